"""Find out whether the best trials of a study really differ: each is trained with several seeds, on the same rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dryfit.api.training import FinalOutcome, distinct, do_runs, exit_status, none_completed, study_snapshot
from dryfit.core.errors import ConfigError, DryfitError, ExitStatus, FileError
from dryfit.core.jobs.train import FinalResult
from dryfit.core.wire import write_text_atomic
from dryfit.reporting.comparison import Comparison, Contender, SeedOutcome, comparison_of, validation_rows
from dryfit.scoring.intervals import FEWEST_SEEDS
from dryfit.scoring.row_files import FACTS_FILE, read_facts
from dryfit.scoring.scored_row import RowFacts
from dryfit.store.layout import StudyLayout
from dryfit.store.state import TrialState
from dryfit.study.loop.final_runs import FinalRun, Result, final_run
from dryfit.study.loop.final_training import finished
from dryfit.study.loop.next_step import End
from dryfit.study.trials.context import StudySnapshot

_FEWEST = 2
_MOST = 20
"""Corrected for more comparisons, an interval would end where no draw of the bootstrap lies."""
_DOING = "comparing the best trials"


@dataclass(frozen=True, slots=True)
class CompareOutcome(FinalOutcome):
    """How ``compare`` ended; ``comparison`` is None where it stopped before all runs were done."""

    comparison: Comparison | None

    @property
    def status(self) -> ExitStatus:
        """The exit status of the command; 1 where no two trials could be compared."""
        useless = self.comparison is not None and not self.comparison.is_useful
        return ExitStatus.ANSWER_IS_NO if useless else exit_status(self.end)


def compare(
    folder: Path | str, *, top: int, seeds: int, on_note: Callable[[str], None] = lambda _: None
) -> CompareOutcome:
    """Train the best trials of a study with several seeds each, and say which of them really differ.

    The seeds are 0, 1, ..., the same for all. Each is compared with the best of the search, on the rows of validation:
    test is not read. Runs that are done are not repeated, those of ``train_top`` included; the answer is kept in the
    study's folder, where the report finds it.

    Args:
        folder: The study; it may be running.
        top: How many of the best trials by the study's metric, from 2 to 20; of those with the same settings only the
            best is taken, and those that collapsed come last.
        seeds: How many seeds each, at least 2.
        on_note: Called with a line about each thing that happens.

    Raises:
        ConfigError: A number is out of range, fewer than two trials are complete, or the study trains no models.
        StudyBusyError: Another process does one of the runs.
    """
    if not _FEWEST <= top <= _MOST:
        raise ConfigError(_DOING, f"the best {top}", f"{_FEWEST} to {_MOST} trials")
    if seeds < FEWEST_SEEDS:
        raise ConfigError(
            _DOING, f"seeds: {seeds}", f"at least {FEWEST_SEEDS}", "one does not say how much seeds differ"
        )
    study = study_snapshot(folder)
    trials, notes = _best_trials(study, top)
    runs = {trial.number: [_run(study, trial, seed) for seed in range(seeds)] for trial in trials}
    end, results = _done(study, [run for of_trial in runs.values() for run in of_trial], on_note)
    if results is None:
        return CompareOutcome(end, None)
    contenders = [
        Contender(trial, tuple(_outcome(study, run, results[run.name]) for run in runs[trial.number]))
        for trial in trials
    ]
    comparison = comparison_of(study.state, contenders, _facts(study.layout), notes)
    study.layout.finals.mkdir(exist_ok=True)
    write_text_atomic(study.layout.comparison, comparison.model_dump_json(by_alias=True) + "\n")
    return CompareOutcome(End.DONE, comparison)


def _best_trials(study: StudySnapshot, top: int) -> tuple[list[TrialState], list[str]]:
    """Return the best trials with different settings, and what is to be said of that.

    Raises:
        ConfigError: There are not two.
    """
    ranked = study.state.ranked
    if not ranked:
        raise none_completed(study)
    chosen = distinct(study, ranked)[:top]
    if len(chosen) < _FEWEST:
        found = "all complete trials have the same settings" if len(ranked) > 1 else "only one trial is complete"
        raise ConfigError(_DOING, found, "two that differ at least", "run more of them: `dryfit tune --trials N`")
    fewer = f"Only {len(chosen)} trials with different settings are complete: these are compared."
    return chosen, [fewer] if len(chosen) < top else []


def _run(study: StudySnapshot, trial: TrialState, seed: int) -> FinalRun:
    """Return the run of a trial with a seed: one that is done and has its rows, else one that leaves test alone."""
    own = replace(final_run(trial, seed=seed, with_validation=False, save=False), test=False)
    others = (replace(own, test=True), replace(own, test=True, save=True))
    done = (run for run in (own, *others) if validation_rows(study.layout.final(run.name).scored) is not None)
    return next((run for run in done if finished(study.layout.final(run.name)) is not None), own)


def _done(
    study: StudySnapshot, runs: Sequence[FinalRun], on_note: Callable[[str], None]
) -> tuple[End, Mapping[str, Result | DryfitError] | None]:
    """Do the runs that are not done yet; None where some are left, as a stop was asked for.

    One that is done and has no rows is looked at again: nobody may have seen its end, and taken over what it left.
    """
    results: dict[str, Result | DryfitError] = {}
    for run in runs:
        paths = study.layout.final(run.name)
        result = finished(paths)
        if result is not None and validation_rows(paths.scored) is not None:
            results[run.name] = result
    left = [run for run in runs if run.name not in results]
    end = End.DONE
    if left:
        end, new = do_runs(study, left, on_note)
        results |= new
    return end, results if all(run.name in results for run in runs) else None


def _outcome(study: StudySnapshot, run: FinalRun, result: Result | DryfitError) -> SeedOutcome:
    scored = study.layout.final(run.name).scored
    if isinstance(result, DryfitError):
        return SeedOutcome(run.seed, None, str(result), scored)
    assert isinstance(result, FinalResult)  # of one configuration
    return SeedOutcome(run.seed, (result.validation or {}).get(study.state.goals[0].name), None, scored)


def _facts(layout: StudyLayout) -> dict[str, RowFacts] | None:
    """Return the groups of rows, which are written with the baselines; None where there are none."""
    try:
        return read_facts(layout.baselines / FACTS_FILE)
    except (FileError, OSError):
        return None
