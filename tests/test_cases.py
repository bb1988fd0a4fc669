"""What users of such tools run into, one case a test, each with its right outcome and its own small table.

Toy cases walk rows of logits that are written down here, with 0 as the end of generation unless said. Cases about a
host run on the tiny model, and on a real one where meaning, or numbers under quantization, are asked for. Cases that
are not here are in the file of what they are about, under the same kind of name.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import logging
import math
import os
import re
import subprocess
import sys
import tracemalloc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import models
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from actions import REQUESTS
from models import TINY_EOG, TINY_UNUSED
from spies import RowSpy, decodes, deltas_of, eog_ids, raw_row, reason_of, text_of

from trie_sampler import (
    Choice,
    EmptyTrieError,
    OffTrieError,
    PayloadError,
    StreamSession,
    TokenTrie,
    TrieCursor,
    TrieLogitsProcessor,
    TrieSamplerError,
    TrieSamplerWarning,
    check_prompt,
    choose,
    cli,
    layout,
    llama_sampler_init_token_trie,
    native_sampling,
    rank,
    token_trie_handle,
)
from trie_sampler.cursor import Sampling, Step
from trie_sampler.llama import sampler as sampler_module
from trie_sampler.llama.decoder import Decoder
from trie_sampler.llama.sampler import n_alive, new_sampler
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens
from trie_sampler.span import walk_span

if TYPE_CHECKING:
    from llama_cpp import Llama

Leaves = list[tuple[str, list[int]]]
Prefix = tuple[int, ...]
Row = npt.NDArray[Any]

NAN, INF = math.nan, math.inf
EOG, FOREIGN = 0, 9
WIDTH = 12
PROMPT = "action kind:"
MESSAGES: Any = [{"role": "user", "content": "action kind"}]
CHOICES = ("STOP", "STOP it now", "PLAY MUSIC", "PLAY VIDEO", "REPLY", "redwood")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc and mprotect")
README = Path(__file__).parents[1] / "README.md"

# Tries made of ids have names that their tokens do not spell, and a random model's text may merge with a choice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:leaves? .*that do(es)? not spell"),
    pytest.mark.filterwarnings("ignore:the prompt ends in"),
]


# --- scripts ----------------------------------------------------------------------------------------------------------


def row_of(probabilities: Mapping[int, float], rest: int = FOREIGN) -> Row:
    """What is missing to 1 is on a token of no leaf."""
    return oracle.row_of(probabilities, WIDTH, rest).astype(np.float32)


def cursor_over(leaves: Leaves, *prefix: int, **settings: Any) -> TrieCursor:
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), **{"eog_ids": [EOG], **settings})
    for token in prefix:
        cursor.accept(token)
    return cursor


def name_after(cursor: TrieCursor, rows: Mapping[Prefix, Row]) -> str | None:
    """The leaf that a cursor's own picks lead to."""
    taken: Prefix = ()
    while not cursor.is_finished and not cursor.must_end:
        token = cursor.pick(rows[taken])
        cursor.accept(token)
        taken = (*taken, token)
    return cursor.leaf_name


def is_forced(cursor: TrieCursor) -> bool:
    return len(cursor.forced_run()) > 0


def complete(llm: Llama, processor: Any, prompt: Any = PROMPT, **settings: Any) -> str:
    settings.setdefault("max_tokens", 32)
    return text_of(llm.create_completion(prompt, logits_processor=processor, **settings))


def free_text(llm: Llama, prompt: Any = PROMPT, n: int = 12) -> str:
    return text_of(llm.create_completion(prompt, temperature=0, max_tokens=n))


@contextlib.contextmanager
def loaded(path: Path, **settings: Any) -> Iterator[Llama]:
    known = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "verbose": False}
    llm = llama_cpp.Llama(str(path), **{**known, **settings})
    try:
        yield llm
    finally:
        llm.close()


def forget(llm: Llama) -> None:
    """Empty the cache, so that a prompt is evaluated in one batch."""
    llm.reset()  # type: ignore[no-untyped-call]


def steer(tokens: Sequence[int]) -> Callable[[Any, Any], Any]:
    """A processor for before the constraint: one call after the other raises the logit of the next of ``tokens``."""
    left = iter(tokens)

    def lift(_ids: Any, scores: Any) -> Any:
        scores[next(left)] += 1000
        return scores

    return lift


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Let a constraint break inside the host's callback."""
    calls = iter(range(1, 1000))
    constrain = TrieCursor.constrain

    def fail(cursor: TrieCursor, row: Any, *, samples: bool) -> Step:
        if next(calls) == step:
            raise error
        return constrain(cursor, row, samples=samples)

    monkeypatch.setattr(TrieCursor, "constrain", fail)


def script_rows(monkeypatch: pytest.MonkeyPatch, n_prompt: int, row_after: Callable[[Prefix], Row]) -> None:
    """Let sessions and ``choose`` see these rows behind a prompt of ``n_prompt`` tokens."""

    def row(decoder: Decoder) -> Row:
        return row_after(tuple(decoder.tokens[n_prompt:]))

    monkeypatch.setattr(Decoder, "row", row)


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of Python a call executes; compiled code has none."""
    n_lines = 0

    def trace(_frame: types.FrameType, event: str, _argument: Any) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return n_lines


def run_program(program: str, *arguments: object) -> Any:
    """What a program, in a process of its own, prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return json.loads(done.stdout)


# --- native samplers over made candidates -----------------------------------------------------------------------------

