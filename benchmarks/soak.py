"""What ten thousand completions leave behind: memory, open files, and whether every answer was one of the choices.

    python -m benchmarks.soak [--seconds 600] [--completions 10000] [--door choose] [--json]

On the tiny random model, each door in a process of its own, sets of choices and prompts in turn:

* baseline: ``create_completion`` without us;
* processor: a new ``TrieLogitsProcessor`` for each completion, from the JSON of a payload that is cached;
* fresh: the same, from a payload that was never seen, so that the full cache drops one for each;
* native: ``create_completion`` within ``native_sampling``, of a payload;
* session: a ``StreamSession`` opened, prefilled, given a trie from JSON, generated from and closed;
* choose: ``choose`` from a list of texts.

The host leaves cycles behind, each holding a row of the vocabulary: garbage is collected every hundred completions, for
the baseline too, and before memory is measured. The first thousand, which fill caches and the allocator's pools, are
not counted. Milliseconds are of the completions alone, without collecting. Exit code 1 where an answer was none of the
choices, or a file stayed open.

The goal of ``--completions 10000``: 10,000 constrained completions in one process, resident memory grown by at most
5 MB more than the baseline's, no file left open, no answer outside the choices. Reads ``/proc``: for Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from llama_cpp import Llama

from benchmarks.lead import load_test_module
from benchmarks.machine import describe, report
from trie_sampler import (
    Choice,
    StreamSession,
    TokenTreePayload,
    TrieLogitsProcessor,
    choose,
    model_id,
    native_sampling,
    warm_up,
)

SETS = (
    ("REPLY", "REPLY_THREAD", "IGNORE"),
    ("PLAY_MUSIC", "PLAY_VIDEO", "STOP", "PAUSE"),
    ("yes", "no"),
    ("red", "redwood", "green", "blue", "naïve", "日本", "日本語"),
    tuple(f"item {i}" for i in range(200)),
)
PROMPTS = ("Action:", "Which one of the two?", "a b c d e f g h i j:", "REPLY or not:", "日本:", "so", "kind is:")
DOORS = ("processor", "fresh", "native", "session", "choose")
N_WARM = 1000
N_TO_COLLECT = 100


class Doors:
    """One completion for each call; the answer without the space before it."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._id = model_id(llm)
        self._payloads = {choices: self._payload_of(choices) for choices in SETS}

    def _payload_of(self, choices: Sequence[str]) -> str:
        leaves = [{"name": name, "tokens": self._llm.tokenize(f" {name}".encode(), add_bos=False)} for name in choices]
        return json.dumps({"modelId": self._id, "descriptors": [{"path": "action", "leaves": leaves}]})

    def _complete(self, prompt: str, **settings: Any) -> str:
        response: Any = self._llm.create_completion(prompt, **settings)
        return str(response["choices"][0]["text"]).strip()

    def baseline(self, prompt: str, _choices: Sequence[str]) -> str:
        """Without us."""
        return self._complete(prompt, max_tokens=8)

    def processor(self, prompt: str, choices: Sequence[str]) -> str:
        """A new constraint from JSON."""
        payload = self._payloads.get(tuple(choices)) or self._payload_of(choices)
        constraint = TrieLogitsProcessor.from_payload(self._llm, payload)
        text = self._complete(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
        return agreed(text, constraint.result)

    fresh = processor

    def native(self, prompt: str, choices: Sequence[str]) -> str:
        """A new sampler in the host's chain."""
        payload = TokenTreePayload.from_json(self._payloads[tuple(choices)])
        with native_sampling(self._llm, payload) as native:
            return self._complete(prompt, max_tokens=native.max_tokens)

    def session(self, prompt: str, choices: Sequence[str]) -> str:
        """A new session, and a trie from JSON."""
        with StreamSession.open(self._llm) as session:
            session.prefill(prompt)
            session.set_token_trie(self._payloads[tuple(choices)])
            generation = session.generate()
        return agreed(generation.text.strip(), generation.choice)

    def choose(self, prompt: str, choices: Sequence[str]) -> str:
        """From texts."""
        choice = choose(self._llm, prompt, list(choices))
        return agreed(choice.text.strip(), choice)


def agreed(text: str, choice: Choice | None) -> str:
    """The text, which the choice has to say too; else what no choice is."""
    name = None if choice is None else choice.name
    return text if text == name else f"{text!r}, and as a choice {name!r}"


def choices_of(door: str, number: int) -> Sequence[str]:
    """The choices of a completion."""
    choices = SETS[number % len(SETS)]
    return (*choices[:7], f"item {number}") if door == "fresh" else choices


def resident_mb() -> float:
    """Resident memory of this process, once garbage is collected."""
    gc.collect()
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files() -> int:
    """How many descriptors this process holds, apart from the one that lists them."""
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def measure(door: str, n_completions: int, seconds: float) -> dict[str, Any]:
    """A row; runs in a process of its own, and ends early where time does."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = load_test_module("models").write_tiny_model(Path(folder, "tiny.gguf"))
        llm = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    ask = getattr(Doors(llm), door)
    n_done = n_wrong = 0
    busy = memory = 0.0
    files = open_files()
    for number in range(-N_WARM, n_completions):
        if number == 0:
            memory, files = resident_mb(), open_files()
        choices = choices_of(door, N_WARM + number)
        start = time.perf_counter()
        answer = ask(f"{number % 997}: {PROMPTS[number % len(PROMPTS)]}", choices)
        if number >= 0:
            busy += time.perf_counter() - start
            n_done += 1
        if door != "baseline" and answer not in choices:
            n_wrong += 1
            print(f"{door}, completion {number}: {answer!r} is none of {choices}", file=sys.stderr)
        if number % N_TO_COLLECT == 0:
            gc.collect()
        if time.monotonic() > deadline:
            break
    return {
        "what": door,
        "completions": n_done,
        "wrong": n_wrong,
        "growth_mb": resident_mb() - memory,
        "files_before": files,
        "files_after": open_files(),
        "ms": 1000 * busy / max(n_done, 1),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """What was measured on, and a Markdown table."""
    for name, value in describe().items():
        print(f"# {name}: {value}")
    print("| door | completions | wrong | memory grew by | beyond the baseline | open files | a completion |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        memory = f"{row['growth_mb']:.2f} MB | {row['beyond_baseline_mb']:.2f} MB"
        files = f"{row['files_before']}, then {row['files_after']}"
        print(
            f"| {row['what']} | {row['completions']} | {row['wrong']} | {memory} | {files} | {row['ms']:.2f} ms |",
            flush=True,
        )


def main() -> None:
    """Measure door after door; print a table, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--door", action="append", choices=DOORS, help="may be repeated (default: each)")
    parser.add_argument("--completions", type=int, default=10_000, help="of each door (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for all doors together (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    # llama.cpp's threads spin while they wait, and starve each other on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warm_up()  # kernels are compiled once, and not in the time of a door
    deadline = time.monotonic() + options.seconds
    doors = ["baseline", *(options.door or DOORS)]
    rows: list[dict[str, Any]] = []
    for i, door in enumerate(doors):
        seconds = (deadline - time.monotonic()) / (len(doors) - i)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            row = pool.submit(measure, door, max(options.completions, 1), seconds).result()
        rows.append(row)
        row["beyond_baseline_mb"] = row["growth_mb"] - rows[0]["growth_mb"]
    with contextlib.suppress(BrokenPipeError):
        if options.json:
            report(rows, as_json=True)
        else:
            print_table(rows)
    if any(row["wrong"] or row["files_after"] > row["files_before"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
