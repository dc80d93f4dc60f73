"""What stands in for the package ``triton``: what code of kernels asks for when it is imported and launched.

No kernel's code runs, so its language is placeholders. Launches and benchmarks are those of
:mod:`dryfit.gpu.triton_kernels`, which replaces them here as in the package itself.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from dryfit.gpu.presence import Placeholder, StandIn


class _Kernel:
    """What is launched as ``kernel[grid](...)``."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names: list[str] = fn.arg_names if isinstance(fn, _Kernel) else [*inspect.signature(fn).parameters]
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return what launches the kernel on a grid."""
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        """Compile a kernel: nothing is."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)

    def run(self, *_: Any, **__: Any) -> Any:
        """Launch; replaced, or another kernel's."""
        raise NotImplementedError


class JITFunction(_Kernel):
    """A kernel."""

    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.signature = inspect.signature(fn)
        self.pre_run_hooks: list[Callable[..., Any]] = []
        self.src = ""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse a call without a grid.

        Raises:
            RuntimeError: As of Triton.
        """
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")

    def add_pre_run_hook(self, hook: Callable[..., Any]) -> None:
        """Call a function before each launch."""
        self.pre_run_hooks.append(hook)


class Config:
    """A configuration that an autotuner may choose."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.num_ctas, self.maxnreg = others.get("num_ctas", 1), others.get("maxnreg")
        self.pre_hook: Callable[..., Any] | None = others.get("pre_hook")

    def all_kwargs(self) -> dict[str, Any]:
        """Return what a kernel is launched with besides its arguments."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Heuristics(_Kernel):
    """A kernel some of whose arguments are computed from others."""

    def __init__(self, fn: Any, arg_names: Sequence[str], values: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(fn)
        self.arg_names, self.values = list(arg_names), values

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute them, and launch."""
        for name, value in self.values.items():
            kwargs[name] = value({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return self.fn.run(*args, **kwargs)


class Autotuner(_Kernel):
    """A kernel whose fastest configuration is looked for: the first, where nothing is timed."""

    def __init__(
        self, fn: Any, arg_names: Sequence[str], configs: Any, key: Any, *changes: Any, **options: Any
    ) -> None:
        super().__init__(fn)
        options = {**dict(zip(("reset_to_zero", "restore_value"), changes, strict=False)), **options}
        self.arg_names, self.configs, self.keys = list(arg_names), configs or [Config({})], key
        self.reset_to_zero, self.restore_value = (
            list(options.get(name) or ()) for name in ("reset_to_zero", "restore_value")
        )
        begin, end = options.get("pre_hook"), options.get("post_hook")
        self.user_defined_pre_hook, self.user_defined_post_hook = begin is not None, end is not None
        self.pre_hook: Callable[..., Any] = begin or self._begin
        self.post_hook: Callable[..., Any] = end or self._end
        self.early_config_prune = (options.get("prune_configs_by") or {}).get("early_config_prune")
        self.restore_copies: dict[str, Any] = {}
        self.cache: dict[Any, Config] = {}
        self.best_config = self.configs[0]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Choose a configuration, by a benchmark where the arguments are new, and launch with it."""
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        types = [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
        key = (*(given[name] for name in self.keys if name in given), *types)
        if len(self.configs) > 1 and key not in self.cache:
            prune = self.early_config_prune
            self.cache[key] = (prune(self.configs, given, **kwargs) if prune is not None else self.configs)[0]
            self._benchmark(self.cache[key], args, kwargs)
        config = self.best_config = self.cache.get(key, self.configs[0])
        if config.pre_hook is not None:
            config.pre_hook({**given, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _benchmark(self, config: Config, args: Any, kwargs: Any) -> None:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()}

        def call() -> None:
            if config.pre_hook is not None:
                config.pre_hook(given)
            self.pre_hook(given)
            self.fn.run(*args, **kwargs, **config.all_kwargs())
            self.post_hook(given, exception=None)

        sys.modules["triton.testing"].do_bench(call, quantiles=(0.5, 0.2, 0.8))
        self.pre_hook(given, reset_only=True)

    def _begin(self, given: dict[str, Any], reset_only: bool = False) -> None:
        for name in self.reset_to_zero:
            given[name].zero_()
        if not reset_only:
            self.restore_copies = {name: given[name].clone() for name in self.restore_value}

    def _end(self, given: dict[str, Any], exception: Exception | None = None) -> None:
        for name, copy in self.restore_copies.items():
            given[name].copy_(copy)
        self.restore_copies = {}


class _Constexpr:
    def __init__(self, value: Any) -> None:
        self.value = value


def _jit(fn: Any = None, **_: Any) -> Any:
    return JITFunction(fn) if fn is not None else JITFunction


def _autotune(configs: Sequence[Config], key: Sequence[str], **options: Any) -> Callable[[Any], Autotuner]:
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, **options)


def _heuristics(values: Mapping[str, Callable[..., Any]]) -> Callable[[Any], Heuristics]:
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, int(n) - 1).bit_length()


def _modules() -> Mapping[str, Mapping[str, Any]]:
    driver = SimpleNamespace(active=None)
    driver.set_active = lambda active: setattr(driver, "active", active)
    tuners = {"Autotuner": Autotuner, "Config": Config, "Heuristics": Heuristics}
    compiling = {"GPUTarget": lambda *values: SimpleNamespace(**dict(zip(_TARGET, values, strict=True)))}
    language = {"constexpr": _Constexpr}
    return {
        "triton": {
            "jit": _jit,
            "autotune": _autotune,
            "heuristics": _heuristics,
            "Config": Config,
            "cdiv": _cdiv,
            "next_power_of_2": _next_power_of_2,
            "JITFunction": JITFunction,
        },
        "triton.backends": {},
        "triton.backends.compiler": compiling,
        "triton.compiler": {"CompiledKernel": type("CompiledKernel", (), {})},  # torch's compiler has types of it
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": _jit},
        "triton.language": language,
        "triton.language.core": language,
        "triton.language.extra": {},
        "triton.language.extra.libdevice": {},
        "triton.language.math": {},
        "triton.runtime": {**tuners, "JITFunction": JITFunction, "driver": driver},
        "triton.runtime.autotuner": tuners,
        "triton.runtime.driver": {"driver": driver},
        "triton.runtime.jit": {"JITFunction": JITFunction, "KernelInterface": _Kernel, "jit": _jit},
        "triton.testing": {"do_bench": Placeholder("do_bench")},
        "triton.tools": {},
        "triton.tools.tensor_descriptor": {},
    }


_TARGET = ("backend", "arch", "warp_size")
TRITON = StandIn("3.6.0", "the tensors that its kernels are given", _modules, "triton", is_open=True)
