"""One walk, several rungs: the same picks and the same allowed tokens from the oracle to a real model.

    rung        what runs
    oracle      dictionaries and float64 (``oracle.py``)
    python      the cursor with its kernels as plain Python (a process under NUMBA_DISABLE_JIT=1)
    njit        the cursor as it is
    processor   ``TrieLogitsProcessor`` over a made candidate array, in the host's own chain of samplers
    model       a real model through ``create_completion``

A rung is a function (Walk, wishes) -> picks, listed in RUNGS. A wish is a sequence of tokens: the i-th token's logit is
raised beyond all others at step i. A rung allows a token after a prefix exactly if it then picks it; so the sets of
allowed tokens are found by asking each rung the same questions, without looking inside any of them.

The rows are the tiny model's own (V = 768, float32), one after every prefix of the choices. Their tree:

    STOP. ── " it" ..        PLAY. ── ED.         re ── d. ── wood.
                                   └─ " MUSIC".        └─ ad.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import oracle
import pytest
from spies import eog_ids, raw_row

from trie_sampler import Sampling, TokenTrie, TrieCursor

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPT = "action kind:"
CHOICES = ("STOP", "STOP it now", "PLAY", "PLAYED", "PLAY MUSIC", "PLAY VIDEO", "red", "redwood", "read")
RAISE = 1000.0
HOT = 6.0

Wishes = list[list[int]]
Picks = list[list[int]]


def raise_wished(row: np.ndarray, step: int, wish: list[int]) -> None:
    if step < len(wish):
        row[wish[step]] += RAISE


@dataclass(frozen=True)
class Walk:
    """What is walked: leaves, a row after every prefix of them, and how."""

    prompt: list[int]
    leaves: list[tuple[str, list[int]]]
    rows: list[tuple[list[int], list[float]]]
    ends: list[int]
    on_end: str = "mass"
    samples: bool = False
    seed: int = 0
    row_after: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.row_after.update((tuple(prefix), np.array(row, np.float32)) for prefix, row in self.rows)

    def row(self, prefix: list[int], wish: list[int]) -> np.ndarray:
        row = self.row_after[tuple(prefix)].copy()
        raise_wished(row, len(prefix), wish)
        return row

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "row_after"}

    def trie(self) -> TokenTrie:
        return TokenTrie.from_sequences(self.leaves)

    def cursor(self) -> TrieCursor:
        return TrieCursor(
            self.trie(), on_end=self.on_end, eog_ids=self.ends, sampling=Sampling(temperature=HOT, seed=self.seed)
        )


# --- the rungs --------------------------------------------------------------------------------------------------------


def walk_oracle(walk: Walk, wishes: Wishes) -> Picks:
    trie = oracle.DictTrie(walk.leaves)
    out = []
    for wish in wishes:
        picks: list[int] = []
        while not picks or picks[-1] not in walk.ends:
            prefix = tuple(picks)
            row = walk.row(picks, wish)
            step = oracle.greedy_step(row, trie.children(prefix), trie.is_terminal(prefix), walk.on_end, walk.ends)
            picks.append(oracle.argmax_child(row, walk.ends) if step == oracle.STOP else step)
        out.append(picks)
    return out


def walk_cursor(walk: Walk, wishes: Wishes) -> Picks:
    out = []
    for wish in wishes:
        cursor = walk.cursor()
        picks: list[int] = []
        while not cursor.is_finished:
            row = walk.row(picks, wish)
            picks.append(cursor.sample(row) if walk.samples else cursor.pick(row))
            cursor.accept(picks[-1])
        out.append(picks)
    return out


def walk_in_plain_python(walk: Walk, wishes: Wishes) -> Picks:
    """``walk_cursor`` in a process of its own, where nothing is compiled."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps({"walk": walk.to_dict(), "wishes": wishes}),
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    picks: Picks = json.loads(done.stdout)
    return picks


class StandIn:
    """A ``Tokenizer`` with what the constraint and ``Llama._init_sampler`` look at, and no model."""

    def __init__(self, walk: Walk) -> None:
        self.n_vocab = len(walk.rows[0][1])
        self.eog_ids = tuple(walk.ends)
        self._spelling = {tuple(tokens): name for name, tokens in walk.leaves}
        # Read by Llama._init_sampler.
        self._n_vocab = self.n_vocab
        self._input_ids = np.array(walk.prompt, np.intc)
        self.last_n_tokens_size = 64
        self._seed = 0
        self._sampler: Any = None

    def tokenize(self, _text: bytes) -> list[int]:
        raise AssertionError("a trie needs no tokenizing")

    def detokenize(self, tokens: Any) -> bytes:
        return self._spelling.get(tuple(tokens), "").encode()

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return token in self.eog_ids


def walk_processor(walk: Walk, wishes: Wishes) -> Picks:
    """The host's own chain, applied to a candidate array that llama.cpp would have made."""
    import ctypes

    import llama_cpp

    from trie_sampler import TrieLogitsProcessor

    host = StandIn(walk)
    settings = {"mode": "sampled", "temperature": HOT, "seed": walk.seed} if walk.samples else {}
    out = []
    for wish in wishes:
        constraint = TrieLogitsProcessor.from_choices(host, walk.trie(), on_end=walk.on_end, **settings)
        host._sampler = llama_cpp.Llama._init_sampler(host, logits_processor=constraint, temp=0.8)
        picks: list[int] = []
        while not picks or picks[-1] not in walk.ends:
            row = walk.row(picks, wish)
            host._input_ids = np.array([*walk.prompt, *picks], np.intc)
            data = (llama_cpp.llama_token_data * len(row))()
            records = np.frombuffer(data, np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)]))
            records["id"], records["logit"] = np.arange(len(row)), row
            array = llama_cpp.llama_token_data_array(data, len(row), -1, sorted=False)
            llama_cpp.llama_sampler_apply(host._sampler.sampler, ctypes.byref(array))
            picks.append(int(array.data[array.selected].id))
            llama_cpp.llama_sampler_accept(host._sampler.sampler, picks[-1])
        assert constraint.result.complete
        out.append(picks)
    return out


