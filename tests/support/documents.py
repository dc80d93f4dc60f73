"""What the documents say can be typed, and how it is run."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
RUN = "run by the long tests"
"""What stands before a fenced block that is run."""
ROWS = {"train": 32, "validation": 8, "test": 8}
"""What the tours leave of the rows that ``dryfit init`` makes: how well a study learns is proved elsewhere."""
_FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>sh|python)\n(?P<body>.*?)```", re.DOTALL)


_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)


def fences(path: Path) -> list[re.Match[str]]:
    """The fenced blocks of a document with commands or Python, each with its ``mark``, ``language`` and ``body``."""
    return list(_FENCE.finditer(path.read_text(encoding="utf-8")))


def run_as_written(fence: re.Match[str], folder: Path, *flags: str) -> int:
    """Run a fenced block, Python with some flags; how many commands it had. Each is as written, but on fewer rows."""
    if fence["language"] == "python":
        subprocess.run([sys.executable, *flags, "-c", fence["body"]], cwd=folder, check=True)
        return 1
    lines = fence["body"].splitlines()
    for line in lines:
        words = line.split("#")[0].split()
        assert words[0] == "dryfit", line
        command = [sys.executable, "-m", "dryfit.cli.app", *words[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)
        if words[1] == "init" and not {"--data", "--script"} & set(words):
            leave_rows(folder / words[2] / "data")
    return len(lines)


def examples(path: Path) -> list[re.Match[str]]:
    """The fenced blocks of a document that are run."""
    return [fence for fence in fences(path) if fence["mark"] == RUN]


def trains(path: Path) -> bool:
    """Whether an example of a document searches or trains."""
    words = ("dryfit tune", "dryfit train")
    return any(line.startswith(words) for fence in examples(path) for line in fence["body"].splitlines())


def run_examples(path: Path, folder: Path) -> int:
    """Run all examples of a document, beside the files that it shows; how many commands they had."""
    for file in _FILE.finditer(path.read_text(encoding="utf-8")):
        (folder / file["name"]).write_text(file["body"], encoding="utf-8")
    return sum(run_as_written(fence, folder, "-W", "error") for fence in examples(path))


def leave_rows(data: Path) -> None:
    """Cut the files of a data set to their first rows."""
    for split, rows in ROWS.items():
        file = data / f"{split}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        assert len(lines) >= rows, file
        file.write_text("".join(lines[:rows]), encoding="utf-8")
