"""Prompts whose end would have merged with a choice: seen by ``check_prompt``, mended by ``heal=True``.

prompt  "http:"     ids [.. http | :]        a choice "//a"
whole   "http://a"  ids [.. http | :// | a]  so the model never saw ":" before "//"
healed              ids [.. http] + path [:// | a]

The oracle tokenizes prompt and choice as one text; what all of them have in common with the prompt stays.
"""

from __future__ import annotations

import enum
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spies import evaluated, text_of

from trie_sampler import (
    EmptyTrieError,
    TokenTrie,
    TrieLogitsProcessor,
    TrieSamplerError,
    TrieSamplerWarning,
    VocabMismatchError,
    check_prompt,
    choose,
)
from trie_sampler.choices import Choices
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens
from trie_sampler.tokens import Tokenizer, tokenize_choices

if TYPE_CHECKING:
    from llama_cpp import Llama

Ids = tuple[int, ...]

EOS, BOS, FIRST_BYTE = 0, 999, 1000


class Toy:
    """The longest piece at each place, else a byte: 0 ends, 999 begins, 1000 .. 1255 are bytes.

    Args:
        pieces: text -> id.
        controls: text -> id of tokens that text makes only where they are parsed.
        invisible_space: a text begins with a space of the vocabulary's own, as SentencePiece has it.
    """

    n_vocab = 1256
    eog_ids: Sequence[int] = (EOS,)

    def __init__(
        self, pieces: dict[str, int], controls: dict[str, int] | None = None, *, invisible_space: bool = False
    ) -> None:
        self.pieces = {text.encode(): token for text, token in pieces.items()}
        self.controls = {text.encode(): token for text, token in (controls or {}).items()}
        self.texts = {token: text for text, token in self.pieces.items()}
        self.names = {token: text for text, token in self.controls.items()}
        self.invisible_space = invisible_space

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        if special and self.controls:
            cut = re.split(b"(" + b"|".join(map(re.escape, self.controls)) + b")", text)
            return [
                token
                for part in cut
                for token in ([self.controls[part]] if part in self.controls else self._plain(part))
            ]
        return self._plain(b" " + text if self.invisible_space and text else text)

    def _plain(self, text: bytes) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len, default=text[:1])
            ids.append(self.pieces.get(piece, FIRST_BYTE + text[0]))
            text = text[len(piece) :]
        return ids

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self._piece(token, special=special) for token in tokens)

    def _piece(self, token: int, *, special: bool) -> bytes:
        if token in self.texts:
            return self.texts[token]
        if token >= FIRST_BYTE:
            return bytes([token - FIRST_BYTE])
        return self.names.get(token, b"") if special else b""

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return token in (EOS, BOS) or token in self.names


URLS = Toy({":": 1, "://": 2, "//": 3, "a": 4, "b": 5})


