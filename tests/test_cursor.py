"""The one state machine, at every node and in every mode: the table, then anything, against the oracle.

The trie of the table, prefixes in brackets; end tokens 0 (end of generation) and 9 (a separator):

    [] ─┬─ 3 [3] ─── 4 [3 4] "YES"
        └─ 5 [5] "A" ─── 6 [5 6] "AB"       [5] has ONE child and is NOT forced: a leaf ends there
"""

from __future__ import annotations

import copy
import enum
import json
import logging
import math
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    STOP,
    DictTrie,
    argmax_child,
    child_mass,
    decision_margin,
    end_mass,
    filtered_distribution,
    greedy_step,
    logsumexp,
    options,
    row_of,
    softmax,
    uniforms,
    walk,
    walk_distribution,
)
from scipy.stats import chisquare
from strategies import leaf_sets, logits_rows

from trie_sampler import layout
from trie_sampler.choice import Choice, walk_numbers
from trie_sampler.cursor import Sampling, Step, TrieCursor, as_mode
from trie_sampler.errors import OffTrieError, TrieSamplerError, TrieSamplerWarning, UnknownPathError
from trie_sampler.payload import TokenSequence, TokenTreeDescriptor, TokenTreePayload
from trie_sampler.trie import TokenTrie

Leaves = list[tuple[str, list[int]]]
Prefix = tuple[int, ...]

NAN, INF = math.nan, math.inf
END = layout.END

LEAVES: Leaves = [("AB", [5, 6]), ("YES", [3, 4]), ("A", [5])]
EOG, SEPARATOR = 0, 9
MODES = ("mass", "eog", "release")


def cursor_of(leaves: Leaves = LEAVES, **settings: Any) -> TrieCursor:
    """A cursor whose end tokens are EOG and, in every mode, the separator."""
    given_ends = {"eog_ids": [EOG], "stop_tokens": [SEPARATOR]}
    return TrieCursor(TokenTrie.from_sequences(leaves), **{**given_ends, **settings})


def two_descriptors() -> TokenTrie:
    """Roots "a" (children 1 and 2) and "b" (child 3)."""
    groups = {"a": [("A", (1,)), ("B", (2, 2))], "b": [("C", (3, 1))]}
    return TokenTrie.from_payload(
        TokenTreePayload(
            model_id="m",
            descriptors=tuple(
                TokenTreeDescriptor(
                    path=path, leaves=tuple(TokenSequence(name=name, tokens=tokens) for name, tokens in leaves)
                )
                for path, leaves in groups.items()
            ),
        )
    )


def state_of(cursor: TrieCursor) -> tuple[Any, ...]:
    """All that a caller can see of where a cursor stands."""
    return (
        repr(cursor),
        cursor.path,
        cursor.node,
        cursor.is_active,
        cursor.is_finished,
        cursor.may_end,
        cursor.must_end,
        cursor.position_in_span,
        cursor.forced_run().tolist(),
        int(cursor._record["n_accepted"][0]),
    )


def prefix_of(cursor: TrieCursor) -> Prefix:
    return cursor.trie.path_tokens(cursor.node)


def is_blank(logit: float) -> bool:
    """NaN or -inf: the model says nothing."""
    return not logit > -INF


# --- the table of the state machine -------------------------------------------------------------

