"""``ResponseSkeleton``: its wire format, what it writes, what that costs, and the grammar that stands in for it.

What is legal JSON is asked of ``json.loads``, what the grammar means of llama.cpp, what was decoded of a spy. Texts of
the tiny models are nonsense, which is why they are good tests of what may come.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from actions import ACTIONS, REQUESTS
from grammar import GrammarSampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import TINY_EOG
from spies import decodes

from trie_sampler import (
    EmptyTrieError,
    EngineError,
    PayloadError,
    StreamSession,
    TokenTreePayload,
    TokenTrie,
    TrieSamplerError,
    TrieSamplerWarning,
    VocabMismatchError,
)
from trie_sampler.automaton import ByteGraph
from trie_sampler.cursor import TrieCursor
from trie_sampler.llama.picker import Picker
from trie_sampler.llama.vocab import as_tokenizer
from trie_sampler.session import StreamStep
from trie_sampler.skeleton import FilledSkeleton, ResponseSkeleton, SamplerPlan, SkeletonSpan, SpanOverride

if TYPE_CHECKING:
    from pathlib import Path

    from llama_cpp import Llama

PROMPT = "action kind:"
ESCAPED = ('say "hi"', "back\\slash", "line\nfeed", "tab\t", "é日本🙂", "\x00\x1f\x7f", "", " ", "</s>", "]", ",")
PREFIXES = ("STOP", "STOP it", "STOP it now", "ST", "S")
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,6})?")


@pytest.fixture(params=["tiny", "tiny_bpe"])
def model(request: pytest.FixtureRequest) -> Llama:
    llm: Llama = request.getfixturevalue(request.param)
    return llm


def literal(value: str) -> dict[str, Any]:
    return {"kind": "literal", "value": value}


def span(kind: str, key: str = "a", /, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "key": key, **more}


def enum(*values: str, key: str = "a", **more: Any) -> dict[str, Any]:
    return span("enum", key, enum_values=values, **more)


def in_object(*spans: dict[str, Any]) -> list[dict[str, Any]]:
    """An object with these spans as its members."""
    out = [literal("{")]
    for n, one in enumerate(spans):
        name = json.dumps(one["key"].removesuffix("[]"))
        out += [literal((", " if n else "") + name + ": "), one]
    return [*out, literal("}")]


def skeleton_of(*spans: Any) -> ResponseSkeleton:
    return ResponseSkeleton(spans=spans)


def fill(llm: Llama, *spans: dict[str, Any], prompt: Any = PROMPT, seed: int = 1, **how: Any) -> FilledSkeleton:
    """Fill on a session of its own; what must hold of every answer is checked here."""
    chunks: list[str] = []
    steps: list[StreamStep] = []
    with StreamSession.open(llm) as session:
        n_prompt = session.prefill(prompt)
        filled = skeleton_of(*spans).fill(session, seed=seed, on_text_chunk=chunks.append, on_step=steps.append, **how)
        assert llm.detokenize(list(session.tokens[n_prompt:])) == filled.text.encode()
        assert not session.has_token_trie
    assert "".join(chunks) == filled.text
    assert all(chunks)
    assert sum(step.done for step in steps) == len(filled.usages)
    assert list(filled.values) == [one["key"] for one in spans if one["kind"] != "literal"]
    return filled


def fill_object(llm: Llama, *spans: dict[str, Any], **how: Any) -> FilledSkeleton:
    """As ``fill``, of an object with these members, whose values must be those of the parsed text."""
    filled = fill(llm, *in_object(*spans), **how)
    assert json.loads(filled.text) == {key.removesuffix("[]"): value for key, value in filled.values.items()}
    return filled


def plan_of(*places: int, **override: Any) -> SamplerPlan:
    return SamplerPlan(overrides=tuple(SpanOverride(span_index=place, **override) for place in places))


@contextlib.contextmanager
def decisions() -> Iterator[list[str]]:
    """Every token, or end, that was decided on inside the block, whoever did it."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((TrieCursor, "decide"), (Picker, "pick")):
            whole = getattr(owner, name)

            def spy(*args: Any, _whole: Any = whole, _name: str = name, **how: Any) -> Any:
                made.append(_name)
                return _whole(*args, **how)

            patch.setattr(owner, name, spy)
        yield made


# --- the wire format --------------------------------------------------------------------------------------------------

WIRE = {
    "spans": [
        {"kind": "literal", "value": '{"a":'},
        {"kind": "enum", "key": "a", "enumValues": ["x", 'é"']},
        {"kind": "enum", "key": "contexts[]", "maxElements": 3},
        {"kind": "boolean", "key": "b", "rule": '"yes"'},
        {"kind": "number", "key": "n"},
        {"kind": "free-string", "key": "s", "maxTokens": 4},
        {"kind": "free-json", "key": "j[]"},
    ]
}


def test_wire_format_comes_back_as_it_was() -> None:
    skeleton = ResponseSkeleton.from_json(json.dumps(WIRE))
    assert json.loads(skeleton.to_json()) == WIRE
    assert ResponseSkeleton.from_json(skeleton.to_json()) == skeleton
    assert ResponseSkeleton.from_json(skeleton.to_json().encode()) == skeleton
    assert [one.is_array for one in skeleton.spans] == [False, False, True, False, False, False, True]


def test_keys_in_both_spellings() -> None:
    camel = skeleton_of({"kind": "enum", "key": "a", "enumValues": ["x"], "maxTokens": 3, "maxElements": 2})
    snake = skeleton_of({"kind": "enum", "key": "a", "enum_values": ["x"], "max_tokens": 3, "max_elements": 2})
    objects = skeleton_of(SkeletonSpan(kind="enum", key="a", enum_values=("x",), max_tokens=3, max_elements=2))
    text = '{"spans":[{"kind":"enum","key":"a","enum_values":["x"],"max_tokens":3,"max_elements":2}]}'
    assert camel == snake == objects == ResponseSkeleton.from_json(text)
    on_the_wire: dict[str, Any] = {"spanIndex": 1, "topK": 2, "topP": 0.5}
    assert SpanOverride(**on_the_wire) == SpanOverride(span_index=1, top_k=2, top_p=0.5)


BAD_SPANS = {
    "unknown kind": span("choice"),
    "no kind": {"key": "a"},
    "literal without value": {"kind": "literal"},
    "no key": {"kind": "number"},
    "empty enum": enum(),
    "enum of numbers": span("enum", enum_values=[1]),
    "enum as text": span("enum", enum_values="ab"),
    "no tokens": span("free-string", max_tokens=0),
    "tokens as a truth value": span("free-string", max_tokens=True),
    "no elements": span("number", "a[]", max_elements=0),
    "elements as text": span("number", "a[]", max_elements="3"),
    "unknown key": span("number", maxToken=3),
    "no object": 3,
}


