"""Private names of torch's modes and operators: seeing, hiding and reading what a thread's code does to tensors."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dryfit.settings.private_names import PrivateNames, importing

with importing("torch", "seeing what code does to tensors"):
    from torch._ops import OpOverload
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.utils import _device as device_contexts
    from torch.utils._device import _device_constructors as device_constructors
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
    from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map, tree_map_only, tree_unflatten

    IS_META: Final[Any] = vars(torch._C.TensorBase)["is_meta"].__get__
    """What a function mode sees where code asks for ``tensor.is_meta``."""
    SET_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__set__
    """What a function mode sees where code sets ``tensor.data``."""
    NEW_TENSOR: Final[Any] = torch._C.TensorBase.__new__
    """What makes a tensor where code calls ``torch.Tensor``."""
    TRACED_CONVOLUTION: Final[Any] = torch.ops.aten._convolution.default
    """What a trace records of a convolution: the same with flags of cuDNN behind the arguments."""
    _TRACER: Final[Any] = torch._C._dispatch_key_parse("Tracer")


NAMES: Final = (
    # seeing every operator of a thread; until: torch documents its modes under a public module
    "torch.utils._python_dispatch.TorchDispatchMode",
    # computing real values where a mode is active; until: torch documents its modes under a public module
    "torch.utils._python_dispatch._disable_current_modes",
    # telling quantised and sharded tensors from those that are their memory; until: torch.utils has it under a
    # public module
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    # finding our own mode around a constructor that builds another model; until: torch.overrides lists the
    # active modes
    "torch.overrides._get_current_function_mode_stack",
    # making memory where a caller's device context or mode would send it elsewhere; until: torch.overrides has
    # it; its documentation names torch._C.DisableTorchFunctionSubclass, which leaves modes on
    "torch._C.DisableTorchFunction",
    # knowing the getters that a function mode sees; until: torch.Tensor has them itself
    "torch._C.TensorBase",
    # knowing which functions take a device, so that a constructor that names one builds on the CPU; until:
    # torch says so, or a constructor's device can be overridden by torch.device as a context
    "torch.utils._device._device_constructors",
    # knowing on which device torch.tensor makes a tensor where a mode hides it; until: torch.get_default_device
    # makes no tensor to find out
    "torch.utils._device.CURRENT_DEVICE",
    # letting a constructor load tensors into those without memory: it asks each whether it is on meta; until:
    # load_state_dict has a hook for a single tensor
    "torch.nn.Module._load_from_state_dict",
    # telling operators from functions; until: torch.ops says what its members are
    "torch._ops.OpOverload",
    # knowing an operator's name, arguments, and which of them it writes to; until: operators have it as a
    # public attribute
    "torch.ops.aten.copy_.default._schema",
    # recording a convolution in torch.jit.trace, which records what it calls; until: traces know dispatch modes
    "torch._C._dispatch_key_parse",
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "torch._C._dispatch_tls_set_dispatch_key_excluded",
    "torch._C._get_tracing_state",
    "torch._C._set_tracing_state",
    "torch.ops.aten._convolution",
    # walking nested containers of a model's own classes; until: torch has a public module for nested containers
    "torch.utils._pytree.tree_iter",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    # making a container again with other leaves; until: torch has a public module for nested containers
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_unflatten",
)

LOADS_STATE: Final = "_load_from_state_dict"
"""The function of ``torch.nn.Module`` that copies a state dict's tensors into one module."""


def without_function_modes() -> AbstractContextManager[object]:
    """Let no mode and no device context of the caller see functions of torch inside the block."""
    return torch._C.DisableTorchFunction()


