"""Models without weights, however a script makes or loads them."""

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dryfit.gpu import fake_tensors, kernels
from dryfit.gpu.fake_tensors import Make
from dryfit.gpu.import_hooks import rebind, when_imported
from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_tensors import storage_key
from dryfit.gpu.private_apis.transformers_steps import (
    PRETRAINED,
    has_steps,
    initialise_again,
    knows_load_config,
    replace_steps,
)
from dryfit.gpu.slots import put_all
from dryfit.gpu.stored_types import STORED_TYPES
from dryfit.gpu.unwritten import stored_dtypes
from dryfit.gpu.values import forget
from dryfit.settings.errors import LoadError
from dryfit.settings.private_names import require

# Initialisers cost nothing on tensors that have no values: a walk over a large model takes no time.


_CONSTANT = frozenset({"constant_", "ones_", "zeros_"})
_MOST_CONSTANTS = 1_000
"""Elements of a parameter that begins with known values."""
"""Those whose values are known afterwards."""
_ONLY_VALUES = (
    "constant_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
)
"""Those that change values alone. ``orthogonal_``, ``sparse_`` and ``dirac_`` allocate on the tensor's device."""


def install_initialisers() -> None:
    """Let the initialisers of ``torch.nn.init`` leave large fakes as they are, sharded ones too."""
    for name in _ONLY_VALUES:
        original = getattr(nn.init, name)
        rebind(original, _for_values(original))


def _for_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not isinstance(own, FakeTensor):
            return original(tensor, *args, **kwargs)
        forget(own)
        if original.__name__ in _CONSTANT and own.numel() <= _MOST_CONSTANTS:
            original(tensor, *args, **kwargs)
        return tensor

    return initialise


# Adapters of PEFT and models of timm, whose weights are neither fetched nor read.


class UnreadWeights(dict[str, torch.Tensor]):
    """The weights of a file that was not opened.

    Args:
        device: Where they were to be.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class _Loaded(NamedTuple):
    """What ``load_state_dict`` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def install_peft(peft: Any, make: Make) -> None:
    """Let PEFT load adapters without their files; their config is read.

    Args:
        peft: The module ``peft.peft_model``.
        make: Makes a fake.
    """
    set_weights = peft.set_peft_model_state_dict

    def unread(model_id: str, device: Any = None, *_args: Any, **_options: Any) -> UnreadWeights:
        return UnreadWeights(torch.device(peft.infer_device() if device is None else device))

    @wraps(set_weights)
    def set_unread(model: nn.Module, weights: Any, adapter_name: str = "default", *args: Any, **options: Any) -> Any:
        if isinstance(weights, UnreadWeights):
            if not options.get("low_cpu_mem_usage"):
                return _Loaded([], [])
            # The adapter was built on the meta device; PEFT puts it where the weights below it lie.
            own = peft.get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
            weights = {name: make(one.shape, one.dtype, weights.device, False) for name, one in own.items()}
        return set_weights(model, weights, adapter_name, *args, **options)

    rebind(peft.load_peft_weights, unread)
    rebind(set_weights, set_unread)


def install_timm(timm: ModuleType) -> None:
    """Let ``timm.create_model`` fetch no weights.

    Args:
        timm: The package.
    """
    create: Callable[..., Any] = vars(timm)["create_model"]

    @wraps(create)
    def without_weights(model_name: str, *args: Any, **options: Any) -> Any:
        options.pop("pretrained", None)
        return create(model_name, *((False, *args[1:]) if args else ()), **options)

    rebind(create, without_weights)


# Files of weights, read as fakes: ``torch.load``, ``safetensors.torch.load_file`` and ``safetensors.safe_open``.
#
# Large tensors are fakes of the shape and type that the file's header says; small ones are real, as a script may look
# at them (step counters, schedules, positions).


_REAL_BELOW_BYTES = 64 << 10
_MAPPED_FROM_BYTES = 1 << 20
_CPU = torch.device("cpu")


def install_checkpoint_files(make: Make) -> None:
    """Let files of weights be read as fakes.

    Args:
        make: Makes a fake.
    """
    rebind(torch.load, _loading(torch.load, make))
    when_imported("safetensors", lambda module: rebind(module.safe_open, _opening(module.safe_open, make)))
    when_imported("safetensors.torch", lambda module: rebind(module.load_file, _whole_file(module.safe_open)))


