"""The native sampler: every callback, alone and in real chains, over made candidate arrays and a real context.

The trie of the tables, prefixes in brackets; end tokens 2 and 3 (the tiny model's end-of-generation ids):

    [] ─┬─ 300 [300] ─── 301 [300 301] "YES"
        └─ 310 [310] "A" ─── 320 [310 320] "AB"       at [310] a leaf ends and another goes on
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from models import TINY_EOG
from oracle import STOP, DictTrie, argmax_child, decision_margin, greedy_step, stop_logit
from spies import raw_row
from strategies import leaf_sets, logits_rows

llama_cpp = pytest.importorskip("llama_cpp")

from trie_sampler import layout, llama_sampler_init_token_trie, token_trie_handle  # noqa: E402
from trie_sampler.cursor import TrieCursor  # noqa: E402
from trie_sampler.errors import (  # noqa: E402
    EmptyTrieError,
    OffTrieError,
    PayloadError,
    TrieSamplerError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
)
from trie_sampler.llama import sampler as sampler_module  # noqa: E402
from trie_sampler.llama.sampler import TokenTrieHandle, n_alive, new_sampler  # noqa: E402
from trie_sampler.trie import TokenTrie  # noqa: E402

Leaves = list[tuple[str, list[int]]]
Prefix = tuple[int, ...]

NAN, INF = math.nan, math.inf
V = 768
ENDS = sorted(TINY_EOG)
MODES = ("mass", "eog", "release")
LEAVES: Leaves = [("AB", [310, 320]), ("YES", [300, 301]), ("A", [310])]
LOGGER = "trie_sampler.llama.sampler"


# --- candidate arrays, samplers and chains ------------------------------------------------------

# A record of the array, written down here and not taken from the library.
RECORD = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_GUARD = np.array([(-7, 7.5, 7.25)], RECORD)[0]
_N_GUARDS = 4


class Candidates:
    """A ``llama_token_data_array`` over NumPy memory, with records behind it that nobody may touch."""

    def __init__(self, ids: Iterable[int], logits: Iterable[float], *, is_sorted: bool = False) -> None:
        ids = np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids, np.int32)
        self.memory = np.full(len(ids) + _N_GUARDS, _GUARD, RECORD)
        self.n = len(ids)
        self.memory["id"][: self.n] = ids
        self.memory["logit"][: self.n] = np.asarray(logits, np.float32)
        self.memory["p"][: self.n] = 0
        self.array = llama_cpp.llama_token_data_array(
            self.memory.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)), self.n, -1, is_sorted
        )

    @classmethod
    def of_row(cls, row: Sequence[float] | np.ndarray) -> Candidates:
        """As llama.cpp makes it: slot t holds id t."""
        return cls(np.arange(len(row)), row)

    def refill(self, row: np.ndarray) -> None:
        """Make it anew in the order of ids."""
        records = self.memory[: self.n]
        records["id"] = np.arange(self.n)
        records["logit"] = row
        self.array.size, self.array.selected, self.array.sorted = self.n, -1, False

    def apply(self, sampler: Any) -> Candidates:
        """Run a sampler or a chain over it."""
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self.array))
        assert (self.memory[self.n :] == _GUARD).all(), "written past the end"
        assert 0 <= self.array.size <= self.n
        return self

    @property
    def records(self) -> np.ndarray:
        return self.memory[: self.array.size]

    @property
    def ids(self) -> list[int]:
        return self.records["id"].tolist()

    @property
    def logits(self) -> list[float]:
        return self.records["logit"].tolist()

    @property
    def finite_ids(self) -> list[int]:
        return sorted(self.records["id"][self.records["logit"] > -INF].tolist())

    @property
    def selected_id(self) -> int:
        assert 0 <= self.array.selected < self.array.size
        return int(self.records["id"][self.array.selected])


@contextlib.contextmanager
def owned(sampler: Any) -> Iterator[Any]:
    """A sampler or chain, freed at the end."""
    assert sampler
    try:
        yield sampler
    finally:
        llama_cpp.llama_sampler_free(sampler)


def chain_of(*samplers: Any) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in samplers:
        assert sampler
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


def payload_json(groups: dict[str, Leaves]) -> str:
    return json.dumps(
        {
            "modelId": "test",
            "descriptors": [
                {"path": path, "leaves": [{"name": name, "tokens": tokens} for name, tokens in leaves]}
                for path, leaves in groups.items()
            ],
        }
    )


def init(vocab: Any, payload: Any, mode: str | int = 0, **settings: Any) -> Any:
    """The initialiser, for payloads whose names spell nothing (its warning has a test of its own)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "leaf", TrieSamplerWarning)
        warnings.filterwarnings("ignore", ".* do(es)? not spell", TrieSamplerWarning)
        return llama_sampler_init_token_trie(vocab, payload, mode, **settings)


def init_leaves(vocab: Any, leaves: Leaves = LEAVES, mode: str | int = 0, **settings: Any) -> Any:
    return init(vocab, payload_json({"action": leaves}), mode, **settings)


def bare(
    leaves: Leaves, mode: int = 0, *, on_invalid: str = "drop", on_end: str = "mass", ends: Collection[int] = (0,)
) -> Any:
    """A sampler without a vocabulary behind it; ``ends`` are its end tokens in every mode."""
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end=on_end, stop_tokens=ends)
    return new_sampler(cursor, keeps_options=bool(mode), on_invalid=on_invalid)[0]


def accept_all(sampler: Any, tokens: Iterable[int]) -> None:
    for token in tokens:
        llama_cpp.llama_sampler_accept(sampler, token)


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> Iterator[Any]:
    """The tiny model, shared by this file: every test evaluates its own prompt."""
    llm = llama_cpp.Llama(
        str(tiny_model_path), n_ctx=256, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, verbose=False
    )
    yield llm
    llm.close()


