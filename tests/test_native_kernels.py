"""The native sampler's callbacks without llama.cpp: against the oracle, and over a host made of NumPy and ctypes.

A record lies in memory that the host hands out and watches, a ``llama_sampler`` is two words, a token data array four.
Compiled, the C entry points are called; under NUMBA_DISABLE_JIT=1 the same functions run as plain Python.

The trie of the tables, prefixes in brackets; end tokens 1 and 8:

    [] ─┬─ 3 [3] "D"
        └─ 9 [9] "A" ─┬─ 4 [9 4] "B"                     at [9] a leaf ends and others go on
                      └─ 6 [9 6] ─── 7 [9 6 7] "C"
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import STOP, DictTrie, argmax_child, greedy_step, stop_logit, walk
from strategies import leaf_sets, logits_rows

from trie_sampler import kernels, layout
from trie_sampler.cursor import TrieCursor
from trie_sampler.jit import c_callback
from trie_sampler.trie import TokenTrie

Leaves = list[tuple[str, list[int]]]

NAN, INF = math.nan, math.inf
V = 40
ENDS = [1, 8]
LEAVES: Leaves = [("A", [9]), ("B", [9, 4]), ("C", [9, 6, 7]), ("D", [3])]
ON_ENDS = ("mass", "eog", "release")
DROP, MASK = "drop", "mask"
INTERFACE, PROBE_INTERFACE = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4320

# Few examples: each is a trie, a walk and an array; the profile "slow" draws twenty times as many.
few = settings(max_examples=max(20, settings.default.max_examples // 3))


# --- the host -----------------------------------------------------------------------------------

_SIGNATURES = {
    "name": "int64(int64)",
    "accept": "void(int64, int32)",
    "apply": "void(int64, int64)",
    "reset": "void(int64)",
    "clone": "int64(int64)",
    "free": "void(int64)",
}
_WORD_OF_1 = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
_WORD_OF_2 = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


# The compiled code lives as long as these.
_compiled: list[Any] = []


@functools.cache
def entry(name: str) -> Callable[..., Any]:
    """A callback of ``kernels`` as the host calls it: its C entry point, or itself where nothing is compiled."""
    function = getattr(kernels, name)
    if numba.config.DISABLE_JIT:
        return function
    _compiled.append(c_callback(_SIGNATURES[name.split("_")[1]], function))
    return _compiled[-1].ctypes


def address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


class Host:
    """malloc, free and ``llama_sampler_init``. Fresh memory is full of rubbish, freed memory of other rubbish.

    An address that is freed twice, or was never handed out, is a KeyError inside a callback: pytest fails for it.
    """

    def __init__(self) -> None:
        self.live: dict[int, np.ndarray] = {}
        self.freed: list[np.ndarray] = []
        self.wrappers: dict[int, np.ndarray] = {}
        self.alive = np.zeros(1, np.int64)
        self.has_memory = True
        self._kept = [_WORD_OF_1(self._malloc), _WORD_OF_1(self._free), _WORD_OF_2(self._init)]
        self.malloc_address, self.free_address, self.init_address = map(address_of, self._kept)

    def _malloc(self, size: int) -> int:
        if not self.has_memory:
            return 0
        block = np.full(size, 0x5A, np.uint8)
        self.live[block.ctypes.data] = block
        return block.ctypes.data

    def _free(self, address: int) -> int:
        block = self.live.pop(address)
        block[:] = 0xFF
        self.freed.append(block)
        return 0

    def _init(self, interface: int, address: int) -> int:
        wrapper = np.array([interface, address], np.int64)
        self.wrappers[wrapper.ctypes.data] = wrapper
        return wrapper.ctypes.data


class Sampler:
    """A ``llama_sampler`` of the host: an interface, and a record's address."""

    def __init__(self, host: Host, wrapper: int) -> None:
        self.host = host
        self.wrapper = wrapper
        self.interface, self.address = host.wrappers[wrapper].tolist()
        self.kind = "probe" if self.interface == PROBE_INTERFACE else "native"

    @property
    def record(self) -> Any:
        return self.host.live[self.address].view(layout.NATIVE)[0]

    @property
    def counters(self) -> list[int]:
        return [int(self.record[name]) for name in ("n_applied", "n_candidates", "n_valid")]

    @property
    def place(self) -> list[int]:
        names = ("root", "node", "state", "position_in_span", "n_accepted")
        return [int(self.record[name]) for name in names]

    def name(self) -> int:
        return int(entry("native_name")(self.wrapper))

    def accept(self, *tokens: int) -> None:
        for token in tokens:
            entry("native_accept")(self.wrapper, token)

    def reset(self) -> None:
        entry("native_reset")(self.wrapper)

    def apply(self, candidates: Candidates) -> Candidates:
        entry(f"{self.kind}_apply")(self.wrapper, candidates.array.ctypes.data)
        candidates.check()
        return candidates

    def clone(self) -> Sampler:
        return Sampler(self.host, entry(f"{self.kind}_clone")(self.wrapper))

    def free(self) -> None:
        entry(f"{self.kind}_free")(self.wrapper)


@contextlib.contextmanager
def pair_of(
    cursor: TrieCursor, *, on_invalid: str = DROP, keeps_options: int = 0, with_probe: bool = True, **fields: Any
) -> Iterator[tuple[Sampler, Sampler]]:
    """A sampler and the probe that shares its record; freed at the end, and then nothing is left."""
    host = Host()
    name = ctypes.create_string_buffer(b"of the test")
    memory = np.zeros(1, layout.NATIVE)
    for field in layout.CURSOR.names or ():
        memory[field] = cursor._record[field]
    settings_of_record = {
        "references": 1 + with_probe,
        "alive_address": host.alive.ctypes.data,
        "interface_address": INTERFACE,
        "probe_interface_address": PROBE_INTERFACE,
        "name_address": ctypes.addressof(name),
        "init_address": host.init_address,
        "malloc_address": host.malloc_address,
        "free_address": host.free_address,
        "on_invalid": layout.ON_INVALID[on_invalid],
        "keeps_options": keeps_options,
        "probed": layout.NO_TOKEN,
        **fields,
    }
    for field, value in settings_of_record.items():
        memory[field] = value
    address = host._malloc(layout.NATIVE.itemsize)
    host.live[address][:] = memory.view(np.uint8)
    host.alive[0] = 1
    sampler = Sampler(host, host._init(INTERFACE, address))
    probe = Sampler(host, host._init(PROBE_INTERFACE, address))
    yield sampler, probe
    if with_probe:
        probe.free()
    sampler.free()
    assert (host.live, host.alive.tolist()) == ({}, [0])


