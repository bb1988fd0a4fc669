"""The wire format: what is read, what is refused and where, and the one canonical text.

The payload most tests start from:

    descriptors[0]  path "action"   leaves[0] "ZULU" [9]   leaves[1] "ALPHA" [17, 4]
    descriptors[1]  path "a.kind"   leaves[0] "é" []
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trie_sampler.errors import PayloadError, TrieSamplerWarning
from trie_sampler.payload import PayloadLimits, TokenSequence, TokenTreeDescriptor, TokenTreePayload

DOCUMENT: dict[str, Any] = {
    "modelId": "m",
    "descriptors": [
        {"path": "action", "leaves": [{"name": "ZULU", "tokens": [9]}, {"name": "ALPHA", "tokens": [17, 4]}]},
        {"path": "a.kind", "leaves": [{"name": "é", "tokens": []}]},
    ],
}
AS_GIVEN = (
    '{"modelId":"m","descriptors":[{"path":"action","leaves":[{"name":"ZULU","tokens":[9]},'
    '{"name":"ALPHA","tokens":[17,4]}]},{"path":"a.kind","leaves":[{"name":"é","tokens":[]}]}]}'
)
CANONICAL = (
    '{"modelId":"m","descriptors":[{"path":"a.kind","leaves":[{"name":"é","tokens":[]}]},'
    '{"path":"action","leaves":[{"name":"ALPHA","tokens":[17,4]},{"name":"ZULU","tokens":[9]}]}]}'
)

REMOVED = object()
Place = tuple[str | int, ...]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = st.fixed_dictionaries(
    {"name": texts, "tokens": st.lists(st.integers(min_value=-(2**31), max_value=2**31 - 1), max_size=4)}
)
descriptors: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"path": texts, "leaves": st.lists(leaves, max_size=5)}
)
descriptor_lists = st.lists(descriptors, max_size=3, unique_by=lambda descriptor: str(descriptor["path"]))
documents = st.fixed_dictionaries({"modelId": texts, "descriptors": descriptor_lists})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def replaced(document: Any, place: Place, value: object) -> Any:
    """Return a copy of the document with the value at the place, or without the key where it is REMOVED."""
    document = copy.deepcopy(document)
    inner = document
    for part in place[:-1]:
        inner = inner[part]
    if value is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return document


def refusal(text: str | bytes) -> str:
    with pytest.raises(PayloadError) as caught:
        TokenTreePayload.from_json(text)
    return str(caught.value)


def places_in(value: Any, place: Place = ()) -> list[Place]:
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in keys for found in ((*place, key), *places_in(inner, (*place, key)))]


def test_reads_the_wire_format() -> None:
    comp = TokenTreePayload.from_json(json.dumps(DOCUMENT).encode())
    ref = TokenTreePayload(
        model_id="m",
        descriptors=(
            TokenTreeDescriptor(
                path="action",
                leaves=(TokenSequence(name="ZULU", tokens=(9,)), TokenSequence(name="ALPHA", tokens=(17, 4))),
            ),
            TokenTreeDescriptor(path="a.kind", leaves=(TokenSequence(name="é", tokens=()),)),
        ),
    )
    assert comp == ref
    assert comp.model_id == "m"
    assert comp.descriptors[0].leaves[1].tokens == (17, 4)
    assert TokenTreePayload(**DOCUMENT) == ref
    assert TokenTreePayload(model_id="m", descriptors=DOCUMENT["descriptors"]) == ref


TOKEN: Place = ("descriptors", 0, "leaves", 1, "tokens", 1)


@pytest.mark.parametrize(
    ("place", "value", "ref"),
    [
        (TOKEN, True, "descriptors[0].leaves[1].tokens[1]: expected a valid integer, got True (bool)"),
        (TOKEN, 4.0, "descriptors[0].leaves[1].tokens[1]: expected a valid integer, got 4.0 (float)"),
        (TOKEN, float("nan"), "descriptors[0].leaves[1].tokens[1]: expected a valid integer, got nan (float)"),
        (TOKEN, "4", "descriptors[0].leaves[1].tokens[1]: expected a valid integer, got '4' (str)"),
        (TOKEN, None, "descriptors[0].leaves[1].tokens[1]: expected a valid integer, got None (NoneType)"),
        (TOKEN, 2**31, "descriptors[0].leaves[1].tokens[1]: expected less than or equal to 2147483647, got 2147483648"),
        (TOKEN, -(2**31) - 1, "descriptors[0].leaves[1].tokens[1]: expected greater than or equal to -2147483648, got"),
        (TOKEN, 10**4000, "descriptors[0].leaves[1].tokens[1]: expected less than or equal to 2147483647, got <13288"),
        (TOKEN[:5], 4, "descriptors[0].leaves[1].tokens: expected a valid array, got 4 (int)"),
        (TOKEN[:5], REMOVED, "descriptors[0].leaves[1].tokens: this key is missing"),
        (TOKEN[:4], "ALPHA", "descriptors[0].leaves[1]: expected an object, got 'ALPHA' (str)"),
        ((*TOKEN[:4], "name"), 7, "descriptors[0].leaves[1].name: expected a valid string, got 7 (int)"),
        ((*TOKEN[:4], "name"), [[[1]]], "descriptors[0].leaves[1].name: expected a valid string, got [[...]] (list)"),
        (("descriptors", 1, "leaves"), {}, "descriptors[1].leaves: expected a valid array, got {} (dict)"),
        (("descriptors", 1, "path"), REMOVED, "descriptors[1].path: this key is missing"),
        (("descriptors", 1), [], "descriptors[1]: expected an object, got [] (list)"),
        (("descriptors",), None, "descriptors: expected a valid array, got None (NoneType)"),
        (("modelId",), 3, "modelId: expected a valid string, got 3 (int)"),
        (("descriptors", 1, "path"), "action", "descriptors[0] and descriptors[1] have the same path 'action'"),
    ],
)
def test_refusal_names_the_place(place: Place, value: object, ref: str) -> None:
    assert refusal(json.dumps(replaced(DOCUMENT, place, value))).startswith(f"TokenTreePayload: {ref}")


@pytest.mark.parametrize("token", [-(2**31), -1, 0, 2**31 - 1])
def test_every_int32_is_read(token: int) -> None:
    payload = TokenTreePayload.from_json(json.dumps(replaced(DOCUMENT, TOKEN, token)))
    assert payload.descriptors[0].leaves[1].tokens == (17, token)


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("", "Invalid JSON"),
        ("nonsense", "Invalid JSON"),
        (AS_GIVEN[:-1], "Invalid JSON"),
        (AS_GIVEN + "x", "Invalid JSON"),
        ("\ufeff" + AS_GIVEN, "Invalid JSON"),
        (AS_GIVEN.encode("utf-16"), "Invalid JSON"),
        (AS_GIVEN.encode("latin-1"), "invalid unicode code point"),
        (AS_GIVEN.replace("é", r"\ud800"), "Invalid JSON"),
        (AS_GIVEN.replace("é", "\ud800"), f"lone surrogate at character {AS_GIVEN.index('é')}"),
        ("[" * 100_000, "recursion limit"),
        ('{"a":' * 100_000, "recursion limit"),
        (AS_GIVEN.replace('"m"', '"m","more":NaN'), "NaN is not a JSON number"),
        (AS_GIVEN.replace('"m"', '"m","more":[-Infinity]'), "-Infinity is not a JSON number"),
        (AS_GIVEN.replace("[9]", "[" + "9" * 5000 + "]"), "number out of range"),
        ("[]", "TokenTreePayload: expected an object, got [] (list)"),
        ("null", "TokenTreePayload: expected an object, got None (NoneType)"),
    ],
)
def test_refuses_what_is_not_json_or_no_object(text: str | bytes, ref: str) -> None:
    assert ref in refusal(text)


@pytest.mark.parametrize("text", [None, 3, DOCUMENT, bytearray(b"{}")])
def test_other_types_than_text_and_bytes_are_a_type_error(text: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(text).__name__}"):
        TokenTreePayload.from_json(text)


def test_many_errors_are_counted_not_listed() -> None:
    comp = refusal(json.dumps(replaced(DOCUMENT, TOKEN[:5], ["x"] * 22)))
    assert comp.count("expected a valid integer") == 5
    assert comp.endswith("tokens[4]: expected a valid integer, got 'x' (str); and 17 more")


def test_snake_case_on_the_wire_is_refused_and_named() -> None:
    comp = refusal(AS_GIVEN.replace("modelId", "model_id"))
    assert comp == "TokenTreePayload: modelId: this key is missing; unknown keys: model_id"


def test_unknown_keys_are_ignored_with_one_warning() -> None:
    leaf = {"name": "A", "tokens": [1], "score": 1, "odd key": {"deep": [1]}}
    document = {"modelId": "m", "version": 2, "descriptors": [{"path": "p", "note": 0, "leaves": [leaf] * 8192}]}
    with pytest.warns(TrieSamplerWarning) as caught:
        payload = TokenTreePayload.from_json(json.dumps(document))
    assert [str(warning.message) for warning in caught] == [
        "TokenTreePayload: unknown keys ignored: "
        "descriptors[].leaves[].score, descriptors[].leaves[]['odd key'], descriptors[].note, version"
    ]
    assert caught[0].filename == __file__
    assert payload.descriptors[0].leaves == (TokenSequence(name="A", tokens=(1,)),) * 8192


def test_many_unknown_keys_are_counted_not_listed() -> None:
    document = DOCUMENT | {f"x{i}": i for i in range(22)}
    with pytest.warns(TrieSamplerWarning, match=r"x4, and 17 more$"):
        TokenTreePayload.from_json(json.dumps(document))


def test_a_long_unknown_key_is_cut_short() -> None:
    with pytest.warns(TrieSamplerWarning, match=r"k\.\.\.k") as caught:
        TokenTreePayload.from_json(json.dumps(DOCUMENT | {"k" * 10_000: 1}))
    assert len(str(caught[0].message)) < 100


def test_unknown_keys_do_not_hide_equal_paths() -> None:
    document = replaced(DOCUMENT, ("descriptors", 1, "path"), "action") | {"more": 1}
    assert refusal(json.dumps(document)).endswith("have the same path 'action'")


@pytest.mark.parametrize(
    ("model", "values", "ref"),
    [
        (TokenSequence, {"name": "A", "tokens": [True]}, "tokens[0]: expected a valid integer, got True (bool)"),
        (TokenSequence, {"name": "A", "tokens": [1, 2**31]}, "tokens[1]: expected less than or equal to 2147483647"),
        (TokenSequence, {"name": "A", "tokens": "12"}, "tokens: expected a valid tuple, got '12' (str)"),
        (TokenSequence, {"name": b"A", "tokens": []}, "name: expected a valid string, got b'A' (bytes)"),
        (TokenSequence, {"name": "\ud800", "tokens": []}, "name: expected a valid string"),
        (TokenSequence, {"name": 10**5000, "tokens": []}, "name: expected a valid string, got <16610 bits> (int)"),
        (TokenSequence, {"name": "A"}, "tokens: this key is missing"),
        (TokenTreeDescriptor, {"path": "\udfff", "leaves": []}, "path: expected a valid string"),
        (TokenTreeDescriptor, {"path": "p", "leaves": [3]}, "leaves[0]: expected"),
        (TokenTreePayload, {"model_id": "\ud800", "descriptors": []}, "model_id: expected a valid string"),
        (
            TokenTreePayload,
            {"model_id": "m", "descriptors": [{"path": p, "leaves": []} for p in "abcb"]},
            "descriptors[1] and descriptors[3] have the same path 'b'",
        ),
        (
            TokenTreePayload,
            {"model_id": "m", "descriptors": [{"path": "p", "leaves": [], "more": 1}]},
            "unknown keys: descriptors[].more",
        ),
    ],
)
def test_constructors_raise_our_error(model: Any, values: dict[str, Any], ref: str) -> None:
    with pytest.raises(PayloadError) as caught:
        model(**values)
    assert not isinstance(caught.value, ValidationError)
    assert str(caught.value).startswith(f"{model.__name__}: {ref}")


def test_unknown_keyword_is_a_type_error() -> None:
    values: dict[str, Any] = {"name": "A", "tokens": (1,), "score": 1}
    with pytest.raises(TypeError, match="unexpected keyword score"):
        TokenSequence(**values)


def test_validation_does_not_call_our_constructor() -> None:
    """Three times the time of from_json hangs on an attribute that Pydantic reads."""
    assert not TokenSequence.__pydantic_custom_init__


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (lambda: TokenSequence(name="A", tokens=(1,)), "tokens"),
        (lambda: TokenTreeDescriptor(path="p", leaves=()), "leaves"),
        (lambda: TokenTreePayload(model_id="m", descriptors=()), "descriptors"),
    ],
)
def test_frozen_and_hashable(make: Any, attribute: str) -> None:
    model = make()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model, attribute, ())
    assert model == make()
    assert hash(model) == hash(make())


@pytest.mark.parametrize(
    "text",
    [
        '{"modelId":"","descriptors":[]}',
        '{"modelId":"m","descriptors":[{"path":"p","leaves":[]}]}',
        '{"modelId":"m","descriptors":[{"path":"p","leaves":[{"name":"","tokens":[]}]}]}',
    ],
)
def test_empty_lists_are_valid(text: str) -> None:
    assert TokenTreePayload.from_json(text).to_json() == text


def test_canonical_json_and_digest() -> None:
    payload = TokenTreePayload.from_json(json.dumps(DOCUMENT))
    assert payload.to_json() == CANONICAL
    assert payload.to_json(canonical=False) == AS_GIVEN
    assert payload.model_dump_json() == AS_GIVEN
    assert payload.digest() == hashlib.sha256(CANONICAL.encode()).hexdigest()


def test_leaves_of_one_name_are_ordered_by_token_value() -> None:
    """As text, [10] would come before [9]."""
    tokens = [[10], [9, 1], [9], [-1], []]
    leaves = [{"name": "A", "tokens": t} for t in tokens]
    document = {"modelId": "m", "descriptors": [{"path": "p", "leaves": leaves}]}
    payload = TokenTreePayload.from_json(json.dumps(document))
    comp = json.loads(payload.to_json())["descriptors"][0]["leaves"]
    assert [leaf["tokens"] for leaf in comp] == tokens[::-1]


def test_text_is_escaped_as_json_stringify_does() -> None:
    leaf = TokenSequence(name='\x00\x1f\b\t\n\f\r"\\/\x7f\u2028é🙂', tokens=())
    descriptor = TokenTreeDescriptor(path="p", leaves=(leaf,))
    comp = TokenTreePayload(model_id="m", descriptors=(descriptor,)).to_json(canonical=False)
    assert r'"\u0000\u001f\b\t\n\f\r\"\\/' + '\x7f\u2028é🙂"' in comp


@given(documents, st.randoms(use_true_random=False))
def test_canonical_json_is_the_same_in_any_order(document: Any, random: Any) -> None:
    shuffled = copy.deepcopy(document)
    random.shuffle(shuffled["descriptors"])
    for descriptor in shuffled["descriptors"]:
        random.shuffle(descriptor["leaves"])
    ref = TokenTreePayload.from_json(json.dumps(document))
    comp = TokenTreePayload.from_json(json.dumps(shuffled, ensure_ascii=False))
    assert comp.to_json() == ref.to_json()
    assert comp.digest() == ref.digest()


@given(documents)
def test_round_trip(document: Any) -> None:
    payload = TokenTreePayload.from_json(json.dumps(document))
    assert json.loads(payload.to_json(canonical=False)) == document
    assert TokenTreePayload.from_json(payload.to_json(canonical=False)) == payload
    canonical = payload.to_json()
    assert TokenTreePayload.from_json(canonical.encode()).to_json(canonical=False) == canonical


def read_or_refuse(text: str | bytes) -> None:
    """Any exception but the documented one fails the test that calls this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrieSamplerWarning)
        try:
            payload = TokenTreePayload.from_json(text)
        except PayloadError as error:
            assert len(str(error)) < 2000  # noqa: PT017 - the message is bounded whatever the input
        else:
            assert TokenTreePayload.from_json(payload.to_json()).digest() == payload.digest()


