"""What a command says, and its exit status, where the process has too little of something or dryfit is wrong."""

from pathlib import Path

import pytest

from dryfit.settings.errors import ExitStatus
from dryfit.study import functions
from study_runs import run_here


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


LIBRARY = ImportError("numpy.so: failed to map segment from shared object")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "too little memory"),
        (LIBRARY, "too little memory"),
        (caused(ImportError("numpy cannot be imported"), LIBRARY), "too little memory"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_what_the_process_lacks_is_said(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lacking(_: object) -> None:
        raise error

    monkeypatch.setattr(functions, "status", lacking)
    done = run_here("status", tmp_path)
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert words in done.stderr and "[MACHINE]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("of ours"), ImportError("no module"), KeyError("ours")])
def test_a_bug_of_ours_has_its_own_status(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(_: object) -> None:
        raise error

    monkeypatch.setattr(functions, "status", wrong)
    done = run_here("status", tmp_path)
    assert done.returncode == ExitStatus.BUG
    assert "[INTERNAL]" in done.stderr and "Traceback" in done.stderr