@pytest.fixture
def vocab(model: Any) -> Any:
    return llama_cpp.llama_model_get_vocab(model.model)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every record that a test makes is gone at its end; the traceback of one that failed may hold a handle."""
    before, n_failed = n_alive(), request.session.testsfailed
    yield
    if request.session.testsfailed > n_failed:
        return
    if n_alive() > before:
        gc.collect()
    # Fewer: the handle of a test that failed before.
    assert n_alive() <= before


# --- the reference's C++ tests, ported literally ------------------------------------------------

THINK_EXECUTE = """{
    "modelId": "test",
    "descriptors": [{
        "path": "action",
        "leaves": [
            { "name": "THINK", "tokens": [100, 101] },
            { "name": "EXECUTE", "tokens": [200] }
        ]
    }]
}"""
THINK = """{
    "modelId": "test",
    "descriptors": [{
        "path": "action",
        "leaves": [{"name": "THINK", "tokens": [100, 101]}]
    }]
}"""


def call_apply(sampler: Any, candidates: Candidates) -> None:
    """``sampler->apply(sampler, &logits)``, through the table and not through llama.cpp."""
    sampler.contents.iface.contents.apply(sampler, ctypes.pointer(candidates.array))


def call_accept(sampler: Any, token: int) -> None:
    """``sampler->accept(sampler, token)``."""
    sampler.contents.iface.contents.accept(sampler, token)


def test_reference_initialize_empty_descriptor(vocab: Any) -> None:
    """InitializeEmptyDescriptor."""
    sampler = llama_sampler_init_token_trie(vocab, '{ "modelId": "test", "descriptors": [] }', 0)
    assert sampler is None


def test_reference_mask_invalid_tokens(vocab: Any) -> None:
    """MaskInvalidTokens."""
    sampler = init(vocab, THINK_EXECUTE, 0, on_invalid="mask")
    assert sampler is not None
    with owned(sampler):
        logits = Candidates([100, 200, 999], [5.0, 4.0, 6.0])
        call_apply(sampler, logits)
        assert logits.array.size == 3
        assert logits.ids == [100, 200, 999]
        assert logits.logits == [5.0, 4.0, -INF]


def test_reference_trie_walking(vocab: Any) -> None:
    """TrieWalking."""
    sampler = init(vocab, THINK, 0, on_invalid="mask")
    assert sampler is not None
    with owned(sampler):
        logits = Candidates([100], [1.0])
        call_apply(sampler, logits)
        assert logits.logits == [1.0]
        call_accept(sampler, 100)
        logits.memory["id"][0] = 101
        call_apply(sampler, logits)
        assert logits.logits == [1.0]
        call_accept(sampler, 101)
        # At the terminal the next token is unconstrained: apply does nothing, whatever is there.
        rest = Candidates([101, 999], [1.0, 2.0])
        call_apply(sampler, rest)
        assert rest.logits == [1.0, 2.0]


@pytest.mark.parametrize(("mode", "ref"), [(0, [(100, 5.0)]), (1, [(100, 5.0), (200, 4.0)])])
def test_reference_data_under_drop(vocab: Any, mode: int, ref: list[tuple[int, float]]) -> None:
    with owned(init(vocab, THINK_EXECUTE, mode)) as sampler:
        logits = Candidates([100, 200, 999], [5.0, 4.0, 6.0])
        call_apply(sampler, logits)
        assert list(zip(logits.ids, logits.logits, strict=True)) == ref
        assert logits.array.size == (1 if mode == 0 else 2)
        assert logits.array.selected == (0 if mode == 0 else -1)


def test_departure_born_active(vocab: Any) -> None:
    """A departure: the reference says inactive at first, and its own tests mask at once. Ours is born armed."""
    with owned(init_leaves(vocab)) as sampler:
        handle = token_trie_handle(sampler)
        assert (handle.node, handle.is_active, handle.position_in_span) == (0, True, 0)
        assert Candidates([300, 999], [0.0, 9.0]).apply(sampler).ids == [300]


@pytest.mark.parametrize("before", ["armed", "in the middle", "over", "off", "deactivated"])
def test_departure_reset_arms_again(vocab: Any, before: str) -> None:
    """A departure: the reference is inactive after reset. Ours goes back to how it was born: at the root, armed."""
    with owned(init_leaves(vocab)) as sampler:
        handle = token_trie_handle(sampler)
        accept_all(sampler, {"in the middle": [300], "over": [300, 301], "off": [999]}.get(before, []))
        if before == "deactivated":
            handle.deactivate()
        llama_cpp.llama_sampler_reset(sampler)
        # What went wrong before the reset is still told, and nothing else is changed by it.
        assert handle.status == (layout.OFF_TRIE if before == "off" else layout.OK)
        assert (handle.node, handle.is_active, handle.position_in_span) == (0, True, 0)
        assert handle.counters["accepted"] == 0
        assert Candidates([300, 999], [0.0, 9.0]).apply(sampler).ids == [300]


# The invariants of the reference's "Internal State Machine", one test each.


def test_invariant_accept_steps_to_a_child(vocab: Any) -> None:
    with owned(init_leaves(vocab)) as sampler:
        handle = token_trie_handle(sampler)
        seen = []
        for token in (310, 320):
            call_accept(sampler, token)
            seen.append((handle.leaf_name, handle.position_in_span, handle.is_active))
        assert seen == [("A", 1, True), ("AB", 2, False)]


def test_invariant_accept_of_anything_else_releases(vocab: Any, caplog: pytest.LogCaptureFixture) -> None:
    with owned(init_leaves(vocab)) as sampler:
        handle = token_trie_handle(sampler)
        call_accept(sampler, 300)
        call_accept(sampler, 310)
        assert handle.status == layout.OFF_TRIE
        assert not caplog.records
        assert handle.is_active is False
        assert [(record.name, record.levelname) for record in caplog.records] == [(LOGGER, "WARNING")]
        assert "released" in caplog.text
        assert handle.status == layout.OK


@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
@pytest.mark.parametrize(("prefix", "ref"), [([], [300, 310]), ([300], [301]), ([310], [320])])
def test_invariant_apply_leaves_children_only(vocab: Any, prefix: list[int], ref: list[int], on_invalid: str) -> None:
    with owned(init_leaves(vocab, mode=1, on_invalid=on_invalid)) as sampler:
        accept_all(sampler, prefix)
        assert Candidates.of_row(np.zeros(V)).apply(sampler).finite_ids == ref


@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
@pytest.mark.parametrize("mode", [0, 1])
def test_invariant_apply_does_nothing_while_inactive(vocab: Any, mode: int, on_invalid: str) -> None:
    rng = np.random.default_rng(0)
    row = rng.normal(size=V).astype(np.float32)
    row[[4, 310]] = NAN, -INF
    with owned(init_leaves(vocab, mode=mode, on_invalid=on_invalid)) as sampler:
        accept_all(sampler, [300, 301])
        candidates = Candidates.of_row(row)
        before = candidates.memory.tobytes()
        candidates.apply(sampler)
        assert candidates.memory.tobytes() == before
        assert (candidates.array.size, candidates.array.selected) == (V, -1)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
@pytest.mark.parametrize("on_end", MODES)
def test_an_empty_array_is_untouched(mode: int, on_invalid: str, on_end: str) -> None:
    with owned(bare(LEAVES, mode, on_invalid=on_invalid, on_end=on_end, ends=ENDS)) as sampler:
        handle = token_trie_handle(sampler)
        for token in (310, 320, ENDS[0]):
            candidates = Candidates([], []).apply(sampler)
            assert (candidates.array.size, candidates.array.selected) == (0, -1)
            assert (handle.status, handle.counters["applied"]) == (layout.OK, 0)
            accept_all(sampler, [token])


# --- the pick, against NumPy --------------------------------------------------------------------

WIDE = 49_152


def wide_leaves() -> Leaves:
    """Nodes of 64, 30, 3, 2 and 1 children over a wide vocabulary, its first and its last id among them."""
    rng = np.random.default_rng(7)
    ids = [int(i) for i in rng.choice(np.arange(10, WIDE - 10), 200, replace=False)]
    top = [0, WIDE - 1, *ids[:62]]
    leaves = [[token] for token in top[4:]]
    leaves += [[top[0], token] for token in ids[62:92]]
    leaves += [[top[1], token] for token in (0, 1, WIDE - 1)]
    leaves += [[top[2], token] for token in ids[92:94]]
    leaves += [[top[3], ids[94]]]
    return [(str(i), tokens) for i, tokens in enumerate(leaves)]


# Every node that goes on: the root, and four others.
def wide_prefixes(leaves: Leaves) -> list[Prefix]:
    trie = DictTrie(leaves)
    found = [prefix for prefix in trie.prefixes() if trie.children(prefix)]
    assert sorted(len(trie.children(prefix)) for prefix in found) == [1, 2, 3, 30, 64]
    return found


def test_pick_equals_numpy_argmax_over_the_children_on_1000_rows() -> None:
    """A record's id read as a float gives valid tokens, always the wrong one: compared with argmax, not membership."""
    leaves = wide_leaves()
    trie = DictTrie(leaves)
    rng = np.random.default_rng(1)
    candidates = Candidates.of_row(np.zeros(WIDE))
    with contextlib.ExitStack() as stack:
        nodes = []
        for prefix in wide_prefixes(leaves):
            sampler = stack.enter_context(owned(bare(leaves)))
            accept_all(sampler, prefix)
            nodes.append((np.array(trie.children(prefix)), sampler))
        picked = set()
        for _ in range(1000):
            row = rng.normal(scale=4, size=WIDE).astype(np.float32)
            for children, sampler in nodes:
                candidates.refill(row)
                candidates.apply(sampler)
                ref = int(children[np.argmax(row[children])])
                assert candidates.ids == [ref]
                assert candidates.logits == [row[ref]]
                assert candidates.selected_id == ref
                picked.add(ref)
    assert len(picked) == 64 + 30 + 3 + 2 + 1 - 2  # every child won once; two ids are children of two nodes


ARRANGEMENTS = ("ordered", "shuffled", "sorted", "top", "some")


def arrange(row: np.ndarray, how: str, rng: np.random.Generator, n_kept: int | None = None) -> Candidates:
    """The candidates as other samplers leave them behind: any order, sorted, or fewer."""
    n = len(row)
    n_kept = int(rng.integers(1, n + 1)) if n_kept is None else n_kept
    descending = np.argsort(-np.nan_to_num(row, nan=-INF, posinf=INF, neginf=-INF), kind="stable")
    ids = {
        "ordered": np.arange(n),
        "shuffled": rng.permutation(n),
        "sorted": descending,
        "top": descending[:n_kept],
        "some": rng.permutation(n)[:n_kept],
    }[how]
    return Candidates(ids, row[ids], is_sorted=how in ("sorted", "top"))


