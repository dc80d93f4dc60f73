"""How a model is cut over several processes: tables keyed by names, in JSON, that need neither torch nor a device.

A plan says of each parameter which slices of it a rank holds, and of each module what happens to the activations that
go in and come out. Ranks are numbered from 0 to ``degree - 1``; each has the same rows of a batch.
"""

import math
from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field, model_validator

from dryfit.core.settings.tables import Settings


class Boundary(StrEnum):
    """What happens to an activation where a sharded region begins or ends.

    Source: M. Shoeybi et al., "Megatron-LM", 2019, section 3 (its f and g are COPY and REDUCE).
    """

    COPY = "copy"
    """Into a region: as it is; gradients are summed over the ranks."""
    REDUCE = "reduce"
    """Out of a region: summed over the ranks; gradients as they are."""
    GATHER = "gather"
    """Out of a region: the ranks' slices put together; each rank keeps its slice of the gradient."""
    SPLIT = "split"
    """Into a region: each rank takes its slice; the slices of the gradient are put together."""


class ParameterShard(Settings):
    """One parameter on the ranks of a plan.

    Attributes:
        shape: The whole parameter's.
        dim: The dimension that is cut; None: each rank holds all of it.
        blocks: Sizes along ``dim`` of what lies side by side in it, each cut by itself: (q, k, v) of a fused
            projection, (gate, up); one block where nothing is fused.
        unit: What may not be cut: slices of each block are multiples of it (a head's features).
        source: The checkpoint's key, where that is not the parameter's name.
        tied_to: The parameter whose memory this is.
        sum_gradient: It is whole on each rank but meets activations that are not: its gradients are summed.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    unit: int = Field(default=1, ge=1)
    source: str | None = None
    tied_to: str | None = None
    sum_gradient: bool = False

    @model_validator(mode="after")
    def _blocks_fill_the_dimension(self) -> "ParameterShard":
        if self.dim is None:
            if self.blocks:
                raise ValueError("a parameter that is not cut has no blocks")
        elif not 0 <= self.dim < len(self.shape):
            raise ValueError(f"dimension {self.dim} of a parameter of {len(self.shape)}")
        elif sum(self.blocks) != self.shape[self.dim]:
            raise ValueError(f"blocks {self.blocks} do not make {self.shape[self.dim]}")
        return self

    def slices(self, rank: int, degree: int) -> Iterator[tuple[int, int]]:
        """Begin and end along ``dim`` of what a rank holds, a pair for each block, in order."""
        begin = 0
        for block in self.blocks:
            share = block // degree
            yield begin + rank * share, begin + (rank + 1) * share
            begin += block

    def local_shape(self, degree: int) -> tuple[int, ...]:
        """What a rank holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // degree, *self.shape[self.dim + 1 :])


class ModuleShard(Settings):
    """What a module of a plan does otherwise than its class says.

    Attributes:
        inputs: What happens to which of its floating-point inputs. An input has the name that the signature of its
            ``forward`` gives it, however it is passed ("hidden_states", "input"); what goes into ``*args`` has its
            position ("0").
        outputs: The same for its outputs, by position: "0" is also the one of a module that returns a tensor.
        dim: The dimension of the activation that is cut, counted from its end (-1: features).
        attributes: Numbers that its code reads, as they are on a rank (``num_heads``).
        vocabulary: Its table is cut by rows: ids of other ranks' rows give zeros.
        bias_after: Its bias is added after its output was summed, not on each rank.
    """

    inputs: dict[str, Boundary] = Field(default_factory=dict)
    outputs: dict[str, Boundary] = Field(default_factory=dict)
    dim: int = Field(default=-1, lt=0)
    attributes: dict[str, int] = Field(default_factory=dict)
    vocabulary: bool = False
    bias_after: bool = False


class Traffic(Settings):
    """What a rank sends at one place in one step.

    In rings: a sum over n ranks sends 2 (n - 1) / n of what is summed, putting together (n - 1) / n of the whole.
    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Attributes:
        module: Where; of a parameter's gradient, its name.
        bytes_per_token: Of one token, in the dtype of the activations.
        bytes_per_step: Of a step, whatever its size: gradients of whole parameters.
        in_backward: Whether it is gradients.
    """

    module: str
    boundary: Boundary
    bytes_per_token: int = Field(default=0, ge=0)
    bytes_per_step: int = Field(default=0, ge=0)
    in_backward: bool = False


class ShardPlan(Settings):
    """How one model is cut over ``degree`` ranks.

    Attributes:
        parameters: By name; each parameter of the model has one.
        modules: By path; only those that do something else than alone.
        traffic: What is sent.
        whole: What could have been cut and is not, by parameter or module: the reason.
        scores: The module whose scores, the model's output, stay cut where the loss is computed over the ranks, and are
            put together elsewhere, as its row says. None: they always are, or are not cut.
    """

    degree: int = Field(ge=2)
    parameters: dict[str, ParameterShard]
    modules: dict[str, ModuleShard]
    traffic: tuple[Traffic, ...] = ()
    whole: dict[str, str] = Field(default_factory=dict)
    scores: str | None = None

    @property
    def vocabulary(self) -> int:
        """How many words the scores that stay cut are of; 0 where none do."""
        row = self.parameters.get(f"{self.scores}.weight") if self.scores is not None else None
        return row.shape[row.dim] if row is not None and row.dim is not None else 0

    def held_bytes(self, item_bytes: int) -> int:
        """Bytes of parameters that a rank holds, each of whose numbers takes so many; tied ones are one."""
        own = (shard for shard in self.parameters.values() if shard.tied_to is None)
        return item_bytes * sum(math.prod(shard.local_shape(self.degree)) for shard in own)

    @model_validator(mode="after")
    def _blocks_can_be_cut(self) -> "ShardPlan":
        for name, shard in self.parameters.items():
            if any(block % (self.degree * shard.unit) for block in shard.blocks):
                raise ValueError(f"{name}: {shard.blocks} in units of {shard.unit} cannot be cut by {self.degree}")
        return self
