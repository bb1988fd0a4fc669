"""The file of a trie: a header, then the arrays as they lie in memory, so that opening one reads nothing else.

======  =====  ================================================================================
offset  bytes
======  =====  ================================================================================
0       8      ``MAGIC``
8       4      ``VERSION``
12      4      H, the bytes of the header
16      4      CRC-32 of the content: all bytes behind the header
20      4      CRC-32 of the 20 bytes before this and of the header
24      H      the header, JSON: counts, and whatever is no array
24 + H         the arrays in the order of ``StoredTrie``, each from a multiple of 64 bytes on
======  =====  ================================================================================

Integers are little-endian, the first five unsigned. Counts give the sizes of the arrays, and sizes their places: no
header can name a place outside the file, or one place twice.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from trie_sampler.errors import TrieFileError
from trie_sampler.layout import LEAF, NODE, OFFSET, TOKEN

# As in PNG: a transfer that takes the file for text changes it.
MAGIC = b"\x89TRIE\r\n\x1a"
VERSION = 1

VERIFIED_SIZE = 16 * 2**20
"""Bytes of a file below which its content is checked unless the caller says otherwise."""

_FIXED = struct.Struct("<8sIIII")
_ALIGNMENT = 64
_NAME_BYTE = np.dtype(np.uint8)
_MAX_COUNT = 2**31 - 1
# Nodes are int32, and first_child has one entry more.
_MAX_NODES = _MAX_COUNT - 1


@dataclass(frozen=True, eq=False)
class StoredTrie:
    """What a file holds.

    Attributes:
        token: [E] int32; in a tree E = S.
        first_child: [S+1] int32.
        leaf: [S] int32.
        target: [E] int32 in a graph, ``None`` in a tree.
        sole_leaf: [S] int32 in a graph, ``None`` in a tree.
        collided: [2, C] int32, nodes and the leaves that lost them.
        name_offsets: [N+1] int64 into ``name_bytes``; ``None`` where a leaf's name is its index.
        name_bytes: [B] uint8, the names as UTF-8.
        n_names: N.
        n_leaves: leaves that can come out, at most N.
        max_token: the largest of ``token``.
        depth: tokens of the longest path.
        paths: the descriptor of each root; roots are the nodes 0 .. R-1.
        tail: the prompt's text before the paths, where it is known.
        healed: the bytes of it that each path writes again.
        n_healed: the tokens of those.
        model_id: fingerprint of the vocabulary, where it is known.
    """

    token: npt.NDArray[np.int32]
    first_child: npt.NDArray[np.int32]
    leaf: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32] | None
    sole_leaf: npt.NDArray[np.int32] | None
    collided: npt.NDArray[np.int32]
    name_offsets: npt.NDArray[np.int64] | None
    name_bytes: npt.NDArray[np.uint8] | None
    n_names: int
    n_leaves: int
    max_token: int
    depth: int
    paths: tuple[str, ...]
    tail: bytes | None
    healed: bytes
    n_healed: int
    model_id: str | None


def write_trie(file: str | os.PathLike[str], stored: StoredTrie) -> None:
    """Write a file, complete or not at all: under another name first, and on the disk before it gets its own.

    Raises:
        OSError: it cannot be written; what was there is unchanged.
    """
    place = Path(os.path.realpath(file))
    if place.exists() and not place.is_file():
        # Another name would take the place of a device, too, if one is allowed to.
        code = errno.EISDIR if place.is_dir() else errno.EEXIST
        raise OSError(code, "not a file that can be replaced", str(place))
    header = json.dumps(_header_of(stored)).encode()
    temporary = place.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # "x" gives it the mode that a new file has here, which tempfile's are denied.
        with temporary.open("xb") as stream:
            stream.write(bytes(_FIXED.size))
            stream.write(header)
            content_sum = 0
            for part in _content_of(stored, len(header)):
                stream.write(part)
                content_sum = zlib.crc32(part, content_sum)
            stream.seek(0)
            stream.write(_fixed_part(header, content_sum))
            stream.flush()
            os.fsync(stream.fileno())
        if place.exists():
            shutil.copymode(place, temporary)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)


def _fixed_part(header: bytes, content_sum: int) -> bytes:
    words = (MAGIC, VERSION, len(header), content_sum)
    start = _FIXED.pack(*words, 0)[:-4]
    return _FIXED.pack(*words, zlib.crc32(header, zlib.crc32(start)))


def _header_of(stored: StoredTrie) -> dict[str, Any]:
    return {
        "nodes": len(stored.leaf),
        "edges": None if stored.target is None else len(stored.token),
        "collisions": stored.collided.shape[1],
        "name_bytes": None if stored.name_bytes is None else len(stored.name_bytes),
        "names": stored.n_names,
        "leaves": stored.n_leaves,
        "max_token": stored.max_token,
        "depth": stored.depth,
        "paths": list(stored.paths),
        "tail": None if stored.tail is None else stored.tail.hex(),
        "healed": stored.healed.hex(),
        "n_healed": stored.n_healed,
        "model_id": stored.model_id,
    }


def _shapes_of(header: Mapping[str, Any]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Dtype and shape of each array in the file, in its order."""
    n_nodes, n_edges, n_bytes = header["nodes"], header["edges"], header["name_bytes"]
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "token": (TOKEN, (n_nodes if n_edges is None else n_edges,)),
        "first_child": (NODE, (n_nodes + 1,)),
        "leaf": (LEAF, (n_nodes,)),
    }
    if n_edges is not None:
        shapes |= {"target": (NODE, (n_edges,)), "sole_leaf": (LEAF, (n_nodes,))}
    shapes["collided"] = (LEAF, (2, header["collisions"]))
    if n_bytes is not None:
        shapes |= {"name_offsets": (OFFSET, (header["names"] + 1,)), "name_bytes": (_NAME_BYTE, (n_bytes,))}
    return shapes


