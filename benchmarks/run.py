"""Peers on the same vocabulary, choices and logits: building, and a walk from the root to a leaf.

    python -m benchmarks.run [--smoke] [--json] [--vocabulary smollm2,gemma,FILE.gguf]
        [--sizes 4,30,200,1000,10000,100000,1000000] [--only NAME,...] [--budget 60] [--seconds 4]

One process a contender and size. Each walk follows one choice, drawn at random: at every step its next token gets the
largest logit of a row of noise, just written. Before anything is timed, some walks are checked at every step: what a
contender allows holds the oracle's children (``tests/oracle.py``); it is nothing else where the contender knows the
vocabulary's own tokenization alone, and otherwise what goes on with some choice, or ends one; and tokens that are not
allowed, louder than the right one, are not picked. Timed are, for a peer, computing what is allowed and applying it to
the row, without the pick; for us the pick, for there is no mask. Nobody's step to the next node counts.

Who takes longer than the budget, fails or is not installed has a row that says so, and is not asked for more choices.

====================  ==========================================================================================
vocabulary_s          what the contender makes of the vocabulary alone, once; imports and compiling included
build_s, _min, _p99   compiling the choices: median, least and 99th percentile of ``builds`` times, seconds
tokenize_s            for the two that take tokens, tokenizing the choices comes on top (one time for both, seconds)
step_us, _min, _p99   mask and apply, a step; ours: the pick
fill_us               of that, computing what is allowed, where a contender has it apart (median)
pick_us, _min, _p99   ``argmax`` of the masked row, a step
walk_us, _min, _p99   steps of a whole walk, summed, over ``walks`` walks; to_ours: walk_us by ours of the same size
rss_mb                peak resident memory above that of the interpreter and NumPy: llama.cpp, the vocabulary and the
                      list of choices are in it
own_mb                peak resident memory above that of the process right before building: the choices' share
====================  ==========================================================================================

Memory is in MiB, and is known on Linux only.
"""

from __future__ import annotations

import argparse
import bisect
import importlib.metadata
import itertools
import json
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STATUS = Path("/proc/self/status")


