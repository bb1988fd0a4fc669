"""A real task: how often the right label is chosen, how fast, and with how many decodes, by each way to choose.

    python -m benchmarks.labelled FILE.csv --labels LABELS.txt [--model SmolLM2] [--model Gemma] [--rows N] [--json]

FILE has a header, texts in its first column and their labels in its second, or in those that ``--text-column`` and
``--label-column`` name. LABELS has a label a line; without it they are those of FILE. The prompt lists all labels, with
spaces for underscores, and shows the examples; Gemma continues it as text, behind ``Label:``, SmolLM2 answers it in its
chat template. Another task than bank customers' questions wants ``--task`` and ``--example`` as well.

* greedy: ``choose``;
* joint, token length normalized, calibrated: ``choose(method="best")``, which searches best first. The neutral prompt
  is the task's own with the question ``N/A``, or 32 with unlabelled questions of other rows: FILE is cut in two, rows
  with even and with odd numbers, and a row's 32 are spread evenly over the half that it is not in;
* every spelling: joint, with ``tokenization="every"``;
* whole tree: ``rank``, calibrated with ``N/A``;
* grammar: ``create_completion(grammar=...)`` at temperature 0, one alternative for each label.

All take the rows in turn on one ``Llama``, so the head of the prompt is cached and the question is not: while one has
row i the next has row i + 1. Priors are measured before, and their time is told apart. The last three get fewer rows,
evenly spread and at least ten, where all would take them longer than ``--budget``; ratios compare the same rows.
Times and decodes are means over the rows; decodes are those after the prompt. One row of 154 is 0.6 %, and a standard
error of the accuracy about 4 %.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llama_cpp import Llama
from llama_cpp.llama_grammar import LlamaGrammar

from benchmarks.lead import FINDERS, load_test_module
from benchmarks.machine import describe, report
from trie_sampler import choose, rank, warm_up
from trie_sampler.choice import Choice
from trie_sampler.llama.vocab import prompt_tokens

N_CTX = 2048
N_NEUTRAL = 32
FEWEST_ROWS = 10
CHATS = ("SmolLM2",)
"""Models that answer in their chat template; the others continue a text."""

TASK = "Classify each bank customer question with one of these labels"
EXAMPLES = (
    "My card was eaten by the machine=card_swallowed",
    "Why was I charged twice?=transaction_charged_twice",
)

GREEDY, JOINT, BY_LENGTH, BY_NA = "greedy", "joint", "token length normalized", "calibrated, N/A"
BY_OTHERS, EVERY, WHOLE, GRAMMAR = "calibrated, 32 questions", "joint, every spelling", "whole tree", "grammar"
SLOW = (EVERY, WHOLE, GRAMMAR)


class Answer(NamedTuple):
    """What one row got: the label, decodes after the prompt, nodes evaluated (NaN where there are none)."""

    label: str
    decodes: float
    nodes: float


@dataclass
class Task:
    """A labelled file, and how it is asked.

    Attributes:
        pairs: (text, label) of each row.
        texts: label -> what the model writes for it.
        head: the beginning of every prompt.
        is_chat: whether the prompt is one message of a chat.
    """

    pairs: Sequence[tuple[str, str]]
    texts: dict[str, str]
    head: str
    is_chat: bool = False

    def prompt(self, text: str) -> Any:
        """What the model is given."""
        whole = f"{self.head}Question: {text}\nLabel:"
        return [{"role": "user", "content": whole}] if self.is_chat else whole

    @property
    def lead(self) -> str:
        """What stands between the prompt and a label."""
        return "" if self.is_chat else " "

    def others(self, row: int) -> list[Any]:
        """Prompts of rows from the half that a row is not in."""
        half = self.pairs[(row + 1) % 2 :: 2] or self.pairs
        n = min(N_NEUTRAL, len(half))
        return [self.prompt(half[i * len(half) // n][0]) for i in range(n)]


@dataclass
class Contender:
    """A way to choose, and what it did.

    Attributes:
        what: its name.
        answer: row -> answer.
        rows: those that it gets.
        prior_seconds: what its first answers took longer than later ones: priors, contexts, tries.
        seconds: row -> time.
        answers: row -> answer.
    """

    what: str
    answer: Callable[[int], Answer]
    rows: Sequence[int] = ()
    prior_seconds: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    def timed(self, row: int) -> tuple[float, Answer]:
        """(seconds, the answer)."""
        start = time.perf_counter()
        answer = self.answer(row)
        return time.perf_counter() - start, answer

    def prepare(self, rows: Sequence[int], budget: float) -> None:
        """Answer a row of each half untimed, and see how many the budget allows."""
        first = {row % 2: row for row in rows}
        before = sum(self.timed(row)[0] for row in first.values())
        usual = self.timed(rows[len(rows) // 2])[0]
        self.prior_seconds = max(0.0, before - len(first) * usual)
        n = min(len(rows), max(FEWEST_ROWS, int(budget / usual))) if self.what in SLOW else len(rows)
        self.rows = spread(rows, n)

    def row_of(self, task: Task, model: str) -> dict[str, Any]:
        """The figures of one line."""
        right = sum(answer.label == task.pairs[row][1] for row, answer in self.answers.items())
        return {
            "what": f"{model}, {self.what}",
            "right": right,
            "rows": len(self.answers),
            "accuracy": right / len(self.answers),
            "seconds": statistics.fmean(self.seconds.values()),
            "decodes": statistics.fmean(answer.decodes for answer in self.answers.values()),
            "nodes": statistics.fmean(answer.nodes for answer in self.answers.values()),
            "prior_seconds": self.prior_seconds,
        }


def spread(rows: Sequence[int], n: int) -> list[int]:
    """``n`` of them, evenly."""
    return [rows[i * len(rows) // n] for i in range(n)]


def read_pairs(file: Path, text: str | None, label: str | None) -> list[tuple[str, str]]:
    """(text, label) of each row of a CSV file with a header."""
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        columns = list(reader.fieldnames or ())
        if len(columns) < 2:
            raise ValueError(f"{file} needs a column of texts and one of labels, and a header")
        text, label = text or columns[0], label or columns[1]
        return [(row[text], row[label]) for row in reader]


def spaced(label: str) -> str:
    """A label as text."""
    return label.replace("_", " ")


def make_head(task: str, labels: Sequence[str], examples: Sequence[str]) -> str:
    """The beginning of every prompt: the task, the labels, examples ``TEXT=LABEL``."""
    shown = [example.rpartition("=") for example in examples]
    blocks = [f"{task}: {', '.join(map(spaced, labels))}"]
    blocks += [f"Question: {text}\nLabel: {spaced(label)}" for text, _, label in shown]
    return "".join(f"{block}\n\n" for block in blocks)


def contenders(llm: Llama, task: Task) -> list[Contender]:
    """All ways to choose."""
    lead = task.lead
    neutral = [task.prompt("N/A")]
    grammar = LlamaGrammar.from_string(
        f"root ::= {' | '.join(json.dumps(lead + text) for text in task.texts.values())}", verbose=False
    )
    label_of = {text: label for label, text in task.texts.items()}

    def known(choice: Choice) -> Answer:
        stats = choice.stats
        return Answer(choice.name or "", stats["forward_passes"], stats.get("nodes_evaluated", float("nan")))

    def by_choose(what: str, neutral_of: Callable[[int], Any] | None = None, **settings: Any) -> Contender:
        def answer(row: int) -> Answer:
            more = {} if neutral_of is None else {"neutral": neutral_of(row)}
            return known(choose(llm, task.prompt(task.pairs[row][0]), task.texts, lead=lead, **settings, **more))

        return Contender(what, answer)

    def by_rank(row: int) -> Answer:
        prompt = task.prompt(task.pairs[row][0])
        return known(rank(llm, prompt, task.texts, lead=lead, normalize="calibrated", neutral=neutral)[0])

    def by_grammar(row: int) -> Answer:
        ids = prompt_tokens(llm, task.prompt(task.pairs[row][0]))
        made: Any = llm.create_completion(ids, grammar=grammar, temperature=0.0, max_tokens=64)
        label = label_of[made["choices"][0]["text"].removeprefix(lead)]
        return Answer(label, made["usage"]["completion_tokens"], float("nan"))

    others = [task.others(row) for row in (0, 1)]
    best: dict[str, Any] = {"method": "best"}
    return [
        by_choose(GREEDY),
        by_choose(JOINT, **best),
        by_choose(BY_LENGTH, **best, normalize="token_length_normalized"),
        by_choose(BY_NA, lambda _: neutral, **best, normalize="calibrated"),
        by_choose(BY_OTHERS, lambda row: others[row % 2], **best, normalize="calibrated"),
        by_choose(EVERY, **best, tokenization="every"),
        Contender(WHOLE, by_rank),
        Contender(GRAMMAR, by_grammar),
    ]


def compare(by_name: dict[str, Contender], what: str, to: str) -> float:
    """Time of one to time of another, over the rows that both had."""
    left, right = by_name[what].seconds, by_name[to].seconds
    both = left.keys() & right.keys()
    return sum(left[row] for row in both) / sum(right[row] for row in both)


def measure(name: str, llm: Llama, task: Task, rows: Sequence[int], budget: float) -> list[dict[str, Any]]:
    """A row for each contender, and one of ratios."""
    ways = contenders(llm, task)
    for way in ways:
        way.prepare(rows, budget)
    for turn in range(len(rows)):
        for place, way in enumerate(ways):
            row = rows[(turn + place) % len(rows)]
            if row in way.rows:
                way.seconds[row], way.answers[row] = way.timed(row)
                if way.answers[row].label not in task.texts:
                    raise AssertionError(f"{way.what} answered {way.answers[row].label!r}")
    by_name = {way.what: way for way in ways}
    figures = {way.what: way.row_of(task, name) for way in ways}
    ratios: dict[str, Any] = {"what": f"{name}, ratios"}
    for calibrated in (BY_NA, BY_OTHERS):
        # Where greedy is never right there is nothing to compare with.
        right = figures[GREEDY]["right"]
        ratios[f"accuracy: {calibrated} / greedy"] = figures[calibrated]["right"] / right if right else float("inf")
        ratios[f"time: {calibrated} / greedy"] = compare(by_name, calibrated, GREEDY)
        ratios[f"time: {calibrated} / whole tree"] = compare(by_name, calibrated, WHOLE)
    return [*figures.values(), ratios]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """What was measured on, a Markdown table, and the ratios."""
    for name, value in describe().items():
        print(f"# {name}: {value}")
    print("| model, by | right | accuracy | seconds a row | decodes a row | nodes a row | seconds before |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if "right" in row:
            nodes = "" if row["nodes"] != row["nodes"] else f"{row['nodes']:.1f}"
            print(
                f"| {row['what']} | {row['right']} of {row['rows']} | {100 * row['accuracy']:.1f} % "
                f"| {row['seconds']:.3f} | {row['decodes']:.1f} | {nodes} | {row['prior_seconds']:.1f} |"
            )
    for row in rows:
        if "right" not in row:
            print(f"\n{row['what']}:")
            for what, value in row.items():
                if what != "what":
                    print(f"* {what}: {value:.2f}")


def main() -> None:
    """Measure; print a table, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV with a header")
    parser.add_argument("--labels", type=Path, help="a label a line (default: those of the file)")
    parser.add_argument("--text-column", help="(default: the first)")
    parser.add_argument("--label-column", help="(default: the second)")
    parser.add_argument("--task", default=TASK, help="what the labels are announced with (default: %(default)r)")
    parser.add_argument("--example", action="append", help="TEXT=LABEL, may be repeated (default: two of a bank's)")
    parser.add_argument("--model", action="append", choices=FINDERS, help="may be repeated (default: each)")
    parser.add_argument("--rows", type=int, help=f"spread evenly, at least {FEWEST_ROWS} (default: all)")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of a slow way (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    pairs = read_pairs(options.file, options.text_column, options.label_column)
    labels = list(dict.fromkeys(label for _, label in pairs))
    if options.labels is not None:
        labels = [line for line in map(str.strip, options.labels.read_text("utf-8").splitlines()) if line]
    if len(pairs) < FEWEST_ROWS:
        parser.error(f"{options.file} has fewer than {FEWEST_ROWS} rows")
    if missing := {label for _, label in pairs} - set(labels):
        parser.error(f"labels of {options.file} that are not among the labels: {', '.join(sorted(missing)[:3])}")
    n_rows = len(pairs) if options.rows is None else min(len(pairs), max(FEWEST_ROWS, options.rows))
    examples = EXAMPLES if options.example is None else options.example
    head = make_head(options.task, labels, [text for text in examples if text.rpartition("=")[2] in labels])
    models = load_test_module("models")
    warm_up()
    rows: list[dict[str, Any]] = []
    for name in options.model or FINDERS:
        path = str(getattr(models, FINDERS[name])())
        llm = Llama(path, n_ctx=N_CTX, n_threads=options.threads, n_threads_batch=options.threads, verbose=False)
        task = Task(pairs, {label: spaced(label) for label in labels}, head, is_chat=name in CHATS)
        rows += measure(name, llm, task, spread(range(len(pairs)), n_rows), options.budget)
        llm.close()
    if options.json:
        report(rows, as_json=True)
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
