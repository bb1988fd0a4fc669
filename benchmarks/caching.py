"""What a payload costs, new and seen before, and whether threads wait for each other's look into the cache.

    python -m benchmarks.caching [--threads 8] [--picks 2000] [--json]

* JSON to a ready trie, against ``json.loads`` of the same text alone and against opening the trie's own file;
* a hit of ``TrieCache.get``: thirty leaves, by their JSON and by a ``TokenTreePayload``; against building it;
* threads that walk tries out of one cache, each walk with a ``get`` of its own: the time that they waited for the
  cache's lock, as a share of the time of their picks; every walk must be what one thread alone walks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.machine import report
from trie_sampler import TokenTreePayload, TokenTrie, TrieCache, TrieCursor, warm_up

N_PAYLOADS, N_LEAVES, N_VOCAB = 40, 30, 1000


class TimedLock:
    """A lock that adds up how long its callers waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waited: list[float] = []

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            start = time.perf_counter()
            self._lock.acquire()
            self.waited.append(time.perf_counter() - start)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def payload_of(names: Iterable[str], n_tokens: int, n_vocab: int, draw: np.random.Generator) -> str:
    """Leaves of so many tokens each, as JSON."""
    leaves = [{"name": name, "tokens": draw.integers(1, n_vocab, n_tokens).tolist()} for name in names]
    return json.dumps({"modelId": "m", "descriptors": [{"path": "action", "leaves": leaves}]})


def payloads() -> list[str]:
    """Thirty leaves of four tokens each."""
    draw = np.random.default_rng(0)
    return [payload_of((f"ACTION_{n}_{i}" for i in range(N_LEAVES)), 4, N_VOCAB, draw) for n in range(N_PAYLOADS)]


def microseconds(call: Callable[[], Any], n: int = 2000) -> float:
    """The median of a call."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def measure_reading(n_leaves: int, n: int) -> dict[str, Any]:
    """A row: JSON to trie."""
    text = payload_of((f"ACTION_{i}" for i in range(n_leaves)), 5, 262_144, np.random.default_rng(2))
    by_json = microseconds(lambda: TokenTrie.from_payload(text), n)
    loads = microseconds(lambda: json.loads(text), n)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/payload.trie"
        TokenTrie.from_payload(text).save(file)
        by_file = microseconds(lambda: TokenTrie.load(file), n)
    return {
        "what": f"{n_leaves} leaves of 5 tokens, {len(text):,} bytes of JSON",
        "json_to_trie_us": by_json,
        "json_loads_us": loads,
        "to_json_loads": by_json / loads,
        "open_file_us": by_file,
    }


def measure_hits(text: str) -> dict[str, Any]:
    """A row: one look."""
    cache, payload = TrieCache(), TokenTreePayload.from_json(text)
    cache.get(text)
    by_text = microseconds(lambda: cache.get(text))
    built = microseconds(lambda: TrieCache().get(text), 200)
    return {
        "what": f"a hit, {N_LEAVES} leaves",
        "by_json_us": by_text,
        "by_payload_us": microseconds(lambda: cache.get(payload)),
        "built_us": built,
        "hit_to_built": by_text / built,
    }


def measure_threads(texts: list[str], n_threads: int, n_picks: int) -> dict[str, Any]:
    """A row: threads on one cache."""
    rows = np.random.default_rng(1).normal(size=(50, N_VOCAB)).astype(np.float32)

    def walk(cache: TrieCache) -> tuple[list[int], float]:
        picks, seconds, cursor = [], 0.0, None
        for n in range(n_picks):
            if cursor is None or cursor.must_end or not cursor.is_active:
                cursor = TrieCursor(cache.get(texts[n % len(texts)]), eog_ids=[0])
            start = time.perf_counter()
            token = cursor.pick(rows[n % len(rows)])
            cursor.accept(token)
            seconds += time.perf_counter() - start
            picks.append(token)
        return picks, seconds

    alone, _ = walk(TrieCache())
    cache, lock = TrieCache(max_entries=N_PAYLOADS), TimedLock()
    cache._tries._lock = cache._readings._lock = lock  # type: ignore[assignment]
    walks: list[tuple[list[int], float]] = []
    threads = [threading.Thread(target=lambda: walks.append(walk(cache))) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(picks != alone for picks, _ in walks) or len(walks) < n_threads:
        raise AssertionError("a thread picked something else")
    stats, picking = cache.stats(), sum(seconds for _, seconds in walks)
    return {
        "what": f"{n_threads} threads, {n_picks} picks each",
        "lock_to_picks": sum(lock.waited) / picking,
        "waits": len(lock.waited),
        "hits": stats.hits,
        "misses": stats.misses,
        "picks_ms": 1e3 * picking,
    }


def main() -> None:
    """Measure; print a line each, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--picks", type=int, default=2000, help="of a thread (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    warm_up()
    texts = payloads()
    rows = [
        measure_reading(N_LEAVES, 500),
        measure_reading(8192, 20),
        measure_hits(texts[0]),
        measure_threads(texts, options.threads, options.picks),
    ]
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
