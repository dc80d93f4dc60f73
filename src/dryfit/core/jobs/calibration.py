"""What is measured on a device, and what came of it: cases, observations, comparisons, constants.

All bytes are integers. *Planned* is what a trace without a device says, *observed* what the device's allocator counted.
"""

from pydantic import Field

from dryfit.core.jobs.memory import ExecutionChoice, StepPhase
from dryfit.core.settings.execution import Allocator, DeviceSpec, PlanSubject
from dryfit.core.settings.tables import Settings


class MemoryCase(Settings):
    """A trial that is both planned and run with made-up weights and rows.

    Batch and length are those of ``subject.settings.train``; every row is as long.

    Attributes:
        name: Its own among the cases of one comparison, and fit to name a file.
        family: What it is counted with: ``encoder``, ``decoder LoRA``.
        padded: All rows but the first end in padding, so that the attention mask counts. transformers drops a mask
            of ones, which a trace cannot know: there the plan is an upper bound.
    """

    name: str = Field(pattern=r"^[\w.-]+$")
    family: str
    subject: PlanSubject
    execution: ExecutionChoice
    allocator: Allocator = Allocator.EXPANDABLE
    reentrant: bool = False
    padded: bool = True


class PartPeak(Settings):
    """The most memory during one part of a run: loading, a step, a validation, a checkpoint."""

    part: str
    allocated_bytes: int
    reserved_bytes: int


class Observation(Settings):
    """What a case took of a device.

    Attributes:
        torch: Version that ran.
        parts: In order.
        context_bytes: In use on the device at the end, less what the allocator had reserved and what others used
            before; an allocation of another process meanwhile is counted too.
        workspace_bytes: What cuBLAS took at the first matrix product of the main thread, and of autograd's.
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


class Deviation(Settings):
    """The first allocation that the trace and the device disagree about; None where one of them has no more.

    Attributes:
        index: Its place among the allocations compared.
        planned_by: Module and operator, as traced.
    """

    index: int
    phase: StepPhase
    planned_bytes: int | None
    planned_by: str
    observed_bytes: int | None


class PhaseDifference(Settings):
    """Allocations of one phase, whatever their order.

    Attributes:
        matched: Allocations that both have.
        only_planned_bytes: Sum of those that only the trace has.
        only_observed_bytes: Sum of those that only the device has.
        largest_planned_bytes: The largest that only the trace has; 0 where there is none.
        largest_observed_bytes: The largest that only the device has; 0 where there is none.
    """

    phase: StepPhase
    matched: int
    only_planned_bytes: int
    only_observed_bytes: int
    largest_planned_bytes: int
    largest_observed_bytes: int


class CaseComparison(Settings):
    """Plan and device, side by side.

    Attributes:
        replay_difference_bytes: The largest difference in reserved memory, after any event, between the device's
            allocator and the simulated one given the same events; None where no history was kept.
        replayed_events: How many those were.
        planned_min_cap_bytes: The smallest capacity under which the plan's own events go through.
    """

    name: str
    family: str
    planned_allocated_bytes: int
    observed_allocated_bytes: int
    planned_reserved_bytes: int
    observed_reserved_bytes: int
    planned_min_cap_bytes: int
    phases: tuple[PhaseDifference, ...] = ()
    first_deviation: Deviation | None = None
    replay_difference_bytes: int | None = None
    replayed_events: int = 0

    @property
    def allocated_error(self) -> float:
        """Relative to what was observed; above 0 where more was planned."""
        return self.planned_allocated_bytes / self.observed_allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        """As for allocated memory."""
        return self.planned_reserved_bytes / self.observed_reserved_bytes - 1


class Calibration(Settings):
    """What was measured on one kind of device with one version of torch.

    Attributes:
        device_name: As the driver calls it.
        torch: Version, ``2.13.0+cu130``.
        context_bytes: Used on the device but not by the caching allocator, after training steps.
        workspace_bytes: What cuBLAS took for each thread.
        error_median: Median relative error of the planned peak.
        error_p95: Its 95th percentile.
        runs: Configurations compared.
    """

    device_name: str
    capability: tuple[int, int]
    torch: str
    context_bytes: int = Field(ge=0)
    workspace_bytes: int = Field(ge=0)
    error_median: float = Field(ge=0)
    error_p95: float = Field(ge=0)
    runs: int = Field(ge=1)
