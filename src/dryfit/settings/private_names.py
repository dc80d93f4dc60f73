"""Checks that private names of other libraries exist and behave as dryfit needs, before their first use.

A library may rename or change a private name in any release. The modules of ``dryfit.gpu.private_apis``,
``dryfit.meta.private_apis`` and ``dryfit.search.private_apis`` are the only ones that touch such names. Each declares
them as a :class:`PrivateNames`, and a feature that uses a group calls :func:`require` first, so that a changed library
leads to an error and not to a wrong result.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from dryfit.settings.errors import LibraryError

TESTED: Final = {
    "torch": ">=2.11,<2.16",
    "transformers": ">=5.17,<6",
    "optuna": ">=5,<6",
}
"""The versions that dryfit was tested with; a test keeps pyproject.toml equal."""


@dataclass(frozen=True, slots=True, eq=False)
class PrivateNames:
    """Private names of one library that are used together.

    Attributes:
        library: Name of the library's distribution.
        names: Their dotted names, from the library's package; ``f(x=)`` for the keyword ``x`` of a function.
        misbehaves: Uses the names as dryfit does, within milliseconds, and returns what is wrong; empty: nothing.
        since: First version of the library that has a name, of names that dryfit does without in an earlier one.
    """

    library: str
    names: tuple[str, ...]
    misbehaves: Callable[[], str] = str
    since: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


def require(doing: str, *groups: PrivateNames) -> None:
    """Test the private names that a feature uses; once per process and group.

    Args:
        doing: The feature, for the error: ``"building a model without memory"``.
        groups: The names it uses.

    Raises:
        LibraryError: A name is missing or does something else.
    """
    for group in groups:
        problem = _problem(group)
        if problem:
            raise library_error(group.library, doing, problem)


@contextmanager
def importing(library: str, doing: str) -> Generator[None]:
    """Import private names of a library inside the block.

    Raises:
        LibraryError: One of them is missing.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise library_error(library, doing, str(error)) from error


def library_error(library: str, doing: str, found: str) -> LibraryError:
    """Return the error for a library that is not as dryfit needs it."""
    try:
        installed = version(library)
    except PackageNotFoundError:
        installed = "of an unknown version"
    tested = TESTED[library]
    return LibraryError(
        doing,
        f"{library} {installed}: {found}",
        allowed=f"{library}{tested}, with which dryfit was tested",
        hint=f"install such a version (pip install '{library}{tested}'); if this is one, please report it",
    )


@cache
def _problem(group: PrivateNames) -> str:
    """Return what is wrong with a group; empty: nothing."""
    missing = [name for name in group.names if _is_due(group, name) and not _exists(name)]
    if missing:
        return "; ".join(f"{name} is missing" for name in missing)
    said: list[str] = []
    # In its own thread: torch's modes, grad mode and autocast are per thread, and the caller's must not apply.
    thread = threading.Thread(target=lambda: said.append(_behaviour(group)), name="dryfit-private-names")
    thread.start()
    thread.join()
    return said[0]


def _is_due(group: PrivateNames, name: str) -> bool:
    """Whether the installed version has a name, as far as is known."""
    first = group.since.get(name)
    return first is None or tuple(map(int, version(group.library).split(".")[:2])) >= first


def _behaviour(group: PrivateNames) -> str:
    try:
        return group.misbehaves()
    except Exception as error:  # noqa: BLE001  # whatever a changed library raises is what is wrong with it
        return f"one of {', '.join(group.names)} raised {type(error).__name__}: {error}"


def _exists(path: str) -> bool:
    dotted, _, keyword = path.removesuffix("=)").partition("(")
    parts = dotted.split(".")
    at: Any = None
    for index, part in enumerate(parts):
        below = getattr(at, part, None)
        if below is None:
            below = _submodule(".".join(parts[: index + 1])) if at is None or inspect.ismodule(at) else None
        if below is None:
            # Attributes that only instances have are declared by their class.
            last = index == len(parts) - 1 and not keyword
            return at is not None and (hasattr(at, part) or (last and part in getattr(at, "__annotations__", {})))
        at = below
    return not keyword or keyword in inspect.signature(at).parameters


def _submodule(name: str) -> Any:
    try:
        return sys.modules.get(name) or import_module(name)
    except ImportError:
        return None
