"""All spellings of the choices against llama.cpp's own grammar and against brute force, state by state.

    choices ["5", "50"]        written      allowed next (pieces)
                               ""           "5", "50"
                               "5"          "0", ends of generation
                               "50"         ends of generation

Three answers to one question: the library's automaton, the grammar's mask, and every piece held against the bytes of
every choice. Then whole generations: at temperature 0 both masks lead to the same token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from actions import ACTIONS, REQUESTS
from grammar import GrammarSampler, Ids, Vocabulary, brute_force_valid_ids, escaped, gbnf, is_whole_utf8, spells_utf8
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import choice_texts

from trie_sampler import TokenTrie, TrieLogitsProcessor

if TYPE_CHECKING:
    from llama_cpp import Llama

HARD_SETS = [
    ["50", "5"],
    ["REPLY", "REPLY_THREAD"],
    ["na\u00efve", "na\u00eff"],
    ["\U0001f44d", "\U0001f44e", "\U0001f44d\U0001f3fd"],
    ['say "hi"', 'say \\"'],
    ["line\nbreak", "line"],
    ["\u6771\u4eac", "\u6771\u4eac\u90fd"],
    [" lead", "lead"],
    ["a\tb"],
    ["a", "a\u00e9"],  # an end in front of a character that can be cut
    ["\u6771", "\U0001f44d"],  # where the grammar alone goes on into overlong UTF-8
    ["<s>", "<|im_start|>", "<start_of_turn>"],  # control tokens' names, which the grammar takes from them too
]  # fmt: skip

# With examples the models vary; one of them begins another action, so that an end and a child compete.
SHOWN = ("REPLY", "STOP_TIMER", "GET_NEWS", "NOTE")
HEAD = "".join(f"Request: {REQUESTS[action][1]}\nAction: {action}\n" for action in SHOWN)
TWENTY_REQUESTS = tuple(request for requests in REQUESTS.values() for request in requests)[::30]


@pytest.fixture(scope="session")
def vocabulary(llm: Llama) -> Vocabulary:
    return Vocabulary.of(llm)


# --- one state --------------------------------------------------------------------------------------------------------


def assert_same_ids(vocabulary: Vocabulary, comp: Ids, ref: Ids, where: str) -> None:
    more = [(int(token), vocabulary.piece_of[token]) for token in np.setdiff1d(comp, ref)]
    less = [(int(token), vocabulary.piece_of[token]) for token in np.setdiff1d(ref, comp)]
    assert not more, f"{where}: allows {more}"
    assert not less, f"{where}: leaves out {less}"
    assert comp.tolist() == ref.tolist(), f"{where}: not ascending, or twice"


def check_grammar(vocabulary: Vocabulary, choices: list[str], written: bytes, grammar: GrammarSampler) -> Ids:
    """The ids that brute force allows, after the grammar has said the same."""
    ref = brute_force_valid_ids(vocabulary.pieces, choices, written)
    left = grammar.valid_ids()
    ends = left[np.isin(left, vocabulary.eog)]
    # Inside a character behind an end, as in "a|\u00e9", llama-cpp-python 0.3.16 still allows the end; 0.3.36 does not.
    if is_whole_utf8(written):
        assert ends.tolist() == (vocabulary.eog.tolist() if written in {choice.encode() for choice in choices} else [])
    texts = ((token, vocabulary.piece_of[token]) for token in np.setdiff1d(left, ends))
    spelled = [token for token, piece in texts if piece and spells_utf8(written + piece)]
    assert_same_ids(vocabulary, np.array(spelled, np.int32), ref, f"grammar of {choices} at {written!r}")
    return ref


def check_state(
    vocabulary: Vocabulary,
    choices: list[str],
    written: bytes,
    trie: TokenTrie,
    node: int,
    grammar: GrammarSampler,
) -> Ids:
    ref = check_grammar(vocabulary, choices, written, grammar)
    assert_same_ids(vocabulary, trie.children(node), ref, f"trie of {choices} at {written!r}")
    names = {choice.encode(): choice for choice in choices}
    assert trie.is_terminal(node) == (written in names)
    assert trie.leaf_name(node) == names.get(written)
    return ref


# --- sets made by hand: every state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", HARD_SETS, ids=[escaped(choices[0]) for choices in HARD_SETS])
def test_every_state_of_a_hard_set(llm: Llama, vocabulary: Vocabulary, choices: list[str]) -> None:
    trie = TokenTrie.from_choices(llm, choices, lead="", tokenization="every")
    with contextlib.ExitStack() as grammars:
        start = grammars.enter_context(contextlib.closing(GrammarSampler(llm, gbnf(choices))))
        node_of = {b"": trie.root}
        todo = [(b"", start)]
        while todo:
            written, grammar = todo.pop()
            for token in check_state(vocabulary, choices, written, trie, node_of[written], grammar):
                after = written + vocabulary.piece_of[token]
                node = trie.step(node_of[written], token)
                if after not in node_of:
                    node_of[after] = node
                    further = grammars.enter_context(contextlib.closing(grammar.clone()))
                    further.accept(token)
                    todo.append((after, further))
                assert node_of[after] == node, f"two states for {after!r}"
    assert {choice.encode() for choice in choices} <= set(node_of)


# --- drawn sets: a walk at random -------------------------------------------------------------------------------------


def check_walk(llm: Llama, vocabulary: Vocabulary, choices: list[str], seed: int) -> None:
    # SmolLM2 has no id for some bytes. The grammar takes a text with such a byte up to there, and can go no further.
    choices = [text for text in choices if all(bytes([byte]) in vocabulary.pieces for byte in text.encode())]
    assume(choices)
    rng = np.random.default_rng(seed)
    trie = TokenTrie.from_choices(llm, choices, lead="", tokenization="every")
    node, written = trie.root, b""
    with contextlib.closing(GrammarSampler(llm, gbnf(choices))) as grammar:
        while len(allowed := check_state(vocabulary, choices, written, trie, node, grammar)):
            token = int(rng.choice(allowed))
            grammar.accept(token)
            node = trie.step(node, token)
            written += vocabulary.piece_of[token]
    assert trie.leaf_name(node) in choices


@settings(max_examples=10)
@given(choice_texts(), st.integers(0, 2**32 - 1))
def test_walk_over_a_drawn_set(llm: Llama, vocabulary: Vocabulary, choices: list[str], seed: int) -> None:
    check_walk(llm, vocabulary, choices, seed)


@pytest.mark.slow
@settings(max_examples=200)
@given(choice_texts(), st.integers(0, 2**32 - 1))
def test_walks_over_many_drawn_sets(llm: Llama, vocabulary: Vocabulary, choices: list[str], seed: int) -> None:
    check_walk(llm, vocabulary, choices, seed)


# --- greedy generations -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def generated(llm: Llama) -> Iterator[list[int]]:
    """The ids that the host's loop yields inside the block, the end of generation among them."""
    # The shape of a batch changes the logits, so nothing of an earlier prompt may be left to build on.
    llm.reset()  # type: ignore[no-untyped-call]
    ids: list[int] = []
    generate = llm.generate

    def spy(*arguments: Any, **keywords: Any) -> Iterator[int]:
        for token in generate(*arguments, **keywords):
            ids.append(token)
            yield token

    vars(llm)["generate"] = spy
    try:
        yield ids
    finally:
        del vars(llm)["generate"]


