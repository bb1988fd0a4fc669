"""``Choice``: what came out, and how sure the model was."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trie_sampler.cursor import Step


class ChoiceStep(NamedTuple):
    """One token of a choice, or the decision to end it.

    ``logprob`` is in nats: of a walk the pick's share of the options there, 0 where it was forced; of ``rank`` what
    the named score takes it for, under the whole vocabulary or, with "walk", over the options. ``margin`` is to the
    second option, ``None`` where there was none or only whole choices were compared.
    """

    token: int
    """Its id; an end token or -1 where the choice ended though it could go on."""
    text: str
    """What it adds; a cut character is replaced."""
    logprob: float
    margin: float | None
    is_forced: bool


@dataclass(frozen=True)
class Choice:
    """One choice made by a model.

    Attributes:
        name: the choice as the caller named it, never with a leading space; ``None`` where the
            generation was cut before the choice was complete.
        value: what the caller wants back: the ``Enum`` member, the ``Literal`` argument, else the name.
        index: place in the caller's list; ``None`` where ``name`` is.
        text: what came out, leading space and all.
        tokens: its token ids, end tokens left out.
        complete: whether the choice was ended.
        logprob: nats, log of ``probability``; of a search that left choices out the score as far as it is known.
        probability: of the walk: the product over its steps of the pick's share of the softmax over
            the options there (children, and stopping where a leaf ends). Forced steps count 1. Of ``rank``
            and "best" the named score's; ``None`` where not all choices were evaluated.
        margin: nats between the best and the second option at the closest step; ``None`` where no
            step had two options. Of ``rank`` and "best" to the next choice, or what it can still reach.
        valid_mass: the model's own probability that its next token starts a choice, at the first
            step; ``None`` unless asked for, or ranked. Low: the prompt does not lead to any of the choices.
        stats: ``steps``, ``forced_steps``, ``masked``, and what the door adds.
        steps: token by token; of ``rank`` and "best" only where ``steps=True`` asked for it, and then under the whole
            vocabulary, so they add up to ``stats["score"]`` of one spelling and not to ``logprob``.
    """

    name: str | None
    value: Any
    index: int | None
    text: str
    tokens: tuple[int, ...]
    complete: bool
    logprob: float
    probability: float | None
    margin: float | None
    valid_mass: float | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[ChoiceStep, ...] = field(default=(), repr=False)

    def to_dict(self, *, steps: bool = False) -> dict[str, Any]:
        """Plain values for ``json.dumps``: an ``Enum`` member as its value, numbers that are not finite as None.

        Args:
            steps: whether ``steps`` are in it, each a dictionary.
        """
        value = self.value.value if isinstance(self.value, enum.Enum) else self.value
        more: dict[str, Any] = {}
        if steps:
            more["steps"] = [{name: _finite(value) for name, value in step._asdict().items()} for step in self.steps]
        return {
            "name": self.name,
            "value": value,
            "index": self.index,
            "text": self.text,
            "tokens": list(self.tokens),
            "complete": self.complete,
            "logprob": _finite(self.logprob),
            "probability": self.probability,
            "margin": _finite(self.margin),
            "valid_mass": self.valid_mass,
            "stats": {name: _finite(value) for name, value in self.stats.items()},
            **more,
        }


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def walk_numbers(steps: Sequence[Step]) -> dict[str, Any]:
    """``logprob``, ``probability``, ``margin`` and ``stats`` of a walk."""
    logprob = sum(step.logprob for step in steps)
    margin = min((step.margin for step in steps), default=math.inf)
    return {
        "logprob": logprob,
        "probability": math.exp(logprob),
        "margin": None if math.isinf(margin) else margin,
        "stats": {
            "steps": len(steps),
            "forced_steps": sum(step.is_forced for step in steps),
            "masked": bool(steps),
        },
    }
