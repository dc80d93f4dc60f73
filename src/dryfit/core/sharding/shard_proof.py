"""Result of the proof that a sharded model computes what the whole model does."""

from pydantic import Field

from dryfit.core.settings.tables import Settings


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
