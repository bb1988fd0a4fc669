"""``Usage``: what a generation cost, and what knowing its tokens beforehand saved."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Counts of one generation.

    Attributes:
        prompt_tokens: of the prompt.
        n_tokens: tokens that came out, end tokens left out.
        forward_passes_total: what a token-by-token run of the same tokens decodes after the prompt: one for
            each token but the last, and one more where the model was asked whether to stop.
        forward_passes_saved: that minus the decodes made after the prompt; negative where a callback used the
            ``Llama``, and the text had to be evaluated again.
        decodes: calls of ``llama_decode``, the prompt's among them.
        skip_ratio_mean: mean over the steps inside tries, forced ones included, of the share of candidates that
            the trie ruled out: (V - valid) / V; 0 where there were none.
        skip_ratio_std: standard deviation of that, of the population.
        seconds: time after the prompt was evaluated.
        tokens_per_second: ``n_tokens / seconds``; 0 where no time passed.
    """

    prompt_tokens: int
    n_tokens: int
    forward_passes_total: int
    forward_passes_saved: int
    decodes: int
    skip_ratio_mean: float
    skip_ratio_std: float
    seconds: float
    tokens_per_second: float

    @classmethod
    def of(
        cls,
        *,
        prompt_tokens: int,
        n_tokens: int,
        asked_to_stop: bool,
        n_decodes: int,
        n_prefill: int,
        skip_ratios: Sequence[float],
        seconds: float,
    ) -> Usage:
        """From what was counted.

        Args:
            prompt_tokens: of the prompt.
            n_tokens: that came out.
            asked_to_stop: whether logits were looked at after the last token.
            n_decodes: calls of ``llama_decode``.
            n_prefill: how many of them the prompt took.
            skip_ratios: one for each step inside a trie.
            seconds: after the prompt.
        """
        total = max(0, n_tokens - 1 + asked_to_stop)
        return cls(
            prompt_tokens=prompt_tokens,
            n_tokens=n_tokens,
            forward_passes_total=total,
            forward_passes_saved=total - (n_decodes - n_prefill),
            decodes=n_decodes,
            skip_ratio_mean=statistics.fmean(skip_ratios) if skip_ratios else 0.0,
            skip_ratio_std=statistics.pstdev(skip_ratios) if skip_ratios else 0.0,
            seconds=seconds,
            tokens_per_second=n_tokens / seconds if seconds > 0 else 0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return dict(vars(self))
