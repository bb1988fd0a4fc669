"""The builder's arrays against nested dictionaries.

The trie of the first tests, node numbers in brackets, breadth-first and ascending by token:

    [0] ─┬─ 10 [1] ─── 20 [3] ─┬─ 30 [5] leaf 0
         │                     └─ 40 [6] leaf 1
         └─ 12 [2] ─── 34 [4] leaf 2

Several descriptors are several roots over the same arrays, all roots first:

    [0] ─── 7 [2] leaf 0 ─── 7 [4] leaf 2
    [1] ─── 7 [3] leaf 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import DictTrie
from strategies import leaf_sets

from trie_sampler.build import MAX_NODES, Arrays, build_arrays

Paths = Sequence[Sequence[int]]

# Ids of one, two, three and four base-256 digits, at both sides of each border.
BORDER_IDS = [0, 1, 255, 256, 257, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 1]


def build(groups: Sequence[Paths], path_leaf: Sequence[int] | None = None) -> Arrays:
    """The arrays of one root a group; leaf i is path i of all groups unless said."""
    paths = [path for group in groups for path in group]
    return build_arrays(
        np.array([token for path in paths for token in path], np.int32),
        np.cumsum([0, *map(len, paths)]),
        np.cumsum([0, *map(len, groups)]),
        np.array(range(len(paths)) if path_leaf is None else path_leaf, np.int32),
    )


def ref_arrays(groups: Sequence[Paths]) -> tuple[list[int], list[int], list[int]]:
    """token, first_child and leaf by walking dictionaries breadth-first; the first path keeps a leaf."""
    n_before = np.cumsum([0, *map(len, groups)])
    tries = [
        DictTrie((f"{n_before[r] + i:06}", path) for i, path in enumerate(group)) for r, group in enumerate(groups)
    ]
    queue = [(trie, ()) for trie in tries]
    token, first_child, leaf = [-1] * len(tries), [], []
    for trie, prefix in queue:
        first_child.append(len(queue))
        name = trie.name(prefix)
        leaf.append(-1 if name is None else int(name))
        for child in trie.children(prefix):
            token.append(child)
            queue.append((trie, (*prefix, child)))
    return token, [*first_child, len(queue)], leaf


def assert_equal(comp: Arrays, ref: tuple[list[int], list[int], list[int]]) -> None:
    assert comp.token.tolist() == ref[0]
    assert comp.first_child.tolist() == ref[1]
    assert comp.leaf.tolist() == ref[2]


# --- by hand ------------------------------------------------------------------------------------


def test_the_trie_of_the_header() -> None:
    comp = build([[[10, 20, 30], [10, 20, 40], [12, 34]]])
    assert comp.token.tolist() == [-1, 10, 12, 20, 34, 30, 40]
    assert comp.first_child.tolist() == [1, 3, 4, 5, 7, 7, 7, 7]
    assert comp.leaf.tolist() == [-1, -1, -1, -1, 2, 0, 1]
    assert (comp.depth, comp.collided_node.size, comp.collided_leaf.size) == (3, 0, 0)


def test_one_root_a_descriptor() -> None:
    comp = build([[[7], [7, 7]], [[7]]], path_leaf=[0, 2, 1])
    assert comp.token.tolist() == [-1, -1, 7, 7, 7]
    assert comp.first_child.tolist() == [2, 3, 4, 5, 5, 5]
    assert comp.leaf.tolist() == [-1, -1, 0, 1, 2]
    assert comp.depth == 2


def test_dtypes_are_those_of_the_layout() -> None:
    comp = build([[[1, 2], [3]]])
    assert {array.dtype for array in comp[:5]} == {np.dtype(np.int32)}
    # No slack behind the arrays: a view of the builder's room would keep all of it alive.
    assert all(array.base is None for array in comp[:5])


#    paths                     leaf of each  leaf array        collided (node, leaf)
COLLISIONS = [
    ([[5], [5]],               [0, 1],       [-1, 0],          [(1, 1)]),
    ([[5], [5]],               [1, 0],       [-1, 1],          [(1, 0)]),
    ([[5], [5]],               [3, 3],       [-1, 3],          []),
    ([[5], [5], [5]],          [0, 1, 2],    [-1, 0],          [(1, 1), (1, 2)]),
    ([[5], [6, 7], [5], [6, 7]], [0, 1, 2, 3], [-1, 0, -1, 1], [(1, 2), (3, 3)]),
    ([[5, 6], [5], [5, 6]],    [0, 1, 0],    [-1, 1, 0],       []),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "path_leaf", "leaf", "collided"), COLLISIONS)
def test_the_first_of_equal_paths_keeps_the_leaf(
    paths: Paths, path_leaf: list[int], leaf: list[int], collided: list[tuple[int, int]]
) -> None:
    comp = build([paths], path_leaf)
    assert comp.leaf.tolist() == leaf
    assert list(zip(comp.collided_node.tolist(), comp.collided_leaf.tolist(), strict=True)) == collided


def test_input_of_other_strides_and_widths() -> None:
    tokens = np.array([9, 0, 8, 0, 7, 0], np.int64)[::2]
    comp = build_arrays(tokens, np.array([0, 1, 3], np.int32), np.array([0, 2], np.int32), np.array([0, 1], np.int64))
    assert comp.token.tolist() == [-1, 8, 9, 7]
    assert comp.leaf.tolist() == [-1, -1, 0, 1]


def test_more_nodes_than_int32_numbers_are_refused() -> None:
    # A broadcast array has the length without the memory.
    tokens = np.broadcast_to(np.int32(0), MAX_NODES)
    with pytest.raises(OverflowError, match=rf"{MAX_NODES + 1} nodes"):
        build_arrays(tokens, np.array([0, MAX_NODES]), np.array([0, 1]), np.zeros(1, np.int32))


# --- radix: long ranges, ids of every number of digits ------------------------------------------


@pytest.mark.parametrize("n_children", [2, 63, 64, 65, 66, 300])
@pytest.mark.parametrize("largest", [255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 1])
def test_wide_nodes_at_every_number_of_digits(n_children: int, largest: int) -> None:
    rng = np.random.default_rng(n_children)
    ids = np.unique([largest, *rng.integers(0, largest, n_children - 1)])
    # The ids also differ in their high digits alone and in their low digits alone.
    ids = np.union1d(ids, [largest >> 8, largest & ~0xFF])
    ids = rng.permutation(np.concatenate([ids, ids[:3]]))  # some repeat: equal keys must stay in order
    paths = [[int(token)] for token in ids]
    comp = build([paths])
    assert_equal(comp, ref_arrays([paths]))
    assert comp.depth == 1
    assert comp.collided_leaf.size == 3


def test_wide_nodes_below_the_root() -> None:
    rng = np.random.default_rng(1)
    paths = [[int(first), int(second), 7] for first in (3, 300) for second in rng.permutation(400)[:150]]
    paths = [paths[i] for i in rng.permutation(len(paths))]
    assert_equal(build([paths]), ref_arrays([paths]))


def test_an_eight_thousand_leaf_enum() -> None:
    """8192 choices, digit by digit of base 20 and two common first tokens."""
    paths = [[50 + i % 2, i // 400, i // 20 % 20, i % 20] for i in range(8192)]
    comp = build([paths])
    assert_equal(comp, ref_arrays([paths]))
    assert np.count_nonzero(comp.leaf >= 0) == 8192


# --- anything -----------------------------------------------------------------------------------


@given(st.lists(leaf_sets(max_token=9, max_leaves=8), min_size=1, max_size=4))
def test_arrays_equal_nested_dictionaries(groups: list[list[tuple[str, list[int]]]]) -> None:
    paths = [[[BORDER_IDS[token] for token in tokens] for _, tokens in group] for group in groups]
    comp = build(paths)
    assert_equal(comp, ref_arrays(paths))
    assert comp.depth == max(len(path) for group in paths for path in group)
    # Every path but the first of its kind collides, at the node where it ends.
    tries = [DictTrie((str(i), path) for i, path in enumerate(group)) for group in paths]
    n_extra = sum(len(names) - 1 for trie in tries for names in trie.collisions().values())
    assert comp.collided_node.size == comp.collided_leaf.size == n_extra
    assert set(comp.collided_leaf.tolist()).isdisjoint(comp.leaf.tolist())


@given(leaf_sets(max_token=9), st.randoms(use_true_random=False))
def test_the_order_of_paths_is_of_no_account(leaves: list[tuple[str, list[int]]], random: object) -> None:
    paths = [tokens for _, tokens in leaves]
    shuffled = paths[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ref, comp = build([paths]), build([shuffled])
    assert comp.token.tobytes() == ref.token.tobytes()
    assert comp.first_child.tobytes() == ref.first_child.tobytes()
    assert ((comp.leaf >= 0) == (ref.leaf >= 0)).all()
    assert comp.depth == ref.depth
