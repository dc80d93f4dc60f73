"""What a study's loop works on, and what it makes of it: a trial's configuration, and the child that trains it."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from optuna.distributions import CategoricalDistribution

from dryfit.config.schema import RuntimeSettings, StudyConfig
from dryfit.core.failure import AttemptTerms, FailureKind, PastFailure
from dryfit.core.jobs import Job, ObjectiveRequest, ResolveRequest, ResolveResult, TrainRequest
from dryfit.core.jobs.memory import ExecutionChoice
from dryfit.core.settings.execution import DeviceKind, plan_execution
from dryfit.core.settings.tables import ModelSettings, ObjectiveSettings, TrialSettings
from dryfit.core.settings.task_facts import is_own
from dryfit.core.settings.trial import Scalar, TrialConfig
from dryfit.core.sharding.device_groups import check_enough, places_of
from dryfit.core.wire import canonical_json
from dryfit.runtime.children.child_spec import ChildLimits, ChildSpec
from dryfit.search.sampling.pruning import most_reports
from dryfit.search.space.fields import apply_params, setting
from dryfit.search.space.params import enumerated
from dryfit.search.space.space import Space
from dryfit.store.layout import StudyLayout, TrialLayout
from dryfit.store.ledger import Ledger
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState
from dryfit.study.resources.trial_devices import Parallelism, least_busy_device, parallelism, visible_devices

_FEW_VALUES = 100
_LIGHTEST = 3


@dataclass(frozen=True, slots=True)
class StudyContext:
    """What a loop works on; all of it stays the same while the loop runs, but for what the ledger's fold learns."""

    config: StudyConfig
    layout: StudyLayout
    space: Space
    ledger: Ledger
    state: StudyState
    resolved: ResolveResult
    total: int
    cores: int

    @property
    def parallelism(self) -> Parallelism:
        """How many trials may run side by side, as far as cores go."""
        return side_by_side(self)

    @property
    def trial_job(self) -> Job:
        """What the process of a trial is for."""
        return Job.TRAIN if self.config.objective is None else Job.OBJECTIVE


@dataclass(frozen=True, slots=True)
class StudySnapshot:
    """What is known of a study by one who only looks at it, whether it runs or not."""

    config: StudyConfig
    layout: StudyLayout
    state: StudyState
    resolved: ResolveResult
    cores: int


def side_by_side(study: StudyContext | StudySnapshot) -> Parallelism:
    """How many trials of a study may run side by side on this machine, as far as cores go."""
    return parallelism(study.config, study.resolved, study.cores)


def trial_settings(
    study: StudyContext | StudySnapshot, params: Mapping[str, Scalar], own: Mapping[str, Scalar]
) -> TrialSettings:
    """The tables of a trial: the study file's, with the searched values in them.

    Args:
        study: Whose trial it is.
        params: What it drew.
        own: The file's own values when it did; of a key that is searched only since then, the trial has that one.
    """
    kept = {name: own[name] for name in study.config.space if name in own}
    return apply_params(study.config.trial_settings, {**kept, **params})


def possible_values(config: StudyConfig, space: Space, key: str) -> tuple[str, ...]:
    """Every word that a key of few values may have in a trial: what the space can draw, else the file's own.

    What the device or the disk does not allow can so be refused before the first trial.
    """
    drawn = [enumerated(param.distribution, limit=_FEW_VALUES) for param in space.cases(key)]
    searched = {str(value) for values in drawn for value in values or ()}
    return tuple(sorted(searched)) or (str(setting(config.trial_settings, key)),)


def resolve_request(
    config: StudyConfig,
    space: Space,
    *,
    pairs: Sequence[tuple[ModelSettings, int]],
    cache_dir: Path,
    device: str,
    precisions: tuple[str, ...] = (),
) -> ResolveRequest:
    """What is asked before anything is trained or planned.

    Args:
        config: The study file.
        space: Its search space.
        pairs: Models and lengths to prepare.
        cache_dir: Where tokens are looked for and put.
        device: As in ``execution.device``.
        precisions: Number formats that trials may have.
    """
    own = is_own(config.study.task)
    return ResolveRequest(
        task=config.study.task,
        metrics=(config.study.metric, *config.study.also),
        searched={name: _ends(space, name) for name in space.names} if own else {},
        data=config.data,
        settings=space.as_prepared(config.trial_settings),
        pairs=tuple(pairs),
        cache_dir=str(cache_dir),
        device=device,
        precisions=precisions,
        processes=config.execution.processes,
    )


