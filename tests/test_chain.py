"""``build_sampler_chain`` over made candidate arrays and over a real context.

The trie that most tests walk, in letters (a, b, ... are the ids of VALID, ascending):

    root ─┬─ a ─┬─ b          "ab"
          │     └─ c ── d     "acd"
          ├─ e                "e"     ┐ "e" begins "ef"
          │  └─ f             "ef"    ┘
          └─ g ── h           "gh"    g: one child, no choice

ref is NumPy's argmax over the children at a node, or the oracle's walk; comp comes out of llama.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import spies
from models import TINY_EOG
from pydantic import ValidationError

llama_cpp = pytest.importorskip("llama_cpp")

from trie_sampler.errors import (  # noqa: E402
    EmptyTrieError,
    EngineError,
    PayloadError,
    TrieSamplerWarning,
    UnknownPathError,
    VocabMismatchError,
)
from trie_sampler.llama import chain as chain_module  # noqa: E402
from trie_sampler.llama.chain import SamplingParams, build_sampler_chain  # noqa: E402
from trie_sampler.llama.sampler import n_alive, token_trie_handle  # noqa: E402
from trie_sampler.llama.vocab import LlamaTokenizer  # noqa: E402

POSITIONS = ["first", "after_temperature"]
MODES = [0, 1]

# Ids of pieces without a role: single characters and words, not control, byte or end tokens.
A, B, C, D, E, F, G, H = 300, 301, 310, 333, 350, 360, 371, 399
LEAVES = [[A, B], [A, C, D], [E], [E, F], [G, H]]
NODES: list[tuple[int, ...]] = [(), (A,), (G,)]
TRIE = oracle.DictTrie([(str(leaf), leaf) for leaf in LEAVES])
FOREIGN = 500
V = 768

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "top_k 1": {"top_k": 1},
    "top_p 0.1": {"top_p": 0.1},
    "min_p 0.9": {"min_p": 0.9},
    "typical": {"typ_p": 0.2},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    "top_n_sigma": {"top_n_sigma": 0.2},
    "temperature 0": {"temp": 0.0},
    "dynamic temperature": {"dynatemp_range": 0.7, "temp": 1.0},
    "min_keep": {"min_keep": 5, "top_k": 2},
    "infill": {"samplers": ["top_k", "infill", "temperature"]},
    "infill alone": {"samplers": ["infill"]},
    "adaptive_p": {"samplers": ["min_p", "adaptive_p"], "adaptive_target": 0.3},
    "adaptive_p off": {"samplers": ["adaptive_p"]},
    "mirostat 1": {"mirostat": 1},
    "mirostat 1, cold": {"mirostat": 1, "temp": 0.0, "mirostat_tau": 0.1},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0},
    "mirostat 2, cold": {"mirostat": 2, "temp": 0.0},
    "no samplers": {"samplers": []},
    "backwards": {"samplers": list(reversed(SamplingParams().samplers)), "xtc_probability": 0.5, "typ_p": 0.5},
    "everything": {
        "top_k": 3,
        "typ_p": 0.5,
        "xtc_probability": 0.5,
        "top_n_sigma": 1.0,
        "dynatemp_range": 0.3,
        "samplers": [*SamplingParams().samplers, "infill", "adaptive_p"],
        "adaptive_target": 0.1,
    },
}
SHAPED: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {A: 3.0, G: -2.0, FOREIGN: 50.0}},
    "bans": {"logit_bias": dict.fromkeys([A, B, C, E, G, H], -np.inf)},
    "ignore_eos": {"ignore_eos": True},
    "penalties": {"penalty_repeat": 1.8, "penalty_freq": 0.5, "penalty_present": 0.5},
    "dry": {"dry_multiplier": 4.0, "dry_allowed_length": 1},
}


@pytest.fixture(autouse=True)
def no_record_survives() -> Iterator[None]:
    before = n_alive()
    yield
    if n_alive() > before:
        gc.collect()
    # Less where the traceback of a test that failed held a handle.
    assert n_alive() <= before


@pytest.fixture(scope="module")
def small(tiny_model_path: Path) -> Iterator[Any]:
    """One tiny model for all tests; most only look at its vocabulary."""
    llama = llama_cpp.Llama(
        str(tiny_model_path), n_ctx=256, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, verbose=False
    )
    yield llama
    llama.close()


def payload_of(small: Any, *spans: Sequence[Sequence[int]], **paths: Sequence[Sequence[int]]) -> str:
    """JSON of a payload whose leaves are named as the vocabulary spells them."""
    tokenizer = LlamaTokenizer(small)
    named = {f"span{i}": leaves for i, leaves in enumerate(spans)} | paths
    return json.dumps(
        {
            "modelId": "tiny",
            "descriptors": [
                {
                    "path": path,
                    "leaves": [{"name": tokenizer.detokenize(leaf).decode(), "tokens": list(leaf)} for leaf in leaves],
                }
                for path, leaves in named.items()
            ],
        }
    )


@contextlib.contextmanager
def chain_of(small: Any, leaves: Sequence[Sequence[int]] | None = LEAVES, **params: Any) -> Iterator[Any]:
    if leaves is not None:
        params["token_trie_descriptor_json"] = payload_of(small, leaves)
    chain = build_sampler_chain(small, SamplingParams(**params))
    try:
        yield chain
    finally:
        llama_cpp.llama_sampler_free(chain)


def names_of(chain: Any) -> list[str]:
    """A sampler that is off is called "?name" since llama.cpp drops it."""
    n_samplers = llama_cpp.llama_sampler_chain_n(chain)
    return [
        llama_cpp.llama_sampler_name(llama_cpp.llama_sampler_chain_get(chain, i)).decode().lstrip("?")
        for i in range(n_samplers)
    ]


def handle_of(chain: Any) -> Any:
    """The trie is the first sampler, or the last but one behind a probe."""
    place = llama_cpp.llama_sampler_chain_n(chain) - 2 if names_of(chain).count("token-trie") == 2 else 0
    return token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, place))


class Candidates:
    """A ``llama_token_data_array`` as ``llama_sampler_sample`` makes it of a row."""

    DTYPE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

    def __init__(self, row: npt.NDArray[np.float32], order: npt.NDArray[np.intp] | None = None) -> None:
        self.records = np.zeros(len(row), self.DTYPE)
        self.records["id"] = np.arange(len(row)) if order is None else order
        self.records["logit"] = row if order is None else row[order]
        self.array = llama_cpp.llama_token_data_array(
            data=self.records.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)),
            size=len(row),
            selected=-1,
            sorted=False,
        )

    def apply(self, sampler: Any) -> int:
        """The id that was selected."""
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self.array))
        assert 0 <= self.array.selected < self.array.size
        return int(self.array.data[self.array.selected].id)

    def ids(self) -> list[int]:
        return [int(self.array.data[i].id) for i in range(self.array.size)]


def sample(chain: Any, row: npt.NDArray[np.float32]) -> int:
    return Candidates(row).apply(chain)


def accept(chain: Any, *tokens: int) -> None:
    for token in tokens:
        llama_cpp.llama_sampler_accept(chain, token)


def best_of(row: npt.NDArray[np.float32], valid: Sequence[int]) -> int:
    """NumPy's argmax, ties to the lowest id."""
    valid = sorted(valid)
    return valid[int(np.argmax(row[valid]))]


