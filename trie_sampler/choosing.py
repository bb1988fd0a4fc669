"""``choose``: the front door; a module of its name would hide the function in the package."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llama_cpp import Llama

from trie_sampler.choice import Choice
from trie_sampler.choices import Choices, ChoicesLike, Spelling
from trie_sampler.cursor import TrieCursor
from trie_sampler.errors import EngineError
from trie_sampler.llama.processor import TrieLogitsProcessor
from trie_sampler.llama.vocab import Prompt, as_tokenizer, prompt_tokens, require_engine
from trie_sampler.tokens import Tokenizer, edge_of, find_merges
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
    tokens = constraint.prepare(prompt)
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


@dataclass(frozen=True)
class PromptCheck:
    """What ``check_prompt`` found; as text a sentence for people.

    Attributes:
        tail: the end of the prompt's text, as far as it was looked at.
        merged: names of the choices whose tokens would have merged with the prompt's last.
        healed: the end of the prompt that ``heal=True`` writes again together with the choice.
        n_healed: how many tokens that is.
        can_heal: whether ``heal=True`` can.
    """

    tail: str
    merged: tuple[str, ...]
    healed: str
    n_healed: int
    can_heal: bool

    @property
    def is_clean(self) -> bool:
        """Nothing merges, so the choices' tokens are what the model was trained on."""
        return not self.merged and self.can_heal

    def __str__(self) -> str:
        """What to do about it."""
        end = f"the prompt ends in {self.tail[-20:]!r}"
        if self.is_clean:
            return f"{end}: no choice merges with it"
        if not self.merged:
            return f"{end}, in tokens that its text alone would not give: no choice can be tokenized behind it"
        names = ", ".join(map(repr, self.merged[:3])) + (", ..." if len(self.merged) > 3 else "")  # noqa: PLR2004
        advice = f"heal=True takes {self.healed!r} back" if self.can_heal else "end the prompt elsewhere"
        return f"{end}, whose last tokens merge with {len(self.merged)} choices ({names}): {advice}"


def check_prompt(llm: Llama | Tokenizer, prompt: Prompt, choices: ChoicesLike, **spelling: Any) -> PromptCheck:
    """Whether a prompt ends where the vocabulary would cut before each choice.

    A trailing space before a word, ``http:`` before ``//``, half a word: the vocabulary would have written
    prompt and choice with a token over both, so what the model sees is no text it was trained on.

    Args:
        llm: a model, ``vocab_only`` is enough; or any ``Tokenizer``.
        prompt: text, token ids or chat messages.
        choices: list of strings, dict name -> text, ``Enum`` class or ``Literal``.
        spelling: ``lead``, ``json_value``, ``case_fold`` of ``TokenTrie.from_choices``; with
            ``lead="auto"`` a choice is named where either of its spellings merges.

    Returns:
        ``PromptCheck``. Nothing is changed, nothing warned about.

    Example:
        >>> print(check_prompt(llm, "Who? ", ["Alice", "Bob"]))              # doctest: +SKIP
        the prompt ends in 'Who? ', whose last tokens merge with 2 choices ('Alice', 'Bob'): heal=True takes ' ' back
    """
    wanted = Spelling.take_from(spelling)
    if spelling:
        raise TypeError(f"check_prompt() got an unexpected keyword argument {next(iter(spelling))!r}")
    tokenizer = as_tokenizer(llm)
    edge = edge_of(tokenizer, prompt_tokens(llm, prompt))
    merges = find_merges(tokenizer, Choices.of(choices), edge, wanted)
    healed = tokenizer.detokenize(edge.tokens[len(edge.tokens) - merges.n_healed :])
    return PromptCheck(
        tail=edge.text.decode("utf-8", "replace"),
        merged=merges.names,
        healed=healed.decode("utf-8", "replace"),
        n_healed=merges.n_healed,
        can_heal=merges.can_heal,
    )


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
