"""``ResponseSkeleton``: an answer whose fixed parts are given and whose open parts a model fills, span by span."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from trie_sampler.binding import Binding
from trie_sampler.cache import Recent
from trie_sampler.choices import Choices, Spelling
from trie_sampler.errors import EngineError, PayloadError, warn
from trie_sampler.gbnf import JSON_VALUE, embed, quote
from trie_sampler.payload import TokenTreePayload, WireModel
from trie_sampler.session import FreeText, Generation, HeldSession, Span, StreamSession, StreamStep
from trie_sampler.tokens import MAX_TEXT_LENGTH, Tokenizer, continue_text
from trie_sampler.trie import TokenTrie
from trie_sampler.usage import Usage

_FREE_TEMPERATURE = 0.8
_ARRAY = "[]"
# The first word of a literal, with what stands before it: text behind it is cut from it cleanly.
_HEAD = re.compile(r"[^\w]*\w+")
_LONGEST_AROUND = 500
"""Characters of the literals around a value that each of its texts is spelled with."""
_FIRST_PRINTABLE = 0x20
_SEED_STEP = 0x9E3779B1


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode text: {error}") from error
    return text


_Text = Annotated[str, Field(strict=True), AfterValidator(_check_text)]


class SkeletonSpan(WireModel):
    """One span of an answer.

    Attributes:
        kind: ``literal`` is written as it is; ``enum``, ``boolean``, ``number``, ``free-string`` and ``free-json``
            are JSON values that the model fills, an ``enum`` or ``free-string`` with its quotes.
        key: what the value is called in the result, and the path of its descriptor in a payload. One that ends
            in ``[]`` is an array of such values.
        value: the text of a literal.
        enum_values: the values of an enum; ``None`` takes them from the payload.
        rule: GBNF for the value, instead of what the kind says: the right side of ``root ::=``, or whole rules.
        max_tokens: of a free span, or of one element; a string is closed there, JSON is an error.
        max_elements: of an array.
    """

    kind: Literal["literal", "enum", "boolean", "number", "free-string", "free-json"]
    key: _Text | None = None
    value: _Text | None = None
    enum_values: tuple[_Text, ...] | None = None
    rule: _Text | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1)] = 128
    max_elements: Annotated[int, Field(strict=True, ge=1)] = 8

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "literal":
            if self.value is None:
                raise ValueError("a literal needs a value, its text")
        elif self.key is None:
            raise ValueError(f"a span of kind {self.kind!r} needs a key")
        if self.enum_values is not None and not self.enum_values:
            raise ValueError("enum_values is empty, so there is nothing to choose from")
        return self

    @property
    def may_be_empty(self) -> bool:
        """Whether an array of it may have no element: where elements begin with a quote, as its end does not."""
        return self.kind in ("enum", "free-string") and self.rule is None

    @property
    def is_array(self) -> bool:
        """Whether it writes a JSON array of its kind."""
        return self.key is not None and self.key.endswith(_ARRAY)


class SpanOverride(WireModel):
    """How one span is sampled. Enums, booleans and numbers are greedy, and free spans sampled, unless it says so.

    Attributes:
        span_index: place in ``spans``.
        temperature: 0 is greedy.
        top_k: keep the k likeliest.
        top_p: keep the fewest whose mass reaches it.
    """

    span_index: Annotated[int, Field(strict=True, ge=0)]
    temperature: Annotated[float, Field(ge=0.0, le=1e30)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class SamplerPlan(WireModel):
    """Overrides by span.

    Attributes:
        overrides: at most one a span.
        strict: an override of a span that is not there, or of a literal, is an error instead of a warning.
    """

    overrides: tuple[SpanOverride, ...] = ()
    strict: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = [override.span_index for override in self.overrides]
        if len(set(places)) < len(places):
            raise ValueError("a span can have one override")
        return self


class Grammar(NamedTuple):
    """A skeleton as one GBNF grammar, for engines without tries."""

    source: str
    """Rules; the first is ``root``."""
    lazy: bool
    """Whether it waits for the trigger."""
    trigger: str | None
    """The opening literal."""


@dataclass(frozen=True)
class SpanUsage:
    """What one span cost; an array has one for each part."""

    span_index: int
    key: str | None
    usage: Usage


@dataclass(frozen=True)
class FilledSkeleton:
    """A filled answer.

    Attributes:
        text: all of it.
        values: key -> parsed value, a list for keys that end in ``[]`` (which the key keeps).
        usages: of every part that a model filled.
    """

    text: str
    values: Mapping[str, Any]
    usages: tuple[SpanUsage, ...]

    @property
    def forward_passes(self) -> int:
        """Calls of ``llama_decode``, the prompt's among them; literals have none of their own."""
        return sum(one.usage.decodes for one in self.usages)


