"""Count the lines of code of a tree: without blank lines, comments and docstrings.

``python scripts/code_lines.py [FOLDER ...]`` prints a number for each package of ``src/dryfit`` (or of the folders),
and their sum. A line counts where a token of code stands on it, so that how a file is formatted matters little.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def code_lines(text: str) -> int:
    """Return how many lines of a module's text hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is a docstring, of a definition or of the name above it.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main(folders: list[str]) -> None:
    """Print the numbers."""
    for folder in [Path(name) for name in folders] or [ROOT / "src" / "dryfit"]:
        counts: Counter[str] = Counter()
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            counts[parts[0] if len(parts) > 1 else "."] += code_lines(path.read_text("utf-8"))
        for package, lines in sorted(counts.items()):
            print(f"{lines:7,}  {package}")
        print(f"{counts.total():7,}  {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
