"""The reference's end-to-end benchmark: a grammar against the trie, token by token, on the same prompts.

    python -m benchmarks.end_to_end --mode strict-guided --model M.gguf --prompt P.txt --token-tree-descriptor D.json
    python -m benchmarks.end_to_end --mode strict-trie-ffi --model M.gguf --prompt P.txt --token-tree-descriptor D.json
        [--tokenization every] [--baseline GRAMMAR_RUN.json] [--grammar G.gbnf] [--output O.json]

* ``strict-guided`` decodes token by token under llama.cpp's grammar of the descriptor's names (or ``--grammar``).
* ``strict-trie-ffi`` decodes in a ``StreamSession`` under the trie, and runs the grammar itself, prompt by prompt in
  turn; or it takes the grammar's run from ``--baseline`` and refuses one of another model, prompts or choices.

A prompt file holds one prompt, or several with a line ``---`` between them; the line end at the end of a prompt is not
part of it. ``benchmarks/prompts`` and ``benchmarks/descriptors`` have some: their token ids are SmolLM2's, and any
other model needs ``--tokenization canonical`` or ``every``, which spell the names anew. Under ``every`` the valid sets
are the grammar's.

Output, one JSON object (times exclude the prompt's evaluation):

==============================  ================================================================================
mode, model                     as called; the file's name
skip_ratio_mean, _std           over all steps inside the trie: share of the vocabulary that it ruled out
tokens_per_second               tokens of the answers by the time after the prompts
tokens_per_second_vs_grammar    that, by the grammar's
token_accuracy                  share of tokens that are the grammar's, place by place, of the longer answer
forward_passes_saved, _total    passes not made, and those of a token-by-token run of the same tokens
forward_pass_delta_vs_grammar   passes made, minus the grammar's
ms_per_token, _unconstrained    of the mode; of plain greedy decoding
token_accuracy_canonical        the same with ``tokenization="canonical"``
valid_set_equal_steps, _steps   steps at which the trie's next tokens were the grammar's, control tokens apart; of how
                                many that were looked at, outside the timed part
tokenization, skip              as called
n_prompts, n_tokens             counts
differences                     where tokens differ: the prompt, the place, and the logit that was given away
answers                         by prompt: SHA-256 of it, token ids, seconds
choices_sha256, stamp           of names and grammar; what was measured on
==============================  ================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama

from benchmarks.lead import load_test_module
from benchmarks.machine import describe
from trie_sampler import StreamSession, TokenTreePayload, TrieCursor, TrieSamplerError, model_id, warm_up
from trie_sampler.binding import Binding
from trie_sampler.choices import Spelling
from trie_sampler.gbnf import quote
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens

MODES = ("strict-guided", "strict-trie-ffi")
SEPARATOR = "\n---\n"
_LONGEST_ANSWER = 64


class BenchmarkError(Exception):
    """What was given cannot be compared; the message says why."""


@dataclass
class Answer:
    """One prompt's answer: tokens without the end token, passes and seconds after the prompt."""

    tokens: list[int]
    n_passes: int
    seconds: float
    usage: Any = None


@dataclass
class Run:
    """Answers of one way to decode, by prompt."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def seconds(self) -> float:
        """Time after all prompts."""
        return sum(answer.seconds for answer in self.answers)

    @property
    def n_passes(self) -> int:
        """Forward passes after all prompts."""
        return sum(answer.n_passes for answer in self.answers)


def read_prompts(files: Sequence[Path]) -> list[str]:
    """The prompts of files, in order."""
    texts = [text for file in files for text in file.read_text(encoding="utf-8").split(SEPARATOR)]
    return [text.removesuffix("\n") for text in texts]


def grammar_of(names: Sequence[str]) -> str:
    """GBNF of the names, with or without a space before them, as ``lead="auto"`` spells them."""
    return 'root ::= " "? (' + " | ".join(map(quote, names)) + ")"


@contextlib.contextmanager
def _chain(llm: Llama, grammar: str | None) -> Iterator[Any]:
    """A sampler chain: a grammar, if any, and the greedy selector."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    try:
        if grammar is not None:
            vocab = llama_cpp.llama_model_get_vocab(llm.model)
            sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
            if not sampler:
                raise BenchmarkError("llama.cpp refuses the grammar")
            llama_cpp.llama_sampler_chain_add(chain, sampler)
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        yield chain
    finally:
        llama_cpp.llama_sampler_free(chain)


def decode_by_chain(llm: Llama, prompt: Sequence[int], grammar: str | None, n_tokens: int | None = None) -> Answer:
    """Token by token, one decode each; until an end token, or so many tokens whatever they are."""
    ends = set(as_tokenizer(llm).eog_ids)
    llm.reset()
    llm.eval(prompt)
    tokens: list[int] = []
    n_passes = 0
    with _chain(llm, grammar) as chain:
        start = time.perf_counter()
        while True:
            token = int(llama_cpp.llama_sampler_sample(chain, llm.ctx, -1))
            if n_tokens is None and token in ends:
                break
            tokens.append(token)
            if len(tokens) == (n_tokens or _LONGEST_ANSWER):
                break
            llm.eval([token])
            n_passes += 1
        seconds = time.perf_counter() - start
    return Answer(tokens, n_passes, seconds)