RECORD = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def apply(sampler: Any, row: Row) -> dict[int, float]:
    """id -> logit of the candidates that a sampler or a chain leaves of a row, in their order."""
    records = np.zeros(len(row), RECORD)
    records["id"], records["logit"] = np.arange(len(row)), row
    data = records.ctypes.data_as(llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(data, len(row), -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    kept = records[: array.size]
    return dict(zip(kept["id"].tolist(), kept["logit"].tolist(), strict=True))


def native_over(leaves: Leaves, *, samples: bool = False, **settings: Any) -> Any:
    cursor = cursor_over(leaves, **settings)
    return new_sampler(cursor, keeps_options=samples)[0]


def chain_of(*samplers: Any) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


@contextlib.contextmanager
def freed(sampler: Any) -> Iterator[Any]:
    try:
        yield sampler
    finally:
        llama_cpp.llama_sampler_free(sampler)


def payload_json(groups: Mapping[str, Leaves]) -> str:
    descriptors = [
        {"path": path, "leaves": [{"name": name, "tokens": tokens} for name, tokens in leaves]}
        for path, leaves in groups.items()
    ]
    return json.dumps({"modelId": "m", "descriptors": descriptors})


# --- one choice begins another ----------------------------------------------------------------------------------------

A_AND_AB: Leaves = [("A", [5]), ("AB", [5, 6])]
A_ROWS = {(): row_of({5: 0.7}), (5,): row_of({6: 0.4, EOG: 0.001})}


def test_case_01_a_choice_that_begins_another() -> None:
    assert name_after(cursor_over(A_AND_AB), A_ROWS) == "A"
    assert oracle.end_mass(A_ROWS[5,], [6]) == pytest.approx(0.6, abs=1e-6)
    assert name_after(cursor_over(A_AND_AB, on_end="eog"), A_ROWS) == "AB"
    cursor = cursor_over(A_AND_AB, 5, sampling=Sampling(seed=1))
    assert cursor.trie.children(cursor.node).tolist() == [6]
    assert not is_forced(cursor), "one child, but the choice may end here"
    n = 4000
    n_longer = sum(cursor.sample(A_ROWS[5,]) == 6 for _ in range(n))
    assert abs(n_longer - 0.4 * n) < 3 * math.sqrt(n * 0.4 * 0.6)


def test_case_01_five_and_fifty_on_real_models(llm: Llama) -> None:
    prompt = "How many fingers on one hand? A:"
    for choices in (["5", "50"], ["50", "5"]):
        assert choose(llm, prompt, choices).name == "5"
    constraint = TrieLogitsProcessor.from_choices(llm, ["5", "50"])
    complete(llm, constraint, prompt)
    assert constraint.result.name == "5"


def test_case_03_numbers_up_to_99999() -> None:
    digit = {str(d): 10 + d for d in range(10)}
    paths = {str(i): [digit[d] for d in str(i)] for i in range(100_000)}
    trie = TokenTrie.from_sequences(list(paths.items()))
    assert trie.n_leaves == 100_000
    assert not trie.collisions
    for name, path in paths.items():
        node = trie.root
        for token in path:
            node = trie.step(node, token)
        assert trie.leaf_name(node) == name
    cursor = TrieCursor(trie, eog_ids=[EOG])
    for n_digits, name in enumerate(["1", "10", "100", "1000"], start=1):
        cursor.accept(paths["1000"][n_digits - 1])
        assert (cursor.leaf_name, cursor.may_end, cursor.must_end) == (name, True, False)
        assert cursor.allowed().tolist() == [EOG, *digit.values()]
    cursor.accept(digit["7"])
    assert (cursor.leaf_name, cursor.must_end) == ("10007", True)
    assert cursor.allowed().tolist() == [EOG]
    zero = TrieCursor(trie, eog_ids=[EOG])
    zero.accept(digit["0"])
    assert zero.must_end, "no number has a 0 in front"


def test_case_04_may_end_must_end_and_forced_are_three_things() -> None:
    leaves: Leaves = [("..1", [7, 1]), ("..11", [7, 1, 1])]
    table = {
        (): (False, False, True, [7]),
        (7,): (False, False, True, [1]),
        (7, 1): (True, False, False, [EOG, 1]),
        (7, 1, 1): (True, True, False, [EOG]),
    }
    for prefix, (may_end, must_end, forced, allowed) in table.items():
        cursor = cursor_over(leaves, *prefix)
        assert (cursor.may_end, cursor.must_end, is_forced(cursor)) == (may_end, must_end, forced), prefix
        assert cursor.allowed().tolist() == allowed
    with pytest.raises(OffTrieError):
        cursor_over(leaves, 7, 1, 1, 1)
    assert cursor_over(leaves).forced_run().tolist() == [7, 1], "up to where the choice may end"


@pytest.mark.parametrize(
    "settings", [{"on_end": "release"}, {"on_end": "eog", "eog_ids": []}, {"on_end": "mass", "eog_ids": []}], ids=str
)
def test_case_06_a_field_before_a_separator(settings: dict[str, Any]) -> None:
    separator = 9
    leaves: Leaves = [("a", [1]), ("abq", [1, 2, 3])]
    cursor = cursor_over(leaves, 1, stop_tokens=[separator], **settings)
    assert cursor.allowed().tolist() == [2, separator]
    row = np.zeros(WIDTH, np.float32)
    row[EOG] = 50
    cursor.mask(row)
    assert np.flatnonzero(row > -INF).tolist() == [2, separator]
    # Under "mass" a model that wants to end the record, or anything else, has ended the field.
    pick_of = {2: separator if settings["on_end"] == "mass" else 2, separator: separator}
    for likely, pick in pick_of.items():
        row = np.full(WIDTH, -5, np.float32)
        row[[EOG, likely]] = 50, 9
        assert cursor.pick(row) == pick
    longer = cursor.clone()
    cursor.accept(separator)
    assert (cursor.leaf_name, cursor.is_active) == ("a", False)
    longer.accept(2)
    assert longer.allowed().tolist() == [3]


@pytest.mark.parametrize("on_end", ["mass", "eog"])
def test_case_07_an_end_token_is_accepted_where_it_was_allowed(on_end: str) -> None:
    cursor = cursor_over(A_AND_AB, 5, on_end=on_end)
    assert EOG in cursor.allowed().tolist()
    for _ in range(3):
        cursor.accept(EOG)
        assert (cursor.is_finished, cursor.leaf_name, cursor.position_in_span) == (True, "A", 1)
        row = np.arange(WIDTH, dtype=np.float32)
        cursor.mask(row)
        assert np.flatnonzero(row > -INF).tolist() == [EOG]
        assert cursor.allowed().tolist() == [EOG]
        assert cursor.pick(np.arange(WIDTH, dtype=np.float32)) == EOG
    with freed(native_over(A_AND_AB, samples=True, on_end=on_end)) as sampler:
        handle = token_trie_handle(sampler)
        llama_cpp.llama_sampler_accept(sampler, 5)
        for _ in range(3):
            llama_cpp.llama_sampler_accept(sampler, EOG)
            assert handle.status == layout.OK
            assert handle.is_finished
            assert list(apply(sampler, np.arange(WIDTH, dtype=np.float32))) == [EOG]


def test_case_09_every_end_token_of_the_vocabulary(gemma: Llama) -> None:
    ends = eog_ids(gemma)
    assert len(ends) > 1
    assert gemma.token_eos() in ends
    assert list(as_tokenizer(gemma).eog_ids) == ends
    trie = TokenTrie.from_choices(gemma, ["yes", "no"], prompt="x:", lead="")
    (token, *rest) = dict(trie.leaves())["yes"]
    assert rest == []
    row = np.zeros(gemma.n_vocab(), np.float32)
    row[token] = 5
    for end in ends:
        cursor = TrieCursor(trie, eog_ids=as_tokenizer(gemma).eog_ids)
        cursor.accept(token)
        assert cursor.allowed().tolist() == ends
        cursor.accept(end)
        assert cursor.is_finished
        cursor.accept(end)
        cursor.reset()
        assert (cursor.node, cursor.is_active, cursor.pick(row)) == (trie.root, True, token)


def test_case_09_reset_after_an_error() -> None:
    rows = {(): row_of({5: 0.7}), (5,): row_of({6: 0.8})}
    cursor = cursor_over(A_AND_AB, 5)
    with pytest.raises(OffTrieError):
        cursor.accept(FOREIGN)
    cursor.reset()
    assert (cursor.node, cursor.is_active, cursor.position_in_span) == (cursor.trie.root, True, 0)
    assert name_after(cursor, rows) == "AB"
    with freed(native_over(A_AND_AB)) as sampler:
        handle = token_trie_handle(sampler)
        llama_cpp.llama_sampler_accept(sampler, FOREIGN)
        assert handle.status == layout.OFF_TRIE
        llama_cpp.llama_sampler_reset(sampler)
        assert list(apply(sampler, rows[()])) == [5]
        llama_cpp.llama_sampler_accept(sampler, 5)
        assert list(apply(sampler, rows[5,])) == [6]
        with pytest.raises(OffTrieError):
            _ = handle.node
        assert handle.is_active


PASSWORDS: Leaves = [("password", [301]), ("password_file", [301, 302])]


@pytest.mark.parametrize(("p_longer", "name"), [(0.2, "password"), (0.9, "password_file")])
def test_case_11_a_stream_commits_once(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, p_longer: float, name: str
) -> None:
    trie = TokenTrie.from_sequences(PASSWORDS)
    row = oracle.row_of({302: p_longer}, tiny.n_vocab(), 400).astype(np.float32)
    # Nobody asks at the root, whose only child is forced.
    rows: dict[Prefix, Row] = {(301,): row}
    script_rows(monkeypatch, len(prompt_tokens(tiny, PROMPT)), rows.__getitem__)
    events: list[tuple[tuple[int, ...], bool]] = []
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.set_token_trie(trie)
        done = session.generate(on_step=lambda step: events.append((step.tokens, step.done)))
    assert done.choice is not None
    assert (done.choice.name, done.choice.complete) == (name, True)
    assert [token for tokens, _ in events for token in tokens] == list(done.tokens)
    assert events[0] == ((301,), False), "nothing is chosen yet"
    assert [is_chosen for _, is_chosen in events].count(True) == 1
    assert events[-1][1]


@pytest.mark.parametrize(("path", "name"), [([301], "password"), ([301, 302], "password_file")])
def test_case_11_a_hosts_stream_commits_once(tiny: Llama, path: list[int], name: str) -> None:
    trie = TokenTrie.from_sequences(PASSWORDS)
    constraint = TrieLogitsProcessor.from_choices(tiny, trie)
    ends = sorted(TINY_EOG)
    tokens = tiny.generate(
        tiny.tokenize(PROMPT.encode()),
        logits_processor=llama_cpp.LogitsProcessorList([steer([*path, ends[0]]), constraint]),
    )
    known: list[tuple[str | None, bool]] = []
    for token in tokens:
        known.append((constraint.result.name, constraint.is_over))
        if token in ends:
            break
    tokens.close()
    assert known[0] == (None, False)
    assert known[1] == (name, True), "after the end token, or the token that no choice continues"
    assert {given for given, _ in known[1:]} == {name}


# --- bytes and reserved ids -------------------------------------------------------------------------------------------

UNICODE = ("日本語 🙂", "🙂🙃", "naïve", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U00013000")


@pytest.mark.parametrize("choices", [UNICODE, *((text,) for text in UNICODE)], ids=str)
def test_case_36_streamed_characters_are_whole(smollm2: Llama, choices: tuple[str, ...]) -> None:
    chunks: list[str] = []
    with StreamSession.open(smollm2) as session:
        session.prefill("A sign:")
        session.set_token_trie(choices, lead="")
        done = session.generate(on_text_chunk=chunks.append)
    assert done.choice is not None
    assert "".join(chunks) == done.choice.name == done.text
    assert done.choice.name in choices
    assert all(chunks), "no empty one, the last neither"
    assert "\ufffd" not in done.text
    constraint = TrieLogitsProcessor.from_choices(smollm2, choices, lead="")
    limit = constraint.max_tokens
    stream: Any = smollm2.create_completion("A sign:", logits_processor=constraint, stream=True, max_tokens=limit)
    events = list(stream)
    deltas = deltas_of(events)
    assert "".join(deltas) == constraint.result.name
    assert constraint.result.name in choices
    assert "\ufffd" not in "".join(deltas)
    # The host's own last event carries the finish_reason and no text.
    assert all(deltas[:-1])
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_case_39_a_reserved_id_is_never_sampled() -> None:
    reserved = 11
    row = np.zeros(WIDTH, np.float32)
    row[reserved] = 50
    for prefix in ((), (5,)):
        cursor = cursor_over(A_AND_AB, *prefix, on_end="eog", sampling=Sampling(seed=1, temperature=5.0))
        before = (cursor.node, cursor.is_active, cursor.position_in_span, cursor.allowed().tolist())
        with pytest.raises(OffTrieError, match=f"token {reserved} is not allowed"):
            cursor.accept(reserved)
        assert (cursor.node, cursor.is_active, cursor.position_in_span, cursor.allowed().tolist()) == before
        assert cursor.pick(row) != reserved
        assert reserved not in {cursor.sample(row) for _ in range(200)}
    cursor.accept(6)
    assert cursor.leaf_name == "AB"


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_case_39_a_reserved_id_of_a_model(tiny: Llama, mode: str) -> None:
    bias = {TINY_UNUSED: 500.0}
    lifted = llama_cpp.LogitsProcessorList([steer([TINY_UNUSED])])
    free = tiny.generate(tiny.tokenize(PROMPT.encode()), temp=0.0, logits_processor=lifted)
    assert next(free) == TINY_UNUSED, "what comes of it without a constraint"
    free.close()
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, mode=mode, seed=3)
    for _ in range(5):
        complete(tiny, constraint, logit_bias=bias)
        assert constraint.result.name in CHOICES
        assert TINY_UNUSED not in constraint.result.tokens
        with native_sampling(tiny, CHOICES, mode) as native:
            response = tiny.create_completion(PROMPT, max_tokens=native.max_tokens, logit_bias=bias)
        assert text_of(response).strip() in CHOICES


# --- what a host can be given -----------------------------------------------------------------------------------------


def test_case_48_bare_and_in_a_list(smollm2: Llama) -> None:
    choices = ["cold", "warm"]
    constraint = TrieLogitsProcessor.from_choices(smollm2, choices)
    bare, *in_lists = [
        complete(smollm2, form, "The opposite of hot is")
        for form in (constraint, [constraint], llama_cpp.LogitsProcessorList([constraint]))
    ]
    assert in_lists == [bare, bare]
    assert bare.strip() == constraint.result.name == "cold"


NO_CHOICES: list[Any] = [None, 5, 1.5, "cold", b"cold", object(), [1, 2], [["cold"]], {"a": 1}, lambda: ["cold"]]


@pytest.mark.parametrize("thing", NO_CHOICES, ids=lambda thing: f"{type(thing).__name__}")
def test_case_48_anything_else_is_a_type_error(tiny: Llama, thing: Any) -> None:
    with decodes(tiny) as sizes:
        with pytest.raises(TypeError):
            complete(tiny, TrieLogitsProcessor.from_choices(tiny, thing))
        with pytest.raises(TypeError):
            choose(tiny, PROMPT, thing)
        with pytest.raises(TypeError):
            TrieLogitsProcessor.from_choices(thing, CHOICES)
        with pytest.raises(TypeError):
            choose(thing, PROMPT, CHOICES)
    assert sizes == []


# --- state, reuse, threads --------------------------------------------------------------------------------------------


def test_case_50_one_processor_many_calls(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    first, *more = [(complete(tiny, constraint), constraint.result.name) for _ in range(3)]
    assert more == [first, first]
    assert first[1] in CHOICES
    complete(tiny, constraint, max_tokens=1)
    assert (complete(tiny, constraint), constraint.result.name) == first
    stream: Any = tiny.create_completion(PROMPT, logits_processor=constraint, stream=True, max_tokens=32)
    next(stream)
    stream.close()
    assert (complete(tiny, constraint), constraint.result.name) == first
    for step in (1, 2):
        with monkeypatch.context() as patched:
            fail_at(patched, step, LookupError("broken"))
            with pytest.raises(TrieSamplerError, match="broken"):
                complete(tiny, constraint)
        assert (complete(tiny, constraint), constraint.result.name) == first
    assert constraint.result.complete


def test_case_51_two_constraints_on_one_model(smollm2: Llama) -> None:
    prompts = {"numbers": "Two plus three is", "cities": "The capital of France is"}
    choices = {"numbers": ["four", "five", "six"], "cities": ["Berlin", "Paris", "Rome"]}
    frees = {kind: free_text(smollm2, prompt, 6) for kind, prompt in prompts.items()}
    constraints = {kind: TrieLogitsProcessor.from_choices(smollm2, choices[kind]) for kind in choices}
    for _ in range(3):
        for kind, constraint in constraints.items():
            text = complete(smollm2, constraint, prompts[kind])
            assert text.strip() == constraint.result.name
            assert constraint.result.name in choices[kind]
    assert constraints["cities"].result.name == "Paris"
    assert {kind: free_text(smollm2, prompt, 6) for kind, prompt in prompts.items()} == frees


def test_case_53_one_trie_two_cursors_in_turn() -> None:
    trie = TokenTrie.from_sequences([("YN", [1, 2, 3]), ("NY", [2, 1, 3]), ("N", [2])])
    cursors = [TrieCursor(trie, eog_ids=[EOG]) for _ in range(2)]
    for tokens in zip([1, 2, 3], [2, 1, 3], strict=True):
        for cursor, token in zip(cursors, tokens, strict=True):
            assert token in cursor.allowed().tolist()
            cursor.accept(token)
    assert [cursor.leaf_name for cursor in cursors] == ["YN", "NY"]


def test_case_53_one_processor_knows_a_new_generation(tiny: Llama, tiny_model_path: Path) -> None:
    prompts = (PROMPT, "the blue one:", PROMPT, "two and ten =")
    refs = []
    for prompt in prompts:
        with loaded(tiny_model_path) as fresh:
            refs.append(complete(fresh, TrieLogitsProcessor.from_choices(fresh, CHOICES), prompt))
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    texts: list[str] = []
    samplers: list[Any] = []
    for prompt in prompts:
        # Left in the middle of a choice: what follows has nothing of it.
        stream: Any = tiny.create_completion("no, yes and", logits_processor=constraint, stream=True, max_tokens=32)
        next(stream)
        texts.append(complete(tiny, constraint, prompt))
        assert constraint.result.text == texts[-1]
        samplers.append(tiny._sampler)
    assert texts == refs
    assert len(set(map(id, samplers))) == len(prompts), "what tells generations apart"


# In a process of its own: the host, left alone, ends in an abort here.
TWO_STREAMS = """
import json, sys
from llama_cpp import Llama
from trie_sampler import TrieLogitsProcessor, TrieSamplerError
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, verbose=False)
constraint = TrieLogitsProcessor.from_choices(llm, ["redwood", "redwing", "red wine", "blue green"])
def ask(prompt, **settings):
    return llm.create_completion(prompt, logits_processor=constraint, max_tokens=40, **settings)
ref = ask("action kind:")["choices"][0]["text"]
streams = [ask(prompt, stream=True) for prompt in ("action kind:", "the blue one:")]
errors = []
while streams:
    stream = streams.pop(0)
    try:
        next(stream)
        streams.append(stream)
    except StopIteration:
        pass
    except TrieSamplerError as error:
        errors.append(str(error))
print(json.dumps({"errors": errors, "ref": ref, "after": ask("action kind:")["choices"][0]["text"]}))
"""


def test_case_53_two_streams_on_one_processor_raise(tiny_model_path: Path) -> None:
    out = run_program(TWO_STREAMS, tiny_model_path)
    assert out["errors"]
    assert "two streams" in out["errors"][0]
    assert out["after"] == out["ref"]


def scores_of(ranked: list[Choice]) -> dict[str | None, float]:
    return {choice.name: choice.logprob for choice in ranked}


HEALED = "the blue red "
HEALED_CHOICES = ["red", "blue one", "blue ten"]


def score_jointly(llm: Llama) -> list[Any]:
    out: list[Any] = [scores_of(rank(llm, prompt, CHOICES)) for prompt in (PROMPT, "the blue one:", PROMPT)]
    out.append(scores_of(rank(llm, HEALED, HEALED_CHOICES, heal=True)))
    out.append(choose(llm, PROMPT, CHOICES, method="best").tokens)
    return out


def heal(llm: Llama) -> list[Any]:
    out: list[Any] = [choose(llm, prompt, HEALED_CHOICES, heal=True).tokens for prompt in (HEALED, PROMPT, HEALED)]
    with StreamSession.open(llm) as session:
        for prompt in (HEALED, PROMPT, HEALED):
            session.prefill(prompt)
            session.set_token_trie(HEALED_CHOICES, heal=True)
            out.append(session.generate().tokens)
            session.clear_token_trie()
            out.append(session.generate(4, temperature=0.0).tokens)
    return out


@pytest.mark.parametrize(
    ("work", "is_marked"),
    [
        pytest.param(heal, True, id="healing, known as recurrent"),
        pytest.param(heal, False, id="healing, found out"),
        pytest.param(score_jointly, True, id="scoring, known as recurrent"),
        pytest.param(score_jointly, False, id="scoring, found out"),
    ],
)
def test_case_56_memory_that_cannot_drop_a_tail(
    tiny: Llama,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Any], list[Any]],
    is_marked: bool,
) -> None:
    assert check_prompt(tiny, HEALED, HEALED_CHOICES).n_healed > 0
    with loaded(tiny_model_path) as fresh:
        refs = work(fresh)
    for module in ("llama_cpp", "llama_cpp.llama_cpp"):  # ours and the host's own
        monkeypatch.setattr(f"{module}.llama_memory_seq_rm", lambda *_: False)
    monkeypatch.setattr(tiny, "_is_recurrent", is_marked, raising=False)
    for comp, ref in zip(work(tiny), refs, strict=True):
        assert comp == (pytest.approx(ref, abs=1e-3) if isinstance(ref, dict) else ref)


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("The capital of France is", ["Berlin", "Paris", "Rome"]), ("The opposite of hot is", ["cold", "warm"])],
    ids=["capital", "opposite"],
)
def test_case_57_cold_and_warm_cache(llm: Llama, prompt: str, choices: list[str]) -> None:
    constraint = TrieLogitsProcessor.from_choices(llm, choices)
    forget(llm)

    def ask_host() -> Choice:
        complete(llm, constraint, prompt)
        return constraint.result

    for made in ([choose(llm, prompt, choices) for _ in range(3)], [ask_host() for _ in range(3)]):
        assert all(choice.margin is not None and choice.margin > 1e-3 for choice in made), "no near tie"
        assert len({choice.tokens for choice in made}) == 1


