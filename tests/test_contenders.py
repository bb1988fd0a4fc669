"""Each contender of the benchmark that is installed walks to the choice that the logits spell."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from benchmarks.contenders import CONTENDERS, DictTrie
from benchmarks.run import Checker, make_choices, run_one, time_walk, write_choices

pytestmark = pytest.mark.model


MODULES = {"lm-format-enforcer": "lmformatenforcer"}


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "STATIC"])
def test_every_choice_comes_out(smollm2: Any, name: str) -> None:
    package = CONTENDERS[name].package
    if package is not None:
        pytest.importorskip(MODULES.get(package, package.replace("-", "_")))
    contender = CONTENDERS[name](smollm2)
    choices, _ = make_choices(smollm2, 5)
    contender.build(choices)
    noise = np.random.default_rng(0).normal(size=smollm2.n_vocab()).astype(np.float32)
    checker = Checker(smollm2, choices)
    for _, tokens in choices:
        # Raises where what is allowed is not the oracle's, or where a louder token wins that is not allowed.
        checker.walk(contender, tokens, noise)
        assert len(time_walk(contender, tokens, noise)) == len(tokens)


class Everything(DictTrie):
    """Masks nothing."""

    def mask(self, row: Any) -> None:
        pass


class Nothing(DictTrie):
    """Masks everything."""

    def mask(self, row: Any) -> None:
        row[:] = -np.inf


@pytest.mark.parametrize(("mistaken", "message"), [(Everything, "wrong tokens"), (Nothing, "are not allowed")])
@pytest.mark.parametrize("canonical", [True, False])
def test_the_check_sees_wrong_masks(smollm2: Any, mistaken: type[DictTrie], message: str, canonical: bool) -> None:
    choices, _ = make_choices(smollm2, 5)
    contender = mistaken(smollm2)
    contender.canonical = canonical
    contender.build(choices)
    with pytest.raises(AssertionError, match=message):
        Checker(smollm2, choices).walk(contender, choices[0][1], np.zeros(smollm2.n_vocab(), np.float32))


def test_what_fails_says_so(tmp_path: Path) -> None:
    write_choices(str(models.smollm2_path()), 4, tmp_path / "choices")
    failure = run_one("STATIC", str(models.smollm2_path()), tmp_path / "choices", 30.0)["failure"]
    assert "No matching distribution found" in failure


def test_who_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    assert run_one("llguidance", "none.gguf", Path("none"), 20.0) == {"failure": "not installed"}
