"""What a careless parent leaves to a command: masks, limits, closed or full streams, a folder that is gone."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dryfit.settings.errors import FailureKind
from dryfit.settings.text import printable
from dryfit.settings.trial import Outcome
from study_runs import (
    DEADLINE_S,
    command,
    command_after,
    ends,
    fold,
    objective_study,
    resume_to_end,
    run_here,
    tune_to_end,
)

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def study(folder: Path, function: str = "quadratic", **parts: str) -> Path:
    folder.mkdir(exist_ok=True)
    text = objective_study(function, space='n = {low = 1, high = 3}\nkind = ["plain", "shifted"]', **parts)
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder


def under(setup: str, *words: str | Path, shell: str = "", **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that ``setup`` has prepared, behind the redirections of ``shell``."""
    argv = command_after(setup, *words)
    if shell:
        argv = ["sh", "-c", f'"$@" {shell}', "sh", *argv]
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **more)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tune_to_end(study(tmp_path_factory.mktemp("undisturbed") / "study"))


@pytest.mark.parametrize("isolation", ["forkserver", pytest.param("fresh", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "setup",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    ],
)
def test_inherited_signal_settings_change_nothing(
    setup: str, isolation: str, undisturbed: Path, tmp_path: Path
) -> None:
    folder = study(tmp_path / "study", runtime=f'isolation = "{isolation}"')
    done = under(setup, "tune", folder)
    assert done.returncode == 0, done.stderr
    assert ends(folder) == ends(undisturbed)


@pytest.mark.parametrize("shell", [">&- 2>&- <&-", ">/dev/full", "2>/dev/full", "2>&1 >/dev/null | true"])
def test_output_that_cannot_be_written_changes_nothing(shell: str, undisturbed: Path, tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    if "|" in shell:
        shell = f"; echo $? > {tmp_path}/status; }} {shell}"
        script = f'{{ "$@" {shell}'
    else:
        script = f'"$@" {shell}; echo $? > {tmp_path}/status'
    argv = command("tune", folder)
    done = subprocess.run(
        ["sh", "-c", script, "sh", *argv], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (tmp_path / "status").read_text().strip() == "0", done.stderr
    assert ends(folder) == ends(undisturbed)
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("status", [3, 70])
def test_a_function_that_leaves_with_any_status_is_a_failed_trial(status: int, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        f"import os\n\n\ndef leave(trial):\n    os._exit({status})\n", encoding="utf-8"
    )
    (tmp_path / "study.toml").write_text(
        '[study]\ntask = "objective"\ntrials = 2\n[objective]\nfunction = "leaving.py:leave"\n[space]\nx = [1, 2]\n'
        '[search]\nmirror = "none"\n[runtime]\nmax_failed_in_a_row = 9\nmax_same_failure = 9\n',
        encoding="utf-8",
    )
    done = under("", "tune", tmp_path)
    assert done.returncode not in (3, 4), done.stderr
    state = fold(tmp_path)
    assert [trial.outcome for trial in state.trials] == [Outcome.FAILED] * 2
    kinds = {attempt.failure.kind for trial in state.trials for attempt in trial.attempts if attempt.failure}
    assert FailureKind.DISK_FULL not in kinds


def test_no_text_of_a_study_controls_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp"
    (tmp_path / "evil.py").write_text(
        "def fail(trial):\n    raise ValueError(trial.params['name'])\n", encoding="utf-8"
    )
    (tmp_path / "study.toml").write_text(
        '[study]\ntask = "objective"\ntrials = 2\n[objective]\nfunction = "evil.py:fail"\n'
        f'[space]\nname = [{json.dumps(evil)}]\n[search]\nmirror = "none"\nsampler = "random"\n',
        encoding="utf-8",
    )
    printed = under("", "tune", tmp_path)
    assert "Traceback" not in printed.stderr
    outputs = [printed.stdout, printed.stderr]
    for words in (("status", tmp_path), ("show", tmp_path), ("show", tmp_path, "0"), ("status", tmp_path, "--json")):
        done = run_here(*words)
        assert done.returncode == 0, done.stderr
        outputs += [done.stdout, done.stderr]
    assert any("owned" in text for text in outputs), "the text was shown"
    assert [text for text in outputs if _OBEYED.search(text)] == []


def test_escaped_json_keeps_its_meaning() -> None:
    every = "".join(map(chr, (*range(0x250), *range(0x2000, 0x2070))))
    escaped = printable(json.dumps(every, ensure_ascii=False))
    assert json.loads(escaped) == every
    assert not _OBEYED.search(escaped)


def test_a_limit_on_the_size_of_files_pauses_the_study(undisturbed: Path, tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    done = under("resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))", "tune", folder)
    assert done.returncode in (2, 3), done.stderr
    assert "Traceback" not in done.stderr
    assert "ulimit -f" in done.stderr
    resume_to_end(folder)
    assert ends(folder) == ends(undisturbed)


def test_too_few_open_files_are_said_and_nothing_is_lost(undisturbed: Path, tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    for most in (9, 16):
        done = under(f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))", "tune", folder)
        assert done.returncode in (0, 2, 3), done.stderr
        assert "Traceback" not in done.stderr
    resume_to_end(folder)
    assert ends(folder) == ends(undisturbed)


def test_dryfit_itself_needs_little_address_space(undisturbed: Path, tmp_path: Path) -> None:
    """It needs about 150 MiB: no file is read with room for the largest there could be, no thread waits to compute."""
    folder, limit = study(tmp_path / "study"), 300 << 20
    done = under(f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))", "tune", folder)
    assert done.returncode == 0, done.stderr
    assert ends(folder) == ends(undisturbed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root has no limit on processes")
@pytest.mark.parametrize("most", [0, 1])
def test_too_few_processes_are_said(most: int, tmp_path: Path) -> None:
    done = under(f"resource.setrlimit(resource.RLIMIT_NPROC, ({most}, {most}))", "tune", study(tmp_path / "study"))
    assert done.returncode in (2, 3), done.stderr
    assert "Traceback" not in done.stderr
    assert "ulimit -u" in done.stderr


def test_a_working_folder_that_is_gone_is_said(undisturbed: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    setup = f"os.rmdir({str(gone)!r})"
    relative = under(setup, "status", "study", cwd=gone)
    gone.mkdir()
    assert relative.returncode == 2, relative.stderr
    assert "Traceback" not in relative.stderr
    absolute = under(setup, "status", undisturbed, cwd=gone)
    assert absolute.returncode in (0, 2), absolute.stderr
    assert "Traceback" not in absolute.stderr


def test_a_folder_whose_name_is_no_text_can_be_used(undisturbed: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    try:
        study(folder)
    except OSError:
        pytest.skip("this file system has no such names")
    done = under("", "tune", folder)
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        assert ends(folder) == ends(undisturbed)