def _gap(offset: int) -> int:
    """Bytes from an offset to the next multiple of the alignment."""
    return -offset % _ALIGNMENT


def _content_of(stored: StoredTrie, n_header_bytes: int) -> Iterator[bytes | memoryview]:
    """The bytes behind the header, piece by piece."""
    offset = _FIXED.size + n_header_bytes
    for name, (dtype, _) in _shapes_of(_header_of(stored)).items():
        array = np.ascontiguousarray(getattr(stored, name), dtype.newbyteorder("<"))
        yield bytes(_gap(offset))
        if array.size:
            yield array.reshape(-1).view(np.uint8).data
        offset += _gap(offset) + array.nbytes


def read_trie(file: str | os.PathLike[str], *, is_mapped: bool, verify: bool | None) -> tuple[StoredTrie, bool]:
    """Read a file.

    Args:
        file: its name.
        is_mapped: leave the arrays in the file; else they are copied into memory. Read-only either way.
        verify: compare the checksum of the content; ``None`` does below ``VERIFIED_SIZE``.

    Returns:
        What it holds, and whether the content was verified. The structure of the arrays is the caller's to check.

    Raises:
        TrieFileError: not a trie, of another version, truncated or damaged.
        OSError: it cannot be read.
    """
    with Path(file).open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            header, start, content_sum = _read_header(stream, size)
            shapes = _shapes_of(header)
            stop = start
            for dtype, shape in shapes.values():
                stop += _gap(stop) + dtype.itemsize * math.prod(shape)
            _require_size(size, stop)
            content = _content_from(stream, size, is_mapped=is_mapped)
            verifies = size < VERIFIED_SIZE if verify is None else verify
            if verifies and zlib.crc32(content[start:]) != content_sum:
                _refuse("it is damaged: the checksum of its content is another")
        except _RefusedError as error:
            raise TrieFileError(f"{os.fspath(file)!r} is no trie that can be loaded: {error}") from None
    arrays: dict[str, Any] = dict.fromkeys(("target", "sole_leaf", "name_offsets", "name_bytes"))
    offset = start
    for name, (dtype, shape) in shapes.items():
        offset += _gap(offset)
        stored = np.frombuffer(content, dtype.newbyteorder("<"), math.prod(shape), offset)
        arrays[name] = stored.astype(dtype, copy=False).reshape(shape)
        offset += stored.nbytes
    return StoredTrie(
        **arrays,
        n_names=header["names"],
        n_leaves=header["leaves"],
        max_token=header["max_token"],
        depth=header["depth"],
        paths=tuple(header["paths"]),
        tail=header["tail"],
        healed=header["healed"],
        n_healed=header["n_healed"],
        model_id=header["model_id"],
    ), verifies


