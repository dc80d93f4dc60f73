"""The child that looks before anything is trained: data checked and tokenised, machine facts read."""

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import InternalError
from dryfit.core.jobs import ResolveRequest, ResolveResult
from dryfit.runtime.supervisor import Supervisor
from dryfit.search.space import Space
from dryfit.store.layout import StudyLayout
from dryfit.study.context import possible_values, preparing_limits
from dryfit.study.errand import Errand, run_errand
from dryfit.study.stops import StopRequests


def prepare(
    config: StudyConfig, layout: StudyLayout, space: Space, supervisor: Supervisor, stops: StopRequests
) -> ResolveResult | None:
    """Run RESOLVE.

    Returns:
        What it found; None where a stop was asked for meanwhile.

    Raises:
        DryfitError: What the child raised: bad data, an unknown model, a machine that cannot do what was asked.
        ChildError: The child failed in another way, or died several times.
    """
    body = ResolveRequest(
        task=config.study.task,
        data=config.data,
        pairs=tuple(space.model_length_pairs(config.trial_settings)),
        cache_dir=str(layout.cache),
        device=config.execution.device,
        precisions=possible_values(config, space, "train.precision"),
    )

    def stop_asked() -> bool:
        stops.look()
        return stops.why is not None

    errand = Errand("checking data and machine", body, layout.preparations, preparing_limits(config.runtime))
    result = run_errand(errand, supervisor, stop_asked)
    if result is None:
        return None
    if result.resolve is None:
        raise InternalError("checking data and machine", "the child's answer is of another job")
    return result.resolve
