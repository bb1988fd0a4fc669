"""The wire format of a payload: which spans are constrained, and by which token sequences.

    {"modelId": "...", "descriptors": [{"path": "action", "leaves": [{"name": "ALPHA", "tokens": [17, 4]}]}]}

Three frozen Pydantic models mirror it: :class:`TokenTreePayload`, :class:`TokenTreeDescriptor` and
:class:`TokenSequence`. Attributes are snake_case, keys on the wire camelCase. What is wrong with a value comes out of
the constructors and of :meth:`TokenTreePayload.from_json` as a :class:`~trie_sampler.errors.PayloadError` that names
the place; Pydantic's own doors (``model_validate`` and its like) keep Pydantic's own errors and warn of nothing.

Checked here is what the payload alone can tell. Whether an id belongs to a vocabulary, and whether anything is left
to choose from, is for the trie builder to say: negative ids and empty lists are valid payloads.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from trie_sampler.errors import PayloadError, warn

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from typing_extensions import Self

__all__ = ["PayloadLimits", "TokenSequence", "TokenTreeDescriptor", "TokenTreePayload"]

_MAX_LISTED: Final = 5
_MAX_KEY_LENGTH: Final = 40

# The vacuous min_length makes Pydantic look inside the string; without a constraint lone surrogates pass.
_Text = Annotated[str, StringConstraints(strict=True, min_length=0)]
_TokenId = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]

_Loc = tuple[int | str, ...]


class WireModel(BaseModel):
    """Frozen model whose constructor raises :class:`PayloadError` and takes either spelling of a key."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, serialize_by_alias=True)

    def __init__(self, /, **data: Any) -> None:
        # The flags are given per call because a setting in model_config would override from_json's own.
        try:
            self.__pydantic_validator__.validate_python(
                data, self_instance=self, by_alias=True, by_name=True, extra="forbid"
            )
        except ValidationError as error:
            problems, unknown = _split_errors(error)
            keywords = [_format_place(loc) for loc in unknown if len(loc) == 1]
            if keywords:
                raise TypeError(f"{error.title}: unexpected keyword {_list_some(keywords)}") from None
            raise _payload_error(error.title, problems, unknown) from None

    # Tells Pydantic that this does what BaseModel.__init__ does, so that validation need not call it for every
    # nested object: calling it makes from_json three times slower.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PayloadLimits:
    """How much of a payload is read; one from strangers may have tighter limits than the defaults.

    Deeply nested JSON is refused in any case: the parser does not call itself more than 200 times.

    Attributes:
        max_bytes: of the JSON, looked at before it is parsed.
        max_descriptors: spans.
        max_leaves: of all descriptors together.
        max_tokens: of one leaf, which is also the depth of a trie.
        max_name_length: characters of a name, and of a path.

    Example:
        >>> TokenTreePayload.from_json('{"modelId": "m", "descriptors": []}', limits=PayloadLimits(max_bytes=8))
        Traceback (most recent call last):
        ...
        trie_sampler.errors.PayloadError: TokenTreePayload: 35 bytes, more than the limit of 8 (max_bytes)
    """

    max_bytes: int = 2**30
    max_descriptors: int = 10_000
    max_leaves: int = 20_000_000
    max_tokens: int = 65_536
    max_name_length: int = 1_000_000


_DEFAULT_LIMITS: Final = PayloadLimits()


class TokenSequence(WireModel):
    """One allowed value and one token path that spells it.

    Several sequences of one name are several spellings of one leaf.

    Attributes:
        name: the value as the caller knows it; any text without lone surrogates.
        tokens: token ids in order, each an ``int`` (no bool, float or text) that fits int32; may be empty.

    Raises:
        PayloadError: a value is missing or of the wrong type or range.
        TypeError: a keyword is unknown.

    Example:
        >>> TokenSequence(name="ALPHA", tokens=(17, 4))
        TokenSequence(name='ALPHA', tokens=(17, 4))
    """

    name: _Text
    tokens: tuple[_TokenId, ...]


class TokenTreeDescriptor(WireModel):
    """One constrained span and the values allowed in it.

    Attributes:
        path: where the span is: ``action``, ``parameters.kind``, ``contexts[]``.
        leaves: the allowed values; may be empty.

    Raises:
        PayloadError: a value is missing or of the wrong type.
        TypeError: a keyword is unknown.

    Example:
        >>> TokenTreeDescriptor(path="action", leaves=(TokenSequence(name="A", tokens=(17,)),)).path
        'action'
    """

    path: _Text
    leaves: tuple[TokenSequence, ...]


