"""Real models: thirty actions, twenty requests each, and the choices that begin one another.

That an output is a choice proves little: any mask gives that. So each step of a greedy walk is done again by the
oracle, in float64, over the raw row that the context still holds, with children from a dictionary trie.

    prompt   Actions: PLAY_MUSIC, ... BOOK_TAXI          shared head, evaluated once
             Request: play some jazz in the kitchen
             Action:                                     the choice follows, with a space or without
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import oracle
import pytest
from actions import ACTIONS, REQUESTS
from scipy import stats
from spies import RowSpy, deltas_of, eog_ids, greedy_walk, raw_row, reason_of, text_of

from trie_sampler import TokenTrie, TrieLogitsProcessor

if TYPE_CHECKING:
    from llama_cpp import Llama

HEAD = f"Pick the one action that fits the request.\nActions: {', '.join(ACTIONS)}\n"
ALL_REQUESTS = tuple(request for requests in REQUESTS.values() for request in requests)
SOME_REQUESTS = ALL_REQUESTS[::10]
N_DRAWS = 4000


def prompt_for(request: str) -> str:
    return f"{HEAD}Request: {request}\nAction:"


def messages_for(request: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{HEAD}Request: {request}"}]


def run(llm: Llama, constraint: Any, request: str, door: str, max_tokens: int) -> str:
    """The text that a door gives; the host's temperature stays at its default."""
    settings = {"logits_processor": constraint, "max_tokens": max_tokens}
    if door == "plain":
        response = llm.create_completion(prompt_for(request), **settings)
        assert reason_of(response) == "stop"
        return text_of(response)
    if door == "streamed":
        return "".join(deltas_of(llm.create_completion(prompt_for(request), stream=True, **settings)))
    if door == "chat":
        response = llm.create_chat_completion(messages_for(request), **settings)
        assert reason_of(response) == "stop"
        return text_of(response)
    assert door == "chat streamed"
    return "".join(deltas_of(llm.create_chat_completion(messages_for(request), stream=True, **settings)))


def check_greedy(llm: Llama, request: str, constraint: TrieLogitsProcessor, door: str = "plain") -> None:
    """One request through one door: a choice, and at every step the oracle's own pick."""
    from llama_cpp import LogitsProcessorList

    spy = RowSpy(llm)
    text = run(llm, LogitsProcessorList([spy, constraint]), request, door, constraint.max_tokens)
    result = constraint.result
    assert result.complete
    assert text.removeprefix(" ") == result.name
    assert text == result.text
    assert result.name == ACTIONS[result.index]
    trie = constraint.bind(prompt_for(request) if "chat" not in door else messages_for(request))
    ref_tokens, ref_name = greedy_walk(trie.leaves(), spy.rows)
    assert list(result.tokens) == ref_tokens, f"{request!r}: {result.name} where the rows say {ref_name}"
    assert result.name == ref_name


@pytest.fixture
def greedy(llm: Llama) -> TrieLogitsProcessor:
    return TrieLogitsProcessor.from_choices(llm, ACTIONS)


@pytest.fixture
def sampled(llm: Llama) -> TrieLogitsProcessor:
    return TrieLogitsProcessor.from_choices(llm, ACTIONS, mode="sampled", temperature=1.0, seed=1)


