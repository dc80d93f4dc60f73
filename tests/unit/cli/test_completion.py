"""Completion in the shell: what a press of the tab key gives."""

import os
import shlex
import subprocess
from pathlib import Path

from study_runs import command


def completed(words: str, *, shell: str = "bash") -> list[str]:
    """What the shell is told when the tab key is pressed after these words."""
    asked = {"_DRYFIT_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    asked |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(command(), capture_output=True, text=True, env={**os.environ, **asked}, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_are_completed() -> None:
    assert completed("dryfit tu") == ["tune"]
    assert set(completed("dryfit re")) == {"rehearse", "resume", "report"}


def test_options_and_their_values_are_completed() -> None:
    assert completed("dryfit tune --tri") == ["--trials"]
    assert {"csv", "optuna"} <= set(completed("dryfit export there --to "))


def test_fish_and_zsh_are_answered_too() -> None:
    assert "tune" in " ".join(completed("dryfit tu", shell="zsh"))
    assert "tune" in " ".join(completed("dryfit tu", shell="fish"))


def test_the_script_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    line = f"{shlex.join([*command(), '--install-completion'])}; exit $?"  # a second command: bash stays the parent
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)}, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_DRYFIT_COMPLETE" in text for text in written)
