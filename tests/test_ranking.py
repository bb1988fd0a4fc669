"""``rank`` and ``choose(method="best")``: the numbers of whole choices, what they cost, and what the search may skip.

First without a model, over scripted rows of logits; then on the tiny model, against a fresh one that evaluates every
prefix by itself.
"""

from __future__ import annotations

import enum
import gc
import itertools
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import oracle
import pytest
from scipy import stats  # type: ignore[import-untyped]
from spies import decodes, raw_row, text_of
from test_scores import RowAfter, brute_leaves, payload_of, random_rows

from trie_sampler import (
    EmptyTrieError,
    EngineError,
    TokenTrie,
    TrieSamplerError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
    choose,
    forget_model,
    rank,
    ranking,
)
from trie_sampler.llama import forest
from trie_sampler.llama.vocab import prompt_tokens
from trie_sampler.ranking import search
from trie_sampler.scores import log_shares

if TYPE_CHECKING:
    from llama_cpp import Llama

Leaves = Sequence[tuple[str, Sequence[int]]]

PROMPT = "action kind:"
CHOICES = ("STOP", "STOP it now", "PLAY MUSIC", "PLAY VIDEO", "REPLY", "redwood")
UNCALIBRATED = ("joint", "walk", "token_length_normalized")


# --- a table of logits in place of a model ----------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[RowAfter], list[list[oracle.Prefix]]]:
    """Makes ``search`` see these rows; gives back what it asks for, a list of prefixes for each decode."""

    def install(row_after: RowAfter) -> list[list[oracle.Prefix]]:
        asked: list[list[oracle.Prefix]] = []

        class Growth:
            method = "scripted"
            most_a_round = 16

            def __init__(self, _llm: Any, trie: TokenTrie, _root: int, _prompt: Any, *_: Any) -> None:
                self.trie = trie
                self.n_decodes = 0

            def begin(self, _n_nodes: int) -> np.ndarray:
                return row_after(())

            def evaluate_some(self, runs: Sequence[Sequence[int]], scores: Any) -> None:
                for run in runs:
                    for node, child in itertools.pairwise(run):
                        assert self.trie.children(node).tolist() == [self.trie.token[child]]
                assert sum(map(len, runs)) <= 32, "a few nodes a decode"
                self.evaluate_all([node for run in runs for node in run], scores)

            def evaluate_all(self, nodes: Sequence[int], scores: Any) -> None:
                self.n_decodes += 1
                asked.append([self.trie.path_tokens(node) for node in nodes])
                for node, prefix in zip(nodes, asked[-1], strict=True):
                    scores.evaluate(node, row_after(prefix))

        monkeypatch.setattr(ranking, "Growth", Growth)
        return asked

    return install


NO_MODEL: Any = None


def table(rows: dict[oracle.Prefix, dict[int, float]], width: int = 12, rest: int = 9) -> RowAfter:
    """Rows with these probabilities; what is missing to 1 is at ``rest``."""
    return lambda prefix: oracle.row_of(rows[prefix], width, rest).astype(np.float32)


def by_name(trie: TokenTrie, found: ranking.Ranking) -> dict[str, float]:
    """Scores, best first."""
    return {trie.name_of(int(leaf)): float(found.lower[leaf]) for leaf in found.order}


def shares_of(trie: TokenTrie, found: ranking.Ranking) -> dict[str, float]:
    """Probabilities, renormalised over the leaves."""
    shares = np.exp(log_shares(found.lower[found.order]))
    return {trie.name_of(int(leaf)): float(share) for leaf, share in zip(found.order, shares, strict=True)}


def run(leaves: Leaves, normalize: str, **settings: Any) -> tuple[TokenTrie, ranking.Ranking]:
    trie = TokenTrie.from_sequences(leaves)
    return trie, search(NO_MODEL, trie, trie.root, [1], normalize=normalize, **settings)


Script = Callable[[RowAfter], list[list[oracle.Prefix]]]


def test_case_22_a_first_token_does_not_pull_the_choice(script: Script) -> None:
    leaves = [("skill", [1, 2]), ("cloud", [3])]
    rows = table({(): {1: 0.6, 3: 0.4}, (1,): {2: 0.01}})
    assert oracle.walk(oracle.DictTrie(leaves), rows)[1] == "skill", "what a greedy walk does"
    script(rows)
    for n_best in (None, 1):
        trie, found = run(leaves, "joint", n_best=n_best)
        assert trie.name_of(int(found.order[0])) == "cloud"
        assert math.exp(by_name(trie, found)["cloud"]) == pytest.approx(0.4, abs=1e-6)
    trie, found = run(leaves, "joint")
    assert math.exp(by_name(trie, found)["skill"]) == pytest.approx(0.006, abs=1e-6)
    trie, found = run(leaves, "walk")
    shares = shares_of(trie, found)
    assert list(shares) == ["skill", "cloud"]
    assert shares == {"skill": pytest.approx(0.6), "cloud": pytest.approx(0.4)}


def test_case_23_tokens_are_scored_behind_their_own_beginning(script: Script) -> None:
    script(table({(): {1: 0.7, 2: 0.3}, (1,): {2: 0.1}, (2,): {1: 0.9}}))
    for n_best in (None, 1, 2):
        trie, found = run([("YN", [1, 2]), ("NY", [2, 1])], "joint", n_best=n_best)
        scores = by_name(trie, found)
        assert next(iter(scores)) == "NY"
        assert math.exp(scores["NY"]) == pytest.approx(0.27, abs=1e-6)
        if n_best != 1:
            assert math.exp(scores["YN"]) == pytest.approx(0.07, abs=1e-6)


def test_case_25_short_and_long(script: Script) -> None:
    leaves = [("S", [1]), ("L", [2, 3])]
    script(table({(): {1: 0.3, 2: 0.5}, (2,): {3: 0.5}}))
    trie, joint = run(leaves, "joint")
    assert {name: math.exp(score) for name, score in by_name(trie, joint).items()} == {
        "S": pytest.approx(0.30, abs=1e-6),
        "L": pytest.approx(0.25, abs=1e-6),
    }
    _, walk = run(leaves, "walk")
    labelled = {
        "walk S": shares_of(trie, walk)["S"],
        "walk L": shares_of(trie, walk)["L"],
        "joint S": shares_of(trie, joint)["S"],
        "joint L": shares_of(trie, joint)["L"],
    }
    assert labelled == {
        "walk S": pytest.approx(0.375, abs=5e-4),
        "walk L": pytest.approx(0.625, abs=5e-4),
        "joint S": pytest.approx(0.545, abs=5e-4),
        "joint L": pytest.approx(0.455, abs=5e-4),
    }
    _, normalized = run(leaves, "token_length_normalized")
    assert by_name(trie, normalized) == {
        "L": pytest.approx(math.log(0.25) / 2, abs=1e-6),
        "S": pytest.approx(math.log(0.3), abs=1e-6),
    }
    assert trie.name_of(int(normalized.order[0])) == "L"


@pytest.mark.parametrize("bad", [10.0, -10.0])
def test_case_26_probabilities_sum_to_one(script: Script, bad: float) -> None:
    row = np.array([0, 1, 2, 0, -1, bad], np.float32)
    script(lambda _prefix: row)
    for normalize in UNCALIBRATED:
        trie, found = run([("A", [1]), ("B", [2]), ("C", [3]), ("D", [4])], normalize)
        shares = shares_of(trie, found)
        assert shares == {
            "B": pytest.approx(0.6439, abs=5e-5),
            "A": pytest.approx(0.2369, abs=5e-5),
            "C": pytest.approx(0.0871, abs=5e-5),
            "D": pytest.approx(0.0321, abs=5e-5),
        }
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)


