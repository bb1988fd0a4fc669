"""All choices scored in one batch, against leaf by leaf and against a greedy choice; and a few of many.

    python -m benchmarks.ranking [--model SmolLM2] [--model Gemma] [--requests 5] [--titles 10000] [--json]

* ``rank`` of thirty actions, prompt not cached, against scoring each action by itself behind the prompt and against
  greedy ``choose``, prompt not cached either;
* ``rank(top_k=5)`` among many titles of English words, one of which the prompt names: nodes evaluated and time,
  against ``rank`` of all of them, whose first five are the same.

Both ways of scoring must agree on the winner unless the two best are nearer than a nat: batches of other shapes move
logits of quantized models.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

import numpy as np
from llama_cpp import Llama

from benchmarks.choosing import load, timed
from benchmarks.lead import FINDERS, load_test_module, some_requests
from benchmarks.machine import report
from trie_sampler import TokenTrie, choose, rank, warm_up
from trie_sampler.llama.decoder import Decoder
from trie_sampler.llama.forest import Forest
from trie_sampler.scores import leaf_scores

LEAD = " "
_ADJECTIVES = (
    "Silent Golden Broken Hidden Last First Distant Frozen Burning Lost Crimson Gentle Hollow Iron Quiet Restless "
    "Scarlet Secret Silver Sleeping Stolen Strange Sunken Velvet Wandering White Wild Winter Wooden Ancient"
)
_NOUNS = (
    "River Garden House Road Mountain Island Harbor Forest Tower Bridge Letter Mirror Clock Orchard Lantern Ship Song "
    "Winter Summer Valley Window Door Stone Crown Daughter Stranger Painter Doctor Soldier Fisherman"
)
_PLACES = (
    "London Paris Kyoto Venice Cairo Lisbon Prague Dublin Vienna Boston Havana Athens Damascus Samarkand Timbuktu Oslo "
    "Montreal Naples Seville Jaipur Zanzibar Edinburgh Marseille Kraków"
)


def log_softmax(row: Any) -> Any:
    """Log-probabilities of a row."""
    wide = np.asarray(row, np.float64)
    return wide - np.logaddexp.reduce(wide)


def leaf_by_leaf(llm: Llama, prompt: str, choices: list[str]) -> str:
    """The likeliest choice, each evaluated by itself behind the prompt."""
    trie = TokenTrie.from_choices(llm, choices, prompt=prompt, lead=LEAD)
    decoder = Decoder(llm, llm.tokenize(prompt.encode(), special=True))
    n_prompt = len(decoder.tokens)
    root = log_softmax(decoder.row())
    scores, leaves = [], []
    ends = np.flatnonzero(trie.leaf >= 0).tolist()
    for end in ends:
        score, logs = 0.0, root
        del decoder.tokens[n_prompt:]
        for token in trie.path_tokens(end):
            score += float(logs[token])
            decoder.push([token])
            logs = log_softmax(decoder.row())
        if len(trie.children(end)):
            score += float(np.log(max(1e-300, 1 - np.exp(logs[trie.children(end)]).sum())))
        scores.append(score)
        leaves.append(int(trie.leaf[end]))
    best = leaf_scores(np.array(scores), np.array(leaves), len(choices))
    return trie.name_of(int(best.argmax()))


def measure(name: str, path: str, threads: int, actions: list[str], requests: list[str]) -> dict[str, Any]:
    """A row: thirty actions."""
    head = f"Pick the one action that fits the request.\nActions: {', '.join(actions)}\n"
    ours, bare, greedy = load(path, threads), load(path, threads), load(path, threads)
    rank(ours, "warm:", actions, lead=LEAD)
    times: dict[str, list[float]] = {}
    for request in requests:
        prompt = f"{head}Request: {request}\nAction:"
        Forest.of(ours).begin([1], 0)  # nothing of the prompt is cached
        whole, ranked = timed(lambda prompt=prompt: rank(ours, prompt, actions, lead=LEAD))
        bare.reset()
        slow, best = timed(lambda prompt=prompt: leaf_by_leaf(bare, prompt, actions))
        greedy.reset()
        quick, _ = timed(lambda prompt=prompt: choose(greedy, prompt, actions, lead=LEAD))
        if ranked[0].name != best and (ranked[0].margin or 0.0) > 1.0:
            raise AssertionError(f"{ranked[0]!r} against {best!r}")
        figures = {"rank_ms": whole, "leaf_by_leaf_ms": slow, "greedy_cold_ms": quick}
        figures |= {"rank_to_leaf_by_leaf": whole / slow, "rank_to_greedy": whole / quick}
        for what, value in figures.items():
            times.setdefault(what, []).append(value)
    row: dict[str, Any] = {"what": f"{name}, {len(actions)} actions"}
    row |= {what: statistics.median(values) for what, values in times.items()}
    row |= {"nodes": ranked[0].stats["nodes"], "decodes_after_prompt": ranked[0].stats["forward_passes"]}
    for llm in (ours, bare, greedy):
        llm.close()
    return row


def make_titles(n_titles: int) -> list[str]:
    """The same titles each time, up to 21,600 of them."""
    every = [
        f"The {adjective} {noun} of {place}"
        for adjective in _ADJECTIVES.split()
        for noun in _NOUNS.split()
        for place in _PLACES.split()
    ]
    return sorted(random.Random(0).sample(every, min(n_titles, len(every))))  # noqa: S311 - no secret


def measure_titles(name: str, path: str, threads: int, n_titles: int) -> dict[str, Any]:
    """A row: five of many titles, and all of them."""
    titles = make_titles(n_titles)
    llm = load(path, threads)
    prompt = f"The library's newest book is called {titles[7]}.\nTitle:"
    rank(llm, prompt, titles, lead=LEAD, top_k=1, max_nodes=1)  # tokenizes the titles
    some_ms, some = timed(lambda: rank(llm, prompt, titles, lead=LEAD, top_k=5))
    all_ms, everything = timed(lambda: rank(llm, prompt, titles, lead=LEAD))
    llm.close()
    scores = [choice.stats["score"] for choice in everything]
    for one, other, score in zip(some, everything, scores, strict=False):
        if one.name != other.name and abs(one.stats["score"] - score) > 1.0:
            raise AssertionError(f"{one!r} against {other!r}")
    stats = some[0].stats
    return {
        "what": f"{name}, 5 of {len(titles)} titles",
        "ms": some_ms,
        "all_ms": all_ms,
        "to_all": some_ms / all_ms,
        "nodes_evaluated": stats["nodes_evaluated"],
        "nodes": stats["nodes"],
        "decodes_after_prompt": stats["forward_passes"],
        "right": int(some[0].name == titles[7]),
        "certain": int(stats["exact"]),
    }


def main() -> None:
    """Measure; print a line each, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=FINDERS, help="may be repeated (default: each)")
    parser.add_argument("--requests", type=int, default=5, help="of 600, spread evenly (default %(default)s)")
    parser.add_argument("--titles", type=int, default=10_000, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    data, models = load_test_module("actions"), load_test_module("models")
    requests = [request for request, _ in some_requests(data.REQUESTS, max(options.requests, 1))]
    warm_up()
    rows = []
    for name in options.model or FINDERS:
        path = str(getattr(models, FINDERS[name])())
        rows.append(measure(name, path, options.threads, list(data.ACTIONS), requests))
        rows.append(measure_titles(name, path, options.threads, options.titles))
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
