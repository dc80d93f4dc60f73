"""DeepSpeed on a virtual GPU: its own Python code, with stand-ins for the operators that it compiles.

Optimizers of DeepSpeed keep their state in Python (``ops/adam/fused_adam.py``, ``ops/adam/cpu_adam.py`` ...), so its
bytes are those of the package itself. The compiled part of a step writes to tensors that it is given.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

import torch

from dryfit.gpu.dispatch import VirtualDispatch
from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.values import forget
from dryfit.settings.errors import TraceError
from dryfit.settings.memory_terms import MemoryCategory

OnLaunch = Callable[[str, list[torch.Tensor]], None]
"""Called at each update on the device, with its name and the tensors that it is given."""

_DOING: Final = "rehearsing DeepSpeed"
_REHEARSED: Final = "ZeRO 0 to 3, offload to the host and their optimizers can be rehearsed"
_REFUSED_OPERATORS: Final = {
    **dict.fromkeys(("async_io", "gds"), "it offloads to NVMe (ZeRO-Infinity), whose buffers are not simulated"),
    "pin_memory": "it asks for pinned memory of DeepSpeed's own, as NVMe offload (ZeRO-Infinity) does, and as "
    "DS_PIN_MEMORY_BACKEND=native",
    **dict.fromkeys(
        ("transformer_inference", "inference_core_ops", "ragged_device_ops", "ragged_ops", "cutlass_ops"),
        "it runs an inference engine of DeepSpeed, whose kernels are its own",
    ),
}
"""What a script does that compiles such an operator, where the name alone does not tell."""
_REFUSED_CLASSES: Final = {
    "deepspeed.runtime.pipe.module": ("PipelineModule", "a pipeline, whose stages wait for one another"),
    "deepspeed.inference.engine": ("InferenceEngine", "an inference engine"),
    "deepspeed.inference.v2.engine_v2": ("InferenceEngineV2", "an inference engine"),
    "deepspeed.runtime.hybrid_engine": ("DeepSpeedHybridEngine", "a hybrid engine, which generates by its own kernels"),
    "deepspeed.runtime.fp16.onebit.adam": ("OnebitAdam", "a 1-bit optimizer"),
    "deepspeed.runtime.fp16.onebit.lamb": ("OnebitLamb", "a 1-bit optimizer"),
    "deepspeed.runtime.fp16.onebit.zoadam": ("ZeroOneAdam", "a 1-bit optimizer"),
}
"""By module, a class that cannot be made, and what is said of it."""
_NORM_BLOCKS: Final = 512
"""Elements of each of LAMB's two scratch tensors."""


class _Operators:
    """Stand-ins for the modules that DeepSpeed compiles, by the names of their builders.

    - ``fused_adam``, ``fused_lion``: kernels over lists of tensors that allocate nothing
      (``csrc/adam/multi_tensor_adam.cu``, ``csrc/lion/multi_tensor_lion.cu``).
    - ``fused_lamb``: two scratch tensors of 512 elements and one coefficient for each parameter
      (``csrc/lamb/fused_lamb_cuda.cpp``).
    - ``cpu_adam``, ``cpu_lion``, ``cpu_adagrad``: update contiguous tensors of the host in place
      (``csrc/adam/cpu_adam_impl.cpp``, ``csrc/lion/cpu_lion_impl.cpp``, ``csrc/adagrad/cpu_adagrad.cpp``).

    Files as of DeepSpeed 0.19.8.
    """

    def __init__(self, on_launch: OnLaunch, on_host: Callable[[str], None]) -> None:
        self._on_launch = on_launch
        self._on_host = on_host

    def of(self, name: str) -> SimpleNamespace:
        """Return the stand-in for a compiled module.

        Raises:
            TraceError: There is none.
        """
        match name:
            case "fused_adam":
                return SimpleNamespace(multi_tensor_adam=self._listed("multi_tensor_adam"))
            case "fused_lion":
                return SimpleNamespace(multi_tensor_lion=self._listed("multi_tensor_lion"))
            case "fused_lamb":
                return SimpleNamespace(lamb=self._lamb)
            case "cpu_adam":
                return self._on_the_host("adam", "adam_update", "adam_rollback")
            case "cpu_lion":
                return self._on_the_host("lion", "lion_update")
            case "cpu_adagrad":
                return self._on_the_host("adagrad", "adagrad_update")
            case _:
                text = _REFUSED_OPERATORS.get(name, f"it compiles the operator {name}, which has no stand-in")
                raise TraceError(_DOING, text, hint=_REHEARSED)

    def _listed(self, name: str) -> Callable[..., None]:
        """Return an update of lists of tensors: gradients, parameters and states."""

        def update(_chunk: int, _overflow: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any) -> None:
            tensors = [one for given in lists for one in given]
            forget(tensors)
            self._on_launch(name, tensors)

        return update

    def _lamb(self, parameter: torch.Tensor, _out: torch.Tensor, *given: Any) -> torch.Tensor:
        """Update a parameter and its two moments; return the coefficient."""
        dtype = torch.float32 if parameter.dtype is torch.float16 else parameter.dtype
        scratch = [parameter.new_empty(_NORM_BLOCKS, dtype=dtype) for _ in range(2)]
        coefficient = parameter.new_empty(1, dtype=dtype)
        tensors = [parameter, *(one for one in given if isinstance(one, torch.Tensor))]
        forget(tensors)
        self._on_launch("lamb", [*tensors, *scratch])
        return coefficient

    def _on_the_host(self, kind: str, *updates: str) -> SimpleNamespace:
        """Return an optimizer of the host, whose updates write to all tensors that they are given."""

        def update(*given: Any) -> None:
            forget([one for one in given if isinstance(one, torch.Tensor)])
            self._on_host(kind)

        made: dict[str, Callable[..., None]] = dict.fromkeys(updates, update)
        return SimpleNamespace(**made, **{f"{does}_{kind}": lambda *_: None for does in ("create", "destroy")})


