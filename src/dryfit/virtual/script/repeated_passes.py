"""Leave out forward and backward passes that repeat those before them in their step: loops that accumulate by hand.

A step over 128 micro-batches of one shape makes its gradients in the first, and finds them made in all others. Where
passes of a model with the same shapes began with the same memory, so does the next one. Its outputs are made, and
beside them as much as the model keeps for its backward pass: what the script does then finds the device as full as
before. When a gradient comes back to the outputs that is freed, and nothing is computed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from dryfit.meta.private_apis.torch_modes import tree_flatten, tree_iter, tree_unflatten
from dryfit.meta.private_apis.torch_modules import hook_tables
from dryfit.meta.private_apis.torch_tensors import storage_key
from dryfit.virtual.script.loaders import Stock
from dryfit.virtual.script.made_outputs import Form, anew, can_be_made, form_of, is_cache, shapes_of
from dryfit.virtual.work import WorkCounter

_SAME = 3
"""Passes with the same shapes, the one that begins among them, that must have begun with the same memory."""
_KEPT_BYTES = 4096
"""What a script may keep of each pass, such as its loss."""


@dataclass(slots=True)
class _Passes:
    """Passes of a model with the same shapes in one optimizer step.

    Attributes:
        begun_at: Allocated bytes as each began.
        outputs: Leaves of the last one's output; None where it cannot be made anew.
        held: Sizes of what the last one kept besides its outputs.
        is_even: Whether the one before it kept the same: where values decide how much, two are seldom alike.
        forward: What its forward pass computed.
        until_gradient: What was computed until a gradient came back to it.
        cost: What the last whole one computed.
    """

    begun_at: list[int] = field(default_factory=list[int])
    outputs: list[Any] | None = None
    form: Any = None
    held: list[int] = field(default_factory=list[int])
    is_even: bool = False
    forward: Counter[Any] = field(default_factory=Counter[Any])
    until_gradient: Counter[Any] | None = None
    cost: Counter[Any] | None = None


class RepeatedPasses:
    """Knows with what each model was called, with gradients, since the last optimizer step.

    Args:
        work: Counts what is left out too, as much as the pass that it repeats.
        stock: Says what is allocated on the device.
    """

    def __init__(self, work: WorkCounter, stock: Callable[[], Stock]) -> None:
        self.left_out = 0
        """How many were not run."""
        self._work = work
        self._stock = stock
        self._seen: WeakKeyDictionary[nn.Module, dict[Any, _Passes]] = WeakKeyDictionary()
        self._last: _Passes | None = None

    def step_ended(self) -> None:
        """Begin anew: there is more beside the model now."""
        self._seen.clear()
        self._last = None

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Call a module with gradients; return its output, and whether it was made."""
        last, self._last = self._last, None
        if last is not None and last.until_gradient is not None:  # its backward pass has ended
            last.cost = last.forward + (self._work.so_far() - last.until_gradient)
        key = shapes_of((args, kwargs)) if _may_repeat(module, (args, kwargs)) else None
        if key is None:
            return original(module, *args, **kwargs), False
        passes = self._seen.setdefault(module, {}).setdefault(key, _Passes())
        stock = self._stock()
        begun_at = [*passes.begun_at[1 - _SAME :], stock.allocated_bytes]
        is_same = len(begun_at) == _SAME and max(begun_at) - min(begun_at) <= _KEPT_BYTES
        if is_same and passes.is_even and passes.cost is not None and passes.outputs is not None:
            self.left_out += 1
            self._work.add(passes.cost)
            return _made(module, passes.outputs, passes.form, passes.held), True
        before = self._work.so_far()
        out = original(module, *args, **kwargs)
        passes.begun_at.append(stock.allocated_bytes)
        passes.forward = self._work.so_far() - before
        passes.until_gradient = passes.cost = None
        self._keep(passes, module, out, stock.event)
        return out, False

    def _keep(self, passes: _Passes, module: nn.Module, out: Any, event: int) -> None:
        """Keep what makes an output anew, and see when a gradient comes back to it."""
        leaves, passes.form = tree_flatten(out, is_leaf=is_cache)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        learning = [tensor for tensor in tensors if tensor.grad_fn is not None]
        passes.outputs = None
        if not learning or not can_be_made(leaves) or _keeps_graph(module):
            return
        if len({storage_key(tensor) for tensor in tensors}) < len(tensors):  # views of each other
            return
        passes.outputs = list(map(form_of, leaves))
        held = list(self._stock().held_since(event))
        for tensor in tensors:
            if (size := tensor.untyped_storage().nbytes()) in held:
                held.remove(size)
        passes.is_even, passes.held = held == passes.held, held

        def comes(_: torch.Tensor) -> None:
            if passes.until_gradient is None:
                passes.until_gradient = self._work.so_far()

        for tensor in learning:
            tensor.register_hook(comes)
        self._last = passes


class _Made(torch.autograd.Function):
    """Outputs of a model that hold the memory of its graph until a gradient comes, and send none on."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, forms: Sequence[Form], held: Iterable[int]) -> Any:
        ctx.held = [torch.empty(size, dtype=torch.uint8, device=parameter.device) for size in held]
        ctx.set_materialize_grads(False)
        made = tuple(map(anew, forms))
        ctx.mark_non_differentiable(*(tensor for tensor, form in zip(made, forms, strict=True) if not form.learns))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.held.clear()
        return None, None, None


def _made(module: nn.Module, outputs: Sequence[Any], form: Any, held: Sequence[int]) -> Any:
    parameter = next(one for one in module.parameters() if one.requires_grad)
    forms = [leaf for leaf in outputs if isinstance(leaf, Form)]
    tensors = iter(_Made.apply(parameter, forms, held))
    return tree_unflatten([next(tensors) if isinstance(leaf, Form) else leaf for leaf in outputs], form)


def _may_repeat(module: nn.Module, given: Any) -> bool:
    """Whether a call of a module may be left out where one before it had the same shapes."""
    if not module.training or not any(one.requires_grad for one in module.parameters()) or _sends_gradients(module):
        return False
    if any(isinstance(leaf, torch.Tensor) and (leaf.requires_grad or leaf.is_cpu) for leaf in tree_iter(given)):
        return False  # what made it has a backward pass of its own; values on the host may decide sizes
    return not any(table for part in module.modules() for table, _ in hook_tables(part))  # they may look inside


def _sends_gradients(module: nn.Module) -> bool:
    """Whether the backward pass of a call exchanges gradients with other ranks."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    return not isinstance(module, DistributedDataParallel) or module.require_backward_grad_sync


def _keeps_graph(module: nn.Module) -> bool:
    """Whether a script may find tensors of the pass in the module, such as losses of its parts."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        for part in module.modules()
        for name, value in vars(part).items()
        if not name.startswith("_")
        for leaf in tree_iter(value)
    )
