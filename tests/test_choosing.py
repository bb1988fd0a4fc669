"""``choose``: one line, always a choice; every kind of prompt and of choices, and what it costs in decodes.

On the tiny model, except where a meaning is asked for.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from spies import decodes, eog_ids, raw_row
from strategies import choice_texts

from trie_sampler import (
    Choice,
    EmptyTrieError,
    EngineError,
    TokenTrie,
    TrieSamplerError,
    TrieSamplerWarning,
    choose,
    warm_up,
)
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPT = "action kind:"
MESSAGES = [{"role": "system", "content": "Pick."}, {"role": "user", "content": "action kind"}]
CHOICES = ("STOP", "STOP it now", "PLAY MUSIC", "PLAY VIDEO", "REPLY", "redwood")


def oracle_choice(llm: Llama, prompt: Any, trie: TokenTrie) -> tuple[tuple[int, ...], str | None, float]:
    """(tokens, name, logprob) of a walk in which every prefix is decoded anew."""
    before = prompt_tokens(llm, prompt)

    def row_after(prefix: oracle.Prefix) -> np.ndarray:
        llm.reset()
        llm.eval([*before, *prefix])
        return raw_row(llm)

    leaves = oracle.DictTrie(trie.leaves())
    tokens, name = oracle.walk(leaves, row_after)
    logprob = 0.0
    for step in range(len(tokens) + 1):
        prefix = tokens[:step]
        if leaves.must_end(prefix):
            break
        picked = tokens[step] if step < len(tokens) else oracle.STOP
        p = oracle.walk_distribution(row_after(prefix), leaves.children(prefix), leaves.is_terminal(prefix))
        logprob += math.log(p[picked])
    return tokens, name, logprob


PROMPTS = {
    "text": PROMPT,
    "no text": "",
    "token list": [1, 300, 301, 302],
    "token array": np.array([1, 300, 301, 302], np.int32),
    "messages": MESSAGES,
    "one message": [{"role": "user", "content": "日本 🙂"}],
    "long": "one two ten, " * 12 + "kind:",
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("model", ["tiny", "tiny_bpe"])
def test_greedy_is_the_oracles_walk(request: pytest.FixtureRequest, model: str, prompt: Any) -> None:
    llm = request.getfixturevalue(model)
    comp = choose(llm, prompt, CHOICES)
    trie = TokenTrie.from_choices(llm, CHOICES, prompt=prompt)
    tokens, name, logprob = oracle_choice(llm, prompt, trie)
    assert (comp.tokens, comp.name) == (tokens, name)
    assert comp.logprob == pytest.approx(logprob, abs=1e-3)
    assert comp.complete
    assert comp.text.removeprefix(" ") == comp.name == CHOICES[comp.index]
    assert comp.stats["prompt_tokens"] == len(prompt_tokens(llm, prompt))
    assert comp.stats["seconds"] > 0


class Action(enum.Enum):
    STOP = "STOP"
    PLAY = "PLAY MUSIC"


KINDS = [
    (["STOP", "PLAY MUSIC"], {"STOP": "STOP", "PLAY MUSIC": "PLAY MUSIC"}),
    (("STOP", "PLAY MUSIC"), {"STOP": "STOP", "PLAY MUSIC": "PLAY MUSIC"}),
    ({"halt": "STOP", "go": "PLAY MUSIC"}, {"halt": "halt", "go": "go"}),
    (Action, {"STOP": Action.STOP, "PLAY MUSIC": Action.PLAY}),
    (Literal["STOP", "PLAY MUSIC"], {"STOP": "STOP", "PLAY MUSIC": "PLAY MUSIC"}),
]


@pytest.mark.parametrize(("choices", "values"), KINDS, ids=["list", "tuple", "dict", "Enum", "Literal"])
def test_choices_of_every_kind(tiny: Llama, choices: Any, values: dict[str, Any]) -> None:
    seen = set()
    for n in range(12):
        choice = choose(tiny, f"{n} kind:", choices, method="sample", temperature=20.0, seed=n)
        assert choice.value is values[choice.name]
        assert list(values)[choice.index] == choice.name
        seen.add(choice.name)
    assert seen == set(values)


def test_trie_as_choices(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT)
    ref, comp = choose(tiny, PROMPT, CHOICES), choose(tiny, PROMPT, trie)
    assert (comp.name, comp.tokens) == (ref.name, ref.tokens)
    assert comp.logprob == pytest.approx(ref.logprob, abs=1e-4)
    assert comp.index == CHOICES.index(comp.name)


def test_one_choice_is_certain(tiny: Llama) -> None:
    choice = choose(tiny, PROMPT, ["redwood"], lead="")
    assert (choice.name, choice.logprob, choice.probability, choice.margin) == ("redwood", 0.0, 1.0, None)
    assert choice.stats["forced_steps"] == len(choice.tokens)


def test_probabilities_of_two_single_tokens_sum_to_one(tiny: Llama) -> None:
    """Heads or tails: the pick's share of the softmax over both, and a log-probability below 0."""
    choice = choose(tiny, PROMPT, ["red", "blue"], lead="")
    tokens = [tiny.tokenize(text, add_bos=False) for text in (b"red", b"blue")]
    assert [len(path) for path in tokens] == [1, 1]
    tiny.reset()
    tiny.eval(prompt_tokens(tiny, PROMPT))
    p = oracle.softmax(raw_row(tiny)[[path[0] for path in tokens]])
    assert choice.probability == pytest.approx(max(p), rel=1e-5)
    assert choice.logprob < 0


