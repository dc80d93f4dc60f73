"""Convert an exported program into a :class:`~dryfit.parallel.trace.graph.Graph`."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from dryfit.core.errors import TraceError
from dryfit.meta.private_apis.torch_capture import HigherOrderOperator
from dryfit.meta.private_apis.torch_modes import OpOverload, schema_of
from dryfit.parallel.trace import marks
from dryfit.parallel.trace.graph import ENTER, LEAVE, Arg, Graph, Leaf, LeafRole, Node, Origin, Ref, Value, refs_in

_MARK: Final = torch.ops.dryfit.mark.default
_IGNORED: Final = frozenset({"aten::_assert_tensor_metadata", "aten::_assert_async", "aten::sym_size"})
_VIEWS: Final = frozenset(
    {"select", "slice", "view", "narrow", "transpose", "unsqueeze", "expand", "permute", "split", "chunk", "unbind"}
)
UNSEEN: Final = "dryfit::written_into"
"""An operator that wrote into a view: the effect on the base tensor is not traced."""


def read_program(
    program: ExportedProgram, module: nn.Module, tokens: int, numbers: Mapping[str, Mapping[str, int]]
) -> Graph:
    """Return a program as data.

    Args:
        program: Exported from the module, with marks.
        module: Gives names and ties of parameters.
        tokens: Rows times length of the inputs.
        numbers: Integer attributes of its submodules.
    """
    reader = _Reader(_leaves(program, module))
    for node, spec in zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True):
        reader.bound[node] = Ref(reader.leaf(spec.kind, spec.target or node.name, node))
    outputs = reader.read(program.graph_module, grad=True)
    return Graph(reader.leaves, tuple(reader.nodes.values()), outputs, tokens, numbers)


def _leaves(program: ExportedProgram, module: nn.Module) -> dict[str, Leaf]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    leaves: dict[str, Leaf] = {}
    for name, parameter in module.named_parameters():
        leaves[name] = Leaf(name, LeafRole.PARAMETER, _value(parameter), tuple(names[id(parameter)]))
    return leaves


class _Reader:
    """Reads the nodes of a graph and of its nested graphs."""

    def __init__(self, leaves: dict[str, Leaf]) -> None:
        self.leaves = leaves
        self.nodes: dict[str, Node] = {}
        self.bound: dict[fx.Node, Any] = {}
        self._first = {name: leaf.name for leaf in leaves.values() for name in leaf.names}

    def leaf(self, kind: InputKind, target: str, node: fx.Node) -> str:
        """Return the name of a placeholder's leaf."""
        if kind is InputKind.PARAMETER:
            return self._first[target]
        role = LeafRole.INPUT if kind is InputKind.USER_INPUT else LeafRole.BUFFER
        value = node.meta.get("val")
        self.leaves[target] = Leaf(target, role, _value(value) if isinstance(value, Tensor) else Value((), False, 0))
        return target

    def read(self, module: fx.GraphModule, *, grad: bool) -> tuple[Ref, ...]:
        """Read a graph whose placeholders are bound, and return its outputs."""
        for node in module.graph.nodes:
            if node.op == "output":
                return tuple(refs_in(self._arg(node.args[0])))
            if node.op == "get_attr":
                self._constant(module, node)
            elif node.op == "call_function":
                self._call(module, node, grad)
        return ()

    def _constant(self, module: fx.GraphModule, node: fx.Node) -> None:
        held = operator.attrgetter(str(node.target))(module)
        if isinstance(held, Tensor):
            name = f"constant {len(self.leaves)}"
            self.leaves[name] = Leaf(name, LeafRole.BUFFER, _value(held))
            self.bound[node] = Ref(name)
        else:
            self.bound[node] = held

    def _call(self, module: fx.GraphModule, node: fx.Node, grad: bool) -> None:
        if node.target is operator.getitem:
            self.bound[node] = self._item(node)
        elif node.target is _MARK:
            self._mark(node, grad)
        elif isinstance(node.target, HigherOrderOperator):
            self._within(module, node, grad)
        elif isinstance(node.target, OpOverload):
            self._operator(node, node.target, grad)
        else:  # arithmetic on sizes that are not known beforehand
            self.bound[node] = None

    def _item(self, node: fx.Node) -> Any:
        whole, index = self.bound[node.args[0]], node.args[1]  # type: ignore[index]
        return whole[index] if isinstance(whole, tuple) else Ref(whole.name, int(index))  # type: ignore[arg-type]

    def _within(self, module: fx.GraphModule, node: fx.Node, grad: bool) -> None:
        """Read a nested graph in place of its operator, which switches gradients or autocast on or off."""
        name = node.target.name()  # type: ignore[union-attr]
        inner = [
            arg
            for arg in node.args
            if isinstance(arg, fx.Node) and isinstance(self._target(module, arg), fx.GraphModule)
        ]
        if len(inner) != 1 or not name.startswith("wrap_with"):
            raise TraceError(
                "reading a traced module", f"an operator {name!r} that runs code of its own", "operators on tensors"
            )
        body = self._target(module, inner[0])
        given = node.args[node.args.index(inner[0]) + 1 :]
        for place, value in zip(body.graph.find_nodes(op="placeholder"), given, strict=True):
            self.bound[place] = self._arg(value)
        enabled = bool(node.args[0]) if name == "wrap_with_set_grad_enabled" else grad
        self.bound[node] = self.read(body, grad=grad and enabled)

    @staticmethod
    def _target(module: fx.GraphModule, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None

    def _mark(self, node: fx.Node, grad: bool) -> None:
        x, kind, module, name, times = node.args
        source = self.bound[x]  # type: ignore[index]
        if kind == marks.SIZES:
            self.bound[node] = source
            if made := self.nodes.get(source.name):
                self.nodes[source.name] = replace(made, origins=_origins(str(name)))
            return
        args: dict[str, Arg] = {"x": source, "module": str(module), "name": str(name), "times": int(times)}  # type: ignore[arg-type]
        self._add(node, ENTER if kind == marks.ENTER else LEAVE, args, str(module), grad)

    def _operator(self, node: fx.Node, target: OpOverload, grad: bool) -> None:
        name = schema_of(target).name
        if name in _IGNORED or not _tensors_of(node.meta.get("val")):
            self.bound[node] = None
            return
        args = self._args(node, target)
        op = name.removeprefix("aten::")
        first = next((value for value in args.values() if isinstance(value, Ref)), None)
        in_place = schema_of(target).is_mutable and first is not None and op.endswith("_") and not op.endswith("__")
        if in_place:
            op = UNSEEN if self._is_view(first) else op[:-1]
        self._add(node, op, args, _module_of(node), grad)
        if in_place:
            for other, held in list(self.bound.items()):
                if held == first:
                    self.bound[other] = self.bound[node]

    def _is_view(self, ref: Ref | None) -> bool:
        made = self.nodes.get(ref.name) if ref else None
        return made is not None and made.op in _VIEWS

    def _args(self, node: fx.Node, target: OpOverload) -> dict[str, Arg]:
        given = dict(zip((argument.name for argument in schema_of(target).arguments), node.args, strict=False))
        given |= node.kwargs
        return {
            argument.name: self._arg(given.get(argument.name, argument.default_value))
            for argument in schema_of(target).arguments
            if argument.name in given or argument.has_default_value()
        }

    def _add(self, node: fx.Node, op: str, args: Mapping[str, Arg], module: str, grad: bool) -> None:
        name = node.name if node.name not in self.nodes else f"{node.name}#{len(self.nodes)}"
        outputs = tuple(_value(item) if isinstance(item, Tensor) else None for item in _items(node.meta["val"]))
        self.nodes[name] = Node(name, op, args, outputs, module, grad)
        many = isinstance(node.meta["val"], tuple | list)
        self.bound[node] = tuple(Ref(name, index) for index in range(len(outputs))) if many else Ref(name)

    def _arg(self, value: Any) -> Arg:
        if isinstance(value, fx.Node):
            return self.bound.get(value)
        if isinstance(value, tuple | list):
            return tuple(self._arg(item) for item in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).partition("@")[0]


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _tensors_of(value: Any) -> list[Tensor]:
    return [item for item in _items(value) if isinstance(item, Tensor)]


def _value(tensor: Tensor) -> Value:
    return Value(tuple(int(size) for size in tensor.shape), tensor.is_floating_point(), tensor.element_size())


def _origins(text: str) -> tuple[Origin, ...]:
    made: list[Origin] = []
    for entry in text.split():
        exact = "=" in entry
        position, _, attributes = entry.partition("=" if exact else "~")
        pairs = (attribute.rpartition(":") for attribute in attributes.split("|"))
        made.append(Origin(int(position), tuple((module, name) for module, _, name in pairs), exact))
    return tuple(made)
