"""What a step of llama.cpp's sampler chain costs with the native sampler in it, as ratios measured in one run.

    python -m benchmarks.native --model gemma.gguf [--steps 200] [--json]

* one of 30 choices: trie and greedy, against greedy alone and against the grammar of the same choices and greedy;
* the trie's own callback, and a step of its chain, at 4 and at 1,000,000 leaves.

A step is ``llama_sampler_sample``: V logits are copied into the candidate array, the chain is run and the token
accepted. Before each timed step the chain is reset and walked, untimed, to a node inside a choice, the same for every
contender, so that every timed step is constrained. Contenders are checked before they are timed: each pick against
NumPy or against the texts, and a whole generation of each against the choices.

"nothing" is a sampler that selects the first slot and looks at nothing: what is left is the host's own copy of the
logits, the floor of any chain. Steps right behind a decode find the caches cold, as they do in a generation.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import llama_cpp
import numba
import numpy as np
import numpy.typing as npt

from benchmarks.machine import report
from benchmarks.speed import V, make_trie, numpy_pick, time_once
from trie_sampler import TokenTrie, TrieCursor, llama_sampler_init_token_trie
from trie_sampler.kernels import view_int64
from trie_sampler.llama.sampler import new_sampler
from trie_sampler.llama.vocab import LlamaTokenizer

_NAMES = """
PLAY_MUSIC PLAY_VIDEO STOP STOP_TIMER SET_TIMER SET_ALARM WEATHER NEWS REPLY REPLY_THREAD
SEND_EMAIL READ_EMAIL CALL HANG_UP NOTE NOTE_DELETE SEARCH TRANSLATE NAVIGATE TRAFFIC
LIGHTS_ON LIGHTS_OFF THERMOSTAT LOCK_DOOR OPEN_GARAGE ORDER_FOOD BOOK_TABLE CALENDAR REMIND IGNORE
"""
CHOICES = [f" {name}" for name in _NAMES.split()]
PROMPT = "Request: play some jazz in the kitchen\nAction:"

Ids = tuple[int, ...]


class Chain:
    """A sampler chain that owns its samplers."""

    def __init__(self, *samplers: Any) -> None:
        self.pointer = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in samplers:
            if not sampler:
                raise AssertionError("a sampler could not be made")
            llama_cpp.llama_sampler_chain_add(self.pointer, sampler)

    def place(self, prefix: Sequence[int]) -> None:
        """Walk to a node, from the root."""
        llama_cpp.llama_sampler_reset(self.pointer)
        for token in prefix:
            llama_cpp.llama_sampler_accept(self.pointer, token)

    def sample(self, llm: Any) -> int:
        """One step."""
        return int(llama_cpp.llama_sampler_sample(self.pointer, llm.ctx, -1))

    def free(self) -> None:
        """Free it with its samplers."""
        llama_cpp.llama_sampler_free(self.pointer)


def generate(llm: Any, tokenizer: LlamaTokenizer, chain: Chain, longest: int) -> str:
    """The text that a chain chooses behind the prompt, up to the end of generation."""
    llm.reset()
    llm.eval(llm.tokenize(PROMPT.encode()))
    chain.place(())
    ids: list[int] = []
    while len(ids) <= longest:
        token = chain.sample(llm)
        if tokenizer.is_eog(token):
            break
        ids.append(token)
        llm.eval([token])
    return tokenizer.detokenize(ids).decode()


def begins_a_choice(tokenizer: LlamaTokenizer, ids: Sequence[int]) -> bool:
    """Whether the text so far begins a choice or, with an end token behind it, is one.

    A grammar spells choices with any tokens, so that its picks cannot be compared by id.
    """
    text = tokenizer.detokenize(ids).decode()
    return text in CHOICES if tokenizer.is_eog(ids[-1]) else any(choice.startswith(text) for choice in CHOICES)


def logits_row(llm: Any) -> npt.NDArray[np.float32]:
    """[V] float32, a copy of the row that is sampled from."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()


@cache
def _table_of_nothing() -> tuple[Any, Any]:
    """A ``llama_sampler_i`` whose apply selects the first slot, and its code; cached, for samplers point at both."""

    def select_first(_sampler: int, array: int) -> None:
        view_int64(array, 4)[2] = 0

    table = llama_cpp.llama_sampler_i()
    compiled = numba.cfunc("void(int64, int64)")(select_first)
    table.apply = llama_cpp.llama_sampler_i_apply(compiled.address)
    return table, compiled


