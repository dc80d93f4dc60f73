"""Real trackers of a real study: a server that is gone, or does not answer, loses nothing and slows no trial."""

import json
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dryfit.ledger.events import ReportMade, TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.search.follower_runs import Runs
from dryfit.settings.study_file_checks import tracker_of
from study_runs import child_running, events_of, objective_study, run, start, summary_of, wait_for
from trackers_beside import (
    OF_TRACKIO,
    OF_WANDB,
    install,
    mlflow_runs,
    mlflow_server,
    path_with,
    tensorboard_scalars,
    trackio_runs,
    wandb_runs,
)

pytestmark = [pytest.mark.slow, pytest.mark.heavy]

PAUSE_S = 0.5
FROZEN_S = 15.0
"""More than the tracker waits for an answer."""
SEARCH = 'sampler = "random"\nmirror = "none"'


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("beside") / "packages")


def write(folder: Path, *, trials: int, track: str) -> None:
    folder.mkdir()
    study = f"trials = {trials}\ntrack = {track}"
    (folder / "study.toml").write_text(objective_study("stepwise", study=study, search=SEARCH), encoding="utf-8")


def wanted(folder: Path) -> Runs:
    runs = Runs()
    for event in events_of(folder):
        runs.apply(event)
    return runs


def kill_tracker(control_pid: int) -> None:
    tracker = child_running("dryfit.search.follower_process", of=control_pid)
    tracker.kill()


def check_mlflow(folder: Path, url: str, packages: Path) -> None:
    runs, found = wanted(folder), json.loads(mlflow_runs(url, packages))
    theirs = {one["tags"]["dryfit.key"]: one for one in found}
    assert len(found) == len(theirs) == len(runs.runs) + 1
    parent = theirs[runs.key]
    assert parent["status"] == "FINISHED" and parent["tags"]["dryfit.ended"]
    for ours in runs.runs:
        one = theirs[ours.key]
        assert one["tags"]["mlflow.parentRunId"] == parent["id"]
        assert one["params"] == {key: str(value) for key, value in ours.params.items()}
        assert sorted(one["metrics"]["value"]) == [[point.step, point.values["value"]] for point in ours.points]
        assert one["tags"]["dryfit.outcome"] == ours.trial.outcome
        assert one["status"] == "FINISHED"
        assert {key: one["metrics"][key][0][1] for key in ours.numbers} == ours.numbers


