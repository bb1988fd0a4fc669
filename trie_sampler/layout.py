"""What every array and record means: dtypes, sentinels, status codes.

Letters for shapes, the same everywhere: N leaves, S nodes, V logits width, K children, D depth.

A trie is three flat arrays. Nodes are numbered breadth-first, so the children of node ``s``
are one contiguous range of node ids, ascending by token, and no target column is needed::

    token        [S]   int32   token that enters the node; NO_TOKEN at a root
    first_child  [S+1] int32   children of s are nodes first_child[s] .. first_child[s+1] - 1
    leaf         [S]   int32   index of the leaf that ends here; NO_LEAF where none does

The automaton of every spelling is a graph: paths join, so an edge says where it leads. ``token`` and
``target`` are then [E] int32, and the edges of s are ``first_child[s] .. first_child[s+1] - 1``. A tree is
the case in which edge i leads to node i, so both go through the same kernels.

Compiled code freezes what it reads from here, so ``kernels.py`` asserts ``VERSION``: changing
this file means raising the number in both, and that edit refreshes the compiled cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np

VERSION: Final = 3

TOKEN: Final = np.dtype(np.int32)
NODE: Final = np.dtype(np.int32)
LEAF: Final = np.dtype(np.int32)
OFFSET: Final = np.dtype(np.int64)

NO_TOKEN: Final = -1
NO_LEAF: Final = -1
NO_NODE: Final = -1

# What a pick returns beside token ids: "stop here" and "look at the cursor's status".
END: Final = -1
TROUBLE: Final = -2

# Cursor states.
RELEASED: Final = 0
ARMED: Final = 1
FINISHED: Final = 2

# How a span may end where a leaf ends and another goes on.
ON_END_MASS: Final = 0
ON_END_EOG: Final = 1
ON_END_RELEASE: Final = 2
ON_END: Final = {"mass": ON_END_MASS, "eog": ON_END_EOG, "release": ON_END_RELEASE}

# Status codes, written by kernels, turned into exceptions and warnings by Python.
OK: Final = 0
OFF_TRIE: Final = 1
"""A token was accepted that is neither a child nor, at a leaf, an end token."""
ALL_INVALID: Final = 2
"""Every valid logit was NaN or -inf; the lowest valid id was taken."""
SPAN_LIMIT: Final = 3
"""``max_span_tokens`` accepts since activation without a clear; the cursor ended the span."""
SHORT_ROW: Final = 4
"""The logits row is narrower than the largest id of the trie; nothing was picked."""
NO_CANDIDATE: Final = 5
"""Samplers before the native one removed every valid token; the best of those was put back."""

# What the native sampler does with candidates that are not valid.
DROP: Final = 0
MASK: Final = 1
ON_INVALID: Final = {"drop": DROP, "mask": MASK}

_CURSOR_FIELDS: Final = [
    # The trie's arrays, by address: one integer reaches everything from compiled code.
    ("token_address", np.int64),
    ("first_child_address", np.int64),
    ("leaf_address", np.int64),
    ("n_nodes", np.int64),
    # Edges and where they lead; 0 for a tree, whose edge i leads to node i.
    ("n_edges", np.int64),
    ("target_address", np.int64),
    # End tokens, ascending: [n_end] int32.
    ("end_address", np.int64),
    ("n_end", np.int64),
    # Width that a row needs at least: the largest id of trie and end tokens, plus one.
    ("min_width", np.int64),
    # Position. birth_root is NO_NODE for a cursor that is born released.
    ("birth_root", np.int32),
    ("root", np.int32),
    ("node", np.int32),
    ("state", np.int32),
    ("on_end", np.int32),
    ("status", np.int32),
    ("n_accepted", np.int64),
    ("position_in_span", np.int64),
    ("max_span_tokens", np.int64),
    # The last pick. margin and logprob are in nats, filled by the scoring kernels only.
    ("picked", np.int32),
    ("is_forced", np.int32),
    ("stop_logit", np.float64),
    ("margin", np.float64),
    ("logprob", np.float64),
    # Sampling from the valid set; temperature 0 is greedy. Generator: xoshiro128++.
    ("temperature", np.float64),
    ("top_p", np.float64),
    ("min_p", np.float64),
    ("top_k", np.int64),
    ("random_0", np.int64),
    ("random_1", np.int64),
    ("random_2", np.int64),
    ("random_3", np.int64),
]

CURSOR: Final = np.dtype(_CURSOR_FIELDS, align=True)
"""The mutable state of one walk over one trie: [1] record, 8-byte aligned."""

NATIVE: Final = np.dtype(
    [
        # A native record begins with a cursor record, so that cursor kernels take its address.
        *_CURSOR_FIELDS,
        # Owners: the llama_sampler whose ctx it is, and each Python handle.
        ("references", np.int64),
        ("is_freed", np.int64),
        # One int64 shared by an initialisation and its clones: how many records are alive.
        ("alive_address", np.int64),
        # The llama_sampler_i table, the sampler's name, and the C functions that clone and free need.
        ("interface_address", np.int64),
        ("probe_interface_address", np.int64),
        ("name_address", np.int64),
        ("init_address", np.int64),
        ("malloc_address", np.int64),
        ("free_address", np.int64),
        ("on_invalid", np.int32),
        # 1: every option is left for the samplers behind; 0: under DROP only the greedy pick.
        ("keeps_options", np.int32),
        # First status since Python looked; reset() does not clear it.
        ("trouble", np.int32),
        # What a probe at the head of the chain picked from the raw logits; NO_TOKEN without one.
        ("probed", np.int32),
        # A probe's clone waits here for the trie sampler's clone, which shares its record.
        ("twin_address", np.int64),
        ("n_applied", np.int64),
        ("n_candidates", np.int64),
        ("n_valid", np.int64),
    ],
    align=True,
)
"""The context of one native sampler: [1] record, allocated by C."""
