"""Tensors that become fakes: addresses, late parameters, recurrent layers, subclasses."""

import copyreg
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import (
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,  # pyright: ignore[reportAttributeAccessIssue]
)

from dryfit.gpu.private_apis.torch_fakes import FakeTensor, forget
from dryfit.gpu.private_apis.torch_modes import without_function_modes
from dryfit.gpu.private_apis.torch_tensors import key_of, replace_make_subclass
from dryfit.settings.errors import TraceError

# Addresses of fakes, which differ as those of real tensors do, and memory that they need not share.
#
# torch gives them all the address 0, by which safetensors and transformers would take them for tied. To be removed
# when torch's fakes have addresses of their own.


_of_storage: Any = torch.UntypedStorage.data_ptr
_addresses = threading.local()


def install_addresses() -> None:
    """Let ``data_ptr`` tell fakes apart."""
    torch.UntypedStorage.data_ptr = _storage_address  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensor.data_ptr = _address  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensor.share_memory_ = _shared  # pyright: ignore[reportAttributeAccessIssue]
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)


def _storage_address(storage: torch.UntypedStorage) -> int:
    if storage.device.type != "meta":
        return _of_storage(storage)
    return key_of(storage) if storage.nbytes() else 0


@contextmanager
def without_addresses() -> Iterator[None]:
    """Refuse in the block to give the address of a fake: code in C would read or write there."""
    before, _addresses.refused = getattr(_addresses, "refused", False), True
    try:
        yield
    finally:
        _addresses.refused = before


def _address(tensor: torch.Tensor) -> int:
    if getattr(_addresses, "refused", False):
        raise RuntimeError("a tensor of a virtual GPU has no memory")
    if not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Leave a tensor without memory as it is: a copy of it in another process has no values either."""
    return tensor


# Real tensors that become fakes when they are given memory: lazy parameters, and what is set as ``tensor.data``.
#
# They stay the same objects, as for torch.


def install_late_tensors() -> None:
    """Let parameters and buffers without a shape be on the host until they have one, and then where they belong."""
    for cls in (UninitializedParameter, UninitializedBuffer):
        cls.__new__ = _made_on_the_host(cls, cls.__new__)  # pyright: ignore[reportAttributeAccessIssue]
    UninitializedTensorMixin.materialize = _materialize  # pyright: ignore[reportAttributeAccessIssue]


def moved(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Note where a tensor without a shape is moved to; whether it is one."""
    lazy: Any = tensor
    if not isinstance(tensor, UninitializedTensorMixin):
        return False
    probe = fn(torch.empty(0, dtype=lazy.dtype, device=lazy.dryfit_device))
    lazy.data = torch.empty(0, dtype=probe.dtype, device="cpu")
    lazy.dryfit_device = probe.device
    return True


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Let a real tensor be a fake on the memory of another one.

    Raises:
        RuntimeError: Something refers to it weakly, or autograd holds it.
    """
    _become(tensor, data, tensor.requires_grad)


def _made_on_the_host(owner: type, make: Any) -> Any:
    def new(
        cls: Any,
        requires_grad: bool = issubclass(owner, nn.Parameter),
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> Any:
        made = make(cls, requires_grad, torch.device("cpu"), dtype, **options)
        made.dryfit_device = torch.get_default_device() if device is None else torch.device(device)
        return made

    return new


def _materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """Give a tensor its shape (``UninitializedTensorMixin.materialize``)."""
    made = torch.empty(shape, device=device or self.dryfit_device, dtype=dtype or self.dtype)
    requires_grad = self.requires_grad
    becomes = self.cls_to_become
    if issubclass(becomes, nn.Parameter):
        made = nn.Parameter(made, requires_grad)
    self.__class__ = becomes
    _become(self, made, requires_grad)


def _become(tensor: torch.Tensor, other: torch.Tensor, requires_grad: bool) -> None:
    """Let a tensor be on the memory of another one, and of its kind."""
    made = other.detach().requires_grad_(requires_grad)  # of its own: nothing refers to it yet
    for source in (other, tensor):
        vars(made).update({name: value for name, value in vars(source).items() if not hasattr(made, name)})
    if isinstance(made, FakeTensor):
        forget(made)
    torch.utils.swap_tensors(tensor, made)


# Packed rows of recurrent layers.


_aten = torch.ops.aten
PACKS = _aten._pack_padded_sequence.default


def packed(args: tuple[Any, ...], lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what packs padded sequences (``nn.utils.rnn.pack_padded_sequence``) whose lengths are known.

    Args:
        args: Of the operator: a fake, two of whose dimensions are rows and lengths; lengths; which of them is first.
        lengths: A real tensor.
    """
    data = args[0]
    _, sizes = PACKS(torch.zeros(*data.shape[:2], 1), lengths, *args[2:])
    return data.new_empty(int(lengths.sum()), *data.shape[2:]), sizes


# Subclasses of tensors that libraries make of fakes, with ``torch.Tensor._make_subclass`` and ``as_subclass``.
#
# torch cannot make one of a fake: that has a class already. bitsandbytes keeps its quantised weights in such classes
# (``Params4bit``, ``Int8Params``), by whose names other libraries know them; fastai and torchvision
# (``tv_tensors.Image``) give each tensor of a batch its kind. Here a fake becomes an instance of a class that is both:
# theirs first, so that its methods and attributes act, and a fake for torch.
#
# To be removed when both take fakes.


