"""Run a user's script on a virtual GPU, and say what it took."""

import json
import logging
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import sleep  # the script may replace the module's
from typing import Any, Final, NoReturn

import torch

from dryfit.gpu import driver_tools, muting
from dryfit.gpu.absent_ranks import AbsentGroup
from dryfit.gpu.constants import DeviceConstants, device_constants, read_calibrations
from dryfit.gpu.custom_operators import register
from dryfit.gpu.device import VirtualGpu
from dryfit.gpu.dispatch import NoStandInError
from dryfit.gpu.elsewhere import Recording, verdict_of
from dryfit.gpu.growing import repeat_growing
from dryfit.gpu.loaders import RehearsalDone, Stock
from dryfit.gpu.missing_parts import lack
from dryfit.gpu.offline_import import keep_offline
from dryfit.gpu.own_processes import OwnProcesses
from dryfit.gpu.private_apis.torch_fakes import FakeTensorMode
from dryfit.gpu.script_recorder import LiveAllocations
from dryfit.gpu.shortening import Shortening
from dryfit.gpu.summary import StepMark, evaluation_growth, least_bytes, settled, summarize
from dryfit.gpu.target import add_working_folder, own_code, started
from dryfit.gpu.training_arguments import ArgumentWatch
from dryfit.gpu.viewers import chrome_trace, memory_snapshot
from dryfit.gpu.work import WorkCounter
from dryfit.processes.process import peak_rss_bytes
from dryfit.processes.wall import Places
from dryfit.settings.choices import Wall
from dryfit.settings.errors import TraceError
from dryfit.settings.files import write_model
from dryfit.settings.memory_terms import DeviceSpec, StepPhase
from dryfit.settings.reach_calibrations import calibrated_reach, read_reach_calibrations
from dryfit.settings.rehearsal_messages import (
    SNAPSHOT,
    TRACE,
    FittedReach,
    HostTensors,
    RehearsalAnswer,
    RehearsalMemory,
    RehearsalRequest,
    RunTime,
    ScriptEnd,
)

Finish = Callable[[RehearsalAnswer], None]
"""Takes an answer and ends the process."""
_LIBRARIES: Final = (
    *("transformers", "accelerate", "peft", "trl", "lightning", "bitsandbytes", "deepspeed"),
    *("diffusers", "timm", "liger_kernel"),
)
_one_answer = threading.Lock()
_LACKING = (
    "There was no rule registered for HigherOrderOperator",
    "Torch not compiled with CUDA enabled",
    "Tried to instantiate dummy base class",
    "module 'torch._C' has no attribute",
    "only be called while FakeTensorMode is active",
    "Wait timeout",
    "with arguments from the 'CUDA' backend",
)
"""Words of errors that a device, or a build of torch for one, would not have raised."""
_LOOK_S = 0.2
"""How often a request to end is looked for."""
_SETTLED_S = 0.1
"""After so long nothing is being recorded any more."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The wall that this process is behind, the rehearsal's folders, and where the script writes as it is."""

    wall: Wall
    places: Places
    kept: tuple[Path, ...] = ()
    own: Path = Path()
    """The folder that the process outside of the wall reads."""


