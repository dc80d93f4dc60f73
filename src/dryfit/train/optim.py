"""Parameter groups, optimizers and schedules of a trial."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.optimization import Adafactor

from dryfit.core.settings import OptimSettings, SchedSettings
from dryfit.tasks.heads import EncoderWithHead, encoder_parts


def parameter_groups(model: EncoderWithHead, optim: OptimSettings) -> list[dict[str, Any]]:
    """Trainable parameters by learning rate and weight decay.

    The head has ``lr * head_lr_factor``; with depth ``n``, layer ``i`` (from 1) has ``lr * layer_decay**(n + 1 - i)``
    and the embeddings ``lr * layer_decay**(n + 1)`` (ELECTRA's rule, Clark et al. 2020, without its head exponent).
    Norms and biases do not decay.
    """
    parts = encoder_parts(model.encoder) if optim.layer_decay < 1 else None
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = optim.head_lr_factor
        if name.startswith("encoder."):
            depth = parts.depth_of[name.removeprefix("encoder.")] if parts else 0
            factor = optim.layer_decay ** (parts.depth + 1 - depth) if parts else 1.0
        decays = parameter.ndim > 1 and "bias" not in name and "norm" not in name.lower()
        groups.setdefault((factor, optim.weight_decay if decays else 0.0), []).append(parameter)
    return [
        {"params": params, "lr": optim.lr * factor, "weight_decay": decay} for (factor, decay), params in groups.items()
    ]


def make_optimizer(model: EncoderWithHead, optim: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer of a trial, over :func:`parameter_groups`."""
    groups = parameter_groups(model, optim)
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(
                groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=_fused(model)
            )
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)
        case "adafactor":
            # With its own step sizes off, lr is what the study says (Shazeer and Stern 2018, section 8, the rest).
            return Adafactor(groups, lr=optim.lr, scale_parameter=False, relative_step=False, warmup_init=False)


def make_schedule(optimizer: torch.optim.Optimizer, sched: SchedSettings, total_steps: int) -> LRScheduler:
    """The learning rate over a trial's steps."""
    name = "constant_with_warmup" if sched.name == "constant" else sched.name
    warmup_steps = math.ceil(sched.warmup_ratio * total_steps)
    return get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps)


def _fused(model: nn.Module) -> bool:
    """Fused AdamW wherever torch has it for the model's device: one pass over the weights instead of several."""
    return next(model.parameters()).device.type in ("cpu", "cuda")
