"""Tensor-parallel plans of the models in a memory-planning request, and their summary as a table."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers.pytorch_utils import Conv1D

from dryfit.core.settings.execution import PlanSubject
from dryfit.core.settings.memory_key import StepKey, step_key
from dryfit.core.settings.weight_formats import base_format, check_sharded
from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.core.sharding.shard_summary import KeptWhole, ShardRow, ShardSummary
from dryfit.parallel.layout.proved_plans import ProvedPlan, proved_plan, stored_plan
from dryfit.parallel.ranks.check import shards_of
from dryfit.tasks.base import Task, TaskModel

_Place = tuple[StepKey, int]


@dataclass(slots=True)
class ShardPlans:
    """Plans by subject and degree, each made once.

    Attributes:
        folder: Where plans are stored, proved and unproved.
        whole_model: Returns a subject's whole model, on the meta device, and its task.
    """

    folder: Path
    whole_model: Callable[[PlanSubject], tuple[TaskModel, Task]]
    _plans: dict[_Place, ShardPlan] = field(default_factory=dict[_Place, ShardPlan])
    _proved: dict[_Place, ShardSummary] = field(default_factory=dict[_Place, ShardSummary])

    def prove(self, subject: PlanSubject, degree: int) -> ShardSummary:
        """Prove a subject's plan and summarise it, without the bytes sent.

        Raises:
            ConfigError: Nothing can be sharded, the degree does not divide it, or the base's format has no slices.
            TraceError: The model's code cannot be traced.
            ShardError: The proof fails.
        """
        place = (step_key(subject), degree)
        if place not in self._proved:
            model, task = self._model(subject)
            proved = proved_plan(model, task, degree, self.folder)
            self._plans[place] = proved.plan
            self._proved[place] = shard_summary(model, proved)
        return self._proved[place]

    def plan(self, subject: PlanSubject, degree: int) -> ShardPlan:
        """Return a subject's plan: the proved one where it was proved here, else one for estimates only.

        Raises:
            ConfigError: Nothing can be sharded, the degree does not divide it, or the base's format has no slices.
            TraceError: The model's code cannot be traced.
        """
        place = (step_key(subject), degree)
        if place not in self._plans:
            self._plans[place] = stored_plan(*self._model(subject), degree, self.folder)
        return self._plans[place]

    def _model(self, subject: PlanSubject) -> tuple[TaskModel, Task]:
        if subject.lora is not None:
            check_sharded(base_format(subject.lora, subject.settings.train))
        return self.whole_model(subject)


def shard_summary(model: nn.Module, proved: ProvedPlan) -> ShardSummary:
    """Summarise how a model is sharded.

    Args:
        model: The whole model; it may be on the meta device.
        proved: Its plan.
    """
    plan, shards = proved.plan, shards_of(model, proved.plan)
    every = dict(model.named_parameters())
    local = {name: shards[name].local_shape(plan.degree) for name in every}
    kinds: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[str]] = {}
    for name in every:
        place = (_starred(name), shards[name].shape, local[name], _how(model, name, shards[name], proved))
        kinds.setdefault(place, []).append(name)
    sharded = [name for name in every if shards[name].dim is not None]
    whole_bytes = sum(one.nbytes for one in every.values())
    return ShardSummary(
        degree=plan.degree,
        weight_bytes=whole_bytes - sum(every[name].nbytes for name in sharded) * (plan.degree - 1) // plan.degree,
        whole_weight_bytes=whole_bytes,
        cut=len(sharded),
        whole=len(every) - len(sharded),
        output_error=proved.proof.output_error,
        gradient_error=proved.proof.gradient_error,
        rows=tuple(
            ShardRow(
                name=name if len(names) > 1 else names[0],
                count=len(names),
                shape=shape,
                local_shape=local_shape,
                how=how,
            )
            for (name, shape, local_shape, how), names in kinds.items()
        ),
        kept_whole=_grouped(plan.whole.items()),
    )


def _starred(name: str) -> str:
    """Return a name with layer numbers replaced by stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _how(model: nn.Module, name: str, shard: ParameterShard, proved: ProvedPlan) -> str:
    """Return how a parameter is sharded, in Megatron's words: by column or row of a linear layer's matrix."""
    if shard.dim is None:
        return "whole, gradients summed" if shard.sum_gradient else "whole"
    path = name.rpartition(".")[0]
    part = model.get_submodule(path)
    if path in proved.plan.modules and proved.plan.modules[path].vocabulary:
        how = "vocabulary"
    elif isinstance(part, nn.Linear | Conv1D):
        outputs_at = len(shard.shape) - 1 if isinstance(part, Conv1D) else 0  # Conv1D's weight is transposed
        how = "column" if shard.dim == outputs_at else "row"
    else:
        how = f"dimension {shard.dim}"
    return f"{how}, {len(shard.blocks)} blocks" if len(shard.blocks) > 1 else how


def _grouped(whole: Iterable[tuple[str, str]]) -> tuple[KeptWhole, ...]:
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, reason in whole:
        reasons.setdefault(reason, {}).setdefault(_starred(name), []).append(name)
    return tuple(
        KeptWhole(
            reason=reason, names=tuple(starred if len(names) > 1 else names[0] for starred, names in kinds.items())
        )
        for reason, kinds in reasons.items()
    )
