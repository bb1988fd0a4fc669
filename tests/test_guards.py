"""Token ids that come from elsewhere: of another model, with a BOS at their head, with and without leading spaces.

And what is kept for a vocabulary: its fingerprint, the tries behind each ending of a prompt.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
import pytest
from test_healing import BOS, EOS, Toy

from trie_sampler import (
    TokenSequence,
    TokenTreeDescriptor,
    TokenTreePayload,
    TokenTrie,
    TrieCursor,
    TrieLogitsProcessor,
    TrieSamplerWarning,
    VocabMismatchError,
    choose,
    forget_model,
    model_id,
)
from trie_sampler.cache import Recent
from trie_sampler.llama.vocab import as_tokenizer, prompt_tokens

if TYPE_CHECKING:
    from llama_cpp import Llama

OURS, OTHERS = f"vocab-sha256:{'0' * 32}", f"vocab-sha256:{'1' * 32}"


class Known(Toy):
    """A toy with a fingerprint, as ``llama.vocab`` gives one."""

    def __init__(self, pieces: dict[str, int], fingerprint: str = OURS, **settings: Any) -> None:
        super().__init__(pieces, **settings)
        self.fingerprint = fingerprint


TOY = Toy({"yes": 2, " yes": 3, "no": 4, " no": 5, "maybe": 6})
PLAIN = [("yes", [2]), ("no", [4]), ("maybe", [6])]


def payload_of(leaves: Sequence[tuple[str, Sequence[int]]], model: str = "m", path: str = "") -> TokenTreePayload:
    sequences = tuple(TokenSequence(name=name, tokens=tuple(tokens)) for name, tokens in leaves)
    return TokenTreePayload(model_id=model, descriptors=(TokenTreeDescriptor(path=path, leaves=sequences),))


def doubts_of(ask: Callable[[], Any]) -> list[str]:
    """What was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask()
    assert all(warning.category is TrieSamplerWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def leaves_of(llm: Llama, names: Sequence[str], *, bos: bool = False, lead: str = "") -> list[tuple[str, list[int]]]:
    """Leaves as somebody makes them with the model's own tokenizer."""
    before = [llm.token_bos()] if bos else []
    ids = [llm.tokenize(f"\n{lead}{name}".encode(), add_bos=False, special=False) for name in names]
    newline = llm.tokenize(b"\n", add_bos=False, special=False)
    assert all(path[: len(newline)] == newline for path in ids)
    return [(name, before + path[len(newline) :]) for name, path in zip(names, ids, strict=True)]


NAMES = ["yes", "no", "maybe", "PLAY_MUSIC", "REPLY", "REPLY_THREAD"]

# --- payloads -------------------------------------------------------------------------------------------------------


def test_a_payload_of_this_model_passes_in_silence(llm: Llama) -> None:
    for lead in ("", " "):
        payload = payload_of(leaves_of(llm, NAMES, lead=lead))
        trie = TokenTrie.from_payload(payload, vocab=llm, strict=True)
        assert trie.n_leaves == len(NAMES)
        assert trie.model_id is None
        assert TrieLogitsProcessor.from_payload(llm, payload, strict=True).max_tokens == trie.depth + 1


def test_a_bos_at_the_head_of_every_leaf_is_told_of(llm: Llama) -> None:
    payload = payload_of(leaves_of(llm, NAMES, bos=True))
    (first, *_) = doubts_of(lambda: TokenTrie.from_payload(payload, vocab=llm))
    assert f"every leaf begins with control token {llm.token_bos()}" in first
    for strict_door in (
        lambda: TokenTrie.from_payload(payload, vocab=llm, strict=True),
        lambda: TrieLogitsProcessor.from_payload(llm, payload, strict=True),
        lambda: TokenTrie.from_payload(payload).check_vocab(as_tokenizer(llm), strict=True),
    ):
        with pytest.raises(VocabMismatchError, match="tokenizer added BOS"):
            strict_door()
    # Without a vocabulary nobody can tell.
    assert TokenTrie.from_payload(payload, strict=True).n_leaves == len(NAMES)


def test_one_leaf_with_a_bos_is_a_leaf_that_does_not_spell_its_name() -> None:
    leaves = [*PLAIN[:2], ("maybe", [BOS, 6])]
    tokenizer = Toy({"yes": 2, "no": 4, "maybe": 6}, {"<s>": BOS})
    (doubt,) = doubts_of(lambda: TokenTrie.from_payload(payload_of(leaves), vocab=tokenizer))
    assert "'maybe' is spelled '<s>maybe' here" in doubt


def test_case_47_leaves_of_another_model(smollm2: Llama, gemma: Llama) -> None:
    payload = payload_of(leaves_of(smollm2, NAMES))
    (doubt,) = doubts_of(lambda: TokenTrie.from_payload(payload, vocab=gemma))
    assert "leaves that do not spell their names, perhaps of another model" in doubt
    # The first three, and how many more.
    assert doubt.count(" is spelled ") == 3
    assert "and 3 more" in doubt
    for ask in (
        lambda: TokenTrie.from_payload(payload, vocab=gemma, strict=True),
        lambda: TrieLogitsProcessor.from_payload(gemma, payload, strict=True),
    ):
        with pytest.raises(VocabMismatchError, match="do not spell their names"):
            ask()
    (doubt,) = doubts_of(lambda: TrieLogitsProcessor.from_payload(gemma, payload))
    assert "do not spell" in doubt


def test_case_47_sixty_four_leaves_are_looked_at() -> None:
    class Counting(Toy):
        n_asked = 0

        def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
            self.n_asked += 1
            return super().detokenize(tokens, special=special)

    tokenizer = Counting({})
    leaves = [(f"{i:04}", tokenizer.tokenize(f"{i:04}".encode())) for i in range(2000)]
    TokenTrie.from_payload(payload_of(leaves), vocab=tokenizer, strict=True)
    assert tokenizer.n_asked == 64
    wrong = [(name, ids[::-1]) for name, ids in leaves]
    (doubt,) = doubts_of(lambda: TokenTrie.from_payload(payload_of(wrong), vocab=tokenizer))
    assert doubt.count(" is spelled ") == 3


@pytest.mark.parametrize("token", [1256, 5000, 2**31 - 1])
def test_case_46_ids_up_to_the_vocabularys_size(token: int) -> None:
    """Added tokens have ids past the base vocabulary; V is what counts."""
    added = Toy({"yes": 2, "added": token})
    with pytest.raises(VocabMismatchError, match=rf"leaf 'added': token {token} at index 0 .*V is 1256"):
        TokenTrie.from_payload(payload_of([("added", [token])]), vocab=added)
    added.n_vocab = token + 1
    assert TokenTrie.from_payload(payload_of([("added", [token])]), vocab=added, strict=True).n_leaves == 1
    for strict in (False, True):
        with pytest.raises(VocabMismatchError, match=rf"leaf 'no': token {token} at index 1 .*V is 1256"):
            TokenTrie.from_payload(payload_of([("yes", [2]), ("no", [4, token])]), vocab=TOY, strict=strict)


@pytest.mark.parametrize("token", [-1, -(2**31)])
def test_case_46_negative_ids(token: int) -> None:
    with pytest.raises(VocabMismatchError, match=rf"leaf 'no': token id {token} at index 1"):
        TokenTrie.from_payload(payload_of([("yes", [2]), ("no", [4, token])]), vocab=TOY)


def test_end_tokens_in_a_leaf_are_refused(llm: Llama) -> None:
    (end, *_) = as_tokenizer(llm).eog_ids
    leaves = [*leaves_of(llm, ["yes"]), ("no", [*leaves_of(llm, ["no"])[0][1], end])]
    for ask in (
        lambda: TokenTrie.from_payload(payload_of(leaves), vocab=llm),
        lambda: TrieLogitsProcessor.from_payload(llm, payload_of(leaves)),
        lambda: choose(llm, "x", TokenTrie.from_sequences(leaves)),
    ):
        with pytest.raises(VocabMismatchError, match=rf"leaf 'no': token {end} at index 1 .*ends the generation"):
            ask()
    with pytest.raises(VocabMismatchError, match=f"token {EOS} at index 0"):
        TokenTrie.from_payload(payload_of([("no", [EOS])]), vocab=TOY)


def test_case_37_a_payload_with_both_spellings_of_a_control_token(smollm2: Llama) -> None:
    tokenizer = as_tokenizer(smollm2)
    (token,) = tokenizer.tokenize(b"<|im_start|>", special=True)
    plain = tokenizer.tokenize(b"<|im_start|>")
    leaves = [("<|im_start|>", [token]), ("<|im_start|>", plain), *leaves_of(smollm2, ["yes"])]
    trie = TokenTrie.from_payload(payload_of(leaves), vocab=smollm2, strict=True)
    for path in ([token], plain):
        node = trie.root
        for step in path:
            node = trie.step(node, step)
        assert trie.leaf_name(node) == "<|im_start|>"
    (end,) = tokenizer.tokenize(b"<|im_end|>", special=True)
    with pytest.raises(VocabMismatchError, match=rf"leaf 'X': token {end} at index 1"):
        TokenTrie.from_payload(payload_of([("X", [plain[0], end])]), vocab=smollm2)


MIXED: list[tuple[list[tuple[str, list[int]]], bool]] = [
    ([("yes", [3]), ("no", [4])], True),
    ([("yes", [2]), ("no", [5])], True),
    ([("yes", [2]), ("no", [4])], False),
    ([("yes", [3]), ("no", [5])], False),
    # A name that has the space itself means it.
    ([(" yes", [3]), ("no", [4])], False),
    # Several paths of a leaf mean it so, too.
    ([("yes", [2]), ("yes", [3]), ("no", [4]), ("no", [5])], False),
]


@pytest.mark.parametrize(("leaves", "mixed"), MIXED)
def test_leaves_with_and_without_a_leading_space(leaves: list[tuple[str, list[int]]], mixed: bool) -> None:
    for strict in (False, True):
        doubts = doubts_of(partial(TokenTrie.from_payload, payload_of(leaves), vocab=TOY, strict=strict))
        assert len(doubts) == mixed
        assert not doubts or "some leaves begin with a space" in doubts[0]


def test_a_refusal_leaves_the_trie_as_it_was() -> None:
    trie = TokenTrie.from_sequences([("yes", [2]), ("no", [4, 2000])])
    before = pickle.dumps(trie)
    with pytest.raises(VocabMismatchError):
        trie.check_vocab(TOY)
    assert pickle.dumps(trie) == before
    assert TrieCursor(trie, eog_ids=[EOS]).allowed().tolist() == [2, 4]


# --- whose payload it is ----------------------------------------------------------------------------------------------

KNOWN = Known({"yes": 2, "no": 4, "maybe": 6})

#   modelId     model_id=    vocabulary  doubtful
IDS: list[tuple[str, str | None, Any, bool]] = [
    (OURS,      None,        KNOWN,      False),
    (OTHERS,    None,        KNOWN,      True),
    # Free names say nothing unless the caller knows what they should be.
    ("llama",   None,        KNOWN,      False),
    ("",        None,        KNOWN,      False),
    ("llama",   "llama",     KNOWN,      False),
    ("llama",   "gemma",     KNOWN,      True),
    ("llama",   "gemma",     None,       True),
    ("llama",   "llama",     None,       False),
    ("llama",   "",          None,       True),
    # What the caller says holds, whatever the vocabulary's own is.
    (OTHERS,    OTHERS,      KNOWN,      False),
    (OURS,      OTHERS,      KNOWN,      True),
    (OURS,      "gemma",     KNOWN,      True),
    # Nothing to compare with.
    (OTHERS,    None,        None,       False),
    (OTHERS,    None,        TOY,        False),
]  # fmt: skip


@pytest.mark.parametrize(("found", "wanted", "vocab", "doubtful"), IDS)
def test_model_ids_are_compared_where_that_says_something(
    found: str, wanted: str | None, vocab: Any, doubtful: bool
) -> None:
    payload = payload_of(PLAIN, found)
    doubts = doubts_of(lambda: TokenTrie.from_payload(payload, vocab=vocab, model_id=wanted))
    assert len(doubts) == doubtful
    if doubtful:
        assert doubts[0].startswith(f"the payload is of model {found!r}, not of ")
        with pytest.raises(VocabMismatchError, match="the payload is of model"):
            TokenTrie.from_payload(payload, vocab=vocab, model_id=wanted, strict=True)
    else:
        TokenTrie.from_payload(payload, vocab=vocab, model_id=wanted, strict=True)


def test_model_ids_in_every_form_of_the_payload(llm: Llama) -> None:
    ours = model_id(llm)
    for found, doubtful in ((ours, False), (OTHERS, True)):
        payload = payload_of(leaves_of(llm, NAMES), found)
        for form in (payload, payload.to_json(), payload.to_json().encode()):
            assert len(doubts_of(partial(TokenTrie.from_payload, form, vocab=llm))) == doubtful
            assert len(doubts_of(partial(TrieLogitsProcessor.from_payload, llm, form))) == doubtful
    with pytest.raises(VocabMismatchError, match="not of 'mine'"):
        TrieLogitsProcessor.from_payload(llm, payload_of(leaves_of(llm, NAMES)), model_id="mine", strict=True)
    assert TrieLogitsProcessor.from_payload(llm, payload_of(leaves_of(llm, NAMES)), model_id="m", strict=True)


def test_model_id_is_the_hash_of_the_token_texts(llm: Llama) -> None:
    import llama_cpp

    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    texts = [llama_cpp.llama_vocab_get_text(vocab, token) for token in range(llm.n_vocab())]
    ref = hashlib.sha256(b"\0".join(texts)).hexdigest()[:32]
    assert model_id(llm) == model_id(as_tokenizer(llm)) == f"vocab-sha256:{ref}"


def test_model_ids_tell_vocabularies_apart(
    smollm2: Llama, gemma: Llama, tiny: Llama, tiny_bpe: Llama, tiny_model_path: Path, tmp_path: Path
) -> None:
    from llama_cpp import Llama

    assert len({model_id(llm) for llm in (smollm2, gemma, tiny, tiny_bpe)}) == 4
    tuned = models.write_tiny_model(tmp_path / "tuned.gguf", seed=5)
    for path, settings in ((tiny_model_path, {"vocab_only": True}), (tuned, {"n_ctx": 64})):
        other = Llama(str(path), verbose=False, **settings)
        try:
            # Fine-tunes of one base share it: it is about token ids.
            assert model_id(other) == model_id(tiny)
        finally:
            other.close()


def test_model_id_refuses_what_has_none() -> None:
    assert model_id(KNOWN) == OURS
    for thing in (TOY, object(), None, "model.gguf"):
        with pytest.raises(TypeError):
            model_id(thing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no fingerprint"):
        model_id(Known({}, fingerprint=7))  # type: ignore[arg-type]


def test_a_trie_knows_whose_it_is(smollm2: Llama) -> None:
    ours = model_id(smollm2)
    settings: list[dict[str, Any]] = [{}, {"tokenization": "every"}, {"heal": True, "prompt": "http:"}]
    for setting in settings:
        trie = TokenTrie.from_choices(smollm2, ["//a", "yes"], **setting)
        assert trie.model_id == ours
        for copied in (copy.copy(trie), copy.deepcopy(trie), pickle.loads(pickle.dumps(trie))):  # noqa: S301
            assert copied.model_id == ours
    assert TokenTrie.from_choices(TOY, ["yes"]).model_id is None
    assert TokenTrie.from_choices(KNOWN, ["yes"]).model_id == OURS
    assert TokenTrie.from_sequences(PLAIN).model_id is None
    assert TokenTrie.from_payload(payload_of(PLAIN, OURS), vocab=KNOWN).model_id is None


def test_a_trie_of_another_vocabulary(smollm2: Llama, gemma: Llama) -> None:
    trie = TokenTrie.from_choices(smollm2, ["yes", "no"], prompt="x:")
    for ask in (
        lambda: TrieLogitsProcessor.from_choices(gemma, trie),
        lambda: trie.check_vocab(as_tokenizer(gemma)),
    ):
        (doubt,) = doubts_of(ask)
        assert doubt == f"the trie was made with another vocabulary: {model_id(smollm2)}, not {model_id(gemma)}"
    with pytest.raises(VocabMismatchError, match="made with another vocabulary"):
        trie.check_vocab(as_tokenizer(gemma), strict=True)
    trie.check_vocab(as_tokenizer(smollm2), strict=True)
    # Where there is no fingerprint, leaves are looked at.
    (doubt,) = doubts_of(lambda: TokenTrie.from_choices(KNOWN, ["maybe"], lead="").check_vocab(Toy({})))
    assert "do not spell" in doubt


def test_a_trie_of_another_vocabulary_with_other_ids_is_refused(tiny: Llama, gemma: Llama) -> None:
    trie = TokenTrie.from_choices(gemma, ["yes", "no"], prompt="x:")
    with pytest.raises(VocabMismatchError, match=f"V is {tiny.n_vocab()}"):
        choose(tiny, "x:", trie)


def test_a_trie_of_this_vocabulary_may_mean_odd_leaves(smollm2: Llama) -> None:
    """Choices that a model spelled itself are not looked at again: names need not be texts."""
    for choices in ({"X": "yes", "Y": " no"}, {"<s>": "yes"}):
        trie = TokenTrie.from_choices(smollm2, choices, lead="")
        assert doubts_of(partial(TrieLogitsProcessor.from_choices, smollm2, trie)) == []


# --- real ids of all kinds ----------------------------------------------------------------------------------------


def test_case_33_the_vocabulary_is_never_decoded_as_a_whole(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    asked = []
    to_piece = llama_cpp.llama_token_to_piece

    def spy(vocab: Any, token: int, *others: Any) -> int:
        asked.append(token)
        return int(to_piece(vocab, token, *others))

    monkeypatch.setattr(llama_cpp, "llama_token_to_piece", spy)
    forget_model(llm)
    assert TokenTrie.from_choices(llm, ["red", "green", "blue", "black"], prompt="x:").n_leaves == 4
    assert 0 < len(asked) < 50


def test_case_33_a_piece_that_is_no_text_does_no_harm() -> None:
    class Broken(Toy):
        def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
            assert 7 not in tokens, "nobody asked for it"
            return super().detokenize(tokens, special=special)

    assert TokenTrie.from_choices(Broken({"red": 2, "\x80": 7}), ["red", "green"], prompt="x:").n_leaves == 2


def test_case_34_byte_pieces_of_a_rare_character(llm: Llama) -> None:
    rare = "\U00013000"
    trie = TokenTrie.from_choices(llm, [rare, "yes"], prompt="x\n")
    cursor = TrieCursor(trie, eog_ids=as_tokenizer(llm).eog_ids)
    path = dict(trie.leaves())[rare]
    assert len(path) == 4
    assert len(cursor.allowed()) == 2
    cursor.accept(path[0])
    assert cursor.forced_run().tolist() == list(path[1:])
    for token in path[1:]:
        cursor.accept(token)
    assert cursor.leaf_name == rare
    only = choose(llm, "x\n", [rare])
    assert only.name == only.text == rare
    assert only.stats["forced_steps"] == 4


def random_walks(trie: TokenTrie, ends: Sequence[int], width: int, n: int) -> Iterator[str | None]:
    """The names that random rows of logits lead to."""
    rng = np.random.default_rng(7)
    noise = rng.standard_normal(width + n, dtype=np.float32)
    cursor = TrieCursor(trie, eog_ids=ends)
    for walk in range(n):
        cursor.reset()
        while not (cursor.is_finished or cursor.must_end):
            cursor.accept(cursor.pick(noise[walk : walk + width]))
        yield cursor.leaf_name


@pytest.mark.parametrize("tokenization", ["canonical", "every"])
def test_case_40_no_choice_is_a_pattern(llm: Llama, tokenization: str) -> None:
    choices = ["Dr. Smith", "a+b (c)", "x^2", "[n]"]
    trie = TokenTrie.from_choices(llm, choices, prompt="x:", tokenization=tokenization)
    names = set(random_walks(trie, as_tokenizer(llm).eog_ids, llm.n_vocab(), 200))
    assert names <= set(choices)
    assert len(names) > 1


def test_case_42_both_lines_come_back(llm: Llama) -> None:
    choices = ["first\nline", "first\nother", "one\r\ntwo", "\n", "end\n"]
    for lead in ("auto", ""):
        for prompt in ("x:", "x: \n"):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*merged with")
                comp = choose(llm, prompt, choices[:2], lead=lead)
                trie = TokenTrie.from_choices(llm, choices, prompt=prompt, lead=lead)
            assert comp.name in choices[:2]
            assert comp.text.removeprefix(" ") == comp.name
            tokenizer = as_tokenizer(llm)
            assert {tokenizer.detokenize(path).decode().removeprefix(" ") for _, path in trie.leaves()} == set(choices)


@pytest.mark.parametrize("width", [31, 32, 50432])
def test_case_43_logits_wider_than_the_vocabulary(width: int) -> None:
    trie = TokenTrie.from_sequences([("A", [5, 30]), ("B", [6])])
    cursor = TrieCursor(trie, eog_ids=[0])
    row = np.full(width, 9.0, np.float32)
    row[6] = 8.0
    assert cursor.pick(row) == 5
    masked = row.copy()
    cursor.mask(masked)
    assert np.flatnonzero(np.isfinite(masked)).tolist() == [5, 6]
    assert masked[5] == 9.0
    cursor.accept(5)
    assert cursor.pick(row) == 30
    cursor.mask(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [30]


def test_case_43_logits_too_narrow_are_refused() -> None:
    cursor = TrieCursor(TokenTrie.from_sequences([("A", [5, 30]), ("B", [6])]), eog_ids=[0])
    with pytest.raises(ValueError, match=r"30|31"):
        cursor.pick(np.zeros(30, np.float32))
    assert cursor.pick(np.zeros(31, np.float32)) == 5


def test_case_87_choices_never_begin_with_a_bos(llm: Llama) -> None:
    bos = llm.token_bos()
    messages: list[Any] = [{"role": "user", "content": "Is fire hot? Answer yes or no."}]
    for prompt in (None, "x:", "", messages, [bos]):
        for heal in (False, True):
            trie = TokenTrie.from_choices(llm, ["yes", "no"], prompt=prompt, heal=heal)
            assert bos not in trie.token
    ids = prompt_tokens(llm, messages)
    constraint = TrieLogitsProcessor.from_choices(llm, ["yes", "no"])
    llm.create_chat_completion(messages, logits_processor=constraint, max_tokens=constraint.max_tokens)
    by_chat = constraint.result
    for prompt in (messages, ids):
        comp = choose(llm, prompt, ["yes", "no"])
        assert (comp.name, comp.tokens) == (by_chat.name, by_chat.tokens)
    if llm._model.add_bos_token():
        assert ids[0] == bos
        assert ids[1] != bos, "one BOS"


# --- what is kept -----------------------------------------------------------------------------------------------------


def constraint_on(llm: Llama, choices: Sequence[str] = ("yes", "no"), **settings: Any) -> TrieLogitsProcessor:
    return TrieLogitsProcessor.from_choices(llm, list(choices), **settings)


def test_constraints_of_one_vocabulary_share_their_tries(tiny: Llama) -> None:
    one, other = constraint_on(tiny), constraint_on(tiny, mode="sampled")
    assert one.bind("the:") is one.bind("the:") is other.bind("the:")
    # What the paths depend on sets them apart: ending, choices, spelling.
    assert one.bind("the one:") is not one.bind("the:")
    for another in (
        constraint_on(tiny, ["no", "yes"]),
        constraint_on(tiny, lead=""),
        constraint_on(tiny, case_fold=True),
        constraint_on(tiny, json_value=True),
        constraint_on(tiny, special=True),
        constraint_on(tiny, tokenization="every"),
    ):
        assert another.bind("the:") is not one.bind("the:")
    named = TrieLogitsProcessor.from_choices(tiny, {"yes": "yes", "no": "nope"})
    assert {name for name, _ in named.bind("the:").leaves()} == {"yes", "no"}
    assert named.bind("the:") is not one.bind("the:")


def test_a_healed_trie_is_kept_apart_from_a_plain_one(tiny: Llama) -> None:
    healing = constraint_on(tiny, ["//a", "//b"], heal=True, lead="")
    ids = healing.prepare("the one:")
    assert healing.bind(ids).n_healed == 1
    with pytest.warns(TrieSamplerWarning, match="merged"):
        plain = constraint_on(tiny, ["//a", "//b"], lead="").bind("the one:")
    assert plain.n_healed == 0
    assert healing.bind("the one:") is plain
    # Every constraint tells of the doubts, not only the one that built the trie.
    with pytest.warns(TrieSamplerWarning, match="merged"):
        assert constraint_on(tiny, ["//a", "//b"], lead="").bind("the one:") is plain


def test_long_prompts_of_one_ending_share_a_trie(tiny: Llama) -> None:
    constraint = constraint_on(tiny)
    assert constraint.bind("one " * 40 + "the end is here:") is constraint.bind("two " * 30 + "the end is here:")


def test_numbers_and_texts_are_kept_apart(tiny: Llama) -> None:
    from typing import Literal

    number = TrieLogitsProcessor.from_choices(tiny, Literal[1], json_value=True, lead="").bind("x=")
    text = TrieLogitsProcessor.from_choices(tiny, ["1"], json_value=True, lead="").bind("x=")
    assert number.depth == 1
    assert text.depth == 3


def test_forget_model_drops_what_is_kept(tiny: Llama) -> None:
    old = constraint_on(tiny)
    trie, tokenizer = old.bind("the:"), as_tokenizer(tiny)
    before = choose(tiny, "the:", ["yes", "no"])
    forget_model(tiny)
    # Constraints at hand keep working.
    tiny.create_completion("the:", logits_processor=old, max_tokens=old.max_tokens)
    assert old.result.tokens == before.tokens
    assert old.bind("the:") is trie
    assert as_tokenizer(tiny) is not tokenizer
    assert constraint_on(tiny).bind("the:") is not trie
    assert sorted(constraint_on(tiny).bind("the:").leaves()) == sorted(trie.leaves())
    assert choose(tiny, "the:", ["yes", "no"]).tokens == before.tokens
    forget_model(tiny)
    forget_model(tiny)


def test_forget_model_lets_the_vocabulary_go(tiny: Llama) -> None:
    constraint = constraint_on(tiny, tokenization="every")
    watched: list[weakref.ref[Any]] = [weakref.ref(as_tokenizer(tiny)), weakref.ref(constraint.bind("the:").token)]
    del constraint
    gc.collect()
    assert all(watch() is not None for watch in watched)
    forget_model(tiny)
    gc.collect()
    assert all(watch() is None for watch in watched)


def test_what_is_kept_goes_with_the_model(tiny_model_path: Path) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model_path), n_ctx=64, n_threads=1, verbose=False)
    constraint = constraint_on(llm, tokenization="every")
    watched: list[weakref.ref[Any]] = [
        weakref.ref(as_tokenizer(llm)),
        weakref.ref(constraint.bind("the:").token),
        weakref.ref(llm),
    ]
    del constraint
    llm.close()
    del llm
    gc.collect()
    assert all(watch() is None for watch in watched)


def test_forget_model_of_a_tokenizer() -> None:
    class Unhashable(Toy):
        __hash__ = None  # type: ignore[assignment]

    for tokenizer in (Toy({"yes": 2}), Unhashable({"yes": 2})):
        trie = TokenTrie.from_choices(tokenizer, ["yes"], tokenization="every", lead="")
        forget_model(tokenizer)
        again = TokenTrie.from_choices(tokenizer, ["yes"], tokenization="every", lead="")
        assert trie.n_nodes == again.n_nodes


@pytest.mark.parametrize("thing", [None, 5, "model.gguf", object()])
def test_forget_model_refuses_what_is_no_model(thing: Any) -> None:
    with pytest.raises(TypeError):
        forget_model(thing)


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_recent_keeps_what_was_used_last() -> None:
    recent: Recent[Sized] = Recent(max_entries=3)
    kept = {key: recent.get(key, lambda: Sized(1)) for key in "abc"}
    assert recent.get("a", lambda: Sized(2)) is kept["a"]
    recent.get("d", lambda: Sized(1))
    assert len(recent) == 3
    assert recent.get("a", lambda: Sized(2)) is kept["a"], "used since"
    assert recent.get("b", lambda: Sized(2)) is not kept["b"]


def test_recent_is_limited_in_bytes() -> None:
    recent: Recent[Sized] = Recent(max_bytes=10)
    for key in range(20):
        recent.get(key, lambda: Sized(3))
        assert len(recent) <= 3
    assert len(recent) == 3
    large = recent.get("large", lambda: Sized(11))
    assert large.nbytes == 11, "handed out, not kept"
    assert recent.get("large", lambda: Sized(1)) is not large


def test_recent_keeps_the_others_where_one_is_too_large() -> None:
    recent: Recent[Sized] = Recent(max_bytes=10)
    small = recent.get("small", lambda: Sized(1))
    recent.get("large", lambda: Sized(11))
    assert recent.get("small", lambda: Sized(1)) is small


def test_recent_is_whole_after_an_error() -> None:
    recent: Recent[Sized] = Recent()

    def fail() -> Sized:
        raise KeyError("no")

    with pytest.raises(KeyError):
        recent.get("a", fail)
    assert len(recent) == 0
    assert recent.get("a", lambda: Sized(1)) is recent.get("a", fail)


def test_recent_across_threads_hands_out_one() -> None:
    recent: Recent[Sized] = Recent()
    gate = threading.Barrier(8)
    seen: list[Sized] = []

    def work() -> None:
        gate.wait()
        seen.append(recent.get("a", lambda: Sized(1)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(map(id, seen))) == 1
    assert len(recent) == 1


def test_every_door_takes_it_from_the_shared_cache(tiny: Any) -> None:
    from trie_sampler import SamplingParams, StreamSession, TrieCache, TrieLogitsProcessor, build_sampler_chain
    from trie_sampler.llama.sampler import token_trie_handle

    names = ("one", "two")
    listed = [{"name": name, "tokens": tiny.tokenize(name.encode(), add_bos=False)} for name in names]
    text = json.dumps({"modelId": "x", "descriptors": [{"path": "p", "leaves": listed}]})
    shared = TrieCache.shared()
    before = shared.stats()
    first = TrieLogitsProcessor.from_payload(tiny, text)
    with StreamSession.open(tiny) as session:
        session.set_token_trie(text)
        session.set_token_trie(TokenTreePayload.from_json(text))
    import llama_cpp

    chain = build_sampler_chain(tiny, SamplingParams(token_trie_descriptor_json=text))
    assert token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, 0)) is not None
    llama_cpp.llama_sampler_free(chain)
    after = shared.stats()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 3)
    assert first._binding.trie is shared.get(text, vocab=tiny)
