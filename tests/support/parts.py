"""Programs and packages that a test needs: without one it is skipped, or fails where CI is set."""

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest

from engines import ENGINES, find

BY_COMMAND = {engine.command: engine for engine in ENGINES}


def need(command: str) -> str:
    """Return the path of a program; skip the test, or fail it under CI, where there is none.

    Args:
        command: A command of ``scripts/engines.py``, which installs it: a test may need no other.
    """
    engine = BY_COMMAND[command]
    path = find(command)
    if path is None:
        _miss(f"{command} is not installed: run `make engines`, or install the Debian package {engine.package}")
    return path


def need_package(module: str) -> None:
    """Skip the test, or fail it under CI, where a Python package of the extras `demo` and `dev` is not installed."""
    if find_spec(module) is None:
        _miss(f"the Python package {module} is not installed: run `make setup`")


def _miss(reason: str) -> NoReturn:
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(reason)
    pytest.fail(f"{reason}; CI is set, so this test may not be skipped")
