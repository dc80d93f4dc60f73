"""What the documents say can be typed, how it is parsed, and how it is run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from dryfit.documents.command_line import app
from dryfit.settings.study_file_text import TABLES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
_RUN = re.compile(r"run by the long tests(?:, beside (?P<beside>\S+))?(?:, exit status (?P<status>\d))?")
"""What stands before a fenced block that is run: by `make nightly`. A page's commands run in one folder; what a folder
of the repository has, or a file, may lie beside them."""
RUN_SMALL = re.compile(r"run small by (?P<test>tests/\S+\.py): (?P<how>.{10,})")
"""What stands before a block whose commands another test runs, and how they differ there."""
NOT_RUN = re.compile(r"not run here: (?P<why>.{10,})")
_SHELL = set("*&|<>~$;")
"""What a line has that needs a shell."""
ROWS = {"train": 32, "validation": 24, "test": 8}
"""What the tours leave of the rows of ``dryfit init``: six groups, to compare trials on. Tests elsewhere learn."""
_BEFORE = {"nohup", "do"}
"""Words of a shell that a command may follow."""
_SPAN = re.compile(r"`dryfit (?P<words>[^`]+)`")
_FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>sh|python)\n(?P<body>.*?)```", re.DOTALL)


_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)


def fences(path: Path) -> list[re.Match[str]]:
    """The fenced blocks of a document with commands or Python, each with its ``mark``, ``language`` and ``body``."""
    return list(_FENCE.finditer(path.read_text(encoding="utf-8")))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after ``dryfit`` of each such command in lines for a shell, quoted lines among them."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for at, word in enumerate(words):
            if " " in word and "dryfit " in word:
                yield from commands(word)
            elif word == "dryfit" and (at == 0 or words[at - 1] in _BEFORE or set(words[at - 1]) <= set(";|&()")):
                end = next((i for i in range(at, len(words)) if set(words[i]) <= set(";|&()<>")), len(words))
                yield words[at + 1 : end]


def mentioned(text: str) -> Iterator[list[str]]:
    """Yield the words after ``dryfit`` of each command that a page names within a sentence."""
    for span in _SPAN.finditer(text):
        yield span["words"].split()


def _command(name: str) -> Any:
    return typer.main.get_command(app).commands[name]


def parse(words: list[str]) -> dict[str, Any]:
    """Return what the command line reads from a command's words; it raises what a user would see, and runs nothing."""
    return _command(words[0]).make_context(words[0], words[1:]).params


def unknown_options(words: list[str]) -> set[str]:
    """Return the options among a command's words that the command does not have."""
    group, own = typer.main.get_command(app), [word for word in words if not word.startswith("-")]
    of = group if words[0].startswith("-") else _command(own[0])
    known = {name for one in of.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    given = words[: words.index("--")] if "--" in words else words
    return {word.partition("=")[0] for word in given if word.startswith("-")} - known


def unknown_keys(parsed: dict[str, Any]) -> set[str]:
    """Return the keys that a parsed command sets and that a study file does not have."""
    unknown: set[str] = set()
    for override in parsed.get("overrides") or ():
        dotted = override.partition("=")[0]
        table, _, key = dotted.removeprefix("space.").partition(".")
        if key not in TABLES.get(table, ()):
            unknown.add(dotted)
    return unknown


def is_run(fence: re.Match[str]) -> bool:
    """Whether a fenced block says that it is run."""
    return _RUN.fullmatch(fence["mark"] or "") is not None


def run_as_written(fence: re.Match[str], folder: Path, *flags: str) -> int:
    """Run a fenced block, Python with some flags; how many commands it had. Each is as written, but on fewer rows."""
    mark = _RUN.fullmatch(fence["mark"])
    if mark["beside"] is not None:
        lay_beside(ROOT / mark["beside"], folder)
    if fence["language"] == "python":
        subprocess.run([sys.executable, *flags, "-c", fence["body"]], cwd=folder, check=True)
        return 1
    body = fence["body"].replace("\\\n", " ")
    is_script = re.search(r"&$", body, re.MULTILINE) is not None
    lines = [body] if is_script else body.splitlines()
    for line in lines:
        done = subprocess.run(
            _command_of(line), cwd=folder, capture_output=True, text=True, check=False, env=_environment(folder)
        )
        assert done.returncode == int(mark["status"] or 0), (line, done.returncode, done.stderr)
        words = shlex.split(line, comments=True)
        if words[:2] == ["dryfit", "init"] and not {"--data", "--script"} & set(words):
            for data in (folder / words[2]).rglob("data"):
                leave_rows(data)
    return len(body.splitlines())


def _command_of(line: str) -> list[str]:
    """A line's command; one of dryfit alone is started so that its imports are shared."""
    words = shlex.split(line, comments=True)
    if words[0] == "dryfit" and not set(line.partition(" # ")[0]) & _SHELL:
        return [sys.executable, "-m", "dryfit.documents.command_line", *words[1:]]
    return ["sh", "-ec", f"{line}\nwait $!" if "&\n" in line else line]


def _environment(folder: Path) -> dict[str, str]:
    """The environment of a command: `dryfit` and `python` are those of the tests, and `.venv` is their environment."""
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def lay_beside(source: Path, folder: Path) -> None:
    """Copy a file, or what a folder has, into the folder where commands run."""
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    else:
        shutil.copy(source, folder)


def examples(path: Path) -> list[re.Match[str]]:
    """The fenced blocks of a document that are run."""
    return [fence for fence in fences(path) if is_run(fence)]


def trains(path: Path) -> bool:
    """Whether an example of a document searches or trains."""
    words = ("dryfit tune", "dryfit train")
    return any(line.startswith(words) for fence in examples(path) for line in fence["body"].splitlines())


def run_examples(path: Path, folder: Path) -> int:
    """Run all examples of a document, beside the files that it shows; how many commands they had."""
    for file in _FILE.finditer(path.read_text(encoding="utf-8")):
        (folder / file["name"]).parent.mkdir(exist_ok=True)
        (folder / file["name"]).write_text(file["body"], encoding="utf-8")
    return sum(run_as_written(fence, folder, "-W", "error") for fence in examples(path))


def leave_rows(data: Path) -> None:
    """Cut the files of a data set to their first rows."""
    for split, rows in ROWS.items():
        file = data / f"{split}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        assert len(lines) >= rows, file
        file.write_text("".join(lines[:rows]), encoding="utf-8")
