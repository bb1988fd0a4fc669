"""``TokenTrie``: what goes in, what is refused, what comes out; then anything, against dictionaries.

The trie of the first tests, node numbers in brackets:

    [0] ─┬─ 3 [1] ─┬─ 4 [3] ─── 4 [5] "C" C's other path is 9
         │         └─ 8 [4] "D"
         └─ 9 [2] "C"
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import DictTrie
from strategies import leaf_sets, texts

from trie_sampler.cursor import TrieCursor
from trie_sampler.errors import (
    EmptyTrieError,
    PayloadError,
    TrieSamplerError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
)
from trie_sampler.payload import TokenSequence, TokenTreeDescriptor, TokenTreePayload
from trie_sampler.tokens import Tokenizer
from trie_sampler.trie import Collision, TokenTrie

Leaves = list[tuple[str, list[int]]]

HEADER: Leaves = [("D", [3, 8]), ("C", [9]), ("C", [3, 4, 4])]


def payload_of(groups: dict[str, Leaves], model_id: str = "m") -> TokenTreePayload:
    descriptors = (
        TokenTreeDescriptor(
            path=path, leaves=tuple(TokenSequence(name=name, tokens=tuple(tokens)) for name, tokens in leaves)
        )
        for path, leaves in groups.items()
    )
    return TokenTreePayload(model_id=model_id, descriptors=tuple(descriptors))


def node_at(trie: TokenTrie, prefix: Iterable[int], root: int | None = None) -> int:
    """The node at a prefix, one ``step`` a token."""
    node = trie.root if root is None else root
    for token in prefix:
        node = trie.step(node, token)
        assert node >= 0
    return node


def ragged(leaves: Leaves) -> tuple[list[int], list[int], list[str]]:
    offsets = np.cumsum([0, *(len(tokens) for _, tokens in leaves)]).tolist()
    return [token for _, tokens in leaves for token in tokens], offsets, [name for name, _ in leaves]


def arrays_of(trie: TokenTrie) -> tuple[bytes, bytes, bytes]:
    return trie.token.tobytes(), trie.first_child.tobytes(), (trie.leaf >= 0).tobytes()


def assert_equals_oracle(trie: TokenTrie, leaves: Leaves, root: int = 0, names: bool = True) -> None:
    """Every node, edge and name of one root, against nested dictionaries."""
    ref = DictTrie(leaves)
    for prefix in ref.prefixes():
        node = node_at(trie, prefix, root)
        assert trie.children(node).tolist() == ref.children(prefix)
        assert trie.is_terminal(node) is ref.is_terminal(prefix)
        assert trie.path_tokens(node) == prefix
        if names:
            assert trie.leaf_name(node) == ref.name(prefix)


# --- by hand ------------------------------------------------------------------------------------


def test_the_trie_of_the_header() -> None:
    trie = TokenTrie.from_sequences(HEADER)
    assert trie.token.tolist() == [-1, 3, 9, 4, 8, 4]
    assert trie.first_child.tolist() == [1, 3, 5, 5, 6, 6, 6]
    assert (trie.leaf >= 0).tolist() == [False, False, True, False, True, True]
    assert (trie.n_nodes, trie.n_leaves, trie.depth, trie.max_token, trie.root) == (6, 2, 3, 9, 0)
    assert (trie.roots, trie.paths, trie.tail) == ({"": 0}, ("",), None)
    # One name with several paths is one leaf with several terminals.
    assert trie.leaf[2] == trie.leaf[5] != trie.leaf[4]
    assert list(trie.leaves()) == [("C", (9,)), ("D", (3, 8)), ("C", (3, 4, 4))]
    assert trie.leaf_name(3) is None
    trie.validate()


#    what                                 leaves                                     nodes leaves terminals
SHAPES = [
    ("shared prefix, two nodes shared",   [("a", [10, 20, 30]), ("b", [10, 20, 40])], 5,    2,    2),
    ("one begins the other",              [("a", [1, 2]), ("b", [1, 2, 3])],          4,    2,    2),
    ("equal name and tokens collapse",    [("a", [1, 2]), ("a", [1, 2])],             3,    1,    1),
    ("one name, several paths",           [("a", [1, 2]), ("a", [3])],                4,    1,    2),
    ("two names, equal tokens",           [("ZULU", [7, 8]), ("ALPHA", [7, 8])],      3,    1,    1),
    ("three names, equal tokens",         [("c", [7]), ("a", [7]), ("b", [7])],       2,    1,    1),
    ("a loser with another path",         [("b", [7]), ("a", [7]), ("b", [8])],       3,    2,    2),
    ("a name may be empty",               [("", [1])],                                2,    1,    1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("leaves", "n_nodes", "n_leaves", "n_terminals"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES]
)
def test_shapes(leaves: Leaves, n_nodes: int, n_leaves: int, n_terminals: int) -> None:
    trie = TokenTrie.from_sequences(leaves)
    assert (trie.n_nodes, trie.n_leaves, len(list(trie.leaves()))) == (n_nodes, n_leaves, n_terminals)
    assert_equals_oracle(trie, leaves)
    trie.validate()


def test_an_inner_terminal() -> None:
    trie = TokenTrie.from_sequences([("short", [1, 2]), ("long", [1, 2, 3])])
    inner, end = node_at(trie, [1, 2]), node_at(trie, [1, 2, 3])
    assert (trie.is_terminal(inner), trie.children(inner).tolist(), trie.leaf_name(inner)) == (True, [3], "short")
    assert (trie.is_terminal(end), trie.children(end).tolist(), trie.leaf_name(end)) == (True, [], "long")
    assert not trie.is_terminal(node_at(trie, [1]))


@pytest.mark.parametrize("names", [("ZULU", "ALPHA"), ("ALPHA", "ZULU")])
def test_of_two_names_with_equal_tokens_the_smaller_stays(names: tuple[str, str]) -> None:
    trie = TokenTrie.from_sequences([(name, [7, 8]) for name in names])
    assert list(trie.leaves()) == [("ALPHA", (7, 8))]
    assert trie.collisions == (Collision(kept="ALPHA", dropped="ZULU", tokens=(7, 8)),)
    assert trie.n_leaves == 1


def test_several_collisions() -> None:
    leaves: Leaves = [("c", [7]), ("a", [7]), ("b", [7]), ("c", [7]), ("x", [8, 8]), ("w", [8, 8]), ("x", [9])]
    trie = TokenTrie.from_sequences(leaves)
    assert set(trie.collisions) == {("a", "b", (7,)), ("a", "c", (7,)), ("w", "x", (8, 8))}
    assert trie.n_leaves == 3  # a, w, and x by its other path
    trie.validate()


def test_a_trie_without_collisions_has_none() -> None:
    assert TokenTrie.from_sequences(HEADER).collisions == ()


def test_step() -> None:
    trie = TokenTrie.from_sequences(HEADER)
    assert trie.step(0, 3) == 1
    assert isinstance(trie.step(0, 3), int)
    for token in (0, 4, 8, 10, -1, -5, 2**31 - 1, 2**31, 2**32 + 3, 2**70):
        assert trie.step(0, token) == -1
    assert [trie.step(5, token) for token in range(12)] == [-1] * 12


@pytest.mark.parametrize("node", [-1, 6, 2**40])
@pytest.mark.parametrize("ask", ["step", "children", "is_terminal", "leaf_name", "path_tokens"])
def test_a_node_that_is_none_is_an_index_error(node: int, ask: str) -> None:
    trie = TokenTrie.from_sequences(HEADER)
    with pytest.raises(IndexError, match=rf"node {node} is not in 0 \.\. 5"):
        getattr(trie, ask)(node, *([3] if ask == "step" else []))


def test_the_arrays_are_small_typed_and_read_only() -> None:
    trie = TokenTrie.from_sequences([(str(i), [i // 100, i // 10, i]) for i in range(1000)])
    assert {array.dtype for array in (trie.token, trie.first_child, trie.leaf)} == {np.dtype(np.int32)}
    assert trie.nbytes == 12 * trie.n_nodes + 4
    for array in (trie.token, trie.first_child, trie.leaf, trie.children(trie.root)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    with pytest.raises(AttributeError):
        trie.depth = 7  # type: ignore[misc]


def test_numeric_options_begin_each_other() -> None:
    """1, 10, 100, 1000 ... are all terminal and internal, and every number is reached."""
    numbers = [*range(300), 1000, 10000, 99999]
    trie = TokenTrie.from_sequences([(str(i), [int(digit) for digit in str(i)]) for i in numbers])
    for i in numbers:
        assert trie.leaf_name(node_at(trie, map(int, str(i)))) == str(i)
    assert trie.children(node_at(trie, [1])).tolist() == list(range(10))
    assert trie.children(node_at(trie, [9, 9, 9, 9, 9])).tolist() == []
    assert trie.n_leaves == len(numbers)


def test_repr_counts_and_does_not_list() -> None:
    assert repr(TokenTrie.from_sequences(HEADER)) == "TokenTrie(n_leaves=2, n_nodes=6, depth=3, nbytes=76)"
    several = TokenTrie.from_payload(payload_of({"a": [("A", [1])], "b": [("B", [2])]}))
    assert repr(several) == "TokenTrie(n_leaves=2, n_nodes=4, depth=1, nbytes=52, paths=['a', 'b'])"


# --- every way in -------------------------------------------------------------------------------


def test_every_way_in_gives_the_same_trie() -> None:
    ref = TokenTrie.from_sequences(HEADER)
    tokens, offsets, names = ragged(HEADER)
    payload = payload_of({"p": HEADER})
    others = [
        TokenTrie.from_sequences(iter(HEADER)),
        TokenTrie.from_sequences([(name, tuple(ids)) for name, ids in HEADER]),
        TokenTrie.from_sequences([(name, np.array(ids)) for name, ids in HEADER]),
        TokenTrie.from_sequences([TokenSequence(name=name, tokens=tuple(ids)) for name, ids in HEADER]),
        TokenTrie.from_ragged(tokens, offsets, names),
        TokenTrie.from_ragged(np.array(tokens, np.uint16), np.array(offsets, np.uint8), names),
        TokenTrie.from_payload(payload),
        TokenTrie.from_payload(payload.to_json()),
        TokenTrie.from_payload(payload.to_json(canonical=False).encode()),
        TokenTrie.from_payload(payload, "p"),
    ]
    for comp in others:
        assert arrays_of(comp) == arrays_of(ref)
        assert list(comp.leaves()) == list(ref.leaves())
        assert (comp.n_leaves, comp.depth) == (ref.n_leaves, ref.depth)


def test_ragged_without_names_counts() -> None:
    trie = TokenTrie.from_ragged([5, 5, 6, 4], [0, 1, 3, 4])
    assert dict(trie.leaves()) == {"0": (5,), "1": (5, 6), "2": (4,)}
    assert trie.n_leaves == 3
    trie.validate()


@pytest.mark.parametrize(
    ("tokens", "n_leaves", "dropped"),
    [([5, 5], 1, ["1"]), ([5, 5, 6], 2, ["1"]), ([5, 6, 5], 2, ["2"]), ([5] * 10 + [6], 2, list("123456789"))],
)
def test_ragged_without_names_may_collide(tokens: list[int], n_leaves: int, dropped: list[str]) -> None:
    """Equal paths under other indices; the last index may be among the lost, and may exceed the number of nodes."""
    trie = TokenTrie.from_ragged(tokens, range(len(tokens) + 1))
    assert [collision.dropped for collision in trie.collisions] == dropped
    assert trie.n_leaves == n_leaves == len(list(trie.leaves()))
    trie.validate()


@pytest.mark.parametrize("names", [None, ["empty", "A", "B"]])
def test_ragged_skips_leaves_without_tokens_with_a_warning(names: list[str] | None) -> None:
    with pytest.warns(TrieSamplerWarning, match="skipped leaves without tokens, 1 in all"):
        trie = TokenTrie.from_ragged([5, 6], [0, 0, 1, 2], names)
    # Indices and names stay those of the caller's list.
    assert list(trie.leaves()) == ([("A", (5,)), ("B", (6,))] if names else [("1", (5,)), ("2", (6,))])
    assert trie.n_leaves == 2
    trie.validate()


def test_ragged_names_the_leaf_that_it_skips() -> None:
    with pytest.warns(TrieSamplerWarning, match="'?GHOST'?"):
        TokenTrie.from_ragged([5], [0, 0, 1], ["GHOST", "A"])


def test_a_leaf_without_tokens_beside_a_good_one_is_skipped_and_named() -> None:
    with pytest.warns(TrieSamplerWarning, match=r"skipped leaves without tokens, 1 in all: 'GHOST'") as caught:
        trie = TokenTrie.from_sequences([("GHOST", []), ("GOOD", [12, 34])])
    assert list(trie.leaves()) == [("GOOD", (12, 34))]
    assert (trie.n_leaves, trie.n_nodes) == (1, 3)
    assert len(caught) == 1


def test_many_leaves_without_tokens_are_counted() -> None:
    with pytest.warns(
        TrieSamplerWarning, match=r"descriptor 'p': skipped leaves without tokens, 5 in all: '0', '1', '2' and 2 more"
    ):
        TokenTrie.from_payload(payload_of({"p": [*((str(i), []) for i in range(5)), ("A", [1])]}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenTrie.from_sequences([("GHOST", []), ("GOOD", [12])]),
        lambda: TokenTrie.from_payload(payload_of({"p": [("GHOST", []), ("GOOD", [12])]})),
        lambda: TokenTrie.from_ragged([12], [0, 0, 1]),
    ],
    ids=["from_sequences", "from_payload", "from_ragged"],
)
def test_a_warning_points_at_the_caller(make: Callable[[], TokenTrie]) -> None:
    """Python shows a warning once per line that caused it: that line must be the caller's."""
    with pytest.warns(TrieSamplerWarning) as caught:
        make()
    assert (caught[0].filename, caught[0].lineno) == (__file__, make.__code__.co_firstlineno)


