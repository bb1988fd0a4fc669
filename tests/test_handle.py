"""The reference's engine ABI: ``run_generation`` on foreign handles, its C names on our sessions, its mobile binding.

The foreign engines are mocks that write down how they are called; one is a session of ours behind the same methods.
"""

from __future__ import annotations

import copy
import ctypes
import json
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trie_sampler import (
    EmptyTrieError,
    EngineError,
    PayloadError,
    TokenSequence,
    TokenTreeDescriptor,
    TokenTreePayload,
    TokenTrie,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
)
from trie_sampler.handle import (
    ForeignResult,
    MobileBinding,
    OnToken,
    StreamingAbi,
    eliza_inference_clear_token_trie,
    eliza_inference_set_token_trie,
    run_generation,
)
from trie_sampler.session import StreamSession, StreamStep

if TYPE_CHECKING:
    from llama_cpp import Llama

Pieces = Sequence[tuple[int, Any, bool]]

HANDLE = object()
SET, CLEAR = "eliza_inference_set_token_trie", "eliza_inference_clear_token_trie"
PREFILL, GENERATE = "eliza_inference_llm_stream_prefill", "eliza_inference_llm_stream_generate"
THINK: Pieces = [(100, "TH", False), (101, "INK", True)]
# The leaves are not in canonical order.
PAYLOAD = TokenTreePayload.from_json(
    '{"modelId": "test-model", "descriptors": [{"path": "action", "leaves": ['
    '{"name": "THINK", "tokens": [100, 101]}, {"name": "EXECUTE", "tokens": [200]}]}]}'
)
COMPACT = (
    '{"modelId":"test-model","descriptors":[{"path":"action","leaves":['
    '{"name":"THINK","tokens":[100,101]},{"name":"EXECUTE","tokens":[200]}]}]}'
)
PROMPT = "action kind:"
CHOICES = ("STOP", "PLAY MUSIC", "REPLY")


