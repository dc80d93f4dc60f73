"""Write the map of all modules into ARCHITECTURE.md: each module once, with the first line of its docstring.

``python scripts/module_map.py`` rewrites what stands between the markers. ``tests/test_architecture.py`` fails where
the map and the tree differ.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dryfit"
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- map: written by scripts/module_map.py -->\n", "<!-- end of map -->\n"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def packages() -> Iterator[tuple[str, list[Path]]]:
    """Yield each package, as a path below ``src/dryfit``, with its modules; packages without modules are left out."""
    for face in sorted(SOURCE.rglob("__init__.py")):
        modules = sorted(path for path in face.parent.glob("*.py") if path != face)
        if modules:
            yield face.parent.relative_to(SOURCE).as_posix(), modules


def map_text() -> str:
    """Return the map as Markdown."""
    lines: list[str] = []
    for package, modules in packages():
        about = summary(SOURCE / package / "__init__.py")
        lines += [f"\n### {package}/\n", *([f"{about}\n"] if about else [])]
        lines += [f"- `{path.stem}`: {summary(path)}" for path in modules]
    return "\n".join(lines) + "\n\n"


def with_map(page: str) -> str:
    """Return the page with the map as it is now."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE.name} has no {BEGIN.strip()} ... {END.strip()}")
    return before + BEGIN + map_text() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text("utf-8")), "utf-8")