def default_device() -> torch.device | None:
    """The device of ``torch.set_default_device``, or of the innermost device context; None: the CPU."""
    return device_contexts.CURRENT_DEVICE


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` records what runs now."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def recorded_by_trace(*, is_recorded: bool) -> Iterator[None]:
    """Let ``torch.jit.trace`` record the operators of the block, or pause, where it calls one without recording it."""
    core: Any = torch._C
    state, was_excluded = core._get_tracing_state(), core._dispatch_tls_is_dispatch_key_excluded(_TRACER)
    core._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
    if not is_recorded:
        core._set_tracing_state(None)
    try:
        yield
    finally:
        if not is_recorded:
            core._set_tracing_state(state)
        core._dispatch_tls_set_dispatch_key_excluded(_TRACER, was_excluded)


def schema_of(operator: Any) -> Any:
    """An operator's schema: its name, arguments, results, and which arguments it writes to."""
    return operator._schema


class _SeesOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class _SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, sys._getframe(1).f_code.co_name))
        return func(*args, **(kwargs or {}))


def _misbehaves() -> str:
    return _operators_misbehave() or _functions_misbehave() or _schemas_misbehave()


def _operators_misbehave() -> str:
    aten = torch.ops.aten
    mode = _SeesOperators()
    with mode:
        shown = torch.empty(1)
        with without_dispatch_modes():
            torch.zeros(1)
        shown.fill_(1)
    if mode.seen != [aten.empty.memory_format, aten.fill_.Scalar]:
        return (
            "torch.utils._python_dispatch: inside of a TorchDispatchMode and outside of _disable_current_modes ran "
            f"empty and fill_, the mode saw {[str(one) for one in mode.seen]}"
        )
    return ""


def _functions_misbehave() -> str:
    part, mode = nn.Module(), _SeesFunctions()
    part.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    state = {"weight": torch.zeros(1)}
    with mode:
        around = function_modes()
        shown = torch.ones(1)
        with without_function_modes():
            torch.zeros(1)
        shown.data = shown.is_meta * shown
        seen, mode.seen = [func for func, _ in mode.seen], []
        part.load_state_dict(state)
    if not around or around[-1] is not mode:
        return "torch.overrides._get_current_function_mode_stack does not end with the mode that was entered last"
    if torch.ones not in seen or torch.zeros in seen:
        return "torch._C.DisableTorchFunction does not hide calls from a TorchFunctionMode, or the mode sees none"
    if IS_META not in seen or SET_DATA not in seen:
        return "a TorchFunctionMode does not see the getters of torch._C.TensorBase where code uses is_meta and data"
    if (IS_META, LOADS_STATE) not in mode.seen:
        return f"torch.nn.Module.{LOADS_STATE} does not ask a tensor whether it is on meta before it is loaded"
    known = device_constructors()
    if not {torch.empty, torch.zeros, torch.tensor, torch.arange} <= set(known) or torch.add in known:
        return "torch.utils._device._device_constructors does not say which functions take a device"
    return ""


def _schemas_misbehave() -> str:
    copy = torch.ops.aten.copy_.default
    schema = schema_of(copy)
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if not isinstance(copy, OpOverload) or isinstance(torch.add, OpOverload):
        return "torch._ops.OpOverload does not tell operators from functions"
    if (schema.name, schema.is_mutable, written) != ("aten::copy_", True, ["self"]):
        return "the _schema of an operator does not say which arguments it writes to"
    if [str(one.type) for one in schema.returns] != ["Tensor"] or not schema.arguments[-1].has_default_value():
        return "the _schema of an operator does not say what it returns and which arguments have a value"
    nested = {"a": [torch.zeros(1), (1, None)]}
    mapped = tree_map_only(int, str, tree_map(lambda leaf: 2 if leaf is None else leaf, nested))
    if list(tree_iter(mapped))[1:] != ["1", "2"] or tree_leaves(mapped)[1:] != ["1", "2"]:
        return "torch.utils._pytree does not walk dicts, lists and tuples to their leaves"
    if tree_unflatten([1, 2, None], tree_flatten(nested)[1]) != {"a": [1, (2, None)]}:
        return "torch.utils._pytree does not make dicts, lists and tuples again with other leaves"
    if is_traceable_wrapper_subclass(torch.zeros(1)) or is_traceable_wrapper_subclass(nn.Parameter(torch.zeros(1))):
        return "torch.utils._python_dispatch.is_traceable_wrapper_subclass takes plain tensors for wrappers"
    return ""


MODES: Final = PrivateNames("torch", NAMES, _misbehaves)