class ResponseSkeleton(WireModel):
    r"""An answer as spans: literals, and JSON values that a model fills between them.

    Attributes:
        spans: in order, each a ``SkeletonSpan`` or a dictionary of its fields. Every key once. Enums and free strings
            write their own quotes, and arrays their brackets: literals have what is between.

    Raises:
        PayloadError: malformed.

    Example:
        >>> skeleton = ResponseSkeleton(spans=[
        ...     {"kind": "literal", "value": '{"action":'},
        ...     {"kind": "enum", "key": "action", "enumValues": ["REPLY", "IGNORE"]},
        ...     {"kind": "literal", "value": "}"},
        ... ])
        >>> print(skeleton.to_gbnf().source.splitlines()[0])
        root ::= "{\"action\":" span1 "}"
    """

    spans: tuple[SkeletonSpan, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = [span.key for span in self.spans if span.kind != "literal"]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise ValueError(f"a key can name one span, and {sorted(map(str, twice))} name several")
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read the wire format, camelCase keys.

        Raises:
            PayloadError: not JSON, or not of this form.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PayloadError(f"ResponseSkeleton: not JSON: {error}") from error
        if not isinstance(content, dict):
            raise PayloadError(f"ResponseSkeleton: an object is expected, got {type(content).__name__}")
        try:
            return cls(**content)
        except TypeError as error:
            raise PayloadError(str(error)) from error

    def to_json(self) -> str:
        """The wire format, without fields that are not set."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    def to_gbnf(self, payload: TokenTreePayload | None = None) -> Grammar:
        """The whole answer as a grammar: the fallback for an engine that has no tries.

        Args:
            payload: has the values of enums that name none.

        Returns:
            ``Grammar``: lazy, with the opening literal as trigger, where the skeleton begins with one.

        Raises:
            PayloadError: an enum without values; a NUL character, which no grammar can have.
        """
        try:
            return self._as_gbnf(payload)
        except PayloadError:
            raise
        except ValueError as error:
            raise PayloadError(str(error)) from None

    def _as_gbnf(self, payload: TokenTreePayload | None) -> Grammar:
        parts, rules = [], []
        for place, span in enumerate(self.spans):
            if span.kind == "literal":
                parts.append(quote(span.value or ""))
                continue
            parts.append(f"span{place}")
            element, more = self._rule_of(span, payload, f"span{place}-")
            rules += more
            if span.is_array:
                rest = f'("," " "? {element})' + f"{{0,{span.max_elements - 1}}}"
                element = f'"[" ({element} {rest}){"?" if span.may_be_empty else ""} "]"'
            rules.append(f"span{place} ::= {element}")
        first = self.spans[0] if self.spans else None
        trigger = first.value if first is not None and first.kind == "literal" and first.value else None
        source = "\n".join([f"root ::= {' '.join(parts) or quote('')}", *rules]) + JSON_VALUE
        return Grammar(source, trigger is not None, trigger)

    def _rule_of(self, span: SkeletonSpan, payload: TokenTreePayload | None, prefix: str) -> tuple[str, list[str]]:
        """(what stands for one value, rules that it needs)."""
        if span.rule is not None:
            return f"{prefix}root", [embed(span.rule, prefix)]
        if span.kind == "enum":
            values = (quote(json.dumps(value, ensure_ascii=False)) for value in _values_of(span, payload))
            return f"({' | '.join(values)})", []
        others = {"boolean": '("true" | "false")', "number": "number", "free-string": "string"}
        return others.get(span.kind, "value"), []

    def fill(
        self,
        session: StreamSession,
        *,
        payload: TokenTreePayload | str | bytes | None = None,
        plan: SamplerPlan | None = None,
        temperature: float = _FREE_TEMPERATURE,
        seed: int | None = None,
        on_step: Callable[[StreamStep], Any] | None = None,
        on_text_chunk: Callable[[str], Any] | None = None,
    ) -> FilledSkeleton:
        """Let a prefilled session write the answer.

        Literals are never sampled and cost no decode of their own: they ride with the next span. Each span is
        activated and cleared here. Enums, booleans and numbers are greedy; free spans draw. Meanwhile nobody else
        can use the session, callbacks neither, and a grammar that it was generating under ends.

        Args:
            session: prefilled; its text has the answer afterwards, or what was written of it before an error.
            payload: descriptors for enums without values, by key.
            plan: how single spans are sampled.
            temperature: of free spans.
            seed: of the draws.
            on_step: called with every ``StreamStep`` of an open span.
            on_text_chunk: called with every piece of the answer's text, literals too.

        Returns:
            The text, the values and what each span cost.

        Raises:
            PayloadError: an enum without values, here or in the payload, or with one over 9,000 characters; before
                anything is written, as is a text that the vocabulary cannot write (VocabMismatchError), a ``rule``
                that is no grammar (ValueError, EngineError) and another argument (TypeError, PayloadError).
            EmptyTrieError: a descriptor without leaves.
            EngineError: JSON that does not end within its limit; the session was cancelled; as
                ``StreamSession.generate``.
            VocabMismatchError: a value that the vocabulary cannot write.

        Warns:
            TrieSamplerWarning: tokens of the payload do not spell its names with this vocabulary; they are
                spelled anew.

        Cost: a decode for each decision, see ``walk_span``; one a token in free spans.
        """
        if isinstance(payload, (str, bytes)):
            payload = TokenTreePayload.from_json(payload)
        for name, value, kind, kinds in (
            ("session", session, StreamSession, "StreamSession"),
            ("payload", payload, TokenTreePayload | None, "TokenTreePayload or its JSON"),
            ("plan", plan, SamplerPlan | None, "SamplerPlan"),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kinds}, got {type(value).__name__}")
        for name, callback in {"on_step": on_step, "on_text_chunk": on_text_chunk}.items():
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} must be callable, got {type(callback).__name__}")
        # As an override would have it, so that it is refused before anything is written.
        SpanOverride(span_index=0, temperature=temperature)
        seed = None if seed is None else _as_seed(seed)
        overrides = self._overrides(plan)
        with session.hold() as held:
            filler = _Filler(held, payload, temperature, seed, on_step, on_text_chunk)
            for span in self.spans:
                filler.check(span)
            for place, span in enumerate(self.spans):
                if span.kind == "literal":
                    filler.wait(span.value or "")
                else:
                    following = self.spans[place + 1] if place + 1 < len(self.spans) else None
                    after = following.value if following is not None and following.kind == "literal" else None
                    filler.fill(place, span, overrides.get(place, SpanOverride(span_index=place)), after or "")
            filler.write_waiting()
            return FilledSkeleton(filler.text, filler.values, tuple(filler.usages))

    def _overrides(self, plan: SamplerPlan | None) -> dict[int, SpanOverride]:
        overrides = {} if plan is None else {one.span_index: one for one in plan.overrides}
        for place in overrides:
            if place >= len(self.spans) or self.spans[place].kind == "literal":
                message = f"the override of span {place} is of no use: there is no such span to sample"
                if plan is not None and plan.strict:
                    raise PayloadError(message)
                warn(message)
        return overrides


class _Writable:
    nbytes = 1


class _Filler:
    """One answer in the making: what is written, and the literal text that waits for the next span.

    A literal waits because the vocabulary may cut across its ends: ``:"`` and ``",`` are single tokens in many.
    So a span of known values spells each of them with the literal before it and the first word of the one behind.
    """

    def __init__(
        self,
        session: HeldSession,
        payload: TokenTreePayload | None,
        temperature: float,
        seed: int | None,
        on_step: Callable[[StreamStep], Any] | None,
        on_text_chunk: Callable[[str], Any] | None,
    ) -> None:
        self._session = session
        self._payload = payload
        self._temperature = temperature
        self._seed = seed
        self._callbacks: dict[str, Any] = {"on_step": on_step, "on_text_chunk": on_text_chunk}
        self._descriptors: dict[str, Binding] = {}
        self._n_draws = 0
        self._waiting = ""
        self._n_ahead = 0
        self.text = ""
        self.values: dict[str, Any] = {}
        self.usages: list[SpanUsage] = []

    def check(self, span: SkeletonSpan) -> None:
        """Refuse what cannot be written, a bad rule, an enum without values; bind the descriptor of one without."""
        self._session.keep("spans that can be written", lambda _: Recent[_Writable](4096)).get(
            span, lambda: self._require_writable(span)
        )
        if span.rule is not None and span.kind != "literal":
            self._session.require_grammar(_grammar_of(span.rule))
        elif span.kind == "enum":
            values = _values_of(span, self._payload)
            # Names that JSON writes otherwise are spelled here: a descriptor's tokens would break the string.
            if span.enum_values is None and all(json.dumps(name, ensure_ascii=False) == f'"{name}"' for name in values):
                self._bind_descriptor(span.key or "")

    def _require_writable(self, span: SkeletonSpan) -> _Writable:
        written = [json.dumps(value, ensure_ascii=False) for value in span.enum_values or ()]
        if span.kind == "literal":
            written = [span.value or ""]
        elif len(written) > 1 and max(map(len, written)) > MAX_TEXT_LENGTH - 2 * _LONGEST_AROUND:
            raise PayloadError(f"a value of {span.key!r} is longer than {MAX_TEXT_LENGTH - 2 * _LONGEST_AROUND:,}")
        for text in filter(None, written):
            continue_text(self._session.tokenizer, (), text.encode())
        return _Writable()

    def _bind_descriptor(self, path: str) -> None:
        """Keep a descriptor of the payload, if its tokens spell its names."""
        tokenizer = self._session.tokenizer
        for descriptor in self._payload.descriptors if self._payload is not None else ():
            for leaf in descriptor.leaves if descriptor.path == path else ():
                is_known = all(token < tokenizer.n_vocab for token in leaf.tokens)
                text = tokenizer.detokenize(leaf.tokens) if is_known else b""
                if is_known and text != leaf.name.encode():
                    warn(
                        f"{path!r}: the payload's tokens of {leaf.name!r} spell {text!r} with this vocabulary; its "
                        "names are spelled anew"
                    )
                    return
        self._descriptors[path] = self._session.bind(self._payload, path=path)

    # --- literals ------------------------------------------------------------------------------

    def wait(self, literal: str) -> None:
        """Append text that is known; what a span before has written of it already is left out."""
        self._waiting += literal[self._n_ahead :]
        self._n_ahead = 0

    def write_waiting(self) -> None:
        """Write what waits: no span that could spell it together with its values comes next."""
        self._write_first(len(self._waiting))

    def _write_first(self, n_characters: int) -> None:
        text, self._waiting = self._waiting[:n_characters], self._waiting[n_characters:]
        if text:
            self._session.splice(text)
            self._tell(text)

    def _tell(self, text: str) -> None:
        self.text += text
        if self._callbacks["on_text_chunk"] is not None:
            self._callbacks["on_text_chunk"](text)

    # --- spans ---------------------------------------------------------------------------------

    def fill(self, place: int, span: SkeletonSpan, override: SpanOverride, after: str) -> None:
        """Write one span and keep its value.

        Args:
            place: its index.
            span: what to write.
            override: how to sample.
            after: the literal behind it.
        """
        key = span.key or ""
        if not span.is_array:
            self.values[key] = self._fill_one(place, span, override, after)
            return
        self._waiting += "["
        values: list[Any] = []
        closes_first = span.may_be_empty
        if closes_first and self._decide(place, span, override, ["]", '"']) == "]":
            self.values[key] = []
            return
        is_open = closes_first
        while True:
            values.append(self._fill_one(place, span, override, "", is_open=is_open))
            is_open = False
            if len(values) == span.max_elements:
                self._waiting += "]"
                break
            if self._decide(place, span, override, [",", "]"]) == "]":
                break
        self.values[key] = values

    def _fill_one(
        self, place: int, span: SkeletonSpan, override: SpanOverride, after: str, *, is_open: bool = False
    ) -> Any:
        if span.rule is not None or span.kind == "free-json":
            return self._fill_by_grammar(place, span, override)
        if span.kind == "free-string":
            return self._fill_string(place, span, override, is_open=is_open)
        if span.kind == "number":
            self.write_waiting()
            trie = _numbers_of(self._session)
            text = self._generate(place, span, override, self._bind(trie, override)).text
            return json.loads(text)
        if span.kind == "boolean":
            return self._choose(place, span, override, {"true": "true", "false": "false"}, after) == "true"
        if span.key in self._descriptors:
            return self._walk_descriptor(place, span, override, is_open=is_open)
        values = _values_of(span, self._payload)
        written = {name: json.dumps(name, ensure_ascii=False)[is_open:] for name in values}
        return self._choose(place, span, override, written, after)

    def _choose(
        self, place: int, span: SkeletonSpan, override: SpanOverride, written: Mapping[str, str], after: str
    ) -> str:
        """Choose a name by its text, spelled with the literals around it."""
        head = _HEAD.match(after)
        ahead = (after if head is None else head[0])[:_LONGEST_AROUND]
        if len(written) == 1:
            (only, text) = next(iter(written.items()))
            self._waiting += text
            return only
        n_early = len(self._waiting) - _LONGEST_AROUND
        if n_early > 0:
            # Most vocabularies begin a token with a space.
            space = self._waiting.rfind(" ", 0, n_early)
            self._write_first(space if space > 0 else n_early)
        before, self._waiting = self._waiting, ""
        texts = {name: before + text + ahead for name, text in written.items()}
        choice = self._generate(place, span, override, self._bind(Choices.of(texts), override)).choice
        if choice is None or choice.name is None:
            raise EngineError(f"span {place} ({span.key!r}) was cut before a value was whole")
        self._n_ahead = len(ahead)
        return choice.name

    def _decide(self, place: int, span: SkeletonSpan, override: SpanOverride, texts: Sequence[str]) -> str:
        """How an array goes on."""
        return self._choose(place, span, override, {text: text for text in texts}, "")

    def _walk_descriptor(self, place: int, span: SkeletonSpan, override: SpanOverride, *, is_open: bool) -> str:
        """A value by the payload's own tokens, between quotes of ours."""
        self._waiting += "" if is_open else '"'
        self.write_waiting()
        bound = Span(self._descriptors[span.key or ""], samples=_samples(override), path=span.key)
        choice = self._generate(place, span, override, bound).choice
        if choice is None or choice.name is None:
            raise EngineError(f"span {place} ({span.key!r}) was cut before a value was whole")
        self._waiting += '"'
        return choice.name

    def _fill_string(self, place: int, span: SkeletonSpan, override: SpanOverride, *, is_open: bool) -> str:
        self._waiting += "" if is_open else '"'
        self.write_waiting()
        allowed, closers = _string_masks_of(self._session)
        done = self._write_free(place, span, override, FreeText(allowed, closers))
        if done.finish_reason != "span":
            self._waiting += '"'
            return done.text
        return done.text[:-1]

    def _fill_by_grammar(self, place: int, span: SkeletonSpan, override: SpanOverride) -> Any:
        self.write_waiting()
        allowed = None if span.rule is not None else self._session.keep("text mask", _text_mask)
        free = FreeText(allowed, ends_where_foreign=True)
        done = self._write_free(place, span, override, free, _grammar_of(span.rule))
        if done.finish_reason not in ("span", "eog"):
            raise EngineError(f"span {place} ({span.key!r}) was not over after {span.max_tokens} tokens")
        if self._session.tokenizer.detokenize(done.tokens) != done.text.encode():
            raise EngineError(f"span {place} ({span.key!r}) has bytes that are no text")
        if span.is_array and not done.text:
            raise EngineError(f"span {place} ({span.key!r}) is an array, and its rule wrote an element without text")
        try:
            return json.loads(done.text)
        except json.JSONDecodeError:
            return done.text

    # --- the session ---------------------------------------------------------------------------

    def _bind(self, source: Choices | TokenTrie, override: SpanOverride) -> Span:
        spelling = Spelling(lead="") if isinstance(source, Choices) else None
        return Span(self._session.bind(source, spelling=spelling), samples=_samples(override))

    def _generate(self, place: int, span: SkeletonSpan, override: SpanOverride, bound: Span) -> Generation:
        settings = self._settings(override, 0.0)
        done = self._session.run_span(bound, **settings, **self._callbacks)
        return self._keep(place, span, done)

    def _write_free(
        self, place: int, span: SkeletonSpan, override: SpanOverride, free: FreeText, grammar: str | None = None
    ) -> Generation:
        settings = self._settings(override, self._temperature)
        done = self._session.run_free(free, max_tokens=span.max_tokens, grammar=grammar, **settings, **self._callbacks)
        return self._keep(place, span, done)

    def _settings(self, override: SpanOverride, temperature: float) -> dict[str, Any]:
        # One seed for all would draw alike in every span.
        seed = None if self._seed is None else (self._seed + _SEED_STEP * self._n_draws) % 2**32
        self._n_draws += 1
        settings: dict[str, Any] = {"temperature": temperature, "seed": seed}
        given = {"temperature": override.temperature, "top_k": override.top_k, "top_p": override.top_p}
        return settings | {name: value for name, value in given.items() if value is not None}

    def _keep(self, place: int, span: SkeletonSpan, done: Generation) -> Generation:
        self.text += done.text
        self.usages.append(SpanUsage(place, span.key, done.usage))
        if done.finish_reason == "cancelled":
            raise EngineError("the session was cancelled while a skeleton was being filled")
        return done


def _values_of(span: SkeletonSpan, payload: TokenTreePayload | None) -> tuple[str, ...]:
    """An enum's values, its own or the payload's."""
    if span.enum_values is not None:
        return span.enum_values
    for descriptor in payload.descriptors if payload is not None else ():
        if descriptor.path == span.key:
            return tuple(dict.fromkeys(leaf.name for leaf in descriptor.leaves))
    raise PayloadError(f"the enum {span.key!r} has no enum_values, and no descriptor of that path is given")


def _grammar_of(rule: str | None) -> str:
    if rule is None:
        return f"root ::= value\n{JSON_VALUE}"
    return f"root ::= rule-root\n{embed(rule, 'rule-')}\n{JSON_VALUE}"


def _as_seed(seed: Any) -> int:
    if isinstance(seed, bool):
        raise TypeError("seed must be an integer, got a bool")
    return operator.index(seed)


def _samples(override: SpanOverride) -> bool:
    return override.temperature is not None and override.temperature > 0


def _numbers_of(session: HeldSession) -> TokenTrie:
    return session.keep("numbers", TokenTrie._of_numbers)


def _string_masks_of(session: HeldSession) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    return session.keep("string masks", _string_masks)


def _string_masks(tokenizer: Tokenizer) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """([V] bool, [V] bool): tokens that may stand in a JSON string without an escape, and those that close it.

    Pieces that are no whole characters are left out: a string closed inside a character would be none.
    """
    closers = np.zeros(tokenizer.n_vocab, bool)
    inside = np.zeros(tokenizer.n_vocab, bool)
    for token, text in _whole_pieces(tokenizer):
        body = text.removesuffix('"')
        if '"' in body or "\\" in body or any(ord(c) < _FIRST_PRINTABLE for c in body):
            continue
        closers[token] = body != text
        inside[token] = body == text
    return inside | closers, closers


def _text_mask(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """[V] bool: tokens of whole characters, and those that end. A grammar of characters lets others write none."""
    mask = np.zeros(tokenizer.n_vocab, bool)
    mask[[token for token, _ in _whole_pieces(tokenizer)]] = True
    mask[list(tokenizer.eog_ids)] = True
    return mask


def _whole_pieces(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    ends = set(tokenizer.eog_ids)
    for token in range(tokenizer.n_vocab):
        piece = b"" if token in ends else tokenizer.detokenize((token,))
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield token, text
