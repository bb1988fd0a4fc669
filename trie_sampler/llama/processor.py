"""``TrieLogitsProcessor``: the constraint as ``logits_processor=`` of ``Llama``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama, LogitsProcessorList, StoppingCriteriaList

from trie_sampler.binding import Binding
from trie_sampler.choice import Choice
from trie_sampler.cursor import Sampling, Step, TrieCursor, as_mode
from trie_sampler.errors import EngineError, TrieSamplerError, UnknownPathError, warn
from trie_sampler.layout import NO_TOKEN
from trie_sampler.llama.vocab import Prompt, as_tokenizer, prompt_tokens
from trie_sampler.payload import TokenTreePayload
from trie_sampler.tokens import ChoicesLike
from trie_sampler.trie import TokenTrie

_TWO_STREAMS = "two streams are open at once on this Llama; the older one cannot go on"


@dataclass
class _Generation:
    """One run of the host's token loop, known by the sampler object that it made for itself."""

    sampler: Callable[[], Any]
    n_prompt: int
    cursor: TrieCursor | None = None
    steps: list[Step] = field(default_factory=list)
    valid_mass: float | None = None
    error: BaseException | None = None

    def final_cursor(self) -> TrieCursor | None:
        """The cursor after the last pick, which the host has not handed back; None without one."""
        if self.cursor is None or not self.steps:
            return None
        final = self.cursor.clone()
        final.accept(self.steps[-1].token)
        return final


