"""Devices, and the terms in which their memory is told: phases, categories, verdicts, measured constants."""

from collections.abc import Iterable, Sequence

from dryfit.settings.older_python import StrEnum
from dryfit.settings.records import Record


class DeviceKind(StrEnum):
    """Where tensors live."""

    CPU = "cpu"
    CUDA = "cuda"


class OptimizerImpl(StrEnum):
    """Implementation of an optimizer's arithmetic: results agree up to rounding, memory and time differ."""

    AUTO = "auto"
    FUSED = "fused"
    FOREACH = "foreach"
    PLAIN = "plain"


class Allocator(StrEnum):
    """How PyTorch's CUDA caching allocator takes memory from the device."""

    EXPANDABLE = "expandable"
    NATIVE = "native"


class DeviceSpec(Record):
    """A device to plan for, real or invented.

    Attributes:
        name: The user's or the driver's name.
        capacity_bytes: Its memory, as in ``torch.cuda.get_device_properties().total_memory``.
        capability: CUDA compute capability, which decides kernels and workspaces.
    """

    name: str
    kind: DeviceKind = DeviceKind.CUDA
    capacity_bytes: int
    capability: tuple[int, int] = (8, 0)

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes is {self.capacity_bytes}, not above 0")


def smallest_device(devices: Sequence[DeviceSpec]) -> DeviceSpec | None:
    """Return the device with the least memory, the first of equals; None without any."""
    return min(devices, key=lambda device: device.capacity_bytes, default=None)


class StepPhase(StrEnum):
    """The phase of a trial in which memory is allocated."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save"


class MemoryCategory(StrEnum):
    """The purpose of allocated memory."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    INPUTS = "inputs"
    WORKSPACES = "workspaces"


class Confidence(StrEnum):
    """How well a plan was calibrated against measurements."""

    CALIBRATED = "calibrated"
    """Constants and errors were measured on this device type."""
    FAMILY = "family"
    """They were measured on another device of the same compute capability."""
    UNCALIBRATED = "uncalibrated"
    """They come from documentation and source code."""


class Effect(StrEnum):
    """How a change of the plan affects the experiment."""

    EXACT = "exact"
    """The same numbers."""
    NUMERICS = "numerics"
    """Equal up to rounding."""
    SEMANTICS = "semantics"
    """Another experiment: only ever suggested."""

    @classmethod
    def most(cls, effects: "Iterable[Effect]") -> "Effect":
        """Return what changes do together."""
        return max(effects, key=list(cls).index, default=cls.EXACT)

    def within(self, most: "Effect") -> bool:
        """Whether a change is allowed where no more than another effect is."""
        return Effect.most((self, most)) is most


class VerdictKind(StrEnum):
    """The planner's verdict."""

    FITS = "fits"
    FITS_WITH = "fits_with"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    @property
    def fits(self) -> bool:
        """Whether the trial fits, as asked or with changes that keep the experiment."""
        return self in (VerdictKind.FITS, VerdictKind.FITS_WITH)


class PeakAt(Record):
    """The moment of the highest allocation.

    Attributes:
        module: Dotted name of the module; empty outside the model.
        op: The operator that allocated last.
    """

    phase: StepPhase
    module: str
    op: str


class Calibration(Record):
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
    context_bytes: int
    workspace_bytes: int
    error_median: float
    error_p95: float
    runs: int

    def __post_init__(self) -> None:
        if min(self.context_bytes, self.workspace_bytes, self.error_median, self.error_p95, self.runs - 1) < 0:
            raise ValueError(f"a measurement of {self.device_name} has an amount below what can be")
