"""Which tensors of a compiled graph take memory, and when: inductor's rules, without its code.

Three files of ``torch/_inductor`` say them (2.13):

* ``graph.py`` (``GraphLowering.run_node``) and ``ir.py`` (``StorageBox``): what element-wise operators give is not
  stored but computed where it is read, unless it has several readers and reads more than four tensors, has
  accumulated more than eight, has become a long expression, is an input of a kernel that inductor does not write, or an
  output of the graph. What a reduction gives is stored.
* ``scheduler.py`` (``Scheduler.fuse_nodes``): a stored tensor goes where all who read it end up in the kernel that
  makes it. None can where something between the two is a kernel by itself.
* ``scheduler.py`` (``SchedulerNode.decide_inplace_update``): a kernel may write over an input of the same size that
  nobody reads later.

The first rule is certain, and of the second that a kernel and the only one that reads it, of as many elements, are one;
of the rest only what it forbids is. So a graph has two plans: with what is certain it takes as much memory as it may,
with all three rules as little as it may.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from dryfit.gpu.private_apis.torch_modes import OpOverload, schema_of

_aten = torch.ops.aten
_READS_REUSED: Final = 4
"""``config.realize_reads_threshold``."""
_READS: Final = 8
"""``config.realize_acc_reads_threshold``, its default."""
_LONG: Final = 30
"""``config.realize_opcount_threshold``, its default."""
_LONGEST: Final = 100
"""A long expression of one tensor is stored from here on."""
_KERNELS: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "int_mm"),
        *("scaled_mm", "sort", "topk", "grouped_mm", "addbmm"),
        *("index_put", "index_put_", "unsafe_index_put", "scatter", "scatter_", "scatter_add", "scatter_add_"),
        *("scatter_reduce", "scatter_reduce_", "unsafe_masked_index_put_accumulate", "max_pool2d_with_indices"),
    }
)
"""Operators with a lowering that makes a kernel by itself, or writes into a tensor that it makes first."""
_REDUCTIONS: Final = frozenset(
    {
        *("sum", "mean", "prod", "amax", "amin", "var", "var_mean", "std", "argmax", "argmin", "any", "all"),
        *("max", "min", "xor_sum", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
        *("inductor_random", "inductor_seeds"),
        *("cat", "prepare_softmax_online", "softmax", "log_softmax"),
    }
)
"""Operators whose result is stored at once, in a kernel that may be fused: reductions, scans, random numbers, cat."""
_VIEWS: Final = frozenset({"unsafe_view", "reshape", "alias", "detach"})
_LOOKS_UP: Final = frozenset({"embedding", "index", "gather", "index_select"})
_WRITES: Final = frozenset({_aten.copy_.default})


@dataclass(slots=True)
class GraphPlan:
    """When each tensor of a graph takes memory.

    Attributes:
        nodes: Of the graph, in order.
        stored_at: When the kernel of each node whose result is stored runs (:func:`time_of`, or one before).
        dropped_at: After which time each node's result is needed no more.
        fused: Stored results that may lie within a kernel.
        in_place: Stored results that may be written over another.
        overwrites: Those of them that certainly are: both are read and written in the same order.
        kernels: Nodes that are kernels by themselves.
        reads: The stored results and inputs that the kernel of each stored result reads, but for tables of which it
            reads some rows.
    """

    nodes: list[fx.Node]
    stored_at: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    dropped_at: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    fused: set[fx.Node] = field(default_factory=set[fx.Node])
    in_place: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    overwrites: set[fx.Node] = field(default_factory=set[fx.Node])
    kernels: set[fx.Node] = field(default_factory=set[fx.Node])
    reads: dict[fx.Node, list[fx.Node]] = field(default_factory=dict[fx.Node, list[fx.Node]])


@dataclass(frozen=True, slots=True)
class _Expression:
    """What is computed where it is read: the stored tensors that it reads, and its operators."""

    reads: frozenset[fx.Node]
    operators: frozenset[fx.Node]

    @property
    def length(self) -> int:
        """What inductor counts (``OpCounterCSE``): operators, their numbers and what is loaded, each once."""
        numbers = sum(isinstance(one, int | float) for node in self.operators for one in node.args)
        return len(self.reads) + len(self.operators) + numbers


def plan_graph(
    graph: fx.Graph, fuses: Callable[[Any], bool], views: Callable[[Any], bool], fixed: Iterable[int]
) -> GraphPlan:
    """Plan the memory of a graph.

    Args:
        graph: Of ATen operators, without in-place ones but ``copy_``.
        fuses: Whether inductor writes an operator's kernel.
        views: Whether an operator gives a view.
        fixed: Numbers of the inputs that no kernel may write over.
    """
    return _Planner(graph, fuses, views, set(fixed)).run()


def time_of(place: int) -> int:
    """Return when a node runs by its place in the graph: between two nodes, what is stored late is."""
    return 2 * place


class _Planner:
    """Goes through a graph as inductor's lowering does."""

    def __init__(
        self, graph: fx.Graph, fuses: Callable[[Any], bool], views: Callable[[Any], bool], is_fixed: set[int]
    ) -> None:
        self._fuses, self._views = fuses, views
        self.plan = GraphPlan(list(graph.nodes))
        self._place = {node: time_of(at) for at, node in enumerate(self.plan.nodes)}
        self._base: dict[fx.Node, fx.Node] = {}
        self._open: dict[fx.Node, _Expression] = {}
        self._last_read: dict[fx.Node, int] = {}
        self._read_by: dict[fx.Node, frozenset[fx.Node]] = {}
        """The stored tensors that each kernel reads."""
        self._outputs: set[fx.Node] = set()
        self._tables: set[fx.Node] = set()
        self._reductions: set[fx.Node] = set()
        self._fixed = {
            node for at, node in enumerate(one for one in graph.nodes if one.op == "placeholder") if at in is_fixed
        }

    def run(self) -> GraphPlan:
        """Return the plan."""
        plan = self.plan
        for node, at in self._place.items():
            self._base[node] = node
            match node.op:
                case "placeholder" | "get_attr":
                    self._last_read[node] = at
                case "output":
                    self._end(node, at)
                case _:
                    self._call(node, at)
        readers = self._fuse()
        for node in sorted(self.plan.fused, key=lambda one: (-self.plan.stored_at[one], self._place[one])):
            self._inline(node, readers)
        self._overwrite()
        plan.reads = {node: self._in_turn(reads - self._tables) for node, reads in self._read_by.items()}
        for node in plan.nodes:
            used = max((self._place[user] for user in node.users), default=self._place[node])
            plan.dropped_at[node] = max(used, self._last_read.get(node, 0), plan.stored_at.get(node, 0))
        return plan

    def _in_turn(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self._place.__getitem__)

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose memory a node reads."""
        return [self._base[one] for one in node.all_input_nodes]

    def _reads(self, inputs: Iterable[fx.Node]) -> frozenset[fx.Node]:
        found: set[fx.Node] = set()
        for one in inputs:
            found |= self._open[one].reads if one in self._open else {one}
        return frozenset(found)

    def _call(self, node: fx.Node, at: int) -> None:
        target, inputs = node.target, self._inputs(node)
        operator = isinstance(target, OpOverload)
        name = schema_of(target).name.partition("::")[2].lstrip("_") if operator else ""
        if (operator and (self._views(target) or name in _VIEWS)) or _is_item(node):
            self._base[node] = inputs[0] if inputs else node
            if _is_item(node) and inputs and inputs[0] in self.plan.kernels:
                self._take_element(node, inputs[0], at)
            else:
                self._reused(self._base[node], len(node.users), at)
        elif target in _WRITES:
            self._base[node] = inputs[0]
            self._touch(self._reads(inputs), at)
        elif not operator or not self._fuses(target) or (name in _KERNELS and not _is_chosen(node)):
            for one in inputs:
                self._store(one, at - 1)
            self._touch(inputs, at)
            self.plan.kernels.add(node)
            self._stored(node, frozenset(inputs), at)
        elif name in _REDUCTIONS:
            self._reductions.add(node)
            self._stored(node, self._reads(inputs), at)
        else:
            if name in _LOOKS_UP:
                self._tables.add(inputs[0])
            parts = [self._open[one].operators for one in inputs if one in self._open]
            self._open[node] = _Expression(self._reads(inputs), frozenset({node}).union(*parts))
            self._reused(node, len(node.users), at)

    def _take_element(self, node: fx.Node, kernel: fx.Node, at: int) -> None:
        """Let one of several results of a kernel be a tensor by itself, stored where the kernel was."""
        self._base[node] = node
        self.plan.kernels.add(node)
        self._read_by[node] = frozenset({kernel})
        self.plan.stored_at[node] = self.plan.stored_at[kernel]
        self._last_read[node] = at

    def _reused(self, node: fx.Node, users: int, at: int) -> None:
        """Store an expression where it is long or has many readers (``mark_reuse``, ``has_exceeded_max_reads``)."""
        made = self._open.get(node)
        if made is None:
            return
        reads, length = len(made.reads), made.length
        is_long = length > _LONG
        is_output = users > 1 and reads and any(user.op == "output" for user in node.users)
        if (users > 1 and (is_long or reads > _READS_REUSED or is_output)) or (
            (reads > _READS or is_long) and (reads > 1 or length > _LONGEST)
        ):
            self._store(node, at)

    def _store(self, node: fx.Node, at: int) -> None:
        """Store an expression, whose kernel runs at a time."""
        made = self._open.pop(node, None)
        if made is not None:
            self._stored(node, made.reads, at)

    def _stored(self, node: fx.Node, reads: frozenset[fx.Node], at: int) -> None:
        self.plan.stored_at[node] = at
        self._read_by[node] = reads
        self._last_read[node] = at
        self._touch(reads, at)

    def _touch(self, reads: Iterable[fx.Node], at: int) -> None:
        for one in reads:
            self._last_read[one] = max(self._last_read.get(one, 0), at)

    def _end(self, node: fx.Node, at: int) -> None:
        self._outputs = set(self._inputs(node))
        for one in self._in_turn(self._outputs):
            self._store(one, at - 1)
        self._touch(self._outputs, at)

    def _inline(self, node: fx.Node, readers: dict[fx.Node, list[fx.Node]]) -> None:
        """Store nothing that one kernel alone reads, of as many elements: these two are always fused."""
        found = readers.get(node, [])
        if len(found) != 1 or _elements(found[0]) != _elements(node):
            return
        reader, reads = found[0], self._read_by.pop(node)
        self._read_by[reader] = self._read_by[reader] - {node} | reads
        self._touch(reads, self.plan.stored_at[reader])
        for one in reads:
            readers[one] = list(dict.fromkeys(reader if other is node else other for other in readers[one]))
        del self.plan.stored_at[node]
        self.plan.fused.remove(node)

    def _fuse(self) -> dict[fx.Node, list[fx.Node]]:
        """Find what may lie within a kernel: all who read it can be fused, and no other kernel stands between.

        Returns:
            The kernels that read each stored result.
        """
        place = self._place
        numbers = {node: number for number, node in enumerate(self.plan.stored_at)}
        above: dict[fx.Node, int] = {}
        behind: dict[fx.Node, int] = {}
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in sorted(self.plan.stored_at, key=lambda one: (self.plan.stored_at[one], place[one])):
            reads = self._read_by[node]
            ancestors = barred = 0
            for one in reads:
                ancestors |= above.get(one, 0)
                barred |= behind.get(one, 0)
                readers.setdefault(one, []).append(node)
            behind[node] = ancestors | barred if node in self.plan.kernels else barred
            above[node] = ancestors | (1 << numbers[node])
        for node in self.plan.stored_at:
            if node in self.plan.kernels or node in self._outputs:
                continue
            bit = 1 << numbers[node]
            if not any(one in self.plan.kernels or behind[one] & bit for one in readers.get(node, ())):
                self.plan.fused.add(node)
        return readers

    def _overwrite(self) -> None:
        """Find what may be written over an input of the same size that is read there for the last time."""
        taken: set[fx.Node] = set()
        for node, at in self.plan.stored_at.items():
            if node in self.plan.kernels or node in self.plan.fused:
                continue
            for one in self._in_turn(self._read_by[node]):
                is_free = self._last_read[one] == at and one not in self._fixed and one not in self.plan.fused
                if is_free and one not in taken and one not in self._outputs and _size(one) == _size(node) is not None:
                    self.plan.in_place[node] = one
                    taken.add(one)
                    if node not in self._reductions and _in_order(one, node):
                        self.plan.overwrites.add(node)
                    break


def _is_chosen(node: fx.Node) -> bool:
    """Whether a node writes one number a row into a constant: inductor compares places instead.

    ``scatter_upon_const_tensor``: torch 2.11 and newer do so before a graph is seen here.
    """
    if node.target is not _aten.scatter.value:
        return False
    constant, dim, selector, _ = node.args
    chosen = selector.meta.get("val") if isinstance(selector, fx.Node) else None
    if not isinstance(constant, fx.Node) or constant.target is not _aten.full.default or chosen is None:
        return False
    places = dict(enumerate(zip(chosen.shape, node.meta["val"].shape, strict=True)))
    chosen_of_row, _ = places.pop(dim % chosen.dim())  # pyright: ignore[reportOperatorIssue]
    return chosen_of_row == 1 and all(rows >= wanted for rows, wanted in places.values())


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _elements(node: fx.Node) -> Any:
    """Return how many elements a node's result has; of several tensors, or of none, nothing that equals another."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else node


def _in_order(read: fx.Node, written: fx.Node) -> bool:
    """Whether all that reads a tensor before another is written reads it as it lies, and the other lies so too."""
    values = [one.meta["val"] for one in (read, written, *read.users) if isinstance(one.meta.get("val"), torch.Tensor)]
    return len(values) == 2 + len(read.users) and all(
        one.is_contiguous() and one.numel() == values[0].numel() for one in values
    )


def _size(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the elements and the bytes of each of a node's result; None: it is no tensor."""
    value = node.meta.get("val")
    return (value.numel(), value.element_size()) if isinstance(value, torch.Tensor) else None
