"""The Python of the documents: each name of dryfit exists and takes what it is given; the examples that train run.

The names are looked up each time; ``make nightly`` runs the examples, in a file of its own, beside the other ones.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from documents import PAGES, README, ROOT, fences, run_examples, trains

NOTEBOOK = ROOT / "examples" / "five_minutes.ipynb"


def code_of(path: Path) -> list[str]:
    """What of a page, or of a notebook, is Python."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4)["cells"]
        return [cell["source"] for cell in cells if cell["cell_type"] == "code" and cell["source"][:1] not in "%!"]
    return [fence["body"] for fence in fences(path) if fence["language"] == "python"]


def names_of(tree: ast.AST) -> dict[str, Any]:
    """The objects that the imports of dryfit bring; importing one that is not there fails."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dryfit":
            home = importlib.import_module(node.module or "")
            found |= {alias.asname or alias.name: getattr(home, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name: importlib.import_module(alias.name) for alias in node.names if alias.name == "dryfit"}
    return found


def used(tree: ast.AST) -> Iterator[tuple[Any, ast.Call | None]]:
    """Yield each object of dryfit that code names, and how it is called where it is."""
    names = names_of(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        first, *rest = text.split(".")
        if first in names and re.fullmatch(r"[\w.]+", text):
            yield functools.reduce(getattr, rest, names[first]), calls.get(id(node))


def bind(called: Any, call: ast.Call) -> None:
    """Fail where something does not take what a call gives it."""
    inspect.signature(called).bind(*call.args, **{str(one.arg): one.value for one in call.keywords})


@pytest.mark.heavy
@pytest.mark.parametrize("path", [README, *PAGES, NOTEBOOK], ids=lambda path: path.name)
def test_every_name_exists_and_takes_what_it_is_given(path: Path) -> None:
    for code in code_of(path):
        for thing, call in used(ast.parse(code)):
            if call is not None:
                bind(thing, call)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "code",
    [
        "import dryfit\ndryfit.tunes('a')",
        "from dryfit.meta import builds",
        "import dryfit\ndryfit.tune('a', trial=3)",
        "from dryfit.meta import build\nbuild()",
    ],
)
def test_what_is_not_there_is_noticed(code: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        for thing, call in used(ast.parse(code)):
            bind(thing, call or ast.Call())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", [path for path in PAGES if trains(path)], ids=lambda path: path.name)
def test_examples_that_train_work_as_written(tmp_path: Path, path: Path) -> None:
    assert run_examples(path, tmp_path) > 0
