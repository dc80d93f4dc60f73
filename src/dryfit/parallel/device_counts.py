"""Plan a trial on several devices: fallbacks to name, and the number that ``execution.tp = "auto"`` takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from dryfit.plans.estimate import Device, SegmentSource
from dryfit.plans.ladder import PlannedTrial, execution_asked, memory_of, work_of
from dryfit.settings.errors import ConfigError, ShardError, TraceError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, Fallback
from dryfit.settings.ladder import describe, time_factor
from dryfit.settings.memory_terms import Effect, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.text import gib

NAMED_COUNTS: Final = (2, 4)
"""Numbers of devices to name where the machine's is not known."""

Found = TypeVar("Found")

RankSegments = Callable[[int], SegmentSource]
"""Returns a rank's segments, given the degree; ConfigError, ShardError or TraceError: the model cannot be sharded."""


def with_rank_counts(
    answer: PlanAnswer, trial: PlannedTrial, body: PlanRequest, device: Device, rank_segments: RankSegments
) -> PlanAnswer:
    """Add to an answer's ladder the need of each of several devices, and to a refusal how many suffice.

    Unless every fallback is asked for, this is done for refusals alone, and for each degree only the smallest choice
    that was tried is traced. The first that fits ends the search.

    Args:
        answer: The answer so far; degrees in its ladder are left out.
        trial: What is fixed.
        body: The request: only degrees above its own are tried.
        device: The device of each rank.
        rank_segments: Returns a rank's segments.
    """
    execution, every_fallback = body.execution, body.every_fallback
    refused = answer.verdict is VerdictKind.REFUSED
    if answer.memory is None or not (refused or every_fallback):
        return answer
    asked = execution_asked(trial, execution)
    most_bytes = execution.limited(device.spec).capacity_bytes
    needs_bytes = required_as_asked(answer)
    smallest = _smallest(answer, asked)
    choices = list(dict.fromkeys((asked, smallest))) if every_fallback else [smallest]
    known = max(execution.ranks, *(fallback.devices for fallback in answer.ladder), 1)

    def on_ranks(degree: int) -> Fallback:
        source, of_ranks = rank_segments(degree), device.of_ranks(degree)
        choice, required_bytes = _first_that_fits(choices, trial, source, of_ranks, most_bytes)
        return _ranks_fallback(
            degree,
            required_bytes,
            needs_bytes,
            fits=required_bytes <= most_bytes and _host_has(degree * required_bytes, body.host_bytes),
            time=time_factor(choice, asked, trial.lengths.longest),
            also=f"; with {describe(choice, asked)}" if choice != asked else "",
        )

    degrees = [degree for degree in NAMED_COUNTS if degree > known]
    found, why_not = until_fits(degrees, on_ranks, lambda _, one: one.fits and not every_fallback)
    fitting = next((fallback for fallback in found.values() if fallback.fits), None)
    reasons = answer.reasons
    if refused and fitting is not None:
        reasons = (*reasons, f"{fitting.change} would fit: {gib(fitting.required_bytes)} {fitting.note}")
    ladder, cannot_shard = (*answer.ladder, *found.values()), answer.cannot_shard or next(iter(why_not), "")
    return answer.model_copy(update={"ladder": ladder, "reasons": reasons, "cannot_shard": cannot_shard})


def fits_on(answer: PlanAnswer, ranks: int, host_bytes: int | None) -> bool:
    """Whether a trial fits on several ranks.

    Args:
        answer: The answer about one of them.
        ranks: Number of ranks.
        host_bytes: Host memory for all ranks together; None: it does not count.
    """
    memory = answer.memory if answer.verdict.fits else None
    return memory is not None and _host_has(ranks * memory.required_bytes, host_bytes)


def until_fits(
    degrees: Iterable[int], on_ranks: Callable[[int], Found], fits: Callable[[int, Found], bool]
) -> tuple[dict[int, Found], list[str]]:
    """Plan a trial on more and more ranks, until it fits.

    Args:
        degrees: Numbers of ranks.
        on_ranks: Plans one of them.
        fits: Whether what was found of so many ranks ends the search.

    Returns:
        What was found by number of ranks, and why it cannot be sharded over others.
    """
    found: dict[int, Found] = {}
    reasons: list[str] = []
    for ranks in sorted(degrees):
        try:
            found[ranks] = on_ranks(ranks)
        except (ConfigError, ShardError, TraceError) as error:
            reasons.append(f"{_ranks(ranks)}: {error.found}")
            continue
        if fits(ranks, found[ranks]):
            break
    return found, reasons


