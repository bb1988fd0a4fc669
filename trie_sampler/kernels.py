"""Compiled functions over one cursor record: step, pick, score, mask.

A kernel takes the address of a cursor record (``layout.CURSOR``) and, where it reads logits, the
row. One integer reaches the trie, the position and the settings, so a call costs a few hundred
nanoseconds where five array arguments cost a microsecond. The record outlives no trie: whoever
holds the address holds the arrays.

``row`` is [W] float32 or float64, any stride, W >= ``min_width`` of the record. NaN counts as
-inf everywhere. Kernels never raise and never print; they write ``status`` into the record.

**Options.** At a node the options are its children and, where a leaf ends, a way to stop:

* ``mass``: one pseudo-option whose logit is the logsumexp of all tokens that are no child, so
  that its share of the softmax is P(stop) = 1 - sum of p(children);
* ``eog`` and ``release``: the end tokens, each with its own logit.

Greedy takes the option of the largest logit (a stop wins a tie against children, among tokens
the lowest id wins); sampling draws from the softmax over the options.

Every function here also runs as plain Python under ``NUMBA_DISABLE_JIT=1``.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # no __all__ there
from numba.extending import intrinsic, overload
from numba.np.numpy_support import from_dtype

from trie_sampler import layout
from trie_sampler.jit import jit, jit_sum
from trie_sampler.layout import (
    ALL_INVALID,
    ARMED,
    CURSOR,
    DROP,
    END,
    FINISHED,
    NATIVE,
    NO_CANDIDATE,
    NO_LEAF,
    NO_NODE,
    NO_TOKEN,
    OFF_TRIE,
    OK,
    ON_END_MASS,
    ON_END_RELEASE,
    RELEASED,
    SHORT_ROW,
    SPAN_LIMIT,
    TROUBLE,
)

# Numba's cache does not see edits of layout.py; raising this number with it does.
_LAYOUT_VERSION = 3
if layout.VERSION != _LAYOUT_VERSION:
    raise ImportError(f"kernels.py is written for layout {_LAYOUT_VERSION}, not {layout.VERSION}")


# --- memory by address -------------------------------------------------------------------------
# Each view has a Python twin for NUMBA_DISABLE_JIT=1 (intrinsics do not work there).


def _pointer_intrinsic(pointee):
    """An intrinsic that turns an integer address into a pointer to ``pointee``."""
    pointer = types.CPointer(pointee)

    @intrinsic
    def as_pointer(_typing, _address):
        def codegen(context, builder, _signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return as_pointer


_cursor_pointer = _pointer_intrinsic(from_dtype(CURSOR))
_native_pointer = _pointer_intrinsic(from_dtype(NATIVE))
_int8_pointer = _pointer_intrinsic(types.int8)
_int32_pointer = _pointer_intrinsic(types.int32)
_int64_pointer = _pointer_intrinsic(types.int64)
_float32_pointer = _pointer_intrinsic(types.float32)


def _view(address, dtype, size):
    """[size] array over memory that somebody else owns; the Python twin of the views below."""
    memory = (ctypes.c_char * (int(size) * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.ndarray(int(size), dtype, memory)


def view_cursor(address):
    """The cursor record at ``address``, by reference."""
    return _view(address, CURSOR, 1)[0]


@overload(view_cursor)
def _view_cursor(address):
    return lambda address: carray(_cursor_pointer(address), (1,))[0]


def view_native(address: int) -> Any:
    """The native record at ``address``, by reference."""
    return _view(address, NATIVE, 1)[0]


@overload(view_native)
def _view_native(address):
    return lambda address: carray(_native_pointer(address), (1,))[0]


def view_int8(address, size):
    """[size] int8 at ``address``, by reference."""
    return _view(address, np.int8, size)


@overload(view_int8)
def _view_int8(address, size):
    return lambda address, size: carray(_int8_pointer(address), (size,))


def view_int32(address, size):
    """[size] int32 at ``address``, by reference."""
    return _view(address, np.int32, size)


@overload(view_int32)
def _view_int32(address, size):
    return lambda address, size: carray(_int32_pointer(address), (size,))


def view_int64(address, size):
    """[size] int64 at ``address``, by reference."""
    return _view(address, np.int64, size)


@overload(view_int64)
def _view_int64(address, size):
    return lambda address, size: carray(_int64_pointer(address), (size,))


def view_float32(address, size):
    """[size] float32 at ``address``, by reference."""
    return _view(address, np.float32, size)


@overload(view_float32)
def _view_float32(address, size):
    return lambda address, size: carray(_float32_pointer(address), (size,))


@jit
def view_tokens(cursor):
    """[E] int32: ``layout`` array ``token``."""
    return view_int32(cursor["token_address"], cursor["n_edges"])


@jit
def view_end_tokens(cursor):
    """[n_end] int32, ascending: the tokens that end a span."""
    return view_int32(cursor["end_address"], cursor["n_end"])


# --- the trie ----------------------------------------------------------------------------------


@jit
def child_range(cursor):
    """(start, stop): the edges to the children of the cursor's node; in a tree they are the children.

    Clamped to the arrays, so that a damaged trie file cannot make a kernel read past them, and to as many
    children as there are ids, so that it cannot make one take for ever.
    """
    n_nodes = cursor["n_nodes"]
    node = cursor["node"]
    if node < 0 or node >= n_nodes:
        return 0, 0
    first_child = view_int32(cursor["first_child_address"], n_nodes + 1)
    start = max(np.int64(0), np.int64(first_child[node]))
    stop = min(np.int64(cursor["n_edges"]), np.int64(first_child[node + 1]), start + cursor["min_width"])
    return start, max(start, stop)


@jit
def id_at(token, edge, n_ids):
    """The token of an edge, clamped to 0 .. n_ids - 1: a damaged file holds any number at all.

    As an unsigned number, which one minimum clamps: a third off the time of a gather.
    """
    return min(np.int64(token[edge]) & np.int64(0xFFFFFFFF), np.int64(n_ids - 1))


@jit
def end_of_edge(cursor, edge):
    """The node that an edge leads to; NO_NODE where a damaged one leads to none."""
    if cursor["target_address"] == 0:
        return edge
    end = np.int64(view_int32(cursor["target_address"], cursor["n_edges"])[edge])
    if end < 0 or end >= cursor["n_nodes"]:
        return np.int64(NO_NODE)
    return end


@jit
def ends_leaf(cursor):
    """Whether a leaf ends at the cursor's node."""
    node = cursor["node"]
    if node < 0 or node >= cursor["n_nodes"]:
        return False
    return view_int32(cursor["leaf_address"], cursor["n_nodes"])[node] != NO_LEAF


