"""A private step of transformers' ``from_pretrained``, which a constructor may call while its model is built."""

import inspect
import sys
from typing import Any, Final

from dryfit.core.private_names import PrivateName, PrivateNames

NAMES: Final = (
    PrivateName(
        "transformers.PreTrainedModel._move_missing_keys_from_meta_to_device",
        "keeping tables that a constructor computed, where it calls from_pretrained, which would replace them",
        "from_pretrained leaves alone what is not on meta",
    ),
)

FORGETS: Final = "_move_missing_keys_from_meta_to_device"
"""The function of ``from_pretrained`` that replaces all that is not in its file, tables included, by empty memory."""
_MODULE: Final = "transformers.modeling_utils"


def is_loaded() -> bool:
    """Whether ``from_pretrained`` can be called: importing it for the test alone would take seconds."""
    return _MODULE in sys.modules


def _misbehaves() -> str:
    models: Any = sys.modules[_MODULE]
    forgets = inspect.unwrap(getattr(models.PreTrainedModel, FORGETS))
    if "empty_like" not in forgets.__code__.co_names:
        return f"transformers.PreTrainedModel.{FORGETS} no longer replaces what it takes for missing by empty_like"
    return ""


LOADING: Final = PrivateNames("transformers", NAMES, _misbehaves)
"""For when :func:`is_loaded`."""
