"""``TrieLogitsProcessor`` in the host's own loop, on the tiny model: exact numbers, and a fresh model for every test.

The choices behind "action kind:" and their tokens (one letter a token where the vocabulary has no word):

    STOP   STOP it now   PLAY MUSIC   PLAY VIDEO   REPLY   redwood
"""

from __future__ import annotations

import contextlib
import enum
import gc
import json
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import oracle
import pytest
from models import TINY_EOS, TINY_EOT
from spies import RowSpy, decodes, deltas_of, eog_ids, greedy_walk, reason_of, text_of
from strategies import AWKWARD_TEXTS

from trie_sampler import (
    EmptyTrieError,
    TokenTreePayload,
    TokenTrie,
    TrieCursor,
    TrieLogitsProcessor,
    TrieSamplerError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
    forget_model,
)

if TYPE_CHECKING:
    from llama_cpp import Llama

CHOICES = ("STOP", "STOP it now", "PLAY MUSIC", "PLAY VIDEO", "REPLY", "redwood")
PROMPT = "action kind:"
OTHER_PROMPTS = ("the blue one:", "two and ten =", "no, yes and", "red green blue, then")
MESSAGES = [{"role": "user", "content": "action kind"}]


def complete(llm: Llama, processor: Any, prompt: str = PROMPT, **settings: Any) -> str:
    settings.setdefault("max_tokens", 32)
    return text_of(llm.create_completion(prompt, logits_processor=processor, **settings))


def free_text(llm: Llama, prompt: str = PROMPT) -> str:
    return text_of(llm.create_completion(prompt, temperature=0, max_tokens=12))


@pytest.fixture
def constraint(tiny: Llama) -> TrieLogitsProcessor:
    return TrieLogitsProcessor.from_choices(tiny, CHOICES)


@pytest.fixture
def fresh_text(tiny_model_path: Path) -> Callable[..., str]:
    """What a model gives that nothing else was asked before; without choices, its free text."""
    from llama_cpp import Llama

    def ask(prompt: str = PROMPT, choices: Any = None, **settings: Any) -> str:
        llm = Llama(str(tiny_model_path), n_ctx=256, type_k=0, type_v=0, verbose=False)
        try:
            if choices is None:
                return free_text(llm, prompt)
            return complete(llm, TrieLogitsProcessor.from_choices(llm, choices, **settings), prompt)
        finally:
            llm.close()

    return ask


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the host's callback printed and forgot; otherwise pytest makes it an error."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: seen.append(what.exc_value))
    return seen


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, *OTHER_PROMPTS])
@pytest.mark.parametrize("on_end", ["mass", "eog"])
def test_each_step_is_the_oracles(tiny: Llama, prompt: str, on_end: str) -> None:
    from llama_cpp import LogitsProcessorList

    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, on_end=on_end)
    spy = RowSpy(tiny)
    text = complete(tiny, LogitsProcessorList([spy, constraint]), prompt)
    result = constraint.result
    ends = eog_ids(tiny)
    leaves = list(constraint.bind(prompt).leaves())
    assert (list(result.tokens), result.name) == greedy_walk(leaves, spy.rows, ends, on_end)
    assert result.complete
    assert text == result.text
    assert text.removeprefix(" ") == result.name == CHOICES[result.index] == result.value
    assert result.stats["steps"] == len(spy.rows) == len(result.tokens) + 1
    if on_end == "mass":
        check_numbers(result, oracle.DictTrie(leaves), spy.rows)


def check_numbers(result: Any, trie: oracle.DictTrie, rows: list[np.ndarray]) -> None:
    logprob, margin, forced = 0.0, np.inf, 0
    for step, row in enumerate(rows):
        prefix = result.tokens[:step]
        picked = result.tokens[step] if step < len(result.tokens) else oracle.STOP
        options = trie.children(prefix), trie.is_terminal(prefix)
        logprob += np.log(oracle.walk_distribution(row, *options)[picked])
        margin = min(margin, oracle.decision_margin(row, *options))
        forced += trie.is_forced(prefix)
    assert result.logprob == pytest.approx(logprob, abs=1e-5)
    assert result.probability == pytest.approx(np.exp(logprob), rel=1e-5)
    assert result.margin == pytest.approx(margin, abs=1e-5)
    assert result.stats["forced_steps"] == forced


def as_list(constraint: TrieLogitsProcessor) -> Any:
    return [constraint]


def as_processor_list(constraint: TrieLogitsProcessor) -> Any:
    from llama_cpp import LogitsProcessorList

    return LogitsProcessorList([constraint])


def behind_another(constraint: TrieLogitsProcessor) -> Any:
    from llama_cpp import LogitsProcessorList

    return LogitsProcessorList([lambda _ids, scores: scores, constraint])


WRAPPINGS = [lambda c: c, as_list, as_processor_list, behind_another, lambda c: c.extend([lambda _i, s: s])]


@pytest.mark.parametrize("wrap", WRAPPINGS, ids=["bare", "list", "LogitsProcessorList", "second", "extended"])
def test_bare_and_in_lists(
    tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any, wrap: Callable[[Any], Any]
) -> None:
    assert complete(tiny, wrap(constraint)) == fresh_text(choices=CHOICES) == constraint.result.text


HOST_SETTINGS = [
    {"temperature": 2.0, "seed": 3},
    {"temperature": 0.0},
    {"temperature": -1.0},
    {"top_k": 1},
    {"top_p": 0.01},
    {"min_p": 1.0},
    {"typical_p": 0.1},
    {"repeat_penalty": 50.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"mirostat_mode": 1},
    {"mirostat_mode": 2},
    {"echo": True},
]