@contextlib.contextmanager
def sampler_of(
    leaves: Leaves = LEAVES,
    prefix: Sequence[int] = (),
    *,
    on_end: str = "mass",
    ends: Sequence[int] = ENDS,
    **settings_of_record: Any,
) -> Iterator[Sampler]:
    """A sampler alone, somewhere in a trie."""
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end=on_end, stop_tokens=ends)
    with pair_of(cursor, with_probe=False, **settings_of_record) as (sampler, _):
        sampler.accept(*prefix)
        yield sampler


# --- arrays of candidates -----------------------------------------------------------------------

_RECORD = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_GUARD = np.array([(-7, 7.5, 7.25)], _RECORD)[0]
_N_GUARDS = 3
# llama.cpp's bool is one byte; the seven behind it are nobody's.
_PADDING = 0x5A5A_5A5A_5A5A_5A00
_SELECTED = 77


class Candidates:
    """A ``llama_token_data_array``, with records behind it that nobody may touch."""

    def __init__(
        self, ids: Sequence[int] | np.ndarray, logits: Sequence[float] | np.ndarray, *, is_sorted: bool
    ) -> None:
        self.n = len(ids)
        self.memory = np.full(self.n + _N_GUARDS, _GUARD, _RECORD)
        self.memory["id"][: self.n] = ids
        self.memory["logit"][: self.n] = logits
        self.array = np.array([self.memory.ctypes.data, self.n, _SELECTED, _PADDING + is_sorted], np.int64)

    @classmethod
    def of_row(
        cls, row: Sequence[float] | np.ndarray, ids: Sequence[int] | None = None, *, is_sorted: bool = True
    ) -> Candidates:
        """Slot t holds id t, or the given ids in their order."""
        row = np.asarray(row, np.float32)
        ids = list(range(len(row))) if ids is None else ids
        return cls(ids, row[ids], is_sorted=is_sorted)

    def check(self) -> None:
        assert (self.memory[self.n :] == _GUARD).all(), "written past the end"
        assert self.array[0] == self.memory.ctypes.data
        assert 0 <= self.array[1] <= self.n
        assert self.array[3] - _PADDING in (0, 1), "more than the flag was written"

    def bytes(self) -> bytes:
        return self.memory.tobytes() + self.array.tobytes()

    @property
    def ids(self) -> list[int]:
        return self.memory["id"][: self.array[1]].tolist()

    @property
    def logits(self) -> list[float]:
        return self.memory["logit"][: self.array[1]].tolist()

    @property
    def selected(self) -> int:
        return int(self.array[2])

    @property
    def is_sorted(self) -> bool:
        return bool(self.array[3] - _PADDING)


ARRANGEMENTS = ("ordered", "shuffled", "sorted", "top", "some", "swapped")


def arrange(row: np.ndarray, how: str, seed: int) -> Candidates:
    """The candidates as other samplers leave them: in any order, sorted, or fewer."""
    rng = np.random.default_rng(seed)
    n = len(row)
    n_kept = int(rng.integers(1, n + 1))
    descending = np.argsort(-np.nan_to_num(row, nan=-INF, posinf=INF, neginf=-INF), kind="stable")
    swapped = np.arange(n)
    i, j = rng.permutation(n)[:2]
    swapped[[i, j]] = j, i
    ids = {
        "ordered": np.arange(n),
        "shuffled": rng.permutation(n),
        "sorted": descending,
        "top": descending[:n_kept],
        "some": rng.permutation(n)[:n_kept],
        "swapped": swapped,
    }[how]
    return Candidates(ids, row[ids], is_sorted=how in ("sorted", "top"))


# --- what is left, against the oracle -----------------------------------------------------------


class Reference:
    """What an array of the ids ``present`` must leave at a node. Absent ids and NaN count as -inf.

    Under ``mass``, where a leaf ends and others go on, the stop is the best end token that is no child, with the logit
    of stopping; it is an option wherever any token that is no child has a finite logit, in the array or not.
    """

    def __init__(
        self, row: np.ndarray, present: list[int], children: list[int], at_leaf: bool, on_end: str, ends: list[int]
    ) -> None:
        seen = np.full(V, -INF)
        for token in present:
            seen[token] = -INF if np.isnan(row[token]) else row[token]
        weighs_mass = at_leaf and bool(children) and on_end == "mass"
        ends_here = ends if at_leaf and not weighs_mass else []
        carriers = sorted(set(ends) - set(children)) if weighs_mass else []
        self.stop = stop_logit(seen, children) if weighs_mass else -INF
        self.carrier = argmax_child(seen, carriers) if carriers and self.stop > -INF else None
        self.valid = sorted({*children, *ends_here})
        self.options = {token: float(seen[token]) for token in self.valid if token in present}
        if self.carrier is not None:
            self.options[self.carrier] = float(np.float32(self.stop))
        self.is_fault = not any(logit > -INF for logit in self.options.values())
        self.status = layout.OK
        if self.is_fault:
            self.status = layout.ALL_INVALID if self.options else layout.NO_CANDIDATE
        # An end token at -inf beside no child: whether that is a fault of the logits or of the filters is no question.
        self.is_doubtful = not self.options and bool(set(carriers).intersection(present))
        self.pick = self._pick(seen, children, at_leaf, on_end, ends_here)

    def _pick(
        self, seen: np.ndarray, children: list[int], at_leaf: bool, on_end: str, ends_here: list[int]
    ) -> int | None:
        """The pick, None where children and stop are too near for another order of summation."""
        if self.is_fault:
            return self.valid[0]
        if self.carrier is None:
            pick = argmax_child(seen, self.valid)
            if at_leaf and children and on_end != "mass":
                step = greedy_step(seen, children, True, on_end, ends_here)
                assert pick in ends_here if step == STOP else pick == step
            return pick
        best = float(seen[children].max())
        if np.isfinite(best) and abs(self.stop - best) <= 1e-6 * max(1.0, abs(self.stop), abs(best)):
            return None
        step = greedy_step(seen, children, True, "mass")
        return self.carrier if step == STOP else step


