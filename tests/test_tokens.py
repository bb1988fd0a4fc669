"""From choices to token paths, with vocabularies small enough to read.

prompt  "... say ://"          tail: what follows its last control token
                ╰── edge ──╮
tokenize(  "say ://"  +  "a" )  =  [tokens of the tail]  +  [tokens of the choice]     a clean cut
tokenize(  "say :"    + "//a")  =  [... "://" across the edge ...]                      not clean: merged
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import choice_texts

from trie_sampler.choices import Choices, Spelling
from trie_sampler.errors import EmptyTrieError, TrieSamplerWarning, VocabMismatchError
from trie_sampler.tokens import (
    START,
    Edge,
    Spelled,
    Tokenizer,
    edge_of,
    spell_choices,
    tokenize_choices,
)

EOS, BOS = 0, 1
FIRST_PIECE, FIRST_BYTE = 2, 1000


class LongestMatch:
    """BPE-like: the longest piece at each place, else a byte. Ids: 0 end, 1 begin, 2.. pieces, 1000.. bytes."""

    n_vocab = 1256
    eog_ids: Sequence[int] = (EOS,)

    def __init__(self, *pieces: str) -> None:
        self.pieces = {piece.encode(): FIRST_PIECE + i for i, piece in enumerate(pieces)}
        self.texts = {token: piece for piece, token in self.pieces.items()}

    def tokenize(self, text: bytes) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len, default=text[:1])
            ids.append(self.pieces.get(piece, FIRST_BYTE + text[0]))
            text = text[len(piece) :]
        return ids

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.texts.get(t, bytes([t - FIRST_BYTE]) if t >= FIRST_BYTE else b"") for t in tokens)

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return token in (EOS, BOS)


class PrefixSpace(LongestMatch):
    """SentencePiece-like: a text begins with an invisible space, which becomes part of its first piece."""

    def tokenize(self, text: bytes) -> list[int]:
        return super().tokenize(b" " + text) if text else []


def paths(tokenizer: Tokenizer, prompt: str | Sequence[int] | None, choices: Any, lead: str = "auto") -> Any:
    """Name -> texts of the tokens of each path, "|" between them."""
    ids = tokenizer.tokenize(prompt.encode()) if isinstance(prompt, str) else prompt
    out: dict[str, list[str]] = {}
    for name, tokens in tokenize_choices(tokenizer, Choices.of(choices), ids, lead=lead).paths:
        out.setdefault(name, []).append("|".join(tokenizer.detokenize([t]).decode("utf-8", "replace") for t in tokens))
    return out


# --- choices as people have them ----------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    DEEP = "deep red"
    CRIMSON = "red"  # noqa: PIE796 - an alias: the same member


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(str, enum.Enum):
    YES = "yes"


class Nothing(enum.Enum):
    pass


#                        names, texts                        values
KINDS: list[tuple[Any, list[str], list[str], list[Any]]] = [
    (["a", "b"],         ["a", "b"],     ["a", "b"],         ["a", "b"]),
    (("a",),             ["a"],          ["a"],              ["a"]),
    ((x for x in "ab"),  ["a", "b"],     ["a", "b"],         ["a", "b"]),
    (["a", "a"],         ["a", "a"],     ["a", "a"],         ["a", "a"]),
    ([""],               [""],           [""],               [""]),
    ({"X": "ex", "Y": "why"}, ["X", "Y"], ["ex", "why"],     ["X", "Y"]),
    ({"X": "ex", "Y": "ex"}, ["X", "Y"], ["ex", "ex"],       ["X", "Y"]),
    ({"a": 1}.keys(),    ["a"],          ["a"],              ["a"]),
    (Colour,             ["red", "deep red"], ["red", "deep red"], [Colour.RED, Colour.DEEP]),
    (Level,              ["1", "2"],     ["1", "2"],         [Level.LOW, Level.HIGH]),
    (Word,               ["yes"],        ["yes"],            [Word.YES]),
    ([Word.YES],         ["yes"],        ["yes"],            ["yes"]),
    (Literal["a", "b"],  ["a", "b"],     ["a", "b"],         ["a", "b"]),
    (Literal["a", 7, True], ["a", "7", "True"], ["a", "7", "True"], ["a", 7, True]),
    (Literal[Colour.DEEP, Level.LOW], ["deep red", "1"], ["deep red", "1"], [Colour.DEEP, Level.LOW]),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "names", "texts", "values"), KINDS, ids=[str(kind[0])[:40] for kind in KINDS])
def test_kinds_of_choices(choices: Any, names: list[str], texts: list[str], values: list[Any]) -> None:
    comp = Choices.of(choices)
    assert (comp.names, comp.texts, comp.values) == (tuple(names), tuple(texts), tuple(values))
    assert Choices.of(comp) is comp
    # A member stays that member, True stays no 1.
    assert [type(value) for value in comp.values] == [type(value) if choices != [Word.YES] else str for value in values]
    assert {type(text) for text in comp.texts + comp.names} == {str}


@pytest.mark.parametrize("choices", [[], (), {}, iter(()), Nothing], ids=repr)
def test_no_choices(choices: Any) -> None:
    with pytest.raises(EmptyTrieError, match="choices is empty"):
        Choices.of(choices)


class Tuples(enum.Enum):
    PAIR = (1, 2)


@pytest.mark.parametrize(
    ("choices", "ref"),
    [
        ("yes", "choices must be a list of strings.* got 'yes'"),
        (b"yes", "choices must be"),
        (7, "choices must be"),
        (None, "choices must be"),
        (str, "choices must be"),
        ([1, 2], "a choice must be a string, got 1"),
        (["a", None], "a choice must be a string, got None"),
        ([b"a"], "a choice must be a string"),
        ({"a": 1}, "a text must be a string, got 1"),
        ({1: "a"}, "a name must be a string, got 1"),
        (Tuples, r"an Enum value must be a string, got \(1, 2\)"),
        (Literal[None], "a Literal argument must be a string, got None"),  # noqa: PYI061
        (Literal[b"a"], "a Literal argument must be a string"),
    ],
)
def test_other_kinds_are_a_type_error(choices: Any, ref: str) -> None:
    with pytest.raises(TypeError, match=ref):
        Choices.of(choices)


def test_a_long_wrong_choice_is_cut_in_the_message() -> None:
    with pytest.raises(TypeError) as caught:
        Choices.of("x" * 10_000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("choices", [["\ud800"], {"a": "\udfff"}, {"\udfff": "a"}])
def test_text_that_is_no_unicode_is_refused(choices: Any) -> None:
    with pytest.raises(ValueError, match="not valid Unicode text"):
        Choices.of(choices)


def test_index_of_equal_names_is_the_first() -> None:
    choices = Choices.of(["b", "a", "b"])
    assert [choices.index_of(name) for name in "ab"] == [1, 0]


# --- leading spaces -----------------------------------------------------------------------------

BOTH, BARE, SPACED = ["PLAY", " |PLAY"], ["PLAY"], [" |PLAY"]

#   prompt                      lead    spellings
LEADS: list[tuple[str | list[int] | None, str, list[str]]] = [
    ("Action:",                 "auto", BOTH),
    ("Action",                  "auto", BOTH),
    ("Action.",                 "auto", BOTH),
    ("done)",                   "auto", BOTH),
    ("Action: ",                "auto", BARE),
    ("Action:\n",               "auto", BARE),
    ("Action:\t",               "auto", BARE),
    ("Action:\u3000",           "auto", BARE),  # an ideographic space is white space
    ("Action:\u00a0",           "auto", BARE),
    *((f"say {opener}",         "auto", BARE) for opener in "\"'`([{<«“‘„‹「『（"),
    ([],                        "auto", BARE),
    ([BOS],                     "auto", BARE),
    ([FIRST_BYTE + 58, EOS],    "auto", BARE),  # ":", then a control token
    ([BOS, FIRST_BYTE + 58],    "auto", BOTH),
    (None,                      "auto", BOTH),
    (None,                      "",     BARE),
    (None,                      " ",    SPACED),
    ([BOS],                     " ",    SPACED),
    ("Action:",                 "",     BARE),
    ("Action:",                 " ",    SPACED),
    ("Action: ",                " ",    SPACED),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "lead", "spellings"), LEADS, ids=repr)
def test_lead(prompt: Any, lead: str, spellings: list[str]) -> None:
    assert paths(LongestMatch("PLAY", "Action"), prompt, {"X": "PLAY"}, lead) == {"X": spellings}


def test_the_space_is_part_of_the_token_where_the_vocabulary_has_it() -> None:
    """Models write " PLAY" as one token, which no trie of "PLAY" holds."""
    assert paths(LongestMatch("PLAY", " PLAY"), "Action:", ["PLAY"]) == {"PLAY": ["PLAY", " PLAY"]}


def test_a_choice_with_a_space_of_its_own_gets_no_other() -> None:
    for lead in ("auto", " ", ""):
        assert paths(LongestMatch(), "x:", [" a", "\nb"], lead) == {" a": [" |a"], "\nb": ["\n|b"]}


@pytest.mark.parametrize("lead", ["always", None, "  ", "\n", True])
def test_another_lead_is_refused(lead: Any) -> None:
    with pytest.raises(ValueError, match='lead must be "auto", "" or " "'):
        tokenize_choices(LongestMatch(), Choices.of(["a"]), None, lead=lead)


def test_a_choice_without_text_has_an_empty_path() -> None:
    spelled = tokenize_choices(LongestMatch(), Choices.of({"none": "", "a": "a"}), None)
    a = FIRST_BYTE + ord("a")
    assert spelled == Spelled((("none", ()), ("a", (a,)), ("a", (FIRST_BYTE + 32, a))), b"")


# --- behind the prompt --------------------------------------------------------------------------


def test_a_sentencepiece_choice_gets_no_invisible_space_in_mid_text() -> None:
    """Tokenized alone "PLAY" would begin with the piece " PLAY", which a quote is never followed by."""
    tokenizer = PrefixSpace(" PLAY", "PLAY", " say", ' "')
    assert [tokenizer.texts[token] for token in tokenizer.tokenize(b"PLAY")] == [b" PLAY"]
    assert paths(tokenizer, 'say "', ["PLAY"]) == {"PLAY": ["PLAY"]}
    assert paths(tokenizer, "say:", ["PLAY"]) == {"PLAY": ["PLAY", " PLAY"]}
    # At the start of a text and after a control token it is what the model was trained on.
    assert paths(tokenizer, [BOS], ["PLAY"]) == {"PLAY": [" PLAY"]}
    assert paths(tokenizer, [], ["PLAY"]) == {"PLAY": [" PLAY"]}


def test_the_tail_is_remembered() -> None:
    tokenizer = LongestMatch()
    ids = [BOS, *tokenizer.tokenize(b"user"), EOS, *tokenizer.tokenize(b"Hi:")]
    assert tokenize_choices(tokenizer, Choices.of(["a"]), ids).tail == b"Hi:"
    assert tokenize_choices(tokenizer, Choices.of(["a"]), [BOS]).tail == b""
    assert tokenize_choices(tokenizer, Choices.of(["a"]), None).tail == b""


def test_the_prompt_may_be_any_sequence() -> None:
    ids = LongestMatch().tokenize(b"Action:")
    ref = tokenize_choices(LongestMatch(), Choices.of(["a"]), ids)
    assert tokenize_choices(LongestMatch(), Choices.of(["a"]), tuple(ids)) == ref


# A vocabulary in which ":" and "//" merge, and words carry their space.
URLS = LongestMatch(":", "://", "//", "http", " a", "ab", " ab", ": ")


def test_a_merge_over_the_edge_warns_once_and_spells_the_whole_choice() -> None:
    with pytest.warns(
        TrieSamplerWarning, match=r"ends in 'http:', .* merged with the choice '//a' and 1 more"
    ) as caught:
        comp = paths(URLS, "http:", ["//a", "//b", "c"], lead="")
    assert len(caught) == 1
    assert comp == {"//a": ["//|a"], "//b": ["//|b"], "c": ["c"]}


def test_the_warning_for_one_choice_counts_no_more() -> None:
    with pytest.warns(TrieSamplerWarning) as caught:
        paths(URLS, "http:", ["//a"], lead="")
    assert "more;" not in str(caught[0].message)
    assert "end the prompt before the space or the half word" in str(caught[0].message)


def test_where_one_spelling_is_clean_the_other_is_left_out() -> None:
    """ "http:" + "c" is clean; "http:" + " c" would make the token ": "."""
    assert paths(URLS, "http:", ["c"]) == {"c": ["c"]}


def test_where_both_spellings_merge_the_bare_one_stands() -> None:
    with pytest.warns(TrieSamplerWarning, match="merged"):
        assert paths(URLS, "http:", ["//a"]) == {"//a": ["//|a"]}


def test_a_prompt_that_ends_in_half_a_word() -> None:
    with pytest.warns(TrieSamplerWarning, match=r"ends in 'xa'.*'bc'"):
        assert paths(URLS, "xa", ["bc"], lead="") == {"bc": ["b|c"]}


def test_a_prompt_that_ends_in_a_space_which_words_carry() -> None:
    with pytest.warns(TrieSamplerWarning, match=r"ends in '. ', .*'ab'"):
        assert paths(URLS, ". ", ["ab"]) == {"ab": ["ab"]}


def test_a_choice_stands_alone_behind_the_first_anchor_that_it_does_not_merge_with() -> None:
    tokenizer = LongestMatch(":x", "\nx", ".x")
    with pytest.warns(TrieSamplerWarning):
        assert paths(tokenizer, "a:", ["xy"], lead="") == {"xy": ["x|y"]}


def test_a_choice_that_merges_with_everything_is_refused() -> None:
    tokenizer = LongestMatch(":x", "\nx", ".x", ")x", "|x", "ax")
    with pytest.raises(VocabMismatchError, match="choice 'xy' merges with whatever stands before it"):
        paths(tokenizer, "a:", ["xy"], lead="")


@pytest.mark.parametrize("make", [LongestMatch, PrefixSpace])
@given(
    prompt=st.text("ab: /", min_size=1, max_size=14),
    choices=st.lists(st.text("ab: /", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    lead=st.sampled_from(["auto", "", " "]),
)
def test_a_path_is_what_the_whole_text_tokenizes_to(make: Any, prompt: str, choices: list[str], lead: str) -> None:
    """The oracle tokenizes prompt and choice as one text and cuts off the prompt."""
    tokenizer = make(":", "://", "//", "ab", " ab", " a", "a:", "b ")
    ids = tokenizer.tokenize(prompt.encode())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comp = tokenize_choices(tokenizer, Choices.of(choices), ids, lead=lead)
    spellings = {"auto": [""] if prompt[-1] in " (" else ["", " "], "": [""], " ": [" "]}[lead]
    ref: list[tuple[str, tuple[int, ...] | None]] = []
    for choice in choices:
        clean = []
        for spelling in [""] if choice[0] == " " else spellings:
            whole = tokenizer.tokenize((prompt + spelling + choice).encode())
            if whole[: len(ids)] == ids:
                clean.append((choice, tuple(whole[len(ids) :])))
        ref += clean or [(choice, None)]
    assert [name for name, _ in comp.paths] == [name for name, _ in ref]
    for (name, tokens), (_, wanted) in zip(comp.paths, ref, strict=True):
        if wanted is None:
            assert tokenizer.detokenize(tokens).decode().removeprefix(" ") == name.removeprefix(" ")
        else:
            assert tokens == wanted
    n_merged = sum(wanted is None for _, wanted in ref)
    caught = [warning for warning in caught if "some choices begin with a space" not in str(warning.message)]
    assert len(caught) == (n_merged > 0)
    assert not caught or ("more" in str(caught[0].message)) == (n_merged > 1)


@pytest.mark.parametrize(("prompt", "lead"), [(None, "auto"), (None, " "), ([BOS], " ")])
def test_a_space_is_not_put_before_the_invisible_one(prompt: list[int] | None, lead: str) -> None:
    """Llama 2, Mistral and Phi-3 put a space before any text: " ab" at the start of a text comes out as two."""
    tokenizer = PrefixSpace(" ab", "ab")
    assert " ab" in paths(tokenizer, prompt, ["ab"], lead)["ab"]


@given(choice_texts(), st.sampled_from(["auto", "", " "]), st.sampled_from([LongestMatch, PrefixSpace]))
def test_any_text_is_spelled(choices: list[str], lead: str, make: Any) -> None:
    tokenizer = make("RE", "PLY", " RE", "日", "\n")
    for prompt in (None, [BOS], tokenizer.tokenize(b"Action:")):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "some choices begin with a space")
            spelled = tokenize_choices(tokenizer, Choices.of(choices), prompt, lead=lead)
        for name, tokens in spelled.paths:
            assert tokenizer.detokenize(tokens).decode() in (name, " " + name)


# --- refusals -----------------------------------------------------------------------------------


def test_a_vocabulary_that_cannot_write_a_choice_is_refused() -> None:
    class Lower(LongestMatch):
        def tokenize(self, text: bytes) -> list[int]:
            return super().tokenize(text.lower())

    with pytest.raises(VocabMismatchError, match=r"choice 'Yes': its tokens .* spell b'yes': this vocabulary cannot"):
        paths(Lower(), None, ["no", "Yes"], lead="")
    assert paths(Lower(), None, ["no"], lead="") == {"no": ["n|o"]}


@pytest.mark.parametrize("spelled", [b"ab ", b"  ab", b"a", b"", b"ab\n"])
def test_only_one_leading_space_may_differ(spelled: bytes) -> None:
    class Sloppy(LongestMatch):
        def detokenize(self, tokens: Sequence[int]) -> bytes:
            del tokens
            return spelled

    with pytest.raises(VocabMismatchError, match="choice 'ab'"):
        paths(Sloppy(), None, ["ab"], lead="")


@pytest.mark.parametrize(("token", "eog_ids"), [(BOS, (EOS,)), (EOS, (EOS,)), (7, (7,))])
def test_text_from_a_user_never_makes_a_control_or_end_token(token: int, eog_ids: tuple[int, ...]) -> None:
    class Parsing(LongestMatch):
        """Parses "<s>", as a tokenizer does that is asked for special tokens."""

        def tokenize(self, text: bytes) -> list[int]:
            before, found, after = text.partition(b"<s>")
            return super().tokenize(before) + ([token, *self.tokenize(after)] if found else [])

    tokenizer = Parsing()
    tokenizer.eog_ids = eog_ids
    with pytest.raises(VocabMismatchError, match=rf"choice 'a<s>b': token {token} at index 1 is a control token"):
        paths(tokenizer, None, ["ok", "a<s>b"], lead="")


# --- the edge -----------------------------------------------------------------------------------


def edge_text(tokenizer: LongestMatch, ids: list[int]) -> tuple[str, bool]:
    edge = edge_of(tokenizer, ids)
    return edge.text.decode(), bool(edge.tokens)


def test_the_start_of_a_text_is_one_edge() -> None:
    assert edge_of(LongestMatch(), []) is START
    assert edge_of(LongestMatch(), [BOS]) is START
    assert edge_of(LongestMatch(), [*LongestMatch().tokenize(b"ab"), EOS]) is START
    assert (START.text, START.tokens, START.spaceless) == (b"", (), True)


def test_the_edge_ends_at_the_last_control_token() -> None:
    tokenizer = LongestMatch()
    ids = [*tokenizer.tokenize(b"before"), EOS, *tokenizer.tokenize(b"after:")]
    after = tuple(tokenizer.tokenize(b"after:"))
    assert edge_of(tokenizer, ids) == Edge(b"after:", after, spaceless=False, n_healable=len(after))


def test_the_edge_is_a_short_window() -> None:
    """A long prompt is not tokenized again for each choice."""
    ids = LongestMatch().tokenize(b"abcdefghijklmnopqrstuvwxyz")
    assert edge_text(LongestMatch(), ids) == ("stuvwxyz", True)


def test_a_character_cut_at_the_start_of_the_window_is_left_out() -> None:
    """Eight of the nine bytes of three characters: the window begins inside the first."""
    ids = LongestMatch().tokenize("日本語".encode())
    assert len(ids) == 9
    assert edge_text(LongestMatch(), ids) == ("本語", True)
    ids = LongestMatch().tokenize("xx\U0001f642\U0001f643abc".encode())[:-1]  # 2 + 4 + 4 + 2: five bytes cut off
    assert edge_text(LongestMatch(), ids) == ("\U0001f643ab", True)


def test_four_continuation_bytes_are_no_character() -> None:
    """At most three are cut: more cannot belong to one character, so no text gives these ids."""
    ids = [FIRST_BYTE + 0x80] * 5 + LongestMatch().tokenize(b"abc")
    assert edge_of(LongestMatch(), ids).tokens == ()


def test_a_prompt_of_nothing_but_a_cut_character_gives_nothing_to_stand_behind() -> None:
    ids = [FIRST_BYTE + 0xA5] * 3
    edge = edge_of(LongestMatch(), ids)
    assert (edge.tokens, edge.spaceless) == ((), True)
    with pytest.warns(TrieSamplerWarning, match="would have merged"):
        assert paths(LongestMatch(), ids, ["a"]) == {"a": ["a"]}


def test_ids_that_no_text_tokenizes_to_give_nothing_to_stand_behind() -> None:
    """ "a", "b" where the vocabulary would write "ab"."""
    ids = [FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")]
    assert edge_text(URLS, ids) == ("ab", False)
    with pytest.warns(TrieSamplerWarning, match="would have merged with the choice 'c'"):
        assert paths(URLS, ids, ["c"]) == {"c": ["c"]}


class FarSighted(LongestMatch):
    """Writes the bytes of a text below ``n_needed`` in another way: a short window does not tokenize back."""

    def __init__(self, n_needed: int) -> None:
        super().__init__()
        self.n_needed = n_needed

    def tokenize(self, text: bytes) -> list[int]:
        return super().tokenize(text) if len(text) >= self.n_needed else [5] * len(text)


@pytest.mark.parametrize(
    ("n_needed", "n_prompt", "n_window"),
    [
        (8, 200, 8),
        (9, 200, 32),
        (32, 200, 32),
        (33, 200, 128),
        (128, 200, 128),
        (9, 32, 32),
        (9, 20, 20),
        (5, 7, 7),
    ],
)
def test_longer_windows_follow_where_the_short_does_not_tokenize_back(
    n_needed: int, n_prompt: int, n_window: int
) -> None:
    ids = LongestMatch().tokenize(bytes(97 + i % 26 for i in range(n_prompt)))
    edge = edge_of(FarSighted(n_needed), ids)
    assert edge.tokens == tuple(ids[-n_window:])
    assert edge.text == LongestMatch().detokenize(ids[-n_window:])


def test_no_window_is_longer_than_128_tokens() -> None:
    ids = LongestMatch().tokenize(b"y" * 72 + b"x" * 128)
    assert edge_of(FarSighted(129), ids) == Edge(b"x" * 128, (), spaceless=False)


def test_a_window_need_only_end_like_the_prompt() -> None:
    """SentencePiece begins the window with a space that the prompt does not have there."""
    tokenizer = PrefixSpace(" say", " hello", "hello")
    ids = tokenizer.tokenize(b"say hello to everyone:")
    edge = edge_of(tokenizer, ids)
    assert edge.tokens != tuple(ids[-len(edge.tokens) :])
    assert edge.tokens[-4:] == tuple(ids[-4:])
    assert edge.text == b"veryone:"


def test_spell_choices_behind_an_edge_at_hand() -> None:
    edge = edge_of(URLS, URLS.tokenize(b"x:"))
    choices = Choices.of(["b"])
    assert spell_choices(URLS, choices, edge, Spelling()) == tokenize_choices(URLS, choices, URLS.tokenize(b"x:"))
    assert spell_choices(URLS, choices, START, Spelling()).paths == (("b", (FIRST_BYTE + ord("b"),)),)
    # Where the prompt is not known both spellings are taken.
    assert len(spell_choices(URLS, choices, START, Spelling(), known=False).paths) == 2


def test_the_toys_are_tokenizers() -> None:
    assert isinstance(URLS, Tokenizer)
    assert not isinstance(object(), Tokenizer)