@pytest.mark.parametrize("settings", HOST_SETTINGS, ids=str)
def test_host_settings_change_nothing(
    tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any, settings: dict[str, Any]
) -> None:
    # The prompt holds the words of the choices, so that penalties would have something to push away.
    prompt = f"{', '.join(CHOICES)}\naction kind:"
    ref = fresh_text(prompt, CHOICES)
    text = complete(tiny, constraint, prompt, **settings)
    assert text.removeprefix(prompt if settings.get("echo") else "") == ref == constraint.result.text


def test_chat(tiny: Llama, constraint: TrieLogitsProcessor) -> None:
    response = tiny.create_chat_completion(MESSAGES, logits_processor=constraint, max_tokens=constraint.max_tokens)
    assert text_of(response) == constraint.result.text
    assert constraint.result.name in CHOICES
    assert reason_of(response) == "stop"


def test_call_on_the_instance(tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any) -> None:
    assert text_of(tiny(PROMPT, logits_processor=constraint, max_tokens=32)) == fresh_text(choices=CHOICES)


@pytest.mark.parametrize("end", [TINY_EOS, TINY_EOT])
def test_every_end_token_ends(tiny: Llama, constraint: TrieLogitsProcessor, end: int) -> None:
    """Of the model's two the one with the larger logit is left at the end of a choice."""
    from llama_cpp import LogitsProcessorList

    def prefer(_ids: Any, scores: Any) -> Any:
        scores[end] += 40
        return scores

    picks = []
    for token in tiny.generate(
        tiny.tokenize(PROMPT.encode()), logits_processor=LogitsProcessorList([prefer, constraint])
    ):
        picks.append(token)
        if token in (TINY_EOS, TINY_EOT):
            break
    assert picks[-1] == end
    assert constraint.result.name in CHOICES
    assert constraint.result.tokens == tuple(picks[:-1])


def test_valid_mass_is_that_of_the_first_row(tiny: Llama) -> None:
    from llama_cpp import LogitsProcessorList

    for wanted in (True, False):
        constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, valid_mass=wanted)
        spy = RowSpy(tiny)
        complete(tiny, LogitsProcessorList([spy, constraint]))
        children = constraint.bind(PROMPT).children(0).tolist()
        ref = oracle.softmax(spy.rows[0])[children].sum()
        assert constraint.result.valid_mass == (pytest.approx(ref, rel=1e-5) if wanted else None)


class Colour(enum.Enum):
    RED = "red"
    WOOD = "redwood"
    CRIMSON = RED  # an alias


class Level(enum.IntEnum):
    ONE = 1
    TEN = 10


VALUES = [
    (["red", "redwood"], [("red", "red"), ("redwood", "redwood")]),
    ({"R": "red", "W": "redwood"}, [("R", "R"), ("W", "W")]),
    (Colour, [("red", Colour.RED), ("redwood", Colour.WOOD)]),
    (Level, [("1", Level.ONE), ("10", Level.TEN)]),
    (Literal["red", "redwood"], [("red", "red"), ("redwood", "redwood")]),
    (Literal[1, 10, True], [("1", 1), ("10", 10), ("True", True)]),
    ((text for text in ("red", "redwood")), [("red", "red"), ("redwood", "redwood")]),
]


@pytest.mark.parametrize(
    ("choices", "refs"), VALUES, ids=["list", "dict", "Enum", "IntEnum", "Literal", "mixed", "iter"]
)
def test_value_is_what_the_caller_gave(tiny: Llama, choices: Any, refs: list[tuple[str, Any]]) -> None:
    """Every choice is made to come out once, by raising the logits of its tokens."""
    from llama_cpp import LogitsProcessorList

    constraint = TrieLogitsProcessor.from_choices(tiny, choices)
    paths = dict(constraint.bind(PROMPT).leaves())
    n_prompt = len(tiny.tokenize(PROMPT.encode()))
    assert set(paths) == {name for name, _ in refs}
    for index, (name, value) in enumerate(refs):

        def lead_there(ids: Any, scores: Any, path: Any = (*paths[name], TINY_EOS)) -> Any:
            scores[path[len(ids) - n_prompt]] += 100
            return scores

        complete(tiny, LogitsProcessorList([lead_there, constraint]))
        result = constraint.result
        assert (result.name, result.value, result.index) == (name, value, index)
        assert type(result.value) is type(value)
        assert json.loads(json.dumps(result.to_dict()))["name"] == name


def test_two_names_of_one_text_give_the_smaller(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, {"zulu": "red", "alpha": "red"})
    with pytest.warns(TrieSamplerWarning, match="can never come out, for others have the same text: 'zulu'"):
        constraint.bind(PROMPT)
    complete(tiny, constraint)
    assert (constraint.result.name, constraint.result.index) == ("alpha", 1)
    assert {c.dropped for c in constraint.bind(PROMPT).collisions} == {"zulu"}


# --- one object, many calls -------------------------------------------------------------------------------------------


def test_three_calls_and_three_prompts(tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any) -> None:
    for prompt in (PROMPT, PROMPT, PROMPT, *OTHER_PROMPTS, PROMPT):
        assert complete(tiny, constraint, prompt) == fresh_text(prompt, CHOICES)
        assert constraint.result.complete


def test_prompt_endings_beyond_what_is_kept(tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any) -> None:
    prompts = [f"{word} is {number}:" for word in ("one", "two", "ten") for number in range(7)]
    for prompt in (*prompts, prompts[0]):
        assert complete(tiny, constraint, prompt) == fresh_text(prompt, CHOICES)


