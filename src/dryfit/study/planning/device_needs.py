"""What a trial needs of a device, from its plan and its failures. Pure."""

from dryfit.core.failure import Action, AttemptTerms, Failure, FailureKind, RecoveryAction
from dryfit.core.settings.execution import ExecutionSettings
from dryfit.runtime.failures.recovery import attempt_terms
from dryfit.runtime.machine.packing import Need
from dryfit.store.state import PlanState, TrialState
from dryfit.study.loop.next_step import Readiness


def trial_need(
    number: int,
    plan: PlanState | None,
    readiness: Readiness,
    terms: AttemptTerms,
    *,
    host_bytes: int | None = None,
    device_count: int | None = None,
) -> Need:
    """Return a trial's need of a device.

    The need of a trial that has run out of memory although its plan fits is unknown: it runs alone, like one without
    a plan.

    Args:
        number: The trial.
        plan: Its plan for one kind of device, if it has a valid one.
        readiness: Whether it may run, and must run alone.
        terms: What earlier failures ask of its next attempt.
        host_bytes: Its host memory; None: not known.
        device_count: Devices that it takes; None: as many as most.
    """
    missed = plan is not None and plan.misses > 0
    memory = plan.answer.memory if plan is not None else None
    shared_bytes = alone_bytes = None
    if plan is not None and memory is not None and plan.answer.verdict.fits:
        # Reserved as it would be with memory in plenty: kernels wait where the allocator must give back first.
        plenty_bytes = memory.peak_reserved_bytes + memory.overhead_bytes + memory.margin_bytes
        capacity_bytes = max(plan.answer.device.capacity_bytes, memory.required_bytes)
        shared_bytes = min(max(memory.required_bytes, plenty_bytes), capacity_bytes)
        alone_bytes = _required_bytes(plan, memory.required_bytes) - memory.margin_bytes
    return Need(
        number,
        shared_bytes=shared_bytes,
        alone_bytes=alone_bytes,
        exclusive=readiness is Readiness.EXCLUSIVE or terms.exclusive or missed,
        avoid=terms.avoid,
        host_bytes=host_bytes,
        device_count=device_count,
        kind=plan.kind if plan is not None else None,
    )


def process_count(plan: PlanState | None, execution: ExecutionSettings) -> int:
    """Return the number of processes of a trial's next attempt, by its plan, else by the study file."""
    choice = plan.execution if plan is not None else None
    return execution.processes if choice is None or choice.tp is None else choice.tp


def _required_bytes(plan: PlanState, first_bytes: int) -> int:
    """Return what the plan's present choice requires, or its first choice if the plan has no number for it."""
    priced = (fallback.required_bytes for fallback in plan.answer.ladder if fallback.execution == plan.execution)
    return min(first_bytes, next(priced, first_bytes))


def fence(need: Need, plan: PlanState | None, capacity_bytes: int | None) -> float | None:
    """Return the share of a device that a trial's allocator may use beside others; None: all.

    The context is left out, as torch leaves it out: where it is larger than planned, the trial must not pay for it.

    Args:
        need: The need of the trial.
        plan: Its plan, if it has one.
        capacity_bytes: The memory of the device; None: not known.
    """
    memory = plan.answer.memory if plan is not None else None
    if need.exclusive or need.shared_bytes is None or memory is None or capacity_bytes is None:
        return None
    share = (need.shared_bytes - memory.overhead_bytes) / capacity_bytes
    return share if 0 < share < 1 else None


def alone_first(answer: RecoveryAction, failure: Failure, trial: TrialState, *, shared: bool) -> RecoveryAction:
    """Return the recovery from a failure: a trial that would fail for memory first gets a device for itself.

    Args:
        answer: The action that was decided.
        failure: The failure that it follows.
        trial: The trial; this failure is not among its past ones yet.
        shared: Whether trials may share a device at all.
    """
    plan, device = trial.plan, trial.attempts[-1].device
    gives_up = failure.kind is FailureKind.OOM_DEVICE and answer.action is Action.GIVE_UP
    if not gives_up or not shared or device is None or plan is None or not plan.answer.verdict.fits:
        return answer
    if plan.misses or attempt_terms(trial.past_failures).exclusive:
        return answer
    return RecoveryAction(Action.EXCLUSIVE, f"{answer.reason}; it shared its device, and has it for itself now")
