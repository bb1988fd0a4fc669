"""Numbers of whole choices from the log-probabilities at the nodes of a trie: what is known, and bounds.

A leaf path has the log-probabilities of its tokens and, where its leaf begins another, that of stopping. Until
all nodes on it are evaluated only a bound is known: what its evaluated part has. ``PathScores`` keeps both for every
path at once, as arrays in depth-first order, in which the paths below any node are one slice.

==========================  ==========================================================================
``normalize``               score of a path; a leaf's is the logsumexp over its paths
==========================  ==========================================================================
``joint``                   log p(tokens | prompt) + log P(stop), under the whole vocabulary
``walk``                    the same, renormalised at each node over its children and stopping
``token_length_normalized`` joint divided by the number of tokens
``calibrated``              joint, minus the leaf's log mean probability under neutral prompts
==========================  ==========================================================================

All log-probabilities are <= 0, so a part of a path bounds the whole from above; divided by a longer length they come
closer to 0, so dividing the known part by the path's own length is a bound as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trie_sampler.errors import TrieSamplerError
from trie_sampler.kernels import score_children
from trie_sampler.layout import END, NO_LEAF
from trie_sampler.trie import TokenTrie

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NORMALIZATIONS = ("joint", "walk", "token_length_normalized", "calibrated")


class Paths:
    """The leaf paths of a tree below one root, P of them, in depth-first order.

    Attributes:
        ends: [P] int64, the node that each path ends at.
        leaf: [P] int64, the index of its leaf among the names.
        length: [P] int64, its tokens.
        first: [S] int64, the paths below or at node s are ``first[s] .. last[s] - 1``.
        last: [S] int64.
        depth: [S] int64, tokens from the root; -1 for nodes of other roots.
    """

    def __init__(self, trie: TokenTrie, root: int) -> None:
        if trie.target is not None:
            raise TrieSamplerError("the paths of a graph cannot be listed")
        trie._require_sound()
        first_child = trie.first_child.astype(np.int64)
        ends_here = (trie.leaf != NO_LEAF).astype(np.int64)
        # Breadth-first numbers make each level a range, and so the children of a range.
        levels = [(root, root + 1)]
        while levels[-1][0] < levels[-1][1]:
            start, stop = levels[-1]
            levels.append((int(first_child[start]), int(first_child[stop])))
        levels.pop()
        self.depth = np.full(trie.n_nodes, -1, np.int64)
        count = ends_here.copy()
        for depth, (start, stop) in reversed(list(enumerate(levels))):
            self.depth[start:stop] = depth
            bounds = first_child[start : stop + 1] - first_child[start]
            sums = np.concatenate([[0], np.cumsum(count[first_child[start] : first_child[stop]])])
            count[start:stop] += sums[bounds[1:]] - sums[bounds[:-1]]
        self.first = np.zeros(trie.n_nodes, np.int64)
        for start, stop in levels:
            below = slice(first_child[start], first_child[stop])
            n_children = np.diff(first_child[start : stop + 1])
            before = np.concatenate([[0], np.cumsum(count[below])[:-1]])[: n_children.sum()]
            family_start = np.repeat(first_child[start:stop] - first_child[start], n_children)
            own = np.repeat(self.first[start:stop] + ends_here[start:stop], n_children)
            if before.size:
                self.first[below] = own + before - before[family_start]
        self.last = self.first + count
        inside = np.flatnonzero((self.depth >= 0) & (ends_here > 0))
        self.ends = inside[np.argsort(self.first[inside], kind="stable")]
        self.leaf = trie.leaf[self.ends].astype(np.int64)
        self.length = self.depth[self.ends]

    def __len__(self) -> int:
        """P."""
        return len(self.ends)


class PathScores:
    """Log-probabilities of every path as far as nodes are evaluated.

    Args:
        trie: the tree.
        paths: of the root to search.
        walks: renormalise at each node.

    Attributes:
        bound: [P] float64, log-probability of the evaluated part, an upper bound of the whole.
        known: [P] bool, whether that is the whole.
        prefix: node -> log-probability from the root, for every node whose parent is evaluated.
        n_evaluated: nodes.
        valid_mass: probability, under the whole vocabulary, that the first token begins a choice.
    """

    def __init__(self, trie: TokenTrie, paths: Paths, root: int, *, walks: bool) -> None:
        self._trie = trie
        self._paths = paths
        self._walks = walks
        self.bound = np.zeros(len(paths))
        self.known = np.zeros(len(paths), bool)
        self.prefix: dict[int, float] = {root: 0.0}
        self.n_evaluated = 0
        self.valid_mass = 0.0
        self._root = root
        self._opened: dict[int, list[int]] = {}

    def has(self, node: int) -> bool:
        """Whether a node is evaluated."""
        return node in self._opened

    def opened_by(self, node: int) -> list[int]:
        """What evaluating a node opened."""
        return self._opened[node]

    def evaluate(self, node: int, row: npt.NDArray[np.floating]) -> list[int]:
        """Take in the logits at a node.

        Args:
            node: its parent is evaluated.
            row: [V] logits after it.

        Returns:
            Its children that have children of their own: what is open now.
        """
        trie, paths = self._trie, self._paths
        start, stop = int(trie.first_child[node]), int(trie.first_child[node + 1])
        scores = np.empty(stop - start)
        end_score = float(score_children(row, trie.token, start, stop, scores))
        ends_leaf = trie.leaf[node] != NO_LEAF
        if node == self._root:
            self.valid_mass = float(np.exp(np.logaddexp.reduce(scores)))
        if self._walks:
            total = float(np.logaddexp.reduce(np.append(scores, end_score) if ends_leaf else scores))
            if np.isfinite(total):
                scores, end_score = scores - total, end_score - total
        prefix = self.prefix[node]
        if ends_leaf:
            self.bound[paths.first[node]] = prefix + end_score
            self.known[paths.first[node]] = True
        self.n_evaluated += 1
        opened = self._opened[node] = []
        for place, child in enumerate(range(start, stop)):
            value = prefix + float(scores[place])
            self.bound[paths.first[child] : paths.last[child]] = value
            if trie.first_child[child] == trie.first_child[child + 1]:
                self.known[paths.first[child]] = True
            else:
                self.prefix[child] = value
                opened.append(child)
        return opened

    def run_from(self, node: int, n_most: int) -> list[int]:
        """A node, and as long as it has one child alone and is no leaf, that child, if it has children."""
        first_child, run = self._trie.first_child, [node]
        while len(run) < n_most and self._trie.leaf[node] == NO_LEAF:
            start, stop = int(first_child[node]), int(first_child[node + 1])
            if stop - start != 1 or first_child[start] == first_child[start + 1]:
                break
            node = start
            run.append(node)
        return run

    def likeliest_paths(self, n_names: int) -> Ints:
        """[N] the place of each leaf's likeliest path, as far as is known; -1 for leaves without one."""
        places = np.full(n_names, -1, np.int64)
        order = np.argsort(self.bound, kind="stable")
        places[self._paths.leaf[order]] = order
        return places

    def end_of(self, place: int) -> int:
        """The node that a path ends at."""
        return int(self._paths.ends[place])

    def steps_of(self, place: int) -> list[tuple[int, float]]:
        """(token, log-probability) along a path, as far as it is evaluated.

        ``END`` is the token of stopping at a leaf that another begins with.
        """
        first_child = self._trie.first_child
        node = end = int(self._paths.ends[place])
        nodes = []
        while node != self._root:
            nodes.append(node)
            node = int(np.searchsorted(first_child, node, side="right")) - 1
        whole = float(self.bound[place]) if self.known[place] else None
        goes_on = first_child[end] < first_child[end + 1]
        steps: list[tuple[int, float]] = []
        before = 0.0
        for node in reversed(nodes):
            value = whole if node == end and not goes_on else self.prefix.get(node)
            if value is None:
                return steps
            steps.append((int(self._trie.token[node]), value - before))
            before = value
        if goes_on and whole is not None:
            steps.append((END, whole - before))
        return steps


