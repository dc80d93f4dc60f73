"""Child job REHEARSE: plan the memory of what a user's own code trains, by rehearsing it with one change after another.

Each rehearsal has a fresh process. The device is without a limit there, so that one rehearsal tells what is needed.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

from dryfit.processes.channel import ChildChannel
from dryfit.processes.rehearsal_process import RehearsalSurroundings, run_rehearsal
from dryfit.settings.bracket import Tried
from dryfit.settings.errors import ChildError, InternalError
from dryfit.settings.execution import ExecutionChoice, Fallback, MemoryPlan, WorstBatch
from dryfit.settings.files import read_model, write_model
from dryfit.settings.installed import installed_version
from dryfit.settings.ladder import (
    ArgumentChange,
    choice_of,
    climb,
    describe,
    smaller_micro_batches,
    time_factor,
)
from dryfit.settings.memory_terms import DeviceSpec, Effect, StepPhase, VerdictKind
from dryfit.settings.plan_messages import NO_TORCH, NOTHING_TAKEN, PlanAnswer, PlanResult, RehearsedPlanRequest
from dryfit.settings.rehearsal_messages import (
    BATCH,
    CHARACTERS,
    EVALUATION_BATCH,
    ArgumentValue,
    Interval,
    RehearsalAnswer,
    RehearsalMemory,
    RehearsalRequest,
    ScriptEnd,
    SeenArguments,
    run_hours,
)
from dryfit.settings.text import gib
from dryfit.settings.training_messages import ObjectiveRequest
from dryfit.settings.wire import Wire
from dryfit.training.current_trial import Trial
from dryfit.training.objective import beating, may_use_torch

CALL_VARIABLE: Final = "DRYFIT_REHEARSED_CALL"
"""Environment variable of a rehearsal: the file of its :class:`RehearsedCall`."""

Rehearse = Callable[[Mapping[str, ArgumentValue]], RehearsalAnswer]
"""Rehearses one training with these ``TrainingArguments`` in the place of its own."""

_TRAIN: Final = "dryfit.training.trainer_rehearsal:train"
_SCRIPT: Final = "dryfit.training.script_rehearsal:train"
_MOST_SAID: Final = 600
_FRAME, _CODE = '  File "', "    "
"""How lines of a traceback begin that name a place, and those with its code."""


class RehearsedCall(Wire):
    """What a rehearsal's process is told of the trial.

    Attributes:
        calling: The call of the user's function.
        changed: The arguments that a fallback changes.
    """

    calling: ObjectiveRequest
    changed: dict[str, ArgumentValue]


def rehearsed_trial() -> tuple[RehearsedCall, Trial]:
    """Return what this process, which is a rehearsal's, is told of the trial, and the trial itself; nobody hears it."""
    file = Path(os.environ[CALL_VARIABLE])
    call = read_model(file, RehearsedCall)
    if call is None:
        raise InternalError("rehearsing a trial", f"{file} is gone")
    folder = Path(call.calling.checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return call, Trial(call.calling, ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0))


def plan(body: RehearsedPlanRequest, channel: ChildChannel) -> PlanResult:
    """Plan what a user's code trains for one trial. What cannot be rehearsed is answered as unknown."""
    own = body.calling.objective
    if body.is_script and not may_use_torch(own.function, Path(own.paths[0])):
        return PlanResult(answers=(PlanAnswer.unknown(body.device, (NO_TORCH,), installed_version("torch")),))
    calling = body.calling.model_copy(update={"checkpoint_dir": str(channel.folder / "trial")})
    request = RehearsalRequest(
        function=_SCRIPT if body.is_script else _TRAIN,
        device=body.device,
        steps=body.steps,
        unlimited=True,
        timeout_s=body.timeout_s,
        calibration_dir=body.calibration_dir,
        keep_caches=True,  # the trainings that follow use them
        scratch_dir="",
        answer_file="",
    )
    with beating(channel):
        answer = plan_by_rehearsal(Rehearsals(request, calling, channel.folder), body.device, allow=body.allow)
    return PlanResult(answers=(answer,))


