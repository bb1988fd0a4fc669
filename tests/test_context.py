r"""Choices behind prompts, on every real vocabulary at hand, against tokenizing prompt and choice as one text.

    llama_tokenize("... The capital is Par" + " " + "Oslo")  =  [the prompt's own ids] + [ids of " Oslo"]   clean
    llama_tokenize("... The capital is Par" + "" + "is")     =  [...                  " Paris"]             not clean

Where the cut is clean, the library, which tokenizes a window of the prompt only, must give those very ids; where it is
not, it must say so. SmolLM2 and Gemma come as packages; ``TRIE_SAMPLER_VOCABS`` adds every vocabulary in its folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import models
import pytest

from trie_sampler import TrieSamplerWarning, VocabMismatchError
from trie_sampler.choices import Choices
from trie_sampler.llama.vocab import as_tokenizer
from trie_sampler.tokens import Tokenizer, tokenize_choices

if TYPE_CHECKING:
    from llama_cpp import Llama

Ids: TypeAlias = tuple[int, ...]

PREFIX = "ggml-vocab-"
FETCHED = {path.stem.removeprefix(PREFIX): path for path in models.vocab_only_ggufs()}
INSTALLED: dict[str, Callable[[], Path]] = {"smollm2": models.smollm2_path, "gemma": models.gemma_path}

# Both belong to embedding models, which generate nothing, and both change the text before they tokenize it.
REWRITING = {
    "bert-bge": "WordPiece: lower-cases, drops accents, has no piece for white space",
    "nomic-bert-moe": "Unigram: applies NFKC, makes every white space a space and joins them",
}

# --- choices ----------------------------------------------------------------------------------------------------------

_WORDS = "yes no Yes Paris is Oslo PLAY_MUSIC play_music REPLY REPLY_THREAD camelCase x A the ing ly s".split()  # noqa: SIM905
_NUMBERS = "0 5 8 50 500 1234 12345678 3.14159 -7 +1 1e-9 0xFF 1,000,000 2024-02-29 12:30 50% #1 1/2 007".split()  # noqa: SIM905
_PATHS = (
    "//a", "//example.org/b", "://c", "/usr/local/bin", "./x.py", "../..", "C:\\Temp\\new", "~/.config", "://",
    "a/b-c_d.tar.gz", "mailto:a@b.org", "?q=1&r=2#top", "@home", "*.gguf", "file with spaces.txt",
)  # fmt: skip
_PHRASES = (
    "New York", "New York City", "Dr. Smith", "I don't know.", "Well, yes; no - maybe?", "a  b", "one, two, three",
    "Yes!", "(none)", "[n]", "{x}", "<end>", "<s>", "</s>", "<|im_end|>", "<end_of_turn>", "[INST]", "...", "?!",
    "trailing ", " leading", "  two", "'s", "'ll go", ", and", "; DROP TABLE", "A.", "-", "--", "=", "|", "^*B^&A",
)  # fmt: skip
_QUOTES = (
    '"', '"quoted"', "'", "''", '""', "`code`", "\\", "\\\\", "\\n", '\\"', "“curly”", "’", "„unten“", "«a»", "‘b’",
    "'\"",
)  # fmt: skip
_LINES = (
    " ", "two\nlines", "two\nmore", "two\r\nlines", "\tx", "tab\there", "a\n\nb", "end\n", "end\n\n", " \n x", "\r",
    "\\\n", "\r\n",
)  # fmt: skip
_CODE = (
    "def f(x):\n    return x", "x = [1, 2]", "a[0]", "if (a && b) {", "};", "=>", "->", "!=", "i++", "self.x", "print(",
    "SELECT * FROM t;", '<div class="a">', "</div>", "#include <x.h>", "$HOME", "%s", "\\d+", "f'{x}'", "// TODO",
    "/* */", "    pass", "x->y", "std::map<int, int>", '{"a": null}', "];", "1]", "]",
)  # fmt: skip
_ACCENTS = (
    "é", "e\u0301", "naïve", "Ärger", "Ünïcödé", "ÇA", "ß", "Łódź", "İstanbul", "Привет", "Ελλάδα", "שלום", "مرحبا",
    "हिन्दी", "ไทย", "ño", "ﬁ", "½", "€5", "Ⅳ", "\u00a0x", "\u200bx",
)  # fmt: skip
_CJK = (
    "日本", "日本語", "東京都", "北京", "中文。", "「本」", "ひらがな", "カタカナ", "한국어", "힣", "龘", "𠮷野家",
    "，", "ＡＢＣ", "1个", "饭", "今天",
)  # fmt: skip
_EMOJI = (
    "🙂", "🙃", "🙂🙃", "👍", "🏽", "👍🏽", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "ok 🙂", "🙂ok", "a🙂b", "❤️", "♥", "\ufe0f", "𓀀",
    "𝔘", "🫨", "→", "∑", "█▒",
)  # fmt: skip

KINDS: dict[str, Sequence[str]] = {
    "words": _WORDS,
    "numbers": _NUMBERS,
    "paths": _PATHS,
    "phrases": _PHRASES,
    "quotes": _QUOTES,
    "lines": _LINES,
    "code": _CODE,
    "accents": _ACCENTS,
    "cjk": _CJK,
    "emoji": _EMOJI,
}
CHOICES = tuple(text for texts in KINDS.values() for text in texts)
LINE_STARTS = ("\n", "\n\n", "\n  indented")

# --- prompts ----------------------------------------------------------------------------------------------------------

HEAD = (
    "Pick the one that fits, naïve 日本語 🙂 or not. There are 1234567 of them:\n\n  - this one, and\n  - that one.\n"
)
# Prompt, whether lead="auto" takes both spellings behind it.
PROMPTS: dict[str, tuple[str, bool]] = {
    "colon": (f"{HEAD}Answer:", True),
    "space": (f"{HEAD}Answer: ", False),
    "quote": (f'{HEAD}say "', False),
    "url": (f"{HEAD}http:", True),
    "half word": (f"{HEAD}The capital is Par", True),
    "bracket": (f"{HEAD}x = [", False),
    "line end": (f"{HEAD}Answer:\n", False),
    "chat": (f"{HEAD}<|im_start|>user\nIs fire hot?<|im_end|>\n<|im_start|>assistant\n", False),
    "short": ("A", True),
}
# Ends without a break for longer than the window, which begins inside of them.
RUNS: dict[str, tuple[str, bool]] = {
    "digits": (f"{HEAD}{'1234567890' * 12}", True),
    "letters": (f"{HEAD}{'acgtgcatta' * 20}", True),
    "han": (f"{HEAD}{'今天天气很好我们一起去公园散步然后回家吃饭' * 6}", True),
    "spaces": (f"{HEAD}{' ' * 100}", False),
    "line ends": (f"{HEAD}{chr(10) * 60}", False),
    "signs": (f"{HEAD}{'=' * 150}", True),
    "emojis": (f"{HEAD}{'🙂🙃👍🏽' * 12}", True),
}


class Vocab:
    """A vocabulary, asked through the host alone."""

    def __init__(self, name: str, llm: Llama) -> None:
        import llama_cpp

        self.name = name
        self.llm = llm
        self._pointer = llama_cpp.llama_model_get_vocab(llm.model)
        self._is_control = llama_cpp.llama_vocab_is_control
        self._is_eog = llama_cpp.llama_vocab_is_eog
        self.bos = [llm.token_bos()] if llama_cpp.llama_vocab_get_add_bos(self._pointer) else []
        self.eos = llm.token_eos()
        self._pieces: dict[int, bytes] = {}

    def ids(self, text: str) -> list[int]:
        return self.llm.tokenize(text.encode(), add_bos=False, special=False)

    def continuation(self, prompt: str, before: list[int], text: str) -> Ids | None:
        """The ids of ``text`` behind ``prompt``, whose own are ``before``; None where the cut is not clean."""
        whole = self.ids(prompt + text)
        return tuple(whole[len(before) :]) if whole[: len(before)] == before else None

    def bytes(self, ids: Sequence[int]) -> bytes:
        for token in ids:
            if token not in self._pieces:
                # With something before it, or the host takes the space off a text's first piece.
                self._pieces[token] = self.llm.detokenize([token], prev_tokens=[self.eos])
        return b"".join(self._pieces[token] for token in ids)

    def text(self, ids: Sequence[int]) -> str:
        return self.bytes(ids).decode()

    def has_control(self, ids: Sequence[int]) -> bool:
        return any(self._is_control(self._pointer, token) or self._is_eog(self._pointer, token) for token in ids)


def is_text(data: bytes) -> bool:
    return data.decode("utf-8", "ignore").encode() == data


class Recorder:
    """Passes everything on and keeps what it was to tokenize and is no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.n_vocab = tokenizer.n_vocab
        self.eog_ids = tokenizer.eog_ids
        self.detokenize = tokenizer.detokenize
        self.is_eog = tokenizer.is_eog
        self.is_control = tokenizer.is_control
        self.cut: list[bytes] = []

    def tokenize(self, text: bytes, *settings: bool) -> list[int]:
        if not is_text(text):
            self.cut.append(text)
        return self._tokenizer.tokenize(text, *settings)


