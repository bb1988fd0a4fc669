"""``TokenTrie.save`` and ``load``: what goes in comes out, what is damaged is refused or does no harm, and a file is
never half written. ``damage.py`` makes the damaged ones."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import numba
import numpy as np
import pytest
import test_automaton
import test_trie
from damage import PIECES, build_file, parts_of
from hypothesis import given
from hypothesis import strategies as st
from oracle import argmax_child
from strategies import leaf_sets, texts
from test_automaton import Toy, graph_of
from test_trie import HEADER, Leaves, payload_of

from trie_sampler import store
from trie_sampler.choices import Choices
from trie_sampler.cursor import TrieCursor
from trie_sampler.errors import OffTrieError, TrieFileError, TrieSamplerError
from trie_sampler.tokens import tokenize_choices
from trie_sampler.trie import TokenTrie

WAYS = [{"mmap": True}, {"mmap": False}]
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="modes, symlinks and signals are POSIX's")


class Known(Toy):
    fingerprint = "vocab-sha256:0123456789abcdef0123456789abcdef"


def canonical_of(tokenizer: Any, choices: Any, prompt_ids: Any = None, **settings: Any) -> TokenTrie:
    """``from_choices``, which would ask llama_cpp what a ``Llama`` is."""
    return TokenTrie._from_spelled(tokenizer, tokenize_choices(tokenizer, Choices.of(choices), prompt_ids, **settings))


TRIES: dict[str, Callable[[], TokenTrie]] = {
    "drawn by hand": lambda: TokenTrie.from_sequences(HEADER),
    "one leaf of one token": lambda: TokenTrie.from_sequences([("", [0])]),
    "the largest id, and a tail of no text": lambda: TokenTrie.from_sequences([("a", [2**31 - 1])], tail=b"\xff\0"),
    "an empty tail": lambda: TokenTrie.from_sequences([("a", [1])], tail=b""),
    "colliding names": lambda: TokenTrie.from_sequences([("b", [7]), ("a", [7]), ("c", [7]), ("c", [8])]),
    "one begins the other": lambda: TokenTrie.from_sequences([("REPLY", [5]), ("REPLY_THREAD", [5, 6])]),
    "indices for names": lambda: TokenTrie.from_ragged([5, 7, 5, 5, 6, 5, 7], [0, 2, 3, 5, 7]),
    "Unicode": lambda: TokenTrie.from_sequences(
        [(t, [i]) for i, t in enumerate(["é", "e\u0301", "日\0", "🙂", "\ud800"])]
    ),
    "several descriptors": lambda: TokenTrie.from_payload(
        payload_of({"action": [("x", [1, 2]), ("y", [1])], "k[].日": [("é", [1, 2]), ("日", [1, 2])], "": [("z", [4])]})
    ),
    "a vocabulary's": lambda: canonical_of(Known([*PIECES, b" "], [0]), {"A": "ab", "B": "ab", "C": "bca"}),
    "a vocabulary's, healed": lambda: canonical_of(
        Known([b"a", b":", b"/", b":/", b"b", b" "]), ["/b"], prompt_ids=[0, 1], heal=True
    ),
    "every spelling": lambda: graph_of(Known(PIECES, [0]), {"A": "ab", "B": "ab", "日": "abc", "C": "aab"}),
    "every spelling, healed": lambda: graph_of(
        Toy([b"a", b":", b"/", b":/", b"b"]), ["/b"], prompt_ids=[0, 1], heal=True
    ),
    "numbers": lambda: TokenTrie._of_numbers(Toy([*(b"%d" % i for i in range(12)), b"-", b".", b"e", b"+"])),
}


def assert_equal(comp: TokenTrie, ref: TokenTrie) -> None:
    """All that a trie remembers, and all that is asked of it as a whole."""
    for field in dataclasses.fields(TokenTrie):
        name = field.name
        found, expected = getattr(comp, name), getattr(ref, name)
        if name == "_names" and expected is not None:
            found, expected = (x.blob.tobytes() + x.offsets.tobytes() for x in (found, expected))
        if isinstance(expected, np.ndarray):
            assert (found.dtype, found.shape, found.tolist()) == (expected.dtype, expected.shape, expected.tolist())
        else:
            assert (type(found), found) == (type(expected), expected), name
    for name in ("roots", "paths", "n_nodes", "nbytes", "collisions", "unreachable"):
        assert getattr(comp, name) == getattr(ref, name)
    assert list(comp.leaves()) == list(ref.leaves())
    assert [comp.leaf_name(node) for node in range(comp.n_nodes)] == [
        ref.leaf_name(node) for node in range(ref.n_nodes)
    ]
    comp.validate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "choices.trie"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("files")


# --- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("verify", [None, True, False])
@pytest.mark.parametrize("make", TRIES.values(), ids=TRIES)
def test_what_goes_in_comes_out(make: Callable[[], TokenTrie], verify: bool | None, way: Any, file: Path) -> None:
    ref = make()
    ref.save(file)
    comp = TokenTrie.load(file, verify=verify, **way)
    assert_equal(dataclasses.replace(comp, _is_sound=True), ref)
    for name in ("token", "first_child", "leaf", "target", "sole_leaf"):
        array = getattr(comp, name)
        if array is not None:
            assert not array.flags.writeable
            assert array.flags.c_contiguous
            assert not way["mmap"] or array.ctypes.data % 64 == 0


@pytest.mark.parametrize("make", TRIES.values(), ids=TRIES)
def test_the_file_is_as_it_is_described(make: Callable[[], TokenTrie], file: Path) -> None:
    trie = make()
    trie.save(file)
    fields, arrays = parts_of(trie)
    assert file.read_bytes() == build_file(fields, list(arrays.values()))
    # It says everything there is to say: what is loaded is saved the same.
    TokenTrie.load(file).save(file)
    assert file.read_bytes() == build_file(fields, list(arrays.values()))


@given(
    leaf_sets(), st.lists(texts(), min_size=12, max_size=12), st.sampled_from(WAYS), st.none() | st.binary(max_size=3)
)
def test_any_tree_equals_the_oracle(
    folder: Path, leaves: Leaves, names: list[str], way: Any, tail: bytes | None
) -> None:
    leaves = [(names[int(name[1:])], tokens) for name, tokens in leaves]
    ref = TokenTrie.from_sequences(leaves, tail=tail)
    ref.save(folder / "tree")
    comp = TokenTrie.load(folder / "tree", **way)
    assert_equal(comp, ref)
    test_trie.assert_equals_oracle(comp, leaves)


@given(test_automaton.cases(), st.sampled_from(WAYS))
def test_any_graph_equals_the_oracle(folder: Path, case: test_automaton.Case, way: Any) -> None:
    case = case.writable()
    case.trie.save(folder / "graph")
    comp = TokenTrie.load(folder / "graph", **way)
    assert_equal(comp, case.trie)
    test_automaton.assert_equals_oracle(comp, case.ref)


@given(st.lists(leaf_sets(max_leaves=5), min_size=1, max_size=3))
def test_any_descriptors_equal_the_oracle(folder: Path, groups: list[Leaves]) -> None:
    payload = payload_of({f"p{i}": leaves for i, leaves in enumerate(groups)})
    TokenTrie.from_payload(payload).save(folder / "payload")
    comp = TokenTrie.load(folder / "payload")
    for i, leaves in enumerate(groups):
        test_trie.assert_equals_oracle(comp, leaves, comp.root_of(f"p{i}"))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_cursor_walks_what_was_loaded(way: Any, file: Path) -> None:
    TokenTrie.from_sequences(HEADER).save(file)
    cursor = TrieCursor(TokenTrie.load(file, **way), eog_ids=[0])
    row = np.arange(10, dtype=np.float32)[::-1].copy()
    assert cursor.pick(row) == argmax_child(row, [3, 9])
    cursor.accept(3)
    assert cursor.allowed().tolist() == [4, 8]
    cursor.accept(4)
    assert cursor.forced_run().tolist() == [4]
    cursor.accept(4)
    assert (cursor.must_end, cursor.leaf_name) == (True, "C")
    graph_of(Toy(PIECES, [0]), ["abc", "ab"]).save(file)
    cursor = TrieCursor(TokenTrie.load(file, **way), eog_ids=[0])
    # "a", "ab" and "abc"; then "b" and "bc".
    assert cursor.allowed().tolist() == [1, 4, 6]
    cursor.accept(1)
    assert cursor.allowed().tolist() == [2, 5]
    cursor.accept(2)
    assert (cursor.may_end, cursor.must_end, cursor.leaf_name) == (True, False, "ab")


@pytest.mark.parametrize("as_given", [str, Path, os.fspath])
def test_names_of_files(as_given: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "ein größerer Name.trie"
    TokenTrie.from_sequences(HEADER).save(as_given(file))
    assert TokenTrie.load(as_given(file)).n_leaves == 2
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    for wrong in (os.fsencode(file), 3, None):
        with pytest.raises(TypeError):
            TokenTrie.load(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            TokenTrie.from_sequences(HEADER).save(wrong)  # type: ignore[arg-type]


# --- copies of what was loaded ------------------------------------------------------------------

COPIES: dict[str, Callable[[TokenTrie], TokenTrie]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda trie: pickle.loads(pickle.dumps(trie)),  # noqa: S301 - our own bytes
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", [TRIES["several descriptors"], TRIES["every spelling"], TRIES["indices for names"]])
def test_a_copy_needs_no_file(
    make: Callable[[], TokenTrie], copied: Callable[[TokenTrie], TokenTrie], file: Path
) -> None:
    ref = make()
    ref.save(file)
    comp = copied(TokenTrie.load(file))
    # The mapped pages live as long as an array over them, whatever becomes of the name.
    file.unlink()
    assert_equal(comp, ref)
    assert not comp.token.flags.writeable


def test_a_cursor_over_a_mapped_trie_is_pickled_with_it(file: Path) -> None:
    TokenTrie.from_sequences(HEADER).save(file)
    cursor = TrieCursor(TokenTrie.load(file))
    cursor.accept(3)
    twin = pickle.loads(pickle.dumps(cursor))  # noqa: S301 - our own bytes
    assert twin.allowed().tolist() == cursor.allowed().tolist() == [4, 8]


# --- what is refused ----------------------------------------------------------------------------

FIELDS, ARRAYS = parts_of(TokenTrie.from_sequences(HEADER, tail=b"to"))
LIST = list(ARRAYS.values())
GOOD = build_file(FIELDS, LIST)
GRAPH_FIELDS, GRAPH_ARRAYS = parts_of(graph_of(Toy(PIECES, [0]), ["ab", "abc", "aa"]))


def with_fields(**changes: Any) -> bytes:
    return build_file(FIELDS | changes, LIST)


def with_arrays(content_sum: int | None = None, **changes: dict[int, int]) -> bytes:
    """Some numbers are others; with the checksum that fits, unless it is given."""
    arrays = {name: array.copy() for name, array in ARRAYS.items()}
    for name, places in changes.items():
        for place, value in places.items():
            arrays[name][place] = value
    return build_file(FIELDS, list(arrays.values()), **({} if content_sum is None else {"content_sum": content_sum}))


def header_text(old: str, new: str) -> bytes:
    text = GOOD[24 : 24 + int.from_bytes(GOOD[12:16], "little")].decode()
    assert old in text
    return build_file(text.replace(old, new).encode("utf-8", "surrogateescape"), LIST)


# What it is, the file, and what is said of it.
REFUSED: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "not a trie file, but empty"),
    ("text", b"REPLY\nIGNORE\n", "not a trie file"),
    ("JSON", b'{"modelId": "m", "descriptors": []}' * 9, "not a trie file"),
    ("a GGUF", b"GGUF" + bytes(500), "not a trie file"),
    ("zeros", bytes(4096), "not a trie file"),
    ("line ends changed", GOOD.replace(b"\r\n", b"\n"), "not a trie file"),
    ("a later version", build_file(FIELDS, LIST, version=2), "of version 2, and this library reads version 1"),
    ("version 0", build_file(FIELDS, LIST, version=0), "of version 0"),
    ("the first byte alone", GOOD[:1], "truncated: 1 bytes"),
    ("the magic number alone", GOOD[:8], "truncated: 8 bytes"),
    ("no header", GOOD[:24], "truncated: 24 bytes"),
    ("half a header", GOOD[:100], "truncated: 100 bytes"),
    ("no content", GOOD[: 24 + GOOD[12]], "truncated"),
    ("the last byte missing", GOOD[:-1], f"truncated: {len(GOOD) - 1} bytes of {len(GOOD)}"),
    ("a byte more", GOOD + b"\0", f"goes on where it should end: {len(GOOD) + 1} bytes, not {len(GOOD)}"),
    ("two files in one", GOOD + GOOD, "goes on where it should end"),
    ("a longer header", build_file(FIELDS, LIST, n_bytes=2**32 - 1), "truncated"),
    ("a shorter header", build_file(FIELDS, LIST, n_bytes=20), "checksum of its header"),
    ("no header at all", build_file(FIELDS, LIST, n_bytes=0), "checksum of its header"),
    ("another header checksum", build_file(FIELDS, LIST, header_sum=7), "checksum of its header"),
    ("a flipped bit of the header", GOOD[:30] + bytes([GOOD[30] ^ 1]) + GOOD[31:], "checksum of its header"),
    ("another content checksum", build_file(FIELDS, LIST, content_sum=7), "checksum of its content"),
    ("a flipped bit of the content", GOOD[:-3] + bytes([GOOD[-3] ^ 1]) + GOOD[-2:], "checksum of its content"),
    ("no JSON", build_file(b"nodes: 3", LIST), "header is not JSON"),
    ("an empty header", build_file(b"", LIST), "header is not JSON"),
    ("no UTF-8", header_text('"tail"', '"\udcfftail"'), "header is not JSON"),
    ("NUL between digits", header_text('"nodes": 6', '"nodes": \x006'), "header is not JSON"),
    ("a key twice", header_text("{", '{"nodes": 6, '), "header is not JSON of unique keys"),
    ("deep nesting", build_file(b"[" * 10**6, LIST), "header is not JSON"),
    ("deep nesting in a field", header_text('[""]', "[" * 10**5), "header is not JSON"),
    ("a number of 5000 digits", header_text('"nodes": 6', '"nodes": ' + "9" * 5000), "header is not JSON"),
    ("a list for a header", build_file(b"[]", LIST), "must have the fields"),
    ("a field less", build_file({k: v for k, v in FIELDS.items() if k != "depth"}, LIST), "must have the fields"),
    ("a field more", with_fields(more=1), "must have the fields"),
    ("NaN", header_text('"nodes": 6', '"nodes": NaN'), "nodes = nan, which should be an integer"),
    ("a truth value", with_fields(depth=True), "depth = True, which should be an integer"),
    ("a float", with_fields(nodes=6.0), "nodes = 6.0, which should be"),
    ("text for a number", with_fields(nodes="6"), "nodes = '6', which should be"),
    ("no number", with_fields(nodes=None), "nodes = None"),
    ("no nodes", with_fields(nodes=0), "nodes = 0, which should be an integer in 1"),
    ("less than no nodes", with_fields(nodes=-1), "nodes = -1"),
    ("more nodes than int32", with_fields(nodes=2**31 - 1), "nodes = 2147483647"),
    ("a size that wraps at 64 bits", with_fields(name_bytes=2**64 - 2), "name_bytes = 18446744073709551614"),
    ("the largest size", with_fields(name_bytes=2**63 - 1), "truncated"),
    ("a size of 10 ** 40", with_fields(names=10**40), "names = 1000"),
    ("as many nodes as fit", with_fields(nodes=2**31 - 2), "truncated"),
    ("as many collisions", with_fields(collisions=2**31 - 1), "truncated"),
    ("negative collisions", with_fields(collisions=-1), "collisions = -1"),
    ("a negative healing", with_fields(n_healed=-1), "n_healed = -1"),
    ("an id past int32", with_fields(max_token=2**31), "max_token = 2147483648"),
    ("a graph of no edges", with_fields(edges=0), "edges = 0"),
    ("edges for a tree", with_fields(edges=6), "truncated"),
    ("one node more", with_fields(nodes=7), "goes on where it should end|truncated|checksum|does not hold"),
    ("names for no names", with_fields(name_bytes=None), "goes on where it should end"),
    ("no names at all", with_fields(names=0), "names = 0"),
    ("more leaves than names", with_fields(leaves=3), "more leaves than names"),
    ("paths longer than nodes", with_fields(depth=6), "more leaves than names, or paths longer"),
    ("no depth", with_fields(depth=0), "depth = 0"),
    ("a depth past any array", with_fields(depth=2**31), "depth = 2147483648"),
    ("no paths", with_fields(paths=[]), "0 paths, 0 distinct, for 6 nodes"),
    ("paths that are one", with_fields(paths=""), "paths in its header are not a list"),
    ("a path that is none", with_fields(paths=["", None]), "paths in its header are not a list"),
    ("a path twice", with_fields(paths=["a", "a"]), "2 paths, 1 distinct"),
    ("more paths than nodes", with_fields(paths=list("abcdefg")), "7 paths, 7 distinct, for 6 nodes"),
    ("a tail of no digits", with_fields(tail="xy"), "hexadecimal"),
    ("half a byte", with_fields(healed="abc"), "hexadecimal"),
    ("a healing that is none", with_fields(healed=None), "hexadecimal"),
    ("a tail of numbers", with_fields(tail=[116, 111]), "hexadecimal"),
    ("a model id of numbers", with_fields(model_id=7), "model id in its header is no text"),
]

# What it is, the file, and the promise that it breaks: the checksums fit, but no trie is like that.
HOSTILE: list[tuple[str, bytes, str]] = [
    ("two roots of one", with_fields(paths=["", "b"]), "roots come first"),
    ("a smaller largest id", with_fields(max_token=8), "max_token is the largest"),
    ("a negative id", with_arrays(token={3: -5}), "tokens are ids"),
    ("a descending range", with_arrays(first_child={2: 6}), "first_child ascends"),
    ("ranges that wrap", with_arrays(first_child={1: 2**31 - 1, 2: -(2**31), 3: -1}), "first_child ascends"),
    ("a circle", with_arrays(first_child={1: 1, 2: 1, 3: 1}), "children come after parents"),
    ("a leaf without a name", with_arrays(leaf={2: 2}), "leaf indices are in range"),
    (
        "a root that leads nowhere",
        with_arrays(first_child={0: 6, 1: 6, 2: 6, 3: 6}, leaf={0: 0}),
        "children follow the roots",
    ),
    ("names that are no text", with_arrays(name_bytes={0: 255}), "names are text"),
    ("a name cut in two", with_arrays(name_bytes={0: 0xC3, 1: 0xA9}), "names are text"),
    ("names that do not begin at 0", with_arrays(name_offsets={0: 1}), "names are text"),
    ("names past their end", with_arrays(name_offsets={2: 3}), "names are text"),
    ("a name before the first", with_arrays(name_offsets={1: -1}), "names are text"),
    ("a name past int64", with_arrays(name_offsets={1: 2**63 - 1}), "names are text"),
]
REFUSED += [(what, content, f"damaged trie: '{promise}' does not hold") for what, content, promise in HOSTILE]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("content", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_damaged_file_is_refused_by_name(content: bytes, message: str, way: Any, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(TrieFileError, match=message) as caught:
        TokenTrie.load(file, **way)
    assert str(file) in str(caught.value)
    file.unlink()  # nothing holds it open, which Windows would tell


def test_the_good_ones_of_the_table_are_good(file: Path) -> None:
    for content in (
        GOOD,
        with_fields(),
        with_arrays(),
        header_text("{", "{"),
        build_file(GRAPH_FIELDS, list(GRAPH_ARRAYS.values())),
    ):
        file.write_bytes(content)
        TokenTrie.load(file, verify=True)


@pytest.mark.parametrize(
    ("array", "place", "value", "promise"),
    [
        ("target", 0, -1, "children come after parents"),
        ("target", 0, 10**6, "targets are nodes"),
        ("sole_leaf", 0, 99, "sole leaves are in range"),
        ("sole_leaf", 0, -2, "sole leaves are in range"),
    ],
)
def test_a_damaged_graph_is_refused(array: str, place: int, value: int, promise: str, file: Path) -> None:
    arrays = {name: a.copy() for name, a in GRAPH_ARRAYS.items()}
    arrays[array][place] = value
    file.write_bytes(build_file(GRAPH_FIELDS, list(arrays.values())))
    with pytest.raises(TrieFileError, match=f"damaged trie: '{promise}' does not hold"):
        TokenTrie.load(file)


@pytest.mark.parametrize(("node", "leaf"), [(-1, 1), (99, 1), (0, 1), (1, -1), (1, 9)])
def test_a_collision_of_nothing_is_refused(node: int, leaf: int, file: Path) -> None:
    fields, arrays = parts_of(TokenTrie.from_sequences([("a", [7]), ("b", [7])]))
    arrays["collided"][:] = [[node], [leaf]]
    file.write_bytes(build_file(fields, list(arrays.values())))
    with pytest.raises(TrieFileError, match="damaged trie: 'collisions are of leaves' does not hold"):
        TokenTrie.load(file)


@pytest.mark.parametrize("size", [0, 1, 8, 23, 24, 200, len(GOOD) - 1])
def test_each_shorter_file_is_refused_whatever_is_verified(size: int, file: Path) -> None:
    file.write_bytes(GOOD[:size])
    for verify in (None, False, True):
        with pytest.raises(TrieFileError):
            TokenTrie.load(file, verify=verify)


def test_what_the_system_says_passes_through(tmp_path: Path) -> None:
    trie = TokenTrie.from_sequences(HEADER)
    with pytest.raises(FileNotFoundError):
        TokenTrie.load(tmp_path / "none.trie")
    with pytest.raises(FileNotFoundError):
        trie.save(tmp_path / "no folder" / "a.trie")
    with pytest.raises(OSError, match=r"director|denied"):
        TokenTrie.load(tmp_path)
    (tmp_path / "folder.trie").mkdir()
    with pytest.raises(IsADirectoryError, match="not a file that can be replaced"):
        trie.save(tmp_path / "folder.trie")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.trie"]


@needs_posix
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="not a file that can be replaced"):
        TokenTrie.from_sequences(HEADER).save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


@needs_posix
@pytest.mark.skipif(sys.platform != "win32" and os.geteuid() == 0, reason="root may do everything")
def test_what_is_not_permitted(file: Path) -> None:
    trie = TokenTrie.from_sequences(HEADER)
    trie.save(file)
    file.chmod(0)
    with pytest.raises(PermissionError):
        TokenTrie.load(file)
    file.chmod(0o600)
    file.parent.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            trie.save(file)
    finally:
        file.parent.chmod(0o700)
    assert TokenTrie.load(file).n_leaves == 2


# --- what is looked at --------------------------------------------------------------------------

DAMAGED = with_arrays(content_sum=zlib.crc32(b"of another"), token={3: 8, 4: 4})


@pytest.mark.parametrize(
    ("verify", "limit", "is_refused"),
    [
        (None, len(DAMAGED) + 1, True),
        (None, len(DAMAGED), False),
        (False, len(DAMAGED) + 1, False),
        (True, 0, True),
    ],
)
def test_the_content_is_verified_below_a_size_or_on_request(
    verify: bool | None, limit: int, is_refused: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.VERIFIED_SIZE == 16 * 2**20
    monkeypatch.setattr(store, "VERIFIED_SIZE", limit)
    file.write_bytes(DAMAGED)
    if is_refused:
        with pytest.raises(TrieFileError, match="checksum of its content"):
            TokenTrie.load(file, verify=verify)
    else:
        assert TokenTrie.load(file, verify=verify).token.tolist() == [-1, 3, 9, 8, 4, 4]


WHOLE: dict[str, Callable[[TokenTrie], Any]] = {
    "leaves": lambda trie: list(trie.leaves()),
    "collisions": lambda trie: trie.collisions,
    "unreachable": lambda trie: trie.unreachable,
    "validate": TokenTrie.validate,
    "save": lambda trie: trie.save("again.trie"),
}


@pytest.mark.parametrize("ask", WHOLE.values(), ids=WHOLE)
def test_who_asks_for_everything_hears_of_damage(
    ask: Callable[[TokenTrie], Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.write_bytes(DAMAGED)
    trie = TokenTrie.load(file, verify=False)
    for comp in (trie, copy.copy(trie), pickle.loads(pickle.dumps(trie))):  # noqa: S301 - our own bytes
        for _ in range(2):
            with pytest.raises(TrieSamplerError, match="damaged trie: 'siblings ascend' does not hold"):
                ask(comp)


def test_a_file_is_gone_through_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TokenTrie.from_sequences(HEADER).save(file)
    asked = []
    validate = TokenTrie.validate
    monkeypatch.setattr(TokenTrie, "validate", lambda trie: asked.append(validate(trie)))
    trie = TokenTrie.load(file, verify=False)
    assert not asked
    for _ in range(3):
        assert len(list(trie.leaves())) == 3
        assert trie.collisions == ()
    assert len(asked) == 1


def test_damage_that_nobody_looked_for(file: Path) -> None:
    """One step at a time: names and places that are none are told of, steps to nowhere are not taken."""
    file.write_bytes(
        with_arrays(leaf={2: 99, 4: -7}, first_child=dict.fromkeys(range(2, 7), 0), name_bytes={0: 255, 1: 255})
    )
    trie = TokenTrie.load(file, verify=False)
    for node in (2, 4):
        with pytest.raises(TrieSamplerError, match="damaged trie: 'leaf indices are in range' does not hold"):
            trie.leaf_name(node)
    with pytest.raises(TrieSamplerError, match="damaged trie: the name of leaf 0 is no text"):
        trie.name_of(0)
    for leaf in (-1, 2, 99):
        with pytest.raises(IndexError, match=f"leaf {leaf} is not in 0 .. 1"):
            trie.name_of(leaf)
    with pytest.raises(TrieSamplerError, match="damaged trie: 'children come after parents' does not hold"):
        trie.path_tokens(5)
    file.write_bytes(
        build_file(GRAPH_FIELDS, [a if n != "target" else np.full_like(a, -9) for n, a in GRAPH_ARRAYS.items()])
    )
    trie = TokenTrie.load(file, verify=False)
    cursor = TrieCursor(trie)
    token = int(cursor.allowed()[0])
    assert trie.step(0, token) == -1
    assert cursor.forced_run().tolist() == []
    with pytest.raises(OffTrieError):
        cursor.accept(token)


@pytest.mark.parametrize("token", [-2, -(2**31), 10**6, 2**31 - 1])
def test_an_id_that_is_none_is_not_picked(token: int, file: Path) -> None:
    file.write_bytes(with_arrays(token={1: token, 2: token}))
    for ask in (TrieCursor.pick, TrieCursor.sample, lambda cursor, row: cursor.constrain(row, samples=False).token):
        cursor = TrieCursor(TokenTrie.load(file, verify=False))
        assert 0 <= ask(cursor, np.zeros(10, np.float32)) < 10


def test_damaged_and_hostile_files_do_no_harm() -> None:
    """In a process of its own: a crash is a return code."""
    n_files = 300 if numba.config.DISABLE_JIT else 2500
    command = [sys.executable, "-X", "faulthandler", damage.__file__, "7", str(n_files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = {line[7:]: int(line[:7]) for line in done.stdout.splitlines()}
    assert sum(counts.values()) == n_files
    assert counts["loaded, damaged, verify=False"] > n_files // 10
    assert counts["refused, verify=False"] > n_files // 10


_READER = """
import ctypes, sys, damage, numpy as np
place = int(sys.argv[1])
array = damage.guarded(np.arange(3), at_end=place >= 0)
print((ctypes.c_long * 1).from_address(array.ctypes.data + array.itemsize * place)[0])
"""


@needs_posix
def test_the_guards_of_the_damage_kill_who_reads_past_an_end() -> None:
    for place, survives in ((2, True), (3, False), (-1, False)):
        command = [sys.executable, "-c", _READER, str(place)]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        assert (done.returncode == 0, done.stdout.strip()) == (survives, str(place) if survives else "")


# --- writing ------------------------------------------------------------------------------------


def test_saving_over_the_file_that_it_is_mapped_from(file: Path) -> None:
    TokenTrie.from_sequences(HEADER).save(file)
    old = TokenTrie.load(file)
    old.save(file)
    assert_equal(TokenTrie.load(file), old)
    TokenTrie.from_sequences([("new", [1])]).save(file)
    # Who has the old one open keeps it.
    assert [name for name, _ in old.leaves()] == ["C", "D", "C"]
    assert [name for name, _ in TokenTrie.load(file).leaves()] == ["new"]


@pytest.mark.parametrize("failing", ["os.fsync", "shutil.copymode", "pathlib.Path.replace", "zlib.crc32"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_failure_leaves_the_old_file_and_no_rubbish(
    failing: str, error: BaseException, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TokenTrie.from_sequences(HEADER).save(file)
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise error

    trie = TokenTrie.from_sequences([("new", [1])])
    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(type(error)):
            trie.save(file)
        fresh = file.with_name("fresh.trie")
        if failing != "shutil.copymode":
            with pytest.raises(type(error)):
                trie.save(fresh)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


@needs_posix
def test_the_mode_is_a_new_file_s_or_the_old_one_s(tmp_path: Path) -> None:
    trie = TokenTrie.from_sequences(HEADER)
    before = os.umask(0o027)
    try:
        trie.save(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new").chmod(0o604)
    trie.save(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o604


@needs_posix
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(Path("there", "real"))
    for _ in range(2):
        TokenTrie.from_sequences(HEADER).save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert TokenTrie.load(tmp_path / "there" / "real").n_leaves == 2
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}


_WRITER = """
import sys, numpy as np
from trie_sampler.store import read_trie, write_trie
here, other = (read_trie(name, is_mapped=False, verify=True)[0] for name in sys.argv[1:3])
print("ready", flush=True)
while True:
    write_trie(sys.argv[3], other)
    write_trie(sys.argv[3], here)
