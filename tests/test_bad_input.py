"""The table of bad input (design, section 11), row by row, at the doors there are: payload, trie, constraint, choose.

Each row says what is asked, the error and the words its message must have. Every refusal leaves the object, and the
model, as it was: the same good call gives the same answer before and after.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from models import TINY_EOS, TINY_EOT, TINY_START
from spies import decodes, reason_of, text_of

from trie_sampler import (
    EmptyTrieError,
    EngineError,
    PayloadError,
    TokenTreePayload,
    TokenTrie,
    TrieCursor,
    TrieLogitsProcessor,
    TrieSamplerError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
    choose,
)

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPT = "action kind:"
CHOICES = ("STOP", "PLAY MUSIC", "redwood")


@contextlib.contextmanager
def unchanged(llm: Llama, constraint: TrieLogitsProcessor | None = None) -> Iterator[None]:
    """The model, and the constraint, answer after the block as they did before; nothing was evaluated inside."""

    def ask() -> tuple[Any, ...]:
        free = text_of(llm.create_completion(PROMPT, temperature=0, max_tokens=6))
        if constraint is None:
            return free, choose(llm, PROMPT, CHOICES).tokens
        llm.create_completion(PROMPT, logits_processor=constraint, max_tokens=16)
        return free, constraint.result.tokens, list(constraint), constraint.max_tokens

    ref = ask()
    with decodes(llm) as sizes:
        yield
    assert sizes == [], "refused before anything was evaluated"
    assert "detokenize" not in vars(llm)
    assert ask() == ref


def descriptor(leaves: Any, path: Any = "action") -> dict[str, Any]:
    return {"path": path, "leaves": leaves}


def payload(*descriptors: Any) -> str:
    return json.dumps({"modelId": "m", "descriptors": list(descriptors)})


GOOD = {"name": "good", "tokens": [300]}


def leaf(*tokens: Any, name: str = "bad") -> dict[str, Any]:
    return {"name": name, "tokens": list(tokens)}


# --- payloads ---------------------------------------------------------------------------------------------------------

# What, the payload, error, words of the message.
PAYLOADS: list[tuple[str, str | bytes, type[Exception], str]] = [
    ("not JSON", "{", PayloadError, "JSON"),
    ("no text", "", PayloadError, "JSON"),
    ("not UTF-8", b'{"modelId": "\xff"}', PayloadError, "(?i)json|utf"),
    ("a list", "[]", PayloadError, "list"),
    ("no modelId", json.dumps({"descriptors": []}), PayloadError, "modelId"),
    ("leaves that are no list", payload(descriptor(5)), PayloadError, r"descriptors\[0\].leaves"),
    ("no tokens", payload(descriptor([{"name": "a"}])), PayloadError, r"descriptors\[0\].leaves\[0\].tokens"),
    (
        "a float id",
        payload(descriptor([GOOD, leaf(1, 2.0)])),
        PayloadError,
        r"descriptors\[0\].leaves\[1\].tokens\[1\]",
    ),
    ("a bool id", payload(descriptor([GOOD, leaf(True)])), PayloadError, r"descriptors\[0\].leaves\[1\].tokens\[0\]"),
    ("a text id", payload(descriptor([leaf("1")])), PayloadError, r"descriptors\[0\].leaves\[0\].tokens\[0\]"),
    ("an id past int32", payload(descriptor([leaf(2**31)])), PayloadError, r"tokens\[0\]"),
    ("two descriptors of one path", payload(descriptor([GOOD]), descriptor([GOOD])), PayloadError, "same path"),
    ("no descriptors", payload(), EmptyTrieError, "no descriptors"),
    ("no leaves", payload(descriptor([])), EmptyTrieError, "'action'"),
    ("only leaves without tokens", payload(descriptor([leaf(), leaf()])), EmptyTrieError, "'action'"),
    ("one of two empty", payload(descriptor([GOOD]), descriptor([], "kind")), EmptyTrieError, "'kind'"),
    ("id < 0", payload(descriptor([GOOD, leaf(300, -1)])), VocabMismatchError, "-1"),
    ("id = V", payload(descriptor([GOOD, leaf(300, 768)])), VocabMismatchError, "'bad': token 768 at index 1.*768"),
    ("id > V", payload(descriptor([leaf(10**6)])), VocabMismatchError, "'bad': token 1000000 at index 0.*768"),
    ("EOS in a leaf", payload(descriptor([leaf(300, TINY_EOS)])), VocabMismatchError, "'bad': token 2 at index 1"),
    ("EOT in a leaf", payload(descriptor([leaf(TINY_EOT, 300)])), VocabMismatchError, "'bad': token 3 at index 0"),
]


@pytest.mark.parametrize(("text", "error", "words"), [row[1:] for row in PAYLOADS], ids=[row[0] for row in PAYLOADS])
def test_payload(tiny: Llama, text: str | bytes, error: type[Exception], words: str) -> None:
    with unchanged(tiny), pytest.raises(error, match=words):
        TrieLogitsProcessor.from_payload(tiny, text)


NAMED = [("id < 0", payload(descriptor([GOOD, leaf(300, -1)])), "'bad'.*-1.*index 1")]


@pytest.mark.parametrize(("text", "words"), [row[1:] for row in NAMED], ids=[row[0] for row in NAMED])
def test_refused_id_is_named_with_leaf_and_index(tiny: Llama, text: str, words: str) -> None:
    """Where the id is an int32 but no id of any vocabulary, too."""
    with pytest.raises(VocabMismatchError, match=words):
        TrieLogitsProcessor.from_payload(tiny, text)


def test_unknown_keys_in_a_payload(tiny: Llama) -> None:
    document = json.loads(payload(descriptor([leaf(420, name="STOP")])))
    document["version"] = 2
    document["descriptors"][0]["leaves"][0]["score"] = 1.0
    with pytest.warns(TrieSamplerWarning, match="version") as caught:
        constraint = TrieLogitsProcessor.from_payload(tiny, json.dumps(document))
    assert len(caught) == 1
    assert "score" in str(caught[0].message)
    tiny.create_completion(PROMPT, logits_processor=constraint)
    assert constraint.result.name == "STOP"


def test_a_leaf_without_tokens_among_good_ones(tiny: Llama) -> None:
    with pytest.warns(TrieSamplerWarning, match="bad") as caught:
        constraint = TrieLogitsProcessor.from_payload(tiny, payload(descriptor([leaf(420, name="STOP"), leaf()])))
    assert len(caught) == 1
    tiny.create_completion(PROMPT, logits_processor=constraint)
    assert constraint.result.name == "STOP"


def test_payload_of_another_model(tiny: Llama) -> None:
    text = payload(descriptor([leaf(420, name="STOP"), leaf(395, name="HALT"), leaf(483, name="GO")]))
    with pytest.warns(TrieSamplerWarning, match=r"'HALT' is spelled 'PLAY' here, 'GO' is spelled 'red'") as caught:
        constraint = TrieLogitsProcessor.from_payload(tiny, text)
    assert len(caught) == 1
    with unchanged(tiny, constraint), pytest.raises(VocabMismatchError, match="HALT"):
        TrieLogitsProcessor.from_payload(tiny, text, strict=True)


@pytest.mark.parametrize("thing", [None, 5, {"modelId": "m"}, ["x"]], ids=repr)
def test_something_that_is_no_payload(tiny: Llama, thing: Any) -> None:
    with unchanged(tiny), pytest.raises(TypeError):
        TrieLogitsProcessor.from_payload(tiny, thing)


# --- choices and settings ---------------------------------------------------------------------------------------------

BAD_CHOICES: list[tuple[str, Any, type[Exception], str]] = [
    ("no choices", [], EmptyTrieError, "empty"),
    ("no choices in a dict", {}, EmptyTrieError, "empty"),
    ("one text", "yes", TypeError, "list of strings"),
    ("a number", 3, TypeError, "list of strings"),
    ("numbers", [1, 2], TypeError, "string"),
    ("a text that is no Unicode", ["ok", "\ud800"], ValueError, "Unicode"),
    ("a trie of larger ids", TokenTrie.from_sequences([("a", [768])]), VocabMismatchError, "'a': token 768 at index 0"),
    (
        "a trie with an end id",
        TokenTrie.from_sequences([("a", [300, 2])]),
        VocabMismatchError,
        "'a': token 2 at index 1",
    ),
]


@pytest.mark.parametrize("door", ["constraint", "choose"])
@pytest.mark.parametrize(
    ("choices", "error", "words"), [row[1:] for row in BAD_CHOICES], ids=[row[0] for row in BAD_CHOICES]
)
def test_choices(tiny: Llama, door: str, choices: Any, error: type[Exception], words: str) -> None:
    doors: dict[str, Callable[[], Any]] = {
        "choose": lambda: choose(tiny, PROMPT, choices),
        "constraint": lambda: TrieLogitsProcessor.from_choices(tiny, choices),
    }
    with unchanged(tiny), pytest.raises(error, match=words):
        doors[door]()


SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "argmax"}, ValueError, "greedy.*sampled.*argmax"),
    ({"mode": 2}, ValueError, "2"),
    ({"mode": -1}, ValueError, "-1"),
    ({"mode": True}, ValueError, "True"),
    ({"mode": None}, ValueError, "None"),
    ({"mode": "sampled", "temperature": -0.1}, ValueError, "temperature"),
    ({"mode": "sampled", "temperature": float("inf")}, ValueError, "temperature"),
    ({"mode": "sampled", "top_k": -1}, ValueError, "top_k"),
    ({"mode": "sampled", "top_k": 1.5}, ValueError, "top_k"),
    ({"mode": "sampled", "top_p": 1.1}, ValueError, "top_p"),
    ({"mode": "sampled", "min_p": -0.1}, ValueError, "min_p"),
    ({"on_end": "stop"}, ValueError, "on_end"),
    ({"on_end": "release"}, ValueError, "on_end"),
    ({"on_fault": "ignore"}, ValueError, "on_fault"),
    ({"lead": "\t"}, ValueError, "lead"),
    ({"temprature": 1.0}, TypeError, "temprature"),
    ({"max_tokens": 5}, TypeError, "max_tokens"),
]


@pytest.mark.parametrize("source", ["choices", "payload", "trie"])
@pytest.mark.parametrize(("settings", "error", "words"), SETTINGS, ids=[str(row[0]) for row in SETTINGS])
def test_settings(tiny: Llama, source: str, settings: dict[str, Any], error: type[Exception], words: str) -> None:
    make: dict[str, Callable[[], Any]] = {
        "choices": lambda: TrieLogitsProcessor.from_choices(tiny, CHOICES, **settings),
        "payload": lambda: TrieLogitsProcessor.from_payload(
            tiny, payload(descriptor([leaf(420, name="STOP")])), **settings
        ),
        "trie": lambda: TrieLogitsProcessor.from_choices(tiny, TokenTrie.from_sequences([("STOP", [420])]), **settings),
    }
    if source == "payload" and "lead" in settings:
        error = TypeError  # a payload's leaves are tokens already
    with unchanged(tiny), pytest.raises(error, match=words):
        make[source]()


def test_something_that_is_no_llama() -> None:
    for llm in (None, "model.gguf", object()):
        for make in (
            lambda llm: TrieLogitsProcessor.from_choices(llm, CHOICES),
            lambda llm: TrieLogitsProcessor.from_payload(llm, payload(descriptor([GOOD]))),
            lambda llm: TokenTrie.from_choices(llm, CHOICES),
            lambda llm: choose(llm, PROMPT, CHOICES),
        ):
            with pytest.raises(TypeError, match="Llama"):
                make(llm)


def test_control_text_in_a_choice_is_plain_text(tiny: Llama) -> None:
    """The default: a choice spelled like a control token is spelled out, never one id."""
    for text in ("<end_of_turn>", "</s>", "a<s>b"):
        choice = choose(tiny, PROMPT, [text])
        assert choice.text == text or choice.text == " " + text
        assert not {TINY_EOS, TINY_EOT, TINY_START, 1}.intersection(choice.tokens)


def test_mode_of_choose_is_called_method(tiny: Llama) -> None:
    for settings, error in (({"method": "argmax"}, ValueError), ({"mode": "greedy"}, TypeError), ({"x": 1}, TypeError)):
        with unchanged(tiny), pytest.raises(error):
            choose(tiny, PROMPT, CHOICES, **settings)


# --- paths ------------------------------------------------------------------------------------------------------------

TWO = payload(descriptor([leaf(420, name="STOP")]), descriptor([leaf(483, name="red")], "kind"))


def test_several_descriptors_and_no_path(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_payload(tiny, TWO)
    free = tiny.create_completion(PROMPT, temperature=0, max_tokens=6)
    assert text_of(tiny.create_completion(PROMPT, logits_processor=constraint, temperature=0, max_tokens=6)) == text_of(
        free
    )
    with pytest.raises(TrieSamplerError, match="activate"):
        _ = constraint.result
    for path, name in (("kind", "red"), ("action", "STOP")):
        constraint.activate(path)
        with unchanged(tiny, constraint):
            for wrong in ("nope", "", None):
                with pytest.raises(UnknownPathError, match=r"'action'.*'kind'"):
                    constraint.activate(wrong)
        assert constraint.result.name == name


def test_unknown_path(tiny: Llama) -> None:
    with unchanged(tiny):
        with pytest.raises(UnknownPathError, match=r"'nope'.*'action'.*'kind'"):
            TrieLogitsProcessor.from_payload(tiny, TWO, "nope")
        with pytest.raises(UnknownPathError):
            TrieLogitsProcessor.from_choices(tiny, TokenTrie.from_sequences([("STOP", [420])]), path="nope")
        with pytest.raises(UnknownPathError):
            TrieLogitsProcessor.from_choices(tiny, CHOICES, path="nope")
        with pytest.raises(UnknownPathError):
            TrieCursor(TokenTrie.from_payload(TWO), path="nope")


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_max_tokens_that_is_too_small(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood"], lead="")
    response = tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=2)
    result = constraint.result
    assert (result.complete, result.name, result.value, result.index) == (False, None, None, None)
    assert text_of(response) == result.text
    assert "redwood".startswith(result.text)
    assert reason_of(response) == "length"
    tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=constraint.max_tokens)
    assert constraint.result.name == "redwood"


@pytest.mark.parametrize("n_ctx", [32, 256, 300])
def test_prompt_and_choice_past_the_context(tiny_model_path: Path, n_ctx: int) -> None:
    """``Llama(n_ctx=32)`` has room for 32 tokens, whatever llama.cpp rounds its own context up to."""
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=n_ctx, type_k=0, type_v=0, verbose=False)
    depth = TokenTrie.from_choices(llm, ["redwood"], prompt=[1, 300], lead="").depth
    fits = [1] + [300] * (n_ctx - depth - 1)
    assert choose(llm, fits, ["redwood"], lead="").complete
    with unchanged(llm):
        for n_more in (2, 3, depth + 1, 1000):
            with pytest.raises(EngineError, match="n_ctx="):
                choose(llm, fits + [300] * n_more, ["redwood"], lead="")
    constraint = TrieLogitsProcessor.from_choices(llm, ["redwood"], lead="")
    prompt = [1] + [300] * (n_ctx - 3)
    if llm.n_ctx() == n_ctx:
        # The host shortens max_tokens without a word; the result does not call that complete.
        llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
        assert (constraint.result.complete, constraint.result.name) == (False, None)
    else:
        # The host goes by the rounded size, and past the end of its own buffer.
        with pytest.raises(EngineError, match=f"n_ctx={n_ctx}"):
            llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
    llm.close()


# --- models and calls -------------------------------------------------------------------------------------------------


def test_empty_prompt_without_bos(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    with unchanged(tiny):
        with monkeypatch.context() as patched:
            patched.setattr("llama_cpp.llama_vocab_bos", lambda _vocab: -1)
            with pytest.raises(TrieSamplerError, match="no BOS"):
                choose(tiny, "", CHOICES)
        with pytest.raises(TrieSamplerError, match="empty"):
            choose(tiny, [], CHOICES)


def test_model_without_an_end_token(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_cpp.llama_vocab_is_eog", lambda _vocab, _token: False)
    with pytest.raises(TrieSamplerError, match="no end-of-generation token"):
        TrieLogitsProcessor.from_choices(tiny, CHOICES)


def test_vocab_only_model(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), vocab_only=True, verbose=False)
    with pytest.raises(TrieSamplerError, match="vocab_only"):
        choose(llm, PROMPT, CHOICES)
    assert TokenTrie.from_choices(llm, CHOICES, prompt=PROMPT).n_leaves == 3
    llm.close()


def test_call_while_a_stream_is_open(tiny_model_path: Path) -> None:
    """The stream that was open hears of it; the call in between, which began anew, is right.

    In a process of its own: the host, left alone, ends the process (GGML_ASSERT(logits != nullptr)).
    """
    program = f"""
