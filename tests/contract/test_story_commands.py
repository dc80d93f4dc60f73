"""``show``, ``status`` and ``status --watch`` as a user meets them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dryfit.documents.command_line import app
from dryfit.settings.errors import ConfigError, LedgerError
from ledgers import eventful
from study_runs import command, events_of, run_here, start, wait_for, write_stepwise

CRASHED = 7
"""A trial of the eventful study that crashed once."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eventful().write(tmp_path_factory.mktemp("eventful"))


def printed(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def test_show_tells_a_story_in_words_and_as_json(study: Path) -> None:
    text = printed("show", study, str(CRASHED))
    assert "attempt 1: native_crash: SIGSEGV in the first step" in text
    assert "then: it is tried again" in text
    assert f"log: {study / 'trials/0007/attempt-2/log.txt'}" in text
    document = json.loads(printed("show", study, str(CRASHED), "--json"))
    assert (document["schema"], document["number"]) == (1, CRASHED)
    assert [one["failure"] and one["failure"]["kind"] for one in document["attempts"]] == ["native_crash", None]


def test_status_groups_failures(study: Path) -> None:
    text = printed("status", study)
    assert "4 x native_crash in trial(s) 7, 17, 27, 37: 4 retry; " in text
    assert "4 refused: does not fit made-up 1 GiB" in text
    assert "side by side: 1 (as asked for)" in text
    troubles = json.loads(printed("status", study, "--json"))["troubles"]
    assert {one["kind"] for one in troubles["failures"]} == {"lost", "native_crash", "user_code"}
    assert troubles["success"]["attempts"] > troubles["success"]["clean_attempts"] > 0


def test_options_that_do_not_go_together_are_refused(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--watch and --json"):
        printed("status", study, "--watch", "--json")
    with pytest.raises(ConfigError, match="--json without a trial"):
        printed("show", study, "--json")
    with pytest.raises(LedgerError, match="watching the study"):
        printed("status", tmp_path, "--watch")
    with pytest.raises(ConfigError, match="there is no trial 99"):
        printed("show", study, "99")


@pytest.mark.slow
def test_a_running_study_is_watched_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0.3")
    write_stepwise(tmp_path)
    process = start("tune", tmp_path, "--quiet")
    assert wait_for(lambda: (tmp_path / "ledger.jsonl").exists() and len(events_of(tmp_path)) > 4, process)
    process.send_signal(signal.SIGSTOP)  # it must not end while a busy machine starts the others
    left = start("status", tmp_path, "--watch")
    with subprocess.Popen(command("status", tmp_path, "--watch"), stdout=subprocess.PIPE, text=True) as watcher:
        assert left.stdout is not None
        assert left.stdout.readline().startswith("study: ")
        left.send_signal(signal.SIGINT)
        _, errors = left.communicate()
        assert (left.returncode, "Traceback" in errors) == (130, False)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        told, _ = watcher.communicate()
    assert watcher.returncode == 0
    assert "study: 3/3 trials (3 complete)" in told
    assert "without a failure: 3 of 3 (100 %) trials, 3 of 3 (100 %) attempts" in told
    assert told.splitlines()[-1] == "nobody runs this study now"


def test_help_of_watching_is_cheap() -> None:
    """The command line imports nothing of it before it is asked for."""
    code = (
        "import sys, dryfit.documents.command_line\n"
        "print(sorted({'rich', 'optuna', 'dryfit.documents.live_progress'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dryfit.documents.live_progress" not in done.stdout and "optuna" not in done.stdout
    assert "--watch" in run_here("status", "--help").stdout
