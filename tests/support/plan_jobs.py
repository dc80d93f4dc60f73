"""Stand-ins for the children of a study that plans: a made-up memory model, and trials that keep to it. No torch.

A trial of batch B and length L needs B x L units of a MiB, half as much with checkpointing. ``head.layers`` makes
planners fail: 6 is unknown, 7 raises, 8 crashes. ``head.hidden = 4242`` makes a trial need twice what was planned.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import ProbeRequest, ProbeResult
from dryfit.settings.errors import ChildFault
from dryfit.settings.execution import ExecutionChoice, Fallback, MemoryPlan, PlanSubject, WorstBatch
from dryfit.settings.jobs import JOBS
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, Effect, PeakAt, StepPhase, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest, PlanResult, RehearsedPlanRequest
from dryfit.settings.training_messages import ResolveRequest, ResolveResult, StopReason, TrainRequest, TrainResult
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import Job
from nvml import Driver

MIB = 2**20
UNKNOWN, RAISES, CRASHES = 6, 7, 8
UNDERESTIMATED = 4242


def use_stand_ins(monkeypatch: Any, *jobs: Job) -> None:
    """Let children of these jobs be stand-ins; a study must run with ``isolation = "fresh"`` to do without torch."""
    for job in jobs:
        monkeypatch.setitem(JOBS, job, JOBS[job]._replace(entry=f"plan_jobs:{job}"))
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def write_study(folder: Path, **tables: dict[str, Any]) -> Path:
    """A study of stand-ins that are real processes, with the keys of these tables as TOML has them."""
    folder.mkdir(parents=True)
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text('{"text": "a", "label": 0}\n', encoding="utf-8")
    known = {
        "study": {"baselines_s": 0},
        "data": {"train": '"train.jsonl"', "validation": '"validation.jsonl"'},
        "search": {"mirror": '"none"'},
        "runtime": {"isolation": '"fresh"', "max_refused_in_a_row": 20},
    }
    lines: list[str] = []
    for table in known | tables:
        keys = known.get(table, {}) | tables.get(table, {})
        lines += [f"[{table}]", *(f"{key} = {value}" for key, value in keys.items())]
    (folder / "study.toml").write_text("\n".join(lines), encoding="utf-8")
    return folder


def needs(rows: int, length: int, *, checkpointing: bool = False) -> int:
    """Bytes of a trial with so many rows in memory at once."""
    return rows * length * MIB // (2 if checkpointing else 1)


def memory(rows: int, length: int, *, checkpointing: bool = False) -> MemoryPlan:
    """The made-up plan of such a trial."""
    size_bytes = needs(rows, length, checkpointing=checkpointing)
    return MemoryPlan(
        peak_allocated_bytes=size_bytes,
        peak_reserved_bytes=size_bytes,
        min_cap_bytes=size_bytes,
        overhead_bytes=0,
        margin_bytes=0,
        required_bytes=size_bytes,
        by_category={},
        by_phase={},
        peak_at=PeakAt(phase=StepPhase.BACKWARD, module="encoder", op="mm"),
        worst_batch=WorstBatch(rows=rows, length=length, from_data=True),
    )


def _choices(batch: int) -> list[ExecutionChoice]:
    whole = ExecutionChoice(micro_batch=batch, accumulation=1)
    less = [batch >> shift for shift in range(batch.bit_length()) if batch >> shift]
    return [
        whole,
        *(ExecutionChoice(micro_batch=rows, accumulation=-(-batch // rows), checkpointing=True) for rows in less),
    ]


def answer(subject: PlanSubject, body: PlanRequest) -> PlanAnswer:
    """The made-up answer."""
    layers = subject.settings.head.layers
    facts: dict[str, Any] = {"device": body.device, "torch": "2.0", "planner_s": 0.25}
    if layers == UNKNOWN:
        return PlanAnswer(verdict=VerdictKind.UNKNOWN, reasons=("aten.made_up in model.py:7",), **facts)
    if layers == RAISES:
        raise KeyError("made up")
    if layers == CRASHES:
        ctypes.string_at(0)
    batch, length = subject.settings.train.batch_size, subject.settings.train.max_length
    choices = _choices(batch)
    needed = [needs(one.micro_batch, length, checkpointing=one.checkpointing) for one in choices]
    fitting = [at for at, size_bytes in enumerate(needed) if size_bytes <= body.device.capacity_bytes]
    if not fitting:
        last = choices[-1]
        ladder = (
            Fallback(
                change=f"checkpointing, micro-batch {batch} -> 1",
                execution=last,
                required_bytes=needed[-1],
                saves_bytes=needed[0] - needed[-1],
                time_factor=2.0,
                effect=Effect.NUMERICS,
                fits=False,
            ),
            Fallback(
                change=f"max length {length} -> 8",
                execution=None,
                required_bytes=needs(1, 8, checkpointing=True),
                saves_bytes=0,
                time_factor=1.0,
                effect=Effect.SEMANTICS,
                fits=needs(1, 8, checkpointing=True) <= body.device.capacity_bytes,
            ),
        )
        return PlanAnswer(
            verdict=VerdictKind.REFUSED,
            memory=memory(batch, length),
            shortfall_bytes=needed[0] - body.device.capacity_bytes,
            ladder=ladder,
            **facts,
        )
    chosen, *rest = (choices[at] for at in fitting)
    return PlanAnswer(
        verdict=VerdictKind.FITS if fitting[0] == 0 else VerdictKind.FITS_WITH,
        memory=memory(chosen.micro_batch, length, checkpointing=chosen.checkpointing),
        execution=chosen,
        fallbacks=tuple(rest),
        eval_batches=tuple(chosen.eval_rows >> shift for shift in range(1, chosen.eval_rows.bit_length())),
        **facts,
    )


def plan(body: PlanRequest, channel: ChildChannel) -> PlanResult:
    """Entry point of stand-in PLAN children."""
    return PlanResult(answers=tuple(answer(subject, body) for subject in body.subjects))


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


OutOfMemoryError.__module__ = "torch"


def runs_out(body: TrainRequest) -> bool:
    """Whether a trial needs more than its limit, by the made-up model."""
    train, limit_bytes = body.config.settings.train, body.plan.memory_limit_bytes
    used = needs(body.plan.micro_batch, train.max_length, checkpointing=body.plan.checkpointing)
    factor = 2 if body.config.settings.head.hidden == UNDERESTIMATED else 1
    return limit_bytes is not None and factor * used > limit_bytes


def result(body: TrainRequest) -> TrainResult:
    """A value that depends on what is learned alone."""
    settings, plan_ = body.config.settings, body.plan
    used = needs(plan_.micro_batch, settings.train.max_length, checkpointing=plan_.checkpointing)
    value = 1.0 / (1.0 + settings.optim.lr + settings.train.batch_size)
    return TrainResult(
        value=value,
        best=0,
        steps=3,
        peak_allocated_bytes=used,
        peak_reserved_bytes=used + MIB,
        peak_rss_bytes=used + 2 * MIB,
    )


def train(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Entry point of stand-in TRAIN children."""
    time.sleep(float(os.environ.get("PLAN_JOBS_PAUSE_S", "0")))
    if runs_out(body):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    reason = channel.stop_requested()
    done = result(body)
    assert done.value is not None
    channel.report(MetricPoint(n=0, step=3, epoch=1.0, value=done.value, metrics={}), timeout_s=60)
    return done.model_copy(update={"stopped_by": reason if reason is StopReason.REQUEST else None})


