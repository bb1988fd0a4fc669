"""``Picker``: the next token of free text, by a sampler chain, with the grammar kept from killing the process."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from trie_sampler.errors import EngineError
from trie_sampler.llama.chain import SamplingParams, build_sampler_chain

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
        self._grammar = llama_cpp.llama_sampler_chain_get(chain, 0) if params.grammar else None
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
        array = self._array_of(candidates)
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
        if self._grammar is None:
            return True
        candidate = np.array([(token, 0.0, 0.0)], _CANDIDATE)
        array = self._array_of(candidate)
        llama_cpp.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return bool(candidate["logit"][0] > -np.inf)

    def accept(self, token: int) -> None:
        """Take a token that enters the context into every sampler.

        Raises:
            EngineError: the grammar does not take it; nothing changed. llama.cpp would end the process.
        """
        if not self.allows(token):
            raise EngineError(f"the grammar does not allow token {token}, which the constraint picked")
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

    @staticmethod
    def _array_of(candidates: npt.NDArray[Any]) -> Any:
        data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
        return llama_cpp.llama_token_data_array(data, len(candidates), -1, False)