def _whole_file(safe_open: Any) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function in the place of ``safetensors.torch.load_file``, which opens files as given."""

    def load_file(filename: Any, device: str | int = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        with safe_open(filename, framework="pt", device=device, **options) as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}

    return load_file


def _opening(original: Any, make: Make) -> Any:
    """Return a class in the place of ``safetensors.safe_open``."""

    class FakeFile:
        """An open safetensors file, whose large tensors have no values."""

        def __init__(
            self, filename: Any, framework: str = "pt", device: str | int | torch.device = "cpu", **options: Any
        ) -> None:
            is_torch = framework in ("pt", "torch", "pytorch")
            self._device = torch.device(device) if is_torch else None
            self._file = original(filename, framework, **({} if is_torch else {"device": device}), **options)

        def __enter__(self) -> "FakeFile":
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> Any:
            """Return a tensor of the file."""
            if self._device is None:
                return self._file.get_tensor(name)
            stored = self._file.get_slice(name)
            shape, dtype = torch.Size(stored.get_shape()), STORED_TYPES[stored.get_dtype()]
            if shape.numel() * dtype.itemsize >= _REAL_BELOW_BYTES:
                return make(shape, dtype, self._device, False)
            return self._file.get_tensor(name).to(self._device)

        def get_slice(self, name: str) -> Any:
            """Return a tensor of the file that is read in parts."""
            return (
                self._file.get_slice(name) if self._device is None else _Slice(self, self._file.get_slice(name), name)
            )

    return FakeFile


class _Slice:
    """A tensor of a file of which parts are taken."""

    def __init__(self, file: Any, stored: Any, name: str) -> None:
        self._file, self._stored, self._name = file, stored, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]


def _loading(original: Callable[..., Any], make: Make) -> Callable[..., Any]:
    """Return a function in the place of ``torch.load``."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        devices: dict[int, torch.device] = {}

        def keep(storage: Any, location: str) -> Any:
            device = _device(map_location, storage, location)
            if storage.nbytes() and device.type == "cuda":
                devices[storage.data_ptr()] = device
            return storage

        if _is_large(f):
            kwargs = {**kwargs, "mmap": True}
        content = original(f, keep, *args, **kwargs)
        return _Content(devices, make).without_data(content)

    return load


def _device(map_location: Any, storage: Any, location: str) -> torch.device:
    """Return where ``torch.load`` would put a storage."""
    if callable(map_location):
        try:
            moved: Any = map_location(storage, location)
        except (AssertionError, RuntimeError):  # torch cannot move a real storage to a device that is not there
            return torch.device("cuda")
        return torch.device(location) if moved is None else moved.device
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        return torch.device(map_location)
    return torch.device(location)


def _is_large(file: Any) -> bool:
    """Whether a file is worth mapping, and can be: written by ``torch.save`` since torch 1.6."""
    if not isinstance(file, str | os.PathLike):
        return False
    path = Path(file)
    return path.is_file() and path.stat().st_size >= _MAPPED_FROM_BYTES and zipfile.is_zipfile(path)