class GrammarEngine:
    """An engine without a token trie; ``calls`` is all it was asked, in order."""

    def __init__(self, pieces: Pieces = THINK, *, prefilled: int = 3, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pieces = pieces
        self.prefilled = prefilled
        self.code = code

    def eliza_inference_llm_stream_prefill(self, handle: Any, prompt_tokens: Sequence[int], slot_id: int) -> int:
        self.calls.append(("prefill", handle, prompt_tokens, slot_id))
        return self.prefilled

    def eliza_inference_llm_stream_generate(
        self, handle: Any, max_tokens: int, temperature: float, top_p: float, on_token: OnToken
    ) -> int:
        self.calls.append(("generate", handle, max_tokens, temperature, top_p))
        for piece in self.pieces:
            self.say(on_token, *piece)
        return self.code

    def say(self, on_token: OnToken, *piece: Any) -> None:
        on_token(*piece)

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Engine(GrammarEngine):
    """An engine with one."""

    def eliza_inference_set_token_trie(self, handle: Any, payload_json: str, mode: int) -> None:
        self.calls.append(("set", handle, payload_json, mode))

    def eliza_inference_clear_token_trie(self, handle: Any) -> None:
        self.calls.append(("clear", handle))


class DeafEngine(Engine):
    """One behind ctypes: an exception of a callback never reaches it."""

    def say(self, on_token: OnToken, *piece: Any) -> None:
        try:
            on_token(*piece)
        except BaseException as error:  # noqa: BLE001 - as ctypes does
            self.calls.append(("unheard", error))


class RaisingEngine(Engine):
    def eliza_inference_llm_stream_generate(self, *_: Any) -> int:
        self.calls.append(("generate",))
        raise OSError("the library crashed")


def run(abi: StreamingAbi, **settings: Any) -> ForeignResult:
    return run_generation(abi, HANDLE, **{"prompt_tokens": [1, 2, 3], "max_tokens": 10, **settings})


# --- the reference's own test ------------------------------------------------------------------


def test_should_call_eliza_inference_set_token_trie_before_generate() -> None:
    mock_ffi = Mock(spec=[PREFILL, GENERATE])
    mock_ffi.eliza_inference_llm_stream_prefill.return_value = 3

    def generate(_handle: Any, _max_tokens: int, _temperature: float, _top_p: float, on_token: OnToken) -> int:
        set_trie_spy.assert_called_once()
        clear_trie_spy.assert_not_called()
        on_token(200, "EXECUTE", True)
        return 0

    mock_ffi.eliza_inference_llm_stream_generate.side_effect = generate
    set_trie_spy = mock_ffi.eliza_inference_set_token_trie = Mock()
    clear_trie_spy = mock_ffi.eliza_inference_clear_token_trie = Mock()
    mock_ctx = Mock()
    trie_payload = {
        "modelId": "test-model",
        "descriptors": [
            {
                "path": "action",
                "leaves": [
                    {"name": "THINK", "tokens": [100, 101]},
                    {"name": "EXECUTE", "tokens": [200]},
                ],
            }
        ],
    }
    on_text_chunk = Mock()

    run_generation(
        mock_ffi,
        mock_ctx.handle,
        prompt_tokens=np.array([1, 2, 3], np.int32),
        slot_id=-1,
        max_tokens=10,
        temperature=0.7,
        top_p=0.9,
        token_tree_payload=json.dumps(trie_payload),
        token_tree_mode=0,  # greedy
        on_text_chunk=on_text_chunk,
    )

    # set_token_trie was called with the payload, as JSON.stringify writes it
    set_trie_spy.assert_called_once_with(mock_ctx.handle, json.dumps(trie_payload, separators=(",", ":")), 0)
    # clear_token_trie was called at the end
    clear_trie_spy.assert_called_once_with(mock_ctx.handle)
    mock_ffi.eliza_inference_llm_stream_generate.assert_called_once_with(mock_ctx.handle, 10, 0.7, 0.9, ANY)
    on_text_chunk.assert_called_once_with("EXECUTE")


# --- what the engine is asked, and when --------------------------------------------------------


@pytest.mark.parametrize(
    "payload", [PAYLOAD, COMPACT, COMPACT.replace(":", " : ").encode()], ids=["object", "str", "bytes"]
)
@pytest.mark.parametrize(("mode", "number"), [(0, 0), (1, 1), ("greedy", 0), ("sampled", 1)])
def test_the_trie_is_set_between_prefill_and_generate_and_cleared_after(payload: Any, mode: Any, number: int) -> None:
    abi = Engine()
    run(abi, token_tree_payload=payload, token_tree_mode=mode, slot_id=2, temperature=0.5, top_p=0.25)
    assert abi.calls == [
        ("prefill", HANDLE, [1, 2, 3], 2),
        ("set", HANDLE, COMPACT, number),
        ("generate", HANDLE, 10, 0.5, 0.25),
        ("clear", HANDLE),
    ]


def test_the_settings_left_out_are_those_of_a_session() -> None:
    abi = GrammarEngine()
    run(abi)
    assert abi.calls == [("prefill", HANDLE, [1, 2, 3], -1), ("generate", HANDLE, 10, 0.8, 0.95)]


def test_the_json_is_utf_8_text_as_it_is() -> None:
    abi = Engine()
    text = COMPACT.replace("THINK", "日本 🙂")
    run(abi, token_tree_payload=text)
    assert abi.calls[1] == ("set", HANDLE, text, 0)


def test_prompt_tokens_become_plain_ints() -> None:
    abi = GrammarEngine()
    run(abi, prompt_tokens=iter(np.array([7, 8], np.int32)))
    assert abi.calls[0] == ("prefill", HANDLE, [7, 8], -1)
    assert {type(token) for token in abi.calls[0][2]} == {int}


def test_without_a_payload_an_earlier_trie_is_cleared_once_before_generate() -> None:
    abi = Engine()
    run(abi)
    assert abi.names == ["prefill", "clear", "generate"]


# --- engines without a token trie --------------------------------------------------------------


def lacking(*names: str) -> Engine:
    """An engine where these are None, as a symbol that was not found."""
    abi = Engine()
    for name in names:
        setattr(abi, name, None)
    return abi


LACKING: dict[str, Callable[[], GrammarEngine]] = {
    "both": GrammarEngine,
    "both are None": lambda: lacking(SET, CLEAR),
    "set": lambda: lacking(SET),
    "clear": lambda: lacking(CLEAR),
}


@pytest.mark.parametrize("make", LACKING.values(), ids=LACKING)
class TestAnEngineThatLacks:
    def test_goes_on_with_its_grammar_and_a_warning_at_the_callers_line(
        self, make: Callable[[], GrammarEngine]
    ) -> None:
        abi = make()
        with pytest.warns(TrieSamplerWarning, match="this engine has no token trie") as record:
            result = run(abi, token_tree_payload=PAYLOAD, grammar='root ::= "THINK"')
        assert [warning.filename for warning in record] == [__file__]
        assert abi.names == ["prefill", "generate"]
        assert result.text == "THINK"

    @pytest.mark.parametrize("grammar", [None, "", False])
    def test_is_refused_without_a_grammar_before_it_is_asked(
        self, make: Callable[[], GrammarEngine], grammar: Any
    ) -> None:
        abi = make()
        with pytest.raises(EngineError, match="no token trie, and its handle no grammar") as caught:
            run(abi, token_tree_payload=PAYLOAD, grammar=grammar)
        assert caught.value.code is None
        assert abi.calls == []

    def test_is_free_without_a_payload(self, make: Callable[[], GrammarEngine]) -> None:
        abi = make()
        assert run(abi).text == "THINK"
        assert abi.names == ["prefill", "generate"]


def test_a_grammar_is_no_reason_for_a_warning_where_there_is_a_trie() -> None:
    abi = Engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(abi, token_tree_payload=PAYLOAD, grammar="root ::= [a-z]+")
    assert abi.names == ["prefill", "set", "generate", "clear"]


# --- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [-1, -17])
def test_a_negative_prefill_is_an_error_with_its_code(code: int) -> None:
    abi = Engine(prefilled=code)
    with pytest.raises(EngineError, match=f"prefill failed with code {code}") as caught:
        run(abi, token_tree_payload=PAYLOAD)
    assert caught.value.code == code
    assert abi.names == ["prefill"]


def test_a_prefill_of_zero_is_none() -> None:
    assert run(Engine(prefilled=0)).text == "THINK"


@pytest.mark.parametrize("code", [-1, 1, 42])
def test_a_generate_other_than_zero_is_an_error_with_its_code_and_clears(code: int) -> None:
    abi = Engine(code=code)
    with pytest.raises(EngineError, match=f"generate failed with code {code}") as caught:
        run(abi, token_tree_payload=PAYLOAD)
    assert caught.value.code == code
    assert abi.names == ["prefill", "set", "generate", "clear"]


def test_a_failed_generate_is_not_told_as_done() -> None:
    steps: list[StreamStep] = []
    with pytest.raises(EngineError):
        run(GrammarEngine([(1, "a", False)], code=1), on_step=steps.append)
    assert [step.done for step in steps] == [False]


def test_a_generate_that_raises_clears() -> None:
    abi = RaisingEngine()
    with pytest.raises(OSError, match="the library crashed"):
        run(abi, token_tree_payload=PAYLOAD)
    assert abi.names == ["prefill", "set", "generate", "clear"]


def test_a_set_that_raises_clears_and_nothing_is_generated() -> None:
    abi = Engine()
    setattr(abi, SET, Mock(side_effect=OSError("no")))
    with pytest.raises(OSError, match="no"):
        run(abi, token_tree_payload=PAYLOAD)
    assert abi.names == ["prefill", "clear"]


@pytest.mark.parametrize("callback", ["on_step", "on_text_chunk"])
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("engine", [Engine, DeafEngine])
def test_a_callback_that_raises_ends_it_and_clears(callback: str, error: BaseException, engine: type[Engine]) -> None:
    abi = engine([(1, "a", False), (2, "b", False), (3, "c", True)])
    spy = Mock(side_effect=[None, error])
    with pytest.raises(type(error)) as caught:
        run(abi, token_tree_payload=PAYLOAD, **{callback: spy})
    assert caught.value is error
    assert spy.call_count == 2
    assert [name for name in abi.names if name != "unheard"] == ["prefill", "set", "generate", "clear"]


def test_the_callbacks_own_error_wins_over_the_code_of_an_engine_that_it_stopped() -> None:
    abi = DeafEngine(code=-9)
    with pytest.raises(ZeroDivisionError):
        run(abi, token_tree_payload=PAYLOAD, on_step=Mock(side_effect=ZeroDivisionError))
    assert abi.names[-1] == "clear"


def test_a_callback_that_raises_in_the_last_step_clears() -> None:
    abi = Engine([(1, "a", False)])
    with pytest.raises(ZeroDivisionError):
        run(abi, token_tree_payload=PAYLOAD, on_step=Mock(side_effect=[None, ZeroDivisionError]))
    assert abi.names[-1] == "clear"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"prompt_tokens": "hello"}, TypeError, "token ids, got str"),
        ({"prompt_tokens": b"hello"}, TypeError, "token ids, got bytes"),
        ({"prompt_tokens": [1.5]}, TypeError, "float"),
        ({"max_tokens": 0}, ValueError, "at least 1, got 0"),
        ({"max_tokens": 1.5}, TypeError, "float"),
        ({"token_tree_mode": 2}, ValueError, "mode must be"),
        ({"token_tree_mode": True}, ValueError, "mode must be"),
        ({"token_tree_payload": "{"}, PayloadError, "Invalid JSON"),
        ({"token_tree_payload": json.loads(COMPACT)}, TypeError, "got dict"),
    ],
)
def test_bad_arguments_are_refused_before_the_engine_is_asked(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    abi = Engine()
    with pytest.raises(error, match=message):
        run(abi, **{"token_tree_payload": PAYLOAD, **settings})
    assert abi.calls == []


@pytest.mark.parametrize("text", [None, 5, bytearray(b"a")])
def test_a_piece_that_is_neither_str_nor_bytes_is_a_type_error(text: Any) -> None:
    with pytest.raises(TypeError, match="token_text must be str or bytes"):
        run(GrammarEngine([(1, text, True)]))


# --- text and steps ----------------------------------------------------------------------------


def test_the_result_and_its_steps() -> None:
    steps: list[StreamStep] = []
    result = run(Engine(), on_step=steps.append)
    assert steps == [StreamStep((100,), "TH", False), StreamStep((101,), "INK", True)]
    assert (result.text, result.tokens) == ("THINK", (100, 101))
    assert result.seconds > 0
    assert result.tokens_per_second == pytest.approx(2 / result.seconds)
    assert json.loads(json.dumps(result.to_dict())) == {
        "text": "THINK",
        "tokens": [100, 101],
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
    }


@pytest.mark.parametrize(("times", "seconds", "rate"), [([10.0, 14.0], 4.0, 0.5), ([10.0, 10.0], 0.0, 0.0)])
def test_tokens_per_second(times: list[float], seconds: float, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trie_sampler.handle.time", Mock(perf_counter=Mock(side_effect=times)))
    result = run(Engine())
    assert (result.seconds, result.tokens_per_second) == (seconds, rate)


STREAMS: dict[str, tuple[Pieces, str, tuple[int, ...], list[StreamStep]]] = {
    "a character in three bytes": (
        [(1, b"a\xe6", False), (2, b"\x97", False), (3, b"\xa5b", True)],
        "a日b",
        (1, 2, 3),
        [StreamStep((1,), "a", False), StreamStep((2,), "", False), StreamStep((3,), "日b", True)],
    ),
    "a character that stays cut": (
        [(1, b"a\xe6\x97", True)],
        "a",
        (1,),
        [StreamStep((1,), "a", True)],
    ),
    "cut, and the end unsaid": (
        [(1, b"a\xe6\x97", False)],
        "a",
        (1,),
        [StreamStep((1,), "a", False), StreamStep((), "", True)],
    ),
    "a text behind a cut character": (
        [(1, b"\xe6", False), (2, "x", False), (3, b"\x97\xa5y", True)],
        "xy",
        (1, 2, 3),
        [StreamStep((1,), "", False), StreamStep((2,), "x", False), StreamStep((3,), "y", True)],
    ),
    "two surrogates": (
        [(1, "a\ud83d", False), (2, "\ude42b", True)],
        "a🙂b",
        (1, 2),
        [StreamStep((1,), "a", False), StreamStep((2,), "🙂b", True)],
    ),
    "lone surrogates": (
        [(1, "a\ude42b", False), (2, "\ud83d", True)],
        "ab",
        (1, 2),
        [StreamStep((1,), "ab", False), StreamStep((2,), "", True)],
    ),
    "an end that is no token": (
        [(1, "a", False), (-1, "", True)],
        "a",
        (1,),
        [StreamStep((1,), "a", False), StreamStep((), "", True)],
    ),
    "an end that is not told": (
        [(1, "a", False)],
        "a",
        (1,),
        [StreamStep((1,), "a", False), StreamStep((), "", True)],
    ),
    "nothing": ([], "", (), [StreamStep((), "", True)]),
    "a call that says nothing": ([(-1, "", False), (1, "a", True)], "a", (1,), [StreamStep((1,), "a", True)]),
    "more after the end": ([(1, "a", True), (2, "b", False)], "a", (1,), [StreamStep((1,), "a", True)]),
}


@pytest.mark.parametrize(("pieces", "text", "tokens", "ref"), STREAMS.values(), ids=STREAMS)
def test_streams(pieces: Pieces, text: str, tokens: tuple[int, ...], ref: list[StreamStep]) -> None:
    steps: list[StreamStep] = []
    chunks: list[str] = []
    result = run(GrammarEngine(pieces), on_step=steps.append, on_text_chunk=chunks.append)
    assert (result.text, result.tokens) == (text, tokens)
    assert steps == ref
    assert chunks == [step.text for step in ref if step.text]


@given(st.text(), st.data())
def test_text_is_whole_however_its_bytes_are_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    parts = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    steps: list[StreamStep] = []
    result = run(GrammarEngine([(5, part, i == len(parts) - 1) for i, part in enumerate(parts)]), on_step=steps.append)
    assert result.text == text == "".join(step.text for step in steps)
    assert len(result.tokens) == len(parts)


# --- the C names over our sessions -------------------------------------------------------------


@pytest.fixture
def payload(tiny: Llama) -> TokenTreePayload:
    leaves = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT).leaves()
    sequences = tuple(TokenSequence(name=name, tokens=tokens) for name, tokens in leaves)
    return TokenTreePayload(model_id="tiny", descriptors=(TokenTreeDescriptor(path="action", leaves=sequences),))


def in_buffer(raw: bytes) -> Any:
    return ctypes.create_string_buffer(raw, len(raw) + 9)


BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytes and a rest": lambda raw: raw + b"} no JSON",
    "bytearray": bytearray,
    "memoryview": memoryview,
    "a part of a memoryview": lambda raw: memoryview(b"xx" + raw + b"yy")[2:],
    "every second byte": lambda raw: memoryview(bytes(byte for pair in zip(raw, raw, strict=True) for byte in pair))[
        ::2
    ],
    "ctypes buffer": in_buffer,
    "ctypes bytes": lambda raw: (ctypes.c_ubyte * len(raw)).from_buffer_copy(raw),
}


