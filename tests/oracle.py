"""Slow, plain reference implementations: what the library must agree with.

Nothing here imports the library, compiles anything or is clever: a trie is nested dictionaries, a number is one
float64 formula written in its docstring. Where the library works in float32 or in another order of summation, compare
with a tolerance, and skip decisions whose ``decision_margin`` is below it.

Conventions. A *row* is one row of logits, of any float type; it is widened to float64 first. NaN counts as -inf
everywhere. *Children* is any collection of distinct token ids, in any order. A *prefix* is a tuple of token ids
starting at the root, ``()`` being the root itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

STOP: Literal["stop"] = "stop"
Option: TypeAlias = int | Literal["stop"]
Prefix: TypeAlias = tuple[int, ...]
Rows: TypeAlias = Mapping[Prefix, np.ndarray] | Callable[[Prefix], np.ndarray]


@dataclass
class Node:
    """One state: the dictionary of what may come next, and the names that end exactly here."""

    children: dict[int, Node] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class DictTrie:
    """Trie of nested dictionaries. A sequence without tokens is left out, as the library leaves it out."""

    def __init__(self, sequences: Iterable[tuple[str, Sequence[int]]]) -> None:
        self.root = Node()
        for name, tokens in sequences:
            if len(tokens) == 0:
                continue
            node = self.root
            for token in tokens:
                node = node.children.setdefault(int(token), Node())
            node.names.add(name)

    def node_at(self, prefix: Sequence[int]) -> Node | None:
        """The node that ``prefix`` leads to, or None where the trie has no such path."""
        node = self.root
        for token in prefix:
            if token not in node.children:
                return None
            node = node.children[token]
        return node

    def _existing(self, prefix: Sequence[int]) -> Node:
        node = self.node_at(prefix)
        if node is None:
            raise KeyError(f"no node at {tuple(prefix)}")
        return node

    def children(self, prefix: Sequence[int]) -> list[int]:
        """Token ids that may come next, ascending."""
        return sorted(self._existing(prefix).children)

    def is_terminal(self, prefix: Sequence[int]) -> bool:
        """True where a whole sequence ends (the design's may_end)."""
        return bool(self._existing(prefix).names)

    def must_end(self, prefix: Sequence[int]) -> bool:
        """Terminal and without children."""
        return self.is_terminal(prefix) and not self.children(prefix)

    def is_forced(self, prefix: Sequence[int]) -> bool:
        """Exactly one child and not terminal."""
        return len(self.children(prefix)) == 1 and not self.is_terminal(prefix)

    def leaf_names(self, prefix: Sequence[int]) -> list[str]:
        """Names that end exactly here, ascending; empty where none does."""
        return sorted(self._existing(prefix).names)

    def name(self, prefix: Sequence[int]) -> str | None:
        """The smallest name that ends exactly here, None where none does."""
        return min(self._existing(prefix).names, default=None)

    def prefixes(self) -> list[Prefix]:
        """Every node's prefix, breadth-first, siblings ascending by token: the library's node numbering."""
        out: list[Prefix] = []
        queue: deque[Prefix] = deque([()])
        while queue:
            prefix = queue.popleft()
            out.append(prefix)
            queue.extend((*prefix, token) for token in self.children(prefix))
        return out

    def language(self) -> set[Prefix]:
        """The set of whole sequences."""
        return {prefix for prefix in self.prefixes() if self.is_terminal(prefix)}

    def collisions(self) -> dict[Prefix, list[str]]:
        """Sequences that more than one name spells -> those names, ascending."""
        return {prefix: self.leaf_names(prefix) for prefix in self.prefixes() if len(self.leaf_names(prefix)) > 1}

    @property
    def n_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.prefixes())


def _clean(row: np.ndarray | Sequence[float]) -> np.ndarray:
    """The row as float64 with NaN -> -inf."""
    out = np.array(row, dtype=np.float64)
    out[np.isnan(out)] = -np.inf
    return out


def row_of(probabilities: Mapping[int, float], width: int, rest: int | None = None) -> np.ndarray:
    """Logits log(p); what is missing to 1 goes to the id ``rest``, everything else to -inf."""
    p = np.zeros(width)
    for token, value in probabilities.items():
        p[token] = value
    if rest is not None:
        p[rest] = 1 - p.sum()
    with np.errstate(divide="ignore"):
        return np.log(p)


