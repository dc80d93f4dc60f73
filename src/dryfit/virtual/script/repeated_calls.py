"""Leave out calls of a model without gradients that repeat the calls before them: loops of evaluation and sampling.

A loader's evaluation is cut by its batches. A loop of the script's own (200 batches drawn by hand, 1 000 steps of
diffusion) cannot be cut: from some call on with the same shapes its outputs are made, and nothing else.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modes import tree_flatten, tree_unflatten
from dryfit.virtual.work import WorkCounter

RUN_BEFORE = 8
"""Calls with the same shapes, between two optimizer steps, that run as they are."""
_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


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
        steps: Says how many optimizer steps have ended.
        on_left_out: Called with a module whose call is left out.
    """

    def __init__(self, work: WorkCounter, steps: Callable[[], int], on_left_out: Callable[[nn.Module], None]) -> None:
        self.left_out = 0
        """How many calls were not run."""
        self._work = work
        self._steps = steps
        self._on_left_out = on_left_out
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
                if torch.is_grad_enabled():
                    return original(module, *args, **kwargs)
                return self._call(original, module, args, kwargs)
            finally:
                self._running.inside = False

        nn.Module.__call__ = call

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = _shapes((args, kwargs))
        if key is None:
            return original(module, *args, **kwargs)
        if self._seen_at != self._steps():  # there is more beside the model now
            self._seen.clear()
            self._seen_at = self._steps()
        seen = self._seen.setdefault(module, {}).setdefault(key, _Seen())
        if seen.times >= RUN_BEFORE and seen.outputs is not None and seen.cost is not None:
            self.left_out += 1
            self._work.add(seen.cost)
            self._on_left_out(module)
            return tree_unflatten([_anew(leaf) for leaf in seen.outputs], seen.form)
        before = self._work.so_far()
        out = original(module, *args, **kwargs)
        seen.times += 1
        if seen.times == RUN_BEFORE:
            leaves, seen.form = tree_flatten(out, is_leaf=_is_cache)
            seen.cost = self._work.so_far() - before
            if all(isinstance(leaf, _SIMPLE) or _is_on_device(leaf) for leaf in leaves):
                seen.outputs = [_form_of(leaf) for leaf in leaves]
        return out


@dataclass(frozen=True, slots=True)
class _Form:
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _shapes(given: Any) -> tuple[Any, ...] | None:
    """Return what of a call's arguments decides its memory; None where it takes more than tensors and constants."""
    leaves, form = tree_flatten(given, is_leaf=_is_cache)
    if not all(
        isinstance(leaf, _SIMPLE) or type(leaf) in (torch.Tensor, nn.Parameter) or _is_on_device(leaf)
        for leaf in leaves
    ):
        return None
    return (*map(_form_of, leaves), form)


def _is_cache(one: Any) -> bool:
    """Whether this is a cache of keys and values, which a call changes, though torch can take it apart."""
    return hasattr(one, "get_seq_length")


def _is_on_device(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor on the virtual GPU: what lies on the host may have values that count."""
    return isinstance(leaf, FakeTensor) and leaf.device.type == "cuda" and leaf.layout is torch.strided


def _form_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _Form(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device)


def _anew(leaf: Any) -> Any:
    if not isinstance(leaf, _Form):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=leaf.device)
