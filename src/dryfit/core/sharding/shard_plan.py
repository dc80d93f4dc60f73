"""Tensor-parallel sharding plan of a model: tables by name, in JSON, without torch.

A plan has for each parameter the slices that a rank holds, and for each module what happens to its input and output
activations. Ranks are numbered from 0 to ``degree - 1``; all have the same rows of a batch.
"""

from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field, model_validator

from dryfit.core.settings.tables import Settings


class Boundary(StrEnum):
    """Communication of an activation where a sharded region begins or ends.

    Source: M. Shoeybi et al., "Megatron-LM", 2019, section 3 (its f and g are COPY and REDUCE).
    """

    COPY = "copy"
    """Into a region: unchanged; gradients are summed over the ranks."""
    REDUCE = "reduce"
    """Out of a region: summed over the ranks; gradients are unchanged."""
    GATHER = "gather"
    """Out of a region: the ranks' slices of the last dimension are concatenated; gradients are sliced."""


class ParameterShard(Settings):
    """How one parameter is divided over the ranks.

    Attributes:
        shape: Shape of the whole parameter.
        dim: The sharded dimension; None: each rank holds the whole parameter.
        blocks: Sizes along ``dim`` of the fused parts, each of which is sharded by itself: (q, k, v), (gate, up); one
            block if nothing is fused.
        unit: Slices of each block are multiples of it (a head's features).
        tied_to: The parameter that this one is tied to.
        sum_gradient: The parameter is whole on each rank but meets sharded activations: its gradients are summed.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    unit: int = Field(default=1, ge=1)
    tied_to: str | None = None
    sum_gradient: bool = False

    @model_validator(mode="after")
    def _blocks_fill_the_dimension(self) -> "ParameterShard":
        if self.dim is None:
            if self.blocks:
                raise ValueError("a parameter that is not sharded has no blocks")
        elif not 0 <= self.dim < len(self.shape):
            raise ValueError(f"dimension {self.dim} of a parameter of {len(self.shape)}")
        elif sum(self.blocks) != self.shape[self.dim]:
            raise ValueError(f"blocks {self.blocks} do not make {self.shape[self.dim]}")
        return self

    def slices(self, rank: int, degree: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end along ``dim`` of a rank's slice of each block, in order."""
        begin = 0
        for block in self.blocks:
            share = block // degree
            yield begin + rank * share, begin + (rank + 1) * share
            begin += block

    def local_shape(self, degree: int) -> tuple[int, ...]:
        """Return the shape that a rank holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // degree, *self.shape[self.dim + 1 :])


class ModuleShard(Settings):
    """How a module of a plan differs from its class.

    Attributes:
        inputs: Boundaries of its floating-point inputs. An input has its name in the signature of ``forward``, however
            it is passed ("hidden_states", "input"); one that goes into ``*args`` has its position ("0").
        outputs: Boundaries of its outputs, by position; a single tensor is "0".
        attributes: Numbers that its code reads, as they are on a rank (``num_heads``).
        vocabulary: Its table is sharded by rows: ids of other ranks' rows give zeros.
        bias_after: Its bias is added once, after its outputs are summed, not on each rank.
    """

    inputs: dict[str, Boundary] = Field(default_factory=dict)
    outputs: dict[str, Boundary] = Field(default_factory=dict)
    attributes: dict[str, int] = Field(default_factory=dict)
    vocabulary: bool = False
    bias_after: bool = False


class ShardPlan(Settings):
    """How one model is sharded over ``degree`` ranks.

    Attributes:
        parameters: All parameters of the model, by name.
        modules: Modules that differ from their class, by path.
        whole: Parameters and modules that could have been sharded and are not, with the reason.
        scores: The module whose outputs, the model's scores, stay sharded if the loss is computed over the ranks, and
            are gathered otherwise. None: they are always gathered, or not sharded.
    """

    degree: int = Field(ge=2)
    parameters: dict[str, ParameterShard]
    modules: dict[str, ModuleShard]
    whole: dict[str, str] = Field(default_factory=dict)
    scores: str | None = None

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary of scores that stay sharded; 0: none do."""
        row = self.parameters.get(f"{self.scores}.weight") if self.scores is not None else None
        return row.shape[row.dim] if row is not None and row.dim is not None else 0
