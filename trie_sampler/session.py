"""``StreamSession``: open, prefill, set a trie, generate, clear: text on one ``Llama`` with constrained spans in it."""

from __future__ import annotations

import codecs
import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llama_cpp import Llama
from llama_cpp.llama_grammar import LlamaGrammar
from typing_extensions import Self

from trie_sampler.binding import Binding, kept_for
from trie_sampler.choice import Choice
from trie_sampler.choices import Choices, ChoicesLike, Spelling, take_spelling
from trie_sampler.cursor import Sampling, Step, TrieCursor, as_mode, check_choice
from trie_sampler.errors import EngineError, TrieSamplerError, UnknownPathError
from trie_sampler.llama.chain import SamplingParams, check_tokens
from trie_sampler.llama.decoder import Decoder, alone_with
from trie_sampler.llama.picker import Picker
from trie_sampler.llama.vocab import Prompt, as_tokenizer, prompt_tokens, require_open
from trie_sampler.payload import PayloadText, TokenTreePayload
from trie_sampler.span import walk_span
from trie_sampler.tokens import Tokenizer, continue_text, finish_leaf
from trie_sampler.trie import TokenTrie
from trie_sampler.usage import Usage

_T = TypeVar("_T")

_SKIPS = ("exact", "canonical")
_MIN_P = 0.05
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""

# Fields of SamplingParams that a session sets in its own way.
_OF_TRIES = frozenset(
    {
        "token_trie_descriptor_json",
        "token_trie_mode",
        "trie_position",
        "path",
        "on_end",
        "stop_tokens",
        "on_invalid",
        "max_span_tokens",
    }
)


@dataclass(frozen=True)
class StreamStep:
    """What ``on_step`` is given: tokens that were settled together.

    Attributes:
        tokens: ids, one that was picked and those that had to follow; none in a last step that only ends. Those of
            a stop text are among them, though it is taken back.
        text: what they add to the text; a character waits until it is whole.
        done: the last step of this generation.
    """

    tokens: tuple[int, ...]
    text: str
    done: bool


