"""Choices as people write them, and the texts that stand for each in an answer."""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from trie_sampler.errors import EmptyTrieError

ChoicesLike: TypeAlias = Any
"""List of strings, dict name -> text, ``Enum`` class, or ``Literal[...]``; see ``Choices.of``."""


@dataclass(frozen=True)
class Spelling:
    """How choices become token paths; the keywords of every ``from_choices``.

    Attributes:
        lead: ``""`` or ``" "`` before every choice; ``"auto"``: none after whitespace, an opening
            quote or bracket or a control token, elsewhere both, and the model decides.
        tokenization: ``"canonical"`` is the tokenizer's own path; ``"every"`` all ways to write the
            text with the vocabulary, as a grammar allows them.
        heal: take back the prompt's last tokens where they would have merged with a choice.
        json_value: write each choice as a JSON value, closing quote included. Behind a prompt that
            ends in a quote the opening one is there already.
        case_fold: also accept the choice in lower, upper and capitalized letters.
        special: let a choice's text name control tokens, ``<|user|>`` for example.

    Raises:
        ValueError: a word that is none of these; ``special`` beside ``"every"``.
    """

    lead: str = "auto"
    tokenization: str = "canonical"
    heal: bool = False
    json_value: bool = False
    case_fold: bool = False
    special: bool = False

    def __post_init__(self) -> None:
        if self.lead not in ("auto", "", " "):
            raise ValueError(f'lead must be "auto", "" or " ", got {self.lead!r}')
        if self.tokenization not in ("canonical", "every"):
            raise ValueError(f'tokenization must be "canonical" or "every", got {self.tokenization!r}')
        for name in ("heal", "json_value", "case_fold", "special"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r:.80}")
        if self.special and self.tokenization == "every":
            raise ValueError('special=True needs tokenization="canonical": control tokens have no text to spell')

    @classmethod
    def take_from(cls, settings: dict[str, Any]) -> Spelling:
        """Make one of the settings that are its own, which leave the dict."""
        return cls(**{field.name: settings.pop(field.name) for field in fields(cls) if field.name in settings})


def take_spelling(settings: dict[str, Any], function: str) -> Spelling:
    """The spelling of a public function's last keywords.

    Raises:
        TypeError: there are others among them.
        ValueError: as ``Spelling``.
    """
    spelling = Spelling.take_from(settings)
    if settings:
        raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(settings))!r}")
    return spelling


@dataclass(frozen=True)
class Choices:
    """Choices in one form, N of each.

    Attributes:
        names: what a choice is called.
        contents: what is written: text, or a number or truth value that is written as Python or, under
            ``json_value``, as JSON writes it.
        values: what is handed back.
    """

    names: tuple[str, ...]
    contents: tuple[str | float, ...]
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
            ValueError: text that is not Unicode; two different choices of one name, as ``Literal[1, "1"]``.
        """
        if isinstance(choices, Choices):
            return choices
        names: tuple[str, ...]
        contents: tuple[str | float, ...]
        values: tuple[Any, ...]
        if isinstance(choices, type) and issubclass(choices, enum.Enum):
            values = tuple(choices)
            contents = tuple(_content_of(member, "an Enum value") for member in values)
            names = tuple(map(_written, contents))
        elif typing.get_origin(choices) is typing.Literal:
            values = typing.get_args(choices)
            contents = tuple(_content_of(argument, "a Literal argument") for argument in values)
            names = tuple(map(_written, contents))
        elif isinstance(choices, Mapping):
            names = values = tuple(_string(name, "a name") for name in choices)
            contents = tuple(_string(text, "a text") for text in choices.values())
        elif isinstance(choices, Iterable) and not isinstance(choices, (str, bytes)):
            names = contents = values = tuple(_string(text, "a choice") for text in choices)
        else:
            raise TypeError(
                "choices must be a list of strings, a dict name -> text, an Enum class or a "
                f"Literal, got {choices!r:.80}"
            )
        if not names:
            raise EmptyTrieError("choices is empty, so there is nothing to choose from")
        if len(set(names)) < len(names):
            _refuse_ambiguous_names(names, contents)
        return cls(names, contents, values)

    @property
    def texts(self) -> tuple[str, ...]:
        """The contents as text."""
        return tuple(map(_written, self.contents))

    def plus(self, text: str, value: Any) -> Choices:
        """These and one more, called as it is written."""
        _string(text, "a choice")
        if text in self.names:
            raise ValueError(f"{text!r} is among the choices already")
        return Choices((*self.names, text), (*self.contents, text), (*self.values, value))

    def index_of(self, name: str) -> int:
        """The place of a name in the caller's list; of equal names the first."""
        return self.names.index(name)

    def forms(self, spelling: Spelling, *, both_leads: bool, in_quotes: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each name with all the texts that stand for it.

        Args:
            spelling: ``lead``, ``json_value`` and ``case_fold`` matter.
            both_leads: whether ``lead="auto"`` takes both spellings here.
            in_quotes: the prompt has opened the quotes of a JSON string.

        Yields:
            (name, texts), as many as there are names. A choice without text has none, one that begins
            with a space gets no other.
        """
        leads = ("", " ") if spelling.lead == "auto" and both_leads else (spelling.lead.replace("auto", ""),)
        if spelling.json_value and in_quotes:
            leads = ("",)
        taken = set()
        if spelling.case_fold:
            taken = {_as_json(text)[in_quotes:] if spelling.json_value else text for text in self.texts}
        for name, content in zip(self.names, self.contents, strict=True):
            text = _written(content)
            if not text and not spelling.json_value:
                yield name, ()
                continue
            forms: list[str] = []
            for case in _cases(text) if spelling.case_fold else (text,):
                written = case
                if spelling.json_value:
                    written = _as_json(content if case == text and not in_quotes else case)[in_quotes:]
                spaced = [lead + written for lead in (leads if not written[:1].isspace() else ("",))]
                # What is another choice as it stands is that choice.
                forms += [form for form in spaced if case == text or form not in taken]
            yield name, tuple(dict.fromkeys(forms))


def _refuse_ambiguous_names(names: tuple[str, ...], contents: tuple[str | float, ...]) -> None:
    """Equal names may stand for one thing only: 1 and "1" are two."""
    first: dict[str, str | float] = {}
    for name, content in zip(names, contents, strict=True):
        known = first.setdefault(name, content)
        if type(known) is not type(content) or known != content:
            raise ValueError(f"two different choices, {known!r} and {content!r}, would both be called {name!r:.80}")


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode text: {value!r:.80} ({error})") from error
    # Not str(value): a member of an Enum of strings would call itself by its name.
    return str.__str__(value)


def _content_of(value: Any, what: str) -> str | float:
    if isinstance(value, enum.Enum):
        value = value.value
    return value if isinstance(value, (bool, int, float)) else _string(value, what)


def _cases(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((text, text.lower(), text.upper(), text.capitalize())))


def _as_json(content: str | float) -> str:
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"choice {content!r} cannot be written as JSON") from error


def _written(content: str | float) -> str:
    """Numbers and truth values as Python writes them; text as it is."""
    return content if isinstance(content, str) else str(content)
