"""``choose``: the front door; a module of its name would hide the function in the package."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llama_cpp import Llama

from trie_sampler.binding import Binding
from trie_sampler.choice import Choice
from trie_sampler.choices import Choices, ChoicesLike, take_spelling
from trie_sampler.cursor import Sampling, Step, TrieCursor, check_choice
from trie_sampler.errors import TrieSamplerError, UnknownPathError
from trie_sampler.llama.decoder import Decoder, alone_with
from trie_sampler.llama.forest import forget_forest
from trie_sampler.llama.vocab import Prompt, as_tokenizer, forget_tokenizer, prompt_tokens, require_engine
from trie_sampler.ranking import draw_joint, rank, with_none
from trie_sampler.scores import NORMALIZATIONS
from trie_sampler.span import walk_span
from trie_sampler.tokens import Tokenizer, edge_of, find_merges
from trie_sampler.trie import TokenTrie

_METHODS = ("greedy", "sample", "best")


def choose(
    llm: Llama,
    prompt: Prompt,
    choices: ChoicesLike | TokenTrie,
    *,
    method: str = "greedy",
    path: str | None = None,
    on_end: str = "mass",
    on_fault: str = "warn",
    valid_mass: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    normalize: str | None = None,
    neutral: Any = None,
    none_choice: str | None = None,
    max_nodes: int | None = None,
    steps: bool = False,
    **spelling: Any,
) -> Choice:
    """Let a model answer a prompt with exactly one of the choices.

    Args:
        llm: a loaded ``Llama``; its context is used as ``create_completion`` uses it, and a prompt
            that begins as the one before is not evaluated again.
        prompt: text, token ids, or chat messages.
        choices: list of strings, dict name -> text, ``Enum`` class, ``Literal`` or ``TokenTrie``.
        method: ``"greedy"`` takes the likeliest token at each step; ``"sample"`` draws; ``"best"`` finds the
            choice that is likeliest as a whole, see ``rank``.
        path: descriptor of a trie with several.
        on_end: "mass" or "eog", see ``TrieCursor``.
        on_fault: "warn" or "raise", see ``TrieCursor``.
        valid_mass: measure how much of the model's own next token went to the choices at all.
        temperature: of ``"sample"``, see ``Sampling`` for this and the next four.
        top_k: keep the k likeliest options.
        top_p: keep the fewest whose mass reaches it.
        min_p: drop options below this share of the likeliest.
        seed: of the draws.
        normalize: of ``"best"``, see ``rank`` (default "joint"); of ``"sample"``: "walk" (default) draws token by
            token, "joint" a whole choice by the model's probability of it, and ignores the five settings above but
            ``seed``.
        neutral: of ``normalize="calibrated"``, see ``rank``.
        none_choice: one more choice, a text such as "none of these", whose value is ``None``.
        max_nodes: of ``"best"``, see ``rank``.
        steps: of ``"best"`` and ``normalize="joint"``, see ``rank``; a walk has its ``Choice.steps`` anyway.
        spelling: ``lead``, ``tokenization``, ``heal``, ``json_value``, ``case_fold`` and ``special`` of
            ``TokenTrie.from_choices``.

    Returns:
        The choice, always complete. ``stats`` also has ``prompt_tokens``, ``forward_passes`` (decodes
        after the prompt) and ``seconds``.

    Raises:
        EmptyTrieError: no choices.
        EngineError: prompt and the longest choice do not fit the context; nothing was evaluated.
        TrieSamplerError: an empty prompt on a model without BOS, a ``vocab_only`` model, or, under
            ``on_fault="raise"``, logits that say nothing.
        TypeError, ValueError: arguments of another kind; unknown settings.

    Threads: calls on one ``Llama`` wait for each other, here and in ``rank`` and sessions; the host's own do not.

    Cost: the prompt and, but for "best" (see ``rank``), one decode for each further decision: a node with
    several children, or a choice that another begins with. Tokens without alternative ride along. With a
    single choice the model is not asked at all.

    Example:
        >>> choose(llm, "Is fire hot? Answer:", ["yes", "no"]).name            # doctest: +SKIP
        'yes'
    """
    start = time.perf_counter()
    check_choice("method", method, _METHODS)
    check_choice("on_end", on_end, ("mass", "eog"))
    if normalize is not None and not _NORMALIZATIONS[method]:
        raise ValueError(f'normalize={normalize!r} needs method="best" or "sample"')
    if normalize is not None:
        check_choice(f"normalize with method={method!r}", normalize, _NORMALIZATIONS[method])
    if neutral is not None and normalize != "calibrated":
        raise ValueError('neutral= is for method="best", normalize="calibrated"')
    require_engine(llm)
    if method == "best" or normalize == "joint":
        take_spelling(dict(spelling), "choose")
        scoring: dict[str, Any] = {"path": path, "none_choice": none_choice, "steps": steps, **spelling}
        if method == "sample":
            return draw_joint(llm, prompt, choices, seed=seed, **scoring)
        return rank(
            llm,
            prompt,
            choices,
            normalize=normalize or "joint",
            neutral=neutral,
            top_k=1,
            max_nodes=max_nodes,
            **scoring,
        )[0]
    wanted = take_spelling(spelling, "choose")
    if none_choice is not None:
        choices = with_none(choices, none_choice)
    binding = Binding.of(as_tokenizer(llm), choices, spelling=wanted)
    trie, tokens = binding.prepare(prompt_tokens(llm, prompt))
    eog_ids = as_tokenizer(llm).eog_ids
    if not eog_ids:
        raise TrieSamplerError("this model names no end-of-generation token, so a choice cannot end")
    cursor = TrieCursor(
        trie,
        path=path,
        on_end=on_end,
        on_fault=on_fault,
        eog_ids=eog_ids,
        sampling=Sampling(temperature, top_k, top_p, min_p, seed),
    )
    if not cursor.is_active:
        raise UnknownPathError(f"say which path to choose from: {list(trie.paths)}")
    decoder = Decoder(llm, tokens)
    decoder.require_room(trie.depth, "a choice")
    walked: list[Step] = []
    with alone_with(llm):
        mass = cursor.valid_mass(decoder.row()) if valid_mass else None
        for move in walk_span(decoder, cursor, samples=method == "sample"):
            walked += move.steps if move.end is None else (move.end,)
    choice = binding.make_choice(cursor, walked, mass)
    door = {
        "prompt_tokens": len(tokens),
        "forward_passes": decoder.n_decodes - decoder.n_prefill,
        "seconds": time.perf_counter() - start,
    }
    return replace(choice, stats={**choice.stats, **door})


_NORMALIZATIONS: dict[str, tuple[str, ...]] = {"greedy": (), "sample": ("walk", "joint"), "best": NORMALIZATIONS}


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
        count = f"{len(self.merged)} choice{'s' if len(self.merged) > 1 else ''}"
        return f"{end}, whose last tokens merge with {count} ({names}): {advice}"


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
    wanted = take_spelling(spelling, "check_prompt")
    tokenizer = as_tokenizer(llm)
    edge = edge_of(tokenizer, prompt_tokens(llm, prompt))
    merges = find_merges(tokenizer, Choices.of(choices), edge, wanted)
    n_healed = merges.n_healed if merges.can_heal else 0
    healed = tokenizer.detokenize(edge.tokens[len(edge.tokens) - n_healed :])
    return PromptCheck(
        tail=edge.text.decode("utf-8", "replace"),
        merged=merges.names,
        healed=healed.decode("utf-8", "replace"),
        n_healed=n_healed,
        can_heal=merges.can_heal,
    )


def forget_model(llm: Llama | Tokenizer) -> None:
    """Drop what is kept for a model: its vocabulary's index, tries behind its prompts' endings, its second context.

    Without it they go with the model itself. Constraints at hand keep working.

    Raises:
        TypeError: not a model.
        TrieSamplerError: the model is closed, and all is gone already.
    """
    forget_tokenizer(llm)
    if isinstance(llm, Llama):
        forget_forest(llm)


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