@pytest.mark.parametrize("how", ARRANGEMENTS[1:])
def test_pick_equals_numpy_argmax_in_any_order(how: str) -> None:
    leaves = wide_leaves()
    trie = DictTrie(leaves)
    rng = np.random.default_rng(2)
    for prefix in wide_prefixes(leaves):
        children = np.array(trie.children(prefix))
        with owned(bare(leaves)) as sampler:
            accept_all(sampler, prefix)
            for _ in range(10):
                row = rng.normal(scale=4, size=WIDE).astype(np.float32)
                # Truncated arrays keep one child at least, so that there is a pick.
                row[children[: 1 + len(children) // 3]] += 30
                candidates = arrange(row, how, rng, n_kept=WIDE // 2)
                present = np.intersect1d(children, candidates.ids)
                if not len(present):
                    continue
                ref = int(present[np.argmax(row[present])])
                assert candidates.apply(sampler).ids == [ref]
                assert (candidates.logits, candidates.selected_id) == ([row[ref]], ref)


@pytest.mark.parametrize("on_end", MODES)
def test_pick_at_a_leaf_that_goes_on_equals_the_oracle(on_end: str) -> None:
    """Where to stop is the question: on wide rows, with each answer given often enough to matter."""
    rng = np.random.default_rng(3)
    ends = [5, 40_000]
    children = sorted(int(i) for i in rng.choice(np.arange(100, 39_000), 8, replace=False))
    leaves = [("A", [77]), *((str(token), [77, token]) for token in children)]
    options = {*children, *ends}
    candidates = Candidates.of_row(np.zeros(WIDE))
    n_stops = 0
    with owned(bare(leaves, on_end=on_end, ends=ends)) as sampler:
        accept_all(sampler, [77])
        for _ in range(200):
            row = rng.normal(size=WIDE).astype(np.float32)
            row[children] += 10
            row[ends] += 10
            ref = greedy_step(row, children, True, on_end, ends)
            if abs(decision_margin(row, children, True)) < 1e-5:
                continue
            candidates.refill(row)
            candidates.apply(sampler)
            if ref == STOP:
                n_stops += 1
                ref = argmax_child(row, ends)
            assert ref in options
            assert candidates.ids == [ref]
    assert 20 < n_stops < 180


# --- what is left, in any order and any mode, against the oracle --------------------------------

WIDTH = 40
NARROW_ENDS = [0, 35]


def ref_options(row: np.ndarray, present: set[int], trie: DictTrie, prefix: Prefix, over: bool, on_end: str) -> Any:
    """(options id -> logit as float32, the pick, the status) for an array of the ids ``present``.

    Absent ids count as -inf. The stop of ``mass`` is the best end token with the logit of stopping, in the array or
    not. A pick that is too near to call is None.
    """
    seen = np.full(WIDTH, -INF)
    for token in present:
        seen[token] = -INF if np.isnan(row[token]) else row[token]
    children = [] if over else trie.children(prefix)
    at_leaf = over or trie.is_terminal(prefix)
    stops = on_end == "mass" and at_leaf and bool(children)
    ids = {*children, *(NARROW_ENDS if at_leaf and not stops else ())}
    options = {token: seen[token] for token in sorted(ids & present)}
    stop = stop_logit(seen, children) if stops else -INF
    end = argmax_child(seen, NARROW_ENDS)
    if stop > -INF:
        options[end] = float(np.float32(stop))
    if not any(logit > -INF for logit in options.values()):
        status = layout.ALL_INVALID if options else layout.NO_CANDIDATE
        return options, min(ids), status
    best_child = max((seen[token] for token in children), default=-INF)
    if stop > -INF and np.isfinite(best_child) and abs(stop - best_child) <= 1e-6 * max(1, abs(stop), abs(best_child)):
        return options, None, layout.OK
    if stops:
        step = greedy_step(seen, children, True, "mass")
        return options, end if step == STOP else step, layout.OK
    return options, argmax_child(seen, ids), layout.OK


@pytest.mark.parametrize("on_end", MODES)
@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
@pytest.mark.parametrize("mode", [0, 1])
@given(
    leaves=leaf_sets(max_token=31),
    row=logits_rows(WIDTH, posinf=True),
    how=st.sampled_from(ARRANGEMENTS),
    data=st.data(),
)
def test_what_is_left_equals_the_oracle(
    leaves: Leaves, row: np.ndarray, how: str, on_end: str, on_invalid: str, mode: int, data: st.DataObject
) -> None:
    leaves = [(name, [token + 1 for token in tokens]) for name, tokens in leaves]  # 0 is an end token
    trie = DictTrie(leaves)
    prefix = data.draw(st.sampled_from(trie.prefixes()))
    over = trie.is_terminal(prefix) and data.draw(st.booleans())
    is_released = on_end == "release" and (over or trie.must_end(prefix))
    candidates = arrange(row, how, np.random.default_rng(data.draw(st.integers(0, 99))))
    before = candidates.records.copy()
    ref, pick, status = ref_options(row, set(candidates.ids), trie, prefix, over, on_end)
    if on_invalid == "mask":
        # A stop that has no slot in a truncated array has a test of its own.
        assume(set(ref) <= set(candidates.ids))
    with owned(bare(leaves, mode, on_invalid=on_invalid, on_end=on_end, ends=NARROW_ENDS)) as sampler:
        accept_all(sampler, [*prefix, *([35] if over else [])])
        candidates.apply(sampler)
        handle = token_trie_handle(sampler)
        if is_released:
            assert candidates.records.tobytes() == before.tobytes()
            assert handle.counters["applied"] == 0
            return
        if on_invalid == "mask" and status != layout.OK:
            status = handle.status or layout.ALL_INVALID  # which of the two faults is no question of masking
        assert handle.status == status
        if status == layout.ALL_INVALID:
            with pytest.warns(TrieSamplerWarning, match="lowest valid id"):
                assert handle.counters["applied"] == 1
        counters = handle.counters
        assert (counters["applied"], counters["candidates"]) == (1, len(before))
    # A selector takes the first of a sorted array for the largest.
    assert not candidates.array.sorted or candidates.logits == sorted(candidates.logits, reverse=True)
    if status != layout.OK:
        assert (candidates.ids, candidates.logits) == ([pick], [0.0])
    elif on_invalid == "mask":
        assert candidates.ids == before["id"].tolist()
        assert candidates.logits == pytest.approx([ref.get(token, -INF) for token in candidates.ids], rel=1e-6)
        assert counters["valid"] == sum(logit > -INF for logit in ref.values())
    elif mode == 1:
        assert dict(zip(candidates.ids, candidates.logits, strict=True)) == pytest.approx(ref, rel=1e-6)
        assert len(candidates.ids) == len(ref) == counters["valid"]
        assert candidates.array.selected == -1
    else:
        assert counters["valid"] == len(ref)
        assert (candidates.array.size, candidates.array.selected) == (1, 0)
        if pick is not None:
            assert candidates.ids == [pick]
            assert candidates.logits == pytest.approx([ref[pick]], rel=1e-6)
        assert candidates.ids[0] in ref


def test_exact_ties() -> None:
    """Among tokens the lowest id wins; a stop under mass wins against children."""
    leaves: Leaves = [("A", [9]), ("B", [9, 4]), ("C", [9, 6]), ("D", [3])]
    for row, on_end, prefix, ref in [
        ([0.0] * 12, "mass", [], 3),
        ([0.0] * 12, "eog", [9], 1),
        ([-1.0, -1.0, *[0.0] * 10], "eog", [9], 4),
        # One foreign token of the children's own logit: P(stop) = p(child).
        ([-INF, -INF, -INF, -INF, 2.0, -INF, 2.0, 2.0, *[-INF] * 4], "mass", [9], 1),
        # The same, where the stop's token is the highest of all.
        ([-INF, -INF, -INF, -INF, 2.0, -INF, 2.0, -INF, 2.0, *[-INF] * 3], "mass", [9], 8),
        ([-INF, -INF, -INF, -INF, 2.0, -INF, 2.0, 1.5, *[-INF] * 4], "mass", [9], 4),
    ]:
        for how in ("ordered", "shuffled", "sorted"):
            with owned(bare(leaves, on_end=on_end, ends=[1, 8])) as sampler:
                accept_all(sampler, prefix)
                candidates = arrange(np.array(row, np.float32), how, np.random.default_rng(0)).apply(sampler)
                assert (on_end, prefix, how, candidates.ids) == (on_end, prefix, how, [ref])


@pytest.mark.parametrize("how", ["ordered", "shuffled", "sorted"])
def test_the_best_end_token_carries_the_stop(how: str) -> None:
    """P(stop) is a mass that no token has; the end token of the largest logit gets its logit.

    It comes last, so that a sorted array is one no more: a selector that trusts the flag would take the first.
    """
    row = np.full(WIDTH, -20.0, np.float32)
    row[[20, 7, 0, 35]] = 1.0, 2.0, -3.0, -2.0
    with owned(bare([("A", [5]), ("B", [5, 20])], 1, ends=NARROW_ENDS)) as sampler:
        accept_all(sampler, [5])
        candidates = arrange(row, how, np.random.default_rng(0)).apply(sampler)
    assert candidates.ids == [20, 35]
    np.testing.assert_allclose(candidates.logits, [1.0, stop_logit(row, [20])], rtol=1e-6)
    assert candidates.logits[1] > 2.0
    assert candidates.array.sorted is False


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("fault", [NAN, -INF])
def test_logits_that_say_nothing_warn_at_the_next_touch(mode: int, fault: float) -> None:
    row = np.full(V, 3.0, np.float32)
    row[[300, 310]] = fault
    with owned(bare(LEAVES, mode)) as sampler:
        handle = token_trie_handle(sampler)
        candidates = Candidates.of_row(row).apply(sampler)
        assert (candidates.ids, candidates.logits) == ([300], [0.0])
        assert handle.status == layout.ALL_INVALID
        with pytest.warns(TrieSamplerWarning, match="every valid logit was NaN or -inf; the lowest valid id"):
            assert handle.is_active
        # Told once.
        assert handle.status == layout.OK
        assert handle.is_active


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
def test_an_array_without_any_valid_candidate_gets_the_lowest_child(
    mode: int, on_invalid: str, caplog: pytest.LogCaptureFixture
) -> None:
    with owned(bare(LEAVES, mode, on_invalid=on_invalid)) as sampler:
        handle = token_trie_handle(sampler)
        candidates = Candidates([999, 4, 301], [3.0, 2.0, 1.0], is_sorted=True).apply(sampler)
        assert (candidates.ids, candidates.logits) == ([300], [0.0])
        assert handle.status == layout.NO_CANDIDATE
        assert handle.is_active
    assert [record.name for record in caplog.records] == [LOGGER]
    assert "removed every valid token" in caplog.text


def test_masking_a_truncated_array_keeps_the_stop() -> None:
    """No end token is among the candidates, and nearly all the mass is foreign: greedy stops."""
    row = np.array([1.0, 20.0], np.float32)
    ids = [20, 7]
    full = np.full(WIDTH, -INF)
    full[ids] = row
    assert greedy_step(full, [20], True, "mass") == STOP
    with owned(bare([("A", [5]), ("B", [5, 20])], on_invalid="mask", ends=NARROW_ENDS)) as sampler:
        accept_all(sampler, [5])
        candidates = Candidates(ids, row).apply(sampler)
        assert candidates.finite_ids[0] in NARROW_ENDS


@pytest.mark.parametrize("on_end", ["mass", "eog"])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
def test_size_0_is_never_left_where_no_end_token_is_known(on_end: str, mode: int, on_invalid: str) -> None:
    """A leaf is over, its span goes on, and the vocabulary has no end token: llama.cpp aborts on an empty array.

    Refusing to make such a sampler is as good.
    """
    try:
        made = bare([("A", [5])], mode, on_invalid=on_invalid, on_end=on_end, ends=())
    except (ValueError, TrieSamplerError):
        return
    with owned(made) as sampler:
        accept_all(sampler, [5])
        candidates = Candidates.of_row(np.zeros(12)).apply(sampler)
        assert candidates.array.size > 0
        assert candidates.finite_ids


def test_a_stop_is_never_spelled_by_a_child() -> None:
    """Stop token 20 also goes on here. P(stop) wins, so what is left has to end the leaf when it is accepted."""
    row = np.full(WIDTH, 9.0, np.float32)
    row[0] = 0.0
    with owned(bare([("A", [5]), ("B", [5, 20, 6])], ends=[0, 20])) as sampler:
        handle = token_trie_handle(sampler)
        accept_all(sampler, [5])
        (picked,) = Candidates.of_row(row).apply(sampler).ids
        accept_all(sampler, [picked])
        assert (handle.leaf_name, handle.is_finished) == ("A", True)


# --- one walk over six rungs --------------------------------------------------------------------

N_PROMPTS = 24


def rung_leaves() -> Leaves:
    """Leaves that end and go on with few or with nearly all tokens, so that both stopping and going on come up."""
    rng = np.random.default_rng(11)
    usable = np.setdiff1d(np.arange(6, V), ENDS)
    leaves: list[list[int]] = []
    for first in range(300, 308):
        leaves.append([first])
        for second in rng.choice(usable, int(rng.choice([3, 600, 700])), replace=False).tolist():
            leaves.append([first, second])
            if second % 97 == 0:
                leaves += [[first, second, int(third)] for third in rng.choice(usable, 720, replace=False)[:300]]
    leaves += [[400, 401, 402], [400, 401, 403]]
    return [(str(i), tokens) for i, tokens in enumerate(leaves)]


@pytest.mark.parametrize("on_end", MODES)
def test_one_walk_over_six_rungs(model: Any, vocab: Any, on_end: str) -> None:
    """Dictionaries, kernel, cursor, callbacks called directly, a chain over a made array, a chain on the context.

    Equal allowed sets and equal picks at every step, over the model's own logits.
    """
    from trie_sampler import kernels

    leaves = rung_leaves()
    ends = [10] if on_end == "release" else ENDS
    stop_tokens = ends if on_end == "release" else ()
    trie = DictTrie(leaves)
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end=on_end, eog_ids=ENDS, stop_tokens=stop_tokens)
    settings: dict[str, Any] = {"on_end": on_end, "stop_tokens": stop_tokens}
    seen = set()
    with contextlib.ExitStack() as stack:
        direct = [
            stack.enter_context(owned(init_leaves(vocab, leaves, mode, on_invalid=on_invalid, **settings)))
            for mode, on_invalid in ((0, "drop"), (1, "drop"), (1, "mask"))
        ]
        greedy = llama_cpp.llama_sampler_init_greedy
        made = stack.enter_context(owned(chain_of(init_leaves(vocab, leaves, 1, **settings), greedy())))
        real = stack.enter_context(owned(chain_of(init_leaves(vocab, leaves, 0, **settings), greedy())))
        handles = [token_trie_handle(sampler) for sampler in direct]
        handles += [token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, 0)) for chain in (made, real)]
        for prompt in range(N_PROMPTS):
            for sampler in (*direct, made, real):
                llama_cpp.llama_sampler_reset(sampler)
            cursor.reset()
            model.reset()
            model.eval([1, 300 + prompt, 17 * prompt % 700 + 20])
            prefix: Prefix = ()
            over = False
            while True:
                row = raw_row(model)
                children, terminal = trie.children(prefix), trie.is_terminal(prefix)
                # Rung 1: dictionaries.
                step = STOP if over else greedy_step(row, children, terminal, on_end, ends)
                ref = argmax_child(row, ends) if step == STOP else step
                allowed = set(ends) if over else {*children, *(ends if terminal else ())}
                assert over or decision_margin(row, children, terminal) > 1e-4
                # Rungs 2 and 3: the kernel, the cursor.
                assert kernels.pick_token(cursor._address, row) == ref
                assert cursor.pick(row) == ref
                assert set(cursor.allowed().tolist()) == allowed
                # Rung 4: the callbacks, called through the table.
                arrays = [Candidates.of_row(row) for _ in direct]
                for sampler, candidates in zip(direct, arrays, strict=True):
                    call_apply(sampler, candidates)
                assert arrays[0].ids == [ref]
                comp = [set(arrays[1].ids), set(arrays[2].finite_ids)]
                if on_end == "mass" and terminal and children and not over:
                    # Of the end tokens the best carries the stop.
                    best = argmax_child(row, ends)
                    assert comp == [{*children, best}] * 2
                else:
                    assert comp == [allowed] * 2
                # Rung 5: a chain over a made array.
                assert Candidates.of_row(row).apply(made).selected_id == ref
                # Rung 6: a chain on the context, which accepts by itself.
                assert llama_cpp.llama_sampler_sample(real, model.ctx, -1) == ref
                cursor.accept(ref)
                for sampler in direct:
                    call_accept(sampler, ref)
                llama_cpp.llama_sampler_accept(made, ref)
                assert {handle.node for handle in handles} == {cursor.node}
                assert {handle.is_active for handle in handles} == {cursor.is_active}
                assert {handle.is_finished for handle in handles} == {cursor.is_finished}
                seen.add((terminal and bool(children), step == STOP))
                if over or (on_end == "release" and not cursor.is_active):
                    break
                over = step == STOP
                prefix = prefix if over else (*prefix, step)
                model.eval([ref])
    # No case was left out: at a leaf that goes on it stopped, and it went on.
    assert {(True, True), (True, False), (False, False)} <= seen