UNICODE = (
    "日本語",
    "日本",
    "🙂🙃",
    "🙂",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "naïve",
    "nai\u0308ve",
    "שלום",
    "two\nlines",
    "two\nmore\nlines",
    "tab\there",
    "Dr. Smith",
    "a+b (c)",
    "x^2",
    "[n]",
    "<end_of_turn>",
)


@pytest.mark.parametrize("model", ["tiny", "tiny_bpe"])
def test_awkward_texts_come_out_whole(request: pytest.FixtureRequest, model: str) -> None:
    llm = request.getfixturevalue(model)
    seen = set()
    for n in range(60):
        choice = choose(llm, f"{n}:", UNICODE, method="sample", temperature=50.0, seed=n)
        assert choice.text.removeprefix(" ") == choice.name
        assert as_tokenizer(llm).detokenize(choice.tokens).decode() == choice.text
        seen.add(choice.name)
    assert len(seen) > 10


@pytest.mark.parametrize("text", UNICODE)
def test_awkward_text_alone(tiny: Llama, text: str) -> None:
    assert choose(tiny, PROMPT, [text]).name == text


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_forward_passes_are_counted(tiny: Llama, prompt: Any) -> None:
    for choices in (CHOICES, ["red", "blue"], ["redwood", "redwing", "red"]):
        tiny.reset()
        with decodes(tiny) as sizes:
            choice = choose(tiny, prompt, choices)
        assert len(sizes) - 1 == choice.stats["forward_passes"]
        trie = oracle.DictTrie(TokenTrie.from_choices(tiny, choices, prompt=prompt).leaves())
        prefixes = [choice.tokens[:size] for size in range(len(choice.tokens) + 1)]
        decisions = [len(path) for path in prefixes if len(trie.children(path)) + trie.is_terminal(path) > 1]
        # One batch a decision: the prompt with a forced run at the root, then what the decision before settled.
        ends = [choice.stats["prompt_tokens"] + size for size in decisions]
        assert sizes == [ends[0], *(later - earlier for earlier, later in itertools.pairwise(ends))]


def test_the_only_choice_costs_nothing(tiny: Llama) -> None:
    tiny.reset()
    with decodes(tiny) as sizes:
        choice = choose(tiny, PROMPT, ["redwood"], lead="")
    assert (sizes, choice.name, choice.probability, choice.margin) == ([], "redwood", 1.0, None)