def approx(logits: list[float]) -> Any:
    return pytest.approx(logits, rel=1e-6, abs=1e-6)


def check_masked(candidates: Candidates, ids: list[int], ref: Reference) -> None:
    assert len(candidates.ids) == len(ids)
    assert candidates.selected == _SELECTED
    replaced = [old for old, new in zip(ids, candidates.ids, strict=True) if old != new]
    if ref.carrier in (None, *ids):
        assert replaced == []
    else:
        # The stop had no slot: it takes that of a token that is no option.
        assert len(replaced) == 1
        assert replaced[0] not in ref.options
        assert ref.carrier in candidates.ids
    assert candidates.logits == approx([ref.options.get(token, -INF) for token in candidates.ids])


@pytest.mark.parametrize("on_end", ON_ENDS)
@pytest.mark.parametrize("on_invalid", [DROP, MASK])
@pytest.mark.parametrize("keeps_options", [0, 1])
@few
@given(
    leaves=leaf_sets(max_token=30),
    row=logits_rows(V, posinf=True),
    how=st.sampled_from(ARRANGEMENTS),
    ends=st.sampled_from([[0, 35], [5], [1, 15, 31]]),
    data=st.data(),
)
def test_what_is_left_equals_the_oracle(
    leaves: Leaves,
    row: np.ndarray,
    how: str,
    ends: list[int],
    on_end: str,
    on_invalid: str,
    keeps_options: int,
    data: st.DataObject,
) -> None:
    trie = DictTrie(leaves)
    # Nodes where a leaf ends and others go on are the rare ones.
    both = [prefix for prefix in trie.prefixes() if trie.is_terminal(prefix) and trie.children(prefix)]
    prefix = data.draw(st.sampled_from(both if both and data.draw(st.booleans()) else trie.prefixes()))
    children, terminal = trie.children(prefix), trie.is_terminal(prefix)
    closers = sorted(set(ends) - set(children))
    is_over = terminal and bool(closers) and data.draw(st.booleans())
    candidates = arrange(row, how, data.draw(st.integers(0, 99)))
    before, ids = candidates.bytes(), candidates.ids
    ref = Reference(row, ids, [] if is_over else children, terminal, on_end, ends)
    with sampler_of(
        leaves, prefix, on_end=on_end, ends=ends, on_invalid=on_invalid, keeps_options=keeps_options
    ) as sampler:
        if is_over:
            sampler.accept(closers[-1])
        if on_end == "release" and (is_over or not children):
            assert sampler.record["state"] == layout.RELEASED
            assert sampler.apply(candidates).bytes() == before
            assert sampler.counters == [0, 0, 0]
            return
        widest = max(*ends, *(token for _, tokens in leaves for token in tokens))
        is_ordered = len(ids) > widest and all(ids[token] == token for token in (*children, *ends))
        assert kernels.is_ordered(sampler.address, int(candidates.array[0]), len(ids)) == is_ordered
        sampler.apply(candidates)
        record = sampler.record
        status = int(record["trouble"])
        assert status in ((layout.ALL_INVALID, layout.NO_CANDIDATE) if ref.is_doubtful else (ref.status,))
        assert record["status"] == status
        assert sampler.counters[:2] == [1, len(ids)]
        if terminal and children and not is_over and on_end == "mass":
            assert float(record["stop_logit"]) == approx(ref.stop)
        n_valid = sampler.counters[2]
    assert not candidates.is_sorted
    if ref.is_fault:
        assert (candidates.ids, candidates.logits) == ([ref.pick], [0.0])
        assert candidates.selected == (-1 if keeps_options else 0)
        assert n_valid == (0 if on_invalid == MASK else len(ref.options))
    elif on_invalid == MASK:
        check_masked(candidates, ids, ref)
        assert n_valid == sum(logit > -INF for logit in ref.options.values())
    elif keeps_options:
        left = [token for token in ids if token in ref.options and token != ref.carrier]
        if is_ordered:
            left.sort()
        assert candidates.ids == left + ([] if ref.carrier is None else [ref.carrier])
        assert candidates.logits == approx([ref.options[token] for token in candidates.ids])
        assert (candidates.selected, n_valid) == (-1, len(ref.options))
    else:
        assert (len(candidates.ids), candidates.selected, n_valid) == (1, 0, len(ref.options))
        assert candidates.logits == approx([max(ref.options.values())])
        if ref.pick is not None:
            assert candidates.ids == [ref.pick]