def test_case_27_each_inner_node_once_in_one_batch(script: Script) -> None:
    leaves = [(f"{stem}{end}", [stem, end]) for stem in (1, 2) for end in (3, 4, 5)]
    asked = script(random_rows(1))
    trie, found = run(leaves, "joint")
    assert asked == [[(1,), (2,)]]
    assert sum(shares_of(trie, found).values()) == pytest.approx(1.0, abs=1e-6)
    assert found.stats["nodes_evaluated"] == found.stats["nodes"] == 3


def test_case_29_one_choice_is_certain(tiny: Llama) -> None:
    (only,) = rank(tiny, PROMPT, ["redwood"], lead="")
    assert (only.logprob, only.probability, only.margin) == (0.0, 1.0, None)
    heads, tails = rank(tiny, PROMPT, ["red", "blue"], lead="")
    assert heads.logprob < 0
    assert tails.logprob < heads.logprob
    assert math.exp(heads.logprob) + math.exp(tails.logprob) == pytest.approx(1.0, abs=1e-6)


def test_case_31_the_model_wanted_another_word(script: Script) -> None:
    script(table({(): {1: 0.02, 2: 0.03, 3: 0.9}}))
    for normalize in UNCALIBRATED:
        trie, found = run([("Pos", [1]), ("Neg", [2])], normalize)
        assert trie.name_of(int(found.order[0])) == "Neg"
        assert found.valid_mass == pytest.approx(0.05, abs=1e-6)


def test_a_beginning_carries_its_end_mass(script: Script) -> None:
    leaves = [("A", [5]), ("AB", [5, 6])]
    script(table({(): {5: 1.0}, (5,): {6: 0.4, 0: 0.001}}))
    for normalize in ("joint", "walk"):
        trie, found = run(leaves, normalize)
        assert shares_of(trie, found) == {"A": pytest.approx(0.6, abs=1e-6), "AB": pytest.approx(0.4, abs=1e-6)}
    script(table({(): {5: 1.0}, (5,): {6: 0.6, 0: 0.001}}))
    for n_best in (None, 1):
        trie, found = run(leaves, "joint", n_best=n_best)
        assert trie.name_of(int(found.order[0])) == "AB", "the longer one can win"


def test_several_paths_of_a_leaf_add_up(script: Script) -> None:
    """None of its paths is the likeliest, together they are."""
    leaves = [("twice", [1, 2]), ("twice", [3]), ("once", [4])]
    script(table({(): {1: 0.3, 3: 0.25, 4: 0.4}, (1,): {2: 0.9}}))
    for n_best in (None, 1):
        trie, found = run(leaves, "joint", n_best=n_best)
        assert by_name(trie, found)["twice"] == pytest.approx(math.log(0.25 + 0.27), abs=1e-3)
        assert trie.name_of(int(found.order[0])) == "twice"


def test_a_choice_that_the_model_cannot_write(script: Script) -> None:
    script(table({(): {1: 0.5, 2: 0.0}, (1,): {2: 0.9}, (2,): {1: 0.5}}))
    trie, found = run([("can", [1, 2]), ("cannot", [2, 1])], "joint", n_best=2)
    assert by_name(trie, found) == {"can": pytest.approx(math.log(0.45)), "cannot": -math.inf}


# --- best-first equals brute force ------------------------------------------------------------------------------------


def many_leaves(seed: int = 5, n_leaves: int = 2000, width: int = 64) -> list[tuple[str, tuple[int, ...]]]:
    """Random paths that share beginnings, begin each other, and some leaves with two."""
    rng = np.random.default_rng(seed)
    paths: dict[tuple[int, ...], str] = {}
    while len(set(paths.values())) < n_leaves:
        path = tuple(rng.integers(0, width, rng.integers(2, 6)).tolist())
        if paths and rng.random() < 0.6:
            base = list(paths)[rng.integers(len(paths))]
            path = (*base[: rng.integers(1, len(base) + 1)], *path[:2])
        if path in paths:
            continue
        n_named = len(paths)
        paths[path] = f"n{n_named}" if n_named == 0 or rng.random() < 0.9 else list(paths.values())[-1]
    return [(name, path) for path, name in paths.items()]


MANY = many_leaves()


@pytest.mark.parametrize("n_best", [1, 5])
@pytest.mark.parametrize("normalize", [*UNCALIBRATED, "calibrated"])
def test_best_first_equals_brute_force(script: Script, normalize: str, n_best: int) -> None:
    rows = random_rows(11, 64, 3.0)
    brute = brute_leaves(MANY, rows, normalize)
    trie = TokenTrie.from_sequences(MANY)
    offsets = None
    if normalize == "calibrated":
        offsets = np.random.default_rng(2).uniform(0, 12, trie._n_names)
        brute = {name: brute[name] + offsets[leaf] for leaf, name in enumerate(map(trie.name_of, range(len(offsets))))}
    assert len(brute) == 2000
    asked = script(rows)
    found = search(NO_MODEL, trie, trie.root, [1], normalize=normalize, offsets=offsets, n_best=n_best)
    ref = sorted(brute, key=lambda name: -brute[name])
    comp = by_name(trie, found)
    assert list(comp)[:n_best] == ref[:n_best]
    for name in ref[:n_best]:
        # Paths that cannot move the order may be left out.
        assert brute[name] - 1e-3 <= comp[name] <= brute[name] + 1e-6
    for leaf in found.order.tolist():
        name = trie.name_of(leaf)
        assert found.lower[leaf] - 1e-6 <= brute[name] <= found.upper[leaf] + 1e-6
    assert found.stats["exact"]
    assert found.stats["nodes_evaluated"] == 1 + sum(map(len, asked)) < found.stats["nodes"] / 2
    assert found.stats["forward_passes"] == len(asked)
    assert max(Counter(itertools.chain(*asked)).values()) == 1, "no node twice"


def test_everything_equals_brute_force(script: Script) -> None:
    rows = random_rows(12, 64, 1.0)
    script(rows)
    for normalize in UNCALIBRATED:
        trie, found = run(MANY, normalize)
        brute = brute_leaves(MANY, rows, normalize)
        comp = by_name(trie, found)
        assert comp == pytest.approx(brute, abs=1e-6)
        assert list(comp.values()) == sorted(comp.values(), reverse=True)
        np.testing.assert_array_equal(found.upper[found.order], found.lower[found.order])


def test_more_than_there_are(script: Script) -> None:
    leaves = [("a", [1]), ("b", [2, 3]), ("c", [2, 4])]
    rows = random_rows(4)
    script(rows)
    trie, found = run(leaves, "joint", n_best=50)
    assert by_name(trie, found) == pytest.approx(brute_leaves(leaves, rows), abs=1e-6)
    assert found.is_exact


@pytest.mark.parametrize("max_nodes", [1, 2, 9, 30])
def test_a_limit_that_is_hit_is_said(script: Script, max_nodes: int) -> None:
    rows = random_rows(13, 64, 0.1)
    script(rows)
    trie, found = run(MANY, "joint", n_best=1, max_nodes=max_nodes)
    assert found.stats["exact"] is False
    assert found.stats["nodes_evaluated"] == max_nodes
    brute = brute_leaves(MANY, rows)
    for leaf in found.order.tolist():
        assert found.lower[leaf] - 1e-6 <= brute[trie.name_of(leaf)] <= found.upper[leaf] + 1e-6


def test_a_limit_that_is_not_needed_changes_nothing(script: Script) -> None:
    script(random_rows(11, 64, 3.0))
    trie, ref = run(MANY, "joint", n_best=1)
    _, comp = run(MANY, "joint", n_best=1, max_nodes=ref.stats["nodes_evaluated"])
    assert comp.stats["exact"] is True
    assert by_name(trie, comp) == by_name(trie, ref)


