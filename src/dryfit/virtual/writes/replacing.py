"""Functions are replaced wherever a module, a table or a function's defaults have them by name already."""

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, Final

_KEPT_MODULES: Final = ("posix", "_io")
"""Modules that keep the functions as they are: Python's own imports use them."""
_KEPT_TABLE: Final = "dryfit.virtual.writes.view"


def replace_everywhere(replaced: dict[Any, Any]) -> None:
    """Replace functions wherever they were taken before: in names of modules, tables, and defaults of functions."""
    if not replaced:
        return
    by_id = {id(old): new for old, new in replaced.items()}
    has_none = by_id.keys().isdisjoint  # most objects: this asks no Python code of each
    kept = {id(vars(sys.modules[name])) for name in _KEPT_MODULES if name in sys.modules}
    if _KEPT_TABLE in sys.modules:
        kept.add(id(vars(sys.modules[_KEPT_TABLE].REAL)))
    kept.add(id(replaced))
    for one in gc.get_objects():
        if type(one) is dict:
            if has_none(map(id, one.values())) or id(one) in kept:
                continue
            for key in [key for key, value in one.items() if id(value) in by_id]:
                one[key] = by_id[id(one[key])]
        elif type(one) is FunctionType and one.__defaults__ and not has_none(map(id, one.__defaults__)):
            one.__defaults__ = tuple(by_id.get(id(value), value) for value in one.__defaults__)


def named_as(real: Callable[..., Any]) -> Callable[[Any], Any]:
    """Give a function the name of another one, but no way back to it, which would be replaced by itself."""

    def decorate(function: Any) -> Any:
        functools.update_wrapper(function, real)
        del function.__wrapped__
        with suppress(ValueError):  # some functions of C have none
            function.__signature__ = inspect.signature(real)
        return function

    return decorate
