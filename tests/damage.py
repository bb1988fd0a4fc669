"""Damaged and hostile trie files, and a walk over whatever can still be loaded of them.

    python tests/damage.py SEED N      N files; the process survives, and prints what became of them

Every array of a loaded trie, and every row of logits, is moved to memory between two pages that nobody may touch: who
reads past an end is killed. So is who takes 30 seconds for a file. All exceptions but the documented ones are errors.

``build_file`` writes the format from its description in ``store.py``, and shares no code with it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import dataclasses
import json
import mmap
import pickle
import random
import signal
import struct
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from test_automaton import Toy, graph_of
from test_native_kernels import Candidates, pair_of

from trie_sampler.cursor import Sampling, TrieCursor
from trie_sampler.errors import TrieFileError, TrieSamplerError
from trie_sampler.scores import GraphScores, Paths, PathScores
from trie_sampler.tokens import finish_leaf
from trie_sampler.trie import TokenTrie

PAGE = mmap.PAGESIZE
WIDEST = 2000
"""A row for a larger ``max_token`` is refused before it is read, and not made here."""

ARRAYS = ("token", "first_child", "leaf", "target", "sole_leaf", "collided", "name_offsets", "name_bytes")


# --- files --------------------------------------------------------------------------------------


def build_file(fields: dict[str, Any] | bytes, arrays: Sequence[np.ndarray], **wrong: int) -> bytes:
    """A file of these fields, or of this text as its header; ``wrong`` replaces numbers of the fixed part."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    content = b""
    for array in arrays:
        content += bytes(-(24 + len(text) + len(content)) % 64) + array.tobytes()
    words = {"version": 1, "n_bytes": len(text), "content_sum": zlib.crc32(content)} | wrong
    start = struct.pack("<8s3I", b"\x89TRIE\r\n\x1a", words["version"], words["n_bytes"], words["content_sum"])
    return start + struct.pack("<I", wrong.get("header_sum", zlib.crc32(start + text))) + text + content


def parts_of(trie: TokenTrie) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The fields and arrays of a trie's file."""
    names = trie._names
    stored = {
        **{name: getattr(trie, name) for name in ARRAYS[:5]},
        "collided": trie._collided,
        "name_offsets": None if names is None else names.offsets,
        "name_bytes": None if names is None else names.blob,
    }
    fields = {
        "nodes": trie.n_nodes,
        "edges": None if trie.target is None else len(trie.token),
        "collisions": len(trie.collisions),
        "name_bytes": None if names is None else len(names.blob),
        "names": trie._n_names,
        "leaves": trie.n_leaves,
        "max_token": trie.max_token,
        "depth": trie.depth,
        "paths": list(trie.paths),
        "tail": None if trie.tail is None else trie.tail.hex(),
        "healed": trie.healed.hex(),
        "n_healed": trie.n_healed,
        "model_id": trie.model_id,
    }
    return fields, {name: np.array(array) for name, array in stored.items() if array is not None}


PIECES = [b"", b"a", b"b", b"c", b"ab", b"bc", b"abc", b"aa"]


def sample_tries() -> list[TokenTrie]:
    """Small tries of every kind."""
    rng = random.Random(1)  # noqa: S311 - the same tries each time
    many = [(f"name {i}", [rng.randrange(1, 9) for _ in range(rng.randrange(1, 6))]) for i in range(40)]
    ids, offsets = [5, 7, 5, 5, 6, 5, 6, 8], [0, 2, 3, 5, 8]
    groups = [("a", [("x", [1, 2]), ("y", [1])]), ("b[]", [("é", [1, 2]), ("日", [1, 2]), ("z", [4])])]
    return [
        TokenTrie.from_sequences([("only", [3])]),
        TokenTrie.from_sequences([("D", [3, 8]), ("C", [9]), ("C", [3, 4, 4])], tail=b"to\xff"),
        TokenTrie.from_sequences(many),
        TokenTrie.from_ragged(ids, offsets),
        TokenTrie._from_leaves(groups),
        graph_of(Toy(PIECES, [0]), ["ab", "abc", "aa", "bca"]),
        graph_of(Toy([b"a", b":", b"/", b":/", b"b"]), ["/b", "/bb"], prompt_ids=[0, 1], heal=True),
    ]


NUMBERS = [-(2**31), -1000, -3, -2, -1, 0, 1, 2, 3, 5, 7, 50, 1999, 2**16, 2**30, 2**31 - 2, 2**31 - 1]
ODD: list[Any] = [None, True, 1.5, 1e300, "", "x", "00", [], {}, [""], ["a", "a"], [1], -1, 2**32, 2**63, 2**64, 10**40]
TEXTS = [b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"nodes": NaN}', b"9" * 5000, b"{}"]


