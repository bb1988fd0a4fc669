"""Each kernel alone: against NumPy, against the oracle, and at the borders of its arrays.

    token        [S]    -1  2  5  9 | 4  7          children of node 0 are nodes 1 .. 3, tokens 2 5 9;
    node                 0  1  2  3 | 4  5          children of node 2 are nodes 4 .. 5, tokens 4 7
    first_child  [S+1]   1  4  4  6   6  6  6

Runs compiled and, under NUMBA_DISABLE_JIT=1, as plain Python with the same answers.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import argmax_child, filtered_distribution, logsumexp, splitmix64, stop_logit, uniforms, xoshiro128pp
from strategies import logits_rows

from trie_sampler import kernels, layout
from trie_sampler.cursor import Sampling, TrieCursor
from trie_sampler.trie import TokenTrie

NAN, INF = math.nan, math.inf

TOKEN = np.array([-1, 2, 5, 9, 4, 7], np.int32)
FIRST_CHILD = np.array([1, 4, 4, 6, 6, 6, 6], np.int32)
LEAF = np.array([-1, 0, -1, 1, 2, 3], np.int32)


def trie_of(token: Any, first_child: Any, leaf: Any, depth: int = 2) -> TokenTrie:
    """A trie of any arrays at all, damaged ones too."""
    arrays = [np.array(array, np.int32) for array in (token, first_child, leaf)]
    return TokenTrie._from_arrays(*arrays, depth, None, {"": 0}, 100, None, np.empty((2, 0), np.int32))


# --- finding ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), unique=True, max_size=12), st.integers(-2, 33), st.data())
def test_find_child_equals_a_linear_search(tokens: list[int], wanted: int, data: st.DataObject) -> None:
    array = np.array(sorted(tokens), np.int32)
    start = data.draw(st.integers(0, len(array)))
    stop = data.draw(st.integers(start, len(array)))
    places = [place for place in range(start, stop) if array[place] == wanted]
    assert kernels.find_child(array, start, stop, wanted) == (places[0] if places else layout.NO_NODE)


@pytest.mark.parametrize(
    ("node", "wanted", "ref"),
    [
        (0, 2, 1),
        (0, 5, 2),
        (0, 9, 3),
        (0, 4, -1),
        (0, 1, -1),
        (0, 10, -1),
        (2, 4, 4),
        (2, 7, 5),
        (2, 5, -1),
        (1, 2, -1),
    ],
)
def test_find_child_of(node: int, wanted: int, ref: int) -> None:
    assert kernels.find_child_of(TOKEN, FIRST_CHILD, node, wanted) == ref


# --- reading a row ------------------------------------------------------------------------------

#             logits at 2 5 9        node (0: none)
ARGMAX = [
    ([1.0, 2.0, 0.0],                2),
    ([2.0, 2.0, 1.0],                1),
    ([1.0, 2.0, 2.0],                2),
    ([NAN, -5.0, NAN],               2),
    ([NAN, NAN, -INF],               -1),
    ([-INF, -INF, -3e38],            3),
    ([0.0, -0.0, 0.0],               1),
    ([1.0, INF, 2.0],                2),
]  # fmt: skip


@pytest.mark.parametrize(("logits", "ref"), ARGMAX)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_argmax_child(logits: list[float], ref: int, dtype: type) -> None:
    row = np.full(10, 3e38, dtype)
    row[[2, 5, 9]] = logits
    assert kernels.argmax_child(row, TOKEN, 1, 4) == ref


WIDE_V = 20_000
ROWS = {
    "as they come": lambda row, _: row,
    "ties": lambda row, _: np.round(row),
    "children lowest": lambda row, ids: np.where(np.isin(np.arange(WIDE_V), ids), row - 20, row),
    "children ascend": lambda row, ids: (row.__setitem__(ids, np.sort(row[ids])), row)[1],
    "NaN here and there": lambda row, _: np.where(row > 0.5, NAN, row),
    "one child is a number": lambda _row, ids: np.where(np.arange(WIDE_V) == ids[-1], -3.0, NAN),
    "the last child": lambda row, ids: np.where(np.arange(WIDE_V) == ids[-1], 50, row),
    "infinite": lambda row, ids: np.where(np.arange(WIDE_V) == ids[len(ids) // 2], INF, row),
    "nothing": lambda row, _: np.full_like(row, -INF),
    "NaN alone": lambda row, _: np.full_like(row, NAN),
}


# Where another way begins, by the number of children, and between.
@pytest.mark.parametrize("n_children", [255, 256, 257, 383, 1000, 8192, 8193, 12_000, WIDE_V])
@pytest.mark.parametrize("kind", ROWS)
def test_argmax_child_of_many(n_children: int, kind: str) -> None:
    rng = np.random.default_rng(n_children)
    ids = np.sort(rng.choice(WIDE_V, n_children, replace=False)).astype(np.int32)
    row = ROWS[kind](rng.normal(size=WIDE_V), ids)
    token = np.array([-1, *ids], np.int32)
    strided = np.zeros((WIDE_V, 3), np.float32)
    strided[:, 1] = row
    for given_row in (row.astype(np.float32), row.astype(np.float64), strided[:, 1]):
        best = argmax_child(given_row, ids.tolist()) if np.any(given_row[ids] > -INF) else None
        ref = layout.NO_NODE if best is None else 1 + int(np.searchsorted(ids, best))
        assert kernels.argmax_child(given_row, token, 1, len(token)) == ref


def test_argmax_child_of_damaged_ids() -> None:
    token = np.random.default_rng(0).integers(-(2**31), 2**31, 9001).astype(np.int32)
    row = np.arange(1000, dtype=np.float32)
    assert 0 <= kernels.argmax_child(row, token, 0, 9001) < 9001


def test_argmax_child_of_none() -> None:
    assert kernels.argmax_child(np.zeros(10), TOKEN, 4, 4) == layout.NO_NODE


@given(logits_rows(40, posinf=True), st.sets(st.integers(0, 39)), st.booleans())
def test_foreign_logsumexp_equals_the_oracle(row: np.ndarray, children: set[int], wide: bool) -> None:
    token = np.array([-1, *sorted(children)], np.int32)
    comp = kernels.foreign_logsumexp(row.astype(np.float64) if wide else row, token, 1, len(token))
    ref = stop_logit(row, children)
    if np.isinf(ref):
        assert comp == ref
    else:
        np.testing.assert_allclose(comp, ref, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("n_logits", [1, 2, 3, 4, 5, 7, 8, 9, 33])
def test_foreign_logsumexp_at_every_remainder(n_logits: int) -> None:
    """The largest logit at each place of segments of each length: no lane of an unrolled loop is forgotten."""
    for place in range(n_logits):
        row = np.full(2 * n_logits + 1, -60.0, np.float32)
        row[place] = 3.0
        row[n_logits] = 99.0  # the child between two segments
        comp = kernels.foreign_logsumexp(row, np.array([-1, n_logits], np.int32), 1, 2)
        np.testing.assert_allclose(comp, logsumexp(np.delete(row, n_logits)), rtol=1e-12)
        comp = kernels.foreign_logsumexp(row[::-1], np.array([-1, n_logits], np.int32), 1, 2)
        np.testing.assert_allclose(comp, logsumexp(np.delete(row, n_logits)), rtol=1e-12)


@pytest.mark.parametrize("child", [[0], [9], [0, 9], [4, 5], []])
def test_foreign_logsumexp_counts_each_other_token_once(child: list[int]) -> None:
    """Distinct powers of two: a token forgotten or counted twice shows."""
    row = np.log(2.0) * np.arange(10)
    ref = math.log(sum(2**i for i in range(10) if i not in child))
    comp = kernels.foreign_logsumexp(row, np.array([-1, *child], np.int32), 1, 1 + len(child))
    np.testing.assert_allclose(comp, ref, rtol=1e-12)


# --- writing a row ------------------------------------------------------------------------------


@pytest.mark.parametrize(("logit", "ref"), [(2.5, 2.5), (-3e38, -3e38), (NAN, 0.0), (-INF, 0.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keep_only_leaves_one_finite_logit(logit: float, ref: float, dtype: type) -> None:
    row = np.zeros(8, dtype)
    row[3] = logit
    kernels.keep_only(row, 3)
    assert row[3] == dtype(ref)
    assert (np.delete(row, 3) == -INF).all()


# --- filters ------------------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 99},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"min_p": 0.3},
    {"min_p": 0.99},
    {"temperature": 1e-3},
    {"top_k": 3, "top_p": 0.8, "min_p": 0.2, "temperature": 2.0},
    {"top_k": 3, "top_p": 0.8, "temperature": 0.7},
]

#                 logits
OPTION_LOGITS = [
    [0.0],
    [1.0, 2.0, 0.0, -1.0],
    [0.3, 0.1, 0.2, 0.1, 0.3],
    [5.0, -INF, 4.0, 4.0],
    [-INF, -INF, 1.0],
    [3e38, -3e38, 3e38],
    [INF, 2.0, INF],
    [700.0, 690.0, -700.0],
]  # fmt: skip


def filter_options(logits: Sequence[float], **settings: Any) -> np.ndarray:
    """Probabilities after the filters."""
    weights = np.array(logits, np.float64)
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    total = kernels.filter_options(weights, *(sampling[n] for n in ("temperature", "top_k", "top_p", "min_p")))
    assert total == pytest.approx(weights.sum(), rel=1e-12)
    return weights / total


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("logits", OPTION_LOGITS, ids=str)
def test_filters_equal_the_oracle(logits: list[float], settings: dict[str, Any]) -> None:
    ref = filtered_distribution(logits, **settings)
    np.testing.assert_allclose(filter_options(logits, **settings), ref, rtol=1e-9, atol=1e-12)


def test_filters_by_hand() -> None:
    """p = .5 .25 .15 .1: each filter alone, at the temperature 1 that the later ones look at."""
    logits = np.log([0.25, 0.5, 0.1, 0.15])
    np.testing.assert_allclose(filter_options(logits, top_k=2), [1 / 3, 2 / 3, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(filter_options(logits, top_p=0.76), [0.25 / 0.9, 0.5 / 0.9, 0, 0.15 / 0.9], rtol=1e-12)
    np.testing.assert_allclose(filter_options(logits, min_p=0.29), [0.25 / 0.9, 0.5 / 0.9, 0, 0.15 / 0.9], rtol=1e-12)
    np.testing.assert_allclose(filter_options(logits, min_p=0.31), [1 / 3, 2 / 3, 0, 0], rtol=1e-12)
    # top_p looks at what top_k left: .5 of .75 is below .7, so both stay.
    np.testing.assert_allclose(filter_options(logits, top_k=2, top_p=0.7), [1 / 3, 2 / 3, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(filter_options(logits, top_k=2, top_p=0.6), [0, 1, 0, 0], rtol=1e-12)
    # Temperature comes last: it does not change who is dropped.
    np.testing.assert_allclose(filter_options(logits, min_p=0.31, temperature=0.5), [0.2, 0.8, 0, 0], rtol=1e-12)


def test_filters_keep_the_earlier_of_equal_options() -> None:
    assert filter_options([1.0, 1.0, 1.0], top_k=2).tolist() == [0.5, 0.5, 0.0]
    assert filter_options([0.0, 1.0, 1.0], top_p=0.1).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_nothing_is_left_of_nothing(settings: dict[str, Any]) -> None:
    weights = np.full(3, -INF)
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    assert kernels.filter_options(weights, *(sampling[n] for n in ("temperature", "top_k", "top_p", "min_p"))) == 0.0
    assert weights.tolist() == [0.0, 0.0, 0.0]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=9),
    st.floats(0.05, 5),
    st.integers(0, 10),
    st.floats(0.05, 1),
    st.floats(0, 0.95),
)
def test_filters_equal_the_oracle_on_anything(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    ref = filtered_distribution(logits, **settings)
    # Where rounding may tip a border either side of it is right.
    for nudge in (-1e-9, 1e-9):
        moved = {**settings, "top_p": min(1.0, top_p + nudge), "min_p": max(0.0, min_p + nudge)}
        if not np.array_equal(filtered_distribution(logits, **moved) > 0, ref > 0):
            return
    np.testing.assert_allclose(filter_options(logits, **settings), ref, rtol=1e-7, atol=1e-12)


# --- random numbers, against their definitions written out in the oracle --------------------------------


def test_the_oracle_s_generators_are_the_published_ones() -> None:
    """First outputs published with the algorithms (splitmix64 from 1234567, xoshiro128++ from 1 2 3 4)."""
    words = splitmix64(1234567)
    assert [next(words) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    outputs = xoshiro128pp([1, 2, 3, 4])
    assert [next(outputs) for _ in range(4)] == [641, 1573767, 3222811527, 3517856514]


# A seed's draws are part of the interface: compiled or not, on every platform.
UNIFORMS = {
    0: [0.2747170139212095, 0.7194105897209213, 0.23642878317643257, 0.7995037001060141, 0.9279865222968557],
    42: [0.6155444861226248, 0.38001480944542465, 0.7745493794146345, 0.9964322274139861, 0.6269627500609519],
    2**64 - 1: [0.6170568264849915, 0.5895936946348771, 0.31683869669720166, 0.585739262527105, 0.08938439516678931],
}


@pytest.mark.parametrize("seed", UNIFORMS)
def test_the_first_five_draws_of_a_seed(seed: int) -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [1])]), sampling=Sampling(seed=seed))
    ref = uniforms(seed)
    assert [next(ref) for _ in range(5)] == UNIFORMS[seed]
    assert [float(kernels.draw_uniform(cursor._record[0])) for _ in range(5)] == UNIFORMS[seed]


def test_draws_are_uniform() -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [1])]), sampling=Sampling(seed=1))
    record = cursor._record[0]
    draws = np.array([kernels.draw_uniform(record) for _ in range(4000)])
    assert 0 <= draws.min() < draws.max() < 1
    # Kolmogorov-Smirnov at 1e-4; fixed seed.
    grid = np.arange(1, 4001) / 4000
    assert np.abs(np.sort(draws) - grid).max() < 2.2 / math.sqrt(4000)


# --- damaged arrays -----------------------------------------------------------------------------

#                     first_child                        children of the root after clamping
DAMAGED_RANGES = [
    ([1, 3, 3, 3],                                       [5, 6]),
    ([1, 2**31 - 1, 3, 3],                               [5, 6]),
    ([1, 99, 99, 99],                                    [5, 6]),
    ([3, 1, 3, 3],                                       []),
    ([-7, 3, 3, 3],                                      [4, 5, 6]),
    ([-9, -8, 3, 3],                                     []),
    ([99, 100, 3, 3],                                    []),
]  # fmt: skip


@pytest.mark.parametrize(("first_child", "tokens"), DAMAGED_RANGES)
def test_kernels_do_not_read_past_damaged_ranges(first_child: list[int], tokens: list[int]) -> None:
    cursor = TrieCursor(trie_of([4, 5, 6], first_child, [-1, 0, 1]))
    assert cursor.trie.children(0).tolist() == tokens
    row = np.zeros(7, np.float32)
    cursor.mask(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == tokens
    for token in (4, 5, 6):
        twin = cursor.clone()
        if token in tokens:
            twin.accept(token)
            assert twin.position_in_span == 1
        else:
            assert kernels.accept_token(twin._address, token) == layout.OFF_TRIE


@pytest.mark.parametrize("token", [-2, -2_000_000_000, 2_000_000_000])
def test_a_damaged_token_does_not_crash_the_process(token: int) -> None:
    """In a process of its own: compiled code reads row[token] unchecked."""
    code = (
        "import numpy as np, warnings; warnings.simplefilter('ignore')\n"
        "from trie_sampler import TokenTrie, TrieCursor\n"
        f"arrays = [np.array(a, np.int32) for a in ([-1, {token}, 5], [1, 3, 3, 3], [-1, 0, 1])]\n"
        "none = np.empty((2, 0), np.int32)\n"
        "try: cursor = TrieCursor(TokenTrie._from_arrays(*arrays, 1, None, {'': 0}, 100, None, none))\n"
        "except Exception as error: raise SystemExit(print(error))\n"
        "for ask in (cursor.pick, cursor.sample, cursor.mask, lambda row: cursor.constrain(row, samples=False)):\n"
        "    try: ask(np.zeros(9, np.float32))\n"
        "    except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("node", [-1, 3, 2**31 - 1, -(2**31)])
def test_kernels_do_not_read_past_a_damaged_position(node: int) -> None:
    cursor = TrieCursor(trie_of([-1, 5, 6], [1, 3, 3, 3], [-1, 0, 1]))
    cursor._record["node"] = node
    assert kernels.accept_token(cursor._address, 5) == layout.OFF_TRIE
    assert cursor.forced_run().tolist() == []
    row = np.zeros(7, np.float32)
    kernels.keep_allowed(cursor._address, row)
    assert (row == -INF).all()


# --- the layout ---------------------------------------------------------------------------------


def test_kernels_refuse_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code freezes what it read from layout.py; a stale cache must not outlive an edit."""
    monkeypatch.setattr(layout, "VERSION", layout.VERSION + 1)
    spec = importlib.util.spec_from_file_location("kernels_of_another_layout", kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=rf"written for layout {layout.VERSION - 1}, not {layout.VERSION}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_records_lie_aligned() -> None:
    assert layout.CURSOR.itemsize % 8 == 0
    offsets = [layout.CURSOR.fields[name][1] % layout.CURSOR[name].itemsize for name in layout.CURSOR.names or ()]
    assert set(offsets) == {0}


def test_sentinels_are_no_token_ids() -> None:
    assert max(layout.NO_TOKEN, layout.NO_LEAF, layout.NO_NODE, layout.END, layout.TROUBLE) < 0
    assert layout.END != layout.TROUBLE
    codes = [layout.OK, layout.OFF_TRIE, layout.ALL_INVALID, layout.SPAN_LIMIT, layout.SHORT_ROW]
    assert len(set(codes)) == len(codes)
    assert len({layout.RELEASED, layout.ARMED, layout.FINISHED}) == 3
    assert len(set(layout.ON_END.values())) == len(layout.ON_END) == 3


# --- without a row that is wide enough ----------------------------------------------------------


@pytest.mark.parametrize("kernel", ["pick_token", "sample_token"])
def test_a_short_row_is_a_status_and_no_pick(kernel: str) -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [5])]))
    assert getattr(kernels, kernel)(cursor._address, np.zeros(5, np.float32)) == layout.TROUBLE
    assert cursor._record["status"][0] == layout.SHORT_ROW
    assert cursor._record["picked"][0] == layout.NO_TOKEN