# What a script's last step ends in. "off": OffTrieError; "logged": one warning in the log.
#
# script                     mode "mass" and "eog"                     mode "release"
# an int is accepted         state      prefix  in span accepts last   state      prefix  in span accepts last
TABLE: list[tuple[str, list[Any], tuple[Any, ...], tuple[Any, ...]]] = [
    # Two departures from the reference design, which says "inactive at first" and "inactive after reset" (its own
    # tests contradict it): ours is born armed, and reset arms.
    ("born armed", [],                        ("armed", (), 0, 0, ""),            ("armed", (), 0, 0, "")),
    ("reset arms", ["deactivate", "reset"],   ("armed", (), 0, 0, ""),            ("armed", (), 0, 0, "")),
    ("a child", [3],                          ("armed", (3,), 1, 1, ""),          ("armed", (3,), 1, 1, "")),
    ("a child that may end", [5],             ("armed", (5,), 1, 1, ""),          ("armed", (5,), 1, 1, "")),
    ("must end", [3, 4],                      ("armed", (3, 4), 2, 2, ""),        ("released", (3, 4), 2, 2, "")),
    ("must end, then end", [3, 4, 0],         ("finished", (3, 4), 2, 3, ""),     ("released", (3, 4), 2, 3, "")),
    ("must end, then more", [3, 4, 4],        ("armed", (3, 4), 2, 2, "off"),     ("released", (3, 4), 2, 3, "")),
    ("through an inner leaf", [5, 6],         ("armed", (5, 6), 2, 2, ""),        ("released", (5, 6), 2, 2, "")),
    ("a stop token at may_end", [5, 9],       ("finished", (5,), 1, 2, ""),       ("released", (5,), 1, 2, "")),
    ("-1 at may_end", [5, -1],                ("finished", (5,), 1, 2, ""),       ("released", (5,), 1, 2, "")),
    # eog_ids are end tokens unless on_end="release", which knows the given stop tokens only.
    ("an EOG id at may_end", [5, 0],          ("finished", (5,), 1, 2, ""),       ("released", (5,), 1, 2, "logged")),
    ("off at the root", [7],                  ("armed", (), 0, 0, "off"),         ("released", (), 0, 1, "logged")),
    ("off: a grandchild", [4],                ("armed", (), 0, 0, "off"),         ("released", (), 0, 1, "logged")),
    ("off in the middle", [3, 6],             ("armed", (3,), 1, 1, "off"),       ("released", (3,), 1, 2, "logged")),
    ("off at may_end", [5, 3],                ("armed", (5,), 1, 1, "off"),       ("released", (5,), 1, 2, "logged")),
    ("an end token too early", [9],           ("armed", (), 0, 0, "off"),         ("released", (), 0, 1, "logged")),
    ("EOG too early", [3, 0],                 ("armed", (3,), 1, 1, "off"),       ("released", (3,), 1, 2, "logged")),
    ("-1 too early", [3, -1],                 ("armed", (3,), 1, 1, "off"),       ("released", (3,), 1, 2, "logged")),
    ("another negative id", [5, -2],          ("armed", (5,), 1, 1, "off"),       ("released", (5,), 1, 2, "logged")),
    ("past int32", [2**31],                   ("armed", (), 0, 0, "off"),         ("released", (), 0, 1, "logged")),
    ("wraps to a child", [2**32 + 5],         ("armed", (), 0, 0, "off"),         ("released", (), 0, 1, "logged")),
    ("finished: counts", [5, 9, 6, 3, 0],     ("finished", (5,), 1, 5, ""),       ("released", (5,), 1, 5, "")),
    ("released: counts", ["deactivate", 3, 4], ("released", None, 0, 2, ""),      ("released", None, 0, 2, "")),
    ("released: any id", ["deactivate", -9],  ("released", None, 0, 1, ""),       ("released", None, 0, 1, "")),
    ("reset from the middle", [3, "reset"],   ("armed", (), 0, 0, ""),            ("armed", (), 0, 0, "")),
    ("reset when over", [5, 9, 9, "reset"],   ("armed", (), 0, 0, ""),            ("armed", (), 0, 0, "")),
    ("activate restarts", [3, "activate"],    ("armed", (), 0, 0, ""),            ("armed", (), 0, 0, "")),
    ("activate, then walk", ["deactivate", 3, "activate", 5],
                                              ("armed", (5,), 1, 1, ""),          ("armed", (5,), 1, 1, "")),
    ("deactivate in the middle", [3, "deactivate"], ("released", None, 0, 0, ""), ("released", None, 0, 0, "")),
    ("reset and again", [3, 4, "reset", 5],   ("armed", (5,), 1, 1, ""),          ("armed", (5,), 1, 1, "")),
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("script", "tracking", "releasing"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_state_table(
    script: list[Any],
    tracking: tuple[Any, ...],
    releasing: tuple[Any, ...],
    mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, prefix, in_span, n_accepted, last = releasing if mode == "release" else tracking
    cursor = cursor_of(on_end=mode)
    *before, final = [*script] or [None]
    for step in before:
        take(cursor, step)
    assert not caplog.records
    if last == "off":
        seen = state_of(cursor)
        with pytest.raises(OffTrieError, match=rf"token {final} is not allowed here"):
            take(cursor, final)
        assert state_of(cursor) == seen
    else:
        take(cursor, final)
    ref_log = [("trie_sampler.cursor", logging.WARNING, f"token {final} is not in the trie here; released")]
    assert caplog.record_tuples == (ref_log if last == "logged" else [])
    assert (cursor.is_active, cursor.is_finished) == (state == "armed", state == "finished")
    assert repr(cursor).startswith(f"TrieCursor({state}, path=''")
    assert cursor.position_in_span == in_span
    assert cursor._record["n_accepted"][0] == n_accepted
    if prefix is None:
        assert (cursor.node, cursor.leaf_name) == (-1, None)
    else:
        assert prefix_of(cursor) == prefix
        assert cursor.leaf_name == {(5,): "A", (5, 6): "AB", (3, 4): "YES"}.get(prefix)
    assert cursor.may_end is (state == "armed" and prefix in {(5,), (5, 6), (3, 4)})
    assert cursor.must_end is (state == "armed" and prefix in {(5, 6), (3, 4)})


def take(cursor: TrieCursor, step: Any) -> None:
    if isinstance(step, str):
        getattr(cursor, step)()
    elif step is not None:
        cursor.accept(step)


def test_a_refused_token_does_not_spoil_the_walk() -> None:
    cursor = cursor_of()
    cursor.accept(3)
    for wrong in (5, 0, 3):
        with pytest.raises(OffTrieError):
            cursor.accept(wrong)
    cursor.accept(4)
    assert cursor.leaf_name == "YES"


def test_the_refusal_lists_what_is_allowed() -> None:
    with pytest.raises(OffTrieError, match=re.escape("token 6 is not allowed here; allowed are [3, 5]")) as caught:
        cursor_of().accept(6)
    assert "more" not in str(caught.value)
    wide = cursor_of([(str(i), [i]) for i in range(10, 30)])
    with pytest.raises(OffTrieError, match=r"\[10, 11, 12, 13, 14, 15, 16, 17\] and 12 more"):
        wide.accept(6)


@pytest.mark.parametrize("token", [5.9, 5.0, "5", None, b"5", [5]], ids=repr)
def test_accept_takes_whole_numbers_only(token: Any) -> None:
    """5.9 cut to the child 5 would be a walk that nobody made."""
    cursor = cursor_of()
    seen = state_of(cursor)
    with pytest.raises(TypeError):
        cursor.accept(token)
    assert state_of(cursor) == seen


@pytest.mark.parametrize("token", [2**63, 2**64 + 5, -(2**63) - 1])
def test_accept_of_an_integer_past_64_bits_is_off_the_trie(token: int) -> None:
    cursor = cursor_of()
    seen = state_of(cursor)
    with pytest.raises(OffTrieError):
        cursor.accept(token)
    assert state_of(cursor) == seen


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, int])
def test_accept_takes_numpy_integers(kind: Callable[[int], Any]) -> None:
    cursor = cursor_of()
    cursor.accept(kind(5))
    assert prefix_of(cursor) == (5,)


def test_may_end_must_end_and_forced_are_three_things() -> None:
    cursor = cursor_of([("..1", [7, 1]), ("..11", [7, 1, 1])])
    #                    may_end must_end forced run
    ref = [(False, False, [7, 1]), (False, False, [1]), (True, False, []), (True, True, [])]
    comp = []
    for token in (None, 7, 1, 1):
        take(cursor, token)
        comp.append((cursor.may_end, cursor.must_end, cursor.forced_run().tolist()))
    assert comp == ref
    with pytest.raises(OffTrieError):
        cursor.accept(1)


def test_a_shared_quote_is_not_forced_before_its_leaf() -> None:
    """ "author" = 40 41 and "title" = 50 41: the root branches, and the quote alone (8) is no child."""
    cursor = cursor_of([("author", [40, 41]), ("title", [50, 41])])
    assert cursor.allowed().tolist() == [40, 50]
    assert cursor.forced_run().tolist() == []
    cursor.accept(50)
    assert cursor.forced_run().tolist() == [41]


def test_a_finished_span_takes_end_tokens_without_an_exception() -> None:
    """A mask that allows EOS and an accept that then refuses it lost every completed choice elsewhere."""
    cursor = cursor_of()
    cursor.accept(5)
    for _ in range(3):
        assert cursor.allowed().tolist() == ([0, 6, 9] if not cursor.is_finished else [0, 9])
        cursor.accept(EOG)
        assert cursor.is_finished
    assert cursor.pick(np.zeros(10, np.float32)) == EOG


# --- what is allowed ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_allowed_released_is_an_error_and_no_empty_list(mode: str) -> None:
    """An empty list would be read as "no constraint", or as "nothing may follow"."""
    cursor = cursor_of(on_end=mode)
    cursor.deactivate()
    with pytest.raises(TrieSamplerError, match="released: every token is allowed"):
        cursor.allowed()


def test_allowed_is_a_copy() -> None:
    cursor = cursor_of()
    cursor.allowed()[:] = 7
    cursor.end_tokens[:] = 7
    assert cursor.allowed().tolist() == [3, 5]
    assert cursor.end_tokens.tolist() == [0, 9]
    cursor.accept(5)
    cursor.accept(0)
    cursor.allowed()[:] = 7
    assert cursor.allowed().tolist() == [0, 9]


#  on_end     eog_ids     stop_tokens  end tokens
END_TOKENS = [
    ("mass",    [1, 0],     [],          [0, 1]),
    ("mass",    [1],        [9, 1],      [1, 9]),
    ("eog",     (7,),       iter([2]),   [2, 7]),
    ("release", [1, 0],     [9],         [9]),
    ("release", [1, 0],     [],          []),
    ("mass",    [],         [],          []),
    ("eog",     [2**31 - 1], [],         [2**31 - 1]),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "eog_ids", "stop_tokens", "ref"), END_TOKENS)
def test_end_tokens(mode: str, eog_ids: Any, stop_tokens: Any, ref: list[int]) -> None:
    assert cursor_of(on_end=mode, eog_ids=eog_ids, stop_tokens=stop_tokens).end_tokens.tolist() == ref


@pytest.mark.parametrize(
    ("settings", "ref"),
    [
        ({"on_end": "eos"}, r"on_end must be one of \['mass', 'eog', 'release'\], got 'eos'"),
        ({"on_end": None}, "on_end must be one of"),
        ({"on_fault": "ignore"}, "on_fault must be"),
        ({"eog_ids": [-1]}, r"end tokens must be ids >= 0, got \[-1, 9\]"),
        ({"stop_tokens": [2**31]}, "end tokens must be ids >= 0"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], ref: str) -> None:
    with pytest.raises(ValueError, match=ref):
        cursor_of(**settings)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        cursor_of(max_tokens=5)


@pytest.mark.parametrize(("mode", "ref"), [("greedy", "greedy"), ("sampled", "sampled"), (0, "greedy"), (1, "sampled")])
def test_modes_have_the_reference_s_numbers_too(mode: Any, ref: str) -> None:
    assert as_mode(mode) == ref


@pytest.mark.parametrize("mode", [2, -1, True, False, None, "mask", "Greedy", ""])
def test_another_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match=rf'mode must be "greedy", "sampled", 0 or 1, got {mode!r}'):
        as_mode(mode)


# --- several descriptors ------------------------------------------------------------------------


