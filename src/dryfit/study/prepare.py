"""The child that looks before anything is trained: data checked and tokenised, machine facts read."""

from pathlib import Path

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ChildError, error_from_parts
from dryfit.core.failure import Action, PastFailure
from dryfit.core.settings import Precision
from dryfit.core.wire import LOG_FILE, ResolveRequest, ResolveResult
from dryfit.runtime.faults import classify
from dryfit.runtime.recovery import decide
from dryfit.runtime.spec import ChildExited, ChildLimits, ChildSpec
from dryfit.runtime.supervisor import Supervisor
from dryfit.search.params import enumerated
from dryfit.search.space import Space
from dryfit.store.layout import StudyLayout
from dryfit.study.stops import StopRequests

_RETRIES = 3
_POLL_S = 0.5


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
        precisions=_precisions(config, space),
    )
    earlier = len(list(layout.preparations.glob("*"))) if layout.preparations.exists() else 0
    past: tuple[PastFailure, ...] = ()
    while True:
        number = earlier + 1 + len(past)
        folder = layout.preparations / f"{number:04d}"
        exited = _run(f"prepare-{number}", folder, body, config, supervisor, stops)
        if exited is None:
            return None
        if exited.result is not None and exited.result.resolve is not None:
            return exited.result.resolve
        if exited.result is not None and exited.result.error is not None:
            error = exited.result.error
            raise error_from_parts(error.code, error.doing, error.found, error.allowed, error.hint)
        failure = classify(exited.evidence, exited.result)
        answer = decide(failure, past, retries=_RETRIES)
        if answer.action is not Action.RETRY or len(past) >= _RETRIES:
            raise ChildError(
                "checking data and machine",
                f"the process ended without an answer ({failure.kind}: {failure.sentence})",
                hint=f"see {folder / LOG_FILE}",
            )
        past = (*past, PastFailure(failure.kind, reached_checkpoint=False))


def _precisions(config: StudyConfig, space: Space) -> tuple[str, ...]:
    """Every number format a trial may ask for, so that one the device lacks is refused before the first trial."""
    drawn = [enumerated(param.distribution, limit=len(Precision)) for param in space.cases("train.precision")]
    searched = {str(value) for values in drawn for value in values or ()}
    return tuple(sorted(searched)) or (config.train.precision.value,)


def _run(
    key: str, folder: Path, body: ResolveRequest, config: StudyConfig, supervisor: Supervisor, stops: StopRequests
) -> ChildExited | None:
    runtime = config.runtime
    limits = ChildLimits(
        start_s=runtime.start_timeout_s, hang_s=runtime.hang_timeout_s, total_s=None, stop_grace_s=runtime.stop_grace_s
    )
    supervisor.start(ChildSpec(key=key, folder=folder, body=body, limits=limits))
    while True:
        stops.look()
        if stops.why is not None:
            supervisor.kill(key, "now")
            return None
        for event in supervisor.wait(_POLL_S):
            if isinstance(event, ChildExited) and event.key == key:
                return event
