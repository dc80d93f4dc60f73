"""Train a study's configurations once more: the best, or the top over several seeds, or compared."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dryfit.documents.comparison import Comparison, Contender, SeedOutcome, comparison_of, validation_rows
from dryfit.documents.finals import SeedRun, TopConfiguration, TopTable, TrainedModel, spread
from dryfit.documents.worth import model_judgement
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.processes.child_spec import SupervisorSettings
from dryfit.processes.node import LocalNode, local_facts
from dryfit.processes.supervisor import Supervisor
from dryfit.search.changes import compare as compare_settings
from dryfit.settings.choices import SCRIPT_TASK
from dryfit.settings.devices import HERE
from dryfit.settings.errors import ConfigError, DryfitError, ExitStatus, FileError, LedgerError
from dryfit.settings.files import write_text_atomic
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.task_facts import facts_of, task_word
from dryfit.settings.training_messages import FinalResult
from dryfit.settings.trial import Outcome, best_first
from dryfit.settings.wire import Job
from dryfit.study.arguments import layout_of
from dryfit.study.context import StudySnapshot, job_of_trials, trial_settings
from dryfit.study.driver import StopRequests
from dryfit.study.final_training import (
    FinalRun,
    FinalTraining,
    copy_model,
    edited_since,
    final_run,
    finished,
    how_it_was_run,
    in_process_request,
    refuse_taken,
    run_lock,
    runs_at_once,
)
from dryfit.study.generations import as_it_was
from dryfit.study.models import merge
from dryfit.study.next_step import End
from dryfit.study.pace import recorded_precision, with_precision
from dryfit.study.requests import with_names
from dryfit.study.session import read_study
from dryfit.study.studies import trial_of
from dryfit.study.trial_plans import plan_here, planned_devices
from dryfit.tasks.row_metrics import FEWEST_SEEDS
from dryfit.tasks.scored_rows import FACTS_FILE, RowFacts, read_facts

BEST = "best"
_OWN_CODE = ("function", "script")
"""What trains instead of dryfit."""
_TOP = re.compile(r"top[0-9]+")
_NO_MEAN = "models are not averaged any more: train each trial by its number, predict with each, take the mean"


def exit_status(end: End) -> ExitStatus:
    """Return the exit status of a command that trained configurations, by how it ended."""
    if end is End.DONE:
        return ExitStatus.DONE
    return ExitStatus.INTERRUPTED if end is End.INTERRUPTED else ExitStatus.STOPPED


@dataclass(frozen=True, slots=True)
class FinalOutcome:
    """How a command ended that trained configurations of a study.

    Attributes:
        end: Done, or why it stopped; the same call goes on.
    """

    end: End

    @property
    def status(self) -> ExitStatus:
        """The exit status of the command."""
        return exit_status(self.end)


@dataclass(frozen=True, slots=True)
class TrainOutcome(FinalOutcome):
    """How ``train`` ended; ``model`` is what was trained, None where it stopped before."""

    model: TrainedModel | None


@dataclass(frozen=True, slots=True)
class TopOutcome(FinalOutcome):
    """How ``train_top`` ended, and the table so far."""

    table: TopTable

    @property
    def status(self) -> ExitStatus:
        """The exit status of the command; 1 where no run has a value."""
        useful = any(run.error is None for configuration in self.table.configurations for run in configuration.runs)
        return ExitStatus.ANSWER_IS_NO if self.end is End.DONE and not useful else exit_status(self.end)


def train(
    folder: Path | str,
    *,
    trial: int | str = BEST,
    with_validation: bool = False,
    seed: int | None = None,
    out: Path | str | None = None,
    merged: bool = False,
    on_note: Callable[[str], None] = lambda _: None,
) -> TrainOutcome:
    """Train a trial's configuration once more, evaluate it once on test, and save the model.

    The study is only read: it may be running meanwhile. Ctrl-C writes a checkpoint, and the same call continues. A
    user's own Trainer or script is run as for the trial, to its end, with today's code: nothing is pruned, and what it
    leaves is the model.

    Args:
        folder: The study.
        trial: Its number, or ``best``: by the study's metric, also where it has several goals.
        with_validation: Train on train and validation together, for as many steps as the trial's best validation had.
        seed: None: the trial's own, which repeats the trial.
        out: Where to put a copy of the saved folder; None: it stays in the study.
        merged: Put there, instead of a copy, the base with its adapters merged into it.
        on_note: Called with a line about each thing that happens.

    Raises:
        ConfigError: There is no such trial, or it cannot be trained so; or ``out`` is there already.
        StudyBusyError: Another process does the same.
        DryfitError: Training failed.
    """
    view = study_snapshot(folder, own_code=True)
    own = _own_job(view)
    target = Path(out).expanduser().absolute() if out is not None else None
    if target is not None:
        refuse_taken(target)
    if merged and own is not None:
        allowed = "without --merge (merged=False)"
        raise ConfigError("merging adapters", "your own code saves the model, in a form of its own", allowed)
    chosen = _chosen(view.state, trial)
    study = as_it_was(view, chosen)
    if own is not None:
        _check_own(view, chosen, on_note)
    elif study.state.generations[chosen.generation - 1].comparability.data != study.resolved.data_fingerprint:
        on_note(f"trial {chosen.number} is of generation {chosen.generation}, which had other rows: today's are used")
    run = final_run(chosen, seed=seed, with_validation=with_validation, own=own)
    end, results = do_runs(study, [run], on_note)
    result = results.get(run.name)
    if result is None:
        return TrainOutcome(end, None)
    if isinstance(result, DryfitError):
        raise result
    assert isinstance(result, FinalResult)  # of one configuration
    saved = study.layout.final(run.name).model if result.model_dir is not None else None
    if saved is None:
        on_note("it has left no files in its folder, so there is nothing to keep")
    elif target is not None and merged:
        merge(saved, target, trust=study.config.model.trust_remote_code)
    elif target is not None:
        copy_model(saved, target)
    return TrainOutcome(End.DONE, _trained(study, run, result, target or saved if saved is not None else None))


def train_top(
    folder: Path | str, *, top: int, seeds: int, on_note: Callable[[str], None] = lambda _: None
) -> TopOutcome:
    """Run the best configurations of a study over several seeds, to estimate the spread of their values.

    The seeds are 0, 1, ..., not the trial's own, by whose value it was chosen. Nothing is chosen on test: the order is
    the search's. Runs that are done are not repeated. A user's own Trainer or script gets the seed as ``trial.seed`` or
    ``{seed}``; one that does not use it has one value.

    Args:
        folder: The study.
        top: How many of the best trials by the study's metric.
        seeds: How many seeds each.
        on_note: Called with a line about each thing that happens.

    Raises:
        ConfigError: No trial has completed.
        StudyBusyError: Another process does one of the runs.
    """
    study = study_snapshot(folder, own_code=True)
    own = _own_job(study)
    complete = (trial for trial in study.state.present if trial.outcome is Outcome.COMPLETE)
    ranked = best_first(complete, study.state.direction)[:top]
    if not ranked:
        raise none_completed(study)
    if own is not None:
        for trial in ranked:
            _check_own(study, trial, on_note)
    runs = [
        final_run(trial, seed=seed, with_validation=False, save=False, own=own)
        for trial in ranked
        for seed in range(seeds)
    ]
    end, results = do_runs(study, runs, on_note)
    metric = study.config.study.metric
    done = [(run.trial, _seed_run(run, results[run.name], metric)) for run in runs if run.name in results]
    rows = tuple(
        _configuration(rank, trial, [run for of, run in done if of is trial])
        for rank, trial in enumerate(ranked, start=1)
    )
    table = TopTable(
        study=study.config.study.name,
        metric=metric,
        seeds=tuple(range(seeds)),
        complete=len(results) == len(runs),
        configurations=rows,
    )
    return TopOutcome(End.DONE if table.complete else end, table)


def in_process(folder: Path | str, *, trial: int | str = BEST, seed: int | None = None) -> list[str]:
    """Return the command that trains a trial's configuration without supervision, for a debugger.

    It is to take this process's place (``os.execv``): the control plane imports no torch, and a debugger wants the
    terminal. Nothing is saved, and test is not read.

    Raises:
        ConfigError: There is no such trial, or it was refused.
    """
    study = study_snapshot(folder)
    chosen = _chosen(study.state, trial)
    study = as_it_was(study, chosen)
    run = final_run(chosen, seed=seed, with_validation=False, save=False)
    return [sys.executable, "-m", "dryfit.training.in_process", str(in_process_request(study, run))]


def _own_job(study: StudySnapshot) -> Job | None:
    """Return the job of the user's own code that trains the study's trials; None: dryfit does."""
    return job_of_trials(study.config) if study.config.function is not None else None


def _check_own(study: StudySnapshot, trial: TrialState, on_note: Callable[[str], None]) -> None:
    """Check that a trial was one of the code that the study names now, and say where that was edited.

    Raises:
        ConfigError: It named other code, or judged it by something else.
    """
    then = study.state.generations[trial.generation - 1].comparability
    change = compare_settings(then, study.state.generation.comparability)
    if not change.comparable:
        raise ConfigError(
            f"training trial {trial.number} once more",
            f"it is of generation {trial.generation}, and {'; '.join(change.reasons)}",
            f"a trial of generation {study.state.generation.number}",
            "with a copy of the study file as it was, `dryfit tune` in another folder",
        )
    edited = edited_since(study)
    if edited is not None:
        on_note(f"{edited} was edited since the study's last session: today's code is run")


def study_snapshot(folder: Path | str, *, own_code: bool = False) -> StudySnapshot:
    """Read a study whose configurations are to be trained once more.

    Args:
        folder: The study.
        own_code: Whether those of the user's own Trainer or script can be, too.

    Raises:
        ConfigError: Its task is a function of the user's own.
        LedgerError: There is none, or no run of it has checked its data.
    """
    layout = layout_of(folder)
    state = read_study(layout)
    task = state.created.task if state.created is not None else None
    if task is not None and facts_of(task).calls_function and not (own_code and facts_of(task).makes_trainer):
        whose = _OWN_CODE[task == SCRIPT_TASK]
        raise ConfigError(
            f"training a configuration of the study in {layout.folder}",
            f'study.task is "{task_word(task)}": dryfit trains no model there, your {whose} does',
            "a study whose task trains a model",
            how_it_was_run(layout, state),
        )
    if state.resolved is None:
        raise LedgerError(
            f"training a configuration of the study in {layout.folder}",
            "its data was never checked: no run of it came so far",
            hint=f"run it with `dryfit tune {layout.study_file}`",
        )
    study = StudySnapshot(
        config=with_names(
            with_precision(load_study_file(layout.frozen_file).config, recorded_precision(state)), state.resolved
        ),
        layout=layout,
        state=state,
        resolved=state.resolved,
        nodes={HERE: local_facts(state.resolved)},
    )
    kinds = planned_devices(study)
    for each in state.trials:
        each.plan = plan_here(kinds, each)
    return study


def _chosen(state: StudyState, trial: int | str) -> TrialState:
    if isinstance(trial, int):
        return trial_of(state, trial)
    if trial != BEST:
        hint = _NO_MEAN if _TOP.fullmatch(trial) else ""
        raise ConfigError("choosing a trial", f"{trial!r}", "a number, best", hint)
    if state.best is None:
        raise ConfigError("choosing the best trial", "no trial has completed yet", "the number of a trial")
    return state.best


def distinct(study: StudySnapshot, trials: Iterable[TrialState]) -> list[TrialState]:
    """Return trials without those that have the same settings as one before them."""
    found: list[TrialState] = []
    for trial in trials:
        own = trial_settings(study, trial.params, trial.own)
        if all(own != trial_settings(study, other.params, other.own) for other in found):
            found.append(trial)
    return found


def none_completed(study: StudySnapshot) -> ConfigError:
    """Return the error for a study without a completed trial."""
    ended = study.state.counts[Outcome.PRUNED] + study.state.counts[Outcome.FAILED]
    return ConfigError("choosing the best trials", f"no trial has completed ({ended} ended otherwise)")


def do_runs(
    study: StudySnapshot, runs: Sequence[FinalRun], on_note: Callable[[str], None]
) -> tuple[End, dict[str, FinalResult | DryfitError]]:
    """Do runs under their locks; finished ones are not repeated.

    Args:
        study: The study that the configurations are of.
        runs: The runs.
        on_note: Called with a line about each thing that happens.
    """
    first = study.layout.final(runs[0].name)
    settings = SupervisorSettings.of_no_study(first.folder, study.config.runtime.isolation)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run_lock(study.layout.final(run.name)))
        supervisor = stack.enter_context(Supervisor(settings))
        stops = stack.enter_context(StopRequests(first.stop_request, supervisor.wake))
        work = FinalTraining(study, LocalNode(supervisor), stops, on_note)
        work.do(runs, most=runs_at_once(study, runs))
    return stops.why or End.DONE, work.results


def _trained(study: StudySnapshot, run: FinalRun, result: FinalResult, folder: Path | None) -> TrainedModel:
    metric = study.config.study.metric
    value = (result.validation or {}).get(metric)
    judgement = model_judgement(
        study.state, study.layout, value, subject="This model", trial=run.trial, folds=study.config.data.folds
    )
    return TrainedModel.of(
        result,
        study=study.config.study.name,
        metric=metric,
        trial=run.trial.number,
        seed=run.seed,
        with_validation=run.last_step is not None,
        searched=run.trial.value,
        value=value,
        judgement=judgement,
        steps=result.training.steps,
        folder=str(folder) if folder is not None else None,
    )


def _configuration(rank: int, trial: TrialState, runs: Sequence[SeedRun]) -> TopConfiguration:
    assert trial.value is not None  # only complete trials are ranked
    return TopConfiguration.of(
        trial,
        rank=rank,
        trial=trial.number,
        searched=trial.value,
        validation=spread([run.validation for run in runs]),
        test=spread([run.test for run in runs]),
        runs=tuple(runs),
    )


def _seed_run(run: FinalRun, result: FinalResult | DryfitError, metric: str) -> SeedRun:
    if isinstance(result, DryfitError):
        return SeedRun(seed=run.seed, error=str(result))
    return SeedRun(
        seed=run.seed, validation=(result.validation or {}).get(metric), test=(result.test or {}).get(metric)
    )


_FEWEST_COMPARED = 2
_MOST_COMPARED = 20
"""Corrected for more comparisons, an interval would end where no draw of the bootstrap lies."""
_COMPARING = "comparing the best trials"


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
    """Train the best trials of a study with several seeds each, and test which of them really differ.

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
    if not _FEWEST_COMPARED <= top <= _MOST_COMPARED:
        raise ConfigError(_COMPARING, f"the best {top}", f"{_FEWEST_COMPARED} to {_MOST_COMPARED} trials")
    if seeds < FEWEST_SEEDS:
        raise ConfigError(
            _COMPARING, f"seeds: {seeds}", f"at least {FEWEST_SEEDS}", "one does not say how much seeds differ"
        )
    study = study_snapshot(folder)
    trials, notes = _contenders(study, top)
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