def logsumexp(logits: np.ndarray | Sequence[float]) -> float:
    """log(sum_i exp(x_i)) = m + log(sum_i exp(x_i - m)) with m = max_i x_i; -inf for nothing, +inf if any x_i is."""
    x = _clean(logits)
    top = float(x.max(initial=-np.inf))
    if np.isinf(top):
        return top
    return top + float(np.log(np.exp(x - top).sum()))


def softmax(logits: np.ndarray | Sequence[float]) -> np.ndarray:
    """p_i = exp(x_i) / sum_j exp(x_j).

    Limits: entries at +inf share everything equally; where every entry is -inf all p_i are 0 (there is no mass).
    """
    x = _clean(logits)
    top = float(x.max(initial=-np.inf))
    if top == -np.inf:
        return np.zeros_like(x)
    weights = (x == np.inf).astype(np.float64) if top == np.inf else np.exp(x - top)
    return weights / weights.sum()


def argmax_child(row: np.ndarray, children: Collection[int]) -> int:
    """The child with the largest logit; ties, and the case that all are NaN or -inf, go to the lowest id."""
    x = _clean(row)
    return min(children, key=lambda child: (-x[child], child))


def _outside(row: np.ndarray, children: Collection[int]) -> np.ndarray:
    """Mask over the row: True at the ids that are not children."""
    mask = np.ones(len(row), dtype=bool)
    mask[list(children)] = False
    return mask


def child_mass(row: np.ndarray, children: Collection[int]) -> float:
    """sum_{c in children} p_c with p = softmax(row): the share of the whole row that is valid (``valid_mass``)."""
    return float(softmax(row)[~_outside(row, children)].sum())


def end_mass(row: np.ndarray, children: Collection[int]) -> float:
    """P(stop) = 1 - sum_{c in children} p_c with p = softmax(row), summed here as the p of all other ids.

    1 where no child has any mass, so also for a row that is -inf throughout.
    """
    p = softmax(row)
    if not p.any():
        return 1.0
    return float(p[_outside(row, children)].sum())


def stop_logit(row: np.ndarray, children: Collection[int]) -> float:
    """logsumexp of the logits of all ids that are not children.

    exp(stop_logit - logsumexp(row)) = end_mass: stopping as one more option beside the children's own logits.
    """
    return logsumexp(_clean(row)[_outside(row, children)])


def greedy_step(
    row: np.ndarray, children: Collection[int], terminal: bool, on_end: str = "mass", stop_ids: Collection[int] = ()
) -> Option:
    """What greedy decoding does at one node: a child's id, or ``"stop"``.

    - no children (then terminal): stop;
    - not terminal: ``argmax_child``;
    - ``on_end="mass"``, terminal: stop iff end_mass >= max_c p_c, else ``argmax_child``;
    - ``on_end="eog"`` or ``"release"``, terminal: argmax over children and ``stop_ids`` (the end-of-generation ids,
      the stop tokens) as tokens; stop iff it is one of ``stop_ids``.
    """
    if not children:
        if not terminal:
            raise ValueError("a node has children or ends a sequence")
        return STOP
    if not terminal:
        return argmax_child(row, children)
    if on_end == "mass":
        best = argmax_child(row, children)
        return STOP if end_mass(row, children) >= softmax(row)[best] else best
    if on_end in ("eog", "release"):
        best = argmax_child(row, {*children, *stop_ids})
        return STOP if best in stop_ids else best
    raise ValueError(f"on_end: {on_end!r}")


def options(row: np.ndarray, children: Collection[int], terminal: bool) -> dict[Option, float]:
    """The options at a node with their logits: children ascending, then ``"stop"`` with ``stop_logit`` if terminal.

    Shifted by the row's largest logit, where that is finite: beside 3e38 the logarithm of a count would be lost.
    """
    x = _clean(row)
    top = x.max(initial=-np.inf)
    if np.isfinite(top):
        x -= top
    out: dict[Option, float] = {child: float(x[child]) for child in sorted(children)}
    if terminal:
        out[STOP] = stop_logit(x, children) if children else 0.0
    return out