# --- against leaf by leaf ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tiny_model_path: Path) -> Iterator[Callable[[Any], RowAfter]]:
    """prompt -> the row after any prefix, from a Llama that evaluates one prefix at a time."""
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=4096, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, verbose=False)

    def behind(prompt: Any) -> RowAfter:
        tokens = prompt_tokens(llm, prompt)
        rows: dict[oracle.Prefix, np.ndarray] = {}
        llm.n_tokens = 0
        llm.eval(tokens)
        rows[()] = raw_row(llm)

        def row_after(prefix: oracle.Prefix) -> np.ndarray:
            if prefix not in rows:
                llm.n_tokens = len(tokens)
                llm.eval(prefix)
                rows[prefix] = raw_row(llm)
            return rows[prefix]

        return row_after

    yield behind
    llm.close()


def leaves_behind(llm: Llama, prompt: Any, choices: Any, **spelling: Any) -> list[tuple[str, tuple[int, ...]]]:
    return list(TokenTrie.from_choices(llm, choices, prompt=prompt, **spelling).leaves())


def check_numbers(ranked: Sequence[Any], scores: dict[str, float], valid_mass: float) -> None:
    """Every number of a whole ranking against brute scores, to 1e-4."""
    total = oracle.logsumexp(list(scores.values()))
    ref = sorted(scores, key=lambda name: -scores[name])
    assert {choice.name for choice in ranked} == set(scores)
    for place, choice in enumerate(ranked):
        assert choice.stats["score"] == pytest.approx(scores[choice.name], abs=1e-4)
        # Where two are nearer than float32 tells, either may come first.
        assert scores[choice.name] == pytest.approx(scores[ref[place]], abs=2e-4)
        assert choice.logprob == pytest.approx(scores[choice.name] - total, abs=1e-4)
        assert choice.probability == pytest.approx(math.exp(scores[choice.name] - total), abs=1e-4)
        assert choice.valid_mass == pytest.approx(valid_mass, abs=1e-4)
        if place + 1 < len(ranked):
            assert choice.margin == pytest.approx(scores[ref[place]] - scores[ref[place + 1]], abs=2e-4)
        else:
            assert choice.margin is None
        assert choice.complete
    assert sum(choice.probability for choice in ranked) == pytest.approx(1.0, abs=1e-6)


WORDS = (
    "THREAD", "REPLY", "redwood", "MUSIC", "greenish", "STOP", "red", "oneness", "blue", "one", "two", "twofold", "yes",
    "no",
)  # fmt: skip
PHRASES = [*WORDS, *(f"{first} {second}" for first in WORDS for second in WORDS)]
SETS: dict[str, tuple[str, ...]] = {
    "two": ("red", "blue"),
    "beginnings": ("re", "red", "red blue", "red blue one", "redwood"),
    "six": CHOICES,
    "two hundred": tuple(PHRASES[:200]),
}


@pytest.mark.parametrize("normalize", UNCALIBRATED)
@pytest.mark.parametrize("choices", SETS.values(), ids=SETS)
def test_every_number_equals_leaf_by_leaf(
    tiny: Llama, fresh: Callable[[Any], RowAfter], choices: tuple[str, ...], normalize: str
) -> None:
    row_after = fresh(PROMPT)
    leaves = leaves_behind(tiny, PROMPT, choices)
    assert len({name for name, _ in leaves}) == len(choices)
    scores = brute_leaves(leaves, row_after, normalize)
    mass = oracle.child_mass(row_after(()), oracle.DictTrie(leaves).children(()))
    ranked: list[Any] = rank(tiny, PROMPT, choices, normalize=normalize)
    check_numbers(ranked, scores, mass)
    assert ranked[0].stats["method"] == "tree"
    for choice in ranked:
        assert choice.text.removeprefix(" ") == choice.name == choices[choice.index]
        assert (choice.name, choice.tokens) in leaves


def test_several_spellings_of_each_choice(tiny: Llama, fresh: Callable[[Any], RowAfter]) -> None:
    leaves = leaves_behind(tiny, PROMPT, CHOICES, lead="auto", case_fold=True)
    assert len(leaves) > 2 * len(CHOICES)
    row_after = fresh(PROMPT)
    mass = oracle.child_mass(row_after(()), oracle.DictTrie(leaves).children(()))
    for normalize in UNCALIBRATED:
        ranked = rank(tiny, PROMPT, CHOICES, normalize=normalize, lead="auto", case_fold=True)
        check_numbers(ranked, brute_leaves(leaves, row_after, normalize), mass)


def test_more_branches_than_sequences(tiny: Llama, fresh: Callable[[Any], RowAfter]) -> None:
    starts = [f"{first}{second}" for first in "abcdefg" for second in "hijklmn"]
    choices = [f"{word}#{third}#{third}" for word in starts for third in "opqrst"]
    leaves = leaves_behind(tiny, PROMPT, choices, lead="")
    trie = oracle.DictTrie(leaves)
    inner = [prefix for prefix in trie.prefixes() if trie.children(prefix)]
    ends = [prefix for prefix in inner if not any(trie.children((*prefix, token)) for token in trie.children(prefix))]
    assert len(ends) > 255
    row_after = fresh(PROMPT)
    ranked = rank(tiny, PROMPT, choices, lead="")
    check_numbers(ranked, brute_leaves(leaves, row_after), oracle.child_mass(row_after(()), trie.children(())))
    assert ranked[0].stats["forward_passes"] == 2
    assert ranked[0].stats["nodes_evaluated"] == len(inner)
    best = rank(tiny, PROMPT, choices, lead="", top_k=3)
    assert [choice.name for choice in best] == [choice.name for choice in ranked[:3]]


