"""Calls of a model that repeat the calls before them: their outputs are made, not computed."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from dryfit.gpu.loaders import Stock
from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_modes import tree_flatten, tree_iter, tree_unflatten
from dryfit.gpu.private_apis.torch_modules import hook_tables
from dryfit.gpu.private_apis.torch_tensors import storage_key
from dryfit.gpu.script_recorder import runs_in
from dryfit.gpu.work import WorkCounter

# Outputs of a model that are made instead of computed: which can be, and by what of its arguments they are decided.


_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, strides, type and device of a tensor, and whether it has a gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    learns: bool


def shapes_of(given: Any) -> tuple[Any, ...] | None:
    """Return what of a call's arguments decides its memory; None where it takes more than tensors and constants."""
    leaves, form = tree_flatten(given, is_leaf=is_cache)
    if not all(
        isinstance(leaf, _SIMPLE) or type(leaf) in (torch.Tensor, nn.Parameter) or _is_on_device(leaf)
        for leaf in leaves
    ):
        return None
    return (*map(form_of, leaves), form)


def is_cache(one: Any) -> bool:
    """Whether this is a cache of keys and values, which a call changes, though torch can take it apart."""
    return hasattr(one, "get_seq_length")


def _is_on_device(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor on the virtual GPU: what lies on the host may have values that count."""
    return isinstance(leaf, FakeTensor) and leaf.device.type == "cuda" and leaf.layout is torch.strided


def can_be_made(leaves: Sequence[Any]) -> bool:
    """Whether an output of these leaves can be made: they are constants, and tensors on the device."""
    return all(isinstance(leaf, _SIMPLE) or _is_on_device(leaf) for leaf in leaves)


def form_of(leaf: Any) -> Any:
    """Return what a tensor is made anew from; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return Form(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad)


def anew(leaf: Any) -> Any:
    """Return a tensor of a form; anything else as it is."""
    if not isinstance(leaf, Form):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=leaf.device)


# Leave out forward and backward passes that repeat those before them in their step: loops that accumulate by hand.
#
# A step over 128 micro-batches of one shape makes its gradients in the first, and finds them made in all others.
# Where passes of a model with the same shapes began with the same memory, so does the next one. Its outputs are made,
# and beside them as much as the model keeps for its backward pass: what the script does then finds the device as full
# as before. When a gradient comes back to the outputs that is freed, and nothing is computed.


_SAME = 3
"""Passes with the same shapes, the one that begins among them, that must have begun with the same memory."""
_KEPT_BYTES = 4096
"""What a script may keep of each pass, such as its loss."""
_ASKS_FOR_GRADIENTS = frozenset({"grad"})


@dataclass(slots=True)
class _Passes:
    """Passes of a model with the same shapes in one optimizer step.

    Attributes:
        begun_at: Allocated bytes as each began.
        outputs: Leaves of the last one's output; None where it cannot be made anew.
        held: Size and label of what the last one kept besides its outputs.
        is_even: Whether the one before it kept the same: where values decide how much, two are seldom alike.
        forward: What its forward pass computed.
        until_gradient: What was computed until a gradient came back to it.
        cost: What the last whole one computed.
    """

    begun_at: list[int] = field(default_factory=list[int])
    outputs: list[Any] | None = None
    form: Any = None
    held: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
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
        is_same = len(begun_at) == _SAME and max(begun_at) - min(begun_at) <= _KEPT_BYTES and _adds_up(module)
        if is_same and passes.is_even and passes.cost is not None and passes.outputs is not None:
            self.left_out += 1
            self._work.add(passes.cost)
            return _made(module, passes, passes.outputs, stock), True
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
            size = tensor.untyped_storage().nbytes()
            if own := next((one for one in held if one[0] == size), None):
                held.remove(own)
        passes.is_even, passes.held = [size for size, _ in held] == [size for size, _ in passes.held], held

        def comes(_: torch.Tensor) -> None:
            if runs_in(_ASKS_FOR_GRADIENTS, "torch/autograd/__init__.py"):
                passes.outputs = None  # they are not added up in the parameters, but given to the script
            if passes.until_gradient is None:
                passes.until_gradient = self._work.so_far()

        for tensor in learning:
            tensor.register_hook(comes)
        self._last = passes


class _Made(torch.autograd.Function):
    """Outputs of a model that hold the memory of its graph until a gradient comes, and send none on."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, forms: Sequence[Form], passes: _Passes, stock: Stock) -> Any:
        ctx.held = [torch.empty(size, dtype=torch.uint8, device=parameter.device) for size, _ in passes.held]
        stock.label_since(stock.event, [label for _, label in passes.held])
        ctx.set_materialize_grads(False)
        made = tuple(map(anew, forms))
        ctx.mark_non_differentiable(*(tensor for tensor, form in zip(made, forms, strict=True) if not form.learns))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.held.clear()
        return None, None, None, None


def _made(module: nn.Module, passes: _Passes, outputs: Sequence[Any], stock: Stock) -> Any:
    parameter = next(one for one in module.parameters() if one.requires_grad)
    forms = [leaf for leaf in outputs if isinstance(leaf, Form)]
    tensors = iter(_Made.apply(parameter, forms, passes, stock))
    return tree_unflatten([next(tensors) if isinstance(leaf, Form) else leaf for leaf in outputs], passes.form)


def _may_repeat(module: nn.Module, given: Any) -> bool:
    """Whether a call of a module may be left out where one before it had the same shapes."""
    if not module.training or not any(one.requires_grad for one in module.parameters()) or _sends_gradients(module):
        return False
    if any(isinstance(leaf, torch.Tensor) and (leaf.requires_grad or leaf.is_cpu) for leaf in tree_iter(given)):
        return False  # what made it has a backward pass of its own; values on the host may decide sizes
    return not any(table for part in module.modules() for table, _ in hook_tables(part))  # they may look inside


def _adds_up(module: nn.Module) -> bool:
    """Whether gradients of passes before stay where the next one adds to them."""
    return any(one.grad is not None for one in module.parameters())


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


# Leave out calls of a model without gradients that repeat the calls before them: loops of evaluation and sampling.
#
# A loader's evaluation is cut by its batches. A loop of the script's own (200 batches drawn by hand, 1 000 steps of
# diffusion) cannot be cut: from some call on with the same shapes its outputs are made, and nothing else.


RUN_BEFORE = 8
"""Calls with the same shapes, between two optimizer steps, that run as they are."""


@dataclass(slots=True)
class _Seen:
    """Calls of a module with the same shapes.

    Attributes:
        outputs: Leaves of the last one's output; None where it cannot be made anew.
        cost: What the last one computed.
    """

    times: int = 0
    outputs: list[Any] | None = None
    form: Any = None
    cost: Counter[Any] | None = None


class RepeatedCalls:
    """Knows which models were called without gradients since the last optimizer step, and with what.

    Args:
        work: Counts what is left out too, as much as the call that it repeats.
        steps: Says how many steps of any optimizer have ended.
        on_left_out: Called with a module whose call is left out.
        passes: Knows calls with gradients.
    """

    def __init__(
        self,
        work: WorkCounter,
        steps: Callable[[], int],
        on_left_out: Callable[[nn.Module], None],
        passes: RepeatedPasses,
    ) -> None:
        self.left_out = 0
        """How many calls were not run."""
        self._work = work
        self._steps = steps
        self._on_left_out = on_left_out
        self._passes = passes
        self._running = threading.local()
        self._seen: WeakKeyDictionary[nn.Module, dict[Any, _Seen]] = WeakKeyDictionary()
        self._seen_at = 0

    def install(self) -> None:
        """Change the call of every module for good."""
        original = nn.Module.__call__

        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._running, "inside", False):
                return original(module, *args, **kwargs)
            self._running.inside = True
            try:
                if self._seen_at != self._steps():  # there is more beside the model now
                    self._seen.clear()
                    self._passes.step_ended()
                    self._seen_at = self._steps()
                if torch.is_grad_enabled():
                    out, is_made = self._passes.call(original, module, args, kwargs)
                    if is_made:
                        self._on_left_out(module)
                    return out
                return self._call(original, module, args, kwargs)
            finally:
                self._running.inside = False

        nn.Module.__call__ = call

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = shapes_of((args, kwargs))
        if key is None:
            return original(module, *args, **kwargs)
        seen = self._seen.setdefault(module, {}).setdefault(key, _Seen())
        if seen.times >= RUN_BEFORE and seen.outputs is not None and seen.cost is not None:
            self.left_out += 1
            self._work.add(seen.cost)
            self._on_left_out(module)
            return tree_unflatten([anew(leaf) for leaf in seen.outputs], seen.form)
        before = self._work.so_far()
        out = original(module, *args, **kwargs)
        seen.times += 1
        if seen.times == RUN_BEFORE:
            leaves, seen.form = tree_flatten(out, is_leaf=is_cache)
            seen.cost = self._work.so_far() - before
            if can_be_made(leaves):
                seen.outputs = list(map(form_of, leaves))
        return out
