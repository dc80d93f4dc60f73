"""The Optuna mirror of a study in real processes: readable while it runs, rebuilt after a kill, never in the way."""

import io
import json
from pathlib import Path
from wsgiref.handlers import SimpleHandler
from wsgiref.util import setup_testing_defaults

import optuna
import optuna_dashboard
import pytest

from dryfit.ledger.events import TrialFinished
from dryfit.ledger.folder import StudyLayout
from study_runs import (
    child_running,
    ends,
    events_of,
    fold,
    objective_study,
    run_here,
    start,
    summary_of,
    tune_to_end,
    wait_for,
    write_study,
)

QUADRATIC = 'n = {low = 1, high = 3}\nkind = ["plain", "shifted"]'
STATES = {"complete": optuna.trial.TrialState.COMPLETE, "pruned": optuna.trial.TrialState.PRUNED}


def storage_of(folder: Path) -> optuna.storages.BaseStorage:
    status = json.loads((StudyLayout(folder).mirror_status).read_bytes())
    backend = optuna.storages.journal.JournalFileBackend(status["journal"])
    return optuna.storages.JournalStorage(backend)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_running_study_can_be_looked_at_and_a_killed_mirror_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0.1")
    folder = tmp_path / "study"
    folder.mkdir()
    text = objective_study("stepwise", study="trials = 6", search='sampler = "random"\npruner = "asha"')
    (folder / "study.toml").write_text(text, encoding="utf-8")
    process = start("tune", folder, "--quiet")
    finished = lambda: sum(isinstance(event, TrialFinished) for event in events_of(folder))  # noqa: E731
    assert wait_for(lambda: finished() >= 1 and (StudyLayout(folder).mirror_status).exists(), process)
    mirror = child_running("dryfit.search.follower_process", of=process.pid)
    assert mirror is not None
    seen = optuna.load_study(study_name="study", storage=storage_of(folder))
    assert process.poll() is None
    assert len(seen.trials) >= 1
    mirror.kill()
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    mirrored = optuna.load_study(study_name="study", storage=storage_of(folder)).trials
    trials = fold(folder).trials
    assert [trial.state for trial in mirrored] == [STATES[end.outcome] for end in ends(folder)]
    for ours, theirs in zip(trials, mirrored, strict=True):
        assert theirs.params == ours.internal
        assert theirs.intermediate_values == {point.n: point.value for point in ours.reports}
        if ours.value is not None:
            assert theirs.value == ours.value


def test_a_mirror_that_cannot_be_written_shows_in_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOWHERE", f"sqlite:///{tmp_path}/nowhere/study.db?password=hunter2hunter2")
    search = 'sampler = "random"\nmirror = "env:NOWHERE"'
    (tmp_path / "study.toml").write_text(objective_study("quadratic", search=search, space=QUADRATIC), encoding="utf-8")
    tune_to_end(tmp_path)
    done = run_here("status", tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "the mirror could not be written since 2" in line]
    assert "unable to open database file" in line and "hunter2" not in line
    mirror = summary_of(tmp_path)["mirror"]
    assert mirror["error"] in line and mirror["since_s"] > 1e9


@pytest.mark.slow
def test_optuna_dashboard_shows_the_study(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    study = write_study(folder, trials=1)
    study.write_text(study.read_text(encoding="utf-8").replace('mirror = "none"\n', ""), encoding="utf-8")
    process = start("tune", folder, "--quiet")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    environment: dict[str, object] = {"PATH_INFO": "/api/studies"}
    setup_testing_defaults(environment)
    handler = SimpleHandler(io.BytesIO(), io.BytesIO(), io.StringIO(), environment, multithread=False)
    handler.run(optuna_dashboard.wsgi(storage_of(folder)))
    head, _, answer = handler.stdout.getvalue().partition(b"\r\n\r\n")
    assert b"200 OK" in head, handler.stderr.getvalue()
    assert "study" in json.dumps(json.loads(answer))
