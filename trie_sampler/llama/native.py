"""``native_sampling``: the native sampler in the chain that ``Llama`` builds for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp
from llama_cpp import Llama

from trie_sampler.binding import Binding
from trie_sampler.choices import ChoicesLike, take_spelling
from trie_sampler.cursor import TrieCursor, as_mode
from trie_sampler.errors import EngineError, TrieSamplerError
from trie_sampler.llama.sampler import TokenTrieHandle, new_sampler, token_trie_handle
from trie_sampler.llama.vocab import as_tokenizer, require_engine
from trie_sampler.payload import TokenTreePayload
from trie_sampler.trie import TokenTrie

_HOOKED = ("_create_completion", "generate")
"""What every door of ``Llama`` goes through, streamed or not."""


class NativeSampling:
    """What ``native_sampling`` yields.

    Attributes:
        max_tokens: enough for the longest choice and its end token: pass it to the host.
        handle: grip on the sampler of the latest generation; ``None`` before one.
    """

    def __init__(self, binding: Binding, make_cursor: Callable[[TokenTrie], TrieCursor], keeps_options: bool) -> None:  # noqa: FBT001
        self._binding = binding
        self._make_cursor = make_cursor
        self._keeps_options = keeps_options
        self.handle: TokenTrieHandle | None = None

    @property
    def max_tokens(self) -> int:
        """Enough for the longest choice and its end token."""
        return self._binding.max_tokens

    def bind(self, prompt_ids: list[int]) -> TrieCursor:
        """A cursor at the root of the trie behind a prompt."""
        return self._make_cursor(self._binding.trie_behind(prompt_ids))

    def insert(self, host_sampler: Any, cursor: TrieCursor) -> None:
        """Put a sampler behind the host's custom samplers, which index the candidates by id, and before the rest."""
        chain = host_sampler.sampler
        customs = [index for index, _ in host_sampler.custom_samplers]
        place = max(customs, default=-1) + 1
        sampler, _ = new_sampler(cursor, keeps_options=self._keeps_options)
        behind = [
            llama_cpp.llama_sampler_chain_remove(chain, place)
            for _ in range(llama_cpp.llama_sampler_chain_n(chain) - place)
        ]
        for item in (sampler, *behind):
            llama_cpp.llama_sampler_chain_add(chain, item)
        self.handle = token_trie_handle(sampler)