def peak_mb() -> float | None:
    """MiB: the largest resident set of this process so far, not of those that it was started from."""
    if not STATUS.exists():
        return None
    (kilobytes,) = (line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(kilobytes) / 1024


def forget_peak() -> None:
    """The peak is what is resident now, from now on."""
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


# Before anything else is imported.
BARE_MB = peak_mb()

from benchmarks.contenders import CONTENDERS, Choices, Contender  # noqa: E402
from benchmarks.lead import FINDERS, load_test_module  # noqa: E402
from benchmarks.machine import describe  # noqa: E402
from benchmarks.ranking import make_titles  # noqa: E402

SIZES = (4, 30, 200, 1000, 10_000, 100_000, 1_000_000)
OURS = "trie_sampler"
TAKE_TOKENS = ("trie_sampler", "dictionaries and NumPy")
VOCABULARIES = {name.lower(): name for name in FINDERS}
_MANY = 100_000
"""Choices, from which on fewer walks are checked and leaves are listed another way."""
_WALKS, _CHECKED, _BUILDS = 2000, 3, 20
"""At most: walks timed, walks checked, builds. At least one of each."""
_PROMPT = "Title:"
_BOOST, _LOUD = 100.0, 200.0


def make_choices(llm: Any, n: int) -> tuple[Choices, float]:
    """Titles with a space before them and the tokens that follow the prompt; seconds of tokenizing them."""
    from trie_sampler import TokenTrie

    titles = make_titles(n)
    if n > len(titles):
        parts = itertools.product(range(1 + n // len(titles)), titles)
        titles = [f"{title}, part {part:02}" for part, title in itertools.islice(parts, n)]
    texts = [f" {title}" for title in titles]
    start = time.perf_counter()
    trie = TokenTrie.from_choices(llm, texts, prompt=_PROMPT, lead="")
    seconds = time.perf_counter() - start
    return (list(trie.leaves()) if n < _MANY else _leaves_of_many(trie)), seconds


def write_choices(model: str, n: int, file: Path) -> float:
    """Tokenize once for all contenders; seconds that it took."""
    from llama_cpp import Llama

    llm = Llama(model, vocab_only=True, verbose=False)
    choices, seconds = make_choices(llm, n)
    file.write_bytes(pickle.dumps(choices))
    llm.close()
    return seconds


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


def oracle_along(choices: Choices, walk: Sequence[int]) -> Any:
    """The oracle's trie of what is on and beside one path [n]: all choices, cut behind where they leave it."""
    paths = set()
    walk = tuple(walk)
    for _, tokens in choices:
        common = 0
        for token, other in zip(tokens, walk, strict=False):
            if token != other:
                break
            common += 1
        paths.add(tuple(tokens[: common + 1]))
    return load_test_module("oracle").DictTrie((str(path), path) for path in paths)


class Checker:
    """What may come next, known without any contender."""

    def __init__(self, llm: Any, choices: Choices) -> None:
        from trie_sampler.llama.vocab import as_tokenizer

        self._tokenizer = as_tokenizer(llm)
        self._choices = choices
        self._texts = sorted(text.encode() for text, _ in choices)
        self._rng = np.random.default_rng(1)
        self._n_vocab = llm.n_vocab()

    def goes_on(self, text: bytes, token: int) -> bool:
        """Whether ``token`` behind ``text`` is the beginning of a choice, or ends one."""
        at = bisect.bisect_left(self._texts, text)
        if self._tokenizer.is_eog(token):
            return self._texts[at : at + 1] == [text]
        piece = self._tokenizer.detokenize((token,))
        at = bisect.bisect_left(self._texts, text + piece)
        return bool(piece) and at < len(self._texts) and self._texts[at].startswith(text + piece)

    def walk(self, contender: Contender, tokens: Sequence[int], noise: Any) -> None:
        """Raises AssertionError where a step's allowed tokens or pick are not the right ones."""
        oracle = oracle_along(self._choices, tokens)
        contender.start()
        text = b""
        for depth, token in enumerate(tokens):
            right = oracle.children(tuple(tokens[:depth]))
            row = noise.copy()
            row[token] = _BOOST
            row[[i for i in self._rng.integers(0, self._n_vocab, 8).tolist() if not self.goes_on(text, i)]] = _LOUD
            contender.mask(row)
            allowed = set(np.asarray(contender.allowed(row)).tolist())
            if missing := set(right) - allowed:
                raise AssertionError(f"{len(missing)} of {len(right)} tokens are not allowed behind {text!r}")
            extra = sorted(allowed - set(right))
            wrong = extra if contender.canonical else [i for i in extra if not self.goes_on(text, i)]
            if wrong:
                pieces = [self._tokenizer.detokenize((i,)) for i in wrong[:3]]
                raise AssertionError(f"{len(wrong)} wrong tokens are allowed behind {text!r}: {pieces}")
            if (picked := contender.pick(row)) != token:
                raise AssertionError(f"picked {picked} for {token} behind {text!r}")
            contender.accept(token)
            text += self._tokenizer.detokenize((token,))


def time_walk(contender: Contender, tokens: Sequence[int], noise: Any) -> list[tuple[float, float, float | None]]:
    """Seconds of masking, picking and computing what is allowed, a step; ours: of the pick for the first."""
    clock = time.perf_counter
    contender.start()
    spent = []
    for token in tokens:
        row = noise.copy()
        row[token] = _BOOST
        begun = clock()
        contender.mask(row)
        masked = clock()
        picked = contender.pick(row)
        chosen = clock()
        if picked != token:
            raise AssertionError(f"picked {picked} for {token} of {tuple(tokens)}")
        contender.accept(token)
        fill = None if contender.filled is None else contender.filled - begun
        spent.append(
            (masked - begun, chosen - masked, fill) if contender.name != OURS else (chosen - masked, 0.0, None)
        )
    return spent


def spread(name: str, seconds: Sequence[float], scale: float = 1e6) -> dict[str, float]:
    """Median, least and 99th percentile."""
    values = np.array(seconds) * scale
    return {
        name: float(np.median(values)),
        f"{name}_min": float(values.min()),
        f"{name}_p99": float(np.percentile(values, 99)),
    }


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, model: str, file: Path, seconds: float) -> dict[str, Any]:
    """A row, in this process; the choices come from a file."""
    from llama_cpp import Llama

    llm = Llama(model, vocab_only=True, verbose=False)
    start = time.perf_counter()
    contender: Contender = CONTENDERS[name](llm)
    vocabulary_s = time.perf_counter() - start
    choices: Choices = pickle.loads(file.read_bytes())  # noqa: S301 - written by the process that started this one
    forget_peak()
    before = peak_mb()
    builds = [_timed(lambda: contender.build(choices))]
    rng = np.random.default_rng(len(choices))
    noise = rng.normal(size=llm.n_vocab()).astype(np.float32)
    walks = [choices[i][1] for i in rng.integers(0, len(choices), _WALKS)]
    time_walk(contender, walks[0][:1], noise)
    peak = peak_mb()
    checker = Checker(llm, choices)
    deadline = time.perf_counter() + seconds
    for walk in walks[: 1 if len(choices) >= _MANY else _CHECKED]:
        checker.walk(contender, walk, noise)
        if time.perf_counter() > deadline:
            break
    timed = []
    deadline = time.perf_counter() + seconds
    for walk in walks:
        timed.append(time_walk(contender, walk, noise))
        if time.perf_counter() > deadline:
            break
    steps, picks, fills = zip(*itertools.chain.from_iterable(timed), strict=True)
    while len(builds) < _BUILDS and sum(builds) + builds[-1] < seconds / 2:
        builds.append(_timed(lambda: contender.build(choices)))
    row: dict[str, Any] = {"vocabulary_s": vocabulary_s, **spread("build_s", builds, 1.0), "builds": len(builds)}
    row |= spread("step_us", steps)
    if name != OURS:
        row |= spread("pick_us", picks)
    if fills[0] is not None:
        row["fill_us"] = float(np.median(fills) * 1e6)
    row |= spread("walk_us", [sum(step for step, _, _ in walk) for walk in timed]) | {"walks": len(timed)}
    if peak is not None and before is not None and BARE_MB is not None:
        row |= {"rss_mb": peak - BARE_MB, "own_mb": peak - before}
    return row


def try_to_measure(name: str, model: str, file: Path, seconds: float) -> dict[str, Any]:
    """A row, or the first line of what went wrong."""
    try:
        return measure(name, model, file, seconds)
    except BaseException as error:  # noqa: BLE001 - Rust's panics are no Exception
        return {"failure": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]}


def run_one(name: str, model: str, file: Path, budget: float, seconds: float = 1.0) -> dict[str, Any]:
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
            [*command, "--seconds", str(seconds)], capture_output=True, text=True, timeout=budget, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"over {budget:.0f} s"}
    if done.returncode:
        ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failure": ": ".join([ended, *said[:1]])[:200]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def compare(
    models: dict[str, str], names: list[str], sizes: list[int], budget: float, seconds: float
) -> list[dict[str, Any]]:
    """All rows; who was over the budget or failed is not asked for more choices. Says on stderr how far it is."""
    rows = []
    for model, path in models.items():
        failed: dict[str, str] = {}
        for n in sorted(sizes):
            with tempfile.TemporaryDirectory() as folder:
                choices = Path(folder) / "choices"
                tokenize_s = write_choices(path, n, choices)
                ours: float | None = None
                for name in names:
                    row = {"failure": failed[name]} if name in failed else run_one(name, path, choices, budget, seconds)
                    if "failure" in row:
                        lasting = name == "STATIC" or row["failure"] == "not installed"
                        at_more = row["failure"] if lasting else f"not tried: {n:,} choices {row['failure']}"
                        failed.setdefault(name, at_more)
                    else:
                        ours = row["walk_us"] if name == OURS else ours
                        row |= {"tokenize_s": tokenize_s} if name in TAKE_TOKENS else {}
                        row |= {"to_ours": row["walk_us"] / ours} if ours else {}
                    rows.append({"model": model, "contender": name, "choices": n, **row})
                    print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    figures = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
    return f"{row['model']}, {row['choices']:,} choices, {row['contender']}: {row.get('failure') or figures}"