@jit
def find_child(token, start, stop, wanted):
    """The edge among ``start .. stop`` of token ``wanted``, or NO_NODE. O(log K).

    token: [E] int32, ascending within start .. stop.
    """
    edge = lower_edge(token, start, stop, wanted)
    if edge < stop and token[edge] == wanted:
        return edge
    return NO_NODE


@jit
def lower_edge(token, start, stop, wanted):
    """The first edge among ``start .. stop`` whose token is at least ``wanted``; stop if none is. O(log K)."""
    low, high = start, stop
    while low < high:
        middle = (low + high) >> 1
        if token[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def find_child_of(token, first_child, node, wanted):
    """The edge of ``node`` with token ``wanted``, or NO_NODE; arrays as in ``layout``, ranges clamped."""
    start = max(np.int64(0), np.int64(first_child[node]))
    stop = min(np.int64(token.shape[0]), np.int64(first_child[node + 1]))
    return find_child(token, start, stop, wanted)


@jit
def is_end_token(cursor, token):
    """Whether ``token`` ends a span: END itself, or one of the end tokens. O(log n_end)."""
    if token == END:
        return True
    ends = view_end_tokens(cursor)
    return find_child(ends, 0, ends.shape[0], token) != NO_NODE


@jit
def trace_forced_run(address, out):
    """Write the tokens that must follow, one child and no leaf end at a time; returns how many.

    out: [>= D] int32. O(length of the run).
    """
    cursor = view_cursor(address)
    token = view_tokens(cursor)
    here = cursor["node"]
    n_forced = 0
    while n_forced < out.shape[0] and cursor["state"] == ARMED and not ends_leaf(cursor):
        start, stop = child_range(cursor)
        if stop - start != 1:
            break
        end = end_of_edge(cursor, start)
        if end == NO_NODE or token[start] != id_at(token, start, cursor["min_width"]):
            break
        out[n_forced] = token[start]
        n_forced += 1
        cursor["node"] = end
    cursor["node"] = here
    return n_forced


# --- the state machine -------------------------------------------------------------------------


@jit
def arm_cursor(address, root):
    """Constrain from ``root`` on; NO_NODE releases."""
    cursor = view_cursor(address)
    cursor["root"] = root
    cursor["node"] = root
    cursor["state"] = RELEASED if root == NO_NODE else ARMED
    cursor["status"] = OK
    cursor["n_accepted"] = 0
    cursor["position_in_span"] = 0
    cursor["picked"] = NO_TOKEN


@jit
def accept_token(address, token):
    """Take one step of the state machine (the table in ``TrieCursor``); returns a status.

    token: an id, or END. OFF_TRIE leaves the node as it was, and under ``release`` releases.
    O(log K).
    """
    cursor = view_cursor(address)
    if cursor["state"] != ARMED:
        cursor["n_accepted"] += 1
        return OK
    start, stop = child_range(cursor)
    end = np.int64(NO_NODE)
    if token >= 0:
        child = find_child(view_tokens(cursor), start, stop, token)
        if child != NO_NODE:
            end = end_of_edge(cursor, child)
    if end != NO_NODE:
        cursor["node"] = end
        cursor["position_in_span"] += 1
        cursor["n_accepted"] += 1
        return _close_span(cursor)
    if ends_leaf(cursor) and is_end_token(cursor, token):
        cursor["n_accepted"] += 1
        cursor["state"] = RELEASED if cursor["on_end"] == ON_END_RELEASE else FINISHED
        return OK
    cursor["status"] = OFF_TRIE
    if cursor["on_end"] == ON_END_RELEASE:
        cursor["n_accepted"] += 1
        cursor["state"] = RELEASED
    return OFF_TRIE


@jit
def _close_span(cursor):
    """After a step: release at the end of a leaf, or stop a walk that outlasts every leaf."""
    start, stop = child_range(cursor)
    if start == stop and cursor["on_end"] == ON_END_RELEASE:
        cursor["state"] = RELEASED
    elif cursor["n_accepted"] >= cursor["max_span_tokens"]:
        # Only a damaged trie gets here: the limit is larger than its depth.
        cursor["status"] = SPAN_LIMIT
        cursor["state"] = RELEASED if cursor["on_end"] == ON_END_RELEASE else FINISHED
        return SPAN_LIMIT
    return OK


# --- picking -----------------------------------------------------------------------------------


@jit
def argmax_child(row, token, start, stop):
    """The edge among ``start .. stop`` with the largest logit, NO_NODE if none is above -inf.

    Ties go to the lowest token. O(K); where K is a large part of V, one pass over the row and a few lookups, for
    a vector instruction passes over eight logits where a gather takes one.
    """
    n_children = stop - start
    if n_children < _MANY:
        return _argmax_few(row, token, start, stop, np.int64(NO_NODE), row.dtype.type(-np.inf))
    if n_children <= max(row.shape[0] // _PART_OF_ROW, 2 * _MARK) or row.strides[0] != row.itemsize:
        return _argmax_many(row, token, start, stop, np.int64(NO_NODE), row.dtype.type(-np.inf))
    return _argmax_wide(row, token, start, stop)


# Measured with V = 262,144, where numpy.argmax takes 13 us: four maxima at once are faster than one from 256 children
# on, and gather one in 0.5 ns; the pass over the row takes 12 us.
_MANY = 256
_PART_OF_ROW = 7
_LANES = 128
_BLOCK = 2 * _LANES
_MARK = 16 * _BLOCK


@jit
def _argmax_few(row, token, start, stop, best, largest):
    """The edge of the largest logit above ``largest``, else ``best``; children one by one."""
    for edge in range(start, stop):
        logit = row[id_at(token, edge, row.shape[0])]
        if logit > largest:
            best = edge
            largest = logit
    return best


@jit
def _argmax_many(row, token, start, stop, best, largest):
    """As ``_argmax_few``, four at a time in blocks; the block of the largest is searched for it at the end."""
    n_ids = row.shape[0]
    best_block = np.int64(NO_NODE)
    edge = start
    while edge + _LANES <= stop:
        a = b = c = d = largest
        for i in range(edge, edge + _LANES, 4):
            w, x = row[id_at(token, i, n_ids)], row[id_at(token, i + 1, n_ids)]
            y, z = row[id_at(token, i + 2, n_ids)], row[id_at(token, i + 3, n_ids)]
            a = w if w > a else a
            b = x if x > b else b
            c = y if y > c else c
            d = z if z > d else d
        a = b if b > a else a
        c = d if d > c else c
        a = c if c > a else a
        if a > largest:
            largest = a
            best_block = edge
        edge += _LANES
    rest = _argmax_few(row, token, edge, stop, np.int64(NO_NODE), largest)
    if rest != NO_NODE:
        return rest
    if best_block != NO_NODE:
        for i in range(best_block, best_block + _LANES):
            if row[id_at(token, i, n_ids)] == largest:
                return i
    return best


@jit
def _argmax_wide(row, token, start, stop):
    """As ``_argmax_few`` for many children in a contiguous row: block by block of the row.

    Children are looked up only in blocks that have a logit above the best so far: about V / K blocks
    times the logarithm of their number, where children are spread like the rest. Where they are not, and
    lookups become many, the children left are gathered.
    """
    n_ids = row.shape[0]
    # The first children set a mark: without one every early block would be looked up.
    edge = start + _MARK
    best = _argmax_many(row, token, start, edge, np.int64(NO_NODE), row.dtype.type(-np.inf))
    largest = row.dtype.type(-np.inf) if best == NO_NODE else row[id_at(token, best, n_ids)]
    lookups_left = n_ids // (_BLOCK * 4)
    block = id_at(token, edge, n_ids)
    while block + _BLOCK <= n_ids:
        # A slice, for its indices are known not to be negative: else this would not be vector code.
        logits = row[block : block + _BLOCK]
        n_above = np.int32(0)
        for i in range(_LANES):
            x, y = logits[i], logits[_LANES + i]
            # NaN where y is: such a block is looked up as well, for x is not known then.
            larger = x if x > y else y
            n_above += np.int32(not larger <= largest)
        if n_above > 0:
            edge = lower_edge(token, edge, stop, block)
            block_stop = lower_edge(token, edge, min(stop, edge + _BLOCK), block + _BLOCK)
            best = _argmax_few(row, token, edge, block_stop, best, largest)
            if best != NO_NODE:
                largest = row[id_at(token, best, n_ids)]
            edge = block_stop
            lookups_left -= 1
            if lookups_left == 0:
                break
        block += _BLOCK
    return _argmax_many(row, token, lower_edge(token, edge, stop, block), stop, best, largest)


@jit
def largest_between(row, start, stop):
    """Find the largest logit in row[start:stop], -inf if there is none.

    Four independent maxima: one alone waits four cycles on itself at each step.
    """
    a, b, c, d = -np.inf, -np.inf, -np.inf, -np.inf
    i = start
    while i + 4 <= stop:
        if row[i] > a:
            a = np.float64(row[i])
        if row[i + 1] > b:
            b = np.float64(row[i + 1])
        if row[i + 2] > c:
            c = np.float64(row[i + 2])
        if row[i + 3] > d:
            d = np.float64(row[i + 3])
        i += 4
    while i < stop:
        if row[i] > a:
            a = np.float64(row[i])
        i += 1
    return max(a, b, c, d)


@jit_sum
def sum_exp_between(row, start, stop, largest):
    """Sum of exp(row[i] - largest) over start .. stop, for finite largest >= every row[i].

    exp(x) = exp(x / 256) ** 256 with a Taylor polynomial of degree 7: only products and sums, so
    that the loop uses vector lanes (4 x faster than the library's exp). Relative error below 1e-11
    down to x = -20, below 1e-6 at -100, where a term stops counting.
    """
    total = 0.0
    for i in range(start, stop):
        x = np.float64(row[i]) - largest
        y = max(x, -100.0) * (1 / 256)
        power = 1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040)))
        power = 1.0 + y * (1.0 + y * (0.5 + y * (1 / 6 + y * power)))
        power *= power
        power *= power
        power *= power
        power *= power
        power *= power
        power *= power
        power *= power
        power *= power
        total += power if x > -100.0 else 0.0
    return total


