"""Ways to hold a row of logits to a set of choices: ours and others, behind one interface.

Every contender is built for the same choices over the same vocabulary, and is asked at each step of a walk to leave
only what may come next. Those that allow every tokenization of a choice leave more tokens than ours; the walks follow
the vocabulary's own tokenization, which all of them allow.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from trie_sampler import TokenTrie, TrieCursor
from trie_sampler.gbnf import quote
from trie_sampler.llama.vocab import as_tokenizer

Row = npt.NDArray[np.float32]
Choices = Sequence[tuple[str, Sequence[int]]]
"""(text, its tokens by the vocabulary's own tokenizer)"""


class Contender(Protocol):
    """A constraint, and one walk through it at a time."""

    package: str | None
    """What is installed for it; ``None`` where nothing is."""

    def build(self, llm: Llama, choices: Choices) -> None:
        """Compile the choices; what depends on the vocabulary alone is made here, too."""

    def start(self) -> None:
        """Begin a walk."""

    def mask(self, row: Row) -> None:
        """Compute what may come next, and set everything else in ``row`` ([V] float32) to -inf."""

    def pick(self, row: Row) -> int:
        """The largest logit of a masked row."""

    def accept(self, token: int) -> None:
        """One token further."""


class _Masks:
    """Who picks by the largest logit of the masked row."""

    package: str | None = None

    def pick(self, row: Row) -> int:
        return int(np.argmax(row))


class Ours:
    """``TrieCursor.pick``, which needs no mask."""

    package = None

    def build(self, llm: Llama, choices: Choices) -> None:
        self._cursor = TrieCursor(TokenTrie.from_sequences(choices), eog_ids=as_tokenizer(llm).eog_ids)
        self.pick = self._cursor.pick

    def start(self) -> None:
        self._cursor.reset()

    def mask(self, row: Row) -> None:
        pass

    def accept(self, token: int) -> None:
        self._cursor.accept(token)


class DictTrie(_Masks):
    """Dictionaries of dictionaries, and NumPy: how logits processors are written by hand."""

    def build(self, llm: Llama, choices: Choices) -> None:
        self._root: dict[int, Any] = {}
        for _, tokens in choices:
            node = self._root
            for token in tokens:
                node = node.setdefault(token, {})

    def start(self) -> None:
        self._node = self._root

    def mask(self, row: Row) -> None:
        children = list(self._node)
        kept = row[children]
        row[:] = -np.inf
        row[children] = kept

    def accept(self, token: int) -> None:
        self._node = self._node[token]


class LlamaGrammar(_Masks):
    """llama.cpp's grammar sampler over a candidate array that is there already."""

    def build(self, llm: Llama, choices: Choices) -> None:
        text = "root ::= " + " | ".join(quote(text) for text, _ in choices)
        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not self._sampler:
            raise ValueError("llama.cpp refuses the grammar")
        fields = [("id", np.intc), ("logit", np.single), ("p", np.single)]
        self._records = np.zeros(llm.n_vocab(), np.dtype(fields, align=True))
        self._records["id"] = np.arange(llm.n_vocab())
        data = ctypes.cast(self._records.ctypes.data, llama_cpp.llama_token_data_p)
        self._array = llama_cpp.llama_token_data_array(data, len(self._records), -1, False)

    def start(self) -> None:
        llama_cpp.llama_sampler_reset(self._sampler)

    def mask(self, row: Row) -> None:
        self._records["logit"] = row
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(self._array))
        row[:] = self._records["logit"]

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)


class LLGuidance(_Masks):
    """llguidance's matcher; the choices are a Lark grammar of alternatives."""

    package = "llguidance"

    def build(self, llm: Llama, choices: Choices) -> None:
        import json

        import llguidance
        import llguidance.llamacpp
        import llguidance.numpy

        self._numpy = llguidance.numpy
        with warnings.catch_warnings():
            # It asks the host by a name that the host is about to drop.
            warnings.simplefilter("ignore", DeprecationWarning)
            tokenizer = llguidance.llamacpp.lltokenizer_from_vocab(llama_cpp.llama_model_get_vocab(llm.model))
        grammar = "start: " + " | ".join(json.dumps(text) for text, _ in choices)
        self._matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        self._bits = llguidance.numpy.allocate_token_bitmask(1, llm.n_vocab())

    def start(self) -> None:
        self._matcher.reset()

    def mask(self, row: Row) -> None:
        self._numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        self._numpy.apply_token_bitmask_inplace(row[None], self._bits)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


