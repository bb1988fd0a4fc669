"""How functions are compiled: on first use, without the GIL, cached on disk where possible.

Nothing is compiled at import. Numba writes its cache beside the source or, where that folder
is read-only, into the user's cache folder; where neither can be written it compiles anew in
each process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from numba.core import event

_logger = logging.getLogger(__name__)


def jit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on its first call.

    Numba's disk cache does not see edits in other files, so a compiled function calls only
    compiled functions of its own file.
    """
    return _compile_on_call(function, fastmath=False)


def jit_sum(function: Callable[..., Any]) -> Any:
    """``jit`` for a sum whose order does not matter: it may use vector lanes and fused products.

    NaN and infinity keep their meaning.
    """
    return _compile_on_call(function, fastmath={"reassoc", "contract"})


def c_callback(signature: str, function: Callable[..., Any]) -> Any:
    """Compile ``function`` now as a C function of that signature; ``.address`` is its entry point."""
    try:
        return numba.cfunc(signature, cache=True)(function)
    except RuntimeError:
        return numba.cfunc(signature)(function)


def _compile_on_call(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # "no locator available": neither folder can hold a cache
        return numba.njit(nogil=True, **options)(function)


class _CompileLog(event.Listener):
    """Says once, before the first real compilation, why a call takes seconds."""

    told = False

    def on_start(self, happened: Any) -> None:
        module = happened.data["dispatcher"].py_func.__module__
        if not self.told and module.startswith(__package__ or ""):
            self.told = True
            _logger.info(
                "compiling the kernels of %s; this takes a few seconds, once per machine and version",
                __package__,
            )

    def on_end(self, happened: Any) -> None:
        pass


event.register("numba:compile", _CompileLog())  # type: ignore[no-untyped-call]  # Numba has no types