@pytest.mark.parametrize("n_cut", [1, 2])
def test_call_after_one_cut_by_max_tokens(tiny: Llama, fresh_text: Any, n_cut: int) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwine"])
    complete(tiny, constraint, max_tokens=n_cut)
    assert not constraint.result.complete
    assert complete(tiny, constraint) == fresh_text(choices=["redwood", "redwine"])
    assert constraint.result.complete


@pytest.mark.parametrize("cached", [PROMPT, f"{PROMPT} no", "action kind"])
def test_prompt_cached_wholly_or_in_part(
    tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any, cached: str
) -> None:
    from llama_cpp import LlamaRAMCache

    ref = fresh_text(choices=CHOICES)
    tiny.eval(tiny.tokenize(cached.encode()))
    assert complete(tiny, constraint) == ref
    tiny.set_cache(LlamaRAMCache())
    for _ in range(2):
        assert complete(tiny, constraint) == ref
        free_text(tiny, "something else")
    tiny.reset()
    assert complete(tiny, constraint) == ref


def test_two_constraints_in_turn_then_freedom(tiny: Llama, fresh_text: Any) -> None:
    numbers, colours = (TrieLogitsProcessor.from_choices(tiny, c) for c in (["one", "two", "ten"], ["red", "blue"]))
    for _ in range(3):
        complete(tiny, numbers)
        complete(tiny, colours)
        assert numbers.bind(PROMPT) is not colours.bind(PROMPT)
        assert colours.result.name in {"red", "blue"}
        with pytest.warns(TrieSamplerWarning, match="generated since without this constraint"):
            assert numbers.result.name in {"one", "two", "ten"}
    assert free_text(tiny) == fresh_text()
    assert fresh_text().strip() not in {"one", "two", "ten", "red", "blue"}


def test_two_constraints_over_one_trie(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT)
    first, second = (TrieLogitsProcessor.from_choices(tiny, trie) for _ in range(2))
    stream = tiny.create_completion(PROMPT, logits_processor=first, stream=True, max_tokens=32)
    next(stream)
    stream.close()
    complete(tiny, second)
    complete(tiny, first)
    assert first.result.name == second_name(second)


def second_name(constraint: TrieLogitsProcessor) -> str | None:
    with pytest.warns(TrieSamplerWarning):
        return constraint.result.name


def test_result_before_any_call(constraint: TrieLogitsProcessor) -> None:
    with pytest.raises(TrieSamplerError, match="never called"):
        _ = constraint.result
    assert not constraint.is_over


def test_result_after_the_model_went_on_without_it(tiny: Llama, constraint: TrieLogitsProcessor) -> None:
    ref = complete(tiny, constraint)
    free_text(tiny)
    with pytest.warns(TrieSamplerWarning, match="generated since"):
        assert constraint.result.text == ref


def test_dropped_constraint_is_freed(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    complete(tiny, constraint)
    gone = weakref.ref(constraint), weakref.ref(constraint._cursor.trie.token)
    del constraint
    free_text(tiny)  # the host keeps the last generation's chain, and so its processors
    gc.collect()
    assert gone[0]() is None
    forget_model(tiny)  # tries are kept for the next constraint with the same choices
    gc.collect()
    assert gone[1]() is None


def test_constraint_does_not_keep_a_generation_alive(tiny: Llama, constraint: TrieLogitsProcessor) -> None:
    complete(tiny, constraint)
    chain = weakref.ref(tiny._sampler)
    free_text(tiny)
    gc.collect()
    assert chain() is None


# --- draws ------------------------------------------------------------------------------------------------------------


def draws(llm: Llama, constraint: TrieLogitsProcessor, n: int = 12) -> list[str]:
    return [complete(llm, constraint, prompt) for _ in range(n // 3) for prompt in (PROMPT, PROMPT, OTHER_PROMPTS[0])]


def sampler_of(llm: Llama, **settings: Any) -> TrieLogitsProcessor:
    return TrieLogitsProcessor.from_choices(llm, CHOICES, mode="sampled", temperature=5.0, **settings)


def test_a_seed_gives_the_same_draws_again(tiny: Llama) -> None:
    ref = draws(tiny, sampler_of(tiny, seed=1))
    assert draws(tiny, sampler_of(tiny, seed=1)) == ref
    assert draws(tiny, sampler_of(tiny, seed=2)) != ref
    assert {text.removeprefix(" ") for text in ref} <= set(CHOICES)


def test_draws_go_on_from_call_to_call(tiny: Llama) -> None:
    """Not the same draw in every call, also where the prompt's ending makes another trie."""
    seen = draws(tiny, sampler_of(tiny, seed=1), 30)
    assert len(set(seen[::3])) > 2
    assert len(set(seen[2::3])) > 2


def test_without_a_seed_draws_differ(tiny: Llama) -> None:
    assert draws(tiny, sampler_of(tiny), 30) != draws(tiny, sampler_of(tiny), 30)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}], ids=str
)
def test_draws_that_have_no_choice_are_greedy(tiny: Llama, fresh_text: Any, settings: dict[str, Any]) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, mode="sampled", **settings)
    for prompt in (PROMPT, *OTHER_PROMPTS):
        assert complete(tiny, constraint, prompt) == fresh_text(prompt, CHOICES)


@pytest.mark.parametrize(("mode", "ref"), [("greedy", "greedy"), (0, "greedy"), ("sampled", "sampled"), (1, "sampled")])
def test_modes_by_name_and_number(tiny: Llama, mode: Any, ref: str) -> None:
    named, other = (
        TrieLogitsProcessor.from_choices(tiny, CHOICES, mode=m, temperature=5.0, seed=4) for m in (ref, mode)
    )
    assert draws(tiny, named) == draws(tiny, other)
    assert (len(set(draws(tiny, other))) > 2) == (ref == "sampled")


