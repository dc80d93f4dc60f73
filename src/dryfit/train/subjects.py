"""What is planned, as the parts of a training step: the model without memory, its loss, its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dryfit.core.choices import BaseFormat, Precision, Task
from dryfit.core.errors import ConfigError, InternalError
from dryfit.core.plan import PlanSubject
from dryfit.core.settings import LoraSettings, TrialSettings
from dryfit.meta.adapters import new_adapter
from dryfit.meta.catalogue import planning_config
from dryfit.meta.configs import set_dropouts
from dryfit.meta.construction import build
from dryfit.meta.pretrained import Kind, make_model, one_stack
from dryfit.tasks.base import Loss
from dryfit.tasks.causal_lm import CausalLm, CausalLmLoss
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, freeze, takes_types
from dryfit.tasks.losses import make_loss
from dryfit.train.model import enable_checkpointing
from dryfit.train.optim import OptimizerPlan, make_optimizer

DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Labels:
    """What there is a label for: each row, each token of it, or each of some classes of it.

    Attributes:
        values: Labels lie from 0 to below this; 0: they are tokens.
        classes: How many a row has of them; 0: one, or where they are tokens, one for each.
    """

    values: int
    classes: int = 0

    def size(self, rows: int, length: int) -> tuple[int, ...]:
        """Dimensions of a batch's labels."""
        if self.classes:
            return rows, self.classes
        return (rows,) if self.values else (rows, length)


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a training step works on.

    Attributes:
        model: On the meta device.
        loss: Loss sum and normaliser.
        inputs: Names of what the model is given, each (rows, length).
        labels: What there is a label for.
        optimizer: Makes the optimizer once the model is on its device.
    """

    model: nn.Module
    loss: Loss
    inputs: tuple[str, ...]
    labels: Labels
    optimizer: Callable[[OptimizerPlan], torch.optim.Optimizer]
    settings: TrialSettings


def step_parts(subject: PlanSubject, *, checkpointing: bool, reentrant: bool) -> StepParts:
    """Build what is planned; nothing takes memory, no weight is read.

    Raises:
        ConfigError: The model is unknown, or has no part that a setting names.
    """
    match subject.task:
        case Task.CRITERIA:
            return _criteria(subject, checkpointing=checkpointing, reentrant=reentrant)
        case Task.CAUSAL_LM:
            return _causal_lm(subject, checkpointing=checkpointing, reentrant=reentrant)
        case Task.OBJECTIVE:
            raise InternalError("building what is planned", f"the task is {subject.task}, which has no model")


def _criteria(subject: PlanSubject, *, checkpointing: bool, reentrant: bool) -> StepParts:
    settings = subject.settings
    config = one_stack(planning_config(settings.model), settings.model, allowed="an encoder")
    regularization = settings.regularization
    set_dropouts(config, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)
    trust = settings.model.trust_remote_code
    encoder = build(lambda: make_model(config, Kind.ENCODER, trust_remote_code=trust))
    if checkpointing:
        enable_checkpointing(encoder, reentrant=reentrant)
    model = build(lambda: EncoderWithHead(encoder, HeadSpec(settings.head, num_outputs=subject.num_labels)))
    freeze(model, regularization.freeze_layers)
    classes = subject.num_labels
    loss = make_loss(
        settings.loss,
        num_labels=classes,
        train_counts=dict.fromkeys(range(classes), 1),
        train_rows=classes + 1,
        multi_label=subject.multi_label,
    )
    labels = Labels(2, classes) if subject.multi_label else Labels(classes)
    inputs = ("input_ids", "attention_mask", *(("token_type_ids",) if takes_types(encoder) else ()))
    return StepParts(model, loss, inputs, labels, partial(make_optimizer, model, settings.optim), settings)


def _causal_lm(subject: PlanSubject, *, checkpointing: bool, reentrant: bool) -> StepParts:
    settings = subject.settings
    config = one_stack(planning_config(settings.model), settings.model, allowed="a decoder")
    set_dropouts(
        config,
        dropout=settings.regularization.dropout,
        attention_dropout=settings.regularization.attention_dropout,
    )
    trust = settings.model.trust_remote_code
    decoder = build(lambda: make_model(config, Kind.CAUSAL_LM, trust_remote_code=trust))
    model = CausalLm(decoder)
    if subject.lora is not None:
        lora = subject.lora
        adapted = new_adapter(decoder, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets)
        model = CausalLm(_frozen_in(adapted, lora))
    if checkpointing:
        enable_checkpointing(decoder, reentrant=reentrant)
    inputs = ("input_ids", "attention_mask")
    return StepParts(model, CausalLmLoss(), inputs, Labels(0), partial(make_optimizer, model, settings.optim), settings)


def _frozen_in(adapted: nn.Module, lora: LoraSettings) -> nn.Module:
    """Give the frozen weights their number format; adapters stay in fp32."""
    if lora.base is BaseFormat.INT8:
        raise ConfigError("planning adapters", "lora.base is int8", "fp32, fp16 or bf16")
    dtype = DTYPES[Precision(lora.base or Precision.FP32)]
    for parameter in adapted.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted
