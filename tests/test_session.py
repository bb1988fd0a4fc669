"""``StreamSession``: what comes out, what it costs in decodes, what samplers see, and what it refuses.

On the tiny model with a float32 key-value cache, where a row is the same to 1e-4 however its tokens were batched.
The letters of a trie made by hand are tokens of that model:

    aaa  300 301 302        bbb  310 311 312
"""

from __future__ import annotations

import contextlib
import enum
import gc
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import oracle
import pytest
from actions import ACTIONS, REQUESTS
from grammar import gbnf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spies import decodes, eog_ids, raw_row, text_of
from strategies import choice_texts

from trie_sampler import (
    Choice,
    EmptyTrieError,
    EngineError,
    PayloadError,
    SamplingParams,
    TokenTreePayload,
    TokenTrie,
    TrieLogitsProcessor,
    TrieSamplerError,
    UnknownPathError,
    VocabMismatchError,
    build_sampler_chain,
    choose,
    native_sampling,
)
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens
from trie_sampler.session import Generation, StreamSession, StreamStep

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPT = "action kind:"
PROMPTS = (PROMPT, "the blue one:", "two and ten =", "no, yes and", "red green blue, then")
CHOICES = ("STOP", "STOP it now", "PLAY MUSIC", "PLAY VIDEO", "REPLY", "redwood")
LETTERS = [("aaa", [300, 301, 302]), ("bbb", [310, 311, 312])]
TOLERANCE = 1e-4

# Tries made of ids have names of their own, and a random model writes text that choices merge with.
pytestmark = [
    pytest.mark.filterwarnings("ignore:leaves that do not spell their names"),
    pytest.mark.filterwarnings("ignore:the prompt ends in"),
]

GREEDY: dict[str, Any] = {"temperature": 0.0}


@contextlib.contextmanager
def loaded(path: Path, **settings: Any) -> Iterator[Llama]:
    from llama_cpp import Llama

    known = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "verbose": False}
    llm = Llama(str(path), **{**known, **settings})
    try:
        yield llm
    finally:
        llm.close()


