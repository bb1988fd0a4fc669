"""Exceptions and warnings of trie_sampler, all under one base class.

    TrieSamplerError
    ├── PayloadError            the JSON on the wire is malformed
    ├── EmptyTrieError          nothing to choose from
    ├── VocabMismatchError      token ids that do not belong to the vocabulary at hand
    ├── UnknownPathError        no descriptor of that path
    ├── OffTrieError            a token was accepted that the trie does not allow
    ├── EngineError             the engine refused or failed; ``.code`` where it gave one
    └── TrieFileError           not a trie file, another version, truncated or damaged

Each also derives from the built-in that a caller would catch without knowing us.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar


class TrieSamplerError(Exception):
    """Base of every exception this library raises on purpose."""


class PayloadError(TrieSamplerError, ValueError):
    """A payload is not JSON or not of the schema; the message names the place."""


class EmptyTrieError(TrieSamplerError, ValueError):
    """No descriptor, no leaf or no token is left to choose from."""


class VocabMismatchError(TrieSamplerError, ValueError):
    """Token ids outside the vocabulary, of another model, or end-of-generation ids in a leaf."""


class UnknownPathError(TrieSamplerError, LookupError):
    """A descriptor path that the trie does not have; the message lists those it has."""


class OffTrieError(TrieSamplerError, ValueError):
    """A token was accepted that is no child of the current node; the cursor did not move."""


class EngineError(TrieSamplerError, RuntimeError):
    """The inference engine refused or failed.

    Attributes:
        code: the engine's return code, ``None`` where there was none.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class TrieFileError(TrieSamplerError, ValueError):
    """A file is not a trie, is of another version, or is damaged; nothing was loaded."""


class TrieSamplerWarning(UserWarning):
    """Input that works but probably does not mean what its author thinks."""


_heard: ContextVar[list[str] | None] = ContextVar("_heard", default=None)


@contextlib.contextmanager
def hear_warnings() -> Iterator[list[str]]:
    """Keep what ``warn`` says inside the block as well, for who hands out the result again."""
    messages: list[str] = []
    token = _heard.set(messages)
    try:
        yield messages
    finally:
        _heard.reset(token)


def warn(message: str) -> None:
    """Warn of doubtful input, at the line outside this package that brought it in."""
    heard = _heard.get()
    if heard is not None:
        heard.append(message)
    stacklevel = 1
    frame = sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, TrieSamplerWarning, stacklevel=stacklevel)
