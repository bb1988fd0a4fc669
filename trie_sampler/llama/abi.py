"""Checks that the installed llama-cpp-python lays memory out as the compiled callbacks expect."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from trie_sampler.errors import EngineError

_SLOTS = ("name", "accept", "apply", "reset", "clone", "free")

# structure -> field -> byte offset, and the size of the whole; what kernels.py reads and writes.
_EXPECTED: dict[str, tuple[dict[str, int], int]] = {
    "llama_token_data": ({"id": 0, "logit": 4, "p": 8}, 12),
    "llama_token_data_array": ({"data": 0, "size": 8, "selected": 16, "sorted": 24}, 32),
    "llama_sampler": ({"iface": 0, "ctx": 8}, 16),
}


def check_abi(host: Any = llama_cpp) -> None:
    """Compare the structures that compiled code touches with the installed ones.

    Raises:
        EngineError: a field is missing or elsewhere; the message names the version.
    """
    problems = []
    if ctypes.sizeof(ctypes.c_void_p) != 8:  # noqa: PLR2004 - bytes of a 64-bit pointer
        problems.append("pointers are not 64 bits wide")
    for name, (offsets, size) in _EXPECTED.items():
        structure = getattr(host, name, None)
        if structure is None:
            problems.append(f"{name} is missing")
            continue
        for field, offset in offsets.items():
            actual = getattr(getattr(structure, field, None), "offset", None)
            if actual != offset:
                problems.append(f"{name}.{field} is at {actual}, not {offset}")
        if ctypes.sizeof(structure) != size:
            problems.append(f"{name} has {ctypes.sizeof(structure)} bytes, not {size}")
    table = getattr(host, "llama_sampler_i", None)
    problems += [f"llama_sampler_i.{slot} is missing" for slot in _SLOTS if not hasattr(table, slot)]
    if problems:
        version = getattr(host, "__version__", "unknown")
        raise EngineError(
            f"llama-cpp-python {version} does not fit the native sampler ({'; '.join(problems)}); "
            "TrieLogitsProcessor works without it"
        )
