"""Optimizers and schedules of a trial, on the device or with their state in host memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, Final, cast, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import PreTrainedModel, get_scheduler
from transformers.optimization import Adafactor

from dryfit.gpu.offline_import import import_offline
from dryfit.settings.choices import Precision
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.execution import ExecutionPlan, ExecutionSettings
from dryfit.settings.memory_terms import DeviceKind, OptimizerImpl
from dryfit.settings.tables import OptimSettings, SchedSettings, TrialSettings
from dryfit.tasks.heads import encoder_parts

# Optional extras of training, imported when a study asks for them.


def pytorch_optimizer() -> ModuleType:
    """The library with Lion.

    Raises:
        MachineError: It is not installed.
    """
    return _extra("pytorch_optimizer", used_by='optim.name = "lion"', needs="pytorch-optimizer >= 4.1", extra="lion")


def bitsandbytes() -> ModuleType:
    """The library with 8-bit and paged AdamW.

    Raises:
        MachineError: It is not installed.
    """
    return _extra(
        "bitsandbytes", used_by='optim.name = "adamw8bit", or a paged one', needs="bitsandbytes >= 0.50", extra="8bit"
    )


def _extra(module: str, *, used_by: str, needs: str, extra: str) -> ModuleType:
    try:
        return import_offline(module)
    except ModuleNotFoundError as error:
        raise MachineError(
            f"preparing {used_by}",
            f"{error.name} is not installed",
            allowed=needs,
            hint=f"pip install 'dryfit[{extra}]'",
        ) from error


# Optimizer state in host memory: the optimizer runs on the CPU, over copies of the weights that stay there.
#
# Gradients are copied to the host when the optimizer steps, after accumulation, unscaling and clipping. (torchao's
# ``CPUOffloadOptimizer`` copies them while they are accumulated, so that neither clipping nor a loss scaler reaches
# them; FSDP's ``CPUOffloadPolicy`` moves the weights too.)


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


# Stand-ins for bitsandbytes' optimizers: they make the same state and learn nothing. A plan may propose one of them
# where the library is not installed.


# bitsandbytes 0.50: Optimizer2State.init_state.
_BLOCK_ELEMENTS = 256
_LEAST_8BIT_ELEMENTS = 4096
# bitsandbytes 0.50: Optimizer8bit.get_state_buffer.
_LEAST_PAGED_ELEMENTS = 100_000

State = dict[str, torch.Tensor]
StateOf = Callable[[nn.Parameter], State]


@final
class ModelledOptimizer(Optimizer):
    """Makes the state of another optimizer at its first step; steps take no other memory.

    Args:
        groups: Parameter groups with their ``lr``.
        state_of: Makes the state of one parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], state_of: StateOf) -> None:
        super().__init__(groups, defaults={})
        self._state_of = state_of

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here passes a closure
        """Make missing state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self._state_of(parameter)


def adamw8bit_state(parameter: nn.Parameter) -> State:
    """Return the state of bitsandbytes' AdamW8bit: two moments of a byte an element, a scale for each block of 256.

    Small tensors keep fp32 moments. The two code maps (1 KiB each, once a device) are not modelled.
    """
    if parameter.numel() < _LEAST_8BIT_ELEMENTS:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    blocks = -(-parameter.numel() // _BLOCK_ELEMENTS)
    moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    scales = {
        name: torch.zeros((blocks,), dtype=torch.float32, device=parameter.device) for name in ("absmax1", "absmax2")
    }
    return moments | scales


def paged_state(parameter: nn.Parameter, *, bits: int) -> State:
    """Return the state of bitsandbytes' paged AdamW: moments of large tensors in host memory, the rest on the device.

    Args:
        parameter: Whose state it is.
        bits: Of a moment, 32 or 8.
    """
    state = adamw8bit_state(parameter)
    if bits == 32:
        state = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    if parameter.numel() < _LEAST_PAGED_ELEMENTS:
        return state
    # What is paged is as large on the device while it is worked on, but CUDA takes it back: it counts as host memory.
    on_host = {name: torch.zeros(parameter.shape, dtype=state[name].dtype) for name in ("state1", "state2")}
    return state | on_host


# Parameter groups, optimizers and schedules of a trial.
#
# Of bitsandbytes' paged AdamW, CUDA moves the state between host and device as it is needed, also after a resumption.


_PAGED = ("state1", "state2")


@cache
def paged_adamw(bits: int) -> Any:
    """Return the class of the optimizer.

    Args:
        bits: Of a moment, 32 or 8.

    Raises:
        MachineError: The library is not installed.
    """
    library = bitsandbytes().optim
    parent: Any = library.PagedAdamW8bit if bits == 8 else library.PagedAdamW32bit

    class PagedAdamW(parent):
        """The library's own, but that its moments are paged again when a checkpoint is read."""

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            """Take over a state; bitsandbytes 0.50 alone would leave all of it on the device."""
            super().load_state_dict(state_dict, move_to_device=False)
            for parameter, state in self.state.items():
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    if name in _PAGED:
                        state[name] = self.get_state_buffer(parameter, dtype=value.dtype).copy_(value)
                    elif move_to_device:
                        state[name] = value.to(parameter.device)

    return PagedAdamW


_TORCH_HAS = (OptimizerImpl.FUSED, OptimizerImpl.FOREACH, OptimizerImpl.PLAIN)
IMPLEMENTATIONS: dict[str, tuple[OptimizerImpl, ...]] = {
    "adamw": _TORCH_HAS,
    "sgd": _TORCH_HAS,
    "lion": (OptimizerImpl.FOREACH, OptimizerImpl.PLAIN),
    "radam": (OptimizerImpl.FOREACH, OptimizerImpl.PLAIN),
    "nadam": (OptimizerImpl.FOREACH, OptimizerImpl.PLAIN),
    "adafactor": (OptimizerImpl.PLAIN,),
    "adamw8bit": (OptimizerImpl.FUSED,),
    "paged_adamw": (OptimizerImpl.FUSED,),
    "paged_adamw8bit": (OptimizerImpl.FUSED,),
}
"""What each optimizer has, the fastest first."""
_PAGED_BITS: Final = {"paged_adamw": 32, "paged_adamw8bit": 8}
"""Bits of a moment of those whose state CUDA moves between host and device."""
_NOT_SHARDED: Final = (("sgd", OptimizerImpl.FUSED),)
"""torch 2.13: aten::_fused_sgd_ has no sharding strategy for DTensors."""

_RECTIFIED_AFTER_STEPS: Final = 5
"""Of RAdam: Liu et al. 2020, arXiv:1908.03265, algorithm 2, for any ``beta2`` from 0.9 on."""


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """The part of an execution plan that an optimizer reads.

    Attributes:
        impl: How its arithmetic is done.
        offload: Whether its state lies in host memory.
        sharded: Whether parameters are FSDP shards (torch's DTensor).
        modelled: For a few steps without data: stand-ins for bitsandbytes' optimizers, which take their memory and
            compute nothing, and what an optimizer takes from a later step on in the second already.
    """

    impl: OptimizerImpl = OptimizerImpl.AUTO
    offload: bool = False
    sharded: bool = False
    modelled: bool = False


def optimizer_plan(plan: ExecutionPlan) -> OptimizerPlan:
    """Return the part of a trial's plan that an optimizer reads."""
    return OptimizerPlan(impl=plan.optimizer_impl, offload=plan.offload_optimizer, sharded=plan.dp > 1)


_ELEMENT_BY_ELEMENT: Final = ("adamw", "sgd", "lion", "radam", "nadam")
"""Optimizers that treat each number of a parameter by itself, so that a slice can be trained without the others."""


def moments_of(optim: OptimSettings) -> int:
    """Return how many tensors of a parameter's shape an optimizer keeps, if :func:`check_sharded` allows it."""
    if optim.name == "sgd":
        return int(optim.beta1 > 0)
    return 1 if optim.name == "lion" else 2


def check_sharded(settings: TrialSettings, plan: ExecutionPlan | ExecutionSettings) -> None:
    """Refuse to shard a trial over processes where that would change what it learns.

    Raises:
        ConfigError: Its optimizer looks at whole parameters, its state lies in host memory, or a loss scaler would
            decide on each rank by itself.
    """
    if plan.processes == 1:
        return
    doing = f"training a trial on {plan.processes} processes"
    if settings.optim.name not in _ELEMENT_BY_ELEMENT:
        problem = f"{settings.optim.name} computes with whole parameters, and each process has a part"
        raise ConfigError(doing, problem, allowed=", ".join(_ELEMENT_BY_ELEMENT), hint="set optim.name to one of them")
    if plan.offload_optimizer:
        raise ConfigError(doing, "execution.offload_optimizer is true", allowed="false: each process has a part of it")
    if settings.train.precision is Precision.FP16:
        problem = 'train.precision is "fp16", whose loss scale each process would choose by itself'
        raise ConfigError(doing, problem, allowed="fp32 or bf16")


def parameter_groups(model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
    """Return the trainable parameters by learning rate and weight decay.

    What is not pretrained, the head, has ``lr * head_lr_factor``; with depth ``n``, layer ``i`` (from 1) has
    ``lr * layer_decay**(n + 1 - i)`` and the embeddings ``lr * layer_decay**(n + 1)`` (ELECTRA's rule, Clark et al.
    2020, without its head exponent).
    Norms and biases do not decay.

    Raises:
        ConfigError: Layers are to learn at different rates in a model that is no encoder with a head.
    """
    paths: tuple[str, ...] = getattr(model, "encoder_paths", ())
    if optim.layer_decay < 1 and not paths:
        raise ConfigError(f"setting optim.layer_decay = {optim.layer_decay}", "the model has no head", allowed="1")
    parts = {
        path: encoder_parts(cast("PreTrainedModel", model.get_submodule(path)))
        for path in (paths if optim.layer_decay < 1 else ())
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path = next((path for path in paths if name.startswith(f"{path}.")), None)
        if path is not None and path in parts:
            factor = optim.layer_decay ** (parts[path].depth + 1 - parts[path].depth_of[name.removeprefix(f"{path}.")])
        else:
            factor = optim.head_lr_factor if paths and path is None else 1.0
        decays = parameter.ndim > 1 and "bias" not in name and "norm" not in name.lower()
        groups.setdefault((factor, optim.weight_decay if decays else 0.0), []).append(parameter)
    return [
        {"params": params, "lr": optim.lr * factor, "weight_decay": decay} for (factor, decay), params in groups.items()
    ]


def make_optimizer(
    model: nn.Module, optim: OptimSettings, plan: OptimizerPlan = OptimizerPlan()
) -> torch.optim.Optimizer:
    """Return the optimizer of a trial, over :func:`parameter_groups`.

    Args:
        model: On its device, which may be a pretended one.
        optim: The ``[optim]`` table.
        plan: How its work is done.

    Raises:
        ConfigError: It is not implemented so, or its state cannot lie in host memory.
        MachineError: Its library is not installed.
    """
    groups = parameter_groups(model, optim)
    device = next(model.parameters()).device.type
    check_optimizer(optim, plan, DeviceKind(device))
    state_of = _modelled_state(optim) if plan.modelled else None
    impl = _chosen(optim.name, plan.impl, device, sharded=plan.sharded)
    if state_of is not None:
        return ModelledOptimizer(groups, state_of)
    if plan.offload:
        return HostOptimizer(groups, lambda host_groups: _optimizer(host_groups, optim, plan.impl, "cpu"))
    if plan.modelled and optim.name == "radam":
        return _rectified(groups, optim, impl, device)
    return _optimizer(groups, optim, impl, device)


def check_optimizer(optim: OptimSettings, plan: OptimizerPlan, device: DeviceKind) -> None:
    """Refuse an implementation that an optimizer does not have.

    Raises:
        ConfigError: It is not implemented so, or its state cannot lie in host memory, or not be paged on this device.
    """
    if has_pages(optim) and device is not DeviceKind.CUDA:
        raise ConfigError(
            f'checking optim.name = "{optim.name}"',
            f"its state is memory that CUDA moves between host and device, and the device is {device}",
            allowed="a CUDA device, or adamw, adamw8bit ...",
        )
    has = _has(optim.name, sharded=plan.sharded)
    if plan.impl is not OptimizerImpl.AUTO and plan.impl not in has:
        raise ConfigError(
            f'checking execution.optimizer_impl = "{plan.impl}"',
            f"{optim.name} has no such implementation" + (" for sharded parameters" if plan.sharded else ""),
            allowed=" or ".join(f'"{known}"' for known in (OptimizerImpl.AUTO, *has)),
        )
    reason = cannot_offload(optim, device) if plan.offload else None
    if reason is not None:
        raise ConfigError(
            "checking execution.offload_optimizer = true",
            reason,
            allowed="true with a CUDA device and any optimizer but adamw8bit and the paged ones",
            hint="leave it unset: it is then chosen where it helps",
        )


def cannot_offload(optim: OptimSettings, device: DeviceKind, *, processes: int = 1) -> str | None:
    """Return why an optimizer's state cannot lie in host memory; None where it can."""
    if processes > 1:
        return "each process of a trial has a part of it, on its own device"
    if device is not DeviceKind.CUDA:
        return "on the CPU it lies in host memory already"
    if optim.name == "adamw8bit":
        return "adamw8bit keeps its state in 8 bits on the device"
    return f"{optim.name} moves its state to host memory by itself" if has_pages(optim) else None


def has_pages(optim: OptimSettings) -> bool:
    """Whether an optimizer's state is in memory that CUDA moves between host and device as it is needed."""
    return optim.name in _PAGED_BITS


def _optimizer(groups: list[dict[str, Any]], optim: OptimSettings, impl: OptimizerImpl, device: str) -> Optimizer:
    optimizer = _made(groups, optim, impl, device)
    ways = {name: optimizer.defaults[name] for name in ("fused", "foreach") if name in optimizer.defaults}
    if ways:
        optimizer.register_load_state_dict_pre_hook(partial(_in_own_way, ways))
    return optimizer


def _in_own_way(ways: dict[str, Any], _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Go on from a saved state as this optimizer works: torch would take over how the one that saved it did.

    Given the groups' way, torch puts the counter of steps where that wants it: on the device for ``fused``.
    """
    return {**state, "param_groups": [{**group, **ways} for group in state["param_groups"]]}


def _made(groups: list[dict[str, Any]], optim: OptimSettings, impl: OptimizerImpl, device: str) -> Optimizer:
    betas = (optim.beta1, optim.beta2)
    impl = _chosen(optim.name, impl, device)
    # Both flags are always given: left out, torch decides by the tensors' type, and pretended tensors are of another.
    flags = {"fused": impl is OptimizerImpl.FUSED, "foreach": impl is OptimizerImpl.FOREACH}
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, **flags)
        case "radam" | "nadam":
            # Decoupled as AdamW's: one value of weight_decay then means the same for all of them.
            adaptive = torch.optim.RAdam if optim.name == "radam" else torch.optim.NAdam
            foreach = impl is OptimizerImpl.FOREACH
            return adaptive(
                groups, lr=optim.lr, betas=betas, eps=optim.eps, decoupled_weight_decay=True, foreach=foreach
            )
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1, **flags)
        case "adafactor":
            # With its own step sizes off, lr is what the study says (Shazeer and Stern 2018, section 8, the rest).
            return Adafactor(groups, lr=optim.lr, scale_parameter=False, relative_step=False, warmup_init=False)
        case "lion":
            return pytorch_optimizer().Lion(groups, lr=optim.lr, betas=betas, foreach=impl is OptimizerImpl.FOREACH)
        case "adamw8bit":
            return bitsandbytes().optim.AdamW8bit(groups, lr=optim.lr, betas=betas, eps=optim.eps)
        case "paged_adamw" | "paged_adamw8bit":
            return paged_adamw(_PAGED_BITS[optim.name])(groups, lr=optim.lr, betas=betas, eps=optim.eps)


def _rectified(groups: list[dict[str, Any]], optim: OptimSettings, impl: OptimizerImpl, device: str) -> Optimizer:
    """RAdam with what it takes from its sixth step on, in the second already; before, it divides by no second moment.

    With a small ``beta2`` it never does: the one that does is taken for all.
    """
    optimizer = _optimizer(groups, optim.model_copy(update={"beta2": 0.999}), impl, device)

    def jump(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        for state in stepped.state.values():
            state["step"] += _RECTIFIED_AFTER_STEPS

    optimizer.register_step_post_hook(jump)
    return optimizer


def _modelled_state(optim: OptimSettings) -> StateOf | None:
    """The state of an optimizer of bitsandbytes; None for others."""
    if optim.name == "adamw8bit":
        return adamw8bit_state
    return partial(paged_state, bits=_PAGED_BITS[optim.name]) if has_pages(optim) else None


def _chosen(name: str, impl: OptimizerImpl, device: str, *, sharded: bool = False) -> OptimizerImpl:
    """Return what ``auto`` stands for: the fastest implementation on this device."""
    if impl is not OptimizerImpl.AUTO:
        return impl
    has = _has(name, sharded=sharded)
    if has[0] is OptimizerImpl.FUSED and device in ("cpu", "cuda"):
        return OptimizerImpl.FUSED
    # On the CPU lists of tensors save no kernel launches, and take more memory.
    return OptimizerImpl.FOREACH if OptimizerImpl.FOREACH in has and device == "cuda" else OptimizerImpl.PLAIN


def _has(name: str, *, sharded: bool) -> tuple[OptimizerImpl, ...]:
    return tuple(impl for impl in IMPLEMENTATIONS[name] if not sharded or (name, impl) not in _NOT_SHARDED)


def implementations(name: str, device: DeviceKind) -> tuple[OptimizerImpl, ...]:
    """Return an optimizer's implementations on a device; what ``auto`` stands for comes first."""
    first = _chosen(name, OptimizerImpl.AUTO, device)
    return (first, *(other for other in IMPLEMENTATIONS[name] if other is not first))


def make_schedule(optimizer: torch.optim.Optimizer, sched: SchedSettings, total_steps: int) -> LRScheduler:
    """Return the schedule of the learning rate over a trial's steps; each group keeps its share of it.

    ``one_cycle`` leaves the optimizer's momentum as the study has it.
    """
    if sched.name == "one_cycle":
        return _one_cycle(optimizer, sched, total_steps)
    name, specific = _IN_TRANSFORMERS[sched.name]
    return get_scheduler(
        name,
        optimizer,
        # At least one step is past the warm-up: else the only step of a short trial would learn at a rate of zero, and
        # transformers 5.23 divides by zero in its polynomial.
        num_warmup_steps=min(math.ceil(sched.warmup_ratio * total_steps), total_steps - 1),
        num_training_steps=total_steps,
        scheduler_specific_kwargs=specific(sched),
    )


_IN_TRANSFORMERS: Final[dict[str, tuple[str, Callable[[SchedSettings], dict[str, float]]]]] = {
    "linear": ("linear", lambda _: {}),
    "cosine": ("cosine", lambda _: {}),
    "cosine_restarts": ("cosine_with_restarts", lambda sched: {"num_cycles": sched.cycles}),
    "polynomial": ("polynomial", lambda sched: {"power": sched.power, "lr_end": 0.0}),
    "constant": ("constant_with_warmup", lambda _: {}),
}


def _one_cycle(optimizer: torch.optim.Optimizer, sched: SchedSettings, total_steps: int) -> LRScheduler:
    # torch 2.13 divides by zero where the warm-up is just one step: it then starts at the peak, as without one.
    warms_up = sched.warmup_ratio * total_steps > 1
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=total_steps,
        pct_start=sched.warmup_ratio if warms_up else 0.0,
        cycle_momentum=False,
    )