def decode_by_trie(
    llm: Llama, prompt: Sequence[int], source: Any, spelling: dict[str, Any], skip: str = "exact"
) -> Answer:
    """In a session, under the trie; stops are weighed as the grammar weighs them."""
    # The same batch as the grammar evaluates: others move the logits of quantized models a little.
    llm.reset()
    with StreamSession.open(llm) as session:
        session.prefill(list(prompt))
        session.set_token_trie(source, on_end="eog", **spelling)
        done = session.generate(skip=skip)
    usage = done.usage
    return Answer(list(done.tokens), usage.forward_passes_total - usage.forward_passes_saved, usage.seconds, usage)


def accuracy(comp: Run, ref: Run) -> float:
    """Share of equal tokens, place by place, of the longer answers."""
    pairs = list(zip(comp.answers, ref.answers, strict=True))
    n_equal = sum(a == b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=False))
    return n_equal / max(1, sum(max(len(one.tokens), len(other.tokens)) for one, other in pairs))


def find_differences(llm: Llama, prompts: Sequence[Sequence[int]], comp: Run, ref: Run) -> list[dict[str, Any]]:
    """First token of each answer that is another one, and the difference of the two logits, token by token."""
    found = []
    for number, (prompt, one, other) in enumerate(zip(prompts, comp.answers, ref.answers, strict=True)):
        n_same = next(
            (i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b),
            min(len(one.tokens), len(other.tokens)),
        )
        if n_same < max(len(one.tokens), len(other.tokens)):
            llm.reset()
            llm.eval([*prompt, *other.tokens[:n_same]])
            row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),))
            both = [answer.tokens[n_same] for answer in (one, other) if n_same < len(answer.tokens)]
            margin = abs(float(row[both[0]] - row[both[-1]])) if len(both) == 2 else None
            found.append({"prompt": number, "place": n_same, "margin": margin})
    return found


def compare_valid_sets(
    llm: Llama, prompts: Sequence[Sequence[int]], ref: Run, binding: Binding, grammar: str, n_steps: int
) -> tuple[int, int]:
    """(steps with equal sets, steps looked at) along the grammar's answers."""
    tests = load_test_module("grammar")
    tokenizer = as_tokenizer(llm)
    n_equal = n_seen = 0
    for prompt, answer in zip(prompts, ref.answers, strict=True):
        cursor = TrieCursor(binding.trie_behind(prompt), on_end="eog", eog_ids=tokenizer.eog_ids)
        with contextlib.closing(tests.GrammarSampler(llm, grammar)) as sampler:
            for token in answer.tokens:
                if n_seen == n_steps:
                    return n_equal, n_seen
                left = [t for t in sampler.valid_ids().tolist() if tokenizer.is_eog(t) or not tokenizer.is_control(t)]
                n_seen += 1
                n_equal += left == sorted(cursor.allowed().tolist())
                if token not in cursor.allowed():
                    break
                cursor.accept(token)
                sampler.accept(token)
    return n_equal, n_seen


def skip_ratio(answers: Sequence[Answer]) -> tuple[float, float]:
    """Mean and standard deviation over the steps of all answers."""
    # A step for each token, and one where the end of a leaf was weighed.
    counts = np.array([answer.usage.forward_passes_total + 1 for answer in answers])
    means = np.array([answer.usage.skip_ratio_mean for answer in answers])
    squares = np.array([answer.usage.skip_ratio_std for answer in answers]) ** 2 + means**2
    mean = float(np.average(means, weights=counts))
    return mean, math.sqrt(max(0.0, float(np.average(squares, weights=counts)) - mean**2))