# --- every slot ---------------------------------------------------------------------------------


def test_name(vocab: Any) -> None:
    with owned(init_leaves(vocab)) as sampler:
        assert llama_cpp.llama_sampler_name(sampler) == b"token-trie"
        assert sampler.contents.iface.contents.name(sampler) == b"token-trie"


def test_alone_in_a_chain_mode_0_selects(model: Any, vocab: Any) -> None:
    """No selector behind it: llama_sampler_sample takes the pick that drop left."""
    model.reset()
    model.eval([1, 20, 21])
    children = [300, 310]
    with owned(chain_of(init_leaves(vocab))) as chain:
        ref = argmax_child(raw_row(model), children)
        assert llama_cpp.llama_sampler_sample(chain, model.ctx, -1) == ref


@pytest.mark.parametrize("selector", ["greedy", "dist", "temp+dist", "top_k+dist", "mirostat_v2"])
def test_mode_0_is_greedy_whatever_selects(model: Any, vocab: Any, selector: str) -> None:
    makers = {
        "greedy": llama_cpp.llama_sampler_init_greedy,
        "dist": lambda: llama_cpp.llama_sampler_init_dist(1),
        "temp": lambda: llama_cpp.llama_sampler_init_temp(5.0),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(40),
        "mirostat_v2": lambda: llama_cpp.llama_sampler_init_mirostat_v2(1, 5.0, 0.1),
    }
    with owned(chain_of(init_leaves(vocab), *(makers[part]() for part in selector.split("+")))) as chain:
        for prompt in range(20):
            model.reset()
            model.eval([1, 20 + prompt, 21])
            ref = argmax_child(raw_row(model), [300, 310])
            assert llama_cpp.llama_sampler_sample(chain, model.ctx, -1) == ref
            llama_cpp.llama_sampler_reset(chain)


