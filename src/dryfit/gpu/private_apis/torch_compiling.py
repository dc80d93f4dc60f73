"""Private names of torch's compiler: what is traced, where inductor takes over, and what it fuses.

Imported where a script first compiles something: dynamo and inductor take a second to import.
"""

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from dryfit.gpu.private_apis.torch_fakes import FakeTensor, active_fake_mode
from dryfit.gpu.private_apis.torch_modes import TorchDispatchMode, function_modes, schema_of, without_dispatch_modes
from dryfit.settings.private_names import PrivateNames, importing
from dryfit.settings.version import PACKAGE_FOLDER

with importing("torch", "following torch.compile"), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own modules
    from torch._dynamo import convert_frame, eval_frame, trace_rules, utils
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, Unsupported
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy  # pyright: ignore
    from torch._dynamo.variables import optimizer, torch_function
    from torch._guards import TracingContext
    from torch._inductor import compile_fx, config, constant_folding, lowering
    from torch.nn.modules import module as modules
    from torch.utils._device import DeviceContext

PRESENT: Final = (
    # tracing without the modes and hooks of a virtual GPU, and going on eagerly where that fails; until: torch's modes
    # and global hooks say that compilers are to ignore them
    "torch._dynamo.convert_frame.CatchErrorsWrapper",
    "torch._dynamo.eval_frame.OptimizeContext",
    "torch._dynamo.exc.BackendCompilerFailed",
    "torch._dynamo.exc.InternalTorchDynamoError",
    "torch._dynamo.exc.Unsupported",
    "torch._dynamo.trace_rules.add",
    "torch._dynamo.types.ConvertFrameReturn",
    "torch._dynamo.types.FrameAction",
    "torch._dynamo.types.FrameExecStrategy",
    "torch._dynamo.utils.set_torch_function_mode_stack",
    "torch._dynamo.variables.optimizer.OptimizerVariable",
    "torch._dynamo.variables.torch_function.SymbolicTorchFunctionState",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_hooks_always_called",
    "torch.utils._device.DeviceContext",
    # knowing which memory a backward graph may write over; until: inductor's graphs say so
    "torch._guards.TracingContext",
    # running inductor's passes and its partitioner, but not its code generation; until: inductor gives its graphs
    "torch._inductor.compile_fx.compile_fx(inner_compile=)",
    "torch._inductor.constant_folding.ConstantFolder",
    "torch._inductor.config.patch",
    # knowing which operators inductor fuses and which are kernels by themselves; until: operators have a tag for it
    "torch._inductor.lowering.lowerings",
    "torch._inductor.lowering.fallbacks",
    # making an optimizer's state while its step is traced; until: as above, of modes
    "torch.optim.Adam._init_group",
)
ABSENT: Final = (
    # running a graph on a list of inputs that it empties: an attribute that AOTAutograd reads of what runs it; until:
    # inductor's graphs may be run by others
    "torch._inductor.output_code.CompiledFxGraph._boxed_call",
)
"""What torch has not before it is used."""
NAMES: Final = (*PRESENT, *ABSENT)
FAILURES: Final = (BackendCompilerFailed, InternalTorchDynamoError)
"""What a frame ends in that dynamo has traced and that a backend, or dynamo itself, could not make a graph of."""
_HOOKS: Final = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")
_TIMES_KERNELS: Final = "shape_padding"
"""A pass that times kernels to decide: it is left out."""


