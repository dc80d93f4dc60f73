"""Operators of a backward pass that work in place on real tensors, though a trace sees a new tensor."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from dryfit.gpu.constants import processors_of
from dryfit.gpu.events import Label, Segment
from dryfit.gpu.kernels import GEMMS, TAKE_SCRATCH, adds_bias, scratch_blocks
from dryfit.gpu.private_apis.torch_modes import MODES, TorchDispatchMode, schema_of, tree_iter
from dryfit.gpu.private_apis.torch_operators import OPERATORS
from dryfit.gpu.private_apis.torch_recording import RECORDING, gradient_sums, use_counts
from dryfit.gpu.private_apis.torch_tensors import TENSORS, is_view, key_of, storage_key
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.private_names import require

_aten = torch.ops.aten
_ADD = _aten.add.Tensor

CANDIDATES = frozenset(
    {_ADD, _aten.scatter_add.default, _aten.index_put.default, _aten.index_add.default, _aten.masked_scatter.default}
)
"""Autograd's sum of gradients, and the operators by which its formulas fill fresh zeros."""


def reuses_first_argument(func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Tell whether the real operator would have reused its first argument.

    Args:
        func: One of :data:`CANDIDATES`, called while autograd works and gradients are off.
        target: Its first argument.
        args: All of them.
    """
    if func is not _ADD:
        return use_counts(target)[0] == sole_holder_counts()[0]
    other = args[1]
    same = isinstance(other, torch.Tensor) and other.shape == target.shape and other.dtype == target.dtype
    return same and not is_view(target) and use_counts(target) == sole_holder_counts()


@cache
def sole_holder_counts() -> tuple[int, int]:
    """Return the use counts of a gradient that only autograd holds, as a mode sees them.

    They depend on torch, so a small backward pass measures them; do not call it first within one.
    """
    seen: list[tuple[int, int]] = []
    gradient_sums(lambda summand: seen.append(use_counts(summand)))
    return seen[0]


# Record the memory that a piece of training allocates and frees, storage by storage.
#
# Works alike on fake tensors of any device and on real ones. Every storage that an operator's output is the first to
# show is an allocation; the end of that storage is its release. Views, in-place operators and ties show no new
# storage, nor does a view of what was made before the recording.


class StorageRecorder(TorchDispatchMode):
    """Record the storages that operators below autograd make on one device.

    Enter it inside of the fake mode, so that it sees operators first. One segment is recorded at a time::

        with recorder.segment() as record:
            recorder.phase = StepPhase.FORWARD
            ...
            recorder.name(parameter.grad, "gradient:encoder.x", MemoryCategory.GRADIENTS)
        record.result

    Args:
        device: Storages elsewhere are left out.
        kernels: Whether to add the scratch memory of CUDA kernels.
        capability: Compute capability of the CUDA device; None leaves out what cannot be interpolated.
    """

    def __init__(self, device: str, *, kernels: bool, capability: tuple[int, int] | None = None) -> None:
        super().__init__()
        require("recording the memory of a step", MODES, TENSORS, RECORDING, OPERATORS)
        sole_holder_counts()  # measured now: it cannot be inside of a backward pass
        self.phase = StepPhase.LOAD
        self._device = device
        self._kernels = kernels
        self.processors = None if capability is None else processors_of(capability)
        """Those of the device; None leaves out scratch memory that cannot be interpolated."""
        self._storages: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._categories: dict[int, MemoryCategory] = {}
        self._next_block = 0
        self._segment: OpenSegment | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then look at its outputs."""
        out = func(*args, **(kwargs or {}))
        self.note(func, args, out)
        return out

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Record what an operator that has just run allocated."""
        segment = self._segment
        if segment is None:
            return
        if self._kernels and func in GEMMS and self._runs_here(args):
            segment.multiplies(self.phase, with_bias=adds_bias(func, args))
        self.note_outputs(segment, func, args, out)
        takes_scratch = self._kernels and func in TAKE_SCRATCH and self._runs_here(args)
        if takes_scratch and (blocks := scratch_blocks(func, args, out, self.processors)):
            self.note_scratch(segment, func, blocks)

    def note_scratch(self, segment: "OpenSegment", func: Any, blocks_bytes: Sequence[int]) -> None:
        """Note what a kernel allocates beside its outputs, all at once, and frees."""
        label = self._label(segment, func)
        blocks = [(self._new_block(MemoryCategory.TEMPORARIES), size_bytes) for size_bytes in blocks_bytes]
        for block, size_bytes in blocks:
            segment.add(block, size_bytes, label)
        for block, size_bytes in reversed(blocks):
            segment.add(block, -size_bytes, label)

    def _runs_here(self, args: tuple[Any, ...]) -> bool:
        """Whether an operator runs on the device: so does one of its tensors."""
        return any(isinstance(one, torch.Tensor) and one.device.type == self._device for one in args)

    def note_outputs(self, segment: "OpenSegment", func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note what an operator returned: new storages, and views of known ones."""
        reused = self.reused_block(func, args)
        if reused is not None and isinstance(out, torch.Tensor):
            self._share(out.untyped_storage(), reused)
            return
        label = None
        leaves = (out,) if isinstance(out, torch.Tensor) else tuple(tree_iter(out))
        for leaf in reversed(leaves) if func in _LAST_FIRST else leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                storage = leaf.untyped_storage()
                key = key_of(storage)
                if key in self._storages:
                    if may_resize(func):
                        self._resize(storage, segment, func)
                elif not _was_before(key, func, args):
                    label = self._label(segment, func) if label is None else label
                    self._watch(storage, label, segment)

    @contextmanager
    def segment(self) -> Iterator["SegmentRecord"]:
        """Record everything inside the block as one segment."""
        assert self._segment is None, "segments do not nest"
        self._segment = opened = OpenSegment()
        record = SegmentRecord()
        try:
            yield record
            self._close(opened)
            record.result = opened.sealed(self._names, self._categories)
        finally:
            self._segment = None

    def name(self, tensor: torch.Tensor, name: str, category: MemoryCategory) -> None:
        """Name a storage that outlives its segment; tied tensors keep the first name."""
        block = self._storages.get(storage_key(tensor))
        if block is not None:
            self._names.setdefault(block, name)
            self._categories[block] = category

    def adopt(self, tensor: torch.Tensor, name: str, category: MemoryCategory) -> None:
        """Register a storage made outside of any segment, without an event."""
        storage = tensor.untyped_storage()
        if key_of(storage) not in self._storages and storage.nbytes():
            self._watch(storage, None, None)
        self.name(tensor, name, category)

    def _label(self, segment: "OpenSegment", func: Any) -> int:
        category = FIRST_GUESS.get(self.phase, MemoryCategory.TEMPORARIES)
        return segment.label(Label(self.phase, category, "", str(func)))

    def _label_of_free(self, _segment: "OpenSegment") -> int | None:
        """Return the label of what is freed now; None: that of what was allocated last."""
        return None

    def reused_block(self, func: Any, args: tuple[Any, ...]) -> int | None:
        """Return the block that the real operator would have reused, where a mode or a fake keeps it from that.

        Autograd adds the gradients of a tensor with several uses into the first of them if nobody else holds it, and
        some backward formulas fill fresh zeros in place; neither on subclasses of tensors (``can_accumulate_inplace``
        in torch/csrc/autograd/input_buffer.cpp, ``areAnyTensorSubclassLike`` in FunctionsManual.cpp).
        """
        if func not in CANDIDATES or self.phase is not StepPhase.BACKWARD or torch.is_grad_enabled():
            return None
        target = args[0]
        if not isinstance(target, torch.Tensor) or not reuses_first_argument(func, target, args):
            return None
        block = self._storages.get(storage_key(target))
        return block if block is not None and block not in self._names else None

    def _new_block(self, category: MemoryCategory | None = None) -> int:
        block = self._next_block
        self._next_block += 1
        if category is not None:
            self._categories[block] = category
        return block

    def _watch(self, storage: Any, label: int | None, segment: "OpenSegment | None") -> None:
        block = self._new_block()
        size = storage.nbytes()
        if segment is not None and label is not None and size:
            segment.add(block, size, label)
        self._sizes[block] = size
        self._share(storage, block)

    def _resize(self, storage: Any, segment: "OpenSegment", func: Any) -> None:
        """Give a storage a block of its present size: as CUDA does, allocate it before the old one is freed."""
        key, size = key_of(storage), storage.nbytes()
        old = self._storages.get(key)
        if old is None or size == self._sizes[old]:
            return
        block = self._new_block(self._categories.get(old))
        if old in self._names:
            self._names[block] = self._names[old]
        if size:
            segment.add(block, size, self._label(segment, func))
        self._sizes[block] = size
        self._storages[key] = block
        self._holders[block] = 1
        self._release(old)

    def _release(self, block: int) -> None:
        """Free a block unless another storage has it too."""
        self._holders[block] -= 1
        segment = self._segment
        if self._holders[block] or segment is None or not self._sizes[block]:
            return
        if segment.has(block) or block in self._names:
            segment.add(block, -self._sizes[block], self._label_of_free(segment))

    def _share(self, storage: Any, block: int) -> None:
        """Let a block live until this storage ends and every other one that shares it."""
        key = key_of(storage)
        self._storages[key] = block
        self._holders[block] = self._holders.get(block, 0) + 1

        def ended(_ref: Any) -> None:
            # Called by whatever drops the last reference, autograd's C++ included: it must not raise.
            del self._watchers[key]
            self._release(self._storages.pop(key))

        self._watchers[key] = weakref.ref(storage, ended)

    def _close(self, segment: "OpenSegment") -> None:
        """Free what lives on without a name: scalars that the real loop keeps for a moment longer."""
        left = {key: block for key, block in self._storages.items() if block not in self._names and segment.has(block)}
        for key in left:
            del self._storages[key], self._watchers[key]
        for block in dict.fromkeys(left.values()):
            segment.free(block)


@cache
def may_resize(func: Any) -> bool:
    """Whether an operator may change the size of a storage that it is given."""
    return func in _RESIZES or schema_of(func).overload_name.endswith("out")


def _was_before(key: int, func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a storage is an argument's, and so was there before its operator; unless that gave it its first size."""
    tensors = (leaf for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return func not in _RESIZES and any(storage_key(tensor) == key for tensor in tensors)


_RESIZES = frozenset(
    {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default, torch.ops.aten.set_.default}  # to nothing
)


_LAST_FIRST = frozenset({torch.ops.aten.native_dropout.default})
"""Operators whose kernels allocate their last output first: the mask (``cuda/Dropout.cu``, ``dropout_cuda``)."""
FIRST_GUESS = {
    StepPhase.LOAD: MemoryCategory.WEIGHTS,
    StepPhase.FORWARD: MemoryCategory.ACTIVATIONS,
    StepPhase.EVALUATE: MemoryCategory.ACTIVATIONS,
}


class SegmentRecord:
    """A segment once its block has ended."""

    result: Segment


class OpenSegment:
    """The events of a segment so far."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.deltas: list[int] = []
        self.labels: list[int] = []
        self.gemm_at: dict[StepPhase, int] = {}
        self.bias_at: int | None = None
        self.label_table: list[Label] = []
        self._numbers: dict[Label, int] = {}
        self._sizes: dict[int, int] = {}
        self._last_label = 0

    def has(self, block: int) -> bool:
        """Whether the block was allocated in this segment."""
        return block in self._sizes

    def label(self, label: Label) -> int:
        """Return the number of a label; a free that follows bears it too."""
        number = self._last_label = self._numbers.setdefault(label, len(self._numbers))
        if number == len(self.label_table):
            self.label_table.append(label)
        return number

    def add(self, block: int, delta: int, label: int | None) -> None:
        """Add an event: ``delta`` bytes above 0 are allocated, below 0 freed."""
        self.blocks.append(block)
        self.deltas.append(delta)
        self.labels.append(self._last_label if label is None else label)
        if delta > 0:
            self._sizes[block] = delta

    def free(self, block: int) -> None:
        """Add the end of a block."""
        self.add(block, -self._sizes[block], None)

    def multiplies(self, phase: StepPhase, *, with_bias: bool = False) -> None:
        """Note that a matrix product begins."""
        self.gemm_at.setdefault(phase, len(self.blocks))
        if with_bias and self.bias_at is None:
            self.bias_at = len(self.blocks)

    def sealed(self, names: dict[int, str], categories: dict[int, MemoryCategory]) -> Segment:
        """Return the finished segment: blocks renumbered, categories as they turned out."""
        numbers: dict[int, int] = {}
        for block in self.blocks:
            numbers.setdefault(block, len(numbers))
        old = self.label_table or [Label(StepPhase.LOAD, MemoryCategory.WEIGHTS, "", "")]
        table: dict[Label, int] = {}
        freed_in = {b: old[n].phase for b, d, n in zip(self.blocks, self.deltas, self.labels, strict=True) if d < 0}
        labels: list[int] = []
        for block, delta, number in zip(self.blocks, self.deltas, self.labels, strict=True):
            label = old[number]
            if delta > 0:
                category = categories.get(block, label.category)
                if category is MemoryCategory.ACTIVATIONS and freed_in.get(block) is label.phase:
                    category = MemoryCategory.TEMPORARIES
                label = replace(label, category=category)
            labels.append(table.setdefault(label, len(table)))
        return Segment(
            blocks=tuple(numbers[block] for block in self.blocks),
            deltas=tuple(self.deltas),
            labels=tuple(labels),
            label_table=tuple(table),
            names={number: names[block] for block, number in numbers.items() if block in names},
            gemm_at=dict(self.gemm_at),
            bias_at=self.bias_at,
        )