class _RefusedError(Exception):
    """What is wrong with a file, before it is named."""


def _refuse(what: str) -> NoReturn:
    raise _RefusedError(what)


def _require_size(size: int, wanted: int) -> None:
    if size < wanted:
        _refuse(f"it is truncated: {size} bytes of {wanted}")
    if size > wanted:
        _refuse(f"it goes on where it should end: {size} bytes, not {wanted}")


def _content_from(stream: BinaryIO, size: int, *, is_mapped: bool) -> memoryview:
    """The whole file, read-only."""
    if is_mapped:
        try:
            return memoryview(mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ))
        except ValueError:  # it became shorter since it was opened
            _refuse("it is truncated: another process writes to it")
    stream.seek(0)
    content = np.fromfile(stream, np.uint8)
    _require_size(len(content), size)
    return content.data.toreadonly()


def _read_header(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int, int]:
    """(the header, where it ends, the checksum of the content)."""
    start = stream.read(_FIXED.size)
    if start[: len(MAGIC)] != MAGIC[: len(start)] or not start:
        _refuse("it is not a trie file" + ("" if start else ", but empty"))
    if len(start) < _FIXED.size:
        _refuse(f"it is truncated: {size} bytes, less than the {_FIXED.size} at the start of any")
    _, version, n_bytes, content_sum, header_sum = _FIXED.unpack(start)
    if version != VERSION:
        _refuse(f"it is of version {version}, and this library reads version {VERSION}; save the trie again")
    if _FIXED.size + n_bytes > size:
        _refuse(f"it is truncated: {size} bytes, and the header alone has {n_bytes}")
    text = stream.read(n_bytes)
    if zlib.crc32(text, zlib.crc32(start[:-4])) != header_sum:
        _refuse("it is damaged: the checksum of its header is another")
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_unique_fields)
    # ValueError: also bytes that are no UTF-8, and numbers too long to be read.
    except (ValueError, RecursionError):
        _refuse("its header is not JSON of unique keys")
    return _check_header(fields), _FIXED.size + n_bytes, content_sum


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _check_header(fields: Any) -> dict[str, Any]:
    """The header with its bytes decoded; every field of it is what it should be."""
    expected = {*_COUNTS, "paths", "tail", "healed", "model_id"}
    if not isinstance(fields, dict) or set(fields) != expected:
        _refuse(f"its header must have the fields {sorted(expected)}")
    header = dict(fields)
    for name, (least, most, may_lack) in _COUNTS.items():
        value = header[name]
        if value is None and may_lack:
            continue
        if type(value) is not int or not least <= value <= most:
            _refuse(f"its header has {name} = {value!r:.80}, which should be an integer in {least} .. {most}")
    paths, model_id = header["paths"], header["model_id"]
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        _refuse("the paths in its header are not a list of texts")
    if len(set(paths)) < len(paths) or not 0 < len(paths) <= header["nodes"]:
        _refuse(f"its header has {len(paths)} paths, {len(set(paths))} distinct, for {header['nodes']} nodes")
    if not (model_id is None or isinstance(model_id, str)):
        _refuse("the model id in its header is no text")
    if header["leaves"] > header["names"] or header["depth"] >= header["nodes"]:
        _refuse("its header has more leaves than names, or paths longer than there are nodes")
    header["tail"] = None if header["tail"] is None else _bytes_of(header["tail"])
    header["healed"] = _bytes_of(header["healed"])
    return header


# Field -> least, most, and whether it may be null.
_COUNTS = {
    "nodes": (1, _MAX_NODES, False),
    "edges": (1, _MAX_COUNT, True),
    "collisions": (0, _MAX_COUNT, False),
    "name_bytes": (0, 2**63 - 1, True),
    "names": (1, _MAX_COUNT, False),
    "leaves": (1, _MAX_COUNT, False),
    "max_token": (0, _MAX_COUNT, False),
    "depth": (1, _MAX_NODES, False),
    "n_healed": (0, _MAX_COUNT, False),
}


def _bytes_of(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        _refuse("its header has something else where bytes are written in hexadecimal digits")
