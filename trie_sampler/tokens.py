"""From choices as people write them to the token paths that continue a prompt.

Plain ``tokenize(choice)`` is wrong in two ways. SentencePiece models put an invisible space
before the first word of a text, so a choice tokenized alone begins with a piece that the middle
of a text never has. And a model that has just written ``Action:`` goes on with ``" PLAY"``, not
``"PLAY"``: one token with its space, which no trie of ``"PLAY"`` holds. So every choice is
tokenized behind the prompt's own last words, and by default both with and without the space:
two paths of one leaf, and the model decides.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from trie_sampler.errors import EmptyTrieError, VocabMismatchError, warn

OPENERS = "\"'`([{<«“‘„‹「『（"
"""After one of these a word begins without a space."""

# Texts whose last token nothing after them merges with, tried in turn where the prompt's own
# end would merge with a choice.
_ANCHORS = ("\n", ".", ")", "|")

# UTF-8: the bytes of a character after its first are 10xxxxxx.
_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80

# Tokens of the prompt that are tokenized again before each choice. Enough for a word and what
# stands before it; where the short window does not tokenize back to itself, longer ones follow.
_WINDOWS = (8, 32, 128)


@runtime_checkable
class Tokenizer(Protocol):
    """A vocabulary, as the core needs it; ``llama.vocab`` makes one of a ``Llama``."""

    @property
    def n_vocab(self) -> int:
        """V: ids are 0 .. V-1."""

    @property
    def eog_ids(self) -> Sequence[int]:
        """Every id that ends a generation, ascending."""

    def tokenize(self, text: bytes) -> list[int]:
        """Ids of UTF-8 text, without BOS, control tokens never parsed."""

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of the tokens' pieces; control tokens give none."""

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""

    def is_control(self, token: int) -> bool:
        """Whether ``token`` is a control token: BOS, end of turn, unused ..."""


ChoicesLike: TypeAlias = Any
"""List of strings, dict name -> text, ``Enum`` class, or ``Literal[...]``; see ``Choices.of``."""


@dataclass(frozen=True)
class Choices:
    """Choices in one form: N names, the texts to spell and the values to hand back."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, choices: Any) -> Choices:
        """Read choices as people have them.

        * strings: name, text and value are the string;
        * a dict: name -> text, the value is the name;
        * an ``Enum`` class: name and text are the member's value as text, the value is the member;
        * ``Literal[...]``: name and text are the argument as text, the value is the argument.

        Raises:
            EmptyTrieError: there are none.
            TypeError: another kind, or something in it that is no text.
        """
        if isinstance(choices, Choices):
            return choices
        if isinstance(choices, type) and issubclass(choices, enum.Enum):
            pairs = [(_text_of(member.value, "an Enum value"), member) for member in choices]
            names, texts, values = _columns((text, text, member) for text, member in pairs)
        elif typing.get_origin(choices) is typing.Literal:
            arguments = typing.get_args(choices)
            texts = tuple(_text_of(argument, "a Literal argument") for argument in arguments)
            names, values = texts, arguments
        elif isinstance(choices, Mapping):
            names, texts, values = _columns(
                (_string(name, "a name"), _string(text, "a text"), name) for name, text in choices.items()
            )
        elif isinstance(choices, Iterable) and not isinstance(choices, (str, bytes)):
            names = texts = values = tuple(_string(text, "a choice") for text in choices)
        else:
            raise TypeError(
                "choices must be a list of strings, a dict name -> text, an Enum class or a "
                f"Literal, got {choices!r:.80}"
            )
        if not names:
            raise EmptyTrieError("choices is empty, so there is nothing to choose from")
        return cls(names, texts, values)

    def index_of(self, name: str) -> int:
        """The place of a name in the caller's list; of equal names the first."""
        return self.names.index(name)


def _columns(rows: Iterable[tuple[str, str, Any]]) -> tuple[tuple[Any, ...], ...]:
    columns = tuple(zip(*rows, strict=True))
    return columns or ((), (), ())


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode text: {value!r:.80} ({error})") from error
    # Not str(value): a member of an Enum of strings would call itself by its name.
    return str.__str__(value)


def _text_of(value: Any, what: str) -> str:
    """Numbers and booleans as Python writes them; text as it is."""
    if isinstance(value, enum.Enum):
        value = value.value
    return _string(str(value) if isinstance(value, (bool, int, float)) else value, what)


@dataclass(frozen=True)
class Spelled:
    """Choices as token paths: (name, tokens), a name once per spelling."""

    paths: tuple[tuple[str, tuple[int, ...]], ...]
    tail: bytes
    """The end of the prompt's text that they were tokenized behind."""


@dataclass(frozen=True)
class Edge:
    """The end of a prompt: what a choice is tokenized behind.

    Attributes:
        text: bytes of the window, whole characters.
        tokens: what the vocabulary makes of ``text``; ends like the prompt.
        spaceless: whether ``lead="auto"`` takes no space here.
    """

    text: bytes
    tokens: tuple[int, ...]
    spaceless: bool


START = Edge(b"", (), True)
"""The start of a text, and just after a control token."""


def edge_of(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Edge:
    """The last words of a prompt that reproduce its last tokens when tokenized alone.

    Looks at the tokens after the last control token only: no piece spans one.
    """
    first = len(prompt_ids)
    while first > 0 and len(prompt_ids) - first < _WINDOWS[-1]:
        if tokenizer.is_control(prompt_ids[first - 1]):
            break
        first -= 1
    tail = list(prompt_ids[first:])
    if not tail:
        return START
    longest = tokenizer.detokenize(tail)
    last = longest.decode("utf-8", "ignore")[-1:]
    spaceless = not last or last.isspace() or last in OPENERS
    for size in (*(size for size in _WINDOWS if size < len(tail)), len(tail)):
        text = _from_whole_character(tokenizer.detokenize(tail[-size:]))
        tokens = tokenizer.tokenize(text) if text else []
        compared = max(1, min(size, len(tail)) // 2)
        if tokens[-compared:] == tail[-compared:]:
            return Edge(text, tuple(tokens), spaceless)
    # Ids that no text tokenizes to (a cut character, a split word): nothing to stand behind.
    return Edge(longest, (), spaceless)


def _from_whole_character(text: bytes) -> bytes:
    """``text`` without the continuation bytes of a character cut at its start."""
    start = 0
    while start < min(len(text), 3) and text[start] & _CONTINUATION_MASK == _CONTINUATION:
        start += 1
    return text[start:]


def check_lead(lead: str) -> None:
    """Refuse another ``lead`` than "auto", "" and " " with a ``ValueError``."""
    if lead not in ("auto", "", " "):
        raise ValueError(f'lead must be "auto", "" or " ", got {lead!r}')


def tokenize_choices(
    tokenizer: Tokenizer,
    choices: Choices,
    prompt_ids: Sequence[int] | None,
    *,
    lead: str = "auto",
) -> Spelled:
    """Token paths of choices as they continue a prompt.

    Args:
        tokenizer: the vocabulary.
        choices: N choices.
        prompt_ids: the prompt's tokens; ``None`` where it is not known: both spellings are taken
            under ``"auto"``, tokenized as at the start of a text.
        lead: see ``TokenTrie.from_choices``.

    Returns:
        One or two paths a choice. A choice without text has none.

    Raises:
        ValueError: ``lead`` is not one of ``"auto"``, ``""``, ``" "``.
        VocabMismatchError: tokens that do not spell the choice, or control tokens among them.

    Warns:
        TrieSamplerWarning: the prompt's last tokens would have merged with a choice.
    """
    check_lead(lead)
    edge = START if prompt_ids is None else edge_of(tokenizer, prompt_ids)
    return spell_choices(tokenizer, choices, edge, lead, known=prompt_ids is not None)


def spell_choices(tokenizer: Tokenizer, choices: Choices, edge: Edge, lead: str, *, known: bool = True) -> Spelled:
    """``tokenize_choices`` behind an edge that is at hand."""
    leads = (lead,) if lead != "auto" else ("",) if edge.spaceless and known else ("", " ")
    paths: list[tuple[str, tuple[int, ...]]] = []
    merged: list[str] = []
    for name, text in zip(choices.names, choices.texts, strict=True):
        if not text:
            paths.append((name, ()))
            continue
        spellings = leads if not text[0].isspace() else ("",)
        clean = []
        for spelling in spellings:
            spelled = (spelling + text).encode()
            tokens = _continue(tokenizer, edge, spelled)
            if tokens is not None and not known and tokenizer.detokenize(tokens) == b" " + spelled:
                # At the start of a text this vocabulary always writes a space; in mid-text it need not.
                tokens = _stand_alone(tokenizer, name, spelled)
            if tokens is not None:
                clean.append(tokens)
        if not clean:
            merged.append(name)
            clean = [_stand_alone(tokenizer, name, (spellings[0] + text).encode())]
        for tokens in clean:
            _check_spelling(tokenizer, name, text, tokens)
            paths.append((name, tokens))
    if merged:
        warn(
            f"the prompt ends in {edge.text[-20:].decode('utf-8', 'replace')!r}, whose last token the "
            f"vocabulary would have merged with the choice {merged[0]!r}"
            + (f" and {len(merged) - 1} more" if len(merged) > 1 else "")
            + "; models rarely see such a split: end the prompt before the space or the half word"
        )
    return Spelled(tuple(paths), edge.text)


def _continue(tokenizer: Tokenizer, edge: Edge, text: bytes) -> tuple[int, ...] | None:
    """Tokens of ``text`` behind the edge, or None where the cut between them is not clean."""
    if edge is START:
        tokens = tokenizer.tokenize(text)
        if text.startswith(b" ") and tokenizer.detokenize(tokens) == b" " + text:
            # This vocabulary itself puts a space before any text.
            tokens = tokenizer.tokenize(text[1:])
        return tuple(tokens)
    if not edge.tokens:
        return None
    tokens = tokenizer.tokenize(edge.text + text)
    n_before = len(edge.tokens)
    return tuple(tokens[n_before:]) if tuple(tokens[:n_before]) == edge.tokens else None


def _stand_alone(tokenizer: Tokenizer, name: str, text: bytes) -> tuple[int, ...]:
    """Tokens of ``text`` in mid-text with nothing before it to merge with."""
    for anchor in _ANCHORS:
        before = anchor.encode()
        tokens = _continue(tokenizer, Edge(before, tuple(tokenizer.tokenize(before)), spaceless=False), text)
        if tokens is not None:
            return tokens
    raise VocabMismatchError(f"choice {name!r} merges with whatever stands before it")


def _check_spelling(tokenizer: Tokenizer, name: str, text: str, tokens: tuple[int, ...]) -> None:
    """Tokens must give the text back, bytes for bytes, a leading space apart."""
    for place, token in enumerate(tokens):
        if tokenizer.is_control(token) or tokenizer.is_eog(token):
            raise VocabMismatchError(
                f"choice {name!r}: token {token} at index {place} is a control token; text from a user never makes one"
            )
    spelled = tokenizer.detokenize(tokens)
    if spelled not in (text.encode(), b" " + text.encode()):
        raise VocabMismatchError(
            f"choice {name!r}: its tokens {list(tokens)} spell {spelled!r}: this vocabulary cannot write it"
        )
