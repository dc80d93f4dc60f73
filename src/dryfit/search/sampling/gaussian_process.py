"""Gaussian processes: what is asked of their process, from the history alone."""

from collections.abc import Mapping, Sequence
from math import isfinite

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome, Scalar, TrialRecord
from dryfit.search.sampling.gp_handle import GpQuestion, GpTrial
from dryfit.search.sampling.history_view import Window
from dryfit.search.sampling.sampler_input import Draw, FreeParams, SamplerInput
from dryfit.search.space.params import to_text

_BEST = 50
_LAST = 150
"""What is read of the ended trials: all up to 200. What a suggestion costs grows with the cube of their number."""

_UNKNOWN_EXCESS = 0.1
"""Of a trial that ran out of memory, or failed because of its parameters, whatever its plan said."""


def gaussian_process(inputs: SamplerInput, otherwise: Draw) -> Draw:
    """Draw the keys without a condition together, by Optuna's GP sampler; the others, and all at first, otherwise.

    Complete trials and those that run are learned from. One that did not fit is an infeasible point: Optuna models how
    far trials are beyond the device's memory and multiplies the chance of fitting in. It has no value, so it is given
    the worst that was seen.
    """
    free = inputs.unconditional()
    trials = _trials(inputs, free)
    if not free or sum(bool(trial.values) and (trial.excess or 0) <= 0 for trial in trials) < _needed(inputs):
        return otherwise
    question = GpQuestion(
        space={name: to_text(kind) for name, kind in free.items()},
        directions=inputs.directions,
        trials=tuple(trials),
        seed=inputs.trial_seed,
    )
    point: Mapping[str, Scalar] | None = None

    def draw(group: FreeParams) -> Mapping[str, Scalar]:
        nonlocal point
        if not group or not group.keys() <= free.keys():
            return otherwise(group)
        point = inputs.ask_gp(question) if point is None else point
        return otherwise(group) if point is None else {name: point[name] for name in group}

    return draw


def _needed(inputs: SamplerInput) -> int:
    return max(1, inputs.search.startup_trials)


def _trials(inputs: SamplerInput, free: FreeParams) -> list[GpTrial]:
    """Return the trials to learn from, by number: those that have a value of every key."""
    directions = inputs.directions
    seen = inputs.history.projected(("gp", directions), lambda: _Learned(directions)).window.records()
    worst = _worst([record.values or () for record in seen if record.outcome is Outcome.COMPLETE], directions)
    constrained = any(record.outcome is Outcome.REFUSED for record in seen)
    trials: list[GpTrial] = []
    for record in sorted([*seen, *inputs.history.running], key=lambda record: record.number):
        params = inputs.space.read(record.params, record.own)
        if not free.keys() <= params.keys():
            continue
        known = {name: params[name] for name in free}
        if record.outcome is None:
            trials.append(GpTrial(params=known))
        elif record.outcome is Outcome.REFUSED:
            above = record.excess if record.excess is not None and record.excess > 0 else _UNKNOWN_EXCESS
            trials.append(GpTrial(params=known, values=worst, excess=above))
        else:
            below = min(0.0, record.excess or 0.0) if constrained else None
            trials.append(GpTrial(params=known, values=record.values or (), excess=below))
    return trials


class _Learned:
    """A projection of the ended trials: those that are learned from, complete ones with finite values and refused ones.

    Args:
        directions: Whether each goal is maximised or minimised.
    """

    def __init__(self, directions: tuple[Direction, ...]) -> None:
        self.window = Window(directions, refused=True, best=_BEST, last=_LAST)

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended."""
        finite = record.outcome is Outcome.COMPLETE and all(isfinite(value) for value in record.values or ())
        if finite or record.outcome is Outcome.REFUSED:
            self.window.apply(record)


def _worst(values: Sequence[Sequence[float]], directions: Sequence[Direction]) -> tuple[float, ...]:
    """Return the worst value of each goal; zeros where there is none, which no sampler is then asked about."""
    columns = zip(*values, strict=True) if values else [(0.0,)] * len(directions)
    worse = (min if direction is Direction.MAXIMIZE else max for direction in directions)
    return tuple(pick(column) for pick, column in zip(worse, columns, strict=True))
