"""The generations of a study in words: why each began, and how many earlier trials it keeps and uses."""

from dryfit.core.settings.trial import Outcome, best_first
from dryfit.reporting.data.summary import GenerationView
from dryfit.reporting.terminal.tables import Table, counted, number_text, time_text
from dryfit.store.events import Compatibility, GenerationBegan, StudyRevised
from dryfit.store.replay import StudyState


def generation_text(generation: GenerationView) -> str:
    """Describe the present generation in one line; empty for the first."""
    if generation.number == 1:
        return ""
    why = f"since {time_text(generation.began_at_s)}: {'; '.join(generation.reasons)}"
    return f"generation {generation.number} ({why}); {_kept(generation.number, generation.earlier, generation.used)}"


def _kept(number: int, earlier: int, used: int) -> str:
    of = "generation 1" if number == 2 else f"generations 1 to {number - 1}"
    return f"{counted(earlier, 'trial')} of {of} kept, {used} of them used"


def began_text(event: GenerationBegan, state: StudyState) -> str | None:
    """Return the message on a new generation; None for the first."""
    if event.generation == 1:
        return None
    kept = _kept(event.generation, state.generation.first, len(event.reused))
    again = f"; its {len(event.points)} best points are tried again" if event.points else ""
    lines = [f"generation {event.generation} begins ({Compatibility.FORKS}): {kept}{again}; the total counts from zero"]
    return "\n".join([*lines, *(f"  {reason}" for reason in event.reasons)])


def revised_text(event: StudyRevised) -> str | None:
    """Return the message on a changed study file with which the study goes on; None if it has no effect."""
    if not event.reasons:
        return None
    return "\n".join(
        [
            f"the study has changed ({event.compatibility}): its trials so far count as before",
            *(f"  {reason}" for reason in event.reasons),
        ]
    )


def generations_table(state: StudyState) -> Table:
    """Return one row for each generation, the present one first."""
    rows: list[tuple[str, ...]] = []
    for generation in reversed(state.generations):
        trials = state.in_generation(generation.number)
        goal = generation.comparability.goals[0]
        best = best_first(trials, goal.direction)
        rows.append(
            (
                str(generation.number),
                time_text(generation.began_at_s),
                "; ".join(generation.reasons) or "-",
                ", ".join(f"{each.direction} {each.name}" for each in generation.comparability.goals),
                f"{trials[0].number} to {trials[-1].number}" if trials else "none yet",
                str(sum(trial.outcome is Outcome.COMPLETE for trial in trials)),
                f"{number_text(best[0].value)} (trial {best[0].number})" if best else "-",
                str(len(generation.reused)),
                generation.name,
            )
        )
    heads = ("generation", "began (UTC)", "why", "goals", "trials", "complete", "best", "earlier ones used")
    return Table((*heads, "Optuna study"), tuple(rows))
