"""Numbers of whole choices without a model: the kernel, the paths of a tree, and bounds that hold at every moment.

Compared with nested dictionaries and float64 NumPy. Runs compiled and as plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import leaf_sets, logits_rows

from trie_sampler.errors import TrieSamplerError
from trie_sampler.kernels import score_children
from trie_sampler.payload import TokenSequence, TokenTreeDescriptor, TokenTreePayload
from trie_sampler.scores import Paths, PathScores, leaf_scores, log_mean, log_shares
from trie_sampler.trie import TokenTrie

Leaves = Sequence[tuple[str, Sequence[int]]]
Floats = npt.NDArray[np.float64]
RowAfter = Callable[[oracle.Prefix], np.ndarray]

INF, NAN = math.inf, math.nan
WIDTH = 40


# --- slow and plain ---------------------------------------------------------------------------------------------------


def brute_paths(leaves: Leaves, row_after: RowAfter, *, walks: bool = False) -> dict[oracle.Prefix, float]:
    """Every path -> log p(tokens), and log P(stop) where it goes on; by softmaxes of one node after the other.

    ``walks``: renormalised at each node over its children and stopping.
    """
    trie = oracle.DictTrie(leaves)
    known: dict[oracle.Prefix, dict[oracle.Option, float]] = {}

    def options(prefix: oracle.Prefix) -> dict[oracle.Option, float]:
        if prefix not in known:
            row, children, terminal = row_after(prefix), trie.children(prefix), trie.is_terminal(prefix)
            with np.errstate(divide="ignore"):
                if walks:
                    shares = oracle.walk_distribution(row, children, terminal)
                    known[prefix] = {option: float(np.log(share)) for option, share in shares.items()}
                else:
                    total = oracle.logsumexp(row)
                    logits = oracle.options(row, children, terminal)
                    shift = oracle.logsumexp(np.array(row, np.float64) - max(row)) if logits else 0.0
                    assert math.isfinite(total)
                    known[prefix] = {option: logit - shift for option, logit in logits.items()}
        return known[prefix]

    found = {}
    for path in trie.language():
        score = sum(options(path[:size])[token] for size, token in enumerate(path))
        found[path] = score + (options(path)[oracle.STOP] if trie.children(path) else 0.0)
    return found


def brute_leaves(leaves: Leaves, row_after: RowAfter, normalize: str = "joint") -> dict[str, float]:
    """Every name that can come out -> its score: the logsumexp over its paths."""
    trie = oracle.DictTrie(leaves)
    by_name: dict[str, list[float]] = {}
    for path, score in brute_paths(leaves, row_after, walks=normalize == "walk").items():
        length = len(path) if normalize == "token_length_normalized" else 1
        name = trie.name(path)
        assert name is not None
        by_name.setdefault(name, []).append(score / length)
    return {name: oracle.logsumexp(scores) for name, scores in by_name.items()}


def random_rows(seed: int, width: int = WIDTH, scale: float = 2.0) -> RowAfter:
    """A float32 row for every prefix, the same one each time."""
    rows: dict[oracle.Prefix, np.ndarray] = {}

    def row_after(prefix: oracle.Prefix) -> np.ndarray:
        if prefix not in rows:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            rows[prefix] = rng.normal(0, scale, width).astype(np.float32)
        return rows[prefix]

    return row_after


def payload_of(groups: dict[str, Leaves]) -> TokenTreePayload:
    descriptors = (
        TokenTreeDescriptor(
            path=path, leaves=tuple(TokenSequence(name=name, tokens=tuple(tokens)) for name, tokens in leaves)
        )
        for path, leaves in groups.items()
    )
    return TokenTreePayload(model_id="m", descriptors=tuple(descriptors))


# --- the kernel -------------------------------------------------------------------------------------------------------


def brute_scores(row: np.ndarray, children: Sequence[int]) -> tuple[Floats, float]:
    """(children's, everything else's) log-probabilities."""
    if oracle.logsumexp(row) == -INF:
        return np.full(len(children), -INF), -INF
    x = np.where(np.isnan(row), -INF, row.astype(np.float64))
    x = np.where(x == INF, 0.0, -INF) if x.max() == INF else x - x.max()
    total = oracle.logsumexp(x)
    return x[list(children)] - total, oracle.stop_logit(x, children) - total


def run_kernel(row: np.ndarray, children: Sequence[int]) -> tuple[Floats, float]:
    # Edges of other nodes around, so that start and stop are not the whole array.
    token = np.array([3, 1, *children, 0, 2], np.int32)
    out = np.full(len(children), NAN)
    rest = score_children(row, token, 2, 2 + len(children), out)
    return out, float(rest)


@given(
    row=logits_rows(23),
    children=st.lists(st.integers(0, 22), unique=True, min_size=1).map(sorted),
    dtype=st.sampled_from([np.float32, np.float64]),
    stride=st.sampled_from([1, 2, 3]),
)
def test_score_children(row: np.ndarray, children: list[int], dtype: type, stride: int) -> None:
    memory: np.ndarray = np.full((len(row), stride), 1e4, dtype)
    memory[:, -1] = row
    view = memory[:, -1]
    scores, rest = run_kernel(view, children)
    ref, ref_rest = brute_scores(view, children)
    finite = np.abs(row[np.isfinite(row)].astype(np.float64))
    # Beside 3e38 the logarithm of a sum is lost in a float64.
    tolerance = 1e-9 + 1e-15 * float(finite.max(initial=0.0))
    np.testing.assert_allclose(scores, ref, rtol=1e-12, atol=tolerance)
    assert rest == pytest.approx(ref_rest, rel=1e-12, abs=tolerance)
    if tolerance < 1e-6 and oracle.logsumexp(row) > -INF:
        assert oracle.logsumexp([*scores, rest]) == pytest.approx(0.0, abs=1e-9)


def test_score_children_keeps_shares_that_no_float_holds() -> None:
    """exp(-2000) is 0 in every float; its logarithm is not."""
    scores, rest = run_kernel(np.array([0, -2000, -2001, -5], np.float32), [1, 2])
    np.testing.assert_allclose(scores, [-2000 - math.log1p(math.exp(-5)), -2001 - math.log1p(math.exp(-5))])
    assert rest == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("row", [[-INF] * 4, [NAN] * 4, [NAN, -INF, -INF, NAN]])
def test_score_children_of_a_row_that_says_nothing(row: list[float], dtype: type) -> None:
    scores, rest = run_kernel(np.array(row, dtype), [1, 3])
    assert scores.tolist() == [-INF, -INF]
    assert rest == -INF


@pytest.mark.parametrize(
    ("row", "ref", "ref_rest"),
    [
        ([0, INF, 1, 2], [0.0, -INF], -INF),
        ([INF, 0, 1, 2], [-INF, -INF], 0.0),
        ([NAN, NAN, 1, INF], [-INF, 0.0], -INF),
    ],
)
def test_score_children_where_one_logit_is_infinite(row: list[float], ref: list[float], ref_rest: float) -> None:
    scores, rest = run_kernel(np.array(row, np.float32), [1, 3])
    assert scores.tolist() == ref
    assert rest == ref_rest


@pytest.mark.parametrize("row", [[0, INF, 1, INF], [INF, INF, 1, 2], [INF, INF, INF, INF]])
def test_score_children_where_several_logits_are_infinite(row: list[float]) -> None:
    scores, rest = run_kernel(np.array(row, np.float32), [1, 3])
    ref, ref_rest = brute_scores(np.array(row, np.float32), [1, 3])
    np.testing.assert_allclose(scores, ref)
    assert rest == pytest.approx(ref_rest)


def test_score_children_where_every_token_is_a_child() -> None:
    row = np.array([1, 2, 0, -1], np.float32)
    scores, rest = run_kernel(row, [0, 1, 2, 3])
    np.testing.assert_allclose(scores, np.log(oracle.softmax(row)))
    assert rest == -INF


# --- paths ------------------------------------------------------------------------------------------------------------


def depth_first(trie: oracle.DictTrie, prefix: oracle.Prefix = ()) -> list[oracle.Prefix]:
    own = [prefix] if trie.is_terminal(prefix) else []
    return own + [path for token in trie.children(prefix) for path in depth_first(trie, (*prefix, token))]


@given(st.lists(leaf_sets(max_token=9, max_leaves=16), min_size=1, max_size=3))
def test_paths_of_every_root(groups: list[list[tuple[str, list[int]]]]) -> None:
    trie = TokenTrie.from_payload(payload_of({f"p{place}": leaves for place, leaves in enumerate(groups)}))
    for place, leaves in enumerate(groups):
        root = trie.root_of(f"p{place}")
        paths, ref = Paths(trie, root), oracle.DictTrie(leaves)
        listed = depth_first(ref)
        assert len(paths) == len(listed)
        assert [trie.path_tokens(int(node)) for node in paths.ends] == listed
        assert [trie.name_of(int(leaf)) for leaf in paths.leaf] == [ref.name(path) for path in listed]
        assert paths.length.tolist() == list(map(len, listed))
        n_own = 0
        for node in range(trie.n_nodes):
            if paths.depth[node] < 0:
                continue
            n_own += 1
            prefix = trie.path_tokens(node)
            assert paths.depth[node] == len(prefix)
            below = [number for number, path in enumerate(listed) if path[: len(prefix)] == prefix]
            assert list(range(paths.first[node], paths.last[node])) == below
        assert n_own == ref.n_nodes, "nodes of other roots have no depth"


def test_paths_of_a_long_chain_and_of_a_wide_node() -> None:
    chain = TokenTrie.from_sequences([("end", range(1, 301)), ("half", range(1, 151))])
    paths = Paths(chain, chain.root)
    assert paths.length.tolist() == [150, 300]
    assert (paths.first[-1], paths.last[-1]) == (1, 2)
    wide = TokenTrie.from_sequences([(str(token), [token]) for token in range(1000)])
    assert Paths(wide, wide.root).ends.tolist() == list(range(1, 1001))


# --- bounds -----------------------------------------------------------------------------------------------------------


@given(
    leaves=leaf_sets(max_token=12, max_leaves=14),
    seed=st.integers(0, 10**6),
    walks=st.booleans(),
    scale=st.sampled_from([0.5, 4.0, 40.0]),
)
def test_bounds_hold_in_any_order_of_evaluation(
    leaves: list[tuple[str, list[int]]], seed: int, walks: bool, scale: float
) -> None:
    trie, ref = TokenTrie.from_sequences(leaves), oracle.DictTrie(leaves)
    row_after = random_rows(seed, scale=scale)
    paths = Paths(trie, trie.root)
    listed = [trie.path_tokens(int(node)) for node in paths.ends]
    brute = brute_paths(leaves, row_after, walks=walks)
    truth = np.array([brute[path] for path in listed])
    by_name = brute_leaves(leaves, row_after, "walk" if walks else "joint")
    names = [trie.name_of(leaf) for leaf in range(trie._n_names)]
    scores = PathScores(trie, paths, trie.root, walks=walks)
    rng = np.random.default_rng(seed)
    opened, n_evaluated, before = {trie.root}, 0, scores.bound.copy()
    while opened:
        node = int(rng.choice(sorted(opened)))
        assert not scores.has(node)
        prefix = trie.path_tokens(node)
        children = scores.evaluate(node, row_after(prefix))
        assert scores.has(node)
        assert children == scores.opened_by(node)
        assert [trie.path_tokens(child) for child in children] == [
            (*prefix, token) for token in ref.children(prefix) if ref.children((*prefix, token))
        ]
        opened.discard(node)
        opened.update(children)
        n_evaluated += 1
        assert scores.n_evaluated == n_evaluated
        slack = 1e-9 * (1 + np.abs(truth))
        assert np.all(scores.bound >= truth - slack)
        assert np.all(scores.bound <= before + slack), "no bound rises"
        np.testing.assert_allclose(scores.bound[scores.known], truth[scores.known], rtol=1e-9, atol=1e-9)
        upper = leaf_scores(scores.bound, paths.leaf, len(names))
        lower = leaf_scores(np.where(scores.known, scores.bound, -INF), paths.leaf, len(names))
        for leaf, name in enumerate(names):
            if name in by_name:
                near = 1e-9 * (1 + abs(by_name[name]))
                assert lower[leaf] - near <= by_name[name] <= upper[leaf] + near
        before = scores.bound.copy()
    assert scores.known.all()
    assert n_evaluated == sum(bool(ref.children(prefix)) for prefix in ref.prefixes())
    assert scores.valid_mass == pytest.approx(oracle.child_mass(row_after(()), ref.children(())), rel=1e-9)
    if walks:
        assert oracle.logsumexp(truth) == pytest.approx(0.0, abs=1e-9), "the walk ends somewhere"


def test_prefix_is_the_log_probability_so_far() -> None:
    leaves = [("a", [1, 2, 3]), ("b", [1, 2, 4]), ("c", [5])]
    trie, row_after = TokenTrie.from_sequences(leaves), random_rows(3)
    scores = PathScores(trie, Paths(trie, trie.root), trie.root, walks=False)
    (one,) = scores.evaluate(trie.root, row_after(()))
    (two,) = scores.evaluate(one, row_after((1,)))
    p = [oracle.softmax(row_after(prefix))[token] for prefix, token in (((), 1), ((1,), 2))]
    assert scores.prefix[one] == pytest.approx(math.log(p[0]))
    assert scores.prefix[two] == pytest.approx(math.log(p[0] * p[1]))
    assert scores.known.tolist() == [False, False, True]


@pytest.mark.parametrize("walks", [False, True])
def test_impossible_tokens(walks: bool) -> None:
    """A choice that the model cannot write has score -inf, and the others keep theirs."""
    leaves = [("a", [1, 2]), ("b", [3]), ("ab", [1, 2, 5])]
    rows: dict[oracle.Prefix, np.ndarray] = {
        (): np.array([0, -INF, 0, 1, 0, 0], np.float32),
        (1,): np.zeros(6, np.float32),
        (1, 2): np.array([0, 0, 0, 0, 0, NAN], np.float32),
    }
    trie = TokenTrie.from_sequences(leaves)
    paths = Paths(trie, trie.root)
    scores = PathScores(trie, paths, trie.root, walks=walks)
    for prefix, row in rows.items():
        node = trie.root
        for token in prefix:
            node = trie.step(node, token)
        scores.evaluate(node, row)
    assert scores.known.all()
    p = oracle.softmax(rows[()])[3]
    assert dict(zip(map(trie.name_of, paths.leaf.tolist()), scores.bound.tolist(), strict=True)) == {
        "a": -INF,
        "ab": -INF,
        "b": pytest.approx(0.0 if walks else math.log(p)),
    }


# --- leaves -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_leaf_scores(data: st.DataObject) -> None:
    n_leaves = data.draw(st.integers(1, 6))
    value = st.one_of(st.floats(-2000, 0), st.just(-INF))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, n_leaves - 1), value), max_size=12))
    leaf = np.array([leaf for leaf, _ in pairs], np.int64)
    comp = leaf_scores(np.array([score for _, score in pairs], np.float64), leaf, n_leaves)
    ref = [oracle.logsumexp([score for own, score in pairs if own == number]) for number in range(n_leaves)]
    np.testing.assert_allclose(comp, ref, rtol=1e-12, atol=1e-12)


def test_paths_of_a_leaf_add_up() -> None:
    comp = leaf_scores(np.log([0.25, 0.5, 0.125]), np.array([1, 0, 1]), 3)
    np.testing.assert_allclose(np.exp(comp), [0.5, 0.375, 0])


@given(st.lists(st.one_of(st.floats(-3000, 3000), st.just(-INF)), min_size=1, max_size=9))
def test_log_shares(scores: list[float]) -> None:
    comp = log_shares(np.array(scores))
    assert np.exp(comp).sum() == pytest.approx(1.0, abs=1e-9)
    if max(scores) > -INF:
        np.testing.assert_allclose(np.exp(comp), oracle.softmax(scores), atol=1e-12)
        assert not np.any(np.isnan(comp))


def test_log_shares_of_one_and_of_none() -> None:
    assert log_shares(np.array([-123.4])).tolist() == [0.0]
    np.testing.assert_allclose(log_shares(np.full(4, -INF)), np.log(0.25))


@given(st.lists(st.lists(st.floats(-900, 0), min_size=3, max_size=3), min_size=1, max_size=5))
def test_log_mean(logs: list[list[float]]) -> None:
    ref = [oracle.logsumexp(column) - math.log(len(logs)) for column in np.array(logs).T]
    np.testing.assert_allclose(log_mean(np.array(logs)), ref, atol=1e-12)


def test_log_mean_is_of_probabilities_not_of_logs() -> None:
    comp = log_mean(np.log([[0.1, 0.5], [0.3, 0.5]]))
    np.testing.assert_allclose(np.exp(comp), [0.2, 0.5])
    assert log_mean(np.array([[-INF, 0.0], [-INF, 0.0]])).tolist() == [-INF, 0.0]


def test_a_graph_has_no_list_of_paths() -> None:
    graph = TokenTrie.from_sequences([("a", [1, 2])])
    object.__setattr__(graph, "target", np.array([-1, 1, 2], np.int32))
    with pytest.raises(TrieSamplerError, match="graph"):
        Paths(graph, graph.root)