def rows_of(n_rows: int, width: int, seed: int = 0) -> Iterator[npt.NDArray[np.float32]]:
    """Random rows: plain, with ties, flat, and with foreign tokens far ahead."""
    rng = np.random.default_rng(seed)
    for i in range(n_rows):
        row = rng.normal(0, 4, width).astype(np.float32)
        if i % 4 == 1:
            row = np.round(row / 4)
        if i % 4 == 2:
            row[rng.integers(0, width, 50)] += 30
        if i % 4 == 3:
            row *= np.float32(0.01)
        yield row


def flat_row(small: Any, **logits: float) -> npt.NDArray[np.float32]:
    row = np.full(V, -3.0, np.float32)
    for name, logit in logits.items():
        row[globals()[name]] = logit
    return row


# --- parameters --------------------------------------------------------------------------------


def test_the_defaults_are_those_of_llama_cpp() -> None:
    """``common_params_sampling`` in common/common.h, and the reference's two fields."""
    ref = {
        "seed": 0xFFFFFFFF,
        "n_prev": 64,
        "n_probs": 0,
        "min_keep": 0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typ_p": 1.0,
        "temp": 0.8,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "penalty_last_n": 64,
        "penalty_repeat": 1.0,
        "penalty_freq": 0.0,
        "penalty_present": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "top_n_sigma": -1.0,
        "ignore_eos": False,
        "no_perf": False,
        "logit_bias": {},
        "samplers": ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
        "grammar": None,
        "grammar_lazy": False,
        "grammar_triggers": (),
        "token_trie_descriptor_json": "",
        "token_trie_mode": "greedy",
        "trie_position": "first",
        "path": None,
        "on_end": "release",
        "stop_tokens": (),
        "on_invalid": "drop",
        "max_span_tokens": 500,
    }
    assert SamplingParams().model_dump() == ref


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**32),
        ("seed", -2),
        ("seed", True),
        ("n_probs", -1),
        ("min_keep", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", "40"),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", 2),
        ("typ_p", np.nan),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -1.0),
        ("temp", np.nan),
        ("temp", np.inf),
        ("temp", 1e39),
        ("dynatemp_range", -0.1),
        ("penalty_last_n", -1),
        ("penalty_last_n", 2**31 - 1),
        ("penalty_repeat", 0.0),
        ("penalty_repeat", -1.0),
        ("penalty_repeat", 1e-45),
        ("penalty_freq", np.inf),
        ("penalty_present", np.nan),
        ("dry_multiplier", -1.0),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -1),
        ("dry_sequence_breakers", ["a\0b"]),
        ("dry_sequence_breakers", [""]),
        ("adaptive_target", 1.1),
        ("adaptive_decay", 1.0),
        ("mirostat", 3),
        ("mirostat_tau", -1.0),
        ("top_n_sigma", np.nan),
        ("logit_bias", {5: np.nan}),
        ("logit_bias", {5: np.inf}),
        ("logit_bias", {"five": 1.0}),
        ("samplers", ["top_k", "tfs_z"]),
        ("samplers", "top_k"),
        ("samplers", [3]),
        ("grammar", "root ::= \0"),
        ("token_trie_mode", 2),
        ("token_trie_mode", True),
        ("token_trie_mode", "argmax"),
        ("trie_position", "last"),
        ("on_end", "never"),
        ("on_invalid", "keep"),
        ("stop_tokens", [-1]),
        ("max_span_tokens", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        SamplingParams(**{field: value})


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="'top_kk'"):
        SamplingParams(top_kk=3)
    with pytest.raises(TypeError, match="'top_kk'"):
        SamplingParams.model_validate({"top_kk": 3})
    with pytest.raises(TypeError, match="'top_kk'"):
        SamplingParams.model_validate_json('{"top_kk": 3}')


def test_parameters_are_frozen_and_survive_json() -> None:
    params = SamplingParams(top_k=3, logit_bias={5: -1.5}, samplers=["top-k"], token_trie_mode=1)
    with pytest.raises(ValidationError, match="frozen"):
        params.top_k = 4  # type: ignore[misc]
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params


@pytest.mark.parametrize("spelling", ["top_p", "top-p", "topp", "TOP_P", "nucleus"])
def test_samplers_go_by_every_name_that_llama_cpp_takes(spelling: str) -> None:
    assert SamplingParams(samplers=[spelling]).samplers == ("top_p",)


def test_more_spellings() -> None:
    comp = SamplingParams(samplers=["temp", "typ", "typical", "top-n-sigma", "adaptivep", "min-p"]).samplers
    assert comp == ("temperature", "typ_p", "typ_p", "top_n_sigma", "adaptive_p", "min_p")


@pytest.mark.parametrize("params", [{"grammar_lazy": True}, {"samplers": ["infill"]}, {"ignore_eos": True}])
def test_parameters_that_would_kill_or_unleash_a_grammar_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(params)) if "samplers" not in params else "infill"):
        SamplingParams(grammar='root ::= "a"', **params)
    SamplingParams(**params)


# --- order -------------------------------------------------------------------------------------

FILTERS = ["top-n-sigma", "top-k", "typical", "top-p", "min-p", "xtc", "temp-ext"]
SHAPERS = ["penalties", "dry"]