class _Optimizers:
    """DeepSpeed's optimizers, which hold parts of weights and gradients that no model and no torch optimizer holds.

    The attributes are those of DeepSpeed 0.16.9 and 0.19.8; one that a release has not is left out.
    """

    _CLASSES: Final[Mapping[str, str]] = {
        "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
        "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
        "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
        "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
        "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    }
    _GRADIENTS: Final = (
        *("ipg_buckets", "ipg_buffer", "averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients"),
    )

    def __init__(self, stepping: Callable[[torch.optim.Optimizer], AbstractContextManager[None]]) -> None:
        self._stepping = stepping
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        """Note each optimizer when it is made."""
        for module, name in self._CLASSES.items():
            when_imported(module, lambda module, name=name: self._follow(getattr(module, name)))

    def _follow(self, cls: Any) -> None:
        make, step = cls.__init__, cls.step

        @wraps(make)
        def note(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            for given in (*args, *kwargs.values()):
                if isinstance(given, torch.optim.Optimizer):
                    given.dryfit_is_part = True  # pyright: ignore[reportAttributeAccessIssue]
            make(optimizer, *args, **kwargs)
            self._seen.add(optimizer)

        @wraps(step)
        def take_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._stepping(optimizer.optimizer):
                return step(optimizer, *args, **kwargs)

        cls.__init__, cls.step = note, take_step

    def held(self) -> Iterator[tuple[torch.Tensor, MemoryCategory]]:
        """Yield this rank's parts of the weights, the gradients held now, and the buckets that send gradients."""
        for optimizer in list(self._seen):
            for group in getattr(optimizer, "fp16_groups", ()):
                for tensor in _tensors_in([getattr(one, "ds_tensor", None) for one in group]):
                    yield tensor, MemoryCategory.WEIGHTS
            for name in self._GRADIENTS:
                for tensor in _tensors_in(getattr(optimizer, name, None)):
                    yield tensor, MemoryCategory.GRADIENTS


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of lists, dictionaries and buckets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif hasattr(value, "buffer"):
        yield from _tensors_in(value.buffer)


def install_deepspeed(on_launch: OnLaunch, on_host: Callable[[str], None], dispatch: VirtualDispatch) -> None:
    """Let DeepSpeed load stand-ins in the place of compiled operators, as soon as the script imports the package.

    Args:
        on_launch: See :data:`OnLaunch`.
        on_host: Called with the name of an optimizer that updates tensors of the host.
        dispatch: Is told of DeepSpeed's own optimizers: their weights and gradients, their steps, and whose tensors on
            the host have no values.
    """
    operators, optimizers = _Operators(on_launch, on_host), _Optimizers(dispatch.stepping)

    def change(module: Any) -> None:
        module.OpBuilder.load = lambda builder, *_, **__: operators.of(builder.name)

    when_imported("deepspeed.ops.op_builder.builder", change)
    for module, (name, what) in _REFUSED_CLASSES.items():
        when_imported(module, lambda module, name=name, what=what: _refuse(getattr(module, name), what))
    optimizers.install()
    dispatch.holders.append(optimizers.held)
    when_imported("deepspeed", lambda module: dispatch.holds_state.extend(f"{one}{os.sep}" for one in module.__path__))


def _refuse(cls: Any, what: str) -> None:
    """Let no object of a class be made."""

    def refused(*_: Any, **__: Any) -> None:
        raise TraceError(_DOING, f"it makes {what} ({cls.__name__})", hint=_REHEARSED)

    cls.__init__ = refused
