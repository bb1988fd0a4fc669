"""What the tests of the model doors look through: rows, decodes, texts. Imports nothing of the library.

llama_cpp is imported inside functions: modules of tests are collected without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import oracle

if TYPE_CHECKING:
    from llama_cpp import Llama

Row = npt.NDArray[np.float32]


def raw_row(llm: Llama) -> Row:
    """A copy of the last decoded row of logits, from the context itself: before any processor or sampler."""
    import llama_cpp

    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()


def eog_ids(llm: Llama) -> list[int]:
    """Every id that llama.cpp takes as an end of generation, asked one by one."""
    import llama_cpp

    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    return [token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)]


class RowSpy:
    """A processor that changes nothing and keeps the raw row of each step. Goes before the constraint."""

    def __init__(self, llm: Llama) -> None:
        self.llm = llm
        self.rows: list[Row] = []

    def __call__(self, _ids: Any, scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        self.rows.append(raw_row(self.llm))
        return scores


@contextlib.contextmanager
def decodes(llm: Llama) -> Iterator[list[int]]:
    """The number of tokens of every ``llama_decode`` that this Llama makes inside the block."""
    sizes: list[int] = []
    decode = llm._ctx.decode

    def spy(batch: Any) -> None:
        sizes.append(batch.n_tokens())
        decode(batch)

    llm._ctx.decode = spy
    try:
        yield sizes
    finally:
        del llm._ctx.decode


@contextlib.contextmanager
def evaluated(llm: Llama) -> Iterator[list[list[int]]]:
    """The token ids that every ``generate`` inside the block was asked to start from."""
    prompts: list[list[int]] = []
    generate = llm.generate

    def spy(tokens: Sequence[int], **keywords: Any) -> Any:
        prompts.append(list(tokens))
        return generate(tokens, **keywords)

    llm.generate = spy
    try:
        yield prompts
    finally:
        del llm.generate


def text_of(response: Any) -> str:
    """The text of a completion or of a chat completion."""
    (choice,) = response["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def reason_of(response: Any) -> str:
    """``stop`` or ``length``."""
    return response["choices"][0]["finish_reason"]


def deltas_of(stream: Iterable[Any]) -> list[str]:
    """The texts of a stream's events, of a completion or of a chat completion."""
    texts = []
    for event in stream:
        (choice,) = event["choices"]
        texts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return texts


def greedy_walk(
    leaves: Iterable[tuple[str, Sequence[int]]], rows: Sequence[Row], ends: Sequence[int] = (), on_end: str = "mass"
) -> tuple[list[int], str | None]:
    """(tokens, name) that the oracle walks over one row a step; ``ends`` are the end-of-generation ids."""
    trie = oracle.DictTrie(leaves)
    left = iter(rows)

    def next_row(_prefix: oracle.Prefix) -> Row:
        return next(left)

    tokens, name = oracle.walk(trie, next_row, on_end, ends)
    return list(tokens), name
