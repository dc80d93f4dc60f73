"""What children of a study are asked, and how long each kind may take."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution

from dryfit.ledger.folder import TrialLayout, attempt_key
from dryfit.ledger.state import TrialState
from dryfit.processes.child_spec import ChildLimits, ChildSpec
from dryfit.search.space import Space
from dryfit.settings.devices import node_of, visible_devices
from dryfit.settings.errors import AttemptTerms, FailureKind, PastFailure
from dryfit.settings.execution import ExecutionChoice, PlanSubject, adapters, plan_execution
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.plan_messages import RehearsedPlanRequest
from dryfit.settings.study_file import RuntimeSettings, StudyConfig
from dryfit.settings.tables import CalledCode, ModelSettings, TrialSettings
from dryfit.settings.task_facts import facts_of, task_word
from dryfit.settings.training_messages import (
    ObjectiveRequest,
    OwnTrainingRequest,
    ResolveRequest,
    ResolveResult,
    ScriptRequest,
    TrainerRequest,
    TrainRequest,
)
from dryfit.settings.trial import Scalar, TrialConfig
from dryfit.study.context import AnyStudy, StudyContext, trial_config
from dryfit.study.files import most_kept

# How long each kind of child may take: to start, in silence, in all, and to stop.


def preparing_limits(runtime: RuntimeSettings) -> ChildLimits:
    """Return the limits of a study's child that trains nothing."""
    return ChildLimits(
        start_s=runtime.start_timeout_s, hang_s=runtime.hang_timeout_s, total_s=None, stop_grace_s=runtime.stop_grace_s
    )


def training_limits(runtime: RuntimeSettings, past: tuple[PastFailure, ...] = (), *, own: bool = False) -> ChildLimits:
    """Return the limits of a child that trains.

    After one failure as a hang, a trial gets ``runtime.hang_timeout_s`` from then on: the limit that was learned from
    its pace was wrong, or it hangs for good.

    Args:
        runtime: The study's settings.
        past: Earlier failures of the trial.
        own: The user's own code trains: its signs of life come from a thread, and tell nothing of its pace.
    """
    return ChildLimits(
        start_s=runtime.start_timeout_s,
        hang_s=runtime.hang_timeout_s,
        total_s=runtime.trial_timeout_s,
        stop_grace_s=runtime.stop_grace_s,
        hang_learned=not own and not any(failure.kind is FailureKind.HANG for failure in past),
    )


# Requests to a study's children: RESOLVE, TRAIN and the user's own code, by settings and placement.


