"""A trie in numbers and as a drawn tree, for people who look before they use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text
from rich.tree import Tree

from trie_sampler.layout import NO_LEAF
from trie_sampler.tokens import Tokenizer
from trie_sampler.trie import TokenTrie


@dataclass(frozen=True)
class Facts:
    """Counts of a trie.

    Attributes:
        n_leaves: names that can come out.
        n_nodes: S, roots included.
        n_edges: E; in a tree one for each node but the roots.
        depth: tokens of the longest path.
        n_branches: nodes with two options at least: where a forward pass is needed.
        n_forced: nodes with one child and no leaf: their token needs none.
        n_prefixes: leaves that begin another.
        widest: children of the widest node.
        n_bytes: size of the arrays.
        n_collisions: names that lost their tokens to a smaller name.
    """

    n_leaves: int
    n_nodes: int
    n_edges: int
    depth: int
    n_branches: int
    n_forced: int
    n_prefixes: int
    widest: int
    n_bytes: int
    n_collisions: int

    @classmethod
    def of(cls, trie: TokenTrie) -> Facts:
        """Count. O(S)."""
        trie._require_sound()
        n_children = np.diff(trie.first_child)
        ends = trie.leaf != NO_LEAF
        return cls(
            n_leaves=trie.n_leaves,
            n_nodes=trie.n_nodes,
            n_edges=int(n_children.sum()),
            depth=trie.depth,
            n_branches=int(np.count_nonzero((n_children > 1) | ((n_children == 1) & ends))),
            n_forced=int(np.count_nonzero((n_children == 1) & ~ends)),
            n_prefixes=int(np.count_nonzero((n_children > 0) & ends)),
            widest=int(n_children.max()),
            n_bytes=trie.nbytes,
            n_collisions=len(trie.collisions),
        )


def draw(trie: TokenTrie, tokenizer: Tokenizer | None, *, max_lines: int) -> Tree:
    """The trie as a tree of tokens, breadth before depth: what does not fit is counted, not drawn.

    Args:
        trie: a tree, or a graph, in which what paths share is drawn for each of them.
        tokenizer: shows tokens by their text; without one they are ids.
        max_lines: nodes drawn at most; forced runs share a line.
    """
    trie._require_sound()
    drawing = Tree(Text(f"{trie.n_leaves} choices"), highlight=False)
    waiting: list[tuple[Any, int]] = []
    for path, root in trie.roots.items():
        waiting.append((drawing.add(Text(path, "bold")) if path else drawing, root))
    left = max_lines
    while waiting:
        branch, node = waiting.pop(0)
        children = trie.children(node)
        drawn = children[: max(0, left)]
        left -= len(drawn)
        for token in drawn.tolist():
            tokens, end = _follow(trie, node, token)
            label = Text(" ".join(_label(token, tokenizer) for token in tokens))
            name = trie.leaf_name(end)
            if name is not None:
                label.append(f"  = {name}", "green")
            below = branch.add(label)
            if len(trie.children(end)):
                waiting.append((below, end))
        if len(drawn) < len(children):
            branch.add(Text(f"... {len(children) - len(drawn)} more", "dim"))
    return drawing


def _follow(trie: TokenTrie, node: int, token: int) -> tuple[Sequence[int], int]:
    """A token and the forced run behind it, and where that leads."""
    tokens = [token]
    end = trie.step(node, token)
    while not trie.is_terminal(end) and len(trie.children(end)) == 1:
        token = int(trie.children(end)[0])
        tokens.append(token)
        end = trie.step(end, token)
    return tokens, end


def _label(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    text = tokenizer.detokenize((token,))
    # repr: spaces and line ends are what a reader looks for here.
    return repr(text.decode("utf-8", "backslashreplace")) if text else f"<{token}>"
