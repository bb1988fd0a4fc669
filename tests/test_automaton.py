"""All spellings of the choices as one graph, and the cursor that walks it, against an oracle of strings.

The hand-drawn graph: choices "ab", "abc", "xyz"; pieces 2 "a", 3 "b", 4 and 7 "ab", 5 "bc", 6 "c", 8 "x", 9 "xyz",
10 "abcd". A state is what was written so far:

    [] ─┬─ 2 ──────── [a] ─┬─ 3 ── [ab] "ab" ── 6 ── [abc] "abc"
        ├─ 4, 7 ── [ab]    └─ 5 ── [abc]
        └─ 9 ── [xyz] "xyz"          8 "x" is a dead end: no piece begins with "yz"; 10 writes too much
"""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import STOP, argmax_child, child_mass, decision_margin, end_mass, softmax, walk_distribution

from trie_sampler import layout
from trie_sampler.automaton import PieceIndex, forget_pieces
from trie_sampler.choices import Choices
from trie_sampler.cursor import Sampling, TrieCursor
from trie_sampler.errors import EmptyTrieError, OffTrieError, TrieSamplerError, TrieSamplerWarning, VocabMismatchError
from trie_sampler.tokens import Tokenizer, tokenize_choices
from trie_sampler.trie import Collision, TokenTrie

MODES = ("mass", "eog", "release")
END = layout.END
Row = np.ndarray[Any, np.dtype[Any]]


class Toy:
    """A vocabulary as a list of pieces, b"" for a control token; its own favourite is the longest piece."""

    def __init__(self, pieces: Sequence[bytes], eog_ids: Iterable[int] = ()) -> None:
        self.pieces = list(pieces)
        self.eog_ids = tuple(eog_ids)
        self.asked: list[int] = []

    @property
    def n_vocab(self) -> int:
        return len(self.pieces)

    @property
    def usable(self) -> dict[int, bytes]:
        return {token: piece for token, piece in enumerate(self.pieces) if piece and token not in self.eog_ids}

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        del special
        ids = []
        while text:
            token = max(
                (token for token, piece in self.usable.items() if text.startswith(piece)),
                key=lambda token: len(self.pieces[token]),
            )
            ids.append(token)
            text = text[len(self.pieces[token]) :]
        return ids

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        del special
        self.asked.extend(tokens)
        return b"".join(self.pieces[token] for token in tokens)

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return not self.pieces[token]


class Spellings:
    """All ways to write texts with pieces. A state is the bytes written so far; nothing is shared or numbered."""

    def __init__(self, pieces: Mapping[int, bytes], texts: Iterable[tuple[str, bytes]]) -> None:
        self.pieces = pieces
        self.names: dict[bytes, set[str]] = {}
        for name, text in texts:
            self.names.setdefault(text, set()).add(name)
        self._known: dict[bytes, bool] = {}

    def _longer(self, done: bytes) -> dict[int, bytes]:
        made = {token: done + piece for token, piece in sorted(self.pieces.items()) if piece}
        return {token: text for token, text in made.items() if any(whole.startswith(text) for whole in self.names)}

    def completes(self, done: bytes) -> bool:
        """Whether some text can still be written to its end."""
        if done not in self._known:
            self._known[done] = done in self.names or any(map(self.completes, self._longer(done).values()))
        return self._known[done]

    def steps(self, done: bytes) -> dict[int, bytes]:
        """Token -> what is written then, ascending by token."""
        return {token: text for token, text in self._longer(done).items() if self.completes(text)}

    def states(self, start: bytes = b"") -> list[bytes]:
        """All that can be written from there on, the shorter first."""
        found, new = {start}, {start}
        while new:
            new = {text for done in new for text in self.steps(done).values()} - found
            found |= new
        return sorted(found, key=lambda text: (len(text), text))

    def is_terminal(self, done: bytes) -> bool:
        return done in self.names

    def name(self, done: bytes) -> str | None:
        return min(self.names.get(done, ()), default=None)

    def outcomes(self, done: bytes) -> set[str]:
        """Names that can still come out."""
        return {min(self.names[state]) for state in self.states(done) if self.is_terminal(state)}

    def depth(self) -> int:
        """Tokens of the longest path."""
        longest = {b"": 0}
        for state in self.states():
            for text in self.steps(state).values():
                longest[text] = max(longest.get(text, 0), longest[state] + 1)
        return max(longest.values())

    def forced(self, done: bytes) -> list[int]:
        run = []
        while len(self.steps(done)) == 1 and not self.is_terminal(done):
            (token,) = self.steps(done)
            run.append(token)
            done += self.pieces[token]
        return run

    def writable(self) -> set[bytes]:
        return {state for state in self.states() if self.is_terminal(state)}

    def lost(self) -> list[str]:
        """Names that keep some text, and can write none."""
        kept = {min(names) for names in self.names.values()}
        return sorted(kept - {min(self.names[text]) for text in self.writable()})


def leads_of(lead: str, text: str) -> list[str]:
    """The spellings of a text where nothing is known of what stands before it."""
    return [text] if text[:1].isspace() else {"auto": [text, " " + text], "": [text], " ": [" " + text]}[lead]


def ref_of(tokenizer: Any, choices: Mapping[str, str], lead: str = "") -> Spellings:
    texts = [(name, form.encode()) for name, text in choices.items() for form in leads_of(lead, text)]
    return Spellings(tokenizer.usable, texts)


def graph_of(
    tokenizer: Tokenizer, choices: Any, *, prompt_ids: Sequence[int] | None = None, lead: str = "", **settings: Any
) -> TokenTrie:
    """``from_choices``, which would ask llama_cpp what a ``Llama`` is."""
    return TokenTrie._from_spelled(
        tokenizer,
        tokenize_choices(tokenizer, Choices.of(choices), prompt_ids, lead=lead, tokenization="every", **settings),
    )