class TestTheCNames:
    @pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
    def test_set_constrains_as_the_sessions_own_method(
        self, tiny: Llama, payload: TokenTreePayload, make: Callable[[bytes], Any]
    ) -> None:
        raw = payload.to_json().encode()
        with StreamSession.open(tiny) as session:
            session.prefill(PROMPT)
            session.set_token_trie(payload)
            ref = session.generate()
            session.prefill(PROMPT)
            eliza_inference_clear_token_trie(session)
            assert not session.has_token_trie
            eliza_inference_set_token_trie(session, make(raw), len(raw), 0)
            assert session.has_token_trie
            comp = session.generate()
        assert comp.choice is not None
        assert comp.choice.name in CHOICES
        assert (comp.text, comp.tokens) == (ref.text, ref.tokens)

    def test_mode_1_samples(self, tiny: Llama, payload: TokenTreePayload) -> None:
        raw = payload.to_json().encode()
        with StreamSession.open(tiny) as session:
            session.prefill(PROMPT)
            session.set_token_trie(payload, "sampled")
            ref = [session.generate(temperature=50.0, seed=seed).text for seed in range(8)]
            session.prefill(PROMPT)
            eliza_inference_set_token_trie(session, raw, len(raw), 1)
            comp = [session.generate(temperature=50.0, seed=seed).text for seed in range(8)]
        assert comp == ref
        assert len(set(comp)) > 1

    def test_any_error_leaves_the_earlier_trie(self, tiny: Llama, payload: TokenTreePayload) -> None:
        raw = payload.to_json().encode()
        other = '{"modelId":"m","descriptors":[%s]}'
        leaf = '{"path":"%s","leaves":[{"name":"F","tokens":[%d]}]}'
        several = (other % f"{leaf % ('a', 300)},{leaf % ('b', 300)}").encode()
        foreign = (other % leaf % ("a", 10**6)).encode()
        empty = (other % "").encode()
        too_wide = (ctypes.c_int32 * 4)()
        refused: list[tuple[Any, Any, Any, type[Exception], str]] = [
            (raw, -1, 0, ValueError, f"from 0 to the buffer's {len(raw)} bytes, got -1"),
            (raw, len(raw) + 1, 0, ValueError, f"got {len(raw) + 1}"),
            (in_buffer(raw), len(raw) + 10, 0, ValueError, f"got {len(raw) + 10}"),
            (raw, float(len(raw)), 0, TypeError, "float"),
            (raw.decode(), len(raw), 0, TypeError, "must be bytes or a buffer of bytes, got str"),
            (ctypes.c_char_p(raw), len(raw), 0, TypeError, "got c_char_p"),
            (None, 0, 0, TypeError, "got NoneType"),
            (too_wide, 4, 0, TypeError, "flat buffer of bytes"),
            (memoryview(bytes(4)).cast("B", (2, 2)), 4, 0, TypeError, "flat buffer of bytes"),
            (raw, 0, 0, PayloadError, "Invalid JSON"),
            (raw, len(raw) - 1, 0, PayloadError, "Invalid JSON"),
            # The terminator is no part of the text.
            (in_buffer(raw), len(raw) + 1, 0, PayloadError, "Invalid JSON"),
            (b"\xff" + raw, len(raw) + 1, 0, PayloadError, "Invalid JSON"),
            (raw, len(raw), 2, ValueError, "mode must be"),
            (empty, len(empty), 0, EmptyTrieError, "no descriptors"),
            (foreign, len(foreign), 0, VocabMismatchError, "1000000"),
            (several, len(several), 0, UnknownPathError, "which path"),
        ]
        with StreamSession.open(tiny) as session:
            session.prefill(PROMPT)
            eliza_inference_set_token_trie(session, raw, len(raw), 0)
            for buffer, length, mode, error, message in refused:
                with pytest.raises(error, match=message):
                    eliza_inference_set_token_trie(session, buffer, length, mode)
                assert session.has_token_trie
            assert session.generate().text.strip() in CHOICES

    def test_a_closed_session_is_refused(self, tiny: Llama, payload: TokenTreePayload) -> None:
        raw = payload.to_json().encode()
        session = StreamSession.open(tiny)
        session.close()
        with pytest.raises(EngineError, match="closed"):
            eliza_inference_set_token_trie(session, raw, len(raw), 0)
        with pytest.raises(EngineError, match="closed"):
            eliza_inference_clear_token_trie(session)

    def test_a_session_that_generates_is_refused_and_keeps_its_trie(
        self, tiny: Llama, payload: TokenTreePayload
    ) -> None:
        raw = payload.to_json().encode()

        def meddle(_step: StreamStep) -> None:
            with pytest.raises(EngineError, match="generating"):
                eliza_inference_set_token_trie(session, raw, len(raw), 0)
            with pytest.raises(EngineError, match="generating"):
                eliza_inference_clear_token_trie(session)

        with StreamSession.open(tiny) as session:
            session.prefill(PROMPT)
            eliza_inference_set_token_trie(session, raw, len(raw), 0)
            session.generate(on_step=meddle)
            assert session.has_token_trie

    def test_clear_without_a_trie_does_nothing(self, tiny: Llama) -> None:
        with StreamSession.open(tiny) as session:
            eliza_inference_clear_token_trie(session)
            assert not session.has_token_trie


