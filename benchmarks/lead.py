"""Whether the space before a choice matters: right answers of a routing task for each ``lead``.

    python -m benchmarks.lead [--model SmolLM2] [--model Gemma] [--requests 20] [--json]

Thirty actions, and requests that mean one of them (those of ``tests/actions.py``), behind a prompt that ends in
``Action:``. ``lead=""`` puts "PLAY_MUSIC" behind the colon, ``lead=" "`` puts " PLAY_MUSIC", ``lead="auto"`` both, and
the model decides. Greedy picks; every lead gets the same prompts. Chance is one in thirty, and one request of twenty
is 5 %: differences of one or two are noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from llama_cpp import Llama

from benchmarks.machine import describe, report
from trie_sampler import choose

LEADS = ("", " ", "auto")
N_CTX = 1024
TESTS = Path(__file__).parent.parent / "tests"
FINDERS = {"SmolLM2": "smollm2_path", "Gemma": "gemma_path"}
"""Model -> the function of ``tests/models.py`` that finds it."""


def load_test_module(name: str) -> ModuleType:
    """A module of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(f"trie_sampler_tests_{name}", TESTS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(TESTS / f"{name}.py")
    if spec.name not in sys.modules:
        # Dataclasses look their module up.
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[spec.name]


def some_requests(requests: dict[str, Sequence[str]], n: int) -> list[tuple[str, str]]:
    """``n`` pairs (request, action), spread evenly over all."""
    pairs = [(request, action) for action, texts in requests.items() for request in texts]
    return [pairs[i * len(pairs) // n] for i in range(min(n, len(pairs)))]


def measure(
    name: str, llm: Llama, actions: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """A row for each lead."""
    head = f"Pick the one action that fits the request.\nActions: {', '.join(actions)}\n"
    for lead in LEADS:
        start = time.perf_counter()
        chosen = [choose(llm, f"{head}Request: {request}\nAction:", actions, lead=lead) for request, _ in pairs]
        yield {
            "what": f"{name}, lead={lead!r}",
            "right": sum(choice.name == action for choice, (_, action) in zip(chosen, pairs, strict=True)),
            "requests": len(pairs),
            "with_space": sum(choice.text.startswith(" ") for choice in chosen),
            "different_actions": len({choice.name for choice in chosen}),
            "seconds": time.perf_counter() - start,
        }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """What was measured on, and a Markdown table."""
    for name, value in describe().items():
        print(f"# {name}: {value}")
    print("| model, lead | right | picks with a space | different actions | seconds |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = (f"{row['right']} of {row['requests']}", row["with_space"], row["different_actions"])
        print(f"| {row['what']} | {' | '.join(map(str, cells))} | {row['seconds']:.0f} |")


def main() -> None:
    """Measure; print a table, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=FINDERS, help="may be repeated (default: each)")
    parser.add_argument("--requests", type=int, default=20, help="of 600, spread evenly (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the model (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    data, models = load_test_module("actions"), load_test_module("models")
    pairs = some_requests(data.REQUESTS, max(options.requests, 1))
    rows: list[dict[str, Any]] = []
    for name in options.model or FINDERS:
        path = getattr(models, FINDERS[name])()
        llm = Llama(str(path), n_ctx=N_CTX, n_threads=options.threads, n_threads_batch=options.threads, verbose=False)
        rows += measure(name, llm, data.ACTIONS, pairs)
        llm.close()
    if options.json:
        report(rows, as_json=True)
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
