"""MLflow: a run for the study, and nested in it one for each trial, found again by a tag.

An MLflow server chooses the ids of runs itself, so each run carries its key in the tag ``dryfit.key``. Before a run is
written for the first time by a writer, what the server has of it is read, and only what it lacks is sent.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dryfit.search.follower_runs import Run, Runs, RunWriter
from dryfit.search.followers import client
from dryfit.settings.trial import Outcome

KEY_TAG = "dryfit.key"

TIMEOUTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Variables of MLflow, where they are not set: by its own retries a call to a dead server takes 246 s."""

_BATCH = 500
"""Metrics of one request; the server takes 1000, and 100 parameters and tags."""
_BATCH_OF_TEXTS = 90
_TEXT_MAX_CHARS = 4_000
_NAME_MAX_CHARS = 250
_RUNNING = "RUNNING"
_STATUS = {
    None: _RUNNING,
    Outcome.COMPLETE: "FINISHED",
    Outcome.PRUNED: "KILLED",
    Outcome.REFUSED: "KILLED",
    Outcome.FAILED: "FAILED",
    Outcome.CANCELLED: "KILLED",
}


@dataclass(slots=True)
class _Known:
    """What the server has of a run.

    Attributes:
        run_id: None where its owner has deleted the run: it is left alone.
        status: As the server calls it.
        sent: How many of the run's points were sent, or found there.
        points: Key, step and time (milliseconds) of each value that was found there.
        params: Names of its parameters.
        tags: Its tags.
    """

    run_id: str | None
    status: str = _RUNNING
    sent: int = 0
    points: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    params: set[str] = field(default_factory=set[str])
    tags: dict[str, str] = field(default_factory=dict[str, str])


