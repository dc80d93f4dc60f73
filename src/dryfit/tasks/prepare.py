"""From settings to tokens: read, check and tokenise once, then take from the cache."""

from pathlib import Path

from dryfit.core.errors import ConfigError, DataError
from dryfit.core.settings import DataSettings, ModelSettings
from dryfit.meta.configs import load_tokenizer, most_tokens
from dryfit.meta.pretrained import encoder_config
from dryfit.meta.source import model_identity
from dryfit.tasks.guard import check_tokens, config_bounds
from dryfit.tasks.rows import Splits, fingerprint, load_splits
from dryfit.tasks.tokens import Tokens, load_tokens, save_tokens, token_folder, tokenise


def prepared_tokens(
    data: DataSettings,
    model: ModelSettings,
    max_length: int,
    *,
    cache_dir: Path,
    data_fingerprint: str,
    only: tuple[str, ...] | None,
) -> Tokens:
    """Tokens of a study's data for one (model, length): from the cache, else made again.

    Args:
        only: As in :func:`dryfit.tasks.tokens.load_tokens`.

    Raises:
        DataError: They had to be made again and the data is no longer what the study was checked with.
    """
    folder = token_folder(
        cache_dir, data_fingerprint=data_fingerprint, identity=model_identity(model), max_length=max_length
    )
    tokens = load_tokens(folder, only=only)
    if tokens is not None:
        return tokens
    splits = load_splits(data)
    found = fingerprint(splits)
    if found != data_fingerprint:
        raise DataError(
            "preparing the data of a trial",
            f"the rows have changed: fingerprint {found}",
            allowed=f"the rows the study was started with: fingerprint {data_fingerprint}",
            hint="restore the data files, or start another study",
        )
    return cache_tokens(splits, model, max_length, cache_dir=cache_dir, data_fingerprint=found)


def cache_tokens(
    splits: Splits, model: ModelSettings, max_length: int, *, cache_dir: Path, data_fingerprint: str
) -> Tokens:
    """Tokenise checked rows and put them into the cache; taken from there if they are already.

    Raises:
        ConfigError: The model has no positions for such a length.
        DataError: A token has no place in the model's embedding.
    """
    config = encoder_config(model)
    limit = most_tokens(config)
    if limit is not None and max_length > limit:
        raise ConfigError(
            f"preparing the model {model.name}",
            f"train.max_length is {max_length}",
            allowed=f"at most {limit}: the model has no more positions",
        )
    folder = token_folder(
        cache_dir, data_fingerprint=data_fingerprint, identity=model_identity(model), max_length=max_length
    )
    tokens = load_tokens(folder)
    if tokens is None:
        tokens = tokenise(splits, load_tokenizer(model), max_length)
        save_tokens(folder, tokens)
    for name, split in tokens.splits.items():
        check_tokens(name, split, config_bounds(config))
    return tokens
