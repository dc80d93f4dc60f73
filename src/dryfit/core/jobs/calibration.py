"""Calibration of memory plans: cases, measurements on a device, comparisons and the resulting constants.

All bytes are integers. *Planned* bytes come from a trace without a device, *observed* ones from the device's allocator.
"""

from pydantic import Field

from dryfit.core.jobs.memory import ExecutionChoice
from dryfit.core.settings.execution import Allocator, DeviceSpec, PlanSubject
from dryfit.core.settings.tables import Settings


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


class Calibration(Settings):
    """Constants measured on one device type with one version of torch.

    Attributes:
        device_name: The driver's name.
        torch: Version, ``2.13.0+cu130``.
        context_bytes: Used on the device outside the caching allocator, after training steps.
        workspace_bytes: cuBLAS workspace of each thread.
        error_median: Median relative error of the planned peak.
        error_p95: Its 95th percentile.
        runs: Number of cases compared.
    """

    device_name: str
    capability: tuple[int, int]
    torch: str
    context_bytes: int = Field(ge=0)
    workspace_bytes: int = Field(ge=0)
    error_median: float = Field(ge=0)
    error_p95: float = Field(ge=0)
    runs: int = Field(ge=1)