# --- how long ---------------------------------------------------------------------------------------------------------

LONG = "the red blue green one two ten yes no and the red blue green one two"


def test_hosts_default_of_16_cuts_a_long_choice(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, [LONG, LONG + " ten"])
    response = tiny.create_completion(PROMPT, logits_processor=constraint)
    assert (constraint.result.complete, constraint.result.name) == (False, None)
    assert (constraint.result.value, constraint.result.index) == (None, None)
    assert reason_of(response) == "length"
    assert text_of(response) == constraint.result.text
    response = tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=constraint.max_tokens)
    assert constraint.result.complete
    assert constraint.result.name in {LONG, LONG + " ten"}
    assert reason_of(response) == "stop"


def test_max_tokens_exactly_and_one_too_few(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood"], lead="")
    n = len(constraint.bind(PROMPT).leaves().__next__()[1])
    assert n > 2
    for max_tokens, name in ((n + 1, "redwood"), (n, "redwood"), (n - 1, None), (1, None)):
        response = tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=max_tokens)
        assert constraint.result.name == name
        assert constraint.result.complete == (name is not None)
        assert len(constraint.result.tokens) == min(n, max_tokens)
        assert reason_of(response) == ("stop" if max_tokens > n else "length")
        assert text_of(response) == constraint.result.text == "redwood"[: len(constraint.result.text)]


def test_cut_where_a_choice_begins_another_is_not_known_to_be_complete(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["STOP", "STOP it now"], lead="")
    text = complete(tiny, constraint, max_tokens=1)
    assert text == "STOP"
    assert (constraint.result.complete, constraint.result.name) == (False, None)


def test_cut_inside_a_character(tiny: Llama) -> None:
    choice = "日🙂\U00013000"
    constraint = TrieLogitsProcessor.from_choices(tiny, [choice], lead="")
    n = len(next(iter(constraint.bind(PROMPT).leaves()))[1])
    assert n == 1 + 4 + 4
    for n_taken in range(1, n + 1):
        # The host's own loop goes on to the end of a character, past max_tokens.
        text = complete(tiny, constraint, max_tokens=n_taken)
        assert text == constraint.result.text == choice[: 1 + (n_taken + 2) // 4]
        assert constraint.result.complete == (text == choice)
        tokens = tiny.generate(tiny.tokenize(PROMPT.encode()), logits_processor=constraint)
        for _ in range(n_taken):
            next(tokens)
        tokens.close()
        assert len(constraint.result.tokens) == n_taken
        assert constraint.result.text == choice[: 1 + (n_taken - 1) // 4]
        assert constraint.result.name == (choice if n_taken == n else None)


@pytest.mark.parametrize("lead", ["auto", "", " "])
@pytest.mark.parametrize("model", ["tiny", "tiny_bpe", pytest.param("smollm2", marks=pytest.mark.model("smollm2"))])
def test_max_tokens_is_enough(request: pytest.FixtureRequest, model: str, lead: str) -> None:
    llm = request.getfixturevalue(model)
    for text in AWKWARD_TEXTS:
        constraint = TrieLogitsProcessor.from_choices(llm, [text], lead=lead)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrieSamplerWarning)
            trie = constraint.bind(PROMPT)
        assert trie.depth + 1 <= constraint.max_tokens
        assert TrieLogitsProcessor.from_choices(llm, trie).max_tokens == trie.depth + 1


def test_stopping_criteria_end_the_call(tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any) -> None:
    for _ in range(2):
        response = tiny.create_completion(
            PROMPT,
            logits_processor=constraint,
            stopping_criteria=constraint.stopping_criteria,
            max_tokens=constraint.max_tokens,
        )
        assert text_of(response) == fresh_text(choices=CHOICES) == constraint.result.text
        assert reason_of(response) == "stop"
        assert constraint.result.complete
    # Alone, beside no call, they stop nothing.
    other = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    response = tiny.create_completion(PROMPT, stopping_criteria=other.stopping_criteria, temperature=0, max_tokens=5)
    assert text_of(response) == fresh_text()[: len(text_of(response))] != ""


def test_stop_strings_of_the_host_cut_the_text_but_not_the_result(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["red wood"], lead="")
    assert complete(tiny, constraint, stop=["w"]) == "red "
    assert not constraint.result.complete


# --- streams ----------------------------------------------------------------------------------------------------------


def open_stream(llm: Llama, constraint: Any, prompt: str = PROMPT) -> Iterator[Any]:
    return llm.create_completion(prompt, logits_processor=constraint, stream=True, max_tokens=40)


UNICODE = ("日本語 🙂", "🙂🙃", "naïve", "\U0001f469\u200d\U0001f469\u200d\U0001f467")


@pytest.mark.parametrize("choices", [CHOICES, UNICODE, *((text,) for text in UNICODE)], ids=str)
def test_joined_deltas_are_the_plain_text(tiny: Llama, fresh_text: Any, choices: tuple[str, ...]) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, choices)
    *deltas, last = deltas_of(open_stream(tiny, constraint))
    assert "".join(deltas) == fresh_text(choices=choices) == constraint.result.text
    assert constraint.result.name in choices
    assert last == ""
    assert all(deltas)
    assert "\ufffd" not in "".join(deltas)
    stream = tiny.create_chat_completion(MESSAGES, logits_processor=constraint, stream=True, max_tokens=40)
    assert "".join(deltas_of(stream)) == constraint.result.text


def test_call_after_an_abandoned_stream(tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any) -> None:
    ref = fresh_text(choices=CHOICES)
    for n_taken in (0, 1, 2):
        stream = open_stream(tiny, constraint)
        for _ in range(n_taken):
            next(stream)
        assert complete(tiny, constraint) == ref
        assert constraint.result.complete
        del stream
        assert complete(tiny, constraint) == ref


