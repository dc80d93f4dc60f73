"""Every command of the documents is one that the command line takes, and is run, or says why it is not.

The commands are parsed each time; the README's tour is run by ``make proof`` and the other pages' by ``make nightly``.
"""

import re
from pathlib import Path

import pytest
import typer

from documents import (
    NOT_RUN,
    PAGES,
    README,
    ROOT,
    RUN_SMALL,
    commands,
    examples,
    fences,
    is_run,
    mentioned,
    parse,
    run_examples,
    trains,
    unknown_keys,
    unknown_options,
)

DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "SECURITY.md",
    *PAGES,
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_run_or_says_why_not(path: Path) -> None:
    for fence in fences(path):
        mark = fence["mark"] or ""
        small = RUN_SMALL.fullmatch(mark)
        assert small is None or (ROOT / small["test"]).is_file(), small
        said = small or is_run(fence) or NOT_RUN.fullmatch(mark) or re.fullmatch(r"file: \S+", mark)
        assert said, fence["body"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_command_hides_in_a_block_of_another_language(path: Path) -> None:
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        assert language not in ("bash", "shell", "console"), body
        assert language or "─" in body or not re.match(r"[$ ]*(?:dryfit|make|pip|python) ", body), body


def test_the_blocks_that_no_test_runs_as_they_stand_are_few_and_listed() -> None:
    listed = (ROOT / "docs" / "repeat.md").read_text("utf-8").partition("## What no test runs as it stands")[2]
    rows = set(re.findall(r"^\| \[(\S+)\]\(\S+\) \| (.+) \|$", listed, re.MULTILINE))
    marks = [(path.name, fence["mark"] or "") for path in DOCUMENTS for fence in fences(path)]
    not_run = [(name, found["why"]) for name, mark in marks if (found := NOT_RUN.fullmatch(mark))]
    small = [(name, found["how"]) for name, mark in marks if (found := RUN_SMALL.fullmatch(mark))]
    assert len(not_run) <= 5
    assert {*not_run, *small} == rows


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_parsed(path: Path) -> None:
    shells = [fence["body"] for fence in fences(path) if fence["language"] == "sh"]
    found = [words for body in shells for words in commands(body)]
    assert len(found) >= sum(line.startswith("dryfit ") for body in shells for line in body.splitlines())
    for words in found:
        assert not unknown_keys(parse(words)), words


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_within_a_sentence_has_options_that_exist(path: Path) -> None:
    for words in mentioned(path.read_text(encoding="utf-8")):
        assert not unknown_options(words), words


def test_what_the_command_line_does_not_take_is_noticed() -> None:
    (words,) = commands("ssh gpu1 'cd here && nohup dryfit tune a.toml --sett b=1 > /dev/null 2>&1 &'  # dryfit no")
    assert words == ["tune", "a.toml", "--sett", "b=1"]
    assert unknown_options(words) == {"--sett"} and not unknown_options(["tune", "--set", "--", "--sett"])
    for wrong in (words, ["show"], ["show", *"abc"], ["tune", "a", "--trials", "many"], ["init", "a", "--task", "b"]):
        with pytest.raises(typer.BadParameter.__mro__[1]):  # what is wrong with a command's words, of any kind
            parse(wrong)
    assert unknown_keys(parse(["tune", "a", "--set", "train.epoch=1", "--set", "space.train.epochs=[1]"])) == {
        "train.epoch"
    }
    with pytest.raises(KeyError):
        parse(["tun", "a"])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_target_of_make_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    lines = "\n".join(fence["body"] for fence in fences(path))
    named = {*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([a-z-]+)", lines, re.MULTILINE)}
    assert named <= targets


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "path", [path for path in PAGES if examples(path) and not trains(path)], ids=lambda path: path.name
)
def test_examples_that_train_nothing_work_as_written(tmp_path: Path, path: Path) -> None:
    assert run_examples(path, tmp_path) > 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("reference/"):  # made of the code: test_reference_pages.py
            assert (path.parent / target).exists(), target


def test_each_picture_is_small_and_on_a_page() -> None:
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert len(pictures) >= 3 and sum(picture.stat().st_size for picture in pictures) < 600_000
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    assert not [picture.name for picture in pictures if f"](pictures/{picture.name})" not in pages]


def test_every_path_of_the_architecture_exists() -> None:
    paths = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", (ROOT / "ARCHITECTURE.md").read_text("utf-8")))
    of_a_study = {"trials/", "final/", "cache/", "logs/", "prepare/", "report/"}
    bases = (ROOT / "src" / "dryfit", ROOT / "src", ROOT)
    assert len(paths) > 20
    assert not [path for path in paths - of_a_study if not any((base / path).exists() for base in bases)]


def test_every_promise_of_security_names_tests_that_exist() -> None:
    named = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", (ROOT / "SECURITY.md").read_text("utf-8"))
    assert len(named) > 25
    assert not [name for name, path in named if f"def {name}(" not in (ROOT / path).read_text("utf-8")]