@pytest.mark.parametrize("on_end", ON_ENDS)
@few
@given(leaves=leaf_sets(max_token=30), seed=st.integers(0, 9999), how=st.sampled_from(["ordered", "shuffled"]))
def test_a_walk_of_picks_equals_the_oracles(leaves: Leaves, seed: int, how: str, on_end: str) -> None:
    ends = [0, 35]
    leaves = [(name, [token + 1 for token in tokens]) for name, tokens in leaves]

    def row_after(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng([seed, *prefix]).normal(size=V).astype(np.float32)
        row[[0, 35, 4, 20]] += 2
        row[36:] -= 3 * (seed % 3)  # more or less of a mass to stop
        return row

    trie = DictTrie(leaves)
    ref_tokens, ref_name = walk(trie, row_after, on_end, ends)
    tokens: tuple[int, ...] = ()
    own = TokenTrie.from_sequences(leaves)
    with pair_of(TrieCursor(own, on_end=on_end, stop_tokens=ends)) as (sampler, _):
        while sampler.record["state"] == layout.ARMED:
            (picked,) = sampler.apply(arrange(row_after(tokens), how, seed)).ids
            sampler.accept(picked)
            if picked not in ends:
                tokens = (*tokens, picked)
        assert tokens == ref_tokens
        assert own.leaf_name(sampler.place[1]) == ref_name
        assert sampler.record["trouble"] == layout.OK
        assert sampler.record["state"] == (layout.RELEASED if on_end == "release" else layout.FINISHED)


# --- tables -------------------------------------------------------------------------------------

ZEROS = [0.0] * 12
# One foreign token has the children's own logit: P(stop) = p(child).
TIE_AT_0 = [-INF, -INF, -INF, -INF, 2.0, -INF, 2.0, 2.0, *[-INF] * 4]
TIE_AT_8 = [-INF, -INF, -INF, -INF, 2.0, -INF, 2.0, -INF, 2.0, *[-INF] * 3]
BELOW = [-INF, -INF, -INF, -INF, 2.0, -INF, 2.0, 1.5, *[-INF] * 4]

#    row                          on_end     prefix   ref
TIES = [
    (ZEROS,                       "mass",    [],      3),
    (ZEROS,                       "mass",    [9],     1),
    (ZEROS,                       "eog",     [9],     1),
    (ZEROS,                       "release", [9],     1),
    ([-1.0, -1.0, *[0.0] * 10],   "eog",     [9],     4),
    (TIE_AT_0,                    "mass",    [9],     1),
    (TIE_AT_8,                    "mass",    [9],     8),
    (BELOW,                       "mass",    [9],     4),
]  # fmt: skip


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(("row", "on_end", "prefix", "ref"), TIES)
def test_among_tokens_the_lowest_wins_and_a_stop_wins_against_children(
    row: list[float], on_end: str, prefix: list[int], ref: int, is_backward: bool
) -> None:
    with sampler_of(prefix=prefix, on_end=on_end) as sampler:
        ids = list(range(12))[:: -1 if is_backward else 1]
        assert sampler.apply(Candidates.of_row(row, ids)).ids == [ref]


# Logits are the ids themselves.
#    prefix        on_end     options
PLACES = [
    ([],          "mass",    [3, 9]),
    ([9, 6],      "mass",    [7]),
    ([9],         "eog",     [1, 4, 6, 8]),
    ([9],         "release", [1, 4, 6, 8]),
    ([9, 4],      "mass",    [1, 8]),
    ([9, 4],      "eog",     [1, 8]),
    ([9, 1],      "mass",    [1, 8]),
    ([9, 8],      "eog",     [1, 8]),
    ([3, 1],      "mass",    [1, 8]),
]  # fmt: skip


@pytest.mark.parametrize(("prefix", "on_end", "ref"), PLACES)
@pytest.mark.parametrize("ids", [list(range(12)), list(range(11, -1, -1))])
def test_options_of_every_kind_of_place(prefix: list[int], on_end: str, ref: list[int], ids: list[int]) -> None:
    row = np.arange(12, dtype=np.float32)
    with sampler_of(prefix=prefix, on_end=on_end, keeps_options=1) as sampler:
        comp = sampler.apply(Candidates.of_row(row, ids))
        assert (sorted(comp.ids), comp.logits) == (ref, comp.ids)
        sampler.record["keeps_options"] = 0
        comp = sampler.apply(Candidates.of_row(row, ids))
        assert (comp.ids, comp.logits, comp.selected) == (ref[-1:], ref[-1:], 0)
        sampler.record["on_invalid"] = layout.MASK
        comp = sampler.apply(Candidates.of_row(row, ids))
        assert comp.ids == ids
        assert comp.logits == [token if token in ref else -INF for token in ids]
        assert sampler.counters == [3, 36, 3 * len(ref)]


FREE = [
    ("release", [3]),
    ("release", [9, 8]),
    ("release", [9, 6, 7]),
    ("release", [5]),
]


@pytest.mark.parametrize("on_invalid", [DROP, MASK])
@pytest.mark.parametrize("keeps_options", [0, 1])
@pytest.mark.parametrize(("on_end", "prefix"), FREE)
def test_released_nothing_is_touched(on_end: str, prefix: list[int], keeps_options: int, on_invalid: str) -> None:
    with sampler_of(prefix=prefix, on_end=on_end, keeps_options=keeps_options, on_invalid=on_invalid) as sampler:
        candidates = Candidates.of_row([NAN, 1.0, -INF, *ZEROS])
        before = candidates.bytes()
        assert sampler.apply(candidates).bytes() == before
        assert sampler.counters == [0, 0, 0]


@pytest.mark.parametrize("on_invalid", [DROP, MASK])
@pytest.mark.parametrize("prefix", [[], [9], [9, 8]])
def test_an_empty_array_is_untouched(prefix: list[int], on_invalid: str) -> None:
    with sampler_of(prefix=prefix, on_invalid=on_invalid) as sampler:
        candidates = Candidates([], [], is_sorted=True)
        before = candidates.bytes()
        assert sampler.apply(candidates).bytes() == before
        assert (sampler.counters, sampler.record["trouble"]) == ([0, 0, 0], layout.OK)


#    prefix     on_end    logits that are not 0                   left: token -> logit
ODD_LOGITS = [
    # NaN is -inf.
    ([],       "mass",   {3: NAN},                               {3: -INF, 9: 0.0}),
    ([9],      "eog",    {6: NAN, 8: -INF, 1: 5.0},              {1: 5.0, 4: 0.0, 6: -INF, 8: -INF}),
    ([9],      "mass",   {6: NAN, 0: NAN, 8: 1.0},               {4: 0.0, 6: -INF, 8: math.log(math.e + 8)}),
    # One infinite token is all the mass, two are no more.
    ([9],      "mass",   {0: INF, 6: 2.0},                       {1: INF, 4: 0.0, 6: 2.0}),
    ([9],      "mass",   {0: INF, 8: INF, 6: INF},               {4: 0.0, 6: INF, 8: INF}),
    ([9],      "eog",    {8: INF},                               {1: 0.0, 4: 0.0, 6: 0.0, 8: INF}),
]  # fmt: skip


@pytest.mark.parametrize("ids", [list(range(12)), list(range(11, -1, -1))])
@pytest.mark.parametrize("on_invalid", [DROP, MASK])
@pytest.mark.parametrize(("prefix", "on_end", "logits", "ref"), ODD_LOGITS)
def test_faulty_and_infinite_logits(
    prefix: list[int], on_end: str, logits: dict[int, float], ref: dict[int, float], on_invalid: str, ids: list[int]
) -> None:
    row = np.zeros(12, np.float32)
    row[list(logits)] = list(logits.values())
    with sampler_of(prefix=prefix, on_end=on_end, on_invalid=on_invalid, keeps_options=1) as sampler:
        comp = sampler.apply(Candidates.of_row(row, ids))
        left = dict(zip(comp.ids, comp.logits, strict=True))
        assert [left.pop(token) for token in ref] == approx(list(ref.values()))
        assert list(left.values()) == ([-INF] * (12 - len(ref)) if on_invalid == MASK else [])
        assert sampler.record["trouble"] == layout.OK


@pytest.mark.parametrize("ids", [list(range(12)), list(range(11, -1, -1)), [6, 3, 4], [6, 4]])
@pytest.mark.parametrize("on_invalid", [DROP, MASK])
def test_without_foreign_mass_there_is_no_stop(ids: list[int], on_invalid: str) -> None:
    row = np.full(12, -INF, np.float32)
    row[[4, 6]] = 1.0, 2.0
    with sampler_of(prefix=[9], on_invalid=on_invalid, keeps_options=1) as sampler:
        comp = sampler.apply(Candidates.of_row(row, ids))
        kept = ids if on_invalid == MASK else [token for token in ids if token in (4, 6)]
        assert (comp.ids, comp.logits) == (kept, row[kept].tolist())
        assert (float(sampler.record["stop_logit"]), sampler.counters[2]) == (-INF, 2)


@pytest.mark.parametrize("ids", [list(range(12)), list(range(11, -1, -1))])
@pytest.mark.parametrize("ends", [[4, 8], [0, 4, 6], [6]])
def test_an_end_token_that_is_a_child_too_is_one_option(ids: list[int], ends: list[int]) -> None:
    row = np.arange(12, dtype=np.float32)
    with sampler_of(prefix=[9], on_end="eog", ends=ends, keeps_options=1) as sampler:
        comp = sampler.apply(Candidates.of_row(row, ids))
        assert (sorted(comp.ids), comp.logits) == (sorted({4, 6, *ends}), comp.ids)


# At [] the options are 3 and 9, at [9] 4 and 6, and the end tokens 1 and 8 under "eog"; ended, the end tokens.
#    prefix     on_end    ids                  logit    kept    status
FAULTS = [
    ([],       "mass",   range(12),            NAN,     3,      layout.ALL_INVALID),
    ([],       "mass",   range(12),            -INF,    3,      layout.ALL_INVALID),
    ([],       "mass",   [9, 5, 3],            NAN,     3,      layout.ALL_INVALID),
    # A valid token that is not there is put back all the same: the lowest of all.
    ([],       "mass",   [9, 5],               -INF,    3,      layout.ALL_INVALID),
    ([],       "mass",   [11, 4, 7],           2.0,     3,      layout.NO_CANDIDATE),
    ([9],      "mass",   range(12),            NAN,     4,      layout.ALL_INVALID),
    ([9],      "eog",    range(12),            NAN,     1,      layout.ALL_INVALID),
    ([9],      "eog",    [0, 2, 3],            2.0,     1,      layout.NO_CANDIDATE),
    ([9, 8],   "mass",   range(12),            -INF,    1,      layout.ALL_INVALID),
    ([9, 8],   "mass",   [4, 6],               2.0,     1,      layout.NO_CANDIDATE),
    ([3],      "eog",    [11],                 2.0,     1,      layout.NO_CANDIDATE),
]  # fmt: skip


@pytest.mark.parametrize("on_invalid", [DROP, MASK])
@pytest.mark.parametrize("keeps_options", [0, 1])
@pytest.mark.parametrize(("prefix", "on_end", "ids", "logit", "kept", "status"), FAULTS)
def test_one_valid_token_is_put_back_where_none_is_left(
    prefix: list[int],
    on_end: str,
    ids: Sequence[int],
    logit: float,
    kept: int,
    status: int,
    keeps_options: int,
    on_invalid: str,
) -> None:
    with sampler_of(prefix=prefix, on_end=on_end, keeps_options=keeps_options, on_invalid=on_invalid) as sampler:
        comp = sampler.apply(Candidates(ids, [logit] * len(ids), is_sorted=True))
        assert (comp.ids, comp.logits, comp.is_sorted) == ([kept], [0.0], False)
        assert comp.selected == (-1 if keeps_options else 0)
        assert (sampler.record["status"], sampler.record["trouble"]) == (status, status)


@pytest.mark.parametrize("on_invalid", [DROP, MASK])
def test_a_node_that_leads_nowhere_gets_an_end_token(on_invalid: str) -> None:
    """Of a damaged trie: no child, no leaf. Without end tokens nothing can be put back, and nothing is invented."""
    arrays = [np.array(array, np.int32) for array in ([-1], [1, 1], [-1])]
    trie = TokenTrie._from_arrays(*arrays, 2, None, {"": 0}, 12, None, np.empty((2, 0), np.int32))
    for ends, ref, status in ((ENDS, ([1], [0.0]), layout.NO_CANDIDATE), ([], None, layout.OK)):
        with pair_of(TrieCursor(trie, stop_tokens=ends), on_invalid=on_invalid) as (sampler, _):
            comp = sampler.apply(Candidates.of_row(ZEROS))
            masked = (list(range(12)), [-INF] * 12)
            assert (comp.ids, comp.logits) == (ref or (masked if on_invalid == MASK else ([], [])))
            assert sampler.record["trouble"] == status


def test_a_stop_is_never_spelled_by_a_child() -> None:
    """Both end tokens go on here: stopping has no token, however much mass it has."""
    leaves: Leaves = [("A", [9]), ("B", [9, 1]), ("C", [9, 8, 2])]
    row = np.full(12, 9.0, np.float32)
    row[[1, 8]] = 0.0, 0.5
    with sampler_of(leaves, [9], keeps_options=1) as sampler:
        comp = sampler.apply(Candidates.of_row(row))
        assert (comp.ids, comp.logits) == ([1, 8], [0.0, 0.5])
        sampler.record["on_invalid"] = layout.MASK
        comp = sampler.apply(Candidates.of_row(row, [2, 8, 1]))
        assert (comp.ids, comp.logits) == ([2, 8, 1], [-INF, 0.5, 0.0])
        assert float(sampler.record["stop_logit"]) == 9.0
    with sampler_of(leaves, [9], ends=[1, 7]) as sampler:
        assert sampler.apply(Candidates.of_row(row)).ids == [7]


@pytest.mark.parametrize("ids", [list(range(12)), [11, 3, 8, 6, 4, 1], [6, 4, 3, 11]])
@pytest.mark.parametrize("on_invalid", [DROP, MASK])
def test_the_stop_has_the_mass_of_every_foreign_token(ids: list[int], on_invalid: str) -> None:
    """Its token: the better of 1 and 8, the lower where both were filtered away."""
    row = np.full(12, -INF, np.float32)
    row[[4, 6, 3, 11, 1, 8]] = 1.0, 2.0, 0.5, 0.25, -4.0, -3.0
    foreign = row[[token for token in ids if token not in (4, 6)]].astype(np.float64)
    stop = math.log(np.exp(foreign).sum())
    ref = {4: 1.0, 6: 2.0, (8 if 8 in ids else 1): stop}
    with sampler_of(prefix=[9], keeps_options=1, on_invalid=on_invalid) as sampler:
        comp = sampler.apply(Candidates.of_row(row, ids))
        left = {token: logit for token, logit in zip(comp.ids, comp.logits, strict=True) if logit > -INF}
        assert left == pytest.approx(ref, rel=1e-6)
        assert len(comp.ids) == (len(ids) if on_invalid == MASK else 3)
        assert sampler.counters[2] == 3


@pytest.mark.parametrize(
    ("ids", "size", "ref"),
    [
        (list(range(10)), 10, True),
        (list(range(9)), 9, False),  # 9 is a child, and has no slot
        ([0, 2, 1, 3, 4, 5, 6, 7, 8, 9], 10, False),  # 1 is an end token
        ([0, 1, 2, 9, 4, 5, 6, 7, 8, 3], 10, False),  # 3 and 9 are children
        ([5, 1, 6, 3, 2, 0, 4, 7, 8, 9], 10, True),  # only tokens that are not allowed at [] have moved
        (list(range(10)), 9, False),
    ],
)
def test_is_ordered(ids: list[int], size: int, ref: bool) -> None:
    memory = np.zeros(len(ids), _RECORD)
    memory["id"] = ids
    with sampler_of() as sampler:
        assert kernels.is_ordered(sampler.address, memory.ctypes.data, size) == ref


# --- steps, troubles and resets -----------------------------------------------------------------

#    on_end      tokens         stands at    state             position   accepted   trouble
STEPS = [
    ("mass",     [9, 6],        (9, 6),      layout.ARMED,     2,         2,         layout.OK),
    ("mass",     [9, 6, 7, 1],  (9, 6, 7),   layout.FINISHED,  3,         4,         layout.OK),
    ("mass",     [9, 5],        (9,),        layout.ARMED,     1,         1,         layout.OFF_TRIE),
    ("mass",     [9, 5, 4],     (9, 4),      layout.ARMED,     2,         2,         layout.OFF_TRIE),
    ("eog",      [9, 8, 30],    (9,),        layout.FINISHED,  1,         3,         layout.OK),
    ("release",  [3],           (3,),        layout.RELEASED,  1,         1,         layout.OK),
    ("release",  [7, 3],        (),          layout.RELEASED,  0,         2,         layout.OFF_TRIE),
]  # fmt: skip


@pytest.mark.parametrize(("on_end", "tokens", "prefix", "state", "position", "n_accepted", "trouble"), STEPS)
def test_accept_steps_and_reset_goes_back_but_forgets_no_trouble(
    on_end: str, tokens: list[int], prefix: tuple[int, ...], state: int, position: int, n_accepted: int, trouble: int
) -> None:
    node = DictTrie(LEAVES).prefixes().index(prefix)
    with sampler_of(on_end=on_end) as sampler:
        sampler.accept(*tokens)
        assert sampler.place == [0, node, state, position, n_accepted]
        assert sampler.record["trouble"] == trouble
        sampler.reset()
        assert sampler.place == [0, 0, layout.ARMED, 0, 0]
        assert (sampler.record["trouble"], sampler.record["status"]) == (trouble, layout.OK)


def test_only_the_first_trouble_is_kept() -> None:
    with sampler_of() as sampler:
        sampler.accept(5)
        sampler.apply(Candidates([7, 8], [0.0, 0.0], is_sorted=False))
        record = sampler.record
        assert (record["trouble"], record["status"]) == (layout.OFF_TRIE, layout.NO_CANDIDATE)
        sampler.reset()
        assert sampler.record["trouble"] == layout.OFF_TRIE
        # Python looks, and takes it away: the next one shows.
        record["trouble"] = layout.OK
        sampler.apply(Candidates.of_row([NAN] * 12))
        sampler.accept(5)
        assert sampler.record["trouble"] == layout.ALL_INVALID


def test_the_limit_of_a_span_is_a_trouble() -> None:
    with sampler_of(on_end="mass") as sampler:
        sampler.record["max_span_tokens"] = 2
        sampler.accept(9, 6)
        assert (sampler.place[2], sampler.record["trouble"]) == (layout.FINISHED, layout.SPAN_LIMIT)
        # The way out is an end token, although no leaf ends here.
        comp = sampler.apply(Candidates.of_row(np.arange(12)))
        assert (comp.ids, comp.logits) == ([8], [8.0])


def test_born_released_it_is_armed_by_hand_and_reset_to_its_birth() -> None:
    two = TokenTrie.from_sequences([("a", [3]), ("b", [4])])
    cursor = TrieCursor(two, stop_tokens=ENDS)
    cursor._record["birth_root"] = layout.NO_NODE
    cursor.reset()
    with pair_of(cursor) as (sampler, _):
        candidates = Candidates.of_row(ZEROS)
        before = candidates.bytes()
        assert sampler.apply(candidates).bytes() == before
        kernels.arm_cursor(sampler.address, 0)
        assert sampler.apply(Candidates.of_row(ZEROS)).ids == [3]
        sampler.reset()
        assert sampler.place == [layout.NO_NODE, layout.NO_NODE, layout.RELEASED, 0, 0]
        assert sampler.apply(candidates).bytes() == before


def test_name() -> None:
    with sampler_of() as sampler:
        assert ctypes.string_at(sampler.name()) == b"of the test"


# --- memory -------------------------------------------------------------------------------------

_ODD = -(2**62) + 12_345


@numba.njit
def both_calls(first: int, second: int) -> tuple[int, int]:
    return kernels.call_1(first, _ODD), kernels.call_2(second, _ODD, 7)


def test_c_functions_are_called_by_address_with_whole_words() -> None:
    for call in (both_calls, lambda first, second: (kernels.call_1(first, _ODD), kernels.call_2(second, _ODD, 7))):
        seen: list[tuple[int, ...]] = []

        def one(a: int, seen: list[tuple[int, ...]] = seen) -> int:
            seen.append((a,))
            return a + 1

        def two(a: int, b: int, seen: list[tuple[int, ...]] = seen) -> int:
            seen.append((a, b))
            return a - b

        functions = _WORD_OF_1(one), _WORD_OF_2(two)
        assert call(address_of(functions[0]), address_of(functions[1])) == (_ODD + 1, _ODD - 7)
        assert seen == [(_ODD,), (_ODD, 7)]


@numba.njit
def add_to(address: int, delta: int) -> int:
    return kernels.fetch_add(address, delta)


def test_fetch_add_gives_the_value_before() -> None:
    for add in (add_to, kernels.fetch_add):
        counters = np.array([5, 2**40, 5], np.int64)
        address = counters[1:].ctypes.data
        assert (add(address, 3), add(address, -1)) == (2**40, 2**40 + 3)
        assert counters.tolist() == [5, 2**40 + 2, 5]


def test_context_of_is_the_second_word() -> None:
    with sampler_of() as sampler:
        assert kernels.context_of(sampler.wrapper) == sampler.address
        assert sampler.interface == INTERFACE


def test_a_record_lives_as_long_as_its_last_owner() -> None:
    with sampler_of() as sampler:
        host = sampler.host
        address = sampler.address
        for n_owners in (2, 3):
            kernels.fetch_reference(address)
            assert sampler.record["references"] == n_owners
        kernels.release_record(address)
        clone = sampler.clone()
        kernels.fetch_reference(clone.address)
        assert (host.alive.tolist(), len(host.live)) == ([2], 2)
        clone.free()
        # The host has freed it, a handle still holds it.
        assert (clone.record["is_freed"], clone.record["references"]) == (1, 1)
        assert (sampler.record["is_freed"], sampler.record["references"]) == (0, 2)
        assert (host.alive.tolist(), len(host.live)) == ([2], 2)
        kernels.release_record(clone.address)
        assert (host.alive.tolist(), list(host.live), len(host.freed)) == ([1], [address], 1)
        kernels.release_record(address)
        assert host.alive.tolist() == [1]


def test_a_clone_stands_at_the_same_place_and_walks_apart() -> None:
    with sampler_of() as sampler:
        sampler.accept(9, 5)
        kernels.fetch_reference(sampler.address)
        sampler.record["probed"] = 4
        clone = sampler.clone()
        host = sampler.host
        assert (clone.interface, clone.place) == (INTERFACE, sampler.place)
        ref, comp = sampler.record, clone.record
        own = {"references": 1, "is_freed": 0, "trouble": layout.OK, "twin_address": 0}
        assert {name: int(comp[name]) for name in own} == own
        assert ref["trouble"] == layout.OFF_TRIE
        assert ref["references"] == 2
        assert all(comp[name] == ref[name] for name in layout.NATIVE.names if name not in own)
        clone.accept(6)
        assert (sampler.place[3], clone.place[3]) == (1, 2)
        assert clone.apply(Candidates.of_row(ZEROS)).ids == [7]
        assert (sampler.counters[0], clone.counters[0]) == (0, 1)
        sampler.reset()
        twin = clone.clone()
        clone.free()
        assert twin.apply(Candidates.of_row(ZEROS)).ids == [7]
        assert sampler.apply(Candidates.of_row(ZEROS)).ids == [3]
        assert host.alive.tolist() == [2]
        twin.free()
        kernels.release_record(sampler.address)


def test_a_copy_is_born_with_one_owner_and_without_a_past() -> None:
    with sampler_of() as sampler:
        kernels.fetch_reference(sampler.address)
        record = sampler.record
        record["is_freed"], record["trouble"], record["twin_address"] = 1, layout.OFF_TRIE, 99
        address = kernels.copy_record(sampler.address)
        copy = sampler.host.live[address].view(layout.NATIVE)[0]
        names = ("references", "is_freed", "trouble", "twin_address")
        assert [int(copy[name]) for name in names] == [1, 0, layout.OK, 0]
        assert [int(record[name]) for name in names] == [2, 1, layout.OFF_TRIE, 99]
        kernels.release_record(address)
        kernels.release_record(sampler.address)


def test_without_memory_there_is_no_copy() -> None:
    with sampler_of() as sampler:
        before = sampler.record.tobytes()
        sampler.host.has_memory = False
        assert kernels.copy_record(sampler.address) == 0
        assert sampler.host.alive.tolist() == [1]
        assert sampler.record.tobytes() == before
        sampler.host.has_memory = True
        address = kernels.copy_record(sampler.address)
        assert list(sampler.host.live) == [sampler.address, address]
        kernels.release_record(address)


# --- the probe ----------------------------------------------------------------------------------


@contextlib.contextmanager
def new_pair(
    prefix: Sequence[int] = (), *, on_end: str = "mass", **settings_of_record: Any
) -> Iterator[tuple[Sampler, Sampler]]:
    """A sampler and its probe, somewhere in the trie of the tables."""
    cursor = TrieCursor(TokenTrie.from_sequences(LEAVES), on_end=on_end, stop_tokens=ENDS)
    with pair_of(cursor, **settings_of_record) as (sampler, probe):
        sampler.accept(*prefix)
        yield sampler, probe


FALLING = [-float(i) for i in range(12)]
FOREIGN = [9.0 if i in (2, 11) else -float(i) for i in range(12)]
FAULTY = [NAN if i in (3, 9) else 0.0 for i in range(12)]

#    prefix     on_end      row        ids of the probe's array     probed
PROBES = [
    ([],       "mass",     FALLING,   range(12),                   3),
    ([],       "mass",     FOREIGN,   range(12),                   3),
    # Logits that say nothing are no pick: the lowest valid id is put back, and reported as that fault.
    ([],       "mass",     FAULTY,    range(12),                   layout.NO_TOKEN),
    ([9],      "mass",     FOREIGN,   range(12),                   1),
    ([9],      "mass",     TIE_AT_8,  range(12),                   8),
    ([9],      "mass",     BELOW,     range(12),                   4),
    ([9],      "eog",      BELOW,     range(12),                   4),
    ([9],      "eog",      FALLING,   range(12),                   1),
    ([9, 1],   "mass",     TIE_AT_8,  range(12),                   8),
    # Not the raw logits any more, and no row to pick from.
    ([],       "mass",     FALLING,   range(11, -1, -1),           layout.NO_TOKEN),
    ([],       "mass",     FALLING,   range(9),                    layout.NO_TOKEN),
    ([],       "mass",     FALLING,   [],                          layout.NO_TOKEN),
    # Released.
    ([3],      "release",  FALLING,   range(12),                   layout.NO_TOKEN),
]  # fmt: skip


@pytest.mark.parametrize("keeps_options", [0, 1])
@pytest.mark.parametrize(("prefix", "on_end", "row", "ids", "ref"), PROBES)
def test_a_probe_only_looks(
    prefix: list[int], on_end: str, row: list[float], ids: Sequence[int], ref: int, keeps_options: int
) -> None:
    with new_pair(prefix, on_end=on_end, keeps_options=keeps_options, probed=5) as (sampler, probe):
        candidates = Candidates.of_row(row, list(ids))
        before = candidates.bytes()
        assert probe.apply(candidates).bytes() == before
        assert sampler.record["probed"] == ref
        assert sampler.counters == [0, 0, 0]


@few
@given(leaves=leaf_sets(max_token=30), row=logits_rows(V), data=st.data())
def test_what_a_probe_picked_is_put_back_where_filters_left_nothing(
    leaves: Leaves, row: np.ndarray, data: st.DataObject
) -> None:
    trie = DictTrie(leaves)
    ends = [31, 35]
    prefix = data.draw(st.sampled_from([prefix for prefix in trie.prefixes() if trie.children(prefix)]))
    children, at_leaf = trie.children(prefix), trie.is_terminal(prefix)
    on_end, on_invalid = data.draw(st.sampled_from(ON_ENDS)), data.draw(st.sampled_from([DROP, MASK]))
    ref = Reference(row, list(range(V)), children, at_leaf, on_end, ends)
    # Filters leave tokens that are no option, and no mass to stop.
    left = [token for token in range(V) if token not in (*children, *ends)]
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end=on_end, stop_tokens=ends)
    with pair_of(cursor, on_invalid=on_invalid) as (sampler, probe):
        sampler.accept(*prefix)
        probe.apply(Candidates.of_row(row))
        probed = int(sampler.record["probed"])
        if ref.pick is not None:
            assert probed == ref.pick
        comp = sampler.apply(Candidates(left, [-INF] * len(left), is_sorted=True))
        assert (comp.ids, comp.logits, comp.selected) == ([probed], [0.0], 0)
        assert sampler.record["trouble"] == layout.NO_CANDIDATE


