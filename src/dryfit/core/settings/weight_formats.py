"""Formats of frozen weights, a row each: bits, compute format, requirements."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import BaseFormat, Precision
from dryfit.core.settings.tables import LoraSettings, TrainSettings


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of the weights that stay frozen under adapters.

    Attributes:
        name: As ``lora.base`` names it.
        bits: Of one weight of a linear layer, without the scales beside it.
        compute: Number format that layers compute in. All that is not quantised is stored in it, and so are all weights
            of a merged model.
        quantised: Whether linear layers hold integers and scales. Norms, embeddings and the output layer never do.
        double_quant: Whether the scales are quantised too.
    """

    name: BaseFormat
    bits: int
    compute: Precision
    quantised: bool = False
    double_quant: bool = False

    def problem(self, precision: Precision) -> str:
        """Return why it cannot be trained with a precision; empty where it can."""
        if self.name is BaseFormat.INT8 and self.compute is Precision.FP32:
            return "its layers would compute in fp32, and LLM.int8() computes in 16 bits"
        # Half-precision layers outside autocast: their gradients have no scale, whatever the others compute in.
        unscaled = (Precision.FP32, Precision.BF16) if self.quantised else (Precision.FP32,)
        if self.compute is Precision.FP16 and precision.stored in unscaled:
            return f"train.precision is {precision}: gradients would pass through fp16 without a scale, and vanish"
        return ""


WEIGHT_FORMATS: Final = MappingProxyType(
    {
        row.name: row
        for row in (
            WeightFormat(BaseFormat.FP32, 32, Precision.FP32),
            WeightFormat(BaseFormat.FP16, 16, Precision.FP16),
            WeightFormat(BaseFormat.BF16, 16, Precision.BF16),
            WeightFormat(BaseFormat.INT8, 8, Precision.FP16, quantised=True),
            WeightFormat(BaseFormat.NF4, 4, Precision.BF16, quantised=True),
        )
    }
)
"""Every format by its name; a quantised one computes in what :func:`base_format` says."""

PRECISIONS_WITH: Final = MappingProxyType(
    {
        BaseFormat.FP16: 'train.precision = "fp16" or "bf16" with it',
        BaseFormat.INT8: 'train.precision and lora.compute "bf16", or both "fp16"',
        BaseFormat.NF4: 'lora.compute = "bf16" or "fp32", or "fp16" with train.precision = "fp16"',
    }
)
"""What is allowed beside the formats that do not go with every precision."""


def base_format(lora: LoraSettings, train: TrainSettings) -> WeightFormat:
    """Return the format of the weights under adapters; unset, it and the compute format follow the training's."""
    row = WEIGHT_FORMATS[lora.base or BaseFormat(train.precision.stored)]
    if not row.quantised:
        return row
    return replace(row, compute=lora.compute or train.precision.stored, double_quant=lora.double_quant)


def check_precision(base: WeightFormat, precision: Precision) -> None:
    """Refuse frozen weights that cannot be trained with a precision.

    Raises:
        ConfigError: The combination is refused.
    """
    if problem := base.problem(precision):
        raise ConfigError(
            f'checking lora.base = "{base.name}"',
            problem,
            allowed=PRECISIONS_WITH[base.name],
            hint="or leave lora.base out: the base then has the format of train.precision",
        )


def check_sharded(base: WeightFormat) -> None:
    """Refuse a format of which a process cannot read its slice.

    Raises:
        ConfigError: It is one.
    """
    if base.quantised:
        names = [row.name for row in WEIGHT_FORMATS.values() if not row.quantised]
        raise ConfigError(
            "sharding a trial's model over processes",
            f'lora.base is "{base.name}"',
            allowed=f"{', '.join(names[:-1])} or {names[-1]}",
            hint="leave execution.tp and execution.dp out",
        )