@pytest.mark.parametrize("bad", BAD_SPANS.values(), ids=BAD_SPANS)
def test_a_bad_span_is_refused_and_its_place_named(bad: Any) -> None:
    with pytest.raises(PayloadError, match=r"spans\[\w*\]"):
        skeleton_of(literal("{"), bad)
    with pytest.raises(PayloadError, match=r"spans\[\w*\]"):
        ResponseSkeleton.from_json(json.dumps({"spans": [literal("{"), bad]}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "nope", "[]", "3", "null", "{}", '{"spans": 3}', '{"spans": [], "more": 1}', '{"spans": NaN}', b"\xff"],
    ids=repr,
)
def test_a_text_that_is_no_skeleton(text: str | bytes) -> None:
    with pytest.raises(PayloadError):
        ResponseSkeleton.from_json(text)


def test_deep_nesting_is_no_crash() -> None:
    with pytest.raises(PayloadError, match="not JSON"):
        ResponseSkeleton.from_json("[" * 200_000)


def test_a_key_names_one_span() -> None:
    with pytest.raises(PayloadError, match=r"\['a'\] name several"):
        skeleton_of(enum("x"), literal(","), span("number"))
    skeleton_of(enum("x"), enum("x", key="a[]"), {"kind": "literal", "key": "a", "value": ""})


