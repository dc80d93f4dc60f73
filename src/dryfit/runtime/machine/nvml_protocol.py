"""The messages between the control process and the process that queries NVML: one JSON object a line."""

from pydantic import ConfigDict, Field

from dryfit.core.wire import Wire
from dryfit.runtime.machine.gpus import GpuState


class NvmlQuestion(Wire):
    """A query of a device, with what is new since the last query.

    Attributes:
        device: Its name as in ``CUDA_VISIBLE_DEVICES``.
        look: Whether to return its state; its errors are always returned.
        uuids: UUIDs by device name.
        own: Ids of processes of ours that have begun.
    """

    model_config = ConfigDict(cache_strings="keys")

    device: str
    look: bool
    uuids: dict[str, str] = Field(default_factory=dict[str, str])
    own: tuple[int, ...] = ()


class NvmlAnswer(Wire):
    """The state and the errors of the device; see :class:`~dryfit.runtime.machine.gpus.GpuMonitor`."""

    model_config = ConfigDict(cache_strings="keys")

    look: GpuState | None
    xids: tuple[int, ...]
