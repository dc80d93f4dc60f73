"""Linear layers of bitsandbytes, whose frozen weights are integers with scales, made of a matrix or read from a file.

``N`` outputs, ``K`` inputs. LLM.int8() (https://arxiv.org/abs/2208.07339) has one scale for each output; NF4
(https://arxiv.org/abs/2305.14314) one for each block of 64 weights, and under double quantisation these scales are
8-bit numbers themselves, with one fp32 scale for each 256 of them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from dryfit.gpu.offline_import import import_offline
from dryfit.meta.file_formats import StoredTensor
from dryfit.settings.choices import BaseFormat
from dryfit.settings.errors import LoadError, MachineError
from dryfit.settings.execution import WeightFormat
from dryfit.settings.text import first_line

PACKAGE: Final = "bitsandbytes"
_EXTRA: Final = "8bit"
_INT8_OUTLIER: Final = 6.0
"""Features that reach this are multiplied in 16 bits: the threshold of LLM.int8(), and of transformers."""
_BLOCK: Final = 64
_SCALE_BLOCK: Final = 256
_SAYS_EACH_TIME: Final = "bitsandbytes.autograd"
"""A logger below it says at each product that LLM.int8() casts inputs in bf16 to fp16."""
_NF4_STATE: Final = "quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class LayerSize:
    """The size of a linear layer.

    Attributes:
        inputs: K.
        outputs: N.
    """

    inputs: int
    outputs: int

    def options(self) -> dict[str, Any]:
        """Return how a layer of this size is made, without memory; a bias is put into it."""
        return {
            "input_features": self.inputs,
            "output_features": self.outputs,
            "bias": False,
            "device": "meta",
        }


@dataclass(frozen=True, slots=True)
class Quantiser:
    """How one format holds linear layers.

    Attributes:
        mark: Attribute of a model by which PEFT knows such layers.
        quantise: Quantises a matrix (N, K), on the device where it shall lie.
        layer: Makes a layer of the weight and bias of another layer, which has been given such a weight.
        layer_class: Returns the class of such layers.
        packed: Makes a layer without memory whose integers and scales are its parameters and buffers, for planning and
            to be filled from a file that holds them.
        unpacked: Returns the weight of a packed layer that has been filled.
        extra: Tensors of a file beside a weight and its scales, whose length only the file knows, or that it may lack.
        names: Names of a packed layer's tensors in a file, by those in the layer, where they differ.
        dequantise: Returns the matrix (N, K) of a quantised layer.
    """

    mark: str
    quantise: Callable[[torch.Tensor, torch.device], nn.Parameter]
    layer: Callable[[LayerSize, Any], nn.Module]
    layer_class: Callable[[], type[nn.Module]]
    packed: Callable[[LayerSize], nn.Module]
    unpacked: Callable[[Any], nn.Parameter]
    dequantise: Callable[[Any], torch.Tensor]
    extra: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict[str, str])


def quantiser_of(base: WeightFormat, compute: torch.dtype) -> Quantiser:
    """Return how a format holds linear layers.

    Args:
        base: A quantised format.
        compute: What layers compute in.

    Raises:
        MachineError: The library is not installed.
    """
    if find_spec(PACKAGE) is None:
        hint = f"pip install 'dryfit[{_EXTRA}]'"
        raise MachineError(_doing(base), f"{PACKAGE} is not installed", PACKAGE, hint)
    if base.name is BaseFormat.INT8:
        logging.getLogger(_SAYS_EACH_TIME).setLevel(logging.ERROR)
        return Quantiser(
            mark="is_loaded_in_8bit",
            quantise=_quantise_int8,
            layer=_int8_layer,
            layer_class=lambda: _bnb().nn.Linear8bitLt,
            packed=_classes().packed_int8,
            unpacked=_unpacked_int8,
            dequantise=_dequantise_int8,
            extra=("weight_format",),
        )
    how = {"compute": compute, "double_quant": base.double_quant}
    tables = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if base.double_quant else ()))
    return Quantiser(
        mark="is_loaded_in_4bit",
        quantise=partial(_quantise_nf4, double_quant=base.double_quant),
        layer=partial(_nf4_layer, **how),
        layer_class=lambda: _bnb().nn.Linear4bit,
        packed=partial(_classes().packed_nf4, **how),
        unpacked=_unpacked_nf4,
        dequantise=_dequantise_nf4,
        extra=("state",),
        names={name: f"weight.{name}" for name in tables} | {"state": f"weight.{_NF4_STATE}"},
    )


def expect_stored(packed: Any, extra: Mapping[str, StoredTensor | None]) -> None:
    """Give a packed layer places for what a file holds beside its weight and scales.

    Args:
        packed: Changed in place.
        extra: What the file has of :attr:`Quantiser.extra`.
    """
    for name, stored in extra.items():
        if stored is None and name == "weight_format":
            continue  # older files do not have it
        shape = stored.shape if stored is not None else (0,)
        packed.register_buffer(name, torch.empty(shape, dtype=torch.uint8, device="meta"))
    if hasattr(packed, "nested_offset"):  # within its state
        del packed.nested_offset


def check_backend(base: WeightFormat, device: torch.device) -> None:
    """Quantise a few numbers on a device, so that a missing backend is told before anything is loaded.

    Raises:
        MachineError: The installed library cannot compute there.
    """
    quantiser = quantiser_of(base, torch.float16)
    try:
        quantiser.quantise(torch.ones(_BLOCK, _BLOCK, dtype=torch.float16), device)
    except (RuntimeError, NotImplementedError, AttributeError, AssertionError, OSError) as error:
        found = f"the installed {PACKAGE} cannot quantise on {device}: {first_line(error)}"
        hint = f"python -m {PACKAGE} says which libraries it finds"
        raise MachineError(_doing(base), found, f"{PACKAGE} with a backend for {device.type}", hint) from error


def _doing(base: WeightFormat) -> str:
    return f'loading a base in {base.bits} bits (lora.base = "{base.name}")'


def _bnb() -> Any:
    return import_offline(PACKAGE)


def _quantise_int8(weight_NK: torch.Tensor, device: torch.device) -> nn.Parameter:
    return _bnb().nn.Int8Params(weight_NK, requires_grad=False).to(device)


def _quantise_nf4(weight_NK: torch.Tensor, device: torch.device, *, double_quant: bool) -> nn.Parameter:
    return (
        _bnb()
        .nn.Params4bit(weight_NK, requires_grad=False, compress_statistics=double_quant, quant_type="nf4")
        .to(device)
    )


def _int8_layer(size: LayerSize, filled: Any) -> nn.Module:
    layer = _bnb().nn.Linear8bitLt(**_int8_options(size))
    layer.weight, layer.bias = filled.weight, filled.bias
    return layer


def _int8_options(size: LayerSize) -> dict[str, Any]:
    return size.options() | {"has_fp16_weights": False, "threshold": _INT8_OUTLIER}


def _nf4_layer(size: LayerSize, filled: Any, *, compute: torch.dtype, double_quant: bool) -> nn.Module:
    layer = _bnb().nn.Linear4bit(**_nf4_options(size, compute, double_quant))
    layer.weight, layer.bias, layer.quant_state = filled.weight, filled.bias, filled.weight.quant_state
    _keep_order(layer)
    return layer


def _nf4_options(size: LayerSize, compute: torch.dtype, double_quant: bool) -> dict[str, Any]:
    return size.options() | {"compute_dtype": compute, "compress_statistics": double_quant, "quant_type": "nf4"}


def _keep_order(layer: Any) -> None:
    """Let a layer's weight lie in one order, on every CPU.

    With bfloat16 instructions a forward pass in eval mode would store it in another one, through which a later backward
    pass computes wrong gradients, and says nothing.
    """
    layer.support_avx512bf16_for_cpu = False


def _unpacked_int8(packed: Any) -> nn.Parameter:
    if hasattr(packed, "weight_format") and int(packed.weight_format):
        raise LoadError("loading an 8-bit weight", f"weight_format is {int(packed.weight_format)}", "0: row by row")
    integers_NK = packed.weight.data
    return _bnb().nn.Int8Params(integers_NK, requires_grad=False, CB=integers_NK, SCB=packed.SCB)


def _unpacked_nf4(packed: Any) -> nn.Parameter:
    doing = "loading a 4-bit weight"
    scales = {_NF4_STATE if name == "state" else name: one for name, one in packed.named_buffers()}
    try:
        weight = _bnb().nn.Params4bit.from_prequantized(packed.weight.data, scales, device=packed.weight.device)
        state = weight.quant_state
        facts = (tuple(state.shape), state.quant_type, state.blocksize)
        nested = (state.nested, state.state2.blocksize if state.nested else _SCALE_BLOCK)
        offset = float(state.offset) if state.nested else 0.0
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError) as error:
        raise LoadError(doing, f"its {_NF4_STATE} is damaged: {first_line(error)}") from error
    wanted = (packed.out_features, packed.in_features), "nf4", _BLOCK
    if facts != wanted or nested != (packed.double_quant, _SCALE_BLOCK) or not isinstance(state.dtype, torch.dtype):
        raise LoadError(doing, f"its {_NF4_STATE} is of shape, type and block {facts}", allowed=str(wanted))
    if not torch.tensor(offset).isfinite():
        raise LoadError(doing, f"nested_offset is {offset}", allowed="a finite number")
    return weight


def _dequantise_int8(layer: Any) -> torch.Tensor:
    weight = layer.weight
    scales_N = weight.SCB if weight.SCB is not None else layer.state.SCB
    return _bnb().functional.int8_vectorwise_dequant(weight.data, scales_N)


def _dequantise_nf4(layer: Any) -> torch.Tensor:
    return _bnb().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


@dataclass(frozen=True, slots=True)
class _Classes:
    """Layers whose integers and scales are plain parameters and buffers, in the library's own classes' place."""

    packed_int8: Callable[..., nn.Module]
    packed_nf4: Callable[..., nn.Module]


@cache
def _classes() -> _Classes:
    """Derive the packed layers from the library's, which is optional."""
    bnb = _bnb()

    class PackedInt8(bnb.nn.Linear8bitLt):
        """A layer of LLM.int8(): ``weight`` (N, K) and its scales ``SCB`` (N,)."""

        def __init__(self, size: LayerSize) -> None:
            super().__init__(**_int8_options(size))
            self.weight = _integers(torch.empty((size.outputs, size.inputs), dtype=torch.int8, device="meta"))
            self.register_buffer("SCB", torch.empty(size.outputs, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight: Any = self.weight
            weight.CB, weight.SCB = weight.detach(), self.SCB
            return super().forward(x)

    class PackedNf4(bnb.nn.Linear4bit):
        """A layer of NF4: two weights a byte in ``weight``, and the scales of blocks."""

        def __init__(self, size: LayerSize, *, compute: torch.dtype, double_quant: bool) -> None:
            super().__init__(**_nf4_options(size, compute, double_quant))
            _keep_order(self)
            self.double_quant, self.compute = double_quant, compute
            count = size.inputs * size.outputs
            weight: Any = _integers(torch.empty(((count + 1) // 2, 1), dtype=torch.uint8, device="meta"))
            weight.compress_statistics, weight.quant_type = double_quant, "nf4"  # PEFT asks for them
            self.weight = weight
            blocks = -(-count // _BLOCK)
            scale = torch.uint8 if double_quant else torch.float32
            self.register_buffer("absmax", torch.empty(blocks, dtype=scale, device="meta"))
            self.register_buffer("quant_map", torch.empty(16, device="meta"))
            if double_quant:
                self.register_buffer("nested_absmax", torch.empty(-(-blocks // _SCALE_BLOCK), device="meta"))
                self.register_buffer("nested_quant_map", torch.empty(256, device="meta"))
                self.register_buffer("nested_offset", torch.empty((), device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.quant_state = self._state()
            return super().forward(x)

        def _state(self) -> Any:
            nested, offset = None, None
            if self.double_quant:
                how = {"blocksize": _SCALE_BLOCK, "dtype": torch.float32}
                nested = bnb.functional.QuantState(self.nested_absmax, code=self.nested_quant_map, **how)
                offset = self.nested_offset
            shape = torch.Size((self.out_features, self.in_features))
            return bnb.functional.QuantState(
                self.absmax, shape, self.quant_map, _BLOCK, "nf4", self.compute, offset=offset, state2=nested
            )

    return _Classes(PackedInt8, PackedNf4)


def _integers(data: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)
