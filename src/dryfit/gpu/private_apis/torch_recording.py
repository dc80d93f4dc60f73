"""Private names of torch that recording a step's memory needs: use counts, and autograd's position."""

from collections.abc import Callable
from typing import Any, Final

import torch

from dryfit.gpu.private_apis.torch_modes import TorchDispatchMode
from dryfit.gpu.private_apis.torch_tensors import storage_key
from dryfit.settings.private_names import PrivateNames

_SEQUENCE_NUMBER: Final = "torch.autograd.graph.Node._sequence_nr"
NAMES: Final = (
    # knowing that autograd would add a gradient in place; until: autograd adds gradients of fake tensors in
    # place, as it does those of real ones
    "torch._C._storage_Use_Count",
    "torch.Tensor._use_count",
    # naming the module whose backward pass runs; until: torch.autograd.graph has the node that runs
    "torch._C._current_autograd_node",
    # finding the forward operator that a node of the backward pass undoes; until: torch.autograd.graph.Node has
    # it under a public name
    _SEQUENCE_NUMBER,
    "torch._C._autograd._get_sequence_nr",
    # telling what a backward pass calls (hooks) from what has called it; until: torch.autograd.graph has the node that
    # runs, with its hook
    "torch.autograd.graph._engine_run_backward",
    # putting another attention kernel in torch's place and taking it out again; until: torch.library.Library
    # can be taken back by a public method
    "torch.library._scoped_library",
)


RUNS_BACKWARD: Final = "_engine_run_backward"
"""Name of the function within which a backward pass runs."""


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of references to a tensor's storage and to the tensor."""
    counted: Any = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
    return counted(storage_key(tensor)), tensor._use_count()  # pyright: ignore[reportAttributeAccessIssue]


def sequence_number() -> int:
    """Return the number that autograd gives to the next operator of this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def running_node_number() -> int | None:
    """Return the number of the operator that this thread's backward pass undoes now; None outside of one."""
    node: Any = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


def scoped_library(namespace: str, kind: str) -> Any:
    """Return a library of operators whose registrations end with the block."""
    return torch.library._scoped_library(namespace, kind)


def gradient_sums(seen: Callable[[torch.Tensor], None]) -> None:
    """Run a small backward pass and show the first summand of each sum of gradients that autograd makes."""
    add = torch.ops.aten.add.Tensor

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is add and not torch.is_grad_enabled():
                seen(args[0])
            return func(*args, **(kwargs or {}))

    with Look():
        leaf = torch.ones(2, 2, requires_grad=True)
        twice = leaf * 2
        (twice.relu().exp().sum() + twice.sin().exp().sum()).backward()


def _misbehaves() -> str:
    with torch.autograd.set_multithreading_enabled(False):  # a device that is faked has no thread
        return _counts_misbehave() or _numbers_misbehave()


def _counts_misbehave() -> str:
    one = torch.ones(2)
    alone = use_counts(one)
    view = one.view(2, 1)
    if use_counts(one)[0] != alone[0] + 1 or use_counts(view)[0] != alone[0] + 1:
        return "torch._C._storage_Use_Count does not count the tensors that hold a storage"
    counts: list[tuple[int, int]] = []
    gradient_sums(lambda tensor: counts.append(use_counts(tensor)))
    if len(counts) != 1 or min(counts[0]) < 1:
        return f"one sum of gradients is seen as {len(counts)}, with use counts {counts}"
    return ""


def _numbers_misbehave() -> str:
    before = sequence_number()
    product = torch.ones(1, requires_grad=True) * 2
    after = sequence_number()
    undone: list[int | None] = []
    assert product.grad_fn is not None
    product.grad_fn.register_prehook(lambda _gradients: undone.append(running_node_number()))
    product.backward()
    if not before <= product.grad_fn._sequence_nr() < after or undone != [before]:
        return f"operator {before} of autograd is undone by a node with the number {undone}"
    if running_node_number() is not None:
        return "torch._C._current_autograd_node gives a node outside of a backward pass"
    return ""


RECORDING: Final = PrivateNames("torch", NAMES, _misbehaves, since={_SEQUENCE_NUMBER: (2, 11)})
"""Nodes have their number in each version; that their class declares it is new."""
