"""What the control process and the one that asks NVML say to each other: one JSON object a line over a socket pair."""

from pydantic import ConfigDict, Field

from dryfit.core.wire import Wire
from dryfit.runtime.machine.gpus import GpuState


class NvmlQuestion(Wire):
    """What is asked of a device, and what was learnt since the last question.

    Attributes:
        device: As ``CUDA_VISIBLE_DEVICES`` names it.
        look: Whether its memory is asked for; the errors that the driver reported of it are always told.
        uuids: Which hardware names mean.
        own: Processes of ours that have begun.
    """

    model_config = ConfigDict(cache_strings="keys")

    device: str
    look: bool
    uuids: dict[str, str] = Field(default_factory=dict[str, str])
    own: tuple[int, ...] = ()


class NvmlAnswer(Wire):
    """What :class:`~dryfit.runtime.machine.gpus.GpuMonitor` say of that device."""

    model_config = ConfigDict(cache_strings="keys")

    look: GpuState | None
    xids: tuple[int, ...]
