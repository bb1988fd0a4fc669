"""Hypothesis strategies: sets of leaves, rows of logits, texts to choose from."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# Texts that went wrong in tools of this kind: quoting, escapes, pattern characters, white space, bytes that a cut can
# split, joined emoji, decomposed accents, right-to-left, a rare hieroglyph (four byte pieces in most vocabularies).
AWKWARD_TEXTS = (
    "a", "ab", "abq", "A", "1", "10", "100", "REPLY", "REPLY_THREAD", "Yes", "yes",
    "Dr. Smith", "a+b (c)", "x^2", "[n]", "{}", "%s", "#", "<end>", "<s>", "</s>",
    '"', '"quoted"', "'", "\\", "\\n", "C:\\dir\\",
    "two\nlines", "two\nmore", "tab\there", " leading", "trailing ", "two  spaces",
    "\u00e9", "e\u0301", "na\u00efve", "\u65e5\u672c", "\u65e5\u672c\u8a9e", "\u05e9\u05dc\u05d5\u05dd", "\U00013000",
    "\U0001f642", "\U0001f642\U0001f643", "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
)  # fmt: skip


@st.composite
def leaf_sets(
    draw: st.DrawFn,
    *,
    max_token: int = 31,
    max_leaves: int = 12,
    max_len: int = 5,
    min_leaves: int = 1,
    min_len: int = 1,
) -> list[tuple[str, list[int]]]:
    """Lists of (name, tokens), ids in 0..max_token, in arbitrary order.

    Half of the leaves continue, cut or repeat an earlier one, so that sequences share prefixes, are prefixes of each
    other, or are equal; half of those that can take an earlier leaf's name do.
    """
    edge_ids = st.sampled_from(sorted({0, 1, min(2, max_token), max_token // 2, max(max_token - 1, 0), max_token}))
    ids = st.one_of(edge_ids, st.integers(0, max_token))
    n_leaves = draw(st.integers(min_leaves, max_leaves))
    leaves: list[tuple[str, list[int]]] = []
    for i in range(n_leaves):
        tokens = draw(st.lists(ids, min_size=min_len, max_size=max_len))
        name = f"n{i}"
        if leaves:
            if draw(st.booleans()):
                base = draw(st.sampled_from(leaves))[1]
                tokens = (base[: draw(st.integers(0, len(base)))] + tokens)[:max_len]
                if draw(st.booleans()):
                    tokens = base[: draw(st.integers(min(min_len, len(base)), len(base)))]
            if draw(st.integers(0, 3)) == 0:
                name = draw(st.sampled_from(leaves))[0]
        leaves.append((name, tokens))
    return draw(st.permutations(leaves))


def logits_rows(
    width: int,
    *,
    nan: bool = True,
    neginf: bool = True,
    posinf: bool = False,
    huge: bool = True,
) -> st.SearchStrategy[np.ndarray]:
    """float32 rows of ``width`` logits: ties and signed zeros always, the rest as switched.

    ``huge``: magnitudes up to the largest float32, whose differences overflow float32.
    """
    common = [0.0, -0.0, 1.0, -1.0, 1.5, 10.0, -20.0]
    rare: list[float] = []
    if nan:
        rare.append(float("nan"))
    if neginf:
        rare.append(float("-inf"))
    if posinf:
        rare.append(float("inf"))
    if huge:
        largest = float(np.finfo(np.float32).max)
        rare += [largest, -largest, 1e30, -1e30, 1e-45, 89.0, -104.0]
    elements = [st.sampled_from(common), st.floats(-30, 30, width=32)]
    if rare:
        elements.append(st.sampled_from(rare))
    # fill: few distinct values over most of the row, which makes ties and keeps wide rows cheap to draw.
    return hnp.arrays(np.float32, width, elements=st.one_of(elements), fill=st.sampled_from(common + rare))


def texts(*, max_size: int = 8) -> st.SearchStrategy[str]:
    """One non-empty text without surrogates, NUL, or U+2581.

    SentencePiece vocabularies write a space as U+2581 and cannot tell the two apart; NUL ends C strings.
    """
    alphabet = st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581")
    return st.one_of(st.sampled_from(AWKWARD_TEXTS), st.text(alphabet, min_size=1, max_size=max_size))


@st.composite
def choice_texts(draw: st.DrawFn, *, min_size: int = 1, max_size: int = 8) -> list[str]:
    """Lists of distinct, non-empty texts, some of them beginnings of others."""
    chosen: dict[str, None] = {}
    for drawn in draw(st.lists(texts(), min_size=min_size, max_size=max_size, unique=True)):
        text = drawn
        if chosen and draw(st.integers(0, 3)) == 0:
            text = draw(st.sampled_from(list(chosen))) + drawn
        while text in chosen:
            text += "'"
        chosen[text] = None
    return draw(st.permutations(list(chosen)))