@pytest.mark.parametrize(
    ("params", "ref"),
    [
        ({}, ["token-trie", *SHAPERS, "greedy"]),
        ({"mirostat": 2}, ["token-trie", *SHAPERS, "greedy"]),
        ({"samplers": ["dry", "xtc", "adaptive_p"]}, ["token-trie", "dry", "greedy"]),
        ({"trie_position": "after_temperature"}, ["token-trie", *SHAPERS, "token-trie", "greedy"]),
        ({"logit_bias": {5: 1.0}}, ["token-trie", "logit-bias", *SHAPERS, "greedy"]),
        ({"token_trie_mode": 1}, ["token-trie", *SHAPERS, *FILTERS, "dist"]),
        (
            {"token_trie_mode": 1, "trie_position": "after_temperature", "ignore_eos": True},
            ["token-trie", "logit-bias", *SHAPERS, *FILTERS, "token-trie", "dist"],
        ),
        (
            {"token_trie_mode": 1, "samplers": ["adaptive_p", "temperature", "penalties"]},
            ["token-trie", "temp-ext", "penalties", "adaptive-p"],
        ),
        ({"token_trie_mode": 1, "mirostat": 1}, ["token-trie", *SHAPERS, "temp", "mirostat"]),
        (
            {"token_trie_mode": 1, "mirostat": 2, "trie_position": "after_temperature"},
            ["token-trie", *SHAPERS, "temp", "token-trie", "mirostat-v2"],
        ),
        (
            {"token_trie_mode": 1, "samplers": ["top_k", "infill"]},
            ["token-trie", "top-k", "infill", "token-trie", "dist"],
        ),
    ],
)
def test_order_with_a_trie(small: Any, params: dict[str, Any], ref: list[str]) -> None:
    with chain_of(small, **params) as chain:
        assert names_of(chain) == ref


@pytest.mark.parametrize("mode", MODES)
def test_order_without_a_trie(small: Any, mode: int) -> None:
    """The mode is the trie's: without one the chain is llama.cpp's own."""
    with chain_of(small, None, token_trie_mode=mode) as chain:
        assert names_of(chain) == [*SHAPERS, *FILTERS, "dist"]
    grammar = 'root ::= "a"'
    with chain_of(small, None, token_trie_mode=mode, grammar=grammar, logit_bias={5: 1.0}) as chain:
        assert names_of(chain) == ["grammar", "logit-bias", *SHAPERS, *FILTERS, "dist"]


def test_each_parameter_reaches_its_sampler(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}
    for name in dir(llama_cpp):
        if not name.startswith("llama_sampler_init_"):
            continue
        function = getattr(llama_cpp, name)

        def spy(*arguments: Any, function: Any = function, name: str = name) -> Any:
            seen[name.removeprefix("llama_sampler_init_")] = [a for a in arguments if isinstance(a, (int, float))]
            return function(*arguments)

        spy.argtypes = function.argtypes if hasattr(function, "argtypes") else None  # type: ignore[attr-defined]
        monkeypatch.setattr(llama_cpp, name, spy)
    params = SamplingParams(
        seed=11,
        n_probs=3,
        min_keep=2,
        top_k=12,
        top_p=0.13,
        min_p=0.14,
        xtc_probability=0.15,
        xtc_threshold=0.16,
        typ_p=0.17,
        temp=0.18,
        dynatemp_range=0.19,
        dynatemp_exponent=0.2,
        penalty_last_n=21,
        penalty_repeat=2.2,
        penalty_freq=2.3,
        penalty_present=2.4,
        dry_multiplier=2.5,
        dry_base=2.6,
        dry_allowed_length=27,
        dry_penalty_last_n=28,
        dry_sequence_breakers=["a", "b"],
        adaptive_target=0.29,
        adaptive_decay=0.3,
        mirostat_tau=3.1,
        mirostat_eta=3.2,
        top_n_sigma=3.3,
        logit_bias={A: 1.0},
        samplers=[*SamplingParams().samplers, "adaptive_p"],
    )
    for update in ({}, {"samplers": ()}, {"mirostat": 1}, {"mirostat": 2}):
        llama_cpp.llama_sampler_free(build_sampler_chain(small, params.model_copy(update=update)))
    # The vocabulary's pointer is an int too.
    vocab = llama_cpp.llama_model_get_vocab(small.model)
    assert {name: [a for a in arguments if a != vocab] for name, arguments in seen.items()} == {
        "logit_bias": [V, 1],
        "penalties": [V, 21, 2.2, 2.3, 2.4],
        "dry": [2.5, 2.6, 27, 28, 2],
        "top_n_sigma": [3.3],
        "top_k": [12],
        "typical": [0.17, 3],
        "top_p": [0.13, 3],
        "min_p": [0.14, 3],
        "xtc": [0.15, 0.16, 3, 11],
        "temp_ext": [0.18, 0.19, 0.2],
        "adaptive_p": [0.29, 0.3, 11],
        "dist": [11],
        "temp": [0.18],
        "mirostat": [V, 11, 3.1, 3.2, 100],
        "mirostat_v2": [11, 3.1, 3.2],
    }


def test_an_off_switch_leaves_nothing_behind(small: Any) -> None:
    """Without a trie, the pick of a cold chain is the argmax of the row."""
    with chain_of(small, None, temp=0.0) as chain:
        for row in rows_of(20, V):
            assert row[sample(chain, row)] == row.max()


# --- the valid set -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
@pytest.mark.parametrize("name", [*CONFIGURATIONS, *SHAPED])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_what_comes_out_is_always_an_option(small: Any, position: str, mode: int, name: str, on_invalid: str) -> None:
    """240 rows at three nodes; greedy without bias or penalties: the argmax of the children, nothing else."""
    params = (CONFIGURATIONS | SHAPED)[name]
    settings = {"trie_position": position, "token_trie_mode": mode, "on_invalid": on_invalid, "seed": 7}
    with chain_of(small, **params, **settings) as chain:
        handle = handle_of(chain)
        for node in NODES:
            handle.activate()
            accept(chain, *node)
            children = TRIE.children(node)
            for row in rows_of(80, V, seed=len(node)):
                comp = sample(chain, row)
                assert comp in children
                if mode == 0 and name in CONFIGURATIONS:
                    assert comp == best_of(row, children)
                handle.deactivate()
                handle.activate()
                # Penalties and DRY see ever more tokens; the walk is back where it was.
                accept(chain, *node)


