"""Child job PLAN: plan the memory of trials on a device before anything runs on it.

The request's subjects become trials (``plan_trials``); the planner (``plan_answers``) traces their steps and finds the
fallback and, where it may choose, the number of ranks by which each fits.
"""

import os
import time
from pathlib import Path

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs.plan import PlanAnswer, PlanRequest, PlanResult
from dryfit.core.settings.execution import PlanSubject
from dryfit.core.sharding.rank_search import AUTO
from dryfit.core.text.units import gib
from dryfit.core.wire import Phase
from dryfit.jobs.planning.plan_answers import Planner
from dryfit.jobs.planning.plan_trials import PlannedTrials
from dryfit.memory.allocator.settings import AllocatorSettings
from dryfit.memory.planning.constants import device_constants, read_calibrations
from dryfit.memory.planning.estimate import Device
from dryfit.memory.planning.fallbacks import PlannedTrial
from dryfit.memory.planning.trace_store import TraceStore
from dryfit.parallel.layout.device_counts import with_rank_counts
from dryfit.parallel.layout.fsdp_bytes import held_bytes
from dryfit.parallel.layout.proved_plans import PLANS_FOLDER
from dryfit.parallel.layout.shard_plans import ShardPlans
from dryfit.tasks.own import own_source
from dryfit.tasks.registry import task_class
from dryfit.train.optim.optimizer import check_sharded, moments_of
from dryfit.train.rehearsal.subjects import step_parts, whole_model


def plan(body: PlanRequest, channel: ChildChannel) -> PlanResult:
    """Plan every subject of a request. What cannot be traced is answered as unknown.

    Raises:
        ConfigError: A model, a size or an execution setting is impossible.
    """
    torch.set_num_threads(1)
    channel.send(Phase(name="load"))
    body = body.model_copy(update={"subjects": tuple(map(_with_source, body.subjects))})
    for subject in body.subjects:
        check_sharded(subject.settings, body.execution)
    trace_dir = Path(body.trace_dir)
    shards = ShardPlans(trace_dir.parent / PLANS_FOLDER, whole_model)
    planner = Planner(body, _device(body), TraceStore.of_this_code(trace_dir), shards, PlannedTrials(body))
    trials = [planner.trials.of(subject, body.execution) for subject in body.subjects]
    planner.prepare(trials)
    answers: list[PlanAnswer] = []
    for subject, trial in zip(body.subjects, trials, strict=True):
        answers.append(_answer(planner, subject, trial))
        channel.beat()
    return PlanResult(answers=tuple(answers))


def _answer(planner: Planner, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
    """Plan one subject.

    Raises:
        ConfigError: A setting is impossible.
        ShardError: Its model cannot be sharded as the settings say.
        TraceError: Its model's code cannot be followed to shard it.
    """
    began_s, request = time.monotonic(), planner.request
    auto, dp = request.execution.tp == AUTO, request.execution.dp
    answer = planner.on_fewest_ranks(subject, trial) if auto else planner.on_ranks_set(subject, trial)
    if request.several:
        answer = with_rank_counts(
            answer,
            trial,
            request,
            planner.device,
            lambda degree: planner.rank_source(subject, degree),
        )
    if dp > 1:
        answer = answer.model_copy(update={"reasons": (*answer.reasons, _held_text(subject, dp))})
    return answer.model_copy(update={"planner_s": round(time.monotonic() - began_s, 3)})


def _held_text(subject: PlanSubject, processes: int) -> str:
    """Say what each process of an FSDP-sharded trial holds, as far as it is known without a trace."""
    model = step_parts(subject, checkpointing=False, reentrant=False).model
    moments = moments_of(subject.settings.optim)
    held = held_bytes(model.parameters(), rank=0, processes=processes, moments=moments)  # no other process holds more
    total = gib(held.weights_bytes + held.gradients_bytes + held.state_bytes)
    parts = (
        f"weights {gib(held.weights_bytes)}, gradients {gib(held.gradients_bytes)}, "
        f"optimizer state {gib(held.state_bytes)}"
    )
    return (
        f"each of {processes} processes holds {total} between two steps: {parts}; what a step takes beside is not known"
    )


def _with_source(subject: PlanSubject) -> PlanSubject:
    """Add the fingerprint of a user's own task: all studies share traces, and its traces hold for one source alone."""
    source = own_source(task_class(subject.task))
    return subject.model_copy(update={"source": source}) if source else subject


def _device(request: PlanRequest) -> Device:
    """Return the device planned for, with its constants and the settings of its allocator."""
    calibrations = read_calibrations(Path(request.trace_dir).parent)
    return Device(
        spec=request.device,
        constants=device_constants(request.device, torch.__version__, calibrations),
        allocator=AllocatorSettings.of_environment(os.environ, AllocatorSettings.of(request.execution.allocator)),
        torch=torch.__version__,
    )
