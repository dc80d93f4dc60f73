"""Optional extras of training, imported when a study asks for them."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from dryfit.core.errors import MachineError
from dryfit.meta.offline_import import import_offline


def pytorch_optimizer() -> ModuleType:
    """The library with Lion.

    Raises:
        MachineError: It is not installed.
    """
    needs = "pytorch-optimizer >= 4.1"
    return _extra("pytorch_optimizer", import_module, used_by='optim.name = "lion"', needs=needs, extra="lion")


def bitsandbytes() -> ModuleType:
    """The library with 8-bit AdamW.

    Raises:
        MachineError: It is not installed.
    """
    needs = "bitsandbytes >= 0.50"
    return _extra("bitsandbytes", import_offline, used_by='optim.name = "adamw8bit"', needs=needs, extra="8bit")


def _extra(module: str, importer: Callable[[str], ModuleType], *, used_by: str, needs: str, extra: str) -> ModuleType:
    try:
        return importer(module)
    except ModuleNotFoundError as error:
        raise MachineError(
            f"preparing {used_by}",
            f"{error.name} is not installed",
            allowed=needs,
            hint=f"pip install 'dryfit[{extra}]'",
        ) from error