def test_a_forced_run_at_the_root_rides_with_the_prompt(tiny: Llama) -> None:
    tiny.reset()
    with decodes(tiny) as sizes:
        choice = choose(tiny, PROMPT, {"a": "zz redwood", "b": "zz redwing"}, lead="")
    assert len(sizes) == 1
    assert sizes[0] > choice.stats["prompt_tokens"]
    assert choice.stats["forward_passes"] == 0


def test_distinct_first_tokens_cost_no_decode_after_the_prompt(tiny: Llama) -> None:
    tiny.reset()
    with decodes(tiny) as sizes:
        choice = choose(tiny, PROMPT, ["red", "blue", "green", "one"], lead="")
    assert sizes == [choice.stats["prompt_tokens"]]
    assert choice.stats["forward_passes"] == 0
    with decodes(tiny) as sizes:
        again = choose(tiny, PROMPT, ["red", "blue", "green", "one"], lead="")
    assert sizes == [], "the prompt is still in the context"
    assert again.name == choice.name


def test_prompt_that_begins_as_the_one_before_is_not_evaluated_again(tiny: Llama) -> None:
    head = prompt_tokens(tiny, "the red blue green one two ten: ")
    choose(tiny, [*head, 300], CHOICES)
    with decodes(tiny) as sizes:
        choose(tiny, [*head, 301, 302], CHOICES)
    assert sizes[0] == 2


# --- methods and settings ---------------------------------------------------------------------------------------------


def test_sample_is_seeded(tiny: Llama) -> None:
    def names(seed: int) -> list[str | None]:
        return [
            choose(tiny, f"{n}:", CHOICES, method="sample", temperature=20.0, seed=100 * seed + n).name
            for n in range(12)
        ]

    assert names(1) == names(1)
    assert names(1) != names(2)
    assert len(set(names(1))) > 2


def test_sample_follows_the_softmax(tiny: Llama) -> None:
    choices = ["red", "blue", "green"]
    tiny.eval(prompt_tokens(tiny, PROMPT))
    row = raw_row(tiny)
    tokens = [tiny.tokenize(text.encode(), add_bos=False)[0] for text in choices]
    p = dict(zip(choices, oracle.softmax(row[tokens] / 4.0), strict=True))
    n = 1000
    counts = dict.fromkeys(choices, 0)
    for seed in range(n):
        counts[choose(tiny, PROMPT, choices, method="sample", lead="", temperature=4.0, seed=seed).name] += 1
    for text in choices:
        assert abs(counts[text] - n * p[text]) < 4 * math.sqrt(n * p[text] * (1 - p[text])) + 1


def test_valid_mass_when_asked(tiny: Llama) -> None:
    choice = choose(tiny, PROMPT, CHOICES, valid_mass=True)
    children = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT).children(0)
    tiny.reset()
    tiny.eval(prompt_tokens(tiny, PROMPT))
    assert choice.valid_mass == pytest.approx(oracle.softmax(raw_row(tiny))[children].sum(), rel=1e-4)
    assert choose(tiny, PROMPT, CHOICES).valid_mass is None


def test_on_end(tiny: Llama) -> None:
    """A random model hardly ever spells the longer one; under "eog" two of 768 tokens are against it."""
    names = {
        on_end: [choose(tiny, f"{n}:", ["STOP", "STOP it now"], on_end=on_end).name for n in range(20)]
        for on_end in ("mass", "eog")
    }
    assert names["mass"] == ["STOP"] * 20
    assert "STOP it now" in names["eog"]