@dataclass(frozen=True)
class Spelling:
    """What the library makes of choices: text -> paths, its warnings, and what it tokenized that is no text."""

    paths: dict[str, list[Ids]]
    messages: list[str]
    cut: list[bytes]


def spell(vocab: Vocab, prompt_ids: Sequence[int], lead: str, texts: Sequence[str]) -> Spelling:
    tokenizer = Recorder(as_tokenizer(vocab.llm))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spelled = tokenize_choices(tokenizer, Choices.of(texts), prompt_ids, lead=lead)
    assert all(issubclass(warning.category, TrieSamplerWarning) for warning in caught)
    paths: dict[str, list[Ids]] = {text: [] for text in texts}
    for text, ids in spelled.paths:
        paths[text].append(tuple(ids))
    return Spelling(paths, [str(warning.message) for warning in caught], tokenizer.cut)


def faults(
    vocab: Vocab, front: list[int], prompt: str, leads: dict[str, tuple[str, ...]], texts: Sequence[str]
) -> list[Any]:
    """``faults_of_alike`` of the texts that begin with a space and of the others: the two do not go together."""
    spaced = [text for text in texts if text[0] == " "]
    bare = [text for text in texts if text[0] != " "]
    return [fault for alike in (spaced, bare) if alike for fault in faults_of_alike(vocab, front, prompt, leads, alike)]


