"""Addresses of fakes, which differ as those of real tensors do, and memory that they need not share.

torch gives them all the address 0, by which safetensors and transformers would take them for tied. To be removed when
torch's fakes have addresses of their own.
"""

import warnings
from typing import Any

import torch

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_tensors import key_of

_of_storage: Any = torch.UntypedStorage.data_ptr


def install() -> None:
    """Let ``data_ptr`` tell fakes apart."""
    torch.UntypedStorage.data_ptr = _storage_address  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensor.data_ptr = _address  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensor.share_memory_ = _shared  # pyright: ignore[reportAttributeAccessIssue]
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)


def _storage_address(storage: torch.UntypedStorage) -> int:
    if storage.device.type != "meta":
        return _of_storage(storage)
    return key_of(storage) if storage.nbytes() else 0


def _address(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Leave a tensor without memory as it is: a copy of it in another process has no values either."""
    return tensor