def test_case_57_the_margin_tells_of_near_ties(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["red", "blue", "green"], lead="")
    red, blue = (tiny.tokenize(text, add_bos=False)[0] for text in (b"red", b"blue"))

    def tie(gap: float) -> Callable[[Any, Any], Any]:
        def level(_ids: Any, scores: Any) -> Any:
            scores[blue], scores[red] = 50.0, 50.0 + gap
            return scores

        return level

    for gap in (0.0, 2.0**-11, 1.0):
        complete(tiny, [tie(gap), constraint])
        assert constraint.result.margin == pytest.approx(gap, abs=1e-6)
        assert constraint.result.name == ("blue" if gap == 0 and blue < red else "red")


def test_case_57_a_forced_run_in_one_batch(llm: Llama) -> None:
    """``choose`` puts the run into one batch with the prompt, the host evaluates it token by token."""
    prompt = "Q: Name the capital of France.\nA:"
    choices = [f" It is, as everybody knows, the city of {city}" for city in ("Paris", "Lagos", "Lima")]
    forget(llm)
    with decodes(llm) as sizes:
        at_once = choose(llm, prompt, choices, lead="")
    assert len(sizes) == 1
    assert sizes[0] > len(prompt_tokens(llm, prompt)) + 5
    forget(llm)
    constraint = TrieLogitsProcessor.from_choices(llm, choices, lead="")
    with decodes(llm) as sizes:
        complete(llm, constraint, prompt)
    assert sizes[1:] == [1] * len(constraint.result.tokens)
    assert at_once.margin is not None
    assert at_once.margin > 1
    assert constraint.result.tokens == at_once.tokens
    assert at_once.name == choices[0]