def faults_of_alike(
    vocab: Vocab, front: list[int], prompt: str, leads: dict[str, tuple[str, ...]], texts: Sequence[str]
) -> list[Any]:
    """Where the library differs from the whole text's ids, behind ``front`` and the ids of ``prompt``.

    ``leads``: each ``lead`` to try, and the spellings that it stands for.
    """
    before = vocab.ids(prompt)
    every = {spelling for spellings in leads.values() for spelling in spellings} | {""}
    clean = {(text, lead): vocab.continuation(prompt, before, lead + text) for text in texts for lead in every}
    found: list[Any] = []
    for lead, spellings in leads.items():
        comp = spell(vocab, [*front, *before], lead, texts)
        merged = []
        for text in texts:
            # A choice with a space of its own gets no other.
            own = ("",) if text[0].isspace() else spellings
            ref = [ids for spelling in own if (ids := clean[text, spelling]) is not None]
            paths = comp.paths[text]
            if not ref:
                merged.append(text)
                if len(paths) != 1:
                    found.append((lead, text, paths, "one path that stands alone"))
            elif paths != ref:
                found.append((lead, text, paths, ref))
            if not {vocab.text(ids) for ids in paths} <= {spelling + text for spelling in own}:
                found.append((lead, text, paths, "another text"))
            if any(map(vocab.has_control, paths)):
                found.append((lead, text, paths, "control tokens"))
        ref_messages = 0
        if merged:
            more = f" and {len(merged) - 1} more" if len(merged) > 1 else ""
            ref_messages = 1
            if not any(f"merged with the choice {merged[0]!r}{more};" in message for message in comp.messages):
                found.append((lead, merged, comp.messages, "a warning of these"))
        if len(comp.messages) != ref_messages:
            found.append((lead, merged, comp.messages, f"{ref_messages} warnings"))
        if comp.cut:
            found.append((lead, comp.cut, "half a character was tokenized"))
    return found


def every_lead(*, both: bool) -> dict[str, tuple[str, ...]]:
    return {"auto": ("", " ") if both else ("",), "": ("",), " ": (" ",)}


