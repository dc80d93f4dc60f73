"""Train the best configurations of a study once more and save them as one model that averages their predictions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dryfit.api.training import FinalOutcome, distinct, do_runs, none_completed, study_snapshot
from dryfit.core.errors import ConfigError, DryfitError
from dryfit.core.jobs.ensemble import EnsembleResult
from dryfit.core.settings.task_facts import BUILT_IN, facts_of, task_word
from dryfit.core.settings.trial import Outcome, best_first
from dryfit.reporting.finals import EnsembleMemberScores, TrainedEnsemble
from dryfit.reporting.worth import model_judgement
from dryfit.store.state import TrialState
from dryfit.study.loop.final_runs import EnsembleRun, final_run
from dryfit.study.loop.final_training import copy_model, finished, refuse_taken
from dryfit.study.loop.next_step import End
from dryfit.study.trials.context import StudySnapshot

MOST_MEMBERS = 32
"""The folder is named after all members, and more would take too long."""


@dataclass(frozen=True, slots=True)
class EnsembleOutcome(FinalOutcome):
    """How ``train_ensemble`` ended; ``model`` is what was made, None where it stopped before."""

    model: TrainedEnsemble | None


def train_ensemble(
    folder: Path | str,
    *,
    top: int,
    with_validation: bool = False,
    seed: int | None = None,
    out: Path | str | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> EnsembleOutcome:
    """Train the best configurations of a study once more, evaluate them together, and save them as one model.

    The mean is taken of probabilities: of classes, or of answers for spans. Each configuration is a run of its own, as
    with :func:`dryfit.train`: a finished run is not repeated, and one that was stopped goes on.

    Args:
        folder: The study.
        top: How many of the best trials by the study's metric, also where it has several goals, from 2 to 32. Of trials
            with the same settings only the best is taken.
        with_validation: Train each on train and validation together, as :func:`dryfit.train` does.
        seed: None: each trial's own.
        out: Where to put a copy of the saved folder; None: it stays in the study.
        on_note: Called with a line about each thing that happens.

    Raises:
        ConfigError: There are not so many trials, the task has no mean, or ``out`` is there already.
        StudyBusyError: Another process does one of the runs.
        DryfitError: A run failed; those that are done stay.
    """
    study = study_snapshot(folder)
    _check_task(study)
    target = Path(out).expanduser().absolute() if out is not None else None
    if target is not None:
        refuse_taken(target)
    chosen = _best_trials(study, top)
    metric, also = study.config.study.metric, study.config.study.also
    if also:
        on_note(f"the best by {metric} alone: {', '.join(also)} is not looked at")
    runs = [final_run(trial, seed=seed, with_validation=with_validation) for trial in chosen]
    together = EnsembleRun(tuple(runs))
    paths = study.layout.final(together.name)
    end, result = End.DONE, finished(paths)
    if result is None:
        on_note(f"{together.name}: trials {', '.join(str(trial.number) for trial in chosen)}")
        end, results = do_runs(study, runs, on_note, together)
        for error in results.values():
            if isinstance(error, DryfitError):
                raise error
        result = results.get(together.name)
    if not isinstance(result, EnsembleResult):
        return EnsembleOutcome(end, None)
    if target is not None:
        copy_model(paths.model, target)
    return EnsembleOutcome(End.DONE, _trained(study, together, result, target or paths.model))


def _check_task(study: StudySnapshot) -> None:
    """Refuse a task whose models cannot be averaged.

    Raises:
        ConfigError: The study has such a task.
    """
    task = study.config.study.task
    if not facts_of(task).mean:
        names = ", ".join(name for name, facts in BUILT_IN.items() if facts.mean)
        found = f'study.task is "{task_word(task)}"'
        raise ConfigError("averaging models", found, f"one of {names}", facts_of(task).no_mean)


def _best_trials(study: StudySnapshot, top: int) -> list[TrialState]:
    """Return the best completed trials; of those with the same settings the best, and of equals the earliest.

    Raises:
        ConfigError: There are not so many, or ``top`` is out of range.
    """
    doing = f"choosing the best {top} trials"
    if not 2 <= top <= MOST_MEMBERS:
        raise ConfigError(doing, f"an ensemble of {top}", f"2 to {MOST_MEMBERS} members", "one: --trial best")
    complete = [trial for trial in study.state.present if trial.outcome is Outcome.COMPLETE]
    best = distinct(study, best_first(complete, study.config.study.resolved_direction))
    if not best:
        raise none_completed(study)
    if len(best) < top:
        repeated = f", {len(complete)} with those that repeat one" if len(complete) > len(best) else ""
        least = f"top2 to top{len(best)}, or more trials" if len(best) > 1 else "at least 2"
        hint = "run more of them: `dryfit tune --trials N`"
        raise ConfigError(doing, f"{len(best)} completed with a value{repeated}", least, hint)
    return best[:top]


def _trained(study: StudySnapshot, run: EnsembleRun, result: EnsembleResult, folder: Path) -> TrainedEnsemble:
    metric = study.config.study.metric
    value = (result.validation or {}).get(metric)
    judgement = model_judgement(
        study.state, study.layout, value, subject="This ensemble", trial=None, folds=study.config.data.folds
    )
    return TrainedEnsemble.of(
        result,
        study=study.config.study.name,
        metric=metric,
        with_validation=run.with_validation,
        value=value,
        judgement=judgement,
        members=tuple(
            EnsembleMemberScores.of(
                own,
                trial=member.trial.number,
                seed=member.seed,
                params=member.trial.params,
                searched=member.trial.value,
                folder=str(folder / "members" / str(place)),
            )
            for place, (member, own) in enumerate(zip(run.members, result.members, strict=True), start=1)
        ),
        folder=str(folder),
    )
