"""Named token paths as flat arrays: what the builder reads, and names without a Python object each.

Leaves come from an iterator, one at a time, or as arrays: NumPy's own, or the buffers of an Arrow list and string
array. Ten million of them are five arrays either way.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trie_sampler.build import number_names
from trie_sampler.errors import EmptyTrieError, TrieSamplerError, VocabMismatchError, warn
from trie_sampler.layout import LEAF, OFFSET, TOKEN
from trie_sampler.payload import TokenSequence

Leaf: TypeAlias = TokenSequence | tuple[str, Sequence[int]]

# Leaves read at a time: as many as make the work on them cheaper than the reading.
_CHUNK = 8192

_MAX_TOKEN = np.iinfo(TOKEN).max


class NameBuffers(NamedTuple):
    """N names as the buffers of an Arrow string array, or arrays of that form."""

    data: bytes | npt.ArrayLike
    """UTF-8, or [B] uint8: the names one after the other"""
    offsets: npt.ArrayLike
    """[N+1] integers, name i is ``data[offsets[i]:offsets[i+1]]``"""


NamesLike: TypeAlias = Sequence[str] | NameBuffers


@dataclass(frozen=True, slots=True)
class Names:
    """N names as one blob.

    Attributes:
        blob: [B] uint8, the names as UTF-8, one after the other.
        offsets: [N+1] int64, name i is ``blob[offsets[i]:offsets[i+1]]``.
    """

    blob: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Of names as Python has them."""
        blob, lengths = bytearray(), array("q")
        for name in names:
            encoded = _encoded(name)
            blob += encoded
            lengths.append(len(encoded))
        return cls(np.frombuffer(blob, np.uint8), offsets_of(np.frombuffer(lengths, OFFSET)))

    @classmethod
    def of_buffers(cls, buffers: NameBuffers) -> Names:
        """Of names that are one blob already; copied, for a trie keeps them and a caller may change an array.

        Raises:
            ValueError: the offsets do not cut the bytes into UTF-8.
        """
        data = buffers.data
        held = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.array(data)
        if held.dtype != np.uint8 or held.ndim != 1:
            raise ValueError(f"the names' bytes must be bytes or [B] uint8, got {held.dtype} {held.shape}")
        names = cls(held, offsets_array(np.array(buffers.offsets), len(held), "bytes of names"))
        if not names.are_text():
            raise ValueError("the names are not UTF-8, or an offset cuts a character")
        return names

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, leaf: int) -> str:
        start, stop = int(self.offsets[leaf]), int(self.offsets[leaf + 1])
        try:
            return self.blob[start:stop].tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise TrieSamplerError(f"damaged trie: the name of leaf {leaf} is no text") from None

    def are_text(self) -> bool:
        """Whether offsets cut the blob into pieces of UTF-8. O(bytes)."""
        starts = self.offsets[:-1]
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.blob) or np.any(starts > self.offsets[1:]):
            return False
        try:
            self.blob.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return False
        # The whole is text, so a piece is unless it begins inside a character.
        firsts = self.blob[starts[starts < len(self.blob)]]
        return not np.any(firsts & 0xC0 == 0x80)  # noqa: PLR2004 - UTF-8: bytes after a character's first are 10xxxxxx

    def take(self, indices: npt.NDArray[np.intp]) -> Names:
        """These names alone."""
        return self if len(indices) == len(self) else Names.of(map(self.__getitem__, indices.tolist()))


