"""The child that looks before anything is trained: data checked and tokenised, machine facts read.

Where trials call a function of the user's own, it looks whether that can be imported, and nothing else.
"""

import os
from collections.abc import Callable

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import InternalError
from dryfit.core.jobs import Body, ChildResult, ImportRequest, ResolveResult
from dryfit.core.settings.tables import ObjectiveSettings
from dryfit.runtime.children.supervisor import Supervisor
from dryfit.search.space.space import Space
from dryfit.store.layout import StudyLayout
from dryfit.study.loop.child_jobs import ChildJob, run_job
from dryfit.study.loop.context import possible_values, preparing_limits, resolve_request
from dryfit.study.loop.stops import StopRequests
from dryfit.study.resources.trial_devices import devices_without_torch, gpu_count


def prepare(
    config: StudyConfig, layout: StudyLayout, space: Space, supervisor: Supervisor, stops: StopRequests
) -> ResolveResult | None:
    """Run RESOLVE, or IMPORT where trials call a function of the user's own.

    Returns:
        What it found; None where a stop was asked for meanwhile.

    Raises:
        DryfitError: What the child raised: bad data, an unknown model, a machine that cannot do what was asked, a
            function that cannot be imported.
        ChildError: The child failed in another way, or died several times.
    """

    def answer(doing: str, body: Body) -> ChildResult | None:
        job = ChildJob(doing, body, layout.preparations, preparing_limits(config.runtime))
        return run_job(job, supervisor, stop_asked)

    def stop_asked() -> bool:
        stops.look()
        return stops.why is not None

    if config.objective is not None:
        return _import_function(config, config.objective, answer)
    body = resolve_request(
        config,
        space,
        pairs=space.model_length_pairs(config.trial_settings),
        cache_dir=layout.cache,
        device=config.execution.device,
        precisions=possible_values(config, space, "train.precision"),
    )

    doing = "checking data and machine"
    result = answer(doing, body)
    if result is None:
        return None
    if result.resolve is None:
        raise InternalError(doing, "the child's answer is of another job")
    return result.resolve


def _import_function(
    config: StudyConfig, own: ObjectiveSettings, answer: Callable[[str, Body], ChildResult | None]
) -> ResolveResult | None:
    device, count = devices_without_torch(config.execution.device, gpu_count(os.environ.get("CUDA_VISIBLE_DEVICES")))
    doing = f"importing {own.function}"
    result = answer(doing, ImportRequest(objective=own))
    if result is None:
        return None
    if result.imported is None:
        raise InternalError(doing, "the child's answer is of another job")
    return ResolveResult(
        data_fingerprint="",
        splits={},
        revisions={own.function: result.imported.source_hash},
        device=device,
        device_count=count,
        versions=result.imported.versions,
    )
