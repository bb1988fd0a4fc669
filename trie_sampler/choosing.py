"""``choose``: the front door; a module of its name would hide the function in the package."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from llama_cpp import Llama

from trie_sampler.choice import Choice
from trie_sampler.cursor import TrieCursor
from trie_sampler.errors import EngineError
from trie_sampler.llama.processor import TrieLogitsProcessor
from trie_sampler.llama.vocab import Prompt, prompt_tokens, require_engine
from trie_sampler.tokens import ChoicesLike
from trie_sampler.trie import TokenTrie

_METHODS = {"greedy": "greedy", "sample": "sampled"}


def choose(
    llm: Llama,
    prompt: Prompt,
    choices: ChoicesLike | TokenTrie,
    *,
    method: str = "greedy",
    **settings: Any,
) -> Choice:
    """Let a model answer a prompt with exactly one of the choices.

    Args:
        llm: a loaded ``Llama``; its context is used as ``create_completion`` uses it, and a prompt
            that begins as the one before is not evaluated again.
        prompt: text, token ids, or chat messages.
        choices: list of strings, dict name -> text, ``Enum`` class, ``Literal`` or ``TokenTrie``.
        method: ``"greedy"`` takes the likeliest token at each step; ``"sample"`` draws.
        settings: those of ``TrieLogitsProcessor.from_choices``, ``mode`` apart; ``valid_mass=True``
            tells how much of the model's own next token went to the choices at all.

    Returns:
        The choice, always complete. ``stats`` also has ``prompt_tokens``, ``forward_passes`` (decodes
        after the prompt) and ``seconds``.

    Raises:
        EmptyTrieError: no choices.
        EngineError: prompt and the longest choice do not fit the context; nothing was evaluated.
        TrieSamplerError: an empty prompt on a model without BOS, a ``vocab_only`` model, or, under
            ``on_fault="raise"``, logits that say nothing.
        TypeError, ValueError: arguments of another kind; unknown settings.

    Cost: the prompt, and one decode for each token of the choice but the last; where the choice
    begins another one more, to see whether it ends.

    Example:
        >>> choose(llm, "Is fire hot? Answer:", ["yes", "no"]).name            # doctest: +SKIP
        'yes'
    """
    start = time.perf_counter()
    if method not in _METHODS:
        raise ValueError(f"method must be one of {list(_METHODS)}, got {method!r}")
    if "mode" in settings:
        raise TypeError("choose() got an unexpected keyword argument 'mode'; it is method= here")
    require_engine(llm)
    constraint = TrieLogitsProcessor.from_choices(llm, choices, mode=_METHODS[method], **settings)
    tokens = prompt_tokens(llm, prompt)
    needed = len(tokens) + constraint.bind(tokens).depth
    # llama.cpp rounds the context up; the host's own buffer has what was asked for.
    room = min(llm.n_ctx(), len(llm.input_ids))
    if needed > room:
        raise EngineError(
            f"{len(tokens)} tokens of prompt and up to {needed - len(tokens)} of a choice do not fit "
            f"the context of {room}; load the model with n_ctx={needed} or more"
        )
    n_picks = 0
    host = llm.generate(tokens, temp=0.0, logits_processor=constraint)
    try:
        for _ in host:
            n_picks += 1
            if constraint.is_over:
                break
    finally:
        host.close()
        constraint.release_host()
    choice = constraint.result
    door = {
        "prompt_tokens": len(tokens),
        "forward_passes": n_picks - 1,
        "seconds": time.perf_counter() - start,
    }
    return replace(choice, stats={**choice.stats, **door})


def warm_up() -> None:
    """Compile or load every kernel now, so that the first real call does not wait for it.

    Cost: about 0.4 s from the disk cache, several seconds where the cache is empty.
    """
    trie = TokenTrie.from_sequences([("A", [1]), ("B", [1, 2]), ("C", [3])])
    cursor = TrieCursor(trie, eog_ids=[0])
    records = np.zeros((4, 3), np.float32)
    for row in (np.zeros(4, np.float32), records[:, 1]):
        for samples in (False, True):
            cursor.reset()
            cursor.pick(row)
            cursor.sample(row)
            cursor.valid_mass(row)
            cursor.forced_run()
            cursor.mask(row)
            cursor.constrain(row, samples=samples)
            cursor.accept(1)
