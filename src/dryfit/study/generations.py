"""What a changed study file means for an existing study. Pure, but for reading files of older versions.

A study never refuses to go on because its file has changed. Where its trials so far still are trials of the study,
they count as before. Where they are not, a new generation begins in the same ledger: they are kept, the sampler uses
those that still compare, and the total counts from zero.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from dryfit.ledger.events import ComparabilityKey, Compatibility, GenerationBegan, StudyRevised
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.search.changes import (
    Change,
    PossibleTrials,
    comparability_key,
    comparable,
    compare,
    relocated,
    with_defaults,
)
from dryfit.search.space import Space, apply_params
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.tables import OwnSettings
from dryfit.settings.task_facts import is_own_key, metric_of
from dryfit.settings.training_messages import ResolveResult
from dryfit.settings.trial import Outcome, Scalar, best_first
from dryfit.study.context import StudySnapshot

_AGAIN: Final = 3
"""Number of the best points that are tried again where values no longer compare: enough for a good start, few enough
that the new generation is a search of its own."""

_INFORMATIVE: Final = (Outcome.COMPLETE, Outcome.PRUNED, Outcome.REFUSED)
"""Outcomes that a sampler or a pruner may learn from."""


def next_generation(state: StudyState, new: ComparabilityKey) -> StudyRevised | GenerationBegan | None:
    """Return the event to record before a study goes on with other settings; None if nothing has changed.

    Args:
        state: The study so far.
        new: The comparability key of its next trials.
    """
    old, present = state.generation.comparability, state.generation
    if old.model_copy(update={"data": old.data or new.data, "folder": new.folder}) == new:
        return None
    if state.present:
        change = compare(old, new)
        if change.verdict is not Compatibility.FORKS:
            return StudyRevised(comparability=new, compatibility=change.verdict, reasons=change.reasons)
        return _generation(state, present.number + 1, new, change)
    if present.number == 1:  # nothing has been tried: there is nothing to keep apart
        return GenerationBegan(generation=1, name=present.name, comparability=new, points=present.points)
    earlier = state.generations[-2].comparability
    return _generation(state, present.number, new, compare(earlier, new))


def _generation(state: StudyState, number: int, new: ComparabilityKey, change: Change) -> GenerationBegan:
    assert state.created is not None
    possible = PossibleTrials(new)
    reused = tuple(trial.number for trial in state.trials if _still_counts(state, trial, possible))
    known = any(state.trials[number].outcome is Outcome.COMPLETE for number in reused)
    return GenerationBegan(
        generation=number,
        name=f"{state.created.name}-g{number}",
        comparability=new,
        reasons=change.reasons or ("what had changed was changed back",),
        reused=reused,
        points=() if known else _points_again(state, number - 1, possible),
    )


def _still_counts(state: StudyState, trial: TrialState, possible: PossibleTrials) -> bool:
    """Return whether an earlier trial could be one of the new generation: its values compare and it fits the space."""
    old = state.generations[trial.generation - 1].comparability
    if trial.outcome not in _INFORMATIVE or not comparable(old, possible.key):
        return False
    return possible.allows(trial.params, _own_of(state, trial))


def _own_of(state: StudyState, trial: TrialState) -> Mapping[str, Scalar]:
    """Return the study file's own values when a trial was asked for."""
    basis = state.generations[trial.generation - 1].comparability
    return with_defaults(trial.own or basis.own or {}, basis.task)


def _points_again(state: StudyState, number: int, possible: PossibleTrials) -> tuple[dict[str, Scalar], ...]:
    """Return the best points of an earlier generation that the space can draw; their values no longer compare."""
    old = state.generations[number - 1].comparability
    was, now = old.goals[0], possible.key.goals[0]
    if relocated(old, possible.key.folder).task != possible.key.task or (
        was.name == now.name and was.direction is not now.direction
    ):
        return ()  # other keys, or what was best is now worst
    points: list[dict[str, Scalar]] = []
    for trial in best_first(state.in_generation(number), was.direction):
        point = possible.searched_values(trial.params, _own_of(state, trial))
        if point and point not in points and not _is_own(possible, point):
            points.append(point)
        if len(points) == _AGAIN:
            break
    return tuple(points)


def _is_own(possible: PossibleTrials, point: dict[str, Scalar]) -> bool:
    """Return whether a point is the study file's own, which is the first trial by default."""
    return all(possible.own.get(name) == point[name] for name in point)


def basis_now(config: StudyConfig, space: Space, layout: StudyLayout, resolved: ResolveResult) -> ComparabilityKey:
    """What a study's next trials rest on."""
    return comparability_key(config, space, data=resolved.data_fingerprint, folder=layout.folder)


def recorded(state: StudyState, layout: StudyLayout) -> StudyRevised | None:
    """Return values that an older dryfit did not record, from its file beside the ledger; None if all is known.

    It must be called before a session replaces that file.
    """
    if state.created is None or state.generation.comparability.own is not None:
        return None
    try:
        config = load_study_file(layout.frozen_file).config
    except ConfigError:
        return None
    old = state.generation.comparability
    basis = comparability_key(config, Space.from_json(old.space), data=old.data, folder=layout.folder)
    return StudyRevised(comparability=basis, compatibility=Compatibility.SAME)


def as_it_was(study: StudySnapshot, trial: TrialState) -> StudySnapshot:
    """Return the study as it was for a trial: its settings, its metrics and its goal, with today's data."""
    generation = study.state.generations[trial.generation - 1]
    if generation is study.state.generation:
        return study
    basis = relocated(generation.comparability.model_copy(update={"own": dict(trial.own)}), str(study.layout.folder))
    own = {name: value for name, value in (basis.own or {}).items() if name in SEARCHABLE or is_own_key(name)}
    settings = apply_params(study.config.trial_settings.model_copy(update={"own": OwnSettings()}), own)
    goal, *also = basis.goals
    judged = study.config.study.model_copy(
        update={
            "metric": metric_of(goal.name),
            "direction": goal.direction,
            "also": tuple(metric_of(one.name) for one in also),
            "also_directions": tuple(one.direction for one in also),
        }
    )
    tables = {table: getattr(settings, table) for table in type(settings).model_fields}
    return replace(study, config=study.config.model_copy(update={**tables, "study": judged}))
