"""``Binding``: what is chosen from, and its trie behind each prompt; the part that all doors share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trie_sampler.choice import Choice, walk_numbers
from trie_sampler.cursor import Step, TrieCursor
from trie_sampler.errors import warn
from trie_sampler.payload import TokenTreePayload
from trie_sampler.tokens import Choices, ChoicesLike, Edge, Tokenizer, check_lead, edge_of, spell_choices
from trie_sampler.trie import TokenTrie

_N_TRIES = 16
"""Prompt endings whose tries are kept; a prompt template has one."""


class Binding:
    """Choices as text are tokenized behind each prompt; a trie or payload is what it is.

    Make one with ``of``.

    Attributes:
        trie: the trie, where it does not depend on the prompt; else ``None``.
        max_tokens: enough for the longest choice and an end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: TokenTrie | Choices,
        choices_by_path: Mapping[str, Choices],
        lead: str = "auto",
    ) -> None:
        check_lead(lead)
        self._tokenizer = tokenizer
        self._source = source
        self._choices_by_path = choices_by_path
        self._lead = lead
        self._tries: dict[Edge, TokenTrie] = {}
        self._told_of_tail = False

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        source: ChoicesLike | TokenTrie | TokenTreePayload,
        *,
        path: str | None = None,
        lead: str = "auto",
        strict: bool = False,
    ) -> Binding:
        """Bind choices as people have them, a trie, or a payload.

        Args:
            tokenizer: the model's vocabulary.
            source: see ``Choices.of``; or a ``TokenTrie``, or a ``TokenTreePayload``.
            path: of a payload, take only this descriptor.
            lead: see ``TokenTrie.from_choices``.
            strict: see ``TokenTrie.check_vocab``.

        Raises:
            EmptyTrieError, UnknownPathError, VocabMismatchError, TypeError, ValueError: as those.
        """
        if isinstance(source, TokenTreePayload):
            trie = TokenTrie.from_payload(source, path, vocab=tokenizer, strict=strict)
            names = {
                descriptor.path: Choices.of([leaf.name for leaf in descriptor.leaves])
                for descriptor in source.descriptors
                if descriptor.path in trie.paths
            }
            return cls(tokenizer, trie, names, lead)
        if isinstance(source, TokenTrie):
            source.check_vocab(tokenizer, strict=strict)
            return cls(tokenizer, source, {}, lead)
        choices = Choices.of(source)
        return cls(tokenizer, choices, {"": choices}, lead)

    @property
    def trie(self) -> TokenTrie | None:
        """The trie, where it does not depend on the prompt."""
        return self._source if isinstance(self._source, TokenTrie) else None

    @property
    def max_tokens(self) -> int:
        """Before a prompt is known an upper bound: no choice has more tokens than bytes."""
        if isinstance(self._source, TokenTrie):
            return self._source.depth + 1
        return max(len(text.encode()) for text in self._source.texts) + 2

    def trie_behind(self, prompt_ids: Sequence[int]) -> TokenTrie:
        """The trie that constrains what follows these tokens; kept per ending of the prompt."""
        source = self._source
        if isinstance(source, TokenTrie):
            self._compare_tail(source.tail, prompt_ids)
            return source
        edge = edge_of(self._tokenizer, prompt_ids)
        trie = self._tries.get(edge)
        if trie is None:
            spelled = spell_choices(self._tokenizer, source, edge, self._lead)
            if len(self._tries) >= _N_TRIES:
                del self._tries[next(iter(self._tries))]
            trie = self._tries[edge] = TokenTrie.from_sequences(spelled.paths, tail=spelled.tail)
        return trie

    def _compare_tail(self, tail: bytes | None, prompt_ids: Sequence[int]) -> None:
        """Warn once where a trie was tokenized behind another ending than this prompt's."""
        if not tail or self._told_of_tail:
            return
        text = self._tokenizer.detokenize(prompt_ids[-len(tail) - 1 :])
        if not text.endswith(tail):
            self._told_of_tail = True
            warn(
                f"the trie was tokenized behind {tail[-20:]!r}, but this prompt ends in "
                f"{text[-20:]!r}: its tokens may be unusual here"
            )

    def make_choice(self, final: TrieCursor, steps: Sequence[Step], valid_mass: float | None = None) -> Choice:
        """The record of a walk.

        Args:
            final: the cursor after the last pick.
            steps: the picks; end tokens at their end are no part of the choice.
            valid_mass: if it was measured.
        """
        picks = [step.token for step in steps]
        while picks and self._tokenizer.is_eog(picks[-1]):
            picks.pop()
        complete = final.is_finished or final.must_end
        name = final.leaf_name if complete else None
        index: int | None = None
        value: Any = name
        if name is not None:
            choices = self._choices_by_path.get(final.path or "")
            if choices is None:
                index = int(final.trie.leaf[final.node])
            else:
                index = choices.index_of(name)
                value = choices.values[index]
        return Choice(
            name=name,
            value=value,
            index=index,
            # As the host does: a character cut by max_tokens is left out.
            text=self._tokenizer.detokenize(picks).decode("utf-8", "ignore"),
            tokens=tuple(picks),
            complete=complete,
            valid_mass=valid_mass,
            **walk_numbers(steps),
        )

    def __repr__(self) -> str:
        """What is chosen from, shortened."""
        return f"{self._source!r:.200}"
