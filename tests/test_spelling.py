"""What else stands for a choice: JSON values, other letter cases, control tokens; and slips with leading spaces.

choice  red   json_value  "red"      behind an opening quote  red"
              case_fold   red  RED  Red
              special     <|user|>red -> the control token, then red
"""

from __future__ import annotations

import enum
import json
import warnings
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import AWKWARD_TEXTS, texts
from test_healing import BOS, Toy, all_paths, spellings

from trie_sampler import (
    EmptyTrieError,
    TokenTreePayload,
    TokenTrie,
    TrieCursor,
    TrieLogitsProcessor,
    TrieSamplerWarning,
    VocabMismatchError,
    check_prompt,
    choose,
)
from trie_sampler.binding import Binding
from trie_sampler.choices import Choices, Spelling
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens

if TYPE_CHECKING:
    from llama_cpp import Llama

LETTERS = Toy({"red": 2, "wood": 3, " red": 4, '"': 5, ' "': 6, "RED": 7, "Red": 8})
CONTROL = {"smollm2": "<|im_start|>", "gemma": "<start_of_turn>", "tiny": "<start_of_turn>"}
END = {"smollm2": "<|im_end|>", "gemma": "<end_of_turn>", "tiny": "<end_of_turn>"}


def written(tokenizer: Any, trie: TokenTrie) -> dict[str, set[str]]:
    """Name -> the texts that its paths add to the prompt."""
    out: dict[str, set[str]] = {}
    for name, tokens in trie.leaves():
        out.setdefault(name, set()).add(tokenizer.detokenize(tokens)[len(trie.healed) :].decode())
    return out


# --- the settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lead": "  "}, "lead must be"),
        ({"lead": None}, "lead must be"),
        ({"tokenization": "both"}, 'tokenization must be "canonical" or "every"'),
        ({"tokenization": None}, "tokenization must be"),
        ({"special": True, "tokenization": "every"}, "special=True needs"),
    ],
)
def test_words_that_are_none_are_refused(tiny: Llama, settings: dict[str, Any], words: str) -> None:
    for ask in (
        lambda: Spelling(**settings),
        lambda: TokenTrie.from_choices(LETTERS, ["a"], **settings),
        lambda: check_prompt(LETTERS, "x", ["a"], **settings),
        lambda: choose(tiny, "x", ["a"], **settings),
        lambda: TrieLogitsProcessor.from_choices(tiny, ["a"], **settings),
    ):
        with pytest.raises(ValueError, match=words):
            ask()


@pytest.mark.parametrize("keyword", ["jsonvalue", "fold", "leading", "healing", "Special", "valid"])
def test_unknown_keywords_are_type_errors(tiny: Llama, keyword: str) -> None:
    ids = list(tiny.input_ids)
    settings: dict[str, Any] = {keyword: True}
    for ask in (TokenTrie.from_choices, TrieLogitsProcessor.from_choices):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            ask(tiny, ["a"], **settings)
    for door in (choose, check_prompt):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            door(tiny, "x", ["a"], **settings)
    assert list(tiny.input_ids) == ids, "nothing was evaluated"


SET = [{"heal": True}, {"json_value": True}, {"case_fold": True}, {"special": True}, {"lead": ""}]
PAYLOAD = '{"modelId": "m", "descriptors": [{"path": "", "leaves": [{"name": "a", "tokens": [327]}]}]}'


@pytest.mark.parametrize("settings", [*SET, {"tokenization": "every"}], ids=str)
def test_what_is_spelled_already_takes_no_spelling(tiny: Llama, settings: dict[str, Any]) -> None:
    trie = TokenTrie.from_choices(tiny, ["a", "b"], prompt="x:", lead="")
    payload = TokenTreePayload.from_json(PAYLOAD)
    before = list(trie.leaves())
    with pytest.raises(ValueError, match="a TokenTrie is spelled already"):
        choose(tiny, "x:", trie, **settings)
    for source in (trie, payload):
        with pytest.raises(ValueError, match=f"a {type(source).__name__} is spelled already"):
            TrieLogitsProcessor.from_choices(tiny, source, **settings)
        with pytest.raises(ValueError, match="is spelled already"):
            Binding.of(as_tokenizer(tiny), source, spelling=Spelling(**settings))
    with pytest.raises(TypeError, match="unexpected keyword"):
        TrieLogitsProcessor.from_payload(tiny, payload, **settings)
    assert list(trie.leaves()) == before
    # Settings that say what holds anyway are no settings.
    assert choose(tiny, "x:", trie, lead="auto", heal=False, tokenization="canonical").name in ("a", "b")


