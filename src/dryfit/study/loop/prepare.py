"""What comes before the first trial: a RESOLVE child reads and tokenises the data and looks at the machine.

Then a BASELINES child finds out what the metric is worth without a model. Where trials call a function of the user's
own, an IMPORT child imports it instead of both.
"""

from collections.abc import Callable

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import DryfitError
from dryfit.core.jobs.baselines import BaselinesRequest
from dryfit.core.jobs.diagnostics import ProbeRequest
from dryfit.core.jobs.train import ImportRequest, ResolveResult
from dryfit.core.settings.execution import DeviceKind, DeviceSpec, smallest_device
from dryfit.core.settings.objective_table import CalledCode
from dryfit.core.settings.task_facts import facts_of, reads
from dryfit.core.wire import digest
from dryfit.runtime.machine.node import Nodes, first_node
from dryfit.scoring.row_files import FACTS_FILE
from dryfit.search.space.space import Space
from dryfit.store.events import BaselinesComputed
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.study.loop.child_jobs import ChildJob, run_job
from dryfit.study.loop.stops import StopRequests
from dryfit.study.resources.trial_devices import devices_without_torch
from dryfit.study.trials.child_limits import preparing_limits
from dryfit.study.trials.child_requests import resolve_request
from dryfit.study.trials.trial_config import possible_values


def prepare(
    config: StudyConfig, layout: StudyLayout, space: Space, nodes: Nodes, stops: StopRequests
) -> ResolveResult | None:
    """Run RESOLVE, or IMPORT where trials call a function of the user's own.

    Returns:
        The facts; None if a stop was asked for meanwhile.

    Raises:
        DryfitError: What the child raised: bad data, an unknown model, a machine that cannot do what was asked, a
            function that cannot be imported.
        ChildError: The child failed in another way, or died several times.
    """
    if config.function is not None:
        return _import_function(config, config.function, layout, nodes, stops)
    body = resolve_request(
        config,
        space,
        pairs=space.model_length_pairs(config.trial_settings),
        cache_dir=layout.cache,
        device=config.execution.device,
        elsewhere=_elsewhere(config),
        precisions=possible_values(config, space, "train.precision"),
    )
    job = ChildJob("checking data and machine", body, layout.preparations, preparing_limits(config.runtime))
    return run_job(job, nodes, stops)


def _import_function(
    config: StudyConfig, own: CalledCode, layout: StudyLayout, nodes: Nodes, stops: StopRequests
) -> ResolveResult | None:
    elsewhere = _elsewhere(config)
    gpus = 0 if elsewhere else len(first_node(nodes).facts.devices)
    device, count = (DeviceKind.CUDA, 0) if elsewhere else devices_without_torch(config.execution.device, gpus)
    body, limits = ImportRequest(objective=own, table=config.function_table), preparing_limits(config.runtime)
    job = ChildJob(f"importing {own.function}", body, layout.preparations, limits)
    result = run_job(job, nodes, stops)
    if result is None:
        return None
    specs: tuple[DeviceSpec, ...] = ()
    if count and device is DeviceKind.CUDA and facts_of(config.study.task).makes_trainer:
        looking = ChildJob("looking at the devices", ProbeRequest(), layout.preparations, limits)
        found = run_job(looking, nodes, stops)
        if found is None:
            return None
        specs = found.devices
    return ResolveResult(
        data_fingerprint="",
        splits={},
        revisions={own.function: result.source_hash},
        own_file=result.source_file,
        device=device,
        device_count=count,
        device_spec=smallest_device(specs),
        device_specs=specs,
        versions=result.versions,
    )


def _elsewhere(config: StudyConfig) -> bool:
    return config.nodes is not None and config.nodes.has_all_gpus(config.execution.device)


def find_baselines(
    config: StudyConfig,
    layout: StudyLayout,
    state: StudyState,
    resolved: ResolveResult,
    nodes: Nodes,
    stops: StopRequests,
    tell: Callable[[str], None],
) -> BaselinesComputed | None:
    """Compute the baselines of the metric.

    Args:
        config: With the thresholds of :func:`with_fitted_thresholds`.
        tell: Is told what goes on, and why there are no baselines.

    Returns:
        The event, not written yet. None: nothing is left to find out, it could not be, or a stop was asked for.
    """
    if _are_known(config, layout, state, resolved):
        return None
    tell("computing baselines")
    try:
        return _compute(config, layout, resolved, nodes, stops)
    except DryfitError as error:
        tell(f"the study goes on without baselines: {error}")
        return None


def with_fitted_thresholds(config: StudyConfig, space: Space) -> StudyConfig:
    """Return the configuration with every threshold fitted on validation that is so in a trial.

    What is fitted there is scored there, so that a baseline without it would be beaten by luck.
    """

    def in_a_trial(key: str) -> bool:
        return reads(config.study.task, key) and "calibrated" in possible_values(config, space, key)

    head, span = config.head, config.span
    if (config.data.multi_label or config.data.num_labels == 2) and in_a_trial("head.threshold"):
        head = head.model_copy(update={"threshold": "calibrated"})
    if in_a_trial("span.null_policy"):
        span = span.model_copy(update={"null_policy": "calibrated"})
    return config.model_copy(update={"head": head, "span": span})


def _are_known(config: StudyConfig, layout: StudyLayout, state: StudyState, resolved: ResolveResult) -> bool:
    """Whether nothing is left to find out: the study has its baselines, wants none, or its task can have none."""
    if config.function is not None or config.study.baselines_s == 0:
        return True
    known = state.baselines is not None and state.baselines.key == _baselines_key(config, resolved)
    return known and (layout.baselines / FACTS_FILE).is_file()


def _compute(
    config: StudyConfig, layout: StudyLayout, resolved: ResolveResult, nodes: Nodes, stops: StopRequests
) -> BaselinesComputed | None:
    """Run BASELINES; None if a stop was asked for meanwhile."""
    body = BaselinesRequest(
        task=config.study.task,
        metric=config.study.metric,
        direction=config.study.resolved_direction,
        data=config.data,
        settings=config.trial_settings,
        cache_dir=str(layout.cache),
        data_fingerprint=resolved.data_fingerprint,
        out_dir=str(layout.baselines),
        limit_s=config.study.baselines_s,
    )
    job = ChildJob("computing baselines", body, layout.preparations, preparing_limits(config.runtime))
    result = run_job(job, nodes, stops)
    return None if result is None else BaselinesComputed(key=_baselines_key(config, resolved), result=result)


def _baselines_key(config: StudyConfig, resolved: ResolveResult) -> str:
    """Return a hash of all that decides the baselines, wherever the study lies."""
    settings, data = config.trial_settings, config.data
    decides = [
        str(config.study.task),
        str(config.study.metric),
        str(config.study.resolved_direction),
        resolved.data_fingerprint,
        [data.num_labels, data.multi_label, data.folds, data.split_seed],
    ]
    if facts_of(config.study.task).spans:  # whether thresholds are fitted
        decides.append(settings.span.null_policy)
    if settings.head.threshold == "calibrated":
        decides.append("head.threshold")
    if facts_of(config.study.task).decoder:  # its loss is one of tokens
        decides += [
            settings.model.model_dump(mode="json"),
            settings.lm.model_dump(mode="json"),
            settings.train.max_length,
        ]
    return digest(decides)
