"""``Recent``: what was made last, limited in number and in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class Recent(Generic[T]):
    """Keeps the most recently used of what is immutable; safe across threads.

    What is dropped while in use stays whole for who holds it.

    Args:
        max_entries: how many are kept.
        max_bytes: how many bytes are kept in all; one thing larger than that is not kept.
    """

    def __init__(self, max_entries: int = 128, max_bytes: int = 2**28) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """What belongs to a key, built where it is not at hand; no lock is held meanwhile."""
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        built = build()
        if built.nbytes > self._max_bytes:
            return built
        with self._lock:
            rival = self._kept.get(key)
            if rival is not None:
                return rival
            self._kept[key] = built
            self._n_bytes += built.nbytes
            while self._kept and (len(self._kept) > self._max_entries or self._n_bytes > self._max_bytes):
                _, dropped = self._kept.popitem(last=False)
                self._n_bytes -= dropped.nbytes
        return built

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)