class _Content:
    """What a file of ``torch.save`` holds, while its large tensors become fakes.

    Args:
        devices: Of storages that belong on a CUDA device, by their address.
        make: Makes a fake.
    """

    def __init__(self, devices: dict[int, torch.device], make: Make) -> None:
        self._devices = devices
        self._make = make
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # so that no address is another tensor's before the end

    def without_data(self, content: Any) -> Any:
        """Return the same content with fakes in the place of large tensors; dicts, lists and modules are changed."""
        match content:
            case torch.Tensor():
                return self._tensor(content)
            case nn.Module():
                put_all(content, lambda slot: self._tensor(slot.tensor))
            case dict():
                for key, value in list(content.items()):
                    content[key] = self.without_data(value)
            case list():
                content[:] = [self.without_data(value) for value in content]
            case tuple():
                values = [self.without_data(value) for value in content]
                cls: Any = type(content)
                return cls._make(values) if hasattr(cls, "_make") else cls(values)
            case _:
                pass
        return content

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):  # a parameter
            device = next(iter(self._devices.values()), _CPU)
            return tensor if device == _CPU else tensor.to(device)
        if tensor.device != _CPU or tensor.layout is not torch.strided:
            return tensor
        self._kept.append(tensor)
        storage = storage_key(tensor)
        key = (storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if key not in self._made:
            self._made[key] = self._new(tensor).requires_grad_(tensor.requires_grad)
        return self._made[key]

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        device = self._devices.get(storage.data_ptr(), _CPU)
        if storage.nbytes() < _REAL_BELOW_BYTES:
            return tensor.detach() if device == _CPU else tensor.detach().to(device)
        key = storage_key(tensor)
        if key not in self._storages:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                self._storages[key] = self._make(tensor.shape, tensor.dtype, device, False)
                return self._storages[key]
            self._storages[key] = self._make(torch.Size([storage.nbytes()]), torch.uint8, device, False)
        whole = self._storages[key].view(-1).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


# ``from_pretrained`` of transformers without weights: the model of the config, with a fake in every place.
#
# All of transformers' own rules act: types, devices, tied weights, modules kept in fp32, quantisation on the device
# with what that allocates for a while. Only the values are not there, and no file of weights is looked for. The
# header of one that lies here is read where ``dtype="auto"`` asks for the type of the weights and the config does not
# say it.


_DOING = "rehearsing from_pretrained"
_UNREAD = "model.bin"
"""A file of weights for transformers before 5, which asks for its name."""
_QUANTISES_HERE = "bitsandbytes"
_SMALL_BUFFER_BYTES = 1 << 20
DemandRoom = Callable[[int, str], None]


def install_from_pretrained(models: Any, make: Make, demand_room: DemandRoom) -> None:
    """Let ``from_pretrained`` fill models with fakes.

    That of transformers before 4.56 stays as it is, and reads files, whose tensors are fakes.

    Args:
        models: The module ``transformers.modeling_utils``.
        make: Makes a fake.
        demand_room: Called for a model of which a part would be left in host memory or on disk.
    """
    if not has_steps(models):
        return
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
            return ([] if knows_load_config(models) else [_UNREAD]), None

        return find

    is_new = knows_load_config(models)
    dtype = partial(_typed if is_new else _typed_of_4, sources)
    load = partial(_filled if is_new else _filled_of_4, make)
    steps = {"files": files, "dtype": dtype, "load": load, "placement": partial(_whole, demand_room)}
    replace_steps(models, lambda name, step: steps[name](step))
    models.get_hf_quantizer = _checked(models.get_hf_quantizer)


def _typed(sources: list[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the type of the weights be known that no config says, though no file of them is looked for."""

    @wraps(original)
    def choose(dtype: Any, checkpoint_files: Any, config: Any, *args: Any) -> Any:
        if dtype == "auto" and getattr(config, "dtype", None) is None and not checkpoint_files:
            dtype = _stored_dtype(sources[0])
        return original(dtype, checkpoint_files, config, *args)

    return choose


def _typed_of_4(sources: list[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for transformers before 5."""

    @wraps(original)
    def choose(cls: Any, dtype: Any, checkpoint_files: Any, config: Any, *args: Any) -> Any:
        if dtype == "auto" and getattr(config, "dtype", None) is None and checkpoint_files == [_UNREAD]:
            dtype = _stored_dtype(sources[0])
        return original(cls, dtype, checkpoint_files, config, *args)

    return choose


def _filled(make: Make, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model be filled with fakes."""

    @wraps(original)
    def fill(
        model: Any,
        state_dict: dict[str, torch.Tensor] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        *given: list[str] | None,
        **named: list[str] | None,
    ) -> Any:
        if state_dict is not None:
            return original(model, state_dict, checkpoint_files, load_config, *given, **named)
        _refuse_disk(load_config.device_map)
        expected_keys = given[0] if given else named.get("expected_keys")  # of an adapter
        weights = dict(_weights(model, expected_keys, make))
        # These keys are the model's own: nothing is to be renamed, merged or split.
        loaded = original(model, weights, None, replace(load_config, weight_mapping=[]), *given, **named)
        for _, buffer in model.named_buffers():
            initialise_again(buffer)
        return loaded

    return fill


def _filled_of_4(make: Make, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for transformers before 5."""

    @wraps(original)
    def fill(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **options: Any) -> Any:
        if state_dict is not None:
            return original(model, state_dict, checkpoint_files, *args, **options)
        _refuse_disk(options.get("device_map"))
        weights = dict(_weights(model, None, make))
        return original(model, weights, None, *args, **{**options, "key_mapping": None})

    return fill


def _whole(demand_room: DemandRoom, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model that is placed automatically lie on the device with all of its parts, or not fit."""

    @wraps(original)
    def place(model: Any, device_map: Any, max_memory: Any, hf_quantizer: Any, *more: Any) -> Any:
        if not isinstance(device_map, str):
            return original(model, device_map, max_memory, hf_quantizer, *more)
        try:
            placed: dict[str, Any] = original(model, device_map, max_memory, hf_quantizer, *more)
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
        if isinstance(tensor, nn.Parameter) or tensor.nbytes >= _SMALL_BUFFER_BYTES:
            # DeepSpeed's ZeRO-3 leaves a parameter without elements, and its shape beside it.
            yield name, make(getattr(tensor, "ds_shape", tensor.shape), tensor.dtype, _CPU, False)
        else:
            yield name, torch.zeros(tensor.shape, dtype=tensor.dtype)


def _stored_dtype(source: Any) -> torch.dtype:
    """Return the first floating-point type of a model's files that lie here; fp32 where there are none."""
    folder = Path(str(source))
    if not folder.is_dir():
        with suppress(ValueError):  # it is no name of a repository
            cached = import_module("huggingface_hub").try_to_load_from_cache(str(source), "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else folder
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with file.open("rb") as opened:
            for dtype in stored_dtypes(opened):
                if dtype.is_floating_point:
                    return dtype
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


# Models without weights, however a script makes or loads them: wherever values would be read, fakes are made.
#
# Libraries are changed when the script imports them, so that nothing is imported that it does not import.


def install(make: Make, demand_room: DemandRoom, on_data: Callable[[Any, torch.Tensor], None]) -> None:
    """Let no weight be read or drawn for the rest of this process.

    Args:
        make: Makes a fake of a shape, type and device; whether it requires a gradient.
        demand_room: Raises an error where a model of so many bytes does not fit; told what has so many.
        on_data: Called with a tensor and the memory that the tensor is given by ``tensor.data = ...``.
    """
    fake_tensors.install_addresses()
    install_initialisers()
    fake_tensors.install_tensor_classes(make, on_data)
    install_checkpoint_files(make)
    when_imported("transformers.modeling_utils", lambda module: install_from_pretrained(module, make, demand_room))
    when_imported("bitsandbytes", lambda _: kernels.install())
    when_imported("peft.peft_model", lambda module: install_peft(module, make))
    when_imported("timm", install_timm)
