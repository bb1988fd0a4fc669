"""``Binding``: what is chosen from, and its trie behind each prompt; the part that all doors share."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from trie_sampler.automaton import forget_pieces
from trie_sampler.cache import Recent, TrieCache
from trie_sampler.choice import Choice, ChoiceStep, walk_numbers
from trie_sampler.choices import Choices, ChoicesLike, Spelling
from trie_sampler.cursor import Step, TrieCursor
from trie_sampler.errors import VocabMismatchError, warn
from trie_sampler.layout import END
from trie_sampler.payload import PayloadText, TokenTreePayload
from trie_sampler.tokens import Tokenizer, edge_of, spell_choices
from trie_sampler.trie import TokenTrie

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Bound:
    """A trie behind an ending of a prompt, and what a caller should hear of it."""

    trie: TokenTrie
    doubts: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.trie.nbytes


_recent: weakref.WeakKeyDictionary[Any, Recent[_Bound]] = weakref.WeakKeyDictionary()


def _recent_of(tokenizer: Tokenizer) -> Recent[_Bound]:
    """The tries of a vocabulary, shared by every binding to it."""
    try:
        return _recent.setdefault(tokenizer, Recent())
    except TypeError:  # a Tokenizer that cannot be hashed or weakly referenced
        return Recent()


_made: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def kept_for(tokenizer: Tokenizer, name: str, make: Callable[[Tokenizer], _T]) -> _T:
    """What is made once of a vocabulary, until it is forgotten."""
    try:
        things = _made.setdefault(tokenizer, {})
    except TypeError:  # a Tokenizer that cannot be hashed or weakly referenced
        return make(tokenizer)
    if name not in things:
        things[name] = make(tokenizer)
    thing: _T = things[name]
    return thing


def forget_vocabulary(tokenizer: Tokenizer) -> None:
    """Drop what is kept for a vocabulary."""
    forget_pieces(tokenizer)
    try:
        _recent.pop(tokenizer, None)
        _made.pop(tokenizer, None)
    except TypeError:
        return


class Binding:
    """Choices as text are tokenized behind each prompt; a trie or payload is what it is.

    Make one with ``of``.

    Attributes:
        trie: the trie, where it does not depend on the prompt; else ``None``.
        heals: whether it may take tokens off a prompt.
        max_tokens: enough for the longest choice and an end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: TokenTrie | Choices,
        choices_by_path: Mapping[str, Choices],
        spelling: Spelling,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._choices_by_path = choices_by_path
        self._spelling = spelling
        self._recent = _recent_of(tokenizer)
        self._longest = 0
        self._told = is_quiet

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        source: ChoicesLike | TokenTrie | TokenTreePayload | PayloadText,
        *,
        path: str | None = None,
        strict: bool = False,
        model_id: str | None = None,
        spelling: Spelling | None = None,
        is_quiet: bool = False,
    ) -> Binding:
        """Bind choices as people have them, a trie, or a payload.

        Args:
            tokenizer: the model's vocabulary.
            source: see ``Choices.of``; or a ``TokenTrie``; or a payload, whose tries are kept in
                ``TrieCache.shared()``.
            path: of a payload, take only this descriptor.
            strict: see ``TokenTrie.check_vocab``.
            model_id: see ``TokenTrie.from_payload``.
            spelling: how choices become tokens; a trie and a payload are spelled already.
            is_quiet: do not warn of unusual tokens.

        Raises:
            PayloadError, EmptyTrieError, UnknownPathError, VocabMismatchError, TypeError, ValueError: as those.
        """
        is_payload = isinstance(source, (TokenTreePayload, PayloadText))
        if (is_payload or isinstance(source, TokenTrie)) and spelling not in (None, Spelling()):
            kind = "TokenTreePayload" if is_payload else "TokenTrie"
            raise ValueError(f"a {kind} is spelled already; {spelling} has no effect on it")
        spelling = spelling or Spelling()
        if isinstance(source, (TokenTreePayload, PayloadText)):
            payload = source.text if isinstance(source, PayloadText) else source
            trie, choices_by_path = TrieCache.shared().look_up(
                payload, path, vocab=tokenizer, strict=strict, model_id=model_id
            )
            return cls(tokenizer, trie, choices_by_path, spelling, is_quiet=is_quiet)
        if isinstance(source, TokenTrie):
            source.check_vocab(tokenizer, strict=strict)
            return cls(tokenizer, source, {}, spelling, is_quiet=is_quiet)
        choices = Choices.of(source)
        return cls(tokenizer, choices, {"": choices}, spelling, is_quiet=is_quiet)

    @property
    def trie(self) -> TokenTrie | None:
        """The trie, where it does not depend on the prompt."""
        return self._source if isinstance(self._source, TokenTrie) else None

    @property
    def heals(self) -> bool:
        """Whether it may take tokens off a prompt."""
        return self._spelling.heal

    @property
    def max_tokens(self) -> int:
        """Before a prompt is known an upper bound: no choice has more tokens than bytes.

        What healing writes again is counted once the prompt is known.
        """
        if isinstance(self._source, TokenTrie):
            return self._source.depth + 1
        if not self._longest:
            forms = self._source.forms(self._spelling, both_leads=True, in_quotes=False)
            # An end token, and the space that some vocabularies write before any text.
            self._longest = max(len(text.encode()) for _, texts in forms for text in (*texts, "")) + 2
        return self._longest

    def trie_behind(self, prompt_ids: Sequence[int]) -> TokenTrie:
        """The trie that constrains what follows these tokens as they are; kept per ending of the prompt.

        Warns:
            TrieSamplerWarning: once, where the tokens will be unusual here.
        """
        return self._bound(prompt_ids, heal=False)

    def prepare(self, prompt_ids: Sequence[int]) -> tuple[TokenTrie, list[int]]:
        """Heal the prompt's end where that is asked for and needed.

        Returns:
            The trie, and the prompt's ids that it follows.
        """
        kept = list(prompt_ids)
        if self.trie is None:
            trie = self._bound(prompt_ids, heal=self._spelling.heal)
            return trie, kept[: len(kept) - trie.n_healed]
        n_healed, end = self.trie.n_healed, (self.trie.tail or b"") + self.trie.healed
        # A prompt that was cut by hand ends in the tail alone.
        if n_healed and self._tokenizer.detokenize(kept[-len(end) - 1 :]).endswith(end):
            if self._tokenizer.detokenize(kept[-n_healed:]) != self.trie.healed or len(kept) == n_healed:
                raise VocabMismatchError(
                    f"the trie writes the prompt's end, {self.trie.healed!r}, again; this prompt cannot be cut there"
                )
            kept = kept[:-n_healed]
        return self.trie_behind(kept), kept

    def needs_healing(self, prompt_ids: Sequence[int]) -> bool:
        """Whether ``prepare`` takes something off this prompt."""
        if not self._spelling.heal and (self.trie is None or not self.trie.n_healed):
            return False
        return len(self.prepare(prompt_ids)[1]) < len(prompt_ids)

    def _bound(self, prompt_ids: Sequence[int], *, heal: bool) -> TokenTrie:
        source = self._source
        if isinstance(source, TokenTrie):
            self._compare_tail(source.tail, prompt_ids)
            return source
        edge = edge_of(self._tokenizer, prompt_ids)
        spelling = replace(self._spelling, heal=heal)

        def build() -> _Bound:
            spelled = spell_choices(self._tokenizer, source, edge, spelling)
            trie = TokenTrie._from_spelled(self._tokenizer, spelled)
            return _Bound(trie, (*spelled.doubts, *([trie.tell_unreachable()] if trie.unreachable else ())))

        bound = self._recent.get((source.names, source.contents, edge, spelling), build)
        if heal:
            self._longest = max(self.max_tokens, bound.trie.depth + 1)
        if heal == self._spelling.heal:
            self._tell(*bound.doubts)
        return bound.trie

    def _tell(self, *doubts: str) -> None:
        """Warn, once for each binding."""
        if doubts and not self._told:
            self._told = True
            for doubt in doubts:
                warn(doubt)

    def _compare_tail(self, tail: bytes | None, prompt_ids: Sequence[int]) -> None:
        """Warn once where a trie was tokenized behind another ending than this prompt's; a healed one is refused."""
        healed = b"" if self.trie is None else self.trie.healed
        if not (tail or healed) or (self._told and not healed):
            return
        tail = tail or b""
        text = self._tokenizer.detokenize(prompt_ids[-len(tail) - 1 :])
        begins = len(prompt_ids) == 0 or self._tokenizer.is_control(prompt_ids[-1])
        if healed and not (text.endswith(tail) if tail else begins):
            raise VocabMismatchError(
                f"the trie writes {healed!r} again behind {tail[-20:]!r}, but this prompt ends in {text[-20:]!r}; take "
                f"the last {0 if self.trie is None else self.trie.n_healed} tokens off the prompt it was made for"
            )
        if not text.endswith(tail):
            self._tell(
                f"the trie was tokenized behind {tail[-20:]!r}, but this prompt ends in "
                f"{text[-20:]!r}: its tokens may be unusual here"
            )

    def find_in_texts(self, part: str) -> str | None:
        """A text that may be written and has ``part`` in it. O(all texts)."""
        source = self._source
        if isinstance(source, Choices):
            forms = source.forms(self._spelling, both_leads=True, in_quotes=False)
            texts = (text for _, texts in forms for text in texts)
        else:
            paths = (tokens for _, tokens in source.leaves())
            texts = (self._tokenizer.detokenize(tokens).decode("utf-8", "replace") for tokens in paths)
        return next((text for text in texts if part in text), None)

    def make_choice(
        self,
        final: TrieCursor,
        steps: Sequence[Step],
        valid_mass: float | None = None,
        *,
        complete: bool | None = None,
        end: Step | None = None,
    ) -> Choice:
        """The record of a walk.

        Args:
            final: the cursor after the last pick.
            steps: the picks; end tokens at their end are no part of the choice.
            valid_mass: if it was measured.
            complete: whether the leaf was ended, where the cursor does not tell.
            end: the decision to stop, where it is not the last of ``steps``.
        """
        walked = steps if end is None else [*steps, end]
        picks = [step.token for step in steps]
        while picks and (picks[-1] == END or self._tokenizer.is_eog(picks[-1])):
            picks.pop()
        if complete is None:
            complete = final.is_finished or final.must_end
        name = final.leaf_name if complete else None
        index, value = None, None
        if name is not None:
            index, value = self._place_of(name, final.path, int(final.trie.leaf[final.node]))
        return Choice(
            name=name,
            value=value,
            index=index,
            text=self._text_of(final.trie, picks),
            tokens=tuple(picks),
            complete=complete,
            valid_mass=valid_mass,
            steps=tuple(self._detail(step) for step in walked),
            **walk_numbers(walked),
        )

    def _detail(self, step: Step) -> ChoiceStep:
        margin = None if math.isinf(step.margin) else step.margin
        return ChoiceStep(step.token, self.text_of(step.token), step.logprob, margin, step.is_forced)

    def text_of(self, token: int) -> str:
        """What a token adds; nothing for END and end tokens."""
        if token == END or self._tokenizer.is_eog(token):
            return ""
        return self._tokenizer.detokenize((token,)).decode("utf-8", "replace")

    def name_choice(self, trie: TokenTrie, root: int, leaf: int, end: int | None = None) -> dict[str, Any]:
        """``name``, ``value``, ``index``, ``text`` and ``tokens`` of a leaf that no walk came to.

        Args:
            trie: has the leaf.
            root: where it was looked for.
            leaf: its number.
            end: where its path ends that is to be told; ``None`` takes its first.
        """
        name = trie.name_of(leaf)
        path = next((path for path, node in trie.roots.items() if node == root), None)
        index, value = self._place_of(name, path, leaf)
        tokens = trie.path_tokens(int(np.flatnonzero(trie.leaf == leaf)[0]) if end is None else end)
        return {
            "name": name,
            "value": value,
            "index": index,
            "text": self._text_of(trie, tokens),
            "tokens": tokens,
        }

    def _place_of(self, name: str, path: str | None, leaf: int) -> tuple[int, Any]:
        """(index, value) of a name, as the caller gave it."""
        choices = self._choices_by_path.get(path or "")
        if choices is None:
            return leaf, name
        index = choices.index_of(name)
        return index, choices.values[index]

    def _text_of(self, trie: TokenTrie, picks: Sequence[int]) -> str:
        """What the picks add to the prompt's text.

        As the host does it, a character cut by ``max_tokens`` is left out.
        """
        written = self._tokenizer.detokenize(picks)
        return written[len(trie.healed) :].decode("utf-8", "ignore")

    def __repr__(self) -> str:
        """What is chosen from, shortened."""
        return f"{self._source!r:.200}"
