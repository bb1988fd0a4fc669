"""Ways to hold a row of logits to a set of choices: ours and others, behind one interface.

Every contender is built for the same choices over the same vocabulary, and is asked at each step of a walk to leave
only what may come next. Those that allow every tokenization of a choice leave more tokens than ours; the walks follow
the vocabulary's own tokenization, which all of them allow.

Each peer is asked in the way that suits it best of those tried: llguidance gets one terminal, because alternatives of a
rule count against a limit of 2,000; xgrammar the backend that is the fastest on this kind of row.
"""

from __future__ import annotations

import ctypes
import json
import re
import time
import warnings
from collections.abc import Sequence
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
    """A constraint, and one walk through it at a time.

    Made from a ``Llama``, of which only the vocabulary is used; what depends on the vocabulary alone is made then.
    """

    name: str
    package: str | None
    """What is installed for it; ``None`` where nothing is."""
    canonical: bool
    """Allows the vocabulary's own tokenization alone, and not all ways to write a choice."""
    filled: float | None
    """``time.perf_counter()`` inside the last ``mask``, when what is allowed was known and not yet applied; ``None``
    where the two are one."""

    def build(self, choices: Choices) -> None:
        """Compile the choices."""

    def start(self) -> None:
        """Begin a walk."""

    def mask(self, row: Row) -> None:
        """Compute what may come next, and set everything else in ``row`` ([V] float32, contiguous) to -inf."""

    def pick(self, row: Row) -> int:
        """The id of the largest logit of a row [V] that ``mask`` has seen."""

    def accept(self, token: int) -> None:
        """One token further."""

    def allowed(self, row: Row) -> npt.NDArray[np.integer[Any]]:
        """[n] ids that may come next, ascending, by a row [V] that ``mask`` has seen; for checks, not timed."""


class _Masks:
    """Who picks by the largest logit of the masked row."""

    package: str | None = None
    canonical = False
    filled: float | None = None

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._n_vocab = llm.n_vocab()

    def mask(self, row: Row) -> None:
        raise NotImplementedError

    def pick(self, row: Row) -> int:
        return int(np.argmax(row))

    def allowed(self, row: Row) -> npt.NDArray[np.integer[Any]]:
        return np.flatnonzero(row > -np.inf)


class Ours:
    """``TrieCursor.pick``, which needs no mask."""

    name = "trie_sampler"
    package: str | None = None
    canonical = True
    filled: float | None = None

    def __init__(self, llm: Llama) -> None:
        self._eog_ids = as_tokenizer(llm).eog_ids
        # Kernels are loaded once a process, as the peers' libraries are.
        TrieCursor(TokenTrie.from_sequences([("a", [1]), ("b", [2])])).pick(np.zeros(3, np.float32))

    def build(self, choices: Choices) -> None:
        self._cursor = TrieCursor(TokenTrie.from_sequences(choices), eog_ids=self._eog_ids)
        self.pick = self._cursor.pick
        self.accept = self._cursor.accept
        self.start = self._cursor.reset

    def mask(self, row: Row) -> None:
        pass

    def allowed(self, row: Row) -> npt.NDArray[np.integer[Any]]:
        return self._cursor.allowed()


class DictTrie(_Masks):
    """Dictionaries of dictionaries, and NumPy: how logits processors are written by hand."""

    name = "dictionaries and NumPy"
    canonical = True

    def build(self, choices: Choices) -> None:
        self._root: dict[int, Any] = {}
        for _, tokens in choices:
            node = self._root
            for token in tokens:
                node = node.setdefault(token, {})

    def start(self) -> None:
        self._node = self._root

    def mask(self, row: Row) -> None:
        children = list(self._node)
        self.filled = time.perf_counter()
        kept = row[children]
        row[:] = -np.inf
        row[children] = kept

    def accept(self, token: int) -> None:
        self._node = self._node[token]


class LlamaGrammar(_Masks):
    """llama.cpp's grammar sampler over a candidate array that is there already."""

    name = "llama.cpp grammar"

    def __init__(self, llm: Llama) -> None:
        super().__init__(llm)
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._sampler: Any = None
        fields = [("id", np.intc), ("logit", np.single), ("p", np.single)]
        self._records = np.zeros(self._n_vocab, np.dtype(fields, align=True))
        self._records["id"] = np.arange(self._n_vocab)
        data = ctypes.cast(self._records.ctypes.data, llama_cpp.llama_token_data_p)
        self._array = llama_cpp.llama_token_data_array(data, self._n_vocab, -1, False)

    def build(self, choices: Choices) -> None:
        if self._sampler:
            llama_cpp.llama_sampler_free(self._sampler)
        text = "root ::= " + " | ".join(quote(text) for text, _ in choices)
        self._sampler = llama_cpp.llama_sampler_init_grammar(self._vocab, text.encode(), b"root")
        if not self._sampler:
            raise ValueError("llama.cpp refuses the grammar")

    def start(self) -> None:
        llama_cpp.llama_sampler_reset(self._sampler)

    def mask(self, row: Row) -> None:
        self._records["logit"] = row
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(self._array))
        row[:] = self._records["logit"]

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)


