"""Launches of Triton kernels on the virtual GPU.

A launch allocates nothing: the caller has allocated the outputs. So a launch does nothing here but be noted, and the
values of the tensors that the kernel gets are unknown from then on. An autotuner launches nothing either: it times no
configurations.
"""

from collections.abc import Callable
from typing import Any

from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.known_values import forget


def install(note: Callable[[str], None]) -> None:
    """Let launches of Triton kernels do nothing for the rest of this process.

    Args:
        note: Called with a remark at each launch.
    """

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        forget([*args, *kwargs.values()])
        note(f"Triton kernel {_name(kernel)}: launched without effect; its outputs are counted, its time is not")

    for module, class_names in (
        ("triton.runtime.jit", ("JITFunction",)),
        ("triton.runtime.autotuner", ("Autotuner", "Heuristics")),
    ):
        when_imported(module, lambda found, names=class_names: _replace(found, names, launched))


def _replace(module: Any, class_names: tuple[str, ...], launched: Callable[..., None]) -> None:
    for name in class_names:
        getattr(module, name).run = launched


def _name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", "")
