"""The virtual GPU: a device that is not there, and all that a script asks of it."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from dryfit.gpu import functions, missing_parts, unwritten, weights
from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import CachingAllocator
from dryfit.gpu.constants import DeviceConstants, device_constants
from dryfit.gpu.cuda_api import CudaApi
from dryfit.gpu.deepspeed_parts import install_deepspeed
from dryfit.gpu.dispatch import VirtualDispatch
from dryfit.gpu.fake_cuda import why_not
from dryfit.gpu.kernels import route_attention
from dryfit.gpu.presence import Presence
from dryfit.gpu.private_apis.torch_virtual import VIRTUAL
from dryfit.gpu.script_recorder import LiveAllocations, NoRoomError, Places
from dryfit.gpu.stand_ins import STAND_INS
from dryfit.gpu.triton_kernels import install_triton
from dryfit.gpu.viewers import Failure
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import TraceError
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.private_names import require
from dryfit.settings.rehearsal_messages import OutOfMemory, Unknown

_DOING = "making a virtual GPU"
_MOST_KERNELS = 8
_MOST_SAID = 200
_GRAPHS = "torch.compile: its graphs ran, without their code; between the bounds is what inductor fuses besides"
_LAUNCHES = "Triton kernels launched without effect"


class VirtualGpu:
    """A CUDA device without hardware, for the rest of this process.

    Args:
        spec: The device.
        ranks: How many such devices the process sees.
        unlimited: Whether it has room for everything, to find out how much a script needs.
        constants: What the device takes besides tensors; None: as published.

    Raises:
        TraceError: This build of torch cannot do it.
    """

    is_compiled = False
    """Whether something was compiled."""
    is_traced = True
    """Whether all that was compiled runs as the graphs that torch makes of it."""
    multiplies_unseen = False
    """Whether a Triton kernel multiplied matrices, whose arithmetic nobody knows."""
    updates_on_host = False
    """Whether an optimizer of the host updated parameters, in a time that nobody knows."""

    def __init__(
        self,
        spec: DeviceSpec,
        *,
        ranks: int = 1,
        unlimited: bool = False,
        constants: DeviceConstants | None = None,
    ) -> None:
        if spec.kind is not DeviceKind.CUDA:
            raise TraceError(_DOING, f"{spec.name} is no GPU", hint="name a GPU: rtx4090, a100-80, 24GiB")
        require(_DOING, VIRTUAL)
        reason = why_not()
        if reason:
            raise TraceError(_DOING, reason, hint="dryfit hides GPUs from a rehearsal that it starts itself")
        self.spec = spec
        self.constants = constants or device_constants(spec, torch.__version__)
        room = None if unlimited else spec.capacity_bytes - self.constants.overhead_bytes
        self.allocations = LiveAllocations(
            lambda: AllocatorSettings.of_environment(os.environ, AllocatorSettings()),
            room,
            self.constants.workspace_bytes,
        )
        self.room_bytes = room
        self.out_of_memory: list[OutOfMemory] = []
        self.failed_at: list[int] = []
        """Number of allocations and frees at each out-of-memory error."""
        self.unknown: dict[tuple[str, str], Unknown] = {}
        self.asked: dict[str, str] = {}
        """What of the device the script asked for that others of its architecture have not, with the first line."""
        self.assumed: list[str] = []
        """Packages that were taken to be there, each with the reason and the source of what it takes."""
        self.notes: list[str] = []
        """Remarks on the whole run."""
        self.presence = Presence(STAND_INS, self._assumes, self._goes_on_without)
        self.places = Places()
        self.dispatch = VirtualDispatch(self.allocations, self.places, ranks, spec.capability)
        self.dispatch.on_no_room = self._no_room
        self.dispatch.on_unknown = self.note_unknown
        self.dispatch.on_note = self._note
        self.dispatch.on_untimed = self._untimed
        self.step = 1
        self._kernels: list[str] = []
        self.on_launch: Callable[[str, list[torch.Tensor]], None] = lambda _name, _tensors: None
        """Called with name and tensors of each compiled kernel that is launched."""
        self._answers = False
        self.api = CudaApi(
            spec,
            ranks,
            self.constants.overhead_bytes,
            self.allocations,
            self.places,
            self.note_unknown,
            self.note_asked,
        )
        self.api.failures = self.failures

    @contextmanager
    def active(self) -> Iterator["VirtualGpu"]:
        """Let this process's tensors be on the virtual GPU, inside the block; what was patched stays."""
        self.api.install()
        functions.install(self.dispatch)
        self.dispatch.bodies.install()
        functions.follow_compiling(self.dispatch, self._compiles, self._not_compiled, self._runs_kernel)
        functions.follow_threads(self._modes)
        functions.mark_forks(self._forked)
        install_triton(self.spec.capability, self._launched, self._note)
        missing_parts.install_flex_attention(self._note)
        missing_parts.install_managed_memory(self.dispatch.empty, self._note)
        install_deepspeed(self._runs_kernel, self._updates_on_host, self.dispatch)
        self.presence.install()
        missing_parts.install_missing_parts(self.presence, self._note)
        weights.install(self._fake, self._demand_room, self.dispatch.note_data)
        self.dispatch.follow()
        # Kept alive as long as the block: what is collected takes its kernels with it.
        with route_attention("cuda", self.spec.capability) as attention, self._modes():
            self.dispatch.attention = attention
            yield self

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let tensors be on the virtual GPU, inside the block, for steps of dryfit's own.

        Of what a script may do besides, nothing is followed, so other work of this process goes on as it is. Behind
        the block torch counts no device.
        """
        if not self._answers:
            self.api.install()
            self._answers = True
        self.api.is_there = True
        threads = torch.autograd.is_multithreading_enabled()
        followed = self.dispatch.follow()
        try:
            with route_attention("cuda", self.spec.capability) as attention, self._modes():
                self.dispatch.attention = attention
                yield
        finally:
            for handle in followed:  # other models and threads of this process are none of the device's
                handle.remove()
            self.api.is_there = False
            torch.autograd.set_multithreading_enabled(threads)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Let one thread's tensors be on the virtual GPU, inside the block."""
        torch.autograd.set_multithreading_enabled(False)
        self.dispatch.functions = functions.VirtualFunctions(self.dispatch)
        with self.dispatch, self.dispatch.functions:
            yield

    def _forked(self) -> None:
        self.dispatch.is_bad_fork = bool(self.allocations.blocks)

    def begin_afresh(self) -> None:
        """Let a forked process use the device, as one that the script begins in a fresh interpreter may."""
        self.dispatch.is_bad_fork = False

    def _runs_kernel(self, name: str, tensors: list[torch.Tensor]) -> None:
        self.on_launch(name, tensors)  # which is set later

    def _compiles(self) -> None:
        self.is_compiled = True
        self._note(_GRAPHS)

    def _not_compiled(self, error: Exception) -> None:
        self.is_compiled, self.is_traced = True, False
        said = " ".join(str(error).split("\n")[:2])[:_MOST_SAID]
        self._note(f"torch.compile: a part runs without it, which is an upper bound of what it keeps: {said}")

    def _launched(self, kernel: str, tensors: list[torch.Tensor], multiplies: bool) -> None:
        self.multiplies_unseen |= multiplies
        self.on_launch(kernel, tensors)
        if kernel not in self._kernels:
            self._kernels.append(kernel)
            self.notes[:] = [note for note in self.notes if not note.startswith(_LAUNCHES)]
            timed = "no time is told" if self.multiplies_unseen else "their time is that of the tensors given to them"
            names = ", ".join(self._kernels[:_MOST_KERNELS])
            more = len(self._kernels) - _MOST_KERNELS
            names += f" and {more} more" if more > 0 else ""
            self.notes.append(f"{_LAUNCHES}: {names}; what they write to is counted, {timed}")

    def _assumes(self, package: str, text: str) -> None:
        self.assumed.append(text)
        self.notes[:] = [note for note in self.notes if not note.startswith(f"code looked for {package} ")]
        row = STAND_INS.get(package)
        if row is not None and not row.is_timed:
            self._untimed(f"the arithmetic of {row.distribution} is not counted")

    def _goes_on_without(self, package: str) -> None:
        self._note(
            f"code looked for {package} and goes on without it: a torch for CUDA has it, and this one has not; "
            f"--with {package} takes it to be there"
        )

    def _untimed(self, why: str) -> None:
        self.multiplies_unseen = True
        self._note(f"{why}: no time is told")

    def _updates_on_host(self, optimizer: str) -> None:
        self.updates_on_host = True
        self._note(f"parameters are updated on the host (DeepSpeed's {optimizer}): no time is told")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes allocated so far."""
        return max(self.allocations.allocated, default=0)

    def note_unknown(self, what: str) -> None:
        """Note that something was asked for that nobody knows without a device, with its line."""
        _, place = self.dispatch.place()
        line = place.line or place.source
        self.unknown.setdefault((what, place.source), Unknown(what=what, line=line, code=self.places.code_of(line)))

    def note_asked(self, what: str) -> None:
        """Note that the script asked for something that distinguishes devices of one architecture, with its line."""
        _, place = self.dispatch.place()
        self.asked.setdefault(what, place.line or place.source)

    def _fake(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> torch.Tensor:
        try:
            made = self.dispatch.empty(shape, dtype, device)
        except NoRoomError as error:
            raise self._no_room(error) from None
        return made.requires_grad_(requires_grad)

    def _no_room(self, error: NoRoomError) -> torch.OutOfMemoryError:
        """Return torch's error."""
        allocator, overhead_bytes = self.allocations.allocator, self.constants.overhead_bytes
        message = no_room_text(allocator, self.spec.capacity_bytes, overhead_bytes, error.requested_bytes)
        return self._refused(message, error.requested_bytes)

    def failures(self) -> list[Failure]:
        """Return the out-of-memory errors, each with the number of events before it and the bytes that were left."""
        found: list[Failure] = []
        for at, error in zip(self.failed_at, self.out_of_memory, strict=True):
            reserved_bytes = self.allocations.reserved[at - 1] if at else 0
            found.append((at, max(0, (self.room_bytes or 0) - reserved_bytes), error))
        return found

    def _demand_room(self, requested_bytes: int, what: str) -> None:
        """Raise an out-of-memory error for what would lie elsewhere in part; not where the device has no limit."""
        if self.room_bytes is not None:
            message = f"{what} takes {_size(requested_bytes)}: a part of it would not be on the device"
            raise self._refused(message, requested_bytes)

    def _refused(self, message: str, requested_bytes: int) -> torch.OutOfMemoryError:
        """Note an out-of-memory error with its line, and return it."""
        _, place = self.dispatch.place()
        self.dispatch.categorize()
        self.failed_at.append(len(self.allocations.blocks))
        self.out_of_memory.append(
            OutOfMemory(
                message=message,
                requested_bytes=requested_bytes,
                line=place.line,
                code=self.places.code_of(place.line),
                source=place.source,
                phase=self.dispatch.phase,
                step=self.step,
                caught=True,
            )
        )
        self.api.observe_failures()
        return torch.OutOfMemoryError(message)


