"""What a script allocates on the virtual GPU: served or refused, by line, module, phase and category."""

import linecache
import os
import site
import sys
import sysconfig
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import CachingAllocator
from dryfit.gpu.events import LT_WORKSPACE_BYTES, LT_WORKSPACE_OP, WORKSPACE_OP, Label
from dryfit.gpu.private_apis.torch_modes import is_traceable_wrapper_subclass
from dryfit.gpu.private_apis.torch_recording import RUNS_BACKWARD, running_node_number, sequence_number
from dryfit.gpu.private_apis.torch_tensors import storage_key
from dryfit.gpu.recorder import FIRST_GUESS, OpenSegment, StorageRecorder
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.version import PACKAGE_FOLDER

# Allocations of a script as they happen: each is served, or refused, by the simulated allocator at once.


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


class _PrivatePool:
    """Segments that nobody else gets: with what may lie within a kernel, and without it."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._taken: tuple[list[int], list[int]] = ([], [])
        self._allocators = (CachingAllocator(settings), CachingAllocator(settings))
        for allocator, taken in zip(self._allocators, self._taken, strict=True):
            allocator.on_segment = lambda _action, _address, size, taken=taken: taken.append(size)
        self._addresses: dict[int, list[int | None]] = {}

    def place(self, block: int, size_bytes: int, *, is_least: bool) -> tuple[list[int], list[int]]:
        """Place a block; return the sizes of the segments that both kinds of pool took for it."""
        most, least = self._allocators
        self._addresses[block] = [most.malloc(size_bytes), least.malloc(size_bytes) if is_least else None]
        taken = tuple(sizes[:] for sizes in self._taken)
        for sizes in self._taken:
            sizes.clear()
        return taken[0], taken[1]

    @property
    def idle_bytes(self) -> int:
        """Memory of its segments that no tensor has."""
        return self._allocators[0].reserved_bytes - self._allocators[0].allocated_bytes

    def free(self, block: int) -> None:
        """Free a block: its place is the pool's."""
        for allocator, address in zip(self._allocators, self._addresses.pop(block), strict=True):
            if address is not None:
                allocator.free(address)


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
        addresses: The address that each event is about.
        segment_events: What the allocator took from the driver and gave back: the number of events before it, the
            action, the address and the bytes.
        emptied_at: Number of events each time that the script gave cached memory back.
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
        self.addresses: list[int] = []
        self.segment_events: list[tuple[int, str, int, int]] = []
        self.allocator.on_segment = lambda *about: self.segment_events.append((len(self.blocks), *about))
        self.emptied_at: list[int] = []
        self.fused: set[int] = set()
        """Blocks of compiled code that may lie within a kernel, and so take no memory."""
        self.in_place: dict[int, int] = {}
        """Blocks of compiled code that may be written over another one, which ends there."""
        self.may_fuse = False
        """Whether what is allocated now may lie within a kernel."""
        self.pool_segments: set[int] = set()
        """Blocks that are segments of private pools."""
        self.least_segments: list[tuple[int, int, int]] = []
        """Those that pools take without what may lie within a kernel: number of events before, block and bytes."""
        self._pools: dict[Hashable, _PrivatePool] = {}
        self._entered: list[_PrivatePool] = []
        self._pool_of: dict[int, _PrivatePool] = {}
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
        if delta > 0 and self.may_fuse:
            self.fused.add(block)
        if self._entered if delta > 0 else block in self._pool_of:
            self._in_pool(block, delta, label)
            return
        if delta > 0:
            if not self.blocks:
                allocator.configure(self._settings())
            address = allocator.malloc(delta)
            if address is None:
                raise NoRoomError(delta)
            self._address_of[block] = address
            self._raise_peaks()
        else:
            address = self._address_of.pop(block, None)
            if address is None:  # it was never allocated
                return
            allocator.free(address)
        super().add(block, delta, label)
        self.addresses.append(address)
        self.allocated.append(allocator.allocated_bytes)
        self.reserved.append(allocator.reserved_bytes)

    def allocate(self, size_bytes: int, label: int | None) -> int:
        """Place a block that no tensor has, and return its number.

        Raises:
            NoRoomError: As in :meth:`add`.
        """
        self._next_workspace -= 1
        self.add(self._next_workspace + 1, size_bytes, label)
        return self._next_workspace + 1

    def enter_pool(self, key: Hashable) -> None:
        """Allocate in a private pool from now on, as while a CUDA graph is captured: what it took it keeps."""
        if key not in self._pools:
            self._pools[key] = _PrivatePool(self.allocator.settings)
        self._entered.append(self._pools[key])

    def leave_pool(self) -> None:
        """Allocate where it was allocated before :meth:`enter_pool`."""
        self._entered.pop()

    def _in_pool(self, block: int, delta: int, label: int | None) -> None:
        """Place a block in a private pool, or free it there; the pool's segments are blocks of the device."""
        if delta < 0:
            self._pool_of.pop(block).free(block)
            return
        pool = self._pool_of[block] = self._entered.pop()
        try:
            taken, least = pool.place(block, delta, is_least=not self.may_fuse)
            for size in least:
                self.least_segments.append((len(self.blocks), self._next_workspace, size))
                self._next_workspace -= 1
            fuses, self.may_fuse = self.may_fuse, False
            for size in taken:
                self.pool_segments.add(self._next_workspace)
                self.allocate(size, label)
            self.may_fuse = fuses
        finally:
            self._entered.append(pool)
        self._raise_peaks()
        self._sizes[block] = delta

    @property
    def tensor_bytes(self) -> int:
        """What ``torch.cuda.memory_allocated`` counts: blocks of tensors, of private pools' segments only those."""
        return self.allocator.allocated_bytes - sum(pool.idle_bytes for pool in self._pools.values())

    def _raise_peaks(self) -> None:
        peaks = self.peaks
        peaks.allocated_bytes = max(peaks.allocated_bytes, self.tensor_bytes)
        peaks.reserved_bytes = max(peaks.reserved_bytes, self.allocator.reserved_bytes)

    def release_cached(self) -> None:
        """Give cached memory back to the driver, as the script asks."""
        self.emptied_at.append(len(self.blocks))
        self.allocator.release_cached()

    def again(self, capacity_bytes: int | None) -> "LiveAllocations":
        """Return the same events on another capacity, until the first that is refused there."""
        made = LiveAllocations(lambda: self.allocator.settings, capacity_bytes, 0)
        made.fused, made.in_place = self.fused, self.in_place
        made.pool_segments, made.least_segments = self.pool_segments, self.least_segments
        for label in self.label_table:
            made.label(label)
        emptied = set(self.emptied_at)
        with suppress(NoRoomError):
            for at, event in enumerate(zip(self.blocks, self.deltas, self.labels, strict=True)):
                if at in emptied:
                    made.release_cached()
                made.add(*event)
        return made

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
            self.allocate(size_bytes, label)
            self._with_workspace.add(whose)

    def least(self) -> tuple[list[int], list[int]]:
        """Return blocks and bytes of the events without those that compiled code may do without."""
        owner: dict[int, int] = {}
        held: set[int] = set()
        blocks: list[int] = []
        deltas: list[int] = []
        passed: set[int] = set()
        segments = iter([*self.least_segments, (len(self.blocks) + 1, 0, 0)])
        next_at, segment, size = next(segments)
        for at, (block, delta) in enumerate(zip(self.blocks, self.deltas, strict=True)):
            while next_at <= at:
                blocks.append(segment)
                deltas.append(size)
                next_at, segment, size = next(segments)
            if block in self.fused or block in self.pool_segments:
                continue
            own = owner.get(block, block)
            if delta > 0:
                over = self.in_place.get(block)
                below = None if over is None else owner.get(over, over)
                if below is not None and over is not None and below in held and over not in passed:
                    owner[block] = below
                    passed.add(over)
                    continue
                held.add(own)
            elif block in passed:
                continue
            else:
                held.discard(own)
            blocks.append(own)
            deltas.append(delta)
        return blocks, deltas

    def held_since(self, event: int) -> list[tuple[int, int]]:
        """Return size and label of what was allocated since an event and is still there, in order."""
        held: dict[int, tuple[int, int]] = {}
        for block, delta, label in zip(self.blocks[event:], self.deltas[event:], self.labels[event:], strict=True):
            if delta > 0:
                held[block] = (delta, label)
            else:
                held.pop(block, None)
        return list(held.values())

    def label_since(self, event: int, labels: Sequence[int]) -> None:
        """Give the allocations since an event, where there was nothing else, the labels of those they stand for."""
        if len(self.labels) == event + len(labels):
            self.labels[event:] = labels

    def close(self) -> None:
        """Take nothing more, so that another thread may look at what there is."""
        self._is_closed = True

    def reset_peaks(self) -> None:
        """Begin new peaks from what is held now."""
        self.peaks = Peaks(self.tensor_bytes, self.allocator.reserved_bytes)