REFUSED_SETTINGS = [
    ({"method": "beam"}, ValueError, "beam"),
    ({"method": "sampled"}, ValueError, "sampled"),
    ({"mode": "greedy"}, TypeError, "mode"),
    ({"tempature": 1.0}, TypeError, "tempature"),
    ({"max_tokens": 5}, TypeError, "max_tokens"),
    ({"temperature": -1.0}, ValueError, "temperature"),
    ({"temperature": math.nan}, ValueError, "temperature"),
    ({"top_k": -1}, ValueError, "top_k"),
    ({"top_p": 1.1}, ValueError, "top_p"),
    ({"min_p": 1.1}, ValueError, "min_p"),
    ({"lead": "  "}, ValueError, "lead"),
    ({"on_end": "release"}, ValueError, "on_end"),
    ({"on_fault": "ignore"}, ValueError, "on_fault"),
    ({"path": "nope"}, TrieSamplerError, "nope"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED_SETTINGS, ids=lambda x: str(x)[:30])
def test_refused_settings(tiny: Llama, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    ref = choose(tiny, PROMPT, CHOICES).name
    with decodes(tiny) as sizes, pytest.raises(error, match=message):
        choose(tiny, PROMPT, CHOICES, **arguments)
    assert sizes == [], "refused before anything was evaluated"
    assert choose(tiny, PROMPT, CHOICES).name == ref


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_context_that_is_too_small(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=32, type_k=0, type_v=0, verbose=False)
    assert llm.n_ctx() >= 32
    depth = TokenTrie.from_choices(llm, ["redwood"], prompt=[1, 300], lead="").depth
    fits = [1] + [300] * (32 - depth - 1)
    assert choose(llm, fits, ["redwood"], lead="").name == "redwood"
    llm.reset()
    with decodes(llm) as sizes:
        for n_more in (1, 2, 200):
            with pytest.raises(EngineError, match="n_ctx="):
                choose(llm, fits + [300] * n_more, ["redwood"], lead="")
        assert sizes == []
    assert choose(llm, PROMPT, CHOICES).complete
    llm.close()


def test_vocab_only_model(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), vocab_only=True, verbose=False)
    with pytest.raises(TrieSamplerError, match="vocab_only"):
        choose(llm, PROMPT, CHOICES)
    assert TokenTrie.from_choices(llm, CHOICES, prompt=PROMPT).n_leaves == len(CHOICES), "good enough to tokenize"
    llm.close()


def test_no_prompt_to_start_from(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrieSamplerError, match="prompt is empty"):
        choose(tiny, [], CHOICES)
    with monkeypatch.context() as patched:
        patched.setattr("llama_cpp.llama_vocab_bos", lambda _vocab: -1)
        with pytest.raises(TrieSamplerError, match="no BOS"):
            choose(tiny, "", CHOICES)
    assert choose(tiny, "", CHOICES).complete


def test_prompt_without_text_on_a_model_that_adds_no_bos(smollm2: Llama) -> None:
    assert not smollm2._model.add_bos_token()
    choice = choose(smollm2, "", ["yes", "no"])
    assert choice.complete
    assert choice.stats["prompt_tokens"] == 1


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"bytes", [1.5], ["a"], [None]], ids=repr)
def test_prompts_of_another_kind(tiny: Llama, prompt: Any) -> None:
    with pytest.raises(TypeError):
        choose(tiny, prompt, CHOICES)
    assert choose(tiny, PROMPT, CHOICES).complete


