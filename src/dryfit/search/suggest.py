"""The next point to try: a pure function of the space, the history, the study's seed and the trial's number.

Nothing lives between two calls. Each fills a throw-away study with a window of the history and asks a fresh sampler,
seeded by the trial's number, so the suggestion after a crash is the one that would have been made without it.
The space is declared, so no search space is inferred from history: parameters with one condition are one group of
the multivariate TPE, and only groups that apply are drawn. Together with the window this keeps the cost flat.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from dryfit.config.schema import SamplerName, SearchSettings
from dryfit.core.seeds import derive_seed
from dryfit.core.settings import Direction, TrialSettings
from dryfit.core.trial import Outcome, Scalar, TrialRecord
from dryfit.search.fields import setting
from dryfit.search.params import Param, into_range, only_value, to_text
from dryfit.search.samplers import REFUSALS, RefusalTold
from dryfit.search.space import Space
from dryfit.search.throwaway import Sealed, ThrowAway, sealed

_BEST = 50
_LAST = 150
"""What TPE reads of the finished trials. Its good trials are at most 25, the rest is a sample of the bad ones."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The point to try next.

    Attributes:
        params: Values by public dotted name.
        internal: The same values by internal name.
        distributions: Optuna's JSON of the distribution behind each internal name.
    """

    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]


def suggest(
    space: Space,
    history: Sequence[TrialRecord],
    *,
    search: SearchSettings,
    direction: Direction,
    base: TrialSettings | None,
    seed: int,
    number: int,
) -> Suggestion:
    """Choose the values of one trial.

    A completed trial is told with its value, a pruned one with its reports, a refused one as
    :data:`~dryfit.search.samplers.REFUSALS` says, a running one as running. Failed and cancelled trials are not told:
    TPE would ignore the first, and the second say nothing. Nor is a completed trial without a value, or with NaN.

    Args:
        space: What may be drawn.
        history: All trials so far; those with this number or a later one are ignored.
        search: Which sampler, and its settings.
        direction: What is better.
        base: The study file's own values; trial 0 takes them where it may. None: there are none.
        seed: The study's seed.
        number: The number of the trial to be.
    """
    sampler_seed = derive_seed(seed, "suggest", number)
    past = [record for record in history if record.number < number]
    told = [record for record in past if _is_told(record, REFUSALS[search.sampler])]
    use_model = search.sampler is SamplerName.TPE and len(told) >= search.startup_trials
    if use_model:
        running = [record for record in past if record.outcome is None]
        window = _window(told, direction)
        trials = [_as_trial(space, record) for record in sorted([*window, *running], key=lambda one: one.number)]
        sampler: BaseSampler = TPESampler(
            seed=sampler_seed, multivariate=True, n_startup_trials=0, constant_liar=bool(running)
        )
    else:
        trials, sampler = [], RandomSampler(seed=sampler_seed)
    study = ThrowAway(trials, sealed(TrialState.RUNNING), direction=direction, sampler=sampler)
    defaults = base if number == 0 and search.defaults_first else None
    return _draw(space, study, sampler, joint=use_model, defaults=defaults)


def _is_told(record: TrialRecord, refusals: RefusalTold) -> bool:
    match record.outcome:
        case Outcome.COMPLETE:
            return record.value is not None and not isnan(record.value)
        case Outcome.PRUNED:
            return True
        case Outcome.REFUSED:
            return refusals is RefusalTold.AS_PRUNED
        case Outcome.FAILED | Outcome.CANCELLED | None:
            return False


def _window(told: Sequence[TrialRecord], direction: Direction) -> list[TrialRecord]:
    """The best and the last finished trials, each once."""
    if len(told) <= _BEST + _LAST:
        return list(told)
    by_number = sorted(told, key=lambda record: record.number)
    last, older = by_number[-_LAST:], by_number[:-_LAST]
    sign = -1.0 if direction is Direction.MAXIMIZE else 1.0
    ranked = [(sign * record.value, record.number, record) for record in by_number if record.value is not None]
    best = {number for _, number, _ in heapq.nsmallest(_BEST, ranked)}
    return [record for record in older if record.number in best] + last


def _as_trial(space: Space, record: TrialRecord) -> Sealed:
    params = space.read(record.params)
    match record.outcome:
        case Outcome.COMPLETE:
            return sealed(TrialState.COMPLETE, params=params, value=record.value)
        case None:
            return sealed(TrialState.RUNNING, params=params)
        case Outcome.REFUSED:
            return sealed(TrialState.PRUNED, params=params)
        case _:
            reports = {point.n: point.value for point in record.reports}
            return sealed(TrialState.PRUNED, params=params, reports=reports)


def _draw(
    space: Space, study: ThrowAway, sampler: BaseSampler, *, joint: bool, defaults: TrialSettings | None
) -> Suggestion:
    """Draw group after group; a group whose condition does not hold is left out."""
    drawn: dict[str, Scalar] = {}
    chosen: dict[str, Param] = {}
    for group in space.groups:
        if not group[0].applies(drawn):
            continue
        values = _draw_group(group, study, sampler, joint=joint)
        for param in group:
            value = None if defaults is None else setting(defaults, param.name)
            drawn[param.name] = value if param.contains(value) else values[param.internal]
            chosen[param.name] = param
    internal = {chosen[name].internal: drawn[name] for name in space.names if name in drawn}
    return Suggestion(
        params={name: drawn[name] for name in space.names if name in drawn},
        internal=internal,
        distributions={param.internal: to_text(param.distribution) for param in chosen.values()},
    )


def _draw_group(
    group: tuple[Param, ...], study: ThrowAway, sampler: BaseSampler, *, joint: bool
) -> Mapping[str, Scalar]:
    values: dict[str, Scalar] = {p.internal: only_value(p.distribution) for p in group if p.distribution.single()}
    free = {p.internal: p.distribution for p in group if p.internal not in values}
    trial = study.trial
    if joint:
        # The order is the space's own and so the same in every process.
        found = sampler.sample_relative(study.study, trial, dict(free)) if free else {}
    else:
        found = {name: sampler.sample_independent(study.study, trial, name, one) for name, one in free.items()}
    return values | {name: into_range(free[name], value) for name, value in found.items()}
