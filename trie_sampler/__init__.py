"""Make a local model answer with exactly one of a known set of strings.

Importing this package imports neither numba nor llama_cpp; a name does when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trie_sampler.cache import TrieCache
    from trie_sampler.choice import Choice
    from trie_sampler.choosing import check_prompt, choose, forget_model, warm_up
    from trie_sampler.cursor import Sampling, TrieCursor
    from trie_sampler.errors import (
        EmptyTrieError,
        EngineError,
        OffTrieError,
        PayloadError,
        TrieFileError,
        TrieSamplerError,
        TrieSamplerWarning,
        UnknownPathError,
        VocabMismatchError,
    )
    from trie_sampler.llama.chain import SamplingParams, build_sampler_chain
    from trie_sampler.llama.native import native_sampling
    from trie_sampler.llama.processor import TrieLogitsProcessor
    from trie_sampler.llama.sampler import llama_sampler_init_token_trie, token_trie_handle
    from trie_sampler.llama.vocab import model_id
    from trie_sampler.payload import PayloadLimits, TokenSequence, TokenTreeDescriptor, TokenTreePayload
    from trie_sampler.ragged import NameBuffers
    from trie_sampler.ranking import rank
    from trie_sampler.session import StreamSession
    from trie_sampler.skeleton import ResponseSkeleton
    from trie_sampler.trie import TokenTrie

__version__ = "0.1.0"

_HOMES = {
    "Choice": "choice",
    "EmptyTrieError": "errors",
    "EngineError": "errors",
    "NameBuffers": "ragged",
    "OffTrieError": "errors",
    "PayloadError": "errors",
    "PayloadLimits": "payload",
    "Sampling": "cursor",
    "ResponseSkeleton": "skeleton",
    "SamplingParams": "llama.chain",
    "StreamSession": "session",
    "TokenSequence": "payload",
    "TokenTreeDescriptor": "payload",
    "TokenTreePayload": "payload",
    "TokenTrie": "trie",
    "TrieCache": "cache",
    "TrieCursor": "cursor",
    "TrieFileError": "errors",
    "TrieLogitsProcessor": "llama.processor",
    "TrieSamplerError": "errors",
    "TrieSamplerWarning": "errors",
    "UnknownPathError": "errors",
    "VocabMismatchError": "errors",
    "build_sampler_chain": "llama.chain",
    "check_prompt": "choosing",
    "choose": "choosing",
    "forget_model": "choosing",
    "llama_sampler_init_token_trie": "llama.sampler",
    "model_id": "llama.vocab",
    "native_sampling": "llama.native",
    "rank": "ranking",
    "token_trie_handle": "llama.sampler",
    "warm_up": "choosing",
}

__all__ = [
    "Choice",
    "EmptyTrieError",
    "EngineError",
    "NameBuffers",
    "OffTrieError",
    "PayloadError",
    "PayloadLimits",
    "ResponseSkeleton",
    "Sampling",
    "SamplingParams",
    "StreamSession",
    "TokenSequence",
    "TokenTreeDescriptor",
    "TokenTreePayload",
    "TokenTrie",
    "TrieCache",
    "TrieCursor",
    "TrieFileError",
    "TrieLogitsProcessor",
    "TrieSamplerError",
    "TrieSamplerWarning",
    "UnknownPathError",
    "VocabMismatchError",
    "build_sampler_chain",
    "check_prompt",
    "choose",
    "forget_model",
    "llama_sampler_init_token_trie",
    "model_id",
    "native_sampling",
    "rank",
    "token_trie_handle",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
