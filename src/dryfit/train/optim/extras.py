"""Optional extras of training, imported when a study asks for them."""

from types import ModuleType

from dryfit.core.errors import MachineError
from dryfit.meta.offline_import import import_offline


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
