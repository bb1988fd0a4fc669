"""Vocabularies and prompts: the ids the host would evaluate, the ids that end, and choices in the context of a prompt.

Five vocabularies, so that every rule is met by each kind of tokenizer:

    smollm2   byte-level BPE, no BOS before a text       tiny bpe     the same kind, BOS
    gemma     SentencePiece, BOS                         tiny spm     SentencePiece without the space before a text
                                                         tiny prefix  and with it, as Llama 2 has it
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import pytest
from spies import eog_ids, evaluated
from strategies import AWKWARD_TEXTS

from trie_sampler import TokenTrie, TrieSamplerError, TrieSamplerWarning
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens

if TYPE_CHECKING:
    from llama_cpp import Llama

VOCABS = {
    "smollm2": {"eog": {0, 2, 4}, "control": "<|im_end|>", "user": "<|im_start|>user\n"},
    "gemma": {"eog": {1, 106, 212}, "control": "<end_of_turn>", "user": "<start_of_turn>user\n"},
    "tiny": {"eog": {2, 3}, "control": "<end_of_turn>", "user": "<start_of_turn>user\n"},
    "tiny_bpe": {"eog": {2, 3}, "control": "<end_of_turn>", "user": "<start_of_turn>user\n"},
    "tiny_prefix": {"eog": {2, 3}, "control": "<end_of_turn>", "user": "<start_of_turn>user\n"},
}


@pytest.fixture(scope="session")
def tiny_prefix_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-prefix.gguf", add_space_prefix=True)


@pytest.fixture
def tiny_prefix(tiny_prefix_path: Path) -> Iterator[Llama]:
    from llama_cpp import Llama

    llama = Llama(str(tiny_prefix_path), n_ctx=256, type_k=0, type_v=0, verbose=False)
    yield llama
    llama.close()


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.model(name)) if "tiny" not in name else name for name in VOCABS]
)
def vocab(request: pytest.FixtureRequest) -> tuple[Llama, dict[str, Any]]:
    """A model and what is known of its vocabulary."""
    return request.getfixturevalue(request.param), VOCABS[request.param]


# --- prompts ----------------------------------------------------------------------------------------------------------

PROMPTS = [
    "Hello",
    "Is fire hot? Answer:",
    "  two spaces, and one after ",
    "line\nline\n\n",
    "日本語 naïve 🙂",
    '{"action": "',
    "USER",  # control token, then text, then control token: see below
    "USER hi CONTROL\n",
    "CONTROL",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_tokens_are_what_create_completion_evaluates(vocab: tuple[Llama, Any], prompt: str) -> None:
    llm, known = vocab
    text = prompt.replace("USER ", known["user"]).replace("USER", known["user"]).replace("CONTROL", known["control"])
    with evaluated(llm) as prompts:
        llm.create_completion(text, max_tokens=1)
    assert [prompt_tokens(llm, text)] == prompts
    assert prompt_tokens(llm, prompts[0]) == prompts[0], "a list of ids is taken as it is"


def test_control_tokens_of_a_prompt_are_parsed(vocab: tuple[Llama, Any]) -> None:
    llm, known = vocab
    assert prompt_tokens(llm, f"a{known['control']}")[-1] in known["eog"]


def test_empty_prompt_is_a_bos(vocab: tuple[Llama, Any]) -> None:
    """Also where texts get none: there is nothing else to evaluate (the host fails an assertion there)."""
    llm, _ = vocab
    assert prompt_tokens(llm, "") == [llm.token_bos()]
    with evaluated(llm) as prompts:
        if llm._model.add_bos_token():
            llm.create_completion("", max_tokens=1)
            assert prompts == [[llm.token_bos()]]
    for nothing in ([], ()):
        with pytest.raises(TrieSamplerError, match="prompt is empty"):
            prompt_tokens(llm, nothing)


@pytest.mark.parametrize("special", [-1, 5])
def test_empty_prompt_without_bos(tiny: Llama, monkeypatch: pytest.MonkeyPatch, special: int) -> None:
    monkeypatch.setattr("llama_cpp.llama_vocab_bos", lambda _vocab: special)
    if special == -1:
        with pytest.raises(TrieSamplerError, match="no BOS"):
            prompt_tokens(tiny, "")
    else:
        assert prompt_tokens(tiny, "") == [special]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Is fire hot?"}],
        [{"role": "system", "content": "Answer yes or no."}, {"role": "user", "content": "日本 🙂"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": " c "},
        ],
    ],
    ids=["user", "system", "dialogue"],
)
def test_chat_tokens_are_what_create_chat_completion_evaluates(
    vocab: tuple[Llama, Any], messages: list[dict[str, str]]
) -> None:
    llm, _ = vocab
    with evaluated(llm) as prompts:
        llm.create_chat_completion(messages, max_tokens=1)
    assert [prompt_tokens(llm, messages)] == prompts
    assert prompt_tokens(llm, tuple(messages)) == prompts[0]


def test_chat_handler_of_the_instance_is_asked(tiny: Llama) -> None:
    from llama_cpp.llama_chat_format import get_chat_completion_handler

    messages = [{"role": "user", "content": "hi"}]
    tiny.chat_handler = get_chat_completion_handler("chatml")
    with evaluated(tiny) as prompts:
        tiny.create_chat_completion(messages, max_tokens=1)
    comp = prompt_tokens(tiny, messages)
    assert [comp] == prompts
    tiny.chat_handler = None
    assert prompt_tokens(tiny, messages) != comp


# --- ends -------------------------------------------------------------------------------------------------------------


def test_end_ids_are_all_that_llama_cpp_names(vocab: tuple[Llama, Any]) -> None:
    llm, known = vocab
    tokenizer = as_tokenizer(llm)
    assert list(tokenizer.eog_ids) == eog_ids(llm) == sorted(known["eog"])
    assert tokenizer.n_vocab == llm.n_vocab()
    assert as_tokenizer(llm) is tokenizer, "one per model: asking every id is slow"


def test_texts_never_make_control_tokens(vocab: tuple[Llama, Any]) -> None:
    llm, known = vocab
    tokenizer = as_tokenizer(llm)
    for text in (known["control"], known["user"], "<s>", "</s>", "<unk>", "<bos>"):
        tokens = tokenizer.tokenize(text.encode())
        assert tokens
        assert not any(tokenizer.is_control(token) for token in tokens)
        assert tokenizer.detokenize(tokens).decode().removeprefix(" ") == text
    for token in known["eog"]:
        assert tokenizer.detokenize([token]) == b""


def test_long_text_round_trips(vocab: tuple[Llama, Any]) -> None:
    llm, _ = vocab
    tokenizer = as_tokenizer(llm)
    text = "日本語 words, 🙂 and\nlines. " * 500
    assert tokenizer.detokenize(tokenizer.tokenize(text.encode())).decode().removeprefix(" ") == text


# --- choices behind a prompt ------------------------------------------------------------------------------------------

# Prompt, whether lead="auto" takes both spellings behind it. The vocabularies merge over some of these edges.
EDGES = [
    ("Action:", True),
    ("The action is", True),
    ("kind of the", True),
    ("x = 1", True),
    ("End.", True),
    ("日本", True),
    ("say 🙂", True),
    ("Action: ", False),
    ("Action:\n", False),
    ("Action:\t", False),
    ('{"action": "', False),
    ("f(", False),
    ("a [", False),
    ("« ", False),
    ("USER", False),  # a control token and a newline
    ("CONTROL", False),  # a control token
]


def reference_paths(llm: Llama, prompt: str, text: str, leads: tuple[str, ...]) -> set[tuple[int, ...]]:
    """``tokenize(prompt + choice)`` without the prompt's own tokens, wherever that cut is clean."""
    before = prompt_tokens(llm, prompt)
    out = set()
    for lead in leads if not text[0].isspace() else ("",):
        whole = prompt_tokens(llm, prompt + lead + text)
        if whole[: len(before)] == before:
            out.add(tuple(whole[len(before) :]))
    return out