def take_in_turn(streams: list[Iterator[Any]]) -> tuple[list[str], list[str]]:
    """Take the streams' events in turn; (texts so far, what they ended in)."""
    texts, errors = [""] * len(streams), []
    open_ones = list(range(len(streams)))
    while open_ones:
        i = open_ones.pop(0)
        with contextlib.suppress(StopIteration):
            try:
                texts[i] += next(streams[i])["choices"][0]["text"]
                open_ones.append(i)
            except TrieSamplerError as error:
                errors.append(str(error))
    return texts, errors


def run_two_streams(path: str, prompts: list[str], choices: list[str], leads_to: list[str] | None) -> dict[str, Any]:
    """Two streams on one constraint, and one call afterwards. Steered, so that choices begin alike and differ."""
    from llama_cpp import Llama, LogitsProcessorList

    llm = Llama(path, n_ctx=256, type_k=0, type_v=0, verbose=False)
    constraint = TrieLogitsProcessor.from_choices(llm, choices)
    paths = dict(constraint.bind(prompts[0]).leaves())
    starts = [llm.tokenize(prompt.encode()) for prompt in prompts]

    def steer(ids: Any, scores: Any) -> Any:
        if leads_to is not None:
            scores[list(paths[leads_to[ids[: len(starts[0])].tolist() != starts[0]]])] += 100
        return scores

    processors = LogitsProcessorList([steer, constraint])
    refs = [complete(llm, processors, prompt) for prompt in prompts]
    texts, errors = take_in_turn([open_stream(llm, processors, prompt) for prompt in prompts])
    hooked = "detokenize" in vars(llm)
    return {
        "refs": refs,
        "texts": texts,
        "errors": errors,
        "hooked": hooked,
        "after": complete(llm, processors, prompts[0]),
    }


def two_streams(*job: Any) -> dict[str, Any]:
    """``run_two_streams`` in a process of its own: the host, left alone, ends in an abort (GGML_ASSERT) here."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]
    out: dict[str, Any] = json.loads(done.stdout)
    assert not out["hooked"]
    assert out["after"] == out["refs"][0], "the next call works"
    return out


ALIKE = ["redwood", "redwing", "red wine", "blue green", "green and blue"]


@pytest.mark.parametrize("second", [PROMPT, *OTHER_PROMPTS])
def test_two_streams_open_at_once(tiny_model_path: Path, second: str) -> None:
    """They share the model's context, so one's tokens land in the other's text: the caller hears of it."""
    out = two_streams(str(tiny_model_path), [PROMPT, second], ALIKE, None)
    assert out["errors"], out
    assert "two streams" in out["errors"][0]


@pytest.mark.parametrize("second", ["kind:", "kind action:", "no, an action kind:"])
def test_two_streams_whose_choices_begin_alike(tiny_model_path: Path, second: str) -> None:
    """The second stream's first pick is the first one's too; the rest of it is not."""
    out = two_streams(str(tiny_model_path), [PROMPT, second], ALIKE[:2], ALIKE[:2])
    assert [text.strip() for text in out["refs"]] == ALIKE[:2]
    # Each text is right, or the caller heard that it is not.
    assert out["errors"] or out["texts"] == out["refs"], out


# --- beside logit_bias ------------------------------------------------------------------------------------------------


def test_logit_bias_beside_a_bare_constraint_is_felt(
    tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any
) -> None:
    ref = fresh_text(choices=CHOICES)
    trie = constraint.bind(PROMPT)
    complete(tiny, constraint)
    (other, *_) = (t for t in trie.children(0).tolist() if t != constraint.result.tokens[0])
    for _ in range(3):
        assert complete(tiny, constraint, logit_bias={other: 100.0}) != ref
        assert constraint.result.tokens[0] == other
        assert constraint.result.complete
        assert len(constraint) == 1
        # The largest bias on a token outside changes nothing.
        assert complete(tiny, constraint, logit_bias={TINY_EOT + 20: 1000.0}) == ref
    assert complete(tiny, constraint) == ref


def test_logit_bias_streamed_and_in_chat(tiny: Llama, constraint: TrieLogitsProcessor) -> None:
    bias = {tiny.tokenize(b"redwood", add_bos=False)[0]: 100.0}
    texts = deltas_of(
        tiny.create_completion(PROMPT, logits_processor=constraint, logit_bias=bias, stream=True, max_tokens=32)
    )
    assert "".join(texts) == constraint.result.name == "redwood"
    response = tiny.create_chat_completion(MESSAGES, logits_processor=constraint, logit_bias=bias, max_tokens=32)
    assert text_of(response) == constraint.result.name == "redwood"


@pytest.mark.parametrize("wrap", [as_list, as_processor_list], ids=["list", "LogitsProcessorList"])
def test_logit_bias_beside_a_list_is_the_hosts_trap(
    tiny: Llama, constraint: TrieLogitsProcessor, fresh_text: Any, wrap: Callable[[Any], Any]
) -> None:
    assert complete(tiny, wrap(constraint), logit_bias={5: 0.0}, temperature=0, max_tokens=12) == fresh_text()
    with pytest.raises(TrieSamplerError, match="never called"):
        _ = constraint.result
    complete(tiny, constraint)
    complete(tiny, wrap(constraint), logit_bias={5: 0.0})
    with pytest.warns(TrieSamplerWarning, match="generated since without"):
        _ = constraint.result


# --- as a list --------------------------------------------------------------------------------------------------------


def other_processor(_ids: Any, scores: Any) -> Any:
    return scores