# The line of a script that runs now: the user's own, and the deepest one outside of torch.
#
# Frames are looked at, never kept: a kept frame would keep its tensors.


class _Owner(IntEnum):
    HIDDEN = 0
    """torch, dryfit, the standard library and what Python itself makes: who calls them is of interest."""
    LIBRARY = 1
    USER = 2


_TORCH = str(Path(torch.__file__).parent) + "/"
BETWEEN = (_TORCH, f"{PACKAGE_FOLDER}/")
"""Folders whose code runs between a script or its libraries and the recorder."""
_PATHS = {name: f"{Path(folder)}/" for name, folder in sysconfig.get_paths().items()}
_STANDARD = (_PATHS["stdlib"], _PATHS["platstdlib"])
_LIBRARIES = (
    *(f"{Path(folder)}/" for folder in (*site.getsitepackages(), site.getusersitepackages())),
    *(_PATHS["purelib"], _PATHS["platlib"]),
)
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something happens.

    Attributes:
        line: ``path:number`` of the user's own code; empty where none runs.
        source: ``path:number`` of the deepest code outside of torch.
    """

    line: str = ""
    source: str = ""


class Places:
    """Finds the place of the running code.

    Attributes:
        own: A file, or a folder with a separator at its end, that is the user's wherever it lies: what is run.
        folder: Where the script was started: files below it are told relative to it.
    """

    def __init__(self) -> None:
        self.own = ""
        self.folder = f"{Path.cwd()}{os.sep}"
        self._owners: dict[int, _Owner] = {}
        self._texts: dict[tuple[int, int], str] = {}
        self._seen: list[CodeType] = []
        """Kept, so that no other code has the ``id`` of one: a code object computes its hash anew each time."""

    def now(self, *, up_to: str = "") -> Place:
        """Return the place of the code that called into torch.

        Args:
            up_to: Name of a function: code that called it is not looked at.
        """
        frame: FrameType | None = sys._getframe(1)
        owners, hidden, source = self._owners, _Owner.HIDDEN, ""
        while frame is not None:
            code = frame.f_code
            if up_to and code.co_name == up_to:
                break
            owner = owners.get(id(code))
            if owner is None:
                self._seen.append(code)
                owner = owners[id(code)] = self._owner(code.co_filename)
            if owner is not hidden:
                if not source:
                    source = self._text(code, frame.f_lineno)
                if owner is _Owner.USER:
                    return Place(self._text(code, frame.f_lineno), source)
            frame = frame.f_back
        return Place("", source)

    def is_own(self, filename: str) -> bool:
        """Whether a file is the script's, and of no library."""
        return self._owner(filename) is _Owner.USER

    def of(self, lines: Sequence[tuple[str, int]]) -> Place | None:
        """Return the place of code that was traced; None where no line of it is outside of torch.

        Args:
            lines: File and number of each call, the deepest last.
        """
        source = ""
        for filename, number in reversed(lines):
            owner = self._owner(filename)
            if owner is _Owner.HIDDEN:
                continue
            text = f"{filename.removeprefix(self.folder)}:{number}"
            source = source or text
            if owner is _Owner.USER:
                return Place(text, source)
        return Place("", source) if source else None

    def _owner(self, filename: str) -> _Owner:
        if filename == self.own or (self.own.endswith(os.sep) and filename.startswith(self.own)):
            return _Owner.USER
        if filename.startswith((*BETWEEN, "<")):
            return _Owner.HIDDEN
        if filename.startswith(_LIBRARIES) or any(folder in filename for folder in _PACKAGE_FOLDERS):
            return _Owner.LIBRARY
        if filename.startswith(_STANDARD):
            return _Owner.HIDDEN
        if any(filename.startswith(f"{folder}/") and _holds_installed(folder) for folder in sys.path if folder):
            return _Owner.LIBRARY
        return _Owner.USER

    def _text(self, code: CodeType, number: int) -> str:
        key = (id(code), number)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = f"{code.co_filename.removeprefix(self.folder)}:{number}"
        return text

    def code_of(self, line: str) -> str:
        """Return the text of a line ``path:number``; empty where it cannot be read."""
        path, _, number = line.rpartition(":")
        return linecache.getline(str(Path(self.folder, path)), int(number)).strip() if path else ""