@jit
def foreign_logsumexp(row, token, start, stop):
    """Sum, in log space, the row over every token that is no child: the logit of stopping.

    exp(this - logsumexp(row)) = 1 - sum of p(children), the end mass. O(V), two passes.
    """
    width = row.shape[0]
    largest = -np.inf
    position = 0
    for edge in range(start, stop + 1):
        segment_stop = width if edge == stop else id_at(token, edge, width)
        largest = max(largest, largest_between(row, position, segment_stop))
        # Never back: damaged ids need not ascend, and the row would be read once for each.
        position = max(position, segment_stop + 1)
    if largest == -np.inf or largest == np.inf:
        return largest
    total = 0.0
    position = 0
    for edge in range(start, stop + 1):
        segment_stop = width if edge == stop else id_at(token, edge, width)
        total += sum_exp_between(row, position, segment_stop, largest)
        position = max(position, segment_stop + 1)
    return largest + math.log(total)


@jit
def best_end_token(cursor, row):
    """The end token of the largest logit (ties and faults: the lowest id); END where there is none.

    One that is a child here as well would go on, not end.
    """
    ends = view_end_tokens(cursor)
    token = view_tokens(cursor)
    start, stop = child_range(cursor)
    best = END
    largest = -np.inf
    for i in range(ends.shape[0]):
        if find_child(token, start, stop, ends[i]) == NO_NODE and (best == END or row[ends[i]] > largest):
            best = ends[i]
            if row[best] > largest:
                largest = np.float64(row[best])
    return best


@jit
def _begin_pick(cursor, row):
    """Reset what a pick reports; False where the row is too narrow."""
    cursor["picked"] = NO_TOKEN
    cursor["stop_logit"] = -np.inf
    cursor["is_forced"] = False
    if row.shape[0] < cursor["min_width"]:
        cursor["status"] = SHORT_ROW
        return False
    return True


@jit
def pick_token(address, row):
    """The greedy pick: a token id, END, or TROUBLE (then ``status`` and ``picked`` tell). O(K).

    At a node where a leaf ends and another goes on, ``mass`` costs a pass over the row, O(V).
    """
    cursor = view_cursor(address)
    if not _begin_pick(cursor, row):
        return TROUBLE
    state = cursor["state"]
    if state == FINISHED:
        return best_end_token(cursor, row)
    token = view_tokens(cursor)
    if state == RELEASED:
        return _argmax_row(row)
    start, stop = child_range(cursor)
    best = argmax_child(row, token, start, stop)
    if ends_leaf(cursor):
        if start == stop:
            return best_end_token(cursor, row)
        return _pick_at_leaf(cursor, row, token, start, stop, best)
    if best == NO_NODE:
        return _pick_lowest(cursor, token, start, stop)
    return id_at(token, best, row.shape[0])


@jit
def _argmax_row(row):
    """The id of the largest logit of the whole row; 0 if none is above -inf."""
    best = 0
    largest = -np.inf
    for i in range(row.shape[0]):
        if row[i] > largest:
            best = i
            largest = row[i]
    return best