def test_mode_1_samples_every_option_and_nothing_else(model: Any, vocab: Any) -> None:
    leaves = [(str(token), [token]) for token in range(300, 308)]
    model.reset()
    model.eval([1, 20, 21])
    hot = llama_cpp.llama_sampler_init_temp(50.0)
    with owned(chain_of(init_leaves(vocab, leaves, 1), hot, llama_cpp.llama_sampler_init_dist(3))) as chain:
        drawn = set()
        for _ in range(200):
            drawn.add(llama_cpp.llama_sampler_sample(chain, model.ctx, -1))
            # Not the chain: that would give dist its first seed again.
            llama_cpp.llama_sampler_reset(llama_cpp.llama_sampler_chain_get(chain, 0))
    assert drawn == set(range(300, 308))


def state_of(handle: TokenTrieHandle) -> tuple[Any, ...]:
    names = ("root", "node", "state", "position_in_span", "n_accepted", "on_end", "max_span_tokens")
    return tuple(int(handle._record[name]) for name in names)


@pytest.mark.parametrize("in_chain", [False, True])
def test_a_clone_stands_at_the_same_place_and_walks_apart(vocab: Any, in_chain: bool) -> None:
    sampler = init_leaves(vocab)
    if in_chain:
        sampler = chain_of(llama_cpp.llama_sampler_init_top_k(0), sampler, llama_cpp.llama_sampler_init_greedy())

    def handle_of(pointer: Any) -> TokenTrieHandle:
        return token_trie_handle(llama_cpp.llama_sampler_chain_get(pointer, 1) if in_chain else pointer)

    with owned(sampler):
        accept_all(sampler, [300])
        with owned(llama_cpp.llama_sampler_clone(sampler)) as clone:
            first, second = handle_of(sampler), handle_of(clone)
            assert state_of(first) == state_of(second)
            accept_all(clone, [301])
            assert (first.leaf_name, first.is_active) == (None, True)
            assert (second.leaf_name, second.is_active) == ("YES", False)
            llama_cpp.llama_sampler_reset(sampler)
            assert (first.node, second.leaf_name) == (0, "YES")
            candidates = Candidates.of_row(np.zeros(V)).apply(sampler)
            assert candidates.ids[0] == 300
        assert second.is_freed
        assert not first.is_freed
        assert Candidates.of_row(np.zeros(V)).apply(sampler).ids[0] == 300


def test_a_clone_outlives_its_original(vocab: Any) -> None:
    original = init_leaves(vocab)
    accept_all(original, [310])
    clone = llama_cpp.llama_sampler_clone(original)
    twin = llama_cpp.llama_sampler_clone(clone)
    llama_cpp.llama_sampler_free(original)
    llama_cpp.llama_sampler_free(clone)
    gc.collect()
    with owned(twin):
        assert Candidates.of_row(np.zeros(V)).apply(twin).ids == [320]
        assert token_trie_handle(twin).leaf_name == "A"


def test_trouble_of_the_original_is_not_the_clones(vocab: Any) -> None:
    with owned(init_leaves(vocab, on_end="mass")) as sampler:
        accept_all(sampler, [999])
        with owned(llama_cpp.llama_sampler_clone(sampler)) as clone:
            assert token_trie_handle(clone).status == layout.OK
        with pytest.raises(OffTrieError):
            _ = token_trie_handle(sampler).node


@pytest.mark.skipif(not hasattr(llama_cpp, "llama_sampler_copy"), reason="this host has no llama_sampler_copy")
@pytest.mark.parametrize("in_chain", [False, True])
def test_copy_takes_over_the_place(vocab: Any, in_chain: bool) -> None:
    """The destination's record is freed, its wrapper gets a new one: handles taken before say so."""
    source, target = init_leaves(vocab), init_leaves(vocab, [("B", [400, 401])], on_end="mass")
    before = n_alive()
    accept_all(source, [310])
    if in_chain:
        source = chain_of(source, llama_cpp.llama_sampler_init_greedy())
        target = chain_of(target, llama_cpp.llama_sampler_init_greedy())

    def handle_of(pointer: Any) -> TokenTrieHandle:
        return token_trie_handle(llama_cpp.llama_sampler_chain_get(pointer, 0) if in_chain else pointer)

    with owned(source), owned(target):
        old = handle_of(target)
        llama_cpp.llama_sampler_copy(source, target)
        new = handle_of(target)
        assert state_of(new) == state_of(handle_of(source))
        assert new.leaf_name == "A"
        assert old.is_freed
        with pytest.raises(TrieSamplerError, match="freed"):
            _ = old.node
        accept_all(target, [320])
        assert (new.leaf_name, handle_of(source).leaf_name) == ("AB", "A")
        del old
        assert n_alive() == before


def test_a_handle_outlives_its_chain(vocab: Any) -> None:
    sampler = init_leaves(vocab)
    chain = chain_of(sampler)
    handle = token_trie_handle(sampler)
    llama_cpp.llama_sampler_free(chain)
    assert handle.is_freed
    assert n_alive() == 1
    touches = ["is_active", "is_finished", "node", "leaf_name", "position_in_span", "counters"]
    for touch in touches:
        with pytest.raises(TrieSamplerError, match="freed with its chain"):
            getattr(handle, touch)
    for touch in (handle.activate, handle.deactivate):
        with pytest.raises(TrieSamplerError, match="freed with its chain"):
            touch()
    assert handle.status == layout.OK
    del handle, touch
    assert n_alive() == 0


def test_no_callback_after_free(vocab: Any) -> None:
    """A handle keeps the record of a freed chain: nothing that other chains do afterwards changes a byte of it."""
    sampler = init_leaves(vocab)
    chain = chain_of(sampler, llama_cpp.llama_sampler_init_greedy())
    Candidates.of_row(np.zeros(V)).apply(chain)
    llama_cpp.llama_sampler_accept(chain, 300)
    handle = token_trie_handle(sampler)
    llama_cpp.llama_sampler_free(chain)
    frozen = handle._record.tobytes()
    for _ in range(50):
        with owned(chain_of(init_leaves(vocab), llama_cpp.llama_sampler_init_greedy())) as other:
            Candidates.of_row(np.zeros(V)).apply(other)
            llama_cpp.llama_sampler_accept(other, 310)
            llama_cpp.llama_sampler_reset(other)
        gc.collect(0)
    gc.collect()
    assert handle.is_freed
    assert handle._record.tobytes() == frozen


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        pytest.skip("no /proc here")


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Collections see only what is made from here on: a thousand of them cost little."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def test_1000_chains_made_cloned_and_freed_leave_nothing(model: Any, vocab: Any) -> None:
    """Each of 500 leaves: the arrays of one lost chain in fifty would show."""
    model.reset()
    model.eval([1, 20, 21])
    rng = np.random.default_rng(5)
    payload = payload_json({"a": [(str(i), rng.integers(300, V, 6).tolist()) for i in range(500)]})

    def live(n_chains: int) -> None:
        for _ in range(n_chains):
            sampler = init(vocab, payload)
            handle = token_trie_handle(sampler)
            chain = chain_of(sampler, llama_cpp.llama_sampler_init_greedy())
            clone = llama_cpp.llama_sampler_clone(chain)
            llama_cpp.llama_sampler_sample(clone, model.ctx, -1)
            llama_cpp.llama_sampler_reset(chain)
            assert n_alive() == 2
            llama_cpp.llama_sampler_free(chain)
            llama_cpp.llama_sampler_free(clone)
            assert handle.is_freed
            del handle
            gc.collect()
            assert n_alive() == 0

    with quick_collections():
        live(50)
        before = resident_bytes()
        live(1000)
        grown = resident_bytes() - before
    assert grown < 2_000_000
    assert len(sampler_module._alive) <= 1


def test_clones_give_their_memory_back(vocab: Any) -> None:
    """40,000 records of some 400 bytes would be 16 MB."""
    with owned(init_leaves(vocab)) as sampler:

        def live(n_clones: int) -> None:
            for _ in range(n_clones):
                llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_clone(sampler))

        live(1000)
        before = resident_bytes()
        live(40_000)
        assert resident_bytes() - before < 2_000_000


def test_the_trie_goes_with_the_last_record(vocab: Any) -> None:
    """TokenTrie has no weak references; its arrays do. They are let go of at the next initialisation."""
    sampler = init_leaves(vocab)
    (alive,) = (a for a in sampler_module._alive.values() if a.count[0])
    token = weakref.ref(alive.cursor.trie.token)
    del alive
    clone = llama_cpp.llama_sampler_clone(sampler)
    llama_cpp.llama_sampler_free(sampler)
    llama_cpp.llama_sampler_free(init_leaves(vocab))
    gc.collect()
    assert token() is not None, "the clone still points into it"
    llama_cpp.llama_sampler_free(clone)
    llama_cpp.llama_sampler_free(init_leaves(vocab))
    gc.collect()
    assert token() is None