@pytest.mark.parametrize("prefix", [[], [9], [9, 6], [9, 1]])
@pytest.mark.parametrize("on_invalid", [DROP, MASK])
@pytest.mark.parametrize("on_end", ["mass", "eog"])
def test_a_probe_that_constrains_leaves_the_options_and_so_does_the_sampler_behind(
    prefix: list[int], on_invalid: str, on_end: str
) -> None:
    row = np.sin(np.arange(12)).astype(np.float32)
    with new_pair(prefix, on_end=on_end, on_invalid=on_invalid, keeps_options=1) as (sampler, probe):
        ref = sampler.apply(Candidates.of_row(row))
        candidates = Candidates.of_row(row)
        kernels.let_probe_constrain(sampler.address)
        probe.apply(candidates)
        assert sampler.record["probed"] >= 0
        assert (candidates.ids, candidates.logits) == (ref.ids, approx(ref.logits))
        assert len(candidates.ids) == 12 if on_invalid == MASK else len(candidates.ids) < 6
        # A second time nothing changes: the stop is now the one token that is no child.
        sampler.apply(candidates)
        assert (candidates.ids, candidates.logits) == (ref.ids, approx(ref.logits))
        assert candidates.selected == ref.selected
        assert sampler.counters[0] == 3
        assert sampler.record["trouble"] == layout.OK