@cache
def _holds_installed(folder: str) -> bool:
    """Whether packages were installed into a folder, as ``pip install --target`` does."""
    return next(Path(folder).glob("*.dist-info"), None) is not None


def runs_in(names: frozenset[str], file_end: str) -> bool:
    """Whether a function of one of these names, in a file that ends so, is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in names and code.co_filename.endswith(file_end):
            return True
        frame = frame.f_back
    return False


FREE = "free"
"""In the place of an operator, of what is freed."""
RESIZE = "storage.resize_"
"""In the place of an operator, of a storage that is given another size."""
_CLIPPING = frozenset({"clip_grad_norm_", "clip_grad_value_", "unscale_"})
_ENDS_STEP = frozenset({"zero_grad"})
_WRAPS = frozenset({"__init__"})
_COPIES = torch.ops.aten._to_copy.default
_CLONES = torch.ops.aten.clone.default
_COUNTING = frozenset({torch.int64, torch.int32, torch.int16, torch.bool})
"""Types of labels, edges and masks; quantised weights have types of one byte."""
_DEEP_COPIES = frozenset({"deepcopy"})
_MOVES = frozenset({"to", "cuda", "half", "bfloat16", "float", "double", "type"})
_MODULE = "nn/modules/module.py"
_DATA_PARALLEL = "nn/parallel/distributed.py"


_OnStep = Callable[[torch.optim.Optimizer], None]


NO_OPERATOR = 1 << 63
"""From here on are the numbers of nodes that no operator has made (``AccumulateGrad``: the highest of 64 bits)."""
_Where = tuple[str, Place]
"""A module, and where the code of it stands."""


class ForwardPlaces:
    """Where in the model, or in its code, each operator of a forward pass stood, by autograd's counter of operators."""

    def __init__(self) -> None:
        self._undone: _Where = ("", Place())
        self._last = -1
        self._starts: list[int] = []
        self._places: list[_Where] = []

    def is_new(self, number: int) -> bool:
        """Whether an operator that runs at this count has made a node: the count is above that of all noted before."""
        return number > self._last

    def note(self, number: int, place: _Where) -> None:
        """Note where the operator that runs at this count stands; later ones at the same count have no gradient."""
        if number <= self._last:
            return
        self._last = number
        if not self._places or self._places[-1] != place:
            self._starts.append(number)
            self._places.append(place)

    def at(self, number: int) -> _Where:
        """Return where the operator stood whose node has this number, which is undone now.

        Nodes that add up the gradients of parameters undo nothing: they stand where the node before them did.
        """
        index = bisect_right(self._starts, number + 1) - 1
        if number < NO_OPERATOR and index >= 0:
            self._undone = self._places[index]
        return self._undone

    def forget(self) -> None:
        """Forget all operators: none of them will be undone any more."""
        self._starts.clear()
        self._places.clear()