@dataclass(slots=True)
class Rehearsals:
    """Rehearses the training of one trial, each time in a fresh process, whose files are removed.

    Attributes:
        request: What is run and how; its places and overrides are set here.
        calling: The trial.
        folder: Where the files of a rehearsal lie meanwhile.
    """

    request: RehearsalRequest
    calling: ObjectiveRequest
    folder: Path
    _number: int = field(default=0, init=False)

    def __call__(self, changed: Mapping[str, ArgumentValue]) -> RehearsalAnswer:
        """Rehearse with changed arguments."""
        self._number += 1
        call = self.folder / f"call-{self._number}.json"
        write_model(call, RehearsedCall(calling=self.calling, changed=dict(changed)), durable=False)
        request = self.request.model_copy(update={"overrides": dict(changed)})
        surroundings = RehearsalSurroundings(os.environ, additions={CALL_VARIABLE: str(call)})
        try:
            return run_rehearsal(request, surroundings, _pass_on, self.folder / f"rehearsal-{self._number}")
        except ChildError as error:
            return RehearsalAnswer(
                verdict=VerdictKind.UNKNOWN, end=ScriptEnd.FAILED, device=request.device, reasons=(str(error),)
            )
        finally:
            call.unlink()


def _pass_on(output: bytes) -> None:
    """Let what a rehearsal prints be in this job's log; a full disk is none of its business."""
    with suppress(OSError):
        os.write(1, output)


def plan_by_rehearsal(rehearse: Rehearse, device: DeviceSpec, *, allow: Literal["exact", "numerics"]) -> PlanAnswer:
    """Find how a training is to be run so that it fits: as it is, or with the first change that is enough.

    Args:
        rehearse: Rehearses it on a device without a limit.
        device: The device that it is to fit on.
        allow: What a change may do to numbers: nothing, or no more than rounding.
    """
    began_s = time.monotonic()
    answer = _answer(rehearse, device, allow=allow)
    return answer.model_copy(update={"planner_s": round(time.monotonic() - began_s, 3)})


def _answer(rehearse: Rehearse, device: DeviceSpec, *, allow: str) -> PlanAnswer:
    own = _with_evaluation(rehearse({}))
    seen, memory = own.training_arguments, _memory(own)
    asked = choice_of(seen)
    answer = partial(
        PlanAnswer,
        device=device,
        confidence=own.confidence,
        torch=own.torch or installed_version("torch"),
        planner_s=0.0,
        hours=_hours(own),
    )
    if memory is None:
        return answer(verdict=VerdictKind.UNKNOWN, reasons=_reasons(own), fallbacks=_with_less(asked, seen, allow))
    if memory.required_bytes <= device.capacity_bytes:
        return answer(
            verdict=VerdictKind.FITS,
            memory=memory,
            execution=asked or ExecutionChoice(micro_batch=max(1, memory.worst_batch.rows), accumulation=1),
            fallbacks=_with_less(asked, seen, allow),
            reasons=_kept_text(own),
        )
    known: dict[ArgumentChange, MemoryPlan] = {}
    failed: list[str] = []

    def rehearse_with(change: ArgumentChange) -> Tried:
        one = _with_evaluation(rehearse(change.values))
        of = _memory(one)
        if of is None:
            failed.append(f"{change}: {'; '.join(_reasons(one))}")
            return Tried(fits=False)
        known[change] = of
        return Tried(of.required_bytes <= device.capacity_bytes, of.required_bytes)

    best = climb(own, rehearse_with, allow=Effect(allow), has_eight_bit=False)
    chosen = None if best is None else choice_of(seen, best)
    return answer(
        verdict=VerdictKind.REFUSED if best is None else VerdictKind.FITS_WITH,
        memory=memory if best is None else known[best],
        execution=chosen,
        fallbacks=_with_less(chosen, seen, allow),
        shortfall_bytes=memory.required_bytes - device.capacity_bytes,
        ladder=tuple(_fallback(change, of, seen, memory, device) for change, of in known.items()),
        reasons=(*_kept_text(own), *failed),
    )


def _hours(answer: RehearsalAnswer) -> Interval | None:
    """Return the hours of a training; None where its steps or their time are not known."""
    run, time = answer.run, answer.work.step_time if answer.work is not None else None
    if run is None or run.steps is None or time is None:
        return None
    return run_hours(time, run.steps, run.batch_share)


