"""What a planner's answer says of a cut model; :class:`dryfit.core.sharding.shard_plan.ShardPlan` has it all."""

from pydantic import Field

from dryfit.core.settings.tables import Settings


class Sent(Settings):
    """What one rank sends, in rings: see :class:`dryfit.core.sharding.shard_plan.Traffic`.

    Attributes:
        forward_bytes: In forward passes.
        backward_bytes: In backward passes, what checkpointing computes again there included.
    """

    forward_bytes: int = Field(default=0, ge=0)
    backward_bytes: int = Field(default=0, ge=0)

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
        )


class ShardRow(Settings):
    """Parameters of one kind, those of all layers together.

    Attributes:
        name: ``encoder.layer.*.attention.self.query.weight``; of a single one its own name.
        count: How many there are.
        shape: The whole of each.
        local_shape: What a rank holds of it.
        how: ``column``, ``row``, ``vocabulary``, ``dimension N``, or ``whole``; with what else is to be said of it.
    """

    name: str
    count: int = Field(ge=1)
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    how: str


class KeptWhole(Settings):
    """Why some parameters that could have been cut are not."""

    reason: str
    names: tuple[str, ...]


class ShardSummary(Settings):
    """A cut model in numbers.

    Attributes:
        degree: Ranks; each has a device of its own.
        weight_bytes: Weights of one rank.
        whole_weight_bytes: Weights of the whole model.
        cut: Parameters of which a rank holds a part.
        whole: Parameters that each rank holds all of.
        sent: By a rank in one optimizer step of the batch that needs most memory; None where it cannot be traced. What
            the gradients' norm takes, a number, is not counted.
        output_error: Largest difference of an output that the proof found; see
            :class:`dryfit.core.sharding.shard_proof.ShardProof`.
        gradient_error: The same of a gradient.
        rows: Every parameter, by kind.
        kept_whole: Why some are not cut.
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
