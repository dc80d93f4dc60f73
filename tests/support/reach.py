"""What a test file reaches, by the import graph: which tests need no torch, and which ones a change may break.

``python tests/support/reach.py BASE`` prints the test files that reach what has changed since a commit
(``make affected``).
"""

import ast
import importlib.abc
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = ROOT / "tests"
PACKAGE: Final = "dryfit"

HEAVY: Final = frozenset(
    {
        "torch",
        "transformers",
        "tokenizers",
        "accelerate",
        "datasets",
        "safetensors",
        "peft",
        "bitsandbytes",
    }
)
"""What ``make check`` runs without."""
_STARTS: Final = frozenset({"subprocess", "dryfit.processes.supervisor"})
"""Whoever reaches one of these starts processes, and what those import no import statement of the test says."""
_DOCUMENTS: Final = ".md"


@dataclass(frozen=True)
class Reach:
    """What importing one file of the tests imports in the end.

    Attributes:
        modules: Modules of dryfit, those of other packages by their first name, and files of ``tests/support``.
        text: The sources of the file and of the files of ``tests/support`` that it reaches.
    """

    modules: frozenset[str]
    text: str

    @property
    def light(self) -> bool:
        """Whether it needs none of the heavy libraries."""
        return not self.modules & HEAVY

    @property
    def starts_processes(self) -> bool:
        """Whether it may run code that it does not import."""
        return bool(self.modules & _STARTS)


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)


@cache
def _below(module: str) -> frozenset[str]:
    """Return a module of dryfit, the packages it lies in, and all they import.

    The outermost package imports its public names when they are asked for: it counts where it is imported by itself.
    """
    parts = module.split(".")
    own = [".".join(parts[:length]) for length in range(2, len(parts) + 1)] or [module]
    return frozenset(own).union(*(_graph().find_upstream_modules(name) for name in own))


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the full names that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


@cache
def _module_of_dryfit(name: str) -> str:
    """Return the module that an imported name is or stands in."""
    while name not in _graph().modules:
        name = name.rpartition(".")[0]
    return name


@cache
def _support_files() -> dict[str, Path]:
    return {path.stem: path for path in (TESTS / "support").rglob("*.py")}


@cache
def reach(path: Path) -> Reach:
    """Return what a test file reaches."""
    support, done = _support_files(), set[Path]()
    modules, texts, due = set[str](), list[str](), [path]
    while due:
        current = due.pop()
        if current in done:
            continue
        done.add(current)
        texts.append(current.read_text(encoding="utf-8"))
        for name in _imports(current):
            top = name.partition(".")[0]
            if top == PACKAGE:
                modules |= _below(_module_of_dryfit(name))
            elif top in support:
                due.append(support[top])
            else:
                modules.add(top)
    return Reach(frozenset(modules) | {str(one.relative_to(ROOT)) for one in done}, "\n".join(texts))


def test_files() -> list[Path]:
    """Return every file with tests."""
    return sorted(TESTS.rglob("test_*.py"))


def _changed_names(path: str) -> set[str] | None:
    """Return under which names a changed file stands in what tests reach; None where it may matter to every test."""
    parts = Path(path).parts
    if parts[:2] == ("src", PACKAGE):
        if path.endswith(".py"):
            name = ".".join(Path(path).relative_to("src").with_suffix("").parts)
            return {name.removesuffix(".__init__")}
        return {_module_of_dryfit(".".join(parts[1:-1]))}  # data of a package: whoever reaches the package
    if parts[0] == "tests" and path.endswith(".py") and Path(path).name != "conftest.py":
        return {path}
    return None


def affected(changed: Iterable[str], files: Iterable[Path]) -> list[Path]:
    """Return the test files that a change reaches.

    Args:
        changed: Files that have changed, from the root of the repository.
        files: The test files to choose from.
    """
    changed = [path for path in changed if not path.startswith("benchmarks/")]
    pages = [path for path in changed if path.endswith(_DOCUMENTS)]
    names = [_changed_names(path) for path in changed if path not in pages]
    everything = None in names
    wanted = {name for some in names if some for name in some}
    of_dryfit = any(path.startswith("src/") for path in changed)
    chosen: list[Path] = []
    for path in files:
        seen = reach(path)
        code = bool(wanted & seen.modules) or (of_dryfit and seen.starts_processes)
        if everything or code or (pages and _DOCUMENTS in seen.text):
            chosen.append(path)
    return chosen


def changed_since(base: str) -> list[str]:
    """Return the files that differ from a commit, those that git does not know yet among them."""
    listings = (["diff", "--name-only", base, "--"], ["ls-files", "--others", "--exclude-standard"])
    changed: set[str] = set()
    for words in listings:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"what has changed since {base!r} cannot be told: {done.stderr.strip()}")
        changed.update(done.stdout.splitlines())
    return sorted(changed)


class _Refuse(importlib.abc.MetaPathFinder):
    """Finds no heavy library."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Fail where one is asked for."""
        del path, target
        if fullname.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"a test that counts as light imports {fullname}", name=fullname)


def refuse_heavy_imports() -> None:
    """Let every import of a heavy library fail in this process."""
    sys.meta_path.insert(0, _Refuse())


if __name__ == "__main__":
    for file in affected(changed_since(sys.argv[1]), test_files()):
        print(file.relative_to(ROOT))
