"""A llama.cpp vocabulary as a ``Tokenizer``, and prompts as ``create_completion`` reads them."""

from __future__ import annotations

import ctypes
import hashlib
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
from llama_cpp import Llama, llama_chat_format

from trie_sampler.binding import forget_vocabulary
from trie_sampler.errors import EngineError, TrieSamplerError, VocabMismatchError
from trie_sampler.tokens import FINGERPRINT_FORM, Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (``[{"role": ..., "content": ...}]``)."""

_LONGEST_PIECE = 256


class LlamaTokenizer:
    """The vocabulary of a loaded model.

    Args:
        llm: the model; a ``vocab_only`` one is enough.

    Cost: ``eog_ids`` asks every id once, 0.07 s for 262,144; ``as_tokenizer`` keeps one per model.
    """

    n_threads = 4
    """llama.cpp tokenizes without the GIL; what is around it is Python, so that more threads would wait."""

    def __init__(self, llm: Llama) -> None:
        # The model owns the vocabulary; holding it keeps the pointer alive.
        self._model = llm._model
        self._open(llama_cpp.llama_model_get_vocab(llm.model))

    @classmethod
    def of_vocab(cls, vocab: Any) -> LlamaTokenizer:
        """The tokenizer of a bare ``llama_vocab *``, which must outlive it."""
        tokenizer = cls.__new__(cls)
        tokenizer._open(vocab)
        return tokenizer

    def _open(self, vocab: Any) -> None:
        self._vocab = vocab
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        # One entry a token that came up: asking llama.cpp again costs a microsecond each time.
        self._pieces: dict[int, bytes] = {}
        self._controls: dict[int, bool] = {}
        self._ends: dict[int, bool] = {}

    @property
    def n_vocab(self) -> int:
        """V."""
        return self._n_vocab

    @cached_property
    def eog_ids(self) -> tuple[int, ...]:
        """Every id that llama.cpp takes as the end of a generation, ascending. First time O(V)."""
        is_eog, vocab = llama_cpp.llama_vocab_is_eog, self._vocab
        return tuple(token for token in range(self._n_vocab) if is_eog(vocab, token))

    @cached_property
    def fingerprint(self) -> str:
        """``vocab-sha256:`` and 32 hex digits of the token texts in the model's file. First time O(V).

        Two models have the same one where they have the same tokens under the same ids.
        """
        text_of, vocab = llama_cpp.llama_vocab_get_text, self._vocab
        texts = b"\0".join(text_of(vocab, token) for token in range(self._n_vocab))
        return FINGERPRINT_FORM + hashlib.sha256(texts).hexdigest()[:32]

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        """Ids of UTF-8 text: no BOS; control tokens are parsed only if ``special``."""
        room = len(text) + 8
        while True:
            ids = (llama_cpp.llama_token * room)()
            n_ids = llama_cpp.llama_tokenize(self._vocab, text, len(text), ids, room, False, special)
            if n_ids >= 0:
                return ids[:n_ids]
            if n_ids < -(2**30):
                raise EngineError(f"llama.cpp cannot tokenize a text of {len(text)} bytes", n_ids)
            room = -n_ids

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of the tokens' pieces; control tokens give their text only if ``special``."""
        if special:
            return b"".join(self._read_piece(token, special=True) for token in tokens)
        pieces = self._pieces
        try:
            return b"".join([pieces[token] for token in tokens])
        except KeyError:
            for token in tokens:
                if token not in pieces:
                    pieces[token] = self._read_piece(token)
            return b"".join([pieces[token] for token in tokens])

    def is_eog(self, token: int) -> bool:
        """Whether llama.cpp takes the token as the end of a generation."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))
        return known

    def is_control(self, token: int) -> bool:
        """Whether llama.cpp marks the token as a control token."""
        known = self._controls.get(token)
        if known is None:
            known = self._controls[token] = bool(llama_cpp.llama_vocab_is_control(self._vocab, token))
        return known

    def _read_piece(self, token: int, *, special: bool = False) -> bytes:
        buffer = ctypes.create_string_buffer(_LONGEST_PIECE)
        while True:
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
            if size >= 0:
                return buffer.raw[:size]
            buffer = ctypes.create_string_buffer(-size)


_tokenizers: weakref.WeakKeyDictionary[Any, LlamaTokenizer] = weakref.WeakKeyDictionary()


def as_tokenizer(llm: Llama | Tokenizer) -> Tokenizer:
    """The tokenizer of a ``Llama``, made once per model; a ``Tokenizer`` is handed back.

    Raises:
        TypeError: neither.
        TrieSamplerError: the ``Llama`` is closed.
    """
    if isinstance(llm, Llama):
        require_open(llm)
        known = _tokenizers.get(llm)
        if known is None:
            known = _tokenizers[llm] = LlamaTokenizer(llm)
        return known
    if isinstance(llm, Tokenizer):
        return llm
    raise TypeError(f"expected a llama_cpp.Llama or a Tokenizer, got {type(llm)}")


def require_open(llm: Llama) -> None:
    """Refuse a closed model: llama.cpp would read freed memory."""
    if getattr(llm._model, "model", None) is None:
        raise TrieSamplerError("this Llama is closed")


def model_id(llm: Llama | Tokenizer) -> str:
    """The fingerprint of a model's vocabulary, fit as a payload's ``modelId``.

    Returns:
        ``"vocab-sha256:"`` and 32 hex digits of the SHA-256 of its token texts in order. It is about
        token ids: fine-tunes of one base that add no token share it.

    Raises:
        TypeError: not a model, or a ``Tokenizer`` without ``fingerprint``.

    Cost: O(V) once a model, 0.1 s for 262,144 tokens.
    """
    tokenizer = as_tokenizer(llm)
    fingerprint = getattr(tokenizer, "fingerprint", None)
    if not isinstance(fingerprint, str):
        raise TypeError(f"{type(tokenizer)} has no fingerprint")
    return fingerprint


def forget_tokenizer(llm: Llama | Tokenizer) -> None:
    """Drop what is kept for a vocabulary.

    Raises:
        TypeError: not a model.
    """
    forget_vocabulary(as_tokenizer(llm))
    if isinstance(llm, Llama):
        _tokenizers.pop(llm, None)


def require_engine(llm: Llama) -> None:
    """Refuse a model that cannot generate.

    Raises:
        TypeError: not a ``Llama``.
        TrieSamplerError: loaded with ``vocab_only=True``.
    """
    if not isinstance(llm, Llama):
        raise TypeError(f"expected a llama_cpp.Llama, got {type(llm)}")
    require_open(llm)
    if llm.model_params.vocab_only:
        raise TrieSamplerError("this Llama was loaded with vocab_only=True: it has no weights to choose by")


def prompt_tokens(llm: Llama | Tokenizer, prompt: Any) -> list[int]:
    """The ids that the host would evaluate for a prompt.

    Text is tokenized as ``create_completion`` does: BOS and EOS as the model says, control tokens
    parsed. A list of ids is taken as it is. Messages go through the model's own chat handler.

    Raises:
        TrieSamplerError: an empty prompt on a model without BOS: nothing to evaluate.
        VocabMismatchError: an id outside the vocabulary, which llama.cpp would end the process for.
        TypeError: another kind of prompt.
    """
    if isinstance(prompt, str):
        ids = _text_tokens(llm, prompt)
    elif not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt is text, token ids or chat messages, got {type(prompt)}")
    else:
        parts = list(prompt)
        if parts and isinstance(parts[0], Mapping):
            heard = _rendered_chat(llm, parts)
            ids = _text_tokens(llm, heard) if isinstance(heard, str) else list(heard)
        else:
            if not all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in parts):
                raise TypeError(f"a prompt is text, token ids or chat messages, got a list of {parts[:3]!r:.80}")
            ids = [operator.index(token) for token in parts]
    n_vocab = as_tokenizer(llm).n_vocab
    for place, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            raise VocabMismatchError(f"the prompt's token {token} at index {place} is no id: V is {n_vocab}")
    if not ids:
        raise TrieSamplerError("the prompt is empty, and this model has no BOS token to start from")
    return ids


def _text_tokens(llm: Llama | Tokenizer, text: str) -> list[int]:
    if not isinstance(llm, Llama):
        return llm.tokenize(text.encode())
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    ids = llm.tokenize(text.encode(), add_bos=False, special=True) if text else []
    bos, eos = llama_cpp.llama_vocab_bos(vocab), llama_cpp.llama_vocab_eos(vocab)
    if bos >= 0 and (llama_cpp.llama_vocab_get_add_bos(vocab) or not text):
        ids = [bos, *ids]
    if eos >= 0 and llama_cpp.llama_vocab_get_add_eos(vocab):
        ids = [*ids, eos]
    return ids


class _HeardError(Exception):
    """Ends a chat handler once it has said what it would complete."""


class _Listener:
    """Stands in for a ``Llama`` in a chat handler and keeps the prompt it would complete."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self.prompt: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def create_completion(self, prompt: Any, **_: Any) -> None:
        self.prompt = prompt
        raise _HeardError


def _rendered_chat(llm: Llama | Tokenizer, messages: Sequence[Any]) -> Any:
    if not isinstance(llm, Llama):
        raise TypeError("chat messages need a llama_cpp.Llama, whose chat handler renders them")
    name = llm.chat_format or ""
    handler: Any = (
        llm.chat_handler or llm._chat_handlers.get(name) or llama_chat_format.get_chat_completion_handler(name)
    )
    listener = _Listener(llm)
    try:
        handler(llama=listener, messages=list(messages))
    except _HeardError:
        return listener.prompt
    # Templates fail in ways of their own: a missing role, a message that is no mapping.
    except Exception as error:
        raise TrieSamplerError(f"the chat handler cannot render these messages: {error!r:.200}") from error
    raise TrieSamplerError(f"the chat handler {llm.chat_format!r} completes nothing; render the prompt yourself")
