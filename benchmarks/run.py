"""Peers on the same vocabulary, choices and logits: building, and a walk from the root to a leaf.

    python -m benchmarks.run [--model SmolLM2] [--model Gemma] [--sizes 4,30,200,1000,10000,100000,1000000]
        [--only NAME] [--budget 60] [--json FILE] [--smoke]

One process a contender and size. Each walk follows one choice, drawn at random: at every step its next token gets the
largest logit of a row of noise, and the contender must pick it, or the run fails. Timed are, for a peer, computing
what is allowed and applying it to the row, without the pick; for us the pick, for there is no mask. Nobody's step to
the next node counts. Who takes longer than the budget, fails or is not installed has a row that says so.

==================  ============================================================================================
build_s             compiling the choices; for peers also what they make of the vocabulary
step_us, _p99       mask and apply; ours: the pick. Median and 99th percentile
pick_us             ``argmax`` of the masked row
walk_us, _min       a whole walk, median and least
mb                  peak resident memory above that of the process with the model's vocabulary and the choices
to_ours             walk_us by ours of the same size
==================  ============================================================================================
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import CONTENDERS, Choices
from benchmarks.lead import FINDERS, load_test_module
from benchmarks.machine import describe
from benchmarks.ranking import make_titles

SIZES = (4, 30, 200, 1000, 10_000, 100_000, 1_000_000)
OURS = "trie_sampler"
_WALKS, _WARM_UP = 2000, 2
_PROMPT = "Title:"
_BOOST = 100.0
_MB = 2**20 if sys.platform == "darwin" else 1024


def make_choices(llm: Any, n: int) -> Choices:
    """Titles with a space before them, and the tokens that follow the prompt."""
    from trie_sampler import TokenTrie

    titles = make_titles(n)
    if n > len(titles):
        parts = itertools.product(range(1 + n // len(titles)), titles)
        titles = [f"{title}, part {part:02}" for part, title in itertools.islice(parts, n)]
    texts = [f" {title}" for title in titles]
    trie = TokenTrie.from_choices(llm, texts, prompt=_PROMPT, lead="")
    return list(trie.leaves()) if n < SIZES[-2] else _leaves_of_many(trie)


def write_choices(model: str, n: int, file: Path) -> None:
    """Tokenize once for all contenders."""
    from llama_cpp import Llama

    llm = Llama(model, vocab_only=True, verbose=False)
    file.write_bytes(pickle.dumps(make_choices(llm, n)))
    llm.close()


def _leaves_of_many(trie: Any) -> Choices:
    """As ``trie.leaves()``, each node's path made of its parent's."""
    paths: list[tuple[int, ...]] = [()] * trie.n_nodes
    first = trie.first_child.tolist()
    token, leaf = trie.token.tolist(), trie.leaf.tolist()
    found = []
    for node, path in enumerate(paths):
        if leaf[node] >= 0:
            found.append((trie.name_of(leaf[node]), path))
        for child in range(first[node], first[node + 1]):
            paths[child] = (*path, token[child])
        paths[node] = ()
    return found


def measure(name: str, model: str, file: Path, budget: float) -> dict[str, Any]:
    """A row, in this process; the choices come from a file."""
    from llama_cpp import Llama

    llm = Llama(model, vocab_only=True, verbose=False)
    choices: Choices = pickle.loads(file.read_bytes())  # noqa: S301 - written by the process that started this one
    contender = CONTENDERS[name]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == OURS:
        # Kernels are loaded once a process, as the peers' libraries are.
        CONTENDERS[name]().build(llm, choices[:2])
    start = time.perf_counter()
    contender.build(llm, choices)
    build_s = time.perf_counter() - start
    rng = np.random.default_rng(len(choices))
    noise = rng.normal(size=llm.n_vocab()).astype(np.float32)
    walks = [choices[i][1] for i in rng.integers(0, len(choices), _WALKS)]
    steps, picks, totals = [], [], []
    deadline = time.perf_counter() + budget / 2
    # Of what takes seconds one walk is enough.
    for number, walk in enumerate(itertools.chain(walks[:_WARM_UP], walks)):
        contender.start()
        total = 0.0
        for token in walk:
            row = noise.copy()
            row[token] = _BOOST
            begun = time.perf_counter()
            contender.mask(row)
            masked = time.perf_counter()
            picked = contender.pick(row)
            chosen = time.perf_counter()
            contender.accept(token)
            if name == OURS:
                begun, masked = masked, chosen
            if picked != token:
                raise AssertionError(f"picked {picked} for {token} of {walk}")
            if number >= _WARM_UP:
                steps.append(masked - begun)
                picks.append(chosen - masked)
            total += masked - begun
        if number >= _WARM_UP:
            totals.append(total)
        if time.perf_counter() > deadline and totals:
            break
    micro = 1e6
    return {
        "build_s": build_s,
        "step_us": float(np.median(steps) * micro),
        "step_us_p99": float(np.percentile(steps, 99) * micro),
        "pick_us": None if name == OURS else float(np.median(picks) * micro),
        "walk_us": float(np.median(totals) * micro),
        "walk_us_min": float(np.min(totals) * micro),
        "walks": len(totals),
        "mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / _MB,
    }


def run_one(name: str, model: str, file: Path, budget: float) -> dict[str, Any]:
    """A row, in a process of its own; what went wrong, in a word."""
    package = CONTENDERS[name].package
    if package is not None and name != "STATIC":
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return {"failure": "not installed"}
    command = [sys.executable, "-m", "benchmarks.run", "--child", name, "--model-file", model, "--choices", str(file)]
    try:
        done = subprocess.run(
            [*command, "--budget", str(budget)], capture_output=True, text=True, timeout=budget, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"over {budget:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with {done.returncode}"]
        return {"failure": said[-1][:160]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def compare(models: dict[str, str], names: list[str], sizes: list[int], budget: float) -> list[dict[str, Any]]:
    """All rows; who was over the budget or failed is not asked for more choices."""
    rows = []
    for (model, path), n in itertools.product(models.items(), sizes):
        with tempfile.TemporaryDirectory() as folder:
            choices = Path(folder) / "choices"
            write_choices(path, n, choices)
            ours: dict[str, Any] = {}
            for name in names:
                failed = [
                    row for row in rows if row["contender"] == name and row["model"] == model and "failure" in row
                ]
                row = failed[-1] if failed else run_one(name, path, choices, budget)
                if name == OURS:
                    ours = row
                if "walk_us" in row and "walk_us" in ours:
                    row["to_ours"] = row["walk_us"] / ours["walk_us"]
                rows.append({**row, "model": model, "contender": name, "choices": n})
                figures = ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
                print(f"{model}, {n:,} choices, {name}: {row.get('failure') or figures}", flush=True)
    return rows


def main() -> None:
    """Measure, print a line a row, and write everything as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=FINDERS, help="may be repeated (default: each)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="choices (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="may be repeated; ours always runs")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="of a process (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    parser.add_argument("--smoke", action="store_true", help="two sizes, SmolLM2, seconds")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model-file", help=argparse.SUPPRESS)
    parser.add_argument("--choices", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [4, 200] if options.smoke else [int(size) for size in options.sizes.split(",")]
    if options.child:
        print(json.dumps(measure(options.child, options.model_file, options.choices, options.budget)))
        return
    names = [name for name in CONTENDERS if not options.only or name in {OURS, *options.only}]
    finders = ["SmolLM2"] if options.smoke else options.model or list(FINDERS)
    models = load_test_module("models")
    files = {name: str(getattr(models, FINDERS[name])()) for name in finders}
    rows = compare(files, names, sizes, options.budget)
    if options.json:
        packages = [contender.package for contender in CONTENDERS.values() if contender.package]
        versions = {name: _version(name) for name in packages}
        document = {"machine": describe(), "peers": versions, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