def _ends(space: Space, name: str) -> tuple[Scalar, ...]:
    """The choices of a searched key, or the ends of its range, of all its cases."""
    found: dict[Scalar, None] = {}
    for param in space.cases(name):
        drawn = param.distribution
        if isinstance(drawn, CategoricalDistribution):
            found |= dict.fromkeys(drawn.choices)
        else:
            found |= dict.fromkeys((drawn.low, drawn.high))
    return tuple(found)


def preparing_limits(runtime: RuntimeSettings) -> ChildLimits:
    """How long a child may take that trains nothing."""
    return ChildLimits(
        start_s=runtime.start_timeout_s, hang_s=runtime.hang_timeout_s, total_s=None, stop_grace_s=runtime.stop_grace_s
    )


def trial_config(
    study: StudyContext | StudySnapshot, number: int, params: Mapping[str, Scalar], seed: int
) -> TrialConfig:
    """Everything that decides what trial ``number`` learns; it may be the one that is about to be asked for."""
    trials = study.state.trials
    own = trials[number].own if number < len(trials) else dict[str, Scalar]()
    return TrialConfig(
        number=number,
        task=study.config.study.task,
        metric=study.config.study.metric,
        direction=study.config.study.resolved_direction,
        also=study.config.study.also,
        data=study.config.data,
        settings=trial_settings(study, params, own),
        params=dict(params),
        seed=seed,
        data_fingerprint=study.resolved.data_fingerprint,
    )


def trial_fingerprint(study: StudyContext, number: int, params: Mapping[str, Scalar], seed: int) -> str:
    """Hash of all that changes a trial's result; of a function of the user's own, its name stands for what it does."""
    own = study.config.objective
    if own is None:
        return trial_config(study, number, params, seed).fingerprint
    decides = {"function": own.function, "version": own.version, "params": dict(params), "seed": seed}
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()[:16]


def fold_reports(study: StudyContext) -> int:
    """Numbers that a trial's folds have for their reports: the same in each trial that is asked for now.

    A report of one number is then the same of every trial: of one fold, after as many validations of it.
    """
    return most_reports(study.space, study.config.trial_settings) if study.config.data.folds > 1 else 1


