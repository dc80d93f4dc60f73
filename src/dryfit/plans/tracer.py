"""The interface of a tracer, and the choices of an execution plan that change a trace."""

from dataclasses import dataclass
from typing import Protocol

from dryfit.gpu.events import Segment, SegmentKind, Shape
from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import OptimizerImpl


@dataclass(frozen=True, slots=True)
class Variant:
    """The choices of an execution plan that change which operators run."""

    checkpointing: bool = False
    optimizer_impl: OptimizerImpl = OptimizerImpl.AUTO
    offload_optimizer: bool = False
    chunked_loss: bool = False
    offload_activations: bool = False

    @staticmethod
    def of(choice: ExecutionChoice) -> "Variant":
        """Return the part of a choice that changes which operators run."""
        return Variant(
            checkpointing=choice.checkpointing,
            optimizer_impl=choice.optimizer_impl,
            offload_optimizer=choice.offload_optimizer,
            chunked_loss=bool(choice.chunked_loss),
            offload_activations=choice.offload_activations,
        )


class Tracer(Protocol):
    """Traces one subject on one kind of device."""

    @property
    def key(self) -> str:
        """Identify all that a segment depends on besides its arguments: model, task, settings, versions."""
        ...

    def trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        """Trace one segment.

        Args:
            kind: Which part of training.
            variant: How it is run.
            shape: Rows and length where ``kind.has_shape``, else None. Those of ``batch`` are of the effective batch.

        Raises:
            TraceError: The model's code cannot be traced; the message names the operator and the line.
        """
        ...
