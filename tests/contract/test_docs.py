"""Every fenced command of the documents is run, or says why it is not."""

import re
from pathlib import Path

import pytest

from documents import README, ROOT, RUN, fences, run_as_written

DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_run_or_says_why_not(path: Path) -> None:
    for fence in fences(path):
        mark = fence["mark"] or ""
        said = (RUN, r"not run here: .{10,}", r"file: \S+")
        assert any(re.fullmatch(words, mark) for words in said), fence["body"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name == "docs"], ids=lambda path: path.name)
def test_examples_of_the_documents_work_as_written(tmp_path: Path, path: Path) -> None:
    for file in FILE.finditer(path.read_text(encoding="utf-8")):
        (tmp_path / file["name"]).write_text(file["body"], encoding="utf-8")
    for fence in fences(path):
        if fence["mark"] == RUN:
            run_as_written(fence, tmp_path, "-W", "error")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
