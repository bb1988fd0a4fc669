"""What was made last, limited in number and in bytes: ``Recent``, and ``TrieCache`` for payloads.

All that is kept is immutable, so what is dropped while in use stays whole for who holds it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from trie_sampler.choices import Choices
from trie_sampler.errors import hear_warnings, warn
from trie_sampler.payload import TokenTreePayload, as_json
from trie_sampler.tokens import Tokenizer
from trie_sampler.trie import TokenTrie, as_tokenizer


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class CacheStats(NamedTuple):
    """Counts of a cache since it was made."""

    entries: int
    """Kept now."""
    nbytes: int
    """Of what is kept now."""
    hits: int
    misses: int
    """Each was built."""
    evictions: int
    """Dropped for newer ones."""


class Recent(Generic[T]):
    """Keeps the most recently used of what is immutable; safe across threads.

    No lock is held while something is built. A second thread that wants the same waits for it, and builds for itself
    where that failed.

    Args:
        max_entries: how many are kept.
        max_bytes: how many bytes are kept in all; one thing larger than that is not kept.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(self, max_entries: int = 128, max_bytes: int = 2**28) -> None:
        if max_entries < 1 or max_bytes < 1:
            raise ValueError(f"a cache keeps at least 1 entry and 1 byte, got {max_entries} and {max_bytes}")
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._n_bytes = self._n_hits = self._n_misses = self._n_evictions = 0
        self._forget_threads()
        _all_recent.add(self)

    def _forget_threads(self) -> None:
        """A forked process has none of the threads that may have held the lock or been building."""
        self._lock = threading.Lock()
        self._being_built: dict[Hashable, threading.Event] = {}

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """What belongs to a key, built where it is not at hand.

        Args:
            key: equal for what is equal.
            build: makes it, once for all who ask meanwhile; it must not ask for the same key.

        Raises:
            whatever ``build`` raises; nothing is kept then.
        """
        while True:
            with self._lock:
                known = self._kept.get(key)
                if known is not None:
                    self._n_hits += 1
                    self._kept.move_to_end(key)
                    return known
                ready = self._being_built.get(key)
                if ready is None:
                    self._n_misses += 1
                    mine = self._being_built[key] = threading.Event()
                    break
            ready.wait()
        try:
            built = build()
            with self._lock:
                self._keep(key, built)
            return built
        finally:
            with self._lock:
                self._being_built.pop(key, None)
            mine.set()

    def _keep(self, key: Hashable, built: T) -> None:
        if built.nbytes > self._max_bytes:
            return
        self._kept[key] = built
        self._n_bytes += built.nbytes
        while len(self._kept) > self._max_entries or self._n_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._n_bytes -= dropped.nbytes
            self._n_evictions += 1

    def clear(self) -> None:
        """Drop everything; that is no eviction."""
        with self._lock:
            self._kept.clear()
            self._n_bytes = 0

    def stats(self) -> CacheStats:
        """Counts."""
        with self._lock:
            return CacheStats(len(self._kept), self._n_bytes, self._n_hits, self._n_misses, self._n_evictions)

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)


