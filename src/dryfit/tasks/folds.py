"""k-fold cross-validation: rows of train and validation divided into folds, each held out once."""

from dataclasses import dataclass

from dryfit.core.errors import DataError
from dryfit.core.settings.splits import fold_groups
from dryfit.core.settings.tables import DataSettings
from dryfit.tasks.base import Task
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION, Splits


@dataclass(frozen=True, slots=True)
class Fold:
    """One of a study's folds.

    Attributes:
        number: From 1.
        count: How many there are.
        seed: Of the division.
    """

    number: int
    count: int
    seed: int

    def __str__(self) -> str:
        return f"fold {self.number} of {self.count}"

    @property
    def token_key(self) -> str:
        """Return what its tokens depend on beside what a study's do."""
        return f"{self}, seed {self.seed}"


def study_folds(data: DataSettings) -> tuple[Fold, ...]:
    """Return the folds of a study; none where its trials train once."""
    if data.folds == 1:
        return ()
    return tuple(Fold(number, data.folds, data.split_seed) for number in range(1, data.folds + 1))


def fold_splits(splits: Splits, fold: Fold, data: DataSettings) -> Splits:
    """Return the training and validation rows of a fold, each in the study's order, train before validation.

    Args:
        splits: The study's; test is left out.
        fold: Which one.
        data: Where the rows are from, for the message.

    Raises:
        ConfigError: There are fewer groups than folds.
    """
    rows = (*splits[TRAIN], *splits[VALIDATION])
    of_group = fold_groups(
        (row.group for row in rows),
        fold.count,
        seed=fold.seed,
        doing=f"dividing {len(rows)} rows of train and validation into folds by {data.group}",
        hint="set a smaller data.folds, or add rows of other groups",
    )
    return {
        TRAIN: tuple(row for row in rows if of_group[row.group] != fold.number),
        VALIDATION: tuple(row for row in rows if of_group[row.group] == fold.number),
    }


def checked_fold(task: Task, splits: Splits, fold: Fold) -> Splits:
    """Return a fold's rows, checked by the task.

    Raises:
        ConfigError: There are fewer groups than folds.
        DataError: The training rows of the fold lack something that the task needs.
    """
    splits = fold_splits(splits, fold, task.context.data)
    try:
        task.check_rows(splits)
    except DataError as error:
        hint = "set another data.split_seed or a smaller data.folds, or add rows of other groups that have it"
        raise DataError(f"{fold}: {error.doing}", error.found, error.allowed, hint) from error
    return splits
