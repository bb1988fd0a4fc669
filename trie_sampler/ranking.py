"""Which whole choice a model prefers, and how sure it is: ``rank``, and the search behind ``choose(method="best")``.

A greedy walk decides token by token and can be led astray by a first token. Here the scores are those of whole
choices: every node of the trie with more than one way on is evaluated, in one batch with tree attention, or, where
only the best are wanted, as many as it takes until no bound beats them.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from trie_sampler.binding import Binding, kept_for
from trie_sampler.cache import Recent
from trie_sampler.choice import Choice, ChoiceStep
from trie_sampler.choices import Choices, ChoicesLike, Spelling
from trie_sampler.cursor import check_choice
from trie_sampler.errors import EngineError, UnknownPathError, warn
from trie_sampler.llama.decoder import Decoder, alone_with
from trie_sampler.llama.forest import MAX_EXTRA, N_SEQUENCES, Forest, StatefulMemoryError, Twig
from trie_sampler.llama.vocab import Prompt, as_tokenizer, prompt_tokens, require_engine
from trie_sampler.progress import Progress
from trie_sampler.scores import (
    NORMALIZATIONS,
    Floats,
    GraphScores,
    Paths,
    PathScores,
    Way,
    leaf_scores,
    log_mean,
    log_shares,
)
from trie_sampler.tokens import Tokenizer
from trie_sampler.trie import TokenTrie

_FIRST_ROUND, _ROUND, _LONGEST_ROUND = 8, 16, 32
"""Nodes evaluated at once by the search: more are wasted where the first decide, fewer make more decodes. llama.cpp's
matrix products take rows by fours or eights: on a CPU 8 nodes of a large vocabulary cost less than 5. A long search
takes a quarter of those that it has evaluated already."""

_LEAF_BY_LEAF = "leaf by leaf"

_TAIL = 1e-3
"""Share of all that choices weigh which ways to write them may have that were not evaluated."""

_MAX_WAYS = 4096
"""Ways to write choices that are evaluated at most, unless ``max_nodes`` says otherwise."""

_TOLERANCE = 1e-3
"""Nats that a leaf's reported score may still gain from paths that were not evaluated."""