def pieces_of(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    return "|".join(tokenizer.detokenize([token]).decode("utf-8", "replace") for token in tokens)


def spellings(tokenizer: Tokenizer, trie: TokenTrie) -> dict[str, list[str]]:
    """Name -> its paths, "|" between the pieces."""
    out: dict[str, list[str]] = {}
    for name, tokens in trie.leaves():
        out.setdefault(name, []).append(pieces_of(tokenizer, tokens))
    return {name: sorted(paths) for name, paths in out.items()}


def n_equal(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def healed_reference(ids: Sequence[int], wholes: Iterable[tuple[str, Sequence[int]]]) -> tuple[int, dict[Ids, str]]:
    """(ids of the prompt that stay, path -> name); a whole is a name with the ids of prompt and choice as one text."""
    wholes = list(wholes)
    n_kept = min(n_equal(ids, whole) for _, whole in wholes)
    paths: dict[Ids, str] = {}
    for name, whole in wholes:
        path = tuple(whole[n_kept:])
        paths[path] = min(name, paths.get(path, name))
    return n_kept, paths


def leads_behind(prompt: str, lead: str, choice: str) -> list[str]:
    if choice[:1].isspace():
        return [""]
    if lead != "auto":
        return [lead]
    return [""] if prompt[-1:].isspace() or prompt[-1:] in "\"'`([{<" else ["", " "]


# --- check_prompt -----------------------------------------------------------------------------------------------------

WORDS = Toy({"http": 10, ":": 1, "://": 2, "//": 3, " Alice": 20, " Bob": 21, "Alice": 22, "Bob": 23, "Par": 30,
             "Paris": 31, "Who": 40, "?": 41, ". ": 50})  # fmt: skip

#   prompt        choices             lead    merged               healed   n
CHECKS: list[tuple[Any, ...]] = [
    ("http:",     ["//a", "c"],       "",     ("//a",),            ":",     1),
    ("http:",     ["c", "d"],         "",     (),                  "",      0),
    ("Who? ",     ["Alice", "Bob"],   "auto", ("Alice", "Bob"),    " ",     1),
    ("Who? ",     ["alice", "Bob"],   "auto", ("Bob",),            " ",     1),
    ("Who?",      ["Alice", "Bob"],   "auto", (),                  "",      0),
    ("Who? Par",  ["is", "ma"],       "",     ("is",),             "Par",   1),
    # With both spellings a choice is named where either merges.
    ("Who.",      ["Alice"],          "auto", ("Alice",),          ".",     1),
    ("Who.",      ["Alice"],          "",     (),                  "",      0),
    ("Who.",      ["Alice"],          " ",    ("Alice",),          ".",     1),
    # A choice without text merges with nothing.
    ("http:",     {"X": "", "Y": "//"}, "",   ("Y",),              ":",     1),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "choices", "lead", "merged", "healed", "n"), CHECKS)
def test_check_prompt(prompt: str, choices: Any, lead: str, merged: tuple[str, ...], healed: str, n: int) -> None:
    comp = check_prompt(WORDS, prompt, choices, lead=lead)
    assert (comp.merged, comp.healed, comp.n_healed) == (merged, healed, n)
    assert comp.tail == prompt
    assert comp.can_heal
    assert comp.is_clean == (not merged)


def test_the_sentence_of_the_docstring() -> None:
    assert str(check_prompt(WORDS, "Who? ", ["Alice", "Bob"])) == (
        "the prompt ends in 'Who? ', whose last tokens merge with 2 choices ('Alice', 'Bob'): heal=True takes ' ' back"
    )


def test_sentences_for_people() -> None:
    assert str(check_prompt(WORDS, "Who?", ["a"])) == "the prompt ends in 'Who?': no choice merges with it"
    many = str(check_prompt(WORDS, "http:", ["//a", "//b", "//c", "//d"]))
    assert "4 choices ('//a', '//b', '//c', ...)" in many
    assert str(check_prompt(WORDS, ":", ["//a"], lead="")).endswith("end the prompt elsewhere")
    cut = [FIRST_BYTE + 0xA5] * 3
    assert "in tokens that its text alone would not give" in str(check_prompt(WORDS, cut, ["a"]))
    long = str(check_prompt(WORDS, "x" * 200, ["a"]))
    assert len(long) < 120


def test_a_prompt_that_cannot_be_healed() -> None:
    """Nothing is left to evaluate; or ids that no text gives."""
    alone = check_prompt(WORDS, [1], ["//a"], lead="")
    assert (alone.merged, alone.can_heal, alone.is_clean) == (("//a",), False, False)
    assert check_prompt(WORDS, [BOS, 1], ["//a"], lead="").can_heal
    split = check_prompt(URLS, [*URLS.tokenize(b"x"), 1, 3], ["a"])
    assert not split.is_clean


def test_a_prompt_that_ends_in_a_control_token_is_clean() -> None:
    for ids in ([BOS], [10, 1, EOS]):
        comp = check_prompt(WORDS, ids, ["//a", "Alice"])
        assert (comp.is_clean, comp.tail, comp.healed) == (True, "", "")


class Scheme(enum.Enum):
    A = "//a"


def test_check_prompt_takes_choices_of_every_kind() -> None:
    for choices, name in ((["//a"], "//a"), ({"X": "//a"}, "X"), (Scheme, "//a"), (Literal["//a"], "//a")):
        assert check_prompt(WORDS, "http:", choices).merged == (name,)
    assert check_prompt(WORDS, WORDS.tokenize(b"http:"), ["//a"]).merged == ("//a",)


def test_check_prompt_knows_the_spellings() -> None:
    tokenizer = Toy({'"//': 5, ':"': 6, " A": 7})
    assert check_prompt(tokenizer, "x:", ["b"], lead="").is_clean
    assert check_prompt(tokenizer, "x:", ["b"], lead="", json_value=True).merged == ("b",)
    assert check_prompt(tokenizer, "x ", ["a"]).is_clean
    assert check_prompt(tokenizer, "x ", ["a"], case_fold=True).merged == ("a",)
    # What a caller hands to from_choices can be handed here as it is.
    assert check_prompt(tokenizer, "x ", ["a"], heal=True, tokenization="every").is_clean


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "words"),
    [
        ((WORDS, "a", ["a"]), {"leading": ""}, TypeError, "unexpected keyword argument 'leading'"),
        ((WORDS, "a", ["a"]), {"mode": 1}, TypeError, "unexpected keyword argument 'mode'"),
        ((WORDS, "a", ["a"]), {"lead": "  "}, ValueError, "lead must be"),
        ((WORDS, "a", []), {}, EmptyTrieError, "choices is empty"),
        ((WORDS, "a", "a"), {}, TypeError, "choices must be"),
        ((WORDS, 3, ["a"]), {}, TypeError, "a prompt is text, token ids or chat messages"),
        ((WORDS, "", ["a"]), {}, TrieSamplerError, "the prompt is empty"),
        ((WORDS, [5000], ["a"]), {}, TrieSamplerError, "no id: V is 1256"),
        ((object(), "a", ["a"]), {}, TypeError, "expected a llama_cpp.Llama or a Tokenizer"),
        ((WORDS, [{"role": "user", "content": "a"}], ["a"]), {}, TypeError, "chat messages need"),
    ],
)
def test_check_prompt_refuses(arguments: Any, settings: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_prompt(*arguments, **settings)


# --- healing by hand --------------------------------------------------------------------------------------------------


def test_case_18_a_prompt_cut_at_a_colon_does_not_block_the_longer_token() -> None:
    prompt = [*URLS.tokenize(b"http"), 1]
    with pytest.warns(TrieSamplerWarning, match="would have merged"):
        plain = TokenTrie.from_choices(URLS, ["//a", "//b"], prompt=prompt, lead="")
    assert sorted(plain.leaves()) == [("//a", (3, 4)), ("//b", (3, 5))]
    assert (plain.n_healed, plain.healed) == (0, b"")
    healed = TokenTrie.from_choices(URLS, ["//a", "//b"], prompt=prompt, lead="", heal=True)
    assert sorted(healed.leaves()) == [("//a", (2, 4)), ("//b", (2, 5))]
    assert (healed.n_healed, healed.healed, healed.tail) == (1, b":", b"http")
    # The first step is forced, the branch comes after it.
    assert healed.children(healed.root).tolist() == [2]
    node = healed.step(healed.root, 2)
    assert healed.children(node).tolist() == [4, 5]
    assert healed.leaf_name(healed.step(node, 4)) == "//a"


@pytest.mark.parametrize("n_back", [2, 3, 5])
def test_case_18_one_token_back_is_not_always_enough(n_back: int) -> None:
    """Letters are tokens of their own until the last one of the long piece stands there."""
    end = "abcdefg"[:n_back]
    tokenizer = Toy({f"{end}!": 4, "?": 5})
    ids = tokenizer.tokenize(f"say {end}".encode())
    trie = TokenTrie.from_choices(tokenizer, ["!?", "!", "_"], prompt=ids, lead="", heal=True)
    apart = tuple(tokenizer.tokenize(f"{end}_".encode()))
    assert sorted(trie.leaves()) == [("!", (4,)), ("!?", (4, 5)), ("_", apart)]
    assert (trie.n_healed, trie.healed, trie.tail[-3:] if trie.tail else None) == (n_back, end.encode(), b"ay ")


def test_all_choices_begin_at_the_earliest_cut() -> None:
    """One that merges with nothing begins there as well: there is one prompt for all of them."""
    trie = TokenTrie.from_choices(URLS, ["//a", "b"], prompt="x:", lead="", heal=True)
    assert spellings(URLS, trie) == {"//a": ["://|a"], "b": [":|b"]}


def test_nothing_merges_so_nothing_is_healed() -> None:
    ref = TokenTrie.from_choices(WORDS, ["Alice", "Bob"], prompt="Who?")
    comp = TokenTrie.from_choices(WORDS, ["Alice", "Bob"], prompt="Who?", heal=True)
    assert sorted(comp.leaves()) == sorted(ref.leaves())
    assert (comp.n_healed, comp.healed, comp.tail) == (0, b"", ref.tail)


def test_without_a_prompt_there_is_nothing_to_heal() -> None:
    ref = TokenTrie.from_choices(WORDS, ["Alice", "Bob"])
    comp = TokenTrie.from_choices(WORDS, ["Alice", "Bob"], heal=True)
    assert sorted(comp.leaves()) == sorted(ref.leaves())
    assert comp.n_healed == 0


def test_control_tokens_before_the_prompt_stay() -> None:
    for before in ([BOS], [BOS, *WORDS.tokenize(b"Who?"), EOS, BOS]):
        ids = [*before, *WORDS.tokenize(b"http:")]
        trie = TokenTrie.from_choices(WORDS, ["//a"], prompt=ids, lead="", heal=True)
        assert (trie.n_healed, trie.tail) == (1, b"http")
        assert spellings(WORDS, trie) == {"//a": ["://|a"]}
        # All of the text after the control token may go: that one is left to evaluate.
        trie = TokenTrie.from_choices(WORDS, ["//a"], prompt=[*before, 1], lead="", heal=True)
        assert (trie.n_healed, trie.tail, trie.healed) == (1, b"", b":")


def test_nothing_would_be_left_to_evaluate() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trie = TokenTrie.from_choices(URLS, ["//a", "b"], prompt=[1], lead="", heal=True)
    assert "the prompt's end, ':', cannot be healed" in str(caught[0].message)
    assert trie.n_healed == 0
    assert spellings(URLS, trie) == {"//a": ["//|a"], "b": ["b"]}


def test_who_asked_for_healing_is_not_told_to_ask_for_it() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TokenTrie.from_choices(URLS, ["//a", "b"], prompt=[1], lead="", heal=True)
    assert not any("pass heal=True" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    "ids",
    [
        [*URLS.tokenize(b"x"), 1, 3],  # ":" and "//" where the vocabulary writes "://"
        [FIRST_BYTE + 0xA5] * 3,  # the end of a character without its beginning
    ],
)
def test_ids_that_no_text_gives_cannot_be_healed(ids: list[int]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trie = TokenTrie.from_choices(URLS, ["//a", "b"], prompt=ids, heal=True)
    assert caught
    assert {name for name, _ in trie.leaves()} == {"//a", "b"}
    assert trie.n_healed == 0


def test_names_and_index_stay() -> None:
    class Path(enum.Enum):
        A = "//a"
        B = "//b"

    for choices, names in ((Path, {"//a", "//b"}), ({"one": "//a", "two": "//b"}, {"one", "two"})):
        trie = TokenTrie.from_choices(URLS, choices, prompt="x:", heal=True)
        assert {name for name, _ in trie.leaves()} == names


def test_an_invisible_space_is_no_part_of_what_is_healed() -> None:
    tokenizer = Toy({":": 1, "://": 2, "//": 3, "a": 4, " x": 6, " ": 7}, invisible_space=True)
    trie = TokenTrie.from_choices(tokenizer, ["//a"], prompt="x:", lead="", heal=True)
    assert (trie.n_healed, trie.healed) == (1, b":")
    assert spellings(tokenizer, trie) == {"//a": ["://|a"]}


def test_a_healed_trie_is_copied_whole() -> None:
    import copy
    import pickle

    trie = TokenTrie.from_choices(URLS, ["//a", "//b"], prompt="x:", heal=True)
    for copied in (copy.copy(trie), copy.deepcopy(trie), pickle.loads(pickle.dumps(trie))):  # noqa: S301
        assert (copied.healed, copied.n_healed, copied.tail, copied.model_id) == (b":", 1, b"x", None)
        assert list(copied.leaves()) == list(trie.leaves())


# --- against the oracle -----------------------------------------------------------------------------------------------

_ALPHABET = "ab: /"
_PIECES = {":": 1, "://": 2, "//": 3, "ab": 4, " ab": 5, " a": 6, "a:": 7, "b ": 8, "/a/": 9, "ba": 10, ": /": 11}


@pytest.mark.parametrize("invisible_space", [False, True])
@given(
    prompt=st.text(_ALPHABET, min_size=1, max_size=14),
    choices=st.lists(st.text(_ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    lead=st.sampled_from(["auto", "", " "]),
)
def test_healed_paths_are_those_of_the_whole_text(
    invisible_space: bool, prompt: str, choices: list[str], lead: str
) -> None:
    tokenizer = Toy(_PIECES, invisible_space=invisible_space)
    ids = [BOS, *tokenizer.tokenize(prompt.encode())]
    wholes = [
        (choice, [BOS, *tokenizer.tokenize((prompt + space + choice).encode())])
        for choice in choices
        for space in leads_behind(prompt, lead, choice)
    ]
    n_kept, ref = healed_reference(ids, wholes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trie = TokenTrie.from_choices(tokenizer, choices, prompt=ids, lead=lead, heal=True)
        check = check_prompt(tokenizer, ids, choices, lead=lead)
    assert len(ids) - trie.n_healed == n_kept
    assert {path: name for name, path in trie.leaves()} == ref
    assert trie.healed == tokenizer.detokenize(ids[n_kept:])
    expected = ("begin with a space", "can never come out")
    assert not [warning for warning in caught if not any(part in str(warning.message) for part in expected)]
    # Each sequence is what the vocabulary makes of its own text.
    for _, path in trie.leaves():
        both = [*ids[:n_kept], *path]
        text = tokenizer.detokenize(both)
        assert tokenizer.tokenize(text[1:] if invisible_space else text) == both[1:]
    merged = {name for name, whole in wholes if n_equal(ids, whole) < len(ids)}
    assert (check.merged, check.can_heal) == (tuple(c for c in choices if c in merged), True)
    assert (check.n_healed, check.healed) == (trie.n_healed, trie.healed.decode())


def ways(tokenizer: Toy, text: bytes) -> Iterator[Ids]:
    """All sequences of pieces that spell a text."""
    if not text:
        yield ()
    pieces = {*tokenizer.pieces.items(), (text[:1], FIRST_BYTE + text[0])} if text else ()
    for piece, token in pieces:
        if text.startswith(piece):
            for rest in ways(tokenizer, text[len(piece) :]):
                yield token, *rest


def all_paths(trie: TokenTrie, node: int = 0, before: Ids = ()) -> Iterator[tuple[str, Ids]]:
    name = trie.leaf_name(node)
    if name is not None:
        yield name, before
    for token in trie.children(node).tolist():
        yield from all_paths(trie, trie.step(node, token), (*before, token))


@given(
    prompt=st.text(_ALPHABET, min_size=1, max_size=6),
    choices=st.lists(st.text(_ALPHABET, min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
)
def test_every_spelling_of_what_is_healed_and_the_choice(prompt: str, choices: list[str]) -> None:
    tokenizer = Toy(_PIECES)
    ids = [BOS, *tokenizer.tokenize(prompt.encode())]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "some choices begin with a space")
        canonical = TokenTrie.from_choices(tokenizer, choices, prompt=ids, lead="", heal=True)
        every = TokenTrie.from_choices(tokenizer, choices, prompt=ids, lead="", heal=True, tokenization="every")
    assert (every.n_healed, every.healed, every.tail) == (canonical.n_healed, canonical.healed, canonical.tail)
    ref = {(choice, way) for choice in choices for way in ways(tokenizer, canonical.healed + choice.encode())}
    assert set(all_paths(every)) == ref
    assert {(name, path) for name, path in canonical.leaves()} <= ref


def test_a_long_prompt_needs_only_its_end() -> None:
    before = "x" * 500
    ref = TokenTrie.from_choices(WORDS, ["//a", "//b"], prompt="http:", heal=True)
    comp = TokenTrie.from_choices(WORDS, ["//a", "//b"], prompt=before + "http:", heal=True)
    assert sorted(comp.leaves()) == sorted(ref.leaves())
    assert comp.n_healed == ref.n_healed == 1


def test_the_paths_of_a_prompt_as_list_and_as_array_are_equal() -> None:
    import numpy as np

    ids = WORDS.tokenize(b"http:")
    ref = tokenize_choices(WORDS, Choices.of(["//a"]), ids, heal=True)
    assert ref == tokenize_choices(WORDS, Choices.of(["//a"]), tuple(ids), heal=True)
    comp = TokenTrie.from_choices(WORDS, ["//a"], prompt=np.array(ids, np.int32), heal=True)
    assert comp.n_healed == ref.n_healed == 1


# --- real vocabularies ------------------------------------------------------------------------------------------------

TEXTS = [
    "//example.org", "Alice", "Bob", "is", "ing", "s", "5", "50", "\n", "\nyes", "日本", "本", "é", "🙂", '"', '":',
    "'s", "=", "==", ")", " x", "  x", "...", "_name", "PLAY_MUSIC", "1.5", "}", "/", "-->", "://",
]  # fmt: skip
ENDS = [
    "Hello, ", "http:", "The capital is Par", "x = ", "x =", "Answer:", "Answer: ", "Answer:  ", "Answer:\n", "1",
    "12", "日", "naïv", '{"a": "', '{"a":', "It", "a.", "f(", "(", "<", "-", "line\n\n", "tab\t", "end of …", "x\n  ",
    "REPLY_", "/usr/", "    ", "🙂", "e",
]  # fmt: skip


@pytest.mark.parametrize("lead", ["auto", ""])
def test_healed_paths_of_real_vocabularies_are_those_of_the_whole_text(llm: Llama, lead: str) -> None:
    tokenizer = as_tokenizer(llm)
    n_healed = 0
    for end in ENDS:
        prompt = f"A few words. {end}"
        ids = prompt_tokens(llm, prompt)
        for choices in ([text] for text in TEXTS):
            wholes = [
                (text, prompt_tokens(llm, prompt + space + text))
                for text in choices
                for space in leads_behind(prompt, lead, text)
            ]
            n_kept, ref = healed_reference(ids, wholes)
            trie = TokenTrie.from_choices(llm, choices, prompt=prompt, lead=lead, heal=True)
            assert len(ids) - trie.n_healed == n_kept, (prompt, choices)
            assert {path: name for name, path in trie.leaves()} == ref, (prompt, choices)
            assert trie.healed == tokenizer.detokenize(ids[n_kept:])
            n_healed += trie.n_healed > 0
    assert n_healed > len(ENDS), "the table has to hold ends that merge"


@pytest.mark.parametrize("end", ENDS)
def test_many_choices_share_one_healed_end(llm: Llama, end: str) -> None:
    prompt = f"A few words. {end}"
    ids = prompt_tokens(llm, prompt)
    choices = [text for text in TEXTS if not text[0].isspace()]
    wholes = [
        (text, prompt_tokens(llm, prompt + space + text))
        for text in choices
        for space in leads_behind(prompt, "auto", text)
    ]
    n_kept, ref = healed_reference(ids, wholes)
    trie = TokenTrie.from_choices(llm, choices, prompt=prompt, heal=True)
    assert len(ids) - trie.n_healed == n_kept
    assert {path: name for name, path in trie.leaves()} == ref
    assert {name for name, _ in trie.leaves()} == set(choices)


@pytest.mark.parametrize("end", ["http:", "Hello, ", " " * 50, "\n" * 30, "=" * 70, "1" * 40, "日本" * 30 + "日"])
def test_ends_longer_than_the_window(llm: Llama, end: str) -> None:
    """Where it can heal, the whole is what the vocabulary makes of the text; where it cannot, it says so."""
    prompt = "A few words, more of them, and others still. " * 10 + end
    ids = prompt_tokens(llm, prompt)
    for text in ("//a", "x", " x", "=", "1", "本", "\n"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trie = TokenTrie.from_choices(llm, [text], prompt=prompt, lead="", heal=True)
        whole = prompt_tokens(llm, prompt + text)
        if not caught:
            ((_, path),) = trie.leaves()
            assert [*ids[: len(ids) - trie.n_healed], *path] == whole, text


def test_case_12_sentencepiece_behind_an_assistant_tag(gemma: Llama) -> None:
    prompt = "<start_of_turn>user\nWhat to eat?<end_of_turn>\n<start_of_turn>model\n"
    before, whole = prompt_tokens(gemma, prompt), prompt_tokens(gemma, prompt + "Pizza")
    assert whole[: len(before)] == before
    for heal in (False, True):
        trie = TokenTrie.from_choices(gemma, ["Pizza", "Pasta"], prompt=prompt, heal=heal)
        assert whole[len(before)] in trie.children(trie.root)
        assert dict(trie.leaves())["Pizza"] == tuple(whole[len(before) :])
        assert trie.n_healed == 0


def test_case_17_a_prompt_that_ends_in_a_space(llm: Llama) -> None:
    tokenizer = as_tokenizer(llm)
    choices = ["Alice", "Bob"]
    with pytest.warns(TrieSamplerWarning, match="would have merged") as caught:
        plain = choose(llm, "Hello, ", choices)
    assert len(caught) == 1
    assert plain.stats["prompt_tokens"] == len(prompt_tokens(llm, "Hello, "))
    trie = TokenTrie.from_choices(llm, choices, prompt="Hello, ", heal=True)
    assert (trie.n_healed, trie.healed) == (1, b" ")
    assert spellings(tokenizer, trie) == {"Alice": [" Alice"], "Bob": [" Bob"]}
    healed = choose(llm, "Hello, ", choices, heal=True)
    assert healed.stats["prompt_tokens"] == plain.stats["prompt_tokens"] - 1
    assert healed.text == healed.name
    constraint = TrieLogitsProcessor.from_choices(llm, choices, heal=True)
    ids = constraint.prepare("Hello, ")
    assert ids == prompt_tokens(llm, "Hello,")
    llm.create_completion(ids, logits_processor=constraint, max_tokens=constraint.max_tokens)
    for choice in (plain, healed, constraint.result):
        assert choice.complete
        assert choice.name in choices
    assert (constraint.result.name, constraint.result.tokens) == (healed.name, healed.tokens)


def test_case_19_a_trailing_space_is_reported_and_left_alone(llm: Llama) -> None:
    check = check_prompt(llm, "Who? ", ["Alice", "Bob"])
    assert (check.merged, check.healed, check.n_healed, check.can_heal) == (("Alice", "Bob"), " ", 1, True)
    assert not check.is_clean
    assert check_prompt(llm, "Who?", ["Alice", "Bob"]).is_clean
    ids = prompt_tokens(llm, "Who? ")
    with pytest.warns(TrieSamplerWarning):
        assert choose(llm, "Who? ", ["Alice", "Bob"]).stats["prompt_tokens"] == len(ids)
    assert llm.input_ids[: len(ids)].tolist() == ids
    constraint = TrieLogitsProcessor.from_choices(llm, ["Alice"])
    with pytest.warns(TrieSamplerWarning, match="pass heal=True"):
        assert constraint.prepare("Who? ") == prompt_tokens(llm, "Who? ")


def test_check_prompt_of_messages_and_ids(llm: Llama) -> None:
    assert check_prompt(llm, [{"role": "user", "content": "Who?"}], ["Alice", "Bob"]).is_clean
    assert check_prompt(llm, prompt_tokens(llm, "Who? "), ["Alice"]) == check_prompt(llm, "Who? ", ["Alice"])
    assert check_prompt(as_tokenizer(llm), prompt_tokens(llm, "Who? "), ["Alice"]).merged == ("Alice",)


# --- choose -----------------------------------------------------------------------------------------------------------

ASKED = [
    ("http:", ["//example.org", "//python.org", "c"]),
    ("The capital of France is Par", ["is", "ma"]),
    ("Hello, ", ["Alice", "Bob"]),
    ("x = ", ["12", "[]"]),
    ("Is fire hot? Answer:", ["yes", "no"]),
]


@pytest.mark.parametrize("lead", ["auto", ""])
@pytest.mark.parametrize(("prompt", "choices"), ASKED)
def test_choose_heals(llm: Llama, prompt: str, choices: list[str], lead: str) -> None:
    ids = prompt_tokens(llm, prompt)
    trie = TokenTrie.from_choices(llm, choices, prompt=prompt, lead=lead, heal=True)
    comp = choose(llm, prompt, choices, lead=lead, heal=True)
    kept = ids[: len(ids) - trie.n_healed]
    evaluated_ids = llm.input_ids[: llm.n_tokens].tolist()
    assert evaluated_ids[: len(kept)] == kept
    assert evaluated_ids[len(kept) :] == list(comp.tokens)[: len(evaluated_ids) - len(kept)]
    assert comp.stats["prompt_tokens"] == len(kept)
    assert comp.complete
    assert comp.index is not None
    assert comp.name == choices[comp.index] == comp.value
    # What is added to the prompt's text, without what was written again.
    assert comp.text in {space + comp.name for space in leads_behind(prompt, lead, comp.name)}
    assert prompt_tokens(llm, prompt + comp.text) == [*kept, *comp.tokens]


@pytest.mark.parametrize(("prompt", "choices"), ASKED)
def test_choose_with_a_healed_trie(llm: Llama, prompt: str, choices: list[str]) -> None:
    """The prompt is cut by ``choose`` where it has not been cut by hand."""
    ref = choose(llm, prompt, choices, heal=True)
    trie = TokenTrie.from_choices(llm, choices, prompt=prompt, heal=True)
    ids = prompt_tokens(llm, prompt)
    for asked in (prompt, ids, ids[: len(ids) - trie.n_healed]):
        comp = choose(llm, asked, trie)
        assert (comp.name, comp.text, comp.tokens) == (ref.name, ref.text, ref.tokens)
        assert comp.stats["prompt_tokens"] == ref.stats["prompt_tokens"]


def test_choose_with_a_healed_trie_behind_another_prompt(smollm2: Llama) -> None:
    trie = TokenTrie.from_choices(smollm2, ["//a", "//b"], prompt="http:", heal=True)
    with pytest.raises(VocabMismatchError, match="writes b':' again behind b'http', but this prompt ends in"):
        choose(smollm2, "Is fire hot?", trie)


def test_choose_heals_in_every_spelling(llm: Llama) -> None:
    for prompt, choices in ASKED[:3]:
        comp = choose(llm, prompt, choices, heal=True, tokenization="every", lead="")
        assert comp.complete
        assert comp.text == comp.name in choices


def test_choose_heals_sampled(smollm2: Llama) -> None:
    names = {
        choose(smollm2, "http:", ["//a", "//b"], heal=True, method="sample", temperature=50.0, seed=n).name
        for n in range(20)
    }
    assert names == {"//a", "//b"}


def test_choose_still_chooses_where_it_cannot_heal(smollm2: Llama) -> None:
    (alone,) = as_tokenizer(smollm2).tokenize(b":")
    with pytest.warns(TrieSamplerWarning, match="cannot be healed"):
        comp = choose(smollm2, [alone], ["//a", "//b"], heal=True)
    assert comp.complete
    letters = [token for letter in (b"w", b"o", b"r", b"d") for token in as_tokenizer(smollm2).tokenize(letter)]
    with pytest.warns(TrieSamplerWarning):
        comp = choose(smollm2, letters, ["s", "y"], heal=True)
    assert comp.complete


def test_case_13_the_name_has_no_space(llm: Llama) -> None:
    for heal in (False, True):
        comp = choose(llm, "Is fire hot? Yes or No? Answer:", ["Yes", "No"], lead=" ", heal=heal)
        assert comp.name in ("Yes", "No")
        assert comp.text == f" {comp.name}"


@pytest.mark.parametrize("prompt", ["Hi!", "Hi! "])
def test_case_15_nonsense_never_wins(llm: Llama, prompt: str) -> None:
    choices = ["Hello", "Goodbye", "^*B^&A"]
    assert choose(llm, prompt, choices, heal=True).name in choices[:2]


# --- the processor ----------------------------------------------------------------------------------------------------

CHOICES = ["//a", "//b", "yes"]


def complete(llm: Llama, prompt: Any, constraint: TrieLogitsProcessor) -> str:
    text = text_of(llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens))
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("tokenization", ["canonical", "every"])
@pytest.mark.parametrize("model", ["tiny", "tiny_bpe"])
def test_a_prepared_prompt(request: pytest.FixtureRequest, model: str, tokenization: str) -> None:
    llm = request.getfixturevalue(model)
    settings: dict[str, Any] = {"heal": True, "tokenization": tokenization, "lead": ""}
    constraint = TrieLogitsProcessor.from_choices(llm, CHOICES, **settings)
    ids = constraint.prepare("the one:")
    assert ids == prompt_tokens(llm, "the one:")[:-1]
    text = complete(llm, ids, constraint)
    comp = constraint.result
    assert (comp.text, comp.complete) == (comp.name, True)
    # The host knows of no healing: its text has the colon.
    assert text == f":{comp.text}"
    assert comp.name == choose(llm, "the one:", CHOICES, **settings).name
    assert constraint.max_tokens >= constraint.bind(ids).depth + 1


def test_a_prompt_that_was_not_prepared_is_a_choice_and_warns(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, heal=True, lead="")
    complete(tiny, "the one:", constraint)
    with pytest.warns(TrieSamplerWarning, match=r"was not healed, .*.*prepare\(prompt\)"):
        comp = constraint.result
    assert (comp.complete, comp.text) == (True, comp.name)
    assert comp.name in CHOICES
    # One that needs no healing says nothing.
    complete(tiny, "the one=", constraint)
    assert constraint.result.complete


def test_another_prompt_than_the_prepared_one(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, heal=True, lead="")
    constraint.prepare("the one:")
    complete(tiny, "the two:", constraint)
    with pytest.warns(TrieSamplerWarning, match="was not healed"):
        assert constraint.result.name in CHOICES
    complete(tiny, "no:", constraint)
    with pytest.warns(TrieSamplerWarning, match="was not healed"):
        assert constraint.result.name in CHOICES


def test_prompts_prepared_earlier_are_known_again(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, heal=True, lead="")
    prompts = [f"the {word}:" for word in ("one", "two", "ten", "red", "green", "blue")]
    prepared = [constraint.prepare(prompt) for prompt in prompts]
    refs = [choose(tiny, prompt, CHOICES, heal=True, lead="") for prompt in prompts]
    for place in (0, 5, 2, 2, 4, 1, 3, 0):
        complete(tiny, prepared[place], constraint)
        comp = constraint.result
        assert (comp.name, comp.tokens, comp.text) == (refs[place].name, refs[place].tokens, comp.name)


def test_prepare_keeps_the_host_as_it_is(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, heal=True, lead="")
    ids = prompt_tokens(tiny, "the one:")
    given_ids = list(ids)
    with evaluated(tiny) as prompts:
        assert constraint.prepare(given_ids) == ids[:-1]
    assert prompts == []
    assert given_ids == ids, "the caller's list stays whole"
    with pytest.raises(TrieSamplerError, match="never called"):
        _ = constraint.result
    # Without heal nothing is taken back.
    assert TrieLogitsProcessor.from_choices(tiny, CHOICES).prepare("the one:") == ids


def test_prepare_takes_messages(smollm2: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(smollm2, ["yes", "no"], heal=True)
    messages = [{"role": "user", "content": "Is fire hot?"}]
    assert constraint.prepare(messages) == prompt_tokens(smollm2, messages)


@pytest.mark.parametrize("prompt", [3, b"the", [10**6], []])
def test_prepare_refuses_and_stays_usable(tiny: Llama, prompt: Any) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, heal=True, lead="")
    ids = constraint.prepare("the one:")
    with pytest.raises((TypeError, TrieSamplerError)):
        constraint.prepare(prompt)
    assert complete(tiny, ids, constraint) == f":{constraint.result.name}"


def test_a_healed_trie_in_a_processor(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt="the one:", heal=True, lead="")
    constraint = TrieLogitsProcessor.from_choices(tiny, trie)
    ids = prompt_tokens(tiny, "the one:")
    assert constraint.prepare(ids) == constraint.prepare(ids[:-1]) == ids[:-1]
    complete(tiny, ids[:-1], constraint)
    assert constraint.result.text == constraint.result.name
    with pytest.raises(VocabMismatchError, match="again behind b'the one', but this prompt ends in"):
        complete(tiny, ids, constraint)


def test_a_prompt_cut_by_hand_that_ends_like_what_was_cut_is_not_cut_again(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt="the one::", heal=True, lead="")
    assert (trie.tail, trie.healed) == (b"the one:", b":")
    ids = prompt_tokens(tiny, "the one:")
    constraint = TrieLogitsProcessor.from_choices(tiny, trie)
    assert constraint.prepare("the one::") == ids
    assert constraint.prepare(ids) == ids


def test_a_healed_trie_leaves_something_of_every_prompt(tiny: Llama) -> None:
    trie = TokenTrie.from_choices(tiny, CHOICES, prompt="the one:", heal=True, lead="")
    with pytest.raises(VocabMismatchError, match="again"):
        choose(tiny, as_tokenizer(tiny).tokenize(b":"), trie)


def test_many_prepared_prompts_are_right_or_warned_about(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["//a", "//b"], heal=True, lead="")
    ids = [constraint.prepare(f"the {n}:") for n in range(70)]
    text = complete(tiny, ids[0], constraint)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comp = constraint.result
    assert caught or text == f":{comp.name}"


def test_a_constraint_that_heals_streamed(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, CHOICES, heal=True, lead="")
    ids = constraint.prepare("the one:")
    stream: Any = tiny.create_completion(
        ids, logits_processor=constraint, max_tokens=constraint.max_tokens, stream=True
    )
    text = "".join(event["choices"][0]["text"] for event in stream)
    assert text == f":{constraint.result.name}"


def test_a_healed_choice_cut_by_max_tokens(tiny: Llama) -> None:
    constraint = TrieLogitsProcessor.from_choices(tiny, ["//aaaa", "//bbbb"], heal=True, lead="")
    ids = constraint.prepare("the one:")
    tiny.create_completion(ids, logits_processor=constraint, max_tokens=1)
    comp = constraint.result
    assert (comp.name, comp.complete) == (None, False)
    assert "//aaaa".startswith(comp.text) or "//bbbb".startswith(comp.text)
