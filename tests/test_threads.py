"""Case 54: one ``Llama`` and many threads. Ours wait for each other, and all comes out as it does alone."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from trie_sampler import StreamSession, TokenTrie, TrieCursor, choose, rank
from trie_sampler.llama import decoder as decoder_module
from trie_sampler.llama.decoder import alone_with

if TYPE_CHECKING:
    from llama_cpp import Llama

pytestmark = pytest.mark.filterwarnings("ignore:the prompt ends in")

CHOICES = ("STOP", "STOP it now", "PLAY MUSIC", "PLAY VIDEO", "REPLY", "redwood")
PROMPTS = ("action kind:", "the blue one:", "two and ten =", "no, yes and")


def by_session(llm: Llama, prompt: str) -> str:
    with StreamSession.open(llm) as session:
        session.prefill(prompt)
        free = session.generate(4, temperature=0.0).text
        session.splice(" ->")
        session.set_token_trie(CHOICES)
        return free + session.generate(temperature=0.0).text


DOORS: dict[str, Callable[[Any, str], Any]] = {
    "choose": lambda llm, prompt: choose(llm, prompt, CHOICES).name,
    "sample": lambda llm, prompt: choose(llm, prompt, CHOICES, method="sample", seed=3).name,
    "best": lambda llm, prompt: choose(llm, prompt, CHOICES, method="best").name,
    "rank": lambda llm, prompt: [choice.name for choice in rank(llm, prompt, CHOICES)],
    "session": by_session,
}


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    gate = threading.Barrier(len(jobs))
    out: list[Any] = [None] * len(jobs)

    def run(place: int) -> None:
        gate.wait()
        try:
            out[place] = jobs[place]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            out[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return out


def test_case_54_every_door_from_eight_threads_at_once(tiny: Llama) -> None:
    jobs = [(name, prompt) for name in DOORS for prompt in PROMPTS]
    refs = [DOORS[name](tiny, prompt) for name, prompt in jobs]

    def work(shift: int) -> list[Any]:
        turned = jobs[shift:] + jobs[:shift]
        out = [DOORS[name](tiny, prompt) for name, prompt in turned]
        return out[len(jobs) - shift :] + out[: len(jobs) - shift]

    for out in in_threads([lambda shift=shift: work(shift) for shift in range(8)]):
        assert out == refs


def test_case_54_one_trie_eight_cursors() -> None:
    import numpy as np

    trie = TokenTrie.from_sequences([(f"{n}", [n % 7 + 1, n % 11 + 1, n % 13 + 1]) for n in range(500)])
    rows = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)

    def walk(first: int) -> list[int]:
        cursor, out = TrieCursor(trie, eog_ids=[0]), []
        for n in range(2000):
            if cursor.must_end or not cursor.is_active:
                cursor.reset()
            out.append(cursor.pick(rows[(first + n) % 64]))
            cursor.accept(out[-1])
        return out

    refs = [walk(first) for first in range(8)]
    assert in_threads([lambda first=first: walk(first) for first in range(8)]) == refs


def test_a_second_thread_waits_and_says_so(tiny: Llama, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trie_sampler.llama.decoder")
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(choose(tiny, PROMPTS[0], CHOICES).name))
    with alone_with(tiny):
        thread.start()
        deadline = time.monotonic() + 30
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another thread" in caplog.text
        assert done == []
        assert choose(tiny, PROMPTS[1], CHOICES).name is not None, "the holder itself does not wait"
    thread.join(30)
    assert done == [choose(tiny, PROMPTS[0], CHOICES).name]
    caplog.clear()
    choose(tiny, PROMPTS[0], CHOICES)
    assert not caplog.records


def test_an_error_gives_the_model_back(tiny: Llama) -> None:
    def fail(_step: Any) -> None:
        raise LookupError

    with StreamSession.open(tiny) as session:
        session.prefill(PROMPTS[0])
        with pytest.raises(LookupError):
            session.generate(3, on_step=fail)
    assert in_threads([lambda: choose(tiny, PROMPTS[0], CHOICES).name])[0] in CHOICES


def test_a_waiting_generation_can_be_cancelled(tiny: Llama) -> None:
    done: list[Any] = []
    with StreamSession.open(tiny) as session:
        session.prefill(PROMPTS[0])
        thread = threading.Thread(target=lambda: done.append(session.generate(50, temperature=0.0)))
        with alone_with(tiny):
            thread.start()
            deadline = time.monotonic() + 30
            while "generating" not in repr(session) and time.monotonic() < deadline:
                time.sleep(0.01)
            session.cancel()
        thread.join(30)
        assert (done[0].finish_reason, done[0].tokens) == ("cancelled", ())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_a_thread_holds_the_model(tiny: Llama) -> None:
    """The child has the lock to itself; what llama.cpp's own threads make of a fork is not ours."""
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with alone_with(tiny):
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    with decoder_module._lock_of_locks:
        child = os.fork()
        if child == 0:
            with alone_with(tiny):
                os._exit(0)
    go_on.set()
    thread.join()
    deadline = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            pytest.fail("the child waits")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
