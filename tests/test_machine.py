"""One machine drives four that must agree: the oracle, a cursor, a native sampler and a processor in the host's chain.

Random picks, foreign tokens, resets, clones, releases. What is refused leaves the others, and the refused one, where
they were; whatever comes out is a leaf.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import llama_cpp
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import leaf_sets
from test_sampler import Candidates
from test_walk import StandIn, Walk

from trie_sampler import OffTrieError, TokenTrie, TrieCursor, TrieLogitsProcessor, TrieSamplerError, token_trie_handle
from trie_sampler.llama.sampler import new_sampler

V = 40
ENDS = (0, 35)
PROMPT = [1, 2]


class Machine(RuleBasedStateMachine):
    """``prefix`` is what the oracle has taken; ``None`` once the leaf is over."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix: list[int] | None = None
        self.sampler: Any = None
        logging.disable(logging.WARNING)

    @initialize(leaves=leaf_sets(max_token=31), on_end=st.sampled_from(["mass", "eog"]))
    def begin(self, leaves: Any, on_end: str) -> None:
        self.on_end = on_end
        shifted = [(name, [token + 1 for token in tokens]) for name, tokens in leaves]
        self.oracle = oracle.DictTrie(shifted)
        self.trie = TokenTrie.from_sequences(shifted)
        self.names = {name for name, tokens in shifted if tokens}
        self.host = StandIn(Walk(PROMPT, shifted, [([], [0.0] * V)], list(ENDS), on_end))
        with warnings.catch_warnings():
            # Names of a table are no texts of its tokens.
            warnings.simplefilter("ignore")
            self.constraint = TrieLogitsProcessor.from_choices(self.host, self.trie, on_end=on_end)  # type: ignore[arg-type]
        self.cursor = TrieCursor(self.trie, on_end=on_end, eog_ids=ENDS)
        self.sampler = new_sampler(self.cursor, keeps_options=False)[0]
        self.handle = token_trie_handle(self.sampler)
        self.start()

    def start(self) -> None:
        """A new walk for all, a new generation for the processor."""
        self.prefix, self.is_released = [], False
        self.picks: list[int] = []
        self.host._sampler = llama_cpp.Llama._init_sampler(
            self.host,
            logits_processor=self.constraint,
            temp=0.0,  # type: ignore[arg-type]
        )
        self.processor_follows = True

    # --- steps ---------------------------------------------------------------------------------

    @precondition(lambda self: self.prefix is not None and not self.is_released)
    @rule(seed=st.integers(0, 10_000), flat=st.booleans())
    def pick(self, seed: int, flat: bool) -> None:
        row = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
        if flat:
            row = np.round(row)  # ties
        assert self.prefix is not None
        children, ends_here = self.oracle.children(self.prefix), self.oracle.is_terminal(self.prefix)
        step = oracle.greedy_step(row, children, ends_here, self.on_end, ENDS)
        ref = oracle.argmax_child(row, ENDS) if step == oracle.STOP else step
        assert self.cursor.pick(row.copy()) == ref
        assert Candidates.of_row(row.copy()).apply(self.sampler).ids == [ref]
        if self.processor_follows:
            assert self.ask_processor(row) == ref
        self.cursor.accept(int(ref))
        llama_cpp.llama_sampler_accept(self.sampler, int(ref))
        self.picks.append(int(ref))
        self.prefix = None if step == oracle.STOP else [*self.prefix, int(ref)]
        if self.prefix is None:
            assert self.cursor.leaf_name in self.names
            if self.processor_follows:
                assert self.constraint.result.name == self.cursor.leaf_name
                assert self.constraint.result.complete

    def ask_processor(self, row: np.ndarray) -> int:
        self.host._input_ids = np.array([*PROMPT, *self.picks], np.intc)
        array = Candidates.of_row(row.copy())
        array.apply(self.host._sampler.sampler)
        token = array.selected_id
        llama_cpp.llama_sampler_accept(self.host._sampler.sampler, token)
        return token

    @precondition(lambda self: self.prefix is not None and not self.is_released)
    @rule(token=st.integers(-1, V + 5))
    def take_a_foreign_token(self, token: int) -> None:
        assert self.prefix is not None
        children, ends_here = self.oracle.children(self.prefix), self.oracle.is_terminal(self.prefix)
        if token in children or (ends_here and (token in ENDS or token == -1)):
            return
        with pytest.raises(OffTrieError):
            self.cursor.accept(token)
        llama_cpp.llama_sampler_accept(self.sampler, token)
        with pytest.raises(OffTrieError):
            _ = self.handle.counters
        _ = self.handle.counters  # told once

    @precondition(lambda self: self.prefix and not self.is_released and self.processor_follows)
    @rule(seed=st.integers(0, 10_000))
    def show_the_processor_another_history(self, seed: int) -> None:
        """The host evaluated what was not picked: no free text from there on, and the caller hears of it."""
        row = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
        last = self.picks[-1]
        self.picks[-1] = 33
        token = self.ask_processor(row)
        self.picks[-1] = last
        assert token in ENDS
        with pytest.raises(TrieSamplerError):
            _ = self.constraint.result
        self.processor_follows = False
        self.constraint.release_host()

    @rule()
    def reset(self) -> None:
        self.cursor.reset()
        llama_cpp.llama_sampler_reset(self.sampler)
        self.start()

    @rule(child=st.integers(0, 3))
    def go_on_with_clones(self, child: int) -> None:
        """What happens to the originals afterwards is nothing to the clones."""
        cursor, sampler = self.cursor, self.sampler
        self.cursor = cursor.clone()
        self.sampler = llama_cpp.llama_sampler_clone(sampler)
        self.handle = token_trie_handle(self.sampler)
        allowed = cursor.allowed().tolist() if cursor.is_active else []
        if allowed:
            cursor.accept(allowed[child % len(allowed)])
            llama_cpp.llama_sampler_accept(sampler, allowed[child % len(allowed)])
        llama_cpp.llama_sampler_free(sampler)

    @rule()
    def release(self) -> None:
        self.cursor.deactivate()
        self.handle.deactivate()
        self.is_released, self.processor_follows = True, False
        row = np.zeros(V, np.float32)
        assert Candidates.of_row(row).apply(self.sampler).array.size == V

    @rule()
    def arm(self) -> None:
        self.cursor.activate()
        self.handle.activate()
        self.prefix, self.is_released, self.processor_follows = [], False, False

    # --- what holds always ---------------------------------------------------------------------

    @invariant()
    def all_are_at_the_same_place(self) -> None:
        if self.sampler is None:
            return
        for name in ("state", "node", "root", "position_in_span"):
            assert int(self.handle._record[name]) == int(self.cursor._record[name][0]), name
        if self.prefix is None or self.is_released:
            assert not self.cursor.is_active
            return
        children, ends_here = self.oracle.children(self.prefix), self.oracle.is_terminal(self.prefix)
        assert self.cursor.allowed().tolist() == sorted({*children, *(ENDS if ends_here else ())})
        assert (self.cursor.may_end, self.cursor.must_end) == (ends_here, ends_here and not children)

    def teardown(self) -> None:
        logging.disable(logging.NOTSET)
        if self.sampler is not None:
            llama_cpp.llama_sampler_free(self.sampler)
            self.constraint.release_host()


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase
