"""What a result was measured on (machine model, versions, commit, and nothing else), and how it is printed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("llama-cpp-python", "numba", "numpy", "pydantic")


def describe() -> dict[str, str]:
    """One line each: processor, cores, Python, package versions, commit."""
    facts = {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "trie_sampler": importlib.metadata.version("trie_sampler"),
        "commit": _commit(),
    }
    for package in _PACKAGES:
        facts[package] = importlib.metadata.version(package)
    return facts


def report(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print what was measured on, and each row's figures behind its ``what``: a line each, or one JSON document."""
    if as_json:
        print(json.dumps({"machine": describe(), "rows": rows}, indent=2))
        return
    for name, value in describe().items():
        print(f"# {name}: {value}")
    for row in rows:
        figures = ", ".join(f"{key} {value:.3g}" for key, value in row.items() if key != "what")
        print(f"{row['what']}: {figures}")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