def model_rung(llm: Llama) -> Callable[[Walk, Wishes], Picks]:
    def walk_model(walk: Walk, wishes: Wishes) -> Picks:
        from llama_cpp import LogitsProcessorList

        from trie_sampler import TrieLogitsProcessor

        settings = {"mode": "sampled", "temperature": HOT, "seed": walk.seed} if walk.samples else {}
        out = []
        for wish in wishes:
            constraint = TrieLogitsProcessor.from_choices(llm, walk.trie(), on_end=walk.on_end, **settings)
            seen: list[int] = []

            def raise_one(ids: Any, scores: Any, wish: list[int] = wish, seen: list[int] = seen) -> Any:
                seen[:] = ids[len(walk.prompt) :].tolist()
                raise_wished(scores, len(seen), wish)
                return scores

            tokens = []
            for token in llm.generate(walk.prompt, logits_processor=LogitsProcessorList([raise_one, constraint])):
                tokens.append(token)
                if token in walk.ends:
                    break
            assert seen == tokens[:-1]
            out.append(tokens)
        return out

    return walk_model


# Further rungs (the C callbacks called directly, the native sampler in a chain) are two lines here.
RUNGS: dict[str, Callable[[Walk, Wishes], Picks]] = {
    "python": walk_in_plain_python,
    "njit": walk_cursor,
    "processor": walk_processor,
}


@pytest.fixture
def rungs(tiny: Llama) -> dict[str, Callable[[Walk, Wishes], Picks]]:
    return {**RUNGS, "model": model_rung(tiny)}


# --- the walk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def walk(tiny: Llama) -> Walk:
    prompt = tiny.tokenize(PROMPT.encode(), special=True)
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT, lead="")
    leaves = [(name, list(tokens)) for name, tokens in trie.leaves()]
    rows = []
    for prefix in oracle.DictTrie(leaves).prefixes():
        tiny.reset()
        for tokens in (prompt, *([token] for token in prefix)):
            tiny.eval(tokens)
        rows.append((list(prefix), raw_row(tiny).tolist()))
    return Walk(prompt, leaves, rows, eog_ids(tiny))


def probes_of(walk: Walk) -> list[int]:
    """Every token of the leaves and every end token, and as many that are neither."""
    inside = {token for _, tokens in walk.leaves for token in tokens} | set(walk.ends)
    outside = [token for token in range(len(walk.rows[0][1])) if token not in inside]
    return sorted(inside) + outside[:: max(1, len(outside) // len(inside))]


Sets = dict[tuple[int, ...], set[int]]


def allowed_sets(rung: Callable[[Walk, Wishes], Picks], walk: Walk) -> Sets:
    """After each prefix the probes that come out where their logit is the largest by far."""
    prefixes = list(walk.row_after)
    questions = [[*prefix, token] for prefix in prefixes for token in probes_of(walk)]
    out: Sets = {prefix: set() for prefix in prefixes}
    for question, answer in zip(questions, rung(walk, questions), strict=True):
        *prefix, token = question
        assert answer[: len(prefix)] == prefix
        if answer[len(prefix)] == token:
            out[tuple(prefix)].add(token)
    return out


def reference_sets(walk: Walk) -> Sets:
    trie = oracle.DictTrie(walk.leaves)
    return {
        prefix: {*trie.children(prefix), *(walk.ends if trie.is_terminal(prefix) else ())} for prefix in trie.prefixes()
    }


@pytest.mark.parametrize("on_end", ["mass", "eog"])
@pytest.mark.parametrize("name", [*RUNGS, "model"])
def test_rung_allows_what_the_leaves_allow(walk: Walk, rungs: dict[str, Any], name: str, on_end: str) -> None:
    ref = reference_sets(walk)
    assert len(ref) > 12
    assert allowed_sets(rungs[name], replace(walk, on_end=on_end)) == ref


@pytest.mark.parametrize("on_end", ["mass", "eog"])
@pytest.mark.parametrize("name", [*RUNGS, "model"])
def test_rung_picks_what_the_oracle_picks(walk: Walk, rungs: dict[str, Any], name: str, on_end: str) -> None:
    """From every prefix on by the rows alone; and to the end of every leaf."""
    walk = replace(walk, on_end=on_end)
    wishes = [list(prefix) for prefix in walk.row_after]
    wishes += [[*tokens, end] for _, tokens in walk.leaves for end in walk.ends]
    ref = walk_oracle(walk, wishes)
    assert {tuple(picks[:-1]) for picks in ref} == {tuple(tokens) for _, tokens in walk.leaves}
    assert {picks[-1] for picks in ref} == set(walk.ends) == {2, 3}
    assert rungs[name](walk, wishes) == ref


def test_rungs_draw_the_same(walk: Walk, rungs: dict[str, Any]) -> None:
    seen = set()
    for seed in range(12):
        drawn = replace(walk, samples=True, seed=seed)
        picks = {name: rung(drawn, [[]]) for name, rung in rungs.items()}
        assert len({json.dumps(p) for p in picks.values()}) == 1, picks
        seen.add(json.dumps(picks["njit"]))
    assert len(seen) > 3, "the walks are to differ"


if __name__ == "__main__":
    job = json.load(sys.stdin)
    print(json.dumps([[int(token) for token in picks] for picks in walk_cursor(Walk(**job["walk"]), job["wishes"])]))