@pytest.mark.parametrize(
    "requests", [ALL_REQUESTS[::5], pytest.param(ALL_REQUESTS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_greedy_picks_are_the_oracles(llm: Llama, greedy: TrieLogitsProcessor, requests: tuple[str, ...]) -> None:
    for request in requests:
        check_greedy(llm, request, greedy)


@pytest.mark.parametrize("door", ["streamed", "chat", "chat streamed"])
def test_greedy_through_other_doors(llm: Llama, greedy: TrieLogitsProcessor, door: str) -> None:
    for request in SOME_REQUESTS[::2]:
        check_greedy(llm, request, greedy, door)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["streamed", "chat", "chat streamed"])
def test_greedy_through_other_doors_for_every_request(llm: Llama, greedy: TrieLogitsProcessor, door: str) -> None:
    for request in ALL_REQUESTS:
        check_greedy(llm, request, greedy, door)


@pytest.mark.parametrize(
    "requests", [SOME_REQUESTS[1::2], pytest.param(ALL_REQUESTS, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("door", ["plain", "streamed", "chat", "chat streamed"])
def test_sampled_outputs_are_choices(
    llm: Llama, sampled: TrieLogitsProcessor, door: str, requests: tuple[str, ...]
) -> None:
    names = set()
    for request in requests:
        text = run(llm, sampled, request, door, sampled.max_tokens)
        result = sampled.result
        assert result.complete
        assert text == result.text
        assert text.removeprefix(" ") == result.name
        assert result.name in ACTIONS
        names.add(result.name)
    assert len(names) > 5, "draws at temperature 1 that hardly vary"


def test_streamed_text_equals_the_plain_one(llm: Llama, greedy: TrieLogitsProcessor) -> None:
    n_compared = 0
    for request in SOME_REQUESTS[:20]:
        plain = run(llm, greedy, request, "plain", greedy.max_tokens)
        # What is still cached changes the shape of the batch, and with it the logits by up to 0.7 nats (facts, H14).
        clear = (greedy.result.margin or np.inf) > 0.7
        streamed = run(llm, greedy, request, "streamed", greedy.max_tokens)
        assert streamed == greedy.result.text
        if clear:
            n_compared += 1
            assert streamed == plain
    assert n_compared >= 3


def test_model_is_free_again_afterwards(llm: Llama, greedy: TrieLogitsProcessor, sampled: TrieLogitsProcessor) -> None:
    from llama_cpp import Llama

    prompt = "The three primary colours are"
    fresh = Llama(llm.model_path, n_ctx=llm.n_ctx(), verbose=False)
    ref = text_of(fresh.create_completion(prompt, temperature=0, max_tokens=24))
    fresh.close()
    for constraint in (greedy, sampled):
        llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
        assert constraint.result.name in ACTIONS
        free = text_of(llm.create_completion(prompt, temperature=0, max_tokens=24))
        assert free.strip() not in ACTIONS
        assert len(free.split()) > 5
        llm.reset()  # the same batches as in the fresh one, so the same logits to the last bit
        assert text_of(llm.create_completion(prompt, temperature=0, max_tokens=24)) == ref


# --- the frequency of draws -------------------------------------------------------------------------------------------


class Generation:
    """What a constraint knows a new generation by: a new sampler object."""


@pytest.fixture
def quiet_llm(llm: Llama) -> Iterator[Llama]:
    """The model without a generation of its own, so that a test can stand in for the host's loop."""
    llm._sampler = None
    yield llm
    llm._sampler = None


def candidates(width: int) -> np.ndarray:
    """[V] records as llama.cpp lays them out; ``["logit"]`` is the strided view that the host hands out."""
    records = np.zeros(width, np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)], align=True))
    records["id"] = np.arange(width)
    return records


def only_candidate(logits: np.ndarray) -> int:
    (left,) = np.flatnonzero(logits > -np.inf)
    return int(left)


def count_draws(
    llm: Llama, constraint: TrieLogitsProcessor, prompt: list[int], rows: list[np.ndarray]
) -> dict[int, int]:
    """Last token -> how often, over generations as the host would run them over these rows."""
    records = candidates(llm.n_vocab())
    observed: dict[int, int] = {}
    for _ in range(N_DRAWS):
        llm._sampler = Generation()
        ids = list(prompt)
        for row in rows:
            records["logit"] = row
            scores = records["logit"]
            assert constraint(np.array(ids, np.intc), scores) is scores
            ids.append(only_candidate(scores))
        observed[ids[-1]] = observed.get(ids[-1], 0) + 1
    return observed


def assert_drawn_from(observed: dict[int, int], expected: dict[int, float]) -> None:
    """Chi-square at 1e-4; options of fewer than five expected draws are counted together."""
    assert set(observed) <= set(expected)
    n = sum(observed.values())
    often = [token for token, p in expected.items() if p * n >= 5]
    ref = [expected[token] * n for token in often]
    comp = [observed.get(token, 0) for token in often]
    if (rest := n - sum(ref)) >= 5:
        ref.append(rest)
        comp.append(n - sum(comp))
    else:
        ref = [x * sum(comp) / sum(ref) for x in ref]
    assert len(ref) >= 2, "a row with one likely option tests nothing"
    assert stats.chisquare(comp, ref).pvalue > 1e-4


def test_draws_at_the_root_follow_the_softmax_over_children(quiet_llm: Llama) -> None:
    llm = quiet_llm
    prompt = llm.tokenize(prompt_for("more, but louder").encode(), special=True)
    llm.reset()
    llm.eval(prompt)
    row = raw_row(llm)
    constraint = TrieLogitsProcessor.from_choices(llm, ACTIONS, mode="sampled", temperature=1.0, seed=7)
    trie = oracle.DictTrie(constraint.bind(prompt).leaves())
    expected = oracle.walk_distribution(row, trie.children(()), terminal=False)
    assert_drawn_from(count_draws(llm, constraint, prompt, [row]), expected)


def test_draws_where_a_choice_begins_another_stop_with_the_end_mass(quiet_llm: Llama) -> None:
    llm = quiet_llm
    prompt = llm.tokenize(b"40 + 10 =", special=True)
    spelled = TokenTrie.from_choices(llm, ["5", "50"], prompt=prompt, lead=" ")
    short, long = (dict(spelled.leaves())[name] for name in ("5", "50"))
    assert long[:-1] == short
    llm.reset()
    llm.eval([*prompt, *short])
    row = raw_row(llm)
    ends = eog_ids(llm)
    # The first rows lead to the end of "5"; the last is the model's own.
    rows = [np.where(np.arange(len(row)) == token, 50.0, 0.0).astype(np.float32) for token in short]
    constraint = TrieLogitsProcessor.from_choices(llm, spelled, mode="sampled", temperature=1.0, seed=7)
    p = oracle.walk_distribution(row, [long[-1]], terminal=True)
    stop = max(ends, key=lambda token: row[token])
    expected = {long[-1]: p[long[-1]], stop: p[oracle.STOP]}
    assert 0.02 < expected[stop] < 0.98
    assert_drawn_from(count_draws(llm, constraint, prompt, [*rows, row]), expected)


# --- choices that begin one another -----------------------------------------------------------------------------------

REPLIES = "Actions: REPLY, REPLY_THREAD\nRequest: answer in the thread\nAction: REPLY_THREAD\n"
PREFIX_PAIRS = [
    # choices, prompt, what comes out
    (["5", "50"], "How many fingers on one hand? A:", "5"),
    (["5", "50"], "2 + 3 =", "5"),
    (["5", "50"], "100 / 2 =", "50"),
    (["5", "50"], "40 + 10 =", "50"),
    (["REPLY", "REPLY_THREAD"], "Actions: REPLY, REPLY_THREAD\nRequest: tell her yes\nAction:", "REPLY"),
    (["REPLY", "REPLY_THREAD"], f"{REPLIES}Request: write in the same thread\nAction:", "REPLY_THREAD"),
    (["New York", "New York City"], "Albany is the capital of the state of", "New York"),
    (["New York", "New York City"], "Buffalo and Albany are cities in the state of", "New York"),
    (["New York", "New York City"], "Manhattan is a borough of", "New York City"),
]  # fmt: skip


@pytest.mark.parametrize("order", [1, -1], ids=["short first", "long first"])
@pytest.mark.parametrize(("choices", "prompt", "ref"), PREFIX_PAIRS)
def test_prefix_pair(llm: Llama, choices: list[str], prompt: str, ref: str, order: int) -> None:
    from llama_cpp import LogitsProcessorList

    constraint = TrieLogitsProcessor.from_choices(llm, choices[::order])
    spy = RowSpy(llm)
    text = text_of(
        llm.create_completion(
            prompt, logits_processor=LogitsProcessorList([spy, constraint]), max_tokens=constraint.max_tokens
        )
    )
    result = constraint.result
    assert (result.name, text.removeprefix(" ")) == (ref, ref)
    assert result.margin is not None
    assert result.margin > 0.3, "too close to be a table entry"
    assert greedy_walk(constraint.bind(prompt).leaves(), spy.rows) == (list(result.tokens), ref)


def test_pairs_of_the_table_reach_both_members() -> None:
    for choices in {tuple(choices) for choices, _, _ in PREFIX_PAIRS}:
        assert {ref for pair, _, ref in PREFIX_PAIRS if tuple(pair) == choices} == set(choices)


def test_end_tokens_as_rivals_are_the_wrong_rule_for_a_model_in_mid_text(gemma: Llama) -> None:
    """Why ``on_end="mass"`` is the default: after "A: 5" hardly anything of the mass is on EOG, or on "0"."""
    prompt = "How many fingers on one hand? A:"
    gemma.reset()
    gemma.eval(gemma.tokenize(f"{prompt} 5".encode(), special=True))
    row = raw_row(gemma)
    (zero,) = gemma.tokenize(b"0", add_bos=False)
    p = oracle.softmax(row)
    ends = eog_ids(gemma)
    assert p[ends].sum() < p[zero] < 0.2
    assert oracle.end_mass(row, [zero]) > 4 * p[zero]
    comp = {}
    for on_end in ("mass", "eog"):
        constraint = TrieLogitsProcessor.from_choices(gemma, ["5", "50"], on_end=on_end)
        spy = RowSpy(gemma)
        gemma.create_completion(prompt, logits_processor=[spy, constraint], max_tokens=constraint.max_tokens)
        comp[on_end] = constraint.result.name
        assert greedy_walk(constraint.bind(prompt).leaves(), spy.rows, ends, on_end)[1] == comp[on_end]
    assert comp == {"mass": "5", "eog": "50"}