@given(st.binary() | st.text())
def test_arbitrary_bytes_and_text(text: str | bytes) -> None:
    read_or_refuse(text)


@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    raw = bytearray(AS_GIVEN.encode())
    start = data.draw(st.integers(min_value=0, max_value=len(raw)))
    stop = data.draw(st.integers(min_value=start, max_value=min(start + 4, len(raw))))
    raw[start:stop] = data.draw(st.binary(max_size=4))
    read_or_refuse(bytes(raw))


@given(json_values)
def test_arbitrary_json(value: Any) -> None:
    read_or_refuse(json.dumps(value))


@given(st.sampled_from(places_in(DOCUMENT)), json_values)
def test_arbitrary_json_at_any_place(place: Place, value: Any) -> None:
    read_or_refuse(json.dumps(replaced(DOCUMENT, place, value)))


@given(st.sampled_from([(), TOKEN[:2], TOKEN[:4]]), st.text(max_size=60), json_values)
def test_arbitrary_key_in_any_object(place: Place, key: str, value: Any) -> None:
    document = copy.deepcopy(DOCUMENT)
    inner: Any = document
    for part in place:
        inner = inner[part]
    inner[key] = value
    read_or_refuse(json.dumps(document))


@given(st.sampled_from([TokenSequence, TokenTreeDescriptor, TokenTreePayload]), json_values, json_values)
def test_arbitrary_values_in_python(model: Any, first: Any, second: Any) -> None:
    names = list(model.model_fields)
    try:
        model(**{names[0]: first, names[1]: second})
    except PayloadError as error:
        assert str(error).startswith(f"{model.__name__}: ")  # noqa: PT017 - most values are refused, not all


