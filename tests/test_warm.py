"""A process forked from the warm one is like one that was started, in all that a test can see of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not warm.available(), reason="processes are started from nothing here"),
]

_SUPPORT = str(Path(warm.__file__).parent)
_OF_A_REHEARSAL = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
_OF_HOW = ("torch", "threads")
"""What tells the two apart, and may."""


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start the program of facts twice: warm, and from nothing."""
    monkeypatch.setattr(warm, "_COMMANDS", ("warm_facts",))
    monkeypatch.setenv("PYTHONPATH", _SUPPORT)

    def run(
        *words: str, what: tuple[str, ...] = ("-P", "-m", "warm_facts"), **options: Any
    ) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        command = [sys.executable, *what, *words]
        options = {"capture_output": True, "text": True, "check": False, **options}
        return subprocess.run(command, **options), _cold_run(command, **options)

    return run


def _cold_run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    text = options.pop("input", None)
    for name in ("capture_output", "check"):
        del options[name]
    with warm.cold_popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        output, errors = process.communicate(text)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.mark.parametrize(
    "what",
    [
        ("-P", "-m", "warm_facts"),
        ("-m", "warm_facts"),
        (f"{_SUPPORT}/warm_facts.py",),
        ("-W", "error::UserWarning", "-W", "ignore::FutureWarning", f"{_SUPPORT}/warm_facts.py"),
    ],
)
@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("more", [{}, _OF_A_REHEARSAL], ids=["plain", "rehearsal"])
def test_it_is_the_same_process(
    both: Any, tmp_path: Path, what: tuple[str, ...], session: bool, more: dict[str, str]
) -> None:
    here, there = os.pipe()
    options = {"cwd": tmp_path, "start_new_session": session, "input": "said to it", "pass_fds": (there,), "what": what}
    environment = {**os.environ, "OF_THE_TEST": "a=b", **more}
    warmed, started = both("facts", "a b", "--c", **options, env=environment)
    os.close(here)
    os.close(there)
    ours, theirs = json.loads(warmed.stdout), json.loads(started.stdout)
    assert ours.pop("torch") and not theirs.pop("torch"), "it was not forked from the warm process"
    assert ours["parent"] == os.getpid() and ours["arguments"] == ["facts", "a b", "--c"]
    assert str(there) in ours["descriptors"]
    assert ours == theirs
    assert (warmed.returncode, warmed.stderr) == (started.returncode, started.stderr) == (0, "")


def test_signals_that_we_ignore_it_ignores(both: Any) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        warmed, started = both("facts", input="")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert json.loads(warmed.stdout)["signals"] == json.loads(started.stdout)["signals"]


@pytest.mark.parametrize("words", [("status", "0"), ("status", "3"), ("status", "-1"), ("exit", "in words"), ("fail",)])
def test_it_ends_as_one_that_was_started(both: Any, words: tuple[str, ...]) -> None:
    warmed, started = both(*words)
    assert warmed.returncode == started.returncode
    assert warmed.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_signal_ends_it_as_a_signal(both: Any) -> None:
    warmed, started = both("interrupt")
    assert warmed.returncode == started.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_HOME": "/elsewhere"},
        {warm.COLD_VARIABLE: "1"},
        {"OMP_NUM_THREADS": "2"},
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_OFFLINE": "1"},
        {"PYTHONWARNINGS": "error"},
    ],
    ids=str,
)
def test_what_imports_read_is_not_taken_over(both: Any, environment: dict[str, str]) -> None:
    warmed, _ = both("facts", input="", env={**os.environ, **environment})
    assert json.loads(warmed.stdout)["torch"] is False


def test_a_folder_that_shadows_a_library_is_not_passed_over(both: Any, tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("", encoding="utf-8")
    paths = os.pathsep.join([_SUPPORT, str(tmp_path)])
    warmed, _ = both("facts", input="", env={**os.environ, "PYTHONPATH": paths})
    assert json.loads(warmed.stdout)["torch"] is False


@pytest.mark.parametrize("environment", [{}, _OF_A_REHEARSAL], ids=["plain", "rehearsal"])
def test_what_an_interpreter_imports_at_its_start_is_not_passed_over(
    both: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("", encoding="utf-8")
    paths = os.pathsep.join([_SUPPORT, str(tmp_path)])
    warmed, _ = both("facts", input="", env={**os.environ, **environment, "PYTHONPATH": paths})
    assert json.loads(warmed.stdout)["torch"] is False


def test_a_later_process_has_its_own_folders_and_starts_from_nothing_where_the_warm_one_is_gone(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_processes", {})
    before = set(psutil.Process().children())
    paths = os.pathsep.join([_SUPPORT, *(path for path in sys.path if path)])
    monkeypatch.setenv("PYTHONPATH", paths)
    for pythonpath in (paths, _SUPPORT):
        warmed, started = both("facts", input="", env={**os.environ, "PYTHONPATH": pythonpath})
        found = [json.loads(one.stdout) for one in (warmed, started)]
        assert found[0]["torch"] is True and set(found[0]["path"]) == set(found[1]["path"])
    (mine,) = set(psutil.Process().children()) - before
    mine.kill()
    mine.wait()
    assert json.loads(both("facts", input="")[0].stdout)["torch"] is False