@dataclass(frozen=True)
class Generation:
    """What one ``generate`` gave.

    Attributes:
        text: what was added, whole characters; the first may have been begun by the generation before.
        tokens: its ids, end tokens left out; without a stop text, as the session's own are.
        finish_reason: "span" (the leaf is over), "eog", "stop", "length" or "cancelled".
        choice: of the trie, where one was set; its ``complete`` is False where it was cut short.
        usage: what it cost.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    choice: Choice | None
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "choice": None if self.choice is None else self.choice.to_dict(),
            "usage": self.usage.to_dict(),
        }


class _CancelledError(Exception):
    """Somebody called ``cancel``."""


@dataclass(frozen=True)
class Span:
    """A trie and how to walk it."""

    binding: Binding
    samples: bool = False
    path: str | None = None
    on_end: str = "mass"
    on_fault: str = "warn"
    stop_tokens: tuple[int, ...] = ()
    max_span_tokens: int = 500


@dataclass(frozen=True)
class FreeText:
    """Text without a trie, and what bounds it.

    Attributes:
        allowed: [V] bool, the tokens that may come; ``None`` is all.
        closers: [V] bool, tokens that end it.
        ends_where_foreign: it also ends where it may and the likeliest token of all is none that may follow.
    """

    allowed: npt.NDArray[np.bool_] | None = None
    closers: npt.NDArray[np.bool_] | None = None
    ends_where_foreign: bool = False


@dataclass(frozen=True)
class _Walk:
    """How a span went: "span" where its leaf is complete, "stop" or "length"; and the decision to end it."""

    reason: str
    end: Step | None


class _TextReader:
    """Bytes to whole characters. One that is cut is left out, as the host does it."""

    def __init__(self, cut: bytes, n_skipped: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._decoder.decode(cut)
        self._n_skipped = n_skipped

    def read(self, data: bytes) -> str:
        text = self._decoder.decode(data[self._n_skipped :])
        self._n_skipped = max(0, self._n_skipped - len(data))
        return text

    @property
    def is_between_characters(self) -> bool:
        return not self._n_skipped and not self._decoder.getstate()[0]


@dataclass
class _Output:
    """What a running generation has so far."""

    on_step: Callable[[StreamStep], Any] | None
    on_text_chunk: Callable[[str], Any] | None
    stops: tuple[str, ...]
    cut: bytes = b""  # of a character that the text before it began
    n_healed: int = 0  # bytes that healing writes again: they are in the text before
    text: str = ""
    n_given: int = 0
    n_taken: int = 0
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    skip_ratios: list[float] = field(default_factory=list)
    asked_to_stop: bool = False

    def __post_init__(self) -> None:
        for name, callback in {"on_step": self.on_step, "on_text_chunk": self.on_text_chunk}.items():
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} must be callable, got {type(callback).__name__}")

    def begin(self, cut: bytes, healed: bytes) -> None:
        """What the text before it has begun, and what of it is written again."""
        self.cut, self.n_healed = cut, len(healed)
        self._pieces: list[bytes] = []
        self._reader = _TextReader(cut, self.n_healed)

    def take(self, tokens: Sequence[int], pieces: Sequence[bytes]) -> bool:
        """Add tokens and what each writes; True where a stop text came up, which is cut off."""
        self.tokens.extend(tokens)
        self.pending.extend(tokens)
        self.n_taken += len(tokens)
        self._pieces.extend(pieces)
        self.text += "".join(map(self._reader.read, pieces))
        # A stop may have begun in text that was there before, but for what was given out already.
        places = [place for stop in self.stops if (place := self.text.find(stop, self.n_given)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        return bool(places)

    def count_whole(self) -> tuple[int, int]:
        """(tokens, characters): as many tokens as there are whole in the text, and what they write of it."""
        reader = _TextReader(self.cut, self.n_healed)
        whole, n_characters = (0, 0), 0
        for n_tokens, piece in enumerate(self._pieces, start=1):
            n_characters += len(reader.read(piece))
            if n_characters <= len(self.text) and reader.is_between_characters:
                whole = (n_tokens, n_characters)
        return whole

    def give(self, *, done: bool = False) -> bool:
        """Tell the callbacks what is new, and whether one was called; text that may turn out to begin a stop waits."""
        end = len(self.text)
        if not done:
            held = (n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
            end = max(self.n_given, end - max(held, default=0))
        chunk, self.n_given = self.text[self.n_given : end], end
        tokens, self.pending = tuple(self.pending), []
        called = False
        if self.on_text_chunk is not None and chunk:
            self.on_text_chunk(chunk)
            called = True
        if self.on_step is not None and (tokens or chunk or done):
            self.on_step(StreamStep(tokens, chunk, done))
            called = True
        return called


class _Snapshot(NamedTuple):
    """Samplers at one place of an output."""

    n_tokens: int
    n_characters: int
    picker: Picker


class StreamSession:
    r"""One text on one ``Llama``, written in turns: by the model, freely or under a trie, and by the caller.

    ``prefill`` sets the text, ``generate`` adds to it. With a trie set, a generation begins at its root and
    ends with the leaf. Tokens without alternative are never sampled; they ride in the batch of the next
    decision, and where nothing follows they are not decoded at all. Nothing is decoded before logits are
    needed, the prompt neither: a forced run at the root goes into its batch.

    Every token that enters the text (picked, forced, spliced) is taken once into every sampler of the
    session. Inside a span the trie replaces the grammar, which has to agree with what it picks; outside the
    grammar constrains.

    ==========================  =====================================================================
    state                       what may be called
    ==========================  =====================================================================
    open                        ``prefill``, ``set_token_trie``, ``clear_token_trie``, ``close``
    prefilled                   also ``generate``, ``generate_with_usage``, ``splice``
    generating                  ``cancel``, from another thread or a callback
    closed                      ``close``
    ==========================  =====================================================================

    Anything else is an ``EngineError``, and anything but ``close`` after the ``Llama`` was closed a
    ``TrieSamplerError``. A session is a context manager that closes itself; the ``Llama`` is
    the caller's and stays open.

    Example:
        >>> with StreamSession.open(llm) as session:                          # doctest: +SKIP
        ...     session.prefill("Request: play some jazz\\nAction:")
        ...     session.set_token_trie(["PLAY_MUSIC", "SEND_MESSAGE"])
        ...     session.generate().choice.name
        'PLAY_MUSIC'
    """

    def __init__(self, llm: Llama) -> None:
        self._decoder = Decoder(llm)
        self._decoder.before_decode = self._raise_if_cancelled
        self._llm = llm
        self._tokenizer = as_tokenizer(llm)
        self._prompt: list[int] = []
        self._generated: list[int] = []
        self._span: Span | None = None
        self._picker: Picker | None = None
        self._grammar_start = 0
        # A plain value: an interrupt inside an Event can leave its lock taken, and the session would wait for ever.
        self._is_cancelled = False
        self._output: _Output | None = None
        self._snapshots: list[_Snapshot] = []
        # One thread at a time; that one may come in again, but not out of a callback.
        self._lock = threading.RLock()
        self._is_held = False
        self._is_closed = False

    @classmethod
    def open(cls, llm: Llama) -> StreamSession:
        """A session over a loaded model.

        Raises:
            TypeError, TrieSamplerError: not a model that can generate.
        """
        return cls(llm)

    # --- the text ------------------------------------------------------------------------------

    def prefill(self, prompt: Prompt, slot_id: int = -1) -> int:
        """Begin a new text. Nothing is evaluated yet; what the context holds already will not be again.

        Args:
            prompt: text, token ids or chat messages.
            slot_id: -1 or 0; a session has one slot.

        Returns:
            Tokens of the prompt.

        Raises:
            TrieSamplerError: an empty prompt on a model without BOS.
            EngineError: it does not fit the context, or the session is closed or generating.
            ValueError: another slot.
        """
        with self._exclusive():
            if slot_id not in (-1, 0):
                raise ValueError(f"a session has one slot, so slot_id is -1 or 0, got {slot_id!r}")
            tokens = prompt_tokens(self._llm, prompt)
            if len(tokens) >= self._decoder.room:
                raise EngineError(
                    f"{len(tokens)} tokens of prompt do not fit the context of {self._decoder.room}; load the model "
                    f"with n_ctx={len(tokens) + 1} or more"
                )
            self._drop_picker()
            self._prompt, self._generated = tokens, []
            self._decoder.replace(tokens)
            return len(tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of prompt and text so far."""
        return tuple(self._decoder.tokens)

    def splice(self, text: str) -> tuple[int, ...]:
        """Write text yourself, as the tokens that continue what is there. Costs no decode of its own.

        Returns:
            Its token ids.

        Raises:
            EngineError: not prefilled, generating, does not fit the context, or the session's grammar does not allow
                it: one goes on until ``prefill``, or a ``generate`` without it.
            VocabMismatchError: the vocabulary cannot write it.
            TypeError, ValueError: not text, or not valid Unicode.
        """
        with self._exclusive(prefilled=True):
            return self._splice(text)

    def _splice(self, text: str) -> tuple[int, ...]:
        if not isinstance(text, str):
            raise TypeError(f"text to splice must be str, got {type(text).__name__}")
        tokens = continue_text(self._tokenizer, self._decoder.tokens, text.encode())
        self._decoder.require_room(len(tokens), "spliced text")
        self._push(tokens)
        return tokens

    # --- the trie ------------------------------------------------------------------------------

    def set_token_trie(
        self,
        source: ChoicesLike | TokenTrie | TokenTreePayload | str | bytes,
        mode: str | int = "greedy",
        path: str | None = None,
        *,
        on_end: str = "mass",
        on_fault: str = "warn",
        stop_tokens: Iterable[int] = (),
        max_span_tokens: int = 500,
        strict: bool = False,
        model_id: str | None = None,
        **spelling: Any,
    ) -> None:
        """Constrain the next generations, each from the root on, until ``clear_token_trie``.

        Args:
            source: a payload or its JSON, a ``TokenTrie``, or choices, tokenized where they are needed.
            mode: "greedy", "sampled", or the reference's 0 and 1.
            path: descriptor; needed where there are several.
            on_end: "mass" or "eog", see ``TrieCursor``.
            on_fault: see ``TrieCursor``.
            stop_tokens: further tokens that end a leaf.
            max_span_tokens: see ``TrieCursor``.
            strict: see ``TokenTrie.check_vocab``.
            model_id: see ``TokenTrie.from_payload``.
            spelling: of ``TokenTrie.from_choices``; ``heal`` takes back tokens of the prompt only.

        Raises:
            PayloadError, EmptyTrieError, VocabMismatchError, UnknownPathError, ValueError, TypeError: what was
                set before stays.
            EngineError: the session is closed or generating.
        """
        source = _as_choices(source)
        stop_tokens = tuple(stop_tokens)
        with self._exclusive():
            self._span = self._make_span(
                source,
                mode,
                path,
                on_end=on_end,
                on_fault=on_fault,
                stop_tokens=stop_tokens,
                max_span_tokens=max_span_tokens,
                strict=strict,
                model_id=model_id,
                spelling=spelling,
            )

    def _make_span(
        self,
        source: ChoicesLike | TokenTrie | TokenTreePayload | str | bytes,
        mode: str | int,
        path: str | None,
        *,
        strict: bool = False,
        model_id: str | None = None,
        spelling: dict[str, Any] | None = None,
        on_end: str = "mass",
        stop_tokens: Iterable[int] = (),
        **of_cursors: Any,
    ) -> Span:
        samples = as_mode(mode) == "sampled"
        check_choice("on_end", on_end, ("mass", "eog"))
        wanted = take_spelling(spelling or {}, "set_token_trie")
        stops = tuple(map(operator.index, stop_tokens))
        check_tokens("stop_tokens", stops, self._tokenizer.n_vocab)
        if isinstance(source, (str, bytes)):
            source = PayloadText(source)
        binding = Binding.of(self._tokenizer, source, path=path, strict=strict, model_id=model_id, spelling=wanted)
        span = Span(binding, samples, path, on_end, stop_tokens=stops, **of_cursors)
        trie = binding.trie or TokenTrie.from_ragged([0], [0, 1])
        if not self._make_cursor(span, trie, Sampling()).is_active:
            raise UnknownPathError(f"say which path to set: {list(trie.paths)}")
        return span

    def clear_token_trie(self) -> None:
        """Generate freely, or under the grammar, from now on.

        Raises:
            EngineError: the session is closed or generating.
        """
        with self._exclusive():
            self._span = None

    @property
    def has_token_trie(self) -> bool:
        """Whether a trie is set."""
        return self._span is not None

    def _make_cursor(
        self, span: Span, trie: TokenTrie, sampling: Sampling, *, text_goes_on: bool = False
    ) -> TrieCursor:
        return TrieCursor(
            trie,
            path=span.path,
            on_end="release" if text_goes_on else span.on_end,
            on_fault=span.on_fault,
            eog_ids=self._tokenizer.eog_ids,
            stop_tokens=span.stop_tokens,
            max_span_tokens=span.max_span_tokens,
            sampling=sampling,
        )

    # --- generating ----------------------------------------------------------------------------

    def generate(
        self,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_p: float = 0.95,
        *,
        top_k: int = 40,
        min_p: float = 0.05,
        seed: int | None = None,
        grammar: str | LlamaGrammar | None = None,
        grammar_triggers: Iterable[str | int] = (),
        stop: str | Iterable[str] = (),
        skip: str = "exact",
        stop_at_span_end: bool = True,
        on_step: Callable[[StreamStep], Any] | None = None,
        on_text_chunk: Callable[[str], Any] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Add to the text: the leaf of the trie that is set, and free text where there is none or it goes on.

        Args:
            max_tokens: at most so many; ``None``: what the context has room for.
            temperature: of free text and of a "sampled" trie, as the next four; 0 is greedy.
            top_p: keep the fewest whose mass reaches it.
            top_k: keep the k likeliest; 0 keeps all.
            min_p: drop those below this share of the likeliest.
            seed: of the draws; ``None`` takes a random one.
            grammar: GBNF with a rule ``root``, for text outside spans. One that is given again goes on. How long
                llama.cpp takes for an ambiguous one, nobody knows: let no stranger write it.
            grammar_triggers: texts or ids that wake the grammar up; it lets everything through until then.
            stop: texts that end a generation; they are part of neither the text nor the context.
            skip: "exact" forces only what any run would write; "canonical" completes a trie of every spelling as
                soon as one leaf is left, as its tokenizer would.
            stop_at_span_end: with a trie set, end with the leaf. Else free text follows, and a leaf that begins
                another ends at one of ``stop_tokens`` or where the likeliest token does not go on with it.
            on_step: called with each ``StreamStep``.
            on_text_chunk: called with each piece of text, never empty.
            sampling: more of ``SamplingParams``, for free text: penalties, DRY, mirostat, logit_bias ...

        Returns:
            ``Generation``. The session's text has what was generated, cancelled or not.

        Raises:
            EngineError: not prefilled, closed, or generating; the leaf may not fit the context; a decode failed
                (``code``); the grammar does not allow what the trie picked, or allows nothing.
            ValueError: a setting out of range; a stop text inside a choice.
            TypeError: an unknown setting.
            Exception: what a callback raised.
        """
        # Iterables may be generators, which run code of their own.
        stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
        triggers = (grammar_triggers,) if isinstance(grammar_triggers, str) else tuple(grammar_triggers)
        with self._exclusive(prefilled=True):
            check_choice("skip", skip, _SKIPS)
            if max_tokens is not None and operator.index(max_tokens) < 1:
                raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
            if not all(isinstance(text, str) and text for text in stops):
                raise ValueError(f"stop must be texts, none of them empty, got {stop!r}")
            params = _params(temperature, top_p, top_k, min_p, seed, grammar, triggers, sampling)
            draws = Sampling(max(0.0, params.temp), max(0, params.top_k), top_p, min_p, seed)
            output = _Output(on_step, on_text_chunk, stops)
            free = FreeText() if self._span is None or not stop_at_span_end else None
            return self._run(self._span, free, output, params, draws, max_tokens, skip=skip)

    def _run(
        self,
        span: Span | None,
        free: FreeText | None,
        output: _Output,
        params: SamplingParams,
        draws: Sampling,
        max_tokens: int | None,
        *,
        skip: str = "exact",
    ) -> Generation:
        """A span, free text, or the one and then the other; settings are checked already."""
        # No context manager: an interrupt between its parts would leave the session busy for ever.
        try:
            self._output = output
            if not self._is_held:
                self._is_cancelled = False
            with alone_with(self._llm):
                return self._run_alone(span, free, output, params, draws, max_tokens, skip)
        finally:
            self._output = None
            if not self._is_held:
                self._is_cancelled = False
            self._drop_snapshots()

    def _run_alone(
        self,
        span: Span | None,
        free: FreeText | None,
        output: _Output,
        params: SamplingParams,
        draws: Sampling,
        max_tokens: int | None,
        skip: str,
    ) -> Generation:
        before = list(self._decoder.tokens)
        cursor, kept = None, before
        # Nothing is changed before all is checked.
        if span is not None:
            cursor, kept = self._prepare_span(span, draws, output.stops, max_tokens, text_goes_on=free is not None)
        if free is not None or self._picker is not None or params.grammar:
            self._obtain_picker(params)
        n_prompt = len(kept)
        limit = min(self._decoder.room - n_prompt, max_tokens or self._decoder.room)
        steps: list[Step] = []
        walk = _Walk("length", None)
        finish_reason = "length"
        start = time.perf_counter()
        try:
            if n_prompt < len(before):
                self._decoder.replace(kept)
            self._decoder.doubt()
            self._decoder.restart_count()
            output.begin(self._cut_character(), b"" if cursor is None else cursor.trie.healed)
            self._keep_snapshot(output)
            if span is not None and cursor is not None:
                walk = self._walk(span, cursor, steps, output, limit, skip, text_goes_on=free is not None)
                finish_reason = walk.reason
            if free is not None and (cursor is None or walk.reason == "span"):
                finish_reason = self._write(free, output, limit)
        except _CancelledError:
            finish_reason = "cancelled"
        finally:
            if n_prompt < len(before):
                self._undo_half_healing(before, n_prompt, output)
        if finish_reason == "stop":
            n_kept = self._take_back_stop(before, n_prompt, output)
            if n_kept < len(steps):
                walk, steps = _Walk("stop", None), steps[:n_kept]
        # Without a decode there is nothing to take the prompt's time from.
        seconds = time.perf_counter() - (self._decoder.time_of_first_row or start)
        choice = None
        if span is not None and cursor is not None:
            choice = span.binding.make_choice(cursor, steps, complete=walk.reason == "span", end=walk.end)
        usage = Usage.of(
            prompt_tokens=n_prompt,
            n_tokens=output.n_taken,
            asked_to_stop=output.asked_to_stop,
            n_decodes=self._decoder.n_decodes,
            n_prefill=self._decoder.n_prefill,
            skip_ratios=output.skip_ratios,
            seconds=seconds,
        )
        output.give(done=True)
        return Generation(output.text, tuple(output.tokens), finish_reason, choice, usage)

    def generate_with_usage(
        self,
        max_tokens: int | None = None,
        *,
        token_tree_payload: ChoicesLike | TokenTrie | TokenTreePayload | str | bytes | None = None,
        token_tree_mode: str | int = "greedy",  # noqa: S107 - a mode, no password
        token_tree_path: str | None = None,
        **settings: Any,
    ) -> Generation:
        """Set a trie, generate, and clear it, also where generating fails.

        Args:
            max_tokens: see ``generate``.
            token_tree_payload: see ``set_token_trie``; ``None`` generates without a trie.
            token_tree_mode: see ``set_token_trie``.
            token_tree_path: see ``set_token_trie``.
            settings: of ``generate``.

        Raises:
            as ``set_token_trie`` and ``generate``.
        """
        token_tree_payload = None if token_tree_payload is None else _as_choices(token_tree_payload)
        with self._exclusive(prefilled=True):
            self._span = (
                None
                if token_tree_payload is None
                else self._make_span(token_tree_payload, token_tree_mode, token_tree_path)
            )
            try:
                return self.generate(max_tokens, **settings)
            finally:
                self._span = None

    @contextlib.contextmanager
    def hold(self) -> Iterator[HeldSession]:
        """Keep everybody else out, callbacks too, while spans are written one after the other.

        A grammar that the session was generating under ends here.

        Raises:
            EngineError: not prefilled, closed, or generating.
        """
        with self._exclusive(prefilled=True):
            self._drop_picker()
            self._is_cancelled = False
            held = HeldSession(self)
            try:
                self._is_held = True
                yield held
            finally:
                self._is_held = False
                held._is_over = True
                self._is_cancelled = False

    def cancel(self) -> None:
        """End the running generation before its next decode; from any thread. Otherwise nothing happens."""
        if self._is_busy:
            self._is_cancelled = True

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the samplers; the ``Llama`` stays open. A second call does nothing.

        Raises:
            EngineError: a generation is running; cancel it first.
        """
        if self._is_closed:
            return
        with self._alone("a generation is running; cancel it before the session is closed"):
            self._drop_picker()
            self._span = None
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """State and size."""
        state = "closed" if self._is_closed else "generating" if self._is_busy else "open"
        return f"StreamSession({state}, {len(self._decoder.tokens)} tokens, token_trie={self.has_token_trie})"

    def __reduce__(self) -> str:
        """Samplers and context are the model's own: there is no second one of them."""
        raise TypeError("a StreamSession cannot be copied or pickled; open another on the Llama")

    # --- tokens and rows -----------------------------------------------------------------------

    def _push(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text; every sampler takes them in, or none takes any."""
        tokens = tuple(tokens)
        if self._picker is not None and len(tokens) > 1:
            self._picker.require(tokens)
        for token in tokens:
            if self._picker is not None:
                self._picker.accept(token)
            self._decoder.push([token])
            self._generated.append(token)

    def _row(self) -> npt.NDArray[np.float32]:
        """The logits after the text."""
        # What is settled is told before the next decode makes it wait.
        if self._output is not None and self._output.give():
            self._decoder.doubt()  # a callback may have used the Llama
        self._raise_if_cancelled()
        return self._decoder.row()

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise _CancelledError

    # --- parts of generate ---------------------------------------------------------------------

    def _prepare_span(
        self, span: Span, draws: Sampling, stops: Sequence[str], max_tokens: int | None, *, text_goes_on: bool
    ) -> tuple[TrieCursor, list[int]]:
        """A cursor at the root of the trie behind the text, and the tokens that healing leaves of the text."""
        for stop in stops:
            text = span.binding.find_in_texts(stop)
            if text is not None:
                raise ValueError(f"the stop text {stop!r} is inside the choice {text!r:.80} and would cut it")
        if self._generated:
            trie, kept = span.binding.trie_behind(self._decoder.tokens), list(self._decoder.tokens)
        else:
            trie, kept = span.binding.prepare(self._decoder.tokens)
        cursor = self._make_cursor(span, trie, draws, text_goes_on=text_goes_on)
        n_more = trie.depth if max_tokens is None else min(trie.depth, max_tokens)
        if len(kept) + n_more > self._decoder.room:
            self._decoder.require_room(n_more, "a choice")
        return cursor, kept

    def _walk(
        self,
        span: Span,
        cursor: TrieCursor,
        steps: list[Step],
        output: _Output,
        limit: int,
        skip: str,
        *,
        text_goes_on: bool,
    ) -> _Walk:
        """Take the trie's span."""
        trie, node = cursor.trie, cursor.node
        finish = self._finish if skip == "canonical" and trie.sole_leaf is not None else None
        moves = walk_span(
            _Rows(self), cursor, samples=span.samples, max_tokens=limit, finish=finish, text_goes_on=text_goes_on
        )
        for move in moves:
            for step in move.steps:
                output.skip_ratios.append(1.0 - self._count_options(trie, node) / self._tokenizer.n_vocab)
                node = trie.step(node, step.token)
            tokens = [step.token for step in move.steps]
            steps.extend(move.steps)
            if output.take(tokens, [self._tokenizer.detokenize((token,)) for token in tokens]):
                return _Walk("stop", None)
            if move.end is not None:
                output.skip_ratios.append(1.0 - self._count_options(trie, node) / self._tokenizer.n_vocab)
                # Where free text follows, the same look at the logits is its first.
                output.asked_to_stop = not text_goes_on
                return _Walk("span", None if text_goes_on else move.end)
        return _Walk("span" if cursor.must_end or not cursor.is_active else "length", None)

    def _count_options(self, trie: TokenTrie, node: int) -> int:
        return len(trie.children(node)) + (len(self._tokenizer.eog_ids) if trie.is_terminal(node) else 0)

    def _finish(self, cursor: TrieCursor) -> Sequence[int]:
        return finish_leaf(self._tokenizer, cursor.trie, cursor.node, self._decoder.tokens)

    def _write(self, free: FreeText, output: _Output, limit: int) -> str:
        """Free text; why it ended."""
        picker = self._picker
        if picker is None:
            raise TrieSamplerError("free text needs samplers")
        ends = self._tokenizer.eog_ids
        while len(output.tokens) < limit:
            row = self._row()
            self._keep_snapshot(output)
            if free.ends_where_foreign and not picker.allows(int(np.argmax(row))) and picker.allows(ends[0]):
                output.asked_to_stop = True
                return "span"
            token = picker.pick(row, free.allowed)
            if self._tokenizer.is_eog(token):
                output.asked_to_stop = True
                return "eog"
            self._push([token])
            if output.take([token], [self._tokenizer.detokenize((token,))]):
                return "stop"
            if free.closers is not None and free.closers[token]:
                return "span"
        return "span" if free.ends_where_foreign and picker.allows(ends[0]) else "length"

    # --- taking back ---------------------------------------------------------------------------

    def _undo_half_healing(self, before: list[int], n_prompt: int, output: _Output) -> None:
        """Put the prompt's end back where what was written instead is not all of it."""
        written = self._tokenizer.detokenize(self._decoder.tokens[n_prompt:])
        if len(written) >= len(self._tokenizer.detokenize(before[n_prompt:])):
            return
        self._drop_picker()
        self._generated = []
        self._decoder.replace(before)
        output.tokens, output.text = [], ""

    def _take_back_stop(self, before: list[int], n_prompt: int, output: _Output) -> int:
        """Leave in the context what is left of the text; how many tokens stay as they were picked.

        A stop text may begin inside of a token; what it has before that is written in other tokens.
        """
        n_kept, n_characters = output.count_whole()
        base = [*before[:n_prompt], *output.tokens[:n_kept]] if n_kept else before
        rest = output.text[n_characters:].encode()
        # Without a token left the prompt is as it was, with the end that healing took.
        tokens = list(continue_text(self._tokenizer, base, rest)) if rest else []
        n_before = len(self._generated) - len(output.tokens)
        output.tokens = [*output.tokens[:n_kept], *tokens]
        self._generated[n_before:] = output.tokens
        self._decoder.replace([*base, *tokens])
        if self._picker is not None:
            self._go_back(n_kept, output.tokens)
        return n_kept

    def _keep_snapshot(self, output: _Output) -> None:
        """Keep the samplers as they are, where a stop text may turn out to begin here."""
        if not output.stops or self._picker is None:
            return
        # Of text that was given out nothing is taken back.
        while len(self._snapshots) > 1 and self._snapshots[1].n_characters <= output.n_given:
            self._snapshots.pop(0).picker.close()
        self._snapshots.append(_Snapshot(len(output.tokens), len(output.text), self._picker.clone()))

    def _go_back(self, n_kept: int, tokens: Sequence[int]) -> None:
        """Make the samplers what they were after ``n_kept`` tokens of the output, and take in ``tokens`` from there on.

        A grammar that names tokens by their ids may not take them in another spelling: it ends then.
        """
        self._drop_picker()
        while self._snapshots:
            snapshot = self._snapshots.pop()
            if snapshot.n_tokens > n_kept:
                snapshot.picker.close()
                continue
            self._picker = snapshot.picker
            break
        if self._picker is None:
            return
        try:
            for token in tokens[snapshot.n_tokens :]:
                self._picker.accept(token)
        except EngineError:
            self._drop_picker()

    def _drop_snapshots(self) -> None:
        while self._snapshots:
            self._snapshots.pop().picker.close()

    def _cut_character(self) -> bytes:
        """The bytes at the text's end that only begin a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        decoder.decode(self._tokenizer.detokenize(self._generated[-_LONGEST_CHARACTER:]))
        return decoder.getstate()[0]

    # --- samplers ------------------------------------------------------------------------------

    def _obtain_picker(self, params: SamplingParams) -> Picker:
        """Samplers for these parameters, in the state that the session's tokens leave them in."""
        old = self._picker
        if old is not None and old.params == params:
            return old
        same_grammar = old is not None and _grammar_of(old.params) == _grammar_of(params)
        start = self._grammar_start if same_grammar else len(self._generated)
        new = self._replayed(params, start)
        self._drop_picker()
        self._picker, self._grammar_start = new, start
        return new

    def _replayed(self, params: SamplingParams, grammar_start: int) -> Picker:
        """Samplers that have taken in the session's tokens, the grammar from its start on."""
        new = Picker(self._llm, params)
        try:
            new.replay(self._generated[:grammar_start])
            for token in self._generated[grammar_start:]:
                new.accept(token)
        except BaseException:
            new.close()
            raise
        return new

    def _drop_picker(self) -> None:
        if self._picker is not None:
            self._picker.close()
            self._picker = None

    # --- states --------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._output is not None or self._is_held

    @contextlib.contextmanager
    def _alone(self, otherwise: str) -> Iterator[None]:
        """Let one thing happen at a time; a second thread, or a callback, is refused."""
        if not self._lock.acquire(blocking=False):
            raise EngineError(otherwise)
        try:
            if self._is_busy:
                raise EngineError(otherwise)
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _exclusive(self, *, prefilled: bool = False) -> Iterator[None]:
        with self._alone("the session is generating; cancel it, or wait"):
            if self._is_closed:
                raise EngineError("the session is closed")
            require_open(self._llm)
            if prefilled and not self._prompt:
                raise EngineError("there is no prompt yet; call prefill first")
            yield


class _Rows:
    """A session's text, as ``span.RowSource``."""

    def __init__(self, session: StreamSession) -> None:
        self.push = session._push
        self.row = session._row


class HeldSession:
    """What ``StreamSession.hold`` gives: a session that only the holder writes to."""

    def __init__(self, session: StreamSession) -> None:
        self._session = session
        self._is_over = False

    def _live(self) -> StreamSession:
        if self._is_over:
            raise EngineError("the session is not held any more")
        require_open(self._session._llm)
        return self._session

    @property
    def tokenizer(self) -> Tokenizer:
        """The session's vocabulary.

        Raises:
            TrieSamplerError: the ``Llama`` is closed; so do all methods.
            EngineError: the session is not held any more; so do all methods.
        """
        return self._live()._tokenizer

    def bind(self, source: Any, *, path: str | None = None, spelling: Spelling | None = None) -> Binding:
        """Bind what is chosen from to the session's vocabulary; nothing is warned about."""
        return Binding.of(self.tokenizer, source, path=path, spelling=spelling, is_quiet=True)

    def splice(self, text: str) -> tuple[int, ...]:
        """See ``StreamSession.splice``."""
        return self._live()._splice(text)

    def require_grammar(self, grammar: str) -> None:
        """Refuse a grammar that does not parse.

        Raises:
            ValueError, EngineError: see ``SamplingParams`` and ``build_sampler_chain``.
        """
        Picker(self._live()._llm, SamplingParams(grammar=grammar)).close()

    def run_span(
        self,
        span: Span,
        *,
        temperature: float,
        top_p: float = 0.95,
        top_k: int = 40,
        seed: int | None = None,
        on_step: Callable[[StreamStep], Any] | None = None,
        on_text_chunk: Callable[[str], Any] | None = None,
    ) -> Generation:
        """``generate`` with a trie that is set for this once."""
        params = _params(temperature, top_p, top_k, _MIN_P, seed, None, (), {})
        draws = Sampling(temperature, top_k, top_p, _MIN_P, seed)
        return self._live()._run(span, None, _Output(on_step, on_text_chunk, ()), params, draws, None)

    def run_free(
        self,
        free: FreeText,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 0.95,
        top_k: int = 40,
        seed: int | None = None,
        grammar: str | None = None,
        on_step: Callable[[StreamStep], Any] | None = None,
        on_text_chunk: Callable[[str], Any] | None = None,
    ) -> Generation:
        """``generate`` of bounded free text."""
        params = _params(temperature, top_p, top_k, _MIN_P, seed, grammar, (), {})
        try:
            return self._live()._run(None, free, _Output(on_step, on_text_chunk, ()), params, Sampling(), max_tokens)
        finally:
            if grammar is not None:
                # It was about this text alone, and would refuse what follows.
                self._session._drop_picker()

    def keep(self, name: str, make: Callable[[Tokenizer], _T]) -> _T:
        """What is made once of the session's vocabulary, and kept with it."""
        return kept_for(self.tokenizer, name, make)


def _as_choices(source: Any) -> Any:
    """Choices, read once: an iterable may be a generator, which runs code of its own."""
    is_payload = isinstance(source, (str, bytes, TokenTrie, TokenTreePayload))
    return source if is_payload else Choices.of(source)


def _params(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    grammar: str | LlamaGrammar | None,
    triggers: tuple[str | int, ...],
    more: dict[str, Any],
) -> SamplingParams:
    of_tries = sorted(_OF_TRIES.intersection(more))
    if of_tries:
        raise TypeError(f"generate() got an unexpected keyword argument {of_tries[0]!r}; see set_token_trie")
    return SamplingParams(
        temp=float(temperature),
        top_p=float(top_p),
        top_k=_plain(top_k),
        min_p=float(min_p),
        grammar=getattr(grammar, "_grammar", grammar),
        grammar_lazy=bool(triggers),
        grammar_triggers=triggers,
        **({} if seed is None else {"seed": _plain(seed)}),
        **more,
    )


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, np.integer) else number


def _grammar_of(params: SamplingParams) -> tuple[Any, ...]:
    return params.grammar, params.grammar_lazy, params.grammar_triggers