# --- anything -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    tokenizer: Toy
    choices: dict[str, str]
    lead: str

    @property
    def ref(self) -> Spellings:
        return ref_of(self.tokenizer, self.choices, self.lead)

    @property
    def trie(self) -> TokenTrie:
        return graph_of(self.tokenizer, self.choices, lead=self.lead)

    def writable(self) -> Case:
        """Without the names that cannot be written; at least one is left."""
        lost = self.ref.lost()
        while lost:
            # Of equal texts the next name would be lost then.
            left = {name: text for name, text in self.choices.items() if name not in lost}
            assume(left)
            object.__setattr__(self, "choices", left)
            lost = self.ref.lost()
        return self


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Choices that share beginnings or are equal, and pieces cut out of them, also in the middle of a character."""
    alphabet = draw(st.sampled_from(["ab", "abc", "ab ", "aéè", "日本🙂"]))
    word = st.text(alphabet, min_size=1, max_size=4).filter(lambda text: not text[0].isspace())
    texts: list[str] = []
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(["", *texts]))
        texts.append((base + draw(word))[:6] if draw(st.integers(0, 7)) else (base or draw(word)))
    names = draw(st.permutations([f"n{i}" for i in range(len(texts))]))
    lead = draw(st.sampled_from(["", " ", "auto"]))
    forms = [form for text in texts for form in leads_of(lead, text)]
    units = {
        "bytes": {bytes([byte]) for form in forms for byte in form.encode()},
        "characters": {character.encode() for form in forms for character in form},
        "texts": {form.encode() for form in forms},
        "nothing": set[bytes](),
    }[draw(st.sampled_from(["bytes", "characters", "texts", "nothing"]))]
    pieces = [*sorted(units), *[b""] * draw(st.integers(0, 2))]
    for _ in range(draw(st.integers(0, 12))):
        whole = draw(st.sampled_from(forms)).encode()
        start = draw(st.integers(0, len(whole) - 1))
        pieces.append(whole[start : start + draw(st.integers(1, 5))] + draw(st.sampled_from([b"", b"", b"", b"a"])))
    pieces = draw(st.permutations(pieces)) or [b""]
    # The text of an end token may be one that is wanted; it ends the generation all the same.
    n_ends = draw(st.integers(0, 2)) if len(pieces) > 3 else 0
    return Case(Toy(pieces, range(n_ends)), dict(zip(names, texts, strict=True)), lead)


def assert_equals_oracle(trie: TokenTrie, ref: Spellings) -> None:
    """Every array of the graph, which has one form only, and what is asked of it."""
    states = ref.states()
    number = {state: node for node, state in enumerate(states)}
    steps = [ref.steps(state) for state in states]
    assert trie.target is not None
    assert trie.sole_leaf is not None
    assert trie.token.tolist() == [token for here in steps for token in here]
    assert trie.target.tolist() == [number[text] for here in steps for text in here.values()]
    assert trie.first_child.tolist() == [0, *accumulate(map(len, steps))]
    assert [trie.leaf_name(node) for node in range(trie.n_nodes)] == [ref.name(state) for state in states]
    assert [trie.is_terminal(node) for node in range(trie.n_nodes)] == [ref.is_terminal(state) for state in states]
    for state, sole in zip(states, trie.sole_leaf.tolist(), strict=True):
        outcomes = ref.outcomes(state)
        assert (None if sole < 0 else {trie.name_of(sole)}) == (outcomes if len(outcomes) == 1 else None)
        assert sole >= -1
    assert (trie.n_nodes, trie.root, trie.depth) == (len(states), 0, ref.depth())
    assert trie.n_leaves == len(ref.outcomes(b""))
    assert trie.max_token == max(trie.token.tolist())
    arrays = (trie.token, trie.first_child, trie.leaf, trie.target, trie.sole_leaf)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    assert not any(array.flags.writeable for array in arrays)
    assert trie.nbytes == 4 * sum(map(len, arrays)) == 4 * (2 * len(trie.token) + 3 * trie.n_nodes + 1)
    trie.validate()


@given(cases())
def test_the_graph_equals_strings(case: Case) -> None:
    ref = case.ref
    lost = [name for name in case.choices if name in ref.lost()]
    if lost:
        with pytest.raises(VocabMismatchError, match=f"choice '{lost[0]}': this vocabulary cannot write it"):
            _ = case.trie
        return
    trie = case.trie
    assert_equals_oracle(trie, ref)
    # Each name that lost a text to a smaller one is told of once for that text, by a path that writes it.
    write = case.tokenizer.detokenize
    comp = sorted((write(tokens), kept, dropped) for kept, dropped, tokens in trie.collisions)
    losers = [(text, sorted(ref.names[text])) for text in ref.writable()]
    assert comp == sorted((text, names[0], name) for text, names in losers for name in names[1:])


@given(cases())
def test_paths_lead_where_they_say(case: Case) -> None:
    case = case.writable()
    trie, states = case.trie, case.ref.states()
    for node, state in enumerate(states):
        tokens = trie.path_tokens(node)
        assert case.tokenizer.detokenize(tokens) == state
        here = trie.root
        for token in tokens:
            assert trie.step(here, token) > here  # edges go up
            here = trie.step(here, token)
        assert here == node
    comp = [(name, case.tokenizer.detokenize(tokens)) for name, tokens in trie.leaves()]
    assert comp == [(case.ref.name(state), state) for state in states if case.ref.is_terminal(state)]


@given(cases())
def test_step_takes_the_allowed_and_nothing_else(case: Case) -> None:
    case = case.writable()
    trie, ref = case.trie, case.ref
    states = ref.states()
    for node, state in enumerate(states):
        steps = ref.steps(state)
        assert trie.children(node).tolist() == list(steps)
        for token in (-2, -1, *range(case.tokenizer.n_vocab + 1), 2**31 - 1, 2**31, 2**32 + min(steps, default=0)):
            assert trie.step(node, token) == (states.index(steps[token]) if token in steps else -1)


# --- by hand ------------------------------------------------------------------------------------

PIECES = [b"ab", b"", b"a", b"b", b"ab", b"bc", b"c", b"ab", b"x", b"xyz", b"abcd"]  # 0 ends, 1 is a control token
CHOICES = ["ab", "abc", "xyz"]


def hand_drawn() -> TokenTrie:
    return graph_of(Toy(PIECES, [0]), CHOICES)


#            state   edges: token -> state                        leaf    the one that must come out
DRAWN_STATES: list[tuple[str, dict[int, str], str | None, str | None]] = [
    ("",    {2: "a", 4: "ab", 7: "ab", 9: "xyz"},           None,   None),
    ("a",   {3: "ab", 5: "abc"},                            None,   None),
    ("ab",  {6: "abc"},                                     "ab",   None),
    ("abc", {},                                             "abc",  "abc"),
    ("xyz", {},                                             "xyz",  "xyz"),
]  # fmt: skip


def test_the_graph_of_the_header() -> None:
    trie = hand_drawn()
    order = [state for state, *_ in DRAWN_STATES]
    comp = []
    assert trie.target is not None
    assert trie.sole_leaf is not None
    for node, state in enumerate(order):
        edges = {int(token): order[trie.step(node, int(token))] for token in trie.children(node)}
        sole = int(trie.sole_leaf[node])
        comp.append((state, edges, trie.leaf_name(node), None if sole < 0 else trie.name_of(sole)))
    assert comp == DRAWN_STATES
    assert trie.token.tolist() == [2, 4, 7, 9, 3, 5, 6]
    assert trie.target.tolist() == [1, 2, 2, 4, 2, 3, 3]
    assert trie.first_child.tolist() == [0, 4, 6, 7, 7, 7]
    assert trie.leaf.tolist() == [-1, -1, 0, 1, 2]
    assert trie.sole_leaf.tolist() == [-1, -1, -1, 1, 2]
    assert (trie.depth, trie.n_leaves, trie.n_nodes, trie.max_token, trie.nbytes) == (3, 3, 5, 9, 120)
    assert repr(trie) == "TokenTrie(n_leaves=3, n_nodes=5, depth=3, nbytes=120)"
    # Of several ways one is told; the first edge that leads there is the longest piece.
    assert list(trie.leaves()) == [("ab", (4,)), ("abc", (2, 5)), ("xyz", (9,))]
    assert_equals_oracle(trie, ref_of(Toy(PIECES, [0]), dict(zip(CHOICES, CHOICES, strict=True))))


#                        pieces                       choice            tokens of the longest path
DEPTHS = [
    ([b"a"],                                          "aaaaa",          5),
    ([b"aaaaa"],                                      "aaaaa",          1),
    ([b"aa", b"aaa"],                                 "aaaaa",          2),
    ([b"aa", b"aaa", b"a"],                           "aaaaa",          5),
    ([b"aa", b"aaaa"],                                "aaaaaa",         3),
    ([b"\xe6\x97", b"\xa5", "日".encode()],            "日日",            4),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "choice", "ref"), DEPTHS)
def test_depth_is_the_longest_path(pieces: list[bytes], choice: str, ref: int) -> None:
    trie = graph_of(Toy(pieces), [choice])
    assert trie.depth == ref
    # A cursor's net is larger than that: the longest walk comes to its end.
    cursor = TrieCursor(trie, max_span_tokens=1)
    for _ in range(ref):
        token = min(cursor.allowed().tolist(), key=lambda token: len(pieces[token]))
        cursor.accept(token)
    assert cursor.must_end


@pytest.mark.parametrize("pieces", [[b"a", b"b"], [b"a", b"bc", b"b", b"zc"], [b"", b""], [b"abcd"], []], ids=str)
def test_a_choice_that_cannot_be_written_is_named(pieces: list[bytes]) -> None:
    with pytest.raises(VocabMismatchError, match="choice 'acb': this vocabulary cannot write it"):
        graph_of(Toy(pieces), ["acb"])
    if b"a" in pieces:
        with pytest.raises(VocabMismatchError, match="choice 'acb': this vocabulary cannot write it"):
            graph_of(Toy(pieces), ["a", "acb", "ab"])


def test_the_text_of_an_end_token_writes_nothing() -> None:
    with pytest.raises(VocabMismatchError, match="choice 'a'"):
        graph_of(Toy([b"a"], [0]), ["a"])
    assert graph_of(Toy([b"a", b"a"], [0]), ["a"]).token.tolist() == [1]


def test_one_spelling_of_several_is_enough() -> None:
    """Under lead="auto" a choice has two; here only that with the space can be written."""
    trie = graph_of(Toy([b" a", b"b"]), ["a", "b"], lead="auto")
    assert list(trie.leaves()) == [("b", (1,)), ("a", (0,))]
    assert trie.n_leaves == 2
    with pytest.raises(VocabMismatchError, match="choice 'b'"):
        graph_of(Toy([b" a", b"b"]), ["a", "b"], lead=" ")
    with pytest.raises(VocabMismatchError, match="choice 'a'"):
        graph_of(Toy([b" a", b"b"]), ["a", "b"], lead="")


def test_a_space_of_its_own_may_be_a_piece_of_its_own() -> None:
    trie = graph_of(Toy([b" ", b"a", b" a"]), ["a"], lead="auto")
    assert {trie.step(0, 1), trie.step(trie.step(0, 0), 1), trie.step(0, 2)} == {
        node for node in range(trie.n_nodes) if trie.leaf_name(node) == "a"
    }
    assert trie.sole_leaf is not None
    assert trie.sole_leaf.tolist() == [0] * trie.n_nodes  # two texts, one leaf: nothing is open


def test_all_cases_of_a_choice_are_one_leaf() -> None:
    single = [bytes([byte]) for byte in b"yYeEsSnNoO"]
    trie = graph_of(Toy(single), ["yes", "no"], case_fold=True)
    assert trie.n_leaves == 2
    assert trie.sole_leaf is not None
    assert trie.sole_leaf[0] == -1
    assert {trie.sole_leaf[trie.step(0, token)] for token in (0, 1)} == {0}
    assert {trie.sole_leaf[trie.step(0, token)] for token in (6, 7)} == {1}


@pytest.mark.parametrize("choices", [{"X": "ab", "B": "ab", "Z": "c"}, {"B": "ab", "Z": "c", "X": "ab"}], ids=str)
def test_of_two_names_with_equal_texts_the_smaller_stays(choices: dict[str, str]) -> None:
    """The ways to write the text are two; the collision is one."""
    trie = graph_of(Toy([b"a", b"b", b"ab", b"c"]), choices)
    (collision,) = trie.collisions
    assert collision == Collision("B", "X", (2,))
    assert {name for name, _ in trie.leaves()} == {"B", "Z"}
    assert trie.n_leaves == 2
    assert pickle.loads(pickle.dumps(trie)).collisions == (collision,)  # noqa: S301 - our own bytes


def test_three_names_with_equal_texts_collide_twice() -> None:
    trie = graph_of(Toy([b"a"]), {"C": "a", "A": "a", "B": "a"})
    assert {(c.kept, c.dropped) for c in trie.collisions} == {("A", "B"), ("A", "C")}
    assert len(trie.collisions) == 2


def test_equal_texts_that_can_be_written_one_way_only_collide_there() -> None:
    trie = graph_of(Toy([b" a"]), {"A": "a", "B": "a"}, lead="auto")
    assert trie.collisions == (Collision("A", "B", (0,)),)


def test_a_choice_twice_is_no_collision() -> None:
    trie = graph_of(Toy([b"a"]), ["a", "a"])
    assert (trie.collisions, trie.n_leaves) == ((), 1)


def test_choices_without_text() -> None:
    with pytest.raises(EmptyTrieError):
        graph_of(Toy([b"a"]), [""])
    with pytest.warns(TrieSamplerWarning, match="skipped leaves without tokens, 1 in all"):
        assert graph_of(Toy([b"a"]), {"none": "", "a": "a"}).n_leaves == 1


def test_the_spaces_follow_the_prompt() -> None:
    tokenizer = Toy([b"x", b":", b" ", b"a", b" a", b""])
    #        prompt       lead     texts
    table = [
        ([0, 1],      "auto",  {b"a", b" a"}),
        ([0, 1, 2],   "auto",  {b"a"}),
        ([0, 1, 5],   "auto",  {b"a"}),
        ([0, 1],      "",      {b"a"}),
        ([0, 1],      " ",     {b" a"}),
        ([0, 1, 2],   " ",     {b" a"}),
        (None,        "auto",  {b"a", b" a"}),
    ]  # fmt: skip
    for prompt_ids, lead, texts in table:
        trie = graph_of(tokenizer, ["a"], prompt_ids=prompt_ids, lead=lead)
        assert {tokenizer.detokenize(tokens) for _, tokens in trie.leaves()} == texts
        assert_equals_oracle(trie, Spellings(tokenizer.usable, [("a", text) for text in texts]))


def test_from_choices() -> None:
    pytest.importorskip("llama_cpp", reason="from_choices asks llama/vocab.py what a Llama is")
    tokenizer, choices = Toy([*PIECES, b":", b" ab"], [0]), ["ab", "abc"]
    for prompt_ids, lead in ((None, ""), (None, "auto"), ([2, 11], "auto"), ([2, 11], " ")):
        comp = TokenTrie.from_choices(tokenizer, choices, prompt=prompt_ids, lead=lead, tokenization="every")
        ref = graph_of(tokenizer, choices, prompt_ids=prompt_ids, lead=lead)
        assert arrays_of(comp) == arrays_of(ref)
        assert comp.tail == (b"" if prompt_ids is None else b"a:")
        assert (comp.healed, comp.n_healed, comp.model_id) == (b"", 0, None)
        # The favourite path is one of all.
        canonical = TokenTrie.from_choices(tokenizer, choices, prompt=prompt_ids, lead=lead)
        for name, tokens in canonical.leaves():
            node = comp.root
            for token in tokens:
                node = comp.step(node, token)
            assert comp.leaf_name(node) == name
    with pytest.raises(VocabMismatchError, match="choice 'q'"):
        TokenTrie.from_choices(tokenizer, ["q"], tokenization="every")


def test_several_roots_stay_the_first_nodes() -> None:
    """No adapter makes such a graph yet; the arrays allow it."""
    tokenizer = Toy([b"a", b"b", b"ab"])
    groups = [("p", [("A", b"ab"), ("B", b"b")]), ("q", [("A", b"ab"), ("C", b"aab")])]
    trie = TokenTrie._from_leaves(groups)._written_in_every_way(PieceIndex.of(tokenizer))
    trie.validate()
    assert trie.roots == {"p": 0, "q": 1}
    for path, leaves in groups:
        ref = Spellings(tokenizer.usable, leaves)
        reached = {b"": trie.root_of(path)}
        for state in ref.states():
            node = reached[state]
            assert trie.children(node).tolist() == list(ref.steps(state))
            assert trie.leaf_name(node) == ref.name(state)
            for token, text in ref.steps(state).items():
                assert reached.setdefault(text, trie.step(node, token)) == trie.step(node, token)
        assert all(tokenizer.detokenize(trie.path_tokens(node)) == state for state, node in reached.items())


def test_json_values_are_written_in_every_way_too() -> None:
    tokenizer = Toy([b"a", b'"', b'a"', b"ab", b"b"])
    trie = graph_of(tokenizer, ["a", "ab"], json_value=True)
    assert_equals_oracle(trie, Spellings(tokenizer.usable, [("a", b'"a"'), ("ab", b'"ab"')]))


def test_control_tokens_have_no_other_spelling() -> None:
    with pytest.raises(ValueError, match="special=True needs tokenization"):
        graph_of(Toy(PIECES, [0]), CHOICES, special=True)


#           pieces        ends    what the refusal names
STRANGERS = [
    (PIECES[:9],   [0],    "leaf 'xyz': token 9 at index 0 cannot be part of a choice: V is 9"),
    (PIECES[:4],   [0],    "leaf 'ab': token 4 at index 0 cannot be part of a choice: V is 4"),
    (PIECES,       [0, 6], "leaf 'abc': token 6 at index 1 cannot be part of a choice: it ends the generation"),
    (PIECES,       [0, 3], "leaf 'ab': token 3 at index 1 cannot be part of a choice: it ends the generation"),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "ends", "ref"), STRANGERS)
def test_check_vocab_finds_the_edge_of_a_stranger(pieces: list[bytes], ends: list[int], ref: str) -> None:
    with pytest.raises(VocabMismatchError, match=ref):
        hand_drawn().check_vocab(Toy(pieces, ends))


def test_check_vocab_reads_what_a_graph_spells() -> None:
    hand_drawn().check_vocab(Toy(PIECES, [0]), strict=True)
    # A choice with several texts is meant so.
    tokenizer = Toy([b"a", b" a"])
    graph_of(tokenizer, ["a"], lead="auto").check_vocab(tokenizer)
    with pytest.warns(TrieSamplerWarning, match="do not spell their names, perhaps of another model: 'ab' is spelled"):
        hand_drawn().check_vocab(Toy([b"q"] * len(PIECES)))


# --- where the arrays and stacks grow -----------------------------------------------------------

PRINTABLE = [chr(code) for code in range(33, 127)]


def test_many_edges_at_one_state() -> None:
    """Past 64 edges another sort takes over, past 64 open branches the stack grows. Ids descend where bytes ascend."""
    pieces = [(character + "!").encode() for character in reversed(PRINTABLE)]
    tokenizer = Toy([*pieces, *(character.encode() for character in reversed(PRINTABLE))])
    choices = {character: character + "!" for character in PRINTABLE}
    assert_equals_oracle(graph_of(tokenizer, choices), ref_of(tokenizer, choices))


def test_many_ids_of_one_piece() -> None:
    """Edges are many more than nodes."""
    tokenizer = Toy([b"a", b"b", b"ab"] * 200)
    choices = {"A": "ab", "B": "b"}
    trie = graph_of(tokenizer, choices)
    assert len(trie.token) == 200 * 4
    assert_equals_oracle(trie, ref_of(tokenizer, choices))


def test_a_long_text_in_all_its_ways() -> None:
    """2^39 and more paths, 41 states."""
    tokenizer = Toy([b"a" * n for n in range(40, 0, -1)])
    trie = graph_of(tokenizer, ["a" * 40])
    assert (trie.n_nodes, len(trie.token), trie.depth) == (41, 820, 40)
    assert trie.sole_leaf is not None
    assert not trie.sole_leaf.any()
    trie.validate()
    assert trie.path_tokens(40) == (0,)


# --- damage and copies --------------------------------------------------------------------------


def arrays_of(trie: TokenTrie) -> tuple[bytes | None, ...]:
    arrays = (trie.token, trie.first_child, trie.leaf, trie.target, trie.sole_leaf)
    return tuple(None if array is None else array.tobytes() for array in arrays)


def damaged(**changes: Any) -> TokenTrie:
    """The hand-drawn graph with single entries or whole arrays changed."""
    good = hand_drawn()
    arrays = {name: getattr(good, name).copy() for name in ("token", "first_child", "leaf", "target")}
    for name, change in changes.items():
        if isinstance(change, dict):
            for place, value in change.items():
                arrays[name][place] = value
        else:
            arrays[name] = np.array(change, np.int32)
    return TokenTrie._from_arrays(
        arrays["token"],
        arrays["first_child"],
        arrays["leaf"],
        good.depth,
        good.tail,
        good._roots,
        good._n_names,
        good._names,
        good._collided,
        arrays["target"],
        good.sole_leaf,
    )


# token 2 4 7 9 3 5 6, target 1 2 2 4 2 3 3, first_child 0 4 6 7 7 7, leaf -1 -1 0 1 2.
DAMAGE: list[tuple[str, dict[str, Any]]] = [
    ("targets are nodes", {"target": {3: 5}}),
    ("targets are nodes", {"target": {6: 2**31 - 1}}),
    ("children come after parents", {"target": {4: 1}}),
    ("children come after parents", {"target": {5: 0}}),
    ("children come after parents", {"target": {0: 0}}),
    ("children come after parents", {"target": {6: -1}}),
    ("children come after parents", {"target": {0: -(2**31)}}),
    ("every edge has a target", {"target": [1, 2, 2, 4, 2, 3]}),
    ("every edge has a target", {"target": [1, 2, 2, 4, 2, 3, 3, 4]}),
    ("every edge has a target", {"target": []}),
    ("every edge has a target", {"token": [2, 4, 7, 9, 3, 5, 6, 7]}),
    ("children follow the roots", {"token": [2, 4, 7, 9, 3, 5], "target": [1, 2, 2, 4, 2, 3]}),
    ("children follow the roots", {"first_child": {0: 1}}),
    ("children follow the roots", {"first_child": {0: -1}}),
    ("children follow the roots", {"first_child": {5: 8}}),
    ("children follow the roots", {"first_child": {5: 6}}),
    ("first_child ascends", {"first_child": {2: 3}}),
    ("first_child ascends", {"first_child": {3: 8}}),
    ("first_child ascends", {"first_child": {1: -4}}),
    ("first_child has S\\+1 entries", {"first_child": [0, 4, 6, 7, 7]}),
    ("first_child has S\\+1 entries", {"leaf": [-1, -1, 0, 1]}),
    ("siblings ascend", {"token": {1: 2}}),
    ("siblings ascend", {"token": {4: 5, 5: 3}}),
    ("siblings ascend", {"token": {3: 0}}),
    ("tokens are ids", {"token": {0: -1}}),
    ("tokens are ids", {"token": {6: -9}}),
    ("leaf indices are in range", {"leaf": {2: 3}}),
    ("leaf indices are in range", {"leaf": {2: -2}}),
    ("every branch ends in a leaf", {"leaf": {4: -1}}),
]


@pytest.mark.parametrize(("promise", "changes"), DAMAGE, ids=lambda value: str(value).replace(" ", "_"))
def test_validate_sees_each_kind_of_damage(promise: str, changes: dict[str, Any]) -> None:
    with pytest.raises(TrieSamplerError, match=f"damaged trie: '{promise}' does not hold"):
        damaged(**changes).validate()


@pytest.mark.parametrize("place", range(7))
def test_a_negative_id_is_refused_before_a_kernel_reads_it(place: int) -> None:
    with pytest.raises(TrieSamplerError, match="'tokens are ids' does not hold"):
        damaged(token={place: -1})


def test_the_undamaged_one_passes() -> None:
    damaged().validate()
    # A leaf less where another goes on is another graph, and no damage.
    damaged(leaf={2: -1}).validate()


@pytest.mark.parametrize("target", [5, 2**31 - 1, -1, -(2**31)])
def test_an_edge_to_no_node_is_no_edge(target: int) -> None:
    cursor = TrieCursor(damaged(target={3: target}))
    with pytest.raises(OffTrieError, match="token 9 is not allowed here"):
        cursor.accept(9)
    assert (cursor.node, cursor.trie.step(0, 9)) == (0, -1)


@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, copy.copy])  # noqa: S301
def test_copies_are_equal_and_read_only(copied: Callable[[TokenTrie], TokenTrie]) -> None:
    ref = graph_of(Toy(PIECES, [0]), {"A": "ab", "B": "ab", "日": "abc"})
    comp = copied(ref)
    assert arrays_of(comp) == arrays_of(ref)
    assert list(comp.leaves()) == list(ref.leaves())
    for name in ("collisions", "depth", "n_leaves", "n_nodes", "max_token", "tail", "roots"):
        assert getattr(comp, name) == getattr(ref, name)
    assert comp.target is not None
    assert comp.sole_leaf is not None
    assert not any(array.flags.writeable for array in (comp.token, comp.leaf, comp.target, comp.sole_leaf))
    comp.validate()


def test_what_was_healed_is_kept() -> None:
    """ "a:" and ":/": the prompt's ":" is taken back, and each way to write ":/b" begins there."""
    tokenizer = Toy([b"a", b":", b"/", b":/", b"b"])
    trie = graph_of(tokenizer, ["/b"], prompt_ids=[0, 1], heal=True)
    assert (trie.healed, trie.n_healed, trie.tail) == (b":", 1, b"a")
    assert_equals_oracle(trie, Spellings(tokenizer.usable, [("/b", b":/b")]))
    comp = pickle.loads(pickle.dumps(trie))  # noqa: S301 - our own bytes
    assert (comp.healed, comp.n_healed, comp.tail) == (b":", 1, b"a")


