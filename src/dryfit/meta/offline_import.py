"""Import a library as it is installed, without the kernels that it would fetch from a hub."""

import logging
import sys
from importlib import import_module
from types import ModuleType

_FETCHER = "kernels"
_COMPLAINS = "bitsandbytes.backends.cpu.ops"


def import_offline(name: str) -> ModuleType:
    """Import a module; a kernel that it asks a hub for while it is imported is as if it were not there.

    bitsandbytes asks the package ``kernels`` for one on a CPU with bfloat16 instructions, and complains where it gets
    none (``bitsandbytes/backends/cpu/ops.py``): it keeps that to itself.

    Raises:
        ImportError: It is not installed, or cannot be imported.
    """
    if name in sys.modules:
        return import_module(name)
    log = logging.getLogger(_COMPLAINS)
    level, fetcher = log.level, sys.modules.get(_FETCHER)
    log.setLevel(logging.ERROR)
    sys.modules[_FETCHER] = None  # pyright: ignore[reportArgumentType]  # so an import of it fails
    try:
        return import_module(name)
    finally:
        log.setLevel(level)
        del sys.modules[_FETCHER]
        if fetcher is not None:
            sys.modules[_FETCHER] = fetcher