# --- payloads of several descriptors ------------------------------------------------------------

TWO: dict[str, Leaves] = {"action": [("A", [1]), ("B", [2, 3])], "kind": [("A", [1, 1]), ("X", [2])]}


def test_several_descriptors_are_several_roots() -> None:
    trie = TokenTrie.from_payload(payload_of(TWO))
    assert trie.paths == ("action", "kind")
    assert trie.roots == {"action": 0, "kind": 1}
    for path, leaves in TWO.items():
        assert_equals_oracle(trie, leaves, trie.root_of(path))
    assert trie.n_leaves == 4  # the two A are leaves of their own descriptors
    assert trie.collisions == ()
    trie.validate()


def test_roots_is_a_copy() -> None:
    trie = TokenTrie.from_payload(payload_of(TWO))
    trie.roots.clear()
    assert trie.roots


def test_several_roots_have_no_one_root() -> None:
    with pytest.raises(UnknownPathError, match=r"\['action', 'kind'\]"):
        _ = TokenTrie.from_payload(payload_of(TWO)).root


def test_path_takes_one_descriptor() -> None:
    trie = TokenTrie.from_payload(payload_of(TWO), "kind")
    assert (trie.paths, trie.root, trie.root_of("kind")) == (("kind",), 0, 0)
    assert list(trie.leaves()) == [("X", (2,)), ("A", (1, 1))]