"""


def kill_while_saving(tmp_path: Path, n_kills: int) -> None:
    rng = np.random.default_rng(5)
    made = []
    for n_leaves in (30_000, 50_000):
        trie = TokenTrie.from_ragged(rng.integers(0, 1000, 8 * n_leaves), np.arange(n_leaves + 1) * 8)
        trie.save(tmp_path / str(n_leaves))
        made.append((tmp_path / str(n_leaves)).read_bytes())
    target = tmp_path / "target"
    target.write_bytes(made[0])
    wait = random.Random(3)  # noqa: S311 - when to kill
    for _ in range(n_kills):
        command = [sys.executable, "-c", _WRITER, str(tmp_path / "30000"), str(tmp_path / "50000"), str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(wait.uniform(0, 0.06))
            child.kill()
        assert target.read_bytes() in made
        TokenTrie.load(target, verify=True)
    # What a kill leaves is in nobody's way.
    for rubbish in tmp_path.glob(".*.tmp"):
        assert rubbish.stat().st_size <= max(map(len, made))
    shutil.copy(tmp_path / "30000", target)
    TokenTrie.load(target).save(target)


def test_a_kill_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 3)


@pytest.mark.slow
def test_many_kills_while_saving_leave_a_whole_file(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 60)


# --- size and time ------------------------------------------------------------------------------


def test_names_of_a_mapped_trie_stay_in_the_file(file: Path) -> None:
    TokenTrie.from_sequences([(f"name {i}", [i]) for i in range(1000)]).save(file)
    trie = TokenTrie.load(file)
    assert trie._names is not None
    for array in (trie.token, trie._names.blob, trie._names.offsets):
        assert not array.flags.owndata
        assert not array.flags.writeable
    assert trie.leaf_name(trie.step(trie.root, 999)) == "name 999"


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="built by compiled code")
def test_a_million_leaves_open_at_once(file: Path) -> None:
    """Bounds with room for a busy machine; the figures are in the docstring of ``load``."""
    ids = np.random.default_rng(0).integers(0, 1000, 5_000_000)
    TokenTrie.from_ragged(ids, np.arange(1_000_001) * 5).save(file)
    assert file.stat().st_size > 2 * store.VERIFIED_SIZE
    row = np.zeros(1000, np.float32)
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        TrieCursor(TokenTrie.load(file)).pick(row)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.05
