"""``TrieCursor``: the mutable walker over one trie, and the one state machine of the library."""

from __future__ import annotations

import logging
import operator
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trie_sampler import kernels, layout
from trie_sampler.errors import OffTrieError, TrieSamplerError, UnknownPathError, warn
from trie_sampler.trie import TokenTrie

_logger = logging.getLogger(__name__)

Row = npt.NDArray[np.float32] | npt.NDArray[np.float64]


_MODES = {"greedy": "greedy", "sampled": "sampled", 0: "greedy", 1: "sampled"}


def as_mode(mode: str | int) -> str:
    """``"greedy"`` or ``"sampled"``, also from the reference's 0 and 1.

    Raises:
        ValueError: another mode.
    """
    if isinstance(mode, bool) or mode not in _MODES:
        raise ValueError(f'mode must be "greedy", "sampled", 0 or 1, got {mode!r}')
    return _MODES[mode]


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse an argument that is none of its words with a ``ValueError``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")


@dataclass(frozen=True)
class Sampling:
    """How to draw from the options of a node; the defaults draw from the plain softmax.

    Filters act in llama.cpp's default order: top_k, top_p, min_p, then temperature.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_k: keep the k likeliest options; 0 keeps all.
        top_p: keep the fewest options whose mass reaches it, [0, 1]; 0 keeps one, 1 all.
        min_p: drop options below this share of the likeliest, [0, 1]; 0 keeps all.
        seed: the sequence of draws, the same on every platform; ``None`` takes a random one.

    Raises:
        ValueError: a number outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        ranges = {
            "temperature must be a finite number >= 0": 0 <= self.temperature < np.inf,
            "top_k must be an integer >= 0": _is_count(self.top_k),
            "top_p must be in [0, 1]": 0 <= self.top_p <= 1,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
        }
        for rule, holds in ranges.items():
            if not holds:
                raise ValueError(f"{rule}, got {getattr(self, rule.split()[0])!r}")


class Step(NamedTuple):
    """One pick of ``TrieCursor.constrain``: token, nats, and whether there was no other."""

    token: int
    logprob: float
    margin: float
    is_forced: bool


class TrieCursor:
    """Walks one trie, constrains each step, and knows when a choice may, must or did end.

    =====================================  ============================  =======================
    event                                  ``on_end`` "mass" or "eog"    ``on_end="release"``
    =====================================  ============================  =======================
    accept a child                         step                          step
    ... that ends a leaf with no children  only end tokens remain        released
    accept an end token at ``may_end``     finished                      released
    accept anything else while armed       ``OffTrieError``, unchanged   released, logged
    accept while released or finished      counted only                  counted only
    ``max_span_tokens`` accepts            finished, logged              released, logged
    ``reset()``                            root, armed as at birth       same
    =====================================  ============================  =======================

    Born armed where the trie has one descriptor or ``path`` is given: making a cursor *is* the
    activation. With several descriptors it is born released; ``activate(path)`` arms it.

    **Where one choice begins another** the question is whether to stop:

    * ``"mass"``: P(stop) is the end mass, 1 - sum of p(children) over the full softmax. Greedy
      stops where P(stop) >= the largest p(child); sampling stops with that probability.
    * ``"eog"``: the end tokens compete with the children as tokens, as in a grammar.
    * ``"release"``: the same with the given ``stop_tokens`` only; after the leaf all is free.

    Args:
        trie: the trie to walk; shared, never changed.
        path: descriptor to start in.
        on_end: ``"mass"``, ``"eog"`` or ``"release"``.
        eog_ids: the model's end-of-generation ids; end tokens unless ``on_end="release"``.
        stop_tokens: further end tokens, a separator for example.
        max_span_tokens: accepts after which the span is closed, 1 or more; never below depth + 1.
        on_fault: ``"warn"`` or ``"raise"`` where every valid logit is NaN or -inf.
        sampling: how ``sample`` draws; ``None`` draws from the plain softmax.

    Raises:
        UnknownPathError: no descriptor of that path.
        ValueError: another ``on_end`` or ``on_fault``; an end token below 0 or past int32; ``max_span_tokens`` below 1.

    Example:
        >>> trie = TokenTrie.from_sequences([("YES", [1, 2]), ("NO", [3])])
        >>> cursor = TrieCursor(trie, eog_ids=[0])
        >>> row = np.array([9.0, 0.5, 0.0, 0.1], np.float32)
        >>> cursor.pick(row)
        1
        >>> cursor.accept(1); cursor.forced_run().tolist()
        [2]
    """

    __slots__ = (
        "_address",
        "_ends",
        "_on_fault",
        "_path",
        "_record",
        "_warned",
        "trie",
    )

    def __init__(
        self,
        trie: TokenTrie,
        *,
        path: str | None = None,
        on_end: str = "mass",
        eog_ids: Iterable[int] = (),
        stop_tokens: Iterable[int] = (),
        max_span_tokens: int = 500,
        on_fault: str = "warn",
        sampling: Sampling | None = None,
    ) -> None:
        check_choice("on_end", on_end, layout.ON_END)
        check_choice("on_fault", on_fault, ("warn", "raise"))
        if operator.index(max_span_tokens) < 1:
            raise ValueError(f"max_span_tokens must be at least 1, got {max_span_tokens}")
        if path is None and len(trie.paths) == 1:
            path = trie.paths[0]
        ends = {operator.index(token) for token in (*(() if on_end == "release" else eog_ids), *stop_tokens)}
        if any(not 0 <= token <= np.iinfo(layout.TOKEN).max for token in ends):
            raise ValueError(f"end tokens must be ids >= 0, got {sorted(ends)}")
        self.trie = trie
        self._ends = np.array(sorted(ends), layout.TOKEN)
        self._on_fault = on_fault
        self._warned = False
        self._path = path
        record = self._adopt(np.zeros(1, layout.CURSOR))
        record["birth_root"] = layout.NO_NODE if path is None else trie.root_of(path)
        record["on_end"] = layout.ON_END[on_end]
        record["max_span_tokens"] = max(max_span_tokens, trie.depth + 1)
        self._set_sampling(sampling or Sampling())
        self.reset()

    def _adopt(self, record: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Point a record at the arrays that this object keeps alive."""
        trie, ends = self.trie, self._ends
        record["token_address"] = trie.token.ctypes.data
        record["first_child_address"] = trie.first_child.ctypes.data
        record["leaf_address"] = trie.leaf.ctypes.data
        record["n_nodes"] = trie.n_nodes
        record["n_edges"] = len(trie.token)
        record["target_address"] = 0 if trie.target is None else trie.target.ctypes.data
        record["end_address"] = ends.ctypes.data
        record["n_end"] = len(ends)
        record["min_width"] = max(trie.max_token, *ends[-1:].tolist(), 0) + 1
        self._record = record
        self._address = record.ctypes.data
        return record

    def _set_sampling(self, sampling: Sampling) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            self._record[name] = getattr(sampling, name)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        for place, word in enumerate(_seed_words(seed)):
            self._record[f"random_{place}"] = word

    # --- where it is ---------------------------------------------------------------------------

    @property
    def node(self) -> int:
        """The node of the trie that it stands at; -1 before the first activation."""
        return int(self._record["node"][0])

    @property
    def path(self) -> str | None:
        """The descriptor it was last activated for; ``None`` before any."""
        return self._path

    @property
    def is_active(self) -> bool:
        """Armed: the next token is constrained."""
        return bool(self._record["state"][0] == layout.ARMED)

    @property
    def is_finished(self) -> bool:
        """A whole leaf was ended; only end tokens may follow."""
        return bool(self._record["state"][0] == layout.FINISHED)

    @property
    def may_end(self) -> bool:
        """Armed, and the path so far is a whole leaf."""
        return self.is_active and self.trie.is_terminal(self.node)

    @property
    def must_end(self) -> bool:
        """Armed, and the path so far is a whole leaf that no other continues."""
        return self.may_end and len(self.trie.children(self.node)) == 0

    @property
    def position_in_span(self) -> int:
        """Tokens of the trie accepted since activation."""
        return int(self._record["position_in_span"][0])

    @property
    def leaf_name(self) -> str | None:
        """Name of the leaf that ends where it stands, ``None`` where none does."""
        return None if self.node < 0 else self.trie.leaf_name(self.node)

    @property
    def on_end(self) -> str:
        """How a span may end: "mass", "eog" or "release"."""
        return next(name for name, code in layout.ON_END.items() if code == self._record["on_end"][0])

    @property
    def end_tokens(self) -> npt.NDArray[np.int32]:
        """[n] int32, ascending: the tokens that end the span."""
        return self._ends.copy()

    def allowed(self) -> npt.NDArray[np.int32]:
        """[K] int32, ascending: the tokens that ``accept`` takes next.

        Raises:
            TrieSamplerError: released, so that every token is allowed; an empty or whole-vocabulary
                answer would be read as something else.
        """
        if self.is_finished:
            return self._ends.copy()
        if not self.is_active:
            raise TrieSamplerError("released: every token is allowed; ask is_active first")
        children = self.trie.children(self.node)
        return np.union1d(children, self._ends) if self.may_end else children.copy()

    def forced_run(self) -> npt.NDArray[np.int32]:
        """[n] int32: the tokens that must follow, up to the next choice, leaf end or branch.

        A node is forced where it has exactly one child and no leaf ends at it. O(n).
        """
        out = np.empty(self.trie.depth, layout.TOKEN)
        return out[: kernels.trace_forced_run(self._address, out)].copy()

    # --- walking -------------------------------------------------------------------------------

    def pick(self, row: Row) -> int:
        """The greedy pick: the allowed token of the largest logit, ties to the lowest id.

        Args:
            row: [W] float32 or float64 logits, any stride, W > the largest id of the trie; read in
                place. NaN counts as -inf.

        Returns:
            A token id. Where the span should end, the end token of the largest logit, or -1 if
            there are no end tokens. Released: the argmax of the row. Does not move the cursor.

        Raises:
            ValueError, TypeError: a row too narrow, or not of that kind.
            TrieSamplerError: no finite valid logit, under ``on_fault="raise"``.

        Warns:
            TrieSamplerWarning: once, where no valid logit is finite; the lowest valid id is taken.

        Cost: O(K), under a microsecond for K <= 64; O(V) where a leaf ends and another goes on.
        """
        if not _is_row(row):
            raise TypeError(_not_a_row(row))
        token: int = kernels.pick_token(self._address, row)
        return token if token > layout.TROUBLE else self._settle(row)

    def sample(self, row: Row) -> int:
        """Draw from the allowed tokens; as ``pick`` otherwise. O(K), with top_k or top_p O(K log K)."""
        self._require_row(row)
        token = int(kernels.sample_token(self._address, row))
        return token if token > layout.TROUBLE else self._settle(row)

    def mask(self, row: Row) -> None:
        """Set every token that is not allowed to -inf, in place; nothing while released. O(V)."""
        self._require_row(row, writable=True)
        kernels.keep_allowed(self._address, row)

    def valid_mass(self, row: Row) -> float:
        """The model's own probability that its next token is one of the children. O(V)."""
        self._require_row(row)
        return float(kernels.measure_valid_mass(self._address, row))

    def constrain(self, row: Row, *, samples: bool) -> Step:
        """Pick or draw, and leave only that token in the row, in place. O(V).

        A token whose logit is NaN or -inf gets 0. While released the row is untouched.

        Raises:
            as ``pick``; TrieSamplerError also where the span should end and has no end token.
        """
        if self._record["state"][0] == layout.RELEASED:
            return Step(layout.NO_TOKEN, 0.0, np.inf, False)
        self._require_row(row, writable=True)
        step = self.decide(row, samples=samples)
        if step.token == layout.END:
            raise TrieSamplerError("the choice is over, and no end token is known to say so")
        kernels.keep_only(row, step.token)
        return step

    def decide(self, row: Row, *, samples: bool) -> Step:
        """Pick or draw, with the numbers of the decision; the row stays as it is. O(K), at a leaf that goes on O(V).

        The token is an end token where the span should end, -1 if there are none.

        Raises:
            as ``pick``.
        """
        self._require_row(row)
        token = int(kernels.score_row(self._address, row, samples))
        if token <= layout.TROUBLE:
            token = self._settle(row)
        record = self._record[0]
        return Step(token, float(record["logprob"]), float(record["margin"]), bool(record["is_forced"]))

    def accept(self, token: int) -> None:
        """Take a token into the walk; -1 ends the span like an end token. O(log K).

        Raises:
            OffTrieError: armed, and the token is not allowed; nothing changed.
        """
        token = operator.index(token)
        # Past int32 there are no ids; -2 is none either, and fits the kernel's argument.
        known = layout.END <= token <= np.iinfo(layout.TOKEN).max
        status = kernels.accept_token(self._address, token if known else layout.TROUBLE)
        if status == layout.OK:
            return
        if status == layout.SPAN_LIMIT:
            _logger.warning("a span outlasted max_span_tokens without being cleared; it is closed")
        elif self._record["on_end"][0] == layout.ON_END_RELEASE:
            _logger.warning("token %d is not in the trie here; released", token)
        else:
            allowed = self.allowed()
            raise OffTrieError(
                f"token {token} is not allowed here; allowed are {allowed[:8].tolist()}"
                + (f" and {len(allowed) - 8} more" if len(allowed) > 8 else "")  # noqa: PLR2004 - enough ids for one line
            )

    # --- starting and ending -------------------------------------------------------------------

    def activate(self, path: str | None = None) -> None:
        """Arm at the root of a descriptor; ``None`` where there is only one.

        Raises:
            UnknownPathError: no descriptor of that path; the message lists them. Nothing changed.
        """
        if path is None:
            if len(self.trie.paths) > 1:
                raise UnknownPathError(f"say which path to activate: {list(self.trie.paths)}")
            path = self.trie.paths[0]
        kernels.arm_cursor(self._address, self.trie.root_of(path))
        self._path = path

    def deactivate(self) -> None:
        """Release: let every token through until the next ``activate`` or ``reset``."""
        kernels.arm_cursor(self._address, layout.NO_NODE)

    def reset(self) -> None:
        """Back to the root, armed or released as at birth; random draws go on where they were."""
        birth_root = int(self._record["birth_root"][0])
        kernels.arm_cursor(self._address, birth_root)
        self._path = next((p for p, root in self.trie.roots.items() if root == birth_root), None)

    def take_draws_from(self, other: TrieCursor) -> None:
        """Go on with another cursor's sequence of random draws."""
        for place in range(4):
            name = f"random_{place}"
            self._record[name] = other._record[name]

    def clone(self) -> TrieCursor:
        """A cursor at the same place that walks on its own; the trie is shared."""
        twin = TrieCursor.__new__(TrieCursor)
        twin.__setstate__(self.__getstate__())
        return twin

    __copy__ = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> TrieCursor:
        return self.clone()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.trie, self._ends, self._on_fault, self._warned, self._path, self._record.copy()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.trie, self._ends, self._on_fault, self._warned, self._path, record = state
        self._adopt(record.copy())

    def __repr__(self) -> str:
        """Where it stands, in words."""
        state = ("released", "armed", "finished")[int(self._record["state"][0])]
        return f"TrieCursor({state}, path={self._path!r}, node={self.node}, leaf={self.leaf_name!r})"

    # --- trouble -------------------------------------------------------------------------------

    def _settle(self, row: Row) -> int:
        """Turn the status of a pick into an exception, or into a warning and the lowest valid id."""
        status = int(self._record["status"][0])
        self._record["status"] = layout.OK
        if status == layout.SHORT_ROW:
            self._require_row(row)
        message = "every valid logit is NaN or -inf, so the model says nothing about the choice"
        if self._on_fault == "raise":
            raise TrieSamplerError(message)
        if not self._warned:
            self._warned = True
            warn(f"{message}; taking the lowest valid id")
        return int(self._record["picked"][0])

    def _require_row(self, row: Row, *, writable: bool = False) -> None:
        """Refuse what is no row of logits for this trie; kernels index it unchecked."""
        if not _is_row(row):
            raise TypeError(_not_a_row(row))
        needed = int(self._record["min_width"][0])
        if len(row) < needed:
            raise ValueError(f"the row holds {len(row)} logits; the trie's ids need {needed}")
        if writable and not row.flags.writeable:
            raise ValueError("the row is read-only, and this writes to it; pass a copy")


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and 0 <= int(value) < 2**63


_ROW_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def _is_row(row: object) -> bool:
    return (
        isinstance(row, np.ndarray)
        and row.dtype in _ROW_DTYPES
        and row.ndim == 1
        and (type(row) is np.ndarray or not isinstance(row, np.ma.MaskedArray))
    )


def _not_a_row(row: object) -> str:
    kind = f"{row.dtype} array of shape {row.shape}" if isinstance(row, np.ndarray) else type(row)
    return f"a row is a one-dimensional float32 or float64 array, got {kind}"


def _seed_words(seed: int) -> list[int]:
    """Four 32-bit words from a seed by SplitMix64, as the authors of xoshiro advise."""
    mask = 2**64 - 1
    words = []
    for _ in range(2):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        words += [z & 0xFFFFFFFF, z >> 32]
    return words