def test_case_58_drafts(tiny: Llama, tiny_model_path: Path) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    words = ["the", "red", "blue", "green", "one", "two", "ten"]
    choices = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    prompt = "\n".join(choices) + "\nthe one:"
    n_prompt = len(tiny.tokenize(prompt.encode()))
    seen: list[int] = []

    def look(ids: Any, scores: Any) -> Any:
        seen.append(len(ids) - n_prompt)
        return scores

    with loaded(
        tiny_model_path, draft_model=LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=6)
    ) as drafting:
        plain, drafted = (TrieLogitsProcessor.from_choices(llm, choices) for llm in (tiny, drafting))
        ref = complete(tiny, plain, prompt)
        for _ in range(3):
            seen.clear()
            with decodes(drafting) as sizes:
                assert complete(drafting, [look, drafted], prompt) == ref
            assert drafted.result.tokens == plain.result.tokens
            assert drafted.result.name == plain.result.name
            assert len(sizes) < len(drafted.result.tokens), "drafts hit"
            # What walks all of the ids it is given would leave the trie here.
            assert seen != list(range(len(seen)))


# --- settings of samplers ---------------------------------------------------------------------------------------------

THREE: Leaves = [("A", [1]), ("B", [2]), ("C", [3])]


def test_case_59_top_k_counts_valid_ones() -> None:
    row = np.array([0, 1, 3, 2, 0, 0, 0, 0, 0, 40, 0, 0], np.float32)
    assert row.argmax() == FOREIGN
    cursor = cursor_over(THREE, sampling=Sampling(top_k=1, seed=0))
    assert {cursor.sample(row) for _ in range(50)} == {2}
    two = cursor_over(THREE, sampling=Sampling(top_k=2, temperature=5.0, seed=0))
    assert {two.sample(row) for _ in range(200)} == {2, 3}
    chain = chain_of(
        native_over(THREE, samples=True),
        llama_cpp.llama_sampler_init_top_k(1),
        llama_cpp.llama_sampler_init_dist(0),
    )
    with freed(chain):
        for _ in range(20):
            ((token, logit),) = apply(chain, row).items()
            assert (token, logit) == (2, 3.0)


def test_case_59_top_k_in_a_call(tiny: Llama) -> None:
    greedy = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    ref = complete(tiny, greedy)
    tiny.eval(tiny.tokenize(PROMPT.encode()))
    assert int(raw_row(tiny).argmax()) not in greedy.bind(PROMPT).children(0)
    assert complete(tiny, greedy, top_k=1) == ref
    assert complete(tiny, TrieLogitsProcessor.from_choices(tiny, CHOICES, mode="sampled", top_k=1)) == ref
    with native_sampling(tiny, CHOICES, "sampled") as native:
        text = text_of(tiny.create_completion(PROMPT, max_tokens=native.max_tokens, top_k=1, temperature=3.0))
    assert text.strip() in CHOICES


@pytest.mark.parametrize("nothing", [NAN, -INF], ids=str)
@pytest.mark.parametrize("door", ["pick", "sample", "constrain", "native"])
def test_case_61_rows_that_say_nothing(nothing: float, door: str) -> None:
    row = np.full(WIDTH, nothing, np.float32)
    row[FOREIGN] = 5
    if door == "native":
        with freed(native_over(THREE)) as sampler:
            handle = token_trie_handle(sampler)
            assert list(apply(sampler, row)) == [1]
            assert handle.status == layout.ALL_INVALID
            with pytest.warns(TrieSamplerWarning, match="NaN or -inf"):
                assert handle.is_active
            assert handle.status == layout.OK
        return
    asks: dict[str, Callable[[TrieCursor], int]] = {
        "pick": lambda cursor: cursor.pick(row),
        "sample": lambda cursor: cursor.sample(row),
        "constrain": lambda cursor: cursor.constrain(row.copy(), samples=False).token,
    }
    ask = asks[door]
    cursor = cursor_over(THREE)
    with pytest.warns(TrieSamplerWarning, match="NaN or -inf") as caught:
        assert [ask(cursor) for _ in range(3)] == [1, 1, 1]
    assert len(caught) == 1
    strict = cursor_over(THREE, on_fault="raise")
    with pytest.raises(TrieSamplerError, match="NaN or -inf"):
        ask(strict)
    assert (strict.node, strict.is_active) == (strict.trie.root, True)


def test_case_62_a_processor_off_the_trie_lets_only_the_end_through(tiny: Llama) -> None:
    rows: list[list[int]] = []

    def overrule_once(_ids: Any, scores: Any) -> Any:
        rows.append(np.flatnonzero(scores > -INF).tolist())
        if len(rows) == 1:
            scores[400] = 1000.0
        return scores

    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    ref = complete(tiny, constraint)
    with pytest.raises(TrieSamplerError, match="evaluated token 400"):
        complete(tiny, [constraint, overrule_once])
    assert len(rows) == 2
    assert set(rows[1]) <= TINY_EOG
    with pytest.raises(TrieSamplerError, match="evaluated token 400"):
        _ = constraint.result
    assert complete(tiny, constraint) == ref


def test_case_62_a_session_off_the_trie_raises(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.set_token_trie(["redwood", "redwing"])
        before = session.tokens
        texts: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(TrieCursor, "decide", lambda *_, **__: Step(400, 0.0, INF, False))
            with pytest.raises(OffTrieError, match="token 400"):
                session.generate(on_text_chunk=texts.append)
        assert 400 not in session.tokens[len(before) :]
        assert set("".join(texts)) <= set(" redw")
        session.prefill(PROMPT)
        done = session.generate()
        assert done.text.strip() in {"redwood", "redwing"}


def test_case_62_no_constraint_is_never_an_empty_list() -> None:
    cursor = cursor_over(THREE)
    cursor.deactivate()
    with pytest.raises(TrieSamplerError, match="every token is allowed"):
        cursor.allowed()


def test_case_62_the_raw_native_sampler_releases_and_says_so(tiny: Llama, caplog: pytest.LogCaptureFixture) -> None:
    leaves: Leaves = [(name, tiny.tokenize(name.encode(), add_bos=False)) for name in ("redwood", "redwing")]
    vocab = llama_cpp.llama_model_get_vocab(tiny.model)
    row = np.zeros(tiny.n_vocab(), np.float32)
    with freed(llama_sampler_init_token_trie(vocab, payload_json({"action": leaves}), 1)) as sampler:
        handle = token_trie_handle(sampler)
        assert len(apply(sampler, row)) < 3
        llama_cpp.llama_sampler_accept(sampler, 400)
        assert handle.status == layout.OFF_TRIE
        assert len(apply(sampler, row)) == tiny.n_vocab()
        with caplog.at_level(logging.WARNING):
            assert not handle.is_active
        assert "released" in caplog.text


def test_case_64_a_trie_of_what_the_model_writes_anyway(smollm2: Llama) -> None:
    prompt = smollm2.tokenize(b"The quick brown fox")

    def generate(processors: list[Any], n: int) -> list[int]:
        forget(smollm2)  # the same batches both times
        stream = smollm2.generate(prompt, temp=0.0, logits_processor=llama_cpp.LogitsProcessorList(processors))
        tokens = [next(stream) for _ in range(n)]
        stream.close()
        return tokens

    n, branch = 8, 3
    free = RowSpy(smollm2)
    tokens = generate([free], n)
    assert not set(tokens).intersection(eog_ids(smollm2))
    row = free.rows[branch]
    second = int(np.argsort(row)[-2])
    other = [*tokens[:branch], second, *tokens[branch + 1 :]]
    trie = TokenTrie.from_sequences([("T", tokens), ("other", other)])
    constraint = TrieLogitsProcessor.from_choices(smollm2, trie)
    spy = RowSpy(smollm2)
    assert generate([spy, constraint], n) == tokens
    for comp, ref in zip(spy.rows, free.rows, strict=True):
        np.testing.assert_array_equal(comp, ref)
    assert constraint.result.margin == pytest.approx(float(row[tokens[branch]]) - float(row[second]), abs=1e-5)
    assert constraint.result.name == "T"


FOUR: Leaves = [("A", [1]), ("B", [2]), ("C", [3]), ("D", [4])]
FOUR_ROW = np.array([0, 1, 2, 0, -1, 0, 0, 0, 0, 10, 0, 0], np.float32)


def test_case_65_greedy_draws_nothing() -> None:
    cursor = cursor_over(FOUR, sampling=Sampling(temperature=5.0, seed=1))
    state = [int(cursor._record[f"random_{place}"][0]) for place in range(4)]
    assert {cursor.pick(FOUR_ROW) for _ in range(50)} == {2}
    assert {cursor.constrain(FOUR_ROW.copy(), samples=False).token for _ in range(50)} == {2}
    assert [int(cursor._record[f"random_{place}"][0]) for place in range(4)] == state
    cursor.sample(FOUR_ROW)
    assert [int(cursor._record[f"random_{place}"][0]) for place in range(4)] != state


def test_case_65_draws_follow_the_softmax_over_the_children() -> None:
    n = 4000
    p = oracle.softmax(FOUR_ROW[1:5])
    cursor = cursor_over(FOUR, sampling=Sampling(temperature=1.0, seed=1))
    counts = np.bincount([cursor.sample(FOUR_ROW) for _ in range(n)], minlength=5)
    assert counts.sum() == counts[1:5].sum()
    assert (np.abs(counts[1:5] - n * p) < 3 * np.sqrt(n * p * (1 - p))).all(), (counts, n * p)
    zero = cursor_over(FOUR, sampling=Sampling(temperature=0.0, seed=1))
    assert {zero.sample(FOUR_ROW) for _ in range(100)} == {2}
    step = zero.constrain(FOUR_ROW.copy(), samples=True)
    assert step.token == 2
    assert math.isfinite(step.logprob)


def test_case_65_the_hosts_settings_do_not_act_again(tiny: Llama) -> None:
    greedy = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    host: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 5.0, "seed": 7},
        {"temperature": 5.0, "seed": 8, "top_k": 0},
    ]
    assert len({complete(tiny, greedy, **settings) for settings in host}) == 1

    def draw(**settings: Any) -> list[str]:
        constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, mode="sampled", temperature=8.0, seed=5)
        return [complete(tiny, constraint, **settings) for _ in range(12)]

    ref = draw()
    assert len(set(ref)) > 1
    host += [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    assert [draw(**settings) for settings in host] == [ref] * len(host)


@pytest.fixture
def near(tiny: Llama) -> tuple[dict[str, int], str]:
    """Two words of one token each within 3 nats behind PROMPT, and which of them the model prefers."""
    tiny.eval(tiny.tokenize(PROMPT.encode()))
    row = raw_row(tiny)
    words = ["red", "green", "blue", "one", "two", "ten", "yes", "no", "true", "false"]
    ids = {word: tiny.tokenize(word.encode(), add_bos=False) for word in words}
    ranked = sorted((word for word in words if len(ids[word]) == 1), key=lambda word: -row[ids[word][0]])
    gaps = {pair: row[ids[pair[0]][0]] - row[ids[pair[1]][0]] for pair in itertools.pairwise(ranked)}
    pair = next(pair for pair, gap in gaps.items() if 0.1 < gap < 2.9)
    return {word: ids[word][0] for word in pair}, pair[0]


def test_case_67_a_bias_beside_the_constraint(tiny: Llama, near: tuple[dict[str, int], str]) -> None:
    ids, preferred = near
    (other,) = set(ids) - {preferred}
    constraint = TrieLogitsProcessor.from_choices(tiny, list(ids), lead="")
    complete(tiny, constraint)
    assert constraint.result.name == preferred
    for _ in range(3):
        assert complete(tiny, constraint, logit_bias={ids[other]: 3.0}) == other
        assert constraint.result.name == other
        assert len(constraint) == 1
        assert complete(tiny, constraint, logit_bias={400: 50.0}) == preferred
    with native_sampling(tiny, list(ids), lead="") as native:
        for bias, name in (({}, preferred), ({ids[other]: 3.0}, other), ({400: 50.0}, preferred)):
            response = tiny.create_completion(PROMPT, max_tokens=native.max_tokens, logit_bias=bias)
            assert text_of(response) == name


def test_case_67_a_plain_list_beside_a_bias_is_dropped_by_the_host(
    tiny: Llama, near: tuple[dict[str, int], str]
) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, list(near[0]), lead="")
    free = free_text(tiny)
    assert complete(tiny, [constraint], logit_bias={5: 0.0}, temperature=0, max_tokens=12) == free
    with pytest.raises(TrieSamplerError, match="never called"):
        _ = constraint.result


def by_completion(llm: Llama, processor: Any) -> str:
    return complete(llm, processor)


def by_chat(llm: Llama, processor: Any) -> str:
    return text_of(llm.create_chat_completion(MESSAGES, logits_processor=processor, max_tokens=32))


@pytest.mark.parametrize("door", [by_completion, by_chat])
def test_case_68_an_error_inside_the_callback(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, door: Callable[[Any, Any], str]
) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    ref = door(tiny, constraint)
    cause = LookupError("broken")
    rows: list[list[int]] = []

    def look(_ids: Any, scores: Any) -> Any:
        rows.append(np.flatnonzero(scores > -INF).tolist())
        return scores

    with monkeypatch.context() as patched:
        fail_at(patched, 2, cause)
        with pytest.raises(TrieSamplerError, match="broken") as caught:
            door(tiny, [constraint, look])
    assert caught.value.__cause__ is cause
    assert len(rows) > 1
    assert all(len(row) == 1 and row[0] in TINY_EOG for row in rows[1:])
    assert rows[0][0] not in TINY_EOG
    assert door(tiny, constraint) == ref
    assert constraint.result.name in {"redwood", "redwing"}


