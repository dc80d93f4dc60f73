"""Listeners: functions of the user's own that the study file names, each of which makes an observer of the study."""

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import cast

from dryfit.core.errors import ConfigError
from dryfit.core.settings.functions import FunctionName
from dryfit.core.user_code import imported
from dryfit.study.loop.observers import ObserverThread


def listeners(names: Sequence[str]) -> list[ObserverThread]:
    """Import the functions of ``study.listeners``; each is called when its observer's thread begins.

    Args:
        names: Their names, with the folders that they are imported from.

    Raises:
        ConfigError: One cannot be imported, or cannot be called without arguments.
    """
    return [ObserverThread(FunctionName.parse(name).short, _function(FunctionName.parse(name))) for name in names]


def _function(name: FunctionName) -> Callable[[], object]:
    doing = f"importing {name.short} of study.listeners"
    if name.folder and name.folder not in sys.path:
        sys.path.append(name.folder)  # behind all others: no file there replaces a module that this process imports
    try:
        function = imported(name, doing)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found = f"it raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        raise ConfigError(doing, found, "a module that can be imported") from error
    wanted = "a function without arguments that returns an observer, such as a subclass of dryfit.Observer"
    if not callable(function):
        raise ConfigError(doing, f"it is a {type(function).__name__}", wanted)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(doing, f"it takes {inspect.signature(function)}: {error}", wanted) from error
    except ValueError:  # a built-in that does not tell
        pass
    return cast("Callable[[], object]", function)