def choose_device(resolved: ResolveResult, in_use: Sequence[str | None], *, processes: int) -> str | None:
    """The CUDA device, or group of them, with the fewest trials, where nothing is known of memory.

    Args:
        resolved: What is there.
        in_use: The devices, or groups, of the running trials.
        processes: Processes of each, with a device for each of them.

    Returns:
        Its name; None on a machine without CUDA devices.

    Raises:
        MachineError: There are fewer devices than a trial has processes.
    """
    if resolved.device is not DeviceKind.CUDA:
        return None
    check_enough(resolved.device_count, processes)
    names = visible_devices(resolved.device_count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return least_busy_device(in_use, places_of(names, processes))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how one attempt of a trial is run; nothing of it changes what is learned.

    Attributes:
        attempt: Its number, from 1.
        device: What the child sees of the machine's CUDA devices, the r-th for its rank r; None: nothing.
        choice: What the planner chose; None: the trial is run as wished.
        terms: What earlier failures of the trial ask for.
        memory_fraction: The most of its device that each of its processes may take; None: all.
    """

    attempt: int
    device: str | None = None
    choice: ExecutionChoice | None = None
    terms: AttemptTerms = field(default_factory=AttemptTerms)
    memory_fraction: float | None = None


def child_spec(study: StudyContext, trial: TrialState, placement: Placement) -> ChildSpec:
    """The child that trains a trial, or calls the user's own function for it."""
    paths, own = study.layout.trial(trial.number), study.config.objective
    past = trial.past_failures
    if own is None:
        config = trial_config(study, trial.number, trial.params, trial.seed)
        body = train_request(study, config, paths, placement, fingerprint=trial.fingerprint or config.fingerprint)
        body = body.model_copy(update={"fold_reports": trial.fold_reports})
        limits = training_limits(study.config.runtime, past)
    else:
        body = _objective_request(study, own, trial, placement)
        # Its signs of life come from a thread of their own: they say nothing of its pace.
        limits = replace(training_limits(study.config.runtime, past), hang_learned=False)
    attempt = placement.attempt
    return ChildSpec(key=f"trial-{trial.number}-{attempt}", folder=paths.attempt(attempt), body=body, limits=limits)


def _objective_request(
    study: StudyContext, own: ObjectiveSettings, trial: TrialState, placement: Placement
) -> ObjectiveRequest:
    runtime = study.config.runtime
    steps = [one.checkpoint_step for one in trial.attempts if one.checkpoint_step is not None]
    return ObjectiveRequest(
        objective=own,
        number=trial.number,
        params=dict(trial.params),
        seed=trial.seed,
        attempt=placement.attempt,
        reported=tuple(point.step for point in trial.reports),
        checkpoint_step=max(steps, default=None),
        checkpoint_dir=str(study.layout.trial(trial.number).checkpoints),
        verdict_timeout_s=runtime.verdict_timeout_s,
        threads=study.config.execution.threads or max(1, study.cores // study.parallelism.most),
        visible_device=placement.device,
        diagnostic=placement.terms.diagnostic,
    )


def train_request(
    study: StudyContext | StudySnapshot,
    config: TrialConfig,
    paths: TrialLayout,
    placement: Placement,
    *,
    fingerprint: str,
) -> TrainRequest:
    """What a process is asked that trains a configuration.

    Args:
        study: Whose configuration it is.
        config: What to learn.
        paths: Where the run has its files.
        placement: How it is run.
        fingerprint: What identifies it, wherever the study lies and whichever version asks.
    """
    choice, terms = placement.choice, placement.terms
    runtime = study.config.runtime
    plan = plan_execution(
        study.config.execution,
        effective_batch=config.settings.train.batch_size,
        device=study.resolved.device,
        cores=study.cores,
        parallel=side_by_side(study).most,
        ranks=choice.tp if choice is not None else None,
    )
    plan = plan if choice is None else choice.carried_out(plan)
    return TrainRequest(
        config=config,
        fingerprint=fingerprint,
        plan=plan.model_copy(update={"loader_workers": lighter_workers(plan.loader_workers, terms.lighter)}),
        attempt=placement.attempt,
        cache_dir=str(study.layout.cache),
        checkpoint_dir=str(paths.checkpoints),
        best_dir=str(paths.best),
        load_report=str(paths.load_report),
        checkpoint_every_s=runtime.checkpoint_every_s,
        verdict_timeout_s=runtime.verdict_timeout_s,
        visible_device=placement.device,
        memory_fraction=placement.memory_fraction,
        diagnostic=terms.diagnostic,
        file_sharing=terms.lighter > 0,
    )


def lighter_workers(workers: int, lighter: int) -> int:
    """Loader workers of an attempt: half as many each time, and the last time none.

    A loader without workers shares no memory at all, so what a full ``/dev/shm`` does to others it does not do to it.
    """
    return 0 if lighter >= _LIGHTEST else workers >> lighter


def training_limits(runtime: RuntimeSettings, past: tuple[PastFailure, ...] = ()) -> ChildLimits:
    """How long a child may take that trains.

    A trial that was taken to hang gets all the time there is from then on: what was learned of its pace was wrong, or
    it hangs for good.
    """
    return ChildLimits(
        start_s=runtime.start_timeout_s,
        hang_s=runtime.hang_timeout_s,
        total_s=runtime.trial_timeout_s,
        stop_grace_s=runtime.stop_grace_s,
        hang_learned=not any(one.kind is FailureKind.HANG for one in past),
    )
