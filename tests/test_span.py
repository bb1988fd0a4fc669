"""``walk_span`` over a toy source of rows: what it takes, which rows it asks for, and where it stops."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import leaf_sets

from trie_sampler import Sampling, TokenTrie, TrieCursor, TrieSamplerError, TrieSamplerWarning
from trie_sampler.layout import END
from trie_sampler.span import Move, walk_span

V = 34
EOG = (32, 33)
Row = npt.NDArray[np.float32]


class Rows:
    """Rows by what was pushed, and a log of what was asked for."""

    def __init__(self, row_after: Callable[[tuple[int, ...]], Row]) -> None:
        self.row_after = row_after
        self.tokens: list[int] = []
        self.asked: list[tuple[int, ...]] = []

    def push(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def row(self) -> Row:
        self.asked.append(tuple(self.tokens))
        return self.row_after(tuple(self.tokens))


def drawn_rows(seed: int, *, scale: float = 3.0) -> Callable[[tuple[int, ...]], Row]:
    """A row of its own for each prefix."""

    def row_after(prefix: tuple[int, ...]) -> Row:
        rng = np.random.default_rng([seed, zlib.crc32(repr(prefix).encode())])
        return (scale * rng.standard_normal(V)).astype(np.float32)

    return row_after


def favouring(*tokens: int) -> Callable[[tuple[int, ...]], Row]:
    """Rows in which these tokens win, the first of them most clearly, whatever came before."""
    row = np.zeros(V, np.float32)
    row[list(tokens)] = np.arange(len(tokens), 0, -1) * 10
    return lambda _prefix: row


def trie_of(leaves: Iterable[tuple[str, Sequence[int]]]) -> TokenTrie:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrieSamplerWarning)
        return TokenTrie.from_sequences(list(leaves))


def walk(rows: Rows, cursor: TrieCursor, *, samples: bool = False, **settings: Any) -> list[Move]:
    return list(walk_span(rows, cursor, samples=samples, **settings))


def decisions_on(trie: oracle.DictTrie, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The prefixes of a walk at which something is open."""
    prefixes = [tuple(tokens[:size]) for size in range(len(tokens) + 1)]
    return [path for path in prefixes if len(trie.children(path)) + trie.is_terminal(path) > 1]


# --- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_end", ["mass", "eog"])
@given(leaves=leaf_sets(), seed=st.integers(0, 999))
def test_greedy_walk_is_the_oracles(on_end: str, leaves: list[tuple[str, list[int]]], seed: int) -> None:
    trie = trie_of(leaves)
    ref = oracle.DictTrie(trie.leaves())
    rows = Rows(drawn_rows(seed))
    cursor = TrieCursor(trie, on_end=on_end, eog_ids=EOG)
    moves = walk(rows, cursor)
    tokens, name = oracle.walk(ref, drawn_rows(seed), on_end, EOG)
    assert tuple(rows.tokens) == tokens
    assert cursor.leaf_name == name
    assert cursor.is_finished or cursor.must_end
    assert [step.token for move in moves for step in move.steps] == rows.tokens
    assert rows.asked == decisions_on(ref, tokens), "a row for each open choice and for nothing else"


@given(leaves=leaf_sets(), seed=st.integers(0, 999))
def test_one_move_a_decision(leaves: list[tuple[str, list[int]]], seed: int) -> None:
    trie = trie_of(leaves)
    rows = Rows(drawn_rows(seed))
    moves = walk(rows, TrieCursor(trie, eog_ids=EOG))
    starts_forced = moves[0].end is None and moves[0].steps[0].is_forced
    assert len(moves) == len(rows.asked) + starts_forced
    for place, move in enumerate(moves):
        forced = [step.is_forced for step in move.steps]
        assert forced == [starts_forced and place == 0, *[True] * (len(forced) - 1)][: len(forced)]
        assert (move.end is not None) == (not move.steps)
        assert move.end is None or place == len(moves) - 1
        for step in move.steps:
            if step.is_forced:
                assert (step.logprob, step.margin) == (0.0, np.inf)


@given(leaves=leaf_sets(), seed=st.integers(0, 999), limit=st.integers(0, 6))
def test_limit_cuts_the_same_walk(leaves: list[tuple[str, list[int]]], seed: int, limit: int) -> None:
    trie = trie_of(leaves)
    whole, cut = Rows(drawn_rows(seed)), Rows(drawn_rows(seed))
    walk(whole, TrieCursor(trie, eog_ids=EOG))
    cursor = TrieCursor(trie, eog_ids=EOG)
    walk(cut, cursor, max_tokens=limit)
    assert cut.tokens == whole.tokens[:limit]
    assert cut.asked == [prefix for prefix in whole.asked if len(prefix) < limit]
    assert cursor.position_in_span == len(cut.tokens)
    if limit < len(whole.tokens):
        assert not cursor.is_finished


