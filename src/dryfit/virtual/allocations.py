"""Allocations of a script as they happen: each is served, or refused, by the simulated allocator at once."""

from collections.abc import Callable
from dataclasses import dataclass

from dryfit.core.jobs.memory import MemoryCategory, StepPhase
from dryfit.memory.allocator.caching_allocator import CachingAllocator
from dryfit.memory.allocator.settings import AllocatorSettings
from dryfit.memory.planning.timeline import LT_WORKSPACE_BYTES, LT_WORKSPACE_OP, WORKSPACE_OP
from dryfit.memory.tracing.events import Label
from dryfit.memory.tracing.recorder import OpenSegment


class NoRoomError(Exception):
    """The device has no room for a block.

    Attributes:
        requested_bytes: Size of the block.
    """

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(f"no room for {requested_bytes} bytes")
        self.requested_bytes = requested_bytes


@dataclass(slots=True)
class Peaks:
    """Most bytes since the last reset, as ``torch.cuda`` reports them."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0


class LiveAllocations(OpenSegment):
    """All allocations of a run, in order, each placed by the allocator when it is made.

    Args:
        settings: Gives those of the allocator; asked at the first allocation, as a device does.
        capacity_bytes: What the device leaves to it; None for as much as is asked.
        workspace_bytes: What cuBLAS takes for each thread that multiplies matrices.

    Attributes:
        allocator: The simulated allocator.
        peaks: Since the script last reset them.
        allocated: Allocated bytes after each event.
        reserved: Reserved bytes after each event.
    """

    def __init__(
        self, settings: Callable[[], AllocatorSettings], capacity_bytes: int | None, workspace_bytes: int
    ) -> None:
        super().__init__()
        self._settings = settings
        self.allocator = CachingAllocator(settings(), capacity_bytes)
        self.peaks = Peaks()
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self._is_closed = False
        self._address_of: dict[int, int] = {}
        self._workspace_bytes = workspace_bytes
        self._with_workspace: set[str] = set()
        self._next_workspace = -1

    def add(self, block: int, delta: int, label: int | None) -> None:
        """Place or free a block.

        Raises:
            NoRoomError: The allocator cannot serve it; nothing has changed then.
        """
        allocator = self.allocator
        if self._is_closed:
            return
        if delta > 0:
            if not self.blocks:
                allocator.configure(self._settings())
            address = allocator.malloc(delta)
            if address is None:
                raise NoRoomError(delta)
            self._address_of[block] = address
            peaks = self.peaks
            peaks.allocated_bytes = max(peaks.allocated_bytes, allocator.allocated_bytes)
            peaks.reserved_bytes = max(peaks.reserved_bytes, allocator.reserved_bytes)
        else:
            address = self._address_of.pop(block, None)
            if address is None:  # it was never allocated
                return
            allocator.free(address)
        super().add(block, delta, label)
        self.allocated.append(allocator.allocated_bytes)
        self.reserved.append(allocator.reserved_bytes)

    def multiplies(self, phase: StepPhase, *, with_bias: bool = False) -> None:
        """Take cuBLAS's workspace at the first matrix product of a thread; backward passes run in one of their own.

        At the first product with a bias, cuBLASLt takes one too.
        """
        if not self._workspace_bytes:
            return
        backward = phase is StepPhase.BACKWARD
        self._take_workspace(str(backward), phase, WORKSPACE_OP, self._workspace_bytes)
        if with_bias:
            self._take_workspace("bias", phase, LT_WORKSPACE_OP, LT_WORKSPACE_BYTES)

    def _take_workspace(self, whose: str, phase: StepPhase, op: str, size_bytes: int) -> None:
        if whose not in self._with_workspace:
            label = self.label(Label(phase, MemoryCategory.WORKSPACES, "", op))
            self.add(self._next_workspace, size_bytes, label)
            self._next_workspace -= 1
            self._with_workspace.add(whose)

    def held_since(self, event: int) -> list[int]:
        """Return the sizes of what was allocated since an event and is still there, in order."""
        held: dict[int, int] = {}
        for block, delta in zip(self.blocks[event:], self.deltas[event:], strict=True):
            if delta > 0:
                held[block] = delta
            else:
                held.pop(block, None)
        return list(held.values())

    def close(self) -> None:
        """Take nothing more, so that another thread may look at what there is."""
        self._is_closed = True

    def reset_peaks(self) -> None:
        """Begin new peaks from what is held now."""
        self.peaks = Peaks(self.allocator.allocated_bytes, self.allocator.reserved_bytes)
