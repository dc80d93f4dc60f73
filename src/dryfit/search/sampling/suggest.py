"""Suggest the parameters of the next trial: a pure function of space, history, study seed and trial number.

Each call fills a scratch study with what the sampler reads of the history and asks a new sampler, seeded by the
trial's number. So the suggestion after a crash is the one that would have been made without it. The space is declared,
so no search space is inferred from history: parameters with one condition are one group, drawn together, and only
groups that apply are drawn. Together with TPE's window, and projections of the history that hold what samplers read,
this keeps the cost flat.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dryfit.config.schema import SearchSettings
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Scalar, TrialRecord
from dryfit.search.sampling.sampler_input import Draw, SamplerInput
from dryfit.search.sampling.samplers import make_draw
from dryfit.search.space.enqueued import Point, next_enqueued
from dryfit.search.space.params import Param, into_range, only_value, to_text
from dryfit.search.space.space import Space
from dryfit.store.history import as_history


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The parameters of the next trial.

    Attributes:
        params: Values by public dotted name.
        internal: The same values by internal name.
        distributions: Optuna's JSON of the distribution behind each internal name.
        enqueued: The enqueued point it is made from; empty where there is none.
    """

    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]
    enqueued: dict[str, Scalar] = field(default_factory=dict[str, Scalar])


def suggest(
    space: Space,
    history: Iterable[TrialRecord],
    *,
    search: SearchSettings,
    directions: tuple[Direction, ...],
    points: Sequence[Point],
    seed: int,
    number: int,
) -> Suggestion:
    """Choose the values of one trial.

    The sampler sees a completed trial with its values, a pruned one with its reports, a running one as running, and a
    refused one if :data:`~dryfit.search.sampling.sampler_input.SEES_REFUSALS` says so; others are not visible, see
    :func:`~dryfit.search.sampling.history_view.is_visible`.

    Args:
        space: What may be drawn.
        history: All trials so far; those with this number or a later one are ignored. A
            :class:`~dryfit.store.history.History` makes the cost independent of its length.
        search: Which sampler, and its settings.
        directions: Whether each goal is maximised or minimised.
        points: Enqueued points, see :func:`~dryfit.search.space.enqueued.enqueued_points`. The first that no trial was
            made from gives its values, as far as the space allows them; the rest is drawn.
        seed: The study's seed.
        number: The number of the next trial.
    """
    past = as_history(history).before(number)
    inputs = SamplerInput(space=space, history=past, search=search, directions=directions, seed=seed, number=number)
    return suggest_next(inputs, points)


def suggest_next(inputs: SamplerInput, points: Sequence[Point]) -> Suggestion:
    """Choose the values of one trial, see :func:`suggest`."""
    enqueued = next_enqueued(points, inputs.history)
    return replace(suggest_at(inputs, enqueued), enqueued=dict(enqueued))


def suggest_at(inputs: SamplerInput, given: Point) -> Suggestion:
    """Choose the values of a trial that is to have some of them already, as far as the space allows these.

    Group after group is drawn; one whose condition does not hold is left out.
    """
    space, draw = inputs.space, make_draw(inputs)
    drawn: dict[str, Scalar] = {}
    chosen: dict[str, Param] = {}
    for group in space.groups:
        if not group[0].applies(drawn):
            continue
        values = _draw_group(group, draw)
        for param in group:
            wanted = given.get(param.name)
            drawn[param.name] = wanted if param.contains(wanted) else values[param.internal]
            chosen[param.name] = param
    return Suggestion(
        params={name: drawn[name] for name in space.names if name in drawn},
        internal={chosen[name].internal: drawn[name] for name in space.names if name in drawn},
        distributions={param.internal: to_text(param.distribution) for param in chosen.values()},
    )


def _draw_group(group: tuple[Param, ...], draw: Draw) -> Mapping[str, Scalar]:
    fixed: dict[str, Scalar] = {p.internal: only_value(p.distribution) for p in group if p.distribution.single()}
    free = {p.internal: p.distribution for p in group if p.internal not in fixed}
    return fixed | {name: into_range(free[name], value) for name, value in draw(free).items()}
