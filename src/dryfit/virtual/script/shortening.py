"""Shorten a script to a few optimizer steps, its evaluation and its saving, largest batch first."""

from collections.abc import Callable
from typing import Any

from dryfit.core.jobs.rehearsal import LargestBatch
from dryfit.virtual.recorder import ScriptRecorder
from dryfit.virtual.script.generated_tokens import LeftOutTokens
from dryfit.virtual.script.loaders import KeptOfBatch, LoaderWatch, Stock
from dryfit.virtual.script.micro_batches import RepeatedMicroBatches
from dryfit.virtual.script.optimizer_steps import OptimizerSteps
from dryfit.virtual.script.repeated_calls import RepeatedCalls
from dryfit.virtual.script.repeated_passes import RepeatedPasses
from dryfit.virtual.script.steps_by_hand import StepsByHand
from dryfit.virtual.script.trainers import end_trainers
from dryfit.virtual.work import WorkCounter


def _nothing(_: int) -> None:
    pass


class Shortening:
    """What ends a script early.

    Args:
        steps: Optimizer steps that are enough.
        worst_batch: Whether to look for the largest batch and train on it first.
        on_step_start: Called with a step's number, from 1, as its optimizer begins.
        on_step_end: Called with it as its optimizer has ended.
        on_ignored: Called where a script that was ended goes on.
        stock: Says what is allocated on the device, to learn what an evaluation keeps of each batch.
        work: Counts the work of micro-batches that are left out, too.
    """

    def __init__(
        self,
        steps: int,
        *,
        worst_batch: bool = True,
        on_step_start: Callable[[int], None] = _nothing,
        on_step_end: Callable[[int], None] = _nothing,
        on_ignored: Callable[[], None] = lambda: None,
        stock: Callable[[], Stock] = Stock,
        work: WorkCounter | None = None,
    ) -> None:
        self._steps = OptimizerSteps(steps, on_step_start, on_step_end, on_ignored)
        self._loaders = LoaderWatch(self._steps, worst_batch=worst_batch, stock=stock)
        work = work or WorkCounter()
        self._micro_batches = RepeatedMicroBatches(work, largest=worst_batch)
        self._tokens = LeftOutTokens(work)
        self._passes = RepeatedPasses(work, stock)
        self._calls = RepeatedCalls(work, lambda: self._steps.number, self._loaders.module_called, self._passes)

    def install(self) -> None:
        """Change this process for good, which belongs to the rehearsal: call it before the script begins.

        The script may be ended by ``RehearsalDone``. One that asks for the next batch by ``next(iterator)`` and does
        not expect an end fails with ``StopIteration``: where :attr:`done` is true then, it was ended, too.
        """
        self._loaders.install()
        self._steps.install(self._loaders.before_step)
        end_trainers(lambda: self._steps.done, self._loaders.goes_past_evaluation)
        self._micro_batches.install()
        self._tokens.install()
        self._calls.install()

    def listeners(self, recorder: ScriptRecorder) -> list[Callable[[Any, Any, Any, Any], None]]:
        """Return what is to be told of each operator on the device."""
        return [StepsByHand(self._steps, recorder).note]

    @property
    def done(self) -> bool:
        """Whether enough steps were made."""
        return self._steps.done

    @property
    def steps(self) -> int:
        """Optimizer steps that have ended."""
        return self._steps.number

    @property
    def evaluating(self) -> bool:
        """Whether the modules that run are evaluating a loader's batch."""
        return self._loaders.evaluating

    @property
    def kept_of_batch(self) -> KeptOfBatch | None:
        """What an evaluation that was cut keeps of each batch; None: nothing."""
        return self._loaders.kept

    @property
    def largest_batch(self) -> LargestBatch | None:
        """The largest batch of the loader that feeds training; None where it was not looked for or is not known."""
        return self._loaders.largest

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out or cut, in words for the answer."""
        repeated, skipped = self._micro_batches.left_out, self._tokens.left_out
        left_out: list[str] = []
        if repeated:
            left_out.append(
                f"{repeated} micro-batches were left out: each takes no more than one before it in its step"
            )
        if skipped:
            left_out.append(f"{skipped} tokens of generated sequences were left out: each takes less than their last")
        if self._calls.left_out:
            left_out.append(
                f"{self._calls.left_out} calls without gradients were left out: each has the shapes of some before it"
            )
        if self._passes.left_out:
            left_out.append(
                f"{self._passes.left_out} forward and backward passes were left out: each has the shapes of some before"
                " it in its step, and began with the same memory"
            )
        if self._tokens.hindrance:
            left_out.append(f"every token of generated sequences is generated: {self._tokens.hindrance}")
        return (*self._loaders.notes, *left_out)