@given(leaves=leaf_sets(), seed=st.integers(0, 999))
def test_draws_are_those_of_a_cursor_that_takes_every_step(leaves: list[tuple[str, list[int]]], seed: int) -> None:
    trie = trie_of(leaves)
    row_after = drawn_rows(seed)
    rows = Rows(row_after)
    settings = Sampling(temperature=2.0, seed=seed)
    walk(rows, TrieCursor(trie, eog_ids=EOG, sampling=settings), samples=True)
    slow = TrieCursor(trie, eog_ids=EOG, sampling=settings)
    taken: list[int] = []
    while not slow.must_end:
        step = slow.decide(row_after(tuple(taken)), samples=True)
        slow.accept(step.token)
        if slow.is_finished:
            break
        taken.append(step.token)
    assert rows.tokens == taken


# --- costs by hand ----------------------------------------------------------------------------------------------------


def test_leaves_of_one_piece_cost_the_first_row() -> None:
    rows = Rows(favouring(4))
    (move,) = walk(rows, TrieCursor(trie_of([("aaa", [1, 2, 3]), ("bbb", [4, 5, 6])])))
    assert [step.token for step in move.steps] == [4, 5, 6] == rows.tokens
    assert [step.is_forced for step in move.steps] == [False, True, True]
    assert rows.asked == [()]


def test_one_leaf_costs_nothing() -> None:
    rows = Rows(favouring(0))
    (move,) = walk(rows, TrieCursor(trie_of([("aaa", [1, 2, 3])])))
    assert ([step.token for step in move.steps], rows.asked) == ([1, 2, 3], [])


def test_forced_run_at_the_root_comes_first() -> None:
    rows = Rows(favouring(4))
    first, second = walk(rows, TrieCursor(trie_of([("a", [1, 2, 3]), ("b", [1, 2, 4, 5])])))
    assert [step.token for step in first.steps] == [1, 2]
    assert [step.token for step in second.steps] == [4, 5]
    assert rows.asked == [(1, 2)]


def test_moves_come_as_they_are_made() -> None:
    """Whoever reads them can stop between two decisions."""
    rows = Rows(favouring(1))
    moves = walk_span(rows, TrieCursor(trie_of([("a", [1, 1]), ("b", [1, 2]), ("c", [3])])), samples=False)
    next(moves)
    assert (rows.tokens, len(rows.asked)) == ([1], 1)
    next(moves)
    assert (rows.tokens, len(rows.asked)) == ([1, 1], 2)


# --- the end of a leaf ------------------------------------------------------------------------------------------------

PREFIX = [("five", [5]), ("fifty", [5, 0])]


@pytest.mark.parametrize(("eog_ids", "end"), [((), END), (EOG, 33)])
def test_end_token_is_in_no_sequence(eog_ids: tuple[int, ...], end: int) -> None:
    rows = Rows(favouring(5, 33))
    cursor = TrieCursor(trie_of(PREFIX), eog_ids=eog_ids)
    moves = walk(rows, cursor)
    assert (rows.tokens, cursor.leaf_name) == ([5], "five")
    assert moves[-1].steps == ()
    assert moves[-1].end is not None
    assert moves[-1].end.token == end
    assert cursor.is_finished


def test_stop_token_ends_a_leaf_and_is_not_written() -> None:
    rows = Rows(favouring(5, 7))
    cursor = TrieCursor(trie_of(PREFIX), eog_ids=EOG, stop_tokens=[7])
    moves = walk(rows, cursor)
    assert (rows.tokens, cursor.leaf_name, cursor.is_finished) == ([5], "five", True)
    assert moves[-1].end is not None
    assert moves[-1].end.token == 7


@pytest.mark.parametrize(("wins", "tokens"), [(9, [5]), (0, [5, 0]), (7, [5]), (32, [5])])
def test_where_text_goes_on_the_likeliest_token_says(wins: int, tokens: list[int]) -> None:
    """9 is nothing to the trie, 7 a stop token, 32 an end of generation."""

    def row_after(prefix: tuple[int, ...]) -> Row:
        return favouring(wins if prefix else 5, 0)(prefix)

    rows = Rows(row_after)
    cursor = TrieCursor(trie_of(PREFIX), on_end="release", stop_tokens=[7])
    moves = walk(rows, cursor, text_goes_on=True)
    assert rows.tokens == tokens
    assert cursor.leaf_name == ("fifty" if tokens == [5, 0] else "five")
    assert rows.asked == [(5,)], "the run to the first leaf is forced"
    assert (moves[-1].end is not None) == (tokens == [5])


