"""What users do to a session by mistake: threads, callbacks, copies, cut healings, stop texts, odd grammars.

On the tiny model; a refusal leaves the session as it was, and whatever happens its tokens spell its text.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from spies import decodes

from trie_sampler import EngineError, SamplingParams, TokenTrie, VocabMismatchError, build_sampler_chain
from trie_sampler.llama.vocab import as_tokenizer
from trie_sampler.session import StreamSession

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPT = "action kind:"
GREEDY: dict[str, Any] = {"temperature": 0.0}

pytestmark = [
    pytest.mark.filterwarnings("ignore:the prompt ends in"),
    pytest.mark.filterwarnings("ignore:leaves that do not spell their names"),
]


@pytest.fixture
def session(tiny: Llama) -> Iterator[StreamSession]:
    with StreamSession.open(tiny) as opened:
        opened.prefill(PROMPT)
        yield opened


def spelled(llm: Llama, session: StreamSession) -> str:
    return as_tokenizer(llm).detokenize(session.tokens).decode()


# --- one at a time ----------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[StreamSession], Any]] = {
    "prefill": lambda session: session.prefill("a"),
    "splice": lambda session: session.splice("a"),
    "set_token_trie": lambda session: session.set_token_trie(["a", "b"]),
    "clear_token_trie": lambda session: session.clear_token_trie(),
    "generate": lambda session: session.generate(1),
    "generate_with_usage": lambda session: session.generate_with_usage(1, token_tree_payload=["a", "b"]),
    "hold": lambda session: session.hold().__enter__(),
    "close": lambda session: session.close(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("in_thread", [False, True], ids=["callback", "thread"])
def test_a_second_call_while_one_is_running(session: StreamSession, name: str, in_thread: bool) -> None:
    refused: list[BaseException] = []

    def call() -> None:
        try:
            CALLS[name](session)
        except EngineError as error:
            refused.append(error)

    def on_step(_step: Any) -> None:
        if in_thread:
            other = threading.Thread(target=call)
            other.start()
            other.join()
        else:
            call()

    done = session.generate(3, on_step=on_step, **GREEDY)
    assert len(refused) >= 3
    assert all("generat" in str(error) for error in refused)
    session.prefill(PROMPT)
    assert session.generate(3, **GREEDY).tokens == done.tokens


def test_threads_that_all_generate(session: StreamSession) -> None:
    """Exactly one is at work at any time; the others are told so."""
    ref = session.generate(20, **GREEDY).tokens
    start = threading.Barrier(4)
    outcomes: list[object] = []

    def once() -> object:
        try:
            session.prefill(PROMPT)
            return len(session.generate(20, **GREEDY).tokens)
        except EngineError as error:
            return str(error)

    def work() -> None:
        start.wait()
        outcomes.extend(once() for _ in range(30))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusals = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert refusals
    assert all("generating" in refusal for refusal in refusals)
    assert any(isinstance(outcome, int) for outcome in outcomes)
    session.prefill(PROMPT)
    assert session.generate(20, **GREEDY).tokens == ref


def test_a_held_session_is_the_holders(tiny: Llama, session: StreamSession) -> None:
    with session.hold() as held:
        for call in CALLS.values():
            with pytest.raises(EngineError, match="generat"):
                call(session)
        assert repr(session).startswith("StreamSession(generating")
        held.splice(" red")
    assert spelled(tiny, session) == PROMPT + " red"
    assert session.generate(2, **GREEDY).finish_reason == "length"


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_has_no_copy(session: StreamSession, way: Callable[[Any], Any]) -> None:
    session.generate(1, grammar='root ::= "a"+')
    with pytest.raises(TypeError, match="cannot be copied"):
        way(session)


@pytest.mark.parametrize("text", [None, 5, b"a", ["a"]])
def test_splicing_what_is_no_text(session: StreamSession, text: Any) -> None:
    before = session.tokens
    with pytest.raises(TypeError, match="must be str"):
        session.splice(text)
    assert session.tokens == before


@pytest.mark.parametrize("token", [-1, 2**31, 10**9])
def test_stop_tokens_outside_the_vocabulary(session: StreamSession, token: int) -> None:
    session.set_token_trie(["red", "blue"])
    with pytest.raises(VocabMismatchError, match=f"stop_tokens: token {token}"):
        session.set_token_trie(["a", "b"], stop_tokens=[token])
    assert session.generate(**GREEDY).text.strip() in ("red", "blue")


def test_a_failed_set_in_one_go_keeps_the_trie(session: StreamSession) -> None:
    session.set_token_trie(["red", "blue"])
    with pytest.raises(VocabMismatchError):
        session.generate_with_usage(token_tree_payload=TokenTrie.from_sequences([("a", [10**8])]))
    assert session.has_token_trie


@pytest.mark.parametrize("settings", [{"top_p": 0.0}, {"min_p": 1.0}])
def test_filters_that_leave_the_likeliest(session: StreamSession, settings: dict[str, Any]) -> None:
    session.set_token_trie(["redwood", "redwing", "blue"], "sampled")
    ref = session.generate(**GREEDY)
    for seed in range(5):
        session.prefill(PROMPT)
        assert session.generate(temperature=5.0, seed=seed, top_k=0, **settings).tokens == ref.tokens
    session.clear_token_trie()
    free = session.generate(5, **GREEDY).tokens
    session.prefill(PROMPT)
    session.generate_with_usage(token_tree_payload=["redwood", "redwing", "blue"], **GREEDY)
    assert session.generate(5, temperature=5.0, top_k=0, **settings).tokens == free


def test_biases_that_ban_everything(tiny: Llama, session: StreamSession) -> None:
    before = session.tokens
    with pytest.raises(EngineError, match="leave none"):
        session.generate(3, logit_bias=dict.fromkeys(range(tiny.n_vocab()), -float("inf")))
    assert session.tokens == before


# --- healing that is cut ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "choices", "spelling"),
    [
        ("The answer is acti", ["on", "ve", "x"], {"lead": "", "heal": True, "tokenization": "every"}),
        ("a  ", ["  x", "  y"], {"heal": True}),
        ("the action kind: re", ["dwood", "d", "x"], {"lead": "", "heal": True}),
    ],
)
@pytest.mark.parametrize("how", ["max_tokens", "cancel", "error"])
def test_a_cut_healing_keeps_the_prompt(
    tiny: Llama, prompt: str, choices: list[str], spelling: dict[str, Any], how: str
) -> None:
    for n in range(1, 6):
        with StreamSession.open(tiny) as session:
            session.prefill(prompt)
            before = session.tokens
            session.set_token_trie(choices, **spelling)
            n_seen = 0

            def on_step(step: Any, limit: int = n, session: StreamSession = session) -> None:
                nonlocal n_seen
                n_seen += len(step.tokens)
                if n_seen >= limit and not step.done:
                    if how == "error":
                        raise LookupError
                    session.cancel()

            text = ""
            if how == "max_tokens":
                done = session.generate(n, **GREEDY)
                text = done.text
                assert as_tokenizer(tiny).detokenize(session.tokens).startswith(before_text(tiny, before))
            elif how == "cancel":
                text = session.generate(on_step=on_step, **GREEDY).text
            else:
                try:
                    text = session.generate(on_step=on_step, **GREEDY).text
                except LookupError:
                    text = spelled(tiny, session)[len(prompt) :]
            assert spelled(tiny, session) == prompt + text
            # And it goes on from there.
            assert session.generate(skip="exact", **GREEDY).finish_reason in ("span", "length")


def before_text(llm: Llama, tokens: tuple[int, ...]) -> bytes:
    return as_tokenizer(llm).detokenize(tokens)


# --- stop texts -------------------------------------------------------------------------------------------------------


def test_a_stop_text_leaves_nothing_behind(tiny: Llama, session: StreamSession) -> None:
    """Neither in the text nor in the context, nor in what the samplers remember."""
    ref = session.generate(12, **GREEDY)
    for start in range(1, len(ref.text)):
        stop = ref.text[start : start + 2]
        session.prefill(PROMPT)
        done = session.generate(12, stop=stop, **GREEDY)
        assert done.text == ref.text[: ref.text.index(stop)]
        assert spelled(tiny, session) == PROMPT + done.text
        assert session.tokens[-len(done.tokens) :] == done.tokens or not done.tokens
        assert done.usage.n_tokens >= len(done.tokens)
        with StreamSession.open(tiny) as other:
            other.prefill(session.tokens)
            assert session.generate(4, **GREEDY).tokens == other.generate(4, **GREEDY).tokens


def test_a_grammar_goes_on_before_the_stop_text(tiny: Llama, session: StreamSession) -> None:
    grammar = 'root ::= "ab" "cd" "ef" "gh" [0-9]'
    done = session.generate(stop="cd", grammar=grammar, **GREEDY)
    assert (done.text, done.finish_reason) == ("ab", "stop")
    rest = session.generate(grammar=grammar, **GREEDY)
    assert rest.text[:-1] == "cdefgh"
    assert spelled(tiny, session) == PROMPT + "ab" + rest.text


def test_penalties_forget_a_stop_text(tiny: Llama, session: StreamSession) -> None:
    penalties: dict[str, Any] = {"penalty_repeat": 1.5, "penalty_last_n": 64}
    ref = session.generate(12, **penalties, **GREEDY)
    stop = ref.text[-3:]
    session.prefill(PROMPT)
    done = session.generate(12, stop=stop, **penalties, **GREEDY)
    comp = session.generate(6, **penalties, **GREEDY)
    with StreamSession.open(tiny) as other:
        other.prefill(PROMPT)
        other.splice("") if not done.text else None
        for token in done.tokens:
            other._push([token])
        assert other.generate(6, **penalties, **GREEDY).tokens == comp.tokens


# --- grammars ---------------------------------------------------------------------------------------------------------

DEADLY = ['root ::= "a"{2,1}', "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000, 'root ::= "a"' + "*" * 100_000]


@pytest.mark.parametrize("grammar", DEADLY, ids=["range", "depth", "stars"])
def test_grammars_that_would_end_the_process(tiny: Llama, session: StreamSession, grammar: str) -> None:
    before = session.tokens
    with pytest.raises(ValueError, match="the grammar"):
        session.generate(2, grammar=grammar)
    assert session.tokens == before
    with pytest.raises(ValueError, match="the grammar"):
        build_sampler_chain(tiny, SamplingParams(grammar=grammar))


def test_a_lazy_grammar_woken_by_any_character(tiny: Llama, session: StreamSession) -> None:
    """Its trigger may be cut over tokens, inside of characters too."""
    for trigger in ("Ж", "жЖ", "😀", "é", "x€y"):
        session.prefill(PROMPT)
        lazy: dict[str, Any] = {"grammar": f'root ::= "{trigger}" "ab"+', "grammar_triggers": [trigger]}
        session.generate(1, **lazy, **GREEDY)
        before = session.tokens
        for refused in (f"x{trigger}zzz", f"{trigger}abz", f"..{trigger}a "):
            with pytest.raises(EngineError, match="does not allow"):
                session.splice(refused)
            assert session.tokens == before
        session.splice(f"x{trigger}ab")
        with pytest.raises(EngineError, match="does not allow"):
            session.splice("c")
        session.splice("ab")


def test_a_lazy_grammar_woken_inside_a_token(tiny: Llama, session: StreamSession) -> None:
    """What stands before the trigger in the token that brings it is no part of what the grammar takes."""
    tokenizer = as_tokenizer(tiny)
    found = 0
    for token in range(300, tiny.n_vocab()):
        piece = tokenizer.detokenize((token,), special=True)
        if not (piece.isascii() and piece.isalpha() and len(piece) >= 3):
            continue
        trigger = piece[1:].decode()
        session.prefill(PROMPT)
        session.generate(1, grammar=f'root ::= "{trigger}" [0-9]+', grammar_triggers=[trigger], **GREEDY)
        session._push([token])
        with pytest.raises(EngineError, match="does not allow"):
            session.splice("x")
        session.splice("12")
        found += 1
        if found == 5:
            break
    assert found == 5


def test_a_lazy_grammar_takes_the_first_of_its_triggers(session: StreamSession) -> None:
    lazy: dict[str, Any] = {"grammar": 'root ::= "two one" [a-z]*', "grammar_triggers": ["one", "two"]}
    session.generate(1, **lazy, **GREEDY)
    session.splice(" two one")
    with pytest.raises(EngineError, match="does not allow"):
        session.splice("1")


def test_a_lazy_grammar_with_a_token_in_it(tiny: Llama, session: StreamSession) -> None:
    """``<[id]>`` is that token and not its text."""
    lazy: dict[str, Any] = {"grammar": 'root ::= <[483]> "ab"', "grammar_triggers": [483]}
    session.generate(1, **lazy, **GREEDY)
    session._push([483])
    with pytest.raises(EngineError, match="does not allow"):
        session.splice("zz")
    session.splice("ab")
    assert tiny.detokenize(list(session.tokens)).endswith(b"ab")


def test_a_lazy_grammar_holds_over_a_leaf_that_wakes_it(session: StreamSession) -> None:
    session.set_token_trie(["xЖab", "xЖabab"], lead="")
    lazy: dict[str, Any] = {"grammar": 'root ::= "Ж" "ab"+ "c"', "grammar_triggers": ["Ж"]}
    done = session.generate(8, stop_at_span_end=False, **lazy, **GREEDY)
    assert done.text.startswith("xЖab")
    session.prefill(PROMPT)
    session.set_token_trie(["xЖzz", "xЖzy"], lead="")
    with pytest.raises(EngineError, match="does not allow"):
        session.generate(8, stop_at_span_end=False, **lazy, **GREEDY)


def test_a_refused_trigger_id(tiny: Llama, session: StreamSession) -> None:
    with pytest.raises(VocabMismatchError, match="grammar_triggers"):
        session.generate(1, grammar='root ::= "a"', grammar_triggers=[tiny.n_vocab()])


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_batch", [1, 3, 64])
def test_saved_passes_of_small_batches(tiny_model_path: Any, n_batch: int) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=256, n_threads=1, n_batch=n_batch, type_k=0, type_v=0, verbose=False)
    with StreamSession.open(llm) as session:
        session.prefill(PROMPT)
        for choices in (["redwood", "redwing", "blue"], ["redwood forest one", "redwood forest two"], ["STOP"]):
            with decodes(llm) as sizes:
                done = session.generate_with_usage(token_tree_payload=choices, **GREEDY)
            assert done.usage.decodes == len(sizes)
            assert 0 <= done.usage.forward_passes_saved <= done.usage.forward_passes_total
            session.splice(" and then some more of it:")
    llm.close()


# --- a stop text, and what is as if it had never come -----------------------------------------------------------------


@pytest.mark.parametrize("vocab", ["tiny", "tiny_bpe"])
@pytest.mark.parametrize(
    ("prompt", "choices", "spelling"),
    [
        ("http:", ["//a", "//b"], {"lead": "", "heal": True}),
        ("The answer is acti", ["on", "ve"], {"lead": "", "heal": True}),
        ("The answer is acti", ["on", "ve"], {"lead": "", "heal": True, "tokenization": "every"}),
        ("a ", ["redwood", "blue"], {"heal": True}),
    ],
)
def test_a_stop_text_over_a_healed_leaf(
    request: pytest.FixtureRequest, vocab: str, prompt: str, choices: list[str], spelling: dict[str, Any]
) -> None:
    llm = request.getfixturevalue(vocab)
    with StreamSession.open(llm) as session:

        def ask(**settings: Any) -> Any:
            session.prefill(prompt)
            session.set_token_trie(choices, **spelling)
            return session.generate(15, stop_at_span_end=False, **settings, **GREEDY)

        ref = ask()
        leaf = ref.choice.name
        for start in range(len(ref.text) - 1):
            stop = ref.text[start : start + 3]
            if any(stop in choice for choice in choices):
                continue
            done = ask(stop=stop)
            assert done.text == ref.text[: ref.text.index(stop)]
            assert as_tokenizer(llm).detokenize(session.tokens).decode("utf-8", "ignore") == prompt + done.text
            assert done.choice.complete is (len(done.text) >= len(leaf))
            assert (done.choice.name == leaf) is done.choice.complete
            assert leaf.startswith(done.choice.text)


def test_draws_go_on_after_a_stop_text(tiny: Llama, session: StreamSession) -> None:
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 7, "top_k": 0, "min_p": 0.0, "top_p": 1.0}
    n_checked = 0
    for more in ({}, {"mirostat": 2}, {"penalty_repeat": 1.3}, {"dry_multiplier": 0.8}):
        session.prefill(PROMPT)
        ref = session.generate(20, **sampled, **more)
        tokenizer = as_tokenizer(tiny)
        for place in range(3, 12):
            stop = tokenizer.detokenize(ref.tokens[place : place + 1]).decode("utf-8", "replace")
            before = tokenizer.detokenize(ref.tokens[:place])
            if "\ufffd" in stop or not stop or stop.encode() in before:
                continue
            session.prefill(PROMPT)
            done = session.generate(20, stop=stop, **sampled, **more)
            if done.tokens != ref.tokens[:place]:
                continue  # the stop begins in the token before
            assert session.generate(20 - place, **sampled, **more).tokens == ref.tokens[place:]
            n_checked += 1
    assert n_checked >= 8


def test_a_stop_text_inside_a_token_that_a_grammar_names(tiny: Llama, session: StreamSession) -> None:
    token = next(
        token
        for token in range(300, tiny.n_vocab())
        if len(piece := as_tokenizer(tiny).detokenize((token,))) >= 3 and piece.isascii() and piece.isalpha()
    )
    piece = as_tokenizer(tiny).detokenize((token,)).decode()
    done = session.generate(5, grammar=f'root ::= "#" <[{token}]> "b"', stop=piece[1:3], **GREEDY)
    assert (done.text, done.finish_reason) == (f"#{piece[0]}", "stop")
    assert spelled(tiny, session) == PROMPT + done.text
    assert session.generate(2, **GREEDY).finish_reason == "length"


# --- characters, refusals, forced runs --------------------------------------------------------------------------------


def test_a_character_cut_between_generations_is_not_lost(tiny: Llama, session: StreamSession) -> None:
    grammar = 'root ::= "é😀Ж" "."'
    parts = []
    while "." not in "".join(parts):
        parts.append(session.generate(1, grammar=grammar, **GREEDY).text)
        assert len(parts) < 20
    assert "".join(parts) == "é😀Ж."
    assert spelled(tiny, session) == PROMPT + "é😀Ж."


REFUSED: dict[str, Callable[[StreamSession], Any]] = {
    "stop in a choice": lambda s: s.generate(stop="orr", grammar='root ::= "q"+', **GREEDY),
    "no room": lambda s: s.generate_with_usage(token_tree_payload=["x" * 2000, "y"], grammar='root ::= "q"+'),
    "callback": lambda s: s.generate(on_step=5, grammar='root ::= "q"+'),
    "chunks": lambda s: s.generate(on_text_chunk="print", grammar='root ::= "q"+'),
    "grammar": lambda s: s.generate(grammar="root ::= (("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_keeps_the_grammar(session: StreamSession, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    grammar = 'root ::= "abcdefghij" [0-9]+'
    begun = session.generate(2, grammar=grammar, **GREEDY).text
    session.set_token_trie(["zorro", "quux"])
    before = session.tokens
    with pytest.raises((ValueError, TypeError, EngineError)):
        REFUSED[name](session)
    capfd.readouterr()
    assert session.tokens == before
    session.clear_token_trie()
    session.splice("abcdefghij"[len(begun) :])
    rest = session.generate(3, grammar=grammar, **GREEDY).text
    assert rest.isdigit()


def test_a_forced_run_that_the_grammar_refuses_is_not_begun(tiny: Llama, session: StreamSession) -> None:
    chunks: list[str] = []
    session.set_token_trie(["redwood forest"], lead="")
    with pytest.raises(EngineError, match="does not allow"):
        session.generate(grammar='root ::= "redwood" [0-9]', on_text_chunk=chunks.append, **GREEDY)
    assert spelled(tiny, session) == PROMPT
    assert chunks == []


def test_xtc_counts_only_what_the_grammar_allows(session: StreamSession) -> None:
    text = ""
    for seed in range(10):
        session.prefill(PROMPT)
        text += session.generate(
            1,
            temperature=1.0,
            seed=seed,
            grammar="root ::= [a-z] [a-z]*",
            samplers=("xtc",),
            xtc_probability=1.0,
            xtc_threshold=0.0,
        ).text
    assert text.isalpha()


def test_a_cut_healing_counts_what_it_cost(tiny: Llama) -> None:
    for n in (1, 2, 3):
        with StreamSession.open(tiny) as session:
            session.prefill("The answer is acti")
            session.set_token_trie(["on", "ve"], lead="", heal=True, tokenization="every")
            with decodes(tiny) as sizes:
                usage = session.generate(n, **GREEDY).usage
            assert usage.decodes == len(sizes)
            assert usage.n_tokens == n
            assert usage.forward_passes_saved >= 0


# --- code that runs inside a call -------------------------------------------------------------------------------------


def test_iterables_that_use_the_session(session: StreamSession) -> None:
    def stops() -> Iterator[str]:
        session.close()
        yield "zz"

    with pytest.raises(EngineError, match="closed"):
        session.generate(3, stop=stops(), **GREEDY)


def test_iterables_that_close_the_model(tiny_model_path: Any) -> None:
    from llama_cpp import Llama

    from trie_sampler import TrieSamplerError

    def names() -> Iterator[str]:
        for name in ("zorro", "quux"):
            llm.close()
            yield name

    llm = Llama(str(tiny_model_path), n_ctx=256, n_threads=1, verbose=False)
    session = StreamSession.open(llm)
    session.prefill(PROMPT)
    with pytest.raises(TrieSamplerError, match="closed"):
        session.set_token_trie(names())  # type: ignore[arg-type]


def test_what_hold_gave_is_of_no_use_afterwards(tiny: Llama, session: StreamSession) -> None:
    with session.hold() as held:
        held.splice(" one")
    for call in (lambda: held.splice(" two"), lambda: held.tokenizer, lambda: held.require_grammar('root ::= "a"')):
        with pytest.raises(EngineError, match="not held"):
            call()
    session.close()
    with pytest.raises(EngineError, match="not held"):
        held.splice(" two")
    assert spelled(tiny, session) == PROMPT + " one"


# One may come while a callback of the garbage collector runs, Hypothesis' own, which is not ours to survive.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_the_session_usable(tiny: Llama) -> None:
    """At random moments, as Ctrl-C comes."""
    import random
    import signal

    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are the main thread's")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    draw = random.Random(0)  # noqa: S311 - no secret
    before = signal.signal(signal.SIGALRM, interrupt)
    prompt = "The answer is acti"
    n_interrupted = 0
    try:
        with StreamSession.open(tiny) as session:
            for turn in range(301):
                session.prefill(prompt)
                session.set_token_trie(["on", "ve", "ons"], lead="", heal=True)
                if turn == 0:
                    # Numba does not survive an interrupt while it loads a kernel.
                    session.generate(20, stop_at_span_end=False, **GREEDY)
                    continue
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0001, 0.006))
                    session.generate(20, stop_at_span_end=False, **GREEDY)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    n_interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert as_tokenizer(tiny).detokenize(session.tokens).startswith(prompt.encode())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert n_interrupted > 20