def resolve(body: ResolveRequest, channel: ChildChannel) -> ResolveResult:
    """Entry point of stand-in RESOLVE children."""
    elsewhere = isinstance(body, ResolveRequest) and body.elsewhere  # a test gives it another job's request
    on_others = {"device": DeviceKind.CUDA, "device_count": 0} if elsewhere else {}
    return resolved().model_copy(update=on_others)


def resolved() -> ResolveResult:
    """A machine without a CUDA device."""
    return ResolveResult(
        data_fingerprint="rows",
        splits={},
        revisions={},
        device=DeviceKind.CPU,
        device_count=1,
        versions={"torch": "2.0"},
    )


def resolve_cuda(body: ResolveRequest, channel: ChildChannel) -> ResolveResult:
    """The same of a machine with one CUDA device, of a GiB."""
    device = DeviceSpec(name="made up", capacity_bytes=1 << 30)
    found = {"device": DeviceKind.CUDA, "device_count": 1, "device_spec": device}
    return resolved().model_copy(update=found)


CARD = DeviceSpec(name="a card", capacity_bytes=1 << 30)


def probe(body: ProbeRequest, channel: ChildChannel) -> ProbeResult:
    """A machine with the card."""
    return ProbeResult(torch="2.0", cuda_build="12", devices=(CARD,))


def rehearse(body: RehearsedPlanRequest, channel: ChildChannel) -> PlanResult:
    """The plan of a user's Trainer with batches of 8: half of one fits; with a dropout of 0.3 nothing does."""
    facts: dict[str, Any] = {"device": body.device, "torch": "2.0", "planner_s": 0.1}
    if body.calling.params["dropout"] == 0.3:
        verdict, short_bytes = VerdictKind.REFUSED, needs(2, 1024) - body.device.capacity_bytes
        refused = PlanAnswer(verdict=verdict, memory=memory(2, 1024), shortfall_bytes=short_bytes, **facts)
        return PlanResult(answers=(refused,))
    fits = PlanAnswer(
        verdict=VerdictKind.FITS_WITH,
        memory=memory(1, 512),
        execution=ExecutionChoice(micro_batch=4, accumulation=2),
        fallbacks=(ExecutionChoice(micro_batch=2, accumulation=4, checkpointing=True),),
        **facts,
    )
    return PlanResult(answers=(fits,))


def train_beside(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """A stand-in TRAIN child. In the first of a study somebody comes to its device and takes nearly all of it."""
    driver = Driver(Path(os.environ["DRYFIT_TEST_DRIVER"]))
    if driver.comes and not driver.came:
        driver.set({os.getppid(): 1000 * MIB})  # the control process: it lives, and is none of the study's children
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 100 MiB")
    return train(body, channel)


def fault(error: Exception) -> ChildFault:
    """What a child's outermost frame would say of an error."""
    names = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__[:-1])
    return ChildFault(names, "", str(error))


Answerer = Callable[[PlanSubject, PlanRequest], PlanAnswer]
