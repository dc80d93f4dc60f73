"""A planner with simple arithmetic in place of traces, so that what stands around it can be tested quickly."""

import os
import signal

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, Fallback, MemoryPlan, PlanSubject, WorstBatch
from dryfit.settings.memory_terms import Effect, MemoryCategory, PeakAt, StepPhase, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest, PlanResult

GIB = 2**30
FIXED_BYTES = 2 * GIB
OVERHEAD_BYTES = GIB // 2
KNOWN = ("bert-base-uncased", "bert-large-uncased", "minilm")


def row_bytes(subject: PlanSubject, *, checkpointing: bool) -> int:
    """What a row of a micro-batch takes: 1 GiB for 512 tokens, a quarter with checkpointing."""
    size = subject.settings.train.max_length * GIB // 512
    return size // 4 if checkpointing else size


def memory(subject: PlanSubject, choice: ExecutionChoice, *, from_data: bool = False) -> MemoryPlan:
    """The memory of one choice."""
    activations = choice.micro_batch * row_bytes(subject, checkpointing=choice.checkpointing)
    peak = FIXED_BYTES + activations
    return MemoryPlan(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak + GIB // 4,
        min_cap_bytes=peak,
        overhead_bytes=OVERHEAD_BYTES,
        margin_bytes=0,
        required_bytes=peak + OVERHEAD_BYTES,
        by_category={MemoryCategory.WEIGHTS: FIXED_BYTES, MemoryCategory.ACTIVATIONS: activations},
        by_phase={StepPhase.FORWARD: peak - 1, StepPhase.BACKWARD: peak},
        peak_at=PeakAt(phase=StepPhase.BACKWARD, module="encoder.layer.23.attention", op="aten.mm.default"),
        worst_batch=WorstBatch(rows=choice.micro_batch, length=subject.settings.train.max_length, from_data=from_data),
    )


def choices(subject: PlanSubject, execution: ExecutionSettings) -> list[ExecutionChoice]:
    """The plan as asked, then with checkpointing, then with smaller micro-batches; what is wished for is kept."""
    batch = subject.settings.train.batch_size
    rows = (
        [min(execution.micro_batch, batch)]
        if execution.micro_batch
        else [batch >> n for n in range(batch.bit_length())]
    )
    modes = [False, True] if execution.checkpointing is None else [execution.checkpointing]
    pairs = [(rows[0], mode) for mode in modes] + [(micro, modes[-1]) for micro in rows[1:]]
    return [
        ExecutionChoice(micro_batch=micro, accumulation=-(-batch // micro), checkpointing=mode) for micro, mode in pairs
    ]


def fallback(subject: PlanSubject, choice: ExecutionChoice, asked: MemoryPlan, capacity_bytes: int) -> Fallback:
    needs = memory(subject, choice).required_bytes
    return Fallback(
        change=f"micro-batch {choice.micro_batch}, accumulate {choice.accumulation}",
        execution=choice,
        required_bytes=needs,
        saves_bytes=asked.required_bytes - needs,
        time_factor=1.3,
        effect=Effect.NUMERICS,
        fits=needs <= capacity_bytes,
    )


def answer(subject: PlanSubject, request: PlanRequest) -> PlanAnswer:
    """The answer for one subject."""
    capacity_bytes = request.device.capacity_bytes
    first, *others = choices(subject, request.execution)
    asked = memory(subject, first, from_data=request.tokens is not None)
    ladder = tuple(fallback(subject, choice, asked, capacity_bytes) for choice in others)
    fitting = [choice for choice in (first, *others) if memory(subject, choice).required_bytes <= capacity_bytes]
    if not fitting:
        shorter = Fallback(
            change="train.max_length 512 -> 64",
            execution=None,
            required_bytes=GIB,
            saves_bytes=asked.required_bytes - GIB,
            time_factor=0.2,
            effect=Effect.SEMANTICS,
            fits=GIB <= capacity_bytes,
        )
        return PlanAnswer(
            verdict=VerdictKind.REFUSED,
            device=request.device,
            memory=asked,
            shortfall_bytes=asked.required_bytes - capacity_bytes,
            ladder=(*ladder, shorter) if request.every_fallback else ladder,
            torch="2.13.0",
            planner_s=0.5,
        )
    best = fitting[0]
    return PlanAnswer(
        verdict=VerdictKind.FITS if best == first else VerdictKind.FITS_WITH,
        device=request.device,
        memory=memory(subject, best, from_data=request.tokens is not None),
        execution=best,
        fallbacks=tuple(fitting[1:]),
        ladder=ladder if request.every_fallback else ladder[: others.index(best) + 1 if best in others else 0],
        torch="2.13.0",
        planner_s=0.5,
    )


def plan(body: PlanRequest, channel: ChildChannel) -> PlanResult:
    """Entry point: what a planner would do."""
    for subject in body.subjects:
        name = subject.settings.model.name
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name not in KNOWN and not os.path.isdir(name):
            raise ConfigError(f"looking for the model {name}", "it is unknown", hint=f"did you mean {KNOWN[0]}?")
        channel.beat()
    return PlanResult(answers=tuple(answer(subject, body) for subject in body.subjects))
