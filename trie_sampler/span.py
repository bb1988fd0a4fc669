"""``walk_span``: from the root of a trie to the end of a leaf, looking at logits only where a choice is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trie_sampler.cursor import Row, Step, TrieCursor
from trie_sampler.layout import END


class RowSource(Protocol):
    """A sequence of tokens whose logits can be had."""

    def push(self, tokens: Iterable[int]) -> None:
        """Append tokens; evaluating them may wait."""

    def row(self) -> Row:
        """[V] logits after the last token."""


@dataclass(frozen=True)
class Move:
    """What one look at the logits decided.

    Attributes:
        steps: the token picked, and the forced run behind it; at a forced root the run alone. They
            are in the sequence.
        end: the decision to stop where a leaf ends and another goes on; its token is in no sequence.
    """

    steps: tuple[Step, ...]
    end: Step | None = None


def walk_span(
    rows: RowSource,
    cursor: TrieCursor,
    *,
    samples: bool,
    max_tokens: int | None = None,
    finish: Callable[[TrieCursor], Sequence[int]] | None = None,
    text_goes_on: bool = False,
) -> Iterator[Move]:
    """Walk an armed cursor until its leaf is over or ``max_tokens`` are taken.

    A token without alternative is never decided on: its row is not asked for. Nor is a row asked for after
    the last token of a leaf that no other continues.

    Args:
        rows: the sequence; picked and forced tokens are pushed.
        cursor: walks along. Afterwards it is finished, released or at ``must_end``, unless cut short; where
            ``text_goes_on`` it may be armed still at the leaf that ended.
        samples: draw, by the cursor's ``Sampling``, instead of the greedy pick.
        max_tokens: of the trie, at most.
        finish: tokens that complete the only leaf left, where the caller does not mind which way it is
            written; empty where several are left.
        text_goes_on: free text follows the leaf. Then a leaf that begins another ends where the likeliest
            token of all is none that goes on with it: the free text would begin with that one.

    Yields:
        One ``Move`` for each decision, and one for a forced run at the root.

    Raises:
        as ``TrieCursor.decide``, and whatever ``rows`` raises.
    """
    taken: list[Step] = []
    left = cursor.trie.depth + 1 if max_tokens is None else max_tokens
    while True:
        run = _without_alternative(cursor, finish)[:left]
        if len(run):
            rows.push(run)
        for token in run:
            cursor.accept(token)
            taken.append(Step(token, 0.0, np.inf, is_forced=True))
            left -= 1
        is_over = cursor.must_end or not cursor.is_active or left <= 0
        if taken:
            yield Move(tuple(taken))
        if is_over:
            return
        row = rows.row()
        if text_goes_on and cursor.may_end and cursor.trie.step(cursor.node, _likeliest(row)) < 0:
            yield Move((), Step(END, 0.0, np.inf, is_forced=False))
            return
        step = cursor.decide(row, samples=samples)
        ends = cursor.trie.step(cursor.node, step.token) < 0
        cursor.accept(step.token)
        if ends:
            yield Move((), step)
            return
        rows.push([step.token])
        taken = [step]
        left -= 1


def _likeliest(row: Row) -> int:
    """The argmax, in which NaN counts as -inf."""
    best = int(np.argmax(row))
    return best if row[best] == row[best] else int(np.argmax(np.where(np.isnan(row), -np.inf, row)))


def _without_alternative(cursor: TrieCursor, finish: Callable[[TrieCursor], Sequence[int]] | None) -> Sequence[int]:
    if not cursor.is_active:
        return ()
    tail = finish(cursor) if finish is not None else ()
    tokens: list[int] = list(tail) or cursor.forced_run().tolist()
    return tokens
