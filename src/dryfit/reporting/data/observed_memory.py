"""Planned and observed memory of trials, as text and as numbers."""

from pydantic import BaseModel, ConfigDict

from dryfit.core.failure import FailureKind
from dryfit.core.jobs.memory import Effect, ExecutionChoice, VerdictKind
from dryfit.core.settings.execution import OptimizerImpl
from dryfit.core.text.units import gib
from dryfit.store.events import FailureFacts, Observed
from dryfit.store.replay import StudyState
from dryfit.store.state import PlanState, TrialState


class Plans(BaseModel):
    """Counts of a study's memory plans.

    Attributes:
        planned: Trials whose plan fits.
        refused: Trials whose plan does not fit.
        unknown: Trials whose memory could not be planned.
        out_of_memory: Attempts that ran out of device memory although their plan fits.
        observed_over_planned: The largest ratio of the peaks of allocated memory; None if none was observed.
    """

    model_config = ConfigDict(frozen=True)

    planned: int
    refused: int
    unknown: int
    out_of_memory: int
    observed_over_planned: float | None


def plan_totals(state: StudyState) -> Plans | None:
    """Count the plans of a study; None if nothing was planned."""
    plans = [trial.plan for trial in state.present if trial.plan is not None]
    if not plans:
        return None
    verdicts = [plan.answer.verdict for plan in plans]
    ratios = [ratio for trial in state.present if (ratio := observed_over_planned(trial)) is not None]
    return Plans(
        planned=sum(verdict.fits for verdict in verdicts),
        refused=verdicts.count(VerdictKind.REFUSED),
        unknown=verdicts.count(VerdictKind.UNKNOWN),
        out_of_memory=sum(plan.misses for plan in plans if plan.answer.verdict is not VerdictKind.UNKNOWN),
        observed_over_planned=round(max(ratios), 4) if ratios else None,
    )


def totals_text(totals: Plans) -> str:
    """Return the counts of a study's plans in one line."""
    parts = [f"{totals.planned} planned", f"{totals.refused} refused", f"{totals.unknown} unknown"]
    if totals.out_of_memory:
        parts.append(f"{totals.out_of_memory} out of memory all the same")
    if totals.observed_over_planned is not None:
        parts.append(f"largest observed / planned {totals.observed_over_planned:.3f}")
    return ", ".join(parts)


def observed_over_planned(trial: TrialState) -> float | None:
    """Return the ratio of observed to planned peak allocated memory; None unless both belong to the same execution."""
    plan, observed = trial.plan, trial.observed
    if plan is None or observed is None or observed.allocated_bytes is None or plan.runs_otherwise:
        return None
    memory = plan.answer.memory
    return observed.allocated_bytes / memory.peak_allocated_bytes if memory and memory.peak_allocated_bytes else None


def choice_text(choice: ExecutionChoice) -> str:
    """Describe an execution choice in a few words."""
    words = [f"tensor parallelism over {choice.tp} ranks"] if choice.tp is not None else []
    words += [f"micro-batch {choice.micro_batch} x {choice.accumulation}"]
    words += [f"validation batch {choice.eval_batch}"] if choice.eval_batch is not None else []
    words += ["checkpointing"] if choice.checkpointing else []
    words += ["loss in chunks"] if choice.chunked_loss else []
    words += ["inputs of layers on the host"] if choice.offload_activations else []
    words += [f"{choice.optimizer_impl} optimizer"] if choice.optimizer_impl is not OptimizerImpl.AUTO else []
    words += ["optimizer state on the host"] if choice.offload_optimizer else []
    return ", ".join(words)


def plan_text(plan: PlanState) -> str:
    """Return a plan in one line: verdict, memory needed and available, confidence."""
    answer = plan.answer
    parts = [str(answer.verdict)]
    if answer.memory is not None:
        each = f" on each of {answer.devices} devices" if answer.devices > 1 else ""
        parts.append(f"needs {gib(answer.memory.required_bytes)} of {gib(answer.device.capacity_bytes)}{each}")
    if answer.verdict is VerdictKind.UNKNOWN:
        parts += answer.reasons
    else:
        parts.append(str(answer.confidence))
    return ", ".join(parts)


def memory_cell(trial: TrialState) -> str:
    """Return the observed and planned peak of a trial for a table, a dash where unknown.

    On a GPU both are allocated memory, on the CPU that of the whole process.
    """
    return f"{_size(trial.observed_bytes)} / {_size(trial.plan.peak_bytes if trial.plan is not None else None)}"


def execution_cell(trial: TrialState) -> str:
    """Return a trial's execution choice for a table, a dash without a plan."""
    choice = trial.plan.execution if trial.plan is not None else None
    return choice_text(choice) if choice is not None else "-"


def plan_lines(trial: TrialState) -> list[str]:
    """Return lines on a trial's planned and observed memory; none if it has neither."""
    lines: list[str] = []
    plan = trial.plan
    if plan is not None:
        lines.append(f"  plan: {plan_text(plan)} (planned in {plan.answer.planner_s:.1f} s)")
        if plan.execution is not None:
            taken = [f"the {plan.fallbacks_taken}. fallback of its plan"] if plan.fallbacks_taken else []
            taken += [f"the {plan.eval_batches_taken}. smaller validation batch"] if plan.eval_batches_taken else []
            lines.append(f"    run with {', '.join([choice_text(plan.execution), *taken])}")
        lines += _ladder_lines(plan)
        misses = [attempt.number for attempt in trial.attempts if _ran_out(attempt.failure)]
        lines += [f"    attempt {number} ran out of memory all the same" for number in misses]
    if trial.observed is not None:
        lines += _observed_lines(trial.observed, plan)
    return lines


def _ran_out(failure: FailureFacts | None) -> bool:
    return failure is not None and failure.kind is FailureKind.OOM_DEVICE


def _ladder_lines(plan: PlanState) -> list[str]:
    if plan.answer.verdict is not VerdictKind.REFUSED:
        return []
    return [
        f"    {fallback.change}: {gib(fallback.required_bytes)}, {'fits' if fallback.fits else 'does not fit'}"
        + (", changes the experiment" if fallback.effect is Effect.SEMANTICS else "")
        + (f", {fallback.note}" if fallback.devices > 1 else "")
        for fallback in plan.answer.ladder
    ]


def _observed_lines(observed: Observed, plan: PlanState | None) -> list[str]:
    memory = None if plan is None or plan.runs_otherwise else plan.answer.memory
    host_bytes = plan.peak_bytes if plan is not None and memory is not None and plan.on_cpu else None
    rows = (
        ("allocated", observed.allocated_bytes, memory.peak_allocated_bytes if memory is not None else None),
        ("reserved", observed.reserved_bytes, memory.peak_reserved_bytes if memory is not None else None),
        ("host memory", observed.rss_bytes, host_bytes),
    )
    return [f"  {name}: {_compared(seen, planned)}" for name, seen, planned in rows if seen is not None]


def _compared(observed_bytes: int, planned_bytes: int | None) -> str:
    if not planned_bytes:
        return f"{gib(observed_bytes)} observed"
    return f"{gib(observed_bytes)} observed, {gib(planned_bytes)} planned ({observed_bytes / planned_bytes:.3f})"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else gib(size_bytes)
