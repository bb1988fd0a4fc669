"""Each contender of the benchmark that is installed walks to the choice that the logits spell."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from benchmarks.contenders import CONTENDERS
from benchmarks.run import make_choices, run_one, write_choices

pytestmark = pytest.mark.model


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "STATIC"])
def test_every_choice_comes_out(smollm2: Any, name: str) -> None:
    contender = CONTENDERS[name]()
    if contender.package is not None:
        pytest.importorskip(contender.package.replace("lm-format-enforcer", "lmformatenforcer").replace("-", "_"))
    choices = make_choices(smollm2, 5)
    contender.build(smollm2, choices)
    noise = np.random.default_rng(0).normal(size=smollm2.n_vocab()).astype(np.float32)
    (line_feed,) = smollm2.tokenize(b"\n", add_bos=False)
    for _, tokens in choices:
        contender.start()
        for token in tokens:
            row = noise.copy()
            # No choice has a line feed, however loud.
            row[line_feed], row[token] = 200, 100
            contender.mask(row)
            assert contender.pick(row) == token
            contender.accept(token)


def test_what_fails_says_so(tmp_path: Path) -> None:
    write_choices(str(models.smollm2_path()), 4, tmp_path / "choices")
    failure = run_one("STATIC", str(models.smollm2_path()), tmp_path / "choices", 30.0)["failure"]
    assert "no package of that name" in failure


def test_who_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    assert run_one("llguidance", "none.gguf", Path("none"), 20.0) == {"failure": "not installed"}
