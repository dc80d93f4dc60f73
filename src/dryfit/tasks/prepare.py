"""Tokens of a study's data: read, checked and tokenised once, then taken from the cache."""

from pathlib import Path

from dryfit.core.errors import ChangedError, ConfigError
from dryfit.meta.files.source import model_identity
from dryfit.meta.loading.configs import load_tokenizer, most_tokens
from dryfit.meta.loading.pretrained import pretrained_config
from dryfit.tasks.base import Task
from dryfit.tasks.folds import Fold, checked_fold
from dryfit.tasks.guard import check_tokens, config_bounds
from dryfit.tasks.own import own_source
from dryfit.tasks.rows.checked_rows import Splits, fingerprint, load_splits
from dryfit.tasks.tokens.token_set import Tokens, load_tokens, save_tokens, token_folder


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
        only: As in :func:`dryfit.tasks.tokens.token_set.load_tokens`.
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
    limit = most_tokens(config)
    if limit is not None and max_length > limit:
        raise ConfigError(
            f"preparing the model {model.name}",
            f"train.max_length is {max_length}",
            allowed=f"at most {limit}: the model has no more positions",
        )
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