_all_recent: weakref.WeakSet[Recent[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for recent in list(_all_recent):
        recent._forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class _Reading:
    """What a JSON text says."""

    digest: str
    choices_by_path: Mapping[str, Choices]
    doubts: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class _Building:
    """A trie, and what a caller should hear of it."""

    trie: TokenTrie
    doubts: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.trie.nbytes + self.trie.nbytes_of_names


class TrieCache:
    """Tries of payloads, built once; safe across threads.

    A text is found again by the SHA-256 of its bytes, and a payload in another order by that of its canonical form;
    the descriptor's path, the vocabulary and the other options are part of the key. Warnings about a payload are
    given at every ``get``. All doors that take a payload share one cache, ``TrieCache.shared()``, but for those that
    are given a bare pointer.

    Args:
        max_entries: tries kept.
        max_bytes: of arrays and names, in all.

    Raises:
        ValueError: a limit below 1.

    Cost: a hit by text about 10 us at 30 leaves, most of it the hash; by ``TokenTreePayload`` its canonical form.

    Example:
        >>> cache = TrieCache(max_entries=2)
        >>> text = '{"modelId": "m", "descriptors": [{"path": "a", "leaves": [{"name": "A", "tokens": [5]}]}]}'
        >>> cache.get(text) is cache.get(text)
        True
        >>> cache.stats()
        CacheStats(entries=1, nbytes=45, hits=1, misses=1, evictions=0)
    """

    def __init__(self, max_entries: int = 128, max_bytes: int = 2**28) -> None:
        self._tries: Recent[_Building] = Recent(max_entries, max_bytes)
        # Several texts may stand for one trie.
        self._readings: Recent[_Reading] = Recent(2 * max_entries, max_bytes)

    @staticmethod
    def shared() -> TrieCache:
        """The one that every door uses."""
        return _shared

    def get(
        self,
        payload: TokenTreePayload | str | bytes,
        path: str | None = None,
        *,
        vocab: Any = None,
        strict: bool = False,
        model_id: str | None = None,
    ) -> TokenTrie:
        """``TokenTrie.from_payload``, kept; no trie is kept, or dropped, for one that raises.

        Args:
            payload: the model, or its JSON.
            path: take only this descriptor.
            vocab: a ``Llama`` or a ``Tokenizer``; see ``TokenTrie.from_payload``, as the next two.
            strict: see there.
            model_id: see there.

        Raises:
            as ``TokenTrie.from_payload``; TypeError also for a payload or path of another type.
        """
        return self.look_up(payload, path, vocab=vocab, strict=strict, model_id=model_id)[0]

    def look_up(
        self,
        payload: TokenTreePayload | str | bytes,
        path: str | None = None,
        *,
        vocab: Any = None,
        strict: bool = False,
        model_id: str | None = None,
    ) -> tuple[TokenTrie, Mapping[str, Choices]]:
        """``get``, and the names of each descriptor in the order of this very payload."""
        if not isinstance(path, str | None):
            raise TypeError(f"a path is text, got {type(path).__name__}")
        tokenizer = None if vocab is None else as_tokenizer(vocab)
        parsed: TokenTreePayload | None = None
        told: list[str] = []

        def parse() -> TokenTreePayload:
            nonlocal parsed
            if parsed is None:
                parsed = payload if isinstance(payload, TokenTreePayload) else TokenTreePayload.from_json(payload)
            return parsed

        def read() -> _Reading:
            with hear_warnings() as doubts:
                reading = _read(parse(), tuple(doubts))
            told.extend(doubts)
            return reading

        def build() -> _Building:
            with hear_warnings() as doubts:
                trie = TokenTrie.from_payload(parse(), path, vocab=tokenizer, strict=strict, model_id=model_id)
            told.extend(doubts)
            return _Building(trie, tuple(doubts))

        reading = (
            read()
            if isinstance(payload, TokenTreePayload)
            else self._readings.get(hashlib.sha256(as_json(payload)).digest(), read)
        )
        number = _number_of(tokenizer)
        if number is None:
            building = build()
        else:
            building = self._tries.get((reading.digest, path, number, strict, model_id), build)
        for doubt in (*reading.doubts, *building.doubts):
            if doubt not in told:
                warn(doubt)
        return building.trie, reading.choices_by_path

    def stats(self) -> CacheStats:
        """Counts of tries."""
        return self._tries.stats()

    def clear(self) -> None:
        """Drop all tries; those in use stay whole."""
        self._tries.clear()
        self._readings.clear()

    def __len__(self) -> int:
        """Tries kept."""
        return len(self._tries)


_shared = TrieCache()


def _read(payload: TokenTreePayload, doubts: tuple[str, ...]) -> _Reading:
    choices = {
        descriptor.path: Choices.of(names)
        for descriptor in payload.descriptors
        if (names := [leaf.name for leaf in descriptor.leaves])
    }
    n_characters = sum(len(name) for each in choices.values() for name in each.names)
    # A name, its place and its content: about 150 bytes of objects.
    nbytes = n_characters + 150 * sum(len(each.names) for each in choices.values())
    return _Reading(payload.digest(), choices, doubts, nbytes)


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def _number_of(tokenizer: Tokenizer | None) -> int | None:
    """A number of its own for each vocabulary; ``None`` for one that cannot be told from others."""
    if tokenizer is None:
        return 0
    try:
        return _numbers.setdefault(tokenizer, next(_next_number))
    except TypeError:  # it cannot be hashed or weakly referenced
        return None