def _contenders(study: StudySnapshot, top: int) -> tuple[list[TrialState], list[str]]:
    """Return the best trials with different settings, and what is to be said of that.

    Raises:
        ConfigError: There are not two.
    """
    ranked = study.state.ranked
    if not ranked:
        raise none_completed(study)
    chosen = distinct(study, ranked)[:top]
    if len(chosen) < _FEWEST_COMPARED:
        found = "all complete trials have the same settings" if len(ranked) > 1 else "only one trial is complete"
        raise ConfigError(_COMPARING, found, "two that differ at least", "run more of them: `dryfit tune --trials N`")
    fewer = f"Only {len(chosen)} trials with different settings are complete: these are compared."
    return chosen, [fewer] if len(chosen) < top else []


def _run(study: StudySnapshot, trial: TrialState, seed: int) -> FinalRun:
    """Return the run of a trial with a seed: one that is done and has its rows, else one that leaves test alone."""
    own = replace(final_run(trial, seed=seed, with_validation=False, save=False), test=False)
    others = (replace(own, test=True), replace(own, test=True, save=True))
    done = (run for run in (own, *others) if validation_rows(study.layout.final(run.name).scored) is not None)
    return next((run for run in done if finished(study, run) is not None), own)


def _done(
    study: StudySnapshot, runs: Sequence[FinalRun], on_note: Callable[[str], None]
) -> tuple[End, Mapping[str, FinalResult | DryfitError] | None]:
    """Do the runs that are not done yet; None where some are left, as a stop was asked for.

    One that is done and has no rows is looked at again: nobody may have seen its end, and taken over what it left.
    """
    results: dict[str, FinalResult | DryfitError] = {}
    for run in runs:
        result = finished(study, run)
        if result is not None and validation_rows(study.layout.final(run.name).scored) is not None:
            results[run.name] = result
    left = [run for run in runs if run.name not in results]
    end = End.DONE
    if left:
        end, new = do_runs(study, left, on_note)
        results |= new
    return end, results if all(run.name in results for run in runs) else None


def _outcome(study: StudySnapshot, run: FinalRun, result: FinalResult | DryfitError) -> SeedOutcome:
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
