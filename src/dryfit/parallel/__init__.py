"""Models over several ranks: planned from a trace, proved equal to the whole, filled by slices, and run.

The public name is imported on first use, as those of the package are.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dryfit.parallel.torchrun import parallelize

_HOMES = {"parallelize": "dryfit.parallel.torchrun"}

__all__ = ["parallelize"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dryfit.parallel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
