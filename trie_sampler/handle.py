"""The reference's engine ABI, both ways: ``run_generation`` on a foreign handle, and the C names on our sessions."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from trie_sampler.cursor import as_mode
from trie_sampler.errors import EngineError, warn
from trie_sampler.payload import TokenTreePayload
from trie_sampler.session import StreamSession, StreamStep

_logger = logging.getLogger(__name__)

_MUST_HAVE = ("eliza_inference_llm_stream_prefill", "eliza_inference_llm_stream_generate")

OnToken = Callable[[int, str | bytes, bool], None]


class StreamingAbi(Protocol):
    """What an engine must have. It may also have the two methods of ``TokenTrieAbi``."""

    def eliza_inference_llm_stream_prefill(self, handle: Any, prompt_tokens: Sequence[int], slot_id: int) -> int:
        """Evaluate a prompt; a negative code is an error."""

    def eliza_inference_llm_stream_generate(
        self, handle: Any, max_tokens: int, temperature: float, top_p: float, on_token: OnToken
    ) -> int:
        """Generate, calling ``on_token(token_id, token_text, is_done)``; a code other than 0 is an error."""


class TokenTrieAbi(StreamingAbi, Protocol):
    """An engine with a token trie. One that lacks one of the two methods counts as having neither."""

    def eliza_inference_set_token_trie(self, handle: Any, payload_json: str, mode: int) -> None:
        """Constrain the next ``generate``; mode 0 is greedy, 1 sampled."""

    def eliza_inference_clear_token_trie(self, handle: Any) -> None:
        """Go back to the grammar, or to free text."""


@dataclass(frozen=True)
class ForeignResult:
    """What a foreign engine generated.

    Attributes:
        text: whole characters.
        tokens: ids in the order they came, without those below 0, which stand for none.
        seconds: time in the engine's ``generate``, callbacks included.
        tokens_per_second: ``len(tokens) / seconds``; 0 where no time passed.
    """

    text: str
    tokens: tuple[int, ...]
    seconds: float
    tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {**vars(self), "tokens": list(self.tokens)}


def run_generation(
    abi: StreamingAbi,
    handle: Any,
    *,
    prompt_tokens: Iterable[int],
    max_tokens: int,
    slot_id: int = -1,
    temperature: float = 0.8,
    top_p: float = 0.95,
    token_tree_payload: TokenTreePayload | str | bytes | None = None,
    token_tree_mode: str | int = 0,
    grammar: object = None,
    on_step: Callable[[StreamStep], Any] | None = None,
    on_text_chunk: Callable[[str], Any] | None = None,
) -> ForeignResult:
    """``StreamSession.generate_with_usage`` on another engine: prefill, set its trie, generate, clear the trie.

    The trie is cleared however generating ends. An engine without a token trie is left to its grammar, with a
    ``TrieSamplerWarning``. Without a payload a trie that somebody left there is cleared first.

    Args:
        abi: the engine, see ``StreamingAbi``.
        handle: what the engine opened; handed on as it is.
        prompt_tokens: ids of the engine's vocabulary.
        max_tokens: at most so many, 1 or more.
        slot_id: handed on as it is; -1 leaves the choice to the engine.
        temperature: handed on as it is.
        top_p: handed on as it is.
        token_tree_payload: the trie or its JSON. The engine is given compact JSON in the order of the payload, as
            ``JSON.stringify`` writes it; whether its tokens are the model's is for the engine to say.
        token_tree_mode: "greedy", "sampled", or the reference's 0 and 1.
        grammar: anything true says that the handle was opened with a grammar. Nothing else is done with it:
            ``generate`` of the engine takes none.
        on_step: called with each ``StreamStep``, the last of them ``done`` where generating succeeds. When it
            raises and the engine goes on all the same, the rest is dropped, and its exception comes out at the end.
        on_text_chunk: called with each piece of text, never empty.

    Returns:
        ``ForeignResult``. What comes after the engine's ``is_done`` is not in it, nor is a character that stays cut.

    Raises:
        EngineError: prefill or generate failed (``code``); a payload for an engine without a token trie, whose
            handle has no grammar.
        PayloadError: JSON that is no payload. This and what follows is raised before the engine is asked.
        ValueError: another mode; ``max_tokens`` below 1; an id below 0; a number that is not finite.
        TypeError: no engine; a prompt that is not token ids; another argument of another type.
        Exception: what a callback or the engine raised.

    Example:
        >>> result = run_generation(                                          # doctest: +SKIP
        ...     abi, handle, prompt_tokens=[1, 2, 3], max_tokens=10, token_tree_payload=payload
        ... )
        >>> result.text                                                       # doctest: +SKIP
        'PLAY_MUSIC'
    """
    _require_engine(abi)
    prompt = _as_ids(prompt_tokens)
    if operator.index(max_tokens) < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    for name, number in {"temperature": temperature, "top_p": top_p}.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {number!r}")
    stream = _Stream(on_step, on_text_chunk)
    mode = int(as_mode(token_tree_mode) == "sampled")
    payload_json = None if token_tree_payload is None else _write_compact(token_tree_payload)
    if payload_json is not None and not _has_token_trie(abi):
        if not grammar:
            raise EngineError("this engine has no token trie, and its handle no grammar: nothing would constrain it")
        warn("this engine has no token trie; only the grammar of its handle constrains what it writes")
        payload_json = None
    code = _as_code(abi.eliza_inference_llm_stream_prefill(handle, prompt, slot_id), "prefill")
    if code < 0:
        raise EngineError(f"the engine's prefill failed with code {code}", code)
    with _token_trie(abi, handle, payload_json, mode):
        start = time.perf_counter()
        try:
            code = abi.eliza_inference_llm_stream_generate(handle, max_tokens, temperature, top_p, stream.take)
        except BaseException as error:
            # An engine may wrap what our callback raised in an exception of its own.
            if stream.failure is None or stream.failure is error:
                raise
            raise stream.failure from error
        seconds = time.perf_counter() - start
        if stream.failure is not None:
            raise stream.failure
        code = _as_code(code, "generate")
        if code != 0:
            raise EngineError(f"the engine's generate failed with code {code}", code)
        if not stream.is_done:
            stream.take(-1, "", True)
    n_tokens = len(stream.tokens)
    return ForeignResult(stream.text, tuple(stream.tokens), seconds, n_tokens / seconds if seconds > 0 else 0.0)


def _require_engine(abi: Any) -> None:
    if not all(callable(getattr(abi, name, None)) for name in _MUST_HAVE):
        raise TypeError(f"an engine needs {' and '.join(_MUST_HAVE)}, and {type(abi).__name__} has not both")


def _as_ids(prompt_tokens: Iterable[int]) -> list[int]:
    if isinstance(prompt_tokens, (str, bytes)):
        raise TypeError(f"prompt_tokens must be token ids, got {type(prompt_tokens).__name__}")
    prompt = [operator.index(token) for token in prompt_tokens]
    if any(token < 0 for token in prompt):
        raise ValueError(f"prompt_tokens must be ids >= 0, got {min(prompt)}")
    return prompt


def _as_code(code: Any, what: str) -> int:
    try:
        return operator.index(code)
    except TypeError:
        raise EngineError(f"the engine's {what} gave {code!r} instead of a code") from None


def _write_compact(payload: TokenTreePayload | str | bytes) -> str:
    if not isinstance(payload, TokenTreePayload):
        payload = TokenTreePayload.from_json(payload)
    return payload.to_json(canonical=False)


def _has_token_trie(abi: StreamingAbi) -> TypeGuard[TokenTrieAbi]:
    names = ("eliza_inference_set_token_trie", "eliza_inference_clear_token_trie")
    return all(callable(getattr(abi, name, None)) for name in names)


@contextlib.contextmanager
def _token_trie(abi: StreamingAbi, handle: Any, payload_json: str | None, mode: int) -> Iterator[None]:
    """The engine's trie inside the block, or none; none behind it."""
    if not _has_token_trie(abi):
        yield
    elif payload_json is None:
        abi.eliza_inference_clear_token_trie(handle)
        yield
    else:
        try:
            # Inside: what an engine keeps of a payload that it refuses is not ours to know.
            abi.eliza_inference_set_token_trie(handle, payload_json, mode)
            yield
        except BaseException:
            try:
                abi.eliza_inference_clear_token_trie(handle)
            except Exception:
                # What went wrong first is what the caller has to know.
                _logger.exception("the engine's trie could not be cleared after an error")
            raise
        abi.eliza_inference_clear_token_trie(handle)