@pytest.mark.parametrize("door", [by_completion, by_chat])
def test_case_68_none_in_the_list(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, door: Callable[[Any, Any], str]
) -> None:
    """The host swallows its own error over it; the constraint behind was never called, and says so."""
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: swallowed.append(what.exc_value))
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    door(tiny, [None, constraint])
    assert swallowed
    with pytest.raises(TrieSamplerError, match="never called"):
        _ = constraint.result
    door(tiny, constraint)
    assert constraint.result.name in CHOICES


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def test_case_70_a_thousand_chains() -> None:
    trie = TokenTrie.from_sequences([(str(i), [i, 7, i % 13]) for i in range(1, 300)])
    cursor = TrieCursor(trie, eog_ids=[EOG])
    row = np.zeros(310, np.float32)
    row[[5, 305]] = 1, 50
    gc.collect()
    n_before = n_alive()

    def live(n: int) -> None:
        for turn in range(n):
            sampler = new_sampler(cursor, keeps_options=False)[0]
            handle = token_trie_handle(sampler)
            chain = chain_of(sampler, llama_cpp.llama_sampler_init_greedy())
            clone = llama_cpp.llama_sampler_clone(chain)
            assert n_alive() == n_before + 2
            if turn % 100 == 50:
                gc.collect()
            for each in (chain, clone):
                assert list(apply(each, row)) == [5]
                llama_cpp.llama_sampler_accept(each, 5)
                assert list(apply(each, row)) == [7]
            llama_cpp.llama_sampler_free(chain)
            assert handle.is_freed
            llama_cpp.llama_sampler_free(clone)
            # The handle still holds the first record; freed twice, it would be gone.
            assert n_alive() == n_before + 1
            del handle
            assert n_alive() == n_before

    live(100)
    before = resident_bytes()
    live(1000)
    assert resident_bytes() - before < 2_000_000
    assert len(sampler_module._alive) <= n_before + 1


# --- size and speed ---------------------------------------------------------------------------------------------------

# VmHWM, for ru_maxrss begins with that of the process that started this one.
MILLION = r"""
import json, re, sys, time
import numpy as np
from trie_sampler import TokenTrie, TrieCursor
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
n, depth = 1_000_000, 8
TrieCursor(TokenTrie.from_ragged(np.arange(8, dtype=np.int32), np.array([0, 8]))).pick(np.zeros(50000, np.float32))
rng = np.random.default_rng(0)
ids = rng.integers(3, 50000, n * depth, dtype=np.int32)
offsets = np.arange(n + 1, dtype=np.int64) * depth
before, start = peak(), time.perf_counter()
trie = TokenTrie.from_ragged(ids, offsets)
out = {"seconds": time.perf_counter() - start, "peak": peak() - before, "nodes": trie.n_nodes, "bytes": trie.nbytes}
trie.save(sys.argv[1])
spent = []
for _ in range(5):
    start = time.perf_counter()
    opened = TokenTrie.load(sys.argv[1])
    spent.append(time.perf_counter() - start)
assert not opened.token.flags.owndata
for title in (0, 123456, n - 1):
    node = opened.root
    for token in ids[title * depth : (title + 1) * depth]:
        node = opened.step(node, int(token))
    assert opened.leaf_name(node) == str(title), title
out |= {"leaves": opened.n_leaves, "open": min(spent)}
print(json.dumps(out))
"""


@pytest.mark.slow
@LINUX
def test_case_73_a_million_titles(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    out = run_program(MILLION, tmp_path / "titles.trie")
    out["bytes_per_node"] = out["bytes"] / out["nodes"]
    for name, value in out.items():
        record_property(name, value)
    print(out)
    assert out["leaves"] == 1_000_000
    assert out["bytes_per_node"] <= 12.5
    assert out["peak"] <= 4 * out["bytes"]
    assert out["open"] < 0.05
    assert out["seconds"] < 60


def random_leaves(n: int, depth: int = 5, seed: int = 0) -> Leaves:
    paths = np.random.default_rng(seed).integers(1, 3000, (n, depth))
    return [(str(i), path) for i, path in enumerate(np.unique(paths, axis=0).tolist())]


def test_case_74_8192_choices(tiny: Llama) -> None:
    leaves = random_leaves(8192)
    assert len(leaves) == 8192
    trie = TokenTrie.from_payload(payload_json({"field": leaves}))
    assert trie.n_leaves == 8192
    ref = oracle.DictTrie(leaves)
    rng = np.random.default_rng(1)
    for _ in range(50):
        rows = [rng.normal(size=3000).astype(np.float32) for _ in range(5)]
        cursor = TrieCursor(trie, eog_ids=[EOG])
        path: Prefix = ()
        for row in rows:
            path = (*path, oracle.argmax_child(row, ref.children(path)))
            token = cursor.pick(row)
            cursor.accept(token)
            assert token == path[-1]
        assert cursor.leaf_name == ref.name(path)
        assert cursor.must_end
    names = [f"{n} red" for n in range(8192)]
    assert choose(tiny, PROMPT, names).name in names


@pytest.mark.parametrize("n", [10_000, 100_000])
def test_case_75_memory_is_linear(n: int) -> None:
    def build(n_leaves: int) -> tuple[int, int]:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, 50_000, n_leaves * 5, dtype=np.int32)
        offsets = np.arange(n_leaves + 1, dtype=np.int64) * 5
        tracemalloc.start()
        try:
            trie = TokenTrie.from_ragged(ids, offsets)
            return trie.nbytes, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    build(10)
    (kept, peak), (kept_of_two, peak_of_two) = build(n), build(2 * n)
    assert kept_of_two <= 2.2 * kept
    assert peak_of_two <= 2.2 * peak
    assert kept <= 12.5 * (5 * n + 1)


MEMORY = r"""
import json, re, sys
import numpy as np
from trie_sampler import TokenTrie
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
def grow(n):
    ids = np.random.default_rng(0).integers(0, 50_000, n * 5, dtype=np.int32)
    offsets = np.arange(n + 1, dtype=np.int64) * 5
    before = peak()
    TokenTrie.from_ragged(ids, offsets)
    return peak() - before
TokenTrie.from_ragged(np.arange(100, dtype=np.int32), np.arange(101))
print(json.dumps(grow(int(sys.argv[1]))))
"""


@LINUX
def test_case_75_resident_memory_is_linear() -> None:
    """Compiled code allocates too, which only the process knows of."""
    single, double = (run_program(MEMORY, n) for n in (100_000, 200_000))
    assert single > 5 * 100_000 * 12
    assert double <= 2.2 * single + 2**20


# The ten children lie on one page of memory, and every other page of the row must not be touched.
ONE_PAGE = """
import ctypes, json, mmap, sys
import numpy as np
from trie_sampler import TokenTrie, TrieCursor
n_vocab, page = 131072, mmap.PAGESIZE
first = 3 * page // 4
children = [first + 5 * k for k in range(10)]
memory = mmap.mmap(-1, n_vocab * 4)
row = np.frombuffer(memory, np.float32)
row[children] = [1, 2, 3, 9, 4, 5, 6, 7, 8, 0]
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def protect(start, size, mode):
    assert libc.mprotect(row.ctypes.data + start, size, mode) == 0
tries = [
    TokenTrie.from_ragged(children, range(11)),
    TokenTrie.from_ragged(
        [t for n in range(100_000) for t in (children[n % 10], 100 + n // 10)], [2 * n for n in range(100_001)]
    ),
]
cursors = [TrieCursor(trie, eog_ids=[0]) for trie in tries]
picks = [cursor.pick(row) for cursor in cursors]
protect(0, 3 * page, 0)
protect(4 * page, n_vocab * 4 - 4 * page, 0)
out = [cursor.pick(row) for cursor in cursors for _ in range(3)]
steps = [cursor.sample(row) for cursor in cursors]
decided = [cursor.decide(row, samples=False).token for cursor in cursors]
if sys.argv[1:] == ["all"]:
    cursors[0].valid_mass(row)
protect(0, n_vocab * 4, 3)
print(json.dumps([picks + out + decided, steps, children]))
"""


@LINUX
def test_case_76_a_pick_looks_at_the_children_only() -> None:
    picked, drawn, children = run_program(ONE_PAGE)
    assert set(picked) == {children[3]}
    assert set(drawn) <= set(children)
    with pytest.raises(AssertionError, match="-11"):
        run_program(ONE_PAGE, "all")  # what reads the whole row would not have come through


def test_case_76_ten_candidates_are_left_of_128_thousand() -> None:
    n_vocab = 131_072
    row = np.random.default_rng(0).normal(size=n_vocab).astype(np.float32)
    few: Leaves = [(str(k), [1000 * k + 7]) for k in range(1, 11)]
    many: Leaves = [(f"{k}.{n}", [1000 * k + 7, n + 1]) for k in range(1, 11) for n in range(2000)]
    children = [1000 * k + 7 for k in range(1, 11)]
    best = oracle.argmax_child(row, children)
    lines = []
    for leaves in (few, many):
        cursor = cursor_over(leaves)
        assert cursor.pick(row) == best
        lines.append(lines_run(lambda cursor=cursor: cursor.pick(row)))  # type: ignore[misc]
        masked = row.copy()
        cursor.mask(masked)
        assert np.flatnonzero(masked > -INF).tolist() == children
        for samples, left in ((True, children), (False, [best])):
            with freed(native_over(leaves, samples=samples)) as sampler:
                handle = token_trie_handle(sampler)
                assert sorted(apply(sampler, row)) == left
                assert handle.counters["candidates"] == n_vocab
                assert handle.counters["valid"] == len(children)
    assert lines[0] == lines[1], "the same work whatever the number of choices"


