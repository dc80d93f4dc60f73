"""Requests and results of the jobs that plan memory or calibrate a device."""

from typing import ClassVar, Final, Literal

from pydantic import Field

from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, Fallback, MemoryPlan, PlanSubject
from dryfit.settings.memory_terms import Allocator, Calibration, Confidence, DeviceSpec, VerdictKind
from dryfit.settings.rehearsal_messages import Interval, RunCost
from dryfit.settings.sharding import ShardSummary
from dryfit.settings.tables import DataSettings, Settings
from dryfit.settings.text import Shown
from dryfit.settings.training_messages import ObjectiveRequest
from dryfit.settings.wire import Job, JobRequest, ProcessNeeds, Wire

# Calibration of memory plans: cases, measurements on a device, comparisons and the resulting constants.
#
# All bytes are integers. *Planned* bytes come from a trace without a device, *observed* ones from the device's
# allocator.


class MemoryCase(Settings):
    """A trial that is both planned and run, with synthetic weights and rows.

    Batch and length are those of ``subject.settings.train``; all rows have that length.

    Attributes:
        name: Unique among the cases of a comparison; also a file name.
        family: Its group in tables: ``encoder``, ``decoder LoRA``.
        padded: All rows but the first end in padding, so that the attention mask is used. transformers drops a mask
            of ones, which a trace cannot know: the plan is then an upper bound.
    """

    name: str = Field(pattern=r"^[\w.-]+$")
    family: str
    subject: PlanSubject
    execution: ExecutionChoice
    allocator: Allocator = Allocator.EXPANDABLE
    reentrant: bool = False
    padded: bool = True


class PartPeak(Settings):
    """Peak memory during one part of a run: loading, a step, a validation, a checkpoint."""

    part: str
    allocated_bytes: int
    reserved_bytes: int


class Observation(Settings):
    """The measured memory of a case on a device.

    Attributes:
        torch: Version of torch.
        parts: Parts of the run, in order.
        context_bytes: Memory in use on the device at the end, without what the allocator had reserved and what others
            used before; allocations of other processes in between are included.
        workspace_bytes: cuBLAS workspaces at the first matrix product of the main thread and of autograd's.
        steps: Optimizer steps done.
    """

    case: MemoryCase
    device: DeviceSpec
    torch: str
    parts: tuple[PartPeak, ...]
    context_bytes: int
    workspace_bytes: tuple[int, int]
    steps: int

    @property
    def peak_allocated_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated`` of the whole run."""
        return max(part.allocated_bytes for part in self.parts)

    @property
    def peak_reserved_bytes(self) -> int:
        """``torch.cuda.max_memory_reserved`` of the whole run."""
        return max(part.reserved_bytes for part in self.parts)


class CaseComparison(Settings):
    """Comparison of a case's plan with its measurement.

    Attributes:
        planned_min_cap_bytes: The smallest capacity with which the planned events succeed.
    """

    name: str
    family: str
    planned_allocated_bytes: int
    observed_allocated_bytes: int
    planned_reserved_bytes: int
    observed_reserved_bytes: int
    planned_min_cap_bytes: int

    @property
    def allocated_error(self) -> float:
        """Relative error of the planned allocation; above 0 if too much was planned."""
        return self.planned_allocated_bytes / self.observed_allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        """Relative error of the planned reservation."""
        return self.planned_reserved_bytes / self.observed_reserved_bytes - 1


NOTHING_TAKEN: Final = "it took nothing of the device"
NO_TORCH: Final = "the script imports nothing that trains with PyTorch"
"""Why a rehearsal says nothing of memory: what was trained stays on the CPU."""


class StudyTokens(Settings):
    """The tokenised rows from which a study's row lengths are known."""

    data: DataSettings
    cache_dir: str
    data_fingerprint: str