class LLGuidance(_Masks):
    """llguidance's matcher; the choices are one terminal of a Lark grammar."""

    name = "llguidance"
    package = "llguidance"

    def __init__(self, llm: Llama) -> None:
        super().__init__(llm)
        import llguidance
        import llguidance.llamacpp
        import llguidance.numpy

        self._library, self._numpy = llguidance, llguidance.numpy
        with warnings.catch_warnings():
            # It asks the host by a name that the host is about to drop.
            warnings.simplefilter("ignore", DeprecationWarning)
            vocab = llama_cpp.llama_model_get_vocab(llm.model)
            self._tokenizer = llguidance.llamacpp.lltokenizer_from_vocab(vocab)
        self._bits = llguidance.numpy.allocate_token_bitmask(1, self._n_vocab)

    def build(self, choices: Choices) -> None:
        grammar = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text, _ in choices)
        matcher = self._library.LLMatcher
        self._matcher = matcher(self._tokenizer, matcher.grammar_from_lark(grammar))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def start(self) -> None:
        self._matcher.reset()

    def mask(self, row: Row) -> None:
        self._numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        self.filled = time.perf_counter()
        self._check()
        self._numpy.apply_token_bitmask_inplace(row[None], self._bits)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


class XGrammar(_Masks):
    """xgrammar's matcher; the choices are an EBNF grammar of alternatives."""

    name = "xgrammar"
    package = "xgrammar"

    def __init__(self, llm: Llama) -> None:
        super().__init__(llm)
        import torch
        import xgrammar

        self._torch, self._library = torch, xgrammar
        # Its threads wait for each other longer than they work wherever a core is busy.
        torch.set_num_threads(1)
        tokenizer = as_tokenizer(llm)
        pieces = [tokenizer.detokenize((token,)) for token in range(self._n_vocab)]
        stop = list(tokenizer.eog_ids)
        self._info = xgrammar.TokenizerInfo(pieces, vocab_size=self._n_vocab, stop_token_ids=stop)
        self._bits = xgrammar.allocate_token_bitmask(1, self._n_vocab)

    def build(self, choices: Choices) -> None:
        grammar = "root ::= " + " | ".join(quote(text) for text, _ in choices)
        # A compiler caches what it compiled.
        compiled = self._library.GrammarCompiler(self._info, max_threads=1).compile_grammar(grammar)
        self._matcher = self._library.GrammarMatcher(compiled)

    def start(self) -> None:
        self._matcher.reset()

    def mask(self, row: Row) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)
        self.filled = time.perf_counter()
        self._library.apply_token_bitmask_inplace(self._torch.from_numpy(row), self._bits[0], backend="torch_native")

    def accept(self, token: int) -> None:
        self._matcher.accept_token(token)


class OutlinesCore(_Masks):
    """outlines-core's index; the choices are a regular expression of alternatives."""

    name = "outlines-core"
    package = "outlines-core"

    def __init__(self, llm: Llama) -> None:
        super().__init__(llm)
        import outlines_core
        import outlines_core.kernels.numpy as kernels

        self._library, self._kernels = outlines_core, kernels
        tokenizer = as_tokenizer(llm)
        ids: dict[bytes, list[int]] = {}
        for token in range(self._n_vocab):
            piece = tokenizer.detokenize((token,))
            if piece and not tokenizer.is_eog(token) and not tokenizer.is_control(token):
                ids.setdefault(piece, []).append(token)
        self._vocabulary = outlines_core.Vocabulary(tokenizer.eog_ids[0], ids)
        self._bits = kernels.allocate_token_bitmask(self._n_vocab)

    def build(self, choices: Choices) -> None:
        regex = "|".join(re.escape(text) for text, _ in choices)
        self._index = self._library.Index(regex, self._vocabulary)

    def start(self) -> None:
        self._guide = self._library.Guide(self._index)

    def mask(self, row: Row) -> None:
        self._kernels.fill_next_token_bitmask(self._guide, self._bits)
        self.filled = time.perf_counter()
        self._kernels.apply_token_bitmask_inplace(row[None], self._bits)

    def accept(self, token: int) -> None:
        self._guide.advance(token)


class FormatEnforcer(_Masks):
    """lm-format-enforcer; the choices are a regular expression of alternatives."""

    name = "lm-format-enforcer"
    package = "lm-format-enforcer"

    def __init__(self, llm: Llama) -> None:
        super().__init__(llm)
        import lmformatenforcer

        self._library = lmformatenforcer
        self._n_walks = 0
        tokenizer = as_tokenizer(llm)
        regular = []
        for token in range(self._n_vocab):
            piece = tokenizer.detokenize((token,)).decode("utf-8", "replace")
            if piece and not tokenizer.is_control(token) and not tokenizer.is_eog(token):
                regular.append((token, piece, piece.startswith(" ")))

        def decode(tokens: list[int]) -> str:
            return tokenizer.detokenize(tokens).decode("utf-8", "replace")

        eog_ids = list(tokenizer.eog_ids)
        self._data = lmformatenforcer.TokenEnforcerTokenizerData(regular, decode, eog_ids, False, self._n_vocab)

    def build(self, choices: Choices) -> None:
        parser = self._library.RegexParser("|".join(re.escape(text) for text, _ in choices))
        self._enforcer = self._library.TokenEnforcer(self._data, parser)

    def start(self) -> None:
        # What was seen is kept by prefix: another first token makes each walk a new one.
        self._n_walks += 1
        self._tokens = [self._n_walks]

    def mask(self, row: Row) -> None:
        allowed = self._enforcer.get_allowed_tokens(self._tokens).allowed_tokens
        self.filled = time.perf_counter()
        kept = row[allowed]
        row[:] = -np.inf
        row[allowed] = kept

    def accept(self, token: int) -> None:
        self._tokens = [*self._tokens, token]


class Static(_Masks):
    """STATIC, a sparse-matrix trie for accelerators."""

    name = "STATIC"
    package = "static-constraint-decoding"

    def __init__(self, llm: Llama) -> None:
        # pip's own words
        raise NotImplementedError("No matching distribution found for static-constraint-decoding")


CONTENDERS: dict[str, type[Any]] = {
    contender.name: contender
    for contender in (Ours, DictTrie, LlamaGrammar, LLGuidance, XGrammar, OutlinesCore, FormatEnforcer, Static)
}