def paths_of(trie: TokenTrie, name: str) -> set[tuple[int, ...]]:
    return {tokens for leaf, tokens in trie.leaves() if leaf == name}


@pytest.mark.parametrize("edge", EDGES, ids=[repr(prompt) for prompt, _ in EDGES])
@pytest.mark.parametrize("lead", ["auto", "", " "])
def test_choices_are_tokenized_in_context(vocab: tuple[Llama, Any], edge: tuple[str, bool], lead: str) -> None:
    llm, known = vocab
    prompt, both = edge
    # After a control token such a vocabulary writes a space itself, and a second one for a space of the choice's own:
    # the tests below say what is to come out then.
    own_space = llm.metadata.get("tokenizer.ggml.add_space_prefix") == "true" and prompt == "CONTROL"
    if own_space and lead == " ":
        pytest.skip("no such space is added")
    prompt = prompt.replace("USER", known["user"]).replace("CONTROL", known["control"])
    leads = (lead,) if lead != "auto" else ("", " ") if both else ("",)
    # What reads as a control token in a prompt does not in a choice.
    texts = [text for text in AWKWARD_TEXTS if text not in {"<s>", "</s>"} and not (own_space and text[0].isspace())]
    n_clean = 0
    for text in texts:
        ref = reference_paths(llm, prompt, text, leads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comp = paths_of(TokenTrie.from_choices(llm, [text], prompt=prompt, lead=lead), text)
        messages = [str(warning.message) for warning in caught]
        if ref:
            n_clean += 1
            assert comp == ref, text
            assert messages == [], text
        else:
            assert len(comp) == 1, text
            (message,) = messages
            assert "would have merged" in message
        for tokens in comp:
            spelled = b"".join(llm.detokenize([token], prev_tokens=[0]) for token in tokens).decode()
            assert spelled in {text, " " + text}, text
    assert n_clean > len(texts) // 2 or prompt.endswith((" ", "\t"))


def test_long_prompts_need_only_their_end(vocab: tuple[Llama, Any]) -> None:
    """A prompt of which only the last words are tokenized again: the same as for the whole."""
    llm, _ = vocab
    prompt = "The quick brown fox, naïve 日本語 🙂, jumps. " * 12 + "Action:"
    trie = TokenTrie.from_choices(llm, ["PLAY_MUSIC", "日本", "no"], prompt=prompt)
    for name in ("PLAY_MUSIC", "日本", "no"):
        assert paths_of(trie, name) == reference_paths(llm, prompt, name, ("", " "))


def texts_of(llm: Llama, trie: TokenTrie) -> list[str]:
    return sorted(as_tokenizer(llm).detokenize(tokens).decode() for _, tokens in trie.leaves())


def test_without_a_prompt_both_spellings_are_taken(vocab: tuple[Llama, Any]) -> None:
    llm, _ = vocab
    trie = TokenTrie.from_choices(llm, ["PLAY"])
    assert texts_of(llm, trie) == [" PLAY", "PLAY"]
    assert trie.tail == b""


def test_a_space_that_the_vocabulary_writes_itself_is_no_second_one(vocab: tuple[Llama, Any]) -> None:
    """SentencePiece with a space before each text puts it after a control token, too."""
    llm, known = vocab
    for prompt in (None, known["control"]):
        assert texts_of(llm, TokenTrie.from_choices(llm, ["PLAY"], prompt=prompt, lead=" ")) == [" PLAY"]
        assert texts_of(llm, TokenTrie.from_choices(llm, [" PLAY"], prompt=prompt)) == [" PLAY"]


def test_trie_behind_a_prompt_knows_its_tail(vocab: tuple[Llama, Any]) -> None:
    llm, _ = vocab
    for prompt in ("Is fire hot? Answer:", "日本", "a few words. " * 40 + "End"):
        tail = TokenTrie.from_choices(llm, ["yes"], prompt=prompt).tail
        assert tail
        assert (" " + prompt).encode().endswith(tail)


def test_prompts_as_text_ids_and_messages_give_equal_tries(vocab: tuple[Llama, Any]) -> None:
    llm, _ = vocab
    messages = [{"role": "user", "content": "Is fire hot?"}]
    for prompt in ("Is fire hot? Answer:", messages):
        ref = TokenTrie.from_choices(llm, ["yes", "no"], prompt=prompt)
        comp = TokenTrie.from_choices(llm, ["yes", "no"], prompt=prompt_tokens(llm, prompt))
        assert sorted(ref.leaves()) == sorted(comp.leaves())


def test_prompt_that_ends_in_half_a_character(vocab: tuple[Llama, Any]) -> None:
    llm, _ = vocab
    whole = prompt_tokens(llm, "sun \U00013000")
    with warnings.catch_warnings():
        # Where the vocabulary would have merged the half with the choice, it says so.
        warnings.simplefilter("ignore", TrieSamplerWarning)
        trie = TokenTrie.from_choices(llm, ["yes"], prompt=whole[:-1])
    assert set(texts_of(llm, trie)) <= {"yes", " yes"}
