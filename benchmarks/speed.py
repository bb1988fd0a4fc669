"""The costs a user pays at each step and at the start, as ratios measured in one run.

    python -m benchmarks.speed [--model FILE.gguf] [--json]

* a pick of the cursor from Python, at 4 and at 1,000,000 leaves, hot and at random nodes;
* the same pick in rows of 32,000 to 262,144 logits, and among 1,000 to 200,000 children;
* a call of the logits processor on a strided row of 262,144 logits, against the NumPy way;
* importing the package, in a process of its own;
* the first ``choose`` of a process, over what the host's import and model load cost anyway.

Contenders are checked to give the same pick before they are timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import report
from trie_sampler import TokenTrie, TrieCursor

V = 262_144
"""Logits of a row: Gemma 3's vocabulary."""


def make_trie(n_leaves: int, seed: int = 0) -> TokenTrie:
    """A trie of random paths whose root has at most 64 children, as most inner nodes have."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 8, n_leaves)
    offsets = np.zeros(n_leaves + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # 64 tokens a level, another set at each: wide enough for a million distinct paths.
    alphabet = np.sort(rng.choice(V, 64, replace=False)).astype(np.int32)
    return TokenTrie.from_ragged(alphabet[rng.integers(0, 64, offsets[-1])], offsets)


def time_calls(call: Callable[[], Any], n_calls: int) -> npt.NDArray[np.float64]:
    """[n_calls] float64, microseconds a call, the cost of reading the clock included."""
    clock = time.perf_counter_ns
    for _ in range(min(n_calls, 100)):
        call()
    spent = np.empty(n_calls)
    for i in range(n_calls):
        start = clock()
        call()
        spent[i] = clock() - start
    return spent / 1000


def time_once(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def numpy_pick(children: npt.NDArray[np.int32], row: npt.NDArray[np.float32]) -> int:
    """How a pick is written without compiled code."""
    return int(children[np.argmax(row[children])])


def numpy_constrain(children: npt.NDArray[np.int32], row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """How logits processors are written: keep the children's logits, fill, scatter."""
    kept = row[children]
    row[:] = -np.inf
    row[children] = kept
    return row


def _call_next(calls: Iterator[Callable[[Any], Any]], argument: Any) -> None:
    next(calls)(argument)


