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

from trie_sampler.automaton import PieceIndex
from trie_sampler.errors import EngineError
from trie_sampler.llama.chain import SamplingParams, build_sampler_chain, check_tokens, init_sampler
from trie_sampler.llama.vocab import as_tokenizer
from trie_sampler.tokens import Tokenizer

# A candidate of llama.cpp: ``llama_token_data``, checked in ``llama/abi``.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Picker:
    """A sampler chain without a trie, fed with rows and with tokens that others picked.

    Args:
        llm: the model.
        params: what to sample by.

    Raises:
        EngineError, VocabMismatchError: see ``build_sampler_chain``.
    """

    def __init__(self, llm: Llama, params: SamplingParams) -> None:
        self.params = params
        self._llm = llm
        self._grammar = _Grammar.of(llm, params) if params.grammar else None
        plain = params.model_copy(update={"grammar": None, "grammar_lazy": False, "grammar_triggers": ()})
        self._chain = chain = build_sampler_chain(llm, plain)
        self._finalizer = weakref.finalize(self, llama_cpp.llama_sampler_free, chain)
        self._candidates = np.zeros(llm.n_vocab(), _CANDIDATE)
        self._ids = np.arange(llm.n_vocab(), dtype=np.int32)

    def pick(self, row: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """Draw a token; the samplers do not take it in yet, see ``accept``. O(V).

        Args:
            row: [V] float32 logits, left as they are.
            allowed: [V] bool, tokens that may come; ``None`` is all.

        Raises:
            EngineError: grammar, biases and ``allowed`` together leave nothing.
        """
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = row if allowed is None else np.where(allowed, row, -np.inf)
        candidates["p"] = 0.0
        if self._grammar is not None:
            self._grammar.apply(_array_of(candidates))
        # Of candidates at -inf llama.cpp would pick one where all are, and some samplers count them.
        is_open = candidates["logit"] > -np.inf
        if not is_open.all():
            candidates = candidates[is_open]
        array = _array_of(candidates)
        if array.size:
            llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size or array.data[array.selected].logit == -np.inf:
            raise EngineError("the grammar or the samplers leave none of the tokens that may come here")
        token = int(array.data[array.selected].id)
        if not self.allows(token):
            raise EngineError(f"the grammar does not allow token {token}, which the samplers picked")
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
            EngineError: the grammar does not take it; nothing changed.
        """
        if self._grammar is not None:
            self._grammar.accept(token)
        llama_cpp.llama_sampler_accept(self._chain, token)

    def replay(self, tokens: Iterable[int]) -> None:
        """Take in tokens from before the grammar began: every sampler but the grammar."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def clone(self) -> Picker:
        """Another in the same state, random numbers included."""
        twin = copy.copy(self)
        twin._chain = chain = llama_cpp.llama_sampler_clone(self._chain)
        twin._finalizer = weakref.finalize(twin, llama_cpp.llama_sampler_free, chain)
        twin._grammar = None if self._grammar is None else self._grammar.clone()
        return twin

    def close(self) -> None:
        """Free the samplers."""
        self._finalizer()
        if self._grammar is not None:
            self._grammar.close()


class _Grammar:
    """llama.cpp's grammar sampler, asked before every token: over one that does not fit it ends the process.

    A lazy grammar lets everything through until a trigger, and then has to take all from the trigger on. It sleeps
    here and not in llama.cpp, whose own cannot be asked what it would refuse on waking.

    Args:
        tokenizer: the vocabulary.
        sampler: ``llama_sampler *`` of a grammar that has taken nothing yet; owned from now on.
        triggers: texts, in UTF-8, and token ids that wake it; ``None`` where it is awake.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampler: Any, triggers: tuple[frozenset[bytes], frozenset[int]] | None
    ) -> None:
        self._tokenizer = tokenizer
        self._triggers = triggers
        # While it sleeps: the last tokens and their bytes, as many as a trigger can reach back.
        self._heard: list[tuple[int, bytes]] = []
        self._own(sampler)

    @classmethod
    def of(cls, llm: Llama, params: SamplingParams) -> _Grammar:
        tokenizer = as_tokenizer(llm)
        texts = frozenset(text.encode() for text in params.grammar_triggers if isinstance(text, str))
        ids = frozenset(token for token in params.grammar_triggers if not isinstance(token, str))
        check_tokens("grammar_triggers", ids, tokenizer.n_vocab)
        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        sampler = init_sampler("grammar", vocab, (params.grammar or "").encode(), b"root")
        return cls(tokenizer, sampler, (texts, ids) if params.grammar_lazy else None)

    def _own(self, sampler: Any) -> None:
        self._sampler = sampler
        self._finalizer = weakref.finalize(self, llama_cpp.llama_sampler_free, sampler)

    def close(self) -> None:
        self._finalizer()

    def apply(self, array: Any) -> None:
        """Set the candidates that it does not take to -inf."""
        if self._triggers is None:
            llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))

    def allows(self, token: int) -> bool:
        if self._triggers is None:
            return _allows(self._sampler, token)
        return not self._wakes(token) or self._try_waking(token, keep=False)

    def accept(self, token: int) -> None:
        if self._triggers is None:
            if not _allows(self._sampler, token):
                raise _refusal(token)
            llama_cpp.llama_sampler_accept(self._sampler, token)
        elif not self._wakes(token):
            self._heard.append((token, self._piece_of(token)))
            self._forget()
        elif not self._try_waking(token, keep=True):
            raise _refusal(token)

    def clone(self) -> _Grammar:
        twin = _Grammar(self._tokenizer, llama_cpp.llama_sampler_clone(self._sampler), self._triggers)
        twin._heard = self._heard.copy()
        return twin

    def require(self, tokens: Sequence[int]) -> None:
        trial = self.clone()
        try:
            for token in tokens:
                trial.accept(token)
        finally:
            trial.close()

    # --- asleep --------------------------------------------------------------------------------

    def _wakes(self, token: int) -> bool:
        texts, ids = self._triggers or ((), ())
        heard = b"".join(piece for _, piece in self._heard) + self._piece_of(token)
        return token in ids or any(text in heard for text in texts)

    def _try_waking(self, token: int, *, keep: bool) -> bool:
        """Whether the grammar takes everything from the trigger on; ``keep`` makes it so."""
        trial = llama_cpp.llama_sampler_clone(self._sampler)
        is_taken = all(_take(trial, each) for each in self._from_trigger_on(token))
        if is_taken and keep:
            self._finalizer()
            self._own(trial)
            self._triggers, self._heard = None, []
        else:
            llama_cpp.llama_sampler_free(trial)
        return is_taken

    def _from_trigger_on(self, token: int) -> Iterable[int | None]:
        """Tokens from the first trigger on; ``None`` stands for a byte that no token writes."""
        texts, ids = self._triggers or ((), ())
        if token in ids:
            return [token]
        heard = [*self._heard, (token, self._piece_of(token))]
        text = b"".join(piece for _, piece in heard)
        start = min(place for trigger in texts if (place := text.find(trigger)) >= 0)
        tokens: list[int | None] = []
        for each, piece in heard:
            if start <= 0:
                tokens.append(each)
            else:
                # A token that the trigger begins inside of: its last bytes, each for itself.
                tokens += [_token_of_byte(self._tokenizer, byte) for byte in piece[start:]]
            start -= len(piece)
        return tokens

    def _forget(self) -> None:
        """Let go of tokens that no trigger can reach back to."""
        texts, _ = self._triggers or ((), ())
        reach = max(map(len, texts), default=1) - 1
        n_bytes = sum(len(piece) for _, piece in self._heard)
        while self._heard and n_bytes - len(self._heard[0][1]) >= reach:
            n_bytes -= len(self._heard.pop(0)[1])

    def _piece_of(self, token: int) -> bytes:
        return self._tokenizer.detokenize((token,), special=True)


def _take(sampler: Any, token: int | None) -> bool:
    """Let a grammar take a token, where it does."""
    if token is None or not _allows(sampler, token):
        return False
    llama_cpp.llama_sampler_accept(sampler, token)
    return True


def _token_of_byte(tokenizer: Tokenizer, byte: int) -> int | None:
    index = PieceIndex.of(tokenizer)
    for node in range(index.first_child[0], index.first_child[1]):
        if index.byte[node] == byte and index.first_id[node] < index.first_id[node + 1]:
            return int(index.ids[index.first_id[node]])
    return None


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
