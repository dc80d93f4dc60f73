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

from dryfit.meta.private_apis.torch_modes import tree_flatten, tree_unflatten
from dryfit.virtual.script.made_outputs import anew, can_be_made, form_of, is_cache, shapes_of
from dryfit.virtual.script.repeated_passes import RepeatedPasses
from dryfit.virtual.work import WorkCounter

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
        steps: Says how many optimizer steps have ended.
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
