"""``Decoder``: the tokens of a live ``Llama``, decoded as late and in as few batches as can be.

Tokens that are known wait until somebody asks for logits; then they go in one batch, which computes
logits for the last of them only. What nobody asks about is never decoded.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from trie_sampler.errors import EngineError
from trie_sampler.llama.vocab import require_engine, require_open

_logger = logging.getLogger(__name__)

_locks: weakref.WeakKeyDictionary[Llama, threading.RLock] = weakref.WeakKeyDictionary()
_lock_of_locks = threading.Lock()


@contextlib.contextmanager
def alone_with(llm: Llama) -> Iterator[None]:
    """Keep this library's calls from other threads off a ``Llama``: they wait, and say so in the log.

    A ``Llama`` has one context, and two threads in it end the process. The host's own calls know nothing of this.
    """
    with _lock_of_locks:
        lock = _locks.setdefault(llm, threading.RLock())
    if not lock.acquire(blocking=False):
        _logger.info("waiting for another thread that uses the same Llama")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _after_fork() -> None:
    """A forked process has none of the threads that may have held a lock."""
    global _lock_of_locks  # noqa: PLW0603 - the lock itself may be held
    _lock_of_locks = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Decoder:
    """One sequence of tokens over the context of a ``Llama``.

    It keeps ``llm.n_tokens`` and ``llm.input_ids`` right, so that a completion before or after finds its
    prefix evaluated, and it finds again what others left: of a new sequence only what differs is evaluated.

    Args:
        llm: the model; its context is used as it is.
        tokens: what the sequence begins with.

    Attributes:
        tokens: the sequence, evaluated or not.
        n_decodes: calls of ``llama_decode`` for this sequence.
        n_prefill: how many of them the first row took, which is the prompt's.
        before_decode: called before each decode; what it raises ends the evaluation.
        time_of_first_row: when that was done, by ``time.perf_counter``; 0 before.

    Raises:
        TypeError, TrieSamplerError: not a model that can generate.
    """

    def __init__(self, llm: Llama, tokens: Iterable[int] = ()) -> None:
        require_engine(llm)
        self._llm = llm
        self.before_decode: Callable[[], None] | None = None
        self._row_type = ctypes.c_float * llm.n_vocab()
        self._row: npt.NDArray[np.float32] | None
        self.replace(tokens)
        self.restart_count()

    @property
    def room(self) -> int:
        """Tokens that the sequence can have in all."""
        # llama.cpp rounds the context up; the host's own buffer has what was asked for.
        return min(self._llm.n_ctx(), len(self._llm.input_ids))

    def require_room(self, n_more: int, what: str) -> None:
        """Refuse work that will not fit, before any of it is done.

        Raises:
            EngineError: the context is too small; the message says what size is needed.
        """
        needed = len(self.tokens) + n_more
        if needed > self.room:
            raise EngineError(
                f"{len(self.tokens)} tokens of prompt and up to {n_more} of {what} do not fit "
                f"the context of {self.room}; load the model with n_ctx={needed} or more"
            )

    def push(self, tokens: Iterable[int]) -> None:
        """Append tokens; they are evaluated with the next row that is asked for."""
        self.tokens.extend(tokens)
        self._row = None

    def replace(self, tokens: Iterable[int]) -> None:
        """Make it another sequence; what both begin with stays evaluated."""
        self.tokens: list[int] = list(tokens)
        self._row = None

    def restart_count(self) -> None:
        """Count from here: the next row is the first again."""
        self.n_decodes = 0
        self.n_prefill = 0
        self.time_of_first_row = 0.0

    def doubt(self) -> None:
        """Others may have used the ``Llama`` meanwhile: look again before the next row."""
        self._row = None

    def row(self) -> npt.NDArray[np.float32]:
        """[V] float32: the logits after the last token, in llama.cpp's own memory, good until the next decode.

        Raises:
            TrieSamplerError: the ``Llama`` is closed.
            EngineError: ``llama_decode`` failed, with its code; the sequence is as before, and another
                try evaluates what is missing.
        """
        if self._row is None:
            require_open(self._llm)
            self._evaluate()
            if not self.time_of_first_row:
                self.n_prefill = self.n_decodes
            pointer = llama_cpp.llama_get_logits_ith(self._llm._ctx.ctx, -1)
            if not pointer:
                raise EngineError("llama.cpp has no logits for the last token")
            address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
            # Not np.ctypeslib: 6 us a call.
            memory: Any = self._row_type.from_address(address)
            self._row = np.frombuffer(memory, np.float32)
        if not self.time_of_first_row:
            self.time_of_first_row = time.perf_counter()
        return self._row

    def _count_evaluated(self) -> int:
        """How many tokens of the sequence the context begins with."""
        n_kept = min(self._llm.n_tokens, len(self.tokens))
        differs = np.flatnonzero(self._llm.input_ids[:n_kept] != np.array(self.tokens[:n_kept], np.intc))
        return int(differs[0]) if len(differs) else n_kept

    def _evaluate(self) -> None:
        llm = self._llm
        n_kept = self._count_evaluated()
        # Newer hosts say whether their logits are those of the last token; of others we cannot know.
        if n_kept == len(self.tokens) == llm.n_tokens and not getattr(llm, "_requires_eval", True):
            return
        n_kept = min(n_kept, len(self.tokens) - 1)
        if n_kept < llm.n_tokens or n_kept == 0:
            self._drop_tail(n_kept)
        rest = self.tokens[llm.n_tokens :]
        for start in range(0, len(rest), llm.n_batch):
            if self.before_decode is not None:
                self.before_decode()
            self.n_decodes += 1
            try:
                llm.eval(rest[start : start + llm.n_batch])
            except RuntimeError as error:
                code = re.search(r"-?\d+$", str(error))
                raise EngineError(f"llama_decode failed: {error}", int(code[0]) if code else None) from error

    def _drop_tail(self, n_kept: int) -> None:
        """Forget what the context holds past ``n_kept`` tokens; where it cannot, everything."""
        llm = self._llm
        memory: Any = llama_cpp.llama_get_memory(llm._ctx.ctx)
        if self._lacks_window(memory, n_kept) or not llama_cpp.llama_memory_seq_rm(memory, 0, n_kept, -1):
            # Recurrent and hybrid models keep a state, no list of tokens.
            llama_cpp.llama_memory_clear(memory, True)
            n_kept = 0
        llm.n_tokens = n_kept
        # Newer hosts take logits of an exactly cached prompt as they are, unless this says not to.
        llm._requires_eval = True

    def _lacks_window(self, memory: Any, n_kept: int) -> bool:
        """Whether a cache that forgets what left the attention window no longer has the one before ``n_kept``."""
        get_first = getattr(llama_cpp, "llama_memory_seq_pos_min", None)
        if get_first is None or not n_kept:
            return False
        window = int(llama_cpp.llama_model_n_swa(self._llm.model))
        return window > 0 and int(get_first(memory, 0)) > max(0, n_kept - window)