# --- the cursor ---------------------------------------------------------------------------------


def seen_of(cursor: TrieCursor) -> tuple[Any, ...]:
    """All that a caller can see of where a cursor stands."""
    return (
        repr(cursor),
        cursor.node,
        cursor.is_active,
        cursor.is_finished,
        cursor.position_in_span,
        cursor.forced_run().tolist(),
        cursor.allowed().tolist() if cursor.is_active or cursor.is_finished else None,
        int(cursor._record["n_accepted"][0]),
    )


def ref_picks(row: Row, children: Collection[int], terminal: bool, mode: str, ends: Collection[int]) -> set[int]:
    """The token that greedy takes; both where float32 may see it otherwise than float64."""
    stops = set(ends) - set(children)
    end = argmax_child(row, stops) if stops else END
    if not children:
        return {end}
    best = argmax_child(row, children)
    if not terminal:
        return {best}
    if mode != "mass":
        return {argmax_child(row, {*children, *ends})}
    if 0 < decision_margin(row, children, terminal) < 1e-6:
        return {best, end}
    return {end if end_mass(row, children) >= softmax(row)[best] else best}


def assert_reads_rows(
    cursor: TrieCursor, row: Row, children: Collection[int], terminal: bool, mode: str, ends: Collection[int]
) -> None:
    """What is picked, drawn, masked and measured at one state of the graph."""
    before = row.tobytes()
    seen = seen_of(cursor)
    allowed = {*children, *(ends if terminal else ())}
    assert cursor.allowed().tolist() == sorted(allowed)
    picks = ref_picks(row, children, terminal, mode, ends)
    pick = cursor.pick(row)
    assert pick in picks
    speaks_end = terminal and not set(ends) - set(children)
    for _ in range(4):
        drawn = cursor.sample(row)
        assert drawn in allowed or (drawn == END and speaks_end)
    np.testing.assert_allclose(cursor.valid_mass(row), child_mass(row, children), rtol=1e-6, atol=1e-12)
    masked = row.copy()
    cursor.mask(masked)
    assert masked.tolist() == [logit if token in allowed else -math.inf for token, logit in enumerate(row.tolist())]
    left = row.copy()
    if pick == END:
        with pytest.raises(TrieSamplerError, match="no end token is known"):
            cursor.constrain(left, samples=False)
    else:
        step = cursor.constrain(left, samples=False)
        assert step.token == pick
        assert step.is_forced is (len(children) == 1 and not terminal)
        assert np.flatnonzero(left > -math.inf).tolist() == [pick]
        assert left[pick] == row[pick]
        if children and (mode == "mass" or not terminal):
            shares = walk_distribution(row, children, terminal)
            share = shares[pick if pick in children else STOP]
            np.testing.assert_allclose(step.logprob, math.log(share), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(step.margin, decision_margin(row, children, terminal), rtol=1e-6, atol=1e-6)
    assert row.tobytes() == before
    assert seen_of(cursor) == seen


def assert_refuses(cursor: TrieCursor, allowed: Collection[int], terminal: bool, mode: str, n_vocab: int) -> None:
    """Everything but the allowed, -1 included where no leaf ends."""
    seen = seen_of(cursor)
    for token in {*range(n_vocab + 1), -2, 2**31, 2**32, *(() if terminal else (END,))} - set(allowed):
        if mode == "release":
            twin = cursor.clone()
            twin.accept(token)
            assert (twin.is_active, twin.is_finished) == (False, False)
        else:
            with pytest.raises(OffTrieError, match=rf"token {token} is not allowed here"):
                cursor.accept(token)
    assert seen_of(cursor) == seen


def assert_ends(cursor: TrieCursor, row: Row, children: Collection[int], mode: str, ends: Collection[int]) -> None:
    """At the end of a leaf: -1 and every end token that does not go on."""
    for token in (END, *(set(ends) - set(children))):
        twin = cursor.clone()
        twin.accept(token)
        assert (twin.is_active, twin.is_finished) == (False, mode != "release")
        assert twin.node == cursor.node
        assert (twin.may_end, twin.must_end) == (False, False)
        assert twin.forced_run().tolist() == []
        if mode == "release":
            continue
        assert twin.allowed().tolist() == sorted(ends)
        outside = set(ends) - set(children)
        assert twin.pick(row) == (argmax_child(row, outside) if outside else END)


@pytest.mark.parametrize("mode", MODES)
@given(case=cases(), seed=st.integers(0, 2**32), shares=st.sampled_from([False, False, True]))
def test_any_walk_over_a_graph_equals_strings(case: Case, seed: int, mode: str, shares: bool) -> None:
    case = case.writable()
    trie, ref, rng = case.trie, case.ref, np.random.default_rng(seed)
    n_vocab = case.tokenizer.n_vocab
    ends = {*case.tokenizer.eog_ids, n_vocab}
    if shares:  # an end token may be a token of the choices as well
        ends.add(int(rng.choice(trie.token)))
    ends = ends if seed % 4 else set()
    cursor = TrieCursor(trie, on_end=mode, stop_tokens=ends, sampling=Sampling(seed=seed))
    number = {state: node for node, state in enumerate(ref.states())}
    done = b""
    for n_done in range(ref.depth() + 1):
        children, terminal = ref.steps(done), ref.is_terminal(done)
        assert cursor.node == number[done]
        assert cursor.leaf_name == ref.name(done)
        if mode == "release" and not children:
            assert not cursor.is_active
            break
        assert (cursor.may_end, cursor.must_end) == (terminal, terminal and not children)
        assert cursor.position_in_span == n_done
        assert cursor.forced_run().tolist() == ref.forced(done)
        row = rng.normal(size=n_vocab + 2).astype([np.float32, np.float64][seed % 2]) * 3
        if rng.integers(3) == 0:
            row = np.round(row / 4)  # ties
        assert_reads_rows(cursor, row, children, terminal, mode, ends)
        allowed = {*children, *(ends if terminal else ())}
        assert_refuses(cursor, allowed, terminal, mode, n_vocab + 1)
        if terminal:
            assert_ends(cursor, row, children, mode, ends)
        if not children:
            break
        token = int(rng.choice(list(children)))
        cursor.accept(token)
        done = children[token]
    assert ref.is_terminal(done)
    cursor.reset()
    assert (cursor.node, cursor.is_active, cursor.position_in_span) == (0, True, 0)


#     mode       end tokens   row of 12, by id                          at      pick
PICKS = [
    ("mass",    [0],         {2: 1.0, 4: 2.0, 7: 2.0, 8: 9.0, 10: 9.0}, (),     4),
    ("mass",    [0],         {2: 1.0, 4: 2.0, 7: 2.1, 8: 9.0, 10: 9.0}, (),     7),
    ("mass",    [0],         {9: -1.0, 2: -2.0, 4: -2.0, 7: -2.0},      (),     9),
    ("mass",    [0],         {5: 1.0, 3: 0.5, 6: 9.0},                  (2,),   5),
    ("mass",    [0],         {6: 9.0},                                  (2, 3), 6),
    ("mass",    [0],         {6: 1.0},                                  (4,),   0),
    ("mass",    [],          {6: 1.0},                                  (7,),   END),
    ("mass",    [0, 11],     {6: 1.0, 11: 0.5},                         (7,),   11),
    ("eog",     [0],         {6: 1.0, 0: 0.9, 3: 9.0},                  (7,),   6),
    ("eog",     [0],         {6: 1.0, 0: 1.0},                          (7,),   0),
    ("eog",     [11],        {6: 1.0, 11: 1.0},                         (2, 3), 6),
    ("release", [11],        {6: 1.0, 11: 1.5},                         (2, 3), 11),
    ("eog",     [0, 11],     {6: 9.0, 11: 1.0},                         (9,),   11),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "ends", "logits", "prefix", "ref"), PICKS)