@pytest.mark.parametrize("name", ["mirostat 1", "mirostat 2", "adaptive_p", "infill", "defaults", "xtc", "everything"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_one_option_is_the_answer_whatever_its_logit(small: Any, position: str, mode: int, name: str) -> None:
    with chain_of(small, [[A, B]], trie_position=position, token_trie_mode=mode, **CONFIGURATIONS[name]) as chain:
        for logit in (-np.inf, np.nan, -100.0, 0.0, 100.0):
            row = next(rows_of(1, V))
            row[A] = logit
            assert sample(chain, row) == A
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrieSamplerWarning)
            handle_of(chain).counters  # noqa: B018 - reports the two rows that said nothing


@pytest.mark.parametrize("fault", [-np.inf, np.nan])
@pytest.mark.parametrize("name", [*CONFIGURATIONS, *SHAPED])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_row_that_says_nothing_gives_the_lowest_id(
    small: Any, position: str, mode: int, name: str, fault: float
) -> None:
    params = (CONFIGURATIONS | SHAPED)[name]
    with chain_of(small, trie_position=position, token_trie_mode=mode, **params) as chain:
        row = next(rows_of(1, V))
        row[TRIE.children(())] = fault
        assert sample(chain, row) == A
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrieSamplerWarning)
            handle_of(chain).counters  # noqa: B018


@pytest.mark.parametrize("position", POSITIONS)
def test_every_option_is_reachable_with_its_share(small: Any, position: str) -> None:
    """4000 draws at temperature 2 without filters: the softmax over the children, within four standard deviations."""
    row = flat_row(small, A=2.0, E=1.0, G=0.0)
    row[FOREIGN] = 4.0
    share = np.exp(row[[A, E, G]] / 2)
    share /= share.sum()
    params = {"samplers": ["temperature"], "temp": 2.0, "seed": 3}
    with chain_of(small, trie_position=position, token_trie_mode=1, **params) as chain:
        draws = [sample(chain, row) for _ in range(4000)]
    comp = np.array([draws.count(token) for token in (A, E, G)]) / len(draws)
    assert np.all(np.abs(comp - share) < 4 * np.sqrt(share * (1 - share) / len(draws)))


@pytest.mark.parametrize(
    "params",
    [{"samplers": ["top_k"]}, {"samplers": ["top_k", "infill"]}, {"samplers": ["top_k"], "on_invalid": "mask"}],
)
def test_filters_in_first_count_valid_tokens_only(small: Any, params: dict[str, Any]) -> None:
    """top_k 2 leaves the two best children though 50 foreign tokens are better."""
    row = flat_row(small, A=2.0, E=1.9, G=1.8)
    row[400:450] = 9.0
    with chain_of(small, token_trie_mode=1, top_k=2, seed=1, **params) as chain:
        assert {sample(chain, row) for _ in range(200)} == {A, E}


def test_filters_after_which_some_children_are_left_decide_among_those(small: Any) -> None:
    row = flat_row(small, A=2.0, E=1.9, G=1.8)
    row[FOREIGN] = 9.0
    settings = {"token_trie_mode": 1, "trie_position": "after_temperature", "seed": 1}
    with chain_of(small, samplers=["top_k"], top_k=3, **settings) as chain:
        assert {sample(chain, row) for _ in range(200)} == {A, E}


