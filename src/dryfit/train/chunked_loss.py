"""Whether a trial's loss is computed in chunks of tokens, and the task that does so."""

from typing import Final

from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.execution import ExecutionPlan
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.lm.causal_lm import CausalLm
from dryfit.tasks.lm.decoder_tail import cannot_chunk, head_alone, scores_differ
from dryfit.tasks.lm.token_loss import over_tokens

PARTS_OF_WEIGHTS: Final = "with execution.dp over 1 each process holds a part of the weights between two passes"


def costs_time(precision: Precision) -> bool:
    """Whether a loss in chunks takes longer than the whole: in fp16 scores are computed twice."""
    return precision is Precision.FP16


def cannot_chunk_loss(task: Task, model: TaskModel, *, tp: int = 1, dp: int = 1) -> str | None:
    """Why a trial's loss cannot be computed in chunks of tokens; None where it can.

    Args:
        task: The trial's.
        model: Its model, with its adapters, on any device, whole or a rank's; no weight is read.
        tp: Ranks that share its tensors.
        dp: Processes that share its rows.
    """
    if over_tokens(task) is None or not isinstance(model, CausalLm):
        return "its loss is not over the words of a vocabulary"
    if dp > 1:
        return PARTS_OF_WEIGHTS
    if tp > 1 and not head_alone(model.base()):
        # Gradients of other parts may be summed over the ranks by hooks, which would run for a chunk and once more.
        return "with execution.tp over 1 nothing but the head may stand between the layers and the scores"
    return cannot_chunk(model.decoder, model.base())


def loss_in_chunks(task: Task, model: TaskModel) -> Task:
    """Return the task with its loss in chunks.

    Raises:
        ConfigError: The model's scores cannot be computed so.
    """
    reason, over = cannot_chunk_loss(task, model), over_tokens(task)
    if reason is not None or over is None:
        raise _refused(reason or "its loss is not a sum over tokens")
    return over.with_loss_in_chunks()


def as_planned(task: Task, model: TaskModel, plan: ExecutionPlan, precision: Precision) -> Task:
    """Return the task with its loss in chunks where the plan says so; where it is silent, if that costs no time.

    Args:
        task: The trial's.
        model: Its model, with its weights.
        plan: How the trial runs.
        precision: Number format of its forward pass.

    Raises:
        ConfigError: The plan asks for chunks, and the model's scores cannot be computed so.
    """
    if plan.chunked_loss is False or (plan.chunked_loss is None and costs_time(precision)):
        return task
    reason = cannot_chunk_loss(task, model, tp=plan.tp, dp=plan.dp)
    if reason is None:
        assert isinstance(model, CausalLm)
        reason = scores_differ(model.decoder, model.base())
    if reason is None:
        return loss_in_chunks(task, model)
    if plan.chunked_loss:
        raise _refused(reason)
    return task


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        "checking execution.chunked_loss = true", reason, allowed="execution.chunked_loss = false for this trial"
    )
