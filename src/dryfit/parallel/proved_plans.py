"""Tensor-parallel plans of models: made, proved, stored, and summed up in a table."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dryfit.meta.construction import build
from dryfit.meta.filling import unwrapped
from dryfit.meta.pretrained import Kind, make_model
from dryfit.parallel.apply import shards_of
from dryfit.parallel.capture import Inputs
from dryfit.parallel.collectives import Ranks
from dryfit.parallel.narrow import Narrowing, WideModel, narrow_config, prove_plan, random_tokens
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import MAX_PROOF_BYTES
from dryfit.parallel.vocabulary_loss import VocabularyLoss
from dryfit.settings.execution import PlanSubject, WeightFormat, base_format, check_sharded
from dryfit.settings.files import read_cached, write_cached
from dryfit.settings.memory_key import StepKey, step_key
from dryfit.settings.sharding import KeptWhole, ParameterShard, ShardPlan, ShardProof, ShardRow, ShardSummary
from dryfit.settings.tables import ModelSettings, Settings
from dryfit.settings.version import PACKAGE_FOLDER, code_fingerprint
from dryfit.settings.wire import digest
from dryfit.tasks.base import Batch, MakeBase, Task, TaskModel
from dryfit.tasks.guard import model_bounds
from dryfit.tasks.lm_loss import over_tokens

# Make, prove and store the tensor-parallel plan of a trial's model, once for each model and degree.


PLANS_FOLDER = "shards"
"""Folder of stored plans, beside a study's tokens or the planner's traces."""


_ROWS, _LENGTH = 3, 12
_POSITIONS = "position_ids"


class ProvedPlan(Settings):
    """A plan and its proof."""

    plan: ShardPlan
    proof: ShardProof


def proved_plan(
    model: TaskModel, task: Task, degree: int, folder: Path, *, most_bytes: int = MAX_PROOF_BYTES
) -> ProvedPlan:
    """Return the proved plan of a trial's model, head and adapters included; a stored one where there is one.

    A model that is too wide to be proved itself is proved on a narrower one of its class, which the task makes from
    narrower configs; ``proof.narrowed`` says so.

    Args:
        model: The whole model, which may be on the meta device; weights are not read.
        task: Makes the model, and knows its inputs.
        degree: Number of ranks.
        folder: Where plans are stored, under a key of everything that decides them.
        most_bytes: Memory that the proof may take.

    Raises:
        ConfigError: Nothing can be sharded, or the degree does not divide it.
        TraceError: The model's code cannot be followed.
        ShardError: The plan computes something else than the model, or the proof would take too much memory.
    """
    path = folder / f"{_key(model, task, degree)}.json"
    kept = read_cached(path, ProvedPlan)
    if kept is not None:
        return kept
    plan = shard_plan(model, task, degree)
    made = ProvedPlan(plan=plan, proof=_proved(WideModel(model, plan, traced_inputs(model, task)), task, most_bytes))
    write_cached(path, made)
    return made


def shard_plan(model: TaskModel, task: Task, degree: int) -> ShardPlan:
    """Plan how a trial's model is sharded, without a proof: for estimates, never for training.

    Raises:
        ConfigError: Nothing can be sharded, or the degree does not divide it.
        TraceError: The model's code cannot be followed.
    """
    return plan_shards(model, degree, inputs=traced_inputs(model, task), loss_over_ranks=over_tokens(task) is not None)


def with_sharded_loss(task: Task, plan: ShardPlan, ranks: Ranks) -> Task:
    """Return the task as a rank trains it: with its loss computed over the ranks where scores stay sharded."""
    if plan.scores is None:
        return task
    needs_a_sum = over_tokens(task)
    assert needs_a_sum is not None  # the plan was made for it
    return needs_a_sum.with_token_loss(VocabularyLoss(ranks, plan.vocabulary))


def stored_plan(model: TaskModel, task: Task, degree: int, folder: Path) -> ShardPlan:
    """Return the stored plan, proved or not, or make and store one by :func:`shard_plan`.

    Args:
        model: As in :func:`proved_plan`.
        task: Makes the model.
        degree: Number of ranks.
        folder: Where plans are stored.

    Raises:
        ConfigError: Nothing can be sharded, or the degree does not divide it.
        TraceError: The model's code cannot be followed.
    """
    key = _key(model, task, degree)
    proved = read_cached(folder / f"{key}.json", ProvedPlan)
    path = folder / f"{key}.unproved.json"
    plan = proved.plan if proved is not None else read_cached(path, ShardPlan)
    if plan is None:
        plan = shard_plan(model, task, degree)
        write_cached(path, plan)
    return plan


def traced_inputs(model: TaskModel, task: Task) -> Inputs:
    """Return a function of rows and length that gives the model's inputs for a trace, on the meta device."""
    return lambda rows, length: _inputs(model, task, rows, length, _on_meta)


def _proved(wide: WideModel, task: Task, most_bytes: int) -> ShardProof:
    return prove_plan(
        wide,
        lambda step: task.model(_narrow_bases(wide, step)),
        lambda model: _sample(model, task) if isinstance(model, TaskModel) else {},
        most_bytes=most_bytes,
    )


def _narrow_bases(wide: WideModel, step: Narrowing) -> MakeBase:
    """Return a maker of narrow models, without weights, in place of a model's pretrained parts."""
    assert isinstance(wide.module, TaskModel)
    parts = wide.module.pretrained()

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del frozen
        if part not in parts:
            raise wide.refused(f"the task asks for a pretrained model {part!r}", f"one of {sorted(parts)}")
        config = narrow_config(parts[part].config, wide.plan.degree, step)
        narrow = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code))
        dtypes = {unwrapped(name): one.dtype for name, one in parts[part].named_parameters()}
        for name, parameter in narrow.named_parameters():  # casts are among the operators that are compared
            parameter.data = parameter.data.to(dtypes[name])
        return narrow

    return make


def _key(model: TaskModel, task: Task, degree: int) -> str:
    """Return a key of everything that a plan depends on: code, architecture, sizes, number of ranks."""
    facts = {
        "code": (code_fingerprint(PACKAGE_FOLDER), torch.__version__, transformers.__version__),
        "degree": degree,
        "inputs": task.inputs,
        "loss over ranks": over_tokens(task) is not None,
        "models": {part: base.config.to_json_string(use_diff=False) for part, base in model.pretrained().items()},
        "modules": [f"{name} {type(part).__qualname__}" for name, part in model.named_modules()],
        "parameters": [f"{name} {tuple(one.shape)}" for name, one in model.named_parameters(remove_duplicate=False)],
    }
    return digest(facts, 24)


def _on_meta(_name: str, size: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(size, dtype=torch.long, device="meta")


def _inputs(
    model: TaskModel, task: Task, rows: int, length: int, make: Callable[[str, tuple[int, ...]], torch.Tensor]
) -> Batch:
    """Return the model's inputs; positions in packed sequences are left out, they do not change how it is sharded."""
    sizes = task.batch_sizes(rows, length, segments=model.takes_types)
    return {name: make(name, sizes[name]) for name in task.inputs if name in sizes and name != _POSITIONS}


def _sample(model: TaskModel, task: Task) -> Batch:
    """Return a batch to prove a plan with: random tokens without padding, all in the first segment."""
    generator = torch.Generator().manual_seed(0)
    words = model_bounds(model).tokens or 2
    return _inputs(model, task, _ROWS, _LENGTH, lambda name, size: random_tokens(name, size, words, generator))


# Tensor-parallel plans of the models in a memory-planning request, and their summary as a table.


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