def measure_picks(n_calls: int) -> Iterator[dict[str, Any]]:
    """Pick at the root, hot, and at random inner nodes, for a small and a large trie."""
    rng = np.random.default_rng(1)
    row = rng.normal(size=V).astype(np.float32)
    argmax = np.median(time_calls(row.argmax, n_calls // 20))
    for n_leaves in (4, 1_000_000):
        trie = make_trie(n_leaves)
        cursor = TrieCursor(trie)
        children = trie.children(trie.root)
        if cursor.pick(row) != numpy_pick(children, row):
            raise AssertionError("the contenders do not agree")
        ours = time_calls(partial(cursor.pick, row), n_calls)
        theirs = time_calls(partial(numpy_pick, children, row), n_calls // 10)
        yield {
            "what": f"cursor.pick, {n_leaves:,} leaves, {len(children)} children, hot",
            "median_us": float(np.median(ours)),
            "p99_us": float(np.percentile(ours, 99)),
            "ratio_to_numpy": float(np.median(ours) / np.median(theirs)),
            "ratio_to_argmax_of_row": float(np.median(ours) / argmax),
        }
        inner = np.flatnonzero((np.diff(trie.first_child) > 0) & (trie.leaf < 0))
        cursors = []
        for node in rng.choice(inner, min(len(inner), 5000)):
            walker = cursor.clone()
            for token in trie.path_tokens(int(node)):
                walker.accept(token)
            cursors.append(walker)
        picks = cycle([walker.pick for walker in cursors])
        spent = time_calls(partial(_call_next, picks, row), n_calls)
        yield {
            "what": f"cursor.pick, {n_leaves:,} leaves, random inner nodes",
            "median_us": float(np.median(spent)),
            "p99_us": float(np.percentile(spent, 99)),
        }


def measure_widths(n_calls: int) -> Iterator[dict[str, Any]]:
    """Pick among 64 children of rows of three vocabularies, and among any part of the widest."""
    rng = np.random.default_rng(3)
    for width in (32_000, 128_256, V):
        row = rng.normal(size=width).astype(np.float32)
        ids = np.sort(rng.choice(width, 64, replace=False))
        cursor = TrieCursor(TokenTrie.from_ragged(ids, np.arange(65)))
        yield {
            "what": f"cursor.pick, 64 children, V = {width:,}",
            "median_us": float(np.median(time_calls(partial(cursor.pick, row), n_calls))),
        }
    row = rng.normal(size=V).astype(np.float32)
    for n_children in (1000, 10_000, 30_000, 50_000, 100_000, 200_000):
        ids = np.sort(rng.choice(V, n_children, replace=False))
        cursor = TrieCursor(TokenTrie.from_ragged(ids, np.arange(n_children + 1)))
        if cursor.pick(row) != numpy_pick(ids, row):
            raise AssertionError("the contenders do not agree")
        # In turn, so that a slow moment of the machine meets both.
        pairs = [(time_once(partial(cursor.pick, row)), time_once(row.argmax)) for _ in range(n_calls // 20)]
        ours, argmax = np.median(np.array(pairs), axis=0)
        yield {
            "what": f"cursor.pick, {n_children:,} children, V = {V:,}",
            "median_us": float(ours),
            "ratio_to_argmax_of_row": float(ours / argmax),
        }


class _StandIn:
    """As much of a ``Llama`` as the processor looks at; a new sampler is a new generation."""

    n_vocab = V
    eog_ids = (1,)

    def __init__(self) -> None:
        self._sampler = object()

    def tokenize(self, text: bytes) -> list[int]:
        raise NotImplementedError(text)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        # Leaves of the trie are named by their index, so that their names check out.
        return self.spelled[tuple(tokens)]

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return token in self.eog_ids

    def start_generation(self) -> None:
        self._sampler = _Marker()

    spelled: dict[tuple[int, ...], bytes]
    input_ids: npt.NDArray[np.intc]


class _Marker:
    """Stands for the sampler object that the host makes for each generation."""


def measure_processor(n_calls: int) -> Iterator[dict[str, Any]]:
    """Calls of the processor on the host's own layout, logits 12 bytes apart, in walks of five steps.

    Each step has the same 64 children, of which one goes on. The two ways take turns, so that a
    slow moment of the machine meets both.
    """
    from trie_sampler import TrieLogitsProcessor

    n_steps = 5
    rng = np.random.default_rng(2)
    children = np.sort(rng.choice(V, 64, replace=False)).astype(np.int32)
    onward = int(children[17])
    paths = [(*[onward] * depth, int(token)) for depth in range(n_steps) for token in children]
    trie = TokenTrie.from_sequences((str(path), path) for path in paths if path[-1] != onward or len(path) == n_steps)
    host = _StandIn()
    host.spelled = {tokens: name.encode() for name, tokens in trie.leaves()}
    constraint = TrieLogitsProcessor.from_choices(host, trie)
    records = np.zeros(V, np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
    row = records["logit"]
    row[:] = rng.normal(size=V)
    row[onward] = 100
    before = row.copy()
    prompt = np.full(100, onward, np.intc)
    host.input_ids = prompt

    def walk() -> list[float]:
        host.start_generation()
        return [float(time_once(partial(constraint, prompt[: 50 + step], row))) for step in range(n_steps)]

    walk()
    if np.flatnonzero(row > -np.inf).tolist() != [numpy_pick(children, before)]:
        raise AssertionError("the contenders do not agree")
    # A row that is filled already costs the same to fill again; the pick's own logit is left in it.
    ours, theirs = [], []
    for _ in range(n_calls // n_steps):
        ours += walk()
        theirs += [time_once(partial(numpy_constrain, children, row)) for _ in range(n_steps)]
    yield {
        "what": f"processor call, strided row of {V:,}",
        "median_us": float(np.median(ours)),
        "p99_us": float(np.percentile(ours, 99)),
        "numpy_median_us": float(np.median(theirs)),
        "ratio_to_numpy": float(np.median(ours) / np.median(theirs)),
    }


_IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
spent = time.perf_counter() - start
print(spent, "numba" in sys.modules, "llama_cpp" in sys.modules)
"""

_FIRST_CHOOSE = """
import time
from llama_cpp import Llama
llm = Llama({model!r}, n_ctx=512, verbose=False)
llm.eval(llm.tokenize(b"one decode, so that the host has warmed up")); llm.reset()
start = time.perf_counter()
from trie_sampler import choose
choose(llm, "Is fire hot? Answer:", ["yes", "no"])
first = time.perf_counter() - start
llm.reset()
start = time.perf_counter()
choose(llm, "Is fire hot? Answer:", ["yes", "no"])
print(first, time.perf_counter() - start)
"""


def run_python(code: str) -> list[str]:
    """The words that a new Python process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def measure_start(model: Path | None, n_runs: int) -> Iterator[dict[str, Any]]:
    """Import, and the first choose of a process with a warm kernel cache."""
    runs = [run_python(_IMPORT.format(module="trie_sampler")) for _ in range(n_runs)]
    if any("True" in run for run in runs):
        raise AssertionError("importing trie_sampler imported numba or llama_cpp")
    yield {
        "what": "import trie_sampler",
        "median_s": float(np.median([float(run[0]) for run in runs])),
    }
    if model is None:
        return
    code = _FIRST_CHOOSE.format(model=str(model))
    run_python(code)  # compiles where the cache is empty
    pairs = np.array([run_python(code) for _ in range(n_runs)], float)
    yield {
        "what": "first choose of a process, over the host's import and load",
        "median_s": float(np.median(pairs[:, 0])),
        "of_which_a_later_choose_costs_s": float(np.median(pairs[:, 1])),
    }


def main() -> None:
    """Measure, print a line each, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file for the first-choose figure")
    parser.add_argument("--calls", type=int, default=20_000, help="timed calls (default %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="processes started (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    rows = [
        *measure_picks(options.calls),
        *measure_widths(options.calls),
        *measure_processor(max(options.calls // 20, 100)),
        *measure_start(options.model, options.runs),
    ]
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