def end_with(answer: RehearsalAnswer, file: Path) -> None:
    """Write an answer and end the process, whatever its threads do."""
    _one_answer.acquire()  # for good
    with muting.unmuted():
        write_model(file, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the script left (threads, workers, hooks of torch) must not decide how this ends


def rehearse(request: RehearsalRequest, finish: Finish, behind: Behind) -> None:
    """Run the script of a request in this process, which belongs to it from now on.

    Args:
        finish: Called with the answer, from any thread; it ends the process.

    Raises:
        TraceError: This build of torch cannot do it, or a real device is visible.
    """
    # After a fork torch makes its pool of threads anew when it is first asked: not by threads of autograd at once.
    torch.set_num_threads(torch.get_num_threads())
    keep_offline(hides_devices=True)
    run = _Run(request, finish, behind)
    run.arguments.install()
    with run.gpu.active():
        run.install()
        end, failure = run.run()
        run.gpu.dispatch.categorize()
    run.finish(end, failure)


def stock_of(held: LiveAllocations) -> Stock:
    """Return what is allocated on the device now."""
    repeat = partial(repeat_growing, held)
    return Stock(held.allocator.allocated_bytes, len(held.blocks), held.held_since, held.label_since, repeat)


class _Run:
    """One script on one device."""

    def __init__(self, request: RehearsalRequest, finish: Finish, behind: Behind) -> None:
        self._behind = behind
        self.began_s = time.monotonic()
        self.request = request
        self.ranks = AbsentGroup(request.ranks, lambda kind, size: self.work.sends(kind, size, self.gpu.dispatch.phase))
        constants = self._constants(request.device)
        self.gpu = VirtualGpu(request.device, ranks=request.ranks, unlimited=request.unlimited, constants=constants)
        self.gpu.dispatch.stand_ins.smallest_sizes = request.smallest_sizes
        self.gpu.dispatch.stand_ins.unbounded = {}
        self.arguments = ArgumentWatch(request.overrides)
        self.marks: list[StepMark] = []
        self.notes: list[str] = []
        self.unseen: list[str] = []
        """Why it is not known what the rest of the script takes."""
        held = self.gpu.allocations
        folder = request.calibration_dir
        calibrations = read_reach_calibrations(Path(folder)) if folder else ()
        self.work = WorkCounter(reach=lambda name: calibrated_reach(name, torch.__version__, calibrations))
        self.shortening = Shortening(
            request.steps,
            worst_batch=request.worst_batch,
            on_step_end=self._step_ended,
            on_ignored=lambda: self.finish(ScriptEnd.STOPPED, ""),
            stock=lambda: stock_of(held),
            work=self.work,
            modes=self.gpu.dispatch.modes,
        )
        self.work.ranks = request.ranks
        self.processes = OwnProcesses(
            self.gpu.places.is_own, lambda: bool(self.marks), self.notes.append, self.gpu.begin_afresh
        )
        self.sent: dict[str, int] = {}
        self._has_optimizer = False
        self.host: HostTensors | None = None
        self._give, self._exit = finish, os._exit

    def _constants(self, device: DeviceSpec) -> DeviceConstants:
        folder = self.request.calibration_dir
        constants = device_constants(device, torch.__version__, read_calibrations(Path(folder)) if folder else ())
        return constants.communicating(device, self.request.ranks, max(1, len(self.ranks.groups)))

    def install(self) -> None:
        """Change this process for good, once the virtual GPU is active."""
        logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)  # the script's error says it
        self.muting = muting.install(self._behind.places, self._behind.wall, self.gpu.dispatch.empty, self._behind.kept)
        driver_tools.install(
            self._behind.places.own_behind(self._behind.wall),
            self.request.device,
            torch.cuda.device_count(),
            self.gpu.constants.overhead_bytes,
            self.gpu.note_asked,
        )
        self.shortening.install()
        self._watch_optimizers()
        self.gpu.dispatch.listeners.append(self._count)
        self.gpu.on_launch = self._count_launch
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        self.ranks.install(self.muting.say, self.notes.append)
        self.processes.install()
        self._answer_exits()
        self.gpu.dispatch.listeners.append(self.ranks.note)
        self.gpu.dispatch.listeners.extend(self.shortening.listeners(self.gpu.dispatch))

    def run(self) -> tuple[ScriptEnd, str]:
        """Run the script; return how it ended, with the traceback of a failure."""
        pid, error = os.getpid(), None
        try:
            add_working_folder(self.request)
            self._give_packages()
            self.gpu.places.own = own_code(self.request)
            started(self.request)()
            if not self.marks:  # what a script that has trained did not wait for, does not begin
                self.processes.run_first()
        except BaseException as raised:  # noqa: BLE001  # a user's script may raise anything; KeyboardInterrupt ends it too
            error = raised
        os._exit = self._exit
        if os.getpid() != pid:  # a process that the script has forked ends as it would without us
            raise error or SystemExit
        match error:
            case RehearsalDone():
                return ScriptEnd.STOPPED, ""
            case torch.OutOfMemoryError():
                last = self.gpu.out_of_memory[-1]
                self.gpu.out_of_memory[-1] = last.model_copy(update={"caught": False})
                return ScriptEnd.OUT_OF_MEMORY, _traceback(error)
            case StopIteration() if self.shortening.done:
                return ScriptEnd.STOPPED, ""
            case NoStandInError() | TraceError():
                self.unseen.append(error.found if isinstance(error, TraceError) else str(error))
                return ScriptEnd.STOPPED, _traceback(error)
            case Exception() if any(text in str(error) for text in _LACKING):
                said = str(error).splitlines()[0].partition(" and mode ")[0].partition(". ")[0]  # the mode is ours
                self.unseen.append(f"a virtual GPU cannot follow it: {said}")
                return ScriptEnd.STOPPED, _traceback(error)
            case ImportError():
                self.unseen.append(lack(error))
                return ScriptEnd.FAILED, _traceback(error)
            case None:
                return self._ended(None)
            case SystemExit():
                return self._ended(error.code)
            case _:
                return ScriptEnd.FAILED, _traceback(error)

    def _ended(self, status: Any) -> tuple[ScriptEnd, str]:
        """Return how a script ended that ended itself."""
        if status not in (None, 0):
            return ScriptEnd.FAILED, f"the script ended with exit status {status}"
        return (ScriptEnd.FINISHED if self._was_seen() else ScriptEnd.NO_STEP), ""

    def _answer_exits(self) -> None:
        """Give the answer where the script leaves without a word to Python, as some do at their end."""
        pid = os.getpid()

        def exit_at_once(status: int) -> NoReturn:
            os._exit = self._exit
            if os.getpid() == pid:
                self.gpu.dispatch.categorize()
                self.finish(*self._ended(status))
            self._exit(status)

        os._exit = exit_at_once

    def _give_packages(self) -> None:
        for one in self.request.given:
            if one.endswith(".py"):
                runpy.run_path(one, init_globals={"register": register})
            elif not self.gpu.presence.give(one, "--with"):
                self.notes.append(f"--with {one}: it is installed, so its own code runs")

    def finish(self, end: ScriptEnd, failure: str) -> None:
        """End the process with the answer of a run that has ended."""
        os._exit = self._exit  # the script may still run, in another thread
        answer = self.answer(end, failure)
        with muting.unmuted():
            self._write_views(end)
        self.muting.close()
        self._give(answer)

    def answer(self, end: ScriptEnd, failure: str) -> RehearsalAnswer:
        """Return the answer of a run that has ended."""
        if end is ScriptEnd.FAILED and self._behind.wall is Wall.LANDLOCK:
            self.notes.append("on this machine code in C and started programs can write nothing; did it fail by that?")
        gpu, request = self.gpu, self.request
        gpu.constants = self._constants(request.device)
        self.work.is_compiled = gpu.is_compiled and not gpu.is_traced
        self.work.is_timed = not (gpu.multiplies_unseen or gpu.updates_on_host)
        gpu.allocations.close()  # the garbage collector may free tensors while these are read
        went_through = end in (ScriptEnd.FINISHED, ScriptEnd.STOPPED)
        memory = self._memory(gpu.allocations, gpu.constants, gpu.room_bytes if went_through else None)
        self.unseen += [*gpu.dispatch.conditions.open, *(gpu.dispatch.stand_ins.unbounded or ())]
        alike = self.processes.alike
        if (
            memory is not None
            and alike > request.ranks
            and alike * memory.required_bytes > request.device.capacity_bytes
        ):
            self.unseen.append(f"{alike} processes like the rehearsed one may share the device; --ranks {alike} if not")
        asked = gpu.allocations.allocator.missing_bytes + gpu.constants.overhead_bytes
        verdict, shortfall, reasons = verdict_of(request.device, memory, end, self.unseen, gpu.out_of_memory, asked)
        run = self.shortening.run_time(has_ended=end is ScriptEnd.FINISHED)
        made = RehearsalAnswer(
            verdict=verdict,
            end=end,
            device=request.device,
            ranks=request.ranks,
            ranks_wanted=self.ranks.wanted,
            sized_by_values=gpu.dispatch.stand_ins.sized_by_values,
            memory=memory,
            shortfall_bytes=shortfall,
            out_of_memory=tuple(gpu.out_of_memory),
            work=self.work.work(request.device),
            run=run,
            fitted=self._fitted(run),
            sent=self.sent if request.ranks > 1 else None,
            worst_batch=self.shortening.largest_batch,
            unknown=tuple(gpu.unknown.values()),
            notes=(*gpu.notes, *self.shortening.notes, *self.notes),
            assumed=tuple(gpu.assumed),
            muted=tuple(self.muting.muted),
            wall=self._behind.wall,
            reasons=reasons,
            at_least=not went_through or bool(self.unseen),
            training_arguments=self.arguments.seen,
            traceback=failure,
            confidence=gpu.constants.confidence,
            torch=torch.__version__,
            libraries=_libraries(),
            rehearsal_s=time.monotonic() - self.began_s,
            host_peak_bytes=peak_rss_bytes(),
            host=self.host,
        )
        recording = Recording(gpu, made, self.marks, self.unseen, self._memory, self.work.work)
        return (
            recording.with_others([(one, self._constants(one)) for one in request.others]) if request.others else made
        )

    def _fitted(self, run: RunTime | None) -> FittedReach | None:
        """Return what a measured step says of the device."""
        measured_s = self.request.measured_step_s
        if measured_s is None:
            return None
        share = run.batch_share if run is not None else None
        return self.work.fitted(self.request.device, measured_s, 1.0 if share is None else share)

    def _memory(
        self, run: LiveAllocations, constants: DeviceConstants, enough_bytes: int | None
    ) -> RehearsalMemory | None:
        """Return the memory of the run, or of its events on another device."""
        gpu, categories = self.gpu, self.gpu.dispatch.categories()
        memory = summarize(
            run, categories, self.marks, constants, gpu.places, failed_at=gpu.failed_at, enough_bytes=enough_bytes
        )
        if memory is not None and (gpu.is_compiled or gpu.dispatch.without_formula):
            least = least_bytes(run, categories, constants, is_traced=gpu.is_traced)
            memory = memory.model_copy(update={"least_bytes": min(least, memory.required_bytes)})
        kept = self.shortening.kept_of_batch
        if memory is not None and kept is not None:
            memory = memory.model_copy(update={"evaluation_growth": evaluation_growth(run, kept, gpu.places)})
        return memory

    def _write_views(self, end: ScriptEnd) -> None:
        """Write the files that were asked for, without what the end of the script frees."""
        gpu, own = self.gpu, self._behind.own
        if end is ScriptEnd.OUT_OF_MEMORY:
            until = gpu.failed_at[-1]
        else:
            deltas = gpu.allocations.deltas
            until = len(deltas) - next((freed for freed, delta in enumerate(reversed(deltas)) if delta > 0), 0)
            until = max(until, self.marks[-1].event if self.marks else 0)
        if SNAPSHOT in self.request.views:
            told = memory_snapshot(gpu.allocations, gpu.places, until=until, failures=gpu.failures())
            # The viewer's page reads the protocols 2 to 4; Python 3.14 writes 5.
            (own / SNAPSHOT).write_bytes(pickle.dumps(told, protocol=4))
        if TRACE in self.request.views:
            kinds = settled(gpu.allocations, gpu.dispatch.categories(), gpu.failed_at)
            steps = {mark.number: mark.event for mark in self.marks}
            told = chrome_trace(gpu.allocations, lambda label, block: kinds[label, block].category, steps, until=until)
            (own / TRACE).write_text(json.dumps(told), encoding="utf-8")

    def _was_seen(self) -> bool:
        """Whether a script that has ended has shown what it takes: it trained, or it does not train at all.

        A backward pass is training: a script may change its parameters by hand.
        """
        made = self.gpu.allocations
        if self.marks or any(label.phase is StepPhase.BACKWARD for label in made.label_table):
            return True
        if self._has_optimizer or not made.blocks:
            return False
        self.notes.append("the script makes no optimizer: this is what it takes without training")
        return True

    def _watch_optimizers(self) -> None:
        """Note that the script makes an optimizer: a constructor adds its groups of parameters."""
        run, add = self, torch.optim.Optimizer.add_param_group

        @wraps(add)
        def noted(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            run._has_optimizer = True
            add(self, param_group)

        torch.optim.Optimizer.add_param_group = noted

    def _step_ended(self, number: int) -> None:
        self.marks.append(StepMark(number, len(self.gpu.allocations.blocks)))
        self.gpu.step = number + 1
        self.work.step_ends(is_whole=not self.shortening.evaluating)
        held = self.gpu.dispatch.host
        if held.peak_bytes:
            self.host = HostTensors(
                held_bytes=held.held_bytes, pinned_bytes=held.pinned_bytes, peak_bytes=held.peak_bytes
            )
        self.sent, self.ranks.sent = dict(self.ranks.sent), defaultdict(int)

    def _watch(self, main_thread: int) -> None:
        """End a script that takes too long, whatever it does with signals and exceptions."""
        limit_s = self.request.timeout_s
        self._wait(limit_s)
        if not self.marks:
            self.unseen.append(f"no optimizer took a step within {limit_s:g} s")
            here = traceback.StackSummary.extract(traceback.walk_stack(sys._current_frames()[main_thread]))
            here.reverse()
            stack = "".join(_from_script(here).format())
            self.finish(ScriptEnd.NO_STEP, f"When time was up, the script was here (most recent call last):\n{stack}")
        self._wait(limit_s)
        self._end_now(f"the script was ended after {2 * limit_s:g} s")

    def _wait(self, limit_s: float) -> None:
        """Wait, and end the script where that is asked for meanwhile."""
        last_s = time.monotonic() + limit_s
        while (left_s := last_s - time.monotonic()) > 0:
            if self._behind.places.is_stopped(self._behind.wall):
                self._end_now("the rehearsal was interrupted")
            sleep(min(left_s, _LOOK_S))

    def _end_now(self, why: str) -> None:
        """End the script wherever it is, and say what was seen."""
        self.gpu.allocations.close()
        sleep(_SETTLED_S)
        late = f"{why}, with {len(self.marks)} of {self.shortening.wanted} steps"
        (self.notes if self.shortening.done else self.unseen).append(late)
        self.finish(ScriptEnd.STOPPED if self.marks else ScriptEnd.NO_STEP, "")

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator's work, if it is a part of training."""
        if not self.shortening.evaluating:
            self.work.note(func, args, kwargs, out, self.gpu.dispatch.phase)

    def _count_launch(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        if not self.shortening.evaluating:
            self.work.note_kernel(kernel, tensors, self.gpu.dispatch.phase)


def _traceback(error: BaseException) -> str:
    """Return a traceback that begins at the script."""
    frames = traceback.TracebackException.from_exception(error)
    _from_script(frames.stack)
    return "".join(frames.format())


def _from_script(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Leave out the frames before the script's, in place: ours, and those of whatever called us."""
    ours = str(Path(__file__).parents[1])
    del stack[: next((number for number, frame in enumerate(stack) if frame.filename == __file__), 0)]
    while len(stack) > 1 and (stack[0].filename.startswith(ours) or "runpy" in stack[0].filename):
        del stack[0]
    return stack


def _libraries() -> dict[str, str]:
    """Return the versions of the libraries that were imported; of one that is no distribution none is known."""
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        if name in sys.modules:
            with suppress(PackageNotFoundError):
                found[name] = version(name)
    return found
