"""Formats of frozen weights, a row each: how many bits, what layers compute in, what each needs and allows."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dryfit.core.errors import ConfigError, TraceError
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
        cuda_only: Whether it needs a CUDA device.
        planned: Whether memory can be planned with it.
        sharded: Whether a process can read its slice of such weights.
    """

    name: BaseFormat
    bits: int
    compute: Precision
    quantised: bool = False
    cuda_only: bool = False
    planned: bool = True
    sharded: bool = True

    def loses_gradients(self, precision: Precision) -> bool:
        """Whether gradients would pass through fp16 without a loss scale, and vanish."""
        return self.compute is Precision.FP16 and precision is Precision.FP32


WEIGHT_FORMATS: Final = MappingProxyType(
    {
        row.name: row
        for row in (
            WeightFormat(BaseFormat.FP32, 32, Precision.FP32),
            WeightFormat(BaseFormat.FP16, 16, Precision.FP16),
            WeightFormat(BaseFormat.BF16, 16, Precision.BF16),
            WeightFormat(
                BaseFormat.INT8, 8, Precision.FP16, quantised=True, cuda_only=True, planned=False, sharded=False
            ),
        )
    }
)
"""Every format by its name."""


def base_format(lora: LoraSettings, train: TrainSettings) -> WeightFormat:
    """Return the format of the weights under adapters: unset, that of ``train.precision``."""
    return WEIGHT_FORMATS[lora.base or BaseFormat(train.precision)]


def check_precision(base: WeightFormat, precision: Precision) -> None:
    """Refuse frozen weights that compute in fp16 without mixed precision.

    Raises:
        ConfigError: The combination is refused.
    """
    if base.loses_gradients(precision):
        raise ConfigError(
            f'checking lora.base = "{base.name}"',
            f"train.precision is {precision}: gradients would pass through fp16 without a scale, and vanish",
            allowed='train.precision = "fp16" or "bf16" with it',
            hint="or leave lora.base out: the base then has the format of train.precision",
        )


def check_planned(base: WeightFormat) -> None:
    """Refuse a format with which memory cannot be planned.

    Raises:
        TraceError: It is one.
    """
    if not base.planned:
        allowed = _listed([row.name for row in WEIGHT_FORMATS.values() if row.planned])
        raise TraceError("planning frozen weights", f'lora.base is "{base.name}"', allowed)


def check_sharded(base: WeightFormat) -> None:
    """Refuse a format of which a process cannot read its slice.

    Raises:
        ConfigError: It is one.
    """
    if not base.sharded:
        raise ConfigError(
            "sharding a trial's model over processes",
            f'lora.base is "{base.name}"',
            allowed=_listed([row.name for row in WEIGHT_FORMATS.values() if row.sharded]),
            hint="leave execution.tp and execution.dp out",
        )


def _listed(names: list[BaseFormat]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