@jit
def _pick_at_leaf(cursor, row, token, start, stop, best):
    """Greedy where a leaf ends and another goes on: the largest option, a stop winning ties."""
    best_child = np.int64(NO_TOKEN)
    if best != NO_NODE:
        best_child = id_at(token, best, row.shape[0])
    if cursor["on_end"] == ON_END_MASS:
        stop_logit = foreign_logsumexp(row, token, start, stop)
        cursor["stop_logit"] = stop_logit
        if best == NO_NODE and stop_logit == -np.inf:
            return _pick_lowest(cursor, token, start, stop)
        if best == NO_NODE or stop_logit >= row[best_child]:
            return best_end_token(cursor, row)
        return best_child
    ends = view_end_tokens(cursor)
    best_end = argmax_child(row, ends, 0, ends.shape[0])
    if best_end == NO_NODE:
        if best == NO_NODE:
            return _pick_lowest(cursor, token, start, stop)
        return best_child
    if best == NO_NODE or row[ends[best_end]] > row[best_child]:
        return ends[best_end]
    if row[ends[best_end]] == row[best_child]:
        return min(ends[best_end], best_child)
    return best_child


@jit
def _pick_lowest(cursor, token, start, stop):
    """No valid logit is above -inf: take the lowest valid id and say so."""
    cursor["status"] = ALL_INVALID
    lowest = np.int64(END)
    if start < stop:
        lowest = id_at(token, start, cursor["min_width"])
    if cursor["on_end"] != ON_END_MASS and ends_leaf(cursor):
        ends = view_end_tokens(cursor)
        if ends.shape[0] > 0 and (lowest == END or ends[0] < lowest):
            lowest = np.int64(ends[0])
    cursor["picked"] = lowest
    return TROUBLE


# --- sampling ----------------------------------------------------------------------------------


@jit
def draw_uniform(cursor):
    """A float64 in [0, 1) with 53 random bits, from two outputs of xoshiro128++.

    Blackman and Vigna, "Scrambled linear pseudorandom number generators", ACM TOMS 47(4), 2021.
    64-bit integers masked to 32 bits give the same bits compiled and as plain Python.
    """
    high = _next_random(cursor) >> 5
    low = _next_random(cursor) >> 6
    return (high * 67108864.0 + low) / 9007199254740992.0


@jit
def _next_random(cursor):
    s0, s1 = cursor["random_0"], cursor["random_1"]
    s2, s3 = cursor["random_2"], cursor["random_3"]
    total = (s0 + s3) & 0xFFFFFFFF
    result = (((total << 7) & 0xFFFFFFFF) | (total >> 25)) + s0
    shifted = (s1 << 9) & 0xFFFFFFFF
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= shifted
    s3 = ((s3 << 11) & 0xFFFFFFFF) | (s3 >> 21)
    cursor["random_0"], cursor["random_1"] = s0, s1
    cursor["random_2"], cursor["random_3"] = s2, s3
    return result & 0xFFFFFFFF


@jit
def gather_options(cursor, row, ids, logits):
    """Write the options at the cursor's node; returns how many.

    ids: [>= K + max(n_end, 1)] int32 out, ascending tokens, stops last (END under ``mass``);
    logits: same shape, float64 out, NaN as -inf. O(K), under ``mass`` at a leaf O(V).
    """
    token = view_tokens(cursor)
    start, stop = child_range(cursor)
    n_options = 0
    for edge in range(start, stop):
        child = id_at(token, edge, row.shape[0])
        logit = row[child]
        ids[n_options] = child
        logits[n_options] = logit if logit == logit else -np.inf
        n_options += 1
    if not ends_leaf(cursor):
        return n_options
    if cursor["on_end"] == ON_END_MASS:
        cursor["stop_logit"] = foreign_logsumexp(row, token, start, stop)
        ids[n_options] = END
        logits[n_options] = cursor["stop_logit"]
        return n_options + 1
    ends = view_end_tokens(cursor)
    for i in range(ends.shape[0]):
        if find_child(token, start, stop, ends[i]) != NO_NODE:
            continue  # it goes on, too: one option
        logit = row[ends[i]]
        ids[n_options] = ends[i]
        logits[n_options] = logit if logit == logit else -np.inf
        n_options += 1
    return n_options


@jit
def filter_options(logits, temperature, top_k, top_p, min_p):
    """Turn logits into unnormalised weights, in place; returns their sum, 0 if all are -inf.

    logits: [n] float64. In llama.cpp's default order: the ``top_k`` largest (0 = all), then the
    fewest whose mass reaches ``top_p``, then those of at least ``min_p`` times the largest, each
    by the softmax at temperature 1; what is left is weighed at ``temperature`` > 0. Ties keep
    the earlier option. O(n), with top_k or top_p O(n log n).
    """
    n = logits.shape[0]
    largest = -np.inf
    for i in range(n):
        largest = max(largest, logits[i])
    if largest == -np.inf:
        logits[:] = 0.0
        return 0.0
    if largest == np.inf:
        for i in range(n):
            logits[i] = 0.0 if logits[i] == np.inf else -np.inf
        largest = 0.0
    if 0 < top_k < n or top_p < 1.0:
        order = np.argsort(-logits, kind="mergesort")
        kept = n
        if top_k > 0:
            kept = min(n, top_k)
        total = 0.0
        for i in range(kept):
            total += math.exp(logits[order[i]] - largest)
        reached = 0.0
        n_reached = 0
        while n_reached < kept:
            reached += math.exp(logits[order[n_reached]] - largest)
            n_reached += 1
            if reached >= top_p * total:
                break
        for i in range(n_reached, n):
            logits[order[i]] = -np.inf
    total = 0.0
    for i in range(n):
        if math.exp(logits[i] - largest) < min_p:
            logits[i] = 0.0
        else:
            logits[i] = math.exp((logits[i] - largest) / temperature)
        total += logits[i]
    return total


@jit
def sample_token(address, row):
    """Draw from the options: a token id, END, or TROUBLE, as ``pick_token``; allocates O(K).

    Temperature 0 is ``pick_token``; a stop under ``mass`` is drawn with its share of the softmax,
    subject to the same filters as the children.
    """
    cursor = view_cursor(address)
    if cursor["state"] != ARMED or cursor["temperature"] <= 0.0:
        return pick_token(address, row)
    if not _begin_pick(cursor, row):
        return TROUBLE
    start, stop = child_range(cursor)
    if start == stop:
        return best_end_token(cursor, row)
    room = stop - start + max(np.int64(1), np.int64(cursor["n_end"]))
    ids = np.empty(room, np.int32)
    logits = np.empty(room, np.float64)
    n_options = gather_options(cursor, row, ids, logits)
    weights = logits[:n_options]
    total = filter_options(weights, cursor["temperature"], cursor["top_k"], cursor["top_p"], cursor["min_p"])
    if total == 0.0:
        return _pick_lowest(cursor, view_tokens(cursor), start, stop)
    if n_options == 1:
        # No draw where nothing is open: who skips forced steps draws the same as who takes them.
        return ids[0]
    left = draw_uniform(cursor) * total
    drawn = -1
    for i in range(n_options):
        if weights[i] > 0.0:
            drawn = i
            left -= weights[i]
            if left < 0.0:
                break
    if ids[drawn] == END:
        return best_end_token(cursor, row)
    return ids[drawn]