def test_best_first_gives_sequences_back(
    tiny: Llama, fresh: Callable[[Any], RowAfter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a handful of sequences nodes lose theirs, and are reached anew."""
    monkeypatch.setattr(ranking, "N_SEQUENCES", 13)
    row_after = fresh(PROMPT)
    for normalize in UNCALIBRATED:
        scores = brute_leaves(leaves_behind(tiny, PROMPT, PHRASES), row_after, normalize)
        ref = sorted(scores, key=lambda name: -scores[name])
        ranked: list[Any] = rank(tiny, PROMPT, PHRASES, normalize=normalize, top_k=30)
        assert [choice.name for choice in ranked] == ref[:30]
        for choice in ranked:
            assert choice.stats["score"] == pytest.approx(scores[choice.name], abs=1e-3)


def test_prompt_that_begins_as_the_one_before(
    tiny: Llama, fresh: Callable[[Any], RowAfter], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = spy_on_decodes(monkeypatch)
    head = prompt_tokens(tiny, "the red blue green one two ten:")
    prompts = [[*head, 300], [*head, 301, 302], [*head, 301, 302, 303], head, [*head, 301], head[:3], [*head, 300]]
    n_new = [len(head) + 1, 2, 1, 1, 1, 1, len(head) - 2]
    for prompt, n in zip(prompts, n_new, strict=True):
        sizes.clear()
        ranked = rank(tiny, prompt, CHOICES)
        assert sizes[0] == n
        assert len(sizes) == 2
        leaves, row_after = leaves_behind(tiny, prompt, CHOICES), fresh(prompt)
        mass = oracle.child_mass(row_after(()), oracle.DictTrie(leaves).children(()))
        check_numbers(ranked, brute_leaves(leaves, row_after), mass)
        top = rank(tiny, prompt, CHOICES, top_k=2)
        assert [choice.name for choice in top] == [choice.name for choice in ranked[:2]]


def test_prompt_longer_than_a_batch(
    tiny_model_path: Path, fresh: Callable[[Any], RowAfter], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(tiny_model_path, n_ctx=3072)
    prompt = [1, *np.random.default_rng(0).integers(262, 760, 2496).tolist(), 439, 443, 288]
    sizes = spy_on_decodes(monkeypatch)
    ranked = rank(llm, prompt, CHOICES)
    assert sizes == [2048, 452, ranked[0].stats["nodes"] - 1]
    leaves, row_after = leaves_behind(llm, prompt, CHOICES), fresh(prompt)
    mass = oracle.child_mass(row_after(()), oracle.DictTrie(leaves).children(()))
    check_numbers(ranked, brute_leaves(leaves, row_after), mass)
    assert ranked[0].stats["prompt_tokens"] == 2500
    llm.close()


def test_models_that_keep_a_state_are_asked_leaf_by_leaf(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = [
        {"normalize": normalize, "top_k": top_k} for normalize in UNCALIBRATED for top_k in (None, 2)
    ]
    settings.append({"normalize": "calibrated", "neutral": ["N/A", "the kind:"], "top_k": None})
    refs = [rank(tiny, PROMPT, CHOICES, **arguments) for arguments in settings]
    forget_model(tiny)
    monkeypatch.setattr(ranking, "_shares_prompts", lambda _llm: False)
    made = spy_on_contexts(monkeypatch)
    for arguments, ref in zip(settings, refs, strict=True):
        comp = rank(tiny, PROMPT, CHOICES, **arguments)
        assert [choice.name for choice in comp] == [choice.name for choice in ref]
        for one, other in zip(comp, ref, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.valid_mass == pytest.approx(other.valid_mass, abs=1e-4)
            assert one.margin == (None if other.margin is None else pytest.approx(other.margin, abs=2e-4))
            assert one.stats["method"] == "leaf by leaf"
            assert one.stats["nodes_evaluated"] == other.stats["nodes_evaluated"]
            assert one.stats["forward_passes"] == one.stats["nodes_evaluated"] - 1
    assert made == [], "no second context for them"


# --- what it costs ----------------------------------------------------------------------------------------------------


def load(path: Path, **settings: Any) -> Llama:
    from llama_cpp import Llama

    defaults = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "verbose": False}
    return Llama(str(path), **{**defaults, **settings})


def spy_on_decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every ``llama_decode`` in second contexts; the host's own are not among them."""
    import llama_cpp

    sizes: list[int] = []
    decode = llama_cpp.llama_decode

    def spy(context: Any, batch: Any) -> Any:
        sizes.append(int(batch.n_tokens))
        return decode(context, batch)

    monkeypatch.setattr(llama_cpp, "llama_decode", spy)
    return sizes


def spy_on_contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parameters of every second context that is made."""
    import llama_cpp

    made: list[Any] = []
    init = llama_cpp.llama_init_from_model

    def spy(model: Any, params: Any) -> Any:
        made.append(type(params).from_buffer_copy(params))
        return init(model, params)

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", spy)
    return made


def spy_on_searches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts of every search."""
    prompts: list[list[int]] = []

    def spy(llm: Any, trie: Any, root: int, prompt: Sequence[int], **settings: Any) -> Any:
        prompts.append(list(prompt))
        return search(llm, trie, root, prompt, **settings)

    monkeypatch.setattr(ranking, "search", spy)
    return prompts


THIRTY = PHRASES[: 30 + len(WORDS)][len(WORDS) :]


def test_one_decode_for_thirty_choices(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_decodes(monkeypatch)
    with decodes(tiny) as own:
        ranked = rank(tiny, PROMPT, THIRTY)
    assert len(ranked) == 30
    leaves = oracle.DictTrie(leaves_behind(tiny, PROMPT, THIRTY))
    n_inner = sum(bool(leaves.children(prefix)) for prefix in leaves.prefixes())
    assert sizes == [len(prompt_tokens(tiny, PROMPT)), n_inner - 1]
    assert own == []
    for choice in ranked:
        assert choice.stats["forward_passes"] == 1
        assert choice.stats["nodes_evaluated"] == choice.stats["nodes"] == n_inner
        assert choice.stats["exact"] is True


def test_distinct_first_tokens_cost_no_decode_after_the_prompt(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_decodes(monkeypatch)
    ranked = rank(tiny, PROMPT, ["red", "blue", "green"], lead="")
    assert sizes == [ranked[0].stats["prompt_tokens"]]
    assert ranked[0].stats["forward_passes"] == 0


def test_forward_passes_are_counted(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_decodes(monkeypatch)
    for top_k in (None, 1, 5):
        sizes.clear()
        ranked = rank(tiny, PROMPT, PHRASES, top_k=top_k)
        assert len(sizes) - 1 == ranked[0].stats["forward_passes"]
        assert (ranked[0].stats["nodes_evaluated"] < ranked[0].stats["nodes"]) is (top_k is not None)


@pytest.mark.parametrize("kv_type", [0, 1, None])
def test_the_second_context_is_like_the_first(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, kv_type: int | None
) -> None:
    made = spy_on_contexts(monkeypatch)
    llm = load(tiny_model_path, type_k=kv_type, type_v=kv_type, rope_freq_base=5000.0, flash_attn=False)
    for prompt in (PROMPT, "red", PROMPT):
        rank(llm, prompt, CHOICES)
        choose(llm, prompt, CHOICES, method="best")
    (params,) = made
    assert (params.type_k, params.type_v) == ((1, 1) if kv_type is None else (kv_type, kv_type))
    for name in ("type_k", "type_v", "rope_freq_base", "rope_freq_scale", "rope_scaling_type", "offload_kqv"):
        assert getattr(params, name) == getattr(llm.context_params, name)
    for name in ("n_threads", "n_threads_batch", "flash_attn_type"):
        if hasattr(params, name):
            assert getattr(params, name) == getattr(llm.context_params, name)
    assert params.kv_unified
    assert params.n_seq_max == 256
    assert not params.embeddings
    llm.close()


def test_a_longer_prompt_needs_a_larger_context(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spy_on_contexts(monkeypatch)
    llm = load(tiny_model_path, n_ctx=2048)
    short = rank(llm, PROMPT, CHOICES)
    rank(llm, [1] + [300] * 900, CHOICES)
    again = rank(llm, PROMPT, CHOICES)
    assert len(made) == 2
    assert made[0].n_ctx < made[1].n_ctx <= 2048, "no more than is needed"
    assert [choice.logprob for choice in again] == pytest.approx([choice.logprob for choice in short], abs=1e-4)
    llm.close()


@pytest.mark.slow
def test_deep_and_broad_trees_find_room(tiny: Llama) -> None:
    rng = np.random.default_rng(0)
    first = rng.permutation(np.arange(100, 768))[:300].tolist()
    trie = TokenTrie.from_sequences([(str(token), [token, *rng.integers(100, 768, 40).tolist()]) for token in first])
    with pytest.warns(TrieSamplerWarning, match="spell"):
        (best,) = rank(tiny, PROMPT, trie, top_k=1)
    assert best.stats["exact"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:leaves that do not spell")
def test_everything_of_a_tree_with_more_nodes_than_fit_together(tiny: Llama) -> None:
    rng = np.random.default_rng(0)
    paths = ([262 + number % 500, 262 + number // 500, *rng.integers(262, 768, 3).tolist()] for number in range(7000))
    trie = TokenTrie.from_sequences([(str(number), path) for number, path in enumerate(paths)])
    ranked: list[Any] = rank(tiny, PROMPT, trie)
    assert sum(choice.probability for choice in ranked) == pytest.approx(1.0, abs=1e-6)


# --- best, and the first few ------------------------------------------------------------------------------------------

NEUTRAL = {"one": "N/A kind:", "ids": [1, 310, 311], "two": ["N/A kind:", "the kind:"]}
SETTINGS: dict[str, dict[str, Any]] = {
    **{normalize: {"normalize": normalize} for normalize in UNCALIBRATED},
    **{f"calibrated {name}": {"normalize": "calibrated", "neutral": prompt} for name, prompt in NEUTRAL.items()},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("prompt", [PROMPT, "", [1, 300, 301], [{"role": "user", "content": "red"}]], ids=repr)
def test_best_is_the_first_of_the_ranking(tiny: Llama, prompt: Any, settings: dict[str, Any]) -> None:
    ranked: list[Any] = rank(tiny, prompt, PHRASES, **settings)
    best = choose(tiny, prompt, PHRASES, method="best", **settings)
    assert (best.name, best.tokens, best.text, best.index) == tuple(
        getattr(ranked[0], name) for name in ("name", "tokens", "text", "index")
    )
    assert best.stats["score"] == pytest.approx(ranked[0].stats["score"], abs=1e-3)
    assert best.stats["exact"] is True
    assert best.valid_mass == pytest.approx(ranked[0].valid_mass, abs=1e-6)
    for top_k in (1, 3, 10):
        top: list[Any] = rank(tiny, prompt, PHRASES, top_k=top_k, **settings)
        assert [choice.name for choice in top] == [choice.name for choice in ranked[:top_k]]
        for one, other in zip(top, ranked, strict=False):
            assert one.stats["score"] == pytest.approx(other.stats["score"], abs=1e-3)
            # To the runner-up's bound, where it is not known.
            assert 0 <= one.margin <= other.margin + 1e-3
            if one.stats["nodes_evaluated"] < one.stats["nodes"]:
                assert one.probability is None
                assert one.logprob == one.stats["score"]


def test_probability_where_the_search_saw_everything(tiny: Llama) -> None:
    ranked, top = rank(tiny, PROMPT, CHOICES), rank(tiny, PROMPT, CHOICES, top_k=len(CHOICES))
    for one, other in zip(top, ranked, strict=True):
        assert one.probability == pytest.approx(other.probability, abs=1e-4)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_limit_on_nodes_shows_in_the_result(tiny: Llama) -> None:
    with pytest.warns(TrieSamplerWarning, match="ended at max_nodes=3"):
        best = choose(tiny, PROMPT, PHRASES, method="best", normalize="token_length_normalized", max_nodes=3)
    assert best.stats["exact"] is False
    assert best.stats["nodes_evaluated"] == 3
    assert best.probability is None
    assert best.name in PHRASES


def test_a_limit_before_any_choice_is_known_is_json_ready(tiny: Llama) -> None:
    choices = ["one two ten", "redwood red", "red red blue"]
    with pytest.warns(TrieSamplerWarning, match="ended at max_nodes=1"):
        best = choose(tiny, PROMPT, choices, method="best", max_nodes=1)
    assert best.stats["exact"] is False
    assert best.name in choices
    json.dumps(best.to_dict(), allow_nan=False)


# --- calibrated -------------------------------------------------------------------------------------------------------


def shares_by_name(scores: dict[str, float]) -> dict[str, float]:
    total = oracle.logsumexp(list(scores.values()))
    return {name: math.exp(score - total) for name, score in scores.items()}


@pytest.mark.parametrize("neutral", NEUTRAL.values(), ids=NEUTRAL)
def test_calibrated_numbers(tiny: Llama, fresh: Callable[[Any], RowAfter], neutral: Any) -> None:
    """Joint minus the log of the mean probability under the neutral prompts."""
    prompts = neutral if isinstance(neutral, list) and isinstance(neutral[0], str) else [neutral]
    row_after = fresh(PROMPT)
    leaves = leaves_behind(tiny, PROMPT, CHOICES)
    joint = brute_leaves(leaves, row_after)
    mass = oracle.child_mass(row_after(()), oracle.DictTrie(leaves).children(()))
    priors = [shares_by_name(brute_leaves(leaves_behind(tiny, prompt, CHOICES), fresh(prompt))) for prompt in prompts]
    scores = {
        name: score - math.log(sum(prior[name] for prior in priors) / len(priors)) for name, score in joint.items()
    }
    check_numbers(rank(tiny, PROMPT, CHOICES, normalize="calibrated", neutral=neutral), scores, mass)


def test_neutral_prompts_are_evaluated_once(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrated(prompt: Any, choices: Sequence[str], neutral: Any, **settings: Any) -> int:
        searched.clear()
        rank(tiny, prompt, choices, normalize="calibrated", neutral=neutral, **settings)
        return len(searched)

    searched = spy_on_searches(monkeypatch)
    assert calibrated(PROMPT, CHOICES, "N/A kind:") == 2
    assert calibrated(PROMPT, CHOICES, "N/A kind:") == 1
    assert calibrated("red:", list(CHOICES), ["N/A kind:"]) == 1
    assert calibrated(PROMPT, CHOICES, ["N/A kind:", "the:", "red:"], top_k=1) == 3
    assert calibrated(PROMPT, CHOICES, ["red:", "N/A kind:", "the:"]) == 1
    assert calibrated(PROMPT, CHOICES[:3], "N/A kind:") == 2, "other choices"
    assert calibrated(PROMPT, CHOICES, [1, 310, 288]) == 2
    assert calibrated(PROMPT, CHOICES, [1, 311, 288]) == 2, "as long, with the same end"
    assert calibrated(PROMPT, CHOICES, "N/A kind:", lead="") == 2, "other tokens"
    forget_model(tiny)
    assert calibrated(PROMPT, CHOICES, "N/A kind:") == 2


def test_neutral_prompts_of_two_models(tiny: Llama, tiny_model_path: Path, tmp_path: Path) -> None:
    import models

    other_path = models.write_tiny_model(tmp_path / "other.gguf", seed=1)
    other, alone = load(other_path), load(other_path)
    settings: dict[str, Any] = {"normalize": "calibrated", "neutral": "N/A kind:"}
    first = rank(tiny, PROMPT, CHOICES, **settings)
    comp, ref = rank(other, PROMPT, CHOICES, **settings), rank(alone, PROMPT, CHOICES, **settings)
    assert [choice.logprob for choice in comp] == pytest.approx([choice.logprob for choice in ref], abs=1e-4)
    assert [choice.logprob for choice in comp] != pytest.approx([choice.logprob for choice in first], abs=1e-2)
    other.close()
    alone.close()


# --- what comes back --------------------------------------------------------------------------------------------------


class Action(enum.Enum):
    STOP = "STOP"
    PLAY = "PLAY MUSIC"


def test_values_of_every_kind_of_choices(tiny: Llama) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (["STOP", "PLAY MUSIC"], {"STOP": "STOP", "PLAY MUSIC": "PLAY MUSIC"}),
        ({"halt": "STOP", "go": "PLAY MUSIC"}, {"halt": "halt", "go": "go"}),
        (Action, {"STOP": Action.STOP, "PLAY MUSIC": Action.PLAY}),
    ]
    for choices, values in kinds:
        ranked: list[Any] = rank(tiny, PROMPT, choices)
        assert {choice.name: choice.value for choice in ranked} == values
        assert all(list(values)[choice.index] == choice.name for choice in ranked)


def test_trie_as_choices(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT)
    for ref, comp in zip(rank(tiny, PROMPT, CHOICES), rank(tiny, PROMPT, trie), strict=True):
        assert (comp.name, comp.tokens, comp.text) == (ref.name, ref.tokens, ref.text)
        assert comp.logprob == pytest.approx(ref.logprob, abs=1e-5)


def test_healed_prompt(tiny: Llama, fresh: Callable[[Any], RowAfter]) -> None:
    prompt = "the blue red "
    trie = TokenTrie.from_choices(tiny, ["red", "blue one"], prompt=prompt, heal=True)
    assert trie.n_healed
    ranked = rank(tiny, prompt, ["red", "blue one"], heal=True)
    row_after = fresh(prompt_tokens(tiny, prompt)[: -trie.n_healed])
    scores = brute_leaves(list(trie.leaves()), row_after)
    check_numbers(ranked, scores, oracle.child_mass(row_after(()), trie.children(trie.root).tolist()))
    assert {choice.text for choice in ranked} == {"red", "blue one"}


def test_none_choice(tiny: Llama) -> None:
    for choices in (CHOICES, Action, {"halt": "STOP", "go": "PLAY MUSIC"}):
        ranked = rank(tiny, PROMPT, choices, none_choice="none of these")
        (none,) = [choice for choice in ranked if choice.value is None]
        assert none.name == "none of these"
        assert none.index == len(choices)
        assert json.loads(json.dumps(none.to_dict()))["value"] is None
        plain = rank(tiny, PROMPT, choices)
        assert [choice.name for choice in ranked if choice is not none] == [choice.name for choice in plain]
    only = choose(tiny, PROMPT, ["redwood"], none_choice="red", method="best", lead="")
    assert only.name == "red"
    assert only.value is None
    assert choose(tiny, PROMPT, ["redwood"], none_choice="red", lead="").value is None
    assert choose(tiny, PROMPT, ["redwood"], none_choice="red", method="sample", normalize="joint", seed=0).complete


def test_result_is_plain_data(tiny: Llama) -> None:
    for ranked in (rank(tiny, PROMPT, Action), rank(tiny, PROMPT, PHRASES, top_k=2)):
        for choice in ranked:
            document = json.loads(json.dumps(choice.to_dict(), allow_nan=False))
            assert document["name"] == document["value"] or document["value"] == choice.value.value
            assert document["tokens"] == list(choice.tokens)
            for number in (choice.logprob, choice.probability, choice.margin, choice.valid_mass):
                assert number is None or type(number) is float
            assert all(type(value) in {bool, int, float, str} for value in choice.stats.values())
            assert type(choice.index) is int
            assert all(type(token) is int for token in choice.tokens)


@pytest.mark.parametrize("logits_all", [False, True])
def test_case_28_numbers_need_no_logits_all(tiny_model_path: Path, logits_all: bool) -> None:
    llm = load(tiny_model_path, logits_all=logits_all)
    ranked: list[Any] = rank(llm, PROMPT, ["red", "blue"], lead="")
    assert [len(choice.tokens) for choice in ranked] == [1, 1]
    assert all(choice.logprob < 0 for choice in ranked)
    assert sum(choice.probability for choice in ranked) == pytest.approx(1.0, abs=1e-6)
    llm.close()


def test_several_descriptors(tiny: Llama, fresh: Callable[[Any], RowAfter]) -> None:
    """The same name with other tokens elsewhere stays apart."""
    groups: dict[str, Leaves] = {
        "a": [("yes", [300, 301]), ("no", [310, 301]), ("both", [310])],
        "b": [("yes", [400, 301]), ("no", [410, 402]), ("more", [410, 403])],
    }
    trie = TokenTrie.from_payload(payload_of(groups))
    row_after = fresh(PROMPT)
    for path, leaves in groups.items():
        for normalize in UNCALIBRATED:
            with pytest.warns(TrieSamplerWarning, match="spell"):
                ranked = rank(tiny, PROMPT, trie, path=path, normalize=normalize)
            mass = oracle.child_mass(row_after(()), oracle.DictTrie(leaves).children(()))
            check_numbers(ranked, brute_leaves(leaves, row_after, normalize), mass)
            assert {(choice.name, choice.tokens) for choice in ranked} == {(name, tuple(ids)) for name, ids in leaves}


@pytest.mark.filterwarnings("ignore:leaves that do not spell")
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"normalize": "calibrated", "neutral": "N/A"},
        {"normalize": "calibrated", "neutral": "N/A", "top_k": 1},
    ],
    ids=["top_k", "calibrated", "calibrated top_k"],
)
def test_several_descriptors_searched(tiny: Llama, settings: dict[str, Any]) -> None:
    groups: dict[str, Leaves] = {
        "a": [("yes", [300, 301]), ("no", [310, 301])],
        "b": [("yes", [400, 301]), ("no", [410, 402])],
    }
    trie = TokenTrie.from_payload(payload_of(groups))
    ranked: list[Any] = rank(tiny, PROMPT, trie, path="b", **settings)
    assert ranked[0].name in {"yes", "no"}
    assert all(math.isfinite(choice.logprob) for choice in ranked)


@pytest.mark.filterwarnings("ignore:choices that can never come out")
@pytest.mark.parametrize(
    "settings", [{"top_k": 2}, {"normalize": "calibrated", "neutral": "N/A"}], ids=["top_k", "calibrated"]
)
def test_choices_of_one_text_searched(tiny: Llama, settings: dict[str, Any]) -> None:
    ranked = rank(tiny, PROMPT, {"b": "red", "a": "red", "c": "blue wood"}, **settings)
    assert {choice.name for choice in ranked} == {"a", "c"}


def test_choices_of_one_text(tiny: Llama) -> None:
    with pytest.warns(TrieSamplerWarning, match="never come out"):
        ranked = rank(tiny, PROMPT, {"b": "red", "a": "red", "c": "blue wood"})
    assert {choice.name: choice.index for choice in ranked} == {"a": 1, "c": 2}


# --- drawing ----------------------------------------------------------------------------------------------------------

# On these the tiny model's walk and its joint probabilities disagree.
DRAWN = (
    "oneness yes", "THREAD STOP", "STOP no", "STOP twofold", "twofold REPLY", "two MUSIC", "one red", "redwood blue",
)  # fmt: skip


def chi_square(counts: Counter[Any], shares: dict[Any, float], n: int) -> float:
    """The p-value of these counts; what is expected less than five times is taken together."""
    assert set(counts) <= set(shares)
    often = [name for name, share in shares.items() if n * share >= 5]
    seen = [counts[name] for name in often]
    expected = [n * shares[name] for name in often]
    rest = n - sum(expected)
    if rest >= 5:
        seen.append(n - sum(seen))
        expected.append(rest)
    assert len(seen) > 2
    return float(stats.chisquare(seen, np.array(expected) * (sum(seen) / sum(expected))).pvalue)


@pytest.mark.parametrize("normalize", ["walk", "joint"])
def test_draws_follow_the_named_distribution(tiny: Llama, normalize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: dict[str, list[Any]] = {name: rank(tiny, PROMPT, DRAWN, normalize=name) for name in ("walk", "joint")}
    found: list[ranking.Ranking] = []

    def search_once(*arguments: Any, **settings: Any) -> ranking.Ranking:
        if not found:
            found.append(search(*arguments, **settings))
        return found[0]

    # The same prompt each time: its numbers need no second evaluation.
    monkeypatch.setattr(ranking, "search", search_once)
    n = 4000
    counts = Counter(
        choose(tiny, PROMPT, DRAWN, method="sample", normalize=normalize, seed=seed).name for seed in range(n)
    )
    shares = {name: {choice.name: choice.probability for choice in ranked[name]} for name in ranked}
    assert chi_square(counts, shares[normalize], n) > 1e-3
    (other,) = set(shares) - {normalize}
    assert chi_square(counts, shares[other], n) < 1e-9, "and the other one is another"


def test_draws_are_seeded(tiny: Llama) -> None:
    def names(normalize: str, seed: int) -> list[str | None]:
        return [
            choose(tiny, f"{n}:", DRAWN, method="sample", normalize=normalize, seed=100 * seed + n).name
            for n in range(12)
        ]

    for normalize in ("walk", "joint"):
        assert names(normalize, 1) == names(normalize, 1)
        assert names(normalize, 1) != names(normalize, 2)


def test_joint_draws_have_the_numbers_of_the_ranking(tiny: Llama) -> None:
    by_name = {choice.name: choice for choice in rank(tiny, PROMPT, DRAWN)}
    for seed in range(5):
        drawn = choose(tiny, PROMPT, DRAWN, method="sample", normalize="joint", seed=seed)
        ref = by_name[drawn.name]
        assert drawn.probability == pytest.approx(ref.probability, abs=1e-5)
        assert (drawn.tokens, drawn.index) == (ref.tokens, ref.index)


def test_joint_draws_ignore_the_settings_of_a_walk(tiny: Llama) -> None:
    def draw(**settings: Any) -> str | None:
        return choose(tiny, PROMPT, DRAWN, method="sample", normalize="joint", seed=4, **settings).name

    assert {draw(), draw(temperature=0.0), draw(top_k=1), draw(top_p=0.1), draw(min_p=0.9)} == {draw()}


# --- what it refuses --------------------------------------------------------------------------------------------------

REFUSED: list[Any] = [
    ({"top_k": 0}, ValueError, "top_k"),
    ({"top_k": -1}, ValueError, "top_k"),
    ({"top_k": "3"}, TypeError, ""),
    pytest.param({"top_k": 1.5}, TypeError, ""),
    ({"normalize": "mean"}, ValueError, "mean"),
    ({"normalize": None}, ValueError, "normalize"),
    ({"normalize": "calibrated"}, ValueError, "neutral.*content replaced"),
    ({"normalize": "calibrated", "neutral": []}, ValueError, "empty"),
    ({"normalize": "calibrated", "neutral": 3}, TypeError, ""),
    ({"normalize": "calibrated", "neutral": [None]}, TypeError, "prompt"),
    ({"normalize": "calibrated", "neutral": [[1, 10**6]]}, VocabMismatchError, "1000000"),
    ({"neutral": "N/A"}, ValueError, "calibrated"),
    ({"method": "best"}, TypeError, "method"),
    ({"tempature": 1.0}, TypeError, "tempature"),
    ({"seed": 1}, TypeError, "seed"),
    ({"lead": "  "}, ValueError, "lead"),
    ({"path": "nope"}, UnknownPathError, "nope"),
    ({"none_choice": "STOP"}, ValueError, "STOP"),
    ({"none_choice": 3}, TypeError, ""),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_settings(
    tiny: Llama, arguments: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = spy_on_decodes(monkeypatch)
    with pytest.raises(error, match=message or None):
        rank(tiny, PROMPT, CHOICES, **arguments)
    assert sizes == [], "refused before anything was evaluated"
    assert rank(tiny, PROMPT, CHOICES)[0].name in CHOICES


REFUSED_COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    ({"method": "greedy", "normalize": "walk"}, "normalize"),
    ({"method": "greedy", "normalize": "joint"}, "normalize"),
    ({"method": "sample", "normalize": "calibrated", "neutral": "N/A"}, "normalize"),
    ({"method": "sample", "normalize": "token_length_normalized"}, "normalize"),
    ({"method": "sample", "normalize": "joint", "neutral": "N/A"}, "neutral"),
    ({"method": "greedy", "neutral": "N/A"}, "neutral"),
    ({"method": "best", "neutral": "N/A"}, "neutral"),
    ({"method": "best", "normalize": "calibrated"}, "neutral"),
    ({"method": "best", "normalize": "mean"}, "mean"),
    ({"method": "best", "on_end": "never"}, "on_end"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_COMBINATIONS, ids=lambda x: str(x)[:60])
def test_refused_combinations(
    tiny: Llama, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = spy_on_decodes(monkeypatch)
    with decodes(tiny) as own, pytest.raises(ValueError, match=message):
        choose(tiny, PROMPT, CHOICES, **arguments)
    assert sizes == own == []


@pytest.mark.parametrize("arguments", [{"method": "best"}, {"method": "sample", "normalize": "joint"}], ids=str)
def test_unknown_keywords_of_choose(tiny: Llama, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="tempature"):
        choose(tiny, PROMPT, CHOICES, tempature=1.0, **arguments)


def test_tries_that_cannot_be_ranked_as_asked(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT)
    with pytest.raises(TypeError, match="none_choice"):
        rank(tiny, PROMPT, trie, none_choice="none of these")
    with pytest.raises(TypeError, match="none_choice"):
        choose(tiny, PROMPT, trie, none_choice="none of these")
    with pytest.raises(ValueError, match="spelled already"):
        rank(tiny, PROMPT, trie, lead="")
    groups: dict[str, Leaves] = {path: [("x", [300, 301])] for path in ("one", "two")}
    several = TokenTrie.from_payload(payload_of(groups))
    for method in ("best", "sample"):
        normalize = {"best": None, "sample": "joint"}[method]
        with pytest.warns(TrieSamplerWarning, match="spell"), pytest.raises(UnknownPathError, match=r"one.*two"):
            choose(tiny, PROMPT, several, method=method, normalize=normalize)


def test_empty_and_odd_choices(tiny: Llama) -> None:
    odd: list[tuple[Any, type[Exception]]] = [
        ([], EmptyTrieError),
        ({}, EmptyTrieError),
        ([""], EmptyTrieError),
        ("yes", TypeError),
        (None, TypeError),
        ([1, 2], TypeError),
    ]
    for choices, error in odd:
        with pytest.raises(error):
            rank(tiny, PROMPT, choices)


@pytest.mark.parametrize("llm", [None, "model.gguf", object()], ids=repr)
def test_something_that_is_no_llama(llm: Any) -> None:
    with pytest.raises(TypeError, match="Llama"):
        rank(llm, PROMPT, CHOICES)


def test_odd_prompts(tiny: Llama) -> None:
    odd: list[Any] = [None, 5, b"bytes", [1.5], ["a"]]
    for prompt in odd:
        with pytest.raises(TypeError):
            rank(tiny, prompt, CHOICES)
    with pytest.raises(TrieSamplerError, match="prompt is empty"):
        rank(tiny, [], CHOICES)
    for token in (-1, 768, 2**31):
        with pytest.raises(VocabMismatchError, match=str(token)):
            rank(tiny, [1, token], CHOICES)


def test_prompt_that_does_not_fit(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = rank(tiny, PROMPT, CHOICES)
    sizes = spy_on_decodes(monkeypatch)
    doors: list[dict[str, Any]] = [{"method": "best"}, {"method": "sample", "normalize": "joint"}]
    for door in doors:
        with pytest.raises(EngineError, match="fit"):
            choose(tiny, [1] + [300] * 17_000, CHOICES, **door)
    assert sizes == []
    comp = rank(tiny, PROMPT, CHOICES)
    assert [choice.logprob for choice in comp] == pytest.approx([choice.logprob for choice in ref], abs=1e-5)


def test_prompt_that_does_not_fit_the_models_own_context(tiny: Llama) -> None:
    prompt = [1] + [300] * 500
    for method in ("greedy", "best"):
        with pytest.raises(EngineError, match="fit"):
            choose(tiny, prompt, CHOICES, method=method)


def test_vocab_only_and_closed_models(tiny_model_path: Path) -> None:
    llm = load(tiny_model_path, vocab_only=True)
    with pytest.raises(TrieSamplerError, match="vocab_only"):
        rank(llm, PROMPT, CHOICES)
    llm.close()
    llm = load(tiny_model_path)
    llm.close()
    for call in (rank, lambda *args: choose(*args, method="best")):
        with pytest.raises(TrieSamplerError, match="closed"):
            call(llm, PROMPT, CHOICES)


def test_a_failed_decode_leaves_it_usable(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    ref = rank(tiny, PROMPT, CHOICES)
    decode = llama_cpp.llama_decode
    for n_before in (0, 1, 2):
        for top_k in (None, 6):
            left = iter([0] * n_before + [3] * 10)
            with monkeypatch.context() as patched:
                patched.setattr(llama_cpp, "llama_decode", lambda *args, left=left: next(left) or decode(*args))
                if n_before < 2 or top_k:
                    with pytest.raises(EngineError, match="code 3") as failed:
                        rank(tiny, "another kind:", CHOICES, top_k=top_k)
                    assert failed.value.code == 3
            comp = rank(tiny, PROMPT, CHOICES)
            assert [choice.logprob for choice in comp] == pytest.approx([choice.logprob for choice in ref], abs=1e-4)


# --- beside everything else -------------------------------------------------------------------------------------------


def test_the_llamas_own_context_is_left_alone(tiny: Llama, tiny_model_path: Path) -> None:
    alone = load(tiny_model_path)
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    refs = [text_of(alone.create_completion(prompt, **settings)) for prompt in (PROMPT, PROMPT + " red")]
    first = text_of(tiny.create_completion(PROMPT, **settings))
    before = (tiny.n_tokens, tiny.input_ids[: tiny.n_tokens].tolist(), raw_row(tiny).tolist())
    with decodes(tiny) as own:
        rank(tiny, "other kind:", CHOICES)
        rank(tiny, PROMPT, CHOICES, normalize="calibrated", neutral="N/A", top_k=2)
        choose(tiny, PROMPT, CHOICES, method="best")
        choose(tiny, PROMPT, CHOICES, method="sample", normalize="joint", seed=0)
    assert own == []
    assert (tiny.n_tokens, tiny.input_ids[: tiny.n_tokens].tolist(), raw_row(tiny).tolist()) == before
    second = text_of(tiny.create_completion(PROMPT + " red", **settings))
    assert [first, second] == refs
    alone.close()


def test_between_the_tokens_of_a_stream(tiny: Llama, tiny_model_path: Path) -> None:
    alone = load(tiny_model_path)
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    ref = text_of(alone.create_completion(PROMPT, **settings))
    comp = ""
    events: Any = tiny.create_completion(PROMPT, stream=True, **settings)
    for event in events:
        comp += event["choices"][0]["text"]
        rank(tiny, PROMPT, CHOICES)
    assert comp == ref
    alone.close()


def count_contexts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Second contexts made and freed."""
    import llama_cpp

    counts = {"made": 0, "freed": 0}
    init, free = llama_cpp.llama_init_from_model, llama_cpp.llama_free

    def made(*args: Any) -> Any:
        counts["made"] += 1
        return init(*args)

    def freed(*args: Any) -> Any:
        counts["freed"] += 1
        return free(*args)

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", made)
    monkeypatch.setattr(llama_cpp, "llama_free", freed)
    return counts


def test_close_frees_the_second_context(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_contexts(monkeypatch)
    llm = load(tiny_model_path)
    rank(llm, PROMPT, CHOICES)
    held = forest.Forest.of(llm)
    llm.close()
    assert counts == {"made": 1, "freed": 1}
    with pytest.raises(TrieSamplerError, match="closed"):
        rank(llm, PROMPT, CHOICES)
    held.close()
    del llm, held
    gc.collect()
    assert counts == {"made": 1, "freed": 1}


def test_forget_model_frees_the_second_context(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_contexts(monkeypatch)
    ref = rank(tiny, PROMPT, CHOICES)
    for n in (1, 2, 3):
        forget_model(tiny)
        assert counts == {"made": n, "freed": n}
        comp = rank(tiny, PROMPT, CHOICES)
        assert [choice.logprob for choice in comp] == pytest.approx([choice.logprob for choice in ref], abs=1e-5)
    forget_model(tiny)
    forget_model(tiny)
    assert counts == {"made": 4, "freed": 4}


def test_a_llama_that_is_dropped_takes_everything_along(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_contexts(monkeypatch)
    for n in (1, 2, 3):
        llm = load(tiny_model_path)
        rank(llm, PROMPT, CHOICES, normalize="calibrated", neutral="N/A")
        gone = weakref.ref(llm), weakref.ref(forest.Forest.of(llm))
        del llm
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        assert counts == {"made": n, "freed": n}


def test_two_llamas(tiny: Llama, tiny_bpe: Llama, tiny_model_path: Path) -> None:
    third = load(tiny_model_path)
    refs = {id(llm): rank(llm, PROMPT, CHOICES) for llm in (tiny, tiny_bpe, third)}
    for llm in (third, tiny, tiny_bpe, tiny, third):
        comp = rank(llm, PROMPT, CHOICES, top_k=3)
        assert [choice.name for choice in comp] == [choice.name for choice in refs[id(llm)][:3]]
    assert [choice.name for choice in refs[id(tiny)]] == [choice.name for choice in refs[id(third)]]
    third.close()
    assert [choice.name for choice in rank(tiny, PROMPT, CHOICES)] == [choice.name for choice in refs[id(tiny)]]
    assert rank(tiny_bpe, PROMPT, CHOICES)[0].name == refs[id(tiny_bpe)][0].name


def test_many_calls_keep_one_context(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_contexts(monkeypatch)
    for n in range(60):
        rank(tiny, f"{n} kind:", PHRASES[n : n + 20], top_k=(None, 3)[n % 2])
    assert counts == {"made": 1, "freed": 0}


def test_nothing_is_printed(tiny: Llama, capfd: pytest.CaptureFixture[str]) -> None:
    rank(tiny, PROMPT, CHOICES, normalize="calibrated", neutral=["N/A", "the:"], top_k=2)
    rank(tiny, PROMPT, CHOICES)
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_of_a_long_context(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import models

    llm = load(models.write_tiny_model(tmp_path / "short.gguf", n_ctx_train=512), n_ctx=1024)
    capfd.readouterr()
    rank(llm, [1] + [300] * 700, CHOICES)
    printed = capfd.readouterr()
    llm.close()
    assert printed == ("", "")


# --- real models ------------------------------------------------------------------------------------------------------


def test_real_models_leaf_by_leaf(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind more tokens than a sliding window holds; batches of other shapes move 4-bit logits by up to 0.7 nats."""
    prompt = "The sky is blue and the grass is green. " * 60 + "The capital of France is"
    choices = ["Berlin", "Paris", "Paris, of course", "Rome", "New York", "New Orleans"]
    ref: list[Any] = rank(llm, prompt, choices)
    best = choose(llm, prompt, choices, method="best")
    forget_model(llm)
    monkeypatch.setattr(ranking, "_shares_prompts", lambda _llm: False)
    comp = {choice.name: choice for choice in rank(llm, prompt, choices)}
    assert ref[0].name == best.name
    assert best.name is not None
    assert best.name.startswith("Paris")
    assert ref[0].stats["prompt_tokens"] > 512
    for choice in ref:
        assert choice.stats["score"] == pytest.approx(comp[choice.name].stats["score"], abs=0.7)
        assert choice.probability == pytest.approx(comp[choice.name].probability, abs=0.2)


def test_steps_make_up_the_score(tiny: Llama) -> None:
    """Of the likeliest path, where a choice has several."""
    for normalize in UNCALIBRATED:
        ranked = rank(tiny, PROMPT, PHRASES, normalize=normalize, steps=True, lead=" ")
        for choice in ranked:
            total = sum(step.logprob for step in choice.steps)
            n_tokens = len(choice.tokens) if normalize == "token_length_normalized" else 1
            assert total / n_tokens == pytest.approx(choice.stats["score"], abs=1e-6)
            assert "".join(step.text for step in choice.steps) == choice.text
            assert all(step.logprob <= 1e-9 for step in choice.steps)
        assert all(choice.steps == () for choice in rank(tiny, PROMPT, PHRASES, normalize=normalize))


def test_steps_of_what_is_not_evaluated_stop_early(tiny: Llama) -> None:
    with pytest.warns(TrieSamplerWarning, match="ended at max_nodes=3"):
        ranked = rank(tiny, PROMPT, PHRASES, top_k=30, max_nodes=3, steps=True)
    for choice in ranked:
        assert choice.text.startswith("".join(step.text for step in choice.steps))
    assert all(choice.steps == () for choice in rank(tiny, PROMPT, CHOICES, tokenization="every", steps=True))