class MlflowRuns(RunWriter):
    """Writes runs to a tracking server or another MLflow URI.

    Args:
        uri: The tracking URI.
        environment: Variables of this process; timeouts are added where it has none.
    """

    def __init__(self, uri: str, environment: MutableMapping[str, str] = os.environ) -> None:
        for name, value in TIMEOUTS.items():
            environment.setdefault(name, value)
        self._uri = uri
        self._experiment_name = environment.get("MLFLOW_EXPERIMENT_NAME", "")
        module: Any = client("mlflow")
        self._entities: Any = client("mlflow", ".entities")
        self._client: Any = module.MlflowClient(tracking_uri=uri)
        self._experiment = ""
        self._known: dict[str, _Known] = {}

    def identity(self) -> str:
        """Return the server and the experiment."""
        return f"{self._uri} {self._experiment_name}"

    def write(self, runs: Runs, numbers: list[int]) -> None:
        """Write what the server lacks of the study and of these trials."""
        study = self._known.get(runs.key) or self._find(runs.key, runs.created.name, int(runs.began_s * 1000), runs, {})
        if study.run_id is None:
            return
        for number in numbers:
            self._write_trial(runs, runs.runs[number], study.run_id)
        tags = {f"dryfit.{key}": str(value) for key, value in runs.facts.items()}
        self._send(study, points=(), params={"seed": str(runs.created.seed)}, tags=tags)
        # A study that is opened again is running again; what ended it before is in its tags no longer.
        wanted = _RUNNING if runs.closed is None else "FINISHED"
        self._set_status(study, wanted, runs.state.sessions[-1].last_at_s if runs.state.sessions else runs.began_s)

    def _write_trial(self, runs: Runs, run: Run, parent: str) -> None:
        began_ms = int(run.trial.asked_at_s * 1000)
        known = self._known.get(run.key) or self._find(
            run.key, run.name, began_ms, runs, {"mlflow.parentRunId": parent, "dryfit.study": runs.folder}
        )
        if known.run_id is None:
            return
        ended_s = run.trial.finished_at_s or run.trial.asked_at_s
        points = [
            (_name(key), point.step, int(point.at_s * 1000), value)
            for point in run.points[known.sent :]
            for key, value in point.values.items()
        ]
        points += [(_name(key), run.trial.steps_done, int(ended_s * 1000), value) for key, value in run.numbers.items()]
        tags = {f"dryfit.{_name(key)}": str(value) for key, value in run.facts.items()}
        self._send(
            known, points=points, params={_name(key): str(value) for key, value in run.params.items()}, tags=tags
        )
        known.sent = len(run.points)
        self._set_status(known, _STATUS[run.trial.outcome], ended_s)
        if run.ended:  # no event about it follows: a trial that is written again is read again
            del self._known[run.key]

    def _find(self, key: str, name: str, began_ms: int, runs: Runs, tags: Mapping[str, str]) -> _Known:
        """Return the run with this key as the server has it; make it where there is none.

        A request to make one may be carried out after its answer was given up, and then be made again: all but the
        oldest such run are deleted.
        """
        experiment = self._experiment = self._experiment or self._find_experiment(runs.created.name)
        found = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{KEY_TAG}` = '{key}'",
            run_view_type=self._entities.ViewType.ALL,
            max_results=10,
        )
        found = sorted(found, key=lambda run: run.info.run_id)
        active = [run for run in found if run.info.lifecycle_stage == "active"]
        if found and not active:
            known = _Known(None)
        elif active:
            for twin in active[1:]:
                self._client.delete_run(twin.info.run_id)
            known = self._read(active[0])
        else:
            made = self._client.create_run(experiment, start_time=began_ms, tags={KEY_TAG: key, **tags}, run_name=name)
            known = _Known(made.info.run_id)
        self._known[key] = known
        return known

    def _find_experiment(self, study: str) -> str:
        name = self._experiment_name or study
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage != "active":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id if found is not None else self._client.create_experiment(name)

    def _read(self, run: Any) -> _Known:
        known = _Known(run.info.run_id, run.info.status, params=set(run.data.params), tags=dict(run.data.tags))
        for key in run.data.metrics:
            for metric in self._client.get_metric_history(run.info.run_id, key):
                known.points.add((key, metric.step, metric.timestamp))
        return known

    def _send(
        self,
        known: _Known,
        *,
        points: Iterable[tuple[str, int, int, float]],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        entities = self._entities
        new_points = [point for point in points if point[:3] not in known.points]
        new_params = {key: value[:_TEXT_MAX_CHARS] for key, value in params.items() if key not in known.params}
        cut = {key: value[:_TEXT_MAX_CHARS] for key, value in tags.items()}
        new_tags = {key: value for key, value in cut.items() if known.tags.get(key) != value}
        for some in _batches(new_points, _BATCH):
            metrics = [entities.Metric(key, value, at_ms, step) for key, step, at_ms, value in some]
            self._client.log_batch(known.run_id, metrics=metrics)
            known.points |= {point[:3] for point in some}
        for some in _batches(new_params.items(), _BATCH_OF_TEXTS):
            self._client.log_batch(known.run_id, params=[entities.Param(key, value) for key, value in some])
            known.params |= {key for key, _ in some}
        for some in _batches(new_tags.items(), _BATCH_OF_TEXTS):
            self._client.log_batch(known.run_id, tags=[entities.RunTag(key, value) for key, value in some])
            known.tags |= dict(some)

    def _set_status(self, known: _Known, wanted: str, at_s: float) -> None:
        """Set the status last: a run that has ended is whole."""
        if known.status == wanted:
            return
        if wanted == _RUNNING:
            self._client.update_run(known.run_id, status=wanted)
        else:
            self._client.set_terminated(known.run_id, status=wanted, end_time=int(at_s * 1000))
        known.status = wanted


def _name(text: str) -> str:
    """Return a name that MLflow takes: letters, digits, ``_-. :/``, no path upwards."""
    kept = "".join(char if (char.isascii() and char.isalnum()) or char in "_-. :/" else "_" for char in text)
    return kept.replace("..", "_.").strip("/ ")[:_NAME_MAX_CHARS] or "_"


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
