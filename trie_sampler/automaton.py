"""All ways to write the choices with a vocabulary, as one graph, in compiled code.

A tokenizer has one favourite path for a text; a model may take another: ``PLAY`` as ``P``, ``LAY``.
A grammar allows them all, and so does this automaton. Its states are the nodes of the byte trie of
the choices; from state ``s`` an edge leads to ``t`` for every token whose bytes spell the way from
``s`` to ``t``. Paths join where they have spelled the same bytes, so a state still knows its leaf.

Two byte tries are walked side by side: that of the choices from every state, that of the
vocabulary's pieces from its root. The cost is what they have in common, about the length of the
longest piece for each byte of the choices, however large the vocabulary is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trie_sampler.build import build_arrays
from trie_sampler.jit import jit
from trie_sampler.layout import LEAF, NO_LEAF, NODE, OFFSET, TOKEN
from trie_sampler.tokens import Tokenizer

Int32s = npt.NDArray[np.int32]

SEVERAL = -1
"""In ``Automaton.sole_leaf``: more than one leaf can still come out."""


@dataclass(frozen=True)
class PieceIndex:
    """The byte trie of a vocabulary's pieces, P nodes; control and end tokens have none.

    Attributes:
        byte: [P] int32, the byte that enters the node.
        first_child: [P+1] int32, as in ``layout``.
        first_id: [P+1] int32, tokens whose piece ends at node p are ``ids[first_id[p]:first_id[p+1]]``.
        ids: [V'] int32, ascending for each node.
    """

    byte: Int32s
    first_child: Int32s
    first_id: Int32s
    ids: Int32s

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PieceIndex:
        """The index of a vocabulary; made once, O(V), about 0.5 s for 262,144 tokens."""
        try:
            known = _indices.get(tokenizer)
        except TypeError:  # a Tokenizer that cannot be hashed or weakly referenced
            return cls._make(tokenizer)
        if known is None:
            known = _indices[tokenizer] = cls._make(tokenizer)
        return known

    @classmethod
    def _make(cls, tokenizer: Tokenizer) -> PieceIndex:
        ends = set(tokenizer.eog_ids)
        pieces = [b"" if token in ends else tokenizer.detokenize((token,)) for token in range(tokenizer.n_vocab)]
        lengths = np.fromiter(map(len, pieces), OFFSET, len(pieces))
        spelled = np.flatnonzero(lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths[spelled])])
        data = np.frombuffer(b"".join(pieces), np.uint8).astype(TOKEN)
        arrays = build_arrays(data, offsets, np.array([0, len(spelled)]), spelled.astype(LEAF))
        # Several tokens of one piece are to the builder leaves that collide.
        first = np.flatnonzero(arrays.leaf != NO_LEAF)
        nodes = np.concatenate([first, arrays.collided_node])
        ids = np.concatenate([arrays.leaf[first], arrays.collided_leaf])
        order = np.lexsort((ids, nodes))
        first_id = np.searchsorted(nodes[order], np.arange(len(arrays.token) + 1)).astype(NODE)
        return cls(arrays.token, arrays.first_child, first_id, ids[order].astype(TOKEN))


_indices: weakref.WeakKeyDictionary[Any, PieceIndex] = weakref.WeakKeyDictionary()


def forget_pieces(tokenizer: Tokenizer) -> None:
    """Drop the index of a vocabulary."""
    try:
        _indices.pop(tokenizer, None)
    except TypeError:
        return


class Automaton(NamedTuple):
    """What ``write_in_every_way`` makes; S states, E edges, see ``layout``."""

    token: Int32s
    """[E] int32"""
    target: Int32s
    """[E] int32"""
    first_child: Int32s
    """[S+1] int32"""
    leaf: Int32s
    """[S] int32"""
    sole_leaf: Int32s
    """[S] int32: the leaf that must come out, ``SEVERAL`` where it is open."""
    state_of: Int32s
    """[nodes of the byte trie] int32: what became of each node, -1 where no token ends there."""
    depth: int
    """Tokens of the longest path."""


class ByteGraph(NamedTuple):
    """What is to be written, byte by byte: B nodes, C edges, each to a node of larger number; see ``layout``."""

    byte: Int32s
    """[C] int32"""
    target: Int32s
    """[C] int32"""
    first_child: Int32s
    """[B+1] int32"""
    leaf: Int32s
    """[B] int32"""

    @classmethod
    def of_trie(cls, byte: Int32s, first_child: Int32s, leaf: Int32s) -> ByteGraph:
        """A byte trie's arrays: edge i leads to node i."""
        return cls(byte, np.arange(len(byte), dtype=NODE), first_child, leaf)

    @classmethod
    def of_numbers(cls) -> ByteGraph:
        """JSON numbers of up to 15 digits before and 6 after the point; all are leaf 0.

        A float64 holds 15 decimal digits.
        """
        n_integer, n_fraction = 15, 6
        # 0 start, 1 after the sign, 2 a lone zero, then one node for each digit, the point, its digits.
        first_digit = 3
        point = first_digit + n_integer
        n_nodes = point + 1 + n_fraction
        edges: list[list[tuple[int, int]]] = [[] for _ in range(n_nodes)]
        digits = range(ord("0"), ord("9") + 1)
        for node in (0, 1):
            edges[node] += [(ord("0"), 2), *((digit, first_digit) for digit in digits[1:])]
        edges[0] = [(ord("-"), 1), *edges[0]]
        for node in range(2, point):
            edges[node].append((ord("."), point))
        for node in (*range(first_digit, point - 1), *range(point, n_nodes - 1)):
            edges[node] += [(digit, node + 1) for digit in digits]
        ends = [node > 1 and node != point for node in range(n_nodes)]
        flat = [edge for node in edges for edge in node]
        return cls(
            np.array([byte for byte, _ in flat], TOKEN),
            np.array([target for _, target in flat], NODE),
            np.cumsum([0, *map(len, edges)]).astype(NODE),
            np.where(ends, 0, NO_LEAF).astype(LEAF),
        )


def write_in_every_way(graph: ByteGraph, n_roots: int, pieces: PieceIndex) -> Automaton:
    """The automaton of all spellings of the leaves of a byte trie or graph.

    Args:
        graph: what is to be written.
        n_roots: the first nodes are roots, and stay.
        pieces: the vocabulary.

    Returns:
        States that some path from a root to a leaf goes through, numbered as the nodes were, so that
        every edge leads to a larger number. A leaf that the vocabulary cannot write is in none.

    Cost: O(E log K); 0.1 s for 10,000 choices of 20 bytes.
    """
    leaf = graph.leaf
    first_edge, token, target = _match_pieces(
        graph.byte, graph.target, graph.first_child, pieces.byte, pieces.first_child, pieces.first_id, pieces.ids
    )
    state_of, n_states, n_edges = _find_states(first_edge, target, leaf, n_roots)
    kept = (np.empty(n_edges, TOKEN), np.empty(n_edges, NODE), np.empty(n_states + 1, NODE))
    new_leaf, sole_leaf = np.empty(n_states, LEAF), np.empty(n_states, LEAF)
    depth = _keep_states(first_edge, token, target, leaf, state_of, *kept, new_leaf, sole_leaf)
    return Automaton(*kept, new_leaf, sole_leaf, state_of, depth)


@jit
def _match_pieces(byte, byte_target, first_child, piece_byte, piece_first_child, first_id, ids):
    """(first_edge [B+1], token [E], target [E]): every token whose bytes lie on a path from a node."""
    n_nodes = first_child.shape[0] - 1
    first_edge = np.empty(n_nodes + 1, np.int64)
    token = np.empty(8 * n_nodes + 64, np.int32)
    target = np.empty(8 * n_nodes + 64, np.int32)
    stack = np.empty((64, 2), np.int64)
    n_edges = 0
    for node in range(n_nodes):
        first_edge[node] = n_edges
        stack[0, 0], stack[0, 1] = node, 0
        height = 1
        while height > 0:
            height -= 1
            here, piece = stack[height, 0], stack[height, 1]
            for way in range(first_child[here], first_child[here + 1]):
                child = byte_target[way]
                longer = _find_byte(piece_byte, piece_first_child[piece], piece_first_child[piece + 1], byte[way])
                if longer < 0:
                    continue
                n_new = first_id[longer + 1] - first_id[longer]
                if n_edges + n_new > token.shape[0]:
                    token = _grow(token, n_edges + n_new)
                    target = _grow(target, n_edges + n_new)
                for i in range(first_id[longer], first_id[longer + 1]):
                    token[n_edges] = ids[i]
                    target[n_edges] = child
                    n_edges += 1
                if piece_first_child[longer] < piece_first_child[longer + 1]:
                    if height == stack.shape[0]:
                        taller = np.empty((2 * height, 2), np.int64)
                        taller[:height] = stack
                        stack = taller
                    stack[height, 0], stack[height, 1] = child, longer
                    height += 1
        _sort_edges(token[first_edge[node] : n_edges], target[first_edge[node] : n_edges])
    first_edge[n_nodes] = n_edges
    return first_edge, token, target


@jit
def _find_byte(byte, start, stop, wanted):
    """The node among ``start .. stop`` that ``wanted`` enters, or -1. O(log K)."""
    low, high = start, stop
    while low < high:
        middle = (low + high) >> 1
        if byte[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    if low < stop and byte[low] == wanted:
        return low
    return -1


@jit
def _grow(array, needed):
    larger = np.empty(max(2 * array.shape[0], needed), array.dtype)
    larger[: array.shape[0]] = array
    return larger


@jit
def _sort_edges(token, target):
    """Sort both by token, in place; no token comes twice."""
    n = token.shape[0]
    if n <= 64:  # noqa: PLR2004 - insertion is faster up to about here, as in ``build``
        for i in range(1, n):
            key, end = token[i], target[i]
            j = i - 1
            while j >= 0 and token[j] > key:
                token[j + 1], target[j + 1] = token[j], target[j]
                j -= 1
            token[j + 1], target[j + 1] = key, end
        return
    order = np.argsort(token, kind="mergesort")
    token[:] = token[order]
    target[:] = target[order]


@jit
def _find_states(first_edge, target, leaf, n_roots):
    """(state_of [B], n_states, n_edges): nodes between a root and a leaf, in their order.

    Edges lead to larger numbers, so one pass from the end finds what reaches a leaf, and one from the
    start what a root reaches.
    """
    n_nodes = leaf.shape[0]
    state_of = np.full(n_nodes, -1, np.int32)
    arrives = np.zeros(n_nodes, np.bool_)
    for node in range(n_nodes - 1, -1, -1):
        arrives[node] = leaf[node] != NO_LEAF
        for edge in range(first_edge[node], first_edge[node + 1]):
            arrives[node] |= arrives[target[edge]]
    reached = np.zeros(n_nodes, np.bool_)
    reached[:n_roots] = True
    n_states, n_edges = 0, 0
    for node in range(n_nodes):
        if not reached[node]:
            continue
        state_of[node] = n_states
        n_states += 1
        for edge in range(first_edge[node], first_edge[node + 1]):
            if arrives[target[edge]]:
                reached[target[edge]] = True
                n_edges += 1
    return state_of, n_states, n_edges


@jit
def _keep_states(first_edge, token, target, leaf, state_of, new_token, new_target, new_first, new_leaf, sole_leaf):
    """Fill the arrays of the states that stay; returns the length of the longest path."""
    state, n_edges = 0, 0
    for node in range(leaf.shape[0]):
        if state_of[node] < 0:
            continue
        new_first[state] = n_edges
        new_leaf[state] = leaf[node]
        for edge in range(first_edge[node], first_edge[node + 1]):
            end = state_of[target[edge]]
            if end >= 0:
                new_token[n_edges] = token[edge]
                new_target[n_edges] = end
                n_edges += 1
        state += 1
    new_first[state] = n_edges
    longest = np.zeros(state, np.int32)
    depth = 0
    for here in range(state - 1, -1, -1):
        only = new_leaf[here]
        is_open = False
        for edge in range(new_first[here], new_first[here + 1]):
            end = new_target[edge]
            longest[here] = max(longest[here], longest[end] + 1)
            if only == NO_LEAF:
                only = sole_leaf[end]
                is_open |= only == SEVERAL
            elif sole_leaf[end] != only:
                is_open = True
        sole_leaf[here] = SEVERAL if is_open else only
        depth = max(depth, longest[here])
    return depth
