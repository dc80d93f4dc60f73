"""The note added to an error that ends training: its step, rows and configuration, and never a row's text."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import final

from dryfit.core.settings.execution import DeviceKind
from dryfit.parallel.layout.portions import Portion
from dryfit.tasks.guard import BatchGuard
from dryfit.train.run import TrialParts


@final
class ErrorContext(AbstractContextManager[None]):
    """Keeps track of where a run is, and adds that as a note to an exception that leaves the block.

    The batch is kept on the host, so the note never asks a device, which may be dead by then.

    Args:
        parts: The run.
        guards: Of its splits: each knows the batch it checked last.
    """

    def __init__(self, parts: TrialParts, *guards: BatchGuard) -> None:
        self._parts = parts
        self._guards = guards
        self._portions: Sequence[Portion] = ()
        self._micro = 0
        self.step = 0

    def begin_batch(self, step: int, portions: Sequence[Portion]) -> None:
        """The gradients of a step are computed from now on, portion by portion; steps count from 1."""
        self.step, self._portions, self._micro = step, portions, 0

    def end_micro_batches(self) -> None:
        """All of the batch went through the model."""
        self._micro = 0

    def end_batch(self) -> None:
        """Forget the batch."""
        self._micro = 0
        for guard in self._guards:
            guard.forget()

    def begin_micro_batch(self) -> None:
        """The next micro-batch of the step goes through the model from now on."""
        self._micro += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the note; the exception goes on."""
        if error is not None:
            with suppress(OSError, RuntimeError, ValueError, LookupError):  # it must not take the error's place
                error.add_note(self.text())

    def text(self) -> str:
        """Return where the run is, in words."""
        config, plan = self._parts.request.config, self._parts.request.plan
        batches = [text for text in (guard.describe(self._current_rows()) for guard in self._guards) if text]
        searched = ", ".join(f"{key} = {value}" for key, value in config.params.items())
        micro = f", micro-batch {self._micro} of {len(self._portions)}" if self._exact and self._micro else ""
        place = (
            f"at optimizer step {self.step} of {self._parts.last_step}{self._parts.position}{micro if batches else ''}"
        )
        how = f"{plan.effective_batch} rows a step, {plan.micro_batch} at once, seed {config.seed}"
        trial = f"trial {config.number}: {searched or 'nothing searched'}"
        return "\n".join([place, *batches, trial, f"on {plan.device} in {config.settings.train.precision}, {how}"])

    @property
    def _exact(self) -> bool:
        """Whether the host is where the device is: elsewhere it may be some micro-batches ahead."""
        return self._parts.request.plan.device is DeviceKind.CPU or self._parts.request.diagnostic

    def _current_rows(self) -> slice:
        """Return the rows of the current micro-batch, or of the whole batch where that is not known."""
        if not (self._exact and self._micro):
            return slice(None)
        portion = self._portions[self._micro - 1]
        return slice(portion.first, portion.first + portion.rows)
