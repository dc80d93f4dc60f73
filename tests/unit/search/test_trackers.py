"""Runs of trackers follow from the ledger; whatever ends a writer, the next one loses and doubles nothing."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dryfit.search.follower_process import FollowerStatus, LedgerFollower, PositionFile
from dryfit.search.follower_runs import Runs, parse_event
from dryfit.search.mlflow_follower import KEY_TAG, MlflowRuns
from dryfit.search.trackio_follower import TrackioRuns
from toy_ledger import Ledger


def whole(path: Path) -> Ledger:
    ledger = Ledger(path)
    for _ in ledger.whole_study():
        pass
    return ledger


def runs_of(ledger: Ledger) -> Runs:
    runs = Runs()
    for line in ledger.path.read_bytes().splitlines():
        event = parse_event(line)
        assert event is not None
        runs.apply(event)
    return runs


def test_runs_are_a_function_of_the_ledger(tmp_path: Path) -> None:
    ledger = whole(tmp_path / "ledger.jsonl")
    runs = runs_of(ledger)
    assert [run.key for run in runs.runs] == [f"toy-1-1-{number}" for number in range(7)]
    failed, done = runs.runs[2], runs.runs[5]
    assert failed.facts["failure_kinds"] == "killed" and failed.facts["outcome"] == "failed"
    assert failed.numbers["attempts"] == 2.0 and "final_value" not in failed.numbers
    assert done.numbers["final_value"] == 5.5
    assert done.params == {"optim.lr": 0.006, "train.batch_size": 16, "seed": 5}
    assert [(point.step, point.values) for point in done.points] == [
        (0, {"epoch": 0.0, "value": 0.5}),
        (1, {"epoch": 1.0, "value": 1.0}),
    ]
    assert runs.facts["best_value"] == 5.5 and runs.facts["goals"] == "maximize value"


class Book:
    """Writes runs into a dictionary, and fails when it is told."""

    def __init__(self, pages: dict[str, list[Any]], broken: list[int], open_runs: set[int]) -> None:
        self.pages, self.broken, self.open_runs = pages, broken, open_runs

    def identity(self) -> str:
        return "book"

    def write(self, runs: Runs, numbers: list[int]) -> None:
        for number in numbers:
            if self.broken and self.broken.pop():
                raise OSError("no paper")
            run = runs.runs[number]
            self.pages[run.key] = [*run.points, run.trial.outcome]
        self.pages.setdefault("touched", []).append(list(numbers))

    def unsettled(self) -> set[int]:
        return self.open_runs

    def close(self) -> None:
        self.open_runs.clear()


def follower(tmp_path: Path, book: Book) -> LedgerFollower:
    return LedgerFollower(
        tmp_path / "ledger.jsonl",
        new_writer=lambda _: book,
        position=PositionFile(tmp_path / "position.json"),
        status=FollowerStatus(tmp_path / "status.json"),
    )


def test_the_position_is_kept_and_only_what_is_new_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    pages: dict[str, list[Any]] = {}
    study = ledger.whole_study()
    for _ in range(3):
        next(study)
    first = follower(tmp_path, Book(pages, [], set()))
    assert first.catch_up() and not first.catch_up()
    said = json.loads((tmp_path / "position.json").read_bytes())
    assert said["offset"] == ledger.path.stat().st_size
    for _ in study:
        pass
    pages["touched"] = []
    assert follower(tmp_path, Book(pages, [], set())).catch_up()
    assert pages["touched"] == [[3, 4, 5, 6]]
    wanted = {run.key: [*run.points, run.trial.outcome] for run in runs_of(ledger).runs}
    assert repr({key: page for key, page in pages.items() if key != "touched"}) == repr(wanted)


def test_what_failed_is_written_again(tmp_path: Path) -> None:
    whole(tmp_path / "ledger.jsonl")
    pages: dict[str, list[Any]] = {}
    with pytest.raises(OSError):
        follower(tmp_path, Book(pages, [1, 0, 0, 0], set())).catch_up()
    assert not (tmp_path / "position.json").exists()
    assert follower(tmp_path, Book(pages, [], set())).catch_up()
    assert pages["touched"] == [[0, 1, 2, 3, 4, 5, 6]]


def test_another_ledger_or_target_begins_at_its_beginning(tmp_path: Path) -> None:
    ledger = whole(tmp_path / "ledger.jsonl")
    pages: dict[str, list[Any]] = {}
    follower(tmp_path, Book(pages, [], set())).catch_up()
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b"toy-1", b"toy-2"))
    follower(tmp_path, Book(pages, [], set())).catch_up()
    assert {"toy-1-1-6", "toy-2-1-6"} <= set(pages)
    (tmp_path / "position.json").write_text("[torn", encoding="utf-8")
    pages["touched"] = []
    follower(tmp_path, Book(pages, [], set())).catch_up()
    assert pages["touched"] == [[0, 1, 2, 3, 4, 5, 6]]


def test_the_position_waits_for_what_the_tracker_may_not_have(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    pages: dict[str, list[Any]] = {}
    study = ledger.whole_study()
    next(study)
    open_runs = {1}
    one = follower(tmp_path, Book(pages, [], open_runs))
    one.catch_up()
    at_open = ledger.path.stat().st_size
    next(study)
    one.catch_up()
    next(study)
    one.catch_up()
    said = json.loads((tmp_path / "position.json").read_bytes())
    assert said["offset"] <= at_open and said["settled"] == [0, 2]
    pages["touched"] = []
    follower(tmp_path, Book(pages, [], set())).catch_up()  # as after a kill
    assert pages["touched"] == [[1]]
    one.close()
    assert json.loads((tmp_path / "position.json").read_bytes())["offset"] == ledger.path.stat().st_size


class Server:
    """As much of an MLflow server as the writer uses; every ``nth`` call is carried out and its answer lost."""

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self.calls, self.nth = 0, 0

    def _answer(self, answer: Any = None) -> Any:
        self.calls += 1
        if self.nth and self.calls % self.nth == 0:
            raise ConnectionError("the answer is lost")
        return answer

    def get_experiment_by_name(self, name: str) -> Any:
        return self._answer(SimpleNamespace(experiment_id="1", lifecycle_stage="active"))

    def search_runs(self, ids: list[str], filter_string: str, **_: Any) -> list[Any]:
        return self._answer([run for run in self.runs.values() if f"'{run.data.tags[KEY_TAG]}'" in filter_string])

    def create_run(self, experiment: str, *, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        info = SimpleNamespace(run_id=f"r{len(self.runs)}", status="RUNNING", lifecycle_stage="active", name=run_name)
        data = SimpleNamespace(params={}, tags=dict(tags), metrics={})
        self.runs[info.run_id] = SimpleNamespace(info=info, data=data)
        return self._answer(self.runs[info.run_id])

    def delete_run(self, run_id: str) -> None:
        self.runs[run_id].info.lifecycle_stage = "deleted"
        self._answer()

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return self._answer(self.runs[run_id].data.metrics[key])

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        data = self.runs[run_id].data
        for metric in metrics:
            data.metrics.setdefault(metric.key, []).append(metric)
        data.params |= {param.key: param.value for param in params}
        data.tags |= {tag.key: tag.value for tag in tags}
        self._answer()

    def set_terminated(self, run_id: str, *, status: str, end_time: int) -> None:
        self.runs[run_id].info.status = status
        self._answer()

    def update_run(self, run_id: str, *, status: str) -> None:
        self.runs[run_id].info.status = status
        self._answer()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient = lambda tracking_uri: made  # type: ignore[attr-defined]
    entities.ViewType = SimpleNamespace(ALL="all")  # type: ignore[attr-defined]
    entities.Metric = lambda key, value, at, step: SimpleNamespace(key=key, value=value, timestamp=at, step=step)  # type: ignore[attr-defined]
    entities.Param = entities.RunTag = lambda key, value: SimpleNamespace(key=key, value=value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return made


@pytest.mark.parametrize("nth", [0, 1, 2, 3, 5, 11])
def test_an_answer_that_is_lost_doubles_nothing(tmp_path: Path, server: Server, nth: int) -> None:
    ledger = whole(tmp_path / "ledger.jsonl")
    environment: dict[str, str] = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3"}
    make = lambda _: MlflowRuns("http://x", environment)  # noqa: E731
    server.nth = nth
    for tries in range(200):
        if tries == 40:
            server.nth = 0  # with every answer lost, or every second one, it would never be done
        one = LedgerFollower(
            ledger.path,
            new_writer=make,
            position=PositionFile(tmp_path / "position.json"),
            status=FollowerStatus(tmp_path / "status.json"),
        )
        try:
            one.catch_up()
            break
        except ConnectionError:
            continue
    assert environment["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "3"
    assert environment["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    found = {run.data.tags[KEY_TAG]: run for run in server.runs.values() if run.info.lifecycle_stage == "active"}
    alive = [run for run in server.runs.values() if run.info.lifecycle_stage == "active"]
    runs = runs_of(ledger)
    assert len(alive) == len(found) == 8
    assert set(found) == {runs.key, *(run.key for run in runs.runs)}
    parent = found[runs.key].info.run_id
    for run in runs.runs:
        theirs = found[run.key]
        assert theirs.data.tags["mlflow.parentRunId"] == parent
        assert theirs.data.params == {key: str(value) for key, value in run.params.items()}
        values = [(metric.step, metric.value) for metric in theirs.data.metrics.get("value", ())]
        assert repr(values) == repr([(point.step, point.values["value"]) for point in run.points])
        assert {key: theirs.data.metrics[key][0].value for key in run.numbers} == run.numbers
        assert all(len(theirs.data.metrics[key]) == 1 for key in run.numbers)
    states = [found[run.key].info.status for run in runs.runs]
    assert states == ["FINISHED", "KILLED", "FAILED", "KILLED", "KILLED", "FINISHED", "RUNNING"]


def test_a_run_that_its_owner_deleted_is_left_alone(tmp_path: Path, server: Server) -> None:
    ledger = whole(tmp_path / "ledger.jsonl")
    runs = runs_of(ledger)
    MlflowRuns("http://x", {}).write(runs, list(range(7)))
    gone = next(run for run in server.runs.values() if run.data.tags[KEY_TAG] == runs.runs[6].key)
    gone.info.lifecycle_stage = "deleted"
    ledger.finish(6, "complete", 1.0)
    MlflowRuns("http://x", {}).write(runs_of(ledger), [6])
    assert len(server.runs) == 8 and gone.info.status == "RUNNING"


# ---- rows of Trackio carry ids that follow from the ledger: what is sent twice is kept once


class Storage:
    """As much of Trackio as the writer uses: rows by id, the first of each kept; configurations, the last."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, int, dict[str, float]]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}
        self.projects: set[str] = set()
        self.timeouts: list[Any] = []
        self.lost = 0
        self.calls = 0

    def take(self, entry: dict[str, Any]) -> None:
        self.projects.add(entry["project"])
        self.names[entry["run_id"]] = entry["run"]
        self.rows.setdefault(entry["log_id"], (entry["run_id"], entry["step"], entry["metrics"]))
        if entry["config"]:
            self.configs[entry["run_id"]] = entry["config"]

    def bulk_log(
        self, project: str, run: str, metrics_list: list[Any], *, config: Any, run_id: str, **rows: list[Any]
    ) -> None:
        assert len(rows["timestamps"]) == len(metrics_list)
        for metrics, step, log_id in zip(metrics_list, rows["steps"], rows["log_ids"], strict=True):
            entry = {"project": project, "run": run, "run_id": run_id, "step": step, "log_id": log_id}
            self.take({**entry, "metrics": metrics, "config": config})
        self.answer()

    def predict(self, *, api_name: str, logs: list[Any], hf_token: None) -> None:
        assert api_name == "/bulk_log" and hf_token is None
        for entry in logs:
            self.take(entry)
        self.answer()

    def answer(self) -> None:
        self.calls += 1
        if self.calls == self.lost:
            raise ConnectionError("the answer is lost")


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    made = Storage()

    def remote(url: str, *, write_token: str | None, httpx_kwargs: dict[str, Any], verbose: bool) -> Storage:
        made.timeouts.append(httpx_kwargs["timeout"])
        return made

    parts = {
        "sqlite_storage": {"SQLiteStorage": made},
        "remote_client": {"RemoteClient": remote},
        "fragments": {},
        "utils": {"get_storage_mode": lambda: "sqlite", "serialize_values": lambda values: values, "TRACKIO_DIR": "d"},
    }
    monkeypatch.setitem(sys.modules, "trackio", ModuleType("trackio"))
    for name, content in parts.items():
        monkeypatch.setitem(sys.modules, f"trackio.{name}", SimpleNamespace(**content))
    return made


