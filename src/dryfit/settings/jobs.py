"""The table of all jobs, the request a child process is started with, and the result it ends with."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, GetPydanticSchema, create_model

from dryfit.settings.check_messages import (
    BatchCheckRequest,
    BatchCheckResult,
    CheckRequest,
    CheckResult,
    PaceRequest,
    PaceResult,
    ProbeRequest,
    ProbeResult,
    ScriptArgumentsRequest,
    ScriptArgumentsResult,
)
from dryfit.settings.errors import ChildFault, InternalError
from dryfit.settings.plan_messages import (
    CalibrateRequest,
    CalibrateResult,
    PlanRequest,
    PlanResult,
    RehearsedPlanRequest,
)
from dryfit.settings.training_messages import (
    BaselinesRequest,
    BaselinesResult,
    ExportRequest,
    ExportResult,
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
    ScriptRequest,
    TinyLmRequest,
    TinyLmResult,
    TrainerRequest,
    TrainRequest,
    TrainResult,
)
from dryfit.settings.wire import ErrorParts, Job, JobRequest, R, Wire


class JobRow(NamedTuple):
    """One job.

    Attributes:
        entry: Its function as ``module:function``, which takes the request and the child's channel and returns the
            result.
        request: The type of its request.
        results: The types that its result may have, by their names in ``result.json``.
    """

    entry: str
    request: type[JobRequest[Any]]
    results: Mapping[str, type[Any]]


def _row(entry: str, request: type[JobRequest[R]], **results: type[R]) -> JobRow:
    return JobRow(entry, request, results)


JOBS = {
    Job.RESOLVE: _row("dryfit.training.resolve:resolve", ResolveRequest, resolve=ResolveResult),
    Job.BASELINES: _row("dryfit.tasks.baselines:baselines", BaselinesRequest, baselines=BaselinesResult),
    Job.TRAIN: _row("dryfit.training.trial_jobs:train", TrainRequest, train=TrainResult),
    Job.CHECK: _row("dryfit.training.resolve:check", CheckRequest, check=CheckResult),
    Job.PLAN: _row("dryfit.training.plan_job:plan", PlanRequest, plan=PlanResult),
    Job.REHEARSE: _row("dryfit.training.rehearsed_plan:plan", RehearsedPlanRequest, plan=PlanResult),
    Job.CALIBRATE: _row("dryfit.training.calibrate:calibrate", CalibrateRequest, calibrate=CalibrateResult),
    Job.PROBE: _row("dryfit.training.resolve:probe", ProbeRequest, probe=ProbeResult),
    Job.PACE: _row("dryfit.training.measured_step:pace", PaceRequest, pace=PaceResult),
    Job.BATCH_CHECK: _row("dryfit.training.batch_check:batch_check", BatchCheckRequest, batch_check=BatchCheckResult),
    Job.IMPORT: _row("dryfit.training.objective:check", ImportRequest, imported=ImportResult),
    Job.OBJECTIVE: _row("dryfit.training.objective:run", ObjectiveRequest, train=TrainResult),
    Job.TRAINER: _row("dryfit.training.own_trainer:run", TrainerRequest, train=TrainResult),
    Job.SCRIPT: _row("dryfit.training.script:run", ScriptRequest, train=TrainResult),
    Job.SCRIPT_ARGUMENTS: _row(
        "dryfit.training.script_arguments:read_arguments",
        ScriptArgumentsRequest,
        script_arguments=ScriptArgumentsResult,
    ),
    Job.FINAL: _row("dryfit.training.trial_jobs:final", FinalRequest, final=FinalResult, train=TrainResult),
    Job.PREDICT: _row("dryfit.training.prediction:predict", PredictRequest, predict=PredictResult),
    Job.MERGE: _row("dryfit.training.export:merge", MergeRequest, merge=MergeResult),
    Job.EXPORT: _row("dryfit.training.export:export", ExportRequest, exported=ExportResult),
    Job.TINY_LM: _row("dryfit.tasks.tiny_lm:write", TinyLmRequest, tiny_lm=TinyLmResult),
    Job.ROWS: _row("dryfit.training.resolve:copy_rows", RowsRequest, rows=RowsResult),
}
"""All jobs."""

_REQUESTS: list[Any] = [row.request for row in JOBS.values()]
_ANY_REQUEST = Annotated[functools.reduce(lambda one, other: one | other, _REQUESTS), Field(discriminator="job")]
RequestBody = Annotated[JobRequest[Any], GetPydanticSchema(lambda _, handler: handler.generate_schema(_ANY_REQUEST))]
"""A request of any job, recognised by its name."""

_RESULTS = {name: result for row in JOBS.values() for name, result in row.results.items()}
_NAMES = {result: name for name, result in _RESULTS.items()}


@functools.cache
def result_file() -> type[Wire]:
    """Return the type of ``result.json``; it is made at the first call, as that takes some milliseconds."""
    parts = {**_RESULTS, "fault": ChildFault, "error": ErrorParts}
    fields: dict[str, Any] = {name: (part | None, None) for name, part in parts.items()}
    return create_model("ResultFile", __base__=Wire, **fields)


def answer_to(request: JobRequest[R], answer: Any) -> R:
    """Return an answer with the type that the request says.

    Args:
        request: The request of a job.
        answer: What its function returned, or its result file holds.

    Raises:
        InternalError: It is the answer of another job.
    """
    results = tuple(JOBS[request.job].results.values())
    if not isinstance(answer, results):
        expected = " or ".join(result.__name__ for result in results)
        raise InternalError(f"doing the job {request.job}", f"its answer is {type(answer).__name__}", expected)
    return answer


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The result of a child process: the answer of its job, or the fault that ended it.

    Attributes:
        error: Set beside ``fault`` if a dryfit error was raised.
    """

    answer: Wire | None = None
    fault: ChildFault | None = None
    error: ErrorParts | None = None

    def to_json(self) -> str:
        """Return the text of ``result.json``: the answer has the name of its type in :data:`JOBS`."""
        parts: dict[str, Any] = {"fault": self.fault, "error": self.error}
        if self.answer is not None:
            parts[_NAMES[type(self.answer)]] = self.answer
        return result_file()(**parts).model_dump_json()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read a ``result.json``.

        Raises:
            pydantic.ValidationError: It holds something else.
        """
        parts = dict(result_file().model_validate_json(text))
        answer = next((parts[name] for name in _RESULTS if parts[name] is not None), None)
        return cls(answer, parts["fault"], parts["error"])


def training_of(result: ChildResult | None) -> TrainResult | None:
    """Return how training, or a user's own function, ended; None if the result does not say."""
    return result.answer if result is not None and isinstance(result.answer, TrainResult) else None


class ChildRequest(Wire):
    """The request a child process is started with.

    Attributes:
        placed_at_s: ``time.monotonic()`` of the control process when it decided to start this child.
        wakeup_fifo: FIFO that the child writes to after each message; None: the control process polls.
        body: The request of its job.
    """

    placed_at_s: float
    wakeup_fifo: str | None = Field(validation_alias="doorbell", serialization_alias="doorbell")
    body: RequestBody
