"""``TrieCache`` and ``Recent``: one trie for equal payloads, one builder for each, and every caller told the same."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trie_sampler import (
    EmptyTrieError,
    PayloadError,
    TokenTreePayload,
    TokenTrie,
    TrieCache,
    TrieCursor,
    UnknownPathError,
    VocabMismatchError,
)
from trie_sampler import cache as cache_module
from trie_sampler.cache import Recent


class Vocabulary:
    """A tokenizer of letters: id 97 is ``a``; 0 ends."""

    def __init__(self, n_vocab: int = 256) -> None:
        self.n_vocab = n_vocab
        self.eog_ids = (0,)

    def tokenize(self, text: bytes, *, special: bool = False) -> tuple[int, ...]:
        return tuple(text)

    def detokenize(self, tokens: Any, *, special: bool = False) -> bytes:
        return bytes(token for token in tokens if 0 < token < 256)

    def is_control(self, token: int) -> bool:
        return token == 1

    def is_eog(self, token: int) -> bool:
        return token == 0


def payload_text(leaves: Any, path: str = "action", model: str = "m", **more: Any) -> str:
    listed = [{"name": name, "tokens": list(tokens)} for name, tokens in leaves]
    return json.dumps({"modelId": model, "descriptors": [{"path": path, "leaves": listed}], **more})


LEAVES = [("b", b"b"), ("a", b"a"), ("ab", b"ab")]
TEXT = payload_text(LEAVES)


# --- what is equal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        TEXT,
        TEXT.encode(),
        json.dumps(json.loads(TEXT), indent=2),
        payload_text(LEAVES[::-1]),
        TokenTreePayload.from_json(TEXT),
        TokenTreePayload.from_json(payload_text(LEAVES[::-1])),
    ],
    ids=["same", "bytes", "spaces", "order", "payload", "payload in another order"],
)
def test_equal_payloads_have_one_trie(other: Any) -> None:
    cache = TrieCache()
    trie = cache.get(TEXT)
    assert cache.get(other) is trie
    assert cache.get(other) is trie
    assert cache.stats()[:1] + cache.stats()[2:] == (1, 2, 1, 0)
    assert len(cache) == 1


def two_paths() -> str:
    leaves = [{"name": "a", "tokens": [97]}]
    return json.dumps({"modelId": "m", "descriptors": [{"path": p, "leaves": leaves} for p in ("x", "y")]})


@pytest.mark.parametrize(
    "other",
    [
        lambda cache: cache.get(payload_text([("a", b"a")])),
        lambda cache: cache.get(payload_text(LEAVES, model="n")),
        lambda cache: cache.get(payload_text(LEAVES, path="b")),
        lambda cache: cache.get(TEXT, "action"),
        lambda cache: cache.get(TEXT, vocab=Vocabulary()),
        lambda cache: cache.get(TEXT, model_id="m"),
        lambda cache: cache.get(TEXT, strict=True),
    ],
)
def test_what_differs_has_tries_of_its_own(other: Callable[[TrieCache], TokenTrie]) -> None:
    cache = TrieCache()
    trie = cache.get(TEXT)
    assert other(cache) is not trie
    assert cache.get(TEXT) is trie
    assert cache.stats().misses == 2


def test_the_trie_is_the_payloads() -> None:
    cache = TrieCache()
    for text in (TEXT, two_paths()):
        for _ in range(2):
            trie, ref = cache.get(text), TokenTrie.from_payload(text)
            assert trie.paths == ref.paths
            assert sorted(trie.leaves()) == sorted(ref.leaves())
    assert cache.get(two_paths(), "y").paths == ("y",)


def test_each_order_keeps_its_own_indices() -> None:
    """One trie, and the places of its names as each caller gave them."""
    cache = TrieCache()
    for leaves in (LEAVES, LEAVES[::-1], sorted(LEAVES)):
        for _ in range(2):
            _, choices = cache.look_up(payload_text(leaves))
            assert [choices["action"].index_of(name) for name, _ in leaves] == [0, 1, 2]
    assert cache.stats().misses == 1


def test_vocabularies_are_told_apart_also_after_one_is_gone() -> None:
    cache = TrieCache()
    small = Vocabulary(98)
    with pytest.raises(VocabMismatchError):
        cache.get(TEXT, vocab=small)
    for _ in range(50):
        assert cache.get(TEXT, vocab=Vocabulary()) is not None
        with pytest.raises(VocabMismatchError):
            cache.get(TEXT, vocab=Vocabulary(98))


def test_a_vocabulary_that_cannot_be_told_from_others_is_not_cached() -> None:
    class Unhashable(Vocabulary):
        __hash__ = None  # type: ignore[assignment]

    cache = TrieCache()
    vocab = Unhashable()
    assert cache.get(TEXT, vocab=vocab) is not cache.get(TEXT, vocab=vocab)
    assert len(cache) == 0


# --- what callers are told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (payload_text(LEAVES, extra=1), "unknown keys ignored: extra"),
        (payload_text([*LEAVES, ("none", b"")]), "none"),
        (payload_text([("x", b"a"), ("y", b"b")]), "do not spell their names"),
    ],
)
def test_every_caller_is_warned(text: str, message: str) -> None:
    cache, vocab = TrieCache(), Vocabulary()
    for _ in range(3):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache.get(text, vocab=vocab)
        assert len(told) == 1
        assert message in str(told[0].message)
        assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("payload", "settings", "error"),
    [
        ("{", {}, PayloadError),
        ("\ud800", {}, PayloadError),
        (b"\xff", {}, PayloadError),
        (None, {}, TypeError),
        (5, {}, TypeError),
        (bytearray(b"{}"), {}, TypeError),
        (payload_text([]), {}, EmptyTrieError),
        ('{"modelId": "m", "descriptors": []}', {}, EmptyTrieError),
        (TEXT, {"path": "nope"}, UnknownPathError),
        (payload_text([("a", [2**31])]), {}, PayloadError),
        (payload_text([("a", [300])]), {"vocab": Vocabulary()}, VocabMismatchError),
        (TEXT, {"model_id": "n", "strict": True}, VocabMismatchError),
        (TEXT, {"vocab": 5}, TypeError),
    ],
)
def test_what_raises_is_not_kept(payload: Any, settings: dict[str, Any], error: type[Exception]) -> None:
    cache = TrieCache()
    kept = cache.get(TEXT)
    for _ in range(2):
        with pytest.raises(error):
            cache.get(payload, **settings)
    assert len(cache) == 1
    assert cache.get(TEXT) is kept


# --- limits -----------------------------------------------------------------------------------------------------------


def numbered(n: int) -> str:
    return payload_text([(f"{n}", f"{n}".encode())])


def test_the_oldest_goes_first() -> None:
    cache = TrieCache(max_entries=3)
    tries = [cache.get(numbered(n)) for n in range(3)]
    assert cache.get(numbered(0)) is tries[0]
    cache.get(numbered(3))
    assert cache.get(numbered(0)) is tries[0]
    assert cache.get(numbered(1)) is not tries[1]
    assert list(tries[1].leaves()) == [("1", (49,))], "whole for who holds it"
    assert cache.stats().evictions == 2
    assert len(cache) == 3


def test_bytes_are_limited_and_counted() -> None:
    cache = TrieCache(max_bytes=1000)
    for n in range(100):
        trie = cache.get(numbered(n))
        stats = cache.stats()
        assert stats.nbytes <= 1000
    assert stats.nbytes == stats.entries * (trie.nbytes + trie.nbytes_of_names)
    large = payload_text([(f"{n}", f"{n}".encode()) for n in range(200)])
    assert cache.get(large) is not cache.get(large)
    assert len(cache) == stats.entries, "what is too large throws nothing out"


@pytest.mark.parametrize("limits", [{"max_entries": 0}, {"max_bytes": 0}, {"max_entries": -1}])
def test_a_cache_keeps_something(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TrieCache(**limits)


def test_clearing_is_no_eviction() -> None:
    cache = TrieCache()
    trie = cache.get(TEXT)
    cache.clear()
    assert (len(cache), cache.stats().nbytes, cache.stats().evictions) == (0, 0, 0)
    assert cache.get(TEXT) is not trie


def test_the_reference_estimate_of_memory() -> None:
    """128 tries of thirty leaves of four tokens that share 30 %: at most 0.5 MB of arrays, 2 MB in all."""
    draw = np.random.default_rng(0)
    cache = TrieCache()
    tries = []
    for n in range(128):
        heads = draw.integers(300, 30_000, (9, 2))
        leaves = [
            (
                f"ACTION_{n}_{i}",
                [*heads[i % 9], *draw.integers(300, 30_000, 2)] if i % 3 == 0 else draw.integers(300, 30_000, 4),
            )
            for i in range(30)
        ]
        tries.append(cache.get(payload_text([(name, map(int, tokens)) for name, tokens in leaves])))
    stats = cache.stats()
    assert (stats.entries, stats.evictions) == (128, 0)
    assert sum(trie.nbytes for trie in tries) <= 500_000
    assert stats.nbytes + cache._readings.stats().nbytes <= 2_000_000


# --- threads ----------------------------------------------------------------------------------------------------------


class Sized:
    nbytes = 1


def in_threads(n: int, work: Callable[[], Any]) -> list[Any]:
    gate = threading.Barrier(n)
    out: list[Any] = []

    def run() -> None:
        gate.wait()
        try:
            out.append(work())
        except Exception as error:  # noqa: BLE001 - looked at by the test
            out.append(error)

    threads = [threading.Thread(target=run) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(out) == n
    return out


def test_one_thread_builds_and_the_others_wait() -> None:
    recent: Recent[Sized] = Recent()
    built: list[Sized] = []

    def build() -> Sized:
        time.sleep(0.05)
        built.append(Sized())
        return built[-1]

    assert set(map(id, in_threads(8, lambda: recent.get("a", build)))) == {id(built[0])}
    assert len(built) == 1
    assert recent.stats()[2:4] == (7, 1)


def test_another_key_does_not_wait() -> None:
    recent: Recent[Sized] = Recent()
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Sized:
        inside.set()
        assert go_on.wait(30)
        return Sized()

    thread = threading.Thread(target=lambda: recent.get("slow", slow))
    thread.start()
    assert inside.wait(30)
    recent.get("quick", Sized)
    assert len(recent) == 1
    go_on.set()
    thread.join()
    assert len(recent) == 2


def test_a_thread_that_waited_for_a_failure_builds_for_itself() -> None:
    recent: Recent[Sized] = Recent()
    n_calls = 0

    def build() -> Sized:
        nonlocal n_calls
        n_calls += 1
        time.sleep(0.02)
        if n_calls <= 3:
            raise KeyError(n_calls)
        return Sized()

    out = in_threads(8, lambda: recent.get("a", build))
    assert sum(isinstance(one, KeyError) for one in out) == 3
    assert len({id(one) for one in out if isinstance(one, Sized)}) == 1
    assert n_calls == 4


def test_threads_pick_from_one_cache_what_one_thread_picks() -> None:
    """Eight threads, 2,000 constrained picks each, from 40 payloads in a cache of 16."""
    texts = [payload_text([(f"{n}{i}", f"{n}{i}".encode()) for i in range(30)]) for n in range(40)]
    rows = np.random.default_rng(1).normal(size=(50, 256)).astype(np.float32)

    def picks(cache: TrieCache) -> list[int]:
        out = []
        cursor = None
        for n in range(2000):
            if cursor is None or cursor.must_end or not cursor.is_active:
                cursor = TrieCursor(cache.get(texts[n % 40]), eog_ids=[0])
            token = cursor.pick(rows[n % 50])
            cursor.accept(token)
            out.append(token)
        return out

    ref = picks(TrieCache())
    cache = TrieCache(max_entries=16)
    assert all(out == ref for out in in_threads(8, lambda: picks(cache)))
    stats = cache.stats()
    n_gets = sum(1 for _ in range(8)) * count_gets(picks, texts)
    assert stats.hits + stats.misses == n_gets
    assert stats.misses - stats.evictions == stats.entries == 16


def count_gets(picks: Callable[[TrieCache], list[int]], texts: list[str]) -> int:
    cache = TrieCache(max_entries=1000)
    picks(cache)
    stats = cache.stats()
    return stats.hits + stats.misses


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_in_the_middle_of_building_does_not_wait_for_ever() -> None:
    cache = TrieCache()
    recent = cache._tries
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Any:
        inside.set()
        go_on.wait(30)
        raise LookupError

    def work() -> None:
        with pytest.raises(LookupError):
            recent.get("slow", slow)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    with recent._lock:
        child = os.fork()
        if child == 0:
            recent.get("slow", Sized)  # type: ignore[arg-type, return-value]
            cache.get(TEXT)
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


# --- shared -----------------------------------------------------------------------------------------------------------


def test_the_shared_cache_is_one() -> None:
    assert TrieCache.shared() is TrieCache.shared() is cache_module._shared


def test_another_walk_of_a_cached_trie_is_small() -> None:
    """The reference's estimate: 4 KB for a further session."""
    cache = TrieCache()
    text = payload_text([(f"{n}", f"{n}".encode()) for n in range(30)])
    kept = [TrieCursor(cache.get(text), eog_ids=[0]) for _ in range(10)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept += [TrieCursor(cache.get(text), eog_ids=[0]) for _ in range(1000)]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / 1000 <= 4096