def load(name: str) -> Iterator[Vocab]:
    from llama_cpp import Llama

    path = FETCHED[name] if name in FETCHED else INSTALLED[name]()
    llm = Llama(str(path), vocab_only=True, n_threads=1, verbose=False)
    yield Vocab(name, llm)
    llm.close()


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.model(name)) for name in INSTALLED),
        *(name for name in FETCHED if name not in REWRITING),
    ],
)
def vocab(request: pytest.FixtureRequest) -> Iterator[Vocab]:
    yield from load(request.param)


@pytest.fixture(params=[name for name in FETCHED if name in REWRITING])
def rewriting_vocab(request: pytest.FixtureRequest) -> Iterator[Vocab]:
    yield from load(request.param)


def test_choices_are_two_hundred_texts() -> None:
    assert len(CHOICES) == len(set(CHOICES)) == 200


@pytest.mark.parametrize("end", PROMPTS)
def test_paths_are_those_of_the_whole_text(vocab: Vocab, end: str) -> None:
    prompt, both = PROMPTS[end]
    assert faults(vocab, vocab.bos, prompt, every_lead(both=both), CHOICES) == []


@pytest.mark.parametrize("end", RUNS)
def test_paths_behind_a_run_longer_than_the_window(vocab: Vocab, end: str) -> None:
    prompt, both = RUNS[end]
    assert faults(vocab, vocab.bos, prompt, {"auto": every_lead(both=both)["auto"]}, CHOICES[::2]) == []


def test_paths_behind_a_control_token_are_those_of_the_text_after_it(vocab: Vocab) -> None:
    assert vocab.has_control([vocab.eos])
    front = [*vocab.bos, *vocab.ids(HEAD), vocab.eos]
    for prompt in ("Answer:", "assistant\n"):
        assert faults(vocab, front, prompt, every_lead(both=prompt == "Answer:"), CHOICES) == []


def test_paths_of_choices_that_begin_a_line(vocab: Vocab) -> None:
    for prompt, both in PROMPTS.values():
        assert faults(vocab, vocab.bos, prompt, every_lead(both=both), LINE_STARTS) == []


# --- prompts that end inside a character ------------------------------------------------------------------------------

CUT_PROMPTS = ("sun \U00013000", "The sign 🙂", "x 힣", "語 龘")
CUT_CHOICES = ("yes", "Paris", "é", "日本", "🙂", "50")


def cut_prompts(vocab: Vocab) -> list[list[int]]:
    """Ids whose text ends inside a character."""
    out = []
    for text in CUT_PROMPTS:
        whole = vocab.ids(text)
        out += [ids for n_cut in (1, 2, 3) if not is_text(vocab.bytes(ids := whole[:-n_cut]))]
    assert out
    return out


def test_half_a_character_is_never_tokenized(vocab: Vocab) -> None:
    for ids in cut_prompts(vocab):
        for lead in ("auto", "", " "):
            assert spell(vocab, ids, lead, CUT_CHOICES).cut == []


def test_paths_behind_half_a_character_are_those_of_mid_text(vocab: Vocab) -> None:
    """Nothing continues half a character, so a choice is spelled as behind any other text, and a warning says so."""
    found = []
    for ids in cut_prompts(vocab):
        for lead in ("", " "):
            comp = spell(vocab, ids, lead, CUT_CHOICES)
            for text in CUT_CHOICES:
                ref = {vocab.continuation(before, vocab.ids(before), lead + text) for before in ("\n", ".", ")", "a")}
                if not set(comp.paths[text]) <= ref or not comp.messages:
                    found.append((ids, lead, text, comp.paths[text], comp.messages))
    assert found == []


# --- vocabularies that change the text --------------------------------------------------------------------------------


def test_a_vocabulary_that_changes_the_text_spells_or_refuses(rewriting_vocab: Vocab) -> None:
    vocab = rewriting_vocab
    prompt_ids = [*vocab.bos, *vocab.ids("Answer:")]

    def refuses(text: str) -> bool:
        try:
            paths = spell(vocab, prompt_ids, "", [text]).paths[text]
        except VocabMismatchError:
            return True
        assert {vocab.text(ids) for ids in paths} <= {text, " " + text}
        return False

    assert 0 < sum(map(refuses, CHOICES)) < len(CHOICES), REWRITING[vocab.name]
