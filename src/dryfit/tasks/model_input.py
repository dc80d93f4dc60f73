"""What a trained model needs to know of the rows it was trained on, kept in its ``dryfit.json``."""

import json
from pathlib import Path

from pydantic import ValidationError

from dryfit.core.errors import LoadError
from dryfit.core.settings import DataSettings, Settings
from dryfit.tasks.load import DRYFIT_FILE
from dryfit.tasks.tokens import Tokens


class ModelInput(Settings):
    """From a row to what the model reads.

    Attributes:
        id: Column with the row's id.
        text: Column with the text.
        criterion: Column with the criterion; None: the model reads text alone.
        max_length: Tokens a row is cut to.
        pad_id: The token that rows are padded with.
        multi_label: Each class has a probability of its own.
    """

    id: str
    text: str
    criterion: str | None
    max_length: int
    pad_id: int
    multi_label: bool


def model_input(data: DataSettings, tokens: Tokens, *, max_length: int) -> ModelInput:
    """What a model trained on these tokens needs to know."""
    return ModelInput(
        id=data.id,
        text=data.text,
        criterion=data.criterion if tokens.pairs else None,
        max_length=max_length,
        pad_id=tokens.pad_id,
        multi_label=data.multi_label,
    )


def read_model_input(folder: Path) -> ModelInput:
    """Read it from a model's folder.

    Raises:
        LoadError: The folder holds no model that dryfit trained, or one that does not say.
    """
    doing = f"reading {folder / DRYFIT_FILE}"
    allowed = "a folder that `dryfit train` wrote, or a trial's best weights"
    try:
        meta = json.loads((folder / DRYFIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(doing, str(error).strip().splitlines()[0], allowed) from error
    if "input" not in meta:
        hint = "an earlier dryfit saved it: train it once more with `dryfit train`"
        raise LoadError(doing, "it does not say what rows the model reads", allowed, hint)
    try:
        return ModelInput.model_validate_json(json.dumps(meta["input"]))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LoadError(doing, f"input.{'.'.join(map(str, first['loc']))}: {first['msg']}", allowed) from error