@pytest.mark.parametrize(
    "params",
    [
        {"samplers": ["top_k"], "top_k": 1},
        {"samplers": ["top_p"], "top_p": 0.5},
        {"samplers": ["min_p"], "min_p": 0.9},
        {"samplers": ["top_n_sigma"], "top_n_sigma": 1.0},
        {"samplers": ["infill"]},
        {"samplers": ["temperature"], "temp": 0.0},
        {"samplers": ["top_k", "xtc"], "top_k": 3, "xtc_probability": 1.0, "xtc_threshold": 0.2},
        {"mirostat": 1, "temp": 0.0},
        {"mirostat": 2, "temp": -1.0},
        {"samplers": ["top_k", "adaptive_p"], "top_k": 2, "adaptive_target": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("on_invalid", ["drop", "mask"])
def test_where_filters_took_all_children_the_best_one_comes_back(
    small: Any, params: dict[str, Any], on_invalid: str
) -> None:
    """Behind the temperature; the probe saw the raw logits. E is the best child, and not the lowest."""
    row = flat_row(small, A=0.5, E=2.0, G=1.0)
    row[[FOREIGN, FOREIGN + 1, FOREIGN + 2]] = [30.0, 30.0, 30.0]
    settings = {"token_trie_mode": 1, "trie_position": "after_temperature", "on_invalid": on_invalid}
    with chain_of(small, **params, **settings) as chain:
        assert {sample(chain, row) for _ in range(20)} == {E}
        accept(chain, A)
        row[[B, C]] = [0.1, 0.2]
        assert sample(chain, row) == C


def test_infill_cannot_smuggle_its_end_token_in(small: Any) -> None:
    """Where no candidate has a fifth of the mass, infill replaces the first by the end-of-turn token."""
    leaves = [[token] for token in range(300, 320)]
    row = np.random.default_rng(0).normal(0, 0.01, V).astype(np.float32)
    with chain_of(small, None, samplers=["infill"]) as chain:
        assert sample(chain, row) in TINY_EOG
    for position in POSITIONS:
        with chain_of(small, leaves, samplers=["infill"], token_trie_mode=1, trie_position=position) as chain:
            assert sample(chain, row) == best_of(row, range(300, 320))
            handle = handle_of(chain)
            handle.deactivate()
            assert sample(chain, row) in TINY_EOG


def test_shuffled_candidates(small: Any) -> None:
    rng = np.random.default_rng(5)
    for position, mode in itertools.product(POSITIONS, MODES):
        with chain_of(small, trie_position=position, token_trie_mode=mode, temp=0.5) as chain:
            for row in rows_of(40, V):
                comp = Candidates(row, rng.permutation(len(row))).apply(chain)
                assert comp in TRIE.children(())
                if mode == 0:
                    assert row[comp] == row[TRIE.children(())].max()


@pytest.mark.parametrize("position", POSITIONS)
def test_behind_the_trie_only_options_are_left(small: Any, position: str) -> None:
    with chain_of(small, trie_position=position, samplers=[], token_trie_mode=1) as chain:
        candidates = Candidates(next(rows_of(1, V)))
        candidates.apply(chain)
        assert candidates.ids() == [A, E, G]


# --- biases and penalties ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bias_flips_a_valid_pick(small: Any, position: str, mode: int) -> None:
    """Mode 1 is cold enough to be sure."""
    row = flat_row(small, A=2.0, E=1.0, G=0.0)
    settings = {"trie_position": position, "token_trie_mode": mode, "temp": 0.001}
    for bias, ref in [({}, A), ({E: 1.5}, E), ({A: -1.5}, E), ({A: -np.inf, E: -np.inf}, G), ({FOREIGN: 99.0}, A)]:
        with chain_of(small, logit_bias=bias, **settings) as chain:
            assert sample(chain, row) == ref


@pytest.mark.parametrize("position", POSITIONS)
def test_biases_that_ban_every_option_leave_an_option(small: Any, position: str) -> None:
    row = flat_row(small, A=0.0, E=2.0, G=1.0)
    for mode in MODES:
        settings = {"trie_position": position, "token_trie_mode": mode, "logit_bias": dict.fromkeys((A, E, G), -np.inf)}
        with chain_of(small, **settings) as chain:
            comp = sample(chain, row)
            assert comp in (A, E, G)
            # The probe in front saw the logits before the ban.
            assert comp == E or position == "first"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "penalty", [{"penalty_repeat": 3.0}, {"penalty_freq": 1.5}, {"penalty_present": 1.5}], ids=lambda p: next(iter(p))
)
def test_penalties_flip_a_valid_pick(small: Any, position: str, mode: int, penalty: dict[str, float]) -> None:
    row = flat_row(small, A=2.0, E=1.0, G=0.0)
    settings = {"trie_position": position, "token_trie_mode": mode, "temp": 0.001}
    with chain_of(small, **penalty, **settings) as chain:
        assert sample(chain, row) == A
        handle = handle_of(chain)
        # What came before the span is shown to the penalties while the trie is released.
        handle.deactivate()
        accept(chain, FOREIGN, A)
        handle.activate()
        assert sample(chain, row) == E
        llama_cpp.llama_sampler_reset(chain)
        assert sample(chain, row) == A


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_dry_flips_a_valid_pick_and_stops_at_a_breaker(small: Any, position: str, mode: int) -> None:
    """After x y A ... x y, going on with A repeats; not across a breaker. Its array is llama.cpp's own by then."""
    row = flat_row(small, A=2.0, E=1.0, G=0.0)
    x, y = 401, 402
    breaker = LlamaTokenizer(small).detokenize([y]).decode()
    settings = {"trie_position": position, "token_trie_mode": mode, "temp": 0.001, "dry_multiplier": 3.0}
    for breakers, ref in [([], E), ([breaker], A)]:
        with chain_of(small, dry_sequence_breakers=breakers, **settings) as chain:
            gc.collect()
            junk = [f"{i:40}".encode() for i in range(1000)]
            handle = handle_of(chain)
            handle.deactivate()
            accept(chain, x, y, A, FOREIGN, x, y)
            handle.activate()
            assert sample(chain, row) == ref
            del junk


def test_llama_cpp_copies_the_biases(small: Any) -> None:
    row = flat_row(small, A=2.0, E=1.0, G=0.0)
    with chain_of(small, logit_bias={E: 5.0}) as chain:
        gc.collect()
        junk = [(llama_cpp.llama_logit_bias * 1)((G, 50.0)) for _ in range(1000)]
        assert sample(chain, row) == E
        del junk
        clone = llama_cpp.llama_sampler_clone(chain)
        assert sample(clone, row) == E
        llama_cpp.llama_sampler_free(clone)


def test_tokens_to_suppress_are_banned_unless_the_trie_has_them(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``common_sampler_init``: some model files name tokens that must not be sampled."""
    ids = (ctypes.c_int32 * 2)(A, FOREIGN)

    def get_tokens(_vocab: Any, n_tokens: Any) -> Any:
        n_tokens._obj.value = 2
        return ids

    monkeypatch.setattr(llama_cpp, "llama_vocab_get_suppress_tokens", get_tokens, raising=False)
    row = flat_row(small, A=2.0, E=1.0)
    row[[FOREIGN, FOREIGN + 1]] = [9.0, 5.0]
    with chain_of(small) as chain:
        assert sample(chain, row) == A
        handle_of(chain).deactivate()
        assert sample(chain, row) == FOREIGN + 1
    with chain_of(small, None, temp=0.0) as chain:
        assert sample(chain, row) == FOREIGN + 1
    monkeypatch.delattr(llama_cpp, "llama_vocab_get_suppress_tokens")
    with chain_of(small, None, temp=0.0) as chain:
        assert sample(chain, row) == FOREIGN


# --- walking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"samplers": ["top_k", "infill"], "top_k": 1}], ids=["plain", "infill"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_clone_walks_apart(small: Any, position: str, mode: int, params: dict[str, Any]) -> None:
    """Each pair of probe and trie is its own: what one stores, the other does not see."""
    before = n_alive()
    row = flat_row(small, A=1.0, B=0.5, C=0.9, E=2.0, G=0.0, H=3.0)
    row[FOREIGN] = 30.0
    params = {"samplers": ["top_k"], "top_k": 1} | params
    with chain_of(small, trie_position=position, token_trie_mode=mode, **params) as chain:
        accept(chain, A)
        clone = llama_cpp.llama_sampler_clone(chain)
        assert n_alive() - before == 2
        llama_cpp.llama_sampler_reset(chain)
        assert (sample(chain, row), sample(clone, row)) == (E, C)
        accept(chain, G)
        assert (sample(clone, row), sample(chain, row)) == (C, H)
        second = llama_cpp.llama_sampler_clone(clone)
        accept(clone, C)
        row[D] = -5.0
        assert (sample(clone, row), sample(second, row), sample(chain, row)) == (D, C, H)
        assert handle_of(clone).position_in_span == 2
        llama_cpp.llama_sampler_free(clone)
        assert (sample(second, row), sample(chain, row)) == (C, H)
        llama_cpp.llama_sampler_free(second)
        assert n_alive() - before == 1


@pytest.mark.parametrize("position", POSITIONS)
def test_a_clone_outlives_its_chain(small: Any, position: str) -> None:
    with chain_of(small, trie_position=position) as chain:
        clone = llama_cpp.llama_sampler_clone(chain)
    gc.collect()
    for row in rows_of(40, V):
        assert sample(clone, row) == best_of(row, TRIE.children(()))
    llama_cpp.llama_sampler_free(clone)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_several_descriptors_wait_for_one_to_be_activated(small: Any, position: str, mode: int) -> None:
    row = flat_row(small, A=1.0, E=2.0)
    row[FOREIGN] = 30.0
    payload = payload_of(small, action=[[A, B], [C]], kind=[[E, F], [G]])
    params = SamplingParams(token_trie_descriptor_json=payload, token_trie_mode=mode, trie_position=position)
    chain = build_sampler_chain(small, params)
    handle = handle_of(chain)
    assert sample(chain, row) == FOREIGN
    handle.activate("kind")
    assert sample(chain, row) == E
    handle.activate("action")
    assert sample(chain, row) == A
    llama_cpp.llama_sampler_free(chain)
    chain = build_sampler_chain(small, params.model_copy(update={"path": "kind"}))
    assert sample(chain, row) == E
    llama_cpp.llama_sampler_free(chain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("on_end", ["mass", "eog", "release"])
def test_where_a_leaf_may_end_and_after_it(small: Any, on_end: str, position: str, mode: int) -> None:
    ends = sorted(TINY_EOG)
    stops = [FOREIGN] if on_end == "release" else ends
    settings = {"on_end": on_end, "stop_tokens": [FOREIGN], "trie_position": position, "token_trie_mode": mode}
    row = flat_row(small, F=1.0)
    row[[*ends, FOREIGN]] = [0.0, 0.1, 0.2]
    with chain_of(small, **settings) as chain:
        accept(chain, E)
        for other in rows_of(60, V):
            assert sample(chain, other) in {F, *stops, FOREIGN}
        row[F] = 20.0
        assert sample(chain, row) == F
        row[F] = -20.0
        assert sample(chain, row) in {*stops, FOREIGN}
        accept(chain, F)
        handle = handle_of(chain)
        assert not handle.is_active or handle.leaf_name is not None
        if on_end == "release":
            assert not handle.is_active
        else:
            for other in rows_of(60, V):
                comp = sample(chain, other)
                assert comp in {*stops, FOREIGN}
                if mode == 0:
                    assert comp == best_of(other, [*stops, FOREIGN])


@pytest.mark.parametrize("position", POSITIONS)
def test_after_the_leaf_the_best_end_token_comes_back(small: Any, position: str) -> None:
    """Before and after the end token that finishes; the filters took every end token away."""
    row = flat_row(small)
    row[sorted(TINY_EOG)] = [1.0, 2.0]
    row[FOREIGN] = 30.0
    settings = {"on_end": "mass", "trie_position": position, "token_trie_mode": 1, "top_k": 1}
    with chain_of(small, **settings) as chain:
        accept(chain, G, H)
        assert sample(chain, row) == max(TINY_EOG)
        accept(chain, min(TINY_EOG))
        assert handle_of(chain).is_finished
        assert sample(chain, row) == max(TINY_EOG)


@pytest.mark.parametrize("position", POSITIONS)
def test_where_ends_are_banned_they_still_end(small: Any, position: str) -> None:
    for mode in MODES:
        settings = {"on_end": "eog", "ignore_eos": True, "trie_position": position, "token_trie_mode": mode}
        with chain_of(small, **settings) as chain:
            accept(chain, E)
            assert sample(chain, flat_row(small, F=1.0)) == F
            accept(chain, F)
            assert sample(chain, flat_row(small)) in TINY_EOG


@pytest.mark.parametrize(
    "name", ["defaults", "top_k 1", "xtc", "typical", "infill", "adaptive_p", "mirostat 1", "mirostat 2"]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_whole_choices_of_a_real_context(small: Any, position: str, mode: int, name: str) -> None:
    """``llama_sampler_sample`` to the end of the span: a choice; greedy: the one the oracle walks to."""
    choices = {
        text: small.tokenize(text.encode(), add_bos=False) for text in ("PLAY", "PLAYING", "STOP", "yes", "yes!")
    }
    leaves = list(choices.values())
    trie = oracle.DictTrie(choices.items())
    for prompt, on_end, seed in itertools.product((b"action:", b"kind"), ("release", "mass", "eog"), range(2)):
        ids = small.tokenize(prompt)
        small.reset()
        small.eval(ids)
        stop = small.tokenize(b"\n", add_bos=False)[-1:] if on_end == "release" else []
        settings = {"trie_position": position, "token_trie_mode": mode, "seed": seed, "on_end": on_end}
        with chain_of(small, leaves, stop_tokens=stop, **settings, **CONFIGURATIONS[name]) as chain:
            handle = handle_of(chain)
            tokens: list[int] = []
            rows = []
            while handle.is_active or handle.is_finished:
                row = spies.raw_row(small)
                token = llama_cpp.llama_sampler_sample(chain, small.ctx, -1)
                ends = [*stop, *TINY_EOG] if on_end != "release" else stop
                if token in ends and trie.is_terminal(tokens):
                    assert handle.is_finished or not handle.is_active
                    break
                tokens.append(token)
                rows.append(row)
                assert trie.node_at(tokens) is not None
                small.eval([token])
            assert trie.is_terminal(tokens), tokens
            if mode == 0:
                for i, row in enumerate(rows):
                    assert tokens[i] == best_of(row, trie.children(tokens[:i]))


# --- beside a sampler that forces --------------------------------------------------------------


class Budget:
    """Stands in for llama.cpp's reasoning budget: masks tokens, or all but the one that it forces."""

    def __init__(self) -> None:
        self.forced: int | None = None
        self.masked: set[int] = set()
        self._table = llama_cpp.llama_sampler_i()
        self._name = llama_cpp.llama_sampler_i_name(lambda _sampler: b"budget")
        self._apply = llama_cpp.llama_sampler_i_apply(self._act)
        self._table.name, self._table.apply = self._name, self._apply

    def _act(self, _sampler: Any, array: Any) -> None:
        candidates = array.contents
        for i in range(candidates.size):
            token = candidates.data[i].id
            if (self.forced is not None and token != self.forced) or token in self.masked:
                candidates.data[i].logit = -np.inf

    def sampler(self) -> Any:
        """Without a context there is nothing to free or to clone."""
        return llama_cpp.llama_sampler_init(ctypes.pointer(self._table), None)


@contextlib.contextmanager
def with_budget(chain: Any, budget: Budget, where: str) -> Iterator[Any]:
    """The chain with the budget sampler in front of all, or between the trie and what follows it."""
    if where == "behind":
        n_samplers = llama_cpp.llama_sampler_chain_n(chain)
        place = n_samplers - 1 if names_of(chain).count("token-trie") == 2 else 1
        moved = [llama_cpp.llama_sampler_chain_remove(chain, place) for _ in range(n_samplers - place)]
        for sampler in [budget.sampler(), *moved]:
            llama_cpp.llama_sampler_chain_add(chain, sampler)
        yield chain
        return
    outer = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(outer, budget.sampler())
    llama_cpp.llama_sampler_chain_add(outer, chain)
    yield outer
    # The inner chain stays the caller's.
    llama_cpp.llama_sampler_chain_remove(outer, 1)
    llama_cpp.llama_sampler_free(outer)


@pytest.mark.parametrize("where", ["front", "behind"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_budget_sampler_and_the_trie(small: Any, position: str, mode: int, where: str) -> None:
    settings = {"trie_position": position, "token_trie_mode": mode, "top_k": 3}
    with chain_of(small, **settings) as chain, warnings.catch_warnings():
        # Where the budget masked every option, the handle says so.
        warnings.simplefilter("ignore", TrieSamplerWarning)
        check_budget(chain, mode, where)


def check_budget(chain: Any, mode: int, where: str) -> None:
    budget = Budget()
    handle = handle_of(chain)
    with with_budget(chain, budget, where) as whole:
        children = TRIE.children(())
        for masked in ([FOREIGN], [A], [A, FOREIGN], children):
            budget.masked = set(masked)
            for row in rows_of(12, V):
                # Double masking does no harm: one of the options comes out.
                comp = sample(whole, row)
                assert comp in children
                if mode == 0 and where == "front" and masked != children:
                    assert comp == best_of(row, [token for token in children if token not in masked])
        budget.masked = set()
        budget.forced = FOREIGN
        row = next(rows_of(1, V))
        # Armed, the trie has the last word, and what the budget forces does not come out.
        assert sample(whole, row) in children
        handle.deactivate()
        row[FOREIGN] = 30.0
        assert sample(whole, row) == FOREIGN
        accept(whole, FOREIGN, FOREIGN)
        assert handle.status == 0
        handle.activate()
        budget.forced = None
        assert sample(whole, row) in children


def test_a_prompt_accepted_while_armed_releases_the_trie(small: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Why the prompt is to be accepted while the trie is released."""
    with chain_of(small) as chain:
        accept(chain, FOREIGN)
        handle = handle_of(chain)
        assert not handle.is_active
        assert "does not allow there; released" in caplog.text


# --- grammars and fallbacks --------------------------------------------------------------------

GRAMMAR = 'root ::= "yes" | "no"'
NOT_A_TRIE = [
    ("", "[", PayloadError),
    ("", '{"modelId": "m", "descriptors": []}', EmptyTrieError),
    ("", '{"modelId": "m", "descriptors": [{"path": "a", "leaves": []}]}', EmptyTrieError),
    (
        "",
        '{"modelId": "m", "descriptors": [{"path": "a", "leaves": [{"name": "x", "tokens": [9999]}]}]}',
        VocabMismatchError,
    ),
    (
        "nope",
        '{"modelId": "m", "descriptors": [{"path": "a", "leaves": [{"name": "x", "tokens": [300]}]}]}',
        UnknownPathError,
    ),
]


@pytest.mark.parametrize(("path", "payload", "error"), NOT_A_TRIE)
def test_a_trie_that_cannot_be_built(small: Any, path: str, payload: str, error: type[Exception]) -> None:
    params = SamplingParams(token_trie_descriptor_json=payload, path=path or None, temp=0.0)
    with pytest.raises(error):
        build_sampler_chain(small, params)
    with pytest.warns(TrieSamplerWarning, match="grammar constrains in its place") as caught:
        chain = build_sampler_chain(small, params.model_copy(update={"grammar": GRAMMAR}))
    assert caught[0].filename == __file__
    assert names_of(chain)[0] == "grammar"
    assert "token-trie" not in names_of(chain)
    tokenizer = LlamaTokenizer(small)
    for row in rows_of(8, V):
        piece = tokenizer.detokenize([sample(chain, row)])
        assert piece
        assert b"yes".startswith(piece) or b"no".startswith(piece)
    llama_cpp.llama_sampler_free(chain)


@pytest.mark.parametrize("lazy", [{}, {"grammar_lazy": True, "grammar_triggers": ["x"]}], ids=["eager", "lazy"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_trie_and_a_grammar_are_refused_together(small: Any, position: str, lazy: dict[str, Any]) -> None:
    """Also where the trie waits for its activation: the grammar would abort on the first token after it."""
    before = n_alive()
    for payload in (payload_of(small, LEAVES), payload_of(small, LEAVES, [[A]])):
        params = SamplingParams(token_trie_descriptor_json=payload, grammar=GRAMMAR, trie_position=position, **lazy)
        with pytest.raises(EngineError, match="a trie and a grammar cannot share a chain"):
            build_sampler_chain(small, params)
    assert n_alive() == before


def test_an_empty_grammar_is_none(small: Any) -> None:
    with chain_of(small, grammar="") as chain:
        assert "grammar" not in names_of(chain)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Addresses of llama.cpp's own samplers that were made, and of all that were freed."""
    made: list[int] = []
    freed: list[int] = []
    for name in dir(llama_cpp):
        if not re.match(r"llama_sampler_(init_|chain_init)", name):
            continue
        function = getattr(llama_cpp, name)

        def spy(*arguments: Any, function: Any = function) -> Any:
            sampler = function(*arguments)
            if sampler:
                made.append(ctypes.addressof(sampler.contents))
            return sampler

        spy.argtypes = getattr(function, "argtypes", None)  # type: ignore[attr-defined]
        monkeypatch.setattr(llama_cpp, name, spy)
    free = llama_cpp.llama_sampler_free

    def spy_free(sampler: Any) -> None:
        if sampler:
            freed.append(ctypes.addressof(sampler.contents))
        free(sampler)

    monkeypatch.setattr(llama_cpp, "llama_sampler_free", spy_free)
    return {"made": made, "freed": freed}


@pytest.mark.parametrize("grammar", ['root ::= ("a"', 'start ::= "a"', "root ::= root", " "])
@pytest.mark.parametrize("lazy", [{}, {"grammar_lazy": True, "grammar_triggers": ["x", 300]}], ids=["eager", "lazy"])
def test_a_grammar_that_does_not_parse(
    small: Any, grammar: str, lazy: dict[str, Any], ledger: dict[str, list[int]]
) -> None:
    with pytest.raises(EngineError, match="the grammar does not parse"):
        build_sampler_chain(small, SamplingParams(grammar=grammar, **lazy))
    assert sorted(ledger["made"]) == sorted(ledger["freed"])


@pytest.mark.parametrize("position", POSITIONS)
def test_a_part_that_fails_takes_the_others_with_it(
    small: Any, position: str, ledger: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selector cannot be made: probe, trie and filters are freed, also those not yet in their place."""
    before = n_alive()
    params = {"token_trie_mode": 1, "trie_position": position, "token_trie_descriptor_json": payload_of(small, LEAVES)}
    for failing in ("dist", "top_k", "penalties"):
        with monkeypatch.context() as patch:
            stub = lambda *_: None  # noqa: E731
            stub.argtypes = [None] * 5  # type: ignore[attr-defined]
            patch.setattr(llama_cpp, f"llama_sampler_init_{failing}", stub)
            with pytest.raises(EngineError, match=f"llama_sampler_init_{failing} made no sampler"):
                build_sampler_chain(small, SamplingParams(**params))
    assert len(ledger["made"]) > 3
    assert Counter(ledger["made"]) <= Counter(ledger["freed"])
    assert n_alive() == before


@pytest.mark.parametrize("name", ["adaptive_p", "infill"])
def test_a_sampler_that_the_host_lacks_is_missed_only_where_it_is_asked_for(
    small: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(llama_cpp, f"llama_sampler_init_{name}")
    with chain_of(small, None), chain_of(small, token_trie_mode=1):
        pass
    # Greedy leaves it out.
    with chain_of(small, samplers=[name]):
        pass
    version = re.escape(llama_cpp.__version__)
    with pytest.raises(EngineError, match=f"{version} has no llama_sampler_init_{name}"):
        build_sampler_chain(small, SamplingParams(samplers=["top_k", name]))


def test_older_signatures(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python 0.3.16: penalties do not ask for V, dry asks for the training context."""
    seen: dict[str, tuple[Any, ...]] = {}

    def old(name: str, n_arguments: int) -> Any:
        def init(*arguments: Any) -> Any:
            seen[name] = arguments
            return llama_cpp.llama_sampler_init_greedy()

        init.argtypes = [None] * n_arguments  # type: ignore[attr-defined]
        return init

    monkeypatch.setattr(llama_cpp, "llama_sampler_init_penalties", old("penalties", 4))
    monkeypatch.setattr(llama_cpp, "llama_sampler_init_dry", old("dry", 8))
    with chain_of(small, None, penalty_last_n=9, dry_penalty_last_n=11):
        pass
    assert seen["penalties"] == (9, 1.0, 0.0, 0.0)
    assert seen["dry"][1:6] == (4096, 0.0, 1.75, 2, 11)
    assert seen["dry"][-1] == 4


def test_a_lazy_grammar_wakes_at_its_triggers(small: Any) -> None:
    """Words are literal: the dot of "x.y" is a dot."""
    tokenizer = LlamaTokenizer(small)
    for trigger, sleeping, waking in [("x.", "xy", "x."), (FOREIGN, "x.", None)]:
        settings = {
            "grammar": 'root ::= "x." "yes" | ' + json.dumps(tokenizer.detokenize([FOREIGN]).decode()) + ' "yes"'
        }
        with chain_of(small, None, temp=0.0, grammar_lazy=True, grammar_triggers=[trigger], **settings) as chain:
            row = next(rows_of(1, V))
            accept(chain, *tokenizer.tokenize(sleeping.encode()))
            assert sample(chain, row) == int(np.argmax(row))
            accept(chain, *(tokenizer.tokenize(waking.encode()) if waking else [FOREIGN]))
            assert b"yes".startswith(tokenizer.detokenize([sample(chain, row)]))


# --- the model, and what belongs to whom -------------------------------------------------------


def test_the_model_may_be_a_pointer(small: Any) -> None:
    for model in (small.model, ctypes.c_void_p(small.model)):
        params = SamplingParams(token_trie_descriptor_json=payload_of(small, LEAVES), on_end="eog", samplers=["dry"])
        chain = build_sampler_chain(model, params)
        accept(chain, G, H)
        assert sample(chain, flat_row(small)) in TINY_EOG
        llama_cpp.llama_sampler_free(chain)


@pytest.mark.parametrize("model", [None, 0, True, "model.gguf", ctypes.c_void_p(0)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="llama_model pointer"):
        build_sampler_chain(model, SamplingParams())


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {768: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"stop_tokens": [768]},
        {"grammar": GRAMMAR, "grammar_lazy": True, "grammar_triggers": [768]},
    ],
    ids=str,
)
def test_tokens_outside_the_vocabulary_are_refused(small: Any, params: dict[str, Any]) -> None:
    with pytest.raises(
        VocabMismatchError, match=f"{next(reversed(params))}: token -?\\d+ is not in the vocabulary of 768"
    ):
        build_sampler_chain(small, SamplingParams(**params))


def test_a_span_that_could_never_end_is_refused(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module._Builder, "_eog_ids", lambda _self: ())
    with pytest.raises(EngineError, match="this vocabulary has none"):
        build_sampler_chain(small, SamplingParams(token_trie_descriptor_json=payload_of(small, LEAVES), on_end="mass"))
    with chain_of(small, on_end="mass", stop_tokens=[FOREIGN]), chain_of(small):
        pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_chains_leave_nothing(small: Any) -> None:
    """Made, cloned, used and freed; the first hundred warm the allocator."""
    payload = payload_of(small, LEAVES)
    row = next(rows_of(1, V))
    before = n_alive()
    parameters = [
        SamplingParams(
            token_trie_descriptor_json=payload,
            trie_position=position,
            token_trie_mode=mode,
            logit_bias={A: 1.0},
            dry_multiplier=1.0,
            **params,
        )
        for position, mode, params in itertools.product(
            POSITIONS, MODES, [{}, {"samplers": ["infill"]}, {"mirostat": 1}, {"samplers": ["adaptive_p"]}]
        )
    ]
    baseline = 0
    for i in range(1100):
        chain = build_sampler_chain(small, parameters[i % len(parameters)])
        clone = llama_cpp.llama_sampler_clone(chain)
        assert {sample(chain, row), sample(clone, row)} <= {A, E, G}
        handle = handle_of(clone) if i % 3 == 0 else None
        for sampler in (chain, clone) if i % 2 else (clone, chain):
            llama_cpp.llama_sampler_free(sampler)
        assert handle is None or handle.is_freed
        del handle
        if i % 100 == 99:
            gc.collect()
            assert n_alive() == before
            baseline = baseline or resident_bytes()
    assert resident_bytes() - baseline < 2_000_000
