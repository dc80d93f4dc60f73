"""Run a user's script on a virtual GPU, and say what it took."""

import resource
import signal
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.jobs.rehearsal import RehearsalAnswer, RehearsalMemory, RehearsalRequest, ScriptEnd
from dryfit.core.text.units import gib
from dryfit.memory.planning.constants import device_constants, read_calibrations
from dryfit.meta.offline_import import import_offline
from dryfit.virtual.gpu import VirtualGpu
from dryfit.virtual.script.absent_ranks import AbsentGroup
from dryfit.virtual.script.optimizer_steps import RehearsalDone
from dryfit.virtual.script.shortening import Shortening
from dryfit.virtual.script.target import add_working_folder, own_file, started
from dryfit.virtual.script.training_arguments import ArgumentWatch
from dryfit.virtual.summary import StepMark, summarize
from dryfit.virtual.work import WorkCounter
from dryfit.virtual.writes import muting


def rehearse(request: RehearsalRequest) -> RehearsalAnswer:
    """Run the script of a request in this process, which belongs to it from now on.

    Raises:
        TraceError: This build of torch cannot do it, or a real device is visible.
    """
    began_s = time.monotonic()
    calibrations = read_calibrations(Path(request.calibration_dir)) if request.calibration_dir else ()
    constants = device_constants(request.device, torch.__version__, calibrations)
    run = _Run(
        request,
        VirtualGpu(
            request.device,
            ranks=request.ranks,
            unlimited=request.unlimited,
            constants=constants,
        ),
    )
    with suppress(ImportError):  # before torch says that there is a device: it would look for CUDA's libraries
        import_offline("bitsandbytes")
    arguments = ArgumentWatch(request.overrides)
    arguments.install()
    with run.gpu.active():
        run.install()
        end, failure = run.run()
        run.gpu.dispatch.categorize()
    answer = run.answer(end, failure)
    run.muting.clear()
    return answer.model_copy(
        update={
            "confidence": constants.confidence,
            "training_arguments": arguments.seen,
            "rehearsal_s": time.monotonic() - began_s,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    )


class _Run:
    """One script on one device."""

    def __init__(self, request: RehearsalRequest, gpu: VirtualGpu) -> None:
        self.request = request
        self.gpu = gpu
        self.marks: list[StepMark] = []
        allocator = gpu.allocations.allocator
        self.work = WorkCounter()
        self.shortening = Shortening(
            request.steps,
            worst_batch=request.worst_batch,
            on_step_end=self._step_ended,
            allocated_bytes=lambda: allocator.allocated_bytes,
            work=self.work,
        )
        self.ranks = AbsentGroup(request.ranks)
        self.sent: dict[str, int] = {}

    def install(self) -> None:
        """Change this process for good, once the virtual GPU is active."""
        self.muting = muting.install(Path(self.request.scratch_dir), self.gpu.dispatch.empty)
        self.shortening.install()
        self.gpu.dispatch.listeners.append(self._count)
        signal.signal(signal.SIGALRM, self._too_late)
        signal.setitimer(signal.ITIMER_REAL, self.request.timeout_s)
        if self.request.ranks > 1:
            self.ranks.install()
            self.gpu.dispatch.listeners.append(self.ranks.note)

    def run(self) -> tuple[ScriptEnd, str]:
        """Run the script; return how it ended, with the traceback of a failure."""
        try:
            add_working_folder(self.request)
            self.gpu.places.own.add(own_file(self.request))
            started(self.request)()
        except RehearsalDone:
            return (ScriptEnd.STOPPED if self.marks else ScriptEnd.NO_STEP), ""
        except SystemExit as error:
            if error.code not in (None, 0):
                return ScriptEnd.FAILED, f"the script ended with exit status {error.code}"
        except torch.OutOfMemoryError as error:
            self._uncaught()
            return ScriptEnd.OUT_OF_MEMORY, _traceback(error)
        except BaseException as error:  # noqa: BLE001  # a user's script may raise anything; KeyboardInterrupt ends it too
            if isinstance(error, StopIteration) and self.shortening.done:
                return ScriptEnd.STOPPED, ""
            return ScriptEnd.FAILED, _traceback(error)
        return (ScriptEnd.FINISHED if self.marks else ScriptEnd.NO_STEP), ""

    def answer(self, end: ScriptEnd, failure: str) -> RehearsalAnswer:
        """Return the answer of a run that has ended."""
        gpu, request = self.gpu, self.request
        went_through = end in (ScriptEnd.FINISHED, ScriptEnd.STOPPED)
        memory = summarize(
            gpu.allocations,
            gpu.dispatch.categories(),
            self.marks,
            gpu.settings,
            gpu.constants,
            failed_at=gpu.failed_at,
            enough_bytes=gpu.room_bytes if went_through else None,
        )
        verdict, shortfall, reasons = _verdict(gpu, memory, end)
        return RehearsalAnswer(
            verdict=verdict,
            end=end,
            device=request.device,
            ranks=request.ranks,
            memory=memory,
            shortfall_bytes=shortfall,
            out_of_memory=tuple(gpu.out_of_memory),
            work=self.work.work(request.device),
            sent=self.sent if request.ranks > 1 else None,
            worst_batch=self.shortening.largest_batch,
            unknown=tuple(gpu.unknown.values()),
            notes=(*gpu.notes, *self.shortening.notes),
            muted=tuple(self.muting.muted),
            reasons=reasons,
            traceback=failure,
            torch=torch.__version__,
        )

    def _step_ended(self, number: int) -> None:
        self.marks.append(StepMark(number, len(self.gpu.allocations.blocks)))
        self.gpu.step = number + 1
        self.work.step_ends()
        self.sent, self.ranks.sent = dict(self.ranks.sent), defaultdict(int)

    def _too_late(self, _signal: int, _frame: object) -> None:
        if not self.marks:
            raise RehearsalDone

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator's work, if it is a part of training."""
        if not self.shortening.evaluating:
            self.work.note(func, args, kwargs, out)

    def _uncaught(self) -> None:
        last = self.gpu.out_of_memory[-1]
        self.gpu.out_of_memory[-1] = last.model_copy(update={"caught": False})


def _verdict(
    gpu: VirtualGpu, memory: RehearsalMemory | None, end: ScriptEnd
) -> tuple[VerdictKind, int, tuple[str, ...]]:
    """Return the verdict, the bytes that are missing, and why."""
    capacity = gpu.spec.capacity_bytes
    missing = 0 if memory is None else max(0, memory.required_bytes - capacity)
    match end:
        case ScriptEnd.FAILED:
            return VerdictKind.UNKNOWN, 0, ("the script failed by itself",)
        case ScriptEnd.NO_STEP:
            return VerdictKind.UNKNOWN, 0, ("no optimizer took a step",)
        case ScriptEnd.OUT_OF_MEMORY:
            asked = gpu.allocations.allocator.missing_bytes + gpu.constants.overhead_bytes
            reason = gpu.out_of_memory[-1].message.partition(". GPU 0")[0]
            return VerdictKind.REFUSED, max(missing, asked - capacity), (reason,)
        case _ if gpu.out_of_memory:
            return VerdictKind.FITS, 0, ("the script met out-of-memory errors and went on with less",)
        case _ if missing and memory is not None:
            return VerdictKind.REFUSED, missing, (f"it needs {gib(memory.required_bytes)}, its margin included",)
        case _:
            return VerdictKind.FITS, 0, ()


def _traceback(error: BaseException) -> str:
    """Return a traceback that begins at the script."""
    frames = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parents[1])
    while len(frames.stack) > 1 and (frames.stack[0].filename.startswith(ours) or "runpy" in frames.stack[0].filename):
        del frames.stack[0]
    return "".join(frames.format())