def virtual_gpu(device: str | DeviceSpec) -> AbstractContextManager[VirtualGpu]:
    """Return a context in which CUDA is a device that is not there; use it in a fresh process.

    Its tensors have no values: ``torch.save`` and safetensors write small files without data, which are read back, and
    replace no file that they did not write.

    ::

        with dryfit.virtual_gpu("rtx4090") as gpu:
            train()
        print(gpu.peak_allocated_bytes)

    Args:
        device: ``rtx4090``, ``a100-80``, ``24GiB``, ...

    Raises:
        ConfigError: There is no such device.
        TraceError: This build of torch cannot do it, or a real device is visible.
    """
    gpu = VirtualGpu(parse_device(device) if isinstance(device, str) else device)
    unwritten.keep_files(gpu.dispatch.empty)
    return gpu.active()


def no_room_text(allocator: CachingAllocator, capacity_bytes: int, overhead_bytes: int, requested_bytes: int) -> str:
    """Return the out-of-memory error of an allocator in torch's words (``CUDACachingAllocator.cpp``, ``malloc``)."""
    used = overhead_bytes + allocator.reserved_bytes
    idle = allocator.reserved_bytes - allocator.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {_size(requested_bytes)}. "
        f"GPU 0 has a total capacity of {_size(capacity_bytes)} of which "
        f"{_size(max(0, capacity_bytes - used))} is free. "
        f"Including non-PyTorch memory, this process has {_size(used)} memory in use. "
        f"Of the allocated memory {_size(allocator.allocated_bytes)} is allocated by PyTorch, and "
        f"{_size(idle)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-"
        "pytorch-alloc-conf)"
    )


def _size(size: int) -> str:
    """Return bytes as torch's allocator prints them (``format_size``)."""
    if size <= 1024:
        return f"{size} bytes"
    if size <= 1048576:
        return f"{size / 1024:.2f} KiB"
    if size <= 1073741824:
        return f"{size / 1048576:.2f} MiB"
    return f"{size / 1073741824:.2f} GiB"
