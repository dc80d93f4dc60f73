"""The check before the first trial: a RESOLVE child reads and tokenises the data and looks at the machine.

Where trials call a function of the user's own, an IMPORT child imports it instead.
"""

from dryfit.config.schema import StudyConfig
from dryfit.core.jobs.train import ImportRequest, ResolveResult
from dryfit.core.settings.objective_table import ObjectiveSettings
from dryfit.runtime.machine.node import Nodes, first_node
from dryfit.search.space.space import Space
from dryfit.store.layout import StudyLayout
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
    if config.objective is not None:
        return _import_function(config, config.objective, layout, nodes, stops)
    body = resolve_request(
        config,
        space,
        pairs=space.model_length_pairs(config.trial_settings),
        cache_dir=layout.cache,
        device=config.execution.device,
        precisions=possible_values(config, space, "train.precision"),
    )
    job = ChildJob("checking data and machine", body, layout.preparations, preparing_limits(config.runtime))
    return run_job(job, nodes, stops)


def _import_function(
    config: StudyConfig, own: ObjectiveSettings, layout: StudyLayout, nodes: Nodes, stops: StopRequests
) -> ResolveResult | None:
    device, count = devices_without_torch(config.execution.device, len(first_node(nodes).facts.devices))
    body, limits = ImportRequest(objective=own), preparing_limits(config.runtime)
    job = ChildJob(f"importing {own.function}", body, layout.preparations, limits)
    result = run_job(job, nodes, stops)
    if result is None:
        return None
    return ResolveResult(
        data_fingerprint="",
        splits={},
        revisions={own.function: result.source_hash},
        own_file=result.source_file,
        device=device,
        device_count=count,
        versions=result.versions,
    )
