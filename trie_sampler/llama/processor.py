"""``TrieLogitsProcessor``: the constraint as ``logits_processor=`` of ``Llama``."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama, LogitsProcessorList, StoppingCriteriaList

from trie_sampler.binding import Binding
from trie_sampler.choice import Choice
from trie_sampler.choices import ChoicesLike, Spelling
from trie_sampler.cursor import Sampling, Step, TrieCursor, as_mode
from trie_sampler.errors import EngineError, TrieSamplerError, UnknownPathError, warn
from trie_sampler.layout import NO_TOKEN
from trie_sampler.llama.vocab import Prompt, as_tokenizer, prompt_tokens
from trie_sampler.payload import PayloadText, TokenTreePayload
from trie_sampler.trie import TokenTrie

_ANOTHER_LLAMA = "this constraint was made for another Llama; make one for each"
_TWO_STREAMS = "two streams are open at once on this Llama; the older one cannot go on"


_N_PREPARED = 4096
"""Prompts that were prepared last and are known again."""

_N_OPEN_STREAMS = 16
"""Older generations of a constraint that are still watched."""


@dataclass(eq=False)
class _Generation:
    """One run of the host's token loop, known by the sampler object that it made for itself."""

    sampler: Callable[[], Any]
    n_prompt: int
    host: Llama
    loop: FrameType | None
    cursor: TrieCursor | None = None
    steps: list[Step] = field(default_factory=list)
    valid_mass: float | None = None
    beside_grammar: bool = False
    is_unhealed: bool = False
    error: BaseException | None = None

    def goes_on_with(self, input_ids: npt.NDArray[np.intc]) -> bool:
        """Whether a caller without a token loop, who makes a sampler per token, has come one token further."""
        picks = [step.token for step in self.steps]
        return (
            self.loop is None
            and len(picks) > 0
            and len(input_ids) == self.n_prompt + len(picks)
            and input_ids[self.n_prompt :].tolist() == picks
        )

    def final_cursor(self) -> TrieCursor | None:
        """The cursor after the last pick, which the host has not handed back; None without one."""
        if self.cursor is None or not self.steps:
            return None
        final = self.cursor.clone()
        final.accept(self.steps[-1].token)
        return final


def _key_of(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).digest()


