"""Every fenced command of the documents is run, or says why it is not."""

import re
from pathlib import Path

import pytest

from documents import PAGES, README, ROOT, RUN, examples, fences, run_examples, trains

DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    *PAGES,
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_run_or_says_why_not(path: Path) -> None:
    for fence in fences(path):
        mark = fence["mark"] or ""
        said = (RUN, r"not run here: .{10,}", r"file: \S+")
        assert any(re.fullmatch(words, mark) for words in said), fence["body"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "path", [path for path in PAGES if examples(path) and not trains(path)], ids=lambda path: path.name
)
def test_examples_that_train_nothing_work_as_written(tmp_path: Path, path: Path) -> None:
    assert run_examples(path, tmp_path) > 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