_LIGHTEST = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how one attempt of a trial runs; does not change what is learned.

    Attributes:
        attempt: Its number, from 1.
        place: Where: the r-th of its devices is for rank r.
        choice: What the planner chose; None: the trial is run as the study file says.
        terms: What earlier failures of the trial ask for.
        memory_fraction: The most of its device that each of its processes may take; None: all.
        planned_bytes: What each of them is planned to take of it; None: not known.
    """

    attempt: int
    place: str
    choice: ExecutionChoice | None = None
    terms: AttemptTerms = field(default_factory=AttemptTerms)
    memory_fraction: float | None = None
    planned_bytes: int | None = None


def resolve_request(
    config: StudyConfig,
    space: Space,
    *,
    pairs: Sequence[tuple[ModelSettings, int]],
    cache_dir: Path,
    device: str,
    elsewhere: bool = False,
    precisions: tuple[str, ...] = (),
) -> ResolveRequest:
    """Return the request to check data, models and machine, before anything is trained or planned.

    Args:
        config: The study file.
        space: Its search space.
        pairs: Models and lengths to prepare.
        cache_dir: The cache of tokenised rows.
        device: As in ``execution.device``.
        elsewhere: Whether trials run on CUDA devices of other machines.
        precisions: Number formats that trials may have.
    """
    own = facts_of(config.study.task).own
    return ResolveRequest(
        task=config.study.task,
        metrics=(config.study.metric, *config.study.also),
        searched={name: _bounds(space, name) for name in space.names} if own else {},
        data=config.data,
        settings=space.as_prepared(config.trial_settings),
        pairs=tuple(pairs),
        cache_dir=str(cache_dir),
        device=device,
        elsewhere=elsewhere,
        precisions=precisions,
        processes=config.execution.processes,
    )


def with_names(config: StudyConfig, resolved: ResolveResult) -> StudyConfig:
    """Return a configuration with the names of classes that the training rows gave, where the study file gives none."""
    if config.data.labels or not resolved.labels:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"labels": resolved.labels})})


def plan_subject(config: StudyConfig, settings: TrialSettings, source: str = "") -> PlanSubject:
    """Return the subject of a trial's memory plan.

    Args:
        config: The study file.
        settings: The trial's settings.
        source: The version of the user's own task; empty: none, or not known.
    """
    return PlanSubject(
        task=config.study.task,
        source=source,
        settings=settings,
        num_labels=config.data.num_labels,
        multi_label=config.data.multi_label,
        lora=adapters(config.study.task, settings),
    )


def _bounds(space: Space, name: str) -> tuple[Scalar, ...]:
    """Return the choices of a searched key, or the ends of its range, over all its cases."""
    bounds: dict[Scalar, None] = {}
    for param in space.cases(name):
        drawn = param.distribution
        ends = drawn.choices if isinstance(drawn, CategoricalDistribution) else (drawn.low, drawn.high)
        bounds |= dict.fromkeys(ends)
    return tuple(bounds)


def child_spec(study: StudyContext, trial: TrialState, placement: Placement) -> ChildSpec:
    """Return the child that trains a trial, or calls the user's own function for it."""
    paths, own = study.layout.trial(trial.number), study.config.function
    if own is None:
        config = trial_config(study, trial.number, trial.params, trial.seed)
        body = train_request(study, config, paths, placement, fingerprint=trial.fingerprint or config.fingerprint)
        more = {"fold_reports": trial.fold_reports, "revisions": study.resolved.revisions}
        body = body.model_copy(update=more | _source(study, task_word(study.config.study.task)))
    else:
        body = own_code_request(study, own, trial, paths, placement)
    attempt = placement.attempt
    return ChildSpec(
        key=attempt_key(trial.number, attempt),
        folder=paths.attempt(attempt),
        body=body,
        limits=training_limits(study.config.runtime, trial.past_failures, own=own is not None),
        place=placement.place,
        planned_bytes=placement.planned_bytes,
    )


def own_code_request(
    study: AnyStudy, own: CalledCode, trial: TrialState, paths: TrialLayout, placement: Placement
) -> ObjectiveRequest | OwnTrainingRequest:
    """Return the request to run a user's own code for an attempt of a trial.

    Args:
        study: The study.
        own: That code.
        trial: The trial.
        paths: Where the attempt has its files.
        placement: How it is run.
    """
    body = _objective_request(study, own, trial, paths, placement)
    return body if study.config.objective is not None else _trainer_request(study, body, paths, placement)