@pytest.mark.parametrize("path", ["nope", "", "Action"])
def test_an_unknown_path_lists_the_known(path: str) -> None:
    ref = f"there is no descriptor {path!r}; the paths are 'action', 'kind'"
    with pytest.raises(UnknownPathError, match=ref):
        TokenTrie.from_payload(payload_of(TWO), path)
    with pytest.raises(UnknownPathError, match=ref):
        TokenTrie.from_payload(payload_of(TWO)).root_of(path)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "ref"),
    [
        (lambda: TokenTrie.from_sequences([]), "no leaf with tokens"),
        (lambda: TokenTrie.from_sequences([("A", []), ("B", [])]), "no leaf with tokens"),
        (lambda: TokenTrie.from_ragged([], [0]), "no leaves"),
        (lambda: TokenTrie.from_ragged([], [0], []), "no leaves"),
        (lambda: TokenTrie.from_ragged([], [0, 0, 0]), "no leaf has tokens"),
        (lambda: TokenTrie.from_payload(payload_of({})), "no descriptors"),
        (lambda: TokenTrie.from_payload(payload_of({"a.b": []})), "descriptor 'a.b' has no leaf with tokens"),
        (lambda: TokenTrie.from_payload(payload_of({"a": [("A", [1])], "b": [("B", [])]})), "descriptor 'b' has no"),
    ],
)
def test_nothing_to_choose_from(make: Callable[[], TokenTrie], ref: str) -> None:
    with pytest.raises(EmptyTrieError, match=ref):
        make()


