"""Packages import each other as the table in docs/architecture.md says, and in no circle."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "powerclip"
FOR_ALL = {"runtime", "settings", "errors"}


def allowed() -> dict[str, set[str]]:
    """Package → those that it may import, from the rows of the table."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows}


def defined(path: Path) -> set[str]:
    """Functions, classes and `Class.method`s of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def imports(path: Path) -> dict[str, int]:
    """Packages and modules of powerclip that a file imports, also within functions and for types → line."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "powerclip":
            names = [f"powerclip.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("powerclip."):
                found.setdefault(name.split(".")[1], node.lineno)
    return found


def test_the_page_names_functions_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(\.\./powerclip/([\w/]+\.py)\)((?:,?\s`[\w.]+`)+)", page)
    assert len(named) > 40
    for file, names in named:
        missing = set(re.findall(r"`([\w.]+)`", names)) - defined(PACKAGE / file)
        assert not missing, f"{file} does not define {', '.join(sorted(missing))}"


def test_every_package_has_a_row():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == allowed().keys()


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_a_package_imports_only_what_its_row_allows(package):
    known = {path.stem for path in PACKAGE.glob("*") if path.suffix in ("", ".py")}
    may = {package, *allowed()[package], *(FOR_ALL if package not in FOR_ALL else {"errors"})}
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for name, line in imports(path).items():
            assert name in may or name not in known, f"{path.relative_to(ROOT)}:{line} imports powerclip.{name}"


@pytest.mark.parametrize("module", sorted(FOR_ALL - {"runtime"}))
def test_what_all_import_imports_none_of_them(module):
    assert imports(PACKAGE / f"{module}.py").keys() <= {"errors"}


def test_no_package_imports_itself_by_way_of_others():
    # A circle raises CycleError, which names it.
    assert set(TopologicalSorter(allowed()).static_order()) == allowed().keys()
