"""Models on the meta device: built without memory, filled with their real weights, moved and looked at safely.

The public names. They are imported on first use, as those of the package are.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dryfit.gpu.slots import leaks
    from dryfit.meta.construction import build, meta_init, on_meta
    from dryfit.meta.filling import materialise
    from dryfit.meta.moves import move
    from dryfit.meta.propagation import shapes
    from dryfit.settings.check_messages import LoadReport

_HOMES = {
    "LoadReport": "dryfit.settings.check_messages",
    "build": "dryfit.meta.construction",
    "leaks": "dryfit.gpu.slots",
    "materialise": "dryfit.meta.filling",
    "meta_init": "dryfit.meta.construction",
    "move": "dryfit.meta.moves",
    "on_meta": "dryfit.meta.construction",
    "shapes": "dryfit.meta.propagation",
}

__all__ = ["LoadReport", "build", "leaks", "materialise", "meta_init", "move", "on_meta", "shapes"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dryfit.meta' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