@pytest.mark.parametrize(
    ("model_of", "keywords"),
    [
        (ResponseSkeleton, {"span": []}),
        (SkeletonSpan, {"kind": "enum", "key": "a", "values": ["x"]}),
        (SpanOverride, {"span_index": 0, "temp": 1.0}),
        (SamplerPlan, {"override": []}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_unknown_keywords_are_a_type_error(model_of: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword {list(keywords)[-1]}"):
        model_of(**keywords)


@pytest.mark.parametrize(
    "bad",
    [
        {"span_index": -1},
        {"span_index": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": -0.1},
        {"top_p": 1.1},
    ],
    ids=str,
)
def test_an_override_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        SpanOverride(**({"span_index": 0} | bad))


def test_a_span_has_one_override() -> None:
    with pytest.raises(PayloadError):
        plan_of(0, 0, temperature=1.0)


@pytest.mark.parametrize("bad", [literal("\ud800"), enum("\ud800", "x")], ids=["literal", "enum"])
def test_lone_surrogates_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        skeleton_of(bad)


# --- refused before anything is evaluated -----------------------------------------------------------------------------


def payload_of(llm: Llama, **names: Sequence[str]) -> TokenTreePayload:
    """Descriptors by path; ``contexts_`` is ``contexts[]``."""
    descriptors: Any = [
        {
            "path": path.replace("_", "[]"),
            "leaves": [{"name": name, "tokens": llm.tokenize(name.encode(), add_bos=False)} for name in leaves],
        }
        for path, leaves in names.items()
    ]
    return TokenTreePayload(model_id="tiny", descriptors=descriptors)


def test_an_enum_without_values_or_descriptor(tiny: Llama) -> None:
    skeleton = skeleton_of(literal("{"), span("free-string", "s"), span("enum"))
    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    before = session.tokens
    for payload in (None, payload_of(tiny, b=["x"]), payload_of(tiny, b=["x"]).to_json()):
        with decodes(tiny) as sizes, pytest.raises(PayloadError, match="'a' has no enum_values"):
            skeleton.fill(session, payload=payload)
        assert (sizes, session.tokens) == ([], before)
    with pytest.raises(PayloadError, match="'a' has no enum_values"):
        skeleton.to_gbnf()
    with decodes(tiny) as sizes, pytest.raises(PayloadError):
        skeleton.fill(session, payload="{")
    assert (sizes, session.tokens) == ([], before)
    session.close()


@pytest.mark.parametrize("leaves", [[], [{"name": "x", "tokens": [99_999]}]], ids=["no leaves", "ids past V"])
def test_a_bad_descriptor_is_noticed_first(tiny: Llama, leaves: list[Any]) -> None:
    descriptors: Any = [{"path": "a", "leaves": leaves}]
    payload = TokenTreePayload(model_id="tiny", descriptors=descriptors)
    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    with decodes(tiny) as sizes, pytest.raises((PayloadError, EmptyTrieError, VocabMismatchError)):
        skeleton_of(span("free-string", "s", max_tokens=3), span("enum")).fill(session, payload=payload)
    assert sizes == []


@pytest.mark.parametrize("place", [0, 2, 9])
def test_an_override_of_nothing(tiny: Llama, place: int) -> None:
    spans = (literal("{"), enum("x", "y"), literal("}"))
    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    before = session.tokens
    strict = SamplerPlan(overrides=plan_of(place, top_k=1).overrides, strict=True)
    with decodes(tiny) as sizes, pytest.raises(PayloadError, match=f"span {place} is of no use"):
        skeleton_of(*spans).fill(session, plan=strict)
    assert (sizes, session.tokens) == ([], before)
    with pytest.warns(TrieSamplerWarning, match=f"span {place} is of no use"):
        skeleton_of(*spans).fill(session, plan=plan_of(place, top_k=1))
    skeleton_of(*spans).fill(session, plan=SamplerPlan(overrides=plan_of(1, top_k=1).overrides, strict=True))
    session.close()


def test_states_of_the_session(tiny: Llama) -> None:
    session = StreamSession.open(tiny)
    with pytest.raises(EngineError, match="prefill"):
        skeleton_of(enum("x", "y")).fill(session)
    with pytest.raises(EngineError, match="prefill"):
        skeleton_of(literal("x")).fill(session)
    session.close()
    with pytest.raises(EngineError, match="closed"):
        skeleton_of(literal("x")).fill(session)


# --- the planner's envelope -------------------------------------------------------------------------------------------

KINDS = ("music", "message", "timer", "other")
ENVELOPE = (
    literal('{"thought": '),
    span("free-string", "thought", max_tokens=10),
    literal(', "action": '),
    enum(*ACTIONS, key="action"),
    literal(', "parameters": {"kind": '),
    enum(*KINDS, key="kind"),
    literal(', "urgent": '),
    span("boolean", "urgent"),
    literal(', "count": '),
    span("number", "count"),
    literal("}}"),
)
ALL_REQUESTS = [request for requests in zip(*REQUESTS.values(), strict=True) for request in requests]


@pytest.mark.parametrize(
    "requests",
    [pytest.param(ALL_REQUESTS[:4], id="4"), pytest.param(ALL_REQUESTS[4:50], id="46", marks=pytest.mark.slow)],
)
def test_planner_envelope(llm: Llama, requests: Sequence[str]) -> None:
    for n, request in enumerate(requests):
        prompt = f"You plan one action of an assistant, in JSON.\nRequest: {request}\n"
        with decodes(llm) as sizes, decisions() as made:
            filled = fill(llm, *ENVELOPE, prompt=prompt, seed=n)
        answer = json.loads(filled.text)
        parameters = answer["parameters"]
        assert filled.values == {"thought": answer["thought"], "action": answer["action"], **parameters}
        assert answer["action"] in ACTIONS
        assert parameters["kind"] in KINDS
        assert isinstance(answer["thought"], str)
        assert isinstance(parameters["urgent"], bool)
        assert type(parameters["count"]) in (int, float)
        assert len(sizes) == len(made) == filled.forward_passes
        assert [one.key for one in filled.usages] == ["thought", "action", "kind", "urgent", "count"]
        assert [one.span_index for one in filled.usages] == [1, 3, 5, 7, 9]


def test_planner_envelope_on_random_weights(model: Llama) -> None:
    for seed in range(3):
        with decodes(model) as sizes, decisions() as made:
            filled = fill(model, *ENVELOPE, prompt=f"{seed} kind:", seed=seed)
        json.loads(filled.text)
        assert len(sizes) == len(made) == filled.forward_passes


# --- literals ---------------------------------------------------------------------------------------------------------

LITERALS: dict[str, tuple[dict[str, Any], ...]] = {
    "nothing": (),
    "empty": (literal(""),),
    "only literals": (literal('{"a": "'), literal(""), literal('x"'), literal("}  ")),
    "only spaces": (literal("  "), literal("\n")),
    "single value": (literal("["), enum("only one"), literal("]")),
    "control tokens as text": (literal("</s>"), literal("<end_of_turn>")),
    "not ASCII": (literal("é日"), literal("本🙂\u200d🙃")),
}


@pytest.mark.parametrize("spans", LITERALS.values(), ids=LITERALS)
def test_what_is_known_costs_nothing(model: Llama, spans: tuple[dict[str, Any], ...]) -> None:
    with decodes(model) as sizes:
        filled = fill(model, *spans)
    assert sizes == []
    assert filled.forward_passes == 0
    assert filled.usages == ()
    assert filled.text == "".join(one.get("value", '"only one"') for one in spans)


def test_control_tokens_do_not_come_from_literals(model: Llama) -> None:
    with StreamSession.open(model) as session:
        n_prompt = session.prefill(PROMPT)
        skeleton_of(literal("</s>"), enum("<s>", "</s>"), literal("<end_of_turn>")).fill(session)
        assert min(session.tokens[n_prompt:]) > 5


def test_a_single_value_costs_nothing_between_others(model: Llama) -> None:
    spans = in_object(enum("x", "y", key="a"), enum("only", key="b"), enum("x", "y", key="c"))
    with decodes(model) as sizes:
        filled = fill(model, *spans)
    assert len(sizes) == filled.forward_passes == 2
    assert [one.key for one in filled.usages] == ["a", "c"]
    assert filled.values["b"] == "only"


EDGES = (
    "",
    " ",
    "   ",
    "}",
    '", ',
    "::",
    '"x": ',
    "word",
    " word",
    "wo rd ",
    "_",
    "é日",
    "\n\n",
    "1",
    "-",
    "true",
    '"',
)


@pytest.mark.parametrize("before", ["", " ", '{"', "1", "wo ", "日"])
@pytest.mark.parametrize("kind", ["enum", "boolean", "number", "free-string"])
def test_text_around_a_span(model: Llama, kind: str, before: str) -> None:
    """Written as it is said, wherever the vocabulary would rather cut."""
    values: dict[str, Any] = {"enum_values": PREFIXES} if kind == "enum" else {}
    for after in EDGES:
        filled = fill(model, literal(before), span(kind, max_tokens=2, **values), literal(after))
        assert filled.text == before + json.dumps(filled.values["a"], ensure_ascii=False) + after or kind == "number"
        assert filled.text.startswith(before)
        assert filled.text.endswith(after)


def test_adjacent_spans_and_literals(model: Llama) -> None:
    spans = (
        enum("x", "y", key="a"),
        span("boolean", "b"),
        literal(""),
        literal(" "),
        literal(","),
        enum("STOP", "STOP it", key="c"),
        literal("wo"),
        literal("rd word"),
        span("free-string", "d", max_tokens=2),
        span("free-string", "e", max_tokens=2),
        enum("one", key="f"),
        enum("x", "y", key="g"),
    )
    filled = fill(model, *spans)
    written = {key: json.dumps(value, ensure_ascii=False) for key, value in filled.values.items()}
    assert filled.text == "{a}{b} ,{c}word word{d}{e}{f}{g}".format(**written)


def test_two_answers_in_one_session(model: Llama) -> None:
    spans = in_object(enum("x", "y", key="a"), span("number", "n"), span("free-string", "s", max_tokens=3))
    with StreamSession.open(model) as session:
        n_prompt = session.prefill(PROMPT)
        first = skeleton_of(*spans).fill(session, seed=1)
        second = skeleton_of(*spans).fill(session, seed=1)
        assert model.detokenize(list(session.tokens[n_prompt:])).decode() == first.text + second.text
        session.generate(4, seed=1)
        third = skeleton_of(*spans).fill(session, seed=1)
    for filled in (first, second, third):
        assert json.loads(filled.text) == filled.values


# --- enums and booleans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [PREFIXES, ESCAPED, ("", "x"), ("a", "a", "b")], ids=str)
def test_enum_values_of_every_kind(model: Llama, values: tuple[str, ...]) -> None:
    seen = set()
    for seed in range(12):
        plan = plan_of(2, temperature=30.0, top_p=1.0)
        filled = fill_object(model, enum(*values), prompt=f"{seed} kind:", seed=seed, plan=plan)
        seen.add(filled.values["a"])
    assert seen <= set(values)


@pytest.mark.parametrize("value", ESCAPED)
def test_each_escape(model: Llama, value: str) -> None:
    """Beside a value that begins like it, so that the escape is really chosen at."""
    filled = fill_object(model, enum(value, value + value + "x"))
    assert filled.values["a"] in (value, value + value + "x")


def test_a_pick_is_the_likeliest_first_token(tiny: Llama) -> None:
    filled = fill(tiny, enum("red", "blue", "green"), literal("}"))
    bound = {json.dumps(name) + "}": name for name in ("red", "blue", "green")}
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.set_token_trie({name: text for text, name in bound.items()}, lead="")
        assert session.generate(temperature=0.0).choice.name == filled.values["a"]  # type: ignore[union-attr]


def test_values_of_a_descriptor(model: Llama) -> None:
    payload = payload_of(model, a=PREFIXES, contexts_=["red", "green", "blue"], **{"b.kind": ["x", "y"]})
    spans = (span("enum", "a"), span("enum", "contexts[]", max_elements=3), span("enum", "b.kind"))
    for seed in range(6):
        plan = plan_of(2, 4, 6, temperature=30.0, top_p=1.0)
        filled = fill_object(model, *spans, seed=seed, payload=payload, plan=plan, prompt=f"{seed}:")
        assert filled.values["a"] in PREFIXES
        assert set(filled.values["contexts[]"]) <= {"red", "green", "blue"}
        assert len(filled.values["contexts[]"]) <= 3
        assert filled.values["b.kind"] in ("x", "y")
    assert (
        fill(model, *in_object(*spans), payload=payload.to_json()).text
        == fill(model, *in_object(*spans), payload=payload).text
    )


def test_own_values_come_before_the_descriptor(tiny: Llama) -> None:
    filled = fill_object(tiny, enum("x", "y"), payload=payload_of(tiny, a=["red", "green"]))
    assert filled.values["a"] in ("x", "y")


def test_a_descriptors_name_that_json_escapes(tiny: Llama) -> None:
    names = ['say "hi"', 'say "hi" now']
    filled = fill(tiny, *in_object(span("enum")), payload=payload_of(tiny, a=names))
    assert json.loads(filled.text)["a"] in names


# --- numbers ----------------------------------------------------------------------------------------------------------


class Pieces:
    """A vocabulary of these pieces and an end token."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = [b"", *(piece.encode() for piece in pieces)]
        self.n_vocab = len(self.pieces)
        self.eog_ids = (0,)

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        raise NotImplementedError

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)

    def is_eog(self, token: int) -> bool:
        return token == 0

    def is_control(self, token: int) -> bool:
        return token == 0


def is_accepted(graph: ByteGraph, text: bytes) -> bool:
    node = 0
    for byte in text:
        edges = range(graph.first_child[node], graph.first_child[node + 1])
        targets = [int(graph.target[edge]) for edge in edges if graph.byte[edge] == byte]
        if not targets:
            return False
        (node,) = targets
    return int(graph.leaf[node]) == 0


LIMITS = ("1" * 15, "1" * 16, "0.123456", "0.1234567", "-" + "9" * 15 + "." + "9" * 6, "-0", "-0.0", "00", "01", "-01")
ODD = ("", "-", "--1", ".", ".5", "5.", "-.5", "1e5", "1E5", "+1", "1 ", " 1", "1.2.3", "0.", "10", "0.00", "100.001")


@pytest.mark.parametrize("text", [*LIMITS, *ODD])
def test_the_graph_of_numbers_at_its_edges(text: str) -> None:
    assert is_accepted(ByteGraph.of_numbers(), text.encode()) == bool(NUMBER.fullmatch(text))


@given(st.text("-.0019e+ ", max_size=24) | st.from_regex(NUMBER, fullmatch=True))
def test_the_graph_of_numbers_is_the_pattern(text: str) -> None:
    accepted = is_accepted(ByteGraph.of_numbers(), text.encode())
    assert accepted == bool(NUMBER.fullmatch(text))
    if accepted:
        assert json.loads(text) == float(text)


def test_the_graph_of_numbers_is_well_formed() -> None:
    graph = ByteGraph.of_numbers()
    assert [array.dtype for array in graph] == [np.int32] * 4
    assert graph.first_child[0] == 0
    assert graph.first_child[-1] == len(graph.byte) == len(graph.target)
    assert len(graph.first_child) == len(graph.leaf) + 1
    for node in range(len(graph.leaf)):
        edges = slice(graph.first_child[node], graph.first_child[node + 1])
        assert (graph.target[edges] > node).all()
        assert (np.diff(graph.byte[edges]) > 0).all()
        assert graph.leaf[node] == 0 or edges.start < edges.stop


def test_numbers_in_tokens_of_several_digits() -> None:
    """Every token path of up to three tokens, against the pattern."""
    pieces = Pieces("-", ".", "0", "1", "12", "00", "-1", ".5", "5.", "0.0", "1" * 15, "1" * 16, "x", "1x", "1,", ".5.")
    trie = TokenTrie._of_numbers(pieces)
    for length in range(1, 4):
        for path in itertools.product(range(1, pieces.n_vocab), repeat=length):
            node = trie.root
            for token in path:
                node = trie.step(node, token) if node >= 0 else node
            text = pieces.detokenize(path).decode()
            assert (node >= 0 and bool(trie.is_terminal(node))) == bool(NUMBER.fullmatch(text)), text


@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0])
def test_numbers_are_always_numbers(model: Llama, temperature: float) -> None:
    texts = set()
    for seed in range(25):
        plan = plan_of(2, 4, temperature=temperature, top_p=1.0)
        spans = (span("number", "n"), span("number", "m[]", max_elements=3))
        filled = fill_object(model, *spans, prompt=f"{seed} kind:", seed=seed, plan=plan)
        numbers = [filled.values["n"], *filled.values["m[]"]]
        assert all(type(number) in (int, float) for number in numbers)
        written = re.fullmatch(r'\{"n": ([^,]*), "m": \[(.*)\]\}', filled.text)
        assert written
        assert all(NUMBER.fullmatch(number) for number in (written[1], *written[2].split(",")))
        texts.add(filled.text)
    assert len(texts) > 2


# --- arrays -----------------------------------------------------------------------------------------------------------

ARRAYS = {
    "enum": enum(*PREFIXES, "red", key="a[]"),
    "escaped enum": enum(*ESCAPED, key="a[]"),
    "single-value enum": enum("only", key="a[]"),
    "free-string": span("free-string", "a[]", max_tokens=3),
    "number": span("number", "a[]"),
    "boolean": span("boolean", "a[]"),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays(model: Llama, array: dict[str, Any]) -> None:
    lengths = set()
    for seed in range(12):
        how = {"seed": seed, "prompt": f"{seed} red", "plan": plan_of(2, temperature=30.0, top_p=1.0)}
        n_most = 1 + seed % 4
        filled = fill_object(model, {**array, "max_elements": n_most}, **how)
        values = filled.values["a[]"]
        assert len(values) <= n_most
        lengths.add(len(values))
        if "enum_values" in array:
            assert set(values) <= set(array["enum_values"])
    assert len(lengths) > 1


def test_some_arrays_are_empty(model: Llama) -> None:
    texts = set()
    for n in range(12):
        plan = plan_of(1, temperature=30.0, top_p=1.0)
        spans = (literal('{"a": '), enum("x", "y", key="a[]"), literal("}"))
        texts.add(fill(model, *spans, prompt=f"{n} kind:", seed=n, plan=plan).text)
    assert '{"a": []}' in texts


def test_an_array_at_either_end(model: Llama) -> None:
    filled = fill(model, enum("x", "y", key="a[]"), span("boolean", "b[]"), enum("x", "y", key="c[]", max_elements=2))
    written = {key[0]: json.dumps(value, separators=(",", ":")) for key, value in filled.values.items()}
    assert filled.text == "{a}{b}{c}".format(**written)


# --- free strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_most", [1, 2, 5, 30])
def test_free_strings_are_whole(model: Llama, n_most: int) -> None:
    for seed in range(12):
        filled = fill_object(
            model, span("free-string", "s", max_tokens=n_most), prompt=f"{seed} kind:", seed=seed, temperature=4.0
        )
        value = filled.values["s"]
        assert not any(c in '"\\' or ord(c) < 0x20 for c in value)
        (usage,) = (one.usage for one in filled.usages)
        assert 1 <= usage.n_tokens <= n_most


def test_a_free_string_that_the_model_closes(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights seldom do: here a third token is likely only if it closes."""
    pick = Picker.pick
    closers = [token for token in range(model.n_vocab()) if model.detokenize([token]).endswith(b'"')]
    calls = itertools.count(1)

    def pick_closer(self: Picker, row: Any, allowed: Any = None) -> int:
        if next(calls) % 3 == 0:
            row = row.copy()
            row[closers] += 100.0
        return pick(self, row, allowed)

    monkeypatch.setattr(Picker, "pick", pick_closer)
    filled = fill_object(model, span("free-string", "s"), span("free-string", "t[]", max_elements=2), seed=3)
    assert [one.usage.n_tokens for one in filled.usages if one.key == "s"] == [3]
    assert not any('"' in value for value in (filled.values["s"], *filled.values["t[]"]))


def test_a_free_string_may_use_the_whole_vocabulary_of_plain_text(tiny: Llama) -> None:
    """What is masked: pieces with a quote inside, a backslash, a control byte or a part of a character."""
    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    skeleton_of(span("free-string", max_tokens=1)).fill(session, seed=1)
    from trie_sampler.skeleton import _string_masks_of

    with session.hold() as held:
        allowed, closers = _string_masks_of(held)
    for token in range(tiny.n_vocab()):
        piece = tiny.detokenize([token])
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = ""
        fits = bool(text) and token not in TINY_EOG
        plain = fits and not re.search(r'["\\\x00-\x1f]', text.removesuffix('"'))
        assert allowed[token] == plain, piece
        assert closers[token] == (plain and text.endswith('"')), piece
    session.close()


# --- rules and free JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ['"yes" | "no"', 'root ::= x\nx ::= "yes" | "no"'], ids=["right side", "rules"])
@pytest.mark.parametrize("kind", ["enum", "number", "free-string", "free-json"])
def test_a_rule_instead_of_the_kind(model: Llama, kind: str, rule: str) -> None:
    filled = fill(model, literal("a: "), span(kind, rule=rule))
    assert filled.text == "a: " + filled.values["a"]
    assert filled.values["a"] in ("yes", "no")


def test_a_rule_whose_text_is_json(model: Llama) -> None:
    assert fill(model, span("enum", rule=r'"[1, " [23] "]"')).values["a"] in ([1, 2], [1, 3])
    assert type(fill(model, span("enum", rule="number")).values["a"]) in (int, float)


def test_free_json(model: Llama) -> None:
    n_whole = 0
    for seed in range(24):
        try:
            filled = fill(model, literal('{"a": '), span("free-json", max_tokens=40), prompt=f"{seed}:", seed=seed)
        except EngineError as error:
            if "was not over after 40 tokens" not in str(error):
                raise
            continue
        assert json.loads(filled.text + "}") == filled.values
        n_whole += 1
    assert n_whole > 3


def test_free_json_before_a_span(model: Llama) -> None:
    """One that is spelled with the literal between them."""
    spans = in_object(span("free-json", "j", rule='"1" | "[2]"'), enum("x", "y", key="e"))
    assert json.loads(fill(model, *spans).text)["j"] in (1, [2])


AFTER_JSON: dict[str, tuple[dict[str, Any], ...]] = {
    "the end": (),
    "an array": (literal(', "k": '), span("free-json", "k[]", rule='"1" | "[2]"', max_elements=2)),
    "a string": (literal(', "s": '), span("free-string", "s", max_tokens=2)),
    "a number": (literal(', "n": '), span("number", "n")),
    "more JSON": (literal(', "k": '), span("free-json", "k", rule='"1" | "[2]"')),
}


@pytest.mark.parametrize("more", AFTER_JSON.values(), ids=AFTER_JSON)
def test_a_literal_after_free_json(tiny: Llama, more: tuple[dict[str, Any], ...]) -> None:
    spans = (literal('{"j": '), span("free-json", "j", rule='"1" | "[2]"'), *more, literal("}"))
    filled = fill(tiny, *spans)
    assert json.loads(filled.text) == {key.removesuffix("[]"): value for key, value in filled.values.items()}


def test_a_value_that_is_whole_at_its_limit(tiny: Llama) -> None:
    assert fill(tiny, span("number", rule='"yes" | "no"', max_tokens=1)).values["a"] in ("yes", "no")


def test_a_rule_that_writes_the_sign_of_a_rule(tiny: Llama) -> None:
    assert fill(tiny, span("free-string", rule='"x ::= " [12]')).values["a"] in ("x ::= 1", "x ::= 2")


def test_json_that_does_not_end(tiny: Llama) -> None:
    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    with pytest.raises(EngineError, match=r"span 0 \('a'\) was not over after 3 tokens"):
        skeleton_of(span("free-json", rule='"abc" [a-z]{40}', max_tokens=3)).fill(session)
    assert not session.has_token_trie
    session.prefill(PROMPT)
    assert skeleton_of(enum("x", "y")).fill(session).values["a"] in ("x", "y")
    session.close()


def test_a_rule_that_does_not_parse(tiny: Llama) -> None:
    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    with decodes(tiny) as sizes, pytest.raises(EngineError, match="does not parse"):
        skeleton_of(span("number", rule='"a" ((')).fill(session)
    assert sizes == []
    assert skeleton_of(enum("x", "y")).fill(session).values["a"] in ("x", "y")
    session.close()


# --- how spans are sampled --------------------------------------------------------------------------------------------

MIXED = in_object(
    enum("one", "ten", "and", "the", "two", "false", key="e"),
    span("boolean", "b"),
    span("number", "n"),
    span("free-string", "s", max_tokens=4),
    enum("one", "ten", "and", key="l[]", max_elements=3),
)


def test_seeds_are_reproducible(model: Llama) -> None:
    plan = plan_of(2, 4, 6, 10, temperature=30.0, top_p=1.0)
    texts = [fill(model, *MIXED, seed=seed, plan=plan).text for seed in (*range(6), *range(6))]
    assert texts[:6] == texts[6:]
    assert len(set(texts[:6])) > 3


def test_only_free_spans_draw_unless_told(model: Llama) -> None:
    filled = [fill(model, *MIXED[:7], seed=seed, temperature=5.0) for seed in range(5)]
    assert len({one.text for one in filled}) == 1
    assert len({fill(model, *MIXED, seed=seed, temperature=5.0).text for seed in range(5)}) > 1


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"temperature": 3.0, "top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_overrides_that_leave_one_token(model: Llama, greedy: dict[str, Any]) -> None:
    texts = {fill(model, *MIXED[6:9], seed=seed, plan=plan_of(2, **greedy)).text for seed in range(5)}
    assert texts == {fill(model, *MIXED[6:9], seed=9, temperature=0.0).text}


def test_an_override_is_of_its_span_alone(tiny: Llama) -> None:
    spans = (enum("one", "ten", "and", key="a"), literal(", "), enum("one", "ten", "and", key="b"))
    seen = [fill(tiny, *spans, seed=seed, plan=plan_of(0, temperature=30.0, top_p=1.0)).values for seed in range(20)]
    assert len({one["a"] for one in seen}) > 1
    by_first: dict[str, set[str]] = {}
    for one in seen:
        by_first.setdefault(one["a"], set()).add(one["b"])
    assert all(len(second) == 1 for second in by_first.values())


def test_draws_of_several_spans_are_independent(tiny: Llama) -> None:
    """Two values of near-equal chance, twice: of the four pairs each comes in a quarter of the answers."""
    spans = (enum("true", "action", key="a"), literal(", "), enum("true", "action", key="b"))
    plan = plan_of(0, 2, temperature=1000.0, top_p=1.0)
    pairs = [tuple(fill(tiny, *spans, seed=seed, plan=plan).values.values()) for seed in range(60)]
    assert len(set(pairs)) == 4


# --- what is told, and how it ends early ------------------------------------------------------------------------------


def test_steps_are_the_tokens_of_open_spans(model: Llama) -> None:
    steps: list[StreamStep] = []
    with StreamSession.open(model) as session:
        n_prompt = session.prefill(PROMPT)
        filled = skeleton_of(*MIXED).fill(session, seed=1, on_step=steps.append)
        written = session.tokens[n_prompt:]
    tokens = [token for step in steps for token in step.tokens]
    assert len(tokens) == sum(one.usage.n_tokens for one in filled.usages)
    # In order, with literals between them.
    left = iter(written)
    assert all(token in left for token in tokens)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("door", ["on_step", "on_text_chunk"])
def test_a_callback_that_raises(model: Llama, door: str, place: int) -> None:
    calls = itertools.count()

    def callback(_: Any) -> None:
        if next(calls) == place:
            raise KeyError("mine")

    with StreamSession.open(model) as session:
        session.prefill(PROMPT)
        hooks: dict[str, Any] = {door: callback}
        with pytest.raises(KeyError, match="mine"):
            skeleton_of(*MIXED).fill(session, seed=1, **hooks)
        assert not session.has_token_trie
        assert "open" in repr(session)
        session.prefill(PROMPT)
        again = skeleton_of(*MIXED).fill(session, seed=1)
    assert again.text == fill(model, *MIXED, seed=1).text


@pytest.mark.parametrize("spans", [MIXED, MIXED[6:9]], ids=["in a trie", "in a free string"])
def test_cancel(model: Llama, spans: list[dict[str, Any]]) -> None:
    with StreamSession.open(model) as session:
        session.prefill(PROMPT)
        with pytest.raises(EngineError, match="cancelled"):
            skeleton_of(*spans).fill(session, seed=1, on_step=lambda _: session.cancel())
        assert not session.has_token_trie
        session.prefill(PROMPT)
        assert skeleton_of(*spans).fill(session, seed=1).text == fill(model, *spans, seed=1).text


@pytest.mark.parametrize(
    "spans",
    [
        (literal("word " * 10), enum("x", "y")),
        (literal("x"), enum("x", "y" * 10)),
        (span("number"),),
        (span("free-string", max_tokens=500), literal("word " * 10)),
    ],
    ids=["literal", "enum", "number", "behind a string"],
)
def test_no_room(tiny: Llama, spans: tuple[dict[str, Any], ...]) -> None:
    """Refused, and the session goes on."""
    session = StreamSession.open(tiny)
    session.prefill([1, *[300] * 248])
    with pytest.raises(EngineError, match="fit the context of 256"):
        skeleton_of(*spans).fill(session, seed=1)
    session.prefill(PROMPT)
    assert skeleton_of(enum("x", "y")).fill(session).values["a"] in ("x", "y")
    session.close()


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_decodes_are_decisions(model: Llama) -> None:
    """Spans that end with a token: there the literal behind them rides with the next decision."""
    spans = [one for one in MIXED if one.get("key") != "n"]
    for seed in range(4):
        with decodes(model) as sizes, decisions() as made:
            filled = fill(model, *spans, prompt=f"{seed} kind:", seed=seed)
        assert len(sizes) == len(made) == filled.forward_passes


def test_a_look_that_two_spans_share_is_one_decode(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        filled = fill(tiny, span("number", "n"), span("boolean", "b"))
    assert filled.forward_passes == len(sizes)


def test_a_descriptor_with_one_leaf_costs_nothing(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        filled = fill(tiny, span("enum"), payload=payload_of(tiny, a=["only"]))
    assert sizes == []
    assert filled.forward_passes == 0


# --- any skeleton -----------------------------------------------------------------------------------------------------

_TEXTS = st.text(st.sampled_from('ab "\\{}[]:,.é日\n-1'), max_size=6)
_VALUES = st.lists(_TEXTS, min_size=1, max_size=4)


@st.composite
def any_spans(draw: st.DrawFn) -> list[dict[str, Any]]:
    out = []
    for n in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["literal", "literal", "enum", "boolean", "number", "free-string"]))
        key = f"k{n}" + draw(st.sampled_from(["", "", "[]"]))
        if kind == "literal":
            out.append(literal(draw(_TEXTS)))
        else:
            values = {"enum_values": draw(_VALUES)} if kind == "enum" else {}
            out.append(span(kind, key, max_tokens=draw(st.integers(1, 3)), max_elements=2, **values))
    return out


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=any_spans(), seed=st.integers(0, 99), is_hot=st.booleans())
def test_any_skeleton(model: Llama, spans: list[dict[str, Any]], seed: int, is_hot: bool) -> None:
    places = [place for place, one in enumerate(spans) if one["kind"] != "literal"]
    plan = plan_of(*places, temperature=20.0, top_p=1.0) if is_hot else None
    filled = fill(model, *spans, seed=seed, plan=plan)
    rest = filled.text
    for one in spans:
        if one["kind"] == "literal":
            assert rest.startswith(one["value"])
            rest = rest[len(one["value"]) :]
            continue
        value = filled.values[one["key"]]
        if one["kind"] == "number":
            numbers = value if one["key"].endswith("[]") else [value]
            written = ",".join([NUMBER.pattern] * len(numbers))
            found = re.match(written if numbers is not value else rf"\[{written}\]", rest)
            assert found
            if numbers is not value and json.loads(found[0]) != value:
                # More digits follow it, and nobody could tell where it ends.
                return
            rest = rest[found.end() :]
            continue
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert rest.startswith(text)
        rest = rest[len(text) :]
    assert not rest


# --- the grammar that stands in for it --------------------------------------------------------------------------------


def is_taken(llm: Llama, source: str, tokens: Sequence[int]) -> bool:
    """Whether llama.cpp's grammar takes these tokens one by one, and an end after them."""
    sampler = GrammarSampler(llm, source)
    try:
        for token in tokens:
            if token not in sampler.valid_ids():
                return False
            sampler.accept(token)
        return bool(TINY_EOG & set(sampler.valid_ids().tolist()))
    finally:
        sampler.close()


GRAMMARS: dict[str, list[dict[str, Any]]] = {
    "every kind": MIXED,
    "escapes": in_object(enum(*ESCAPED[:5], key="e"), enum(*ESCAPED[:5], key="l[]", max_elements=2)),
    "arrays": in_object(span("number", "n[]", max_elements=1), span("boolean", "b[]", max_elements=3)),
    "strings": in_object(span("free-string", "s[]", max_tokens=3, max_elements=2)),
    "begins open": [enum("x", "y"), literal("")],
    "only literals": [literal('a"\\\n\té'), literal("")],
    "a rule": [literal("a: "), span("enum", rule='"yes" |\n "no"')],
    "JSON at the end": [literal("a: "), span("free-json", rule='"[" ws "]"')],
}


@pytest.mark.parametrize("spans", GRAMMARS.values(), ids=GRAMMARS)
def test_the_grammar_takes_what_is_written(model: Llama, spans: list[dict[str, Any]]) -> None:
    source = skeleton_of(*spans).to_gbnf().source
    for seed in range(2):
        with StreamSession.open(model) as session:
            n_prompt = session.prefill(f"{seed} kind:")
            skeleton_of(*spans).fill(session, seed=seed)
            tokens = session.tokens[n_prompt:]
        assert is_taken(model, source, tokens)
        assert not is_taken(model, source, tokens[:-1])
        assert not is_taken(model, source, (*tokens, tokens[-1]))


@pytest.mark.parametrize(
    ("text", "is_legal"),
    [
        ('{"e": "one", "b": true, "n": -1.5, "s": "x\\n", "l": []}', True),
        ('{"e": "one", "b": true, "n": 0, "s": "", "l": ["ten", "one"]}', True),
        ('{"e": "six", "b": true, "n": 0, "s": "", "l": []}', False),
        ('{"e": "one", "b": maybe, "n": 0, "s": "", "l": []}', False),
        ('{"e": "one", "b": true, "n": 01, "s": "", "l": []}', False),
        ('{"e": "one", "b": true, "n": 0, "s": "\n", "l": []}', False),
        ('{"e": "one", "b": true, "n": 0, "s": "", "l": ["six"]}', False),
        ('{"e": "one", "b": true, "n": 0, "s": "", "l": ["one","one","one","one"]}', False),
        ('{"b": true, "e": "one", "n": 0, "s": "", "l": []}', False),
        ('{"e": "one", "b": true, "n": 0, "s": "", "l": []', False),
        ('{"e": "one", "b": true, "n": 0, "s": "", "l": []}}', False),
    ],
)
def test_what_the_grammar_means(tiny: Llama, text: str, is_legal: bool) -> None:
    tokens = tiny.tokenize(text.encode(), add_bos=False)
    assert is_taken(tiny, skeleton_of(*MIXED).to_gbnf().source, tokens) == is_legal


def test_the_grammar_of_a_descriptor(tiny: Llama) -> None:
    source = skeleton_of(*in_object(span("enum"))).to_gbnf(payload_of(tiny, a=["red", "green", "red"])).source
    taken = {
        name: is_taken(tiny, source, tiny.tokenize(b'{"a": "%s"}' % name.encode(), add_bos=False))
        for name in ("red", "green", "blue")
    }
    assert taken == {"red": True, "green": True, "blue": False}


def test_the_trigger_is_the_opening_literal() -> None:
    assert skeleton_of(literal('{"a":'), span("number")).to_gbnf()[1:] == (True, '{"a":')
    for spans in ([span("number"), literal("}")], [literal(""), span("number")]):
        assert skeleton_of(*spans).to_gbnf()[1:] == (False, None)


def test_a_lazy_grammar_wakes_up_at_its_trigger(model: Llama) -> None:
    spans = in_object(enum("one", "ten"), span("boolean", "b"))
    source, is_lazy, trigger = skeleton_of(*spans).to_gbnf()
    assert is_lazy
    assert trigger is not None
    how: dict[str, Any] = {"grammar": source, "grammar_triggers": [trigger], "seed": 1}
    with StreamSession.open(model) as session:
        session.prefill(PROMPT)
        before = session.generate(1, **how).text
        session.splice(trigger)
        done = session.generate(100, **how)
    assert trigger not in before
    assert done.finish_reason == "eog"
    answer = json.loads(trigger + done.text)
    assert answer["a"] in ("one", "ten")
    assert isinstance(answer["b"], bool)


def test_the_grammar_of_whole_rules(tiny: Llama) -> None:
    source = skeleton_of(span("enum", rule='root ::= x\nx ::= "yes" | "no"')).to_gbnf().source
    assert is_taken(tiny, source, tiny.tokenize(b"yes", add_bos=False))


def test_the_grammar_of_nothing(tiny: Llama) -> None:
    assert is_taken(tiny, skeleton_of().to_gbnf().source, ())


# --- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"payload": 5}, {"payload": {"descriptors": []}}, {"plan": {}}, {"plan": [1]}], ids=str
)
def test_arguments_of_another_type(tiny: Llama, how: dict[str, Any]) -> None:
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        before = session.tokens
        with pytest.raises(TypeError):
            skeleton_of(literal("a"), enum("x", "y")).fill(session, **how)
        with pytest.raises(TypeError, match="session"):
            skeleton_of(literal("a")).fill(tiny)  # type: ignore[arg-type]
        assert session.tokens == before


@pytest.mark.parametrize("rule", ["(", "unknown-rule", '"a"{2,1}', "(" * 5_000])
def test_a_bad_rule_is_refused_before_anything_is_written(
    tiny: Llama, rule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        before = session.tokens
        with pytest.raises((ValueError, EngineError), match="grammar"):
            skeleton_of(literal("a "), span("number"), span("free-json", "b", rule=rule)).fill(session)
        assert session.tokens == before
    capfd.readouterr()


def test_a_callback_cannot_change_the_session(tiny: Llama) -> None:
    refused: list[str] = []
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)

        def meddle(_chunk: str) -> None:
            for call in (lambda: session.splice("!"), lambda: session.prefill("a"), session.clear_token_trie):
                with pytest.raises(EngineError, match="generating"):
                    call()
                refused.append("")

        spans = in_object(enum("red", "blue", key="a"), span("number", "n"), span("boolean", "b"))
        filled = skeleton_of(*spans).fill(session, on_text_chunk=meddle)
        assert len(refused) > 6
        assert json.loads(filled.text) == filled.values
        assert tiny.detokenize(list(session.tokens)).decode().endswith(filled.text)


def test_a_grammar_from_before_does_not_reach_into_an_answer(tiny: Llama) -> None:
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.generate(2, grammar="root ::= [0-9]+", temperature=0.0)
        filled = skeleton_of(*in_object(enum("red", "blue"), span("free-string", "s", max_tokens=3))).fill(session)
        assert json.loads(filled.text) == filled.values


def test_a_payload_of_other_tokens_is_spelled_anew(tiny: Llama) -> None:
    """Its tokens are another model's: the names are what counts between quotes."""
    leaves = [{"name": "red", "tokens": [300, 301]}, {"name": "green", "tokens": [302]}]
    payload = TokenTreePayload(model_id="other", descriptors=[{"path": "a", "leaves": leaves}])
    with pytest.warns(TrieSamplerWarning, match="spelled anew"):
        filled = fill(tiny, *in_object(span("enum")), payload=payload)
    assert json.loads(filled.text) == filled.values
    assert filled.values["a"] in ("red", "green")


def test_a_payload_of_names_with_a_space_is_spelled_anew(tiny: Llama) -> None:
    """As many make it: the space in front belongs to the tokens, and not to the value."""
    tokens = [as_tokenizer(tiny).tokenize(f" {name}".encode()) for name in ("red", "green")]
    leaves = [{"name": name, "tokens": list(ids)} for name, ids in zip(("red", "green"), tokens, strict=True)]
    payload = TokenTreePayload(model_id="tiny", descriptors=[{"path": "a", "leaves": leaves}])
    with pytest.warns(TrieSamplerWarning, match="spelled anew"):
        filled = fill(tiny, *in_object(span("enum")), payload=payload)
    assert json.loads(filled.text) == filled.values


@pytest.mark.parametrize("filler", ["long words ", "x", "\u7530"])
def test_literals_longer_than_a_choice_may_be(tiny_model_path: Path, filler: str) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=40_000, n_threads=2, verbose=False)
    around = (filler * 12_000)[:12_000]
    with StreamSession.open(llm) as session:
        n_prompt = session.prefill(PROMPT)
        spans = [literal(around), enum("red", "blue"), literal(around[:300])]
        filled = skeleton_of(*spans).fill(session)
        assert filled.text == f'{around}"{filled.values["a"]}"{around[:300]}'
        assert llm.detokenize(list(session.tokens[n_prompt:])).decode() == filled.text
    llm.close()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"temperature": "x"}, (PayloadError, TypeError)),
        ({"temperature": float("nan")}, PayloadError),
        ({"temperature": -1.0}, PayloadError),
        ({"on_step": 5}, TypeError),
        ({"on_text_chunk": 5}, TypeError),
        ({"seed": "a"}, TypeError),
        ({"seed": True}, TypeError),
    ],
    ids=str,
)
def test_settings_are_refused_before_anything_is_written(tiny: Llama, how: dict[str, Any], error: Any) -> None:
    spans = (literal("{"), span("boolean", "b"), span("free-string", "s", max_tokens=3))
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        before = session.tokens
        with decodes(tiny) as sizes, pytest.raises(error):
            skeleton_of(*spans).fill(session, **how)
        assert (sizes, session.tokens) == ([], before)