def decision_margin(row: np.ndarray, children: Collection[int], terminal: bool) -> float:
    """Best minus second best logit of ``options``, in nats: p_best / p_second = exp(margin). +inf for one option.

    0 where the two are equal, also at -inf or +inf.
    """
    logits = sorted(options(row, children, terminal).values(), reverse=True)
    if len(logits) < 2:
        return np.inf
    return 0.0 if logits[0] == logits[1] else logits[0] - logits[1]


def walk_distribution(row: np.ndarray, children: Collection[int], terminal: bool) -> dict[Option, float]:
    """p_o = exp(x_o) / sum_o' exp(x_o') over ``options``; in their order.

    Where every option is at -inf: all on "stop" if terminal, else all on the lowest child.
    """
    logits = options(row, children, terminal)
    p = softmax(list(logits.values()))
    if not p.any():
        p[-1 if terminal else 0] = 1.0
    return dict(zip(logits, p.tolist(), strict=True))


def filtered_distribution(
    logits: np.ndarray | Sequence[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Probabilities of the options after the filters, in the options' order; 0 for one that was dropped.

    Each filter looks at the softmax at temperature 1 over what the filter before it left, as llama.cpp's do:

    1. top_k: the k largest, ties to the earlier option; k <= 0 is off;
    2. top_p: the shortest run of the most probable, ties to the earlier, whose sum is >= top_p, at least one;
       >= 1 is off;
    3. min_p: drop p < min_p * max p; <= 0 is off;
    4. temperature: p_i = exp(x_i / t) / sum_j exp(x_j / t) over what is left; t <= 0: all on the largest, ties to
       the earlier.

    Where every option is at -inf: all on the first.
    """
    x = _clean(logits)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        p = softmax(x[order])
        reached = np.flatnonzero(np.cumsum(p) >= top_p)
        if len(reached):
            order = order[: int(reached[0]) + 1]
    if min_p > 0:
        p = softmax(x[order])
        # The first always stays: it is the maximum (and with min_p > 1 nothing else could).
        order = [i for rank, i in enumerate(order) if rank == 0 or p[rank] >= min_p * p[0]]
    out = np.zeros(len(x))
    if temperature > 0 and x[order[0]] > -np.inf:
        # Shifted before it is divided: a large logit over a small temperature would overflow.
        kept = x[order] if x[order[0]] == np.inf else (x[order] - x[order[0]]) / temperature
        out[order] = softmax(kept)
    else:
        out[order[0]] = 1.0
    return out


def walk(trie: DictTrie, rows: Rows, on_end: str = "mass", stop_ids: Collection[int] = ()) -> tuple[Prefix, str | None]:
    """The greedy walk from the root: (tokens, name). ``rows`` gives the row of logits after each prefix."""
    prefix: Prefix = ()
    while True:
        children, terminal = trie.children(prefix), trie.is_terminal(prefix)
        if not children:
            return prefix, trie.name(prefix)
        row = rows(prefix) if callable(rows) else rows[prefix]
        step = greedy_step(row, children, terminal, on_end, stop_ids)
        if step == STOP:
            return prefix, trie.name(prefix)
        prefix = (*prefix, step)


_M32, _M64 = 2**32 - 1, 2**64 - 1


def splitmix64(seed: int) -> Iterator[int]:
    """64-bit words from a seed: Steele, Lea and Flood 2014, as Vigna's splitmix64.c has it."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & _M64
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & _M64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _M64
        yield z ^ z >> 31


def _rotl(x: int, k: int) -> int:
    """The 32 bits of x turned left by k."""
    return (x << k & _M32) | x >> 32 - k


def xoshiro128pp(s: list[int]) -> Iterator[int]:
    """32-bit words from four as the state: Blackman and Vigna's xoshiro128plusplus.c. Changes ``s``."""
    while True:
        yield _rotl(s[0] + s[3] & _M32, 7) + s[0] & _M32
        t = s[1] << 9 & _M32
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = _rotl(s[3], 11)


def uniforms(seed: int) -> Iterator[float]:
    """Draws in [0, 1) of a seed: 53 bits from two outputs, the high 27 of the first and the high 26 of the second.

    The state is the two halves, low first, of each of the seed's first two 64-bit words.
    """
    words = splitmix64(seed)
    state = [half for word in (next(words), next(words)) for half in (word & _M32, word >> 32)]
    outputs = xoshiro128pp(state)
    while True:
        high, low = next(outputs) >> 5, next(outputs) >> 6
        yield (high * 2**26 + low) / 2**53
