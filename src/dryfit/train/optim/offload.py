"""Optimizer state in host memory: the optimizer runs on the CPU, over copies of the weights that stay there.

Gradients are copied to the host when the optimizer steps, after accumulation, unscaling and clipping. (torchao's
``CPUOffloadOptimizer`` copies them while they are accumulated, so that neither clipping nor a loss scaler reaches them;
FSDP's ``CPUOffloadPolicy`` moves the weights too.)
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer

Groups = list[dict[str, Any]]


@final
class HostOptimizer(Optimizer):
    """An optimizer of device parameters that keeps its state, and the weights it updates, in host memory.

    To the loop, the clipping, the scheduler and the loss scaler it is one of the device parameters; its saved state is
    that of the optimizer on the host.

    Args:
        groups: Parameter groups with their ``lr``.
        make_inner: Makes the optimizer on the host from the same groups with the host's copies as parameters.
    """

    def __init__(self, groups: Groups, make_inner: Callable[[Groups], Optimizer]) -> None:
        super().__init__(groups, defaults={})
        pinned = any(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        self._pinned = pinned
        self._inner = make_inner(
            [
                {**group, "params": [self._on_host(parameter) for parameter in group["params"]]}
                for group in self.param_groups
            ]
        )
        self.defaults = self._inner.defaults  # schedules read the learning rate there
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
            pair
            for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True)
            for pair in zip(outer["params"], inner["params"], strict=True)
        ]
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here passes a closure
        """Fetch the gradients, update the host's weights, send them to the device."""
        for parameter, host in self._pairs:
            host.grad = None if parameter.grad is None else self._fetch(parameter.grad, host)
        self._wait()  # also for the copies of the last step, which read what the optimizer now changes
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]
        self._inner.step()
        for parameter, host in self._pairs:
            parameter.copy_(host, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer on the host; its tensors are there."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]
        return self._inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, and the device's weights as they are now."""
        self._inner.load_state_dict(state_dict)
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer["lr"] = inner["lr"]
        for parameter, host in self._pairs:
            host.copy_(parameter)

    def _on_host(self, parameter: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(parameter, device="cpu", pin_memory=self._pinned, requires_grad=False)
        return copy.copy_(parameter.detach())

    def _fetch(self, gradient: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        if host not in self._gradients:
            self._gradients[host] = torch.empty_like(host, pin_memory=self._pinned)
        return self._gradients[host].copy_(gradient, non_blocking=True)

    def _wait(self) -> None:
        for device in {parameter.device for parameter, _ in self._pairs if parameter.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
