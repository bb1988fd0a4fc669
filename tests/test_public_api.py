"""What `import trie_sampler` gives, and what it leaves alone.

trie_sampler ─── name ─── _HOMES[name] ─── imported on first use, nothing compiled before
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trie_sampler
from trie_sampler import errors


def needs_llama(home: str) -> bool:
    """Homes that are made of llama_cpp; the core's tests run without it."""
    return home.startswith("llama.") or home in {"choosing", "ranking", "session", "skeleton"}


def run_python(code: str, **environment: str) -> str:
    """stdout of a fresh interpreter; its failure is ours."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_sorted_and_complete() -> None:
    assert trie_sampler.__all__ == sorted(set(trie_sampler.__all__))
    assert set(trie_sampler.__all__) == set(trie_sampler._HOMES)


def test_all_holds_every_error_of_the_tree() -> None:
    ref = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, (errors.TrieSamplerError, Warning))
    }
    assert ref
    assert ref <= set(trie_sampler.__all__)


@pytest.mark.parametrize(
    ("error", "caught_as"),
    [
        (errors.PayloadError, ValueError),
        (errors.EmptyTrieError, ValueError),
        (errors.VocabMismatchError, ValueError),
        (errors.UnknownPathError, LookupError),
        (errors.OffTrieError, ValueError),
        (errors.EngineError, RuntimeError),
        (errors.TrieFileError, ValueError),
    ],
)
def test_every_error_is_ours_and_a_built_in_one(error: type[Exception], caught_as: type[Exception]) -> None:
    assert issubclass(error, errors.TrieSamplerError)
    with pytest.raises(caught_as, match="what was wrong"):
        raise error("what was wrong")


def test_an_engine_error_has_the_code_of_the_engine() -> None:
    assert errors.EngineError("no").code is None
    assert errors.EngineError("no", -3).code == -3
    assert str(errors.EngineError("no", -3)) == "no"
    assert issubclass(errors.TrieSamplerWarning, UserWarning)


def test_type_checkers_see_what_the_interpreter_sees() -> None:
    """The imports under TYPE_CHECKING name the same objects from the same homes."""
    tree = ast.parse(Path(trie_sampler.__file__).read_text())
    seen = {
        alias.name: str(node.module).removeprefix("trie_sampler.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("trie_sampler.")
        for alias in node.names
    }
    assert seen == trie_sampler._HOMES


@pytest.mark.parametrize("name", trie_sampler.__all__)
def test_every_name_is_importable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = trie_sampler._HOMES[name]
    if needs_llama(home):
        pytest.importorskip("llama_cpp")
    monkeypatch.delitem(vars(trie_sampler), name, raising=False)
    value = getattr(trie_sampler, name)
    assert value is getattr(importlib.import_module(f"trie_sampler.{home}"), name)
    assert value.__module__ == f"trie_sampler.{home}"
    assert value.__doc__
    # Kept, so that the second look costs a dictionary look-up.
    assert vars(trie_sampler)[name] is value


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'trie_sampler' has no attribute 'TokenTree'"):
        _ = trie_sampler.TokenTree
    assert not hasattr(trie_sampler, "__wrapped__")


def test_dir_lists_every_name() -> None:
    assert set(trie_sampler.__all__) | {"__version__"} <= set(dir(trie_sampler))


def test_the_version_is_one() -> None:
    assert all(part.isdecimal() for part in trie_sampler.__version__.split(".")[:2])


@pytest.mark.parametrize("action", ["import trie_sampler", "import trie_sampler; dir(trie_sampler)"])
def test_import_brings_nothing_heavy(action: str) -> None:
    heavy = ("numba", "llvmlite", "llama_cpp", "numpy", "pydantic", "scipy", "matplotlib")
    comp = run_python(f"import sys; {action}; print([name for name in {heavy!r} if name in sys.modules])")
    assert comp == "[]"


def test_a_payload_needs_no_compiler() -> None:
    code = "import sys; from trie_sampler import TokenTreePayload, OffTrieError; print('numba' in sys.modules)"
    assert run_python(code) == "False"


def test_the_core_works_without_llama_cpp() -> None:
    code = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "import numpy as np\n"
        "from trie_sampler import Choice, TokenTrie, TrieCursor\n"
        "cursor = TrieCursor(TokenTrie.from_sequences([('A', [5]), ('B', [3])]))\n"
        "print(cursor.pick(np.arange(8.0, dtype=np.float32)))\n"
    )
    assert run_python(code, NUMBA_DISABLE_JIT="1") == "5"
