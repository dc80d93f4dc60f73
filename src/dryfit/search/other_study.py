"""Enqueued points from the best trials of another study."""

from collections.abc import Sequence
from dataclasses import dataclass

from dryfit.core.errors import ConfigError
from dryfit.core.settings.trial import Scalar
from dryfit.search.changes import with_defaults
from dryfit.search.space.params import public_name
from dryfit.search.space.space import Space
from dryfit.store.replay import StudyState


@dataclass(frozen=True, slots=True)
class TakenPoints:
    """Points that a study takes from another study.

    Attributes:
        points: Values by public dotted name, the best first, each point once.
        notes: In words where they come from, and what of them is left to the sampler.
    """

    points: tuple[dict[str, Scalar], ...] = ()
    notes: tuple[str, ...] = ()


def take_points(other: StudyState, count: int, source: str, space: Space) -> TakenPoints:
    """Return the best trials of a study as points of a space.

    A key that they did not draw has the value of their study file. What the space could not draw is left out, with all
    that depends on it.

    Args:
        other: The other study.
        count: How many of its best trials to take at most.
        source: The setting, for messages.
        space: The space of the new study.

    Raises:
        ConfigError: The other study has no trial with a value, or none has a value in the space.
    """
    doing = f"reading search.enqueue_from = {source}"
    basis = other.generation.comparability
    best = other.ranked[:count]
    if not best:
        raise ConfigError(doing, "that study has no complete trial yet", "a study with complete trials")
    points: list[dict[str, Scalar]] = []
    left: dict[str, list[int]] = {}
    for trial in best:
        own = with_defaults(trial.own or basis.own or {}, basis.task)
        point = {public_name(name): value for name, value in space.read(trial.params, own).items()}
        missing = [name for name in space.names if name not in point and space.active(name, point) is not None]
        for name in missing:
            left.setdefault(name, []).append(trial.number)
        if point and point not in points:
            points.append(point)
    if not points:
        raise ConfigError(doing, "no value of its best trials lies in [space]", "a study of some of the same keys")
    numbers = _listed([trial.number for trial in best])
    tried = f"trying {len(points)} point(s) first: trials {numbers} of {source}, the best by {other.goals[0].name}"
    notes = [tried]
    for name, trials in left.items():
        notes.append(f"{name} of its trials {_listed(trials)} is unknown or outside [space]: the sampler draws it")
    if dropped := {name: None for trial in best for name in trial.params if name not in space.names}:
        notes.append(f"searched there and not here, so left out: {', '.join(dropped)}")
    return TakenPoints(tuple(points), tuple(notes))


def not_taken(source: str, before: str) -> tuple[str, ...]:
    """Return the note for an existing study that began with other points, or with none."""
    if source == before:
        return ()
    began = f"with {before}" if before else "without it"
    hint = "further points can stand in [[search.enqueue]]"
    return (f"search.enqueue_from = {source} is not read: it says how a study begins, and this began {began}; {hint}",)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
