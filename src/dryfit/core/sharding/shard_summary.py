"""Summary of a sharding plan in numbers, for the planner's answer."""

from pydantic import Field

from dryfit.core.settings.tables import Settings


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
        output_error: Largest output error of the proof; see :class:`dryfit.core.sharding.shard_proof.ShardProof`.
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
