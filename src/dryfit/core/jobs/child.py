"""The request a child process is started with, and the result it ends with."""

from typing import Annotated, TypeAlias

from pydantic import Field

from dryfit.core.failure import ChildFault
from dryfit.core.jobs.diagnostics import (
    BatchCheckRequest,
    BatchCheckResult,
    CheckRequest,
    CheckResult,
    ProbeRequest,
    ProbeResult,
)
from dryfit.core.jobs.ensemble import EnsembleRequest, EnsembleResult
from dryfit.core.jobs.plan import CalibrateRequest, CalibrateResult, PlanRequest, PlanResult
from dryfit.core.jobs.train import (
    FinalRequest,
    FinalResult,
    ImportRequest,
    ImportResult,
    MergeRequest,
    MergeResult,
    ObjectiveRequest,
    PredictRequest,
    PredictResult,
    ResolveRequest,
    ResolveResult,
    RowsRequest,
    RowsResult,
    TinyLmRequest,
    TinyLmResult,
    TrainRequest,
    TrainResult,
)
from dryfit.core.wire import ErrorParts, Wire


class ChildResult(Wire):
    """The result of a child process: the field of its job is set, or ``fault``."""

    resolve: ResolveResult | None = None
    train: TrainResult | None = None
    check: CheckResult | None = None
    plan: PlanResult | None = None
    calibrate: CalibrateResult | None = None
    probe: ProbeResult | None = None
    batch_check: BatchCheckResult | None = None
    imported: ImportResult | None = None
    final: FinalResult | None = None
    ensemble: EnsembleResult | None = None
    predict: PredictResult | None = None
    merge: MergeResult | None = None
    tiny_lm: TinyLmResult | None = None
    rows: RowsResult | None = None
    fault: ChildFault | None = None
    error: ErrorParts | None = Field(default=None, description="set beside `fault` where a dryfit error was raised")


Body: TypeAlias = (
    ResolveRequest
    | TrainRequest
    | CheckRequest
    | PlanRequest
    | CalibrateRequest
    | ProbeRequest
    | BatchCheckRequest
    | ImportRequest
    | ObjectiveRequest
    | FinalRequest
    | EnsembleRequest
    | PredictRequest
    | MergeRequest
    | TinyLmRequest
    | RowsRequest
)
"""The request of any job."""


class ChildRequest(Wire):
    """The request a child process is started with.

    Attributes:
        placed_at_s: ``time.monotonic()`` of the control process when it decided to start this child.
        wakeup_fifo: FIFO that the child writes to after each message; None: the control process polls.
        body: The request of its job.
    """

    placed_at_s: float
    wakeup_fifo: str | None = Field(validation_alias="doorbell", serialization_alias="doorbell")
    body: Annotated[Body, Field(discriminator="job")]
