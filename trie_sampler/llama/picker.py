"""``Picker``: the next token of free text, by a sampler chain, with the grammar kept from killing the process."""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from trie_sampler.errors import EngineError
from trie_sampler.llama.chain import SamplingParams, build_sampler_chain
from trie_sampler.llama.vocab import as_tokenizer
from trie_sampler.tokens import tokenize_alone

# A candidate of llama.cpp: ``llama_token_data``, checked in ``llama/abi``.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Picker:
    """A sampler chain without a trie, fed with rows and with tokens that others picked.

    Args:
        llm: the model.
        params: what to sample by.

    Raises:
        EngineError, ValueError: see ``build_sampler_chain``.
    """

    def __init__(self, llm: Llama, params: SamplingParams) -> None:
        self.params = params
        self._llm = llm
        chain = build_sampler_chain(llm, params)
        self._chain = chain
        self._finalizer = weakref.finalize(self, llama_cpp.llama_sampler_free, chain)
        # The grammar, where there is one, is the first of the chain.
        pointer = llama_cpp.llama_sampler_chain_get(chain, 0) if params.grammar else None
        self._grammar = None if pointer is None else _Grammar(llm, params, pointer)
        self._candidates = np.zeros(llm.n_vocab(), _CANDIDATE)
        self._ids = np.arange(llm.n_vocab(), dtype=np.int32)

    def pick(self, row: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """Draw a token; the chain does not take it in yet, see ``accept``. O(V).

        Args:
            row: [V] float32 logits, left as they are.
            allowed: [V] bool, tokens that may come; ``None`` is all.

        Raises:
            EngineError: the grammar, or ``allowed``, leaves nothing.
        """
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = row if allowed is None else np.where(allowed, row, -np.inf)
        candidates["p"] = 0.0
        array = _array_of(candidates)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise EngineError("the samplers left no token to pick")
        token = int(array.data[array.selected].id)
        if not self.allows(token) or (allowed is not None and not allowed[token]):
            # Where everything is at -inf, llama.cpp picks one all the same.
            raise EngineError("the grammar allows none of the tokens that may come here")
        return token

    def allows(self, token: int) -> bool:
        """Whether the grammar takes the token next; always, where there is none. O(1) in V."""
        return self._grammar is None or self._grammar.allows(token)

    def require(self, tokens: Sequence[int]) -> None:
        """Refuse tokens that the grammar does not take one after the other; nothing changes.

        Raises:
            EngineError: it does not take them all.
        """
        if self._grammar is not None:
            self._grammar.require(tokens)

    def accept(self, token: int) -> None:
        """Take a token that enters the context into every sampler.

        Raises:
            EngineError: the grammar does not take it; nothing changed. llama.cpp would end the process.
        """
        if self._grammar is not None:
            self._grammar.require((token,))
            self._grammar.hear(token)
        llama_cpp.llama_sampler_accept(self._chain, token)

    def replay(self, tokens: Iterable[int]) -> None:
        """Take in tokens from before the grammar began: every sampler but the grammar."""
        first = 0 if self._grammar is None else 1
        for token in tokens:
            for place in range(first, llama_cpp.llama_sampler_chain_n(self._chain)):
                llama_cpp.llama_sampler_accept(llama_cpp.llama_sampler_chain_get(self._chain, place), token)

    def close(self) -> None:
        """Free the chain."""
        self._finalizer()


class _Grammar:
    """What llama.cpp's grammar sampler would take; it ends the process over anything else.

    A lazy grammar takes everything until a trigger, and then has to take the text from the trigger on. So that
    text is tried on a grammar that is awake.
    """

    def __init__(self, llm: Llama, params: SamplingParams, pointer: Any) -> None:
        self._tokenizer = as_tokenizer(llm)
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._params = params
        self._pointer = pointer
        self._sleeps = params.grammar_lazy
        self._heard = ""

    def allows(self, token: int) -> bool:
        if not self._sleeps:
            return _allows(self._pointer, token)
        woken = self._text_on_waking(token)
        return woken is None or self._takes(woken)

    def require(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 1:
            if not self.allows(tokens[0]):
                raise _refusal(tokens[0])
            return
        clone = llama_cpp.llama_sampler_clone(self._pointer)
        trial = copy.copy(self)
        trial._pointer = clone
        try:
            for token in tokens:
                trial.require((token,))
                trial.hear(token)
                llama_cpp.llama_sampler_accept(clone, token)
        finally:
            llama_cpp.llama_sampler_free(clone)

    def hear(self, token: int) -> None:
        """The token is about to be accepted."""
        if self._sleeps:
            self._sleeps = self._text_on_waking(token) is None
            self._heard += self._text_of(token)

    def _text_on_waking(self, token: int) -> str | None:
        """The text that the grammar has to take if the token wakes it; None if it does not."""
        if token in self._params.grammar_triggers:
            return self._text_of(token)
        heard = self._heard + self._text_of(token)
        for trigger in self._params.grammar_triggers:
            if isinstance(trigger, str) and trigger in heard:
                return heard[heard.index(trigger) :]
        return None

    def _takes(self, text: str) -> bool:
        pointer = llama_cpp.llama_sampler_init_grammar(self._vocab, (self._params.grammar or "").encode(), b"root")
        try:
            # A grammar reads characters: which tokens bring them does not matter.
            for token in tokenize_alone(self._tokenizer, text.encode()):
                if not _allows(pointer, token):
                    return False
                llama_cpp.llama_sampler_accept(pointer, token)
            return True
        finally:
            llama_cpp.llama_sampler_free(pointer)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.detokenize((token,), special=True).decode("utf-8", "replace")


def _refusal(token: int) -> EngineError:
    return EngineError(f"the grammar does not allow token {token}, which the constraint picked")


def _allows(grammar: Any, token: int) -> bool:
    candidate = np.array([(token, 0.0, 0.0)], _CANDIDATE)
    array = _array_of(candidate)
    llama_cpp.llama_sampler_apply(grammar, ctypes.byref(array))
    return bool(candidate["logit"][0] > -np.inf)


def _array_of(candidates: npt.NDArray[Any]) -> Any:
    data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
    return llama_cpp.llama_token_data_array(data, len(candidates), -1, False)
