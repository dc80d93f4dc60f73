"""Subjects whose models are sharded over ranks, planned in this process; a sharded model of theirs with weights."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from dryfit.gpu.slots import Slot, put_all
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import ExecutionSettings, PlanSubject, adapters
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.tables import TrialSettings
from dryfit.training.plan_job import plan

GIB = 2**30
CPU = DeviceSpec(name="the CPU", kind=DeviceKind.CPU, capacity_bytes=64 * GIB)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


class Quiet:
    """The channel of a child that nobody listens to."""

    def send(self, message: Any) -> None:
        """Say nothing."""

    def beat(self) -> None:
        """Give no sign of life."""


def config(folder: Path, kind: str = "bert", **changes: Any) -> Path:
    """A folder with a config alone: what planning reads."""
    own: dict[str, Any] = {"llama": {"num_key_value_heads": 2}}.get(kind, {})
    AutoConfig.for_model(kind, **{**SIZES, "pad_token_id": 0, **own, **changes}).save_pretrained(folder)
    return folder


def subject(model: Path, task: BuiltInTask = BuiltInTask.CRITERIA, **tables: Any) -> PlanSubject:
    """What is planned, with the keys of these tables; without adapters, unless they say so."""
    usual = {"train": {"batch_size": 8, "max_length": 32}, "lora": {"r": 0}}
    both = {name: {**usual.get(name, {}), **tables.get(name, {})} for name in (*usual, *tables)}
    settings = TrialSettings.model_validate_json(json.dumps({"model": {"name": str(model)}, **both}))
    return PlanSubject(task=task, settings=settings, lora=adapters(task, settings))


def planned(
    what: PlanSubject,
    cache: Path,
    *,
    device: DeviceSpec = CPU,
    every_fallback: bool = False,
    degrees: tuple[int, ...] = (),
    host_bytes: int | None = None,
    **execution: Any,
) -> PlanAnswer:
    """What the child job answers."""
    body = PlanRequest(
        subjects=(what,),
        device=device,
        execution=ExecutionSettings.model_validate_json(json.dumps(execution)),
        trace_dir=str(cache / "traces"),
        every_fallback=every_fallback,
        degrees=degrees,
        host_bytes=host_bytes,
    )
    result = plan(body, Quiet())  # pyright: ignore[reportArgumentType]
    return result.answers[0]


def with_weights(model: nn.Module) -> nn.Module:
    """Random numbers in place of tensors that hold nothing."""
    generator = torch.Generator().manual_seed(1)

    def drawn(slot: Slot) -> torch.Tensor:
        old = slot.tensor
        if not old.is_floating_point():
            return torch.arange(old.numel(), dtype=old.dtype).reshape(old.shape) % 8
        return torch.randn(old.shape, generator=generator).mul(0.1).to(old.dtype)

    put_all(model, drawn)
    return model
