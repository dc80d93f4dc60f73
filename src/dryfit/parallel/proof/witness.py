"""Record each module's output during one forward pass, and the module in which it failed."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dryfit.meta.construction.walk import floats_of


@dataclass(slots=True)
class Witness:
    """Records a model's modules during one pass.

    Attributes:
        outputs: Outputs of each module, in the order in which they ended; the first ones of a module that runs twice.
        inside: Modules that were entered and not left.
    """

    outputs: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def listen(self, module: nn.Module) -> None:
        """Start recording."""
        for path, part in module.named_modules():
            self._handles.append(part.register_forward_pre_hook(partial(self._enter, path)))
            self._handles.append(part.register_forward_hook(partial(self._leave, path)))

    def stop(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, path: str, _module: nn.Module, _args: Any) -> None:
        self.inside.append(path)

    def _leave(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self.inside.pop()
        self.outputs.setdefault(path, tuple(tensor.detach().clone() for tensor in floats_of(output)))
