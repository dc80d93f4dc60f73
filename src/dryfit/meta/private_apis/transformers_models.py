"""Private names of transformers about a model's own declarations: types, computed and useless keys."""

from collections.abc import Collection
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # keeping in fp32 what an architecture wants in fp32; until: models say by a public name which weights these
    # are
    "transformers.PreTrainedModel._get_dtype_plan",
    # knowing tables that are right as the constructor computes them; until: models say by a public name which
    # keys they compute themselves
    "transformers.PreTrainedModel._keys_to_ignore_on_load_missing",
    # knowing keys that an architecture has no use for; until: models say by a public name which keys they
    # compute themselves
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected",
    # computing experts one after the other in fp64, which their fused kernel does not know; until:
    # set_experts_implementation leaves other models as they are
    "transformers.PreTrainedModel._can_set_experts_implementation",
)


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Collection[str]:
    """Patterns of the weights that an architecture wants in fp32 although the model is in this type."""
    return model._get_dtype_plan(dtype)


def computed_keys(module: nn.Module) -> Collection[str]:
    """Parts of the names of tables that a checkpoint may lack; none for what is no model of transformers."""
    return getattr(module, "_keys_to_ignore_on_load_missing", None) or ()


def useless_keys(model: PreTrainedModel) -> tuple[str, ...]:
    """Patterns of keys that an architecture has no use for."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def chooses_experts(model: PreTrainedModel) -> bool:
    """Whether a model has experts that can be computed one after the other."""
    return model._can_set_experts_implementation()


class _Probe(PreTrainedModel):
    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self._keep_in_fp32_modules_strict = ["norm"]
        self._keys_to_ignore_on_load_missing = ["table"]
        self._keys_to_ignore_on_load_unexpected = ["old"]
        self.post_init()


def _misbehaves() -> str:
    model = _Probe()
    if set(kept_in_fp32(model, torch.float16)) != {"norm"} or set(kept_in_fp32(model, torch.float32)):
        return "transformers.PreTrainedModel._get_dtype_plan does not give the weights that a model keeps in fp32"
    if set(computed_keys(model)) != {"table"} or set(useless_keys(model)) != {"old"}:
        return "a model does not have the _keys_to_ignore_on_load lists of its class"
    if chooses_experts(model) is not False:
        return "transformers.PreTrainedModel._can_set_experts_implementation finds experts in a model without"
    return ""


MODELS: Final = PrivateNames("transformers", NAMES, _misbehaves)