BAD_IDS: list[list[Any]] = [
    [-1],
    [5, -7],
    [2**31],
    [5, 2**40],
    [2**63],
    [2**64],
    [1.0],
    [5, 2.5],
    [float("nan")],
    [True],
    [False, True],
    [5, True],
    ["5"],
    [None],
]


@pytest.mark.parametrize("ids", BAD_IDS, ids=repr)
def test_ids_that_are_none_are_refused(ids: list[Any]) -> None:
    with pytest.raises(VocabMismatchError, match="token id"):
        TokenTrie.from_sequences([("GOOD", [5]), ("BAD", ids)])


# NumPy itself makes [5, True] two integers; an array that was made so cannot tell.
BAD_RAGGED = [*(ids for ids in BAD_IDS if ids != [5, True]), np.array([1.5]), np.array([True]), np.array(["x"])]


@pytest.mark.parametrize("ids", BAD_RAGGED, ids=repr)
def test_ragged_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(VocabMismatchError, match="token id"):
        TokenTrie.from_ragged(ids, [0, len(ids)])


def test_a_refusal_says_which_id() -> None:
    with pytest.raises(VocabMismatchError, match=r"leaf 'B': token id -7 at index 1"):
        TokenTrie.from_sequences([("A", [5]), ("B", [3, -7, -8])])