# --- numbers of a pick, and the mask -----------------------------------------------------------


@jit
def score_pick(cursor, row, picked):
    """Write ``logprob``, ``margin`` and ``is_forced`` of a pick made from this row at this node.

    logprob: nats, of the pick in the softmax over the options (0 where there is only one);
    margin: nats between the best option and the second (inf where there is only one). The end
    tokens share one log-probability, for which of them ends a span is no decision. O(K).
    """
    cursor["logprob"] = 0.0
    cursor["margin"] = np.inf
    start, stop = child_range(cursor)
    at_leaf = ends_leaf(cursor)
    n_options = stop - start + (1 if at_leaf else 0)
    cursor["is_forced"] = cursor["state"] == ARMED and n_options == 1 and not at_leaf
    if cursor["state"] != ARMED or n_options < 2:
        return
    token = view_tokens(cursor)
    # Greedy weighs the end tokens one by one, their share of the softmax is that of all.
    stop_best, stop_logit = -np.inf, -np.inf
    if at_leaf and cursor["on_end"] == ON_END_MASS:
        stop_best = stop_logit = cursor["stop_logit"]
    elif at_leaf:
        stop_best, stop_logit = _weigh_end_tokens(row, view_end_tokens(cursor), token, start, stop)
    first, second = stop_best, -np.inf
    n_infinite = 1 if stop_logit == np.inf else 0
    for edge in range(start, stop):
        logit = np.float64(row[id_at(token, edge, row.shape[0])])
        if logit == np.inf:
            n_infinite += 1
        if logit > first:
            first, second = logit, first
        elif logit > second:
            second = logit
    if first == -np.inf:
        cursor["margin"] = 0.0
        cursor["logprob"] = -math.log(n_options)
        return
    if first == np.inf:
        # The limit that the softmax goes to: who is infinite shares everything.
        cursor["margin"] = np.inf if n_infinite == 1 else 0.0
        cursor["logprob"] = -math.log(n_infinite)
        return
    total = math.exp(stop_logit - first)
    for edge in range(start, stop):
        logit = np.float64(row[id_at(token, edge, row.shape[0])])
        if logit == logit:
            total += math.exp(logit - first)
    chosen = stop_logit
    if find_child(token, start, stop, picked) != NO_NODE:
        chosen = np.float64(row[picked])
    cursor["margin"] = first - second
    cursor["logprob"] = chosen - first - math.log(total)


@jit
def _weigh_end_tokens(row, ends, token, start, stop):
    """(largest, logsumexp) of the end tokens' logits; those that are children too are left out."""
    largest = -np.inf
    for i in range(ends.shape[0]):
        if row[ends[i]] > largest and find_child(token, start, stop, ends[i]) == NO_NODE:
            largest = np.float64(row[ends[i]])
    if largest == -np.inf or largest == np.inf:
        return largest, largest
    total = 0.0
    for i in range(ends.shape[0]):
        logit = np.float64(row[ends[i]])
        if logit == logit and find_child(token, start, stop, ends[i]) == NO_NODE:
            total += math.exp(logit - largest)
    return largest, largest + math.log(total)


@jit
def _logsumexp_children(row, token, start, stop):
    """Sum, in log space, the children's logits; NaN counts as -inf."""
    largest = -np.inf
    for edge in range(start, stop):
        if row[id_at(token, edge, row.shape[0])] > largest:
            largest = np.float64(row[id_at(token, edge, row.shape[0])])
    if largest == -np.inf or largest == np.inf:
        return largest
    total = 0.0
    for edge in range(start, stop):
        logit = np.float64(row[id_at(token, edge, row.shape[0])])
        if logit == logit:
            total += math.exp(logit - largest)
    return largest + math.log(total)


@jit
def _share_infinite(row, token, start, stop, out):
    """``score_children`` in the limit: infinite logits share everything equally."""
    n_infinite = 0
    for i in range(row.shape[0]):
        if row[i] == np.inf:
            n_infinite += 1
    n_foreign = n_infinite
    for edge in range(start, stop):
        out[edge - start] = -np.inf
        if row[id_at(token, edge, row.shape[0])] == np.inf:
            out[edge - start] = -math.log(n_infinite)
            n_foreign -= 1
    return math.log(n_foreign / n_infinite) if n_foreign > 0 else -np.inf


@jit
def score_children(row, token, start, stop, out):
    """Write the children's log-probabilities in the softmax over the whole row; returns that of all others.

    row: [W] float32 or float64; token: [E] int32, the children are start .. stop; out: [stop - start] float64.
    The log-probability of everything that is no child is the end mass where a leaf ends. NaN counts as
    -inf; a row without a finite logit gives -inf for all. O(V).
    """
    foreign = foreign_logsumexp(row, token, start, stop)
    children = _logsumexp_children(row, token, start, stop)
    largest = max(foreign, children)
    if largest == np.inf:
        return _share_infinite(row, token, start, stop, out)
    if largest == -np.inf:
        out[:] = -np.inf
        return -np.inf
    total = largest + math.log(math.exp(foreign - largest) + math.exp(children - largest))
    for edge in range(start, stop):
        logit = np.float64(row[id_at(token, edge, row.shape[0])])
        out[edge - start] = logit - total if logit == logit else -np.inf
    return foreign - total


@jit
def measure_valid_mass(address, row):
    """The model's own probability that its next token is one of the children; NaN for a short row. O(V)."""
    cursor = view_cursor(address)
    if row.shape[0] < cursor["min_width"]:
        return np.nan
    token = view_tokens(cursor)
    start, stop = child_range(cursor)
    inside = _logsumexp_children(row, token, start, stop)
    outside = foreign_logsumexp(row, token, start, stop)
    if inside == np.inf:
        return 0.5 if outside == np.inf else 1.0
    if inside == -np.inf:
        return 0.0
    return 1.0 / (1.0 + math.exp(min(outside - inside, 700.0)))


