"""Private steps of transformers' ``from_pretrained``: finding files, choosing the type, filling, what is missing."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from dryfit.core.private_names import PrivateName, PrivateNames

_UNTIL: Final = "from_pretrained takes a source of weights other than files"
NAMES: Final = (
    PrivateName(
        "transformers.PreTrainedModel._move_missing_keys_from_meta_to_device",
        "keeping tables that a constructor computed, where it calls from_pretrained, which would replace them",
        "from_pretrained leaves alone what is not on meta",
    ),
    PrivateName(
        "transformers.modeling_utils._get_resolved_checkpoint_files",
        "a model whose weights are not read needs no files of weights",
        _UNTIL,
    ),
    PrivateName(
        "transformers.modeling_utils._get_dtype", "the same: the type is that of the config, or of a header", _UNTIL
    ),
    PrivateName(
        "transformers.PreTrainedModel._load_pretrained_model",
        "filling a model by its own rules (types, devices, quantisation) with tensors that have no values",
        _UNTIL,
    ),
)

FORGETS: Final = "_move_missing_keys_from_meta_to_device"
"""The function of ``from_pretrained`` that replaces all that is not in its file, tables included, by empty memory."""
_MODULE: Final = "transformers.modeling_utils"
_INITIALISED: Final = "_is_hf_initialized"
_Function = Callable[..., Any]


def is_loaded() -> bool:
    """Whether ``from_pretrained`` can be called: importing it for the test alone would take seconds."""
    return _MODULE in sys.modules


def initialise_again(tensor: torch.Tensor) -> None:
    """Let transformers give a tensor of a loaded model the value that the model's initialiser computes."""
    vars(tensor).pop(_INITIALISED, None)


def replace_steps(models: Any, wrap: Callable[[str, _Function], _Function]) -> None:
    """Replace the steps of ``from_pretrained``.

    Args:
        models: The module ``transformers.modeling_utils``.
        wrap: Given ``files``, ``dtype`` or ``load`` and the step's function, returns another one.
    """
    models._get_resolved_checkpoint_files = wrap("files", models._get_resolved_checkpoint_files)
    models._get_dtype = wrap("dtype", models._get_dtype)
    step = models.PreTrainedModel._load_pretrained_model
    models.PreTrainedModel._load_pretrained_model = staticmethod(wrap("load", step))


def _misbehaves() -> str:
    models: Any = sys.modules[_MODULE]
    forgets = inspect.unwrap(getattr(models.PreTrainedModel, FORGETS))
    if "empty_like" not in forgets.__code__.co_names:
        return f"transformers.PreTrainedModel.{FORGETS} no longer replaces what it takes for missing by empty_like"
    return ""


LOADING: Final = PrivateNames("transformers", NAMES[:1], _misbehaves)
"""For when :func:`is_loaded`."""


def _steps_misbehave() -> str:
    models: Any = sys.modules[_MODULE]
    for function, wanted in (
        (models._get_dtype, ("dtype", "config", "state_dict")),
        (models.PreTrainedModel._load_pretrained_model, ("model", "state_dict", "load_config", "expected_keys")),
    ):
        missing = [name for name in wanted if name not in inspect.signature(function).parameters]
        if missing:
            return f"{function.__qualname__} takes no {missing[0]}"
    return ""


PRETRAINED: Final = PrivateNames("transformers", NAMES[1:], _steps_misbehave)
"""For when ``transformers.modeling_utils`` is imported."""