class RaggedPaths(NamedTuple):
    """Token paths of one or more roots, each of a leaf."""

    tokens: npt.NDArray[np.int32]
    """[T] int32, the paths one after the other"""
    offsets: npt.NDArray[np.int64]
    """[P+1] int64, path p is ``tokens[offsets[p]:offsets[p+1]]``"""
    root_offsets: npt.NDArray[np.int64]
    """[R+1] int64, root r has the paths ``root_offsets[r] .. root_offsets[r+1]``"""
    leaf: npt.NDArray[np.int32]
    """[P] int32, the leaf that a path spells"""
    n_leaves: int
    """N"""
    names: Names | None
    """N names; ``None`` where a leaf's name is its index"""

    @classmethod
    def collect(cls, groups: Iterable[tuple[str, Iterable[Leaf]]]) -> RaggedPaths:
        """Read (path, leaves) groups, one root each; leaves of one name within a group are one leaf.

        Raises:
            EmptyTrieError: a group without a leaf that has tokens.
            VocabMismatchError: what is no token id.

        Warns:
            TrieSamplerWarning: leaves without tokens, which are skipped.

        Cost: O(1) Python steps a leaf; memory for the arrays alone.
        """
        tokens, lengths = array("i"), array("q")
        blob, name_lengths = bytearray(), array("q")
        root_offsets = [0]
        for path, leaves in groups:
            empty: list[str] = []
            for names, ids in _read_in_chunks(leaves, empty):
                n_before = len(tokens)
                try:
                    tokens.extend(chain.from_iterable(ids))
                except (TypeError, OverflowError):
                    raise _no_id(names, ids) from None
                if n_before < len(tokens) and np.frombuffer(tokens, TOKEN)[n_before:].min() < 0:
                    raise _no_id(names, ids)
                lengths.extend(map(len, ids))
                text = "".join(names)
                blob += text.encode("utf-8", "surrogatepass")
                name_lengths.extend(map(len, names if text.isascii() else map(_encoded, names)))
            where = f"descriptor {path!r:.80}" if path else "the trie"
            if len(lengths) == root_offsets[-1]:
                raise EmptyTrieError(f"{where} has no leaf with tokens, so there is nothing to choose from")
            if empty:
                warn(f"{where}: skipped leaves without tokens, {len(empty)} in all: {some(list(map(repr, empty)))}")
            root_offsets.append(len(lengths))
        names_of_paths = Names(np.frombuffer(blob, np.uint8), offsets_of(np.frombuffer(name_lengths, OFFSET)))
        n_of_roots = np.diff(root_offsets)
        leaf_of_path, leaf_names = _number_leaves(
            names_of_paths, np.repeat(np.arange(len(n_of_roots), dtype=LEAF), n_of_roots)
        )
        return cls(
            np.frombuffer(tokens, TOKEN),
            offsets_of(np.frombuffer(lengths, OFFSET)),
            np.array(root_offsets, OFFSET),
            leaf_of_path,
            len(leaf_names),
            leaf_names,
        )

    @classmethod
    def of_arrays(cls, tokens: npt.ArrayLike, offsets: npt.ArrayLike, names: NamesLike | None) -> RaggedPaths:
        """Of all paths in one array; see ``TokenTrie.from_ragged``."""
        ids = token_array(tokens)
        bounds = offsets_array(offsets, len(ids), "tokens")
        n_paths = len(bounds) - 1
        if names is None:
            leaf_of_path, n_leaves, held = np.arange(n_paths, dtype=LEAF), n_paths, None
        else:
            given = Names.of_buffers(names) if isinstance(names, NameBuffers) else Names.of(names)
            if len(given) != n_paths:
                raise ValueError(f"{len(given)} names for {n_paths} paths")
            leaf_of_path, held = _number_leaves(given, np.zeros(n_paths, LEAF))
            n_leaves = len(held)
        paths = cls(ids, bounds, np.array([0, n_paths], OFFSET), leaf_of_path, n_leaves, held)
        return paths._without_empty()

    def name_of(self, leaf: int) -> str:
        """The name of a leaf."""
        return str(leaf) if self.names is None else self.names[leaf]

    def _without_empty(self) -> RaggedPaths:
        """Only paths with tokens, of a single root."""
        lengths = np.diff(self.offsets)
        if not len(lengths):
            raise EmptyTrieError("there are no leaves, so there is nothing to choose from")
        if lengths.all():
            return self
        kept = lengths > 0
        if not kept.any():
            raise EmptyTrieError("no leaf has tokens, so there is nothing to choose from")
        skipped = [repr(self.name_of(leaf)) for leaf in self.leaf[~kept][:4].tolist()]
        warn(f"skipped leaves without tokens, {np.count_nonzero(~kept)} in all: {some(skipped)}")
        n_kept = int(np.count_nonzero(kept))
        return self._replace(
            offsets=offsets_of(lengths[kept]), root_offsets=np.array([0, n_kept], OFFSET), leaf=self.leaf[kept]
        )