Make = Callable[[torch.Size, torch.dtype, torch.device, bool], torch.Tensor]
"""Makes a fake of a shape, type and device; whether it requires a gradient."""

_DATA: Any = torch.Tensor.data
_OF_FAKES: set[str] = set()
"""Attributes that a fake has of itself."""


def install_tensor_classes(make: Make, on_data: Callable[[Any, torch.Tensor], None]) -> None:
    """Let libraries make their own classes of fakes.

    Args:
        make: Makes a fake.
        on_data: Called with a fake and the memory that it is given by ``tensor.data = ...``.
    """

    def made(cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        is_fake = isinstance(data, FakeTensor)
        if cls is FakeTensor or not (is_fake or (_is_weight(cls) and not data.is_meta)):
            return original(cls, data, require_grad, **options)
        fake: Any = data.detach() if is_fake else make(data.shape, data.dtype, data.device, False)
        return _become_instance(fake, _both(cls)).requires_grad_(require_grad)

    def like(cls: Any, *args: Any, **state: Any) -> Any:
        is_data = args and (
            isinstance(args[0], FakeTensor) or (type(args[0]) is torch.Tensor and not state.get("fake_mode"))
        )
        if cls is not FakeTensor or not is_data:
            return new(cls, *args, **state)
        # ``type(parameter)(data, **vars(parameter))``, as accelerate gives one other data, small ones with values
        return nn.Parameter(args[0], state.get("requires_grad", False))

    def as_subclass(tensor: torch.Tensor, cls: Any) -> Any:
        if not (isinstance(tensor, FakeTensor) and issubclass(cls, torch.Tensor)):
            return as_is(tensor, _theirs(cls))
        with without_function_modes():
            view: Any = tensor.view_as(tensor)
        return _become_instance(view, FakeTensor if cls is torch.Tensor else _both(cls))

    as_is = torch.Tensor.as_subclass
    torch.Tensor.as_subclass = as_subclass  # pyright: ignore[reportAttributeAccessIssue]
    new = FakeTensor.__new__
    FakeTensor.__new__ = like  # pyright: ignore[reportAttributeAccessIssue]
    original = replace_make_subclass(made)
    FakeTensor.data = property(_DATA.__get__, _setting_data(make, on_data))  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensor.__repr__ = _as_plain  # pyright: ignore[reportAttributeAccessIssue]


def _as_plain(self: torch.Tensor, **options: Any) -> str:
    """Return the text of a fake without the word: torchao looks there for a fake, and takes another kernel for it."""
    return torch.Tensor.__repr__(self, **options).replace("FakeTensor(", "tensor(")


def _setting_data(make: Make, on_data: Callable[[Any, torch.Tensor], None]) -> Callable[[Any, torch.Tensor], None]:
    """Return what sets ``tensor.data`` of a fake: it stays one, and is where its new data are."""

    def set_data(tensor: Any, data: torch.Tensor) -> None:
        if not isinstance(data, FakeTensor):
            data = make(data.shape, data.dtype, data.device, False)
        _DATA.__set__(tensor, data)
        tensor.fake_device = data.device
        on_data(tensor, data)

    return set_data


@cache
def _is_weight(cls: Any) -> bool:
    """Whether a class is one of weights, all of which are fakes; one without a shape yet is none."""
    return issubclass(cls, nn.Parameter) and cls is not nn.Parameter and not issubclass(cls, UninitializedTensorMixin)


def _become_instance(fake: Any, cls: Any) -> Any:
    """Give a fake another class.

    Raises:
        TraceError: The class has ``__slots__``, for which a fake has no room.
    """
    _OF_FAKES.update(vars(fake))
    try:
        fake.__class__ = cls
    except TypeError:
        what = f"{cls.__module__}.{cls.__qualname__}, a class of tensors with __slots__"
        raise TraceError("following the script", f"a virtual GPU has no tensors of {what}") from None
    return fake


class _Unregistered:
    """Keeps a class that is derived here from the library's ``__init_subclass__``, which may want arguments."""

    __slots__ = ()

    def __init_subclass__(cls) -> None: ...


class _AsTensor:
    """Lets the functions of torch treat a class as one of plain tensors: they treat that of fakes as none."""

    __slots__ = ()
    __torch_function__ = inspect.getattr_static(torch.Tensor, "__torch_function__")


def _theirs(cls: Any) -> Any:
    """Return the class of real tensors in the place of one of :func:`_both`: a host tensor may be of a fake's kind."""
    if not issubclass(cls, FakeTensor):
        return cls
    return torch.Tensor if cls is FakeTensor else cls.__bases__[1]


@cache
def _both(cls: Any) -> Any:
    """Return the class of fakes that are instances of a library's class of tensors as well."""
    if issubclass(cls, FakeTensor):
        return cls

    make = cls.__new__

    def new(kind: Any, *args: Any, **state: Any) -> Any:
        # ``Params4bit(data, **vars(parameter))``: bitsandbytes before 0.50 takes the names of its own attributes alone
        return make(kind, *args, **{name: value for name, value in state.items() if name not in _OF_FAKES})

    cls.__new__ = staticmethod(new)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    both = type(cls)(cls.__name__, (_Unregistered, cls, _AsTensor, FakeTensor), names)
    both.__torch_function__ = inspect.getattr_static(cls, "__torch_function__")
    if FakeTensor in copyreg.dispatch_table:  # pickle asks by the class itself
        copyreg.pickle(both, copyreg.dispatch_table[FakeTensor])
    return both
