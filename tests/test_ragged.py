"""Named paths as flat arrays, from iterators and from arrays.

("A", [5])  ("B", [])  ("A", [5, 6])     tokens 5 5 6   offsets 0 1 3   leaf 0 0   names A
              skipped      the same leaf
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trie_sampler import (
    EmptyTrieError,
    NameBuffers,
    TokenSequence,
    TokenTrie,
    TrieSamplerWarning,
    VocabMismatchError,
)
from trie_sampler.build import number_names
from trie_sampler.ragged import Names, RaggedPaths

NAMES = st.text(st.sampled_from("ab\0é"), max_size=3)


# --- names --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), NAMES), max_size=30), st.sampled_from([0, 1, 256, 2**20 + 7]))
def test_number_names_equals_a_dictionary(items: list[tuple[int, str]], base: int) -> None:
    """Bases of 0 and 1 make nearly all hashes equal: names are still compared, not hashes."""
    names = Names.of(name for _, name in items)
    comp = number_names(names.blob, names.offsets, np.array([group for group, _ in items], np.int32), base)
    first: dict[tuple[int, str], int] = {}
    assert comp.tolist() == [first.setdefault(item, i) for i, item in enumerate(items)]


@given(st.lists(NAMES, max_size=10))
def test_names_come_back(names: list[str]) -> None:
    comp = Names.of(names)
    assert [comp[i] for i in range(len(comp))] == names
    assert comp.are_text()


@pytest.mark.parametrize(
    ("data", "offsets", "message"),
    [
        (b"abc", [0, 2], "offsets must ascend from 0 to 3, the number of bytes of names"),
        (b"abc", [0, 2, 1, 3], "ascend"),
        (b"abc", [1, 3], "ascend"),
        (b"abc", [0.0, 3.0], "integers"),
        (b"abc", [], "integers"),
        ("é".encode(), [0, 1, 2], "cuts a character"),
        (b"\xff", [0, 1], "not UTF-8"),
        (np.array([1, 2]), [0, 2], "uint8"),
    ],
)
def test_buffers_that_are_no_names(data: Any, offsets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTrie.from_ragged([5, 6], [0, 1, 2], NameBuffers(data, offsets))


# --- from arrays --------------------------------------------------------------------------------


def test_arrays_are_not_copied() -> None:
    tokens, offsets = np.array([5, 5, 6], np.int32), np.array([0, 1, 3], np.int64)
    paths = RaggedPaths.of_arrays(tokens, offsets, ["A", "BC"])
    assert np.shares_memory(paths.tokens, tokens)
    assert np.shares_memory(paths.offsets, offsets)


def test_what_a_trie_keeps_is_its_own() -> None:
    """An array that changes afterwards changes no trie."""
    tokens, offsets = np.array([5, 5, 6], np.int32), np.array([0, 1, 3], np.int64)
    blob, ends = np.frombuffer(b"ABC", np.uint8).copy(), np.array([0, 1, 3], np.int64)
    trie = TokenTrie.from_ragged(tokens, offsets, NameBuffers(blob, ends))
    ref = list(trie.leaves())
    for array in (tokens, offsets, blob, ends):
        array[:] = 0
    assert list(trie.leaves()) == ref == [("A", (5,)), ("BC", (5, 6))]


@pytest.mark.parametrize("names", [["A", "B", "A"], NameBuffers(b"ABA", [0, 1, 2, 3])])
def test_equal_names_are_one_leaf(names: Any) -> None:
    trie = TokenTrie.from_ragged([5, 6, 7], [0, 1, 2, 3], names)
    assert trie.n_leaves == 2
    assert sorted(trie.leaves()) == [("A", (5,)), ("A", (7,)), ("B", (6,))]


def test_a_pair_of_names_is_names() -> None:
    assert sorted(TokenTrie.from_ragged([5, 6], [0, 1, 2], ("A", "B")).leaves()) == [("A", (5,)), ("B", (6,))]


def test_empty_paths_are_skipped_with_a_warning() -> None:
    with pytest.warns(TrieSamplerWarning, match="skipped leaves without tokens, 1 in all: 'B'"):
        trie = TokenTrie.from_ragged([5, 6], [0, 1, 1, 2], NameBuffers(b"ABC", [0, 1, 2, 3]))
    assert sorted(trie.leaves()) == [("A", (5,)), ("C", (6,))]


# --- from an iterator ---------------------------------------------------------------------------


def test_an_iterator_is_read_once_and_in_part() -> None:
    """Leaves are not kept: at most a few thousand are alive at a time."""
    alive: list[int] = []

    class Path(list[int]):
        def __init__(self, *tokens: int) -> None:
            super().__init__(tokens)
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    most = 0

    def leaves() -> Iterator[tuple[str, list[int]]]:
        nonlocal most
        for i in range(30_000):
            most = max(most, len(alive))
            yield f"n{i}", Path(i % 7, i)

    trie = TokenTrie.from_sequences(leaves())
    assert trie.n_leaves == 30_000
    assert most < 20_000


@pytest.mark.parametrize("n", [8191, 8192, 8193, 20_000])
def test_chunks_make_no_difference(n: int) -> None:
    """Leaves without tokens, of several paths and with wide characters on all sides of a border."""
    leaves = [(f"é{i % (n - 3)}", [i % 5, i] if i % 4093 else []) for i in range(n)]
    with pytest.warns(TrieSamplerWarning, match="skipped leaves"):
        trie = TokenTrie.from_sequences(iter(leaves))
    ref = {tuple(tokens): name for name, tokens in leaves if tokens}
    assert trie.n_leaves == len(set(ref.values()))
    nodes = np.flatnonzero(trie.leaf >= 0).tolist()
    assert len(nodes) == len(ref)
    assert all(ref[trie.path_tokens(node)] == trie.leaf_name(node) for node in nodes[:: n // 97])


def test_two_roots_have_their_own_leaves() -> None:
    paths = RaggedPaths.collect([("a", [("X", [1]), ("Y", [2]), ("X", [3])]), ("b", [("X", [1])])])
    assert paths.leaf.tolist() == [0, 1, 0, 2]
    assert paths.root_offsets.tolist() == [0, 3, 4]
    assert [paths.name_of(leaf) for leaf in range(paths.n_leaves)] == ["X", "Y", "X"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1], "leaf 'BAD': token id -1 at index 1 is no id"),
        ([1, 2**31], "leaf 'BAD': token id 2147483648 at index 1"),
        ([1, 2**80], "leaf 'BAD': token id 12089"),
        ([1.0], "leaf 'BAD': token id 1.0 at index 0"),
        (["1"], "leaf 'BAD': token id '1' at index 0"),
        ([None], "leaf 'BAD': token id None"),
        ([1, True], "leaf 'BAD': a truth value is no token id"),
        (np.array([1.5]), "leaf 'BAD': token id .*1.5"),
    ],
)
@pytest.mark.parametrize("n_before", [0, 1, 8191, 8192])
def test_what_is_no_id_is_refused_by_its_leaf(ids: Sequence[Any], message: str, n_before: int) -> None:
    leaves = [*((f"n{i}", (i,)) for i in range(n_before)), ("BAD", ids), ("after", [7])]
    with pytest.raises(VocabMismatchError, match=message):
        TokenTrie.from_sequences(iter(leaves))


def test_numpy_ids_and_sequences_may_be_mixed() -> None:
    leaves = [("A", np.array([1, 2], np.int64)), TokenSequence(name="B", tokens=(3,)), ("C", (np.int32(4),))]
    assert sorted(TokenTrie.from_sequences(leaves).leaves()) == [("A", (1, 2)), ("B", (3,)), ("C", (4,))]


@pytest.mark.parametrize("leaves", [[], [("A", [])], iter(())])
def test_nothing_to_choose_from(leaves: Any) -> None:
    with pytest.raises(EmptyTrieError, match="the trie has no leaf with tokens"):
        TokenTrie.from_sequences(leaves)
