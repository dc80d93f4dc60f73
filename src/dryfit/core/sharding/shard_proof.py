"""What a proof of a :class:`dryfit.core.sharding.shard_plan.ShardPlan` found, for the plan's record."""

from pydantic import Field

from dryfit.core.settings.tables import Settings


class ShardProof(Settings):
    """A cut model computed what the whole one does, in double precision on simulated ranks.

    Attributes:
        degree: How many ranks.
        output_error: Largest difference of an output, relative to the largest output where that is over 1.
        gradient_error: Largest difference of a gradient, relative to the largest of all gradients.
        loss_error: Largest difference of a loss that was computed over the ranks, where scores stay cut, relative to it
            where it is over 1; its gradients were compared too. None: no scores stay cut.
        parameter_error: Largest difference of a parameter after ``steps`` optimizer steps.
        parameters: How many parameters were compared.
        steps: How many optimizer steps were made.
        left_out: Layers that were left out, because two others of the same kind were proved.
        narrowed: Of a model that is too wide to be proved itself, what was made smaller in the model of the same class
            that was proved in its place: (wide, narrow) by the key of the config. Empty: it was proved at full width.
        seconds: Time it took.
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
