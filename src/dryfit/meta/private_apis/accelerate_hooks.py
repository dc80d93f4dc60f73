"""The private name under which accelerate keeps its hook on a module; accelerate itself is not imported."""

import sys
from typing import Any, Final

from torch import nn

from dryfit.core.private_names import PrivateName, PrivateNames

NAMES: Final = (
    PrivateName(
        "accelerate.hooks.add_hook_to_module._hf_hook",
        "finding modules whose weights accelerate has put elsewhere",
        "accelerate tells the hook of a module",
    ),
)


def hook_of(module: nn.Module) -> Any:
    """The hook that accelerate has put on a module itself; None without one."""
    return vars(module).get("_hf_hook")


def is_loaded() -> bool:
    """Whether accelerate's hooks can be anywhere: whether something has imported them."""
    return _MODULE in sys.modules


def _misbehaves() -> str:
    hooks: Any = sys.modules[_MODULE]
    module, hook = nn.Identity(), hooks.ModelHook()
    hooks.add_hook_to_module(module, hook)
    return "" if hook_of(module) is hook else "accelerate does not keep the hook of a module as its _hf_hook"


_MODULE: Final = "accelerate.hooks"
HOOKS: Final = PrivateNames("accelerate", (), _misbehaves)
"""For when :func:`is_loaded`. Its one name is an attribute of modules that have a hook: only using it shows it."""