class TokenTreePayload(WireModel):
    """All that is to be constrained in one answer of one model.

    Attributes:
        model_id: the model whose token ids these are (``modelId`` on the wire).
        descriptors: the constrained spans, no two of one path; may be empty.

    Raises:
        PayloadError: a value is missing or of the wrong type, or two descriptors have one path.
        TypeError: a keyword is unknown.

    Example:
        >>> payload = TokenTreePayload.from_json('{"modelId": "m", "descriptors": []}')
        >>> payload.to_json()
        '{"modelId":"m","descriptors":[]}'
        >>> TokenTreePayload(model_id="m", descriptors=()) == payload
        True
    """

    model_id: _Text
    descriptors: tuple[TokenTreeDescriptor, ...]

    @model_validator(mode="after")
    def _refuse_equal_paths(self) -> Self:
        first_index: dict[str, int] = {}
        for index, descriptor in enumerate(self.descriptors):
            first = first_index.setdefault(descriptor.path, index)
            if first != index:
                places = f"descriptors[{first}] and descriptors[{index}]"
                context = {"text": f"{places} have the same path {_show(descriptor.path)}"}
                raise PydanticCustomError("duplicate_path", "{text}", context)
        return self

    @classmethod
    def from_json(cls, text: str | bytes, *, limits: PayloadLimits = _DEFAULT_LIMITS) -> Self:
        """Read a payload from its JSON, keys spelt in camelCase.

        Unknown keys are ignored, with one :class:`~trie_sampler.errors.TrieSamplerWarning` that names them. Of a key
        that occurs twice in one object only the last is looked at. Cost: O(bytes), about 2.5 times
        ``json.loads``.

        Args:
            text: the JSON document; bytes are UTF-8 without a byte order mark.
            limits: what is more than this is refused.

        Returns:
            The payload, in the order of the document.

        Raises:
            PayloadError: the text is not JSON or not of the schema, or past a limit; the message names the place and
                what was found.
            TypeError: ``text`` is neither ``str`` nor ``bytes``.

        Example:
            >>> TokenTreePayload.from_json('{"modelId": "m", "descriptors": 3}')
            Traceback (most recent call last):
            ...
            trie_sampler.errors.PayloadError: TokenTreePayload: descriptors: expected a valid array, got 3 (int)
        """
        raw = as_json(text)
        _require(cls, "", len(raw), "bytes", limits.max_bytes, "max_bytes")
        unknown: Iterable[_Loc] = ()
        try:
            with collector_at_rest():
                payload = cls.model_validate_json(raw, extra="forbid")
        except ValidationError as error:
            problems, unknown = _split_errors(error)
            if problems:
                raise _payload_error(error.title, problems, unknown) from None
            payload = cls._read_ignoring_unknown(raw)
        payload._require_limits(limits)
        if unknown:
            keys = _list_some([_format_place(loc) for loc in unknown])
            warn(f"{cls.__name__}: unknown keys ignored: {keys}")
        return payload

    def _require_limits(self, limits: PayloadLimits) -> None:
        cls = type(self)
        _require(cls, "descriptors", len(self.descriptors), "spans", limits.max_descriptors, "max_descriptors")
        n_leaves = 0
        for index, descriptor in enumerate(self.descriptors):
            place = f"descriptors[{index}]"
            n_leaves += len(descriptor.leaves)
            _require(cls, f"{place}.leaves", n_leaves, "leaves up to here", limits.max_leaves, "max_leaves")
            _require(
                cls, f"{place}.path", len(descriptor.path), "characters", limits.max_name_length, "max_name_length"
            )
            # Two passes in C over what is nearly always right; the place is looked for where it is not.
            longest = max(map(len, map(attrgetter("tokens"), descriptor.leaves)), default=0)
            longest_name = max(map(len, map(attrgetter("name"), descriptor.leaves)), default=0)
            if longest <= limits.max_tokens and longest_name <= limits.max_name_length:
                continue
            for number, leaf in enumerate(descriptor.leaves):
                where = f"{place}.leaves[{number}]"
                _require(cls, f"{where}.tokens", len(leaf.tokens), "tokens", limits.max_tokens, "max_tokens")
                _require(cls, f"{where}.name", len(leaf.name), "characters", limits.max_name_length, "max_name_length")

    @classmethod
    def _read_ignoring_unknown(cls, raw: bytes) -> Self:
        # Pydantic reads NaN and Infinity as floats, so that one under an unknown key would pass.
        try:
            json.loads(raw, parse_constant=_refuse_constant, parse_int=str)
        except RecursionError:
            raise PayloadError(f"{cls.__name__}: Invalid JSON: nested too deeply for the stack at hand") from None
        try:
            return cls.model_validate_json(raw, extra="ignore")
        except ValidationError as error:  # the paths are compared only when all else is right
            raise _payload_error(error.title, _split_errors(error)[0], ()) from None

    def to_json(self, *, canonical: bool = True) -> str:
        """Write the payload as compact JSON: no spaces, non-ASCII kept, keys in the order of the schema.

        Cost: O(bytes), and O(N log N) comparisons for N leaves if canonical.

        Args:
            canonical: sort descriptors by path and leaves by name, then tokens (text by code point), so that equal
                constraints give equal text. Otherwise the order given is kept, and the text is what JavaScript's
                ``JSON.stringify`` makes of the same object.

        Returns:
            The JSON document; :meth:`from_json` reads it back, within its limits.

        Example:
            >>> leaves = (TokenSequence(name="ZULU", tokens=(9,)), TokenSequence(name="ALPHA", tokens=(17, 4)))
            >>> descriptor = TokenTreeDescriptor(path="action", leaves=leaves)
            >>> TokenTreePayload(model_id="m", descriptors=(descriptor,)).to_json()[47:]
            '"leaves":[{"name":"ALPHA","tokens":[17,4]},{"name":"ZULU","tokens":[9]}]}]}'
        """
        descriptors: Iterable[TokenTreeDescriptor] = self.descriptors
        if canonical:
            descriptors = sorted(descriptors, key=lambda descriptor: descriptor.path)
        document = {
            "modelId": self.model_id,
            "descriptors": [
                {
                    "path": descriptor.path,
                    "leaves": [
                        {"name": leaf.name, "tokens": leaf.tokens}
                        for leaf in (sorted(descriptor.leaves, key=_leaf_order) if canonical else descriptor.leaves)
                    ],
                }
                for descriptor in descriptors
            ],
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON's UTF-8, as 64 hexadecimal digits.

        Equal for payloads that differ only in order. Cost: that of :meth:`to_json`.

        Example:
            >>> TokenTreePayload(model_id="m", descriptors=()).digest()[:12]
            '7e15c6e00d5b'
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from running while many small objects without cycles are made.

    It would look at all that lives in the process each time, which takes longer than reading 8192 leaves does.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class PayloadText(NamedTuple):
    """The JSON of a payload, where a text could also be something else."""

    text: str | bytes


def as_json(text: str | bytes) -> bytes:
    """The UTF-8 of a payload's JSON.

    Raises:
        TypeError: neither ``str`` nor ``bytes``.
        PayloadError: no Unicode text.
    """
    if not isinstance(text, str | bytes):
        raise TypeError(f"the JSON of a payload is str or bytes, got {type(text).__name__}")
    try:
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise PayloadError(f"TokenTreePayload: lone surrogate at character {error.start} of the text") from None


def _require(cls: type, place: str, n: int, what: str, limit: int, name: str) -> None:
    if n > limit:
        where = f"{place}: " if place else ""
        raise PayloadError(f"{cls.__name__}: {where}{n} {what}, more than the limit of {limit} ({name})")


def _leaf_order(leaf: TokenSequence) -> tuple[str, tuple[int, ...]]:
    return leaf.name, leaf.tokens


def _refuse_constant(constant: str) -> NoReturn:
    raise PayloadError(f"{TokenTreePayload.__name__}: Invalid JSON: {constant} is not a JSON number")


def _split_errors(error: ValidationError) -> tuple[list[ErrorDetails], list[_Loc]]:
    """Return the errors of the schema, and the distinct places of unknown keys with every index as -1."""
    problems = []
    unknown: dict[_Loc, None] = {}
    for problem in error.errors(include_url=False, include_context=False):
        if problem["type"] == "extra_forbidden":
            unknown[tuple(-1 if isinstance(part, int) else part for part in problem["loc"])] = None
        else:
            problems.append(problem)
    return problems, list(unknown)


def _payload_error(title: str, problems: list[ErrorDetails], unknown: Iterable[_Loc]) -> PayloadError:
    """Build the one error for all that is wrong; unknown keys are named too, as they are often misspelt ones."""
    parts = [_format_problem(problem) for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        parts.append(f"and {len(problems) - _MAX_LISTED} more")
    if unknown:
        parts.append(f"unknown keys: {_list_some([_format_place(loc) for loc in unknown])}")
    return PayloadError(f"{title}: {'; '.join(parts)}")


def _format_problem(problem: ErrorDetails) -> str:
    kind, found = problem["type"], problem["input"]
    what = "this key is missing" if kind == "missing" else problem["msg"].replace("Input should be", "expected", 1)
    if kind not in {"missing", "json_invalid", "duplicate_path"}:
        what += f", got {_show(found)} ({type(found).__name__})"
    return f"{_format_place(problem['loc'])}: {what}" if problem["loc"] else what


def _format_place(loc: _Loc) -> str:
    """Write a location as ``descriptors[0].leaves[3]``, an index of -1 as ``[]``."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]" if part >= 0 else "[]"
        elif part.isidentifier() and len(part) <= _MAX_KEY_LENGTH:
            place += f".{part}" if place else part
        else:
            place += f"[{_show(part)}]"
    return place


def _list_some(items: list[str]) -> str:
    n_more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f", and {n_more} more" if n_more > 0 else "")


class _FoundRepr(reprlib.Repr):
    """Bounded representation of whatever was found."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 1

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out an integer of more than 4300 digits.
        return super().repr_int(x, level) if x.bit_length() <= 64 else f"<{x.bit_length()} bits>"  # noqa: PLR2004


_show = _FoundRepr().repr
