"""Tokens of a study's data, made once and cached, and the folds of cross-validation."""

from dataclasses import dataclass
from pathlib import Path

from dryfit.meta.checkpoint_files import model_identity
from dryfit.meta.configs import check_positions, load_tokenizer
from dryfit.meta.pretrained import pretrained_config
from dryfit.settings.errors import ChangedError, DataError
from dryfit.settings.splits import fold_groups
from dryfit.settings.tables import DataSettings
from dryfit.tasks.base import Task
from dryfit.tasks.guard import check_tokens, config_bounds
from dryfit.tasks.own import own_source
from dryfit.tasks.rows import TRAIN, VALIDATION, Splits, fingerprint, load_splits
from dryfit.tasks.tokens import Tokens, load_tokens, save_tokens, token_folder

# k-fold cross-validation: rows of train and validation divided into folds, each held out once.


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


# Tokens of a study's data: read, checked and tokenised once, then taken from the cache.


def checked_splits(task: Task) -> Splits:
    """Read and check the rows of a task.

    Raises:
        ConfigError: Sources are missing, or named twice.
        DataError: A file, row or value is wrong, or nothing can be learned from them.
    """
    splits = load_splits(task.context.data, task.required, task.further)
    task.check_rows(splits)
    return splits


def prepared_tokens(
    task: Task, *, cache_dir: Path, data_fingerprint: str, only: tuple[str, ...] | None, fold: Fold | None = None
) -> Tokens:
    """Return the tokens of a study's data: from the cache, else made again.

    Args:
        only: As in :func:`dryfit.tasks.tokens.load_tokens`.
        fold: Which rows are train and validation; None: those of the sources.

    Raises:
        ChangedError: Tokens had to be made again, and the data has changed since the study was checked.
    """
    tokens = load_tokens(_folder(task, cache_dir, data_fingerprint, fold), only=only)
    if tokens is not None:
        return tokens
    splits = checked_splits(task)
    actual = fingerprint(splits)
    if actual != data_fingerprint:
        raise ChangedError(
            "preparing the data of a trial",
            f"the rows have changed: fingerprint {actual}",
            allowed=f"the rows the study was started or resumed with: fingerprint {data_fingerprint}",
            hint="put them back; or keep them, and `dryfit resume` begins another generation of trials",
        )
    splits = splits if fold is None else checked_fold(task, splits, fold)
    return cache_tokens(task, splits, cache_dir=cache_dir, data_fingerprint=actual, fold=fold)


def cache_tokens(
    task: Task, splits: Splits, *, cache_dir: Path, data_fingerprint: str, fold: Fold | None = None
) -> Tokens:
    """Tokenise checked rows into the cache, unless they are there already.

    Args:
        task: Reads them.
        splits: The rows.
        cache_dir: Where tokens are looked for and put.
        data_fingerprint: Of all rows of the study.
        fold: Whose rows they are; None: those of the sources.

    Raises:
        ConfigError: The model has too few positions for the length.
        DataError: A token id is beyond the model's embedding.
    """
    model, max_length = task.context.settings.model, task.context.settings.train.max_length
    config = pretrained_config(model, task.kind)
    check_positions(config, "train.max_length", max_length, f"preparing the model {model.name}")
    folder = _folder(task, cache_dir, data_fingerprint, fold)
    tokens = load_tokens(folder)
    if tokens is None:
        tokens = task.tokenise(splits, load_tokenizer(model))
        save_tokens(folder, tokens)
    for name, split in tokens.splits.items():
        check_tokens(name, split, config_bounds(config))
    return tokens


def _folder(task: Task, cache_dir: Path, data_fingerprint: str, fold: Fold | None) -> Path:
    settings = task.context.settings
    decides = (task.token_key(), own_source(type(task)), fold.token_key if fold is not None else "")
    return token_folder(
        cache_dir,
        data_fingerprint=data_fingerprint,
        identity=model_identity(settings.model),
        max_length=settings.train.max_length,
        task="\x1f".join(filter(None, decides)),
    )