def test_case_77_no_loop_over_children() -> None:
    n_vocab = 131_072
    row = np.random.default_rng(0).normal(size=n_vocab).astype(np.float32)
    lines: dict[str, list[int]] = {}
    for n in (20, 20_000):
        children = np.sort(np.random.default_rng(1).choice(np.arange(1, n_vocab), n, replace=False))
        trie = TokenTrie.from_ragged(children, np.arange(n + 1))
        cursor = TrieCursor(trie, eog_ids=[EOG], sampling=Sampling(seed=1))
        best = int(children[row[children].argmax()])
        asks: dict[str, Callable[[], Any]] = {
            "pick": lambda cursor=cursor: cursor.pick(row),  # type: ignore[misc]
            "sample": lambda cursor=cursor: cursor.sample(row),  # type: ignore[misc]
            "allowed": lambda cursor=cursor: cursor.allowed(),  # type: ignore[misc]
            "mask": lambda cursor=cursor: cursor.mask(row.copy()),  # type: ignore[misc]
            "constrain": lambda cursor=cursor: cursor.constrain(row.copy(), samples=False),  # type: ignore[misc]
        }
        for name, ask in asks.items():
            ask()
            lines.setdefault(name, []).append(lines_run(ask))
        assert cursor.pick(row) == best
        np.testing.assert_array_equal(cursor.allowed(), children)
        masked = row.copy()
        cursor.mask(masked)
        np.testing.assert_array_equal(np.flatnonzero(masked > -INF), children)
        left = row.copy()
        assert cursor.constrain(left, samples=False).token == best
        assert np.flatnonzero(left > -INF).tolist() == [best]
        assert cursor.sample(row) in children
    assert all(small == large < 60 for small, large in lines.values()), lines


class ScriptedRows:
    """A sequence whose rows are written down; counts who asks, and with how many tokens waiting."""

    def __init__(self, rows: Mapping[Prefix, Row]) -> None:
        self.rows = rows
        self.tokens: list[int] = []
        self.asked: list[int] = []
        self.waiting = 0

    def push(self, tokens: Iterable[int]) -> None:
        pushed = list(tokens)
        self.tokens += pushed
        self.waiting += len(pushed)

    def row(self) -> Row:
        self.asked.append(self.waiting)
        self.waiting = 0
        return self.rows[tuple(self.tokens)]


AAA_BBB: Leaves = [("aaa", [1, 2, 3]), ("bbb", [4, 5, 6])]


def test_case_79_the_rest_of_the_only_option_is_one_batch() -> None:
    rows = ScriptedRows({(): row_of({1: 0.3, 4: 0.6}), (4, 5, 6): row_of({7: 0.9})})
    cursor = cursor_over(AAA_BBB)
    list(walk_span(rows, cursor, samples=False))
    assert (cursor.leaf_name, rows.tokens) == ("bbb", [4, 5, 6])
    assert rows.asked == [0], "the prompt's row, and no other"
    rows.row()
    assert rows.asked == [0, 3], "who goes on evaluates all three at once"


def test_case_79_decodes_of_a_session(tiny: Llama) -> None:
    leaves: Leaves = [("aaa", [301, 302, 303]), ("bbb", [304, 305, 306])]
    trie = TokenTrie.from_sequences(leaves)
    with StreamSession.open(tiny) as session:
        n_prompt = session.prefill(PROMPT)
        session.set_token_trie(trie)
        with decodes(tiny) as sizes:
            done = session.generate()
        assert sizes == [n_prompt]
        assert list(done.tokens) in [tokens for _, tokens in leaves]
        session.clear_token_trie()
        with decodes(tiny) as sizes:
            session.generate(1, temperature=0.0)
        assert sizes == [3]
    with decodes(tiny) as sizes:
        assert choose(tiny, PROMPT, trie).stats["forward_passes"] == 0
    assert sum(sizes) <= n_prompt


TOOLS = ("search_web", "play_music", "book_taxi", "calculate")


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_case_80_a_tool_from_the_prefill_alone(request: pytest.FixtureRequest, model: str) -> None:
    llm = request.getfixturevalue(model)
    prompt = "User: I want to hear some jazz.\nTool:"
    trie = TokenTrie.from_choices(llm, TOOLS, prompt=prompt, lead="")
    assert len(trie.children(trie.root)) == len(TOOLS)
    forget(llm)
    with decodes(llm) as sizes:
        choice = choose(llm, prompt, TOOLS, lead="")
    assert sizes == [len(prompt_tokens(llm, prompt))]
    assert choice.stats["forward_passes"] == 0
    assert choice.name in TOOLS
    constraint = TrieLogitsProcessor.from_choices(llm, TOOLS, lead="")
    complete(llm, constraint, prompt)
    assert constraint.result.name == choice.name


def test_case_82_the_row_is_changed_in_place(tiny: Llama) -> None:
    n_vocab = 131_072
    trie = TokenTrie.from_sequences([("AB", [301, 302, 303]), ("C", [304])])
    constraint = TrieLogitsProcessor.from_choices(tiny, trie)
    records = np.zeros((n_vocab, 3), np.float32)
    scores = records[:, 1]
    assert not scores.flags.c_contiguous

    def step(ids: list[int], wanted: int) -> int:
        scores[:] = 0
        scores[wanted], scores[400] = 5, 50
        given = np.array(ids, np.intc)
        tracemalloc.start()
        try:
            assert constraint(given, scores) is scores
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peaks = [step([1, 320, *path], wanted) for path, wanted in (([], 301), ([301], 302), ([301, 302], 303))]
    assert np.flatnonzero(scores > -INF).tolist() == [303]
    assert not records[:, [0, 2]].any()
    assert constraint.result.name == "AB"
    assert max(peaks[1:]) < 16_384, "a copy of the row has 512 KiB, a mask 128"


def test_case_82_a_cursor_allocates_nothing() -> None:
    cursor = cursor_over(AAA_BBB)
    row = np.zeros(131_072, np.float32)
    cursor.constrain(row.copy(), samples=False)
    tracemalloc.start()
    try:
        cursor.pick(row)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        cursor.pick(row)
        cursor.mask(row)
        cursor.constrain(row, samples=False)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 4096


# --- limits and what comes out ----------------------------------------------------------------------------------------


def test_case_89_cut_by_the_token_limit(tiny: Llama) -> None:
    choice = next(
        text
        for text in ("red blue", "red blue one", "red blue one two ten", "redwood", "two ten no yes the")
        if TokenTrie.from_choices(tiny, [text], prompt=PROMPT, lead="").depth == 5
    )
    constraint = TrieLogitsProcessor.from_choices(tiny, [choice], lead="")
    response = tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=3)
    result = constraint.result
    assert (result.complete, result.name, result.value, result.index) == (False, None, None, None)
    assert (reason_of(response), len(result.tokens)) == ("length", 3)
    assert choice.startswith(text_of(response))
    assert constraint.max_tokens >= 6
    trie = TokenTrie.from_choices(tiny, [choice], prompt=PROMPT, lead="")
    assert TrieLogitsProcessor.from_choices(tiny, trie).max_tokens == trie.depth + 1 == 6
    response = tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=6)
    assert (constraint.result.name, reason_of(response)) == (choice, "stop")
    with native_sampling(tiny, trie) as native:
        assert native.max_tokens == 6
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.set_token_trie([choice], lead="")
        done = session.generate(3)
        assert done.choice is not None
        assert (done.finish_reason, done.choice.complete, done.choice.name) == ("length", False, None)
    assert choose(tiny, PROMPT, [choice], lead="").complete, "no limit to get wrong"


def test_case_89_cut_inside_a_character(tiny: Llama) -> None:
    choice = "日🙂"
    constraint = TrieLogitsProcessor.from_choices(tiny, [choice], lead="")
    assert len(tiny.tokenize(choice.encode(), add_bos=False)) == 5
    tokens = tiny.generate(tiny.tokenize(PROMPT.encode()), logits_processor=constraint)
    for _ in range(3):
        next(tokens)
    tokens.close()
    assert (constraint.result.complete, constraint.result.name, constraint.result.text) == (False, None, "日")
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.set_token_trie([choice], lead="")
        done = session.generate(3)
        assert done.choice is not None
        assert (done.finish_reason, done.text) == ("length", "日")
        assert (done.choice.complete, done.choice.name) == (False, None)


@pytest.mark.model("smollm2")
def test_case_90_the_command_prints_the_choice_alone(capfd: pytest.CaptureFixture[str]) -> None:
    prompt = "Is ice cold? yes\nIs fire hot? yes\nIs snow white? yes\nIs water wet?"
    arguments = ["choose", "--model", str(models.smollm2_path()), "--prompt", prompt]
    capfd.readouterr()
    assert cli.main([*arguments, "--choice", "yes", "--choice", "no"]) == 0
    assert capfd.readouterr().out == "yes\n"