class XGrammar(_Masks):
    """xgrammar's matcher; the choices are an EBNF grammar of alternatives."""

    package = "xgrammar"

    def build(self, llm: Llama, choices: Choices) -> None:
        import torch
        import xgrammar

        self._torch, self._xgrammar = torch, xgrammar
        tokenizer = as_tokenizer(llm)
        pieces = [tokenizer.detokenize((token,)) for token in range(llm.n_vocab())]
        info = xgrammar.TokenizerInfo(pieces, vocab_size=llm.n_vocab(), stop_token_ids=list(tokenizer.eog_ids))
        grammar = "root ::= " + " | ".join(quote(text) for text, _ in choices)
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, llm.n_vocab())

    def start(self) -> None:
        self._matcher.reset()

    def mask(self, row: Row) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)
        self._xgrammar.apply_token_bitmask_inplace(self._torch.from_numpy(row), self._bits[0])

    def accept(self, token: int) -> None:
        self._matcher.accept_token(token)


class OutlinesCore(_Masks):
    """outlines-core's index; the choices are a regular expression of alternatives."""

    package = "outlines-core"

    def build(self, llm: Llama, choices: Choices) -> None:
        import outlines_core
        import outlines_core.kernels.numpy as kernels

        self._core, self._kernels = outlines_core, kernels
        tokenizer = as_tokenizer(llm)
        ids: dict[bytes, list[int]] = {}
        for token in range(llm.n_vocab()):
            piece = tokenizer.detokenize((token,))
            if piece and not tokenizer.is_eog(token) and not tokenizer.is_control(token):
                ids.setdefault(piece, []).append(token)
        vocabulary = outlines_core.Vocabulary(tokenizer.eog_ids[0], ids)
        self._index = outlines_core.Index("|".join(re.escape(text) for text, _ in choices), vocabulary)
        self._bits = kernels.allocate_token_bitmask(llm.n_vocab())

    def start(self) -> None:
        self._guide = self._core.Guide(self._index)

    def mask(self, row: Row) -> None:
        self._kernels.fill_next_token_bitmask(self._guide, self._bits)
        self._kernels.apply_token_bitmask_inplace(row[None], self._bits)

    def accept(self, token: int) -> None:
        self._guide.advance(token)


class FormatEnforcer(_Masks):
    """lm-format-enforcer; the choices are a regular expression of alternatives."""

    package = "lm-format-enforcer"

    def build(self, llm: Llama, choices: Choices) -> None:
        from lmformatenforcer import RegexParser, TokenEnforcer, TokenEnforcerTokenizerData

        tokenizer = as_tokenizer(llm)
        regular = []
        for token in range(llm.n_vocab()):
            piece = tokenizer.detokenize((token,)).decode("utf-8", "replace")
            if piece and not tokenizer.is_control(token) and not tokenizer.is_eog(token):
                regular.append((token, piece, piece.startswith(" ")))

        def decode(tokens: list[int]) -> str:
            return tokenizer.detokenize(tokens).decode("utf-8", "replace")

        data = TokenEnforcerTokenizerData(regular, decode, list(tokenizer.eog_ids), False, llm.n_vocab())
        parser = RegexParser("|".join(re.escape(text) for text, _ in choices))
        self._enforcer = TokenEnforcer(data, parser)

    def start(self) -> None:
        # What was seen is kept by prefix: another first token makes each walk a new one.
        self._n_walks = getattr(self, "_n_walks", 0) + 1
        self._tokens = [self._n_walks]

    def mask(self, row: Row) -> None:
        allowed = self._enforcer.get_allowed_tokens(self._tokens).allowed_tokens
        kept = row[allowed]
        row[:] = -np.inf
        row[allowed] = kept

    def accept(self, token: int) -> None:
        self._tokens = [*self._tokens, token]


class Static:
    """STATIC, a sparse-matrix trie for accelerators."""

    package = "static-constraint-decoding"

    def build(self, llm: Llama, choices: Choices) -> None:
        raise NotImplementedError("no package of that name on PyPI: it is published as source only")

    start: Callable[[], None]
    mask: Callable[[Row], None]
    pick: Callable[[Row], int]
    accept: Callable[[int], None]


CONTENDERS: dict[str, type[Any]] = {
    "trie_sampler": Ours,
    "dictionaries and NumPy": DictTrie,
    "llama.cpp grammar": LlamaGrammar,
    "llguidance": LLGuidance,
    "xgrammar": XGrammar,
    "outlines-core": OutlinesCore,
    "lm-format-enforcer": FormatEnforcer,
    "STATIC": Static,
}