def test_several_descriptors_are_born_released() -> None:
    cursor = TrieCursor(two_descriptors())
    assert (cursor.is_active, cursor.is_finished, cursor.path, cursor.node) == (False, False, None, -1)
    assert (cursor.may_end, cursor.must_end, cursor.leaf_name) == (False, False, None)
    assert cursor.forced_run().tolist() == []
    cursor.accept(31)
    cursor.activate("b")
    assert (cursor.is_active, cursor.path, cursor.allowed().tolist()) == (True, "b", [3])
    cursor.accept(3)
    assert (cursor.position_in_span, cursor._record["n_accepted"][0]) == (1, 1)
    cursor.activate("a")
    assert (cursor.path, cursor.allowed().tolist(), cursor.position_in_span) == ("a", [1, 2], 0)
    cursor.reset()
    assert (cursor.is_active, cursor.path, cursor.node) == (False, None, -1)


def test_several_descriptors_and_a_path_are_born_armed() -> None:
    cursor = TrieCursor(two_descriptors(), path="b")
    assert (cursor.is_active, cursor.path, cursor.allowed().tolist()) == (True, "b", [3])
    cursor.activate("a")
    cursor.deactivate()
    assert (cursor.is_active, cursor.path) == (False, "a")
    cursor.reset()  # as at birth, not as last activated
    assert (cursor.is_active, cursor.path, cursor.allowed().tolist()) == (True, "b", [3])


def test_an_unknown_path_is_refused_and_changes_nothing() -> None:
    trie = two_descriptors()
    ref = r"there is no descriptor 'nope'; the paths are 'a', 'b'"
    with pytest.raises(UnknownPathError, match=ref):
        TrieCursor(trie, path="nope")
    cursor = TrieCursor(trie, path="b")
    cursor.accept(3)
    seen = state_of(cursor)
    with pytest.raises(UnknownPathError, match=ref):
        cursor.activate("nope")
    with pytest.raises(UnknownPathError, match=r"say which path to activate: \['a', 'b'\]"):
        cursor.activate()
    assert state_of(cursor) == seen


def test_one_descriptor_needs_no_path() -> None:
    payload = {"modelId": "m", "descriptors": [{"path": "p", "leaves": [{"name": "A", "tokens": [1]}]}]}
    cursor = TrieCursor(TokenTrie.from_payload(json.dumps(payload)))
    assert (cursor.is_active, cursor.path) == (True, "p")
    cursor.deactivate()
    cursor.activate()
    assert (cursor.is_active, cursor.path) == (True, "p")
    assert TrieCursor(cursor.trie, path="p").path == "p"
    with pytest.raises(UnknownPathError):
        TrieCursor(cursor.trie, path="")


# --- the safety net -----------------------------------------------------------------------------


def cyclic_trie(depth: int) -> TokenTrie:
    """A damaged trie: the root, entered by 5, is its own child, so that a walk never ends."""
    arrays = [np.array(array, np.int32) for array in ([5], [0, 1], [-1])]
    return TokenTrie._from_arrays(*arrays, depth, None, {"": 0}, 100, None, np.empty((2, 0), np.int32))


#   given  depth  accepts at which the span is closed
LIMITS = [
    (4,     2,    4),
    (4,     9,    10),
    (500,   1,    500),
]  # fmt: skip


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_of_no_tokens_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="max_span_tokens must be at least 1"):
        TrieCursor(cyclic_trie(1), max_span_tokens=limit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("limit", "depth", "ref"), LIMITS)
