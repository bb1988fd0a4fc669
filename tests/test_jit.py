"""How functions are compiled, with Numba's decorator replaced by one that says what it was asked.

jit(function) ─── cache=True ─── no place for a cache (RuntimeError) ─── without cache
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numba
import pytest

from trie_sampler import jit as jit_module
from trie_sampler.jit import c_callback, jit, jit_sum


def three() -> int:
    return 3


class FakeDecorator:
    """Stands in for ``numba.njit``; refuses a cache where told to, as Numba does on a read-only disk."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> Callable[..., Any]:
        self.asked.append(options)

        def decorate(function: Callable[..., Any]) -> Any:
            if options.get("cache") and self.error is not None:
                raise self.error
            return "compiled", function

        return decorate


@pytest.mark.parametrize("compile_", [jit, jit_sum])
def test_compiles_without_the_gil_and_with_a_cache(compile_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    njit = FakeDecorator()
    monkeypatch.setattr(numba, "njit", njit)
    assert compile_(three) == ("compiled", three)
    (asked,) = njit.asked
    assert asked.items() >= {"nogil": True, "cache": True}.items()
    # parallel=True has thread layers that abort or break fork.
    assert not asked.get("parallel")


@pytest.mark.parametrize("compile_", [jit, jit_sum])
def test_falls_back_where_no_folder_can_hold_a_cache(compile_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    njit = FakeDecorator(RuntimeError("cannot cache function 'three': no locator available for file"))
    monkeypatch.setattr(numba, "njit", njit)
    assert compile_(three) == ("compiled", three)
    first, second = njit.asked
    # All else stays as asked.
    assert first == {**second, "cache": True}
    assert second["nogil"]


def test_only_sums_may_be_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full fastmath would let the compiler assume that no logit is NaN or infinite."""
    njit = FakeDecorator()
    monkeypatch.setattr(numba, "njit", njit)
    jit(three)
    jit_sum(three)
    plain, summing = njit.asked
    assert not plain.get("fastmath")
    assert summing["fastmath"] == {"reassoc", "contract"}


@pytest.mark.parametrize("refuses", [False, True])
def test_a_c_callback_is_compiled_with_a_cache_where_there_is_a_place(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfunc = FakeDecorator(RuntimeError("no locator available") if refuses else None)
    monkeypatch.setattr(numba, "cfunc", lambda signature, **options: cfunc(signature=signature, **options))
    assert c_callback("int32()", three) == ("compiled", three)
    cached = {"signature": "int32()", "cache": True}
    assert cfunc.asked == ([cached, {"signature": "int32()"}] if refuses else [cached])


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "njit", FakeDecorator(TypeError("no such option")))
    with pytest.raises(TypeError, match="no such option"):
        jit(three)


def test_a_jitted_function_gives_what_its_python_gives() -> None:
    assert jit(three)() == 3


def happened_in(module: str) -> Any:
    function = SimpleNamespace(__module__=module)
    return SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=function)})


def test_the_first_compilation_of_ours_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=jit_module.__name__)
    listener = jit_module._CompileLog()
    listener.on_start(happened_in("somebody.else"))
    assert caplog.records == []
    for _ in range(2):
        listener.on_start(happened_in("trie_sampler.kernels"))
        listener.on_end(happened_in("trie_sampler.kernels"))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "compiling the kernels of trie_sampler" in record.getMessage()


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing compiles under NUMBA_DISABLE_JIT")
def test_numba_tells_us_of_its_compilations(caplog: pytest.LogCaptureFixture) -> None:
    """The listener reads what Numba really sends."""
    caplog.set_level(logging.INFO, logger=jit_module.__name__)
    listener = jit_module._CompileLog()
    numba.core.event.register("numba:compile", listener)
    try:
        ours: dict[str, Any] = {"__name__": "trie_sampler.made_up"}
        exec("def four():\n    return 4\n", ours)  # noqa: S102 - a function whose module is of our package
        assert numba.njit(ours["four"])() == 4
    finally:
        numba.core.event.unregister("numba:compile", listener)
    assert listener.told