def _host_loop() -> FrameType | None:
    """The frame of ``Llama.generate`` that is asking, ``None`` under another driver.

    A sampler's callback is not told who samples; the frame is what sets an older stream apart from a
    newer one, and one ``Llama`` from another.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Llama.generate.__code__:
        frame = frame.f_back
    return frame


_generations: weakref.WeakKeyDictionary[Llama, weakref.WeakSet[_Generation]] = weakref.WeakKeyDictionary()


def _watch(llm: Llama, generation: _Generation) -> None:
    """Refuse a stream that goes on after a newer generation of its ``Llama`` has begun, constrained or not.

    The host would sample for it with the newer one's sampler: from another set, or from all tokens.
    """
    watched = _generations.setdefault(llm, weakref.WeakSet())
    watched.add(generation)
    if "sample" in vars(llm):
        return

    def sample(*arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1)
        for older in watched:
            if older.loop is caller and older.sampler() is not llm._sampler:
                raise TrieSamplerError(_TWO_STREAMS)
        return type(llm).sample(llm, *arguments, **keywords)

    vars(llm)["sample"] = sample


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
        self._prepared: OrderedDict[bytes, TokenTrie] = OrderedDict()
        self._has_forgotten = False
        self._older: deque[_Generation] = deque(maxlen=_N_OPEN_STREAMS)
        # Whose detokenize stands in after an error, by which function, and what for.
        self._hook: tuple[Llama, Any, Any] | None = None

    @classmethod
    def from_choices(cls, llm: Llama, choices: ChoicesLike | TokenTrie, **settings: Any) -> TrieLogitsProcessor:
        """Constrain to choices, tokenized anew behind each prompt that the host brings.

        Args:
            llm: the model the constraint will be used with, and no other.
            choices: list of strings, dict name -> text, ``Enum`` class, ``Literal`` or ``TokenTrie``.
            settings: ``lead``, ``tokenization``, ``heal``, ``json_value``, ``case_fold`` and ``special`` (see
                ``TokenTrie.from_choices``; with ``heal`` give the host the ids that ``prepare`` makes of a
                prompt); ``mode`` ("greedy", "sampled", or the reference's 0 and 1); for "sampled":
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed`` (see ``Sampling``);
                ``path`` (of a trie with several descriptors); ``on_end`` ("mass" or "eog") and
                ``on_fault`` ("warn" or "raise") (see ``TrieCursor``); ``valid_mass=True`` to
                measure it. Unknown ones are a ``TypeError``.

        Raises:
            EmptyTrieError: there are no choices.
            ValueError: a setting out of range.
            TypeError: choices of another kind.
        """
        spelling = Spelling.take_from(settings)
        return cls(llm, Binding.of(as_tokenizer(llm), choices, spelling=spelling), **settings)

    @classmethod
    def from_payload(
        cls,
        llm: Llama,
        payload: TokenTreePayload | str | bytes,
        path: str | None = None,
        *,
        strict: bool = False,
        model_id: str | None = None,
        **settings: Any,
    ) -> TrieLogitsProcessor:
        """Constrain to the leaves of a payload.

        Tries of payloads are kept, see ``TrieCache``. With several descriptors and no ``path`` it lets everything
        through until ``activate(path)``.

        Raises:
            PayloadError, EmptyTrieError, UnknownPathError, VocabMismatchError: see
                ``TokenTrie.from_payload``.
        """
        source = payload if isinstance(payload, TokenTreePayload) else PayloadText(payload)
        binding = Binding.of(as_tokenizer(llm), source, path=path, strict=strict, model_id=model_id)
        return cls(llm, binding, **settings)

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
            TrieSamplerWarning: the ``Llama`` has generated since without this constraint; under ``heal`` the
                host was given a prompt that was not prepared and needed it.
        """
        generation = self._generation
        if generation is None:
            raise TrieSamplerError(
                "the constraint was never called: the host drops a plain [constraint] beside "
                "logit_bias=; pass the constraint itself"
            )
        if generation.error is not None:
            self._raise_error(generation.error)
        if generation.loop is not None and generation.sampler() is not self._llm._sampler:
            warn("this Llama has generated since without this constraint; the result is the earlier one's")
        if generation.is_unhealed:
            warn(
                "the prompt's end may merge with a choice, and it was not healed, or too long ago: give the host "
                "the ids of prepare(prompt), not the prompt"
            )
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

    def prepare(self, prompt: Prompt) -> list[int]:
        """The ids to give the host for a prompt: without the last ones where ``heal`` takes them back.

        The host evaluates the prompt before it calls the constraint, so healing has to come first.

        Args:
            prompt: text, token ids or chat messages.

        Returns:
            Ids, for ``create_completion(ids, ...)``; without ``heal`` all of the prompt's.

        Raises:
            as ``TokenTrie.from_choices``.

        Example:
            >>> constraint = TrieLogitsProcessor.from_choices(llm, ["//a", "//b"], heal=True)  # doctest: +SKIP
            >>> llm.create_completion(constraint.prepare("http:"), logits_processor=constraint,
            ...                       max_tokens=constraint.max_tokens)                        # doctest: +SKIP
        """
        trie, ids = self._binding.prepare(prompt_tokens(self._llm, prompt))
        key = _key_of(ids)
        self._prepared[key] = trie
        self._prepared.move_to_end(key)
        if len(self._prepared) > _N_PREPARED:
            self._prepared.popitem(last=False)
            self._has_forgotten = True
        return ids

    def bind(self, prompt: Prompt) -> TokenTrie:
        """The trie that constrains what follows this prompt; made now if it is not known yet.

        Raises:
            as ``TokenTrie.from_choices``.
        """
        ids = prompt_tokens(self._llm, prompt)
        return self._prepared.get(_key_of(ids)) or self._binding.trie_behind(ids)

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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Not copied, not pickled: a constraint belongs to the ``Llama`` it was made for."""
        raise TypeError("a constraint belongs to its Llama; make another with from_choices or from_payload")

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
            if (
                generation is None
                or generation.sampler() is not self._llm._sampler
                or getattr(self._llm, "input_ids", None) is not input_ids.base
            ):
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
        loop = _host_loop()
        caller = {} if loop is None else loop.f_locals
        host = caller.get("self", self._llm)
        sampler: Any = host._sampler
        alive = (lambda: None) if sampler is None else weakref.ref(sampler)
        before_this = self._generation
        if loop is None and before_this is not None and before_this.goes_on_with(input_ids):
            before_this.sampler = alive
            return before_this
        if before_this is not None:
            self._older.append(before_this)
        self._generation = generation = _Generation(alive, len(input_ids), host, loop)
        if loop is not None:
            self._guard(sampler, generation)
            _watch(host, generation)
        if host is not self._llm:
            raise TrieSamplerError(_ANOTHER_LLAMA)
        if caller.get("grammar") is not None:
            generation.beside_grammar = True
            raise TrieSamplerError(
                "a grammar beside the constraint is refused: llama.cpp ends the process where the two disagree"
            )
        ids = input_ids.tolist()
        trie = self._prepared.get(_key_of(ids))
        if trie is None:
            # A prompt that was prepared long ago looks like one that was never healed.
            generation.is_unhealed = self._has_forgotten or self._binding.needs_healing(ids)
            trie = self._binding.trie_behind(ids)
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
        return generation

    def _guard(self, sampler: Any, generation: _Generation) -> None:
        """Watch the host's sampler object from its second token on, where plain Python calls it.

        There an error can end the host's loop at once, and a row that is gone can be refused, for which
        llama.cpp would end the process: an older stream has evaluated a token since.
        """
        if llama_cpp.llama_perf_sampler(sampler.sampler).n_sample:
            raise TrieSamplerError(
                "the host has sampled before it called the constraint: a processor in front of it failed"
            )
        sample = type(sampler).sample

        def guarded(context: Any, idx: int = -1) -> int:
            # Only with drafts does the host ask for another row than the last.
            if idx != -1 and generation.host.draft_model is None:
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
        generation = self._generation
        if generation is not None:
            generation.error = error
            self._raise_from_detokenize(generation)
        self._leave_end_token(scores)

    def _leave_end_token(self, scores: npt.NDArray[np.single]) -> None:
        generation = self._generation
        if generation is not None and generation.beside_grammar:
            return  # an end token that the grammar does not allow would end the process
        ends = self._eog_ids if generation is None else as_tokenizer(generation.host).eog_ids
        scores[:] = -np.inf
        scores[ends[0]] = 0.0

    def _raise_from_detokenize(self, generation: _Generation) -> None:
        """End the running call in our exception: the next thing it does is to detokenize.

        A one-shot function on the instance; a later generation's call finds it harmless.
        """
        host = generation.host

        def raise_once(*arguments: Any, **keywords: Any) -> Any:
            self.release_host()
            if generation.error is not None and generation.sampler() is host._sampler:
                self._raise_error(generation.error)
            return host.detokenize(*arguments, **keywords)

        self.release_host()
        self._hook = host, raise_once, vars(host).get("detokenize")
        vars(host)["detokenize"] = raise_once

    def release_host(self) -> None:
        """Take back what makes the host's call end in our exception; for callers that ask ``result``."""
        if self._hook is None:
            return
        host, ours, previous = self._hook
        self._hook = None
        if vars(host).get("detokenize") is not ours:
            return
        if previous is None:
            del vars(host)["detokenize"]
        else:
            vars(host)["detokenize"] = previous

    def _raise_error(self, error: BaseException) -> NoReturn:
        if isinstance(error, (TrieSamplerError, Warning)) or not isinstance(error, Exception):
            raise error
        raise TrieSamplerError(f"the constraint failed while sampling: {error!r}") from error