class PlanAnswer(Shown, Wire):
    """The planner's answer for one subject.

    Attributes:
        memory: The memory of ``execution``, or of the plan as requested if it was refused; None if unknown.
        execution: How the trial is to be executed; None if it was refused or is unknown.
        fallbacks: Further choices that fit with less memory, in the order to try.
        eval_batches: Smaller validation batches than that of ``execution``, in the order to try where a validation runs
            out of memory.
        shortfall_bytes: Memory that the device lacks for the plan as requested; 0 if it fits.
        ladder: Changes, each with the memory it saves.
        reasons: Why it is unknown or refused.
        sharding: The tensor-parallel shards, asked for by ``execution.tp`` or chosen by the planner; all bytes are
            then those of one rank.
        cannot_shard: Why the ladder has no fallback to several devices; empty where it has one or none was asked for.
        torch: Version of torch that was traced.
        hours: Of the training alone on the device, as it is asked for; None: its steps or their time are not known.
        cost: Of those hours; None: no price was given, or they are not known.
    """

    verdict: VerdictKind
    device: DeviceSpec
    memory: MemoryPlan | None = None
    execution: ExecutionChoice | None = None
    fallbacks: tuple[ExecutionChoice, ...] = ()
    eval_batches: tuple[int, ...] = ()
    shortfall_bytes: int = 0
    ladder: tuple[Fallback, ...] = ()
    reasons: tuple[str, ...] = ()
    sharding: ShardSummary | None = Field(default=None, validation_alias="cut", serialization_alias="cut")
    cannot_shard: str = Field(default="", validation_alias="cannot_cut", serialization_alias="cannot_cut")
    confidence: Confidence = Confidence.UNCALIBRATED
    torch: str
    planner_s: float
    hours: Interval | None = None
    cost: RunCost | None = None

    @classmethod
    def unknown(cls, device: DeviceSpec, reasons: tuple[str, ...], torch: str, planner_s: float = 0.0) -> "PlanAnswer":
        """Return the answer where nothing is known, with the reasons."""
        return cls(verdict=VerdictKind.UNKNOWN, device=device, reasons=reasons, torch=torch, planner_s=planner_s)

    @property
    def devices(self) -> int:
        """Devices that the trial takes if it fits; all bytes are per device."""
        if self.sharding is not None:
            return self.sharding.degree
        return (self.execution.tp if self.execution is not None else None) or 1

    @property
    def excess(self) -> float | None:
        """The share of its device by which the trial's memory exceeds it, negative where it fits; None: unknown."""
        if self.memory is not None:
            return self.memory.required_bytes / self.device.capacity_bytes - 1
        return self.shortfall_bytes / self.device.capacity_bytes if self.shortfall_bytes else None


class PlanResult(Wire):
    """One answer for each subject, in order."""

    answers: tuple[PlanAnswer, ...]


class PlanRequest(JobRequest[PlanResult]):
    """Plan the memory of several subjects for a device, without allocating anything on it."""

    job: Literal[Job.PLAN] = Job.PLAN
    needs: ClassVar = ProcessNeeds(hides_devices=True)  # it must not make a context on a device that trains
    subjects: tuple[PlanSubject, ...]
    device: DeviceSpec
    execution: ExecutionSettings = Field(validation_alias="wishes", serialization_alias="wishes")
    tokens: StudyTokens | None = Field(default=None, description="None: rows of train.max_length are assumed")
    trace_dir: str = Field(description="folder of recorded traces, shared by all studies")
    every_fallback: bool = Field(
        default=False,
        validation_alias="every_rung",
        serialization_alias="every_rung",
        description="price every fallback, and changes of the experiment",
    )
    several: bool = Field(default=True, description="consider several devices too")
    degrees: tuple[int, ...] = Field(default=(), description='ranks over 1 that execution.tp = "auto" may take')
    host_bytes: int | None = Field(default=None, description="host memory for all ranks of a trial; None: unlimited")
    timed: bool = Field(default=False, description="tell the hours of a training too")


class RehearsedPlanRequest(JobRequest[PlanResult]):
    """Plan the memory of what a user's own code trains for one trial, by rehearsing it on a virtual GPU.

    Attributes:
        calling: The call of the function; its folder of checkpoints is none of the trial's.
        is_script: Its ``function`` is the command of a script.
        device: The device to plan for.
        allow: What a fallback may change: nothing but rounding (numerics), or not even that.
        steps: Optimizer steps that are rehearsed.
        calibration_dir: Folder of what was measured of devices.
        timeout_s: Most seconds of one rehearsal until its first optimizer step has ended.
    """

    job: Literal[Job.REHEARSE] = Job.REHEARSE
    needs: ClassVar = ProcessNeeds(hides_devices=True, of_the_user=True)
    calling: ObjectiveRequest
    is_script: bool = False
    device: DeviceSpec
    allow: Literal["exact", "numerics"] = "numerics"
    steps: int = Field(default=3, ge=1)
    calibration_dir: str
    timeout_s: float = Field(default=900.0, gt=0)


class CalibrateResult(Wire):
    """The result of CALIBRATE: an observation, or a calibration with the comparisons it was made from."""

    observation: Observation | None = None
    calibration: Calibration | None = None
    comparisons: tuple[CaseComparison, ...] = ()


class CalibrateRequest(JobRequest[CalibrateResult]):
    """Measure the memory of training steps on a GPU, or compare earlier measurements with plans.

    Attributes:
        case: The case to measure; None: compare all measurements, with every device hidden.
        folder: Measurements: ``CASE.json`` has a case with its observation, ``CASE.pickle`` the allocator's history.
        calibration_dir: Where to save the calibration; None: nowhere.
        visible_device: Value of CUDA_VISIBLE_DEVICES.
    """

    job: Literal[Job.CALIBRATE] = Job.CALIBRATE
    needs: ClassVar = ProcessNeeds(hides_devices=True)
    case: MemoryCase | None
    folder: str
    calibration_dir: str | None = None
    visible_device: str | None = None