def test_a_walk_that_outlasts_every_leaf_is_closed(
    limit: int, depth: int, ref: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    cursor = TrieCursor(cyclic_trie(depth), on_end=mode, max_span_tokens=limit)
    for _ in range(ref - 1):
        cursor.accept(5)
    assert cursor.is_active
    assert not caplog.records
    cursor.accept(5)
    assert (cursor.is_active, cursor.is_finished) == (False, mode != "release")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("trie_sampler.cursor", logging.WARNING)
    assert "max_span_tokens" in record.getMessage()
    cursor.accept(5)  # counted only
    assert cursor._record["n_accepted"][0] == ref + 1
    assert cursor.position_in_span == ref
    assert len(caplog.records) == 1


def test_the_default_limit_is_500() -> None:
    assert TrieCursor(cyclic_trie(1))._record["max_span_tokens"][0] == 500


@pytest.mark.parametrize("mode", MODES)
def test_the_net_never_fires_inside_a_leaf(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = list(range(2, 9))
    cursor = cursor_of([("long", tokens)], on_end=mode, max_span_tokens=1)
    for token in tokens:
        cursor.accept(token)
    assert cursor.leaf_name == "long"
    assert cursor.must_end is (mode != "release")
    cursor.accept(SEPARATOR)
    assert not caplog.records


def test_a_reset_counts_from_zero_again() -> None:
    cursor = TrieCursor(cyclic_trie(1), max_span_tokens=3)
    for _ in range(4):
        cursor.accept(5)
        cursor.accept(5)
        cursor.activate()
    assert cursor.is_active


def test_a_forced_run_through_a_cycle_ends() -> None:
    assert TrieCursor(cyclic_trie(7)).forced_run().tolist() == [5] * 7


# --- copies -------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[TrieCursor], TrieCursor]] = {
    "clone": TrieCursor.clone,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cursor: pickle.loads(pickle.dumps(cursor)),  # noqa: S301 - our own bytes
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("script", [[], [5], [5, 9], [3, 4], ["deactivate", 1]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_copy_stands_at_the_same_place_and_walks_on_its_own(
    copied: Callable[[TrieCursor], TrieCursor], script: list[Any], mode: str
) -> None:
    cursor = cursor_of(on_end=mode, sampling=Sampling(seed=3), on_fault="raise", max_span_tokens=77)
    for step in script:
        take(cursor, step)
    twin = copied(cursor)
    assert state_of(twin) == state_of(cursor)
    assert twin.end_tokens.tolist() == cursor.end_tokens.tolist()
    for name in ("on_end", "max_span_tokens", "birth_root", "temperature", "random_0", "random_3"):
        assert twin._record[name] == cursor._record[name]
    seen = state_of(cursor)
    twin.reset()
    twin.accept(3)
    assert state_of(cursor) == seen
    twin_seen = state_of(twin)
    cursor.reset()
    cursor.accept(5)
    assert state_of(twin) == twin_seen
    twin.reset()
    with pytest.raises(TrieSamplerError, match="NaN or -inf"):
        twin.pick(np.full(10, NAN, np.float32))


@pytest.mark.parametrize("name", ["clone", "copy", "deepcopy"])
def test_a_copy_shares_the_trie(name: str) -> None:
    cursor = cursor_of()
    assert COPIES[name](cursor).trie is cursor.trie


def test_a_copy_outlives_what_it_was_made_of() -> None:
    """The record holds addresses; the copy's must be those of arrays that it keeps alive itself."""
    cursor = cursor_of()
    twin = pickle.loads(pickle.dumps(cursor))  # noqa: S301
    # Both are alive here, so that equal addresses cannot be memory used again.
    assert twin.trie.token.ctypes.data != cursor.trie.token.ctypes.data
    assert twin._record["token_address"][0] == twin.trie.token.ctypes.data
    assert twin._record["end_address"][0] == twin._ends.ctypes.data
    assert twin._record["first_child_address"][0] == twin.trie.first_child.ctypes.data
    assert twin._record["leaf_address"][0] == twin.trie.leaf.ctypes.data
    assert twin._address == twin._record.ctypes.data
    twin.accept(5)
    assert twin.allowed().tolist() == [0, 6, 9]


def test_a_copy_goes_on_with_the_same_draws() -> None:
    cursor = cursor_of(sampling=Sampling(seed=3))
    row = np.zeros(10, np.float32)
    _ = [cursor.sample(row) for _ in range(5)]
    twin = cursor.clone()
    assert [twin.sample(row) for _ in range(30)] == [cursor.sample(row) for _ in range(30)]


# --- the language -------------------------------------------------------------------------------


@given(leaf_sets(max_token=7), st.sampled_from(["mass", "eog"]), st.sets(st.sampled_from([3, 8, 9]), max_size=2))
def test_the_cursor_accepts_the_payload_and_nothing_else(leaves: Leaves, mode: str, ends: set[int]) -> None:
    """Every prefix is walked, every token of the alphabet tried there; ends may be tokens of the trie too."""
    ref = DictTrie(leaves)
    payload = TokenTreePayload(
        model_id="m",
        descriptors=(
            TokenTreeDescriptor(
                path="p", leaves=tuple(TokenSequence(name=name, tokens=tuple(tokens)) for name, tokens in leaves)
            ),
        ),
    )
    start = TrieCursor(TokenTrie.from_payload(payload.to_json()), on_end=mode, eog_ids=ends)
    language: set[Prefix] = set()
    n_prefixes = 0
    todo: list[tuple[Prefix, TrieCursor]] = [((), start)]
    while todo:
        prefix, cursor = todo.pop()
        n_prefixes += 1
        children, terminal = ref.children(prefix), ref.is_terminal(prefix)
        allowed = sorted({*children, *(ends if terminal else ())})
        assert cursor.allowed().tolist() == allowed
        assert (cursor.may_end, cursor.must_end) == (terminal, ref.must_end(prefix))
        assert cursor.leaf_name == ref.name(prefix)
        seen = state_of(cursor)
        for token in (-2, END, *range(11), 2**31 - 1):
            if token in children:
                twin = cursor.clone()
                twin.accept(token)
                todo.append(((*prefix, token), twin))
            elif terminal and (token in ends or token == END):
                twin = cursor.clone()
                twin.accept(token)
                assert twin.is_finished
                assert twin.leaf_name == ref.name(prefix)
                language.add(prefix)
            else:
                with pytest.raises(OffTrieError):
                    cursor.accept(token)
                assert state_of(cursor) == seen
        assert state_of(cursor) == seen
    assert n_prefixes == ref.n_nodes
    assert language == ref.language() == {tuple(tokens) for _, tokens in leaves}


@given(leaf_sets(max_token=3))
def test_forced_runs_equal_the_oracle(leaves: Leaves) -> None:
    trie, ref = TokenTrie.from_sequences(leaves), DictTrie(leaves)
    for prefix in ref.prefixes():
        cursor = TrieCursor(trie)
        for token in prefix:
            cursor.accept(token)
        seen = state_of(cursor)
        run: Prefix = ()
        while ref.is_forced(prefix + run):
            run = (*run, *ref.children(prefix + run))
        assert cursor.forced_run().tolist() == list(run)
        assert cursor.forced_run().dtype == np.int32
        assert state_of(cursor) == seen
        if ref.is_terminal(prefix):
            cursor.accept(END)
            assert cursor.forced_run().tolist() == []


# --- picking ------------------------------------------------------------------------------------


def as_given(row: np.ndarray, form: str) -> np.ndarray:
    """The same logits as another kind of array; what lies between them would win."""
    if form == "float32":
        return row.copy()
    if form == "float64":
        return row.astype(np.float64)
    buffer = np.full(2 * len(row), 3e38, row.dtype)
    if form == "strided":
        buffer[::2] = row
        return buffer[::2]
    buffer[::-2] = row
    return buffer[::-2]


FORMS = ("float32", "float64", "strided", "reversed")


Place = tuple[Leaves, Prefix, np.ndarray, str, set[int]]


@st.composite
def places(draw: st.DrawFn, *, huge: bool = True) -> Place:
    """Leaves over 2..13, a node, a row at least as wide as needed, a mode, end tokens beside the leaves'."""
    leaves = [(name, [token + 2 for token in tokens]) for name, tokens in draw(leaf_sets(max_token=11))]
    prefix = draw(st.sampled_from(DictTrie(leaves).prefixes()))
    ends = draw(st.sets(st.sampled_from([0, 1, 14, 15]), max_size=3))
    width = draw(st.integers(16, 20))
    return leaves, prefix, draw(logits_rows(width, huge=huge)), draw(st.sampled_from(MODES)), ends


def cursor_at(leaves: Leaves, prefix: Prefix, mode: str, ends: Collection[int], **settings: Any) -> TrieCursor:
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), on_end=mode, stop_tokens=ends, **settings)
    for token in prefix:
        cursor.accept(token)
    return cursor


def is_fault(row: np.ndarray, children: Collection[int], terminal: bool, mode: str, ends: Collection[int]) -> bool:
    """Whether no option has a logit: then nothing the model says decides."""
    if not children:
        return False
    if not terminal:
        return all(is_blank(row[child]) for child in children)
    if mode == "mass":
        return all(is_blank(logit) for logit in row)
    return all(is_blank(row[token]) for token in {*children, *ends})


def ref_end(row: np.ndarray, ends: Collection[int]) -> int:
    """The end token that says a stop: the likeliest, ties and blanks the lowest, -1 where there is none."""
    return argmax_child(row, ends) if ends else END


@given(places(), st.sampled_from(FORMS))
def test_pick_equals_the_oracle(place: Place, form: str) -> None:
    leaves, prefix, row, mode, ends = place
    tree = DictTrie(leaves)
    children, terminal = tree.children(prefix), tree.is_terminal(prefix)
    cursor = cursor_at(leaves, prefix, mode, ends)
    seen = state_of(cursor)
    given_row = as_given(row, form)
    before = given_row.tobytes()
    fault = is_fault(row, children, terminal, mode, ends)
    if mode == "release" and not children:
        ref = {argmax_child(row, range(len(row)))}
    elif fault and mode == "mass":
        # The oracle calls an all-blank row at a leaf a stop (end mass 1); the library takes the lowest child and
        # says so: a model that says nothing has not said that the choice is over.
        ref = {min(children)}
    elif mode == "mass" and terminal and 0 < decision_margin(row, children, terminal) < 1e-6:
        ref = {*children, ref_end(row, ends)}  # too close for float32 against float64
    else:
        step = greedy_step(row, children, terminal, mode, ends)
        # As a token among tokens, a stop is the very end token that won.
        ref = {ref_end(row, ends) if step == STOP else step}
    if fault:
        with pytest.warns(TrieSamplerWarning, match="every valid logit is NaN or -inf"):
            comp = cursor.pick(given_row)
    else:
        comp = cursor.pick(given_row)
    assert comp in ref
    assert given_row.tobytes() == before
    assert state_of(cursor) == seen


#                             what                          row of 10, by id                 pick
PICKS: list[tuple[str, str, Prefix, dict[int, float], int]] = [
    ("the best child, not the best token", "mass", (), {3: 1.0, 5: 2.0, 0: 9.0, 7: 9.0}, 5),
    ("a tie goes to the lowest id",        "mass", (), {3: 2.0, 5: 2.0, 0: 9.0}, 3),
    ("NaN is no logit",                    "mass", (), {3: NAN, 5: -50.0, 0: NAN}, 5),
    ("-inf is no logit",                   "mass", (), {3: -INF, 5: -3e38, 0: 1.0}, 5),
    ("a forced token, however unlikely",   "mass", (3,), {4: -3e38, 0: 9.0}, 4),
    ("must end: the better end token",     "mass", (3, 4), {0: 1.0, 9: 2.0, 4: 5.0}, 9),
    ("must end: a tie",                    "eog", (3, 4), {0: 2.0, 9: 2.0, 4: 5.0}, 0),
    ("must end: blank end tokens",         "mass", (3, 4), {0: NAN, 9: -INF, 4: 5.0}, 0),
    # At (5): child 6, or stop.
    ("mass: all else outweighs it",        "mass", (5,), {6: 1.0, 0: 0.5, 1: 0.5, 2: 0.5}, 0),
    ("mass: it outweighs all else",        "mass", (5,), {6: 9.0, 0: 0.5, 1: 0.5, 2: 0.5}, 6),
    ("mass: equal, the stop wins",         "mass", (5,), {6: 1.0, 7: 1.0}, 0),
    ("mass: a blank child",                "mass", (5,), {6: NAN, 7: -9.0}, 0),
    ("mass: the better end token says it", "mass", (5,), {6: 1.0, 7: 5.0, 0: -5.0, 9: -4.0}, 9),
    ("eog: foreign mass is nothing",       "eog", (5,), {6: 1.0, 0: 0.5, 7: 9.0, 9: 0.9}, 6),
    ("eog: an end token above it",         "eog", (5,), {6: 1.0, 0: 1.5, 7: 9.0, 9: 1.4}, 0),
    ("eog: a tie goes to the lower id, 0", "eog", (5,), {6: 1.0, 0: 1.0}, 0),
    ("eog: a tie goes to the lower id, 6", "eog", (5,), {6: 1.0, 9: 1.0}, 6),
    ("eog: a blank child",                 "eog", (5,), {6: -INF, 9: -50.0, 7: 9.0}, 9),
    ("eog: blank end tokens",              "eog", (5,), {6: -50.0, 9: NAN, 7: 9.0}, 6),
    ("release: stop tokens only",          "release", (5,), {6: 1.0, 0: 9.0, 9: 0.5}, 6),
    ("release: a stop token above it",     "release", (5,), {6: 1.0, 0: 9.0, 9: 1.5}, 9),
    ("release: over, so anything",         "release", (5, 6), {7: 1.0, 3: 0.5}, 7),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "prefix", "logits", "ref"), [p[1:] for p in PICKS], ids=[p[0] for p in PICKS])
@pytest.mark.parametrize("form", FORMS)
def test_picks(mode: str, prefix: Prefix, logits: dict[int, float], ref: int, form: str) -> None:
    row = np.full(10, -INF, np.float32)
    row[list(logits)] = list(logits.values())
    cursor = cursor_of(on_end=mode)
    for token in prefix:
        cursor.accept(token)
    assert cursor.pick(as_given(row, form)) == ref


def test_eog_needs_no_end_tokens() -> None:
    """Without any, a leaf that begins another cannot be said to be over: the child it is."""
    for mode in ("eog", "release"):
        cursor = cursor_at(LEAVES, (5,), mode, ())
        assert cursor.pick(np.zeros(7, np.float32)) == 6
    cursor = cursor_at(LEAVES, (5,), "mass", ())
    assert cursor.pick(np.zeros(7, np.float32)) == END
    assert cursor_at(LEAVES, (5, 6), "mass", ()).pick(np.zeros(7, np.float32)) == END


def test_one_choice_begins_another_greedily() -> None:
    """p(6) = .4, p(EOG) = .001, the rest foreign: the end mass .6 says A; weighing EOG alone says AB."""
    row = row_of({6: 0.4, EOG: 0.001}, 10, rest=2).astype(np.float32)
    for mode, ref in (("mass", EOG), ("eog", 6)):
        cursor = cursor_of(on_end=mode, stop_tokens=())
        cursor.accept(5)
        assert cursor.pick(row) == ref
        assert end_mass(row, [6]) == pytest.approx(0.6)


def test_a_greedy_walk_equals_the_oracle_walk() -> None:
    rng = np.random.default_rng(5)
    leaves = [(str(i), rng.integers(2, 8, rng.integers(1, 5)).tolist()) for i in range(40)]
    tree, trie = DictTrie(leaves), TokenTrie.from_sequences(leaves)
    names = set()
    for _ in range(50):
        rows = {prefix: rng.normal(size=9).astype(np.float32) * 3 for prefix in tree.prefixes()}
        for mode in ("mass", "eog"):
            cursor = TrieCursor(trie, on_end=mode, eog_ids=[0])
            while not cursor.is_finished:
                cursor.accept(cursor.pick(rows[prefix_of(cursor)]))
            assert (prefix_of(cursor), cursor.leaf_name) == walk(tree, rows, mode, [0])
            names.add(cursor.leaf_name)
    assert len(names) > 10


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [7, 8, 50432])
def test_any_row_as_wide_as_the_largest_id(width: int, dtype: type) -> None:
    row = np.zeros(width, dtype)
    row[-1] = 9.0
    cursor = cursor_of([("A", [5]), ("B", [6])], eog_ids=[], stop_tokens=[])
    row[6] = 5.0
    assert cursor.pick(row) == 6
    cursor.mask(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [5, 6]


# --- faults -------------------------------------------------------------------------------------

#    mode       prefix  blank ids                     lowest valid id
FAULTS = [
    ("mass",    (),     [3, 5],                       3),
    ("eog",     (),     [3, 5],                       3),
    ("release", (),     [3, 5],                       3),
    ("mass",    (3,),   [4],                          4),
    ("mass",    (5,),   range(10),                    6),
    ("eog",     (5,),   [6, 0, 9],                    0),
    ("release", (5,),   [6, 9],                       6),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "prefix", "blank", "ref"), FAULTS)
