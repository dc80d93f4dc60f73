"""What no linter sees of the sources: imports that happen, and functions that are long.

Which package may import which, and where imports and arguments stand, pyproject.toml says: import-linter and ruff.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src" / "dryfit").rglob("*.py"))
EVERYTHING = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")
)

MOST_FUNCTION_LINES = 60
CONTROL_PLANE = ("settings", "ledger", "processes", "search", "study", "documents")
HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "sklearn",
    "scipy",
    "pandas",
    "pyarrow",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_function_is_long():
    spans = [
        (path, node.name, (node.end_lineno or 0) - node.lineno + 1) for path in SOURCES for node in functions(path)
    ]
    assert len(spans) > 1000
    assert not [f"{module_name(path)}:{name}" for path, name, lines in spans if lines > MOST_FUNCTION_LINES]


def test_nobody_imports_the_package_root():
    importers = [
        module_name(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Import) and any(alias.name == "dryfit" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module == "dryfit" or node.level))
    ]
    assert not [name for name in importers if name != "dryfit"]


def test_core_needs_only_the_standard_library_and_pydantic():
    allowed = {*sys.stdlib_module_names, "pydantic", "dryfit"}
    core = [path for path in SOURCES if module_name(path).startswith("dryfit.settings")]
    assert core
    foreign = {name for path in core for name in imported(path) if name.partition(".")[0] not in allowed}
    assert not foreign
    assert not {
        name
        for path in core
        for name in imported(path)
        if name.startswith("dryfit") and not name.startswith("dryfit.settings")
    }


# Spelled in halves: this file is searched too.
FORBIDDEN = ["shared" + "/data", "/wo" + "rk/", "TO" + "DO", "FIX" + "ME", "print(" + '"debug']


@pytest.mark.parametrize("words", FORBIDDEN)
def test_no_file_names_a_place_outside_or_leaves_work_undone(words):
    texts = [*EVERYTHING, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    texts += (ROOT / "examples").rglob("*.toml")
    assert not [str(path) for path in texts if words in path.read_text(encoding="utf-8")]


def control_modules() -> list[str]:
    prefixes = tuple(f"dryfit.{package}" for package in CONTROL_PLANE)
    names = [module_name(path) for path in SOURCES]
    return [name for name in names if name in ("dryfit", "dryfit.study.functions") or name.startswith(prefixes)]


def test_the_control_plane_never_loads_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {control_modules()!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    # __main__ modules run on import; there is none of them in the list by construction.
    assert not [name for name in control_modules() if name.endswith("__main__")]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