class _Stream:
    """What the engine has said so far; ``take`` is its ``on_token``."""

    def __init__(self, on_step: Callable[[StreamStep], Any] | None, on_text_chunk: Callable[[str], Any] | None) -> None:
        for name, callback in {"on_step": on_step, "on_text_chunk": on_text_chunk}.items():
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} must be callable, got {type(callback).__name__}")
        self._on_step = on_step
        self._on_text_chunk = on_text_chunk
        # A cut character is left out, as in a session.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
        self._utf16 = codecs.getincrementaldecoder("utf-16-le")("ignore")
        self.text = ""
        self.tokens: list[int] = []
        self.is_done = False
        self.failure: BaseException | None = None

    def take(self, token_id: int, token_text: str | bytes, is_done: bool) -> None:  # noqa: FBT001 - as engines call it
        if self.is_done or self.failure is not None:
            return
        try:
            self._take(token_id, token_text, is_done=bool(is_done))
        except BaseException as error:
            # Raised so that an engine in Python stops; kept because one behind ctypes never hears of it.
            self.failure = error
            raise

    def _take(self, token_id: int, token_text: str | bytes, *, is_done: bool) -> None:
        tokens = () if token_id < 0 else (operator.index(token_id),)
        chunk = self._decode(token_text, final=is_done)
        self.tokens.extend(tokens)
        self.text += chunk
        self.is_done = is_done
        if self._on_text_chunk is not None and chunk:
            self._on_text_chunk(chunk)
        if self._on_step is not None and (tokens or chunk or is_done):
            self._on_step(StreamStep(tokens, chunk, is_done))

    def _decode(self, piece: str | bytes, *, final: bool) -> str:
        if isinstance(piece, str):
            # Strings out of JavaScript may be cut between two surrogates.
            piece = self._utf16.decode(piece.encode("utf-16-le", "surrogatepass"), final).encode()
        elif not isinstance(piece, bytes):
            raise TypeError(f"token_text must be str or bytes, got {type(piece).__name__}")
        return self._utf8.decode(piece, final)