def test_valid_mass_of_a_short_row_is_none() -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [5])]))
    assert math.isnan(kernels.measure_valid_mass(cursor._address, np.zeros(5, np.float32)))


# --- status codes: what compiled callers, who see no exception, go by --------------------------


def status_of(cursor: TrieCursor) -> tuple[int, int]:
    return int(cursor._record["status"][0]), int(cursor._record["picked"][0])


@pytest.mark.parametrize("kernel", ["pick_token", "sample_token"])
@pytest.mark.parametrize("on_end", ["mass", "eog", "release"])
def test_no_valid_logit_is_a_status_and_the_lowest_id(kernel: str, on_end: str) -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [5]), ("B", [3])]), on_end=on_end)
    row = np.array([9, 9, 9, NAN, 9, -INF], np.float32)
    assert getattr(kernels, kernel)(cursor._address, row) == layout.TROUBLE
    assert status_of(cursor) == (layout.ALL_INVALID, 3)


def test_a_good_pick_leaves_no_status() -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [5]), ("B", [3])]))
    assert kernels.pick_token(cursor._address, np.zeros(6, np.float32)) == 3
    assert cursor._record["status"][0] == layout.OK


@pytest.mark.parametrize("on_end", ["mass", "eog", "release"])
def test_each_end_of_an_accept_is_a_status(on_end: str) -> None:
    cursor = TrieCursor(trie_of([5], [0, 1], [-1], depth=1), on_end=on_end, max_span_tokens=2)
    assert kernels.accept_token(cursor._address, 5) == layout.OK
    assert cursor._record["status"][0] == layout.OK
    assert kernels.accept_token(cursor._address, 5) == layout.SPAN_LIMIT
    assert cursor._record["status"][0] == layout.SPAN_LIMIT
    kernels.arm_cursor(cursor._address, 0)
    assert cursor._record["status"][0] == layout.OK
    assert kernels.accept_token(cursor._address, 7) == layout.OFF_TRIE
    assert cursor._record["status"][0] == layout.OFF_TRIE