CHANGES: list[Callable[[Any], Any]] = [
    lambda c: c.append(other_processor),
    lambda c: c.insert(0, other_processor),
    lambda c: c.__iadd__([other_processor]),
    lambda c: c.__setitem__(0, other_processor),
    lambda c: c.__setitem__(slice(None), []),
]


@pytest.mark.parametrize("change", CHANGES, ids=["append", "insert", "+=", "[0]=", "[:]="])
def test_changes_are_refused(tiny: Llama, constraint: TrieLogitsProcessor, change: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="before it"):
        change(constraint)
    assert len(constraint) == 1
    complete(tiny, constraint)
    assert constraint.result.name in CHOICES


EMPTYINGS: list[Callable[[Any], Any]] = [
    lambda c: c.clear(),
    lambda c: c.pop(),
    lambda c: c.__delitem__(0),
    lambda c: c.remove(c[0]),
]


@pytest.mark.parametrize("change", EMPTYINGS, ids=["clear", "pop", "del", "remove"])
def test_an_emptied_constraint_is_never_a_silent_one(
    tiny: Llama, constraint: TrieLogitsProcessor, change: Callable[[Any], Any]
) -> None:
    try:
        change(constraint)
    except TypeError:
        complete(tiny, constraint)
        assert constraint.result.name in CHOICES
    else:
        complete(tiny, constraint)
        with pytest.raises(TrieSamplerError, match="never called"):
            _ = constraint.result


def test_extend_is_a_new_list_with_the_others_first(constraint: TrieLogitsProcessor) -> None:
    from llama_cpp import LogitsProcessorList

    both = constraint.extend([other_processor])
    assert isinstance(constraint, LogitsProcessorList)
    assert type(both) is LogitsProcessorList
    assert list(both) == [other_processor, constraint]
    assert len(constraint) == 1


def test_identity(tiny: Llama, constraint: TrieLogitsProcessor) -> None:
    twin = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    assert constraint == constraint  # noqa: PLR0124
    assert constraint != twin
    assert len({constraint, twin}) == 2
    assert "greedy" in repr(constraint)


# --- trouble ----------------------------------------------------------------------------------------------------------


def completion(llm: Llama, processor: Any) -> str:
    return text_of(llm.create_completion(PROMPT, logits_processor=processor, max_tokens=32))


def chat(llm: Llama, processor: Any) -> str:
    return text_of(llm.create_chat_completion(MESSAGES, logits_processor=processor, max_tokens=32))


def streamed(llm: Llama, processor: Any) -> str:
    return "".join(deltas_of(llm.create_completion(PROMPT, logits_processor=processor, stream=True, max_tokens=32)))


def streamed_chat(llm: Llama, processor: Any) -> str:
    return "".join(
        deltas_of(llm.create_chat_completion(MESSAGES, logits_processor=processor, stream=True, max_tokens=32))
    )


DOORS = [completion, chat, streamed, streamed_chat]