def find_models(names: Sequence[str]) -> dict[str, str]:
    """Label -> file of each vocabulary that is named or is a file."""
    models = load_test_module("models")
    found = {}
    for name in names:
        if label := VOCABULARIES.get(name.lower()):
            try:
                found[label] = str(getattr(models, FINDERS[label])())
            except models.ModelNotInstalledError as error:
                raise SystemExit(f"{name}: {error}") from None
        elif Path(name).is_file():
            found[Path(name).stem] = name
        else:
            raise SystemExit(f"--vocabulary {name}: neither of {', '.join(VOCABULARIES)}, nor a file")
    return found


def main() -> None:
    """Measure; a line a row on stderr as it comes, and everything as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", metavar="NAME,...", help="smollm2, gemma or a GGUF file (default: both)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="choices (default: %(default)s)")
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(CONTENDERS)}; ours always runs")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="of a process (default: 60)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of walks that are timed, about (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--smoke", action="store_true", help="4 and 200 choices, SmolLM2, half a minute")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model-file", help=argparse.SUPPRESS)
    parser.add_argument("--choices", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(try_to_measure(options.child, options.model_file, options.choices, options.seconds)))
        return
    only = options.only.split(",") if options.only else list(CONTENDERS)
    if unknown := set(only) - set(CONTENDERS):
        parser.error(f"--only: {', '.join(sorted(unknown))}, of {', '.join(CONTENDERS)}")
    names = [name for name in CONTENDERS if name in {OURS, *only}]
    vocabularies = options.vocabulary.split(",") if options.vocabulary else list(VOCABULARIES)
    sizes, seconds = [int(size) for size in options.sizes.split(",")], options.seconds
    if options.smoke:
        vocabularies, sizes, seconds = vocabularies[:1], [4, 200], 0.2
    rows = compare(find_models(vocabularies), names, sizes, options.budget, seconds)
    if options.json:
        packages = [contender.package for contender in CONTENDERS.values() if contender.package]
        peers = {name: _version(name) for name in [*packages, "torch"]}
        print(json.dumps({"machine": describe(), "peers": peers, "budget_s": options.budget, "rows": rows}, indent=1))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