def test_a_payload_may_not_smuggle_ids_in_either() -> None:
    document = {"modelId": "m", "descriptors": [{"path": "p", "leaves": [{"name": "A", "tokens": [1, -2]}]}]}
    with pytest.raises(VocabMismatchError, match="-2"):
        TokenTrie.from_payload(json.dumps(document))
    document["descriptors"][0]["leaves"][0]["tokens"] = [1, True]  # type: ignore[index]
    with pytest.raises(PayloadError, match=r"descriptors\[0\]\.leaves\[0\]\.tokens\[1\]"):
        TokenTrie.from_payload(json.dumps(document))
    with pytest.raises(PayloadError):
        TokenTrie.from_payload("{")


def test_the_largest_id_is_an_id() -> None:
    trie = TokenTrie.from_sequences([("A", [0, 2**31 - 1])])
    assert trie.max_token == 2**31 - 1
    assert trie.step(trie.step(0, 0), 2**31 - 1) == 2


@pytest.mark.parametrize(
    ("tokens", "offsets", "names", "ref"),
    [
        ([5, 6], [0, 1], None, "from 0 to 2"),
        ([5, 6], [1, 2], None, "from 0 to 2"),
        ([5, 6], [0, 3], None, "from 0 to 2"),
        ([5, 6], [0, 2, 1, 2], None, "must ascend"),
        ([5, 6], [0, -1, 2], None, "must ascend"),
        ([5, 6], [], None, r"\[N\+1\] integers"),
        ([5, 6], [0.0, 2.0], None, r"\[N\+1\] integers"),
        ([5, 6], [[0, 2]], None, r"\[N\+1\] integers"),
        ([5, 6], 2, None, r"\[N\+1\] integers"),
        ([[5, 6]], [0, 1], None, "one-dimensional"),
        (5, [0, 1], None, "one-dimensional"),
        ([5, 6], [0, 2], ["a", "b"], "2 names for 1 paths"),
        ([5, 6], [0, 1, 2], ["a"], "1 names for 2 paths"),
    ],
)
def test_ragged_arrays_that_do_not_fit(tokens: Any, offsets: Any, names: Any, ref: str) -> None:
    with pytest.raises(ValueError, match=ref):
        TokenTrie.from_ragged(tokens, offsets, names)


# --- against a vocabulary -----------------------------------------------------------------------


class ToyVocab:
    """V = 32: 0 and 1 end a generation, 2 is a control token, the rest are letters; 31 begins with a space."""

    n_vocab = 32
    eog_ids = (0, 1)

    def tokenize(self, text: bytes) -> list[int]:
        return [3 + byte - ord("a") for byte in text]

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(b"" if t < 3 else b" z" if t == 31 else bytes([ord("a") + t - 3]) for t in tokens)

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return token < 3


def spelled(*names: str) -> Leaves:
    return [(name, ToyVocab().tokenize(name.encode())) for name in names]


def test_the_toy_is_a_tokenizer() -> None:
    assert isinstance(ToyVocab(), Tokenizer)


def test_a_payload_of_the_vocabulary_at_hand_passes() -> None:
    payload = payload_of({"p": spelled("abc", "abd")})
    assert TokenTrie.from_payload(payload, vocab=ToyVocab(), strict=True).n_leaves == 2
    assert TokenTrie.from_payload(payload, "p", vocab=ToyVocab()).n_leaves == 2


