"""Ten million leaves: what building, opening and walking such a trie costs.

    python -m benchmarks.scale [--leaves 10000000] [--shape ids] [--shape titles] [--json]

* build from ragged arrays: seconds, bytes a node, and the peak of resident memory above interpreter and input, as a
  multiple of the finished arrays;
* save, open (mapped), and the first pick after opening;
* a pick of the cursor from Python at random inner nodes, each of another path, against one node again and again.

``ids`` are item codes of 3 to 7 levels, 64 codes a level; ``titles`` are words by Zipf's law out of 100,000 tokens, so
that the root alone has tens of thousands of children. Each shape is built in a process of its own, and the input comes
from a file, so that making it does not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import report
from benchmarks.speed import V, time_calls
from trie_sampler import TokenTrie, TrieCursor

_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024


def make_ids(n_leaves: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """([T] tokens, [N+1] offsets): codes out of 64 a level, 3 to 7 of them."""
    alphabet = np.sort(rng.choice(V, 64, replace=False)).astype(np.int32)
    offsets = _offsets_of(rng.integers(3, 8, n_leaves))
    return alphabet[rng.integers(0, 64, offsets[-1])], offsets


def make_titles(n_leaves: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """([T] tokens, [N+1] offsets): words by Zipf's law out of 100,000, 3 to 7 of them."""
    words = rng.choice(V, 100_000, replace=False).astype(np.int32)
    ranks = np.cumsum(1 / np.arange(1, len(words) + 1))
    offsets = _offsets_of(rng.integers(3, 8, n_leaves))
    return words[np.searchsorted(ranks, rng.random(offsets[-1]) * ranks[-1])], offsets


SHAPES = {"ids": make_ids, "titles": make_titles}


def _offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def measure(shape: str, n_leaves: int) -> dict[str, Any]:
    """A row, measured in processes that start from files."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, offsets = SHAPES[shape](n_leaves, np.random.default_rng(0))
        np.save(f"{folder}/tokens.npy", tokens)
        np.save(f"{folder}/offsets.npy", offsets)
        del tokens, offsets
        row = {"what": f"{shape}, {n_leaves:,} leaves"}
        for step in ("build", "walk"):
            command = [sys.executable, "-m", "benchmarks.scale", "--step", step, "--folder", folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row |= json.loads(done.stdout)
        return row


def build(folder: Path) -> dict[str, float]:
    """Build and save; kernels are loaded before, as after ``warm_up``."""
    TokenTrie.from_ragged([5, 5, 6], [0, 1, 3])
    tokens, offsets = np.load(folder / "tokens.npy"), np.load(folder / "offsets.npy")
    before = _peak()
    start = time.perf_counter()
    trie = TokenTrie.from_ragged(tokens, offsets)
    built = time.perf_counter()
    peak = _peak()
    trie.save(folder / "scale.trie")
    saved = time.perf_counter()
    return {
        "build_s": built - start,
        "nodes": trie.n_nodes,
        "root_children": len(trie.children(trie.root)),
        "bytes_a_node": trie.nbytes / trie.n_nodes,
        "peak_to_arrays": (peak - before) / trie.nbytes,
        "save_s": saved - built,
    }


def walk(folder: Path) -> dict[str, float]:
    """Open the file and pick."""
    rng = np.random.default_rng(1)
    row = rng.normal(size=V).astype(np.float32)
    TrieCursor(TokenTrie.from_ragged([5, 5, 6], [0, 1, 3])).pick(row)
    start = time.perf_counter()
    trie = TokenTrie.load(folder / "scale.trie")
    opened = time.perf_counter()
    cursor = TrieCursor(trie)
    first = cursor.pick(row)
    picked = time.perf_counter()
    children = trie.children(trie.root)
    if first != children[np.argmax(row[children])]:
        raise AssertionError("the contenders do not agree")
    argmax = np.median(time_calls(row.argmax, 1000))
    root = np.median(time_calls(partial(cursor.pick, row), 1000))
    walkers = list(_random_walkers(trie, cursor, 20_000, rng))
    hot = time_calls(partial(walkers[0].pick, row), 20_000)
    picks = cycle([walker.pick for walker in walkers])
    random = time_calls(partial(_call_next, picks, row), 20_000)
    return {
        "load_ms": (opened - start) * 1000,
        "first_pick_ms": (picked - opened) * 1000,
        "root_pick_us": float(root),
        "root_pick_to_argmax": float(root / argmax),
        "hot_us": float(np.median(hot)),
        "hot_p99_us": float(np.percentile(hot, 99)),
        "random_us": float(np.median(random)),
        "random_p99_us": float(np.percentile(random, 99)),
        "random_to_hot": float(np.median(random) / np.median(hot)),
    }


def _random_walkers(trie: TokenTrie, cursor: TrieCursor, n: int, rng: np.random.Generator) -> Iterator[TrieCursor]:
    """Cursors at random inner nodes of at most 64 children where no leaf ends."""
    degrees = np.diff(trie.first_child)
    inner = np.flatnonzero((degrees > 0) & (degrees <= 64) & (trie.leaf < 0))
    for node in rng.choice(inner, n):
        walker = cursor.clone()
        for token in trie.path_tokens(int(node)):
            walker.accept(token)
        yield walker


def _call_next(calls: Iterator[Callable[[Any], Any]], argument: Any) -> None:
    next(calls)(argument)


def _peak() -> int:
    """Most bytes of resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS


def main() -> None:
    """Measure, print a line each, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=10_000_000, help="leaves of a trie (default %(default)s)")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this shape; may be given twice")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--step", choices=("build", "walk"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps((build if options.step == "build" else walk)(options.folder)))
        return
    report([measure(shape, options.leaves) for shape in options.shape or SHAPES], as_json=options.json)


if __name__ == "__main__":
    main()