@pytest.mark.parametrize("value", [NAN, -INF])
@pytest.mark.parametrize("ask", ["pick", "sample", "constrain"])
def test_no_valid_logit(mode: str, prefix: Prefix, blank: Any, ref: int, value: float, ask: str) -> None:
    """Never the foreign token, however likely: the lowest valid id, and one warning that says so."""
    row = np.full(10, 5.0, np.float32)
    row[list(blank)] = value
    cursor = cursor_of(on_end=mode)
    for token in prefix:
        cursor.accept(token)

    def asked() -> int:
        given_row = row.copy()
        if ask != "constrain":
            return int(getattr(cursor, ask)(given_row))
        step = cursor.constrain(given_row, samples=False)
        assert np.flatnonzero(np.isfinite(given_row)).tolist() == [step.token]
        assert given_row[step.token] == 0
        assert math.isfinite(step.logprob)
        return step.token

    with pytest.warns(TrieSamplerWarning, match="every valid logit is NaN or -inf") as caught:
        assert asked() == ref
    assert (len(caught), caught[0].filename) == (1, __file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert asked() == ref
    # A clone has warned already; a good row is picked from as if nothing had been.
    assert cursor.clone().pick(row) == ref
    assert cursor.pick(np.arange(10, dtype=np.float32)) in cursor.allowed()


@pytest.mark.parametrize("ask", ["pick", "sample"])
def test_no_valid_logit_may_be_an_error(ask: str) -> None:
    cursor = cursor_of(on_fault="raise")
    seen = state_of(cursor)
    for _ in range(2):
        with pytest.raises(TrieSamplerError, match="every valid logit is NaN or -inf"):
            getattr(cursor, ask)(np.full(10, NAN, np.float32))
    assert state_of(cursor) == seen
    assert cursor.pick(np.arange(10, dtype=np.float32)) == 5


def test_constrain_may_raise_too_and_leaves_the_row() -> None:
    cursor = cursor_of(on_fault="raise")
    row = np.full(10, -INF, np.float32)
    row[7] = 5.0
    before = row.copy()
    with pytest.raises(TrieSamplerError, match="every valid logit is NaN or -inf"):
        cursor.constrain(row, samples=False)
    assert row.tolist() == before.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_dead_end_has_nothing_to_pick(mode: str) -> None:
    """No child and no leaf: -1 and a warning, not a token from somewhere."""
    arrays = [np.array(array, np.int32) for array in ([-1], [1, 1], [-1])]
    trie = TokenTrie._from_arrays(*arrays, 1, None, {"": 0}, 100, None, np.empty((2, 0), np.int32))
    with pytest.warns(TrieSamplerWarning, match="every valid logit"):
        assert TrieCursor(trie, on_end=mode, stop_tokens=[3]).pick(np.zeros(9, np.float32)) == END


ASK: dict[str, Callable[[TrieCursor, Any], Any]] = {
    "pick": TrieCursor.pick,
    "sample": TrieCursor.sample,
    "constrain": lambda cursor, row: cursor.constrain(row, samples=False),
    "constrain drawing": lambda cursor, row: cursor.constrain(row, samples=True),
    "mask": TrieCursor.mask,
    "valid_mass": TrieCursor.valid_mass,
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
@pytest.mark.parametrize("width", [0, 6, 9])
def test_a_row_too_narrow_is_refused(ask: Callable[[TrieCursor, Any], Any], width: int) -> None:
    cursor = cursor_of()  # the separator, 9, is the largest id
    row = np.zeros(width, np.float32)
    seen = state_of(cursor)
    with pytest.raises(ValueError, match=f"the row holds {width} logits; the trie's ids need 10"):
        ask(cursor, row)
    assert state_of(cursor) == seen
    assert (row == 0).all()
    ask(cursor, np.zeros(10, np.float32))


NO_ROWS: dict[str, Any] = {
    "list": [0.0] * 10,
    "None": None,
    "text": "0123456789",
    "two dimensions": np.zeros((10, 10), np.float32),
    "one row of a batch": np.zeros((1, 10), np.float32),
    "int64": np.zeros(10, np.int64),
    "bool": np.zeros(10, bool),
    "float16": np.zeros(10, np.float16),
    "complex": np.zeros(10, complex),
    "object": np.zeros(10, object),
    "another byte order": np.zeros(10, np.dtype(np.float32).newbyteorder()),
    "masked": np.ma.zeros(10, np.float32),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
@pytest.mark.parametrize("row", NO_ROWS.values(), ids=NO_ROWS)
def test_what_is_no_row_is_a_type_error(ask: Callable[[TrieCursor, Any], Any], row: Any) -> None:
    cursor = cursor_of()
    seen = state_of(cursor)
    with pytest.raises(TypeError, match="one-dimensional float32 or float64 array"):
        ask(cursor, row)
    assert state_of(cursor) == seen


@pytest.mark.parametrize("ask", ["constrain", "mask"])
def test_a_read_only_row_cannot_be_written(ask: str) -> None:
    row = np.zeros(10, np.float32)
    row.setflags(write=False)
    with pytest.raises((TypeError, ValueError), match=r"read-only|one-dimensional|writ"):
        ASK[ask](cursor_of(), row)


@pytest.mark.parametrize("ask", ["pick", "sample", "valid_mass"])
def test_a_read_only_row_can_be_read(ask: str) -> None:
    row = np.zeros(10, np.float32)
    row.setflags(write=False)
    ASK[ask](cursor_of(), row)


# --- the mask -----------------------------------------------------------------------------------


@given(places(), st.sampled_from(FORMS), st.booleans(), st.sets(st.sampled_from([2, 5, 13]), max_size=2))
def test_mask_leaves_what_is_allowed(place: Place, form: str, finish: bool, shared: set[int]) -> None:
    leaves, prefix, row, mode, ends = place
    ends |= shared  # an end token may be a token of the leaves as well
    tree = DictTrie(leaves)
    children, terminal = tree.children(prefix), tree.is_terminal(prefix)
    cursor = cursor_at(leaves, prefix, mode, ends)
    if finish and terminal and cursor.is_active:
        cursor.accept(END)
        ref = ends
    else:
        ref = {*children, *(ends if terminal else ())}
    masked = as_given(row, form)
    before = masked.copy()
    seen = state_of(cursor)
    assert cursor.mask(masked) is None
    assert state_of(cursor) == seen
    if mode == "release" and (not children or (finish and terminal)):
        ref = set(range(len(row)))
    else:
        assert sorted(ref) == cursor.allowed().tolist()
    for token in range(len(row)):
        if token in ref:
            assert masked[token].tobytes() == before[token].tobytes()
        else:
            assert masked[token] == -INF
    if masked.base is not None:
        assert (np.delete(masked.base, np.s_[::2] if form == "strided" else np.s_[1::2]) == np.float32(3e38)).all()


# --- one step of a processor --------------------------------------------------------------------


def ref_numbers(
    row: np.ndarray, children: Collection[int], terminal: bool, mode: str, ends: Collection[int]
) -> tuple[dict[Any, float], float]:
    """log p of every option (children, STOP for all end tokens together) and the margin, in nats."""
    if mode == "mass" or not terminal:
        p = walk_distribution(row, children, terminal)
        margin = decision_margin(row, children, terminal)
    else:
        x = np.where(np.isnan(row), -INF, row.astype(np.float64))
        top = x.max()
        x = x - top if np.isfinite(top) else x
        logits = {child: x[child] for child in children}
        shares = softmax([*logits.values(), logsumexp(x[sorted(ends)])])
        p = dict(zip([*logits, STOP], shares.tolist(), strict=True))
        # Greedy weighs the end tokens one by one.
        best, second = sorted([*logits.values(), max(x[sorted(ends)], default=-INF)], reverse=True)[:2]
        margin = 0.0 if best == second else best - second
    return {option: math.log(share) if share > 0 else -INF for option, share in p.items()}, margin


# Numbers are asked of logits below 1e16: beside larger ones the logarithm of a count is lost, float64 or not.
@given(places(huge=False), st.sampled_from(FORMS), st.booleans(), st.integers(0, 2**32))
def test_constrain_leaves_one_token_and_tells_its_numbers(place: Place, form: str, samples: bool, seed: int) -> None:
    leaves, prefix, row, mode, ends = place
    tree = DictTrie(leaves)
    children, terminal = tree.children(prefix), tree.is_terminal(prefix)
    # Without any end token there is nothing to leave in the row: see the test below.
    ends = ends or {1}
    cursor = cursor_at(leaves, prefix, mode, ends, sampling=Sampling(seed=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrieSamplerWarning)
        twin = cursor.clone()
        ref = (twin.sample if samples else twin.pick)(row)
        left = as_given(row, form)
        buffer = left.base
        seen = state_of(cursor)
        step = cursor.constrain(left, samples=samples)
    assert state_of(cursor) == seen
    if mode == "release" and not children:
        assert step == Step(layout.NO_TOKEN, 0.0, INF, is_forced=False)
        assert left.tobytes() == as_given(row, form).tobytes()
        return
    assert step.token == ref
    assert np.flatnonzero(left > -INF).tolist() == [step.token]
    assert np.isfinite(left[step.token])
    logit = row[step.token]
    assert left[step.token] == (0 if is_blank(logit) else logit)
    if buffer is not None:  # nothing was copied, nothing between the logits was written
        assert left.base is buffer
        assert np.count_nonzero(buffer == np.float32(3e38)) >= len(row)
    assert step.is_forced is (len(children) == 1 and not terminal)
    if not children or is_fault(row, children, terminal, mode, ends):
        if not children:
            assert (step.logprob, step.margin) == (0.0, INF)
        return
    logprobs, margin = ref_numbers(row, children, terminal, mode, ends)
    chosen = step.token if step.token in children else STOP
    np.testing.assert_allclose(step.logprob, logprobs[chosen], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(step.margin, margin, rtol=1e-6, atol=1e-6)
    if samples:
        assert logprobs[chosen] > -INF


@pytest.mark.parametrize("samples", [False, True])
def test_constrain_without_an_end_token_cannot_say_stop(samples: bool) -> None:
    cursor = cursor_at(LEAVES, (5, 6), "mass", ())
    row = np.zeros(7, np.float32)
    with pytest.raises(TrieSamplerError, match="no end token is known"):
        cursor.constrain(row, samples=samples)
    assert (row == 0).all()


def test_constrain_while_finished_leaves_the_better_end_token() -> None:
    cursor = cursor_at(LEAVES, (5,), "mass", (0, 9))
    cursor.accept(9)
    row = np.array([1, 5, 5, 5, 5, 5, 5, 5, 5, 2], np.float32)
    assert cursor.constrain(row, samples=True) == Step(9, 0.0, INF, is_forced=False)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [9]


def test_constrain_while_released_leaves_the_row() -> None:
    cursor = cursor_of()
    cursor.deactivate()
    row = np.arange(10, dtype=np.float32)
    assert cursor.constrain(row, samples=False).token == layout.NO_TOKEN
    assert row.tolist() == list(range(10))


@pytest.mark.parametrize("foreign", [10.0, -10.0])
def test_probabilities_add_up_whatever_the_unmasked_argmax(foreign: float) -> None:
    """Logits 1 2 0 -1 and a foreign token, likely or not: .2369 .6439 .0871 .0321."""
    leaves = [(name, [token]) for token, name in enumerate("ABCD", start=1)]
    cursor = cursor_of(leaves, stop_tokens=(), sampling=Sampling(seed=26))
    row = np.array([-3, 1, 2, 0, -1, foreign], np.float32)
    steps = [cursor.constrain(row.copy(), samples=True) for _ in range(400)]
    comp = {step.token: math.exp(step.logprob) for step in steps}
    assert comp == pytest.approx({1: 0.2369, 2: 0.6439, 3: 0.0871, 4: 0.0321}, abs=5e-5)
    assert sum(comp.values()) == pytest.approx(1, abs=1e-6)
    assert cursor.constrain(row.copy(), samples=False).token == 2


def test_logits_further_apart_than_float32_reaches() -> None:
    row = np.full(10, -3e38, np.float32)
    row[5] = 3e38
    step = cursor_of().constrain(row, samples=False)
    assert (step.token, step.logprob, step.margin) == (5, 0.0, pytest.approx(6e38))


# --- numbers of a walk --------------------------------------------------------------------------


def walk_steps(leaves: Leaves, rows: dict[Prefix, np.ndarray], **settings: Any) -> tuple[str | None, list[Step]]:
    cursor = TrieCursor(TokenTrie.from_sequences(leaves), eog_ids=[0], **settings)
    steps = []
    while not cursor.must_end and not cursor.is_finished:
        steps.append(cursor.constrain(rows[prefix_of(cursor)].copy(), samples=False))
        cursor.accept(steps[-1].token)
    return cursor.leaf_name, steps


def test_the_walk_number_of_a_long_choice() -> None:
    """S=[1] p .3; L=[2,3] p .5 and .5: the walk goes to L (.5 > .3), with .625 of the two."""
    leaves = [("S", [1]), ("L", [2, 3])]
    rows = {(): row_of({1: 0.3, 2: 0.5}, 8, rest=7), (2,): row_of({3: 0.5}, 8, rest=7)}
    name, steps = walk_steps(leaves, rows)
    numbers = walk_numbers(steps)
    assert name == "L"
    assert numbers["probability"] == pytest.approx(0.625)
    assert numbers["margin"] == pytest.approx(math.log(0.5 / 0.3))
    assert numbers["stats"] == {"steps": 2, "forced_steps": 1, "masked": True}


def test_the_first_token_pulls_a_greedy_walk() -> None:
    """skill=[1,2], cloud=[3]; p(1)=.6, p(3)=.4, p(2 after 1)=.01: documented as what greedy does."""
    rows = {(): row_of({1: 0.6, 3: 0.4}, 8), (1,): row_of({2: 0.01}, 8, rest=7)}
    name, steps = walk_steps([("skill", [1, 2]), ("cloud", [3])], rows)
    assert (name, walk_numbers(steps)["probability"]) == ("skill", pytest.approx(0.6))


def test_a_walk_may_end_in_a_stop() -> None:
    rows = {(): row_of({3: 0.2, 5: 0.6}, 10, rest=7), (5,): row_of({6: 0.4, EOG: 0.001}, 10, rest=2)}
    name, steps = walk_steps(LEAVES, rows)
    assert name == "A"
    assert walk_numbers(steps)["probability"] == pytest.approx(0.75 * 0.6)
    assert walk_numbers(steps)["margin"] == pytest.approx(math.log(0.6 / 0.4))


def test_valid_mass_tells_that_the_prompt_is_off() -> None:
    """p(Pos)=.02, p(Neg)=.03, p("The")=.9: Neg it is, and .05 says how little that means."""
    cursor = cursor_of([("Pos", [1]), ("Neg", [2])])
    row = row_of({1: 0.02, 2: 0.03, 7: 0.9}, 10, rest=8)
    assert cursor.pick(row) == 2
    assert cursor.valid_mass(row) == pytest.approx(0.05)


@given(places(huge=False), st.sampled_from(FORMS))
def test_valid_mass_equals_the_oracle(place: Place, form: str) -> None:
    leaves, prefix, row, mode, ends = place
    children = DictTrie(leaves).children(prefix)
    cursor = cursor_at(leaves, prefix, mode, ends)
    given_row = as_given(row, form)
    before = given_row.tobytes()
    np.testing.assert_allclose(cursor.valid_mass(given_row), child_mass(row, children), rtol=1e-6, atol=1e-12)
    assert given_row.tobytes() == before


def test_an_infinite_logit_takes_everything() -> None:
    """logit_bias may be +inf: its token's share is 1, the limit that the filters take too."""
    row = np.zeros(10, np.float32)
    row[5] = INF
    step = cursor_of().constrain(row.copy(), samples=False)
    assert (step.token, step.logprob, step.margin) == (5, 0.0, INF)
    assert cursor_of().valid_mass(row) == 1.0
    row[3] = INF  # two share it
    step = cursor_of().constrain(row.copy(), samples=False)
    assert (step.token, step.logprob, step.margin) == (3, pytest.approx(-math.log(2)), 0.0)


def test_a_choice_as_plain_values() -> None:
    class Colour(enum.Enum):
        RED = "red"

    step = Step(5, math.log(0.25), 0.5, is_forced=False)
    forced = Step(6, 0.0, INF, is_forced=True)
    numbers = walk_numbers([step, forced])
    assert numbers == {
        "logprob": math.log(0.25),
        "probability": pytest.approx(0.25),
        "margin": 0.5,
        "stats": {"steps": 2, "forced_steps": 1, "masked": True},
    }
    choice = Choice(name="red", value=Colour.RED, index=0, text=" red", tokens=(5, 6), complete=True, **numbers)
    comp = json.loads(json.dumps(choice.to_dict()))
    assert comp == {
        "name": "red",
        "value": "red",
        "index": 0,
        "text": " red",
        "tokens": [5, 6],
        "complete": True,
        "valid_mass": None,
        **numbers,
    }
    plain = Choice("x", 7, 1, "x", (1,), True, **walk_numbers([]))
    assert (plain.to_dict()["value"], plain.probability, plain.margin) == (7, 1.0, None)
    assert plain.stats == {"steps": 0, "forced_steps": 0, "masked": False}
    assert walk_numbers([forced])["margin"] is None


# --- drawing ------------------------------------------------------------------------------------

N_DRAWS = 4000


def draws(cursor: TrieCursor, row: np.ndarray, n_draws: int = N_DRAWS) -> Iterator[int]:
    return (int(cursor.sample(row)) for _ in range(n_draws))


def assert_drawn_from(tokens: Iterator[int], ref: dict[int, float]) -> None:
    """Chi-square at 1e-3 with a fixed seed; what has no probability never comes."""
    counts = dict.fromkeys(ref, 0)
    for token in tokens:
        counts[token] += 1
    possible = [token for token, p in ref.items() if p > 0]
    assert sum(counts[token] for token in possible) == sum(counts.values())
    if len(possible) > 1:
        expected = np.array([ref[token] for token in possible]) * sum(counts.values())
        assert chisquare([counts[token] for token in possible], expected).pvalue > 1e-3


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 2},
    {"top_k": 1},
    {"top_p": 0.8},
    {"min_p": 0.25},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
]

# A wide node at which a leaf ends: 12 children of [4], stop tokens 0 and 3.
WIDE: Leaves = [("W", [4]), *((f"w{i}", [4, 5 + i]) for i in range(6))]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("mode", ["mass", "eog"])
def test_draws_follow_the_filtered_softmax(settings: dict[str, Any], terminal: bool, mode: str) -> None:
    leaves = WIDE if terminal else WIDE[1:]
    row = np.random.default_rng(4).normal(size=16).astype(np.float32)
    row[[0, 3]] = 0.8, 0.2
    row[[11, 12, 13, 14, 15]] = -2.0  # foreign
    cursor = cursor_at(leaves, (4,), mode, (0, 3), sampling=Sampling(seed=1234, **settings))
    children = range(5, 11)
    if not terminal:
        ids, logits = [*children], row[5:11]
    elif mode == "eog":
        ids, logits = [*children, 0, 3], row[[*children, 0, 3]]
    else:
        named = options(row, children, terminal=True)
        ids, logits = [*children, 0], np.array(list(named.values()))  # 0 is the likelier end token
    p = filtered_distribution(logits, **settings)
    seen = state_of(cursor)
    assert_drawn_from(draws(cursor, row), dict(zip(ids, p.tolist(), strict=True)))
    assert state_of(cursor) == seen


def test_one_choice_begins_another_drawn() -> None:
    """p(6) = .4 and the end mass .6: AB in 40 % of 4,000 draws, within 3 sigma."""
    row = row_of({6: 0.4, EOG: 0.001}, 10, rest=2).astype(np.float32)
    cursor = cursor_of(stop_tokens=(), sampling=Sampling(seed=0))
    cursor.accept(5)
    n_ab = sum(token == 6 for token in draws(cursor, row))
    assert abs(n_ab - 0.4 * N_DRAWS) < 3 * math.sqrt(N_DRAWS * 0.4 * 0.6)


def test_temperature_1_draws_from_the_softmax_over_the_children() -> None:
    row = np.array([9, 9, 9, 1.0, 9, 0.0, 9, 9, 9, 9], np.float32)
    p = float(softmax([1.0, 0.0])[0])
    cursor = cursor_of(sampling=Sampling(temperature=1.0, seed=65))
    n_first = sum(token == 3 for token in draws(cursor, row))
    assert abs(n_first - p * N_DRAWS) < 3 * math.sqrt(N_DRAWS * p * (1 - p))


def test_a_token_that_is_child_and_end_at_once_is_one_option() -> None:
    """Separator 9 also goes on from A: three equal logits, three equal shares, not 9 twice."""
    cursor = cursor_at([("A", [5]), ("B", [5, 6]), ("C", [5, 7]), ("D", [5, 9])], (5,), "eog", (9,))
    row = np.zeros(10, np.float32)
    assert cursor.allowed().tolist() == [6, 7, 9]
    assert math.exp(cursor.constrain(row.copy(), samples=False).logprob) == pytest.approx(1 / 3)
    cursor = cursor_at(
        [("A", [5]), ("B", [5, 6]), ("C", [5, 7]), ("D", [5, 9])], (5,), "eog", (9,), sampling=Sampling(seed=9)
    )
    assert_drawn_from(draws(cursor, row), {6: 1 / 3, 7: 1 / 3, 9: 1 / 3})


@given(places(), st.sampled_from(FORMS), st.floats(0.1, 3))
def test_top_k_1_is_greedy(place: Place, form: str, temperature: float) -> None:
    leaves, prefix, row, mode, ends = place
    tree = DictTrie(leaves)
    children, terminal = tree.children(prefix), tree.is_terminal(prefix)
    cursor = cursor_at(leaves, prefix, mode, ends, sampling=Sampling(temperature=temperature, top_k=1, seed=0))
    tokens = {*children, *(ends if terminal and mode != "mass" else ())}
    logits = sorted((row[token] for token in tokens if not is_blank(row[token])), reverse=True)
    tie = len(logits) > 1 and logits[0] == logits[1]
    if tie or (mode == "mass" and terminal and decision_margin(row, children, terminal) < 1e-6):
        return  # greedy prefers the stop, a filter the earlier option
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrieSamplerWarning)
        assert cursor.sample(as_given(row, form)) == cursor.pick(row)


def test_top_k_counts_valid_tokens() -> None:
    """The argmax is foreign and top_k=1: the best VALID child, never nothing and never the argmax."""
    row = np.array([0, 0, 0, 1.0, 0, 2.0, 0, 9.0, 9.0, 0], np.float32)
    cursor = cursor_of(sampling=Sampling(top_k=1, seed=0))
    assert set(draws(cursor, row, 50)) == {5}


@given(places(), st.integers(0, 2**64 - 1))
def test_temperature_0_picks_and_draws_nothing(place: Place, seed: int) -> None:
    leaves, prefix, row, mode, ends = place
    cursor = cursor_at(leaves, prefix, mode, ends, sampling=Sampling(temperature=0, seed=seed))
    generator = [f"random_{i}" for i in range(4)]
    before = cursor._record[generator].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrieSamplerWarning)
        assert cursor.sample(row) == cursor.pick(row)
    assert (cursor._record[generator] == before).all()


@given(places(), st.integers(0, 2**64 - 1), st.sampled_from(FORMS))
def test_a_draw_is_allowed_and_has_mass(place: Place, seed: int, form: str) -> None:
    leaves, prefix, row, mode, ends = place
    cursor = cursor_at(leaves, prefix, mode, ends, sampling=Sampling(seed=seed))
    if not cursor.is_active:
        assert cursor.sample(as_given(row, form)) == cursor.pick(row)
        return
    tree = DictTrie(leaves)
    fault = is_fault(row, tree.children(prefix), tree.is_terminal(prefix), mode, ends)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if fault else "error", TrieSamplerWarning)
        comp = cursor.sample(as_given(row, form))
    if comp == END:
        assert not ends
        assert cursor.may_end
    else:
        assert comp in cursor.allowed()
        if comp in tree.children(prefix) and not fault:
            assert not is_blank(row[comp])


