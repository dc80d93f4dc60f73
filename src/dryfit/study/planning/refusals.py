"""Messages for trials that do not fit: the numbers, and settings that would fit.

``dryfit plan`` prints a plan in ``reporting.plans``, and so do reports.
"""

from collections.abc import Sequence

from dryfit.core.jobs.memory import Effect, Fallback, VerdictKind
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.settings.trial import Outcome
from dryfit.core.text.units import gib
from dryfit.search.space.smallest import SmallestPoints
from dryfit.search.space.space import Space
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState


def needed_bytes(answer: PlanAnswer) -> int:
    """Return the memory that a device must have for the plan as asked."""
    return answer.memory.required_bytes if answer.memory is not None else _capacity(answer) + answer.shortfall_bytes


def least_fallback(answer: PlanAnswer) -> Fallback | None:
    """The fallback that needs least and leaves the experiment as it is; None where the ladder has none."""
    own = [
        fallback
        for fallback in answer.ladder
        if fallback.effect is not Effect.SEMANTICS and fallback.execution is not None
    ]
    return min(own, key=lambda fallback: fallback.required_bytes, default=None)


def refusal_text(answer: PlanAnswer) -> str:
    """Return why a trial is refused, as one line with numbers."""
    if answer.verdict is VerdictKind.UNKNOWN:
        why = "; ".join(answer.reasons) or "the planner gives no reason"
        return f'its memory is unknown, and execution.unknown is "refuse" ({why})'
    each = f" on each of {answer.devices} devices" if answer.devices > 1 else ""
    parts = [f"needs {gib(needed_bytes(answer))}{each}, {answer.device.name} has {gib(_capacity(answer))}"]
    least = least_fallback(answer)
    if least is not None and least.required_bytes < needed_bytes(answer):
        parts.append(f"at least {gib(least.required_bytes)} ({least.change})")
    fitting = [_suggestion(fallback) for fallback in _named([answer])]
    parts.append(f"would fit: {' or '.join(fitting)}" if fitting else "no change known makes it fit")
    return "; ".join(parts)


def refused_for_memory(state: StudyState) -> list[tuple[TrialState, PlanAnswer]]:
    """Return the trials refused in a row of which it is known that they do not fit, with their plans."""
    return [(trial, answer) for trial, answer in _refused_in_a_row(state) if answer.verdict is VerdictKind.REFUSED]


def _refused_in_a_row(state: StudyState) -> list[tuple[TrialState, PlanAnswer]]:
    if not state.refused_in_a_row:
        return []
    refused = [
        (trial, trial.plan.answer)
        for trial in state.present
        if trial.outcome is Outcome.REFUSED and trial.plan is not None
    ]
    return refused[-state.refused_in_a_row :]


def nothing_fits_text(state: StudyState) -> str:
    """Return the last words of a study of refusals: the trial that came closest, and what would fit."""
    known = refused_for_memory(state)
    head = f"the last {len(_refused_in_a_row(state))} trials were refused: none fits"
    if not known:
        return f"{head}, for no plan could be made; see `dryfit show`, or set execution.unknown to exclusive"
    trial, answer = min(known, key=lambda refused: least_bytes(refused[1]))
    smallest = smallest_left(Space.from_json(state.generation.comparability.space), state)
    if smallest is not None and not smallest.points:
        head = f"nothing in the search space fits: {_smallest_text(smallest.names)} refused as well"
    lines = [head, f"  closest: {_closest(trial, answer)}"]
    lines += [f"  would fit: {_suggestion(fallback)}" for fallback in _named([answer for _, answer in known])]
    lines.append(f"  or a device, or execution.memory_limit, of {gib(least_bytes(answer))} or more")
    return "\n".join(lines)


def smallest_left(space: Space, state: StudyState) -> SmallestPoints | None:
    """Return the points that take least memory, without those that the trials refused in a row rule out.

    Without points nothing in the space fits. None where it is not known which points take least.
    """
    smallest = SmallestPoints.of(space)
    for trial, _ in refused_for_memory(state):
        smallest = smallest.without(trial.params) if smallest is not None else None
    return smallest


def _smallest_text(names: Sequence[str]) -> str:
    return (
        f"the smallest values of {', '.join(names)} are" if names else "no searched key changes memory, and a trial is"
    )


def _closest(trial: TrialState, answer: PlanAnswer) -> str:
    least = least_fallback(answer)
    run_as = f" with {least.change}" if least is not None and least.required_bytes < needed_bytes(answer) else ""
    params = ", ".join(f"{name} = {value}" for name, value in trial.params.items())
    needs = f"needs {gib(least_bytes(answer))}{run_as}, {answer.device.name} has {gib(_capacity(answer))}"
    return f"trial {trial.number} {needs}" + (f" ({params})" if params else "")


def _named(answers: Sequence[PlanAnswer]) -> list[Fallback]:
    """What is worth telling of all that fits: for one device, and with more devices.

    Of one refusal that is the first fallback of each kind; of several the one that needs least.
    """
    fitting = [[fallback for fallback in answer.ladder if fallback.fits] for answer in answers]
    own = [next((fallback for fallback in fallbacks if fallback.devices == 1), None) for fallbacks in fitting]
    more = [next((fallback for fallback in fallbacks if fallback.devices > 1), None) for fallbacks in fitting]
    least = min(
        (fallback for fallback in own if fallback is not None),
        key=lambda fallback: fallback.required_bytes,
        default=None,
    )
    fewest = min(
        (fallback for fallback in more if fallback is not None),
        key=lambda fallback: (fallback.devices, fallback.required_bytes),
        default=None,
    )
    return [fallback for fallback in (least, fewest) if fallback is not None]


def _suggestion(fallback: Fallback) -> str:
    effect = "changes the experiment" if fallback.effect is Effect.SEMANTICS else "execution.allow or a wish forbids it"
    effect = fallback.note if fallback.devices > 1 else effect
    return f"{fallback.change} ({gib(fallback.required_bytes)}, {effect})"


def least_bytes(answer: PlanAnswer) -> int:
    """Return the least memory that the plan needs with any change that leaves the experiment as it is."""
    least = least_fallback(answer)
    return min(needed_bytes(answer), least.required_bytes if least is not None else needed_bytes(answer))


def _capacity(answer: PlanAnswer) -> int:
    return answer.device.capacity_bytes