def test_picks(mode: str, ends: list[int], logits: dict[int, float], prefix: tuple[int, ...], ref: int) -> None:
    row = np.zeros(12, np.float32)
    row[list(logits)] = list(logits.values())
    cursor = TrieCursor(hand_drawn(), on_end=mode, stop_tokens=ends)
    for token in prefix:
        cursor.accept(token)
    assert cursor.pick(row) == ref


@pytest.mark.parametrize("mode", ["mass", "eog"])
def test_draws_reach_every_allowed_token_and_no_other(mode: str) -> None:
    row = np.zeros(12, np.float32)
    row[8] = 1.0  # the dead end, the likeliest
    cursor = TrieCursor(hand_drawn(), on_end=mode, eog_ids=[0], sampling=Sampling(seed=1))
    for prefix in ((), (2,), (2, 3), (4,), (7,), (2, 5), (9,)):
        cursor.reset()
        for token in prefix:
            cursor.accept(token)
        assert {cursor.sample(row) for _ in range(300)} == set(cursor.allowed().tolist())


def test_paths_that_join_go_on_alike() -> None:
    """Where the same bytes were written, whatever the tokens, the cursor stands at the same node."""
    nodes = set()
    for prefix in ((4,), (7,), (2, 3)):
        cursor = TrieCursor(hand_drawn(), eog_ids=[0])
        for token in prefix:
            cursor.accept(token)
        nodes.add((cursor.node, cursor.leaf_name, tuple(cursor.allowed().tolist())))
        assert cursor.position_in_span == len(prefix)
    assert nodes == {(2, "ab", (0, 6))}


