"""A module's forward pass traced by ``torch.export`` on the meta device, its repeated layers once."""

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from dryfit.gpu.private_apis.torch_modes import MODES, OpOverload, schema_of
from dryfit.gpu.private_apis.torch_modules import MODULES, children_of, replace_children
from dryfit.gpu.private_apis.torch_operators import OPERATORS
from dryfit.gpu.slots import Slot, SlotKind, replaced
from dryfit.meta.private_apis.torch_capture import CAPTURE, HigherOrderOperator, TorchDynamoException
from dryfit.parallel import marks
from dryfit.parallel.graph import ENTER, LEAVE, Arg, Graph, Leaf, LeafRole, Node, Origin, Ref, Value, refs_in
from dryfit.parallel.marks import modules_marked, numbers_of, numbers_probed, paths
from dryfit.settings.errors import TraceError
from dryfit.settings.private_names import require
from dryfit.settings.sharding import ModuleShard, ParameterShard, ShardPlan

# Shorten lists of repeated layers for a trace, and extend the plan of the kept ones to all layers.
#
# Layers are of one kind if their classes, settings and shapes of parameters and buffers are the same, but for the
# layer's index. The front of a list is kept until it holds two layers of each kind: the first may be special by its
# place, those after the second are not.


OF_EACH_KIND: Final = 2
"""Layers of a kind that stand for all of them."""
_WHICH_LAYER: Final = frozenset(
    {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx", "training"}
)


@contextmanager
def shortened(module: nn.Module) -> Iterator[dict[str, str]]:
    """Remove the layers of a module that repeat others, and put them back.

    Yields:
        The kept layer that stands for each removed one, by path.
    """
    stands_for: dict[str, str] = {}
    held: list[tuple[nn.ModuleList, dict[str, nn.Module | None]]] = []
    for path, layers in outermost_lists(module):
        kept, like = _split(layers)
        if len(kept) < len(layers) and not _shares_parameters(module, list(layers)[len(kept) :]):
            dot = f"{path}." if path else ""
            stands_for |= {f"{dot}{out}": f"{dot}{one}" for out, one in like.items()}
            every = children_of(layers)
            held.append((layers, every))
            replace_children(layers, {name: every[name] for name in kept})
    try:
        yield stands_for
    finally:
        for layers, every in held:
            replace_children(layers, every)


def outermost_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of layers by path; not those within a layer, such as experts, whose number the layer knows."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((path, part))
    return lists


def _split(layers: nn.ModuleList) -> tuple[list[str], dict[str, str]]:
    """Return the names of the kept layers, and for each other layer a kept one of its kind."""
    kinds = {name: kind_of(layer) for name, layer in layers.named_children()}
    wanted = {kind: min(OF_EACH_KIND, list(kinds.values()).count(kind)) for kind in kinds.values()}
    kept: list[str] = []
    latest: dict[object, str] = {}
    for name, kind in kinds.items():
        if not any(wanted.values()):
            break
        kept.append(name)
        latest[kind] = name
        wanted[kind] = max(0, wanted[kind] - 1)
    return kept, {name: latest[kind] for name, kind in kinds.items() if name not in kept}


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Return the key that layers of one kind share."""
    return tuple(
        (
            path,
            type(part),
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in part.named_parameters(recurse=False)),
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in part.named_buffers(recurse=False)),
            tuple(
                (name, value)
                for name, value in sorted(vars(part).items())
                if isinstance(value, int | float | str) and name not in _WHICH_LAYER
            ),
        )
        for path, part in layer.named_modules()
    )


def _shares_parameters(module: nn.Module, layers: list[nn.Module]) -> bool:
    """Return whether some layers share parameters with each other or with the rest of the module."""
    inside = [id(parameter) for layer in layers for _, parameter in layer.named_parameters(remove_duplicate=False)]
    every = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    return len(set(inside)) < len(inside) or any(every.count(key) > 1 for key in set(inside))


def for_all_layers(plan: ShardPlan, module: nn.Module, stands_for: Mapping[str, str]) -> ShardPlan:
    """Extend the plan of a shortened module to the whole module.

    Args:
        plan: The shortened module's.
        module: The whole module.
        stands_for: The kept layer that stood for each removed one.
    """
    parameters: dict[str, ParameterShard] = {}
    whole: dict[str, str] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        one = renamed(name, stands_for)
        parameters[name] = plan.parameters[one]
        if one in plan.whole:
            whole[name] = plan.whole[one]
    modules = {
        path: plan.modules[one]
        for path, _ in module.named_modules(remove_duplicate=False)
        if (one := renamed(path, stands_for)) in plan.modules
    }
    return plan.model_copy(update={"parameters": parameters, "modules": modules, "whole": whole})


def renamed(name: str, new_of: Mapping[str, str]) -> str:
    """Return the name of a module or parameter after some modules have got other paths.

    Args:
        name: Its name before.
        new_of: The new path, by the old one.
    """
    for old, new in new_of.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


# Trace a module's forward pass by ``torch.export`` on the meta device; nothing is computed.
#
# The exported program becomes a :class:`~dryfit.parallel.graph.Graph`.


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


Inputs = Callable[[int, int], Mapping[str, Any]]
"""Returns a module's keyword arguments, on the meta device, given rows and length."""

# What a model's own code, or torch while tracing it, may raise.
_FOREIGN: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    TorchDynamoException,
)

