"""Events of a memory trace, and the interface of a tracer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.older_python import StrEnum

# Events of a memory trace: blocks allocated and freed, in order.
#
# A training run is put together from *segments* that are traced once each and may be repeated::
#
#     load  batch  micro_first  micro_next ...  update_first     the first optimizer step
#           batch  micro_first  micro_next ...  update           every later one
#           evaluate                                             a validation batch
#           measure                                              answers that a validation generates
#           save                                                 a checkpoint
#
# Beside them, ``micro_host`` is what a micro-batch keeps in host memory where its activations are offloaded.
#
# A storage that lives beyond its segment has a name, the same in every segment: ``weight:encoder.x``,
# ``gradient:encoder.x``, ``optimizer:encoder.x:exp_avg``, ``input:input_ids``.


class SegmentKind(StrEnum):
    """A part of training that is traced as one."""

    LOAD = "load"
    """Weights and buffers come to the device."""
    BATCH = "batch"
    """An effective batch comes to the device."""
    MICRO_FIRST = "micro_first"
    """Forward and backward of a micro-batch where no gradient exists yet."""
    MICRO_NEXT = "micro_next"
    """The same where gradients are added to those of an earlier micro-batch."""
    MICRO_HOST = "micro_host"
    """Host memory of a micro-batch with offloaded activations; no part of a run on the device."""
    UPDATE_FIRST = "update_first"
    """Clipping, the optimizer's first step, which makes its state, and the end of all gradients."""
    UPDATE = "update"
    """Every later one."""
    UPDATE_HOST = "update_host"
    """Host memory of a paged optimizer's state; no part of a run on the device."""
    EVALUATE = "evaluate"
    """A validation batch."""
    MEASURE = "measure"
    """What a validation asks of the model beyond passes over the rows: generated answers."""
    SAVE = "save"
    """A checkpoint is written."""

    @property
    def has_shape(self) -> bool:
        """Whether it depends on the rows and lengths of a batch."""
        updates = (SegmentKind.UPDATE_FIRST, SegmentKind.UPDATE, SegmentKind.UPDATE_HOST)
        return self not in (SegmentKind.LOAD, *updates, SegmentKind.SAVE)


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows and padded length of a batch."""

    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Label:
    """The purpose of an allocation, and where in the model it was made.

    Attributes:
        module: Dotted name in the model, empty outside of it.
        op: The operator, ``aten.mm.default``.
        line: Line of a user's script, ``path:number``; empty in the trace of a plan.
        source: Deepest line outside of torch, likewise.
    """

    phase: StepPhase
    category: MemoryCategory
    module: str
    op: str
    line: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Events in order, as columns: event ``i`` is about block ``blocks[i]``.

    Attributes:
        blocks: Numbers of the blocks, from 0, in the order of their first event.
        deltas: Bytes asked for, unrounded, above 0; minus as much where the block is freed.
        labels: Index into ``label_table`` of each event; for a free, of the operator that freed.
        label_table: Every label that occurs.
        names: Names of the blocks that live on across segments.
        gemm_at: Indices of the events before which the first matrix product of a phase was called: there the
            library takes its workspace once in a process, for each thread that calls it.
        bias_at: The same of the first product with a bias, for which another library takes a workspace once.
    """

    blocks: Sequence[int]
    deltas: Sequence[int]
    labels: Sequence[int]
    label_table: tuple[Label, ...]
    names: Mapping[int, str]
    gemm_at: Mapping[StepPhase, int]
    bias_at: int | None = None


# Sizes of the caching allocator, and of what libraries take through it.


BLOCK_BYTES = 512
"""The CUDA caching allocator rounds every request up to a multiple of this (kMinBlockSize)."""
WORKSPACE_OP = "cublas workspace"
LT_WORKSPACE_OP = "cublasLt workspace"
LT_WORKSPACE_BYTES = 1 << 20
"""What cuBLASLt keeps from its first product with a bias on (``cuda/CUDABlas.cpp``, 1 024 KiB by default)."""
