"""Damaged and hostile payload JSON, through all that reads payloads without a model.

    python tests/test_payload_fuzz.py SEED N      N inputs; prints what became of them

Whether an input is a payload, which leaves its trie has and what its digest is are told by a second reading of it,
made of Python's own ``json`` and a few comparisons. All exceptions but the documented ones are errors, and so are more
than 10 seconds for an input and a cache that a refusal has changed. Each input depends on the seed and its own number
only: ``make_input(SEED, NUMBER)`` makes one again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import json
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import AWKWARD_TEXTS
from test_cache import TEXT, Vocabulary

from trie_sampler.cache import TrieCache
from trie_sampler.cursor import TrieCursor
from trie_sampler.errors import (
    EmptyTrieError,
    OffTrieError,
    PayloadError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
)
from trie_sampler.payload import PayloadLimits, TokenTreePayload
from trie_sampler.trie import TokenTrie

DOCUMENTED = (PayloadError, EmptyTrieError, UnknownPathError, VocabMismatchError)
SECONDS = 10
VOCABULARY = Vocabulary()
WIDEST = 2000
"""No row of logits is made for larger ids."""

Input = Any
Leaves = dict[str, dict[tuple[int, ...], str]]
"""Path -> tokens -> name."""

# --- documents ----------------------------------------------------------------------------------

NAMES = (*AWKWARD_TEXTS, "", "\0", "a\0b", "\x7f", "\ufeff", "\u2028", "\ufdd0", "\U0010ffff", "__proto__", "n" * 300)
PATHS = ("action", "a.kind", "contexts[]", "", "\0", "é", "e\u0301", "a" * 5000, "descriptors")
MODELS = ("m", "", "\0", "日本", "m" * 5000, "vocab-sha256:0123456789abcdef0123456789abcdef", "vocab-sha256:")
LIMITS = (-(2**31), -1, 0, 1, 255, 256, 257, 2**15, 2**16, 2**31 - 1)
KEYS = ("modelId", "descriptors", "path", "leaves", "name", "tokens")
ODD_KEYS = (*KEYS, "model_id", "Tokens", "token", "", "\0", "a b", "k" * 5000, "__class__", "\ud800")
ODD: tuple[Any, ...] = (
    *(None, True, False, *LIMITS, 2**31, -(2**31) - 1, 2**32, 2**63, 2**64, 10**40, 10**4299),
    *(1.0, 1.5, -0.0, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "\0", "\ud800", "\udc00\ud800", "x" * 100_000),
    *([], {}, [[]], [None], [True], [1], ["1"], {"name": "A", "tokens": [1]}, {"0": 1}),
)
# Written as they stand where a value belongs: what Python's json does not write, and what is no JSON.
RAW = (
    *("-0", "1e2", "1E400", "-1e-400", "9" * 4300, "-" + "9" * 4301, "9" * 50_000, "0." + "1" * 5000),
    *("01", "+1", ".5", "1.", "0x10", "1_000", "NaN", "-Infinity", "nul", "True", "undefined", "/**/1", "1,", ",1", ""),
    *(r'"\ud83d\ude42"', r'"\ud800"', r'"\udc00\ud800"', r'"\x41"', r'"\u00"', r'"\/"'),
    *('"a\nb"', "'a'", '"a', "\u00a0", "[[],", "[" * 100_000, '{"a":' * 100_000),
    *("[" * depth + "]" * depth for depth in (50, 190, 205, 2000)),
)
RAW_MARK = "\x01raw"
TEXTS: tuple[Input, ...] = (
    *("", " ", "null", "[]", "{}", "0", '"m"', "[" * 100_000, '{"a":' * 100_000, "[{}," * 30_000, "\ufeff" + TEXT),
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf" + TEXT.encode(), TEXT.encode("utf-16"), TEXT.encode("utf-32-le")),
    *(TEXT + "\0", "\0" + TEXT, TEXT + TEXT, TEXT + "x", TEXT[:-1], f"[{TEXT}]", json.dumps(TEXT)),
    TEXT + " " * 100_000,
)
NO_TEXTS: tuple[Any, ...] = (None, 3, 1.5, bytearray(b"{}"), memoryview(b"{}"), [], {"modelId": "m"}, Path("x"), object)


def make_leaf(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(NAMES)
    how = rng.random()
    if how < 0.5:
        tokens = [byte for byte in name.encode() if byte][:40] or [2]
    elif how < 0.9:
        tokens = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 5))]
    else:
        tokens = [rng.randrange(2, 300) for _ in range(rng.choice([0, 1, 3, 30]))]
    return {"name": name, "tokens": tokens}


def make_document(rng: random.Random) -> dict[str, Any]:
    descriptors = [
        {"path": path, "leaves": [make_leaf(rng) for _ in range(rng.choice([1, 2, 3, 5, 8]))]}
        for path in rng.sample(PATHS, rng.choice([1, 1, 1, 2, 3]))
    ]
    return {"modelId": rng.choice(MODELS), "descriptors": descriptors}


def stretch(rng: random.Random, document: dict[str, Any]) -> None:
    """Go to a limit; what comes out is a payload still, but for equal paths."""
    descriptor = rng.choice(document["descriptors"])
    leaves = descriptor["leaves"]
    leaf = rng.choice(leaves or [make_leaf(rng)])
    how = rng.randrange(13)
    if how == 0:
        leaves.append(copy.deepcopy(leaf))
    elif how == 1:
        leaves.append({"name": rng.choice(NAMES), "tokens": list(leaf["tokens"])})
    elif how == 2:
        leaves.append({"name": leaf["name"], "tokens": [*leaf["tokens"], 7]})
    elif how in {3, 4}:
        leaf["tokens"].insert(rng.randrange(len(leaf["tokens"]) + 1), rng.choice(LIMITS))
    elif how == 5:
        leaf["tokens"].clear()
    elif how == 6:
        leaf["name"] = rng.choice(["x", "é", "\U0001f642"]) * rng.choice([1000, 30_000])
    elif how == 7:
        leaves += [{"name": f"n{i}", "tokens": [3 + i % 7, 3 + i // 7]} for i in range(rng.choice([10, 200]))]
    elif how == 8:
        leaf["tokens"] += [5] * rng.choice([100, 600])
    elif how == 9:
        leaves.clear()
    elif how == 10 and rng.random() < 0.3:
        document["descriptors"].append({"path": descriptor["path"], "leaves": [make_leaf(rng)]})
    elif how == 11:
        document["descriptors"] += [{"path": f"p{i}", "leaves": [make_leaf(rng)]} for i in range(20)]
    else:
        key = rng.choice(["x", "score", "a b", "k" * 99])
        rng.choice([document, descriptor, leaf])[key] = rng.choice([1, [{}], ""])


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything inside."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places_in(value[key])


def damage(rng: random.Random, document: dict[str, Any]) -> None:
    """Something is of another type, missing, too much or elsewhere."""
    # Of a thousand tokens most are alike.
    places = list(places_in(document))[:500]
    if not places:
        return
    container, key = rng.choice(places)
    how = rng.randrange(7)
    if how == 0:
        del container[key]
    elif how == 1:
        container[key] = f"{RAW_MARK}{rng.randrange(len(RAW))}"
    elif how == 2:
        other, place = rng.choice(places)
        # Copies, so that nothing is moved into itself.
        container[key], other[place] = copy.deepcopy((other[place], container[key]))
    elif how == 3 and isinstance(container, list):
        container.insert(key, copy.deepcopy(rng.choice(ODD)))
    elif how == 4 and isinstance(container, dict):
        container[rng.choice(ODD_KEYS)] = container.pop(key)
    elif how == 5 and isinstance(container, dict):
        container[rng.choice(ODD_KEYS)] = copy.deepcopy(rng.choice(ODD))
    else:
        container[key] = copy.deepcopy(rng.choice(ODD))


# --- texts --------------------------------------------------------------------------------------


def write(rng: random.Random, document: dict[str, Any]) -> str:
    layout = rng.choice([{}, {}, {"indent": 1}, {"separators": (",", ":")}])
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5, **layout)
    return re.sub(rf'"\\u0001{RAW_MARK[1:]}(\d+)"', lambda match: RAW[int(match[1])], text)


def repeat_key(rng: random.Random, text: str) -> str:
    """A key, perhaps a second time in its object: before the others, where it changes nothing, or behind them."""
    value = rng.choice(["5", "NaN", "null", '"A"', "[]", "[1]", '{"a":1}', "9" * 30])
    member = f'"{rng.choice(KEYS)}":{value}'
    is_first = rng.random() < 0.7
    places = [match.end() if is_first else match.start() for match in re.finditer(r"\{" if is_first else r"\}", text)]
    if not places:
        return text
    place = rng.choice(places[:100])
    return text[:place] + (f"{member}," if is_first else f",{member}") + text[place:]


BYTES = (
    *(b"\0", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xef\xbb\xbf", b"\\ud800"),
    *(b"{", b"}", b"[", b"]", b",", b":", b"-", b".", b"e9", b"0", b" ", b'"', b"\\", b"\n", b"\\u0000", b"9" * 400),
)


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    content = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.choice([1, 1, 2, 9, 200]))
        how = rng.randrange(7)
        if how == 0 and stop > start:
            content[start] ^= 1 << rng.randrange(8)
        elif how == 1:
            del content[start:stop]
        elif how == 2:
            content[start:start] = content[start:stop]
        elif how == 3:
            content[start:stop] = rng.randbytes(stop - start)
        elif how == 4 and rng.random() < 0.3:
            del content[start:]
        elif how == 5:
            place = rng.randrange(len(content) + 1)
            content[place:place] = content[start:stop]
        else:
            content[start:start] = rng.choice(BYTES)
    return bytes(content)


def make_input(seed: int, number: int) -> Input:
    """``str`` or ``bytes``, rarely something else."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - the same inputs for a seed
    kind = rng.random()
    if kind < 0.01:
        return rng.choice(NO_TEXTS)
    if kind < 0.03:
        return rng.choice(TEXTS)
    document = make_document(rng)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        if document["descriptors"]:
            stretch(rng, document)
    if kind < 0.06:
        document["descriptors"].clear()
    if 0.4 < kind < 0.75:
        for _ in range(rng.choice([1, 1, 2, 3])):
            damage(rng, document)
    text = write(rng, document)
    if rng.random() < 0.15:
        text = repeat_key(rng, text)
    if kind > 0.7:
        raw = damage_bytes(rng, text.encode("utf-8", "surrogatepass"))
        # Latin-1 reads anything as text.
        return rng.choice([raw, raw, raw.decode("utf-8", "surrogateescape"), raw.decode("latin-1")])
    return rng.choice([text, text.encode("utf-8", "surrogatepass")])


