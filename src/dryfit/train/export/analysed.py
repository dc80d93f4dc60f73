"""What a model that is to be used does well and badly, as its training and its study say it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dryfit.core.errors import FileError
from dryfit.core.jobs.analysis import Analysis
from dryfit.core.settings.trial import TrialConfig
from dryfit.scoring.analysis import analyse
from dryfit.scoring.row_files import read_facts
from dryfit.scoring.scored_row import ScoredRow
from dryfit.tasks.base import Task
from dryfit.tasks.class_threshold import HALF, threshold_names


def analysed(
    rows: Sequence[ScoredRow],
    split: str,
    task: Task,
    config: TrialConfig,
    *,
    fitted: Mapping[str, float],
    facts_file: str,
) -> Analysis | None:
    """Return the analysis of a split's rows; None where there are none.

    Args:
        rows: With the model's answers.
        split: Which they are.
        task: What was learned.
        config: How.
        fitted: What was chosen on validation: thresholds are taken from there.
        facts_file: File of the criteria and groups of the study's rows. Without it there are none: no baselines were
            asked for, or somebody removed them.
    """
    try:
        facts = read_facts(Path(facts_file))
    except (FileError, OSError):
        facts = None
    names = threshold_names(task.classes or 0, multi_label=config.data.multi_label)
    thresholds = [fitted.get(name, HALF) for name in names]
    labels = config.data.labels
    return analyse(rows, facts, split=split, metric=config.metric, thresholds=thresholds, labels=labels)
