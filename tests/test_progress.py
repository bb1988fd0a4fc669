"""A bar for long work: only where it takes long, tqdm is there and somebody looks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from trie_sampler import progress as module
from trie_sampler.progress import Progress


class Bar:
    """What is told to tqdm."""

    def __init__(self, **settings: Any) -> None:
        made.append(self)
        self.settings = settings
        self.updates: list[int] = []
        self.is_closed = False

    def update(self, n: int) -> None:
        self.updates.append(n)

    def close(self) -> None:
        self.is_closed = True


made: list[Bar] = []


@pytest.fixture(autouse=True)
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    made.clear()
    tqdm = type(sys)("tqdm.auto")
    tqdm.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm.auto", tqdm)
    return made


def test_short_work_shows_nothing(bars: list[Bar]) -> None:
    with Progress("counting", 3) as progress:
        for _ in range(3):
            progress.advance()
    assert bars == []


def test_long_work_shows_one_bar(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", -1.0)
    with Progress("counting", 5) as progress:
        progress.advance(2)
        progress.advance()
        progress.advance(2)
    (bar,) = bars
    assert bar.settings == {"total": 5, "desc": "counting", "initial": 2, "disable": None}
    assert (bar.updates, bar.is_closed) == ([1, 2], True)


def test_an_error_closes_the_bar(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", -1.0)
    progress = Progress("counting")

    def work() -> None:
        with progress:
            progress.advance()
            raise LookupError

    with pytest.raises(LookupError):
        work()
    assert bars[0].is_closed


def test_without_tqdm_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", -1.0)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with Progress("counting") as progress:
        progress.advance()
        progress.advance()


def test_nothing_is_written_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    """With the real tqdm: under a test nobody does."""
    pytest.importorskip("tqdm")
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        patch.setattr(module, "_PATIENCE", -1.0)
        patch.delitem(sys.modules, "tqdm.auto")
        with Progress("counting", 2) as progress:
            progress.advance()
            progress.advance()
    assert capfd.readouterr() == ("", "")
