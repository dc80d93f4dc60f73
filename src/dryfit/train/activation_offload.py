"""Keep what checkpointed layers are recomputed from, their inputs, in host memory until the backward pass.

transformers has the same as ``activation_checkpointing_enable(offload=True)`` from some version of 5 on. Up to 5.23 it
asks for pinned memory wherever it runs, and so fails on a machine without an accelerator, where plans are made and
tests run. To be replaced by it when it does not.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from dryfit.core.errors import ConfigError
from dryfit.core.settings.execution import DeviceKind


def cannot_offload_activations(device: DeviceKind, *, processes: int = 1) -> str | None:
    """Return why a trial's activations cannot lie in host memory; None where they can, as far as its model is asked."""
    if processes > 1:
        return "each process of a trial has activations of its own, on its own device"
    return None if device is DeviceKind.CUDA else "on the CPU they lie in host memory already"


def offload_layer_inputs(model: nn.Module) -> list[RemovableHandle]:
    """Copy the tensors that each checkpointed layer is called with to the host, and back when it is recomputed.

    Numbers are copied, so gradients are the same bit for bit. Tensors given by keyword are shared by all layers and
    stay on the device.

    Args:
        model: With activation checkpointing; changed in place.

    Returns:
        What takes the change back.

    Raises:
        ConfigError: None of its layers says that it is checkpointed.
    """
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if layer.gradient_checkpointing]
    if not layers:
        raise ConfigError(
            "keeping activations in host memory",
            f"{type(model).__name__} has no layer that transformers checkpoints by itself",
            allowed="execution.offload_activations = false for this model",
        )
    return [handle for layer in layers for handle in _offloaded(layer)]


def _offloaded(layer: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    running: list[AbstractContextManager[Any]] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        # Inside of the layer, checkpoint's own hooks take every tensor: left to these is what it was called with.
        running.append(save_on_cpu(pin_memory=torch.cuda.is_available()))
        running[-1].__enter__()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop().__exit__(None, None, None)

    return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)
