"""Folders of saved models: find them in a study's folder, and explain why another folder is no model."""

from pathlib import Path
from typing import Final

from dryfit.core.errors import LoadError
from dryfit.core.text.words import few

DRYFIT_FILE: Final = "dryfit.json"
"""What a saved model says of itself; a folder without it is none of dryfit's."""
LEDGER_FILE: Final = "ledger.jsonl"
"""What makes a folder a study's."""

MODEL_FOLDER: Final = "a folder that `dryfit train` wrote, or a trial's best weights"
_PLAIN: Final = ("config.json", "adapter_config.json", "modules.json")
_INSIDE: Final = ("model", "best", "final/*/model", "trials/*/best")
"""Where models lie in the folder of a final training, a trial, or a study."""


def is_model(folder: Path) -> bool:
    """Return whether dryfit saved a model, or several as one, in a folder."""
    return (folder / DRYFIT_FILE).is_file()


def is_plain_model(folder: Path) -> bool:
    """Return whether another program saved a model in a folder: transformers, peft or sentence-transformers."""
    return not is_model(folder) and any((folder / name).is_file() for name in _PLAIN)


def is_study(folder: Path) -> bool:
    """Return whether a folder is a study's."""
    return (folder / LEDGER_FILE).is_file()


def models_in(folder: Path) -> list[Path]:
    """Return the models that lie in the folder of a study, a trial or a final training; trained ones first."""
    return [file.parent for pattern in _INSIDE for file in sorted(folder.glob(f"{pattern}/{DRYFIT_FILE}"))]


def _plain_models_in(folder: Path) -> list[Path]:
    return [place for pattern in _INSIDE for place in sorted(folder.glob(pattern)) if is_plain_model(place)]


def model_folder(model: Path | str, doing: str) -> Path:
    """Return the whole path of a model's folder.

    Args:
        model: What the user named.
        doing: For messages.

    Raises:
        LoadError: There is no such folder, or it is none of a model; the models in it are named.
    """
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is no such folder"
        raise LoadError(doing, found, MODEL_FOLDER, "check the path")
    if is_model(folder):
        return folder
    there = models_in(folder)
    if there:
        what = "it is a study's folder" if is_study(folder) else f"it has no {DRYFIT_FILE}"
        raise LoadError(doing, what, MODEL_FOLDER, f"take a model that lies in it: {few(map(str, there))}")
    plain = [folder] if is_plain_model(folder) else _plain_models_in(folder)
    if plain:
        are = "is a model" if len(plain) == 1 else "are models"
        found = f"{few(map(str, plain))} {are} that other code than dryfit's saved"
        hint = "dryfit.load, transformers or peft open it; `dryfit export MODEL_DIR --to transformers -o OUT` copies it"
        raise LoadError(doing, found, MODEL_FOLDER, hint)
    if is_study(folder):
        found = "it is a study's folder, and no model lies in it"
        raise LoadError(doing, found, MODEL_FOLDER, f"train its best trial once more: `dryfit train {folder}`")
    hint = "dryfit.load opens any model; its rows are known of those alone that dryfit saved"
    raise LoadError(doing, f"it has no {DRYFIT_FILE}", MODEL_FOLDER, hint)
