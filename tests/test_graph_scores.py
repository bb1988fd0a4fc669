"""Scores of choices over every way to write them, against a sum over all paths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from test_automaton import Toy

from trie_sampler.choices import Choices
from trie_sampler.errors import TrieSamplerError
from trie_sampler.scores import GraphScores, Way
from trie_sampler.tokens import tokenize_choices
from trie_sampler.trie import TokenTrie

PIECES = [b"a", b"b", b"ab", b"abc", b"c", b"bc", b" ", b" a", b"a"]
TABLES = [["ab", "abc"], ["a", "ab", "abcab"], ["cab", "bab", "aaa"]]


def make_trie(texts: list[str], tokenizer: Toy) -> TokenTrie:
    spelled = tokenize_choices(tokenizer, Choices.of(texts), None, lead="", tokenization="every")
    return TokenTrie._from_spelled(tokenizer, spelled)


def row_after(tokens: tuple[int, ...], width: int) -> npt.NDArray[np.float32]:
    """Logits that depend on all that came before, as a model's do."""
    return np.random.default_rng([7, *tokens]).normal(size=width).astype(np.float32)


def all_ways(trie: TokenTrie, width: int, *, walks: bool) -> Iterator[tuple[str, float]]:
    """(name, log-probability) of every path to a leaf."""
    waiting: list[tuple[int, tuple[int, ...], float]] = [(0, (), 0.0)]
    while waiting:
        node, tokens, logprob = waiting.pop()
        children = trie.children(node)
        name = trie.leaf_name(node)
        if not len(children):
            assert name is not None
            yield name, logprob
            continue
        wide = row_after(tokens, width).astype(np.float64)
        logs = wide - np.logaddexp.reduce(wide)
        stop = np.logaddexp.reduce(np.delete(logs, children))
        if walks:
            options = np.append(logs[children], stop) if name is not None else logs[children]
            logs, stop = logs - np.logaddexp.reduce(options), stop - np.logaddexp.reduce(options)
        if name is not None:
            yield name, logprob + stop
        waiting += [
            (trie.step(node, token), (*tokens, token), logprob + float(logs[token])) for token in children.tolist()
        ]


def tokens_of(way: Way) -> tuple[int, ...]:
    return () if way.parent is None else (*tokens_of(way.parent), way.token)


@pytest.mark.parametrize("texts", TABLES, ids=",".join)
@pytest.mark.parametrize("walks", [False, True])
def test_sums_over_every_way(texts: list[str], walks: bool) -> None:
    tokenizer = Toy(PIECES)
    trie = make_trie(texts, tokenizer)
    truth = dict.fromkeys(texts, -np.inf)
    for name, logprob in all_ways(trie, tokenizer.n_vocab, walks=walks):
        truth[name] = np.logaddexp(truth[name], logprob)
    ref = np.array([truth[name] for name in texts])

    scores = GraphScores(trie, 0, walks=walks)
    opened = scores.evaluate(scores.root, row_after((), tokenizer.n_vocab))
    while opened:
        lower, upper = scores.bounds(opened)
        assert np.all(lower <= ref + 1e-9)
        assert np.all(ref <= upper + 1e-9)
        assert 0 < scores.tail(opened) <= 1
        way = opened.pop()
        opened += scores.evaluate(way, row_after(tokens_of(way), tokenizer.n_vocab))
    lower, upper = scores.bounds(())
    np.testing.assert_allclose(lower, ref, atol=1e-9)
    np.testing.assert_allclose(upper, ref, atol=1e-9)
    assert scores.tail(()) == 0
    if walks:
        assert np.exp(lower).sum() == pytest.approx(1)


def test_a_tree_has_no_ways() -> None:
    with pytest.raises(TrieSamplerError, match="one way"):
        GraphScores(TokenTrie.from_sequences([("A", [1])]), 0, walks=False)
