"""Weights & Biases: a run for each trial, grouped by study, with an id of its own and resumed by it.

The client uploads in the background, so a run counts as written only when it is finished. One that was not is written
from its first point again: a server drops the steps that it has, and of a run that is only on the disk (offline) the
folder is written anew.
"""

import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from dryfit.search.follower_runs import Run, Runs, RunWriter
from dryfit.search.followers import client
from dryfit.settings.trial import Outcome

_DEFAULTS = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true"}
_INIT_S = 30


class WandbRuns(RunWriter):
    """Writes runs by the client of Weights & Biases, whose mode, server and key are in its variables.

    Args:
        where: ``PROJECT`` or ``ENTITY/PROJECT``; empty: a project of the study's name.
        folder: Where the client keeps its files.
        environment: Variables of this process; what is shown of it is turned off where it is not set.
    """

    def __init__(self, where: str, folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
        for name, value in _DEFAULTS.items():
            environment.setdefault(name, value)
        self._offline = environment.get("WANDB_MODE") == "offline"
        self._server = f"{environment.get('WANDB_BASE_URL', '')} {environment.get('WANDB_MODE', '')}"
        self._where = where
        self._folder = folder
        self._client: Any = client("wandb")
        self._open: dict[int, Any] = {}
        self._sent: dict[int, int] = {}

    def identity(self) -> str:
        """Return the project, the server, and whether anything is uploaded."""
        return f"{self._where} {self._server}"

    def write(self, runs: Runs, numbers: list[int]) -> None:
        """Write what these trials' runs lack; finish those that have ended."""
        for number in numbers:
            run = runs.runs[number]
            handle = self._open.get(number) or self._begin(runs, run)
            for point in run.points[self._sent[number] :]:
                handle.log({**point.values, "optimizer_step": point.step}, step=point.n)
            self._sent[number] = len(run.points)
            handle.summary.update({**run.facts, **run.numbers})
            if run.ended:
                self._finish(number, failed=run.trial.outcome is Outcome.FAILED)

    def unsettled(self) -> set[int]:
        """Return the trials whose runs are not finished."""
        return set(self._open)

    def close(self) -> None:
        """Finish all runs: those of trials that go on are resumed."""
        for number in list(self._open):
            self._finish(number, failed=False)

    def _begin(self, runs: Runs, run: Run) -> Any:
        if self._offline:
            for left in self._folder.glob(f"wandb/offline-run-*-{run.key}"):
                shutil.rmtree(left)
        self._folder.mkdir(parents=True, exist_ok=True)
        entity, _, project = self._where.rpartition("/")
        names = {"project": project or runs.created.name, "group": runs.folder, "id": run.key, "name": run.name}
        handle = self._client.init(
            **names,
            entity=entity or None,
            resume="allow",
            reinit="create_new",
            config=run.params,
            dir=str(self._folder),
            settings=self._client.Settings(init_timeout=_INIT_S, x_disable_stats=True, x_disable_meta=True),
        )
        self._open[run.trial.number] = handle
        handle.define_metric("*", step_metric="optimizer_step")
        known = int(handle.step)  # the step after the last one that the server has
        self._sent[run.trial.number] = sum(point.n < known for point in run.points)
        return handle

    def _finish(self, number: int, *, failed: bool) -> None:
        self._open[number].finish(exit_code=int(failed))
        del self._open[number]