def test_text_that_goes_on_asks_no_row_after_a_leaf_without_children() -> None:
    rows = Rows(favouring(1))
    cursor = TrieCursor(trie_of([("a", [1, 2]), ("b", [3])]), on_end="release")
    walk(rows, cursor, text_goes_on=True)
    assert (rows.tokens, rows.asked, cursor.is_active) == ([1, 2], [()], False)


def test_nan_is_not_the_likeliest_token() -> None:
    row = np.zeros(V, np.float32)
    row[0] = 10
    row[20] = np.nan
    rows = Rows(lambda _prefix: row)
    cursor = TrieCursor(trie_of(PREFIX), on_end="release")
    walk(rows, cursor, text_goes_on=True)
    assert rows.tokens == [5, 0]


def test_drawn_stop_token_is_not_written_where_text_goes_on() -> None:
    """Free text begins with the stop token if the model wants it to; the span must not write it as its own."""
    row = np.zeros(V, np.float32)
    row[[0, 7]] = 5.0, 4.9
    for seed in range(20):
        rows = Rows(lambda _prefix: row)
        sampling = Sampling(temperature=3.0, seed=seed)
        walk(
            rows,
            TrieCursor(trie_of(PREFIX), on_end="release", stop_tokens=[7], sampling=sampling),
            samples=True,
            text_goes_on=True,
        )
        assert rows.tokens in ([5], [5, 0])


# --- completing the only leaf left ------------------------------------------------------------------------------------


def test_finish_writes_the_rest_its_own_way() -> None:
    trie = trie_of([("a", [1, 2, 3]), ("b", [4, 5, 6])])
    rows = Rows(favouring(1))
    cursor = TrieCursor(trie)
    seen = []

    def finish(at: TrieCursor) -> Sequence[int]:
        seen.append(at.position_in_span)
        return [2, 3] if at.position_in_span == 1 else ()

    walk(rows, cursor, finish=finish)
    assert (rows.tokens, rows.asked) == ([1, 2, 3], [()])
    assert seen == [0, 1]
    assert cursor.must_end


def test_finish_is_cut_by_the_limit() -> None:
    rows = Rows(favouring(1))
    cursor = TrieCursor(trie_of([("a", [1, 2, 3]), ("b", [4])]))
    walk(rows, cursor, finish=lambda at: [1, 2, 3][at.position_in_span :], max_tokens=2)
    assert rows.tokens == [1, 2]
    assert not cursor.must_end


# --- what may go wrong ------------------------------------------------------------------------------------------------


def test_released_cursor_is_not_walked() -> None:
    cursor = TrieCursor(trie_of(PREFIX))
    cursor.deactivate()
    rows = Rows(favouring(5))
    assert walk(rows, cursor) == []
    assert (rows.tokens, rows.asked) == ([], [])


def test_error_of_the_source_comes_through() -> None:
    class StopHereError(Exception):
        pass

    def row_after(prefix: tuple[int, ...]) -> Row:
        if prefix:
            raise StopHereError
        return favouring(1)(prefix)

    rows = Rows(row_after)
    cursor = TrieCursor(trie_of([("a", [1, 2, 3]), ("b", [1, 2, 4]), ("c", [5])]))
    with pytest.raises(StopHereError):
        walk(rows, cursor)
    assert rows.tokens == [1, 2]
    assert cursor.position_in_span == 2, "cursor and sequence agree"


def test_rows_without_a_finite_logit() -> None:
    rows = Rows(lambda _prefix: np.full(V, -np.inf, np.float32))
    with pytest.warns(TrieSamplerWarning, match="lowest valid id"):
        walk(rows, TrieCursor(trie_of([("a", [3, 1]), ("b", [4, 2])])))
    assert rows.tokens == [3, 1]
    rows = Rows(lambda _prefix: np.full(V, np.nan, np.float32))
    with pytest.raises(TrieSamplerError, match="says nothing"):
        walk(rows, TrieCursor(trie_of([("a", [3, 1]), ("b", [4, 2])]), on_fault="raise"))
    assert rows.tokens == []
