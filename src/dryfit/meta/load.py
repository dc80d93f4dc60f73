"""Pretrained encoders and tokenizers, loaded strictly."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from dryfit.core.errors import ConfigError, LoadError
from dryfit.meta.source import ModelSource, local_folder

# Each architecture names its dropouts in its own way; the first row whose names the config knows is used.
_HIDDEN_DROPOUTS = (
    ("hidden_dropout_prob",),  # BERT, RoBERTa, ELECTRA, ALBERT, DeBERTa, MPNet
    ("hidden_dropout",),
    ("embedding_dropout", "mlp_dropout"),  # ModernBERT
    ("resid_pdrop", "embd_pdrop"),
    ("dropout",),  # DistilBERT, XLNet
)
_ATTENTION_DROPOUTS = (
    ("attention_probs_dropout_prob",),
    ("attention_dropout",),  # DistilBERT, ModernBERT
    ("attn_pdrop",),
)
# These number positions from the padding token on.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm"})


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading left over.

    Attributes:
        folder: Where the weights came from: a folder or a hub id.
        unexpected: Weights of the file the encoder has no place for (heads of the pretraining, poolers).
        missing: Weights of a pooler the file does not hold; anything else missing is an error.
    """

    folder: str
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]


def load_config(source: ModelSource) -> PreTrainedConfig:
    """Read a model's config.

    Raises:
        LoadError: The folder holds no config that transformers knows.
        ConfigError: The model is no encoder.
    """
    folder = local_folder(source)
    where = str(folder or source.name)
    try:
        config = AutoConfig.from_pretrained(
            where,
            revision=source.revision if folder is None else None,
            trust_remote_code=source.trust_remote_code,
            local_files_only=folder is not None,
        )
    except (OSError, ValueError) as error:
        if folder is None:  # the hub's own errors tell a network fault from a wrong name
            raise
        raise LoadError(
            f"reading the config of {where}",
            str(error).strip().splitlines()[0],
            allowed="a config.json that transformers knows; one with its own code needs trust_remote_code = true",
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"reading the config of {where}", f"{config.model_type} is an encoder-decoder", allowed="an encoder"
        )
    return config


def load_encoder(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float | None = None,
    attention_dropout: float | None = None,
) -> tuple[PreTrainedModel, LoadReport]:
    """Load a pretrained encoder, every weight accounted for.

    Args:
        source: Hub id, folder or ``minilm``, with revision and trust.
        dtype: Type of the weights.
        dropout: Hidden dropout; None keeps the pretrained one.
        attention_dropout: Dropout of attention probabilities; None keeps the pretrained one.

    Raises:
        LoadError: A weight is missing or has another shape; poolers excepted, they are not used.
        ConfigError: The architecture has no such dropout, or is no encoder.
    """
    config = load_config(source)
    set_dropouts(config, dropout=dropout, attention_dropout=attention_dropout)
    folder = local_folder(source)
    where = str(folder or source.name)
    try:
        with _quiet():
            model, info = AutoModel.from_pretrained(
                where,
                config=config,
                revision=source.revision if folder is None else None,
                trust_remote_code=source.trust_remote_code,
                local_files_only=folder is not None,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that we can name all of them in our own error
                **_without_pooler(config),
            )
    except OSError as error:
        if folder is None:
            raise
        raise LoadError(f"loading weights from {where}", str(error).strip().splitlines()[0]) from error
    return model, _checked(info, where)


def encoder_from_config(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build an encoder with random fp32 weights, poolers left out as :func:`load_encoder` leaves them out."""
    return AutoModel.from_config(
        config, dtype=torch.float32, trust_remote_code=trust_remote_code, **_without_pooler(config)
    )


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        LoadError: The folder holds none.
    """
    folder = local_folder(source)
    where = str(folder or source.name)
    try:
        return AutoTokenizer.from_pretrained(
            where,
            revision=source.revision if folder is None else None,
            trust_remote_code=source.trust_remote_code,
            local_files_only=folder is not None,
        )
    except (OSError, ValueError) as error:
        if folder is None:
            raise
        raise LoadError(f"loading the tokenizer of {where}", str(error).strip().splitlines()[0]) from error


def set_dropouts(config: PreTrainedConfig, *, dropout: float | None, attention_dropout: float | None) -> None:
    """Write dropout probabilities into the places an architecture keeps them; None leaves them alone.

    Raises:
        ConfigError: The architecture knows no such dropout.
    """
    for key, value, table in (
        ("dropout", dropout, _HIDDEN_DROPOUTS),
        ("attention_dropout", attention_dropout, _ATTENTION_DROPOUTS),
    ):
        if value is None:
            continue
        names = next((row for row in table if all(hasattr(config, name) for name in row)), None)
        if names is None:
            raise ConfigError(
                f"setting regularization.{key} = {value}",
                f"{config.model_type} has no such dropout",
                hint="leave the key out for this model (in a search: give it a `when`)",
            )
        for name in names:
            setattr(config, name, value)


def most_tokens(config: PreTrainedConfig) -> int | None:
    """The longest input an architecture has positions for; None where it has no such limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0 or not getattr(config, "position_biased_input", True):
        return None
    if config.model_type in _OFFSET_POSITIONS:
        limit -= (config.pad_token_id or 0) + 1
    return limit


def _without_pooler(config: PreTrainedConfig) -> dict[str, bool]:
    """``add_pooling_layer=False`` where the architecture takes it: we pool ourselves."""
    cls: Any = MODEL_MAPPING.get(type(config), None)
    takes = inspect.isclass(cls) and "add_pooling_layer" in inspect.signature(cls).parameters
    return {"add_pooling_layer": False} if takes else {}


def _checked(info: dict[str, Any], where: str) -> LoadReport:
    missing = sorted(info["missing_keys"])
    lost = [key for key in missing if not _of_pooler(key)]
    mismatched = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"]]
    broken = [str(message) for message in info.get("error_msgs") or ()]
    if lost or mismatched or broken:
        parts = [
            f"{count} {what} ({_few(names)})"
            for count, what, names in (
                (len(lost), "missing", lost),
                (len(mismatched), "of another shape", mismatched),
                (len(broken), "not readable", broken),
            )
            if count
        ]
        raise LoadError(
            f"loading weights from {where}",
            "weights: " + "; ".join(parts),
            allowed="a file with every weight of the architecture in its config.json",
            hint="check that config.json and the weights belong together",
        )
    unexpected = tuple(sorted(key for key in info["unexpected_keys"]))
    return LoadReport(folder=where, unexpected=unexpected, missing=tuple(missing))


def _of_pooler(key: str) -> bool:
    return any(part.startswith("pooler") for part in key.split("."))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no table of left-over keys: the report has them."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A model source that is simply a folder or a hub id."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, source: str | Path) -> "FolderSource":
        """A source for a path or name."""
        return cls(name=str(source))
