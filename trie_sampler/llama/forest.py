"""``Forest``: many continuations of one prompt evaluated together, in a context of its own on a model's weights.

The prompt is in sequence 0. A token of a tree belongs to the sequences of everything that grows from it, so that
attention sees its own ancestors and no one else's (tree attention): one batch evaluates a whole tree of tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from trie_sampler.errors import EngineError
from trie_sampler.llama.vocab import require_engine

N_SEQUENCES = 256
"""llama.cpp's limit; sequence 0 is the prompt's."""

_N_BATCH = 2048
_GRAIN = 512
MAX_EXTRA = 16_384
"""Tokens of trees that a context has room for beside a prompt as long as the model's own context."""

_MAX_ROWS_BYTES = 2**28
"""Logits computed at once: V float32 for each row asked for."""

Row = npt.NDArray[np.float32]


class Twig(NamedTuple):
    """A token of a tree to evaluate: where it stands and to which sequences it belongs."""

    token: int
    position: int
    sequences: Sequence[int]


class StatefulMemoryError(EngineError):
    """The model's memory is no list of tokens, of which parts could be shared or dropped."""


class Forest:
    """The second context of a ``Llama``; get one with ``of``. Not for two threads at once.

    Attributes:
        n_decodes: calls of ``llama_decode`` since ``begin``.
        n_evaluated: tokens of trees evaluated since ``begin``.
    """

    def __init__(self, llm: Llama) -> None:
        require_engine(llm)
        self._llm = weakref.ref(llm)
        self._model = llm._model  # owns the weights, and outlives the context
        self._n_vocab = llm.n_vocab()
        self._row_type = ctypes.c_float * self._n_vocab
        self._prompt: list[int] = []
        self._n_ctx = 0
        self._finalizer: weakref.finalize[..., Forest] | None = None
        self.n_decodes = 0
        self.n_evaluated = 0

    @classmethod
    def of(cls, llm: Llama) -> Forest:
        """The one of this ``Llama``, kept as long as it."""
        known = _forests.get(llm)
        if known is None:
            known = _forests[llm] = cls(llm)
            # A context must not outlive the model that ``Llama.close`` frees.
            llm._stack.callback(_close, weakref.ref(known))
        return known

    @property
    def max_rows(self) -> int:
        """Rows of logits that one decode gives at most."""
        return max(8, _MAX_ROWS_BYTES // (4 * self._n_vocab))

    def begin(self, prompt: Sequence[int], n_extra: int) -> Row:
        """Evaluate a prompt, but for what it has in common with the one before; trees of that one are gone.

        Args:
            prompt: [n] ids, at least one.
            n_extra: tokens of trees that there must be room for.

        Returns:
            [V] float32, the logits after it, a copy.

        Raises:
            StatefulMemoryError: the model cannot share a prompt.
            EngineError: no context of that size can be had, or a decode failed.
        """
        self.n_decodes = self.n_evaluated = 0
        self._require_room(len(prompt) + n_extra)
        n_kept = 0
        for ours, theirs in zip(self._prompt, prompt[:-1], strict=False):
            if ours != theirs:
                break
            n_kept += 1
        self.drop(range(1, N_SEQUENCES))
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, n_kept, -1):
            self._prompt = []
            raise StatefulMemoryError("this model keeps a state, not a list of tokens, and cannot share a prompt")
        self._prompt = list(prompt[:n_kept])
        rest = prompt[n_kept:]
        for start in range(0, len(rest), _N_BATCH):
            part = rest[start : start + _N_BATCH]
            twigs = [Twig(token, n_kept + start + place, (0,)) for place, token in enumerate(part)]
            self._decode(twigs, [len(part) - 1])
        self._prompt = list(prompt)
        return self._row(len(rest[(len(rest) - 1) // _N_BATCH * _N_BATCH :]) - 1).copy()

    def share(self, source: int, targets: Iterable[int]) -> None:
        """Let sequences begin as another one does; they are empty before."""
        for target in targets:
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def drop(self, sequences: Iterable[int]) -> None:
        """Forget sequences."""
        for sequence in sequences:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def evaluate(self, twigs: Sequence[Twig], wanted: Sequence[int]) -> list[Row]:
        """Evaluate tokens in one batch, or in as many as 2048 tokens at a time make; parents before children.

        Args:
            twigs: tokens.
            wanted: which of them to give logits for, ascending, at most ``max_rows``.

        Returns:
            For each of ``wanted`` [V] float32, which the next decode may overwrite.

        Raises:
            EngineError: the decode failed, with its code.
        """
        rows: list[Row] = []
        for start in range(0, len(twigs), _N_BATCH):
            part = twigs[start : start + _N_BATCH]
            places = [place - start for place in wanted if start <= place < start + len(part)]
            self._decode(part, places)
            self.n_evaluated += len(part)
            is_last = start + len(part) == len(twigs)
            rows += [self._row(place) if is_last else self._row(place).copy() for place in places]
        return rows

    # --- llama.cpp -----------------------------------------------------------------------------

    def _decode(self, twigs: Sequence[Twig], wanted: Sequence[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(twigs)
        for place, twig in enumerate(twigs):
            batch.token[place] = twig.token
            batch.pos[place] = twig.position
            batch.n_seq_id[place] = len(twig.sequences)
            for number, sequence in enumerate(twig.sequences):
                batch.seq_id[place][number] = sequence
            batch.logits[place] = 0
        for place in wanted:
            batch.logits[place] = 1
        self.n_decodes += 1
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise EngineError(f"llama_decode failed with code {code}", code)

    def _row(self, place: int) -> Row:
        pointer = llama_cpp.llama_get_logits_ith(self._context, place)
        if not pointer:
            raise EngineError("llama.cpp has no logits for a token that they were asked for")
        address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        row: Row = np.frombuffer(self._row_type.from_address(address), np.float32)  # type: ignore[call-overload]
        return row

    def _require_room(self, n_tokens: int) -> None:
        if n_tokens <= self._n_ctx:
            return
        llm = self._llm()
        if llm is None:
            raise EngineError("the Llama is gone")
        limit = llm.n_ctx() + MAX_EXTRA
        if n_tokens > limit:
            raise EngineError(f"a prompt and trees of {n_tokens} tokens do not fit the limit of {limit}")
        self.close()
        params = type(llm.context_params).from_buffer_copy(llm.context_params)
        params.n_ctx = min(limit, -(-n_tokens // _GRAIN) * _GRAIN)
        params.n_batch = _N_BATCH
        params.n_seq_max = N_SEQUENCES
        params.kv_unified = True
        # A window that only keeps what attention reaches could not be rewound or shared.
        params.swa_full = True
        params.embeddings = False
        with _quiet():
            context = llama_cpp.llama_init_from_model(self._model.model, params)
        if not context:
            raise EngineError(f"llama.cpp made no second context of {params.n_ctx} tokens")
        batch = llama_cpp.llama_batch_init(_N_BATCH, 0, N_SEQUENCES)
        self._context, self._batch, self._n_ctx = context, batch, int(params.n_ctx)
        self._memory = llama_cpp.llama_get_memory(context)
        self._finalizer = weakref.finalize(self, _free, context, batch)
        if getattr(llm, "_lora_adapter", None) is not None:
            _apply_lora(context, llm)

    def close(self) -> None:
        """Free the context; the next ``begin`` makes another."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self._prompt, self._n_ctx = [], 0


_no_log = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep llama.cpp's log about a second context off the terminal; versions that cannot say who listens talk."""
    get = getattr(llama_cpp, "llama_log_get", None)
    if get is None:
        yield
        return
    callback, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    get(ctypes.byref(callback), ctypes.byref(data))
    llama_cpp.llama_log_set(_no_log, None)
    try:
        yield
    finally:
        llama_cpp.llama_log_set(callback, data)


_forests: weakref.WeakKeyDictionary[Llama, Forest] = weakref.WeakKeyDictionary()


def forget_forest(llm: Llama) -> None:
    """Free the second context of a ``Llama``, where it has one."""
    forest = _forests.pop(llm, None)
    if forest is not None:
        forest.close()


def _close(forest: weakref.ref[Forest]) -> None:
    alive = forest()
    if alive is not None:
        alive.close()


def _free(context: object, batch: object) -> None:
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)


def _apply_lora(context: object, llm: Llama) -> None:
    """LoRA lives on the context, so a second one needs it again."""
    scale = getattr(llm, "lora_scale", 1.0)
    one = getattr(llama_cpp, "llama_set_adapter_lora", None)
    if one is not None and hasattr(one, "argtypes") and not hasattr(llama_cpp, "llama_set_adapters_lora"):
        code = one(context, llm._lora_adapter, scale)
    else:
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(llm._lora_adapter)  # type: ignore[misc]
        code = llama_cpp.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(scale))
    if code != 0:
        raise EngineError("the LoRA adapter could not be applied to the second context", int(code))