@contextmanager
def native_sampling(
    llm: Llama,
    source: ChoicesLike | TokenTrie | TokenTreePayload,
    mode: str | int = "greedy",
    *,
    path: str | None = None,
    on_end: str = "mass",
    max_span_tokens: int = 500,
    strict: bool = False,
    **spelling: Any,
) -> Iterator[NativeSampling]:
    """Constrain what ``create_completion``, ``create_chat_completion`` and ``generate`` give within the block.

    The sampler goes into the chain that the host builds, after its custom samplers (``logit_bias``,
    logits processors) and before its penalties. A completion is bound when it is called: a stream
    that is consumed after the block is constrained too, one made before it is not.

    Args:
        llm: the model.
        source: choices, a ``TokenTrie`` or a ``TokenTreePayload``.
        mode: "greedy" leaves one token whatever the host's temperature; "sampled" leaves the options
            to the host's filters, temperature and draw.
        path: descriptor to start in, where there are several.
        on_end: see ``TrieCursor``; under "release" free text follows the choice.
        max_span_tokens: see ``TrieCursor``.
        strict: see ``TokenTrie.check_vocab``.
        spelling: ``lead``, ``tokenization``, ``json_value``, ``case_fold``, ``special`` of
            ``TokenTrie.from_choices``; ``heal`` is refused, for the prompt is the host's.

    Yields:
        ``NativeSampling``: ``max_tokens`` for the host, ``handle`` on the latest sampler.

    Raises:
        EngineError: the installed ``Llama`` builds its chain otherwise, or is in such a block already;
            or, from a completion inside the block, a call with a grammar (llama.cpp kills the process
            where a trie and a grammar disagree), from another thread, or of an older stream.
        EmptyTrieError, VocabMismatchError, UnknownPathError, ValueError, TypeError: as elsewhere.

    Example:
        >>> with native_sampling(llm, ["yes", "no"]) as native:                # doctest: +SKIP
        ...     llm.create_completion("Is fire hot? Answer:", max_tokens=native.max_tokens)
    """
    require_engine(llm)
    if getattr(llm.generate, "is_native_sampling", False):
        raise EngineError("this Llama is inside a native_sampling block already; leave that one first")
    missing = [name for name in (*_HOOKED, "_init_sampler") if not callable(getattr(llm, name, None))]
    if missing:
        raise EngineError(f"llama-cpp-python {llama_cpp.__version__}: Llama has no {', '.join(missing)}")
    tokenizer = as_tokenizer(llm)
    if on_end != "release" and not tokenizer.eog_ids:
        raise TrieSamplerError("this model names no end-of-generation token, so a choice cannot end")
    wanted = take_spelling(spelling, "native_sampling")
    if wanted.heal:
        raise ValueError("heal=True needs the prompt: use choose, or prepare of a TrieLogitsProcessor")
    binding = Binding.of(tokenizer, source, path=path, strict=strict, spelling=wanted)

    def make_cursor(trie: TokenTrie) -> TrieCursor:
        eog_ids = tokenizer.eog_ids
        return TrieCursor(trie, path=path, on_end=on_end, eog_ids=eog_ids, max_span_tokens=max_span_tokens)

    make_cursor(binding.trie or TokenTrie.from_ragged([0], [0, 1]))  # refuses bad settings now
    native = NativeSampling(binding, make_cursor, keeps_options=as_mode(mode) == "sampled")
    thread = threading.get_ident()

    def refuse_other_threads() -> None:
        if threading.get_ident() != thread:
            raise EngineError("this Llama is constrained by native_sampling in another thread")

    original_generate, original_completion = llm.generate, llm._create_completion

    def generate(tokens: Any, *arguments: Any, **keywords: Any) -> Any:
        refuse_other_threads()
        prompt_ids = list(tokens)
        host = original_generate(prompt_ids, *arguments, **keywords)
        return _run_with_chain(llm, host, native, prompt_ids)

    def create_completion(*arguments: Any, **keywords: Any) -> Any:
        refuse_other_threads()
        return _run_with(llm, original_completion(*arguments, **keywords), "generate", generate)

    generate.is_native_sampling = True  # type: ignore[attr-defined]
    with _replaced(llm, "generate", generate), _replaced(llm, "_create_completion", create_completion):
        yield native


@contextmanager
def _replaced(llm: Llama, name: str, function: Any) -> Iterator[None]:
    """An attribute of the instance for a while; what was there before comes back."""
    attributes = vars(llm)
    before = attributes.get(name)
    attributes[name] = function
    try:
        yield
    finally:
        if before is None:
            attributes.pop(name, None)
        else:
            attributes[name] = before


def _run_with(llm: Llama, host: Any, name: str, function: Any) -> Generator[Any, Any, Any]:
    """Run a host generator whose first step sees a replaced attribute: there it builds its chain."""
    try:
        with _replaced(llm, name, function):
            value = next(host)
        mine = llm._sampler
        while True:
            sent = yield value
            # The host would go on with the sampler of whoever has generated since.
            if llm._sampler is not mine:
                raise EngineError("two streams are open at once on this Llama; the older one cannot go on")
            value = host.send(sent)
    except StopIteration as stop:
        return stop.value
    finally:
        host.close()


def _run_with_chain(llm: Llama, host: Any, native: NativeSampling, prompt_ids: list[int]) -> Any:
    original: Callable[..., Any] = llm._init_sampler

    def init_sampler(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("grammar") is not None:
            raise EngineError(
                "a grammar beside an active trie is refused: llama.cpp ends the process where they disagree"
            )
        cursor = native.bind(prompt_ids)
        host_sampler = original(*arguments, **keywords)
        native.insert(host_sampler, cursor)
        return host_sampler

    return _run_with(llm, host, "_init_sampler", init_sampler)