# The draws of a seed are the same compiled, as plain Python and on every platform.
DRAWN = [3, 3, 5, 5, 3, 3, 3, 3, 3, 3, 3, 3, 5, 5, 3, 5, 3, 5, 3, 3]


def test_the_same_seed_draws_the_same_tokens() -> None:
    """By inverting the cumulative distribution: child 3 below .7, child 5 above."""
    row = np.log(np.array([1, 1, 1, 0.7, 1, 0.3, 1, 1, 1, 1], np.float32))
    assert [3 if u < 0.7 else 5 for u, _ in zip(uniforms(42), DRAWN, strict=False)] == DRAWN
    cursors = [cursor_of(sampling=Sampling(seed=42)) for _ in range(2)]
    for cursor in cursors:
        assert list(draws(cursor, row, len(DRAWN))) == DRAWN
    assert list(draws(cursors[0], row, 40)) == list(draws(cursors[1], row, 40))
    other = cursor_of(sampling=Sampling(seed=43))
    assert list(draws(other, row, 40)) != list(draws(cursor_of(sampling=Sampling(seed=42)), row, 40))


def test_without_a_seed_every_cursor_draws_its_own() -> None:
    row = np.zeros(10, np.float32)
    one, two = (list(draws(cursor_of(), row, 80)) for _ in range(2))
    assert one != two  # equal with probability 2**-80


