"""Rows of train and validation divided into folds: each is held out once, and the rest trained on."""

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
        """What decides its tokens beside all that decides a study's."""
        return f"{self}, seed {self.seed}"


def study_folds(data: DataSettings) -> tuple[Fold, ...]:
    """The folds that a study asks for; none where its trials train once."""
    if data.folds == 1:
        return ()
    return tuple(Fold(number, data.folds, data.split_seed) for number in range(1, data.folds + 1))


def fold_splits(splits: Splits, fold: Fold, data: DataSettings) -> Splits:
    """The rows that a fold is trained on and validated on, each in the order of train and then validation.

    Args:
        splits: All of the study's; test is left out.
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
    """A fold's rows, once it is seen that the task can be learned from them.

    Raises:
        ConfigError: There are fewer groups than folds.
        DataError: It cannot: the training rows of the fold lack something.
    """
    found = fold_splits(splits, fold, task.context.data)
    try:
        task.check_rows(found)
    except DataError as error:
        hint = "set another data.split_seed or a smaller data.folds, or add rows of other groups that have it"
        raise DataError(f"{fold}: {error.doing}", error.found, error.allowed, hint) from error
    return found
