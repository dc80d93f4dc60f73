"""What a recording says of other devices: its allocations, replayed where there is less room.

A script does the same on all devices of one architecture until one of them refuses an allocation, or the script asks
what distinguishes them (their memory, their name). So far its events are those of any of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.device import VirtualGpu, no_room_text
from dryfit.gpu.script_recorder import LiveAllocations
from dryfit.gpu.summary import StepMark
from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.rehearsal_messages import (
    FAILED_BY_ITSELF,
    NO_STEP_TAKEN,
    OutOfMemory,
    RehearsalAnswer,
    RehearsalMemory,
    ScriptEnd,
    StepWork,
)
from dryfit.settings.text import gib


@dataclass(frozen=True, slots=True)
class Recording:
    """A run that has ended.

    Attributes:
        answer: What was said of it on its own device.
        marks: Ends of the optimizer steps.
        unseen: Why it is not known what the rest of the script takes.
        memory_of: Gives the memory of its events, replayed or as they were.
        work_on: Gives the work of a step on a device.
    """

    gpu: VirtualGpu
    answer: RehearsalAnswer
    marks: Sequence[StepMark]
    unseen: Sequence[str]
    memory_of: Callable[[LiveAllocations, DeviceConstants, int | None], RehearsalMemory | None]
    work_on: Callable[[DeviceSpec], StepWork | None]

    def with_others(self, devices: Sequence[tuple[DeviceSpec, DeviceConstants]]) -> RehearsalAnswer:
        """Return the answer with those of other devices, as far as they are known."""
        asked = [f"the script asks for {what}" + (f" at {line}" if line else "") for what, line in self._asked()]
        if asked:
            return self.answer.model_copy(update={"apart": asked[0]})
        others = [self._on(device, constants) for device, constants in devices]
        return self.answer.model_copy(update={"others": tuple(one for one in others if one is not None)})

    def _asked(self) -> list[tuple[str, str]]:
        errors = self.gpu.out_of_memory
        caught = [("its room, by an out-of-memory error that it catches", one.line) for one in errors if one.caught]
        return [*self.gpu.asked.items(), *caught]

    def _on(self, device: DeviceSpec, constants: DeviceConstants) -> RehearsalAnswer | None:
        """Return the answer on a device; None: another rehearsal has to tell."""
        gpu, run, end = self.gpu, self.gpu.allocations, self.answer.end
        if end is ScriptEnd.OUT_OF_MEMORY or constants.workspace_bytes != gpu.constants.workspace_bytes:
            return None
        room_bytes = device.capacity_bytes - constants.overhead_bytes
        had_room = run.allocator.settings.gc_threshold is None and run.allocator.retries == 0
        there = run if had_room and room_bytes >= run.allocator.asked_bytes else run.again(room_bytes)
        refused = len(there.blocks) < len(run.blocks)
        if there is not run and not refused and gpu.api.shows_counters:
            return None
        error = self._error(there, device, constants) if refused else None
        if error is not None:
            there, enough_bytes = run if had_room else run.again(None), None
        else:
            enough_bytes = room_bytes if end in (ScriptEnd.FINISHED, ScriptEnd.STOPPED) else None
        memory = self._memory(there, constants, enough_bytes)
        verdict, shortfall_bytes, reasons = verdict_of(device, memory, end, self.unseen)
        return self.answer.model_copy(
            update={
                "device": device,
                "memory": memory,
                "verdict": verdict,
                "shortfall_bytes": shortfall_bytes,
                "reasons": reasons,
                "out_of_memory": () if error is None else (error,),
                "work": self.work_on(device),
                "confidence": constants.confidence,
            }
        )

    def _memory(
        self, run: LiveAllocations, constants: DeviceConstants, enough_bytes: int | None
    ) -> RehearsalMemory | None:
        """Return the memory of events; of the run itself, that of its own device with another overhead."""
        memory = self.answer.memory
        if memory is None or run is not self.gpu.allocations or memory.min_cap_bytes > run.allocator.asked_bytes:
            return self.memory_of(run, constants, enough_bytes)
        more_bytes = constants.overhead_bytes - memory.overhead_bytes
        return memory.model_copy(
            update={
                "overhead_bytes": constants.overhead_bytes,
                "nccl_bytes": constants.nccl_bytes,
                "required_bytes": memory.required_bytes + more_bytes,
                "least_bytes": None if memory.least_bytes is None else memory.least_bytes + more_bytes,
            }
        )

    def _error(self, there: LiveAllocations, device: DeviceSpec, constants: DeviceConstants) -> OutOfMemory:
        """Return the error of the first event that a device refuses."""
        run, at = self.gpu.allocations, len(there.blocks)
        label, requested_bytes = run.label_table[run.labels[at]], run.deltas[at]
        capacity_bytes, overhead_bytes = device.capacity_bytes, constants.overhead_bytes
        return OutOfMemory(
            message=no_room_text(there.allocator, capacity_bytes, overhead_bytes, requested_bytes),
            requested_bytes=requested_bytes,
            line=label.line,
            code=self.gpu.places.code_of(label.line),
            source=label.source,
            phase=label.phase,
            step=1 + sum(mark.event <= at for mark in self.marks),
            caught=False,
        )


def verdict_of(
    device: DeviceSpec,
    memory: RehearsalMemory | None,
    end: ScriptEnd,
    unseen: Sequence[str],
    errors: Sequence[OutOfMemory] = (),
    asked_bytes: int = 0,
) -> tuple[VerdictKind, int, tuple[str, ...]]:
    """Return the verdict, the bytes that are missing, and why.

    Args:
        unseen: Why it is not known what the rest of the script takes.
        errors: Out-of-memory errors that the script met.
        asked_bytes: The capacity that the device should have had when the last one was raised.
    """
    verdict, missing_bytes, reasons = _seen_verdict(device, memory, end, errors, asked_bytes)
    if unseen and verdict is not VerdictKind.REFUSED:
        return VerdictKind.UNKNOWN, missing_bytes, tuple(unseen)
    return verdict, missing_bytes, reasons


def _seen_verdict(
    device: DeviceSpec,
    memory: RehearsalMemory | None,
    end: ScriptEnd,
    errors: Sequence[OutOfMemory],
    asked_bytes: int,
) -> tuple[VerdictKind, int, tuple[str, ...]]:
    capacity = device.capacity_bytes
    missing = 0 if memory is None else max(0, memory.required_bytes - capacity)
    match end:
        case ScriptEnd.FAILED:
            return VerdictKind.UNKNOWN, 0, (FAILED_BY_ITSELF,)
        case ScriptEnd.NO_STEP:
            return VerdictKind.UNKNOWN, 0, (NO_STEP_TAKEN,)
        case ScriptEnd.OUT_OF_MEMORY:
            reason = errors[-1].message.partition(". GPU 0")[0]
            return VerdictKind.REFUSED, max(missing, asked_bytes - capacity), (reason,)
        case _ if errors:
            return VerdictKind.FITS, 0, ("the script met out-of-memory errors and went on with less",)
        case _ if memory is not None and (between := memory.between(capacity)) is not None:
            kind, reason = between
            return kind, missing, (reason,)
        case _ if missing and memory is not None:
            return VerdictKind.REFUSED, missing, (f"it needs {gib(memory.required_bytes)}, its margin included",)
        case _:
            return VerdictKind.FITS, 0, ()