def test_case_90_no_end_token_in_the_text(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["yes", "no"], lead="")
    assert complete(tiny, constraint) == constraint.result.text == constraint.result.name
    assert not TINY_EOG.intersection(constraint.result.tokens)
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        session.set_token_trie(["yes", "no"], lead="")
        done = session.generate()
    assert done.text in {"yes", "no"}
    assert not TINY_EOG.intersection(done.tokens)


def by_session(llm: Llama, **settings: Any) -> None:
    with StreamSession.open(llm) as session:
        session.prefill(PROMPT)
        session.set_token_trie(["yes", "no"], **settings)


def by_native(llm: Llama, **settings: Any) -> None:
    with native_sampling(llm, ["yes", "no"], **settings):
        pass


KEYWORD_DOORS: dict[str, Callable[..., Any]] = {
    "choose": lambda llm, **settings: choose(llm, PROMPT, ["yes", "no"], **settings),
    "best": lambda llm, **settings: choose(llm, PROMPT, ["yes", "no"], method="best", **settings),
    "rank": lambda llm, **settings: rank(llm, PROMPT, ["yes", "no"], **settings),
    "processor": lambda llm, **settings: TrieLogitsProcessor.from_choices(llm, ["yes", "no"], **settings),
    "native": by_native,
    "session": by_session,
    "trie": lambda llm, **settings: TokenTrie.from_choices(llm, ["yes", "no"], **settings),
    "cursor": lambda _llm, **settings: TrieCursor(TokenTrie.from_sequences(THREE), **settings),
    "check_prompt": lambda llm, **settings: check_prompt(llm, PROMPT, ["yes", "no"], **settings),
}


@pytest.mark.parametrize("door", KEYWORD_DOORS.values(), ids=KEYWORD_DOORS)
@pytest.mark.parametrize("keyword", ["guided_choice", "choices_", "tempature"])
def test_case_91_an_unknown_keyword_is_a_type_error(tiny: Llama, door: Callable[..., Any], keyword: str) -> None:
    with decodes(tiny) as sizes, pytest.raises(TypeError, match=keyword):
        door(tiny, **{keyword: ["yes"]})
    assert sizes == []
    door(tiny)


def test_case_91_the_result_proves_that_the_constraint_ran(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    complete(tiny, constraint)
    choice = choose(tiny, PROMPT, ["redwood", "redwing"])
    for made in (constraint.result, choice):
        assert made.name in {"redwood", "redwing"}
        assert made.stats["steps"] >= len(made.tokens) > 0
        assert made.stats["masked"] is True
        assert made.to_dict()["stats"]["masked"] is True
    stale = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    free_text(tiny)
    with pytest.raises(TrieSamplerError, match="never called"):
        _ = stale.result


EMPTY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "choices=[]": (lambda llm: choose(llm, PROMPT, []), "choices"),
    "processor": (lambda llm: TrieLogitsProcessor.from_choices(llm, []), "choices"),
    "descriptors=[]": (lambda _: TokenTrie.from_payload(payload_json({})), "descriptors"),
    "no tokens": (lambda _: TokenTrie.from_payload(payload_json({"a.b": [("X", []), ("Y", [])]})), r"'a\.b'"),
    "no leaves": (lambda _: TokenTrie.from_payload(payload_json({"ok": THREE, "a.b": []})), r"'a\.b'"),
    "in a session": (lambda llm: _set_trie(llm, payload_json({"a.b": [("X", [])]})), r"'a\.b'"),
}


def _set_trie(llm: Llama, payload: str) -> None:
    with StreamSession.open(llm) as session:
        session.set_token_trie(payload)


@pytest.mark.parametrize(("ask", "place"), EMPTY.values(), ids=EMPTY)
def test_case_92_nothing_to_choose_from(tiny: Llama, ask: Callable[[Any], Any], place: str) -> None:
    with decodes(tiny) as sizes, pytest.raises(EmptyTrieError, match=place) as caught:
        ask(tiny)
    assert sizes == []
    assert not isinstance(caught.value, PayloadError)
    assert choose(tiny, PROMPT, CHOICES).name in CHOICES


@pytest.mark.parametrize("payload", [payload_json({}), payload_json({"a.b": [("X", [])]})], ids=["none", "no tokens"])
def test_case_92_the_native_initialiser_gives_none(tiny: Llama, caplog: pytest.LogCaptureFixture, payload: str) -> None:
    vocab = llama_cpp.llama_model_get_vocab(tiny.model)
    assert llama_sampler_init_token_trie(vocab, payload, 0) is None
    assert "nothing to choose from" in caplog.text


def test_case_92_leaves_without_tokens_and_of_one_name() -> None:
    leaves: Leaves = [("good", [1]), ("Nobody", []), ("better", [2])]
    with pytest.warns(TrieSamplerWarning, match="without tokens, 1 in all: 'Nobody'") as caught:
        trie = TokenTrie.from_payload(payload_json({"p": leaves}))
    assert len(caught) == 1
    assert {name for name, _ in trie.leaves()} == {"good", "better"}
    two_ways = TokenTrie.from_payload(payload_json({"p": [("yes", [1, 2]), ("yes", [3]), ("no", [4])]}))
    assert two_ways.n_leaves == 2
    for path in ((1, 2), (3,)):
        node = two_ways.root
        for token in path:
            node = two_ways.step(node, token)
        assert two_ways.leaf_name(node) == "yes"
    assert not two_ways.collisions


@pytest.mark.parametrize("order", [1, -1])
def test_case_92_two_names_of_one_token_list(order: int) -> None:
    leaves: Leaves = [("alpha", [1, 2]), ("zulu", [1, 2]), ("other", [3])]
    trie = TokenTrie.from_payload(payload_json({"p": leaves[::order]}))
    node = trie.step(trie.step(trie.root, 1), 2)
    assert trie.leaf_name(node) == "alpha"
    assert sum(trie.is_terminal(node) for node in range(trie.n_nodes)) == 2
    (collision,) = trie.collisions
    assert (collision.kept, collision.dropped, tuple(collision.tokens)) == ("alpha", "zulu", (1, 2))


# --- lists, agents, applications --------------------------------------------------------------------------------------

AGENT = ("REPLY", "REPLY_THREAD", "IGNORE", "CONTINUE")


def test_case_95_a_hundred_actions(smollm2: Llama) -> None:
    requests = [request for of_action in REQUESTS.values() for request in of_action][::6]
    assert len(requests) == 100
    names = [choose(smollm2, f"Message: {request}\nAction:", AGENT).name for request in requests]
    assert len(names) == 100
    assert set(names) <= set(AGENT)


def test_case_95_every_action_can_come_out(tiny: Llama) -> None:
    names = [
        choose(tiny, f"{n} Action:", AGENT, method="sample", temperature=20.0, on_end="eog", seed=n).name
        for n in range(100)
    ]
    assert set(names) == set(AGENT)


def test_case_97_none_of_these(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = ["red", "blue"]
    tokens = {word: tiny.tokenize(word.encode(), add_bos=False)[0] for word in (*choices, "green")}
    row = oracle.row_of({tokens["red"]: 0.02, tokens["blue"]: 0.03, tokens["green"]: 0.9}, tiny.n_vocab(), 400)
    script_rows(monkeypatch, len(prompt_tokens(tiny, PROMPT)), lambda _prefix: row.astype(np.float32))
    with_none = choose(tiny, PROMPT, choices, none_choice="green", lead="", valid_mass=True)
    assert (with_none.name, with_none.value, with_none.index) == ("green", None, 2)
    assert with_none.valid_mass == pytest.approx(0.95, abs=1e-5)
    without = choose(tiny, PROMPT, choices, lead="", valid_mass=True)
    assert without.name == "blue"
    assert without.valid_mass == pytest.approx(0.05, abs=1e-5)


def test_case_98_a_pick_from_a_list_in_one_line(smollm2: Llama, llm: Llama) -> None:
    for model in (smollm2, llm):
        assert choose(model, "Is fire hot? Answer:", ["Yes", "No"]).name in {"Yes", "No"}


def test_case_98_the_readme_shows_it_first(
    smollm2: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert first is not None
    (line,) = [line for line in first[1].splitlines() if "choose(" in line]
    assert re.search(r"choose\(llm, .+, \[.+\]\)", line)
    monkeypatch.setattr(llama_cpp, "Llama", lambda *_, **__: smollm2)
    variables: dict[str, Any] = {}
    exec(compile(first[1], str(README), "exec"), variables)  # noqa: S102 - what the reader would run
    choice = variables["choice"]
    assert choice.name in {"lost card", "card swallowed", "refund"}
    assert capsys.readouterr().out.splitlines()[0] == choice.name
