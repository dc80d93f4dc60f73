"""Rows of Trackio carry ids that follow from the ledger: what is sent twice, or to a new writer, is kept once."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dryfit.search.follower_runs import Runs, parse_event
from dryfit.search.trackio_follower import TrackioRuns
from toy_ledger import Ledger


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


def runs_of(ledger: Ledger) -> Runs:
    runs = Runs()
    for line in ledger.path.read_bytes().splitlines():
        event = parse_event(line)
        assert event is not None
        runs.apply(event)
    return runs


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
