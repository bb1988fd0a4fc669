"""From ragged token paths to the flat arrays of a trie, in compiled code.

The builder walks the trie level by level. At each level a node is a range of paths that share
their first d tokens; sorting that range by token d makes its children runs of equal tokens:

1. Level 0 holds one node per root: all paths of one descriptor.
2. Paths that end at a node mark it terminal and leave the range.
3. The rest is sorted by the next token, small ranges by insertion, large ones by radix.
4. Each run of equal tokens becomes a child, numbered in order: breadth-first, ascending.

Every token is looked at a constant number of times, so the cost is O(T) for T tokens in all,
and ten million leaves take seconds on one thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trie_sampler.jit import jit
from trie_sampler.layout import LEAF, NO_LEAF, NO_TOKEN, NODE, OFFSET, TOKEN

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MAX_NODES = 2**31 - 2
"""Node ids are int32; a trie of that size would hold 25 GB."""

# Below this length insertion beats the 256 counters of a radix pass (measured: 40 to 90 equal).
_INSERTION_LIMIT = 64


class Arrays(NamedTuple):
    """What the builder makes; see ``layout`` for the first three."""

    token: Int32s
    """[S] int32"""
    first_child: Int32s
    """[S+1] int32"""
    leaf: Int32s
    """[S] int32"""
    collided_node: Int32s
    """[C] int32: terminals at which a second leaf ended"""
    collided_leaf: Int32s
    """[C] int32: the leaf that lost its place there"""
    depth: int
    """Length of the longest path."""


def build_arrays(tokens: Int32s, offsets: Int64s, root_offsets: Int64s, path_leaf: Int32s) -> Arrays:
    """Build the arrays of a trie from token paths.

    Args:
        tokens: [T] int32, all paths one after the other; ids >= 0.
        offsets: [P+1] int64, path p is ``tokens[offsets[p]:offsets[p+1]]``; none is empty.
        root_offsets: [R+1] int64, descriptor r owns paths ``root_offsets[r] .. root_offsets[r+1]``.
        path_leaf: [P] int32, the leaf that path p spells. Where two leaves share a path the
            first keeps it.

    Returns:
        The arrays. Cost: O(T) time; 12 bytes a node and about 36 bytes a path while building.

    Raises:
        OverflowError: more nodes than int32 can number.
    """
    n_nodes_at_most = len(root_offsets) - 1 + len(tokens)
    if n_nodes_at_most > MAX_NODES:
        raise OverflowError(f"{n_nodes_at_most} nodes at most; int32 numbers only {MAX_NODES}")
    n_paths = len(offsets) - 1
    token = np.empty(n_nodes_at_most, TOKEN)
    first_child = np.empty(n_nodes_at_most + 1, NODE)
    leaf = np.empty(n_nodes_at_most, LEAF)
    collided_node = np.empty(n_paths, NODE)
    collided_leaf = np.empty(n_paths, LEAF)
    n_nodes, n_collided, depth = _fill_levels(
        np.ascontiguousarray(tokens, TOKEN),
        np.ascontiguousarray(offsets, OFFSET),
        np.ascontiguousarray(root_offsets, OFFSET),
        np.ascontiguousarray(path_leaf, LEAF),
        token,
        first_child,
        leaf,
        collided_node,
        collided_leaf,
    )
    return Arrays(
        token[:n_nodes].copy(),
        first_child[: n_nodes + 1].copy(),
        leaf[:n_nodes].copy(),
        collided_node[:n_collided].copy(),
        collided_leaf[:n_collided].copy(),
        depth,
    )


@jit
def _fill_levels(
    tokens,
    offsets,
    root_offsets,
    path_leaf,
    token,
    first_child,
    leaf,
    collided_node,
    collided_leaf,
):
    """Fill the node arrays breadth-first; returns (n_nodes, n_collided, depth). O(T)."""
    n_paths = offsets.shape[0] - 1
    n_level = root_offsets.shape[0] - 1
    n_digits = _count_digits(tokens)
    # keys: token of the level in the high half, path in the low half; one range per node.
    keys = np.arange(n_paths)
    spare = np.empty(n_paths, np.int64)
    level_start = root_offsets[:-1].copy()
    level_stop = root_offsets[1:].copy()
    next_start = np.empty(max(n_paths, n_level), np.int64)
    next_stop = np.empty(max(n_paths, n_level), np.int64)
    for root in range(n_level):
        token[root] = NO_TOKEN
    n_nodes = n_level
    n_collided = 0
    node = 0
    depth = 0
    while n_level > 0:
        n_next = 0
        for i in range(n_level):
            start, stop = level_start[i], level_stop[i]
            leaf[node] = NO_LEAF
            end = start
            for j in range(start, stop):
                path = keys[j] & 0xFFFFFFFF
                place = offsets[path] + depth
                if place < offsets[path + 1]:
                    keys[end] = (np.int64(tokens[place]) << 32) | path
                    end += 1
                    continue
                ended = path_leaf[path]
                if leaf[node] == NO_LEAF:
                    leaf[node] = ended
                elif leaf[node] != ended:
                    collided_node[n_collided] = node
                    collided_leaf[n_collided] = ended
                    n_collided += 1
            if end - start > 1:
                _sort_by_token(keys, spare, start, end, n_digits)
            first_child[node] = n_nodes
            run = start
            while run < end:
                wanted = keys[run] >> 32
                run_stop = run + 1
                while run_stop < end and keys[run_stop] >> 32 == wanted:
                    run_stop += 1
                token[n_nodes] = wanted
                next_start[n_next] = run
                next_stop[n_next] = run_stop
                n_nodes += 1
                n_next += 1
                run = run_stop
            node += 1
        if n_next > 0:
            depth += 1
        level_start, next_start = next_start, level_start
        level_stop, next_stop = next_stop, level_stop
        if next_start.shape[0] < level_start.shape[0]:
            # The first level's arrays are as short as there are roots.
            next_start = np.empty(level_start.shape[0], np.int64)
            next_stop = np.empty(level_start.shape[0], np.int64)
        n_level = n_next
    first_child[n_nodes] = n_nodes
    return n_nodes, n_collided, depth


@jit
def _count_digits(tokens):
    """How many base-256 digits the largest token has."""
    largest = 0
    for i in range(tokens.shape[0]):
        largest = max(largest, tokens[i])
    n_digits = 1
    while largest >> (8 * n_digits) > 0:
        n_digits += 1
    return n_digits


@jit
def _sort_by_token(keys, spare, start, stop, n_digits):
    """Sort keys[start:stop] in place, stable in the token half. O(n) passes for long ranges.

    Long ranges: least significant digit first radix sort (Knuth, TAOCP vol. 3, 5.2.5).
    """
    if stop - start < _INSERTION_LIMIT:
        for i in range(start + 1, stop):
            key = keys[i]
            j = i - 1
            while j >= start and keys[j] > key:
                keys[j + 1] = keys[j]
                j -= 1
            keys[j + 1] = key
        return
    counts = np.empty(257, np.int64)
    for digit in range(n_digits):
        shift = 32 + 8 * digit
        counts[:] = 0
        for i in range(start, stop):
            counts[((keys[i] >> shift) & 0xFF) + 1] += 1
        counts[0] = start
        for value in range(256):
            counts[value + 1] += counts[value]
        for i in range(start, stop):
            value = (keys[i] >> shift) & 0xFF
            spare[counts[value]] = keys[i]
            counts[value] += 1
        for i in range(start, stop):
            keys[i] = spare[i]


def number_names(blob: npt.NDArray[np.uint8], offsets: Int64s, groups: Int32s, base: int) -> npt.NDArray[np.int64]:
    """Find for each name the first one of its group that is equal to it.

    Args:
        blob: [B] uint8, the names' bytes.
        offsets: [N+1] int64, name i is ``blob[offsets[i]:offsets[i+1]]``.
        groups: [N] int32.
        base: of the hash, below 2^31 - 1.

    Returns:
        [N] int64: an index, its own where no equal name comes before. Cost: O(B + N log N).
    """
    hashes = np.empty(len(groups), np.int64)
    _hash_names(blob, offsets, groups, base, hashes)
    first = np.empty(len(groups), np.int64)
    _find_equal_names(blob, offsets, groups, hashes, np.argsort(hashes, kind="stable"), first)
    return first


_PRIME = 2**31 - 1


@jit
def _hash_names(blob, offsets, groups, base, hashes):
    """Write a polynomial in ``base`` modulo a prime for each name and group. O(B)."""
    for i in range(hashes.shape[0]):
        total = np.int64(groups[i]) + 1
        for j in range(offsets[i], offsets[i + 1]):
            total = (total * base + np.int64(blob[j]) + 1) % _PRIME
        hashes[i] = total


@jit
def _find_equal_names(blob, offsets, groups, hashes, order, first):
    """Compare names of equal hash with the first ones of each kind among them. O(B) unless hashes collide."""
    n = order.shape[0]
    start = 0
    for place in range(n):
        if hashes[order[place]] != hashes[order[start]]:
            start = place
        name = order[place]
        first[name] = name
        for other in range(start, place):
            known = order[other]
            if first[known] == known and groups[known] == groups[name] and _are_equal(blob, offsets, known, name):
                first[name] = known
                break


@jit
def _are_equal(blob, offsets, one, other):
    """Whether two names have the same bytes."""
    length = offsets[one + 1] - offsets[one]
    if offsets[other + 1] - offsets[other] != length:
        return False
    for i in range(length):
        if blob[offsets[one] + i] != blob[offsets[other] + i]:
            return False
    return True