@pytest.mark.parametrize(
    "last", [enum("x" * 10_000, "y"), enum("x\u2581", "y"), literal("\u2581"), enum("\u2581")], ids=str
)
def test_texts_that_cannot_be_written_are_refused_first(tiny: Llama, last: dict[str, Any]) -> None:
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        before = session.tokens
        for _ in range(2):
            with pytest.raises((PayloadError, VocabMismatchError)):
                skeleton_of(literal("{"), span("boolean", "b"), last).fill(session)
            assert session.tokens == before


def test_closing_the_model_in_a_callback_is_an_error(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    for spans in (
        (literal('{"t":'), span("free-string", "t", max_tokens=5)),
        (literal('{"t":'), enum("a", "b"), literal("x"), enum("c", "d", key="k")),
        (span("boolean", "b"), span("number", "n")),
        (span("boolean", "b"), span("free-json", "j")),
    ):
        llm = Llama(str(tiny_model_path), n_ctx=256, n_threads=1, verbose=False)
        session = StreamSession.open(llm)
        session.prefill(PROMPT)
        with pytest.raises(TrieSamplerError, match="closed"):
            skeleton_of(*spans).fill(session, on_text_chunk=lambda _, llm=llm: llm.close())


RULES = {
    "comment": '"1" | "2" # one or two',
    "right side and rules": 'x\nx ::= "1"',
    "rules of JSON": "root ::= string",
    "lines": '"1"\n| "2"',
    "a rule of its own": 'root ::= 0x\n0x ::= "1"',
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_fill_and_gbnf_read_a_rule_alike(tiny: Llama, rule: str) -> None:
    spans = (literal("<"), span("free-json", "a", rule=rule), span("free-json", "b", rule='root ::= 0x\n0x ::= "2"'))
    filled = fill(tiny, *spans)
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        source = skeleton_of(*spans).to_gbnf().source
        with session.hold() as held:
            held.require_grammar(source)
        # What was filled is a sentence of the grammar.
        session.generate(1, grammar=source, logit_bias={tiny.tokenize(b"<", add_bos=False)[-1]: 100.0})
        session.splice(filled.text[1:])
    assert filled.text.endswith("2")


def test_a_nul_is_filled_and_has_no_grammar(tiny: Llama) -> None:
    skeleton = skeleton_of(literal("\0{"), span("boolean", "b"))
    with pytest.raises(PayloadError, match="NUL"):
        skeleton.to_gbnf()


def test_elements_without_text_are_an_error(tiny: Llama) -> None:
    with pytest.raises(EngineError, match="without text"):
        fill(tiny, span("free-json", "a[]", rule='""'))


def test_free_json_is_text(model: Llama) -> None:
    for seed in range(20):
        with StreamSession.open(model) as session:
            n_prompt = session.prefill(f"{seed}:")
            with contextlib.suppress(EngineError):
                skeleton_of(literal('{"a":"'), span("free-json", "j", max_tokens=30)).fill(session, seed=seed)
            model.detokenize(list(session.tokens[n_prompt:])).decode()
