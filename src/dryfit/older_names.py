"""Modules that documents named in earlier versions: each name imports the module that it became, and warns."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, cast

_MOVED: Final = {
    "dryfit.api": "dryfit.study.functions",
    "dryfit.parallel.planning": "dryfit.parallel",
    "dryfit.parallel.planning.planner": "dryfit.parallel.planner",
    "dryfit.parallel.proof": "dryfit.parallel",
    "dryfit.parallel.proof.prove": "dryfit.parallel.prove",
    "dryfit.scoring": "dryfit.tasks",
    "dryfit.scoring.analysis": "dryfit.tasks.analysis",
}


class _OlderNames:
    """Finds the older names, and gives the import system the module of today."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, cast("Any", self)) if name in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        older, home = module.__name__, _MOVED[module.__name__]
        warnings.warn(f"{older} is {home} since dryfit 0.2", DeprecationWarning, stacklevel=2)
        sys.modules[older] = import_module(home)


def find_older_names() -> None:
    """Let ``import`` find the older names, before it looks for files."""
    sys.meta_path.insert(0, _OlderNames())
