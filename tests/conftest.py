"""Fixtures, markers and Hypothesis profiles.

``slow`` tests run with ``--run-slow`` (which also selects the Hypothesis profile "slow"). ``model`` tests need a real
model; they are skipped only where the package that carries it is not installed. Every profile but "explore" draws the
same examples on every run, so that CI fails for a change of the code and nothing else.

llama_cpp is imported inside fixtures only: the core's tests run without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Makes `import oracle`, `strategies`, `models` work under --import-mode=importlib too.
sys.path.insert(0, str(Path(__file__).parent))

import models

# llama.cpp's threads spin while they wait, and starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from llama_cpp import Llama

MODEL_PATHS: dict[str, Callable[[], Path]] = {"smollm2": models.smollm2_path, "gemma": models.gemma_path}

# Files that need neither llama_cpp nor a model, and pass with NUMBA_DISABLE_JIT=1 too.
CORE_FILES = {
    "test_architecture",
    "test_automaton",
    "test_build",
    "test_cache",
    "test_cursor",
    "test_graph_scores",
    "test_jit",
    "test_kernels",
    "test_native_kernels",
    "test_payload",
    "test_ragged",
    "test_scores",
    "test_span",
    "test_store",
    "test_tokens",
    "test_trie",
}

# too_slow: the first example of a run may have to compile a kernel.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", max_examples=100, derandomize=True, database=None, **_COMMON)
settings.register_profile("slow", max_examples=2000, derandomize=True, database=None, **_COMMON)
settings.register_profile("explore", max_examples=2000, derandomize=False, **_COMMON)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", default=False, help="run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long; runs with --run-slow")
    config.addinivalue_line("markers", "core: needs no llama_cpp; runs as plain Python too")
    config.addinivalue_line("markers", "model(*names): needs real models, 'smollm2' or 'gemma'; both without names")
    if config.getoption("--run-slow") and not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow = config.getoption("--run-slow")
    for item in items:
        if item.path.stem in CORE_FILES:
            item.add_marker(pytest.mark.core)
        if not run_slow and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: needs --run-slow"))
        names = {"smollm2", "gemma", "llm"}.intersection(getattr(item, "fixturenames", ()))
        if names and not item.get_closest_marker("model"):
            # So that -m "not model" leaves these out too. The fixture itself does the skipping.
            item.add_marker(pytest.mark.model(*(names - {"llm"})))


def _model_path(name: str) -> Path:
    try:
        return MODEL_PATHS[name]()
    except models.ModelNotInstalledError as error:
        pytest.skip(f"model {name}: {error}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("model")
    fixtures = getattr(item, "fixturenames", ())
    if marker and not {"smollm2", "gemma", "llm"}.intersection(fixtures):
        for name in marker.args or MODEL_PATHS:
            _model_path(name)


def _load_real(name: str) -> Iterator[Llama]:
    path = _model_path(name)
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=2048, logits_all=False, verbose=False)
    yield llama
    llama.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Llama]:
    """SmolLM2-135M-Instruct: byte-level BPE, V = 49152, chat template. Shared: leave it usable."""
    yield from _load_real("smollm2")


@pytest.fixture(scope="session")
def gemma() -> Iterator[Llama]:
    """Gemma 3 270M: SentencePiece, V = 262144, sliding window. Shared: leave it usable."""
    yield from _load_real("gemma")


@pytest.fixture(scope="session", params=list(MODEL_PATHS))
def llm(request: pytest.FixtureRequest) -> Llama:
    """Each real model in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model with the SentencePiece vocabulary, see ``models.write_tiny_model``."""
    return models.write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-spm.gguf", vocab="spm")


@pytest.fixture(scope="session")
def tiny_bpe_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model with the byte-level BPE vocabulary."""
    return models.write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-bpe.gguf", vocab="bpe")


def _load_tiny(path: Path) -> Iterator[Llama]:
    from llama_cpp import Llama

    # 0 is GGML_TYPE_F32: with the default float16 cache numbers differ by 1e-2 between batch shapes.
    # One thread: two that wait for each other cost more than the work, far more on a busy machine.
    llama = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, verbose=False)
    yield llama
    llama.close()


@pytest.fixture
def tiny(tiny_model_path: Path) -> Iterator[Llama]:
    """A fresh tiny model for one test (5 ms): float32 key-value cache, SentencePiece vocabulary."""
    yield from _load_tiny(tiny_model_path)


@pytest.fixture
def tiny_bpe(tiny_bpe_model_path: Path) -> Iterator[Llama]:
    """As ``tiny``, with the byte-level BPE vocabulary."""
    yield from _load_tiny(tiny_bpe_model_path)