SMALL: Final = (3, 7)
OTHER: Final = (5, 11)
"""Rows and length that divide no usual number of heads or features, and not each other."""


class CannotFollow(Exception):  # noqa: N818 - callers make their own error of it
    """A module's code, or torch while tracing it, raised an error.

    Args:
        module: Path of the innermost module that was running; empty for the model itself.
        text: The error.
    """

    def __init__(self, module: str, text: str) -> None:
        super().__init__(f"in {module or 'the model itself'}: {text}")
        self.module = module
        self.text = text


def capture(module: nn.Module, inputs: Inputs | None = None, size: tuple[int, int] = SMALL) -> Graph:
    """Trace a module's forward pass, without dropout.

    ``torch.export`` first runs the code in Python; where that fails, it is called again in strict mode, as a compiler,
    which gives no origins of numbers.

    Args:
        module: A module whose parameters may be on the meta device.
        inputs: Returns its inputs; None: tokens and a mask.
        size: Rows and length.

    Raises:
        TraceError: Both ways failed.
        LibraryError: torch's graphs are not those that dryfit reads.
    """
    require(f"following {type(module).__name__} to shard it", CAPTURE, MODES, MODULES, OPERATORS)
    problems: list[str] = []
    for strict in (False, True):
        try:
            return follow(module, inputs, size, strict=strict)
        except CannotFollow as no:
            problems.append(str(no))
    raise TraceError(
        f"following {type(module).__name__} to shard it",
        f"torch.export gave up {problems[0]}; as a compiler, {problems[1]}",
        "a forward pass that runs on tensors without values",
        "train it on one device, or give inputs that its code can be followed with",
    )


def follow(
    module: nn.Module,
    inputs: Inputs | None,
    size: tuple[int, int],
    *,
    strict: bool = False,
    shards: Mapping[str, ModuleShard] | None = None,
    degree: int = 1,
) -> Graph:
    """Trace a module's forward pass in one of two ways.

    Args:
        module: A module, or one rank's shard of it.
        inputs: Returns its inputs.
        size: Rows and length.
        strict: Trace as a compiler does.
        shards: For a rank's shard: the boundaries that change the shapes of inputs and outputs.
        degree: Number of ranks.

    Raises:
        CannotFollow: Tracing failed.
    """
    made = dict((inputs or token_inputs(module))(*size))
    with _ready(module, shards or {}, degree, probed=not strict) as running:
        try:
            program = torch.export.export(module, (), made, strict=strict)
        except _FOREIGN as error:
            raise CannotFollow(
                running[-1] if running else "", f"{type(error).__name__}: {_first_line(error)}"
            ) from error
    numbers = {path: numbers_of(part) for path, part in paths(module)}
    return read_program(program, module, size[0] * size[1], numbers)


def token_inputs(module: nn.Module) -> Inputs:
    """Return the usual inputs of a text model: tokens and a mask."""
    config = getattr(module, "config", None)

    def made(rows: int, length: int) -> dict[str, Any]:
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids
        if hasattr(config, "use_cache"):
            given["use_cache"] = False
        return given

    return made


@contextmanager
def _ready(module: nn.Module, shards: Mapping[str, ModuleShard], degree: int, *, probed: bool) -> Iterator[list[str]]:
    was_training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # A model's warnings about tracing do not concern the user who plans.
            warnings.simplefilter("ignore")
            stack.enter_context(replaced(module, _without_value))
            running = stack.enter_context(modules_marked(module, shards, degree))
            stack.enter_context(numbers_probed(module) if probed else nullcontext())
            yield running
    finally:
        for part in was_training:
            part.training = True


def _without_value(slot: Slot) -> torch.Tensor | None:
    """Return a parameter or buffer on the meta device; None for what is there already, and for constants."""
    if slot.kind is SlotKind.ATTRIBUTE or slot.tensor.device.type == "meta":
        return None
    return torch.empty_like(slot.tensor, device="meta")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"
