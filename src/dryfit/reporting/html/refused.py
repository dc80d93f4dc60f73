"""The refused trials of a study by what decides their memory: what they need, and what the device has."""

from collections.abc import Sequence
from dataclasses import dataclass

from dryfit.core.settings.memory_key import IRRELEVANT, NEUTRAL
from dryfit.core.settings.trial import Outcome, Scalar
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState
from dryfit.study.planning.refusals import needed_bytes


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """Refused trials with equal values of all settings that decide memory."""

    params: dict[str, Scalar]
    trials: tuple[int, ...]
    needed_bytes: int | None
    capacity_bytes: int | None
    reason: str


def refusals(state: StudyState) -> list[RefusalRow]:
    """Return the refused trials grouped by plan, in order of their first trial."""
    by_key: dict[str, list[TrialState]] = {}
    for trial in state.present:
        if trial.outcome is Outcome.REFUSED:
            key = trial.plan.key if trial.plan is not None else f"trial {trial.number}"
            by_key.setdefault(key, []).append(trial)
    return [_refusal(trials) for trials in by_key.values()]


def _refusal(trials: Sequence[TrialState]) -> RefusalRow:
    first = trials[0]
    answer = first.plan.answer if first.plan is not None else None
    unrelated = IRRELEVANT | NEUTRAL.keys()
    return RefusalRow(
        params={name: value for name, value in first.params.items() if name not in unrelated},
        trials=tuple(trial.number for trial in trials),
        needed_bytes=needed_bytes(answer) if answer is not None and answer.memory is not None else None,
        capacity_bytes=answer.device.capacity_bytes if answer is not None else None,
        reason=first.reason,
    )
