"""Do something to a module as soon as the script has imported it, and import nothing before the script does."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Surroundings = Callable[[], AbstractContextManager[object]]

_waiting: dict[str, list[Callable[[Any], None]]] = {}
_surroundings: dict[str, Surroundings] = {}


def when_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call a function with a module: now if it is imported already, else right after its own code has run.

    Args:
        name: Full name of the module.
        act: Changes it.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    _look_out()
    _waiting.setdefault(name, []).append(act)


def import_within(name: str, surroundings: Surroundings) -> None:
    """Let a module's own code run inside of a context manager, whoever imports it; a second call changes nothing.

    Args:
        name: Full name of the module.
        surroundings: Makes the context manager.
    """
    _look_out()
    _surroundings.setdefault(name, surroundings)


def rebind(old: Any, new: Any) -> None:
    """Put an object in another one's place in every module that has it under a name of its own."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def is_of(value: Any, module: str, *names: str) -> bool:
    """Whether a value is of a class of a module; without the module there is no such value."""
    classes = vars(sys.modules[module]) if module in sys.modules else {}
    return isinstance(value, tuple(classes[name] for name in names if name in classes))


def _look_out() -> None:
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules that are looked out for as the other finders do, with another loader around theirs."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, or None where nobody looks out for it."""
        if fullname in self._looking or (fullname not in _waiting and fullname not in _surroundings):
            return None
        self._looking.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module as another loader does, in its surroundings, then calls what waits for it."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # resources, source text: whatever the other loader can do besides

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module, empty."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then what waits for it."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._inner
            module.__loader__ = self._inner
        with _surroundings.get(module.__name__, nullcontext)():
            self._inner.exec_module(module)
        for act in _waiting.pop(module.__name__, []):
            act(module)