def _number_leaves(names: Names, groups: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], Names]:
    """([P] leaf of each path, the leaves' names): equal names within a group are one leaf, numbered as they come.

    Names are compared where a hash of them is equal. Its base is drawn, so that nobody can prepare names that
    make this slow (a polynomial modulo a prime: Carter and Wegman, "Universal classes of hash functions", 1979).
    """
    first = number_names(names.blob, names.offsets, groups, 2**20 + secrets.randbelow(2**30))
    is_first = first == np.arange(len(first))
    leaf_of_first = np.cumsum(is_first, dtype=LEAF) - LEAF.type(1)
    return leaf_of_first[first], names.take(np.flatnonzero(is_first))


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N+1] int64: where each of N pieces begins, and the end."""
    offsets = np.zeros(len(lengths) + 1, OFFSET)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def offsets_array(offsets: npt.ArrayLike, end: int, what: str) -> npt.NDArray[np.int64]:
    """[N+1] int64 of a caller's offsets; copied only from another dtype.

    Raises:
        ValueError: not integers that ascend from 0 to ``end``.
    """
    bounds = np.asarray(offsets)
    if bounds.ndim != 1 or bounds.size == 0 or bounds.dtype.kind not in "iu":
        raise ValueError(f"offsets must be [N+1] integers, got {bounds.dtype} {bounds.shape}")
    bounds = bounds.astype(OFFSET, copy=False)
    if bounds[0] != 0 or bounds[-1] != end or np.any(bounds[1:] < bounds[:-1]):
        raise ValueError(f"offsets must ascend from 0 to {end}, the number of {what}")
    return bounds


def token_array(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """[T] int32; copied only from another dtype; ids that are no int32 >= 0 are refused, never wrapped."""
    try:
        ids = np.asarray(tokens)
    except OverflowError as error:
        raise VocabMismatchError(f"token ids must fit int32: {error}") from error
    if ids.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {ids.shape}")
    if ids.size == 0:
        return np.empty(0, TOKEN)
    if ids.dtype.kind not in "iu":
        raise VocabMismatchError(f"token ids must be integers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() > _MAX_TOKEN:
        place = int(np.argmax((ids < 0) | (ids > _MAX_TOKEN)))
        raise VocabMismatchError(f"token id {ids[place]} (at {place} of all tokens) is no id: 0 .. 2^31-1")
    return ids.astype(TOKEN, copy=False)


def _read_in_chunks(
    leaves: Iterable[Leaf], empty: list[str]
) -> Iterator[tuple[Sequence[str], Sequence[Sequence[int]]]]:
    """(names, ids) of leaves with tokens, many at a time, so that the rest of the work is done a chunk at a time.

    Args:
        leaves: of one root.
        empty: takes the names of those without tokens.
    """
    waiting = iter(leaves)
    while chunk := list(islice(waiting, _CHUNK)):
        pairs = [(leaf.name, leaf.tokens) if isinstance(leaf, TokenSequence) else leaf for leaf in chunk]
        names, paths = zip(*pairs, strict=True)
        if not all(map(len, paths)):
            empty += [name for name, ids in pairs if not len(ids)]
            kept = [pair for pair in pairs if len(pair[1])]
            if not kept:
                continue
            names, paths = zip(*kept, strict=True)
        if {TokenSequence} != set(map(type, chunk)):
            _refuse_truth_values(names, paths)
        yield names, paths


def _refuse_truth_values(names: Sequence[str], paths: Sequence[Sequence[int]]) -> None:
    if bool in map(type, chain.from_iterable(paths)):
        name, ids = next(pair for pair in zip(names, paths, strict=True) if bool in map(type, pair[1]))
        raise VocabMismatchError(f"leaf {name!r:.80}: a truth value is no token id: {list(ids)!r:.80}")


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _no_id(names: Sequence[str], paths: Sequence[Sequence[Any]]) -> VocabMismatchError:
    """The refusal of the first of these that is no token id."""
    name, place, token = next(
        (name, place, token)
        for name, ids in zip(names, paths, strict=True)
        for place, token in enumerate(ids)
        if not isinstance(token, (int, np.integer)) or not 0 <= int(token) <= _MAX_TOKEN
    )
    return VocabMismatchError(f"leaf {name!r:.80}: token id {token!r} at index {place} is no id: 0 .. 2^31-1")


def some(items: Sequence[str], limit: int = 3) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(f"{item:.80}" for item in items[:limit]) + more
