"""Uses that the host makes possible and no constraint survives: each ends in an error, none in free text or a crash."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPT = "Action:"
CHOICES = ["REPLY", "REPLY_THREAD", "IGNORE"]


@pytest.fixture
def constraint(tiny: Llama):
    from trie_sampler import TrieLogitsProcessor

    return TrieLogitsProcessor.from_choices(tiny, CHOICES)


def joined(chunks) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("between", ["zzz", PROMPT, "another, much longer prompt than the first one was:"])
def test_a_free_call_while_a_constrained_stream_is_open(tiny: Llama, constraint, between: str) -> None:
    from trie_sampler import TrieSamplerError

    stream = tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=constraint.max_tokens, stream=True)
    next(stream)
    tiny.create_completion(between, max_tokens=2)
    with pytest.raises(TrieSamplerError, match="two streams"):
        joined(stream)
    tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=constraint.max_tokens)
    assert constraint.result.name in CHOICES


@pytest.mark.parametrize("constrained", [True, False])
def test_another_call_while_a_native_stream_is_open(tiny: Llama, constrained: bool) -> None:
    from trie_sampler import EngineError, native_sampling

    with native_sampling(tiny, CHOICES) as native:
        stream = tiny.create_completion(PROMPT, max_tokens=native.max_tokens, stream=True)
        next(stream)
        if constrained:
            tiny.create_completion("zzz", max_tokens=native.max_tokens)
    tiny.create_completion("zzz", max_tokens=2)
    with pytest.raises(EngineError, match="two streams"):
        joined(stream)


def test_native_blocks_do_not_nest(tiny: Llama) -> None:
    from trie_sampler import EngineError, native_sampling

    with native_sampling(tiny, ["up", "down"]) as outer:
        with pytest.raises(EngineError, match="already"), native_sampling(tiny, ["left", "right"]):
            pass
        text = tiny.create_completion(PROMPT, max_tokens=outer.max_tokens)["choices"][0]["text"]
        assert text.strip() in ("up", "down")
    assert not {"generate", "_create_completion", "_init_sampler"} & vars(tiny).keys()


def test_a_token_loop_of_ones_own(tiny: Llama, constraint) -> None:
    """``eval`` and ``sample`` without ``generate``: the host makes a sampler for each token."""
    for _ in range(2):
        tiny.reset()
        tiny.eval(tiny.tokenize(PROMPT.encode()))
        picks = []
        while not constraint.is_over or not picks:
            picks.append(tiny.sample(logits_processor=constraint, temp=0.0))
            tiny.eval([picks[-1]])
        assert constraint.result.name in CHOICES
        assert constraint.result.tokens == tuple(picks[: len(constraint.result.tokens)])


def test_a_constraint_of_another_llama(tiny: Llama, tiny_bpe: Llama, constraint) -> None:
    from trie_sampler import TrieSamplerError

    for _ in range(2):
        with pytest.raises(TrieSamplerError, match="another Llama"):
            tiny_bpe.create_completion(PROMPT, logits_processor=constraint, max_tokens=8)
        assert "detokenize" not in vars(tiny_bpe)
        tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=constraint.max_tokens)
        assert constraint.result.name in CHOICES


@pytest.mark.parametrize("gbnf", ['root ::= "42"', 'root ::= " "? ("REPLY" | "IGNORE")'])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_beside_the_constraint(tiny: Llama, constraint, gbnf: str, temperature: float) -> None:
    from llama_cpp import LlamaGrammar

    from trie_sampler import TrieSamplerError

    with pytest.raises(TrieSamplerError, match="grammar"):
        tiny.create_completion(
            PROMPT,
            logits_processor=constraint,
            max_tokens=8,
            temperature=temperature,
            grammar=LlamaGrammar.from_string(gbnf, verbose=False),
        )
    tiny.create_completion(PROMPT, logits_processor=constraint, max_tokens=constraint.max_tokens)
    assert constraint.result.name in CHOICES


def test_a_grammar_beside_the_constraint_in_the_hosts_own_loop(tiny: Llama, constraint) -> None:
    """``generate`` never detokenizes: the error comes where it asks for the second token."""
    from llama_cpp import LlamaGrammar

    from trie_sampler import TrieSamplerError

    grammar = LlamaGrammar.from_string('root ::= "424242"', verbose=False)
    with pytest.raises(TrieSamplerError, match="grammar"):
        list(tiny.generate(tiny.tokenize(PROMPT.encode()), temp=0.0, logits_processor=constraint, grammar=grammar))
    constraint.release_host()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_constraint_is_not_copied(constraint, copied) -> None:
    with pytest.raises(TypeError, match="belongs to its Llama"):
        copied(constraint)


def test_finalizers_have_nothing_left_to_compile(tiny: Llama) -> None:
    """A handle may be collected while LLVM loads a kernel, and LLVM must not be entered twice."""
    from trie_sampler import kernels, native_sampling

    with native_sampling(tiny, CHOICES):
        tiny.create_completion(PROMPT, max_tokens=4)
    assert kernels.release_record.signatures
    assert kernels.fetch_reference.signatures


def test_fact_a_row_view_belongs_to_the_hosts_buffer(tiny: Llama, tiny_model_path: Path) -> None:
    """What ``goes_on_with`` compares is the host's own record of what it evaluated."""
    tiny.eval([1, 300, 301])
    assert np.shares_memory(tiny._input_ids, tiny.input_ids)
    assert tiny._input_ids.tolist() == [1, 300, 301]
    assert tiny_model_path.exists()