# --- our own session as a foreign engine -------------------------------------------------------


class OwnEngine:
    """A session behind the reference's methods; its pieces are the bytes of single tokens."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm

    def eliza_inference_llm_stream_prefill(
        self, handle: StreamSession, prompt_tokens: Sequence[int], slot_id: int
    ) -> int:
        return handle.prefill(list(prompt_tokens), slot_id)

    def eliza_inference_llm_stream_generate(
        self, handle: StreamSession, max_tokens: int, temperature: float, top_p: float, on_token: OnToken
    ) -> int:
        comp = handle.generate(max_tokens, temperature, top_p, seed=1)
        for i, token in enumerate(comp.tokens):
            # The tokens before it keep llama.cpp from leaving out a first space.
            piece = self._llm.detokenize([token], prev_tokens=[*handle.tokens])
            on_token(token, piece, i == len(comp.tokens) - 1)
        return 0

    def eliza_inference_set_token_trie(self, handle: StreamSession, payload_json: str, mode: int) -> None:
        raw = payload_json.encode()
        eliza_inference_set_token_trie(handle, raw, len(raw), mode)

    def eliza_inference_clear_token_trie(self, handle: StreamSession) -> None:
        eliza_inference_clear_token_trie(handle)


@pytest.mark.parametrize("mode", [0, 1])
def test_a_session_behind_the_abi_generates_what_it_does_itself(
    tiny: Llama, payload: TokenTreePayload, mode: int
) -> None:
    prompt = [1, 300, 301, 302]
    with StreamSession.open(tiny) as session:
        session.prefill(prompt)
        ref = session.generate_with_usage(32, seed=1, token_tree_payload=payload, token_tree_mode=mode)
        comp = run_generation(
            OwnEngine(tiny),
            session,
            prompt_tokens=prompt,
            max_tokens=32,
            token_tree_payload=payload,
            token_tree_mode=mode,
        )
        assert not session.has_token_trie
    assert (comp.text, comp.tokens) == (ref.text, ref.tokens)
    assert comp.text.strip() in CHOICES


def test_a_session_behind_the_abi_writes_freely_without_a_payload(tiny: Llama, payload: TokenTreePayload) -> None:
    with StreamSession.open(tiny) as session:
        session.set_token_trie(payload)
        comp = run_generation(OwnEngine(tiny), session, prompt_tokens=[1, 300], max_tokens=12)
        session.prefill([1, 300])
        ref = session.generate(12, seed=1)
    assert comp.tokens == ref.tokens
    assert comp.text == ref.text


# --- the mobile binding ------------------------------------------------------------------------


def make_binding(*optional: str) -> Mock:
    binding = Mock(spec=["llmStreamPrefill", "llmStreamGenerate", *optional])
    binding.llmStreamPrefill.return_value = 3

    def generate(args: dict[str, Any]) -> int:
        args["onToken"](100, b"TH", False)
        args["onToken"](101, b"INK", True)
        return 0

    binding.llmStreamGenerate.side_effect = generate
    return binding


class TestMobileBinding:
    def test_every_method_is_given_one_object(self) -> None:
        binding = make_binding("llmStreamSetTokenTrie", "llmStreamClearTokenTrie")
        result = run(MobileBinding(binding), token_tree_payload=PAYLOAD, token_tree_mode=1, slot_id=0)
        assert result.text == "THINK"
        assert [(name, args) for name, args, _ in binding.method_calls] == [
            ("llmStreamPrefill", ({"stream": HANDLE, "promptTokens": [1, 2, 3], "slotId": 0},)),
            ("llmStreamSetTokenTrie", ({"stream": HANDLE, "triePayloadJson": COMPACT, "mode": 1},)),
            (
                "llmStreamGenerate",
                ({"stream": HANDLE, "maxTokens": 10, "temperature": 0.8, "topP": 0.95, "onToken": ANY},),
            ),
            ("llmStreamClearTokenTrie", ({"stream": HANDLE},)),
        ]

    @pytest.mark.parametrize("has_set", [False, True])
    @pytest.mark.parametrize("has_clear", [False, True])
    def test_hasattr_tells_the_truth(self, has_set: bool, has_clear: bool) -> None:
        optional = ["llmStreamSetTokenTrie"] * has_set + ["llmStreamClearTokenTrie"] * has_clear
        abi = MobileBinding(make_binding(*optional))
        assert hasattr(abi, SET) is has_set
        assert hasattr(abi, CLEAR) is has_clear
        if has_set and has_clear:
            assert run(abi, token_tree_payload=PAYLOAD).text == "THINK"
        else:
            with pytest.raises(EngineError, match="no token trie"):
                run(abi, token_tree_payload=PAYLOAD)
            with pytest.warns(TrieSamplerWarning, match="no token trie"):
                assert run(abi, token_tree_payload=PAYLOAD, grammar=True).text == "THINK"

    def test_a_method_that_is_none_is_lacking(self) -> None:
        binding = make_binding("llmStreamSetTokenTrie", "llmStreamClearTokenTrie")
        binding.llmStreamSetTokenTrie = None
        abi = MobileBinding(binding)
        assert not hasattr(abi, SET)
        assert hasattr(abi, CLEAR)

    def test_the_codes_of_the_binding_come_out(self) -> None:
        binding = make_binding("llmStreamSetTokenTrie", "llmStreamClearTokenTrie")
        binding.llmStreamGenerate.side_effect = [-4]
        with pytest.raises(EngineError, match="generate failed") as caught:
            run(MobileBinding(binding), token_tree_payload=PAYLOAD)
        assert caught.value.code == -4
        binding.llmStreamClearTokenTrie.assert_called_once()
        binding.llmStreamPrefill.return_value = -2
        with pytest.raises(EngineError, match="prefill failed") as caught:
            run(MobileBinding(binding))
        assert caught.value.code == -2

    def test_other_names_are_no_attributes(self) -> None:
        abi = MobileBinding(make_binding())
        with pytest.raises(AttributeError, match="'MobileBinding' object has no attribute 'llmStreamPrefill'"):
            _ = abi.llmStreamPrefill
        with pytest.raises(AttributeError, match="the binding has no llmStreamSetTokenTrie"):
            _ = abi.eliza_inference_set_token_trie
        # A copy asks for attributes before there are any.
        assert not hasattr(copy.copy(abi), SET)


# --- several things go wrong ------------------------------------------------------------------------------------------


class UnclearableEngine(Engine):
    """One that cannot clear."""

    def eliza_inference_clear_token_trie(self, handle: Any) -> None:
        super().eliza_inference_clear_token_trie(handle)
        raise OSError("cannot clear")


class UnclearableRaisingEngine(UnclearableEngine, RaisingEngine):
    """One that crashes and cannot clear."""


class WrappingEngine(Engine):
    """One that raises its own for what a callback raises."""

    def say(self, on_token: OnToken, *piece: Any) -> None:
        try:
            on_token(*piece)
        except Exception as error:
            raise OSError("a callback failed") from error


def test_the_first_error_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="the library crashed"):
        run(UnclearableRaisingEngine(), token_tree_payload=PAYLOAD)
    assert "could not be cleared" in caplog.text
    with pytest.raises(OSError, match="cannot clear"):
        run(UnclearableEngine(), token_tree_payload=PAYLOAD)


def test_a_callbacks_error_comes_out_of_an_engine_that_wraps_it() -> None:
    def on_step(_step: Any) -> None:
        raise LookupError("mine")

    engine = WrappingEngine()
    with pytest.raises(LookupError, match="mine") as caught:
        run(engine, token_tree_payload=PAYLOAD, on_step=on_step)
    assert isinstance(caught.value.__cause__, OSError)
    assert engine.calls[-1] == ("clear", HANDLE)


@pytest.mark.parametrize("abi", [None, 5, object(), Mock(spec=[PREFILL])])
def test_no_engine(abi: Any) -> None:
    with pytest.raises(TypeError, match="an engine needs"):
        run(abi)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"temperature": "x"}, TypeError),
        ({"top_p": float("nan")}, ValueError),
        ({"prompt_tokens": [1, -1]}, ValueError),
        ({"on_step": 5}, TypeError),
        ({"on_text_chunk": "x"}, TypeError),
    ],
)
def test_arguments_are_refused_before_the_engine_is_asked(settings: dict[str, Any], error: type[Exception]) -> None:
    engine = Engine()
    with pytest.raises(error):
        run(engine, **settings)
    assert engine.calls == []


@pytest.mark.parametrize("name", ["prefill", "generate"])
def test_a_code_that_is_none(name: str) -> None:
    engine: Any = Engine(prefilled=None) if name == "prefill" else Engine(code=None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=f"{name} gave None instead of a code"):
        run(engine)
