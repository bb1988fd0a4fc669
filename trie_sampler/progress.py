"""``Progress``: a bar for long work, where tqdm is installed and somebody looks."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import Self

_PATIENCE = 1.0
"""Seconds before a bar is shown."""


class Progress:
    """Counts work, and shows a bar on a terminal or in a notebook once it takes long.

    Args:
        what: is done, "tokenizing choices" for example.
        total: how many there are, where that is known.

    Example:
        >>> with Progress("counting", 3) as progress:
        ...     for _ in range(3):
        ...         progress.advance()
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what = what
        self._total = total
        self._start = time.perf_counter()
        self._done = 0
        self._bar: Any = None

    def advance(self, n: int = 1) -> None:
        """So many more are done."""
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
        elif time.perf_counter() - self._start > _PATIENCE:
            self._show()

    def _show(self) -> None:
        self._start = float("inf")
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        # disable=None: silent where nobody looks, as in a log file.
        self._bar = tqdm(total=self._total, desc=self._what, initial=self._done, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
