"""Trackio: a run per trial, with fixed ids for the run and each row, so repeated rows are stored once.

``trackio.init`` finds runs by name, gives each row a random id and keeps quiet about rows that it could not write. So
rows go to what lies below it: the storage on this machine, or the same call of a Trackio server, which reports failure.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dryfit.search.follower_runs import Run, Runs, RunWriter
from dryfit.search.followers import TRACKIO_SERVER, client
from dryfit.settings.secrets import redacted

_ROWS = 500
"""Rows of one call."""
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a run.

    Attributes:
        id: No other row of the project has it; one that is there is not written again.
        step: Optimizer steps done.
        at_s: When the ledger noted it, in Unix seconds.
        values: What is shown; may be empty.
    """

    id: str
    step: int
    at_s: float
    values: Mapping[str, float]


class TrackioRuns(RunWriter):
    """Writes runs into Trackio's files on this machine, or to the server in ``TRACKIO_SERVER_URL``.

    Args:
        project: Where the runs are put; empty: a project of the study's name.
        environment: Variables of this process.
    """

    def __init__(self, project: str, environment: Mapping[str, str] = os.environ) -> None:
        self._project = project
        self._url = environment.get(TRACKIO_SERVER, "")
        self._token = environment.get("TRACKIO_WRITE_TOKEN")
        self._utils: Any = client("trackio", ".utils")
        storage: Any = client("trackio", ".sqlite_storage")
        self._storage: Any = storage.SQLiteStorage
        self._fragments: Any = client("trackio", ".fragments")
        self._server: Any = None
        self._sent: dict[int, int] = {}

    def identity(self) -> str:
        """Return the project, and the server or the folder that it is in."""
        return f"{self._project} {redacted(self._url, {}) or self._utils.TRACKIO_DIR}"

    def write(self, runs: Runs, numbers: list[int]) -> None:
        """Write what may be missing of these trials' runs."""
        for number in numbers:
            run = runs.runs[number]
            rows = _rows(run, self._sent.get(number, 0))
            config = {
                **run.params,
                **run.facts,
                **run.numbers,
                "_Group": runs.folder,
                "_Created": _time(run.trial.asked_at_s),
                "_Username": None,
            }
            for at in range(0, len(rows), _ROWS):
                self._log(self._project or runs.created.name, run, rows[at : at + _ROWS], config)
            self._sent[number] = len(run.points)
            if run.ended:  # no event about it follows
                del self._sent[number]

    def _log(self, project: str, run: Run, rows: list[_Row], config: Mapping[str, Any]) -> None:
        name = f"{run.name}-{run.key[:8]}"  # studies may share a project
        if not self._url and self._utils.get_storage_mode() == "sqlite":
            columns = {
                "steps": [row.step for row in rows],
                "timestamps": [_time(row.at_s) for row in rows],
                "log_ids": [row.id for row in rows],
            }
            values = [dict(row.values) for row in rows]
            self._storage.bulk_log(project, name, values, config=dict(config), run_id=run.key, **columns)
            return
        entries = [
            {
                "project": project,
                "run": name,
                "run_id": run.key,
                "metrics": self._utils.serialize_values(dict(row.values)),
                "step": row.step,
                "timestamp": _time(row.at_s),
                "config": self._utils.serialize_values(dict(config)) if index == 0 else None,
                "log_id": row.id,
            }
            for index, row in enumerate(rows)
        ]
        if self._url:
            self._connected().predict(api_name="/bulk_log", logs=entries, hf_token=None)
        else:  # SQLite is no file of a network's file system: Trackio's dashboard takes rows from fragments there
            records = [self._fragments.metric_record(entry) for entry in entries]
            self._fragments.FragmentWriter().write_local(records)

    def _connected(self) -> Any:
        if self._server is None:
            remote: Any = client("trackio", ".remote_client")
            self._server = remote.RemoteClient(
                self._url, write_token=self._token, httpx_kwargs={"timeout": _TIMEOUT_S}, verbose=False
            )
        return self._server


def _rows(run: Run, after: int) -> list[_Row]:
    """Return the rows of a run: its beginning, the validations after the first ``after``, its end."""
    trial = run.trial
    rows = [_Row(f"{run.key}-begin", 0, trial.asked_at_s, {})]
    for index, point in enumerate(run.points[after:], start=after):
        rows.append(_Row(f"{run.key}-{index}", point.step, point.at_s, point.values))
    if run.ended:
        rows.append(_Row(f"{run.key}-end", trial.steps_done, trial.finished_at_s or trial.asked_at_s, run.numbers))
    return rows


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()
