"""Request and result of the job BASELINES: values of a study's metric without a model."""

import math
from typing import Literal

from pydantic import Field

from dryfit.core.jobs.job import Job, JobRequest
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.tables import DataSettings, TrialSettings
from dryfit.core.settings.task_facts import MetricName, TaskName
from dryfit.core.settings.trial import Goal, better
from dryfit.core.wire import Wire


class BaselineScore(Wire):
    """A baseline and its metrics on the validation split, or their means over the folds.

    Attributes:
        name: A word: ``majority``; also the folder of its rows.
        words: What it answers.
        metrics: Those that can be computed of it.
        is_linear: It is trained: a linear model.
    """

    name: str
    words: str
    metrics: dict[str, float]
    is_linear: bool = False


class BaselinesResult(Wire):
    """The result of BASELINES.

    Attributes:
        baselines: The plainest first, then the best of its kind, then linear models.
        notes: Which are missing, and why.
    """

    baselines: tuple[BaselineScore, ...] = ()
    notes: tuple[str, ...] = ()

    def strongest(self, goal: Goal) -> BaselineScore | None:
        """Return the baseline that is best by a metric, the plainer of equals; None where none has it."""
        strongest: BaselineScore | None = None
        for one in self.baselines:
            than = strongest.metrics[goal.name] if strongest is not None else math.nan
            if better(one.metrics.get(goal.name, math.nan), than, goal.direction):
                strongest = one
        return strongest


class BaselinesRequest(JobRequest[BaselinesResult]):
    """Compute a study's baselines, and keep their rows and the groups of all rows.

    Attributes:
        metric: The study's metric, by which the best of several constant answers is found.
        settings: The study file's own.
        data_fingerprint: Of the rows that the study was resolved with.
        out_dir: Folder of a folder of rows for each baseline, and of the facts of rows; it belongs to the job.
        limit_s: How long each baseline may take.
    """

    job: Literal[Job.BASELINES] = Job.BASELINES
    task: TaskName
    metric: MetricName
    direction: Direction
    data: DataSettings
    settings: TrialSettings
    cache_dir: str
    data_fingerprint: str
    out_dir: str
    limit_s: float = Field(gt=0)
