"""What the contract may touch of mpkit: names that a module lists in `__all__`, and no private attribute."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.py"))
DEEP = ("mpkit.boost.", "mpkit.lessons.")  # packages whose files have public names of their own: one idea, one file


def module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def is_public(name: str) -> bool:
    """Whether users may import this dotted name."""
    home, _, last = name.rpartition(".")
    if home == "mpkit" and module(name) is not None:
        return True
    if not home.startswith("mpkit") or (home.count(".") > 1 and not home.startswith(DEEP)):
        return False
    found = module(home)
    return found is not None and last in getattr(found, "__all__", [])


def touched(source: str) -> set[str]:
    """Dotted names of mpkit that a file imports, or reads from a module of it; and `._attribute` of private ones."""
    tree, modules, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mpkit":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {a.asname or a.name: f"mpkit.{a.name}" for a in node.names if node.module == "mpkit"}
        elif isinstance(node, ast.Import):
            found |= {f"import {a.name}" for a in node.names if a.name.split(".")[0] == "mpkit"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr.endswith("__"):
                continue
            if base in modules and module(modules[base]) is not None:
                found.add(f"{modules[base]}.{node.attr}")
            elif node.attr.startswith("_") and base not in ("self", "cls", "os"):
                found.add(f".{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_the_contract_needs_public_names_alone(path):
    assert [name for name in sorted(touched(path.read_text())) if not is_public(name)] == []


def test_private_names_are_seen():
    source = "from mpkit.casting.lists import X\nfrom mpkit import step\nstep.nothing\nx._y\nimport mpkit.model"
    assert [name for name in sorted(touched(source)) if not is_public(name)] == [
        "._y",
        "import mpkit.model",
        "mpkit.casting.lists.X",
        "mpkit.step.nothing",
    ]