# --- JSON values ------------------------------------------------------------------------------------------------------

NASTY = [
    "", '"', '""', "\\", '\\"', "\n", "two\nlines", "a\tb", "\r\n", "\x00", "\x1f", "日本語", "🙂", "é", "e\u0301", "/",
    "</script>", "\u2028", "{}", "[1]", "null", "true", "7", " x", "x ", "'", "a\\nb", '{"a": "b"}', "\x7f",
]  # fmt: skip
PROMPTS = ['{"color": "', '{"color": ', '{"color":', "color = ", None]


@pytest.mark.parametrize("lead", ["auto", "", " "])
@pytest.mark.parametrize("heal", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_what_is_written_reads_back_as_the_name(llm: Llama, prompt: str | None, heal: bool, lead: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*merged with|.*cannot be healed")
        trie = TokenTrie.from_choices(llm, NASTY, prompt=prompt, lead=lead, heal=heal, json_value=True)
    opened = '"' if prompt and prompt.endswith('"') else ""
    comp = written(as_tokenizer(llm), trie)
    assert set(comp) == set(NASTY)
    for name, forms in comp.items():
        for text in forms:
            assert json.loads(opened + text) == name
            assert text.endswith('"')


@given(st.lists(texts(), min_size=1, max_size=5, unique=True), st.sampled_from(PROMPTS), st.booleans())
def test_any_text_reads_back_as_the_name(choices: list[str], prompt: str | None, fold: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*merged with")
        trie = TokenTrie.from_choices(LETTERS, choices, prompt=prompt, json_value=True, case_fold=fold)
    opened = '"' if prompt and prompt.endswith('"') else ""
    for name, forms in written(LETTERS, trie).items():
        back = {json.loads(opened + text) for text in forms}
        assert back <= {name, name.lower(), name.upper(), name.capitalize()}
        # A choice keeps what it is as it stands, whatever the others fold to.
        assert name in back


@pytest.mark.parametrize("text", [*NASTY[:8], "日本語", 'say "hi"'])
def test_a_choice_of_the_model_reads_back(smollm2: Llama, text: str) -> None:
    for prompt in ('{"color": "', '{"color":'):
        comp = choose(smollm2, prompt, [text, "other"], json_value=True, heal=True, method="sample", seed=1)
        assert json.loads(prompt + comp.text + "}") == {"color": comp.name}


class Color(enum.Enum):
    RED = "red"
    REDWOOD = "redwood"
    BLUE = "blue"


def test_case_99_enum_values_in_json_output(llm: Llama) -> None:
    tokenizer = as_tokenizer(llm)
    prompt = '{"color": "'
    trie = TokenTrie.from_choices(llm, Color, prompt=prompt, json_value=True)
    node = trie.root
    for token in tokenizer.tokenize(b"\nred")[1:]:
        node = trie.step(node, token)
    # The two part at the quote against "w", not at an end token.
    assert not trie.is_terminal(node)
    assert {tokenizer.detokenize([token])[:1] for token in trie.children(node).tolist()} == {b'"', b"w"}
    for prompt in ('{"color": "', '{"color": ', '{"color":'):
        comp = choose(llm, f"The sky as JSON: {prompt}", Color, json_value=True, heal=True)
        assert isinstance(comp.value, Color)
        assert comp.value.value == comp.name
        assert json.loads(prompt + comp.text + "}") == {"color": comp.name}


def test_red_and_redwood_part_at_the_quote() -> None:
    comp = spellings(LETTERS, TokenTrie.from_choices(LETTERS, ["red", "redwood"], prompt='x: "', json_value=True))
    assert comp == {"red": ['red|"'], "redwood": ['red|wood|"']}
    comp = spellings(LETTERS, TokenTrie.from_choices(LETTERS, ["red"], prompt="x:", json_value=True))
    assert comp == {"red": [' "|red|"', '"|red|"']}
    # In quotes lead= has no say.
    comp = spellings(LETTERS, TokenTrie.from_choices(LETTERS, ["red"], prompt='x: "', json_value=True, lead=" "))
    assert comp == {"red": ['red|"']}


def test_case_16_the_shared_quote_is_not_a_token_of_its_own() -> None:
    """As ids: the root has the merged tokens, not the lone quote 8, and nothing is forced there."""
    trie = TokenTrie.from_sequences([("author", [40, 41]), ("title", [50, 41])])
    assert trie.children(trie.root).tolist() == [40, 50]
    assert TrieCursor(trie, eog_ids=[0]).forced_run().tolist() == []
    tokenizer = Toy({'"': 8, '"author': 40, '"title': 50})
    for prompt in ("{", None):
        trie = TokenTrie.from_choices(tokenizer, ["author", "title"], prompt=prompt, json_value=True, lead="")
        assert sorted(trie.leaves()) == [("author", (40, 8)), ("title", (50, 8))]


def test_case_16_free_text_after_the_pick_is_free_generations(llm: Llama) -> None:
    prompt = "One, two, three, four, five, six, seven, eight, nine, ten. Again: One, two, three,"
    ids = prompt_tokens(llm, prompt)

    def free(start: list[int], n: int) -> list[int]:
        picks: list[int] = []
        for token in llm.generate(start, temp=0.0):
            picks.append(token)
            if len(picks) == n:
                break
        return picks

    ref = free(ids, 8)
    text = as_tokenizer(llm).detokenize(ref[:3]).decode()
    comp = choose(llm, prompt, [text, "zebra", " and"], lead="")
    assert comp.text == text
    assert list(comp.tokens) == ref[:3]
    assert free([*ids, *comp.tokens], 5) == ref[3:]


class Mixed(enum.Enum):
    YES = True
    SEVEN = 7
    HALF = 0.5
    WORD = "true"


def test_numbers_and_truth_values_are_written_as_json(tiny: Llama) -> None:
    choices = Literal[7, True, False, -3, "a"]
    trie = TokenTrie.from_choices(LETTERS, choices, prompt="x=", json_value=True, lead="")
    assert written(LETTERS, trie) == {
        "7": {"7"}, "True": {"true"}, "False": {"false"}, "-3": {"-3"}, "a": {'"a"'}
    }  # fmt: skip
    for name, forms in written(LETTERS, trie).items():
        assert str(json.loads(*forms)) == name
    # In quotes it can only be text.
    trie = TokenTrie.from_choices(LETTERS, choices, prompt='x: "', json_value=True)
    assert written(LETTERS, trie)["True"] == {'True"'}
    assert written(LETTERS, trie)["7"] == {'7"'}
    trie = TokenTrie.from_choices(LETTERS, Mixed, prompt="x=", json_value=True, lead="")
    assert written(LETTERS, trie) == {"True": {"true"}, "7": {"7"}, "0.5": {"0.5"}, "true": {'"true"'}}
    # Without JSON as Python writes them.
    assert written(LETTERS, TokenTrie.from_choices(LETTERS, Literal[True], lead="")) == {"True": {"True"}}
    for n in range(8):
        comp = choose(tiny, "kind=", Mixed, lead="", json_value=True, method="sample", temperature=20.0, seed=n)
        assert json.loads(comp.text) == comp.value.value
        assert type(json.loads(comp.text)) is type(comp.value.value)


def test_numbers_fold_to_nothing_else() -> None:
    trie = TokenTrie.from_choices(LETTERS, Literal[True, 7], prompt="x: ", json_value=True, case_fold=True)
    assert written(LETTERS, trie) == {"True": {"true"}, "7": {"7"}}


def test_two_things_of_one_name_are_refused() -> None:
    for choices in (Literal[1, "1"], Literal[True, "True"], enum.Enum("odd", {"A": 1, "B": "1"})):
        with pytest.raises(ValueError, match="would both be called"):
            Choices.of(choices)
    assert Choices.of(["a", "a"]).names == ("a", "a")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_that_json_does_not_have_are_refused(value: float) -> None:
    odd = enum.Enum("odd", {"A": value, "B": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        TokenTrie.from_choices(LETTERS, odd, prompt="x: ", json_value=True)


def test_json_values_in_every_spelling() -> None:
    trie = TokenTrie.from_choices(LETTERS, ["red"], prompt='x "', json_value=True, tokenization="every")
    comp = {LETTERS.detokenize(path) for _, path in all_paths(trie)}
    assert comp == {b'red"'}
    assert len(set(all_paths(trie))) == 4, "red as a word and as letters, the quote as a piece and as a byte"


def test_a_payload_of_choices_without_text_needs_json() -> None:
    with pytest.raises(EmptyTrieError):
        TokenTrie.from_choices(LETTERS, [""])
    assert written(LETTERS, TokenTrie.from_choices(LETTERS, [""], json_value=True, lead="")) == {"": {'""'}}


# --- letter cases -----------------------------------------------------------------------------------------------------


def folded(choices: Any, **settings: Any) -> dict[str, set[str]]:
    settings.setdefault("lead", "")
    return written(LETTERS, TokenTrie.from_choices(LETTERS, choices, case_fold=True, **settings))


FOLDED: list[tuple[Any, dict[str, set[str]]]] = [
    (["red"], {"red": {"red", "RED", "Red"}}),
    (["rEd"], {"rEd": {"rEd", "red", "RED", "Red"}}),
    (["PLAY_Music"], {"PLAY_Music": {"PLAY_Music", "play_music", "PLAY_MUSIC", "Play_music"}}),
    (["1.5"], {"1.5": {"1.5"}}),
    (["straße"], {"straße": {"straße", "STRASSE", "Straße"}}),
    ({"X": "red"}, {"X": {"red", "RED", "Red"}}),
    (Color, {"red": {"red", "RED", "Red"}, "redwood": {"redwood", "REDWOOD", "Redwood"},
             "blue": {"blue", "BLUE", "Blue"}}),
    # What is another choice as it stands is that choice.
    # Of what two fold to, the smaller name takes it.
    (["red", "RED"], {"red": {"red"}, "RED": {"RED", "Red"}}),
    (["RED", "red", "Red"], {"red": {"red"}, "RED": {"RED"}, "Red": {"Red"}}),
    ({"a": "RED", "z": "red"}, {"a": {"RED", "Red"}, "z": {"red"}}),
    ({"z": "RED", "a": "red"}, {"a": {"red", "Red"}, "z": {"RED"}}),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "ref"), FOLDED, ids=[str(choices)[:40] for choices, _ in FOLDED])
def test_folded_texts(choices: Any, ref: dict[str, set[str]]) -> None:
    assert folded(choices) == ref


def test_folded_texts_of_two_choices_collide() -> None:
    trie = TokenTrie.from_choices(LETTERS, ["rED", "REd"], case_fold=True, lead="")
    assert written(LETTERS, trie) == {"REd": {"REd", "red", "RED", "Red"}, "rED": {"rED"}}
    assert {(c.kept, c.dropped, LETTERS.detokenize(c.tokens)) for c in trie.collisions} == {
        ("REd", "rED", text) for text in (b"red", b"RED", b"Red")
    }
    assert trie.n_leaves == 2


@given(st.lists(st.text("aAbBß", min_size=1, max_size=3), min_size=1, max_size=5, unique=True))
def test_an_exact_text_is_always_its_own_choice(choices: list[str]) -> None:
    comp = folded(choices)
    assert set(comp) == set(choices)
    for name, forms in comp.items():
        assert name in forms
        assert not forms & (set(choices) - {name})
        assert forms <= {name, name.lower(), name.upper(), name.capitalize()}


def test_an_exact_text_with_a_space_of_its_own_wins_too() -> None:
    with pytest.warns(TrieSamplerWarning, match="begin with a space"):
        trie = TokenTrie.from_choices(LETTERS, {"b": " no", "a": "NO"}, case_fold=True)
    assert " no" in written(LETTERS, trie).get("b", set())


def test_folded_choices_come_back_as_they_were_given(tiny: Llama) -> None:
    seen = set()
    for n in range(40):
        comp = choose(tiny, "kind=", Color, lead="", case_fold=True, method="sample", temperature=20.0, seed=n)
        assert comp.name == comp.value.value == list(Color)[comp.index if comp.index is not None else -1].value
        assert comp.text.lower() == comp.name
        seen.add(comp.text)
    assert len(seen) > 3


def test_folded_json() -> None:
    assert folded(["red", "RED"], prompt='x: "', json_value=True) == {"red": {'red"'}, "RED": {'RED"', 'Red"'}}


def test_folded_in_every_spelling_and_healed() -> None:
    tokenizer = Toy({" R": 2, "ed": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trie = TokenTrie.from_choices(tokenizer, ["red"], prompt="x ", case_fold=True, heal=True)
    assert (trie.n_healed, trie.healed) == (1, b" ")
    assert written(tokenizer, trie) == {"red": {"red", "RED", "Red"}}
    every = TokenTrie.from_choices(
        tokenizer, ["red"], prompt="x ", case_fold=True, heal=True, tokenization="every", lead=""
    )
    assert {tokenizer.detokenize(path) for _, path in all_paths(every)} == {b" red", b" RED", b" Red"}


# --- control tokens ---------------------------------------------------------------------------------------------------

MARKED = Toy({"user": 2, "a": 3, "<": 4}, {"<|user|>": 7, "<|end|>": 0})


def test_case_37_a_control_token_by_its_text() -> None:
    """The default is plain pieces; an end token is refused with its place."""
    plain = TokenTrie.from_choices(MARKED, ["<|user|>", "<|end|>"], lead="")
    paths = dict(plain.leaves())
    assert paths["<|user|>"] == tuple(MARKED.tokenize(b"<|user|>"))
    assert MARKED.detokenize(paths["<|end|>"]) == b"<|end|>"
    assert dict(TokenTrie.from_choices(MARKED, ["<|user|>"], lead="", special=True).leaves()) == {"<|user|>": (7,)}
    trie = TokenTrie.from_choices(MARKED, {"X": "a<|user|>a"}, prompt="x:", lead="", special=True)
    assert dict(trie.leaves()) == {"X": (3, 7, 3)}
    with pytest.raises(VocabMismatchError, match=r"choice 'X': token 0 at index 1 ends the generation"):
        TokenTrie.from_choices(MARKED, {"X": "a<|end|>"}, lead="", special=True)


@pytest.mark.parametrize("name", ["smollm2", "gemma", "tiny"])
def test_case_37_control_tokens_of_real_vocabularies(request: pytest.FixtureRequest, name: str) -> None:
    llm = request.getfixturevalue(name)
    tokenizer = as_tokenizer(llm)
    text, end = CONTROL[name], END[name]
    (token,) = tokenizer.tokenize(text.encode(), special=True)
    assert tokenizer.is_control(token)
    for prompt in (None, "x", "x\n"):
        plain = TokenTrie.from_choices(llm, [text], prompt=prompt, lead="")
        ((_, path),) = plain.leaves()
        assert token not in path
        assert tokenizer.detokenize(path).decode() == text
        trie = TokenTrie.from_choices(llm, [text, "no"], prompt=prompt, lead="", special=True)
        assert dict(trie.leaves())[text] == (token,)
        with pytest.raises(VocabMismatchError, match="ends the generation"):
            TokenTrie.from_choices(llm, ["ok", f"x{end}"], prompt=prompt, special=True)
    plain = TokenTrie.from_choices(llm, [end], prompt="x\n", lead="")
    assert all(not tokenizer.is_eog(token) for token in plain.token.tolist() if token >= 0)
    # Both spellings of one name: two paths of it.
    leaves = [(text, [token]), (text, tokenizer.tokenize(b"\n" + text.encode())[1:])]
    both = TokenTrie.from_sequences(leaves)
    both.check_vocab(tokenizer, strict=True)
    assert {path for _, path in both.leaves()} == {tuple(path) for _, path in leaves}
    assert both.n_leaves == 1


def test_control_tokens_in_a_choice_of_the_model(smollm2: Llama) -> None:
    comp = choose(smollm2, "x:", ["<|im_start|>", "no"], special=True, method="sample", seed=3, lead="")
    assert comp.complete
    assert comp.name in ("<|im_start|>", "no")
    (token,) = as_tokenizer(smollm2).tokenize(b"<|im_start|>", special=True)
    only = choose(smollm2, "x:", ["<|im_start|>"], special=True, lead="")
    assert (only.tokens, only.name) == ((token,), "<|im_start|>")


def test_special_with_the_other_settings() -> None:
    trie = TokenTrie.from_choices(MARKED, ["<|user|>a"], prompt='x "', json_value=True, special=True)
    assert dict(trie.leaves()) == {"<|user|>a": (7, 3, *MARKED.tokenize(b'"'))}
    trie = TokenTrie.from_choices(MARKED, ["<|user|>a"], prompt="x", special=True, heal=True, lead="")
    assert dict(trie.leaves()) == {"<|user|>a": (7, 3)}
    assert trie.n_healed == 0


PLAIN = [BOS, *MARKED.tokenize(b"<|user|>:")]
PLAIN_END = [BOS, *MARKED.tokenize(b"<|end|>:")]


@pytest.mark.parametrize("ids", [PLAIN, PLAIN_END], ids=["user", "end"])
@pytest.mark.parametrize("heal", [False, True])
def test_text_of_the_prompt_never_becomes_a_control_token(ids: list[int], heal: bool) -> None:
    """A prompt that spells ``<|user|>`` in plain pieces, as careful callers make it, is text."""
    trie = TokenTrie.from_choices(MARKED, ["a"], prompt=ids, special=True, heal=heal, lead="")
    assert dict(trie.leaves()) == {"a": (3,)}
    assert trie.n_healed == 0


def test_special_where_the_vocabulary_writes_a_space_after_control_tokens(tmp_path: Any) -> None:
    import models
    from llama_cpp import Llama

    path = models.write_tiny_model(tmp_path / "prefix.gguf", add_space_prefix=True)
    llm = Llama(str(path), n_ctx=64, n_threads=1, vocab_only=True, verbose=False)
    try:
        TokenTrie.from_choices(llm, ["a<start_of_turn>user"], prompt="the:", special=True)
    finally:
        llm.close()


# --- slips with leading spaces ----------------------------------------------------------------------------------------

MIXED: list[tuple[Any, dict[str, Any], bool]] = [
    ([" yes", "no"], {}, True),
    (["no", " yes"], {}, True),
    ({"a": " yes", "b": "no"}, {}, True),
    ([" yes", " no"], {}, False),
    (["yes", "no"], {}, False),
    (["\nyes", "no"], {}, False),
    (["\nyes", " no"], {}, False),
    ([" yes"], {}, False),
    ({" yes": "yes", "no": "no"}, {}, False),
    ([" yes", "no"], {"lead": ""}, False),
    ([" yes", "no"], {"lead": " "}, False),
    ([" yes", "no"], {"json_value": True}, False),
    ([" yes", "no"], {"heal": True}, True),
    ([" yes", "no"], {"case_fold": True}, True),
    ([" yes", "no"], {"tokenization": "every"}, True),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "settings", "doubtful"), MIXED, ids=str)
def test_mixed_leading_spaces_are_told_of_once(choices: Any, settings: dict[str, Any], doubtful: bool) -> None:
    for prompt in (None, "x:", "x(", "x:|"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            TokenTrie.from_choices(LETTERS, choices, prompt=prompt, **settings)
        assert len(caught) == doubtful
        if doubtful:
            message = str(caught[0].message)
            assert "some choices begin with a space (' yes') and some do not ('no')" in message
            assert caught[0].filename == __file__


def test_mixed_leading_spaces_in_choose(tiny: Llama) -> None:
    with pytest.warns(TrieSamplerWarning, match="some choices begin with a space") as caught:
        assert choose(tiny, "x:", [" yes", "no"]).complete
    assert len(caught) == 1
    assert choose(tiny, "x:", [" yes", "no"], lead="").complete


def test_awkward_texts_in_json_and_folded(tiny: Llama) -> None:
    tokenizer = as_tokenizer(tiny)
    choices = [text for text in AWKWARD_TEXTS if "\u2581" not in text]
    trie = TokenTrie.from_choices(tiny, choices, prompt='x "', json_value=True, case_fold=True, heal=True)
    for name, forms in written(tokenizer, trie).items():
        assert name in {json.loads('"' + text) for text in forms}