class TrainingModes:
    """The modes in which a script trains its modules.

    Attributes:
        in_evaluation_mode: Whether an optimizer took a step on a batch for which modules were in evaluation mode alone.
    """

    def __init__(self) -> None:
        self.in_evaluation_mode = False
        self._in_training_mode = False

    def is_training(self, module: nn.Module) -> bool:
        """Return whether a call of a module is a part of training.

        It is in training mode; and in evaluation mode, in which transformers loads models, where a graph is made and
        the script has trained in that mode, or in none yet.
        """
        if module.training:
            self._in_training_mode |= torch.is_grad_enabled()
            return True
        return torch.is_grad_enabled() and (self.in_evaluation_mode or not self._in_training_mode)


class ScriptRecorder(StorageRecorder):
    """A recorder that finds out by itself what the script is doing.

    Modules are followed by torch's hooks on every module, optimizers by its hooks on every step; weights, gradients
    and optimizer state are known from the modules and optimizers that were seen.

    Args:
        allocations: Where allocations go.
        places: Finds the running line.
        device: Storages elsewhere are left out; CUDA's kernels take more than their tensors.
        capability: Compute capability of the CUDA device.
    """

    def __init__(
        self,
        allocations: LiveAllocations,
        places: Places,
        device: str = "cuda",
        capability: tuple[int, int] | None = None,
    ) -> None:
        self._forced: StepPhase | None = None
        self._outer_step: StepPhase | None = None
        self._running_at: Place | None = None
        self._resting = self._last_phase = StepPhase.LOAD
        self._backward_passes = 0
        self._of_graph: tuple[str, tuple[tuple[str, int], ...]] | None = None
        """Module and lines of the node of a compiled graph that is being noted."""
        self._written_over: int | None = None
        """The block that it is written over."""
        self._copied: set[int] = set()
        """Blocks that were copied to the device while the script loaded, by no module."""
        self._has_run = False
        """Whether a model was called in training since the last optimizer step."""
        self.modes = TrainingModes()
        super().__init__(device, kernels=device == "cuda", capability=capability)
        self.allocations = allocations
        self.places = places
        self._segment = allocations
        self._modules: list[str] = []
        self._forward = ForwardPlaces()
        self._module_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.holders: list[Callable[[], Iterator[tuple[torch.Tensor, MemoryCategory]]]] = []
        """Each yields tensors of a library, which no model and no optimizer holds, and what they are."""
        self.on_whole_step: tuple[_OnStep, _OnStep] = (lambda _: None, lambda _: None)
        """Called where a library's own step begins and where it has ended, with the optimizer below it."""

    @property
    def phase(self) -> StepPhase:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the script is doing."""
        if running_node_number() is not None:
            return StepPhase.BACKWARD
        if self._forced is not None and not self._modules:  # a closure runs the model inside of the optimizer's step
            return self._forced
        return self._resting

    @phase.setter
    def phase(self, phase: StepPhase) -> None:
        self._resting = phase

    def follow(self) -> Sequence[RemovableHandle]:
        """Follow every module and every optimizer of the process, until what is returned is removed."""
        return (
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        )

    def record_segments(self) -> None:
        """Record nothing from now on but segments, of steps whose phases are marked."""
        self._segment = None

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Record what an operator that has just run allocated, and where it stands."""
        self._running_at = None
        if self._segment is not None:
            self._note_forward()
        super().note(func, args, out)

    def note_stored(
        self,
        func: Any,
        args: tuple[Any, ...],
        out: Any,
        *,
        where: tuple[str, tuple[tuple[str, int], ...]],
        may_fuse: bool,
        over: torch.Tensor | None,
        overwrites: bool,
    ) -> None:
        """Record what a kernel of compiled code stores.

        Args:
            func: Its operator.
            args: Of the operator; none where they are not there any more.
            out: What it gives.
            where: Its module, and file and number of the lines that called it.
            may_fuse: Whether it may lie within another kernel.
            over: What it may be written over.
            overwrites: Whether it certainly is.
        """
        first = self._next_block
        block = None if over is None else self._storages.get(storage_key(over))
        size_bytes = out.untyped_storage().nbytes() if isinstance(out, torch.Tensor) else 0
        is_alike = block is not None and self._sizes[block] == size_bytes
        self._written_over = block if overwrites and is_alike else None
        self._of_graph, self.allocations.may_fuse = where, may_fuse
        try:
            self.note(func, args, out)
        finally:
            self._of_graph, self.allocations.may_fuse, self._written_over = None, False, None
        if block is not None and is_alike and self._next_block == first + 1:
            self.allocations.in_place[first] = block

    def note_resized(self, storage: Any) -> None:
        """Record that a storage has another size; those of the host are none of ours."""
        self._running_at = None
        self._resize(storage, self.allocations, RESIZE)

    def note_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Say what memory is that a parameter is given within a module: gathered, and no activation."""
        if self._modules and isinstance(tensor, nn.Parameter):
            block = self._storages.get(storage_key(data))
            if block is not None and block not in self._names:
                self._categories[block] = MemoryCategory.TEMPORARIES

    def place(self) -> tuple[str, Place]:
        """Return the module and the line that run; in a backward pass, those of the operator that is undone."""
        self._running_at = None
        return self._place()

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _place(self) -> tuple[str, Place]:
        if self._of_graph is not None:
            module, lines = self._of_graph
            if place := self.places.of(lines):
                within = "." in self._module() or len(self._modules) > 1
                return ".".join(filter(None, (self._module() if within else "", module))), place
        if not self._modules and (number := running_node_number()) is not None:
            module, place = self._forward.at(number)
            called = self.places.now(up_to=RUNS_BACKWARD)
            if called.line or (called.source and number >= NO_OPERATOR):  # a hook, or a backward pass in Python
                return module, called if called.line else self._here()
            return module, place if place.source else self._here()
        return self._module(), self._here()

    def reused_block(self, func: Any, args: tuple[Any, ...]) -> int | None:
        """Return the block that an operator writes its result to, though a new tensor is seen."""
        return self._written_over if self._of_graph is not None else super().reused_block(func, args)

    def categorize(self) -> None:
        """Say of everything that models and optimizers hold now what it is."""
        for holder in self.holders:
            for tensor, category in holder():
                self.name(tensor, "held", category)
        # torch's own functions: a class of the script's may have others of the same names, with other arguments.
        parameters, buffers = nn.Module.named_parameters, nn.Module.named_buffers
        named = {id(one): name for root in list(self._roots) for name, one in parameters(root)}
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.name(parameter, "weight:", MemoryCategory.WEIGHTS)
                    if parameter.grad is not None:
                        self.name(parameter.grad, "gradient:", MemoryCategory.GRADIENTS)
            for parameter, state in list(optimizer.state.items()):
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        of = named.get(id(parameter), "")
                        self.name(value, f"optimizer:{of}:{key}", MemoryCategory.OPTIMIZER)
        for root in list(self._roots):
            for name, parameter in parameters(root, remove_duplicate=False):
                is_adapter = parameter.requires_grad and "lora_" in name
                self.name(parameter, f"weight:{name}", _WEIGHTS[is_adapter])
                if parameter.grad is not None:
                    self.name(parameter.grad, f"gradient:{name}", MemoryCategory.GRADIENTS)
            for name, buffer in buffers(root):
                self.name(buffer, f"weight:{name}", MemoryCategory.WEIGHTS)

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Count the block as one step of a library, which takes several steps of an optimizer in it."""
        begins, ends = self.on_whole_step
        begins(optimizer)
        self.categorize()
        self._forced = self._outer_step = StepPhase.OPTIMIZER
        try:
            yield
        finally:
            self._forced = self._outer_step = None
        ends(optimizer)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Count what is freed inside the block to a backward pass: autograd frees between two operators too."""
        self._backward_passes += 1
        try:
            yield
        finally:
            self._backward_passes -= 1

    def categories(self) -> dict[int, MemoryCategory]:
        """Return the category of each block of which one is known; averages have the sizes of their weights."""
        sizes = {self._sizes[block] for block, name in self._names.items() if name.startswith("weight:")}
        averages = {block for block in self._copied if self._sizes.get(block) in sizes}
        return dict.fromkeys(averages, MemoryCategory.WEIGHTS) | self._categories

    @property
    def in_module(self) -> bool:
        """Whether a module is running."""
        return bool(self._modules)

    def trains(self) -> None:
        """Note that loading is over: a script may train without any module."""
        if self._resting is StepPhase.LOAD:
            self._resting = StepPhase.FORWARD

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of a model that was called, or one by itself that has a gradient: these are noted."""
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            self.name(tensor, "weight:", MemoryCategory.WEIGHTS)
            self.name(tensor.grad, "gradient:", MemoryCategory.GRADIENTS)
            return True
        block = self._storages.get(storage_key(tensor))
        return block is not None and self._names.get(block, "").startswith("weight:")

    def name(self, tensor: torch.Tensor, name: str, category: MemoryCategory) -> None:
        """Say what a tensor on the device is for, of a sharded one its own shard; tied tensors keep the first name.

        A quantised tensor has tensors in it: codes, scales.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                self.name(getattr(tensor, part), name, category)
        elif tensor.device.type == self._device:
            with suppress(NotImplementedError):  # a wrapper of ``torch.func``, which has no memory of its own
                super().name(tensor, name, category)

    def note_outputs(self, segment: Any, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note what an operator returned; whole numbers and masks that are made before training are inputs."""
        block = self._next_block
        super().note_outputs(segment, func, args, out)
        if self._next_block > block and self.phase is StepPhase.LOAD and getattr(out, "dtype", None) in _COUNTING:
            self._categories[block] = MemoryCategory.INPUTS  # unless a model or an optimizer turns out to hold it

    def _label(self, segment: Any, func: Any) -> int:
        module, place = self._place()
        phase = self.phase
        if not self._modules and phase in (StepPhase.FORWARD, StepPhase.LOAD) and runs_in(_CLIPPING, ".py"):
            phase = StepPhase.CLIP
        category = FIRST_GUESS.get(phase, MemoryCategory.TEMPORARIES)
        if phase is StepPhase.LOAD and func is _COPIES and not runs_in(_MOVES, _MODULE):
            category = MemoryCategory.INPUTS  # unless a model or an optimizer turns out to hold it
            self._copied.add(self._next_block)
        if func is _CLONES and not self._modules and runs_in(_DEEP_COPIES, "/copy.py"):
            self._copied.add(self._next_block)  # an average of a model that has run already
        if phase is StepPhase.LOAD and runs_in(_WRAPS, _DATA_PARALLEL):
            category = MemoryCategory.GRADIENTS  # buckets, into which gradients are copied to be sent
        if phase is StepPhase.FORWARD and not self._modules and not torch.is_grad_enabled():
            category = MemoryCategory.TEMPORARIES
        self._last_phase = phase
        return segment.label(Label(phase, category, module, str(func), place.line, place.source))

    def _label_of_free(self, segment: Any) -> int:
        """Return a label of the running line; between two phases, what is freed counts to the one that has ended."""
        place = self.places.now()
        if self._backward_passes:
            phase = StepPhase.BACKWARD
        elif self._modules or self._forced:
            phase = self.phase
        else:
            ends_step = not self._has_run and runs_in(_ENDS_STEP, ".py")
            phase = StepPhase.OPTIMIZER if ends_step else self._last_phase
        return segment.label(Label(phase, MemoryCategory.TEMPORARIES, self._module(), FREE, place.line, place.source))

    def _note_forward(self) -> None:
        number = sequence_number()
        if self._forward.is_new(number) and running_node_number() is None:
            self._forward.note(number, (self._module(), self._here()))

    def _here(self) -> Place:
        """Return the running line; looked for once for each operator, and not again where one is being noted."""
        here = self._running_at
        if here is None:
            here = self._running_at = self.places.now()
        return here

    def _module_begins(self, module: nn.Module, _args: Any) -> None:
        if not self._modules and running_node_number() is None:
            trains = self.modes.is_training(module)
            self._resting = StepPhase.FORWARD if trains else StepPhase.EVALUATE
            self._has_run |= trains
        name = self._module_names.get(module)
        if name is None:
            if not self._modules:
                self._meet(module)
            name = self._module_names.get(module) or type(module).__name__
        self._modules.append(name)

    def _module_ends(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _meet(self, root: nn.Module) -> None:
        """Learn the names of a model's modules the first time that it is called."""
        self.know(root)
        self.categorize()

    def know(self, root: nn.Module) -> None:
        """Learn the names of a model's modules and parameters."""
        self._roots.add(root)
        for name, module in root.named_modules():
            self._module_names.setdefault(module, name)

    def _step_begins(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self._has_run = False
        self.categorize()
        self._forced = self._last_phase = StepPhase.OPTIMIZER

    def _step_ends(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._forced = self._outer_step
        self.trains()
        self.categorize()
        self._forward.forget()


_WEIGHTS = {False: MemoryCategory.WEIGHTS, True: MemoryCategory.ADAPTERS}