def damage_parts(rng: random.Random, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Something in the fields or arrays is wrong, and the checksums may fit."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    for _ in range(rng.choice([1, 1, 2, 5])):
        array = arrays[rng.choice(list(arrays))].reshape(-1)
        if not len(array) or rng.random() < 0.2:
            name = rng.choice(list(fields))
            near = fields[name] + rng.choice([-1, 1]) if type(fields[name]) is int else None
            fields = fields | {name: rng.choice([near, rng.choice(NUMBERS), rng.choice(ODD)])}
            continue
        start = rng.randrange(len(array))
        stop = min(len(array), start + rng.choice([1, 1, 1, 2, len(array)]))
        how = rng.randrange(4)
        if how == 0:
            rng.shuffle(array[start:stop])
        elif how == 1:
            array[start:stop] += np.array(rng.choice([-1, 1])).astype(array.dtype)
        else:
            array[start:stop] = np.array(rng.choice([*NUMBERS, len(array)]), np.int64).astype(array.dtype)
    text = rng.choice(TEXTS) if rng.random() < 0.02 else fields
    wrong = {} if rng.random() < 0.6 else {"content_sum": rng.getrandbits(32)}
    return build_file(text, list(arrays.values()), **wrong)


def damage_bytes(rng: random.Random, file: bytes) -> bytes:
    """Bytes are changed, cut away, put in or moved."""
    content = bytearray(file)
    place = rng.randrange(len(content))
    how = rng.randrange(5)
    if how == 0:
        return file[:place]
    if how == 1:
        return file + rng.randbytes(rng.choice([1, 4, 64, 4096]))
    if how == 2:
        return file[:place] + rng.randbytes(rng.randrange(1, 9)) + file[place:]
    if how == 3:
        return file[:place] + file[place + rng.randrange(1, 65) :]
    for _ in range(rng.choice([1, 1, 8, 64])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


# --- memory between pages that nobody may touch -------------------------------------------------


def guarded(array: np.ndarray, *, at_end: bool) -> np.ndarray:
    """A copy that ends, or begins, at a page which is not to be read."""
    n_bytes = -(-max(array.nbytes, 1) // PAGE) * PAGE
    block = mmap.mmap(-1, n_bytes + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    offset = PAGE + (n_bytes - array.nbytes if at_end else 0)
    moved = np.frombuffer(block, array.dtype, array.size, offset).reshape(array.shape)
    moved[...] = array
    mprotect = getattr(ctypes.CDLL(None), "mprotect", None) if sys.platform != "win32" else None
    if mprotect is not None:
        for guard in (address, address + PAGE + n_bytes):
            assert mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) == 0
    return moved


def guard_trie(trie: TokenTrie, *, at_end: bool) -> TokenTrie:
    moved = {name: getattr(trie, name) for name in ARRAYS[:5]}
    moved = {name: guarded(array, at_end=at_end) for name, array in moved.items() if array is not None}
    return dataclasses.replace(trie, **moved)


# --- a walk over all of it ----------------------------------------------------------------------


def outcome_of(ask: Callable[..., Any], *arguments: Any) -> Any:
    """What is answered; ``None`` for an exception that is documented."""
    try:
        return ask(*arguments)
    except TrieSamplerError:
        return None


class Blind:
    """A vocabulary that writes nothing, whatever the id."""

    n_vocab = WIDEST
    eog_ids: Sequence[int] = ()

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        return [0] * len(text)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b""

    def is_eog(self, token: int) -> bool:
        return False

    def is_control(self, token: int) -> bool:
        return False


def ask_trie(trie: TokenTrie) -> None:
    repr(trie)
    for node in range(trie.n_nodes):
        children = trie.children(node).tolist()
        assert len(children) <= trie.max_token + 1
        outcome_of(trie.leaf_name, node)
        outcome_of(trie.path_tokens, node)
        for token in (*children[:5], -1, 0, 2**31 - 1):
            assert -1 <= trie.step(node, token) < trie.n_nodes
        finish_leaf(Blind(), trie, node, ())
    for leaf in (0, trie._n_names - 1):
        outcome_of(trie.name_of, leaf)
    outcome_of(lambda: trie.unreachable)
    outcome_of(lambda: trie.collisions)
    outcome_of(lambda: list(trie.leaves()))
    outcome_of(trie.check_vocab, Blind())
    outcome_of(lambda: list(pickle.loads(pickle.dumps(trie)).leaves()))  # noqa: S301 - a trie of ours
    outcome_of(lambda: list(copy.copy(trie).leaves()))


def rows_of(rng: random.Random, width: int) -> Iterator[np.ndarray]:
    noise = np.random.default_rng(rng.getrandbits(32))
    for width_here in (width, width + rng.randrange(40)):
        row = noise.normal(size=width_here).astype(np.float32)
        row[noise.random(width_here) < 0.2] = rng.choice([-np.inf, np.nan, np.inf, 0.0])
        yield guarded(row, at_end=rng.random() < 0.7)


def ask_cursor(rng: random.Random, cursor: TrieCursor, row: np.ndarray) -> None:
    for _ in range(12):
        run = cursor.forced_run()
        assert ((run >= 0) & (run < len(row))).all()
        for ask in (cursor.pick, cursor.sample, cursor.valid_mass, lambda row: cursor.decide(row, samples=False)):
            ask(row)
        cursor.mask(guarded(row, at_end=True))
        outcome_of(lambda: cursor.constrain(guarded(row, at_end=True), samples=True))
        _ = cursor.may_end, cursor.must_end, outcome_of(cursor.allowed), outcome_of(lambda: cursor.leaf_name)
        token = cursor.pick(row) if rng.random() < 0.7 else cursor.sample(row)
        assert -1 <= token < len(row)
        with contextlib.suppress(TrieSamplerError):
            cursor.accept(token)
            assert 0 <= cursor.node < cursor.trie.n_nodes


def ask_native(rng: random.Random, cursor: TrieCursor, row: np.ndarray) -> None:
    ids = list(range(len(row)))
    with pair_of(cursor, on_invalid=rng.choice(["drop", "mask"]), keeps_options=rng.randrange(2), with_probe=False) as (
        sampler,
        _,
    ):
        for _ in range(6):
            if rng.random() < 0.5:
                rng.shuffle(ids)
            left = sampler.apply(Candidates.of_row(row, ids))
            assert left.ids, "a chain without candidates ends the process"
            assert all(0 <= token < len(row) for token in left.ids)
            sampler.accept(left.ids[0])


def ask_scores(trie: TokenTrie, root: int, row: np.ndarray) -> None:
    if trie.target is None:
        paths = Paths(trie, root)
        scores = PathScores(trie, paths, root, walks=True)
        opened = [root]
        while opened:
            opened += scores.evaluate(opened.pop(0), row)
        return
    graph = GraphScores(trie, root, walks=False)
    ways = [graph.root]
    for _ in range(20):
        if ways:
            ways += graph.evaluate(ways.pop(0), row)
    graph.bounds(ways)


def ask_everything(rng: random.Random, trie: TokenTrie) -> None:
    trie = guard_trie(trie, at_end=rng.random() < 0.7)
    ask_trie(trie)
    for path, root in list(trie.roots.items())[:3]:
        on_end = rng.choice(["mass", "eog", "release"])
        sampling = Sampling(rng.choice([0.0, 1.0]), rng.choice([0, 2]), rng.choice([0.5, 1.0]), 0.01, seed=1)
        ends = [] if on_end == "release" and rng.random() < 0.5 else [0, 5]
        cursor = TrieCursor(trie, path=path, on_end=on_end, stop_tokens=ends, sampling=sampling)
        width = max(trie.max_token, 5) + 1
        if width > WIDEST:
            with contextlib.suppress(ValueError):
                cursor.pick(np.zeros(9, np.float32))
            continue
        for row in rows_of(rng, width):
            ask_cursor(rng, cursor.clone(), row)
            ask_native(rng, cursor.clone(), row)
            # What is counted for each leaf takes memory that an index in place of names makes no file pay for.
            if trie._n_names < 10**6:
                outcome_of(ask_scores, trie, root, row)


def run(seed: int, n_files: int) -> collections.Counter[str]:
    """Damage, load, walk; what became of each file."""
    rng = random.Random(seed)  # noqa: S311 - the same files for a seed
    tries = sample_tries()
    parts = [parts_of(trie) for trie in tries]
    seen: collections.Counter[str] = collections.Counter()
    has_alarm = hasattr(signal, "alarm")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(n_files):
            fields, arrays = rng.choice(parts)
            if rng.random() < 0.25:
                content = damage_bytes(rng, build_file(fields, list(arrays.values())))
            else:
                content = damage_parts(rng, fields, arrays)
            file = Path(folder, f"{i}.trie")
            file.write_bytes(content)
            verify = rng.choice([None, False, False, False, True])
            if has_alarm:
                signal.alarm(30)
            try:
                trie = TokenTrie.load(file, mmap=rng.random() < 0.5, verify=verify)
            except TrieFileError:
                seen[f"refused, verify={verify}"] += 1
                continue
            finally:
                file.unlink()
            is_whole = outcome_of(lambda trie=trie: trie.validate() or True)
            seen[f"loaded, {'whole' if is_whole else 'damaged'}, verify={verify}"] += 1
            assert is_whole or verify is False
            ask_everything(rng, trie)
            if has_alarm:
                signal.alarm(0)
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for what, count in sorted(run(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(f"{count:6d} {what}")