class OtherError(Exception):
    """What a bug, a user's own code or the operating system would raise."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("at_step", [1, 2, 3])
@pytest.mark.parametrize("error", [TrieSamplerError("ours"), OtherError("theirs"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_inside_ends_the_call(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, door: Callable[[Any, Any], str], at_step: int, error: BaseException
) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    ref = door(tiny, constraint)
    calls = iter(range(1, 100))
    constrain = TrieCursor.constrain

    def fail(cursor: TrieCursor, row: Any, *, samples: bool) -> Any:
        if next(calls) == at_step:
            raise error
        return constrain(cursor, row, samples=samples)

    with monkeypatch.context() as patched:
        patched.setattr(TrieCursor, "constrain", fail)
        expected = TrieSamplerError if isinstance(error, OtherError) else type(error)
        with pytest.raises(expected) as caught:
            door(tiny, constraint)
    raised: BaseException | None = caught.value
    assert error in (raised, raised.__cause__ if raised else None)
    assert "detokenize" not in vars(tiny)
    with pytest.raises(expected):
        _ = constraint.result
    assert door(tiny, constraint) == ref
    assert constraint.result.complete
    assert free_text(tiny)


def test_detokenize_that_was_the_callers_own_is_put_back(tiny: Llama) -> None:
    original = tiny.detokenize

    def own(*arguments: Any, **keywords: Any) -> bytes:
        return original(*arguments, **keywords)

    tiny.detokenize = own
    constraint = TrieLogitsProcessor.from_choices(tiny, ["red", "blue"], on_fault="raise")
    with pytest.raises(TrieSamplerError, match="NaN or -inf"):
        complete(tiny, [nothing_valid, constraint])
    assert tiny.detokenize is own
    assert complete(tiny, constraint).strip() in {"red", "blue"}


def nothing_valid(_ids: Any, scores: Any) -> Any:
    scores[:] = np.nan
    scores[TINY_EOT + 30] = 5.0
    return scores


def test_rows_that_say_nothing(tiny: Llama) -> None:
    """The lowest valid id and one warning, never the foreign id; or an error, where that is asked for."""
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    with pytest.warns(TrieSamplerWarning, match="NaN or -inf") as caught:
        complete(tiny, [nothing_valid, constraint])
    assert len(caught) == 1
    result = constraint.result
    assert result.name in CHOICES
    assert result.tokens[0] == constraint.bind(PROMPT).children(0).min()
    strict = TrieLogitsProcessor.from_choices(tiny, CHOICES, on_fault="raise")
    for door in DOORS:
        with pytest.raises(TrieSamplerError, match="NaN or -inf"):
            door(tiny, [nothing_valid, strict])
        assert door(tiny, strict)


def test_choices_that_cannot_be_bound_end_the_call(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, [""])
    for door in DOORS:
        with pytest.raises(EmptyTrieError):
            door(tiny, constraint)
        assert "detokenize" not in vars(tiny)
        with pytest.raises(EmptyTrieError):
            _ = constraint.result
    assert free_text(tiny)


def test_a_sampler_after_the_constraint_that_changes_the_pick_is_noticed(tiny: Llama) -> None:
    def overrule(_ids: Any, scores: Any) -> Any:
        scores[TINY_EOT + 40] = 1000.0
        return scores

    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    with pytest.raises(TrieSamplerError, match="changed the pick"):
        complete(tiny, [constraint, overrule])
    assert complete(tiny, constraint).strip() in {"redwood", "redwing"}


@pytest.mark.parametrize("at_steps", [{1}, {2}, {3}, {1, 2}, {2, 3}, set(range(1, 50))], ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_a_failing_processor_before_the_constraint(
    tiny: Llama, swallowed: list[Any], door: Callable[[Any, Any], str], at_steps: set[int]
) -> None:
    """The host swallows its error and samples unmasked at that step: a caller must not get such a text for a choice."""
    constraint = TrieLogitsProcessor.from_choices(tiny, ["redwood", "redwing"])
    calls = iter(range(1, 100))

    def fail(_ids: Any, scores: Any) -> Any:
        if next(calls) in at_steps:
            raise OtherError
        return scores

    try:
        text = door(tiny, [fail, constraint])
    except TrieSamplerError:
        pass
    else:
        # No call ended in an error; then the result must say so.
        with pytest.raises(TrieSamplerError):
            print(f"{text!r} passed for {constraint.result.name!r}")
    assert swallowed
    assert door(tiny, constraint).strip() in {"redwood", "redwing"}


def test_logit_bias_of_an_id_that_is_none(tiny: Llama, swallowed: list[Any]) -> None:
    """The host's own processor fails at every step, before ours."""
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    try:
        complete(tiny, constraint, logit_bias={10**6: 1.0})
    except TrieSamplerError:
        return
    with pytest.raises(TrieSamplerError):
        _ = constraint.result


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_none_among_the_processors(tiny: Llama, swallowed: list[Any], first: bool) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    try:
        text = complete(tiny, [None, constraint] if first else [constraint, None])
    except TrieSamplerError:
        return
    assert swallowed
    if first:
        with pytest.raises(TrieSamplerError, match="never called"):
            _ = constraint.result
    else:
        assert text == constraint.result.text
        assert constraint.result.name in CHOICES


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drafting(tiny_model_path: Path) -> Iterator[Llama]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=6)
    llm = Llama(str(tiny_model_path), n_ctx=256, type_k=0, type_v=0, draft_model=draft, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_drafts_change_no_pick(tiny: Llama, drafting: Llama, mode: str) -> None:
    words = ["the", "red", "blue", "green", "one", "two", "ten"]
    choices = [" ".join(words[i:] + words[:i]) for i in range(len(words))] + ["the red", "red wine", "two and ten"]
    prompt = "\n".join(choices) + "\nthe one:"
    settings = {"mode": mode, "seed": 5, "temperature": 3.0} if mode == "sampled" else {}
    plain, drafted = (TrieLogitsProcessor.from_choices(llm, choices, **settings) for llm in (tiny, drafting))
    n_saved = 0
    for _ in range(6):
        ref = complete(tiny, plain, prompt)
        with decodes(drafting) as sizes:
            assert complete(drafting, drafted, prompt) == ref
        assert drafted.result.name == plain.result.name
        assert drafted.result.tokens == plain.result.tokens
        n_saved += len(drafted.result.tokens) + 1 - len(sizes)
        assert max(sizes[1:], default=2) > 1, "nothing was drafted"
    assert n_saved > 0, "no draft was accepted: the test shows nothing"


# --- logprobs of the host ---------------------------------------------------------------------------------------------


def test_host_logprobs_are_those_of_the_raw_rows(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=256, type_k=0, type_v=0, logits_all=True, verbose=False)
    constraint = TrieLogitsProcessor.from_choices(llm, CHOICES)
    spy = RowSpy(llm)
    response = llm.create_completion(PROMPT, logits_processor=[spy, constraint], max_tokens=32, logprobs=3)
    tokens = constraint.result.tokens
    ref = [float(np.log(oracle.softmax(row)[token])) for row, token in zip(spy.rows, tokens, strict=False)]
    comp = response["choices"][0]["logprobs"]["token_logprobs"]
    assert comp == pytest.approx(ref, abs=1e-4)
    assert constraint.result.logprob >= sum(ref), "among fewer options every pick is likelier"
    llm.close()


# --- payloads ---------------------------------------------------------------------------------------------------------


def payload_of(llm: Llama, groups: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    descriptors = []
    for path, texts in groups.items():
        leaves = [{"name": text, "tokens": llm.tokenize(text.encode(), add_bos=False)} for text in texts]
        descriptors.append({"path": path, "leaves": leaves})
    return {"modelId": "tiny", "descriptors": descriptors}


KINDS = {"action": ("STOP", "PLAY MUSIC", "PLAY VIDEO"), "kind": ("red", "redwood", "blue")}


@pytest.mark.parametrize("form", [json.dumps, lambda d: json.dumps(d).encode(), None], ids=["str", "bytes", "model"])
@pytest.mark.parametrize("path", ["action", "kind"])
def test_payload_in_every_form(tiny: Llama, form: Any, path: str) -> None:
    document = payload_of(tiny, KINDS)
    payload = form(document) if form else TokenTreePayload.from_json(json.dumps(document))
    constraint = TrieLogitsProcessor.from_payload(tiny, payload, path)
    spy = RowSpy(tiny)
    text = complete(tiny, [spy, constraint])
    (leaves,) = (d["leaves"] for d in document["descriptors"] if d["path"] == path)
    ref_tokens, ref_name = greedy_walk([(leaf["name"], leaf["tokens"]) for leaf in leaves], spy.rows)
    result = constraint.result
    assert (list(result.tokens), result.name) == (ref_tokens, ref_name)
    assert text == result.text == result.name == KINDS[path][result.index]


def test_payload_of_one_descriptor_is_armed(tiny: Llama) -> None:
    payload = json.dumps(payload_of(tiny, {"action": KINDS["action"]}))
    constraint = TrieLogitsProcessor.from_payload(tiny, payload)
    complete(tiny, constraint)
    assert constraint.result.name in KINDS["action"]


def test_payload_of_several_descriptors_is_born_released(tiny: Llama, fresh_text: Any) -> None:
    constraint = TrieLogitsProcessor.from_payload(tiny, json.dumps(payload_of(tiny, KINDS)))
    assert complete(tiny, constraint, temperature=0, max_tokens=12) == fresh_text()
    with pytest.raises(TrieSamplerError, match="released all the time"):
        _ = constraint.result
    for path in ("kind", "action", "kind"):
        constraint.activate(path)
        for _ in range(2):
            assert complete(tiny, constraint) == constraint.result.text
            assert constraint.result.name in KINDS[path]
            assert constraint.result.value == constraint.result.name == KINDS[path][constraint.result.index]


def test_unknown_path_changes_nothing(tiny: Llama) -> None:
    document = json.dumps(payload_of(tiny, KINDS))
    with pytest.raises(UnknownPathError, match=r"'action'.*'kind'"):
        TrieLogitsProcessor.from_payload(tiny, document, "nope")
    constraint = TrieLogitsProcessor.from_payload(tiny, document)
    constraint.activate("kind")
    with pytest.raises(UnknownPathError, match=r"'action'.*'kind'"):
        constraint.activate("nope")
    complete(tiny, constraint)
    assert constraint.result.name in KINDS["kind"]
    texts = TrieLogitsProcessor.from_choices(tiny, CHOICES)
    with pytest.raises(UnknownPathError):
        texts.activate("nope")
    complete(tiny, texts)
    assert texts.result.name in CHOICES


def test_activated_in_the_middle_of_a_text(tiny: Llama, fresh_text: Any) -> None:
    """Free up to the moment of activation, then a leaf from its root, then the end."""
    constraint = TrieLogitsProcessor.from_payload(tiny, json.dumps(payload_of(tiny, KINDS)))
    steps = iter(range(100))

    def arm(_ids: Any, scores: Any) -> Any:
        if next(steps) == 3:
            constraint.activate("kind")
        return scores

    text = complete(tiny, [arm, constraint], temperature=0)
    assert constraint.result.name in KINDS["kind"]
    assert text.endswith(constraint.result.text)
    free = text.removesuffix(constraint.result.text)
    assert free
    assert fresh_text().startswith(free)


def test_deactivated_constraint_lets_everything_through(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_payload(tiny, json.dumps(payload_of(tiny, KINDS)), "kind")

    def release(_ids: Any, scores: Any) -> Any:
        constraint.deactivate()
        return scores

    complete(tiny, constraint)
    tiny.create_completion(PROMPT, logits_processor=[constraint, release], max_tokens=4)
    complete(tiny, constraint)
    assert constraint.result.name in KINDS["kind"], "the next generation is armed as at birth"


def test_payload_of_another_model(tiny: Llama, tiny_bpe: Llama) -> None:
    foreign = json.dumps(payload_of(tiny_bpe, {"kind": KINDS["kind"]}))
    with pytest.warns(TrieSamplerWarning, match="do not spell their names"):
        constraint = TrieLogitsProcessor.from_payload(tiny, foreign)
    with pytest.raises(VocabMismatchError, match="do not spell their names"):
        TrieLogitsProcessor.from_payload(tiny, foreign, strict=True)
    complete(tiny, constraint)
    assert constraint.result.name in KINDS["kind"]


def payload_with(tokens: list[int]) -> str:
    leaves = [{"name": "good", "tokens": [300]}, {"name": "bad", "tokens": tokens}]
    return json.dumps({"modelId": "m", "descriptors": [{"path": "p", "leaves": leaves}]})


REFUSED_IDS = [
    ([300, 768], "'bad': token 768 at index 1 .*768"),
    ([10**6], "'bad': token 1000000 at index 0 .*768"),
    ([300, TINY_EOS], "'bad': token 2 at index 1 .*ends the generation"),
    ([TINY_EOT, 300], "'bad': token 3 at index 0 .*ends the generation"),
    ([-1], "-1"),
]


@pytest.mark.parametrize(("tokens", "message"), REFUSED_IDS)
def test_ids_that_are_none_of_the_models(tiny: Llama, tokens: list[int], message: str) -> None:
    with pytest.raises(VocabMismatchError, match=message):
        TrieLogitsProcessor.from_payload(tiny, payload_with(tokens))


def test_trie_of_another_prompt_warns_once(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt=PROMPT)
    constraint = TrieLogitsProcessor.from_choices(tiny, trie)
    complete(tiny, constraint)
    constraint = TrieLogitsProcessor.from_choices(tiny, trie)
    with pytest.warns(TrieSamplerWarning, match="tokenized behind"):
        complete(tiny, constraint, OTHER_PROMPTS[0])
    complete(tiny, constraint, OTHER_PROMPTS[0])


if __name__ == "__main__":
    print(json.dumps(run_two_streams(*json.load(sys.stdin))))