def test_reset_goes_on_with_the_draws() -> None:
    row = np.zeros(10, np.float32)
    ref = list(draws(cursor_of(sampling=Sampling(seed=8)), row, 40))
    cursor = cursor_of(sampling=Sampling(seed=8))
    comp = []
    for token in draws(cursor, row, 40):
        comp.append(token)
        cursor.accept(token)
        cursor.reset()
    assert comp == ref


def test_draws_can_be_handed_over() -> None:
    row = np.zeros(10, np.float32)
    one, two = cursor_of(sampling=Sampling(seed=1)), cursor_of(sampling=Sampling(seed=2))
    _ = list(draws(one, row, 7))
    two.take_draws_from(one)
    assert list(draws(two, row, 40)) == list(draws(one, row, 40))


@pytest.mark.parametrize(
    ("settings", "ref"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number >= 0, got -0.1"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": NAN}, "top_k"),
        ({"top_k": INF}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"top_p": -0.1}, r"top_p must be in \[0, 1\], got -0.1"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.01}, "min_p"),
        ({"min_p": NAN}, "min_p"),
    ],
)
def test_sampling_out_of_range(settings: dict[str, Any], ref: str) -> None:
    with pytest.raises(ValueError, match=ref):
        Sampling(**settings)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**64 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    cursor = cursor_of(sampling=Sampling(seed=seed))
    assert set(draws(cursor, np.zeros(10, np.float32), 60)) == {3, 5}


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1}, {"top_p": 0}]
)
def test_sampling_at_the_border_of_its_ranges(settings: dict[str, Any]) -> None:
    cursor = cursor_of(sampling=Sampling(seed=1, **settings))
    assert cursor.sample(np.arange(10, dtype=np.float32)) in (3, 5)


def test_a_tiny_temperature_is_greedy_without_an_overflow() -> None:
    row = np.arange(10, dtype=np.float32)
    cursor = cursor_of(sampling=Sampling(temperature=1e-30, seed=1))
    assert set(draws(cursor, row, 50)) == {5}
