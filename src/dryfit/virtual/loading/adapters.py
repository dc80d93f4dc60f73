"""Adapters of PEFT and models of timm, whose weights are neither fetched nor read."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from dryfit.virtual.import_hooks import rebind
from dryfit.virtual.loading.tensor_classes import Make


class UnreadWeights(dict[str, torch.Tensor]):
    """The weights of a file that was not opened.

    Args:
        device: Where they were to be.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class _Loaded(NamedTuple):
    """What ``load_state_dict`` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def install_peft(peft: Any, make: Make) -> None:
    """Let PEFT load adapters without their files; their config is read.

    Args:
        peft: The module ``peft.peft_model``.
        make: Makes a fake.
    """
    set_weights = peft.set_peft_model_state_dict

    def unread(model_id: str, device: Any = None, *_args: Any, **_options: Any) -> UnreadWeights:
        return UnreadWeights(torch.device(peft.infer_device() if device is None else device))

    @wraps(set_weights)
    def set_unread(model: nn.Module, weights: Any, adapter_name: str = "default", *args: Any, **options: Any) -> Any:
        if isinstance(weights, UnreadWeights):
            if not options.get("low_cpu_mem_usage"):
                return _Loaded([], [])
            # The adapter was built on the meta device; PEFT puts it where the weights below it lie.
            own = peft.get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
            weights = {name: make(one.shape, one.dtype, weights.device, False) for name, one in own.items()}
        return set_weights(model, weights, adapter_name, *args, **options)

    rebind(peft.load_peft_weights, unread)
    rebind(set_weights, set_unread)


def install_timm(timm: ModuleType) -> None:
    """Let ``timm.create_model`` fetch no weights.

    Args:
        timm: The package.
    """
    create: Callable[..., Any] = vars(timm)["create_model"]

    @wraps(create)
    def without_weights(model_name: str, *args: Any, **options: Any) -> Any:
        options.pop("pretrained", None)
        return create(model_name, *((False, *args[1:]) if args else ()), **options)

    rebind(create, without_weights)
