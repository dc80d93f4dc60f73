"""Mark in a trace where modules begin and end, and which of their attributes sizes come from.

An exported graph has neither. An operator that does nothing carries each mark.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dryfit.settings.sharding import Boundary, ModuleShard

ENTER, LEAVE, SIZES = "enter", "leave", "sizes"


def _marked(x: Tensor, kind: str, module: str, name: str, times: int) -> Tensor:
    shape = list(x.shape)
    if shape:
        shape[-1] *= times
    return x.new_empty(shape)


# Not torch.library.custom_op, whose wrappers take most of the time of a trace with many marks. The operator exists as
# long as the library object does.
_LIBRARY: Final = torch.library.Library("dryfit", "DEF")
_LIBRARY.define("mark(Tensor x, str kind, str module, str name, int times) -> Tensor")
_LIBRARY.impl("mark", _marked, "Meta")

mark: Final = torch.ops.dryfit.mark.default
"""Returns a tensor as it is, with a mark in the trace; for tensors without values only.

Arguments: the tensor; the kind (ENTER, LEAVE or SIZES); the path of a module; the name of its input or output, or
a list of origins; how many times longer the last dimension is behind the mark, where ranks' slices are gathered.
"""


_ACTIVATIONS: Final = frozenset({"torch.nn.modules.activation", "transformers.activations"})


class Probe(int):
    """An integer that remembers which attributes of modules it was computed from."""

    origins: frozenset[tuple[str, str]]
    exact: bool

    def __new__(cls, value: int, origins: frozenset[tuple[str, str]], exact: bool = False) -> "Probe":
        """Make an integer with its origins."""
        made = super().__new__(cls, value)
        made.origins = origins
        made.exact = exact
        return made


def _remembering(name: str) -> Callable[..., Any]:
    """Return a method of integers whose result remembers the origins of its operands."""
    operation = getattr(int, name)

    def derived(*operands: Any) -> Any:
        value = operation(*operands)
        if type(value) is not int:
            return value
        return Probe(value, frozenset().union(*(one.origins for one in operands if isinstance(one, Probe))))

    return derived


for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "neg"]:
    setattr(Probe, f"__{_name}__", _remembering(f"__{_name}__"))


class _SizesRead(TorchFunctionMode):
    """Marks behind each operator which of its integer arguments come from attributes of modules."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [
            f"{position}{'=' if number.exact else '~'}{'|'.join(f'{module}:{name}' for module, name in number.origins)}"
            for position, number in enumerate(_integers([*args, *(kwargs or {}).values()]))
            if isinstance(number, Probe)
        ]
        if not read or getattr(func, "__name__", "").endswith("_"):
            return made
        first = made[0] if isinstance(made, tuple | list) and made else made
        if isinstance(first, Tensor) and not first.is_meta:  # a constant, made where no activation is
            return made
        if isinstance(made, Tensor):
            return mark(made, SIZES, "", " ".join(read), 1)
        if isinstance(made, tuple | list) and made and isinstance(made[0], Tensor):
            return type(made)((mark(made[0], SIZES, "", " ".join(read), 1), *made[1:]))
        return made


def _integers(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


@contextmanager
def numbers_probed(module: nn.Module) -> Iterator[None]:
    """Replace every integer attribute of every module by a probe, and put them back."""
    held: list[tuple[dict[str, Any], str, int]] = []
    for path, part in paths(module):
        for name, value in numbers_of(part).items():
            held.append((part.__dict__, name, value))
            part.__dict__[name] = Probe(value, frozenset({(path, name)}), exact=True)
    try:
        with _SizesRead():
            yield
    finally:
        for attributes, name, value in held:
            attributes[name] = value


def numbers_of(module: nn.Module) -> dict[str, int]:
    """Return a module's attributes that are integers larger than one."""
    return {name: value for name, value in vars(module).items() if type(value) is int and value > 1}


def paths(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule with its first path, without the module itself."""
    return ((path, part) for path, part in module.named_modules() if path)


@contextmanager
def modules_marked(module: nn.Module, shards: Mapping[str, ModuleShard], degree: int) -> Iterator[list[str]]:
    """Mark the inputs and outputs of every submodule.

    Args:
        module: The module.
        shards: Boundaries that change the shape of an input or output on a rank; their marks do the same.
        degree: Number of ranks.

    Yields:
        The paths of the modules that are running, the innermost last.
    """
    running: list[str] = []
    with ExitStack() as undo:
        for path, part in paths(module):
            if _on_elements(part):
                continue
            shard = shards.get(path, ModuleShard())
            before = part.register_forward_pre_hook(_entering(path, part, running), with_kwargs=True)
            undo.callback(before.remove)
            after = part.register_forward_hook(_leaving(path, shard, degree, running))
            undo.callback(after.remove)
        yield running


def _on_elements(module: nn.Module) -> bool:
    """Return whether a module works elementwise: no region begins or ends there."""
    known = isinstance(module, nn.Dropout | nn.Identity) or type(module).__module__ in _ACTIVATIONS
    return known and next(module.parameters(), None) is None


def input_names(module: nn.Module) -> list[str]:
    """Return the names of the inputs that a module's forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, taken in inspect.signature(module.forward).parameters.items() if taken.kind in kinds]


def _entering(path: str, module: nn.Module, running: list[str]) -> Callable[..., Any]:
    names = input_names(module)

    def marked(name: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return mark(value, ENTER, path, name, 1)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        running.append(path)
        named = [names[index] if index < len(names) else str(index) for index in range(len(args))]
        return (
            tuple(marked(name, value) for name, value in zip(named, args, strict=True)),
            {name: marked(name, value) for name, value in kwargs.items()},
        )

    return hook


def _leaving(path: str, shard: ModuleShard, degree: int, running: list[str]) -> Callable[..., Any]:
    def marked(position: int, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        times = degree if shard.outputs.get(str(position)) is Boundary.GATHER else 1
        return mark(value, LEAVE, path, str(position), times)

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        running.pop()
        if isinstance(output, Tensor):
            return marked(0, output)
        if type(output) in (tuple, list):
            return type(output)(marked(position, value) for position, value in enumerate(output))
        return output

    return hook