def digest(*parts: str) -> str:
    """SHA-256 of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_baseline(file: Path, wanted: dict[str, str], prompts: Sequence[str]) -> Run:
    """The grammar's run, if it was of the same model, choices and prompts."""
    kept = json.loads(file.read_text())
    if kept.get("mode") != MODES[0]:
        raise BenchmarkError(f"{file} is no output of --mode {MODES[0]}")
    for what, value in wanted.items():
        if kept[what] != value:
            raise BenchmarkError(f"{file} is of another {what}: {kept[what]}, not {value}")
    if [answer["prompt_sha256"] for answer in kept["answers"]] != [digest(prompt) for prompt in prompts]:
        raise BenchmarkError(f"{file} is of other prompts")
    return Run([Answer(answer["tokens"], answer["passes"], answer["seconds"]) for answer in kept["answers"]])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the mode; the output's keys."""
    texts = read_prompts(options.prompt)
    descriptor = options.token_tree_descriptor.read_text()
    names = list(
        dict.fromkeys(leaf.name for d in TokenTreePayload.from_json(descriptor).descriptors for leaf in d.leaves)
    )
    grammar = options.grammar.read_text() if options.grammar else grammar_of(names)
    spelling = {} if options.tokenization == "payload" else {"tokenization": options.tokenization}
    source = descriptor if options.tokenization == "payload" else names
    llm = Llama(str(options.model), n_ctx=options.n_ctx, n_threads=options.threads, verbose=False)
    prompts = [prompt_tokens(llm, text) for text in texts]
    same = {"model": options.model.name, "model_id": model_id(llm), "choices_sha256": digest(grammar, *names)}
    is_guided = options.mode == MODES[0]
    grammars, plain, tries, canonical = Run(), Run(), Run(), Run()
    if options.baseline and not is_guided:
        grammars = read_baseline(options.baseline, same, texts)
    warm_up()
    decode_by_chain(llm, prompts[0], grammar)
    if not is_guided:
        decode_by_trie(llm, prompts[0], source, spelling, options.skip)
    for number, prompt in enumerate(prompts):
        if not options.baseline or is_guided:
            grammars.answers.append(decode_by_chain(llm, prompt, grammar))
        if not is_guided:
            tries.answers.append(decode_by_trie(llm, prompt, source, spelling, options.skip))
            canonical.answers.append(decode_by_trie(llm, prompt, names, {"tokenization": "canonical"}))
        plain.answers.append(decode_by_chain(llm, prompt, None, max(1, len(grammars.answers[number].tokens))))
    run = grammars if is_guided else tries
    speed = run.n_tokens / run.seconds
    mean, std, n_saved, n_total, n_equal, n_seen = None, None, 0, run.n_passes, None, 0
    if not is_guided:
        mean, std = skip_ratio(tries.answers)
        n_total = sum(answer.usage.forward_passes_total for answer in tries.answers)
        n_saved = sum(answer.usage.forward_passes_saved for answer in tries.answers)
        payload_or_names = TokenTreePayload.from_json(descriptor) if options.tokenization == "payload" else names
        binding = Binding.of(as_tokenizer(llm), payload_or_names, spelling=Spelling(**spelling), is_quiet=True)
        n_equal, n_seen = compare_valid_sets(llm, prompts, grammars, binding, grammar, options.checked_steps)
    output = {
        "mode": options.mode,
        "model": options.model.name,
        "skip_ratio_mean": mean,
        "skip_ratio_std": std,
        "tokens_per_second": speed,
        "tokens_per_second_vs_grammar": speed * grammars.seconds / grammars.n_tokens,
        "token_accuracy": accuracy(run, grammars),
        "forward_passes_saved": n_saved,
        "forward_passes_total": n_total,
        "forward_pass_delta_vs_grammar": run.n_passes - grammars.n_passes,
        "ms_per_token": 1000 / speed,
        "ms_per_token_unconstrained": 1000 * plain.seconds / plain.n_tokens,
        "token_accuracy_canonical": None if is_guided else accuracy(canonical, grammars),
        "valid_set_equal_steps": n_equal,
        "valid_set_steps": n_seen,
        "differences": [] if is_guided else find_differences(llm, prompts, tries, grammars),
        "tokenization": None if is_guided else options.tokenization,
        "skip": None if is_guided else options.skip,
        "n_prompts": len(prompts),
        "n_tokens": run.n_tokens,
        "answers": [
            {
                "prompt_sha256": digest(text),
                "text": llm.detokenize(answer.tokens).decode("utf-8", "replace"),
                "tokens": answer.tokens,
                "passes": answer.n_passes,
                "seconds": answer.seconds,
            }
            for text, answer in zip(texts, run.answers, strict=True)
        ],
        **same,
        "stamp": describe(),
    }
    llm.close()
    return output


def main(argv: list[str] | None = None) -> int:
    """Measure, and write the output; 2 where the input cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("--prompt", required=True, type=Path, action="append", metavar="FILE", help="may be repeated")
    parser.add_argument("--token-tree-descriptor", required=True, type=Path, metavar="FILE", help="a payload's JSON")
    parser.add_argument("--grammar", type=Path, metavar="FILE", help="GBNF in place of the names'")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help=f"output of --mode {MODES[0]}")
    parser.add_argument(
        "--tokenization",
        choices=("payload", "canonical", "every"),
        default="payload",
        help="the payload's ids, or its names spelled anew (default: payload)",
    )
    parser.add_argument(
        "--skip",
        choices=("exact", "canonical"),
        default="exact",
        help="what is not decoded: tokens without an alternative, or all of a choice that is the only one left",
    )
    parser.add_argument("--checked-steps", type=int, default=50, metavar="N", help="valid sets compared (default: 50)")
    parser.add_argument("--n-ctx", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: stdout")
    options = parser.parse_args(argv)
    try:
        text = json.dumps(measure(options), indent=2, ensure_ascii=False)
    except (BenchmarkError, TrieSamplerError, OSError) as error:
        print(f"end_to_end: {error}", file=sys.stderr)
        return 2
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