# --- a second reading ---------------------------------------------------------------------------


class Doubt(Exception):
    """Readers of JSON may differ, or nobody promises anything."""


def read_json(text: str | bytes) -> Any:
    """The value, by Python's ``json``, in which of equal keys the last is looked at too.

    Raises:
        ValueError: no JSON in strict UTF-8.
        Doubt: too deep, or not a number under a key whose value is not looked at.
    """
    repeats: list[Any] = []
    constants: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            repeats.append(pairs)
        return members

    decoded = text if isinstance(text, str) else text.decode()
    decoded.encode()
    try:
        value = json.loads(decoded, object_pairs_hook=collect, parse_constant=constants.append)
    except RecursionError:
        raise Doubt from None
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", decoded):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    # Brackets inside strings count too, which only makes more inputs doubtful.
    if deepest > 150 or (constants and repeats):
        raise Doubt
    json.dumps([value, repeats], ensure_ascii=False).encode()  # no lone surrogates, which are no Unicode text
    if constants:
        raise ValueError("not a number")
    return value


def is_payload(value: Any) -> bool:
    def has(thing: Any, kinds: dict[str, type]) -> bool:
        return isinstance(thing, dict) and all(type(thing.get(key)) is kind for key, kind in kinds.items())

    return (
        has(value, {"modelId": str, "descriptors": list})
        and all(has(descriptor, {"path": str, "leaves": list}) for descriptor in value["descriptors"])
        and all(
            has(leaf, {"name": str, "tokens": list}) and all(type(token) is int for token in leaf["tokens"])
            for descriptor in value["descriptors"]
            for leaf in descriptor["leaves"]
        )
        and all(
            -(2**31) <= token < 2**31
            for descriptor in value["descriptors"]
            for leaf in descriptor["leaves"]
            for token in leaf["tokens"]
        )
        and len({descriptor["path"] for descriptor in value["descriptors"]}) == len(value["descriptors"])
    )