@pytest.mark.parametrize(
    "requests", [TWENTY_REQUESTS[2:11:3], pytest.param(TWENTY_REQUESTS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_greedy_ids_are_the_grammars(llm: Llama, vocabulary: Vocabulary, requests: tuple[str, ...]) -> None:
    from llama_cpp.llama_grammar import LlamaGrammar

    constraint = TrieLogitsProcessor.from_choices(llm, ACTIONS, lead="", tokenization="every", on_end="eog")
    grammar = LlamaGrammar.from_string(gbnf(ACTIONS), verbose=False)
    room = max(map(len, ACTIONS)) + 1  # an ASCII text has no more tokens than characters
    names = set()
    for request in requests:
        prompt = f"{HEAD}Request: {request}\nAction:"
        with generated(llm) as ref:
            llm.create_completion(prompt, grammar=grammar, temperature=0.0, max_tokens=room)
        with generated(llm) as comp:
            llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
        assert comp == ref, request
        assert comp[-1] in vocabulary.eog
        assert constraint.result.name == b"".join(vocabulary.piece_of[token] for token in ref[:-1]).decode()
        names.add(constraint.result.name)
    assert len(names) > 1, "the same answer to everything tests little"


# --- the grammar itself -----------------------------------------------------------------------------------------------


def test_grammar_reads_each_way_to_write_a_character(smollm2: Llama) -> None:
    found = []
    for literal in ("\u00e9", "\\xE9", "\\u00E9", "\\U000000E9"):
        with contextlib.closing(GrammarSampler(smollm2, f'root ::= "{literal}"')) as grammar:
            found.append(grammar.valid_ids().tolist())
    assert found[0]
    assert found == [found[0]] * 4


def test_grammar_goes_on_into_overlong_utf8_and_brute_force_does_not(llm: Llama, vocabulary: Vocabulary) -> None:
    """Why ``check_grammar`` asks ``spells_utf8``."""
    choices = ["\u6771", "\U0001f44d"]
    with contextlib.closing(GrammarSampler(llm, gbnf(choices))) as grammar:
        grammar.valid_ids()
        (lead,) = vocabulary.pieces[b"\xf0"]
        grammar.accept(lead)
        left = [vocabulary.piece_of[token] for token in grammar.valid_ids()]
    assert b"\x86" in left
    assert not spells_utf8(b"\xf0\x86")
    ref = brute_force_valid_ids(vocabulary.pieces, choices, b"\xf0")
    assert b"\x86" not in [vocabulary.piece_of[token] for token in ref]


def test_clone_goes_its_own_way(smollm2: Llama) -> None:
    choices = ["5", "50"]
    (five,) = smollm2.tokenize(b"5", add_bos=False)
    with contextlib.closing(GrammarSampler(smollm2, gbnf(choices))) as grammar:
        before = grammar.valid_ids().tolist()
        with contextlib.closing(grammar.clone()) as other:
            other.accept(five)
            assert other.valid_ids().tolist() != before
        assert grammar.valid_ids().tolist() == before


def test_grammar_sampler_refuses_what_would_end_the_process(smollm2: Llama, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(GrammarSampler(smollm2, gbnf(["5"]))) as grammar:
        with pytest.raises(ValueError, match="has not been asked"):
            grammar.accept(int(brute_force_valid_ids(Vocabulary.of(smollm2).pieces, ["5"], b"")[0]))
        grammar.valid_ids()
        with pytest.raises(ValueError, match="does not allow"):
            grammar.accept(smollm2.token_eos())
    with pytest.raises(ValueError, match="refuses the grammar"):
        GrammarSampler(smollm2, 'root ::= "\\a"')
    assert "unknown escape" in capfd.readouterr().err
