"""Runs beside a study: a configuration trained once more; and their requests."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.train import FinalRequest, TrainRequest
from dryfit.core.settings.task_facts import task_word
from dryfit.core.settings.trial import Outcome, TrialConfig, mean
from dryfit.core.wire import REQUEST_FILE, digest, write_model
from dryfit.scoring.row_files import FACTS_FILE
from dryfit.store.layout import FinalLayout
from dryfit.store.state import PlanState, TrialState
from dryfit.study.planning.device_needs import process_count
from dryfit.study.resources.trial_devices import choose_place
from dryfit.study.trials.child_requests import Placement, train_request
from dryfit.study.trials.context import StudySnapshot
from dryfit.study.trials.trial_config import trial_config


@dataclass(frozen=True, slots=True)
class FinalRun:
    """One configuration to train once more.

    Attributes:
        trial: The trial with the configuration.
        seed: Seed of head, dropout and batch order; the trial's own repeats the trial.
        last_step: As in :class:`dryfit.core.jobs.train.FinalRequest`.
        save: Whether to save the model, or to return its scores alone.
        schedule_steps: As in :class:`dryfit.core.jobs.train.FinalRequest`.
        test: Whether to evaluate on test.
        own: The job of the user's own code that trains it; None: dryfit does.
    """

    trial: TrialState
    seed: int
    last_step: int | None = None
    save: bool = True
    schedule_steps: int | None = None
    test: bool = True
    own: Job | None = None

    @property
    def name(self) -> str:
        """Name of the run's folder; different for everything that computes something else."""
        parts = [f"trial-{self.trial.number:04d}", f"seed-{self.seed}"]
        parts += ["with-validation"] if self.last_step is not None else []
        parts += [] if self.save else ["scores"]
        return "-".join([*parts, *([] if self.test else ["no-test"])])

    @property
    def job(self) -> Job:
        """What its process does."""
        return self.own or Job.FINAL

    @property
    def plan(self) -> PlanState | None:
        """The plan of its trial."""
        return self.trial.plan


def final_run(
    trial: TrialState, *, seed: int | None, with_validation: bool, save: bool = True, own: Job | None = None
) -> FinalRun:
    """Return the run that trains a trial's configuration once more.

    Args:
        trial: The trial.
        seed: None: the trial's own.
        with_validation: Train on train and validation together.
        save: As in :class:`FinalRun`.
        own: As in :class:`FinalRun`.

    Raises:
        ConfigError: The trial was refused; or it has no best validation, whose step would be the last; or only the
            user's own code knows which rows it validates on.
    """
    doing = f"training trial {trial.number} once more"
    if trial.outcome is Outcome.REFUSED:
        raise ConfigError(doing, f"it was refused ({trial.reason})", "a trial that fits the device")
    last_step = schedule_steps = None
    if with_validation and own is not None:
        raise ConfigError(doing, "which rows it is validated on, only your own code knows", "without --with-validation")
    if with_validation and trial.folds:
        # As long as its trainings were on average: each had nearly as many rows as this one has.
        last_step = max(1, round(mean([fold.best_step for fold in trial.folds])))
        schedule_steps = max(last_step, round(mean([fold.schedule_steps for fold in trial.folds])))
    elif with_validation:
        last_step = trial.best_step
        if last_step is None:
            allowed = "with --with-validation: a trial that has a best validation, whose step is the last one"
            raise ConfigError(doing, "it has none", allowed, "train it without --with-validation, or another one")
    return FinalRun(trial, trial.seed if seed is None else seed, last_step, save, schedule_steps, own=own)


def final_request(study: StudySnapshot, run: FinalRun, placement: Placement) -> FinalRequest:
    """Return the request for a run."""
    paths, trial = study.layout.final(run.name), run.trial
    known = study.state.baselines
    baseline = known.result.strongest(study.state.goals[0]) if known is not None else None
    return FinalRequest(
        training=_train_request(study, run, paths, placement),
        last_step=run.last_step,
        schedule_steps=run.schedule_steps,
        chosen_dirs=_chosen_dirs(study, run),
        model_dir=str(paths.model) if run.save else None,
        attempt_model_dir=str(paths.files_of(placement.attempt).model),
        study=study.config.study.name,
        searched=trial.value,
        folds=max(1, len(trial.folds)),
        baseline=(baseline.metrics[study.state.goals[0].name], baseline.words) if baseline is not None else None,
        facts_file=str(study.layout.baselines / FACTS_FILE),
        test=run.test,
    )


def _chosen_dirs(study: StudySnapshot, run: FinalRun) -> tuple[str, ...]:
    """Return the folders that may hold what validation chose: the trial's weights, or a later run's."""
    if run.last_step is None:
        return ()
    seeds = dict.fromkeys((run.trial.seed, run.seed))
    later = [final_run(run.trial, seed=seed, with_validation=False) for seed in seeds]
    return (
        str(study.layout.trial(run.trial.number).best),
        *(str(study.layout.final(other.name).model) for other in later),
    )


def _train_request(study: StudySnapshot, run: FinalRun, paths: FinalLayout, placement: Placement) -> TrainRequest:
    """Return the training of a run: of one model, though the trial may have trained one for each fold."""
    config = trial_config(study, run.trial.number, run.trial.params, run.seed)
    config = config.model_copy(update={"data": config.data.model_copy(update={"folds": 1})})
    return train_request(study, config, paths, placement, fingerprint=_fingerprint(run.trial, config))


def _fingerprint(trial: TrialState, config: TrialConfig) -> str:
    """Return the identity of a run: its trial as recorded, with today's data, and its own seed."""
    if not trial.fingerprint:
        return config.fingerprint
    decides = {
        "trial": trial.fingerprint,
        "seed": config.seed,
        "task": task_word(config.task),
        "data": [config.data_fingerprint, config.data.num_labels, config.data.multi_label],
    }
    return digest(decides)


def in_process_request(study: StudySnapshot, run: FinalRun) -> Path:
    """Write the request for :mod:`dryfit.jobs.in_process` into a folder of its own, which is emptied first."""
    paths = FinalLayout(study.layout.final(run.name).folder.with_name(f"{run.name}-in-process"))
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.attempt(1).mkdir(parents=True)
    choice = run.trial.plan.execution if run.trial.plan is not None else None
    processes = process_count(run.trial.plan, study.config.execution)
    place = choose_place(study.resolved.device, study.nodes, processes=processes)
    body = _train_request(study, run, paths, Placement(1, place, choice))
    request = paths.attempt(1) / REQUEST_FILE
    write_model(request, body, durable=False)
    return request