def make_chains(vocab: Any, trie: TokenTrie) -> dict[str, Chain]:
    """The contenders, by what is in the chain."""
    leaves = [{"name": name, "tokens": list(path)} for name, path in trie.leaves()]
    payload = json.dumps({"modelId": "benchmark", "descriptors": [{"path": "action", "leaves": leaves}]})
    grammar = "root ::= " + " | ".join(json.dumps(choice) for choice in CHOICES)
    greedy = llama_cpp.llama_sampler_init_greedy
    nothing = llama_cpp.llama_sampler_init(ctypes.pointer(_table_of_nothing()[0]), None)
    new_trie = partial(llama_sampler_init_token_trie, vocab, payload, 0, strict=True)
    return {
        "greedy": Chain(greedy()),
        "nothing": Chain(nothing),
        "trie, greedy": Chain(new_trie(), greedy()),
        'trie on_end="mass", greedy': Chain(new_trie(on_end="mass"), greedy()),
        'trie on_invalid="mask", greedy': Chain(new_trie(on_invalid="mask"), greedy()),
        "grammar, greedy": Chain(llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root"), greedy()),
    }


def check_picks(
    llm: Any, tokenizer: LlamaTokenizer, trie: TokenTrie, chains: dict[str, Chain], prefixes: Iterable[Ids]
) -> None:
    """At every node: the tries' picks are NumPy's, greedy's is the argmax, the grammar's begins a choice."""
    row = logits_row(llm)
    for prefix in prefixes:
        node = trie.root
        for token in prefix:
            node = trie.step(node, token)
        ref = numpy_pick(trie.children(node), row)
        for name, chain in chains.items():
            chain.place(prefix)
            picked = chain.sample(llm)
            if name == "greedy":
                good = picked == int(np.argmax(row))
            elif name == "nothing":
                good = picked == 0
            elif name.startswith("grammar") or ("mass" in name and trie.is_terminal(node)):
                good = begins_a_choice(tokenizer, [*prefix, picked])
            else:
                good = picked == ref
            if not good:
                raise AssertionError(f"chain({name}) picked {picked} behind {prefix}, NumPy {ref}")


def time_in_turns(
    llm: Any, chains: dict[str, Chain], prefixes: Iterable[Ids], *, behind_decode: bool = False
) -> dict[str, list[float]]:
    """Microseconds of each step.

    The chains take turns, so that a slow moment of the machine meets all, and each turn begins with another one, so
    that each runs behind each.
    """
    spent: dict[str, list[float]] = {name: [] for name in chains}
    names = list(chains)
    for prefix in prefixes:
        names.append(names.pop(0))
        for name in names:
            chain = chains[name]
            chain.place(prefix)
            if behind_decode:
                llm.reset()
                llm.eval(llm.tokenize(PROMPT.encode()))
            spent[name].append(time_once(partial(chain.sample, llm)))
    return spent


def compare(where: str, spent: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """One row a chain: its median, and the median's ratio to greedy's, to the floor's and under the grammar's."""
    medians = {name: float(np.median(times)) for name, times in spent.items()}
    for name, median in medians.items():
        row = {
            "what": f"step of chain({name}), {where}",
            "median_us": median,
            "p99_us": float(np.percentile(spent[name], 99)),
            "ratio_to_greedy": median / medians["greedy"],
            "over_nothing_us": median - medians["nothing"],
        }
        if "grammar, greedy" in medians:
            row["grammar_over_this"] = medians["grammar, greedy"] / median
        yield row


def measure_contenders(llm: Any, n_steps: int) -> Iterator[dict[str, Any]]:
    """Medians of the same steps inside 30 choices, through each chain."""
    tokenizer = LlamaTokenizer(llm)
    paths = [tuple(tokenizer.tokenize(choice.encode())) for choice in CHOICES]
    trie = TokenTrie.from_sequences(zip(CHOICES, paths, strict=True))
    chains = make_chains(llama_cpp.llama_model_get_vocab(llm.model), trie)
    for name, chain in chains.items():
        # The others never end a choice by themselves, or are free of choices altogether.
        if "mass" in name or name.startswith("grammar"):
            chosen = generate(llm, tokenizer, chain, longest=100)
            if chosen not in CHOICES:
                raise AssertionError(f"chain({name}) chose {chosen!r}")
    llm.reset()
    llm.eval(llm.tokenize(PROMPT.encode()))
    inner = sorted({path[:depth] for path in paths for depth in range(1, len(path))})
    check_picks(llm, tokenizer, trie, chains, [(), *inner])
    # The root as often as all other nodes that go on.
    rng = np.random.default_rng(0)
    prefixes = [inner[rng.integers(len(inner))] if step % 2 else () for step in range(n_steps)]
    quick = [name for name in chains if name != "grammar, greedy" and "mask" not in name]
    slow = [name for name in chains if name not in quick]
    spent = {name: time_in_turns(llm, {name: chains[name]}, prefixes)[name] for name in slow}
    spent |= time_in_turns(llm, {name: chains[name] for name in quick}, prefixes)
    yield from compare(f"V {llm.n_vocab():,}, {len(CHOICES)} choices", spent)
    behind = time_in_turns(llm, {name: chains[name] for name in quick}, prefixes, behind_decode=True)
    yield from compare("the same right behind a decode", behind)
    for chain in chains.values():
        chain.free()


class Candidates:
    """A candidate array as ``llama_sampler_sample`` makes it, over memory of our own."""

    def __init__(self, row: npt.NDArray[np.float32]) -> None:
        record = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._fresh = np.zeros(len(row), record)
        self._fresh["id"] = np.arange(len(row))
        self._fresh["logit"] = row
        self._memory = self._fresh.copy()
        data = self._memory.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        self.array = llama_cpp.llama_token_data_array(data, len(row), -1, False)

    def refill(self) -> None:
        """All V candidates in the order of their ids."""
        self._memory[:] = self._fresh
        self.array.size, self.array.selected, self.array.sorted = len(self._fresh), -1, False

    def picked(self) -> int:
        """The only token that is left."""
        if self.array.size != 1:
            raise AssertionError(f"{self.array.size} candidates are left")
        return int(self.array.data[0].id)


def measure_sizes(llm: Any, n_steps: int) -> Iterator[dict[str, Any]]:
    """The callback alone and a step of its chain, at random inner nodes of a small and of a large trie."""
    row = logits_row(llm)
    if len(row) != V:
        raise SystemExit(f"the tries of this part need a vocabulary of {V:,}, this model has {len(row):,}")
    rng = np.random.default_rng(1)
    candidates = Candidates(row)
    sizes: dict[int, dict[str, list[float]]] = {}
    chains = {}
    walks: dict[int, list[tuple[Ids, int]]] = {}
    n_children: dict[int, int] = {}
    for n_leaves in (4, 1_000_000):
        trie = make_trie(n_leaves)
        sampler, _ = new_sampler(TrieCursor(trie, on_end="release"), keeps_options=False)
        chains[n_leaves] = (sampler, Chain(sampler, llama_cpp.llama_sampler_init_greedy()))
        sizes[n_leaves] = {"apply": [], "chain": []}
        inner = np.flatnonzero((np.diff(trie.first_child) > 0) & (trie.leaf < 0))
        # The root as often as all others: it has the most children.
        nodes = [int(rng.choice(inner)) if step % 2 else trie.root for step in range(n_steps)]
        walks[n_leaves] = [(trie.path_tokens(node), numpy_pick(trie.children(node), row)) for node in nodes]
        n_children[n_leaves] = max(len(trie.children(node)) for node in nodes)
    for step in range(n_steps):
        for n_leaves, (sampler, chain) in chains.items():
            prefix, ref = walks[n_leaves][step]
            chain.place(prefix)
            candidates.refill()
            apply = partial(llama_cpp.llama_sampler_apply, sampler, ctypes.byref(candidates.array))
            sizes[n_leaves]["apply"].append(time_once(apply))
            if candidates.picked() != ref:
                raise AssertionError(f"the callback left {candidates.picked()}, NumPy picks {ref}")
            sizes[n_leaves]["chain"].append(time_once(partial(chain.sample, llm)))
    small = {what: np.median(times) for what, times in sizes[4].items()}
    for n_leaves, timed in sizes.items():
        for what, times in timed.items():
            yield {
                "what": f"{'callback' if what == 'apply' else 'step of chain(trie, greedy)'}, {n_leaves:,} leaves",
                "max_children": n_children[n_leaves],
                "median_us": float(np.median(times)),
                "p99_us": float(np.percentile(times, 99)),
                "ratio_to_4_leaves": float(np.median(times) / small[what]),
            }
    for _, chain in chains.values():
        chain.free()


def main() -> None:
    """Measure, print a line each, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file; the targets are for Gemma 3, V = 262144")
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each contender (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    llm = llama_cpp.Llama(str(options.model), n_ctx=512, verbose=False)
    rows = [*measure_contenders(llm, options.steps), *measure_sizes(llm, options.steps)]
    llm.close()
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
