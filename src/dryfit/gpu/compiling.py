"""``torch.compile`` on a virtual GPU: dynamo, AOTAutograd and inductor's passes run, and their graphs run on fakes."""

import inspect
import operator
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from dryfit.gpu.compiled_graphs import GraphPlan, plan_graph, time_of
from dryfit.gpu.dispatch import VirtualDispatch
from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.private_apis.torch_compiling import (
    COMPILING,
    donated_inputs,
    follow_compiler,
    fuses,
    views,
    without_global_hooks,
)
from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_modes import OpOverload, tree_iter, tree_map, without_dispatch_modes
from dryfit.gpu.script_recorder import NoRoomError
from dryfit.settings.private_names import require

_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SELF: Final = re.compile(r"^L\['\w+'\]")
_TABLE: Final = re.compile(r"[.]_\w+(?=\[)")
_INDEX: Final = re.compile(r"\['?([\w.]+)'?\]")
_POOL: Final = "torch.compile"
_TANGENT: Final = "tangents_"
"""How AOTAutograd begins the names of a backward graph's inputs that are gradients."""


def install_compiler(
    dispatch: VirtualDispatch,
    ours: Callable[[TorchFunctionMode], bool],
    on_graph: Callable[[], None],
    on_failure: Callable[[Exception], None],
    on_kernel: Callable[[str, list[torch.Tensor]], None],
) -> None:
    """Let what is compiled run as inductor's graphs.

    Args:
        dispatch: Of the virtual GPU.
        ours: Whether a function mode is the virtual GPU's.
        on_graph: Called with each graph that is made for the device.
        on_failure: Called where a frame could not be compiled, and runs as it is.
        on_kernel: Called with name and tensors of each kernel of inductor's that runs.

    Raises:
        LibraryError: This version of torch has another compiler.
    """
    require("following torch.compile", COMPILING)

    def make(graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
        if not _is_of_device(graph):
            return lambda given: graph(*given)
        on_graph()
        made = CompiledGraph(graph, dispatch, _fixed(graph, options), on_kernel)
        return CapturedGraph(made, dispatch, _copied(graph, options)) if options.get("cudagraphs") else made

    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks", UserWarning)
    when_imported("torch.nn.attention.flex_attention", _trace_flex_attention)
    follow_compiler(make, ours, modules_as_torch_calls_them, on_failure, dispatch.on_device)


@contextmanager
def modules_as_torch_calls_them() -> Iterator[None]:
    """Let modules be called past what follows them, in the block: a compiler would trace that."""
    call = nn.Module.__call__
    nn.Module.__call__ = inspect.unwrap(call)
    try:
        with without_global_hooks():
            yield
    finally:
        nn.Module.__call__ = call


def _trace_flex_attention(module: Any) -> None:
    """Let a compiler trace torch's own function: its kernel is one of the graph."""
    stand_in = module.flex_attention
    if (replaced := inspect.unwrap(stand_in)) is not stand_in:
        torch.compiler.substitute_in_graph(stand_in, skip_signature_check=True)(replaced)


def _fixed(graph: fx.GraphModule, options: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the inputs that others hold: all of a forward pass, most of a backward pass."""
    numbers = range(sum(node.op == "placeholder" for node in graph.graph.nodes))
    return set(numbers) - (donated_inputs() if options.get("is_backward") else frozenset())


def _copied(graph: fx.GraphModule, options: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the inputs that a CUDA graph reads at an address of its own: what others make."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    if options.get("is_backward"):
        return [at for at, name in enumerate(names) if name.startswith(_TANGENT)]
    return sorted(set(range(len(names))) - set(options.get("static_input_idxs", ())))


def _is_of_device(graph: fx.GraphModule) -> bool:
    values = (leaf for node in graph.graph.nodes for leaf in tree_iter(node.meta.get("val")))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in values)


class CompiledGraph:
    """Runs a graph of inductor's on fakes: what it stores is allocated, what it computes where it is read is not.

    Args:
        graph: Forward or backward, after all passes that change what is saved.
        dispatch: Of the virtual GPU.
        fixed: Numbers of the inputs that no kernel may write over.
        on_kernel: Called with name and tensors of each kernel of inductor's that runs.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        dispatch: VirtualDispatch,
        fixed: set[int],
        on_kernel: Callable[[str, list[torch.Tensor]], None],
    ) -> None:
        self._graph, self._dispatch, self._on_kernel = graph, dispatch, on_kernel
        self.plan: GraphPlan = plan_graph(graph.graph, fuses, views, fixed)
        place = {node: time_of(at) for at, node in enumerate(self.plan.nodes)}
        self._late: dict[int, list[fx.Node]] = defaultdict(list)
        for node, at in self.plan.stored_at.items():
            if at > place[node]:
                self._late[at].append(node)
        self._ends: dict[int, list[fx.Node]] = defaultdict(list)
        for node, at in self.plan.dropped_at.items():
            self._ends[at].append(node)
        self._constants: dict[str, Any] = {}

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph on inputs, whose list it empties.

        Raises:
            torch.OutOfMemoryError: The device has no room.
        """
        values: dict[fx.Node, Any] = {}
        given = iter(inputs[:])
        inputs.clear()
        out: Any = None
        for node in self.plan.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
        del given
        try:
            for at, node in enumerate(self.plan.nodes):
                for late in self._late.get(time_of(at) - 1, ()):
                    self._note(late, (), values[late], values)
                self._drop(time_of(at) - 1, values)
                if node.op == "output":
                    out = tree_map(lambda one: values[one] if isinstance(one, fx.Node) else one, node.args[0])
                elif node.op == "get_attr":
                    values[node] = self._constant(str(node.target))
                elif node.op != "placeholder":
                    values[node] = self._run(time_of(at), node, values)
                self._drop(time_of(at), values)
        except NoRoomError as error:
            raise self._dispatch.on_no_room(error) from None
        return out

    def _drop(self, at: int, values: dict[fx.Node, Any]) -> None:
        for node in self._ends.get(at, ()):
            values.pop(node, None)

    def _run(self, at: int, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        target: Any = node.target
        if node in self.plan.kernels and isinstance(target, OpOverload):
            found = self._dispatch.by_own_code(target, args, kwargs)
            if found is not None:
                return found[0]
        with without_dispatch_modes(), self._dispatch.fakes:
            out = target(*args, **kwargs)
        if node in self.plan.stored_at and target is not operator.getitem:
            if self.plan.stored_at[node] == at:
                self._note(node, args, out, values)
            if node in self.plan.kernels and isinstance(target, OpOverload):
                for listener in self._dispatch.listeners:
                    listener(target, args, kwargs, out)
        return out

    def _note(self, node: fx.Node, args: Any, out: Any, values: Mapping[fx.Node, Any]) -> None:
        """Allocate what a node stores."""
        over = self.plan.in_place.get(node)
        self._dispatch.note_stored(
            node.target,
            tuple(args),
            out,
            where=_where(node),
            may_fuse=node in self.plan.fused,
            over=None if over is None else values.get(over),
            overwrites=node in self.plan.overwrites,
        )
        if node not in self.plan.kernels and node not in self.plan.fused:
            moved = [leaf for one in (*self.plan.reads[node], node) for leaf in tree_iter(values.get(one, out))]
            self._on_kernel(str(node.target), [one for one in moved if isinstance(one, torch.Tensor)])

    def _constant(self, name: str) -> Any:
        """Return a constant or a graph within the graph; of a tensor, one of the virtual GPU's in its place."""
        if name not in self._constants:
            value: Any = self._graph
            for part in name.split("."):
                value = getattr(value, part)
            if isinstance(value, FakeTensor) and value.fake_mode is not self._dispatch.fakes:
                value = self._dispatch.empty(value.shape, value.dtype, value.device)
            self._constants[name] = value
        return self._constants[name]


def _where(node: fx.Node) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return the module that a node is of, and the lines that called it, the deepest last."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()), ("", None))[0] if stack else ""
    path = _INDEX.sub(r".\1", _TABLE.sub("", _SELF.sub("", str(path)))).strip(".")
    found = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return path, tuple((one["file"], int(one["line"])) for one in found)


class CapturedGraph:
    """A compiled graph that is captured in a CUDA graph (``mode="reduce-overhead"``): its memory is a private pool's.

    All of them share a pool (``torch/_inductor/cudagraph_trees.py``), which keeps what it took.

    Args:
        graph: What is captured.
        dispatch: Of the virtual GPU.
        copied: Numbers of the inputs that are copied into memory of the pool before each replay.
    """

    def __init__(self, graph: CompiledGraph, dispatch: VirtualDispatch, copied: Sequence[int]) -> None:
        self._graph, self._dispatch, self._copied = graph, dispatch, copied
        self._held: list[torch.Tensor] | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph on inputs, whose list it empties.

        Raises:
            torch.OutOfMemoryError: The device has no room.
        """
        allocations = self._dispatch.allocations
        allocations.enter_pool(_POOL)
        try:
            if self._held is None:
                given = [inputs[at] for at in self._copied if isinstance(inputs[at], torch.Tensor)]
                with torch.no_grad():
                    self._held = [torch.empty_like(one) for one in given if one.is_cuda]
            return self._graph(inputs)
        finally:
            allocations.leave_pool()