class _NumbersOnDevice(TorchFunctionMode):
    """Let ``torch.tensor`` of a number be a fake, which a fake mode makes of constants only on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], int | float) and kwargs.get("device") is not None:
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


class _ConstantsOnHost(TorchDispatchMode):
    """Let passes that fold constants compute them on the CPU: the device has no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not types and active_fake_mode() is None and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def follow_compiler(
    make: Callable[..., Callable[[list[Any]], Any]],
    ours: Callable[[TorchFunctionMode], bool],
    entering: Callable[[], AbstractContextManager[object]],
    on_failure: Callable[[Exception], None],
    on_device: Callable[[], AbstractContextManager[object]],
) -> None:
    """Let dynamo and inductor make the graphs of whatever is compiled from now on, and give them to a function.

    Args:
        make: Called with each graph module, its example inputs and inductor's options; returns what runs the graph
            on a list of inputs, which it empties.
        ours: Whether a function mode is not the script's, and so not to be traced.
        entering: Makes a context for each call of something compiled.
        on_failure: Called where dynamo or a pass fails on a frame, which then runs as it is.
        on_device: Makes the context in which tensors are made for good, while something is traced.
    """
    trace_rules.add("dryfit")
    _trace_without_modes(ours, on_failure)
    _enter_with_hooks(entering)
    _make_state_within(on_device)
    compile_ = compile_fx.compile_fx

    def compiled(model: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        with _NumbersOnDevice(), config.patch({_TIMES_KERNELS: False}):
            inputs = [*map(_of_tracing, inputs)]
            return compile_(model, inputs, *args, **{**kwargs, "inner_compile": _boxed(make)})

    fold = constant_folding.ConstantFolder.run

    def fold_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _ConstantsOnHost():
            return fold(self, *args, **kwargs)

    compile_fx.compile_fx = compiled  # pyright: ignore[reportAttributeAccessIssue]
    constant_folding.ConstantFolder.run = fold_on_host


def _of_tracing(one: Any) -> Any:
    """Return an example input as dynamo traced it: torch 2.8 and 2.9 take no fakes of another mode."""
    context = TracingContext.try_get()
    if not isinstance(one, FakeTensor) or context is None or context.fake_mode in (None, one.fake_mode):
        return one
    return context.fake_mode.from_tensor(one)


def _boxed(make: Callable[..., Callable[[list[Any]], Any]]) -> Callable[..., Any]:
    def inner_compile(graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        run: Any = make(graph, inputs, options)

        def boxed(inputs: list[Any]) -> Any:
            return run(inputs)

        boxed._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return boxed

    return inner_compile


def _trace_without_modes(ours: Callable[[TorchFunctionMode], bool], on_failure: Callable[[Exception], None]) -> None:
    wrapper = convert_frame.CatchErrorsWrapper
    convert = wrapper.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with without_dispatch_modes():
            try:
                made = convert(self, *args, **kwargs)
                if made.guarded_code is not None:
                    gc.collect()  # what was traced holds the inputs, in cycles
                return made
            except FAILURES as error:
                on_failure(error)
            except Unsupported as error:
                if str(PACKAGE_FOLDER) not in str(error):  # the script's own
                    raise
                torch.compiler.set_stance("force_eager")  # ``fullgraph`` demands a graph
                on_failure(error)
            return ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))

    wrapper.__call__ = call
    _keep_function_modes(ours)


def _keep_function_modes(ours: Callable[[TorchFunctionMode], bool]) -> None:
    """Trace without the function modes of a virtual GPU, and keep them where compiled code sets the script's modes."""
    state, set_stack = torch_function.SymbolicTorchFunctionState, utils.set_torch_function_mode_stack
    make = state.__init__

    def init(self: Any, py_stack: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        make(self, py_stack, *args, **kwargs)
        pairs = zip(self.mode_stack, py_stack, strict=True)
        self.mode_stack = deque(variable for variable, mode in pairs if not ours(mode))

    def set_stack_of_script(stack: Sequence[TorchFunctionMode]) -> None:
        at = sum(isinstance(mode, DeviceContext) for mode in stack)  # torch wants a default device's at the bottom
        set_stack([*stack[:at], *filter(ours, function_modes()), *stack[at:]])

    state.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
    utils.set_torch_function_mode_stack = set_stack_of_script  # compiled code looks the name up; dynamo keeps its own


def _make_state_within(on_device: Callable[[], AbstractContextManager[object]]) -> None:
    """Let the state of a compiled optimizer be made on the device: it is made while the step is traced."""
    variable = optimizer.OptimizerVariable
    call_method = variable.call_method

    def call(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        with on_device() if name == "_init_group" else nullcontext():
            return call_method(self, tx, name, *args, **kwargs)

    variable.call_method = call


def _enter_with_hooks(entering: Callable[[], AbstractContextManager[object]]) -> None:
    context = eval_frame.OptimizeContext
    make = context.__init__

    def enter() -> Callable[[], None]:
        stack = ExitStack()
        stack.enter_context(entering())
        return stack.close

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.enter_exit_hooks.append(enter)

    context.__init__ = init


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Let modules have no hooks of the whole process, in the block: dynamo would trace them."""
    before = [dict(vars(modules)[name]) for name in _HOOKS]
    for name in _HOOKS:
        vars(modules)[name].clear()
    try:
        yield
    finally:
        for name, hooks in zip(_HOOKS, before, strict=True):
            vars(modules)[name].update(hooks)


def donated_inputs() -> frozenset[int]:
    """Return the numbers of the inputs that the backward graph being compiled may write over: nobody else has them."""
    context = TracingContext.try_get()
    about = None if context is None else context.fw_metadata
    return frozenset(getattr(about, "bw_donated_idxs", None) or ())


def fuses(operator: Any) -> bool:
    """Whether inductor writes an operator's kernel itself, so that it may become a part of another."""
    known: Mapping[Any, Any] = lowering.lowerings
    return operator in known and operator not in lowering.fallbacks


def views(operator: Any) -> bool:
    """Whether what an operator gives is a view of its first tensor, and it writes to nothing."""
    schema = schema_of(operator)
    aliases = [one.alias_info for one in schema.returns]
    return bool(aliases) and all(one is not None and not one.is_write for one in aliases)


def _misbehaves() -> str:
    aten = torch.ops.aten
    if not fuses(aten.add.Tensor) or fuses(aten.nonzero.default):
        return "torch._inductor.lowering does not tell what is fused"
    if not views(aten.view.default) or views(aten.add.Tensor) or views(aten.copy_.default):
        return "the _schema of an operator does not tell views"
    return ""


COMPILING: Final = PrivateNames("torch", PRESENT, _misbehaves)