@dataclass(frozen=True, eq=False)
class Way:
    """One way to write the beginning of a choice: a path of a graph.

    Attributes:
        node: where it is.
        parent: without the last token; ``None`` at the root.
        token: the last token, -1 at the root.
        depth: tokens.
        logprob: of all its tokens.
    """

    node: int
    parent: Way | None
    token: int
    depth: int
    logprob: float


class GraphScores:
    """Log-probabilities of the leaves of a graph: sums over the ways to write them, as far as those are evaluated.

    Args:
        trie: the graph.
        root: node.
        walks: renormalise at each node.

    Attributes:
        root: where every way begins.
        n_evaluated: ways.
        valid_mass: see ``PathScores``.
    """

    def __init__(self, trie: TokenTrie, root: int, *, walks: bool) -> None:
        if trie.target is None or trie.sole_leaf is None:
            raise TrieSamplerError("a tree has one way to write each path")
        trie._require_sound()
        self._trie = trie
        self._target = trie.target
        self._sole_leaf = trie.sole_leaf
        self._walks = walks
        self._known = np.full(trie._n_names, -np.inf)
        self._below: dict[int, Ints] = {}
        # Edges lead to larger numbers, so what is below is known before it is asked for.
        for node in np.flatnonzero(trie.sole_leaf < 0)[::-1].tolist():
            ends = np.unique(trie.target[trie.first_child[node] : trie.first_child[node + 1]])
            own = trie.leaf[node : node + 1]
            below = [self._reachable(end) for end in ends.tolist()] + [own[own != NO_LEAF].astype(np.int64)]
            self._below[node] = np.unique(np.concatenate(below))
        self._opened: dict[Way, list[Way]] = {}
        self.root = Way(root, None, -1, 0, 0.0)
        self.n_evaluated = 0
        self.valid_mass = 0.0

    def opened_by(self, way: Way) -> list[Way]:
        """What evaluating a way opened."""
        return self._opened[way]

    def evaluate(self, way: Way, row: npt.NDArray[np.floating]) -> list[Way]:
        """Take in the logits after a way; returns the longer ones that are open now."""
        trie, node = self._trie, way.node
        start, stop = int(trie.first_child[node]), int(trie.first_child[node + 1])
        scores = np.empty(stop - start)
        end_score = float(score_children(row, trie.token, start, stop, scores))
        ends_leaf = trie.leaf[node] != NO_LEAF
        if way is self.root:
            self.valid_mass = float(np.exp(np.logaddexp.reduce(scores)))
        if self._walks:
            total = float(np.logaddexp.reduce(np.append(scores, end_score) if ends_leaf else scores))
            if np.isfinite(total):
                scores, end_score = scores - total, end_score - total
        if ends_leaf:
            self._add(int(trie.leaf[node]), way.logprob + end_score)
        self.n_evaluated += 1
        opened = self._opened[way] = []
        for edge in range(start, stop):
            end, value = int(self._target[edge]), way.logprob + float(scores[edge - start])
            if trie.first_child[end] == trie.first_child[end + 1]:
                self._add(int(trie.leaf[end]), value)
            elif value > -np.inf:
                opened.append(Way(end, way, int(trie.token[edge]), way.depth + 1, value))
        return opened

    def _add(self, leaf: int, value: float) -> None:
        self._known[leaf] = np.logaddexp(self._known[leaf], value)

    def bounds(self, opened: Iterable[Way]) -> tuple[Floats, Floats]:
        """([N] certain, [N] possible): what is open may go to any leaf that it can reach."""
        possible = np.zeros(len(self._known))
        for way in opened:
            possible[self._reachable(way.node)] += np.exp(way.logprob)
        with np.errstate(divide="ignore"):
            return self._known.copy(), np.logaddexp(self._known, np.log(possible))

    def tail(self, opened: Iterable[Way]) -> float:
        """The share of what is open in all that is known or open; 0 where nothing is."""
        rest = float(np.exp(np.logaddexp.reduce([way.logprob for way in opened] or [-np.inf])))
        known = float(np.exp(np.logaddexp.reduce(self._known)))
        return rest / (rest + known) if rest > 0 else 0.0

    def _reachable(self, node: int) -> Ints:
        return self._below[node] if self._sole_leaf[node] < 0 else self._sole_leaf[node : node + 1].astype(np.int64)


def leaf_scores(path_scores: Floats, leaf: Ints, n_leaves: int) -> Floats:
    """[N] logsumexp of the scores of each leaf's paths; -inf for a leaf without any.

    Args:
        path_scores: [P].
        leaf: [P] index of the leaf.
        n_leaves: N.
    """
    largest = np.full(n_leaves, -np.inf)
    np.maximum.at(largest, leaf, path_scores)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(under="ignore"):
        sums = np.bincount(leaf, np.exp(path_scores - shift[leaf]), n_leaves)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(sums))


def log_shares(scores: Floats) -> Floats:
    """[N] log of the softmax of scores; uniform where none is finite."""
    total = np.logaddexp.reduce(scores)
    if not np.isfinite(total):
        return np.full(len(scores), -np.log(len(scores)))
    return np.asarray(scores - total)


def log_mean(log_probabilities: Floats) -> Floats:
    """[N] log of the mean over the first axis of [M, N] log-probabilities."""
    return np.asarray(np.logaddexp.reduce(log_probabilities, axis=0) - np.log(len(log_probabilities)))