# llama.cpp's candidates are three words, the logit one of them: which words of 16 records are logits.
_RECORD_BYTES = 12
_MAX_TOKEN = np.iinfo(np.int32).max
_LOGIT_WORDS = np.tile(np.array([True, False, False]), 16)


@jit
def keep_only(row, token):
    """Leave one token in the row, in place: all others become -inf. O(V).

    A logit of NaN or -inf is replaced by 0: samplers downstream need one finite candidate. Rows of
    llama.cpp's candidates are blended whole, three vectors at a time: stores into every third word
    take a tenth longer, NumPy's twice as long.
    """
    kept = row[token]
    if row.itemsize == 4 and row.strides[0] == _RECORD_BYTES:
        words = view_float32(row.ctypes.data, 3 * row.shape[0] - 2)
        n_blocks = words.shape[0] // 48
        for block in range(n_blocks):
            for i in range(48):
                word = words[48 * block + i]
                words[48 * block + i] = np.float32(-np.inf) if _LOGIT_WORDS[i] else word
        row[16 * n_blocks :] = -np.inf
    else:
        row[:] = -np.inf
    row[token] = kept if kept > -np.inf else 0.0


@jit
def keep_allowed(address, row):
    """Set every token that is not allowed to -inf, in place; released: nothing. O(V)."""
    cursor = view_cursor(address)
    if cursor["state"] == RELEASED:
        return
    token = view_tokens(cursor)
    start, stop = child_range(cursor)
    ends = view_end_tokens(cursor)
    if cursor["state"] == FINISHED:
        stop = start
    elif not ends_leaf(cursor):
        ends = ends[:0]
    position = 0
    edge = start
    end = 0
    # Children and end tokens are merged in ascending order, the gaps between them filled.
    while edge < stop or end < ends.shape[0]:
        child = id_at(token, edge, row.shape[0]) if edge < stop else np.int64(_MAX_TOKEN)
        kept = child
        if end < ends.shape[0] and ends[end] <= kept:
            kept = np.int64(ends[end])
            end += 1
        if edge < stop and child == kept:
            edge += 1
        row[position:kept] = -np.inf
        # Never back, as in ``foreign_logsumexp``.
        position = max(position, kept + 1)
    row[position:] = -np.inf


@jit
def score_row(address, row, samples):
    """Pick or draw, and score the pick: ``picked``, ``logprob`` and ``margin`` of the record.

    Returns what ``pick_token`` returns. The row is left for ``keep_only``: as a call of its own
    that loop is compiled to vector stores, inside this one it takes twice as long.
    """
    picked = sample_token(address, row) if samples else pick_token(address, row)
    cursor = view_cursor(address)
    token = cursor["picked"] if picked == TROUBLE else picked
    if token >= 0 or picked == END:
        score_pick(cursor, row, token)
        cursor["picked"] = token
    return picked


# --- the native sampler ------------------------------------------------------------------------
# What llama.cpp calls, through C entry points that Numba makes of the native_... functions: no
# Python and no GIL. Addresses of llama_sampler and llama_token_data_array come as integers. The
# functions are plain, compiled on demand (``llama/sampler.py``), and run as Python in tests.


@intrinsic
def _call_1(_typing, _function, _argument):
    """int64 function(int64) of C, by address."""
    return types.int64(types.int64, types.int64), _codegen_of_call(1)


@intrinsic
def _call_2(_typing, _function, _first, _second):
    """int64 function(int64, int64) of C, by address."""
    return types.int64(types.int64, types.int64, types.int64), _codegen_of_call(2)


def _codegen_of_call(n_arguments):
    def codegen(_context, builder, _signature, arguments):
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * n_arguments)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return codegen


