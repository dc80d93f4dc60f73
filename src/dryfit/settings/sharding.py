"""Tensor-parallel sharding plans as data: tables by name, their proof, summary and number of ranks."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from pydantic import Field, model_validator

from dryfit.settings.tables import Settings

# Tensor-parallel sharding plan of a model: tables by name, in JSON, without torch.
#
# A plan has for each parameter the slices that a rank holds, and for each module what happens to its input and output
# activations. Ranks are numbered from 0 to ``degree - 1``; all have the same rows of a batch.


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


# Result of the proof that a sharded model computes what the whole model does.


class ShardProof(Settings):
    """Proof that a sharded model computes the same as the whole one, in double precision on simulated ranks.

    Attributes:
        degree: Number of ranks.
        output_error: Largest difference of an output, relative to the largest output if that is over 1.
        gradient_error: Largest difference of a gradient, relative to the largest of all gradients.
        loss_error: Largest difference of a loss computed over the ranks from sharded scores, relative to the loss if
            that is over 1; its gradients were compared too. None: no scores stay sharded.
        parameter_error: Largest difference of a parameter after ``steps`` optimizer steps.
        parameters: Number of parameters compared.
        steps: Number of optimizer steps.
        left_out: Layers left out, because two others of the same kind were proved.
        narrowed: For a model too wide to be proved itself: what is smaller in the model of the same class that was
            proved instead, (wide, narrow) by the config's key. Empty: it was proved at full width.
        seconds: Duration.
    """

    degree: int = Field(ge=2)
    output_error: float = Field(ge=0)
    gradient_error: float = Field(ge=0)
    loss_error: float | None = Field(default=None, ge=0)
    parameter_error: float = Field(ge=0)
    parameters: int = Field(ge=1)
    steps: int = Field(ge=0)
    left_out: tuple[str, ...] = ()
    narrowed: dict[str, tuple[int, int]] = Field(default_factory=dict)
    seconds: float = Field(ge=0)


# Summary of a sharding plan in numbers, for the planner's answer.


class Sent(Settings):
    """Bytes that one rank sends.

    Attributes:
        forward_bytes: In forward passes.
        backward_bytes: In backward passes, with recomputation by checkpointing.
    """

    forward_bytes: int = Field(default=0, ge=0)
    backward_bytes: int = Field(default=0, ge=0)

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
        )


class ShardRow(Settings):
    """Parameters of one kind in all layers.

    Attributes:
        name: ``encoder.layer.*.attention.self.query.weight``, or the name of a single parameter.
        count: Their number.
        shape: Shape of each whole parameter.
        local_shape: Shape that a rank holds.
        how: ``column``, ``row``, ``vocabulary``, ``dimension N`` or ``whole``, with remarks.
    """

    name: str
    count: int = Field(ge=1)
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    how: str


class KeptWhole(Settings):
    """Why some parameters that could be sharded are not."""

    reason: str
    names: tuple[str, ...]


class ShardSummary(Settings):
    """A sharded model in numbers.

    Attributes:
        degree: Number of ranks; each has its own device.
        weight_bytes: Weights of one rank.
        whole_weight_bytes: Weights of the whole model.
        cut: Number of sharded parameters.
        whole: Number of parameters that each rank holds completely.
        sent: Bytes that a rank sends in one optimizer step of the batch that needs the most memory, without the single
            number of the gradients' norm; None if it cannot be traced.
        output_error: Largest output error of the proof; see :class:`dryfit.settings.sharding.ShardProof`.
        gradient_error: Its largest gradient error.
        rows: All parameters, by kind.
        kept_whole: Why some are not sharded.
    """

    degree: int = Field(ge=2)
    weight_bytes: int
    whole_weight_bytes: int
    cut: int
    whole: int
    sent: Sent | None = None
    output_error: float
    gradient_error: float
    rows: tuple[ShardRow, ...]
    kept_whole: tuple[KeptWhole, ...] = ()


# Choice of the number of tensor-parallel ranks where ``execution.tp`` is "auto".


AUTO: Final = "auto"
DEGREES: Final = (2, 4, 8)
"""Numbers of ranks that are tried, the fewest first."""


def degrees_within(most: int) -> tuple[int, ...]:
    """Return the degrees possible with ``most`` devices, or with cores for so many processes."""
    return tuple(degree for degree in DEGREES if degree <= most)
