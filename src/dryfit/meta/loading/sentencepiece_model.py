"""Check tokenizers that are a bare sentencepiece model: packages to read them, and wrong readings."""

import importlib.util
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import import_protobuf

from dryfit.core.errors import LoadError, MachineError

_MODEL_FILES = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
_NEEDS = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}  # modules and their packages


def sentencepiece_file(folder: Path) -> Path | None:
    """Return a folder's sentencepiece model; None where a tokenizer.json stands beside it."""
    if (folder / "tokenizer.json").is_file():
        return None
    return next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)


def check_packages(path: Path) -> None:
    """Refuse a sentencepiece model that this installation cannot read; transformers would ask for tiktoken.

    Raises:
        MachineError: A package is not installed.
    """
    missing = [package for module, package in _NEEDS.items() if not _is_there(module)]
    if missing:
        raise MachineError(
            f"loading the tokenizer in {path}",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            allowed="sentencepiece and protobuf, or a folder with a tokenizer.json",
            hint=f"pip install {' '.join(missing)}",
        )


def check_algorithm(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a BPE model that was read as a unigram one: the same pieces, cut in other places.

    transformers 5 builds the tokenizers of most architectures as unigram models, whatever the file says.

    Raises:
        LoadError: The model was read wrongly.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "Unigram":
        return
    generated: Any = import_protobuf()  # its classes are made when it is imported: no stub knows them
    proto = generated.ModelProto()
    proto.ParseFromString(path.read_bytes())
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        reader = f"{type(tokenizer).__name__} of transformers {transformers.__version__}"
        raise LoadError(
            f"loading the tokenizer in {path}",
            f"it is a BPE model, and {reader} reads it as a unigram one, which cuts text differently",
            allowed="a unigram sentencepiece model, or a tokenizer.json",
            hint='add its tokenizer.json, and tokenizer_class = "PreTrainedTokenizerFast" in tokenizer_config.json',
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