class Growth:
    """Evaluates nodes of one trie behind one prompt.

    Args:
        llm: the model.
        trie: a tree.
        root: its root node.
        prompt: ids.
        paths: of that root.

    Attributes:
        method: "tree", or "leaf by leaf" for models that cannot share a prompt between sequences.
        n_decodes: after the prompt.
        most_a_round: runs that ``evaluate_some`` takes at once.
    """

    def __init__(self, llm: Llama, trie: TokenTrie, root: int, prompt: Sequence[int], paths: Paths | None) -> None:
        self._llm = llm
        self._trie = trie
        self._root: Any = root
        self._prompt = list(prompt)
        self._paths: Any = paths
        self.method = "tree" if _shares_prompts(llm) else _LEAF_BY_LEAF
        self._forest = Forest.of(llm)
        self._decoder: Decoder | None = None
        self._sequence_of: dict[Any, int] = {root: 0}
        # All that is alive at once has to fit the context.
        self._n_sequences = min(N_SEQUENCES - 1, max(2 * _FIRST_ROUND, MAX_EXTRA // trie.depth))
        self.most_a_round = min(_LONGEST_ROUND, self._n_sequences // 2)
        self._free = list(range(self._n_sequences, 0, -1))
        self._n_before = 0

    @property
    def n_decodes(self) -> int:
        """Decodes after the prompt's."""
        decoder = self._decoder
        return (self._forest.n_decodes if decoder is None else decoder.n_decodes) - self._n_before

    def begin(self, n_nodes: int) -> npt.NDArray[np.float32]:
        """The logits at the root; ``n_nodes`` will be evaluated at most."""
        if self.method == "tree":
            try:
                row = self._forest.begin(self._prompt, min(n_nodes, self._n_sequences * self._trie.depth))
            except StatefulMemoryError:
                self.method = _LEAF_BY_LEAF
            else:
                self._n_before = self._forest.n_decodes
                return row
        self._decoder = Decoder(self._llm, self._prompt)
        self._decoder.require_room(self._trie.depth, "a choice")
        row = self._decoder.row()
        self._n_before = self._decoder.n_decodes
        return row

    def path_to(self, node: Any) -> list[Any]:
        """Nodes from below the root to ``node``."""
        path = []
        while node != self._root:
            path.append(node)
            node = int(np.searchsorted(self._trie.first_child, node, side="right")) - 1
        return path[::-1]

    # --- everything ----------------------------------------------------------------------------

    def evaluate_all(self, nodes: Sequence[int], scores: PathScores) -> None:
        """Evaluate inner nodes, parents before children: as one batch where sequences and memory allow."""
        with Progress("evaluating nodes", len(nodes)) as progress:
            if self._decoder is not None:
                for node in nodes:
                    self._one_by_one([node], scores)
                    progress.advance()
                return
            ends = [node for node in nodes if not self._has_inner_child(node)]
            for start in range(0, len(ends), self._n_sequences):
                n_before = scores.n_evaluated
                self._evaluate_branches(ends[start : start + self._n_sequences], scores)
                progress.advance(scores.n_evaluated - n_before)

    def _evaluate_branches(self, ends: Sequence[int], scores: PathScores) -> None:
        """Evaluate all nodes above and at ``ends``, each end with a sequence of its own."""
        owners: dict[int, list[int]] = {}
        for sequence, end in enumerate(ends, start=1):
            for node in self.path_to(end):
                owners.setdefault(node, []).append(sequence)
        self._forest.share(0, range(1, len(ends) + 1))
        nodes = sorted(owners)
        twigs = [self._twig(node, owners[node]) for node in nodes]
        size = min(self._forest.max_rows, 2048)
        for first in range(0, len(nodes), size):
            part = nodes[first : first + size]
            wanted = [place for place, node in enumerate(part) if not scores.has(node)]
            rows = self._forest.evaluate(twigs[first : first + size], wanted)
            for place, row in zip(wanted, rows, strict=True):
                scores.evaluate(part[place], row)
        self._forest.drop(range(1, len(ends) + 1))

    def _has_inner_child(self, node: int) -> bool:
        first = self._trie.first_child
        return bool(np.any(np.diff(first[first[node] : first[node + 1] + 1]) > 0))

    def _twig(self, node: Any, sequences: Sequence[int]) -> Twig:
        return Twig(self._token_of(node), len(self._prompt) + self._depth_of(node) - 1, sequences)

    def _token_of(self, node: Any) -> int:
        return int(self._trie.token[node])

    def _depth_of(self, node: Any) -> int:
        return int(self._paths.depth[node])

    # --- a few at a time -----------------------------------------------------------------------

    def evaluate_some(self, runs: Sequence[Sequence[Any]], scores: PathScores | GraphScores) -> None:
        """Evaluate open nodes in one batch.

        Args:
            runs: each an open node and nodes behind it, one child after the other; it gets a sequence that goes on
                from its parent's.
            scores: take the rows in.
        """
        nodes = [node for run in runs for node in run]
        if self._decoder is not None:
            self._one_by_one(nodes, scores)
            return
        twigs: list[Twig] = []
        wanted: list[int] = []
        ends = [run[-1] for run in runs]
        for run in runs:
            path = self.path_to(run[-1])
            alive = next((place for place in range(len(path) - 1, -1, -1) if path[place] in self._sequence_of), -1)
            source = self._sequence_of[path[alive] if alive >= 0 else self._root]
            sequence = self._take_sequence(keep={source}, besides=ends)
            self._forest.share(source, [sequence])
            twigs += [self._twig(step, (sequence,)) for step in path[alive + 1 :]]
            wanted += range(len(twigs) - len(run), len(twigs))
            self._sequence_of[run[-1]] = sequence
        rows = self._forest.evaluate(twigs, wanted)
        opened = [scores.evaluate(node, row) for node, row in zip(nodes, rows, strict=True)]
        for node, is_open in zip(nodes, opened, strict=True):
            if not is_open and node in self._sequence_of:
                self._give_back(node)

    def _take_sequence(self, keep: set[int], besides: Sequence[Any]) -> int:
        """A free sequence; where there is none, the oldest node's, whose children are reached anew if need be."""
        if not self._free:
            for node, sequence in self._sequence_of.items():
                if node != self._root and sequence not in keep and node not in besides:
                    self._give_back(node)
                    break
        return self._free.pop()

    def _give_back(self, node: Any) -> None:
        sequence = self._sequence_of.pop(node)
        self._forest.drop([sequence])
        self._free.append(sequence)

    def _one_by_one(self, nodes: Sequence[Any], scores: PathScores | GraphScores) -> None:
        decoder = self._decoder
        if decoder is None:
            raise EngineError("the prompt is not evaluated")
        for node in nodes:
            decoder.tokens = [*self._prompt, *map(self._token_of, self.path_to(node))]
            decoder.doubt()
            scores.evaluate(node, decoder.row())


class GraphGrowth(Growth):
    """``Growth`` over the ways to write choices: its nodes are ``Way``, and no two share one."""

    def __init__(self, llm: Llama, trie: TokenTrie, root: Way, prompt: Sequence[int]) -> None:
        super().__init__(llm, trie, 0, prompt, None)
        self._root = root
        self._sequence_of = {root: 0}

    def path_to(self, node: Way) -> list[Way]:
        """Ways from below the root to this one."""
        path = []
        step: Way = node
        while step.parent is not None:
            path.append(step)
            step = step.parent
        return path[::-1]

    def _token_of(self, node: Way) -> int:
        return node.token

    def _depth_of(self, node: Way) -> int:
        return node.depth


def _shares_prompts(llm: Llama) -> bool:
    """Whether the model's memory is a list of tokens; older hosts do not say, and older llama.cpp not everything."""
    asks = [getattr(llama_cpp, f"llama_model_is_{kind}", None) for kind in ("recurrent", "hybrid")]
    if getattr(llm, "_is_recurrent", False) or getattr(llm, "_is_hybrid", False):
        return False
    return not any(ask is not None and ask(llm.model) for ask in asks)


@dataclass
class Ranking:
    """Scores of all leaves of one trie behind one prompt, exact or bounded.

    Attributes:
        lower: [N] scores that are certain, by index of the leaf's name.
        upper: [N] scores that they can still reach.
        order: leaves that can come out, best first.
        valid_mass: the model's probability that its next token begins a choice.
        stats: counts.
        scores: of the paths; ``None`` where choices are written in every way, and have no one path.
    """

    lower: Floats
    upper: Floats
    order: npt.NDArray[np.int64]
    valid_mass: float
    stats: dict[str, Any] = field(default_factory=dict)
    scores: PathScores | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every leaf's score is known."""
        return bool(np.all(_gaps(self.lower[self.order], self.upper[self.order]) <= _TOLERANCE))


def search(
    llm: Llama,
    trie: TokenTrie,
    root: int,
    prompt: Sequence[int],
    *,
    normalize: str,
    offsets: Floats | None = None,
    n_best: int | None = None,
    max_nodes: int | None = None,
) -> Ranking:
    """Score whole choices behind a prompt.

    Args:
        llm: the model.
        trie: a tree.
        root: where the choices begin.
        prompt: ids.
        normalize: "joint", "walk" or "token_length_normalized"; "calibrated" is joint with ``offsets``.
        offsets: [names] added to each leaf's score.
        n_best: stop when the order of so many is certain; ``None`` evaluates everything.
        max_nodes: evaluate no more; then the order may be uncertain, and ``stats["exact"]`` is False.
    """
    if trie.target is not None:
        return _search_graph(
            llm, trie, root, prompt, normalize=normalize, offsets=offsets, n_best=n_best, limit=max_nodes
        )
    start = time.perf_counter()
    paths = Paths(trie, root)
    scores = PathScores(trie, paths, root, walks=normalize == "walk")
    inner = [node for node in _inner_nodes(trie, paths) if node != root]
    growth = Growth(llm, trie, root, prompt, paths)
    first_row = growth.begin(len(inner))
    opened = set(scores.evaluate(root, first_row))

    def bounds() -> tuple[Floats, Floats, Floats]:
        return _bounds(trie, paths, scores, normalize, offsets)

    is_certain = True
    if n_best is None:
        growth.evaluate_all(inner, scores)
    else:
        is_certain = _search_best(growth, paths, scores, opened, bounds, n_best, max_nodes)
    lower, upper, _ = bounds()
    leaves = np.unique(paths.leaf)
    # Where nothing is certain yet, what is possible.
    order = leaves[np.lexsort((-upper[leaves], -lower[leaves]))]
    stats = {
        "prompt_tokens": len(prompt),
        "forward_passes": growth.n_decodes,
        "nodes_evaluated": scores.n_evaluated,
        "nodes": len(inner) + 1,
        "method": growth.method,
        "exact": is_certain,
        "seconds": time.perf_counter() - start,
    }
    return Ranking(lower, upper, order, scores.valid_mass, stats, scores)


def _search_best(
    growth: Growth,
    paths: Paths,
    scores: PathScores,
    opened: set[int],
    bounds: Callable[[], tuple[Floats, Floats, Floats]],
    n_best: int,
    max_nodes: int | None,
) -> bool:
    """Evaluate open nodes, most promising first, until the best are certain; False where ``max_nodes`` came first."""
    with Progress("evaluating nodes", max_nodes) as progress:
        while opened:
            lower, upper, path_upper = bounds()
            if _is_settled(lower, upper, n_best):
                return True
            n_nodes = _FIRST_ROUND if scores.n_evaluated == 1 else max(_ROUND, scores.n_evaluated // 32 * 8)
            n_nodes = min(n_nodes, growth.most_a_round)
            if max_nodes is not None:
                n_nodes = min(n_nodes, max_nodes - scores.n_evaluated)
            if n_nodes <= 0:
                return False
            # Bounds only sink and scores only rise: a node that cannot reach the best never will.
            needed = float(np.partition(lower, -n_best)[-n_best]) if n_best <= len(lower) else -np.inf
            worth = {node: float(path_upper[paths.first[node] : paths.last[node]].max()) for node in opened}
            opened = {node for node in opened if worth[node] > needed}
            runs: list[list[int]] = []
            for node in sorted(opened, key=lambda node: (-worth[node], node)):
                # What has to follow a node is hardly ever what decides, so it comes along.
                runs.append(scores.run_from(node, n_nodes))
                n_nodes -= len(runs[-1])
                if not n_nodes:
                    break
            growth.evaluate_some(runs, scores)
            evaluated = [node for run in runs for node in run]
            progress.advance(len(evaluated))
            opened.update(*map(scores.opened_by, evaluated))
            opened.difference_update(evaluated)
    return True


def _search_graph(
    llm: Llama,
    trie: TokenTrie,
    root: int,
    prompt: Sequence[int],
    normalize: str,
    offsets: Floats | None,
    n_best: int | None,
    limit: int | None,
) -> Ranking:
    """``search`` over every way to write each choice, until those left weigh next to nothing."""
    if normalize == "token_length_normalized":
        raise ValueError("a choice that is written in every way has no length; use another normalize")
    start = time.perf_counter()
    limit = _MAX_WAYS if limit is None else limit
    scores = GraphScores(trie, root, walks=normalize == "walk")
    growth = GraphGrowth(llm, trie, scores.root, prompt)
    opened = set(scores.evaluate(scores.root, growth.begin(N_SEQUENCES * trie.depth)))
    is_certain = True
    with Progress("evaluating ways", limit) as progress:
        while opened:
            lower, upper = scores.bounds(opened)
            if offsets is not None:
                lower, upper = lower + offsets, upper + offsets
            if scores.tail(opened) <= _TAIL or (n_best is not None and _is_settled(lower, upper, n_best)):
                break
            if scores.n_evaluated >= limit:
                is_certain = False
                break
            chosen = sorted(opened, key=lambda way: -way.logprob)[
                : min(growth.most_a_round, limit - scores.n_evaluated)
            ]
            growth.evaluate_some([[way] for way in chosen], scores)
            progress.advance(len(chosen))
            opened.difference_update(chosen)
            for way in chosen:
                opened.update(scores.opened_by(way))
    lower, upper = scores.bounds(opened)
    if offsets is not None:
        lower, upper = lower + offsets, upper + offsets
    leaves = np.unique(trie.leaf[trie.leaf >= 0]).astype(np.int64)
    stats = {
        "prompt_tokens": len(prompt),
        "forward_passes": growth.n_decodes,
        "nodes_evaluated": scores.n_evaluated,
        "tail": scores.tail(opened),
        "method": growth.method,
        "exact": is_certain,
        "seconds": time.perf_counter() - start,
    }
    return Ranking(lower, upper, leaves[np.argsort(-lower[leaves], kind="stable")], scores.valid_mass, stats)


def _inner_nodes(trie: TokenTrie, paths: Paths) -> list[int]:
    return np.flatnonzero((paths.depth >= 0) & (np.diff(trie.first_child) > 0)).tolist()


def _bounds(
    trie: TokenTrie, paths: Paths, scores: PathScores, normalize: str, offsets: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """([N] certain, [N] possible, [P] possible) scores."""
    n_names = trie._n_names
    upper = scores.bound / paths.length if normalize == "token_length_normalized" else scores.bound
    lower = np.where(scores.known, upper, -np.inf)
    leaf_upper = leaf_scores(upper, paths.leaf, n_names)
    leaf_lower = leaf_scores(lower, paths.leaf, n_names)
    if offsets is not None:
        leaf_upper, leaf_lower = leaf_upper + offsets, leaf_lower + offsets
    return leaf_lower, leaf_upper, leaf_upper[paths.leaf]


def _gaps(lower: Floats, upper: Floats) -> Floats:
    """What scores may still gain; nothing where both are -inf."""
    return np.subtract(upper, lower, out=np.zeros(len(lower)), where=upper > lower)


def _is_settled(lower: Floats, upper: Floats, n_best: int) -> bool:
    """Whether the first ``n_best`` are certain, in order, and their scores near enough."""
    order = np.argsort(-lower, kind="stable")
    best, rest = order[:n_best], order[n_best:]
    if not np.all(_gaps(lower[best], upper[best]) <= _TOLERANCE):
        return False
    beaten = upper[rest].max(initial=-np.inf)
    ceilings = np.append(upper[best][1:], beaten)
    return bool(np.all(lower[best] >= np.maximum.accumulate(ceilings[::-1])[::-1]))


# --- what people call ----------------------------------------------------------------------------


def rank(
    llm: Llama,
    prompt: Prompt,
    choices: ChoicesLike | TokenTrie,
    *,
    normalize: str = "joint",
    neutral: Prompt | Sequence[Prompt] | None = None,
    top_k: int | None = None,
    path: str | None = None,
    none_choice: str | None = None,
    max_nodes: int | None = None,
    steps: bool = False,
    **spelling: Any,
) -> list[Choice]:
    """Every choice with the model's own probability, best first.

    Args:
        llm: a loaded ``Llama``; a second context on its weights is made once and kept.
        prompt: text, token ids, or chat messages.
        choices: list of strings, dict name -> text, ``Enum`` class, ``Literal`` or ``TokenTrie``.
        normalize: ``"joint"``: the model's probability of the whole choice; ``"walk"``: that of the constrained
            sampler; ``"token_length_normalized"``; ``"calibrated"``: joint against the choice's mean probability under
            ``neutral`` prompts. See ``trie_sampler.scores`` for formulas.
        neutral: for "calibrated": prompts without what is asked, one or a list. The real prompt with its content
            replaced by "N/A", or some of the task's own prompts; a bare start of text is no neutral prompt.
        top_k: only so many, by best-first search.
        path: descriptor of a trie with several.
        none_choice: one more choice, a text such as "none of these", whose value is ``None``.
        max_nodes: of the search of ``top_k`` or of ``tokenization="every"``, at most. Where it ends before the order is
            certain there is a warning, ``stats["exact"]`` is False, scores are what is certain of them (-inf where
            nothing is), and a ``margin`` may be negative: to what the next can still reach.
        steps: give each choice its ``steps``, token by token; with ``tokenization="every"`` it has no one path, and
            none.
        spelling: of ``TokenTrie.from_choices``. With ``tokenization="every"`` a choice's probability is the sum
            over the ways to write it, until those left have 0.1 % of the whole (``stats["tail"]``), in rounds of a few
            nodes.

    Returns:
        One ``Choice`` each. ``logprob`` is the score in nats, renormalised over the choices where all were
        evaluated, and then ``probability`` is its exponential and they sum to 1; of a search ``logprob`` is the score
        as it is, and ``probability`` is ``None``. ``text`` and ``tokens`` are those of its likeliest path. ``margin``
        is nats to the next, ``valid_mass`` the model's probability that its next token begins a choice at all.
        ``stats`` has what it cost.

    Raises:
        EmptyTrieError, VocabMismatchError, UnknownPathError, TypeError, ValueError: as ``choose``; ValueError also
            for "calibrated" without ``neutral``.
        EngineError: it does not fit, or a decode failed.

    Warns:
        TrieSamplerWarning: ``max_nodes`` came first.

    Cost: the prompt and one decode for all nodes with children; more where their logits exceed 256 MB or their
        sequences 255. ``top_k`` evaluates a few nodes a decode until the order is certain.
        "calibrated" evaluates all nodes behind each neutral prompt once, which is kept: minutes for 10,000 choices.

    Example:
        >>> [best, *_] = rank(llm, "Similar to sky:", ["cloud", "skill"])      # doctest: +SKIP
    """
    check_choice("normalize", normalize, NORMALIZATIONS)
    require_engine(llm)
    for name, value in {"top_k": top_k, "max_nodes": max_nodes}.items():
        if value is not None and operator.index(value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    scored = _Scored.of(llm, choices, path, none_choice, spelling, "rank")
    trie, root, tokens = scored.behind(prompt)
    Decoder(llm, tokens).require_room(trie.depth, "a choice")
    with alone_with(llm):
        offsets = scored.offsets(neutral, normalize)
        found = search(llm, trie, root, tokens, normalize=normalize, offsets=offsets, n_best=top_k, max_nodes=max_nodes)
    if not found.stats["exact"]:
        warn(f"the search ended at max_nodes={max_nodes or _MAX_WAYS} before the order was certain")
    return scored.choices(trie, root, found, top_k, steps=steps)


def with_none(choices: ChoicesLike | TokenTrie, text: str) -> Choices:
    """Choices and one more that means none of them."""
    if isinstance(choices, TokenTrie):
        raise TypeError("a TokenTrie cannot have a none_choice added; put it among the choices")
    return Choices.of(choices).plus(text, None)


@dataclass(frozen=True)
class _Scored:
    """Choices bound to a model, to be scored."""

    llm: Llama
    tokenizer: Tokenizer
    binding: Binding
    path: str | None

    @classmethod
    def of(
        cls,
        llm: Llama,
        choices: ChoicesLike | TokenTrie,
        path: str | None,
        none_choice: str | None,
        spelling: dict[str, Any],
        function: str,
    ) -> _Scored:
        wanted = Spelling.take_from(spelling)
        if spelling:
            raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(spelling))!r}")
        if none_choice is not None:
            choices = with_none(choices, none_choice)
        tokenizer = as_tokenizer(llm)
        return cls(llm, tokenizer, Binding.of(tokenizer, choices, spelling=wanted), path)

    def behind(self, prompt: Prompt) -> tuple[TokenTrie, int, list[int]]:
        """The trie that follows a prompt, its root, and the prompt's ids."""
        return self._behind(prompt_tokens(self.llm, prompt))

    def _behind(self, prompt_ids: Sequence[int]) -> tuple[TokenTrie, int, list[int]]:
        trie, tokens = self.binding.prepare(prompt_ids)
        if self.path is None and len(trie.paths) > 1:
            raise UnknownPathError(f"say which path to choose from: {list(trie.paths)}")
        return trie, trie.root if self.path is None else trie.root_of(self.path), tokens

    def offsets(self, neutral: Prompt | Sequence[Prompt] | None, normalize: str) -> Floats | None:
        """[names] minus the log of each choice's mean probability under the neutral prompts; kept."""
        if normalize != "calibrated":
            if neutral is not None:
                raise ValueError('neutral= is for normalize="calibrated"')
            return None
        if neutral is None:
            raise ValueError(
                "calibrated needs neutral=: the real prompt with its content replaced, by N/A for example, or some of "
                "the task's own prompts"
            )
        shares = [self._neutral_shares(prompt) for prompt in _as_prompts(neutral)]
        means = log_mean(np.stack(shares))
        # Leaves of other descriptors have no share, and no score either.
        return np.where(np.isfinite(means), -means, 0.0)

    def _neutral_shares(self, prompt: Prompt) -> Floats:
        """[names] log-probabilities under one neutral prompt."""
        trie, root, tokens = self._behind(self._neutral_tokens(prompt))
        kept: Recent[_Shares] = kept_for(self.tokenizer, "neutral shares", lambda _: Recent(4096))

        def measure() -> _Shares:
            found = search(self.llm, trie, root, tokens, normalize="joint")
            shares = np.full(len(found.lower), -np.inf)
            shares[found.order] = log_shares(found.lower[found.order])
            return _Shares(shares, trie)

        # The trie is kept in the entry, so that its id stays its own.
        return kept.get((id(self.llm), id(trie), root, tuple(tokens)), measure).log_shares

    def _neutral_tokens(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt that comes again and again."""
        if not isinstance(prompt, str):
            return prompt_tokens(self.llm, prompt)
        kept: Recent[Any] = kept_for(self.tokenizer, "neutral tokens", lambda _: Recent(4096))
        ids: list[int] = kept.get(prompt, lambda: np.array(prompt_tokens(self.llm, prompt), np.int32)).tolist()
        return ids

    def choices(self, trie: TokenTrie, root: int, found: Ranking, n_best: int | None, *, steps: bool) -> list[Choice]:
        """The ranking as records."""
        order = found.order if n_best is None else found.order[:n_best]
        scores = found.lower
        shares = log_shares(scores[found.order]) if n_best is None or found.is_exact else None
        path_scores = found.scores
        likeliest = None if path_scores is None else path_scores.likeliest_paths(len(scores))
        made = []
        for place, leaf in enumerate(order.tolist()):
            score = float(scores[leaf])
            behind = found.upper[found.order[place + 1 :]].max(initial=-np.inf)
            path = None if likeliest is None else int(likeliest[leaf])
            end = None if path is None or path_scores is None else path_scores.end_of(path)
            choice = self.binding.name_choice(trie, root, leaf, end)
            logprob = score if shares is None else float(shares[place])
            made.append(
                Choice(
                    **choice,
                    complete=True,
                    logprob=logprob,
                    probability=None if shares is None else math.exp(logprob),
                    margin=None if behind == -np.inf else float(score - behind),
                    valid_mass=found.valid_mass,
                    stats={**found.stats, "score": score},
                    steps=self._steps_of(path_scores, path) if steps else (),
                )
            )
        return made

    def _steps_of(self, scores: PathScores | None, path: int | None) -> tuple[ChoiceStep, ...]:
        if scores is None or path is None:
            return ()
        return tuple(
            ChoiceStep(token, self.binding.text_of(token), value, None, is_forced=False)
            for token, value in scores.steps_of(path)
        )


@dataclass(frozen=True)
class _Shares:
    log_shares: Floats
    trie: TokenTrie

    @property
    def nbytes(self) -> int:
        return self.log_shares.nbytes


def _as_prompts(neutral: Any) -> Iterable[Prompt]:
    """One prompt or a list of them: a list of ids or of messages is one."""
    if isinstance(neutral, str):
        return [neutral]
    parts = list(neutral)
    if not parts:
        raise ValueError("neutral= is an empty list")
    is_one = not isinstance(parts[0], (str, list, tuple, np.ndarray))
    return [parts] if is_one else parts


def draw_joint(
    llm: Llama, prompt: Prompt, choices: ChoicesLike | TokenTrie, *, seed: int | None = None, **settings: Any
) -> Choice:
    """One choice drawn by its whole probability."""
    ranked = rank(llm, prompt, choices, normalize="joint", **settings)
    shares = np.array([choice.probability for choice in ranked])
    return ranked[int(np.random.default_rng(seed).choice(len(ranked), p=shares / shares.sum()))]