from llama_cpp import Llama
from trie_sampler import TrieLogitsProcessor, TrieSamplerError
llm = Llama({str(tiny_model_path)!r}, n_ctx=256, type_k=0, type_v=0, verbose=False)
constraint = TrieLogitsProcessor.from_choices(llm, ["redwood", "redwing"])
def call(**settings):
    return llm.create_completion({PROMPT!r}, logits_processor=constraint, max_tokens=16, **settings)
call()
ref = constraint.result.tokens
stream = call(stream=True)
next(stream)
call()
assert constraint.result.tokens == ref
try:
    list(stream)
except TrieSamplerError as error:
    assert "two streams" in str(error), error
else:
    raise SystemExit("the open stream heard of nothing")
call()
assert constraint.result.tokens == ref
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def test_plain_list_beside_logit_bias(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    tiny.create_completion(PROMPT, logits_processor=[constraint], logit_bias={5: 0.0}, max_tokens=4)
    with pytest.raises(TrieSamplerError, match=r"never called.*logit_bias"):
        _ = constraint.result
    tiny.create_completion(PROMPT, logits_processor=constraint, logit_bias={5: 0.0}, max_tokens=16)
    assert constraint.result.name in CHOICES


def test_payload_model_is_taken_too(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_payload(
        tiny, TokenTreePayload.from_json(payload(descriptor([leaf(420, name="STOP")])))
    )
    tiny.create_completion(PROMPT, logits_processor=constraint)
    assert constraint.result.name == "STOP"
