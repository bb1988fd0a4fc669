"""A whole ``choose`` against what it has to cost at least, guidance's ``select`` and llama.cpp's grammar.

    python -m benchmarks.choosing [--model SmolLM2] [--model Gemma] [--requests 20] [--json]

One of thirty actions for each of twenty requests, with the prompt's head (the list of actions) in the cache, as a
router has it. All contenders take each request in turn, each on a ``Llama`` of its own:

* prefill: the rest of the prompt, evaluated, and nothing else;
* decode: one more token; batch: as many tokens as ``choose`` decoded for its next decision, a forced run among them;
* ``choose``, whole call, against two bounds: prefill + 1 ms + 1.15 x its decodes as single tokens, or as those batches;
* guidance's ``select``, Outlines' choice and lm-format-enforcer's processor, whole calls, where they are installed;
* ``create_completion(grammar=...)``, whole call, and its time after the prefill against ours.

Medians over the requests, of ratios too. Answers are checked to be actions.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList

from benchmarks.lead import FINDERS, load_test_module, some_requests
from benchmarks.machine import report
from trie_sampler import choose, warm_up
from trie_sampler.llama.decoder import Decoder

N_CTX = 1024


def load(path: str, threads: int) -> Llama:
    """A model on so many threads."""
    return Llama(path, n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(milliseconds, what the call gave)."""
    start = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - start), result


def guidance_select(path: str, threads: int, actions: Sequence[str]) -> Callable[[str], str] | None:
    """Answer by guidance's ``select``; None where it is not installed."""
    try:
        from guidance import models, select
    except ImportError:
        return None
    base = models.LlamaCpp(
        path, echo=False, enable_monitoring=False, n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads
    )
    return lambda prompt: str((base + prompt + " " + select(list(actions), name="action"))["action"])


def outlines_choice(path: str, threads: int, actions: Sequence[str]) -> Callable[[str], str] | None:
    """Answer by Outlines' choice on llama.cpp; None where it is not installed."""
    try:
        import outlines
    except ImportError:
        return None
    generator = outlines.Generator(outlines.from_llamacpp(load(path, threads)), Literal[tuple(actions)])
    return lambda prompt: str(generator(prompt + " ", max_tokens=32, temperature=0.0))


def enforcer_choice(path: str, threads: int, actions: Sequence[str]) -> Callable[[str], str] | None:
    """Answer by lm-format-enforcer's processor for llama.cpp; None where it is not installed."""
    try:
        from lmformatenforcer import RegexParser
        from lmformatenforcer.integrations import llamacpp
    except ImportError:
        return None
    llm = load(path, threads)
    data = llamacpp.build_token_enforcer_tokenizer_data(llm)
    pattern = " (" + "|".join(actions) + ")"

    def answer(prompt: str) -> str:
        processor = llamacpp.build_llamacpp_logits_processor(data, RegexParser(pattern))
        done = llm.create_completion(
            prompt, logits_processor=LogitsProcessorList([processor]), temperature=0.0, max_tokens=32
        )
        return str(done["choices"][0]["text"]).strip()

    return answer


PEERS = {"guidance_select": guidance_select, "outlines_choice": outlines_choice, "format_enforcer": enforcer_choice}


def measure(name: str, path: str, threads: int, actions: Sequence[str], requests: Sequence[str]) -> dict[str, Any]:
    """One row."""
    head = f"Pick the one action that fits the request.\nActions: {', '.join(actions)}\n"
    prompts = [f"{head}Request: {request}\nAction:" for request in requests]
    ours, bare, host = load(path, threads), load(path, threads), load(path, threads)
    quoted = " | ".join(f'" {action}"' for action in actions)
    grammar = LlamaGrammar.from_string(f"root ::= {quoted}", verbose=False)
    peers = {peer: made for peer, make in PEERS.items() if (made := make(path, threads, actions)) is not None}
    decoder = Decoder(bare)
    bare_ids = [bare.tokenize(prompt.encode(), special=True) for prompt in prompts]
    times: dict[str, list[float]] = {}
    passes: list[int] = []
    sizes: list[int] = []
    evaluate = ours.eval

    def counted(tokens: Sequence[int]) -> None:
        sizes.append(len(tokens))
        evaluate(tokens)

    vars(ours)["eval"] = counted

    def keep(what: str, milliseconds: float) -> None:
        times.setdefault(what, []).append(milliseconds)

    for turn, (prompt, ids) in enumerate(zip([prompts[-1], *prompts], [bare_ids[-1], *bare_ids], strict=True)):
        decoder.replace(ids)
        prefill = timed(decoder.row)[0]
        decoder.push([ids[-1]])
        decode = timed(decoder.row)[0]
        sizes.clear()
        whole, choice = timed(lambda prompt=prompt: choose(ours, prompt, actions))
        by_grammar, answer = timed(
            lambda prompt=prompt: host.create_completion(prompt, grammar=grammar, temperature=0.0, max_tokens=32)
        )
        selected = {peer: timed(lambda prompt=prompt, ask=ask: ask(prompt)) for peer, ask in peers.items()}
        answers = [choice.name, answer["choices"][0]["text"].strip(), *(said for _, said in selected.values())]
        if not set(answers) <= set(actions):
            raise AssertionError(f"not all of these are actions: {answers}")
        if turn == 0:
            continue  # the head is in the cache from here on
        passes.append(choice.stats["forward_passes"])
        batches = 0.0
        for size in sizes[1:]:
            decoder.push(ids[:size])
            batches += timed(decoder.row)[0]
        keep("prefill_ms", prefill)
        keep("decode_ms", decode)
        keep("choose_ms", whole)
        keep("choose_to_bound", whole / (prefill + choice.stats["forward_passes"] * decode * 1.15 + 1.0))
        keep("choose_to_bound_of_batches", whole / (prefill + batches * 1.15 + 1.0))
        keep("after_prefill_to_grammar", (whole - prefill) / (by_grammar - prefill))
        keep("grammar_ms", by_grammar)
        keep("after_prefill_ms", whole - prefill)
        keep("grammar_after_prefill_ms", by_grammar - prefill)
        for peer, (milliseconds, _) in selected.items():
            keep(f"{peer}_ms", milliseconds)
            keep(f"choose_to_{peer}", whole / milliseconds)
    row: dict[str, Any] = {"what": name} | {what: statistics.median(values) for what, values in times.items()}
    row["forward_passes"] = statistics.fmean(passes)
    for llm in (ours, bare, host):
        llm.close()
    return row


def main() -> None:
    """Measure; print a line a model, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=FINDERS, help="may be repeated (default: each)")
    parser.add_argument("--requests", type=int, default=20, help="of 600, spread evenly (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    data, models = load_test_module("actions"), load_test_module("models")
    requests = [request for request, _ in some_requests(data.REQUESTS, max(options.requests, 1))]
    warm_up()
    rows = [
        measure(name, str(getattr(models, FINDERS[name])()), options.threads, data.ACTIONS, requests)
        for name in options.model or FINDERS
    ]
    with contextlib.suppress(BrokenPipeError):
        report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