def test_the_cursor_s_record_knows_edges_from_nodes() -> None:
    trie = hand_drawn()
    record = TrieCursor(trie)._record[0]
    assert (record["n_nodes"], record["n_edges"]) == (5, 7)
    assert trie.target is not None
    assert record["target_address"] == trie.target.ctypes.data
    tree = TokenTrie.from_sequences([("a", [1, 2])])
    record = TrieCursor(tree)._record[0]
    assert (record["n_nodes"], record["n_edges"], record["target_address"]) == (3, 3, 0)


COPIES: dict[str, Callable[[TrieCursor], TrieCursor]] = {
    "clone": lambda cursor: cursor.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cursor: pickle.loads(pickle.dumps(cursor)),  # noqa: S301 - our own bytes
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("prefix", [(), (2,), (2, 3), (9,)])
def test_a_copy_stands_at_the_same_place_and_walks_on_its_own(
    copied: Callable[[TrieCursor], TrieCursor], prefix: tuple[int, ...]
) -> None:
    cursor = TrieCursor(hand_drawn(), eog_ids=[0], sampling=Sampling(seed=5))
    for token in prefix:
        cursor.accept(token)
    twin = copied(cursor)
    seen = seen_of(cursor)
    assert seen_of(twin) == seen
    assert twin.trie.target is not None
    # The copy's record holds addresses of arrays that the copy itself keeps alive.
    assert twin._record["target_address"][0] == twin.trie.target.ctypes.data
    assert twin._record["token_address"][0] == twin.trie.token.ctypes.data
    row = np.linspace(0, 1, 12, dtype=np.float32)
    assert [twin.sample(row) for _ in range(20)] == [cursor.sample(row) for _ in range(20)]
    twin.reset()
    twin.accept(7)
    assert seen_of(cursor) == seen
    del cursor
    gc.collect()
    twin.accept(6)
    assert (twin.leaf_name, twin.must_end) == ("abc", True)


@given(cases(), st.integers(0, 2**32))
def test_a_greedy_walk_ends_in_a_choice(case: Case, seed: int) -> None:
    """No dead ends: whatever the model says, a whole choice comes out, in at most ``depth`` steps."""
    case = case.writable()
    trie, rng = case.trie, np.random.default_rng(seed)
    n_vocab = case.tokenizer.n_vocab
    cursor = TrieCursor(trie, on_end="eog", eog_ids=[n_vocab])
    tokens: list[int] = []
    while True:
        token = cursor.pick(rng.normal(size=n_vocab + 1).astype(np.float32) * 5)
        cursor.accept(token)
        if cursor.is_finished:
            break
        tokens.append(token)
    assert len(tokens) <= trie.depth
    text = case.tokenizer.detokenize(tokens).decode()
    assert cursor.leaf_name is not None
    assert text in leads_of(case.lead, case.choices[cursor.leaf_name])


# --- the pieces of a vocabulary -----------------------------------------------------------------


def test_the_pieces_are_asked_for_once() -> None:
    tokenizer = Toy(PIECES, [0])
    graph_of(tokenizer, CHOICES)
    assert sorted(tokenizer.asked) == list(range(1, len(PIECES)))  # an end token is not asked for its text
    graph_of(tokenizer, ["abc"])
    assert PieceIndex.of(tokenizer) is PieceIndex.of(tokenizer)
    assert len(tokenizer.asked) == len(PIECES) - 1
    other = Toy(PIECES, [0])
    assert PieceIndex.of(other) is not PieceIndex.of(tokenizer)
    assert len(other.asked) == len(PIECES) - 1
    forget_pieces(tokenizer)
    graph_of(tokenizer, CHOICES)
    assert len(tokenizer.asked) == 2 * (len(PIECES) - 1)
    forget_pieces(tokenizer)
    forget_pieces(tokenizer)


def test_the_pieces_go_with_the_tokenizer() -> None:
    tokenizer = Toy(PIECES, [0])
    alive = weakref.ref(PieceIndex.of(tokenizer))
    graph = graph_of(tokenizer, CHOICES)
    assert alive() is not None
    del tokenizer
    gc.collect()
    assert alive() is None
    graph.validate()


class Unhashable(Toy):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    """Has no room for a weak reference."""

    __slots__ = ("toy",)

    def __init__(self, pieces: Sequence[bytes], eog_ids: Iterable[int] = ()) -> None:
        self.toy = Toy(pieces, eog_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.toy, name)


@pytest.mark.parametrize("make", [Unhashable, Slotted])
def test_a_tokenizer_that_no_dictionary_takes(make: Any) -> None:
    tokenizer = make(PIECES, [0])
    with pytest.raises(TypeError):
        weakref.WeakKeyDictionary[Any, int]()[tokenizer] = 0
    assert arrays_of(graph_of(tokenizer, CHOICES)) == arrays_of(hand_drawn())
    forget_pieces(tokenizer)


def ids_of(index: PieceIndex, piece: bytes) -> list[int]:
    """The ids of a piece, by a walk of the index."""
    node = 0
    for byte in piece:
        children = range(index.first_child[node], index.first_child[node + 1])
        node = next((child for child in children if index.byte[child] == byte), -1)
        if node < 0:
            return []
    return list(map(int, index.ids[index.first_id[node] : index.first_id[node + 1]]))


@given(st.lists(st.binary(max_size=4), max_size=20), st.integers(0, 3))
def test_the_index_holds_each_id_at_its_piece(pieces: list[bytes], n_ends: int) -> None:
    tokenizer = Toy(pieces, range(min(n_ends, len(pieces))))
    index = PieceIndex.of(tokenizer)
    usable = tokenizer.usable
    for piece in {b"\x00", *pieces} - {b""}:
        assert ids_of(index, piece) == [token for token, other in usable.items() if other == piece]
    assert sorted(index.ids.tolist()) == list(usable)
    assert (index.first_id[0], index.first_id[-1]) == (0, len(usable))
    assert {array.dtype for array in (index.byte, index.first_child, index.first_id, index.ids)} == {np.dtype(np.int32)}


class Undecodable(bytes):
    """Bytes that nobody may take for text."""

    def decode(self, *_: Any, **__: Any) -> str:
        raise AssertionError("decoded")


def test_pieces_are_bytes_and_no_text() -> None:
    """日 is e6 97 a5, 本 is e6 9c ac: pieces may hold the end of one and the beginning of the other."""
    halves = [b"\xe6", b"\x97\xa5", b"\x97", b"\xa5\xe6", b"\x9c\xac", "日本".encode(), b"\xff", b"\xe6\x97\xff"]

    class Raw(Toy):
        def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
            return Undecodable(super().detokenize(tokens, special=special))

    trie = graph_of(Raw(halves), ["日本"])
    assert_equals_oracle(trie, Spellings(dict(enumerate(halves)), [("日本", "日本".encode())]))
    found = set()

    def follow(node: int, tokens: tuple[int, ...]) -> None:
        if trie.is_terminal(node):
            found.add(tokens)
        for token in trie.children(node).tolist():
            follow(trie.step(node, token), (*tokens, token))

    follow(trie.root, ())
    assert found == {(5,), (0, 1, 0, 4), (0, 2, 3, 4)}


# --- the native sampler -------------------------------------------------------------------------


@pytest.mark.skipif(bool(os.environ.get("NUMBA_DISABLE_JIT")), reason="its callbacks are compiled")
@pytest.mark.parametrize("keeps_options", [True, False])
@pytest.mark.parametrize("mode", ["eog", "mass"])
def test_the_native_sampler_walks_a_graph(mode: str, keeps_options: bool) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    from trie_sampler.llama.sampler import new_sampler, token_trie_handle

    record = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    ref = ref_of(Toy(PIECES, [0]), dict(zip(CHOICES, CHOICES, strict=True)))
    states = ref.states()
    rng = np.random.default_rng(3)
    cursor = TrieCursor(hand_drawn(), on_end=mode, eog_ids=[0])
    sampler = new_sampler(cursor, keeps_options=keeps_options)[0]
    copied = llama_cpp.llama_sampler_clone(sampler)
    llama_cpp.llama_sampler_free(sampler)
    handle = token_trie_handle(copied)
    reached = set()
    try:
        for _ in range(40):
            llama_cpp.llama_sampler_reset(copied)
            cursor.reset()
            done = b""
            while True:
                assert int(handle._record["node"]) == cursor.node == states.index(done)
                reached.add(done)
                row = rng.normal(size=12).astype(np.float32)
                memory = np.zeros(12, record)
                memory["id"], memory["logit"] = np.arange(12), row
                pointer = memory.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
                array = llama_cpp.llama_token_data_array(pointer, 12, -1, False)
                llama_cpp.llama_sampler_apply(copied, ctypes.byref(array))
                left = memory["id"][: array.size].tolist()
                assert sorted(left) == cursor.allowed().tolist() if keeps_options else left == [cursor.pick(row)]
                steps = ref.steps(done)
                if not steps:
                    break
                token = int(rng.choice(list(steps)))
                llama_cpp.llama_sampler_accept(copied, token)
                cursor.accept(token)
                done = steps[token]
    finally:
        del handle
        llama_cpp.llama_sampler_free(copied)
    assert reached == set(states)
