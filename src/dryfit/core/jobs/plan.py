"""Jobs that say what training will take of a device, and measure it."""

from typing import Literal

from pydantic import Field

from dryfit.core.jobs.calibration import Calibration, CaseComparison, MemoryCase, Observation
from dryfit.core.jobs.memory import Confidence, ExecutionChoice, Fallback, MemoryPlan, VerdictKind
from dryfit.core.jobs.names import Job
from dryfit.core.settings.execution import DeviceSpec, ExecutionSettings, PlanSubject
from dryfit.core.settings.tables import DataSettings, Settings
from dryfit.core.sharding.shard_summary import ShardSummary
from dryfit.core.wire import Wire


class StudyTokens(Settings):
    """Where the lengths of a study's rows are known from."""

    data: DataSettings
    cache_dir: str
    data_fingerprint: str


class PlanRequest(Wire):
    """Plan the memory of some subjects on a device; nothing is allocated there."""

    job: Literal[Job.PLAN] = Job.PLAN
    subjects: tuple[PlanSubject, ...]
    device: DeviceSpec
    execution: ExecutionSettings = Field(validation_alias="wishes", serialization_alias="wishes")
    tokens: StudyTokens | None = Field(default=None, description="None: rows of train.max_length are taken")
    trace_dir: str = Field(description="folder of recorded traces, shared by all studies")
    every_fallback: bool = Field(
        default=False,
        validation_alias="every_rung",
        serialization_alias="every_rung",
        description="price every fallback, and changes of the experiment",
    )
    several: bool = Field(default=True, description="look at several devices, to take or to name them")
    degrees: tuple[int, ...] = Field(default=(), description='ranks over 1 that execution.tp = "auto" may take')
    host_bytes: int | None = Field(default=None, description="host memory for all ranks of a trial; None: not counted")


class PlanAnswer(Wire):
    """What the planner found for one subject.

    Attributes:
        memory: The memory of ``execution``; of the plan as asked where it was refused; None where it is unknown.
        execution: What the trial is to be run with; None where it was refused or is unknown.
        fallbacks: What else fits with less memory, in the order to try.
        shortfall_bytes: What the device lacks for the plan as asked; 0 where it fits.
        ladder: Changes, each with what it saves.
        reasons: Why it is unknown or refused.
        sharding: The tensor-parallel shards, asked for by ``execution.tp`` or chosen by the planner; all bytes are
            then those of one rank.
        cannot_shard: Why the ladder has no fallback to several devices; empty where it has one or none was asked for.
        torch: Version the traces speak for.
    """

    verdict: VerdictKind
    device: DeviceSpec
    memory: MemoryPlan | None = None
    execution: ExecutionChoice | None = None
    fallbacks: tuple[ExecutionChoice, ...] = ()
    shortfall_bytes: int = 0
    ladder: tuple[Fallback, ...] = ()
    reasons: tuple[str, ...] = ()
    sharding: ShardSummary | None = Field(default=None, validation_alias="cut", serialization_alias="cut")
    cannot_shard: str = Field(default="", validation_alias="cannot_cut", serialization_alias="cannot_cut")
    confidence: Confidence = Confidence.UNCALIBRATED
    torch: str
    planner_s: float

    @property
    def devices(self) -> int:
        """How many devices the trial takes, where it fits; all bytes are those of each."""
        if self.sharding is not None:
            return self.sharding.degree
        return (self.execution.tp if self.execution is not None else None) or 1


class PlanResult(Wire):
    """One answer for each subject, in order."""

    answers: tuple[PlanAnswer, ...]


class CalibrateRequest(Wire):
    """Measure what training steps take of a GPU, or compare earlier measurements with plans.

    Attributes:
        case: What to measure; None: compare all that was measured, with every device hidden.
        folder: The exchange: ``CASE.json`` holds a case with its observation, ``CASE.pickle`` the allocator's history.
        calibration_dir: Where to keep what the comparison gives; None: nowhere.
        visible_device: Value of CUDA_VISIBLE_DEVICES.
    """

    job: Literal[Job.CALIBRATE] = Job.CALIBRATE
    case: MemoryCase | None
    folder: str
    calibration_dir: str | None = None
    visible_device: str | None = None


class CalibrateResult(Wire):
    """What CALIBRATE found: an observation, or a calibration and what it was made from."""

    observation: Observation | None = None
    calibration: Calibration | None = None
    comparisons: tuple[CaseComparison, ...] = ()