# --- limits -----------------------------------------------------------------------------------------------------------

LIMITED = json.dumps(
    {
        "modelId": "m",
        "descriptors": [
            {"path": "a", "leaves": [{"name": "x", "tokens": [1, 2, 3]}, {"name": "yy", "tokens": []}]},
            {"path": "bbb", "leaves": [{"name": "zzzz", "tokens": [4]}]},
        ],
    }
)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes": len(LIMITED) - 1}, f"TokenTreePayload: {len(LIMITED)} bytes, more than the limit of"),
        ({"max_descriptors": 1}, r"descriptors: 2 spans, .* \(max_descriptors\)"),
        ({"max_leaves": 2}, r"descriptors\[1\].leaves: 3 leaves up to here, .* \(max_leaves\)"),
        ({"max_tokens": 2}, r"descriptors\[0\].leaves\[0\].tokens: 3 tokens, .* of 2 \(max_tokens\)"),
        ({"max_name_length": 3}, r"descriptors\[1\].leaves\[0\].name: 4 characters, .* \(max_name_length\)"),
        ({"max_name_length": 2}, r"descriptors\[1\].path: 3 characters"),
    ],
)
def test_limits(limits: dict[str, int], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        TokenTreePayload.from_json(LIMITED, limits=PayloadLimits(**limits))


def test_limits_that_are_just_kept() -> None:
    limits = PayloadLimits(max_bytes=len(LIMITED), max_descriptors=2, max_leaves=3, max_tokens=3, max_name_length=4)
    assert TokenTreePayload.from_json(LIMITED, limits=limits) == TokenTreePayload.from_json(LIMITED)


def test_a_deep_leaf_is_refused_by_default() -> None:
    text = json.dumps(
        {"modelId": "m", "descriptors": [{"path": "a", "leaves": [{"name": "x", "tokens": [1] * 65_537}]}]}
    )
    with pytest.raises(PayloadError, match="max_tokens"):
        TokenTreePayload.from_json(text)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_parsing_is_never_recursive(opening: str) -> None:
    for depth in (201, 100_000):
        with pytest.raises(PayloadError, match=r"recursion|JSON"):
            TokenTreePayload.from_json('{"modelId": "m", "descriptors": [], "x": ' + opening * depth)


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("text", ['{"modelId": "m", "descriptors": []}', "no JSON"])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool, text: str) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with contextlib.suppress(PayloadError):
            TokenTreePayload.from_json(text)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