@intrinsic
def _fetch_add(_typing, _address, _delta):
    """Add to the int64 at an address atomically; the value before."""

    def codegen(context, builder, _signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def call_1(function, argument):
    """Call a C function of one word by address."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(int(function))(int(argument))


@overload(call_1)
def _overload_call_1(function, argument):
    return lambda function, argument: _call_1(function, argument)


def call_2(function, first, second):
    """Call a C function of two words by address."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return kind(int(function))(int(first), int(second))


@overload(call_2)
def _overload_call_2(function, first, second):
    return lambda function, first, second: _call_2(function, first, second)


def fetch_add(address, delta):
    """Add to a shared counter; the value before. Samplers are cloned and freed in any thread."""
    counter = _view(address, np.int64, 1)
    before = int(counter[0])
    counter[0] += delta
    return before


@overload(fetch_add)
def _overload_fetch_add(address, delta):
    return lambda address, delta: _fetch_add(address, delta)


_REFERENCES_OFFSET = dict(NATIVE.fields or {})["references"][1]
_NATIVE_SIZE = NATIVE.itemsize


@jit
def fetch_reference(address):
    """Take a share of a native record for a Python handle."""
    fetch_add(address + _REFERENCES_OFFSET, 1)


@jit
def release_record(address):
    """Give up one owner's share of a native record; the last one frees it."""
    if fetch_add(address + _REFERENCES_OFFSET, -1) == 1:
        native = view_native(address)
        free_address = native["free_address"]
        alive_address = native["alive_address"]
        call_1(free_address, address)
        fetch_add(alive_address, -1)


@jit
def copy_record(address):
    """A native record of its own with the same content, one owner; 0 where C has no memory."""
    native = view_native(address)
    size = _NATIVE_SIZE
    copy_address = call_1(native["malloc_address"], size)
    if copy_address == 0:
        return copy_address
    view_int8(copy_address, size)[:] = view_int8(address, size)
    copy = view_native(copy_address)
    copy["references"] = 1
    copy["is_freed"] = 0
    copy["trouble"] = OK
    copy["twin_address"] = 0
    fetch_add(copy["alive_address"], 1)
    return copy_address


@jit
def context_of(sampler_address):
    """``llama_sampler.ctx``: the native record's address."""
    return view_int64(sampler_address, 2)[1]


# A value of ``keeps_options`` like 1, under which the probe leaves the options too.
_KEEPS_AT_BOTH_ENDS = 2


@jit
def let_probe_constrain(address):
    """Let the probe leave the options already, for samplers in between that may add a candidate."""
    view_native(address)["keeps_options"] = _KEEPS_AT_BOTH_ENDS


@jit
def _report(native, status):
    if status != OK and native["trouble"] == OK:
        native["trouble"] = status


def native_name(sampler_address):
    """``llama_sampler_i.name``."""
    return view_native(context_of(sampler_address))["name_address"]


def native_accept(sampler_address, token):
    """``llama_sampler_i.accept``: one step of the state machine."""
    address = context_of(sampler_address)
    _report(view_native(address), accept_token(address, token))


def native_reset(sampler_address):
    """``llama_sampler_i.reset``: back to the root, armed or released as at birth."""
    address = context_of(sampler_address)
    arm_cursor(address, view_native(address)["birth_root"])


def native_clone(sampler_address):
    """``llama_sampler_i.clone``: a sampler at the same place that walks on its own.

    A probe in front has been cloned just before and left its record: the pair shares it.
    """
    address = context_of(sampler_address)
    native = view_native(address)
    copy_address = native["twin_address"]
    if copy_address != 0:
        native["twin_address"] = 0
        fetch_add(copy_address + _REFERENCES_OFFSET, 1)
    else:
        copy_address = copy_record(address)
    return call_2(native["init_address"], native["interface_address"], copy_address)


def native_free(sampler_address):
    """``llama_sampler_i.free``: give the record back; llama.cpp deletes the wrapper."""
    address = context_of(sampler_address)
    view_native(address)["is_freed"] = 1
    release_record(address)


def native_apply(sampler_address, array_address):
    """``llama_sampler_i.apply``: leave the options (or the pick) in the candidate array."""
    apply_to_candidates(context_of(sampler_address), array_address)


def probe_apply(sampler_address, array_address):
    """``apply`` of a probe: pick from the raw logits, for the trie sampler behind the filters."""
    address = context_of(sampler_address)
    native = view_native(address)
    native["probed"] = NO_TOKEN
    fields = view_int64(array_address, 4)
    size = fields[1]
    if native["state"] != RELEASED and size >= native["min_width"] and is_ordered(address, fields[0], size):
        row = view_float32(fields[0], 3 * size)[1::3]
        picked = pick_token(address, row)
        native["probed"] = NO_TOKEN if picked == TROUBLE else picked
    if native["keeps_options"] == _KEEPS_AT_BOTH_ENDS:
        apply_to_candidates(address, array_address)


def probe_clone(sampler_address):
    """``clone`` of a probe: its record waits for the trie sampler's clone."""
    address = context_of(sampler_address)
    native = view_native(address)
    copy_address = copy_record(address)
    native["twin_address"] = copy_address
    return call_2(native["init_address"], native["probe_interface_address"], copy_address)


def probe_free(sampler_address):
    """``free`` of a probe: the trie sampler owns the walk, so only a share is given back."""
    release_record(context_of(sampler_address))


@jit
def is_ordered(address, data_address, size):
    """Whether slot t of the candidates still holds id t, for every token that is allowed. O(K).

    What follows writes to those slots, so ids out of order or range, of a damaged file, are no order either.
    """
    cursor = view_cursor(address)
    if size < cursor["min_width"]:
        return False
    ids = view_int32(data_address, 3 * size)
    token = view_tokens(cursor)
    start, stop = child_range(cursor)
    before = np.int64(-1)
    for edge in range(start, stop):
        child = np.int64(token[edge])
        if child <= before or child >= size or ids[3 * child] != child:
            return False
        before = child
    ends = view_end_tokens(cursor)
    for i in range(ends.shape[0]):
        if ids[3 * ends[i]] != ends[i]:
            return False
    return True


@jit
def apply_to_candidates(address, array_address):
    """Constrain a ``llama_token_data_array`` to the options at the record's node.

    array: {data*, size, selected, sorted}; data are [size] records of id int32, logit float32 and
    p float32. An array in its original order costs O(K) under DROP; a shuffled, sorted or truncated
    one, and MASK, O(size log K). Where a leaf ends under ``mass`` the stop is the best end token
    with the stop's logit, so that samplers behind weigh it as an option.
    """
    native = view_native(address)
    fields = view_int64(array_address, 4)
    size = fields[1]
    if native["state"] == RELEASED or size == 0:
        return
    native["n_applied"] += 1
    native["n_candidates"] += size
    # Rewritten logits are in no order, and dist takes the first of a sorted array for the largest.
    view_int8(array_address + 24, 1)[0] = 0
    ids = view_int32(fields[0], 3 * size)
    logits = view_float32(fields[0], 3 * size)
    cursor = view_cursor(address)
    token = view_tokens(cursor)
    ends = view_end_tokens(cursor)
    start, stop = child_range(cursor)
    at_leaf = native["state"] == FINISHED or ends_leaf(cursor)
    if native["state"] == FINISHED:
        stop = start
    ordered = is_ordered(address, fields[0], size)
    stop_logit = -np.inf
    weighs_mass = at_leaf and start < stop and native["on_end"] == ON_END_MASS
    end_token = NO_TOKEN
    if weighs_mass:
        stop_logit = _foreign_mass(ids, logits, size, token, start, stop, ordered)
        native["stop_logit"] = stop_logit
        end_token = _best_end_candidate(ids, logits, size, token, start, stop, ends)
    n_ends = ends.shape[0] if at_leaf and not weighs_mass else 0

    if native["on_invalid"] != DROP:
        if ordered:
            n_valid, n_finite = _mask_ordered(logits, size, token, start, stop, ends, n_ends, end_token, stop_logit)
        else:
            n_valid, n_finite = _mask_scanned(
                ids, logits, size, token, start, stop, ends, n_ends, end_token, stop_logit
            )
        native["n_valid"] += n_finite
        if n_finite == 0:
            _put_back(native, fields, ids, logits, token, start, stop, ends, n_ends, n_valid)
        return

    if ordered:
        n_valid = _compact_ordered(ids, logits, token, start, stop, ends, n_ends)
    else:
        n_valid = _compact_scanned(ids, logits, size, token, start, stop, ends, n_ends)
    if stop_logit > -np.inf and end_token != NO_TOKEN:
        # A foreign token gave the mass its weight, so the array has room for one more option.
        ids[3 * n_valid] = end_token
        logits[3 * n_valid + 1] = stop_logit
        n_valid += 1
    native["n_valid"] += n_valid
    fields[1] = n_valid
    fields[2] = -1
    best = _best_candidate(ids, logits, n_valid, end_token)
    if best < 0:
        _put_back(native, fields, ids, logits, token, start, stop, ends, n_ends, n_valid)
    elif native["keeps_options"] == 0:
        ids[0] = ids[3 * best]
        logits[1] = logits[3 * best + 1]
        fields[1] = 1
        fields[2] = 0


@jit
def _is_valid_candidate(candidate, token, start, stop, ends, n_ends):
    if find_child(token, start, stop, candidate) != NO_NODE:
        return True
    return find_child(ends, 0, n_ends, candidate) != NO_NODE


@jit
def _foreign_mass(ids, logits, size, token, start, stop, ordered):
    """``foreign_logsumexp`` over candidates in any order."""
    if ordered:
        return foreign_logsumexp(logits[1 : 3 * size : 3], token, start, stop)
    largest = -np.inf
    for i in range(size):
        if logits[3 * i + 1] > largest and find_child(token, start, stop, ids[3 * i]) == NO_NODE:
            largest = np.float64(logits[3 * i + 1])
    if largest == -np.inf or largest == np.inf:
        return largest
    total = 0.0
    for i in range(size):
        logit = np.float64(logits[3 * i + 1])
        if logit == logit and find_child(token, start, stop, ids[3 * i]) == NO_NODE:
            total += math.exp(logit - largest)
    return largest + math.log(total)


@jit
def _best_end_candidate(ids, logits, size, token, start, stop, ends):
    """``best_end_token`` among candidates in any order; NO_TOKEN where there is none. O(size log n_end)."""
    best = NO_TOKEN
    for i in range(ends.shape[0]):
        if find_child(token, start, stop, ends[i]) == NO_NODE:
            best = ends[i]
            break
    largest = -np.inf
    for i in range(size):
        candidate, logit = ids[3 * i], logits[3 * i + 1]
        if not (logit > largest or (logit == largest and candidate < best)):
            continue
        if find_child(ends, 0, ends.shape[0], candidate) == NO_NODE:
            continue
        if find_child(token, start, stop, candidate) == NO_NODE:
            best = candidate
            largest = np.float64(logit)
    return best


@jit
def _compact_ordered(ids, logits, token, start, stop, ends, n_ends):
    """Move the valid candidates to the front, ascending; how many. Slot t holds id t. O(K).

    Ascending ids never move past a slot that is still needed: the n-th lowest is at least n.
    """
    n_valid = 0
    edge = start
    end = 0
    while edge < stop or end < n_ends:
        from_child = edge < stop and (end >= n_ends or token[edge] <= ends[end])
        wanted = token[edge] if from_child else ends[end]
        if edge < stop and token[edge] == wanted:
            edge += 1
        if end < n_ends and ends[end] == wanted:
            end += 1
        logits[3 * n_valid + 1] = logits[3 * wanted + 1]
        ids[3 * n_valid] = wanted
        n_valid += 1
    return n_valid


@jit
def _compact_scanned(ids, logits, size, token, start, stop, ends, n_ends):
    """``_compact_ordered`` for candidates in any order, which is kept. O(size log K)."""
    n_valid = 0
    for i in range(size):
        if _is_valid_candidate(ids[3 * i], token, start, stop, ends, n_ends):
            ids[3 * n_valid] = ids[3 * i]
            logits[3 * n_valid + 1] = logits[3 * i + 1]
            n_valid += 1
    return n_valid


@jit
def _mask_ordered(logits, size, token, start, stop, ends, n_ends, end_token, stop_logit):
    """``_mask_scanned`` where slot t holds id t: the gaps between the options are filled. O(size)."""
    n_valid, n_finite = 0, 0
    position = 0
    edge = start
    end = 0
    stops = 1 if end_token != NO_TOKEN else 0
    while edge < stop or end < n_ends or stops > 0:
        kept = _MAX_TOKEN
        if edge < stop:
            kept = token[edge]
        if end < n_ends:
            kept = min(kept, ends[end])
        if stops > 0:
            kept = min(kept, end_token)
        if edge < stop and token[edge] == kept:
            edge += 1
        if end < n_ends and ends[end] == kept:
            end += 1
        if stops > 0 and end_token == kept:
            stops = 0
            logits[3 * kept + 1] = stop_logit
        logits[3 * position + 1 : 3 * kept : 3] = -np.inf
        position = kept + 1
        n_valid += 1
        if logits[3 * kept + 1] > -np.inf:
            n_finite += 1
        else:
            logits[3 * kept + 1] = -np.inf
    logits[3 * position + 1 : 3 * size : 3] = -np.inf
    return n_valid, n_finite


@jit
def _mask_scanned(ids, logits, size, token, start, stop, ends, n_ends, end_token, stop_logit):
    """Write -inf to every candidate that is no option; (options present, those with a finite logit).

    A stop whose end token was filtered away takes the slot of a foreign token.
    """
    n_present, n_finite = 0, 0
    foreign = -1
    stop_slot = -1
    for i in range(size):
        candidate = ids[3 * i]
        if end_token != NO_TOKEN and candidate == end_token:
            stop_slot = i
        elif _is_valid_candidate(candidate, token, start, stop, ends, n_ends):
            n_present += 1
            if logits[3 * i + 1] > -np.inf:
                n_finite += 1
            else:
                logits[3 * i + 1] = -np.inf
        else:
            foreign = i
            logits[3 * i + 1] = -np.inf
    if stop_slot < 0 and stop_logit > -np.inf and end_token != NO_TOKEN:
        stop_slot = foreign
        ids[3 * stop_slot] = end_token
    if stop_slot >= 0:
        logits[3 * stop_slot + 1] = stop_logit
        n_present += 1
        n_finite += 1 if stop_logit > -np.inf else 0
    return n_present, n_finite


@jit
def _best_candidate(ids, logits, n_valid, end_token):
    """The slot of the greedy pick, -1 if no option is above -inf; NaN becomes -inf in place.

    Ties go to the stop under ``mass`` (``end_token``), else to the lowest id.
    """
    best = -1
    largest = -np.inf
    for i in range(n_valid):
        logit = logits[3 * i + 1]
        if not logit > -np.inf:
            logits[3 * i + 1] = -np.inf
        elif logit > largest or (
            logit == largest
            and (ids[3 * i] == end_token or (ids[3 * best] != end_token and ids[3 * i] < ids[3 * best]))
        ):
            best = i
            largest = logit
    return best


@jit
def _put_back(native, fields, ids, logits, token, start, stop, ends, n_ends, n_valid):
    """No option is left with a finite logit: leave one candidate, never none, and say so.

    It is what a probe picked before the filters, else the lowest valid id.
    """
    kept = NO_TOKEN
    if native["probed"] != NO_TOKEN:
        kept = native["probed"]
        status = NO_CANDIDATE
    else:
        if start < stop:
            kept = id_at(token, start, native["min_width"])
        if n_ends > 0 and (kept == NO_TOKEN or ends[0] < kept):
            kept = ends[0]
        if kept == NO_TOKEN and ends.shape[0] > 0:
            kept = ends[0]
        status = ALL_INVALID if n_valid > 0 else NO_CANDIDATE
    if kept == NO_TOKEN:
        return
    native["status"] = status
    _report(native, status)
    ids[0] = kept
    logits[1] = 0.0
    fields[1] = 1
    fields[2] = 0 if native["keeps_options"] == 0 else -1