def test_a_payload_in_which_some_leaves_begin_with_a_space_is_told_of() -> None:
    payload = payload_of({"p": [*spelled("abc"), ("z", [31])]})
    with pytest.warns(TrieSamplerWarning, match=r"some leaves begin with a space \('z'\) and some do not \('abc'\)"):
        assert TokenTrie.from_payload(payload, vocab=ToyVocab(), strict=True).n_leaves == 2


@pytest.mark.parametrize(
    ("leaves", "ref"),
    [
        ([("GOOD", [5]), ("BAD", [4, 32])], r"'BAD': token 32 at index 1 .*: V is 32"),
        ([("BAD", [40, 4])], r"'BAD': token 40 at index 0 .*: V is 32"),
        ([("BAD", [4, 0, 5])], r"'BAD': token 0 at index 1 .*: it ends the generation"),
        ([("BAD", [4, 1]), ("GOOD", [4])], r"'BAD': token 1 at index 1"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_ids_of_another_vocabulary_are_refused(leaves: Leaves, ref: str, strict: bool) -> None:
    with pytest.raises(VocabMismatchError, match=ref):
        TokenTrie.from_payload(payload_of({"p": leaves}), vocab=ToyVocab(), strict=strict)


def test_the_last_id_of_the_vocabulary_is_no_mismatch() -> None:
    """Added tokens lie past the base vocabulary, up to V."""
    TokenTrie.from_sequences([(" z", [31])]).check_vocab(ToyVocab(), strict=True)


def test_leaves_that_do_not_spell_their_names_are_a_warning_or_an_error() -> None:
    payload = payload_of({"p": [*spelled("good"), *((name, [4, 5]) for name in ("WRONG",)), ("W2", [4]), ("W3", [5])]})
    ref = r"leaves that do not spell their names.*'W2' is spelled 'b' here"
    with pytest.warns(TrieSamplerWarning, match=ref) as caught:
        TokenTrie.from_payload(payload, vocab=ToyVocab())
    assert len(caught) == 1
    with pytest.raises(VocabMismatchError, match=ref):
        TokenTrie.from_payload(payload, vocab=ToyVocab(), strict=True)


def test_one_wrong_leaf_among_64_is_seen_the_first_and_the_last_too() -> None:
    pairs = [(chr(97 + i // 8) + chr(97 + i % 8), [3 + i // 8, 3 + i % 8]) for i in range(64)]
    TokenTrie.from_sequences(pairs).check_vocab(ToyVocab(), strict=True)
    for wrong in (0, 31, 63):
        leaves = [("?", tokens) if i == wrong else (name, tokens) for i, (name, tokens) in enumerate(pairs)]
        with pytest.raises(VocabMismatchError, match=r"'\?' is spelled"):
            TokenTrie.from_sequences(leaves).check_vocab(ToyVocab(), strict=True)


def test_a_bounded_number_of_leaves_is_compared() -> None:
    class Counting(ToyVocab):
        n_asked = 0

        def detokenize(self, tokens: Sequence[int]) -> bytes:
            Counting.n_asked += 1
            return super().detokenize(tokens)

    leaves = [(chr(97 + i // 20) + chr(97 + i % 20), [3 + i // 20, 3 + i % 20]) for i in range(400)]
    TokenTrie.from_sequences(leaves).check_vocab(Counting(), strict=True)
    assert Counting.n_asked == 64


def test_a_vocabulary_without_end_tokens() -> None:
    class Endless(ToyVocab):
        eog_ids = ()

    TokenTrie.from_sequences(spelled("ab")).check_vocab(Endless(), strict=True)


# --- from text ----------------------------------------------------------------------------------


def test_from_choices_with_a_tokenizer() -> None:
    pytest.importorskip("llama_cpp", reason="from_choices asks llama/vocab.py what a Llama is")
    trie = TokenTrie.from_choices(ToyVocab(), ["ab", "abc"], lead="")
    assert list(trie.leaves()) == [("ab", (3, 4)), ("abc", (3, 4, 5))]
    assert trie.tail == b""
    trie = TokenTrie.from_choices(ToyVocab(), {"X": "ab"}, prompt="cd", lead="")
    assert list(trie.leaves()) == [("X", (3, 4))]
    assert trie.tail == b"cd"
    with pytest.raises(EmptyTrieError, match="choices is empty"):
        TokenTrie.from_choices(ToyVocab(), [])
    with pytest.raises(EmptyTrieError, match="no leaf with tokens"):
        TokenTrie.from_choices(ToyVocab(), [""])
    with pytest.raises(TypeError, match="Llama or a Tokenizer"):
        TokenTrie.from_choices("gemma.gguf", ["ab"])  # type: ignore[arg-type]


# --- damage -------------------------------------------------------------------------------------


def damaged(**changes: Any) -> TokenTrie:
    """The header's trie with arrays replaced: a list is a whole array, a dict sets places."""
    good = TokenTrie.from_sequences(HEADER)
    arrays = {name: getattr(good, name).copy() for name in ("token", "first_child", "leaf")}
    for name, change in changes.items():
        if isinstance(change, dict):
            for place, value in change.items():
                arrays[name][place] = value
        else:
            arrays[name] = np.array(change, np.int32)
    return TokenTrie._from_arrays(
        *arrays.values(), good.depth, None, {"": 0}, good._n_names, good._names, good._collided
    )


# The header's trie: token -1 3 9 4 8 4, first_child 1 3 5 5 6 6 6, terminal at 2 4 5.
DAMAGE: list[tuple[str, dict[str, Any]]] = [
    ("roots come first", {"token": {0: 3}}),
    ("tokens are ids", {"token": {5: -1}}),
    ("tokens are ids", {"token": {2: -9}}),
    ("siblings ascend", {"token": {3: 8, 4: 4}}),
    ("siblings ascend", {"token": {4: 4}}),
    ("siblings ascend", {"token": {2: 2}}),
    ("children follow the roots", {"first_child": {0: 2}}),
    ("children follow the roots", {"first_child": {0: 0}}),
    ("children follow the roots", {"first_child": {6: 7}}),
    ("children follow the roots", {"first_child": {6: 5}}),
    ("first_child ascends", {"first_child": {2: 6}}),
    ("first_child ascends", {"first_child": {3: -1}}),
    ("children come after parents", {"first_child": {3: 3, 2: 3, 1: 3}}),
    ("leaf indices are in range", {"leaf": {2: 2}}),
    ("leaf indices are in range", {"leaf": {2: -2}}),
    ("every branch ends in a leaf", {"leaf": {4: -1}}),
    ("first_child has S\\+1 entries", {"first_child": [1, 3, 5, 5, 6, 6]}),
    ("first_child has S\\+1 entries", {"leaf": [-1, -1, 0, -1, 1]}),
    ("token has S entries", {"token": [-1, 3, 9, 4, 8, 4, 5]}),
]


@pytest.mark.parametrize(("promise", "changes"), DAMAGE, ids=lambda value: str(value).replace(" ", "_"))
def test_validate_sees_each_kind_of_damage(promise: str, changes: dict[str, Any]) -> None:
    with pytest.raises(TrieSamplerError, match=f"damaged trie: '{promise}' does not hold"):
        damaged(**changes).validate()


def test_the_undamaged_one_passes() -> None:
    damaged().validate()


# --- copies and threads -------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, copy.copy])  # noqa: S301
def test_copies_are_equal_and_read_only(copied: Callable[[TokenTrie], TokenTrie]) -> None:
    payload = payload_of({"a": [("Ä\n日", [1, 2]), ("b", [1, 2])], "k[]": [("", [2**31 - 1])]})
    ref = TokenTrie.from_payload(payload)
    comp = copied(ref)
    assert arrays_of(comp) == arrays_of(ref)
    assert list(comp.leaves()) == list(ref.leaves())
    assert (comp.roots, comp.collisions, comp.depth, comp.tail) == (ref.roots, ref.collisions, ref.depth, ref.tail)
    assert comp.n_leaves == ref.n_leaves == 2
    assert not any(array.flags.writeable for array in (comp.token, comp.first_child, comp.leaf))
    comp.validate()


def test_the_tail_is_kept() -> None:
    trie = TokenTrie.from_sequences(HEADER, tail=b"Action:")
    assert pickle.loads(pickle.dumps(trie)).tail == trie.tail == b"Action:"  # noqa: S301


def test_eight_threads_walk_one_trie() -> None:
    leaves = [(str(i), [i % 7, i // 7 % 7, i // 49]) for i in range(343)]
    trie = TokenTrie.from_sequences(leaves)
    rows = np.random.default_rng(0).normal(size=(8, 3, 7)).astype(np.float32)

    def walk(rows_of_one: Any) -> str | None:
        cursor = TrieCursor(trie)
        for row in rows_of_one:
            cursor.accept(cursor.pick(row))
        return cursor.leaf_name

    ref = [walk(rows_of_one) for rows_of_one in rows]
    assert len(set(ref)) > 1
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(walk, rows)) == ref


# --- anything -----------------------------------------------------------------------------------


@given(leaf_sets())
def test_a_trie_equals_nested_dictionaries(leaves: Leaves) -> None:
    trie = TokenTrie.from_sequences(leaves)
    ref = DictTrie(leaves)
    assert_equals_oracle(trie, leaves)
    assert trie.n_nodes == ref.n_nodes
    assert [tokens for _, tokens in trie.leaves()] == [p for p in ref.prefixes() if ref.is_terminal(p)]
    # Every name that did not lose all its paths is reached, and n_leaves counts them.
    assert trie.n_leaves == len({ref.name(prefix) for prefix in ref.language()})
    comp = {(c.tokens, c.kept, c.dropped) for c in trie.collisions}
    assert comp == {(p, names[0], loser) for p, names in ref.collisions().items() for loser in names[1:]}
    assert len(trie.collisions) == len(comp)
    trie.validate()


@given(leaf_sets(), st.randoms(use_true_random=False))
def test_the_order_of_leaves_is_of_no_account(leaves: Leaves, random: Any) -> None:
    ref = TokenTrie.from_sequences(leaves)
    shuffled = [*leaves, leaves[0]]  # and a repeated one collapses
    random.shuffle(shuffled)
    comp = TokenTrie.from_sequences(shuffled)
    assert arrays_of(comp) == arrays_of(ref)
    assert list(comp.leaves()) == list(ref.leaves())
    assert set(comp.collisions) == set(ref.collisions)
    assert comp.n_leaves == ref.n_leaves


@given(leaf_sets(min_len=0))
def test_from_ragged_equals_from_sequences(leaves: Leaves) -> None:
    tokens, offsets, names = ragged(leaves)
    made = []
    for make in (lambda: TokenTrie.from_sequences(leaves), lambda: TokenTrie.from_ragged(tokens, offsets, names)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                made.append((make(), len(caught)))
            except EmptyTrieError:
                made.append((None, len(caught)))
    (ref, n_ref), (comp, n_comp) = made
    assert n_comp == n_ref == (any(not ids for _, ids in leaves) and ref is not None)
    if ref is None or comp is None:
        assert ref is comp
        return
    assert arrays_of(comp) == arrays_of(ref)
    assert list(comp.leaves()) == list(ref.leaves())
    assert set(comp.collisions) == set(ref.collisions)
    assert comp.n_leaves == ref.n_leaves
    comp.validate()


@given(st.lists(leaf_sets(max_leaves=5), min_size=1, max_size=3))
def test_several_descriptors_equal_as_many_tries(groups: list[Leaves]) -> None:
    payload = payload_of({f"p{i}": leaves for i, leaves in enumerate(groups)})
    trie = TokenTrie.from_payload(payload.to_json(canonical=False))
    for i, leaves in enumerate(groups):
        assert_equals_oracle(trie, leaves, trie.root_of(f"p{i}"))
        assert_equals_oracle(TokenTrie.from_payload(payload, f"p{i}"), leaves)
    # No node belongs to two roots.
    assert trie.n_nodes == sum(DictTrie(leaves).n_nodes for leaves in groups)
    assert trie.n_leaves == sum(len({ref.name(prefix) for prefix in ref.language()}) for ref in map(DictTrie, groups))
    trie.validate()


@given(st.lists(texts(), min_size=1, max_size=8, unique=True))
def test_any_name_comes_back(names: list[str]) -> None:
    trie = TokenTrie.from_sequences([(name, [i]) for i, name in enumerate(names)])
    assert [name for name, _ in trie.leaves()] == names


def test_a_name_with_a_lone_surrogate_comes_back() -> None:
    """Payloads refuse it, Python callers may have it."""
    assert dict(TokenTrie.from_sequences([("\ud800", [1])]).leaves()) == {"\ud800": (1,)}


def test_canonical_json_lists_leaves_by_name() -> None:
    payload = payload_of({"p": [("ZULU", [9]), ("ALPHA", [7])]})
    assert payload.to_json().index("ALPHA") < payload.to_json().index("ZULU")
    assert arrays_of(TokenTrie.from_payload(payload)) == arrays_of(TokenTrie.from_payload(payload.to_json()))