@pytest.mark.parametrize("environment", [{}, {"TRACKIO_SERVER_URL": "http://x/?write_token=abcdefgh"}])
@pytest.mark.parametrize("lost", [0, 1, 4])
def test_what_is_sent_again_is_kept_once(
    tmp_path: Path, storage: Storage, environment: dict[str, str], lost: int
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    storage.lost = lost
    for _ in ledger.whole_study():
        runs = runs_of(ledger)
        writer = TrackioRuns("", environment)
        for _ in range(2):
            try:
                writer.write(runs, list(range(len(runs.runs))))
            except ConnectionError:
                writer.write(runs, list(range(len(runs.runs))))
    runs = runs_of(ledger)
    assert storage.projects == {runs.created.name} and not writer.unsettled()
    assert bool(storage.timeouts) == bool(environment) and set(storage.timeouts) <= {10}
    for run in runs.runs:
        rows = [(step, values) for key, step, values in storage.rows.values() if key == run.key]
        ended = [(run.trial.steps_done, run.numbers)] if run.ended else []
        wanted = [(0, {}), *((point.step, point.values) for point in run.points), *ended]
        assert repr(sorted(rows, key=repr)) == repr(sorted(wanted, key=repr))
        config = storage.configs[run.key]
        assert run.params.items() <= config.items() and config["_Group"] == runs.folder
        assert run.facts.items() <= config.items()
    assert len(set(storage.names.values())) == len(runs.runs)


def test_what_tells_targets_apart_has_no_token(storage: Storage) -> None:
    here, there = TrackioRuns("p", {}), TrackioRuns("p", {"TRACKIO_SERVER_URL": "http://x/?write_token=abcdefgh"})
    assert here.identity() == "p d"
    assert "abcdefgh" not in there.identity() and "http://x/" in there.identity()
