"""Builds the report page of a study from its state."""

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError
from dryfit.core.settings.task_facts import task_word
from dryfit.core.settings.trial import Outcome
from dryfit.reporting.comparing.comparison import read_comparison
from dryfit.reporting.data.best import best_study_file
from dryfit.reporting.data.worth import standing_of
from dryfit.reporting.html.compared import with_comparison
from dryfit.reporting.html.final_sections import final_sections
from dryfit.reporting.html.page import Page
from dryfit.reporting.html.sections import sections_of
from dryfit.reporting.html.time_section import with_time
from dryfit.reporting.html.time_spent import time_spent
from dryfit.reporting.html.verdict import KnownOfBest, verdict_of
from dryfit.reporting.terminal.tables import duration_text, number_text
from dryfit.runtime.children.result_reading import read_phases
from dryfit.search.sampling.importance import importances_of
from dryfit.search.space.fields import setting
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState


def build_page(
    state: StudyState, config: StudyConfig | ConfigError, layout: StudyLayout, *, running: bool, now_s: float
) -> Page:
    """Return the report page of a study.

    Args:
        state: The study's state, after ``study_created``.
        config: The configuration the study was last run with, or why it is not known.
        layout: The study's folder.
        running: Whether a process runs the study now.
        now_s: Unix time.
    """
    created = state.created
    assert created is not None
    best_file, missing = _best_file(state, config)
    known = KnownOfBest(standing_of(state, layout), read_comparison(layout, state))
    importances = importances_of(state.history(), state.direction)
    finals = final_sections(layout)
    sections = sections_of(state, importances, finals, best_file=best_file, best_missing=missing)
    spent = time_spent(state, lambda one: read_phases(layout.trial(one.trial).attempt(one.number)))
    return Page(
        title=created.name,
        subtitle=_subtitle(state, running=running),
        verdict=verdict_of(state, defaults_first=_began_with_defaults(state, config), known=known),
        tiles=_tiles(state),
        sections=with_comparison(with_time(sections, spent), known.comparison),
        source=layout.ledger.name,
        made_at_s=now_s,
    )


def _best_file(state: StudyState, config: StudyConfig | ConfigError) -> tuple[str, str]:
    """Return the best configuration as a study file, or why there is none."""
    if not state.ranked or state.created is None:
        return "", ""
    try:
        if isinstance(config, ConfigError):
            raise config
        return best_study_file(config, state.created, state.ranked[0]), ""
    except ConfigError as error:
        return "", f"It cannot be written as a study file: {error.doing}: {error.found}."


def _began_with_defaults(state: StudyState, config: StudyConfig | ConfigError) -> bool:
    """Whether the first trial had the study file's own values."""
    if isinstance(config, ConfigError) or not state.present:
        return False
    try:
        own = {name: setting(config.trial_settings, name) for name in state.present[0].params}
    except AttributeError:
        return False  # a searched name is no setting of this version
    return own == state.present[0].params


def _subtitle(state: StudyState, *, running: bool) -> str:
    created = state.created
    assert created is not None
    goals = " and ".join(f"{goal.direction} {goal.name}" for goal in state.goals)
    total = state.sessions[-1].total if state.sessions else 0
    now = "running now" if running else "not running"
    return f"{task_word(created.task)}: {goals}; {state.counted} of {total} trials counted; {now}"


def _tiles(state: StudyState) -> tuple[tuple[str, str], ...]:
    tiles: list[tuple[str, str]] = []
    if state.ranked:
        best = state.ranked[0]
        tiles.append((f"best {state.goals[0].name}", number_text(best.score)))
        tiles.append(("best trial", str(best.number)))
    tiles += [
        (str(outcome), str(count)) for outcome, count in state.counts.items() if count or outcome is Outcome.COMPLETE
    ]
    if state.open_trials:
        tiles.append(("not finished", str(len(state.open_trials))))
    tiles.append(("time worked", duration_text(state.wall_s)))
    return tuple(tiles)
