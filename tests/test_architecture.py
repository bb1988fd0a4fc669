"""The picture in CONTRIBUTING.md is the plan; these tests hold the code against it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trie_sampler"

# Imports inside a function that cross the order on purpose: (file, what it imports).
EXCEPTIONS = {("trie", "llama/vocab")}


def read_picture() -> dict[str, tuple[int, set[str]]]:
    """File -> (row, third parties it may import)."""
    block = re.search(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert block
    picture = {}
    for row, line in enumerate(block[1].strip().splitlines()):
        for name, _, parties in re.findall(r"([\w/]+)(\[([^\]]*)\])?", line):
            picture[name] = row, set(parties.replace(",", " ").split())
    return picture


PICTURE = read_picture()
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, also inside functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "trie_sampler" else {module}
    return found


def test_the_picture_names_every_file_and_no_other() -> None:
    assert {name_of(path) for path in FILES} == set(PICTURE)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_from_rows_above_and_what_its_brackets_name(path: Path) -> None:
    name = name_of(path)
    row, parties = PICTURE[name]
    for module in imports_of(path):
        head, *rest = module.split(".")
        if head == "trie_sampler":
            ours = "/".join(rest)
            if not rest and name == "cli":
                continue  # the command is a user of the public names
            if ours == "__version__" or (name, ours) in EXCEPTIONS:
                continue
            assert PICTURE[ours][0] < row, f"{name} imports {ours}, which is not above it"
        elif head not in sys.stdlib_module_names and head not in {"typing_extensions", "pydantic_core"}:
            allowed = parties | ({"numpy"} if "numba" in parties else set())
            # Types of the hosts may be named where the code behind is imported lazily.
            assert head in allowed or (name, head) == ("trie", "llama_cpp"), f"{name} imports {head}"