SCRIPT = st.lists(
    st.one_of(
        st.sampled_from(["reset", "clone", "activate", "deactivate", "touch"]),
        st.integers(0, 3).map(lambda place: ("child", place)),
        st.sampled_from([0, 35, 31, 1, -1]),
    ),
    max_size=12,
)


@given(leaves=leaf_sets(max_token=31), script=SCRIPT, on_end=st.sampled_from(MODES))
def test_any_script_walks_like_the_cursor(leaves: Leaves, script: list[Any], on_end: str) -> None:
    leaves = [(name, [token + 1 for token in tokens]) for name, tokens in leaves]
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end=on_end, stop_tokens=NARROW_ENDS)
    sampler = new_sampler(cursor, keeps_options=False)[0]
    handle = token_trie_handle(sampler)
    is_off = False
    logging.disable(logging.WARNING)
    try:
        for step in script:
            if isinstance(step, tuple):
                children = cursor.trie.children(max(cursor.node, 0))
                step = int(children[step[1] % len(children)]) if len(children) else 0
            if isinstance(step, int):
                llama_cpp.llama_sampler_accept(sampler, step)
                if cursor.is_active and step not in cursor.allowed() and not (step == -1 and cursor.may_end):
                    is_off = True
                with contextlib.suppress(OffTrieError):
                    cursor.accept(step)
            elif step == "clone":
                clone = llama_cpp.llama_sampler_clone(sampler)
                llama_cpp.llama_sampler_free(sampler)
                sampler, is_off = clone, False
                handle = token_trie_handle(sampler)
            elif step == "reset":
                llama_cpp.llama_sampler_reset(sampler)
                cursor.reset()
            else:
                act = functools.partial(getattr, handle, "counters") if step == "touch" else getattr(handle, step)
                if is_off and on_end != "release":
                    with pytest.raises(OffTrieError):
                        act()
                is_off = False
                act()
                if step != "touch":
                    getattr(cursor, step)()
            assert (handle.status == layout.OFF_TRIE) is is_off
            for name in ("state", "node", "root", "position_in_span", "n_accepted"):
                assert int(handle._record[name]) == int(cursor._record[name][0]), (step, name)
    finally:
        logging.disable(logging.NOTSET)
        llama_cpp.llama_sampler_free(sampler)


# --- the handle ---------------------------------------------------------------------------------

TWO = {"action": LEAVES, "kind": [("K", [400, 401]), ("L", [410])]}


def test_several_descriptors_are_born_released(vocab: Any) -> None:
    with owned(init(vocab, payload_json(TWO))) as sampler:
        handle = token_trie_handle(sampler)
        assert (handle.is_active, handle.node, handle.leaf_name) == (False, -1, None)
        assert Candidates.of_row(np.zeros(V)).apply(sampler).array.size == V
        for path, child in (("kind", 400), ("action", 300)):
            handle.activate(path)
            assert handle.is_active
            assert Candidates.of_row(np.zeros(V)).apply(sampler).ids == [child]
        llama_cpp.llama_sampler_reset(sampler)
        assert handle.is_active is False
        with pytest.raises(UnknownPathError, match="'action', 'kind'"):
            handle.activate()


def test_path_arms_at_birth(vocab: Any) -> None:
    with owned(init(vocab, payload_json(TWO), path="kind")) as sampler:
        handle = token_trie_handle(sampler)
        assert handle.is_active
        accept_all(sampler, [400])
        llama_cpp.llama_sampler_reset(sampler)
        assert Candidates.of_row(np.zeros(V)).apply(sampler).ids == [400]


def test_an_unknown_path_lists_the_known_and_changes_nothing(vocab: Any) -> None:
    with owned(init(vocab, payload_json(TWO))) as sampler:
        handle = token_trie_handle(sampler)
        handle.activate("kind")
        accept_all(sampler, [400])
        before = handle._record.tobytes()
        with pytest.raises(UnknownPathError, match=r"nope.*'action', 'kind'"):
            handle.activate("nope")
        assert handle._record.tobytes() == before


def test_deactivate_and_activate(vocab: Any) -> None:
    with owned(init_leaves(vocab, on_end="mass")) as sampler:
        handle = token_trie_handle(sampler)
        accept_all(sampler, [300])
        handle.deactivate()
        assert (handle.is_active, handle.is_finished, handle.position_in_span) == (False, False, 0)
        # Another sampler forces its own tokens meanwhile; they are counted and not tracked.
        accept_all(sampler, [310, 999])
        assert (handle.counters["accepted"], handle.position_in_span, handle.status) == (2, 0, layout.OK)
        assert Candidates.of_row(np.zeros(V)).apply(sampler).array.size == V
        handle.activate()
        assert (handle.is_active, handle.node) == (True, 0)
        assert Candidates.of_row(np.zeros(V)).apply(sampler).ids == [300]


def test_counters_and_position(vocab: Any) -> None:
    with owned(init_leaves(vocab, mode=1, on_end="eog")) as sampler:
        handle = token_trie_handle(sampler)
        # prefix -> options: 300 310 | 320 and two EOG ids | two EOG ids
        for n_steps, (token, n_valid) in enumerate([(310, 2), (320, 2 + 3), (2, 2 + 3 + 2)], start=1):
            assert Candidates.of_row(np.zeros(V)).apply(sampler).array.size > 0
            assert handle.counters == {
                "applied": n_steps,
                "candidates": n_steps * V,
                "valid": n_valid,
                "accepted": n_steps - 1,
            }
            assert handle.position_in_span == n_steps - 1
            accept_all(sampler, [token])
        assert (handle.is_finished, handle.is_active) == (True, False)
        assert (handle.position_in_span, handle.leaf_name) == (2, "AB")


def test_eog_and_mass_keep_end_tokens_only_after_a_leaf(vocab: Any) -> None:
    for on_end in ("mass", "eog"):
        for tokens in ([300, 301], [310, 3]):
            with owned(init_leaves(vocab, mode=1, on_end=on_end)) as sampler:
                accept_all(sampler, tokens)
                assert Candidates.of_row(np.zeros(V)).apply(sampler).ids == ENDS


@pytest.mark.parametrize("on_end", ["mass", "eog"])
def test_a_token_off_the_trie_is_an_error_at_the_next_touch(vocab: Any, on_end: str) -> None:
    with owned(init_leaves(vocab, on_end=on_end)) as sampler:
        handle = token_trie_handle(sampler)
        accept_all(sampler, [300, 999, 301])
        # Nothing moved at 999; 301 did.
        assert handle.status == layout.OFF_TRIE
        with pytest.raises(OffTrieError, match="does not allow"):
            _ = handle.is_active
        assert (handle.status, handle.leaf_name) == (layout.OK, "YES")


def test_the_first_trouble_is_told(vocab: Any) -> None:
    with owned(init_leaves(vocab, on_end="mass")) as sampler:
        handle = token_trie_handle(sampler)
        row = np.full(V, NAN, np.float32)
        Candidates.of_row(row).apply(sampler)
        accept_all(sampler, [999])
        assert handle.status == layout.ALL_INVALID


def test_another_samplers_pointer_is_a_type_error(vocab: Any) -> None:
    with owned(chain_of(init_leaves(vocab), llama_cpp.llama_sampler_init_greedy())) as chain:
        others = [chain, llama_cpp.llama_sampler_chain_get(chain, 1), None, llama_cpp.llama_sampler_p_ctypes()]
        for other in others:
            with pytest.raises(TypeError, match="not a token-trie sampler"):
                token_trie_handle(other)


def test_two_handles_of_one_sampler_see_the_same(vocab: Any) -> None:
    with owned(init_leaves(vocab)) as sampler:
        first, second = token_trie_handle(sampler), token_trie_handle(sampler)
        first.deactivate()
        assert second.is_active is False
        del first
        gc.collect()
        assert n_alive() == 1
        assert second.position_in_span == 0


def test_the_safety_net_never_fires_inside_a_leaf(vocab: Any) -> None:
    long: Leaves = [("L", [300] * 20)]
    with owned(init_leaves(vocab, long, max_span_tokens=1)) as sampler:
        handle = token_trie_handle(sampler)
        accept_all(sampler, [300] * 19)
        assert (handle.is_active, handle.status) == (True, layout.OK)
        accept_all(sampler, [300])
        assert (handle.is_active, handle.leaf_name, handle.status) == (False, "L", layout.OK)


# --- what is refused ----------------------------------------------------------------------------

