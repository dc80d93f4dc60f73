"""Random programs of storages, on a virtual GPU and beside it on the CPU: what is allocated is what is held."""

import json
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dryfit
from dryfit.gpu.events import BLOCK_BYTES

SIZES = st.integers(0, 3000)
PLACES = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["empty", "zeros"]), SIZES),
    st.tuples(st.sampled_from(["resize storage", "resize typed", "resize"]), PLACES, SIZES),
    st.tuples(st.sampled_from(["view", "detach", "delete", "clone", "empty set"]), PLACES),
    st.tuples(st.sampled_from(["set", "set storage", "data", "swap", "out"]), PLACES, PLACES),
)
counts = {"steps": 0, "programs": 0}


def step(tensors: list[torch.Tensor], device: str, doing: tuple[Any, ...]) -> None:
    """Do one step of a program with the tensors of one device."""
    name, *given = doing
    if name in ("empty", "zeros"):
        tensors.append(getattr(torch, name)(given[0], device=device))
        return
    if not tensors:
        return
    one = tensors[given[0] % len(tensors)]
    other = tensors[given[1] % len(tensors)] if len(given) > 1 else one
    storage = one.untyped_storage()
    whole = storage.nbytes() >= (one.storage_offset() + one.numel()) * one.element_size()
    match name:
        case "resize storage":
            storage.resize_(4 * given[1])
        case "resize typed":
            one._typed_storage()._resize_(given[1])
        case "resize":
            one.resize_(given[1])
        case "view" if whole:
            tensors.append(one[one.numel() // 3 :])
        case "detach" if whole:
            tensors.append(one.detach())
        case "delete":
            del tensors[given[0] % len(tensors)]
        case "clone" if whole:
            tensors.append(one.clone())
        case "empty set":
            one.set_()
        case "set":
            one.set_(other)
        case "set storage":
            one.set_(other.untyped_storage(), 0, (other.untyped_storage().nbytes() // 4,))
        case "data":
            one.data = other
        case "swap":
            one.data, other.data = other.data, one.data
        case "out" if whole and one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
            other.resize_(0)
            torch.neg(one, out=other)


def held(tensors: list[torch.Tensor]) -> int:
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in storages.values())


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=4, max_size=25))
def follows(program: list[tuple[Any, ...]]) -> None:
    here: list[torch.Tensor] = []
    there: list[torch.Tensor] = []
    before = torch.cuda.memory_allocated()  # after a failure, what that still holds
    counts["programs"] += 1
    for doing in program:
        step(here, "cpu", doing)
        step(there, "cuda", doing)
        counts["steps"] += 1
        assert torch.cuda.memory_allocated() - before == held(here), (
            doing,
            [one.untyped_storage().nbytes() for one in here],
        )


def refused() -> tuple[str, list[int]]:
    """What a storage says that is to be larger than the device, and its size and all memory afterwards."""
    storage = torch.zeros(256, device="cuda").untyped_storage()
    try:
        storage.resize_(2**31)
    except torch.OutOfMemoryError as error:
        return str(error), [storage.nbytes(), torch.cuda.memory_allocated()]
    raise AssertionError("it has room for everything")


with dryfit.virtual_gpu("1GiB"):
    follows()
    error, after = refused()
    print(json.dumps({**counts, "error": error, "after": after}))
