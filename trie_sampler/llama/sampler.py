"""The trie as a native ``llama_sampler``: Numba-compiled callbacks, no Python while sampling.

A sampler's state is a record that C allocates (``layout.NATIVE``). It is owned by the
``llama_sampler`` and by each Python handle, and freed with the last of them. The trie's arrays belong to
Python; they are kept until the last record of an initialisation, clones included, is gone.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import llama_cpp
import numpy as np

from trie_sampler import kernels, layout
from trie_sampler.cursor import TrieCursor, as_mode, check_choice
from trie_sampler.errors import OffTrieError, TrieSamplerError, warn
from trie_sampler.jit import c_callback
from trie_sampler.llama.abi import check_abi
from trie_sampler.llama.vocab import LlamaTokenizer
from trie_sampler.payload import TokenTreePayload
from trie_sampler.trie import TokenTrie

_logger = logging.getLogger(__name__)
_lock = threading.Lock()

_SIGNATURES = {
    "name": "int64(int64)",
    "accept": "void(int64, int32)",
    "apply": "void(int64, int64)",
    "reset": "void(int64)",
    "clone": "int64(int64)",
    "free": "void(int64)",
}
_NAME = b"token-trie"


class _Tables:
    """The two ``llama_sampler_i`` tables, one for all our samplers: ``llama_sampler_copy`` compares them.

    Compiled when the first sampler is made, about 1.5 s without a disk cache.
    """

    def __init__(self) -> None:
        check_abi()
        compiled = {
            f"{kind}_{slot}": c_callback(_SIGNATURES[slot], getattr(kernels, f"{kind}_{slot}"))
            for kind, slots in (("native", _SIGNATURES), ("probe", ("apply", "clone", "free")))
            for slot in slots
        }
        self._compiled = compiled
        # Finalizers call these at any moment, also while LLVM loads another kernel, which must not be entered twice.
        for function in (kernels.fetch_reference, kernels.release_record):
            function.compile("void(int64)")
        self.trie = self._fill({slot: f"native_{slot}" for slot in _SIGNATURES})
        # A probe only looks: its record is stepped and reset by the trie sampler it belongs to.
        self.probe = self._fill(
            {"name": "native_name", "apply": "probe_apply", "clone": "probe_clone", "free": "probe_free"}
        )

    def _fill(self, slots: dict[str, str]) -> Any:
        table = llama_cpp.llama_sampler_i()
        for slot, function in slots.items():
            kind = getattr(llama_cpp, f"llama_sampler_i_{slot}")
            setattr(table, slot, kind(self._compiled[function].address))
        return table


_tables: _Tables | None = None


def _get_tables() -> _Tables:
    global _tables  # noqa: PLW0603 - made once, on first use, for compiling takes a second
    with _lock:
        if _tables is None:
            _tables = _Tables()
        return _tables


_libc: Any = ctypes.CDLL(None) if hasattr(ctypes, "CDLL") and not hasattr(ctypes, "WinDLL") else ctypes.cdll.msvcrt


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


class _Alive:
    """The arrays that the records of one initialisation point into, and how many records live."""

    def __init__(self, cursor: TrieCursor) -> None:
        self.count = np.zeros(1, np.int64)
        self.cursor = cursor
        self.name = ctypes.create_string_buffer(_NAME)


_alive: dict[int, _Alive] = {}


def _keep(alive: _Alive) -> None:
    """Hold the arrays while C points at them; let go of those whose last record is gone."""
    with _lock:
        for address in [address for address, old in _alive.items() if old.count[0] == 0]:
            del _alive[address]
        _alive[alive.count.ctypes.data] = alive


def n_alive() -> int:
    """Native records that exist in this process; for leak tests."""
    with _lock:
        return int(sum(alive.count[0] for alive in _alive.values()))


def new_sampler(
    cursor: TrieCursor, *, keeps_options: bool, on_invalid: str = "drop", with_probe: bool = False
) -> tuple[Any, Any]:
    """A ``llama_sampler`` that goes on from a cursor's place, and its probe or ``None``.

    Args:
        cursor: copied; what happens to it later is of no account.
        keeps_options: leave every option, or under "drop" only the greedy pick.
        on_invalid: "drop" or "mask".
        with_probe: also make the sampler for the head of the chain.

    Both belong to whoever adds them to a chain.
    """
    check_choice("on_invalid", on_invalid, layout.ON_INVALID)
    if cursor.on_end != "release" and not len(cursor.end_tokens):
        raise ValueError(f"on_end={cursor.on_end!r} needs end tokens: without one no candidate could end a leaf")
    tables = _get_tables()
    alive = _Alive(cursor.clone())
    memory = np.zeros(1, layout.NATIVE)
    for name in layout.CURSOR.names or ():
        memory[name] = alive.cursor._record[name]
    memory["references"] = 1 + with_probe
    memory["alive_address"] = alive.count.ctypes.data
    memory["interface_address"] = ctypes.addressof(tables.trie)
    memory["probe_interface_address"] = ctypes.addressof(tables.probe)
    memory["name_address"] = ctypes.addressof(alive.name)
    memory["init_address"] = _address_of(llama_cpp.llama_sampler_init)
    memory["malloc_address"] = _address_of(_libc.malloc)
    memory["free_address"] = _address_of(_libc.free)
    memory["on_invalid"] = layout.ON_INVALID[on_invalid]
    memory["keeps_options"] = keeps_options
    memory["probed"] = layout.NO_TOKEN
    _libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    address = _libc.malloc(layout.NATIVE.itemsize)
    if not address:
        raise MemoryError("no memory for a sampler's record")
    ctypes.memmove(address, memory.ctypes.data, layout.NATIVE.itemsize)
    alive.count[0] = 1
    _keep(alive)
    probe = llama_cpp.llama_sampler_init(ctypes.pointer(tables.probe), address) if with_probe else None
    return llama_cpp.llama_sampler_init(ctypes.pointer(tables.trie), address), probe


def llama_sampler_init_token_trie(
    vocab: Any,
    trie_descriptor_json: TokenTreePayload | str | bytes,
    mode: str | int,
    *,
    path: str | None = None,
    on_invalid: str = "drop",
    on_end: str = "release",
    stop_tokens: Iterable[int] = (),
    max_span_tokens: int = 500,
    strict: bool = False,
) -> Any:
    """Make a native sampler of a payload, for ``llama_cpp.llama_sampler_chain_add``.

    Args:
        vocab: the model's vocabulary, from ``llama_cpp.llama_model_get_vocab``.
        trie_descriptor_json: a ``TokenTreePayload`` or its JSON.
        mode: 0 or "greedy" leaves the likeliest option alone in the candidates, so that any selector
            behind is greedy; 1 or "sampled" leaves all options to the samplers behind.
        path: the descriptor to start in; with several and no path it lets everything through until
            ``token_trie_handle(sampler).activate(path)``.
        on_invalid: "drop" shortens the candidate array to the options, O(K), and all samplers behind
            are O(K); "mask" keeps the array and writes -inf, and then mode 0 needs a greedy selector.
        on_end: see ``TrieCursor``; "release" lets everything through after a leaf.
        stop_tokens: tokens that end a leaf which another continues.
        max_span_tokens: see ``TrieCursor``.
        strict: raise instead of returning ``None``, also where names and tokens do not fit.

    Returns:
        ``llama_sampler *``. The chain that it is added to owns it. ``None``, with the reason logged,
        for a payload that cannot be a constraint. Adding ``None`` to a chain kills the process, so
        check::

            sampler = llama_sampler_init_token_trie(vocab, payload_json, 0)
            if sampler is None:
                ...  # use a grammar, or give up: do not sample unconstrained
            llama_cpp.llama_sampler_chain_add(chain, sampler)

    Raises:
        ValueError: another ``mode``, ``on_invalid`` or ``on_end``; a stop token outside the vocabulary.
        TypeError: a payload that is neither text nor a ``TokenTreePayload``.
        EngineError: the installed llama-cpp-python does not fit.
        PayloadError, EmptyTrieError, UnknownPathError, VocabMismatchError: under ``strict``.

    Cost: the payload's parsing and building; a step costs O(K), independent of the number of leaves.
    """
    keeps_options = as_mode(mode) == "sampled"
    check_choice("on_invalid", on_invalid, layout.ON_INVALID)
    check_choice("on_end", on_end, layout.ON_END)
    tokenizer = LlamaTokenizer.of_vocab(vocab)
    stop_tokens = tuple(stop_tokens)
    if any(token >= tokenizer.n_vocab for token in stop_tokens):
        raise ValueError(f"stop_tokens must be ids below {tokenizer.n_vocab}, got {stop_tokens}")
    eog_ids = () if on_end == "release" else tokenizer.eog_ids
    if on_end != "release" and not (eog_ids or stop_tokens):
        raise ValueError(f"on_end={on_end!r}: this vocabulary names no end-of-generation token; give stop_tokens")
    try:
        # Not cached: a pointer does not say whether it is the vocabulary that it was.
        trie = TokenTrie.from_payload(trie_descriptor_json, path, vocab=tokenizer, strict=strict)
    except TrieSamplerError as error:
        if strict:
            raise
        _logger.error("no token-trie sampler: %s", error)  # noqa: TRY400 - the reason is enough
        return None
    cursor = TrieCursor(
        trie,
        on_end=on_end,
        eog_ids=eog_ids,
        stop_tokens=stop_tokens,
        max_span_tokens=max_span_tokens,
    )
    return new_sampler(cursor, keeps_options=keeps_options, on_invalid=on_invalid)[0]


class TokenTrieHandle:
    """Python's grip on a native sampler, also after its chain was freed.

    What went wrong in a callback surfaces at the next touch of anything but ``status``: a token off
    the trie is an ``OffTrieError`` (logged where the sampler released instead), logits that say nothing
    are a ``TrieSamplerWarning``, the rest is logged.

    Not for use while another thread samples with it.
    """

    def __init__(self, address: int, trie: TokenTrie) -> None:
        self._address = address
        self._trie = trie
        kernels.fetch_reference(address)
        self._finalizer = weakref.finalize(self, kernels.release_record, address)
        self._record = kernels.view_native(address)

    @property
    def status(self) -> int:
        """First trouble since it was last reported, a status code of ``layout``; 0 is none."""
        return int(self._record["trouble"])

    @property
    def is_freed(self) -> bool:
        """Whether llama.cpp has freed the sampler."""
        return bool(self._record["is_freed"])

    @property
    def is_active(self) -> bool:
        """Armed: the next token is constrained."""
        return bool(self._touch()["state"] == layout.ARMED)

    @property
    def is_finished(self) -> bool:
        """A whole leaf was ended; only end tokens may follow."""
        return bool(self._touch()["state"] == layout.FINISHED)

    @property
    def node(self) -> int:
        """The trie's node that it stands at."""
        return int(self._touch()["node"])

    @property
    def leaf_name(self) -> str | None:
        """Name of the leaf that ends where it stands, ``None`` where none does."""
        node = self.node
        return None if node < 0 else self._trie.leaf_name(node)

    @property
    def position_in_span(self) -> int:
        """Tokens of the trie accepted since activation."""
        return int(self._touch()["position_in_span"])

    @property
    def counters(self) -> dict[str, int]:
        """``applied`` calls, ``candidates`` that entered them, ``valid`` ones among them, and ``accepted`` tokens."""
        record = self._touch()
        names = {"applied": "n_applied", "candidates": "n_candidates", "valid": "n_valid", "accepted": "n_accepted"}
        return {name: int(record[field]) for name, field in names.items()}

    def activate(self, path: str | None = None) -> None:
        """Constrain from the root of a descriptor on; ``None`` where there is only one.

        Raises:
            UnknownPathError: no descriptor of that path.
        """
        self._touch()
        kernels.arm_cursor(self._address, self._trie.root if path is None else self._trie.root_of(path))

    def deactivate(self) -> None:
        """Let everything through. Needed before a sampler that forces tokens of its own, as a reasoning budget does."""
        self._touch()
        kernels.arm_cursor(self._address, layout.NO_NODE)

    def _touch(self) -> Any:
        if self.is_freed:
            raise TrieSamplerError("this sampler was freed with its chain")
        trouble = self.status
        self._record["trouble"] = layout.OK
        if trouble == layout.OFF_TRIE and self._record["on_end"] != layout.ON_END_RELEASE:
            raise OffTrieError("a token was accepted that the trie does not allow there; nothing moved")
        if trouble == layout.OFF_TRIE:
            _logger.warning("a token was accepted that the trie does not allow there; released")
        elif trouble == layout.ALL_INVALID:
            warn("every valid logit was NaN or -inf; the lowest valid id was left")
        elif trouble != layout.OK:
            _logger.warning("%s", _TROUBLES[trouble])
        return self._record


_TROUBLES = {
    layout.SPAN_LIMIT: "a span outlasted max_span_tokens without being cleared; it was closed",
    layout.NO_CANDIDATE: "samplers in front removed every valid token; the best valid one was put back",
}


def token_trie_handle(sampler: Any) -> TokenTrieHandle:
    """Take hold of a sampler that ``llama_sampler_init_token_trie`` made.

    Args:
        sampler: the pointer, or one from ``llama_sampler_chain_get``; it must not be freed.

    Raises:
        TypeError: another sampler.
    """
    table = ctypes.addressof(sampler.contents.iface.contents) if sampler and sampler.contents.iface else 0
    if _tables is None or table != ctypes.addressof(_tables.trie):
        raise TypeError("not a token-trie sampler")
    address = int(sampler.contents.ctx)
    alive_address = int(kernels.view_native(address)["alive_address"])
    with _lock:
        trie = _alive[alive_address].cursor.trie
    return TokenTrieHandle(address, trie)