def _objective_request(
    study: AnyStudy, own: CalledCode, trial: TrialState, paths: TrialLayout, placement: Placement
) -> ObjectiveRequest:
    node = node_of(placement.place)
    steps = [attempt.checkpoint_step for attempt in trial.attempts if attempt.checkpoint_step is not None]
    return ObjectiveRequest(
        objective=own,
        number=trial.number,
        params=dict(trial.params),
        seed=trial.seed,
        reported=tuple(point.step for point in trial.reports),
        checkpoint_step=max(steps, default=None),
        threads=study.config.execution.threads or max(1, study.nodes[node].cores // study.most_on(node)),
        **_of_attempt(study, paths, placement, trial.fingerprint),
        **_source(study, own.function),
    )


def _of_attempt(study: AnyStudy, paths: TrialLayout, placement: Placement, fingerprint: str) -> dict[str, Any]:
    """Return what every request for an attempt says of it."""
    return {
        "fingerprint": fingerprint,
        "attempt": placement.attempt,
        "checkpoint_dir": str(paths.files_of(placement.attempt).checkpoints),
        "kept_checkpoint_dir": str(paths.checkpoints),
        "verdict_timeout_s": study.config.runtime.verdict_timeout_s,
        "visible_device": visible_devices(placement.place),
        "diagnostic": placement.terms.diagnostic,
    }


def _source(study: AnyStudy, name: str) -> dict[str, Any]:
    """Return the file of the user's own task or function, and its hash since the session began."""
    return {"own_file": study.resolved.own_file, "own_hash": study.resolved.revisions.get(name, "")}


def calling_request(own: CalledCode, *, params: dict[str, Scalar], seed: int, number: int = 0) -> ObjectiveRequest:
    """Return the call of a user's own function for a trial that is only rehearsed: it has no files.

    Args:
        own: The function.
        params: Values of the space.
        seed: The trial's.
        number: The trial's.
    """
    return ObjectiveRequest(
        objective=own,
        number=number,
        fingerprint="",
        params=params,
        seed=seed,
        attempt=1,
        reported=(),
        checkpoint_step=None,
        checkpoint_dir="",
        kept_checkpoint_dir="",
        verdict_timeout_s=1.0,
        threads=1,
    )


def _trainer_request(
    study: AnyStudy, calling: ObjectiveRequest, paths: TrialLayout, placement: Placement
) -> OwnTrainingRequest:
    runtime, script = study.config.runtime, study.config.script
    best_dir = str(paths.files_of(placement.attempt).best) if most_kept(runtime.keep) != 0 else None
    request = TrainerRequest(
        calling=calling,
        best_dir=best_dir,
        checkpoint_every_s=runtime.checkpoint_every_s,
        choice=placement.choice,
        memory_fraction=placement.memory_fraction,
    )
    if script is None:
        return request
    return ScriptRequest(results=script.results, **{name: each for name, each in request if name != "job"})


def rehearsed_plan_request(
    study: StudyContext, own: CalledCode, trial: TrialState, device: DeviceSpec, calibration_dir: Path
) -> RehearsedPlanRequest:
    """Return the request to plan a trial of the user's own code.

    Args:
        study: The study.
        own: That code.
        trial: The trial.
        device: What it is planned for.
        calibration_dir: Folder of what was measured of devices.
    """
    calling = calling_request(own, params=dict(trial.params), seed=trial.seed, number=trial.number)
    return RehearsedPlanRequest(
        calling=calling.model_copy(update=_source(study, own.function)),
        is_script=study.config.script is not None,
        device=device,
        allow=study.config.execution.allow,
        calibration_dir=str(calibration_dir),
    )


def train_request(
    study: AnyStudy, config: TrialConfig, paths: TrialLayout, placement: Placement, *, fingerprint: str
) -> TrainRequest:
    """Return the request to train a configuration.

    Args:
        study: The study of the configuration.
        config: What to learn.
        paths: Where the run has its files.
        placement: How it is run.
        fingerprint: Identity of the run, wherever the study lies and whichever version asks.
    """
    choice, terms = placement.choice, placement.terms
    node, own = node_of(placement.place), paths.files_of(placement.attempt)
    plan = plan_execution(
        study.config.execution,
        effective_batch=config.settings.train.batch_size,
        device=study.resolved.device,
        cores=study.nodes[node].cores,
        parallel=study.most_on(node),
        ranks=choice.tp if choice is not None else None,
    )
    plan = plan if choice is None else choice.carried_out(plan)
    return TrainRequest(
        config=config,
        plan=plan.model_copy(update={"loader_workers": lighter_workers(plan.loader_workers, terms.lighter)}),
        cache_dir=str(study.layout.cache),
        best_dir=str(own.best),
        kept_best_dir=str(paths.best),
        scored_dir=str(own.scored),
        load_report=str(own.load_report),
        checkpoint_every_s=study.config.runtime.checkpoint_every_s,
        memory_fraction=placement.memory_fraction,
        file_sharing=terms.lighter > 0,
        **_of_attempt(study, paths, placement, fingerprint),
    )


def lighter_workers(workers: int, lighter: int) -> int:
    """Return the loader workers of an attempt: half as many each time, and none the last time.

    A loader without workers shares no memory, so a full ``/dev/shm`` does it no harm.
    """
    return 0 if lighter >= _LIGHTEST else workers >> lighter