@pytest.mark.nightly
def test_a_server_that_is_frozen_and_then_gone_loses_nothing_and_slows_no_trial(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, layout = tmp_path / "study", StudyLayout(tmp_path / "study")
    with mlflow_server(tmp_path / "server", packages) as server:
        monkeypatch.setenv("PYTHONPATH", path_with(packages))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        monkeypatch.setenv("STEP_PAUSE_S", str(PAUSE_S))
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        write(folder, trials=24, track='["mlflow", "tensorboard"]')
        study = start("tune", folder, "--quiet")
        try:
            finished = lambda: sum(isinstance(event, TrialFinished) for event in events_of(folder))  # noqa: E731
            assert wait_for(lambda: finished() >= 1 and layout.tracker("mlflow").position.exists(), study)
            began_s = time.time()
            server.freeze(FROZEN_S)
            server.kill()
            assert wait_for(lambda: any(one["error"] for one in summary_of(folder)["trackers"]), study)
            kill_tracker(study.pid)
            before = finished()
            assert wait_for(lambda: finished() >= before + 2, study)
            server.start()
            ended_s = time.time()
            _, errors = study.communicate(timeout=600)
            assert study.returncode == 0, errors
        finally:
            study.kill()
        reports = [event.at for event in events_of(folder) if isinstance(event, ReportMade)]
        during = [after - before for before, after in pairwise(reports) if began_s < after < ended_s]
        assert len(during) > (ended_s - began_s) / PAUSE_S / 3, "the study did not go on while the server was gone"
        assert sorted(during)[len(during) // 2] < 3 * PAUSE_S
        done = run("resume", folder, "--quiet")  # where the last try had failed
        assert done.returncode == 0, done.stderr
        assert all(tracker["behind_bytes"] == 0 for tracker in summary_of(folder)["trackers"])
        assert "tensorboard has everything" in run("status", folder).stdout
        check_mlflow(folder, server.url, packages)
    shown = json.loads(tensorboard_scalars(folder / "tensorboard", packages))
    for ours in wanted(folder).runs:
        values = [[point.step, pytest.approx(point.values["value"], rel=1e-6)] for point in ours.points]
        assert shown[ours.name]["value"] == values


def test_a_study_ends_in_time_without_its_server_and_a_later_run_catches_up(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "study"
    monkeypatch.setenv("PYTHONPATH", path_with(packages))
    with mlflow_server(tmp_path / "server", packages) as server:
        server.kill()
        monkeypatch.setenv("MY_SERVER", server.url.replace("http://", "http://me:hunter2hunter2@"))
        write(folder, trials=2, track='["mlflow:env:MY_SERVER"]')
        done = run("tune", folder)
        assert done.returncode == 0, done.stderr
        assert "mlflow:env:MY_SERVER lacks the last" in done.stderr and "dryfit resume" in done.stderr
        restart = threading.Thread(target=server.start)
        restart.start()
        restart.join()
        done = run("resume", folder)
        assert done.returncode == 0 and "lacks the last" not in done.stderr, done.stderr
        check_mlflow(folder, server.url, packages)
    texts = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert not any(b"hunter2hunter2" in text for text in texts)


def test_event_files_that_were_torn_or_deleted_are_written_again(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "study"
    monkeypatch.setenv("PYTHONPATH", path_with(packages))
    write(folder, trials=3, track='["tensorboard"]')
    done = run("tune", folder)
    assert done.returncode == 0 and "lacks" not in done.stderr, done.stderr
    files = sorted((folder / "tensorboard").rglob("events.out.tfevents.*"))
    whole = {file: file.read_bytes() for file in files}
    assert len(whole) == 3
    files[0].write_bytes(whole[files[0]][:-7])
    files[1].write_bytes(b"something else")
    files[2].unlink()
    (StudyLayout(folder).tracker("tensorboard").position).unlink()
    assert run("resume", folder).returncode == 0
    assert {file: file.read_bytes() for file in files} == whole
    assert set(json.loads(tensorboard_scalars(folder / "tensorboard", packages))) == {
        file.parent.name for file in files
    }


@pytest.mark.nightly
def test_runs_of_wandb_are_whole_after_a_kill_and_a_resume(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = install(tmp_path_factory.mktemp("beside") / "wandb", OF_WANDB)
    folder, layout = tmp_path / "study", StudyLayout(tmp_path / "study")
    monkeypatch.setenv("PYTHONPATH", path_with(packages))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("STEP_PAUSE_S", str(PAUSE_S))
    write(folder, trials=10, track='["wandb:project"]')
    study = start("tune", folder, "--quiet")
    try:
        slug = tracker_of("wandb:project").slug
        assert wait_for(lambda: list(layout.trackers.glob("wandb/offline-run-*")), study)
        kill_tracker(study.pid)
        assert wait_for(lambda: layout.tracker(slug).position.exists(), study)
        study.send_signal(signal.SIGKILL)
    finally:
        study.kill()
    study.communicate()
    done = run("resume", folder)
    assert done.returncode == 0 and "lacks" not in done.stderr, done.stderr
    found = json.loads(wandb_runs(layout.trackers, packages))
    runs = wanted(folder)
    assert set(found) == {ours.key for ours in runs.runs}
    for ours in runs.runs:
        (one,) = found[ours.key]
        assert (one["group"], one["project"], one["name"]) == (runs.folder, "project", ours.name)
        assert ours.params.items() <= one["config"].items()
        points = [(point["optimizer_step"], point["value"]) for point in one["history"]]
        assert points == [(point.step, point.values["value"]) for point in ours.points]
        assert one["summary"]["outcome"] == "complete" and one["exit"] == 0
    assert summary_of(folder)["trackers"] == [
        {"entry": "wandb:project", "behind_bytes": 0, "failing_since_s": None, "error": None}
    ]


@pytest.mark.nightly
def test_rows_of_trackio_are_there_once_after_kills_and_a_replay(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = install(tmp_path_factory.mktemp("beside") / "trackio", OF_TRACKIO)
    folder, layout = tmp_path / "study", StudyLayout(tmp_path / "study")
    monkeypatch.setenv("PYTHONPATH", path_with(packages))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("STEP_PAUSE_S", str(PAUSE_S))
    write(folder, trials=6, track='["trackio"]')
    study = start("tune", folder, "--quiet")
    try:
        assert wait_for(lambda: layout.tracker("trackio").position.exists(), study)
        kill_tracker(study.pid)
        assert wait_for(lambda: sum(isinstance(event, TrialFinished) for event in events_of(folder)) >= 2, study)
        study.send_signal(signal.SIGKILL)
    finally:
        study.kill()
    study.communicate()
    for _ in range(2):
        layout.tracker("trackio").position.unlink(missing_ok=True)  # everything is sent once more
        done = run("resume", folder)
        assert done.returncode == 0 and "lacks" not in done.stderr, done.stderr
    found, runs = json.loads(trackio_runs("study", packages)), wanted(folder)
    assert set(found) == {ours.key for ours in runs.runs}
    for ours in runs.runs:
        one = found[ours.key]
        begin, *points, end = one["rows"]
        assert one["name"] == f"{ours.name}-{ours.key[:8]}" and begin["step"] == 0
        assert [(point["step"], point["value"]) for point in points] == [
            (point.step, point.values["value"]) for point in ours.points
        ]
        assert ours.numbers.items() <= end.items() and end["step"] == ours.trial.steps_done
        assert ours.params.items() <= one["config"].items()
        assert (one["config"]["outcome"], one["config"]["_Group"]) == ("complete", runs.folder)