def answer_on_ranks(
    one: PlanAnswer, several: PlanAnswer, ranks: int, trial: PlannedTrial, execution: ExecutionSettings
) -> PlanAnswer:
    """Return the answer about a trial that does not fit on one device and runs on several.

    Args:
        one: The refusal on one device.
        several: The answer about one of the ranks, which fits.
        ranks: Number of ranks.
        trial: What is fixed, on one device.
        execution: Settings for one device.
    """
    assert several.execution is not None and several.memory is not None  # it fits
    asked = execution_asked(trial, execution)
    tried = {
        fallback.execution: fallback.required_bytes for fallback in several.ladder if fallback.execution is not None
    }
    tried.setdefault(several.execution, several.memory.required_bytes)
    most_bytes = several.device.capacity_bytes
    found = [
        _ranks_fallback(
            ranks,
            required_bytes,
            required_as_asked(one),
            fits=required_bytes <= most_bytes,
            time=time_factor(choice, asked, trial.lengths.longest),
        ).model_copy(
            update={
                "change": " + ".join(part for part in (_ranks(ranks), describe(choice, asked)) if part),
                "execution": choice.model_copy(update={"tp": ranks}),
            }
        )
        for choice, required_bytes in tried.items()
    ]
    return several.model_copy(
        update={
            "verdict": VerdictKind.FITS_WITH,
            "execution": several.execution.model_copy(update={"tp": ranks}),
            "fallbacks": tuple(choice.model_copy(update={"tp": ranks}) for choice in several.fallbacks),
            "shortfall_bytes": one.shortfall_bytes,
            "ladder": (*one.ladder, *found),
            "cannot_shard": one.cannot_shard,
        }
    )


def with_tried_ranks(one: PlanAnswer, tried: Mapping[int, PlanAnswer], host_bytes: int | None) -> PlanAnswer:
    """Add to a refusal the trial's need on numbers of ranks that do not suffice.

    Args:
        one: The refusal on one device.
        tried: The answers about one of the ranks, by number of ranks.
        host_bytes: As in :func:`fits_on`.
    """
    found: list[Fallback] = []
    for ranks, answer in tried.items():
        if answer.memory is None:
            continue
        sizes = [
            answer.memory.required_bytes,
            *(fallback.required_bytes for fallback in answer.ladder if fallback.execution),
        ]
        also = ""
        if answer.verdict.fits and host_bytes is not None:
            also = f"; the host has {gib(host_bytes)} for all of them"
        found.append(_ranks_fallback(ranks, min(sizes), required_as_asked(one), fits=False, also=also))
    return one.model_copy(update={"ladder": (*one.ladder, *found)})


def with_more_ranks(answer: PlanAnswer, ranks: int, *, may_chunk: bool) -> PlanAnswer:
    """Add more ranks to an answer that fits, as its last fallback: the smallest of its choices, sharded.

    Args:
        answer: It fits.
        ranks: How many.
        may_chunk: Whether so many can compute the loss in chunks of tokens.
    """
    assert answer.execution is not None  # it fits
    choices = [choice for choice in (answer.execution, *answer.fallbacks) if not choice.offloads]
    smallest = (choices or [answer.execution])[-1]
    alone_only: dict[str, bool | None] = {"offload_optimizer": False, "offload_activations": False}
    if not may_chunk:
        alone_only["chunked_loss"] = None
    last = smallest.model_copy(update={"tp": ranks, **alone_only})
    return answer.model_copy(update={"fallbacks": (*answer.fallbacks, last)})


def required_as_asked(answer: PlanAnswer) -> int:
    """Return the bytes that one device must have for the plan as asked."""
    assert answer.memory is not None
    first = next((fallback for fallback in answer.ladder if fallback.execution is not None), None)
    return answer.memory.required_bytes if first is None else first.required_bytes + first.saves_bytes


def _host_has(needed_bytes: int, host_bytes: int | None) -> bool:
    return host_bytes is None or needed_bytes <= host_bytes


def _ranks_fallback(
    ranks: int, required_bytes: int, alone_bytes: int, *, fits: bool, time: float = 1.0, also: str = ""
) -> Fallback:
    """Return the fallback to a number of ranks, with each one's bytes beside those of a single device."""
    return Fallback(
        change=_ranks(ranks),
        execution=None,
        required_bytes=required_bytes,
        saves_bytes=alone_bytes - required_bytes,
        time_factor=time,
        effect=Effect.NUMERICS,
        fits=fits,
        devices=ranks,
        note=f"on each of {ranks} devices{also}",
    )


def _ranks(degree: int) -> str:
    return f"execution.tp = {degree}"


def _first_that_fits(
    choices: Sequence[ExecutionChoice], trial: PlannedTrial, source: SegmentSource, device: Device, most_bytes: int
) -> tuple[ExecutionChoice, int]:
    """Return the first choice that fits, or the one that needs least, with its bytes."""
    priced: list[tuple[ExecutionChoice, int]] = []
    for choice in choices:
        needs_bytes = memory_of(source, work_of(trial, choice), device, most_bytes).required_bytes
        if needs_bytes <= most_bytes:
            return choice, needs_bytes
        priced.append((choice, needs_bytes))
    return min(priced, key=lambda one: one[1])


def _smallest(answer: PlanAnswer, asked: ExecutionChoice) -> ExecutionChoice:
    """Return the tried choice that needs least; what is kept in host memory is for a single process only."""
    own = [
        (fallback.required_bytes, fallback.execution)
        for fallback in answer.ladder
        if fallback.execution is not None and fallback.devices == 1 and not fallback.execution.offloads
    ]
    return min([(required_as_asked(answer), asked), *own], key=lambda one: one[0])[1]