def test_a_clone_of_a_pair_is_a_pair_of_one_record() -> None:
    with new_pair([9]) as (sampler, probe):
        host = probe.host
        probe_clone = probe.clone()
        assert probe_clone.interface == PROBE_INTERFACE
        assert sampler.record["twin_address"] == probe_clone.address
        clone = sampler.clone()
        assert (clone.interface, clone.address) == (INTERFACE, probe_clone.address)
        assert clone.address != sampler.address
        assert (host.alive.tolist(), len(host.live)) == ([2], 2)
        for one in (sampler, clone):
            assert (one.record["references"], one.record["twin_address"]) == (2, 0)
        # One step of the clone is its probe's, and not the original's.
        clone.accept(6)
        probe_clone.apply(Candidates.of_row(FOREIGN))
        probe.apply(Candidates.of_row(TIE_AT_8))
        assert (clone.record["probed"], sampler.record["probed"]) == (7, 8)
        # The pair is used up: the next clone has a record of its own.
        single = sampler.clone()
        assert (single.record["references"], single.place) == (1, sampler.place)
        assert host.alive.tolist() == [3]
        single.free()
        # A probe that goes is no sampler that was freed.
        probe_clone.free()
        assert (clone.record["references"], clone.record["is_freed"]) == (1, 0)
        assert host.alive.tolist() == [2]
        clone.free()
        assert (host.alive.tolist(), list(host.live)) == ([1], [sampler.address])