def _with_evaluation(answer: RehearsalAnswer) -> RehearsalAnswer:
    """Return an answer with what the evaluation keeps of the batches that were left out."""
    memory = answer.memory
    grown_bytes = _kept_bytes(memory)
    if memory is None or not grown_bytes:
        return answer
    at_end_bytes = memory.by_phase.get(StepPhase.EVALUATE, 0) + grown_bytes
    more_bytes = max(0, at_end_bytes - memory.peak_allocated_bytes)
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "min_cap_bytes", "required_bytes")
    larger = {name: getattr(memory, name) + more_bytes for name in names}
    return answer.model_copy(update={"memory": memory.model_copy(update=larger)})


def _kept_bytes(memory: RehearsalMemory | None) -> int:
    growth = memory.evaluation_growth if memory is not None else None
    return growth.bytes_per_batch * (growth.batches_left_out or 0) if growth is not None else 0


def _kept_text(answer: RehearsalAnswer) -> tuple[str, ...]:
    kept_bytes = _kept_bytes(answer.memory)
    if not kept_bytes:
        return ()
    return (f"its evaluation keeps {gib(kept_bytes)} on the device until its end; eval_accumulation_steps moves them",)


def _memory(answer: RehearsalAnswer) -> MemoryPlan | None:
    """Return what a rehearsal says of memory as a plan; None where it says nothing that can be relied on."""
    memory = answer.memory
    if memory is None or not answer.went_through or answer.verdict is VerdictKind.UNKNOWN or answer.out_of_memory:
        return None
    own = MemoryPlan.model_fields.keys() & RehearsalMemory.model_fields.keys()
    batch = answer.worst_batch
    shapes = {} if batch is None else batch.shapes
    shape = next((shape for name, shape in shapes.items() if shape and name != CHARACTERS), ())
    seen = answer.training_arguments
    rows = shape[0] if shape else seen.whole(BATCH) if seen is not None else 0
    length = shape[1] if len(shape) > 1 else 1
    worst = WorstBatch(rows=rows, length=length, from_data=bool(shape))
    return MemoryPlan(**{name: getattr(memory, name) for name in own}, worst_batch=worst)


def _reasons(answer: RehearsalAnswer) -> tuple[str, ...]:
    """Return why a rehearsal says nothing of memory, with what stands after the frames of its traceback."""
    reasons = answer.reasons or (NOTHING_TAKEN,)
    lines = answer.traceback.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    said = "; ".join(line.strip() for line in after if not line.startswith(_CODE))
    return (*reasons, said[:_MOST_SAID]) if said else reasons


def _with_less(choice: ExecutionChoice | None, seen: SeenArguments | None, allow: str) -> tuple[ExecutionChoice, ...]:
    """Return choices that take less than one that fits, in the order to try where it runs out all the same."""
    if choice is None or seen is None:
        return ()
    less: list[ExecutionChoice] = []
    rows = choice.micro_batch
    for smaller, accumulation in smaller_micro_batches(rows, choice.accumulation) if allow != "exact" else ():
        if smaller <= rows // 2:
            rows = smaller
            less.append(choice.model_copy(update={"micro_batch": rows, "accumulation": accumulation}))
    if seen.checkpointing and not choice.checkpointing:
        less.append((less or [choice])[-1].model_copy(update={"checkpointing": True}))
    return tuple(less)


def _fallback(
    change: ArgumentChange, memory: MemoryPlan, seen: SeenArguments | None, asked: MemoryPlan, device: DeviceSpec
) -> Fallback:
    choice, before = choice_of(seen, change), choice_of(seen)
    words, time = str(change), 1.0
    if seen is not None and choice is not None and before is not None:
        if choice.eval_batch is not None:
            before = before.model_copy(update={"eval_batch": seen.whole(EVALUATION_BATCH)})
        words, time = describe(choice, before), time_factor(choice, before, memory.worst_batch.length)
    return Fallback(
        change=words,
        execution=choice,
        required_bytes=memory.required_bytes,
        saves_bytes=asked.required_bytes - memory.required_bytes,
        time_factor=time,
        effect=change.effect,
        fits=memory.required_bytes <= device.capacity_bytes,
    )
