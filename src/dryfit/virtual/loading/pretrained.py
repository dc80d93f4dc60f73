"""``from_pretrained`` of transformers without weights: the model of the config, with a fake in every place.

All of transformers' own rules act: types, devices, tied weights, modules kept in fp32, quantisation on the device with
what that allocates for a while. Only the values are not there, and no file of weights is looked for. The header of one
that lies here is read where ``dtype="auto"`` asks for the type of the weights and the config does not say it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn

from dryfit.core.errors import LoadError
from dryfit.core.private_names import require
from dryfit.meta.files.safetensors_file import read_safetensors_header
from dryfit.meta.private_apis.transformers_steps import PRETRAINED, initialise_again, replace_steps
from dryfit.virtual.loading.tensor_classes import Make

_DOING = "rehearsing from_pretrained"
_QUANTISES_HERE = "bitsandbytes"
_REAL_BELOW_BYTES = 1 << 20
_CPU = torch.device("cpu")
DemandRoom = Callable[[int, str], None]


def install(models: Any, make: Make, demand_room: DemandRoom) -> None:
    """Let ``from_pretrained`` fill models with fakes.

    Args:
        models: The module ``transformers.modeling_utils``.
        make: Makes a fake.
        demand_room: Called for a model of which a part would be left in host memory or on disk.
    """
    # Operators in a thread of transformers' own would not be seen.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    sources: list[Any] = [None]

    def files(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def find(
            pretrained_model_name_or_path: Any = None, *_args: Any, gguf_file: str | None = None, **_options: Any
        ) -> tuple[list[str], None]:
            require(_DOING, PRETRAINED)
            if gguf_file is not None:
                raise LoadError(_DOING, f"{gguf_file} is a GGUF file", "a model with a config.json")
            sources[0] = pretrained_model_name_or_path
            return [], None

        return find

    def dtype(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def choose(dtype: Any, checkpoint_files: Any, config: Any, *args: Any) -> Any:
            if dtype == "auto" and getattr(config, "dtype", None) is None and not checkpoint_files:
                dtype = _stored_dtype(sources[0])
            return original(dtype, checkpoint_files, config, *args)

        return choose

    def load(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def fill(
            model: Any,
            state_dict: dict[str, torch.Tensor] | None,
            checkpoint_files: list[str] | None,
            load_config: Any,
            expected_keys: list[str] | None = None,
        ) -> Any:
            if state_dict is not None:
                return original(model, state_dict, checkpoint_files, load_config, expected_keys)
            _refuse_disk(load_config.device_map)
            weights = dict(_weights(model, expected_keys, make))
            # These keys are the model's own: nothing is to be renamed, merged or split.
            loaded = original(model, weights, None, replace(load_config, weight_mapping=[]), expected_keys)
            for _, buffer in model.named_buffers():
                initialise_again(buffer)
            return loaded

        return fill

    steps = {"files": files, "dtype": dtype, "load": load, "placement": partial(_whole, demand_room)}
    replace_steps(models, lambda name, step: steps[name](step))
    models.get_hf_quantizer = _checked(models.get_hf_quantizer)


def _whole(demand_room: DemandRoom, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model that is placed automatically lie on the device with all of its parts, or not fit."""

    @wraps(original)
    def place(model: Any, device_map: Any, max_memory: Any, hf_quantizer: Any) -> Any:
        if not isinstance(device_map, str):
            return original(model, device_map, max_memory, hf_quantizer)
        try:
            placed: dict[str, Any] = original(model, device_map, max_memory, hf_quantizer)
        except ValueError:  # of weights that are quantised none may lie elsewhere
            if hf_quantizer is None:
                raise
            placed = {"": "cpu"}
        if not torch.cuda.is_available() or not {"cpu", "disk"} & set(placed.values()):
            return placed
        demand_room(_bytes_of(model, hf_quantizer), f'with device_map="{device_map}" the model')
        return {"": 0}

    return place


def _weights(model: nn.Module, expected_keys: list[str] | None, make: Make) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a file would hold: every parameter and saved buffer that is not tied to another one."""
    tied = getattr(model, "all_tied_weights_keys", {})
    expected = None if expected_keys is None else frozenset(expected_keys)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tied or (expected is not None and name not in expected):
            continue
        if isinstance(tensor, nn.Parameter) or tensor.nbytes >= _REAL_BELOW_BYTES:
            yield name, make(tensor.shape, tensor.dtype, _CPU, False)
        else:
            yield name, torch.zeros(tensor.shape, dtype=tensor.dtype)


def _stored_dtype(source: Any) -> torch.dtype:
    """Return the first floating-point type of a model's files that lie here; fp32 where there are none."""
    folder = Path(str(source))
    if not folder.is_dir():
        with suppress(HFValidationError):
            cached = try_to_load_from_cache(str(source), "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else folder
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with suppress(LoadError):
            for tensor in read_safetensors_header(file).tensors.values():
                if tensor.dtype.is_floating_point:
                    return tensor.dtype
    return torch.float32


def _bytes_of(model: nn.Module, quantizer: Any) -> int:
    """Return what the weights of a model on meta will take."""
    sizes = (
        {}
        if quantizer is None
        else {name: quantizer.param_element_size(model, name, one) for name, one in model.named_parameters()}
    )
    return int(sum(one.numel() * sizes.get(name, one.element_size()) for name, one in model.named_parameters()))


def _refuse_disk(device_map: dict[str, Any] | None) -> None:
    parts = [name or "all of it" for name, device in (device_map or {}).items() if device == "disk"]
    if parts:
        raise LoadError(
            _DOING,
            f"the device map leaves {len(parts)} parts of the model on disk, the first is {parts[0]}",
            allowed="a model that lies on the devices and in host memory: training does not write to the disk",
            hint='name a larger device, or load with device_map={"": 0} to see by how much it does not fit',
        )


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what cannot be quantised without values; what is stored in another form is quantised again instead."""

    @wraps(original)
    def quantiser(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        text = config.get_text_config(decoder=True)
        stored = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
        for wanted in (stored, quantization_config):
            if wanted is not None:
                _check_quantised(wanted)
        made = original(config, quantization_config, *args, **kwargs)
        if made[0] is not None:
            made[0].pre_quantized = False
        return made

    return quantiser


def _check_quantised(wanted: Any) -> None:
    of_config = isinstance(wanted, dict)
    method = wanted.get("quant_method", "") if of_config else getattr(wanted, "quant_method", "")
    method = str(getattr(method, "value", method))
    named = f"quantization_config of {method!r} in the model's config" if of_config else type(wanted).__name__
    if of_config and (wanted.get("load_in_4bit") or wanted.get("load_in_8bit")):
        method = _QUANTISES_HERE
    if method != _QUANTISES_HERE:
        raise LoadError(
            f"{_DOING} with {named}",
            f"the memory of weights quantised by {method!r} is not known",
            allowed="BitsAndBytesConfig, or weights that are not quantised",
        )
    if find_spec(_QUANTISES_HERE) is None:
        raise LoadError(f"{_DOING} with {named}", "bitsandbytes is not installed here", hint="pip install bitsandbytes")