def row_one_by_one(path: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    with loaded(path) as llm:
        for token in tokens:
            llm.eval([token])
        return raw_row(llm)


def run(
    llm: Llama, choices: Any, mode: str | int = "greedy", *, prompt: Any = PROMPT, trie: Any = None, **settings: Any
) -> Generation:
    """One generation of a new session; ``trie`` holds the keywords of ``set_token_trie``."""
    with StreamSession.open(llm) as session:
        session.prefill(prompt)
        if choices is not None:
            session.set_token_trie(choices, mode, **(trie or {}))
        return session.generate(**settings)


def write(llm: Llama, *, prompt: Any = PROMPT, **settings: Any) -> Generation:
    """Free text of a new session, greedy unless said otherwise."""
    return run(llm, None, prompt=prompt, **{**GREEDY, "max_tokens": 12, **settings})


def choice_of(generation: Generation) -> Choice:
    assert generation.choice is not None
    return generation.choice


def decoded(generation: Generation) -> int:
    """Decodes after the prompt, by what the usage says."""
    return generation.usage.forward_passes_total - generation.usage.forward_passes_saved


@pytest.fixture
def session(tiny: Llama) -> Iterator[StreamSession]:
    with StreamSession.open(tiny) as opened:
        yield opened


# --- decodes ----------------------------------------------------------------------------------------------------------


def test_distinct_first_tokens_cost_no_decode_after_the_prompt(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        done = run(tiny, ["red", "blue", "green", "one"], trie={"lead": ""})
    assert sizes == [done.usage.prompt_tokens]
    assert (done.usage.forward_passes_total, done.usage.forward_passes_saved) == (0, 0)
    assert done.finish_reason == "span"


def test_leaves_of_one_piece(tiny: Llama) -> None:
    trie = TokenTrie.from_sequences(LETTERS)
    with decodes(tiny) as sizes:
        done = run(tiny, trie)
    assert sizes == [done.usage.prompt_tokens], "what nobody asks about is never decoded"
    assert (done.usage.forward_passes_total, done.usage.forward_passes_saved) == (2, 2)
    tiny.reset()  # type: ignore[no-untyped-call]
    with decodes(tiny) as sizes:
        done = run(tiny, trie, stop_at_span_end=False, max_tokens=6, **GREEDY)
    assert len(done.tokens) == 6
    assert sizes == [done.usage.prompt_tokens, 3, 1, 1], "the leaf in one batch, then token by token"
    assert (done.usage.forward_passes_total, done.usage.forward_passes_saved) == (5, 2)


def test_the_leaf_rides_with_what_comes_next(tiny: Llama, session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(TokenTrie.from_sequences(LETTERS))
    session.generate()
    with decodes(tiny) as sizes:
        n_spliced = len(session.splice(", then"))
        assert sizes == []
        done = session.generate()
    assert sizes == [3 + n_spliced]
    assert (done.usage.prompt_tokens, decoded(done)) == (4 + 3 + n_spliced, 0)


def test_one_leaf_costs_nothing(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        done = run(tiny, ["redwood"], trie={"lead": ""})
    assert (sizes, done.text, done.finish_reason) == ([], "redwood", "span")
    assert done.usage.forward_passes_saved == done.usage.forward_passes_total == len(done.tokens) - 1
    assert choice_of(done).probability == 1.0
    assert tiny.n_tokens == 0


def test_forced_run_at_the_root_rides_with_the_prompt(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        done = run(tiny, {"a": "zz redwood", "b": "zz redwing"}, trie={"lead": ""})
    assert len(sizes) == 1
    assert sizes[0] > done.usage.prompt_tokens
    assert decoded(done) == 0


def test_decodes_are_the_decisions_but_the_first(tiny: Llama) -> None:
    choices = (*CHOICES, "PLAY MUSIC now", "redwing", "REPLY THREAD")
    for prompt in PROMPTS:
        tiny.reset()  # type: ignore[no-untyped-call]
        with decodes(tiny) as sizes:
            done = run(tiny, choices, prompt=prompt)
        trie = oracle.DictTrie(TokenTrie.from_choices(tiny, choices, prompt=prompt).leaves())
        prefixes = [done.tokens[:size] for size in range(len(done.tokens) + 1)]
        open_at = [path for path in prefixes if len(trie.children(path)) + trie.is_terminal(path) > 1]
        assert len(sizes) == len(open_at)
        assert decoded(done) == len(sizes) - 1
        asked_to_stop = trie.is_terminal(done.tokens) and bool(trie.children(done.tokens))
        assert done.usage.forward_passes_total == len(done.tokens) - 1 + asked_to_stop
        n_ends = len(eog_ids(tiny))
        steps = prefixes if asked_to_stop else prefixes[:-1]
        ratios = [1 - (len(trie.children(p)) + n_ends * trie.is_terminal(p)) / tiny.n_vocab() for p in steps]
        assert done.usage.skip_ratio_mean == pytest.approx(np.mean(ratios))
        assert done.usage.skip_ratio_std == pytest.approx(np.std(ratios))


def test_total_is_what_the_processor_decodes(tiny: Llama) -> None:
    """But for the end token, which the host asks for behind every leaf."""
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    for prompt in PROMPTS:
        done = run(tiny, CHOICES, prompt=prompt)
        tiny.reset()  # type: ignore[no-untyped-call]
        with decodes(tiny) as sizes:
            tiny.create_completion(prompt, logits_processor=constraint, max_tokens=32)
        must_end = not choice_of(done).text.endswith("STOP")
        assert done.usage.forward_passes_total == len(sizes) - 1 - must_end


def test_free_text_costs_a_decode_a_token(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        done = write(tiny)
    assert sizes == [done.usage.prompt_tokens] + [1] * 11
    assert (done.usage.forward_passes_total, done.usage.forward_passes_saved) == (11, 0)
    assert done.usage.skip_ratio_mean == 0.0


def test_numbers_of_the_usage(tiny: Llama) -> None:
    done = write(tiny)
    usage = done.usage
    assert usage.n_tokens == len(done.tokens) == 12
    assert usage.seconds > 0
    assert usage.tokens_per_second == pytest.approx(12 / usage.seconds)
    assert json.loads(json.dumps(done.to_dict()))["usage"]["n_tokens"] == 12


def test_total_where_a_leaf_that_begins_another_ends_and_text_goes_on(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        done = run(tiny, ["STOP", "STOP it now"], stop_at_span_end=False, max_tokens=8, **GREEDY)
    assert (choice_of(done).name, len(done.tokens), len(sizes)) == ("STOP", 8, 8)
    assert done.usage.forward_passes_total == 7
    assert done.usage.forward_passes_saved == 0


# --- the context after skipping ---------------------------------------------------------------------------------------


def test_rows_are_those_of_token_by_token(tiny: Llama, tiny_model_path: Path, session: StreamSession) -> None:
    session.prefill(PROMPT)
    for choices, text in ((["redwood", "redwing"], ", "), (CHOICES, " then"), ({"x": "zz redwood"}, "")):
        session.set_token_trie(choices)
        session.generate()
        session.splice(text)
        session.clear_token_trie()
        session.generate(1, **GREEDY)
        before = session.tokens[:-1]
        np.testing.assert_allclose(raw_row(tiny), row_one_by_one(tiny_model_path, before), atol=TOLERANCE)
        assert tiny.input_ids[: tiny.n_tokens].tolist() == list(before)


def test_context_that_cannot_drop_a_tail(tiny: Llama, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(llm: Llama) -> list[Any]:
        first, second = StreamSession.open(llm), StreamSession.open(llm)
        done: list[Any] = []
        for prompt in PROMPTS[:2]:
            first.prefill(prompt)
            second.prefill("the red one, the blue one:")
            first.set_token_trie(CHOICES)
            done += [first.generate().tokens, second.generate(3, **GREEDY).tokens]
            first.splice(" and")
            done += [first.generate().tokens, second.generate(3, **GREEDY).tokens]
            done.append(choose(llm, "the red one:", ["redwood", "redwing"]).tokens)
        return done

    with loaded(tiny_model_path) as fresh:
        ref = work(fresh)
    for module in ("llama_cpp", "llama_cpp.llama_cpp"):  # ours and the host's own
        monkeypatch.setattr(f"{module}.llama_memory_seq_rm", lambda *_: False)
    assert work(tiny) == ref


# --- samplers see every token once ------------------------------------------------------------------------------------


def by_hand(path: Path, before: Sequence[int], seen: Sequence[int], n: int, **settings: Any) -> list[int]:
    """``n`` tokens of llama.cpp's own loop: a chain that is fed ``seen``, and a decode for each token."""
    import llama_cpp

    with loaded(path) as llm:
        chain = build_sampler_chain(llm, SamplingParams(**settings))
        for token in seen:
            llama_cpp.llama_sampler_accept(chain, token)
        for token in before:
            llm.eval([token])
        out = []
        for _ in range(n):
            # It also accepts what it picks.
            out.append(llama_cpp.llama_sampler_sample(chain, llm.ctx, -1))
            llm.eval(out[-1:])
        llama_cpp.llama_sampler_free(chain)
        return out


PENALTIES: list[dict[str, Any]] = [
    {"penalty_repeat": 1.3},
    {"penalty_freq": 0.7},
    {"penalty_freq": 0.7, "penalty_last_n": 20},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
]
FEW = range(300, 320)


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("early", [True, False], ids=["samplers before the span", "samplers after it"])
def test_penalties_after_a_skipped_run(
    tiny: Llama, tiny_model_path: Path, session: StreamSession, penalties: dict[str, Any], early: bool
) -> None:
    """Text of few tokens, so that what was written decides what comes."""
    settings = {"penalty_last_n": 64, "logit_bias": dict.fromkeys(FEW, 40.0), **penalties}
    run_on = [300, 301, 300, 302, 303, 300, 304, 301, 305, 306, 307, 305, 308, 309, 310, 309, 311, 300]
    n_prompt = session.prefill(PROMPT)
    if early:
        session.generate(1, **settings, **GREEDY)
    session.set_token_trie(TokenTrie.from_sequences([("a", [*run_on, 302]), ("b", [*run_on, 303])]))
    session.generate(**({**settings, **GREEDY} if early else {}))
    session.splice(as_tokenizer(tiny).detokenize([304, 304, 318]).decode())
    session.clear_token_trie()
    before = session.tokens
    comp = list(session.generate(15, **settings, **GREEDY).tokens)
    assert comp == by_hand(tiny_model_path, before, before[n_prompt:], 15, temp=0.0, **settings)
    if "dry_multiplier" not in penalties:
        assert comp != by_hand(tiny_model_path, before, (), 15, temp=0.0, **settings), "nothing of it was seen"
    if penalties.get("penalty_freq") and len(penalties) == 1:
        twice = [token for token in before[n_prompt:] for _ in range(2)]
        assert comp != by_hand(tiny_model_path, before, twice, 15, temp=0.0, **settings), "all of it was seen twice"


def test_each_token_is_accepted_once(session: StreamSession, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    taken: list[int] = []
    accept = llama_cpp.llama_sampler_accept

    def spy(sampler: Any, token: int) -> None:
        taken.append(token)
        accept(sampler, token)

    n_prompt = session.prefill(PROMPT)
    monkeypatch.setattr(llama_cpp, "llama_sampler_accept", spy)
    session.generate(3, **GREEDY)
    session.set_token_trie(["redwood", "redwing"])
    session.generate(**GREEDY)
    session.splice(", blue")
    session.generate(stop_at_span_end=False, max_tokens=9, **GREEDY)
    session.clear_token_trie()
    session.generate(2, **GREEDY)
    assert taken == list(session.tokens[n_prompt:])


@pytest.mark.parametrize(
    "draws", [{"temp": 0.0}, {"temp": 1.5, "seed": 7}, {"temp": 1.0, "seed": 7, "top_k": 3}], ids=str
)
def test_free_text_is_that_of_a_chain_by_hand(tiny: Llama, tiny_model_path: Path, draws: dict[str, Any]) -> None:
    ref = by_hand(tiny_model_path, prompt_tokens(tiny, PROMPT), (), 10, **draws)
    more = {name: value for name, value in draws.items() if name != "temp"}
    assert list(write(tiny, max_tokens=10, temperature=draws["temp"], **more).tokens) == ref


# --- grammars ---------------------------------------------------------------------------------------------------------

WOODS = 'root ::= ("redwood" | "redwing") [0-9] [0-9] "!"'


def test_grammar_goes_on_after_a_span(session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(["redwood", "redwing"], lead="")
    done = session.generate(stop_at_span_end=False, grammar=WOODS, **GREEDY)
    assert re.fullmatch(r"red(wood|wing)\d\d!", done.text)
    assert done.finish_reason == "eog"
    assert choice_of(done).text == done.text[:-3]


def test_grammar_goes_on_after_spans_and_splices_and_other_settings(session: StreamSession) -> None:
    grammar = 'root ::= [0-9] ", " ("redwood" | "redwing") "; " [a-c] "."'
    session.prefill(PROMPT)
    text = session.generate(1, grammar=grammar, **GREEDY).text
    session.splice(", ")
    session.set_token_trie(["redwood", "redwing"], lead="")
    text += ", " + session.generate(grammar=grammar, temperature=1.0, seed=1).text
    session.splice("; ")
    session.clear_token_trie()
    done = session.generate(grammar=grammar, **GREEDY)
    text += "; " + done.text
    assert re.fullmatch(r"\d, red(wood|wing); [abc]\.", text)
    assert done.finish_reason == "eog"
    again = session.generate(grammar=grammar, **GREEDY)
    assert (again.text, again.tokens, again.finish_reason) == ("", (), "eog"), "it is over, and stays over"


def test_grammar_begins_where_it_is_first_given(session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.generate(3, **GREEDY)
    session.splice(" and")
    assert session.generate(grammar='root ::= "z" [0-9]', **GREEDY).text[0] == "z"


REFUSING: list[dict[str, Any]] = [
    {"grammar": 'root ::= "blue"'},
    {"grammar": 'root ::= "redw" [0-9]'},
    {"grammar": 'root ::= "redw" [0-9]', "grammar_triggers": ["red"]},
    {"grammar": 'root ::= "red"', "grammar_triggers": [483]},
]


@pytest.mark.parametrize("settings", REFUSING, ids=str)
def test_grammar_that_does_not_allow_the_pick(session: StreamSession, settings: dict[str, Any]) -> None:
    session.set_token_trie(["redwood", "redwing"], lead="")
    session.prefill(PROMPT)
    with pytest.raises(EngineError, match="grammar does not allow"):
        session.generate(**settings, **GREEDY)
    session.prefill(PROMPT)
    assert choice_of(session.generate()).complete


def test_grammar_as_the_hosts_object(tiny: Llama) -> None:
    from llama_cpp.llama_grammar import LlamaGrammar

    grammar = LlamaGrammar.from_string(WOODS, verbose=False)
    assert write(tiny, grammar=grammar).tokens == write(tiny, grammar=WOODS).tokens
    ref = tiny.create_completion(PROMPT, grammar=grammar, max_tokens=12, **GREEDY)
    assert write(tiny, grammar=grammar).text == text_of(ref)


def test_session_goes_on_after_its_grammar_refused(tiny: Llama, session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(["redwood", "redwing"], lead="")
    with pytest.raises(EngineError):
        session.generate(grammar='root ::= "red" [0-9]', **GREEDY)
    session.clear_token_trie()
    before = session.tokens
    comp = session.generate(5, **GREEDY).tokens
    assert comp == write(tiny, prompt=list(before), max_tokens=5).tokens


DEAD_ENDS = [
    ({"grammar": 'root ::= "a" "\\U7FFFFFFF"'}, "grammar"),
    ({"grammar": 'root ::= "zq"', "logit_bias": dict.fromkeys(range(768), -float("inf"))}, "grammar|samplers"),
]


@pytest.mark.parametrize(("settings", "message"), DEAD_ENDS, ids=["grammar", "bias"])
def test_grammar_that_leaves_nothing(session: StreamSession, settings: dict[str, Any], message: str) -> None:
    session.prefill(PROMPT)
    with pytest.raises(EngineError, match=message):
        session.generate(8, **settings, **GREEDY)
    session.prefill(PROMPT)
    assert session.generate(3, **GREEDY).finish_reason == "length"


LAZY = [
    pytest.param({"grammar": 'root ::= "zz"', "grammar_triggers": ["zz"]}, id="untriggered"),
    pytest.param({"grammar": 'root ::= "redw" [a-z]*', "grammar_triggers": ["redw"]}, id="triggered inside"),
    pytest.param({"grammar": "root ::= [^0-9]*", "grammar_triggers": [288]}, id="triggered before"),
]


@pytest.mark.parametrize("settings", LAZY)
def test_lazy_grammar_does_not_touch_a_span(tiny: Llama, settings: dict[str, Any]) -> None:
    def ask(**grammar: Any) -> Generation:
        with StreamSession.open(tiny) as session:
            session.prefill("action kind")
            session.generate(1, logit_bias={288: 100.0}, **grammar, **GREEDY)
            session.set_token_trie(["redwood", "redwing"], lead="")
            return session.generate(logit_bias={288: 100.0}, **grammar, **GREEDY)

    ref, comp = choice_of(ask()), choice_of(ask(**settings))
    assert (comp.tokens, comp.name) == (ref.tokens, ref.name)
    # The first call fills the context for the others, whose batches are smaller.
    assert comp.logprob == pytest.approx(ref.logprob, abs=1e-4)
    assert comp.margin == pytest.approx(ref.margin, abs=1e-3)
    assert ask().usage.skip_ratio_mean == ask(**settings).usage.skip_ratio_mean


def test_lazy_grammar_that_the_span_wakes_holds_behind_it(session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(["redwood", "redwing"], lead="")
    done = session.generate(
        stop_at_span_end=False,
        grammar='root ::= "redw" [a-z] [a-z] [a-z] [0-9] "!"',
        grammar_triggers=["redw"],
        **GREEDY,
    )
    assert re.fullmatch(r"red(wood|wing)\d!", done.text)
    assert done.finish_reason == "eog"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"grammar": 'root ::= "rx"', "grammar_triggers": ["r"]}, id="word"),
        pytest.param({"grammar": 'root ::= "x"', "grammar_triggers": [483]}, id="token"),
    ],
)
def test_trigger_that_its_grammar_does_not_begin_with(tiny_model_path: Path, settings: dict[str, Any]) -> None:
    """In a process of its own: llama.cpp throws through C where a token wakes a grammar and does not fit it."""
    program = f"""
from llama_cpp import Llama
from trie_sampler import EngineError
from trie_sampler.session import StreamSession
llm = Llama({str(tiny_model_path)!r}, n_ctx=256, n_threads=1, verbose=False)
session = StreamSession.open(llm)
session.prefill("action kind:")
session.set_token_trie(["redwood", "redwing"], lead="")
try:
    session.generate(**{settings!r})
except EngineError:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_splice_that_the_grammar_refuses_leaves_the_text(session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.generate(1, grammar="root ::= [a-z]+", **GREEDY)
    before = session.tokens
    with pytest.raises(EngineError):
        session.splice("one!two")
    assert session.tokens == before


# --- the same as the other doors --------------------------------------------------------------------------------------


def doors(llm: Llama, choices: Any, prompt: str, **spelling: Any) -> dict[str, str]:
    """The text that each door gives."""
    constraint = TrieLogitsProcessor.from_choices(llm, choices, **spelling)
    with native_sampling(llm, choices, **spelling) as native:
        of_native = text_of(llm.create_completion(prompt, max_tokens=native.max_tokens))
    llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
    return {
        "session": run(llm, choices, prompt=prompt, trie=spelling).text,
        "choose": choose(llm, prompt, choices, **spelling).text,
        "processor": constraint.result.text,
        "native": of_native,
    }


@pytest.mark.parametrize("spelling", [{}, {"lead": ""}, {"tokenization": "every"}, {"json_value": True}], ids=str)
def test_every_door_gives_the_same(tiny: Llama, spelling: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        texts = doors(tiny, CHOICES, prompt, **spelling)
        assert set(texts.values()) == {texts["choose"]}, texts


def test_choice_is_that_of_choose(tiny: Llama) -> None:
    for prompt in PROMPTS:
        comp, ref = choice_of(run(tiny, CHOICES, prompt=prompt)), choose(tiny, prompt, CHOICES)
        assert (comp.name, comp.value, comp.index, comp.tokens, comp.text, comp.complete) == (
            ref.name,
            ref.value,
            ref.index,
            ref.tokens,
            ref.text,
            True,
        )
        assert comp.logprob == pytest.approx(ref.logprob, abs=1e-3)
        assert comp.margin == pytest.approx(ref.margin, abs=1e-3)


@pytest.mark.parametrize("model", ["tiny", "tiny_bpe"])
def test_any_set_of_choices(request: pytest.FixtureRequest, model: str) -> None:
    llm: Llama = request.getfixturevalue(model)

    @settings(suppress_health_check=list(HealthCheck), max_examples=50)
    @given(choice_texts(), st.sampled_from([PROMPT, "say ", "action kind: "]), st.booleans())
    def check(texts: list[str], prompt: str, heal: bool) -> None:
        ref = choose(llm, prompt, texts, heal=heal)
        done, _, _ = collected(llm, texts, prompt=prompt, trie={"heal": heal})
        assert (choice_of(done).tokens, choice_of(done).name, done.text) == (ref.tokens, ref.name, ref.text)
        spelling = {"lead": "", "tokenization": "every"}
        exact, short = (collected(llm, texts, prompt=prompt, trie=spelling, skip=s)[0] for s in ("exact", "canonical"))
        assert exact.text == short.text == choice_of(short).name
        assert decoded(short) <= decoded(exact)
        cut, _, _ = collected(llm, texts, prompt=prompt, max_tokens=1 + len(texts[0]) % 3)
        assert cut.finish_reason in ("span", "length")
        assert choice_of(cut).complete == (cut.finish_reason == "span")

    check()


class Colour(enum.Enum):
    RED = "red"
    WOOD = "redwood"


def test_value_is_what_the_caller_gave(tiny: Llama) -> None:
    assert isinstance(choice_of(run(tiny, Colour)).value, Colour)
    kinds: list[Any] = [{"halt": "STOP", "go": "PLAY MUSIC"}, Literal["STOP", "PLAY MUSIC"], Colour]
    for choices in kinds:
        comp, ref = choice_of(run(tiny, choices)), choose(tiny, PROMPT, choices)
        assert (comp.name, comp.value, comp.index) == (ref.name, ref.value, ref.index)


@pytest.mark.parametrize("on_end", ["mass", "eog"])
def test_draws_are_the_processors(tiny: Llama, on_end: str) -> None:
    settings: dict[str, Any] = {"temperature": 8.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    names = set()
    for seed in range(12):
        constraint = TrieLogitsProcessor.from_choices(
            tiny, CHOICES, mode="sampled", on_end=on_end, seed=seed, **settings
        )
        tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=32)
        comp = choice_of(run(tiny, CHOICES, "sampled", trie={"on_end": on_end}, seed=seed, **settings))
        assert (comp.tokens, comp.name) == (constraint.result.tokens, constraint.result.name), seed
        names.add(comp.name)
    assert len(names) > 2


def test_filters_reach_the_draws(tiny: Llama) -> None:
    settings: dict[str, Any] = {"temperature": 8.0, "top_p": 1.0, "min_p": 0.0}
    greedy = choice_of(run(tiny, CHOICES)).tokens
    for seed in range(5):
        assert choice_of(run(tiny, CHOICES, 1, seed=seed, top_k=1, **settings)).tokens == greedy
        assert choice_of(run(tiny, CHOICES, 1, seed=seed, temperature=0.0)).tokens == greedy
        assert choice_of(run(tiny, CHOICES, 0, seed=seed, top_k=0, **settings)).tokens == greedy, "no draws"


@contextlib.contextmanager
def generated(llm: Llama) -> Iterator[list[int]]:
    """The ids that the host's loop yields inside the block, the end of generation among them."""
    llm.reset()  # type: ignore[no-untyped-call]
    ids: list[int] = []
    generate = llm.generate

    def spy(*arguments: Any, **keywords: Any) -> Iterator[int]:
        for token in generate(*arguments, **keywords):
            ids.append(token)
            yield token

    vars(llm)["generate"] = spy
    try:
        yield ids
    finally:
        del vars(llm)["generate"]


def check_against_grammar(llm: Llama, choices: Sequence[str], prompt: str) -> None:
    from llama_cpp.llama_grammar import LlamaGrammar

    grammar = LlamaGrammar.from_string(gbnf(choices), verbose=False)
    with generated(llm) as ref:
        llm.create_completion(prompt, grammar=grammar, temperature=0.0, max_tokens=max(map(len, choices)) + 1)
    llm.reset()  # type: ignore[no-untyped-call]
    spelling = {"lead": "", "tokenization": "every", "on_end": "eog"}
    done = run(llm, choices, prompt=prompt, trie=spelling, skip="exact")
    assert list(done.tokens) == [token for token in ref if token not in eog_ids(llm)], prompt
    assert done.text in choices
    llm.reset()  # type: ignore[no-untyped-call]
    short = run(llm, choices, prompt=prompt, trie=spelling, skip="canonical")
    assert (short.text, choice_of(short).name) == (done.text, choice_of(done).name)
    assert decoded(short) <= decoded(done)


def test_exact_is_the_grammars(tiny: Llama) -> None:
    for prompt in PROMPTS:
        check_against_grammar(tiny, CHOICES, prompt)


def test_canonical_decodes_less(tiny: Llama) -> None:
    spelling = {"lead": "", "tokenization": "every"}
    counts = {skip: [0, 0] for skip in ("exact", "canonical")}
    for prompt in PROMPTS:
        texts = []
        for skip, count in counts.items():
            tiny.reset()  # type: ignore[no-untyped-call]
            with decodes(tiny) as sizes:
                done = run(tiny, CHOICES, prompt=prompt, trie=spelling, skip=skip)
            assert len(sizes) - 1 == decoded(done)
            assert choice_of(done).complete
            count[0] += len(sizes)
            count[1] += len(done.tokens)
            texts.append(done.text)
        assert texts[0] == texts[1]
    assert counts["canonical"][0] < counts["exact"][0]


def test_canonical_with_one_leaf_asks_nothing(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        done = run(tiny, ["redwood"], trie={"lead": "", "tokenization": "every"}, skip="canonical")
    assert sizes == []
    assert list(done.tokens) == tiny.tokenize(b"redwood", add_bos=False)


HEAD = "".join(f"Request: {REQUESTS[action][1]}\nAction: {action}\n" for action in ("REPLY", "STOP_TIMER", "GET_NEWS"))


def request_prompt(request: str) -> str:
    return f"{HEAD}Request: {request}\nAction:"


def check_doors(llm: Llama, requests: Sequence[str]) -> None:
    """A pick that is nearly a tie may go either way: a batch of another shape changes logits a little."""
    constraint = TrieLogitsProcessor.from_choices(llm, ACTIONS)
    names = set()
    with StreamSession.open(llm) as session:
        for request in requests:
            prompt = request_prompt(request)
            session.prefill(prompt)
            session.set_token_trie(ACTIONS)
            done = choice_of(session.generate())
            llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
            result = constraint.result
            with native_sampling(llm, ACTIONS) as native:
                text = text_of(llm.create_completion(prompt, max_tokens=native.max_tokens))
            found = {done.name, result.name, text.strip()}
            assert len(found) == 1 or min(done.margin or 0, result.margin or 0) < 0.2, (request, found)
            names.add(done.name)
    assert len(names) > 1


def test_doors_on_real_models(llm: Llama) -> None:
    check_doors(llm, [requests[3] for requests in REQUESTS.values()][::8])


@pytest.mark.slow
def test_doors_on_real_models_at_length(llm: Llama) -> None:
    check_doors(llm, [request for requests in REQUESTS.values() for request in requests])


@pytest.mark.slow
def test_exact_is_the_grammars_on_real_models(llm: Llama) -> None:
    for requests in list(REQUESTS.values())[::6]:
        check_against_grammar(llm, ACTIONS, request_prompt(requests[5]))


# --- text that goes on ------------------------------------------------------------------------------------------------


def test_text_goes_on_after_the_leaf(tiny: Llama) -> None:
    done = run(tiny, CHOICES, stop_at_span_end=False, max_tokens=12, **GREEDY)
    choice = choice_of(done)
    assert choice.complete
    assert done.tokens[: len(choice.tokens)] == choice.tokens
    assert done.finish_reason == "length"
    rest = write(tiny, prompt=[*prompt_tokens(tiny, PROMPT), *choice.tokens], max_tokens=12 - len(choice.tokens))
    assert done.tokens[len(choice.tokens) :] == rest.tokens


@pytest.mark.parametrize("prompt", [[1, n, n + 1] for n in range(300, 304)], ids=str)
def test_leaf_that_begins_another_ends_where_the_model_leaves_it(tiny: Llama, prompt: list[int]) -> None:
    """Whatever the model writes behind the shorter leaf by itself decides."""
    whole = TokenTrie.from_choices(tiny, ["STOP", "STOP it now"], prompt=prompt)
    (short,) = [tokens for name, tokens in whole.leaves() if name == "STOP"][:1]
    follows = write(tiny, prompt=[*prompt, *short], max_tokens=2).tokens
    leaves = [("short", short), ("long", [*short, follows[0], 400]), ("other", [*short, follows[0], 401])]
    for trie, names in (
        (TokenTrie.from_sequences(leaves[:2]), {"long"}),
        (TokenTrie.from_sequences(leaves), {"long", "other"}),
        (TokenTrie.from_sequences([leaves[0], ("far", [*short, (follows[0] + 1) % 700 + 6, 400])]), {"short"}),
    ):
        done = run(tiny, trie, prompt=prompt, stop_at_span_end=False, max_tokens=len(short) + 4, **GREEDY)
        assert choice_of(done).name in names
        if names == {"short"}:
            assert done.tokens[: len(short) + 2] == (*short, *follows)


def test_stop_token_ends_a_leaf_where_text_goes_on(tiny: Llama) -> None:
    """The separator is the model's to write: text begins with it."""
    follows = write(tiny, prompt=[*prompt_tokens(tiny, PROMPT), 420], max_tokens=1).tokens
    trie = TokenTrie.from_sequences([("a", [420]), ("b", [420, 400])])
    done = run(tiny, trie, trie={"stop_tokens": follows}, stop_at_span_end=False, max_tokens=4, **GREEDY)
    assert (choice_of(done).name, choice_of(done).tokens) == ("a", (420,))
    assert done.tokens[:2] == (420, *follows)


def test_stop_token_is_no_part_of_the_choice(tiny: Llama) -> None:
    everything = [token for token in range(6, 768) if token not in (262, 743, 453, 349)]
    done = run(tiny, ["STOP", "STOP it now"], trie={"stop_tokens": everything, "lead": ""})
    assert (choice_of(done).name, done.text) == ("STOP", "STOP")
    assert choice_of(done).tokens == done.tokens
    assert choice_of(done).text == "STOP"


# --- stop texts -------------------------------------------------------------------------------------------------------


def collected(llm: Llama, choices: Any = None, **settings: Any) -> tuple[Generation, list[StreamStep], list[str]]:
    steps: list[StreamStep] = []
    chunks: list[str] = []
    done = run(llm, choices, on_step=steps.append, on_text_chunk=chunks.append, **settings)
    assert "".join(chunks) == "".join(step.text for step in steps) == done.text
    assert all(chunks)
    if done.finish_reason != "stop":
        assert tuple(token for step in steps for token in step.tokens) == done.tokens
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    return done, steps, chunks


def test_stop_text_at_every_place(tiny: Llama) -> None:
    ref = write(tiny, max_tokens=12).text
    for start in range(len(ref)):
        for size in (1, 2, 5):
            stop = ref[start : start + size]
            done, _, _ = collected(tiny, max_tokens=12, stop=stop, **GREEDY)
            assert (done.text, done.finish_reason) == (ref[: ref.index(stop)], "stop")
            assert tiny.detokenize(list(done.tokens)).decode() == done.text


def test_first_of_several_stop_texts(tiny: Llama) -> None:
    ref = write(tiny, max_tokens=12).text
    done, _, _ = collected(tiny, max_tokens=12, stop=[ref[8:11], ref[4:6], "never"], **GREEDY)
    assert done.text == ref[: min(ref.index(ref[8:11]), ref.index(ref[4:6]))]


def test_text_that_only_begins_a_stop_is_given_in_the_end(tiny: Llama) -> None:
    ref = write(tiny, max_tokens=6).text
    done, steps, _ = collected(tiny, max_tokens=6, stop=f"{ref[-3:]}\n?", **GREEDY)
    assert (done.text, done.finish_reason) == (ref, "length")
    assert steps[-1].text.endswith(ref[-3:])


def test_stop_text_where_text_goes_on(tiny: Llama) -> None:
    ref = run(tiny, ["redwood", "redwing"], stop_at_span_end=False, max_tokens=12, **GREEDY)
    leaf = choice_of(ref).text
    stop = ref.text[len(leaf) : len(leaf) + 2]
    done, _, _ = collected(tiny, ["redwood", "redwing"], stop_at_span_end=False, max_tokens=12, stop=stop, **GREEDY)
    assert (done.text, done.finish_reason) == (leaf, "stop")
    assert choice_of(done).complete


@pytest.mark.parametrize("stop", ["STOP", "it", ["x y z", " MU"], "redwood"])
def test_stop_text_inside_a_choice_is_refused(tiny: Llama, stop: Any) -> None:
    with decodes(tiny) as sizes, pytest.raises(ValueError, match="inside the choice"):
        run(tiny, CHOICES, stop=stop)
    assert sizes == []


CUT_SILENTLY: list[tuple[dict[str, Any], Any, str]] = [
    ({"json_value": True}, None, '"'),
    ({"case_fold": True, "lead": ""}, None, "REDW"),
    ({"lead": " "}, None, " red"),
    ({}, "trie", "redw"),
    ({}, "payload", "redw"),
]


@pytest.mark.parametrize(("spelling", "form", "stop"), CUT_SILENTLY, ids=lambda value: str(value)[:20])
def test_stop_text_inside_what_is_written(tiny: Llama, spelling: dict[str, Any], form: Any, stop: str) -> None:
    choices: Any = ["REDWOOD", "REDWING"] if "case_fold" in spelling else ["redwood", "redwing"]
    if form == "trie":
        choices = TokenTrie.from_choices(tiny, choices, prompt=PROMPT)
    if form == "payload":
        choices = json.dumps(payload_of(tiny, {"p": {"A": "redwood", "B": "redwing"}}))
    if "case_fold" in spelling:
        written = run(tiny, choices, trie=spelling).text
        stop = written[:3]
        assert stop not in choices[0] or pytest.fail("nothing to see: it is written as it was given")
    with pytest.raises(ValueError, match="inside the choice"):
        run(tiny, choices, trie=spelling, stop=stop)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_max_tokens_inside_a_span(tiny: Llama) -> None:
    whole = run(tiny, ["redwood", "redwing"], trie={"lead": ""})
    for limit in range(1, len(whole.tokens)):
        for goes_on in (False, True):
            done = run(tiny, ["redwood", "redwing"], trie={"lead": ""}, max_tokens=limit, stop_at_span_end=not goes_on)
            choice = choice_of(done)
            assert done.finish_reason == "length"
            assert (choice.complete, choice.name, choice.index, choice.value) == (False, None, None, None)
            assert done.tokens == whole.tokens[:limit] == choice.tokens
            assert whole.text.startswith(done.text)
    for limit in (len(whole.tokens), len(whole.tokens) + 1):
        done = run(tiny, ["redwood", "redwing"], trie={"lead": ""}, max_tokens=limit)
        assert (done.finish_reason, done.text) == ("span", whole.text)


def test_max_tokens_counts_leaf_and_text(tiny: Llama) -> None:
    leaf = run(tiny, LETTERS_TRIE).tokens
    for limit in range(1, 8):
        done = run(tiny, LETTERS_TRIE, stop_at_span_end=False, max_tokens=limit, **GREEDY)
        assert len(done.tokens) == limit
        assert done.finish_reason == "length"
        assert choice_of(done).complete == (limit >= len(leaf))


LETTERS_TRIE = TokenTrie.from_sequences(LETTERS)


def test_text_fills_the_context_and_no_more(tiny: Llama, session: StreamSession) -> None:
    session.prefill([1] + [300] * 250)
    done = session.generate(**GREEDY)
    assert (len(done.tokens), done.finish_reason) == (5, "length")
    assert len(session.tokens) == 256
    assert session.generate(**GREEDY).tokens == ()
    with pytest.raises(EngineError, match="n_ctx="):
        session.splice("x")
    assert tiny.create_completion(PROMPT, max_tokens=2)


@pytest.mark.parametrize("n", [256, 257, 3000])
def test_prompt_that_does_not_fit(tiny: Llama, session: StreamSession, n: int) -> None:
    session.prefill(PROMPT)
    with decodes(tiny) as sizes, pytest.raises(EngineError, match=f"n_ctx={n + 1}"):
        session.prefill([300] * n)
    assert sizes == []
    assert session.tokens == tuple(prompt_tokens(tiny, PROMPT)), "what was there stays"


def test_trie_that_does_not_fit_is_refused_before_any_decode(tiny: Llama, session: StreamSession) -> None:
    session.prefill([1] + [300] * 252)
    session.set_token_trie(LETTERS_TRIE)
    assert choice_of(session.generate()).complete, "it fits exactly"
    session.prefill([1] + [300] * 253)
    with decodes(tiny) as sizes, pytest.raises(EngineError, match="n_ctx=257"):
        session.generate()
    assert sizes == []
    assert len(session.tokens) == 254
    assert len(session.generate(2).tokens) == 2, "a part of it may"


def test_splice_that_does_not_fit(session: StreamSession) -> None:
    session.prefill([1] + [300] * 252)
    with pytest.raises(EngineError, match="n_ctx="):
        session.splice("redwood")
    assert len(session.tokens) == 253


def test_safety_net_is_not_met_by_a_longer_leaf(tiny: Llama, caplog: pytest.LogCaptureFixture) -> None:
    trie = TokenTrie.from_sequences([("a", [300] * 40), ("b", [300] * 39 + [301])])
    done = run(tiny, trie, trie={"max_span_tokens": 3})
    assert len(done.tokens) == 40
    assert choice_of(done).complete
    assert caplog.records == []


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [None, CHOICES], ids=["free", "trie"])
def test_cancel_from_a_callback(tiny: Llama, session: StreamSession, choices: Any) -> None:
    session.prefill("the blue one:")
    if choices:
        session.set_token_trie(["redwood", "redwing now", "redwing then"], lead="")
    at_cancel: list[int] = []

    def stop_it(step: StreamStep) -> None:
        if not step.done and not at_cancel:
            session.cancel()
            at_cancel.append(len(sizes))

    with decodes(tiny) as sizes:
        done = session.generate(20, on_step=stop_it, **GREEDY)
    assert done.finish_reason == "cancelled"
    assert len(sizes) == at_cancel[0], "no decode after it"
    assert (done.choice is not None and not done.choice.complete) == bool(choices)
    assert session.tokens == (*prompt_tokens(tiny, "the blue one:"), *done.tokens)
    session.clear_token_trie()
    again = session.generate(5, **GREEDY)
    before = [*prompt_tokens(tiny, "the blue one:"), *done.tokens]
    assert again.tokens == write(tiny, prompt=before, max_tokens=5).tokens


@pytest.mark.parametrize("n_before", [1, 2, 7])
def test_cancel_from_another_thread_during_a_decode(tiny: Llama, session: StreamSession, n_before: int) -> None:
    session.prefill(PROMPT)
    decode, sizes = tiny._ctx.decode, []
    reached, cancelled = threading.Event(), threading.Event()

    def slow(batch: Any) -> None:
        sizes.append(batch.n_tokens())
        if len(sizes) == n_before:
            reached.set()
            assert cancelled.wait(10)
        decode(batch)

    def other() -> None:
        assert reached.wait(10)
        session.cancel()
        cancelled.set()

    thread = threading.Thread(target=other)
    thread.start()
    vars(tiny._ctx)["decode"] = slow
    try:
        done = session.generate(50, **GREEDY)
    finally:
        del vars(tiny._ctx)["decode"]
        thread.join()
    assert done.finish_reason == "cancelled"
    assert len(sizes) == n_before, "stops within one decode"
    assert len(done.tokens) == n_before, "what that decode was for is still picked"
    rest = session.generate(5, **GREEDY)
    assert done.tokens + rest.tokens == write(tiny, max_tokens=n_before + 5).tokens


def test_cancel_while_a_long_prompt_is_evaluated(tiny_model_path: Path) -> None:
    with loaded(tiny_model_path, n_batch=8) as llm, StreamSession.open(llm) as session:
        session.prefill([1] + [300] * 40)
        decode, sizes = llm._ctx.decode, []

        def spy(batch: Any) -> None:
            sizes.append(batch.n_tokens())
            session.cancel()
            decode(batch)

        vars(llm._ctx)["decode"] = spy
        assert session.generate(5, **GREEDY).finish_reason == "cancelled"
        assert sizes == [8]


def test_cancel_before_and_after_does_nothing(session: StreamSession) -> None:
    session.cancel()
    session.prefill(PROMPT)
    session.cancel()
    assert session.generate(3, **GREEDY).finish_reason == "length"
    session.cancel()
    assert session.generate(3, **GREEDY).finish_reason == "length"


def test_cancelled_steps_end_with_done(tiny: Llama) -> None:
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)
        steps: list[StreamStep] = []

        def stop_it(step: StreamStep) -> None:
            steps.append(step)
            if len(steps) == 2:
                session.cancel()

        done = session.generate(10, on_step=stop_it, **GREEDY)
    assert [step.done for step in steps] == [False, False, True]
    assert "".join(step.text for step in steps) == done.text
    assert (done.usage.forward_passes_total, done.usage.forward_passes_saved) == (1, 0)


# --- errors in callbacks ----------------------------------------------------------------------------------------------


class CallbackError(Exception):
    pass


@pytest.mark.parametrize("error", [CallbackError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["on_step", "on_text_chunk"])
@pytest.mark.parametrize("n_good", [0, 1])
def test_error_of_a_callback_clears_the_trie(
    tiny: Llama, session: StreamSession, name: str, error: type[BaseException], n_good: int
) -> None:
    calls = iter(range(100))

    def fail(_: Any) -> None:
        if next(calls) == n_good:
            raise error

    settings: dict[str, Any] = {name: fail}
    n_prompt = session.prefill(PROMPT)
    with pytest.raises(error):
        session.generate_with_usage(token_tree_payload=["zz redwood", "zz redwing now"], **settings)
    assert not session.has_token_trie
    assert "generating" not in repr(session)
    before = list(session.tokens)
    assert before[:n_prompt] == prompt_tokens(tiny, PROMPT)
    assert session.generate(5, **GREEDY).tokens == write(tiny, prompt=before, max_tokens=5).tokens


def test_generate_with_usage(tiny: Llama, session: StreamSession) -> None:
    session.prefill(PROMPT)
    done = session.generate_with_usage(token_tree_payload=CHOICES, token_tree_mode=0)
    assert choice_of(done).tokens == choose(tiny, PROMPT, CHOICES).tokens
    assert not session.has_token_trie
    session.set_token_trie(CHOICES)
    done = session.generate_with_usage(3, **GREEDY)
    assert (done.choice, done.finish_reason, session.has_token_trie) == (None, "length", False)
    with pytest.raises(EngineError):
        session.generate_with_usage(token_tree_payload=CHOICES, grammar='root ::= "zz"')
    assert not session.has_token_trie
    payload = payload_of(tiny, KINDS)
    path = "kind"
    done = session.generate_with_usage(token_tree_payload=json.dumps(payload), token_tree_path=path)
    assert choice_of(done).name in KINDS["kind"]


# --- text comes in whole characters -----------------------------------------------------------------------------------

CHARACTERS = [
    ["\U0001f44d", "\U0001f44e", "\U0001f44d\U0001f3fd"],
    ["\u6771\u4eac", "\u6771\u4eac\u90fd", "\u65e5\u672c"],
    ["na\u00efve", "na\u00efte", "e\u0301"],
    ["\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f469\u200d\U0001f467"],
]


@pytest.mark.parametrize("model", ["tiny", "tiny_bpe"])
@pytest.mark.parametrize("choices", CHARACTERS, ids=ascii)
@pytest.mark.parametrize("spelling", ["canonical", "every"])
def test_pieces_never_break_a_character(
    request: pytest.FixtureRequest, model: str, choices: list[str], spelling: str
) -> None:
    llm: Llama = request.getfixturevalue(model)
    for seed in range(4):
        done, _, chunks = collected(
            llm, choices, mode="sampled", trie={"tokenization": spelling}, temperature=9.0, seed=seed
        )
        assert done.text == choice_of(done).text
        assert done.text.removeprefix(" ") == choice_of(done).name
        assert not any("\ufffd" in chunk for chunk in chunks)


def test_text_of_a_model_that_writes_bytes(tiny: Llama) -> None:
    """A random model writes parts of characters; what makes none is left out, as the host does it."""
    for seed in range(5):
        settings = {"max_tokens": 60, "temperature": 5.0, "seed": seed, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        done, _, chunks = collected(tiny, logit_bias=dict.fromkeys(range(134, 262), 30.0), **settings)
        assert done.text == as_tokenizer(tiny).detokenize(done.tokens).decode("utf-8", "ignore")
        assert not any("\ufffd" in chunk for chunk in chunks)


def test_character_cut_by_max_tokens_is_left_out(tiny: Llama) -> None:
    done, _, _ = collected(tiny, ["\U0001f44d", "\U0001f44e"], trie={"lead": ""}, max_tokens=2)
    assert (done.text, len(done.tokens), done.finish_reason) == ("", 2, "length")


def test_steps_come_before_the_decode_that_follows(tiny: Llama, session: StreamSession) -> None:
    session.prefill(PROMPT)
    log: list[str] = []
    decode = tiny._ctx.decode

    def spy(batch: Any) -> None:
        log.append("decode")
        decode(batch)

    vars(tiny._ctx)["decode"] = spy
    try:
        session.generate(3, on_step=lambda step: log.append("done" if step.done else "step"), **GREEDY)
    finally:
        del vars(tiny._ctx)["decode"]
    assert log == ["decode", "step", "decode", "step", "decode", "done"]


# --- healing ----------------------------------------------------------------------------------------------------------


def test_healing_rewrites_the_prompts_end(tiny: Llama) -> None:
    prompt = "action kind: "
    done, _, _ = collected(tiny, ["redwood", "blue"], prompt=prompt, trie={"heal": True})
    ref = choose(tiny, prompt, ["redwood", "blue"], heal=True)
    assert (choice_of(done).tokens, done.text, choice_of(done).text) == (ref.tokens, ref.text, ref.text)
    assert done.text == ref.name
    with StreamSession.open(tiny) as session:
        session.prefill(prompt)
        session.set_token_trie(["redwood", "blue"], heal=True)
        first = session.generate()
        assert as_tokenizer(tiny).detokenize(session.tokens) == (prompt + first.text).encode()
        session.splice(" or ")
        second = session.generate()
        assert as_tokenizer(tiny).detokenize(session.tokens) == (prompt + first.text + " or " + second.text).encode()


def test_refusal_leaves_a_prompt_that_would_be_healed(
    session: StreamSession, capfd: pytest.CaptureFixture[str]
) -> None:
    session.prefill("action kind: ")
    session.set_token_trie(["redwood", "blue"], heal=True)
    before = session.tokens
    with pytest.raises(EngineError, match="does not parse"):
        session.generate(grammar="root ::= (")
    capfd.readouterr()
    assert session.tokens == before


# --- states -----------------------------------------------------------------------------------------------------------

WORK: dict[str, Callable[[StreamSession], Any]] = {
    "prefill": lambda session: session.prefill(PROMPT),
    "set_token_trie": lambda session: session.set_token_trie(CHOICES),
    "clear_token_trie": lambda session: session.clear_token_trie(),
    "generate": lambda session: session.generate(2),
    "generate_with_usage": lambda session: session.generate_with_usage(2, token_tree_payload=CHOICES),
    "splice": lambda session: session.splice("x"),
}


@pytest.mark.parametrize("name", ["generate", "generate_with_usage", "splice"])
def test_before_prefill(tiny: Llama, session: StreamSession, name: str) -> None:
    session.set_token_trie(CHOICES)
    with decodes(tiny) as sizes, pytest.raises(EngineError, match="prefill first"):
        WORK[name](session)
    assert sizes == []
    assert session.has_token_trie
    session.prefill(PROMPT)
    assert choice_of(session.generate()).complete


@pytest.mark.parametrize("name", WORK)
def test_after_close(session: StreamSession, name: str) -> None:
    session.prefill(PROMPT)
    session.close()
    session.close()
    session.cancel()
    assert "closed" in repr(session)
    with pytest.raises(EngineError, match="closed"):
        WORK[name](session)


@pytest.mark.parametrize("name", [*WORK, "close"])
def test_while_generating(tiny: Llama, session: StreamSession, name: str) -> None:
    refused: list[Exception] = []

    def meddle(_: StreamStep) -> None:
        assert "generating" in repr(session)
        with pytest.raises(EngineError) as caught:
            session.close() if name == "close" else WORK[name](session)
        refused.append(caught.value)

    session.prefill(PROMPT)
    done = session.generate(3, on_step=meddle, **GREEDY)
    assert len(refused) == 3
    assert done.tokens == write(tiny, max_tokens=3).tokens
    assert "open" in repr(session)


def test_while_another_thread_generates(session: StreamSession) -> None:
    session.prefill(PROMPT)
    reached, asked = threading.Event(), threading.Event()
    out: list[Any] = []

    def wait(_: StreamStep) -> None:
        reached.set()
        assert asked.wait(10)

    thread = threading.Thread(target=lambda: out.append(session.generate(5, on_step=wait, **GREEDY)))
    thread.start()
    assert reached.wait(10)
    for work in [*WORK.values(), StreamSession.close]:
        with pytest.raises(EngineError, match="generat"):
            work(session)
    asked.set()
    thread.join()
    assert len(out[0].tokens) == 5


def test_context_manager_closes_and_leaves_the_model(tiny: Llama) -> None:
    def fail(_: StreamStep) -> None:
        raise CallbackError

    session = StreamSession.open(tiny)
    session.prefill(PROMPT)
    with pytest.raises(CallbackError), session:
        session.generate(on_step=fail)
    with pytest.raises(EngineError, match="closed"):
        session.generate()
    assert tiny.create_completion(PROMPT, max_tokens=2)


@pytest.mark.parametrize("slot_id", [-1, 0])
def test_slots_it_has(session: StreamSession, slot_id: int) -> None:
    assert session.prefill(PROMPT, slot_id) == len(session.tokens) == 4


@pytest.mark.parametrize("slot_id", [1, -2, 7, None, "0"])
def test_slots_it_has_not(session: StreamSession, slot_id: Any) -> None:
    with pytest.raises(ValueError, match="slot"):
        session.prefill(PROMPT, slot_id=slot_id)
    assert session.tokens == ()


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", [1.5], ["a"], []], ids=repr)
def test_prompts_of_another_kind(session: StreamSession, prompt: Any) -> None:
    session.prefill(PROMPT)
    before = session.tokens
    with pytest.raises((TypeError, TrieSamplerError)):
        session.prefill(prompt)
    assert session.tokens == before


def test_prompts_of_every_kind(tiny: Llama, session: StreamSession) -> None:
    prompts: list[Any] = [PROMPT, [1, 300], np.array([1, 300], np.int32), [{"role": "user", "content": "kind"}], ""]
    for prompt in prompts:
        assert session.prefill(prompt) == len(prompt_tokens(tiny, prompt))
        assert list(session.tokens) == prompt_tokens(tiny, prompt)


def test_something_that_is_no_llama(tiny_model_path: Path) -> None:
    for llm in (None, "model.gguf", object()):
        with pytest.raises(TypeError, match="Llama"):
            StreamSession.open(llm)  # type: ignore[arg-type]
    with loaded(tiny_model_path, vocab_only=True) as llm, pytest.raises(TrieSamplerError, match="vocab_only"):
        StreamSession.open(llm)


# --- settings ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_tokens": 0}, ValueError, "max_tokens"),
    ({"max_tokens": -1}, ValueError, "max_tokens"),
    ({"max_tokens": 1.5}, TypeError, "float"),
    ({"temperature": float("nan")}, ValueError, "temp"),
    ({"top_p": 1.5}, ValueError, "top_p"),
    ({"top_p": -0.5}, ValueError, "top_p"),
    ({"min_p": 2.0}, ValueError, "min_p"),
    ({"top_k": 1.5}, ValueError, "top_k"),
    ({"seed": -2}, ValueError, "seed"),
    ({"skip": "most"}, ValueError, "skip"),
    ({"stop": ""}, ValueError, "stop"),
    ({"stop": ["a", ""]}, ValueError, "stop"),
    ({"stop": [b"a"]}, ValueError, "stop"),
    ({"tempature": 1.0}, TypeError, "tempature"),
    ({"penalty_repeat": -1.0}, ValueError, "penalty_repeat"),
    ({"samplers": ["nope"]}, ValueError, "nope"),
]


@pytest.mark.parametrize(("settings", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("choices", [None, CHOICES], ids=["free", "trie"])
def test_refused_settings(
    tiny: Llama, session: StreamSession, settings: dict[str, Any], error: type[Exception], message: str, choices: Any
) -> None:
    session.prefill(PROMPT)
    if choices:
        session.set_token_trie(choices)
    before = session.tokens
    with decodes(tiny) as sizes, pytest.raises(error, match=message):
        session.generate(**settings)
    assert sizes == []
    assert session.tokens == before
    assert session.generate(2, **GREEDY).tokens == (
        run(tiny, choices, max_tokens=2, **GREEDY).tokens if choices else write(tiny, max_tokens=2).tokens
    )


def test_grammar_that_does_not_parse(session: StreamSession, capfd: pytest.CaptureFixture[str]) -> None:
    session.prefill(PROMPT)
    with pytest.raises(EngineError, match="does not parse"):
        session.generate(grammar="root ::= (")
    assert "expecting" in capfd.readouterr().err
    assert session.generate(2).finish_reason == "length"


# --- what is set ------------------------------------------------------------------------------------------------------

KINDS = {"kind": {"A": "redwood", "B": "blue"}, "colour": {"R": "red", "G": "green"}}


def payload_of(llm: Llama, kinds: dict[str, dict[str, str]]) -> dict[str, Any]:
    def leaf(name: str, text: str) -> dict[str, Any]:
        return {"name": name, "tokens": llm.tokenize(text.encode(), add_bos=False)}

    return {
        "modelId": "m",
        "descriptors": [
            {"path": path, "leaves": [leaf(*pair) for pair in leaves.items()]} for path, leaves in kinds.items()
        ],
    }


def named(llm: Llama, kinds: dict[str, list[str]]) -> str:
    return json.dumps(payload_of(llm, {path: {text: text for text in texts} for path, texts in kinds.items()}))


def test_payloads_of_every_form(tiny: Llama) -> None:
    text = named(tiny, {"kind": ["redwood", "blue"]})
    forms = [text, text.encode(), TokenTreePayload.from_json(text), TokenTrie.from_payload(text)]
    refs = {choose(tiny, PROMPT, ["redwood", "blue"], lead="").tokens}
    assert {choice_of(run(tiny, form)).tokens for form in forms} == refs
    assert {choice_of(run(tiny, form, 0, trie={"path": "kind"})).tokens for form in forms} == refs


def test_several_descriptors_need_a_path(tiny: Llama, session: StreamSession) -> None:
    text = named(tiny, {"kind": ["redwood", "blue"], "colour": ["red", "green"]})
    session.prefill(PROMPT)
    for form in (text, TokenTrie.from_payload(text)):
        session.clear_token_trie()
        with pytest.raises(UnknownPathError, match="kind"):
            session.set_token_trie(form)
        with pytest.raises(UnknownPathError, match="kind"):
            session.set_token_trie(form, path="nope")
        assert not session.has_token_trie
        for path, names in (("kind", {"redwood", "blue"}), ("colour", {"red", "green"})):
            session.set_token_trie(form, path=path)
            assert choice_of(session.generate()).name in names


SETTINGS_OF_TRIES: list[tuple[Any, dict[str, Any], type[Exception]]] = [
    ("{", {}, PayloadError),
    ("[]", {}, PayloadError),
    ('{"modelId": "m", "descriptors": []}', {}, EmptyTrieError),
    ([], {}, EmptyTrieError),
    (None, {}, TypeError),
    (3, {}, TypeError),
    (CHOICES, {"mode": "beam"}, ValueError),
    (CHOICES, {"mode": 2}, ValueError),
    (CHOICES, {"mode": True}, ValueError),
    (CHOICES, {"path": "nope"}, UnknownPathError),
    (CHOICES, {"on_end": "release"}, ValueError),
    (CHOICES, {"on_fault": "ignore"}, ValueError),
    (CHOICES, {"stop_tokens": [-1]}, ValueError),
    (CHOICES, {"stop_tokens": ["a"]}, TypeError),
    (CHOICES, {"leed": ""}, TypeError),
    (CHOICES, {"tokenization": "some"}, ValueError),
    (TokenTrie.from_sequences([("a", [768])]), {}, VocabMismatchError),
    (TokenTrie.from_sequences([("a", [2])]), {}, VocabMismatchError),
    (LETTERS_TRIE, {"lead": ""}, ValueError),
]


@pytest.mark.parametrize(("source", "settings", "error"), SETTINGS_OF_TRIES, ids=lambda value: str(value)[:30])
def test_refused_tries_leave_what_was_set(
    tiny: Llama, session: StreamSession, source: Any, settings: dict[str, Any], error: type[Exception]
) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(["red", "blue"])
    with decodes(tiny) as sizes, pytest.raises(error):
        session.set_token_trie(source, **settings)
    assert sizes == []
    assert session.has_token_trie
    assert choice_of(session.generate()).name in {"red", "blue"}


def test_trie_stays_until_it_is_cleared(session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(CHOICES)
    for _ in range(3):
        assert choice_of(session.generate()).name in CHOICES
        session.splice(", ")
    session.prefill("two and ten =")
    assert choice_of(session.generate()).name in CHOICES
    session.clear_token_trie()
    session.clear_token_trie()
    assert session.generate(3, **GREEDY).choice is None


def test_splice_writes_what_continues_the_text(tiny: Llama, session: StreamSession) -> None:
    session.prefill(PROMPT)
    ids = session.splice(" redwood, \u65e5\u672c")
    assert as_tokenizer(tiny).detokenize(ids) == " redwood, \u65e5\u672c".encode()
    assert session.tokens[-len(ids) :] == ids
    assert session.splice("") == ()
    assert session.generate(4, **GREEDY).tokens == write(tiny, prompt=list(session.tokens[:-4]), max_tokens=4).tokens


# --- others on the same model -----------------------------------------------------------------------------------------


def free(llm: Llama, prompt: Any = PROMPT) -> str:
    return text_of(llm.create_completion(prompt, temperature=0, max_tokens=8))


def test_free_completions_before_between_and_after(tiny: Llama, tiny_model_path: Path) -> None:
    with loaded(tiny_model_path) as fresh:
        refs = {prompt: free(fresh, prompt) for prompt in PROMPTS}
        alone = StreamSession.open(fresh)
        alone.prefill(PROMPT)
        ref = [alone.generate(4, **GREEDY).tokens for _ in range(3)]
    session = StreamSession.open(tiny)
    assert free(tiny) == refs[PROMPT]
    session.prefill(PROMPT)
    for tokens, prompt in zip(ref, PROMPTS, strict=False):
        assert session.generate(4, **GREEDY).tokens == tokens
        assert free(tiny, prompt) == refs[prompt]
        assert free(tiny, list(session.tokens))
    session.set_token_trie(CHOICES)
    session.generate()
    session.close()
    assert free(tiny) == refs[PROMPT]
    assert choose(tiny, PROMPT, CHOICES).name == choice_of(run(tiny, CHOICES)).name


def test_two_sessions_in_turn(tiny: Llama, tiny_model_path: Path) -> None:
    """Prompts of the same length too: the number of tokens alone says nothing."""

    def turn(session: StreamSession, number: int) -> tuple[int, ...]:
        if number % 2:
            return session.generate_with_usage(token_tree_payload=["redwood", "redwing", "blue"]).tokens
        return session.generate(3, **GREEDY).tokens

    prompts = [[1, 300, 301], [1, 310, 311], [1, 300, 302]]
    refs = []
    for prompt in prompts:
        with loaded(tiny_model_path) as fresh:
            alone = StreamSession.open(fresh)
            alone.prefill(prompt)
            refs.append([turn(alone, number) for number in range(4)])
    sessions = [StreamSession.open(tiny) for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prefill(prompt)
    for number in range(4):
        for session, ref in zip(sessions, refs, strict=True):
            assert turn(session, number) == ref[number]


def test_model_used_by_a_callback(tiny: Llama) -> None:
    """A call to the model between two decodes, of as many tokens as the session had evaluated."""
    ref = write(tiny)
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)

        def ask(step: StreamStep) -> None:
            if not step.done:
                before = [1] + [300] * (len(session.tokens) - len(step.tokens) - 1)
                choose(tiny, before, ["red", "blue"], lead="")

        assert session.generate(12, on_step=ask, **GREEDY).tokens == ref.tokens


def test_model_used_by_a_callback_for_something_longer(tiny: Llama) -> None:
    ref = write(tiny)
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPT)

        def ask(_: StreamStep) -> None:
            choose(tiny, [1] + [300] * 40, ["red", "blue"], lead="")

        assert session.generate(12, on_step=ask, **GREEDY).tokens == ref.tokens


def test_failed_decode(tiny: Llama, session: StreamSession) -> None:
    session.prefill(PROMPT)
    session.set_token_trie(["redwood", "blue"])

    def fail(_batch: Any) -> None:
        raise RuntimeError("llama_decode returned -3")

    vars(tiny._ctx)["decode"] = fail
    with pytest.raises(EngineError) as caught:
        session.generate()
    del vars(tiny._ctx)["decode"]
    assert caught.value.code == -3
    assert session.tokens == tuple(prompt_tokens(tiny, PROMPT))
    assert choice_of(session.generate()).tokens == choose(tiny, PROMPT, ["redwood", "blue"]).tokens


def test_nothing_is_printed(tiny: Llama, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    run(tiny, CHOICES, stop_at_span_end=False, max_tokens=8, grammar="root ::= [^0-9]+", **GREEDY)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_llama_closed_under_a_session(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=256, n_threads=1, verbose=False)
    session = StreamSession.open(llm)
    session.prefill("action kind:")
    session.generate(2, grammar="root ::= [a-z ]+")
    session.set_token_trie(["red", "blue"])
    llm.close()
    for call in (session.generate, session.clear_token_trie, lambda: session.prefill("x"), lambda: session.splice("x")):
        with pytest.raises(TrieSamplerError, match="this Llama is closed"):
            call()
    session.close()
    gc.collect()
