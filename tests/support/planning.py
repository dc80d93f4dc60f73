"""A made-up model whose memory is known by hand, as a tracer."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dryfit.gpu.events import Label, Segment, SegmentKind, Shape
from dryfit.plans.tracer import Variant
from dryfit.settings.errors import TraceError
from dryfit.settings.memory_terms import MemoryCategory, OptimizerImpl, StepPhase

MIB = 2**20


@dataclass
class Recording:
    """Writes a segment event by event."""

    blocks: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    table: dict[Label, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    gemm_at: dict[StepPhase, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    phase: StepPhase = StepPhase.LOAD

    def take(self, size_bytes: int, category: MemoryCategory, module: str = "", name: str | None = None) -> int:
        block = len(self.sizes)
        self.sizes[block] = size_bytes
        if name:
            self.names[block] = name
        self._event(block, size_bytes, Label(self.phase, category, module, "aten.empty.default"))
        return block

    def free(self, block: int, module: str = "") -> None:
        label = Label(self.phase, MemoryCategory.TEMPORARIES, module, "free")
        self._event(block, -self.sizes[block], label)

    def free_named(self, name: str, size_bytes: int) -> None:
        block = len(self.sizes)
        self.sizes[block] = size_bytes
        self.names[block] = name
        self.free(block)

    def gemm(self) -> None:
        self.gemm_at.setdefault(self.phase, len(self.deltas))

    def _event(self, block: int, delta: int, label: Label) -> None:
        self.blocks.append(block)
        self.deltas.append(delta)
        self.labels.append(self.table.setdefault(label, len(self.table)))

    def segment(self) -> Segment:
        return Segment(self.blocks, self.deltas, self.labels, tuple(self.table), self.names, self.gemm_at)


@dataclass
class ToyTracer:
    """``layers`` layers of ``weight`` bytes. A layer keeps ``activation * B * L`` bytes for its backward pass, or with
    checkpointing a quarter of them, and needs ``scores * B * L * L`` bytes meanwhile, in both passes.

    Attributes:
        states: Optimizer state, in weights: 2 for Adam.
        answered: Bytes that a generated answer takes.
        scored: ``scored * B * L`` bytes that a validation takes at its end.
        extra_rows: From so many rows on a layer makes one tensor more.
        bump: Bytes more in each activation, of a shape: a law that no polynomial fits.
        untraceable: Raises for these.
    """

    layers: int = 2
    weight: int = 4 * MIB
    activation: int = 1024
    scores: int = 4
    states: int = 2
    answered: int = MIB
    scored: int = 0
    key: str = "toy"
    extra_rows: int | None = None
    bump: Callable[[Shape], int] = lambda shape: 0
    untraceable: Callable[[SegmentKind, Variant], bool] = lambda kind, variant: False
    traced: list[tuple[SegmentKind, Variant, Shape | None]] = field(default_factory=list)

    def trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        if self.untraceable(kind, variant):
            raise TraceError("tracing toy", f"{kind.value} has an operator without a size, toy.py:7")
        assert kind.has_shape == (shape is not None)
        self.traced.append((kind, variant, shape))
        made = Recording()
        match kind:
            case SegmentKind.LOAD:
                for layer in range(self.layers):
                    made.take(self.weight, MemoryCategory.WEIGHTS, f"layer.{layer}.linear", f"weight:layer.{layer}")
            case SegmentKind.BATCH:
                made.phase = StepPhase.FORWARD
                made.take(8 * shape.rows * shape.length, MemoryCategory.INPUTS, "", "input:ids")
            case SegmentKind.MICRO_FIRST | SegmentKind.MICRO_NEXT:
                self._micro(made, variant, shape, first=kind is SegmentKind.MICRO_FIRST)
            case SegmentKind.MICRO_HOST:
                whole = self.activation * shape.rows * shape.length
                inputs = [made.take(whole // 4, MemoryCategory.ACTIVATIONS) for _ in range(self.layers)]
                for block in inputs:
                    made.free(block)
            case SegmentKind.UPDATE_HOST:
                made.free(made.take(77, MemoryCategory.TEMPORARIES))
                for layer in range(self.layers):
                    made.take(2 * self.weight, MemoryCategory.OPTIMIZER, "", f"optimizer:layer.{layer}")
            case SegmentKind.UPDATE_FIRST | SegmentKind.UPDATE:
                self._update(made, variant, first=kind is SegmentKind.UPDATE_FIRST)
            case SegmentKind.EVALUATE:
                made.phase = StepPhase.EVALUATE
                made.take(8 * shape.rows * shape.length, MemoryCategory.INPUTS, "", "input:ids")
                made.gemm()
                for layer in range(self.layers):
                    made.free(self._scores(made, shape, layer))
                if self.scored:
                    size_bytes = self.scored * shape.rows * shape.length
                    made.free(made.take(size_bytes, MemoryCategory.TEMPORARIES, "head"))
            case SegmentKind.MEASURE:
                made.phase = StepPhase.EVALUATE
                made.free(made.take(self.answered * shape.rows, MemoryCategory.TEMPORARIES, "cache"))
            case SegmentKind.SAVE:
                made.phase = StepPhase.SAVE
                made.free(made.take(512, MemoryCategory.TEMPORARIES))
        return made.segment()

    def _scores(self, made: Recording, shape: Shape, layer: int) -> int:
        size_bytes = self.scores * shape.rows * shape.length**2
        return made.take(size_bytes, MemoryCategory.TEMPORARIES, f"layer.{layer}.attention.self")

    def _micro(self, made: Recording, variant: Variant, shape: Shape, *, first: bool) -> None:
        made.phase = StepPhase.FORWARD
        made.gemm()
        whole = self.activation * shape.rows * shape.length + self.bump(shape)
        kept = []
        for layer in range(self.layers):
            size_bytes = whole // 4 if variant.checkpointing else whole
            inputs = made.take(size_bytes, MemoryCategory.ACTIVATIONS, f"layer.{layer}.linear")
            kept.append(inputs)
            if self.extra_rows and shape.rows >= self.extra_rows:
                made.free(made.take(512, MemoryCategory.TEMPORARIES))
            made.free(self._scores(made, shape, layer))
            if variant.offload_activations:
                made.free(inputs)
        made.phase = StepPhase.BACKWARD
        made.gemm()
        for layer in reversed(range(self.layers)):
            if variant.offload_activations:
                kept[layer] = made.take(whole // 4, MemoryCategory.ACTIVATIONS, f"layer.{layer}.linear")
            again = [whole] * variant.checkpointing
            again = [made.take(size, MemoryCategory.ACTIVATIONS, f"layer.{layer}.linear") for size in again]
            scores = self._scores(made, shape, layer)
            name = f"gradient:layer.{layer}"
            gradient = made.take(
                self.weight, MemoryCategory.GRADIENTS, f"layer.{layer}.linear", name if first else None
            )
            for block in (scores, *again, kept[layer], *([] if first else [gradient])):
                made.free(block)

    def _update(self, made: Recording, variant: Variant, *, first: bool) -> None:
        made.phase = StepPhase.OPTIMIZER
        for layer in range(self.layers):
            if first and not variant.offload_optimizer:
                for state in range(self.states):
                    made.take(self.weight, MemoryCategory.OPTIMIZER, "", f"optimizer:layer.{layer}:{state}")
        if variant.optimizer_impl is OptimizerImpl.FOREACH:
            made.free(made.take(self.weight * self.layers, MemoryCategory.TEMPORARIES))
        for layer in range(self.layers):
            made.free_named(f"gradient:layer.{layer}", self.weight)