ONE_LEAF = '{"modelId": "m", "descriptors": [{"path": "a", "leaves": [{"name": "x", "tokens": %s}]}]}'
REFUSED = [
    ("not JSON", "{", {}, PayloadError),
    ("not an object", "[]", {}, PayloadError),
    ("no leaves key", '{"modelId": "m", "descriptors": [{"path": "a"}]}', {}, PayloadError),
    ("id that is a bool", ONE_LEAF % "[true]", {}, PayloadError),
    ("id that is a float", ONE_LEAF % "[300.5]", {}, PayloadError),
    ("id past int32", ONE_LEAF % "[4294967596]", {}, TrieSamplerError),
    ("two of one path", '{"modelId": "m", "descriptors": [{"path": "a", "leaves": []}, {"path": "a", "leaves": []}]}',
     {}, PayloadError),
    ("no descriptors", payload_json({}), {}, EmptyTrieError),
    ("no leaves", payload_json({"a": []}), {}, EmptyTrieError),
    ("unknown path", payload_json({"a": LEAVES}), {"path": "nope"}, UnknownPathError),
    ("id of V", payload_json({"a": [("x", [300, V])]}), {}, VocabMismatchError),
    ("negative id", payload_json({"a": [("x", [-1])]}), {}, TrieSamplerError),
    ("EOG id in a leaf", payload_json({"a": [("x", [300, 3])]}), {}, VocabMismatchError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "settings", "error"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refusals(
    vocab: Any, payload: str, settings: dict[str, Any], error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error) as raised:
        init(vocab, payload, strict=True, **settings)
    assert not caplog.records
    for form in (payload, payload.encode()):
        assert init(vocab, form, **settings) is None
        (record,) = caplog.records
        assert (record.name, record.levelno) == (LOGGER, logging.ERROR)
        assert str(raised.value) in record.getMessage()
        caplog.clear()
    assert n_alive() == 0


def test_the_last_id_of_the_vocabulary_is_fine(vocab: Any) -> None:
    with owned(init_leaves(vocab, [("x", [V - 1]), ("y", [300])])) as sampler:
        assert Candidates.of_row(np.arange(V)).apply(sampler).ids == [V - 1]


def test_names_that_do_not_detokenize_only_warn(vocab: Any) -> None:
    with pytest.warns(TrieSamplerWarning, match="THINK"):
        sampler = llama_sampler_init_token_trie(vocab, THINK_EXECUTE, 0)
    assert sampler is not None
    llama_cpp.llama_sampler_free(sampler)
    with pytest.raises(VocabMismatchError, match="THINK"):
        llama_sampler_init_token_trie(vocab, THINK_EXECUTE, 0, strict=True)


def test_names_that_detokenize_do_not_warn(model: Any, vocab: Any) -> None:
    leaves = [(text, model.tokenize(text.encode(), add_bos=False)) for text in ("REPLY", "STOP", "yes")]
    with owned(llama_sampler_init_token_trie(vocab, payload_json({"a": leaves}), 0, strict=True)) as sampler:
        assert token_trie_handle(sampler).is_active


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": 2},
        {"mode": -1},
        {"mode": True},
        {"mode": "argmax"},
        {"mode": None},
        {"mode": 0, "on_invalid": "keep"},
        {"mode": 0, "on_invalid": None},
        {"mode": 0, "on_end": "stop"},
        {"mode": 0, "stop_tokens": [-1]},
    ],
    ids=str,
)
def test_wrong_arguments_are_value_errors(vocab: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        init(vocab, THINK_EXECUTE, **settings)
    assert n_alive() == 0


@pytest.mark.parametrize("settings", [{"on_invalid": "keep"}, {"on_end": "stop"}], ids=str)
def test_wrong_arguments_are_told_before_the_payload(vocab: Any, settings: dict[str, Any]) -> None:
    """A mistake in the program is not to be taken for a payload that cannot be a constraint."""
    with pytest.raises(ValueError, match="must be"):
        llama_sampler_init_token_trie(vocab, payload_json({}), 0, **settings)


@pytest.mark.parametrize("payload", [None, {}, 7, bytearray(THINK, "ascii")], ids=lambda p: type(p).__name__)
def test_a_payload_of_another_type_is_refused(vocab: Any, payload: Any) -> None:
    try:
        made = init(vocab, payload)
    except (TypeError, PayloadError):
        return
    assert made is None


def test_a_stop_token_outside_the_vocabulary_is_refused(vocab: Any) -> None:
    """No array has a slot for it, so that none would count as ordered: every step would cost O(V)."""
    try:
        made = init_leaves(vocab, stop_tokens=[V])
    except ValueError:
        return
    if made is not None:
        llama_cpp.llama_sampler_free(made)
    assert made is None


@pytest.mark.parametrize(("mode", "size"), [(0, 1), ("greedy", 1), (1, 2), ("sampled", 2)])
def test_modes_by_number_and_name(vocab: Any, mode: Any, size: int) -> None:
    with owned(init(vocab, THINK_EXECUTE, mode)) as sampler:
        assert Candidates.of_row(np.zeros(V)).apply(sampler).array.size == size


def test_compiles_without_a_place_for_a_cache(vocab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only package and no home: Numba finds "no locator", and then it compiles uncached, as jit.py does."""
    cfunc = numba.cfunc

    def refuse_cache(signature: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'native_name': no locator available for file")
        return cfunc(signature, **options)

    monkeypatch.setattr(numba, "cfunc", refuse_cache)
    monkeypatch.setattr(sampler_module, "_tables", None)
    with owned(init(vocab, THINK_EXECUTE)) as sampler:
        assert Candidates.of_row(np.zeros(V)).apply(sampler).ids == [100]


# --- threads ------------------------------------------------------------------------------------


def branching_leaves() -> Leaves:
    """7776 leaves of five tokens, six children at every node."""
    paths: list[list[int]] = [[]]
    for depth in range(5):
        paths = [[*path, 300 + 70 * depth + 11 * child] for path in paths for child in range(6)]
    return [(str(i), path) for i, path in enumerate(paths)]


def sample_walks(llm: Any, chain: Any, salt: int, n_walks: int = 400) -> list[int]:
    """2000 constrained tokens: walks of five, each behind its own prompt."""
    out = []
    for i in range(n_walks):
        llm.reset()
        llm.eval([1, 20 + (i + salt) % 700, 21])
        llama_cpp.llama_sampler_reset(chain)
        for _ in range(5):
            out.append(llama_cpp.llama_sampler_sample(chain, llm.ctx, -1))
            llm.eval(out[-1:])
    return out


def test_two_threads_sample_from_one_trie_as_one_does(tiny_model_path: Path, vocab: Any) -> None:
    leaves = branching_leaves()
    paths = {tuple(path) for _, path in leaves}
    llms = [
        llama_cpp.Llama(
            str(tiny_model_path), n_ctx=64, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, verbose=False
        )
        for _ in range(2)
    ]
    first = init_leaves(vocab, leaves)
    # A clone walks the very same arrays.
    samplers = [first, llama_cpp.llama_sampler_clone(first)]
    with contextlib.ExitStack() as stack:
        for llm in llms:
            stack.callback(llm.close)
        chains = [stack.enter_context(owned(chain_of(s, llama_cpp.llama_sampler_init_greedy()))) for s in samplers]
        ref = [sample_walks(llm, chain, salt) for salt, (llm, chain) in enumerate(zip(llms, chains, strict=True))]
        comp: list[list[int]] = [[], []]

        def work(i: int) -> None:
            comp[i] = sample_walks(llms[i], chains[i], i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(tokens) for tokens in comp] == [2000, 2000]
    assert comp == ref
    assert ref[0] != ref[1]
    walks = {tuple(tokens[i : i + 5]) for tokens in comp for i in range(0, 2000, 5)}
    assert walks <= paths
    assert len(walks) > 100


def test_clones_are_made_and_freed_in_threads(vocab: Any) -> None:
    """The count of living records and the shares of each are changed by all of them at once."""
    with owned(init_leaves(vocab)) as sampler:
        clone = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address_of(llama_cpp.llama_sampler_clone))
        free = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address_of(llama_cpp.llama_sampler_free))

        @numba.njit(nogil=True)
        def live(sampler: int, n_clones: int) -> None:
            for _ in range(n_clones):
                free(clone(sampler))

        pointer = ctypes.cast(sampler, ctypes.c_void_p).value
        live(pointer, 1)
        threads = [threading.Thread(target=live, args=(pointer, 300_000)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert n_alive() == 1


def address_of(function: Any) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value
    assert value
    return value


@contextlib.contextmanager
def python_sampler() -> Iterator[Any]:
    """The same greedy job with a Python callback: what the native sampler is to be better than."""
    interface = llama_cpp.llama_sampler_i()

    def apply(_sampler: Any, array: Any) -> None:
        array.contents.selected = 300

    interface.name = llama_cpp.llama_sampler_i_name(lambda _: b"python")
    interface.apply = llama_cpp.llama_sampler_i_apply(apply)
    yield llama_cpp.llama_sampler_init(ctypes.pointer(interface), None)


@pytest.mark.skipif(not hasattr(ctypes.PyDLL(None), "usleep"), reason="no usleep here")
def test_holding_the_gil_does_not_stop_a_loop_that_samples(model: Any, vocab: Any) -> None:
    """This thread sleeps with the GIL held. The loop goes on sampling; with a Python callback it stands still."""
    sample = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)(
        address_of(llama_cpp.llama_sampler_sample)
    )
    reset = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address_of(llama_cpp.llama_sampler_reset))

    @numba.njit(nogil=True)
    def sample_until_told(chain: int, context: int, told: Any, counts: Any) -> None:
        while told[0] == 0:
            token = sample(chain, context, -1)
            reset(chain)
            counts[0] += 1
            counts[1] += token

    model.reset()
    model.eval([1, 20, 21])
    ref = argmax_child(raw_row(model), [300, 310])
    context = ctypes.cast(model.ctx, ctypes.c_void_p).value
    hold_gil = ctypes.PyDLL(None).usleep

    def steps_while_held(chain: Any) -> tuple[int, int]:
        told, counts = np.zeros(1, np.int64), np.zeros(2, np.int64)
        pointer = ctypes.cast(chain, ctypes.c_void_p).value
        thread = threading.Thread(target=sample_until_told, args=(pointer, context, told, counts))
        thread.start()
        while counts[0] == 0:
            time.sleep(0.001)
        before = int(counts[0])
        hold_gil(300_000)
        during = int(counts[0]) - before
        told[0] = 1
        thread.join()
        return during, int(counts[1]) // int(counts[0])

    # Compiled beforehand: a thread that compiles needs the GIL.
    with owned(chain_of(init_leaves(vocab), llama_cpp.llama_sampler_init_greedy())) as chain:
        sample_until_told(
            ctypes.cast(chain, ctypes.c_void_p).value, context, np.ones(1, np.int64), np.zeros(2, np.int64)
        )
        interval = sys.getswitchinterval()
        # Nobody takes the GIL from this thread between its two looks at the counter.
        sys.setswitchinterval(30)
        try:
            n_native, token = steps_while_held(chain)
            with python_sampler() as python, owned(chain_of(python)) as other:
                n_python, _ = steps_while_held(other)
        finally:
            sys.setswitchinterval(interval)
    assert token == ref
    assert n_native > 500
    assert n_python <= 1


# --- processes ----------------------------------------------------------------------------------

_PROCESS = """
import ctypes, gc, os, sys
import numpy as np
import llama_cpp
from trie_sampler import llama_sampler_init_token_trie, token_trie_handle
from trie_sampler.llama.sampler import n_alive

llm = llama_cpp.Llama({model!r}, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
vocab = llama_cpp.llama_model_get_vocab(llm.model)
text = "REPLY"
tokens = llm.tokenize(text.encode(), add_bos=False)
assert len(tokens) < 60
payload = __import__("json").dumps({{
    "modelId": "m", "descriptors": [{{"path": "a", "leaves": [{{"name": text, "tokens": tokens}}]}}]}})

def new_chain():
    sampler = llama_sampler_init_token_trie(vocab, payload, 0, on_end="mass")
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(chain, sampler)
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
    return sampler, chain

def walk(chain):
    out = []
    records = np.zeros((768, 3), np.int32)
    for _ in range(len(tokens) + 1):
        records[:] = 0
        records[:, 0] = np.arange(768)
        array = llama_cpp.llama_token_data_array(
            records.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)), 768, -1, False)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        out.append(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(chain, out[-1])
    return out

sampler, chain = new_chain()
handle = token_trie_handle(sampler)
llm.eval([1, 20, 21])
assert llama_cpp.llama_sampler_sample(chain, llm.ctx, -1) == tokens[0]
llama_cpp.llama_sampler_reset(chain)
assert walk(chain) == [*tokens, 2]
assert handle.is_finished
llama_cpp.llama_sampler_reset(chain)
"""
_FORK = """
child = os.fork()
if child == 0:
    assert walk(chain) == [*tokens, 2] and handle.is_finished
    _, other = new_chain()
    clone = llama_cpp.llama_sampler_clone(chain)
    llama_cpp.llama_sampler_reset(clone)
    assert walk(clone) == walk(other)
    for one in (chain, clone, other):
        llama_cpp.llama_sampler_free(one)
    assert handle.is_freed
    del handle
    assert n_alive() == 0
    print("child", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not handle.is_freed and handle.node == 0
assert walk(chain) == [*tokens, 2]
llama_cpp.llama_sampler_free(chain)
"""


def run_process(tmp_path: Path, code: str) -> str:
    file = tmp_path / "process.py"
    file.write_text(code)
    root = Path(sampler_module.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    # Warnings are not what this is about: the host leaves files open, and newer Pythons warn at any fork.
    command = [sys.executable, "-W", "ignore", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_after_use(tmp_path: Path, tiny_model_path: Path) -> None:
    assert run_process(tmp_path, _PROCESS.format(model=str(tiny_model_path)) + _FORK) == "child\n"


@pytest.mark.parametrize("kept", ["everything", "the chain", "the handle", "a freed chain's handle"])
def test_exit_with_live_chains_is_clean(tmp_path: Path, tiny_model_path: Path, kept: str) -> None:
    ends = {
        "everything": "",
        "the chain": "del handle, llm",
        "the handle": "del chain, sampler, llm",
        "a freed chain's handle": "llama_cpp.llama_sampler_free(chain)",
    }
    code = _PROCESS.format(model=str(tiny_model_path)) + ends[kept] + "\nprint('end')\n"
    assert run_process(tmp_path, code) == "end\n"


# --- the probe: what a chain's builder puts at its head -----------------------------------------


def probed_chain(leaves: Leaves, *between: Any) -> Any:
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end="release")
    sampler, probe = new_sampler(cursor, keeps_options=False, with_probe=True)
    return chain_of(probe, *between, sampler)


def test_a_probe_saves_the_best_valid_token_from_filters(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(9)
    with owned(probed_chain(LEAVES, llama_cpp.llama_sampler_init_top_k(1))) as chain:
        assert n_alive() == 1
        for copy in (chain, llama_cpp.llama_sampler_clone(chain)):
            handle = token_trie_handle(llama_cpp.llama_sampler_chain_get(copy, 2))
            picked = set()
            for _ in range(20):
                row = rng.normal(size=V).astype(np.float32)
                row[5] = 50  # all that top-k keeps
                candidates = Candidates.of_row(row).apply(copy)
                assert candidates.ids == [argmax_child(row, [300, 310])]
                picked.update(candidates.ids)
            assert picked == {300, 310}
            assert handle.status == layout.NO_CANDIDATE
            assert handle.is_active
            assert "put back" in caplog.text
        # The pair of a clone has one record of its own.
        assert n_alive() == 2
        llama_cpp.llama_sampler_accept(copy, 310)
        assert Candidates.of_row(row).apply(copy).ids == [320]
        assert Candidates.of_row(row).apply(chain).ids == [argmax_child(row, [300, 310])]
        del handle
        llama_cpp.llama_sampler_free(copy)
        assert n_alive() == 1
        with pytest.raises(TypeError, match="not a token-trie sampler"):
            token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, 0))
        assert llama_cpp.llama_sampler_name(llama_cpp.llama_sampler_chain_get(chain, 0)) == b"token-trie"


# --- facts of the host --------------------------------------------------------------------------


def test_fact_sample_accepts_by_itself(model: Any, vocab: Any) -> None:
    """L8: a second accept walks twice. With the leaves [5,5] and [5,6] it lands on a wrong leaf without any error."""
    model.reset()
    model.eval([1, 20, 21])
    leaves: Leaves = [("55", [305, 305]), ("56", [305, 306])]
    with owned(chain_of(init_leaves(vocab, leaves))) as chain:
        handle = token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, 0))
        token = llama_cpp.llama_sampler_sample(chain, model.ctx, -1)
        assert (token, handle.position_in_span, handle.counters["accepted"]) == (305, 1, 1)
        llama_cpp.llama_sampler_accept(chain, token)
        assert (handle.leaf_name, handle.status) == ("55", layout.OK)


def test_fact_sample_fills_the_array_in_the_order_of_ids(model: Any, vocab: Any) -> None:
    """L5, L9: V candidates enter, slot t with id t: the fast path is the one that is taken."""
    model.reset()
    model.eval([1, 20, 21])
    with owned(chain_of(init_leaves(vocab))) as chain:
        handle = token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, 0))
        llama_cpp.llama_sampler_sample(chain, model.ctx, -1)
        assert handle.counters == {"applied": 1, "candidates": V, "valid": 2, "accepted": 1}


def test_fact_all_our_samplers_share_one_table(vocab: Any) -> None:
    """L2: llama_sampler_copy asserts it."""
    with owned(init_leaves(vocab)) as one, owned(init_leaves(vocab, mode=1, on_invalid="mask")) as two:
        tables = {ctypes.addressof(sampler.contents.iface.contents) for sampler in (one, two)}
        assert len(tables) == 1
        # L1, L3: no slot of ours is empty, every other is.
        filled = {name for name, _ in llama_cpp.llama_sampler_i._fields_ if getattr(one.contents.iface.contents, name)}
        assert filled == {"name", "accept", "apply", "reset", "clone", "free"}