# --- the C names over our sessions -------------------------------------------------------------


def eliza_inference_set_token_trie(
    session: StreamSession,
    payload_json: bytes | bytearray | memoryview | ctypes.Array[ctypes.c_char],
    payload_len: int,
    mode: int,
) -> None:
    """``session.set_token_trie`` as the reference's C function; on any error the trie set before stays.

    Args:
        session: the handle.
        payload_json: memory that begins with the JSON of a payload, in UTF-8; one descriptor only, as nothing
            here could say which. What lies behind ``payload_len`` is not read, so no terminator is needed.
        payload_len: bytes of the JSON.
        mode: 0 is greedy, 1 sampled.

    Raises:
        TypeError: ``payload_json`` is not bytes, as text or a pointer of unknown size is not.
        ValueError: ``payload_len`` below 0 or past the end; another mode.
        EngineError: the session is closed or generating.
        PayloadError, EmptyTrieError, VocabMismatchError, UnknownPathError: see ``StreamSession.set_token_trie``.

    Example:
        >>> data = payload.to_json().encode()                                 # doctest: +SKIP
        >>> eliza_inference_set_token_trie(session, data, len(data), 0)       # doctest: +SKIP
    """
    if not isinstance(payload_json, (bytes, bytearray, memoryview, ctypes.Array)):
        raise TypeError(f"payload_json must be bytes or a buffer of bytes, got {type(payload_json).__name__}")
    view = memoryview(payload_json)
    if view.itemsize != 1 or view.ndim != 1:
        raise TypeError(f"payload_json must be a flat buffer of bytes, got shape {view.shape} of {view.itemsize} bytes")
    length = operator.index(payload_len)
    if not 0 <= length <= view.nbytes:
        raise ValueError(f"payload_len must be from 0 to the buffer's {view.nbytes} bytes, got {length}")
    session.set_token_trie(view[:length].tobytes(), mode)


def eliza_inference_clear_token_trie(session: StreamSession) -> None:
    """``session.clear_token_trie`` as the reference's C function.

    Raises:
        EngineError: the session is closed or generating.
    """
    session.clear_token_trie()


# --- the reference's mobile binding ------------------------------------------------------------


class MobileBinding:
    """A binding whose methods take one object (``llmStreamPrefill({"stream": ...})``) as a ``StreamingAbi``.

    Each of the two optional methods is here exactly where the binding has its own.

    Args:
        binding: has ``llmStreamPrefill`` and ``llmStreamGenerate``, perhaps ``llmStreamSetTokenTrie`` and
            ``llmStreamClearTokenTrie``; their argument is a dictionary.

    Example:
        >>> run_generation(MobileBinding(binding), stream, prompt_tokens=[1], max_tokens=10)  # doctest: +SKIP
    """

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def eliza_inference_llm_stream_prefill(self, handle: Any, prompt_tokens: Sequence[int], slot_id: int) -> int:
        """See ``StreamingAbi``."""
        code: int = self._binding.llmStreamPrefill({"stream": handle, "promptTokens": prompt_tokens, "slotId": slot_id})
        return code

    def eliza_inference_llm_stream_generate(
        self, handle: Any, max_tokens: int, temperature: float, top_p: float, on_token: OnToken
    ) -> int:
        """See ``StreamingAbi``."""
        code: int = self._binding.llmStreamGenerate(
            {
                "stream": handle,
                "maxTokens": max_tokens,
                "temperature": temperature,
                "topP": top_p,
                "onToken": on_token,
            }
        )
        return code

    # Methods of the class would be there always, and hasattr is how an engine is asked what it can do.
    def __getattr__(self, name: str) -> Callable[..., None]:
        if name == "eliza_inference_set_token_trie":
            set_trie = self._optional(name, "llmStreamSetTokenTrie")
            return lambda handle, payload_json, mode: set_trie(
                {"stream": handle, "triePayloadJson": payload_json, "mode": mode}
            )
        if name == "eliza_inference_clear_token_trie":
            clear_trie = self._optional(name, "llmStreamClearTokenTrie")
            return lambda handle: clear_trie({"stream": handle})
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _optional(self, name: str, theirs: str) -> Callable[[dict[str, Any]], None]:
        method: Callable[[dict[str, Any]], None] | None = getattr(self._binding, theirs, None)
        if not callable(method):
            raise AttributeError(f"the binding has no {theirs}", name=name, obj=self)  # noqa: TRY004 - for hasattr
        return method