@pytest.mark.parametrize("token", [-1, 768, 2**31, -(2**40)])
def test_prompt_ids_that_are_none_of_the_models(tiny_model_path: Path, token: int) -> None:
    """In a process of its own: llama.cpp, asked about such an id, ends the process."""
    program = f"""
from llama_cpp import Llama
from trie_sampler import TrieSamplerError, choose
llm = Llama({str(tiny_model_path)!r}, n_ctx=256, verbose=False)
try:
    choose(llm, [1, 300, {token}], ["red", "blue"])
except (TrieSamplerError, ValueError) as error:
    assert {str(token)!r} in str(error), error
    assert choose(llm, "kind:", ["red", "blue"]).complete
else:
    raise SystemExit("not refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def test_something_that_is_no_llama() -> None:
    for llm in (None, "model.gguf", object()):
        with pytest.raises(TypeError, match="Llama"):
            choose(llm, PROMPT, CHOICES)


def test_error_in_the_middle_leaves_the_model_usable(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = choose(tiny, PROMPT, ["redwood", "redwing"])
    for error in (RuntimeError("engine"), KeyboardInterrupt()):
        with monkeypatch.context() as patched:
            patched.setattr("trie_sampler.cursor.TrieCursor.decide", lambda *_, error=error, **__: _raise(error))
            with pytest.raises(type(error)):
                choose(tiny, PROMPT, ["redwood", "redwing"])
        assert "detokenize" not in vars(tiny)
        assert choose(tiny, PROMPT, ["redwood", "redwing"]).tokens == ref.tokens
    assert tiny.create_completion(PROMPT, max_tokens=3)


def _raise(error: BaseException) -> None:
    raise error


def test_empty_and_odd_choices(tiny: Llama) -> None:
    table: list[tuple[Any, type[Exception]]] = [
        ([], EmptyTrieError),
        ({}, EmptyTrieError),
        ([""], EmptyTrieError),
        (enum.Enum("Nothing", []), EmptyTrieError),
        ("yes", TypeError),
        (b"yes", TypeError),
        (None, TypeError),
        (3, TypeError),
        ([1, 2], TypeError),
        ({"a": 1}, TypeError),
        (["a", None], TypeError),
        (["\ud800"], ValueError),
    ]
    for choices, error in table:
        with decodes(tiny) as sizes, pytest.raises(error):
            choose(tiny, PROMPT, choices)
        assert sizes == []
    with pytest.warns(TrieSamplerWarning, match="without tokens"):
        assert choose(tiny, PROMPT, ["", "red"]).name == "red"


# --- in a process -----------------------------------------------------------------------------------------------------


def test_result_is_plain_data(tiny: Llama) -> None:
    choice = choose(tiny, PROMPT, Action)
    document = json.loads(json.dumps(choice.to_dict()))
    assert document["name"] == document["value"] == choice.name
    assert document["tokens"] == list(choice.tokens)
    assert isinstance(choice, Choice)


def test_generation_is_free_after_choosing(tiny: Llama, tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    for _ in range(3):
        choose(tiny, PROMPT, CHOICES)
    fresh = Llama(str(tiny_model_path), n_ctx=256, type_k=0, type_v=0, verbose=False)
    texts = [llm.create_completion(PROMPT, temperature=0, max_tokens=12)["choices"][0]["text"] for llm in (fresh, tiny)]
    assert texts[0] == texts[1]
    assert texts[0].strip() not in CHOICES
    fresh.close()


def test_warm_up_leaves_nothing_to_compile(tiny_model_path: Path) -> None:
    """After it, a first choice compiles no kernel: Numba's events of a fresh process say so."""
    program = f"""
import warnings; warnings.simplefilter("error")
from trie_sampler import choose, warm_up
warm_up()
from numba.core import event
compiled = []
class Log(event.Listener):
    def on_start(self, happened): compiled.append(str(happened.data["dispatcher"]))
    def on_end(self, happened): pass
event.register("numba:compile", Log())
from llama_cpp import Llama
llm = Llama({str(tiny_model_path)!r}, n_ctx=256, verbose=False)
for method in ("greedy", "sample"):
    choose(llm, "kind:", ["STOP", "STOP it now", "red"], method=method, valid_mass=True)
assert not compiled, compiled
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_printed(tiny: Llama, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose(tiny, PROMPT, CHOICES)
        warm_up()
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


# --- any choices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "tiny_bpe"])
def test_any_set_of_choices(request: pytest.FixtureRequest, model: str) -> None:
    llm: Llama = request.getfixturevalue(model)
    ends = set(eog_ids(llm))
    tokenizer = as_tokenizer(llm)

    @settings(suppress_health_check=list(HealthCheck))
    @given(choice_texts())
    def check(texts: list[str]) -> None:
        for method, prompt in (("greedy", PROMPT), ("sample", "say "), ("sample", MESSAGES)):
            with warnings.catch_warnings():
                # Where the prompt's end would have merged with a choice.
                warnings.simplefilter("ignore", TrieSamplerWarning)
                choice = choose(llm, prompt, texts, method=method, temperature=3.0, seed=len(texts))
            assert choice.complete
            assert choice.text in {choice.name, f" {choice.name}"}
            assert texts[choice.index] == choice.name == choice.value
            assert tokenizer.detokenize(choice.tokens).decode() == choice.text
            assert not ends.intersection(choice.tokens)
            assert 0 < choice.probability <= 1

    check()


# --- what models mean -------------------------------------------------------------------------------------------------


def test_one_pass_of_meaning(llm: Llama) -> None:
    table = [
        ("Q: What colour is the sky on a clear day?\nA:", ["blue", "purple", "^*B^&A"], "blue"),
        ("The capital of France is", ["Berlin", "Paris", "Rome"], "Paris"),
        ("2 + 3 =", ["5", "50", "7"], "5"),
    ]
    for prompt, choices, ref in table:
        assert choose(llm, prompt, choices).name == ref
        assert choose(llm, prompt, choices[::-1]).name == ref


@pytest.mark.parametrize("prompt", ["Hi!", "Hi! "])
def test_nonsense_never_wins(llm: Llama, prompt: str) -> None:
    """A lone space before a word is no text that a model was trained on; healing takes it back."""
    choice = choose(llm, prompt, ["Hello", "Goodbye", "^*B^&A"], heal=True)
    assert choice.name in {"Hello", "Goodbye"}


def test_same_pick_from_a_cold_and_a_warm_cache(llm: Llama) -> None:
    prompt = "The capital of France is"
    llm.reset()
    first, *later = [choose(llm, prompt, ["Berlin", "Paris", "Rome"]) for _ in range(3)]
    assert first.margin is not None
    assert first.margin > 1
    assert {choice.name for choice in later} == {first.name}


def test_chat_and_the_same_ids_by_hand(llm: Llama) -> None:
    messages = [{"role": "user", "content": "Is fire hot? Answer yes or no."}]
    ref = choose(llm, messages, ["yes", "no"])
    comp = choose(llm, prompt_tokens(llm, messages), ["yes", "no"])
    assert comp.tokens == ref.tokens
    assert not set(ref.tokens).intersection({llm.token_bos(), *eog_ids(llm)})


# --- step by step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_steps_of_a_walk_make_up_its_numbers(tiny: Llama, method: str) -> None:
    for seed in range(5):
        choice = choose(tiny, PROMPT, ["STOP", "STOP it", "redwood", "red"], method=method, seed=seed)
        assert sum(step.logprob for step in choice.steps) == pytest.approx(choice.logprob)
        assert "".join(step.text for step in choice.steps) == choice.text
        assert tuple(step.token for step in choice.steps if step.text) == choice.tokens
        margins = [step.margin for step in choice.steps if step.margin is not None]
        assert min(margins, default=None) == choice.margin
        assert sum(step.is_forced for step in choice.steps) == choice.stats["forced_steps"]
        assert all(step.logprob == 0 and step.margin is None for step in choice.steps if step.is_forced)
    assert "steps" not in choice.to_dict()
    assert json.loads(json.dumps(choice.to_dict(steps=True)))["steps"][0]["token"] == choice.tokens[0]


@pytest.mark.parametrize("settings", [{"method": "best"}, {"method": "sample", "normalize": "joint"}])
def test_steps_of_a_whole_choice_only_on_demand(tiny: Llama, settings: dict[str, Any]) -> None:
    assert choose(tiny, PROMPT, ["red", "blue"], **settings).steps == ()
    choice = choose(tiny, PROMPT, ["red", "redwood", "blue"], steps=True, **settings)
    assert sum(step.logprob for step in choice.steps) == pytest.approx(choice.stats["score"], abs=1e-3)
    assert choice.text == "".join(step.text for step in choice.steps)


def test_unknown_settings_are_named_after_the_door(tiny: Llama) -> None:
    for method in ("greedy", "best", "sample"):
        with pytest.raises(TypeError, match=r"choose\(\) got an unexpected keyword argument 'foo'"):
            choose(tiny, PROMPT, ["a", "b"], method=method, foo=1)
