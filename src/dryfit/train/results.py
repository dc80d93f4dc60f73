"""The last step of a training process: turn its run into the result for the control process."""

from collections.abc import Callable, Iterable
from typing import Any

from dryfit.core.jobs.train import StopReason, TrainRequest, TrainResult
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.settings.trial import FoldScore, best_point, fold_means
from dryfit.parallel.layout.processes import ProcessGroup
from dryfit.train.device import observed_memory
from dryfit.train.run import FoldPosition, RunState, TrialParts


def train_result(request: TrainRequest, run: RunState, group: ProcessGroup) -> TrainResult:
    """Return the result of a trial that trains once."""
    best = best_point(run.points, request.config.direction)
    return TrainResult(
        value=best.value if best else None,
        also=tuple(best.metrics[metric] for metric in request.config.also) if best else (),
        best=best.n if best else None,
        steps=run.step,
        stopped_by=run.stopped_by,
        **_peaks(request.plan.device, group),
    )


def fold_score(parts: TrialParts, run: RunState) -> FoldScore | None:
    """Return the score of a fold; None: it was stopped before its end, or no validation gave a number."""
    config = parts.request.config
    best = best_point(run.points, config.direction)
    if best is None or run.stopped_by not in (None, StopReason.EARLY_STOPPING):
        return None
    return FoldScore(
        value=best.value,
        also=tuple(best.metrics[metric] for metric in config.also),
        best_step=best.step,
        steps=run.step,
        schedule_steps=parts.total_steps,
        collapsed=best.collapsed,
    )


def folds_result(
    request: TrainRequest,
    position: FoldPosition,
    stopped_by: StopReason | None,
    group: ProcessGroup,
    *,
    fold_steps: int = 0,
) -> TrainResult:
    """Return the result of a trial of several folds, whether all of them are done or not.

    Args:
        request: What was asked.
        position: The folds that are done.
        stopped_by: Why those to come were not trained; None: nothing stopped them.
        group: The processes that train it.
        fold_steps: Optimizer steps of a fold that was begun and is not done.
    """
    value, *also = fold_means(position.done) if position.is_complete else (None,)
    if stopped_by is None and any(fold.stopped_early for fold in position.done):
        stopped_by = StopReason.EARLY_STOPPING
    return TrainResult(
        value=value,
        also=tuple(also),
        best=None,
        steps=position.steps_before + fold_steps,
        folds=position.done,
        stopped_by=stopped_by,
        **_peaks(request.plan.device, group),
    )


def _peaks(device: DeviceKind, group: ProcessGroup) -> dict[str, Any]:
    """Return the most memory that was used: of a device by the rank that took most, of the host by all together."""
    peaks = group.collect(observed_memory(device))
    return {
        "peak_allocated_bytes": _combined(max, (peak.allocated_bytes for peak in peaks)),
        "peak_reserved_bytes": _combined(max, (peak.reserved_bytes for peak in peaks)),
        "peak_rss_bytes": _combined(sum, (peak.rss_bytes for peak in peaks)),
    }


def _combined(combine: Callable[[list[int]], int], peaks: Iterable[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return combine(known) if known else None