def digest_of(document: Any) -> str:
    descriptors = [
        {
            "path": descriptor["path"],
            "leaves": sorted(
                ({"name": leaf["name"], "tokens": leaf["tokens"]} for leaf in descriptor["leaves"]),
                key=lambda leaf: (leaf["name"], leaf["tokens"]),
            ),
        }
        for descriptor in sorted(document["descriptors"], key=lambda descriptor: descriptor["path"])
    ]
    canonical = {"modelId": document["modelId"], "descriptors": descriptors}
    return hashlib.sha256(json.dumps(canonical, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def leaves_of(document: Any, path: str | None, vocab: Vocabulary | None) -> Leaves | type[Exception]:
    """The leaves that the trie has to have, or the error that it has to be."""
    descriptors = [descriptor for descriptor in document["descriptors"] if path in {None, descriptor["path"]}]
    if not descriptors:
        return EmptyTrieError if path is None else UnknownPathError
    leaves: Leaves = {}
    for descriptor in descriptors:
        named = leaves[descriptor["path"]] = {}
        for leaf in descriptor["leaves"]:
            tokens = tuple(leaf["tokens"])
            if tokens:
                named[tokens] = min(leaf["name"], named.get(tokens, leaf["name"]))
        if not named:
            return EmptyTrieError
        # Ids are looked at descriptor by descriptor, before a later one turns out to be empty.
        if min(token for tokens in named for token in tokens) < 0:
            return VocabMismatchError
    ids = {token for named in leaves.values() for tokens in named for token in tokens}
    if vocab is not None and (max(ids) >= vocab.n_vocab or ids.intersection(vocab.eog_ids)):
        return VocabMismatchError
    return leaves


# --- asking -------------------------------------------------------------------------------------


def answer_of(ask: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """What is answered; the class of an exception that is documented."""
    try:
        return ask(*arguments, **settings)
    except DOCUMENTED as error:
        if isinstance(error, PayloadError):
            assert len(str(error)) < 2000  # noqa: PT017 - the message is bounded whatever the input
        return type(error)


def walk(rng: random.Random, trie: TokenTrie, leaves: Leaves) -> None:
    trie.validate()
    assert trie.paths == tuple(leaves)
    ref = [(name, tokens) for named in leaves.values() for tokens, name in named.items()]
    assert sorted(trie.leaves()) == sorted(ref)
    for path, named in list(leaves.items())[:3]:
        cursor = TrieCursor(trie, path=path)
        for tokens in rng.sample(list(named), min(2, len(named))):
            for token in tokens:
                allowed = cursor.allowed().tolist()
                assert token in allowed
                refuse_a_stranger(rng, cursor, allowed)
                cursor.accept(token)
            assert cursor.may_end
            assert cursor.leaf_name == named[tokens]
            assert cursor.must_end == (not any(len(t) > len(tokens) and t[: len(tokens)] == tokens for t in named))
            cursor.accept(-1)
            assert cursor.is_finished
            cursor.reset()
        if trie.max_token < WIDEST:
            row = np.random.default_rng(rng.getrandbits(32)).normal(size=WIDEST).astype(np.float32)
            for decide in (cursor.pick, cursor.sample):
                cursor.reset()
                picked: list[int] = []
                while (token := decide(row)) >= 0:
                    cursor.accept(token)
                    picked.append(token)
                assert cursor.leaf_name == named[tuple(picked)]


def refuse_a_stranger(rng: random.Random, cursor: TrieCursor, allowed: list[int]) -> None:
    token = rng.choice([0, -2, 2**31 - 1, 2**31, 10**40, allowed[0] + 1])
    if token in allowed:
        return
    before = cursor.node, cursor.position_in_span
    with pytest.raises(OffTrieError):
        cursor.accept(token)
    assert (cursor.node, cursor.position_in_span) == before


def go_round(rng: random.Random, payload: TokenTreePayload, document: Any) -> str:
    """Write and read again; returns the same payload in another order."""
    read = TokenTreePayload.from_json
    assert payload.digest() == digest_of(document)
    assert read(payload.to_json(canonical=False)) == payload
    assert read(payload.to_json().encode()).to_json() == payload.to_json()
    shuffled = json.loads(payload.to_json(canonical=False))
    rng.shuffle(shuffled["descriptors"])
    for descriptor in shuffled["descriptors"]:
        rng.shuffle(descriptor["leaves"])
    text = json.dumps(shuffled, ensure_ascii=rng.random() < 0.5)
    assert read(text).digest() == payload.digest()
    return text


def try_limits(rng: random.Random, text: str | bytes, document: Any) -> None:
    """Limits that are just kept, and one of them a little tighter."""
    leaves = [leaf for descriptor in document["descriptors"] for leaf in descriptor["leaves"]]
    names = [leaf["name"] for leaf in leaves] + [descriptor["path"] for descriptor in document["descriptors"]]
    limits = {
        "max_bytes": len(text.encode() if isinstance(text, str) else text),
        "max_descriptors": len(document["descriptors"]),
        "max_leaves": len(leaves),
        "max_tokens": max((len(leaf["tokens"]) for leaf in leaves), default=0),
        "max_name_length": max(map(len, names), default=0),
    }
    assert isinstance(TokenTreePayload.from_json(text, limits=PayloadLimits(**limits)), TokenTreePayload)
    name = rng.choice(list(limits))
    if limits[name]:
        tighter = PayloadLimits(**(limits | {name: limits[name] - 1}))
        assert answer_of(TokenTreePayload.from_json, text, limits=tighter) is PayloadError, name


def save_and_load(trie: TokenTrie) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.trie")
        trie.save(file)
        loaded = TokenTrie.load(file, mmap=False)
    assert loaded.paths == trie.paths
    assert list(loaded.leaves()) == list(trie.leaves())


def check_text(rng: random.Random, text: str | bytes) -> list[str]:
    """Send a text through every door; what it turned out to be."""
    kinds = []
    is_sure, document = True, None
    try:
        value = read_json(text)
        kinds.append("JSON")
        document = value if is_payload(value) else None
    except ValueError:
        pass
    except Doubt:
        is_sure = False
    payload = answer_of(TokenTreePayload.from_json, text)
    if not isinstance(payload, TokenTreePayload):
        assert payload is PayloadError
        assert document is None, "a payload was refused"
    elif is_sure:
        assert document is not None, "what is no payload was read"
    else:
        document = json.loads(payload.to_json(canonical=False))
    if document is not None:
        kinds.append("payload")
        reordered = go_round(rng, payload, document)
        try_limits(rng, text, document)

    paths = [descriptor["path"] for descriptor in document["descriptors"]] if document is not None else []
    path = rng.choice([None, None, *paths[:2], *(["nowhere"] if rng.random() < 0.2 else [])])
    vocab = rng.choice([None, VOCABULARY])
    ref = PayloadError if document is None else leaves_of(document, path, vocab)
    trie = answer_of(TokenTrie.from_payload, text, path, vocab=vocab)

    cache = TrieCache(max_entries=2)
    kept = cache.get(TEXT)
    before = cache.stats()
    cached = answer_of(cache.get, text, path, vocab=vocab)
    assert answer_of(cache.get, text, path, vocab=vocab) is cached, "no hit, or another refusal"
    if isinstance(ref, dict):
        kinds.append("trie")
        for one in (trie, cached):
            walk(rng, one, ref)
        assert cache.stats().hits > before.hits
        assert cache.get(reordered, path, vocab=vocab) is cached
        if rng.random() < 0.02:
            save_and_load(trie)
    else:
        kinds.append(ref.__name__)
        assert trie is cached is ref
        assert cache.stats()._replace(misses=before.misses) == before, "a refusal changed the cache"
    assert cache.get(TEXT) is kept
    # What is only doubtful is refused, or it is the same trie.
    strict = answer_of(cache.get, text, path, vocab=vocab, strict=True, model_id=rng.choice([None, "m"]))
    assert strict in [ref, VocabMismatchError] if isinstance(strict, type) else isinstance(ref, dict)
    return kinds


def check(rng: random.Random, given: Input) -> list[str]:
    """As ``check_text``; anything but text is a ``TypeError`` at every door."""
    if isinstance(given, (str, bytes)):
        return check_text(rng, given)
    cache = TrieCache(max_entries=2)
    for ask in (TokenTreePayload.from_json, TokenTrie.from_payload, cache.get):
        with pytest.raises(TypeError):
            ask(given)
    assert len(cache) == 0
    return ["TypeError"]


# --- running ------------------------------------------------------------------------------------


@contextlib.contextmanager
def alarms() -> Iterator[Callable[[float], object]]:
    """Sets a time after which a ``TimeoutError`` is raised, where the platform can; 0 for none."""
    if not hasattr(signal, "setitimer"):
        yield lambda seconds: None
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(seed: int, n_inputs: int) -> collections.Counter[str]:
    """Make inputs and check each; how many were what."""
    seen: collections.Counter[str] = collections.Counter()
    check_text(random.Random(seed), TEXT)  # noqa: S311 - kernels may have to be compiled
    with alarms() as set_alarm:
        for number in range(n_inputs):
            given = make_input(seed, number)
            rng = random.Random(f"{seed}/{number}/check")  # noqa: S311
            set_alarm(SECONDS)
            try:
                seen.update(check(rng, given))
            except Exception as error:
                shown = repr(given)
                shown = shown if len(shown) < 4000 else f"{shown[:2000]} ... {shown[-2000:]}"
                what = f"make_input({seed}, {number}): {type(error).__name__}: {error}"
                raise AssertionError(f"{what}\n{shown}") from error
            set_alarm(0)
    if n_inputs >= 1000:
        assert 2 * seen["JSON"] >= n_inputs, seen
        assert 10 * seen["payload"] >= n_inputs, seen
        assert {"trie", "TypeError", *(error.__name__ for error in DOCUMENTED)} <= set(seen), seen
    return seen


@pytest.mark.parametrize(("seed", "n_inputs"), [(1, 3000), pytest.param(2, 100_000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::trie_sampler.TrieSamplerWarning")
def test_damaged_payloads(seed: int, n_inputs: int) -> None:
    run(seed, n_inputs)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", TrieSamplerWarning)
    warnings.simplefilter("ignore", ResourceWarning)  # the host leaves files open
    start = time.perf_counter()
    for what, count in run(int(sys.argv[1]), int(sys.argv[2])).most_common():
        print(f"{count:7d} {what}")
    print(f"{time.perf_counter() - start:7.1f} s")