class TrieLogitsProcessor(LogitsProcessorList):
    """Constrains ``Llama.create_completion`` to one of a set of choices.

    It *is* a ``LogitsProcessorList``, so it goes bare or in a list into ``logits_processor=``, of
    ``create_completion`` and ``create_chat_completion``, streamed or not. At each step it picks (or
    draws) the token itself and leaves only that one: temperature, filters and penalties of the host
    come after it and change nothing. Give the host ``max_tokens=constraint.max_tokens``: its own
    default is 16. One object serves any number of calls on its ``Llama``, one after the other.

    Other processors act on the logits if they come before it: ``LogitsProcessorList([other,
    constraint])``. With ``logit_bias=`` pass the constraint bare; the host drops a plain list then.

    An error while sampling cannot leave the host's callback, where it would be swallowed and free
    text follow. It is kept, only an end token is let through, and the call itself ends in the
    exception; ``result`` raises it too.

    Make one with ``from_choices`` or ``from_payload``.

    Example:
        >>> constraint = TrieLogitsProcessor.from_choices(llm, ["yes", "no"])      # doctest: +SKIP
        >>> llm.create_completion("Is fire hot? Answer:", logits_processor=constraint,
        ...                       max_tokens=constraint.max_tokens)                # doctest: +SKIP
        >>> constraint.result.name                                                 # doctest: +SKIP
        'yes'
    """

    def __init__(
        self,
        llm: Llama,
        binding: Binding,
        *,
        mode: str | int = "greedy",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        path: str | None = None,
        on_end: str = "mass",
        on_fault: str = "warn",
        valid_mass: bool = False,
    ) -> None:
        super().__init__([self._constrain])
        if on_end not in ("mass", "eog"):
            raise ValueError(f'on_end must be "mass" or "eog" in a processor, got {on_end!r}')
        self._llm = llm
        self._binding = binding
        self._eog_ids = as_tokenizer(llm).eog_ids
        if not self._eog_ids:
            raise TrieSamplerError("this model names no end-of-generation token, so a choice cannot end")
        self._samples = as_mode(mode) == "sampled"
        self._wants_mass = valid_mass
        self._path = path
        self._settings: dict[str, Any] = {
            "on_end": on_end,
            "on_fault": on_fault,
            "eog_ids": self._eog_ids,
            "sampling": Sampling(temperature, top_k, top_p, min_p, seed),
        }
        # A cursor on a stand-in checks settings that are only used when a prompt is known.
        trie = binding.trie or TokenTrie.from_ragged([0], [0, 1])
        cursor = TrieCursor(trie, path=path, **self._settings)
        self._cursor = cursor if binding.trie is not None else None
        self._generation: _Generation | None = None
        # The function that stands in for llm.detokenize after an error, and what it stands in for.
        self._hook: tuple[Any, Any] | None = None

    @classmethod
    def from_choices(
        cls, llm: Llama, choices: ChoicesLike | TokenTrie, *, lead: str = "auto", **settings: Any
    ) -> TrieLogitsProcessor:
        """Constrain to choices, tokenized anew behind each prompt that the host brings.

        Args:
            llm: the model the constraint will be used with, and no other.
            choices: list of strings, dict name -> text, ``Enum`` class, ``Literal`` or ``TokenTrie``.
            lead: see ``TokenTrie.from_choices``.
            settings: ``mode`` ("greedy", "sampled", or the reference's 0 and 1); for "sampled":
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed`` (see ``Sampling``);
                ``path`` (of a trie with several descriptors); ``on_end`` ("mass" or "eog") and
                ``on_fault`` ("warn" or "raise") (see ``TrieCursor``); ``valid_mass=True`` to
                measure it. Unknown ones are a ``TypeError``.

        Raises:
            EmptyTrieError: there are no choices.
            ValueError: a setting out of range.
            TypeError: choices of another kind.
        """
        return cls(llm, Binding.of(as_tokenizer(llm), choices, lead=lead), **settings)

    @classmethod
    def from_payload(
        cls,
        llm: Llama,
        payload: TokenTreePayload | str | bytes,
        path: str | None = None,
        *,
        strict: bool = False,
        **settings: Any,
    ) -> TrieLogitsProcessor:
        """Constrain to the leaves of a payload.

        With several descriptors and no ``path`` it lets everything through until ``activate(path)``.

        Raises:
            PayloadError, EmptyTrieError, UnknownPathError, VocabMismatchError: see
                ``TokenTrie.from_payload``.
        """
        if not isinstance(payload, TokenTreePayload):
            payload = TokenTreePayload.from_json(payload)
        return cls(llm, Binding.of(as_tokenizer(llm), payload, path=path, strict=strict), **settings)

    # --- what a caller asks --------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Enough for the longest choice and its end token: pass it to the host as ``max_tokens``.

        Before a prompt is known, an upper bound: no choice has more tokens than bytes.
        """
        return self._binding.max_tokens

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """Stops the host once the choice is ended; then no end token is yielded."""
        return StoppingCriteriaList([lambda _ids, _logits: self._last_pick_ends()])

    @property
    def result(self) -> Choice:
        """The choice of the latest generation that called the constraint.

        A generation cut before the end gives ``complete=False`` and no name.

        Raises:
            TrieSamplerError: the host never called the constraint (``logit_bias=`` beside a plain
                list drops it), or it was released all the time.
            Exception: what went wrong while sampling.

        Warns:
            TrieSamplerWarning: the ``Llama`` has generated since without this constraint.
        """
        generation = self._generation
        if generation is None:
            raise TrieSamplerError(
                "the constraint was never called: the host drops a plain [constraint] beside "
                "logit_bias=; pass the constraint itself"
            )
        if generation.error is not None:
            self._raise_error(generation.error)
        if generation.sampler() is not self._llm._sampler:
            warn("this Llama has generated since without this constraint; the result is the earlier one's")
        final = generation.final_cursor()
        if final is None:
            raise TrieSamplerError("the constraint was released all the time; activate(path) arms it")
        return self._binding.make_choice(final, generation.steps, generation.valid_mass)

    @property
    def is_over(self) -> bool:
        """Whether the last pick ended the choice, so that nothing needs to be evaluated any more."""
        generation = self._generation
        if generation is None:
            return False
        final = generation.final_cursor()
        return generation.error is not None or (final is not None and (final.is_finished or final.must_end))

    def activate(self, path: str | None = None) -> None:
        """Constrain from the next token on, at the root of a descriptor, in later calls too.

        Raises:
            UnknownPathError: no descriptor of that path.
        """
        if self._cursor is not None:
            self._cursor.activate(path)
        elif path is not None:
            raise UnknownPathError(f"a constraint made of text has no paths, so none is {path!r}")
        self._path = path
        if self._generation is not None:
            self._generation.steps.clear()

    def deactivate(self) -> None:
        """Let every token through until the next ``activate`` or the next generation."""
        if self._cursor is not None:
            self._cursor.deactivate()

    def bind(self, prompt: Prompt) -> TokenTrie:
        """The trie that constrains what follows this prompt; made now if it is not known yet.

        Raises:
            as ``TokenTrie.from_choices``.
        """
        return self._binding.trie_behind(prompt_tokens(self._llm, prompt))

    # --- as a list of processors ---------------------------------------------------------------

    def __call__(self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        """One step; see the class. ``scores`` [V] float32, any stride, is changed in place."""
        return self._constrain(input_ids, scores)

    def extend(self, others: Iterable[Any]) -> Any:
        """A new list with ``others`` first; the host assigns this and so keeps constraint and bias."""
        return LogitsProcessorList([*others, self])

    def _refuse_change(self, *_: Any) -> NoReturn:
        raise TypeError(
            "what comes after the constraint has no effect; put other processors before it: "
            "LogitsProcessorList([other, constraint])"
        )

    append: Any = _refuse_change
    insert: Any = _refuse_change
    __iadd__: Any = _refuse_change
    __setitem__: Any = _refuse_change

    def __eq__(self, other: object) -> bool:
        """By identity: two constraints are never the same list."""
        return self is other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __repr__(self) -> str:
        """What it chooses from."""
        mode = "sampled" if self._samples else "greedy"
        return f"TrieLogitsProcessor({self._binding!r}, mode={mode!r})"

    # --- one step ------------------------------------------------------------------------------

    def _constrain(self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        try:
            generation = self._generation
            if generation is None or generation.sampler() is not self._llm._sampler:
                generation = self._begin_generation(input_ids)
            if generation.error is None:
                self._step(generation, input_ids, scores)
            else:
                self._leave_end_token(scores)
        # An exception that leaves here is printed and forgotten, and free text follows.
        except BaseException as error:  # noqa: BLE001
            self._trap(error, scores)
        return scores

    def _begin_generation(self, input_ids: npt.NDArray[np.intc]) -> _Generation:
        """The host makes a new sampler for each generation; ours starts at the root."""
        sampler: Any = self._llm._sampler
        alive = (lambda: None) if sampler is None else weakref.ref(sampler)
        self._generation = generation = _Generation(alive, len(input_ids))
        trie = self._binding.trie_behind(input_ids.tolist())
        before = self._cursor
        if before is None or before.trie is not trie:
            self._cursor = TrieCursor(trie, path=self._path, **self._settings)
            if before is not None:
                self._cursor.take_draws_from(before)
        else:
            before.reset()
            if self._path is not None:
                before.activate(self._path)
        generation.cursor = self._cursor
        if sampler is not None and hasattr(sampler, "sample"):
            self._guard(sampler, generation)
        return generation

    def _guard(self, sampler: Any, generation: _Generation) -> None:
        """Watch the host's sampler object from its second token on, where plain Python calls it.

        There an error can end the host's loop at once, and a call that llama.cpp would end the process
        for can be refused: an older stream that goes on asks this newer sampler for a row that is gone.
        """
        if llama_cpp.llama_perf_sampler(sampler.sampler).n_sample:
            raise TrieSamplerError(
                "the host has sampled before it called the constraint: a processor in front of it failed"
            )
        sample = type(sampler).sample

        def guarded(context: Any, idx: int = -1) -> int:
            # Only with drafts does the host ask for another row than the last.
            if idx != -1 and self._llm.draft_model is None:
                raise TrieSamplerError(_TWO_STREAMS)
            token = int(sample(generation.sampler(), context, idx))
            if generation.error is not None:
                self.release_host()
                self._raise_error(generation.error)
            return token

        sampler.sample = guarded

    def _step(
        self,
        generation: _Generation,
        input_ids: npt.NDArray[np.intc],
        scores: npt.NDArray[np.single],
    ) -> None:
        cursor, steps = generation.cursor, generation.steps
        if cursor is None:
            raise TrieSamplerError("the constraint was called again while it was being bound")
        if steps:
            # With a draft model more ids follow than were sampled: only the position counts.
            place = generation.n_prompt + len(steps) - 1
            if place >= len(input_ids):
                room = len(self._llm.input_ids)
                if place >= room:
                    raise EngineError(f"prompt and choice do not fit n_ctx={room}; load the model with a larger one")
                raise TrieSamplerError(_TWO_STREAMS)
            evaluated = int(input_ids[place])
            if evaluated != steps[-1].token:
                raise TrieSamplerError(
                    f"the host evaluated token {evaluated} where {steps[-1].token} was picked: two "
                    "streams are open at once, or a sampler after the constraint changed the pick"
                )
            cursor.accept(evaluated)
        else:
            generation.n_prompt = len(input_ids)
            if self._wants_mass and cursor.is_active:
                generation.valid_mass = cursor.valid_mass(scores)
        step = cursor.constrain(scores, samples=self._samples)
        if step.token != NO_TOKEN:
            steps.append(step)

    # --- the end -------------------------------------------------------------------------------

    def _last_pick_ends(self) -> bool:
        generation = self._generation
        if generation is None:
            return False
        final = generation.final_cursor()
        return generation.error is not None or (final is not None and final.is_finished)

    # --- trouble -------------------------------------------------------------------------------

    def _trap(self, error: BaseException, scores: npt.NDArray[np.single]) -> None:
        """Keep the error, let only an end token through, and make the host's call end in it."""
        if self._generation is not None:
            self._generation.error = error
            self._raise_from_detokenize(self._generation)
        self._leave_end_token(scores)

    def _leave_end_token(self, scores: npt.NDArray[np.single]) -> None:
        scores[:] = -np.inf
        scores[self._eog_ids[0]] = 0.0

    def _raise_from_detokenize(self, generation: _Generation) -> None:
        """End the running call in our exception: the next thing it does is to detokenize.

        A one-shot function on the instance; a later generation's call finds it harmless.
        """

        def raise_once(*arguments: Any, **keywords: Any) -> Any:
            self.release_host()
            if generation.error is not None and generation.sampler() is self._llm._sampler:
                self._raise_error(generation.error)
            return self._llm.detokenize(*arguments, **keywords)

        self.release_host()
        self._hook = raise_once, vars(self._llm).get("detokenize")
        vars(self._llm)["detokenize"] = raise_once

    def release_host(self) -> None:
        """Take back what makes the host's call end in our exception; for callers that ask ``result``."""
        attributes = vars(self._llm)
        if self._hook is None or attributes.get("detokenize") is not self._hook[0]:
            return
        if self._hook[1] is None:
            del attributes["detokenize"]
        else:
            attributes["detokenize"] = self._hook[1]
        self._hook = None

    def _raise_error(self, error: BaseException) -> NoReturn:
        if isinstance(error, TrieSamplerError) or not isinstance(error, Exception):
            raise error
        raise TrieSamplerError(f"the constraint failed while sampling: {error!r}") from error
