"""Rungs that need more devices: the model cut over several ranks, each with its part of the memory.

How many devices a trial takes is the study's decision, so none of these is ever chosen here.
"""

from collections.abc import Callable, Sequence
from typing import Final

from dryfit.core.errors import ConfigError, ShardError, TraceError
from dryfit.core.jobs import PlanAnswer
from dryfit.core.memory import Effect, ExecutionChoice, Rung, VerdictKind
from dryfit.core.plan import ExecutionSettings
from dryfit.core.units import gib
from dryfit.memory.estimate import Device
from dryfit.memory.ladder import capacity_bytes, memory_of, work_of
from dryfit.memory.rungs import Trial, describe, execution_asked, time_factor
from dryfit.memory.source import SegmentSource

DEGREES: Final = (2, 4)
"""How many ranks are looked at."""

Divided = Callable[[int], SegmentSource]
"""The segments of one rank of so many; raises ConfigError, ShardError or TraceError where the model cannot be cut."""


def with_divided(
    answer: PlanAnswer, trial: Trial, wishes: ExecutionSettings, whole: SegmentSource, device: Device, divided: Divided
) -> PlanAnswer:
    """Add to a ladder what each of several devices would need, and to a refusal how many would do.

    Args:
        answer: Its ladder has every rung.
        trial: What is fixed.
        wishes: Only degrees above theirs are looked at.
        whole: Segments of the trial as asked.
        device: What each rank would have.
        divided: Gives a rank's segments.
    """
    if answer.verdict is VerdictKind.UNKNOWN or wishes.dp > 1:
        return answer
    asked = execution_asked(trial, wishes)
    most_bytes = capacity_bytes(wishes, device)
    needs_bytes = memory_of(whole, work_of(trial, asked), device, most_bytes).required_bytes
    choices = [asked, *_smallest(answer)]
    found: list[Rung] = []
    cannot_cut = ""
    for degree in DEGREES:
        if degree <= wishes.tp:
            continue
        try:
            choice, required_bytes = _first_that_fits(choices, trial, divided(degree), device, most_bytes)
        except (ConfigError, ShardError, TraceError) as error:
            cannot_cut = cannot_cut or f"execution.tp = {degree}: {error.found}"
            continue
        also = f"; with {describe(choice, asked)}" if choice != asked else ""
        found.append(
            Rung(
                change=f"execution.tp = {degree}",
                execution=None,
                required_bytes=required_bytes,
                saves_bytes=needs_bytes - required_bytes,
                time_factor=time_factor(choice, asked, trial),
                effect=Effect.NUMERICS,
                fits=required_bytes <= most_bytes,
                devices=degree,
                note=f"on each of {degree} devices{also}",
            )
        )
    fitting = next((rung for rung in found if rung.fits), None)
    reasons = answer.reasons
    if answer.verdict is VerdictKind.REFUSED and fitting is not None:
        reasons = (*reasons, f"{fitting.change} would fit: {gib(fitting.required_bytes)} {fitting.note}")
    return answer.model_copy(update={"ladder": (*answer.ladder, *found), "reasons": reasons, "cannot_cut": cannot_cut})


def _first_that_fits(
    choices: Sequence[ExecutionChoice], trial: Trial, source: SegmentSource, device: Device, most_bytes: int
) -> tuple[ExecutionChoice, int]:
    """The first choice that fits with what it needs, or the one that needs least."""
    priced: list[tuple[ExecutionChoice, int]] = []
    for choice in choices:
        needs_bytes = memory_of(source, work_of(trial, choice), device, most_bytes).required_bytes
        if needs_bytes <= most_bytes:
            return choice, needs_bytes
        priced.append((choice, needs_bytes))
    return min(priced, key=lambda one: one[1])


def _smallest(answer: PlanAnswer) -> list[ExecutionChoice]:
    """Of what was tried, the choice that needs least; state in host memory is for one process alone."""
    own = [
        (rung.required_bytes, rung.execution)
        for rung in answer.ladder
        if rung.execution is not None and not rung.execution.offload_optimizer
    ]
    return [min(own, key=lambda one: one[0])[1]] if own else []
