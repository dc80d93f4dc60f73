"""Choose the axes to shard: those that save the most memory for the bytes they send.

An axis is worth the bytes of parameters, gradients and an optimizer's two moments that a rank need not hold, less the
bytes that a step sends because of it. Of axes that meet in one tensor only one can be sharded. Layers are always
sharded; the table of a vocabulary, whose sums and scores are long, only where it pays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Final

from dryfit.parallel.axes import Obstacle
from dryfit.parallel.graph import LEAVE, Graph, Leaf, Node, Ref
from dryfit.parallel.regions import CannotShard, GraphAxes, Regions, find_axes, find_regions, score_mark
from dryfit.parallel.rules import SumKind
from dryfit.parallel.vocabulary_loss import NUMBERS
from dryfit.settings.errors import ConfigError

KEPT_PER_PARAMETER: Final = 4
"""A parameter, its gradient and the two moments of Adam, all of one size."""

LEAST_SHARE: Final = 0.01
"""Least share of the model that makes a vocabulary table worth two collectives in a step."""

TOKENS: Final = 4096
"""Tokens of a step by default."""

LOSS_BYTES: Final = 4 * NUMBERS
"""Bytes a token that a rank sends to each other rank for a loss over the ranks, in fp32."""


@dataclass(frozen=True, slots=True)
class ShardedAxes:
    """The axes that are sharded.

    Attributes:
        traced: The graph with its axes.
        axes: The sharded axes.
        regions: Where collectives are needed.
        whole: Why other matrices stay whole, by parameter.
        scores: The module whose scores stay sharded where the loss is computed over the ranks.
    """

    traced: GraphAxes
    axes: frozenset[int]
    regions: Regions
    whole: Mapping[str, str]
    scores: str | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    axis: int
    size: int
    leaves: tuple[Leaf, ...]
    saved_bytes: float
    gain_bytes: float
    vocabulary: bool


_PRIORITY: Final = (Obstacle.UNKNOWN, Obstacle.OPERATOR, Obstacle.LOSS, Obstacle.BUFFER, Obstacle.OUTPUT, Obstacle.ROWS)
"""Kinds of reasons, the most informative first."""


@dataclass(slots=True)
class _Whole:
    """Why parameters stay whole; of several reasons the most informative, which has the lowest rank."""

    why: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, leaves: Iterable[Leaf], text: str, rank: int = 0) -> None:
        for leaf in leaves:
            self.why[leaf.name] = min(self.why.get(leaf.name, (rank, text)), (rank, text), key=lambda one: one[0])


def choose(
    graph: Graph,
    degree: int,
    tokens: int = TOKENS,
    refused: Mapping[str, str] | None = None,
    *,
    loss_over_ranks: bool = False,
) -> ShardedAxes:
    """Choose the axes to shard over some ranks.

    Args:
        graph: A forward pass.
        degree: Number of ranks.
        tokens: Tokens of a step, for weighing the bytes sent.
        refused: Parameters that must stay whole, with the reason.
        loss_over_ranks: Whether scores may stay sharded.

    Raises:
        ConfigError: Nothing can be sharded, or the degree does not divide it.
    """
    traced = find_axes(graph)
    if heads := _heads(traced):
        traced = find_axes(graph, heads)
    whole = _Whole()
    apart = score_mark(traced) if loss_over_ranks else None
    found = _candidates(traced, degree, tokens, refused or {}, whole, apart)
    sharded, regions = _settle(traced, found, whole)
    why = {
        leaf.name: whole.why[leaf.name][1]
        for leaf in graph.parameters()
        if len(leaf.value.shape) > 1 and traced.sharded_axis(Ref(leaf.name), sharded) is None and leaf.name in whole.why
    }
    if not sharded:
        raise ConfigError(
            f"sharding a model over {degree} ranks",
            "nothing of it can be sharded: " + "; ".join(f"{name}: {text}" for name, text in list(why.items())[:3]),
            "layers whose features or heads are independent of each other",
            "train it without execution.tp",
        )
    layers = [one for one in found if one.axis in sharded and not one.vocabulary]
    if wrong := next((one for one in layers if one.size % degree), None):
        raise _indivisible(wrong, gcd(*(one.size for one in layers)), degree)
    mark = next((node for node in graph.nodes if node.name == apart and node.name in regions.at), None)
    return ShardedAxes(traced, sharded, regions, why, mark.module if mark is not None else None)


def _heads(traced: GraphAxes) -> list[str]:
    """Return marks behind linear layers whose outputs are whole only for the model's output or its loss."""
    made: list[str] = []
    makers = {node.name: node for node in traced.graph.nodes}
    for node in traced.graph.nodes:
        maker = makers.get(node.ref("x").name) if node.op == LEAVE else None
        if maker is None or maker.op != "linear" or maker.module != node.module:
            continue
        axes = traced.axes.axes_of(traced.dims[maker.ref("weight")][0])
        obstacles = {reason.obstacle for axis in axes for reason in traced.axes.reasons(axis)}
        if obstacles and obstacles <= {Obstacle.OUTPUT, Obstacle.LOSS}:
            made.append(node.name)
    return made


def _candidates(
    traced: GraphAxes, degree: int, tokens: int, refused: Mapping[str, str], whole: _Whole, apart: str | None
) -> list[_Candidate]:
    """Return the axes that can be sharded; note for the others' parameters why not."""
    tables = {
        axis
        for met in traced.sums.values()
        for one in met
        if one.kind is SumKind.LOOKUP
        for axis in traced.axes.axes_of(one.dim)
    }
    scores: dict[int, Ref] = {
        axis: Ref(node.name)
        for node in traced.graph.nodes
        if node.name in traced.opened
        for axis in traced.axes_of(node.ref("x"))[-1]
    }
    twice = _twice(traced)
    total = sum(leaf.value.size_bytes for leaf in traced.graph.parameters()) * KEPT_PER_PARAMETER
    found: list[_Candidate] = []
    for axis, leaves in _axes_of_parameters(traced).items():
        if no := next((refused[leaf.name] for leaf in leaves if leaf.name in refused), ""):
            whole.note(leaves, no)
            continue
        if reason := min(traced.axes.reasons(axis), key=lambda reason: _PRIORITY.index(reason.obstacle), default=None):
            whole.note(leaves, reason.text, 1 + _PRIORITY.index(reason.obstacle))
            continue
        if axis in twice:
            whole.note(leaves, "one tensor has the same axis twice")
            continue
        saved = sum(leaf.value.size_bytes for leaf in leaves) * KEPT_PER_PARAMETER * (degree - 1) / degree
        sent = _sent_bytes(traced, axis, scores, apart) * tokens * 2 * (degree - 1) / degree
        vocabulary = axis in tables or axis in scores
        if vocabulary and (saved <= sent or saved < LEAST_SHARE * total):
            whole.note(leaves, "sharding it would send more than it saves")
            continue
        if vocabulary and traced.axes.size(axis) % degree:
            whole.note(leaves, f"{degree} ranks do not divide its {traced.axes.size(axis)} rows")
            continue
        found.append(_Candidate(axis, traced.axes.size(axis), leaves, saved, saved - sent, vocabulary))
    return found


def _axes_of_parameters(traced: GraphAxes) -> dict[int, tuple[Leaf, ...]]:
    found: dict[int, dict[str, Leaf]] = {}
    for leaf in traced.graph.parameters():
        for axes in traced.axes_of(Ref(leaf.name)):
            for axis in axes:
                found.setdefault(axis, {})[leaf.name] = leaf
    return {axis: tuple(leaves.values()) for axis, leaves in found.items()}


def _twice(traced: GraphAxes) -> set[int]:
    """Return axes that are in one tensor twice, as the two sides of a square matrix between residual streams."""
    found: set[int] = set()
    for ref in traced.dims:
        axes = [axis for dim in traced.axes_of(ref) for axis in dim]
        if len(set(axes)) < len(axes):
            found.update(axis for axis in axes if axes.count(axis) > 1)
    return found


def _sent_bytes(traced: GraphAxes, axis: int, scores: Mapping[int, Ref], apart: str | None) -> float:
    """Return the bytes a token that are reduced or gathered because an axis is sharded."""
    made = [
        traced.values[Ref(one.node)]
        for met in traced.sums.values()
        for one in met
        if axis in traced.axes.axes_of(one.dim)
    ]
    told = 0
    if axis in scores and scores[axis].name == apart:
        # Scores are not put together; what is summed then is the gradient of what the head is given.
        told = LOSS_BYTES
        made += [traced.values[node.ref("input")] for node in traced.graph.nodes if _makes(node, axis, traced)]
    elif axis in scores:
        made.append(traced.values[scores[axis]])
    return told + sum(value.size_bytes for value in made) / traced.graph.tokens


def _makes(node: Node, axis: int, traced: GraphAxes) -> bool:
    """Whether an operator is a linear layer that makes features along an axis."""
    return node.op == "linear" and axis in traced.axes.axes_of(traced.dims[node.ref("weight")][0])


def _settle(traced: GraphAxes, found: list[_Candidate], whole: _Whole) -> tuple[frozenset[int], Regions]:
    """Return the best candidates that can be sharded together, and their regions."""
    rivals = _rivals(traced, {candidate.axis for candidate in found})
    left = list(found)
    while True:
        sharded = _independent(left, rivals)
        try:
            return sharded, find_regions(traced, sharded)
        except CannotShard as no:
            for candidate in left:
                if text := no.why.get(candidate.axis):
                    whole.note(candidate.leaves, text)
            left = [candidate for candidate in left if candidate.axis not in no.why]


def _independent(candidates: list[_Candidate], rivals: Mapping[int, set[int]]) -> frozenset[int]:
    """Return candidates of which no two are rivals, greedily by the gain for each rival they exclude.

    Source: S. Sakai et al., "A note on greedy algorithms for the maximum weighted independent set problem", 2003
    (GWMIN).
    """
    left = {candidate.axis: candidate for candidate in candidates}
    taken: set[int] = set()

    def worth(candidate: _Candidate) -> tuple[bool, float]:
        excluded = len(rivals.get(candidate.axis, set()) & left.keys())
        gain = candidate.gain_bytes if candidate.gain_bytes > 0 else candidate.saved_bytes
        return candidate.gain_bytes > 0, gain / (excluded + 1)

    while left:
        best = max(left.values(), key=worth)
        taken.add(best.axis)
        for axis in rivals.get(best.axis, set()) | {best.axis}:
            left.pop(axis, None)
    return frozenset(taken)


def _rivals(traced: GraphAxes, candidates: set[int]) -> dict[int, set[int]]:
    """Return candidates that meet in one tensor, of which only one can be sharded."""
    found: dict[int, set[int]] = {}
    for ref in traced.dims:
        here = {axis for dim in traced.axes_of(ref) for axis in dim} & candidates
        if len(here) > 1:
            for axis in here:
                found.setdefault(axis, set()).update(here - {axis})
    return found


def _indivisible(wrong: _Candidate, common: int, degree: int) -> ConfigError:
    allowed = [str(number) for number in range(2, common + 1) if common % number == 0]
    first, others = wrong.leaves[0].name, len(wrong.leaves) - 1
    return ConfigError(
        f"sharding a model over {degree} ranks",
        f"{degree} does not divide {wrong.size}, the heads or features that {first} and {others} others are sharded by",
        f"execution.tp of {', '.join(allowed)}" if allowed else "no degree: what is sharded has no divisor in common",
        "where query heads share keys and values, the number of key and value heads counts",
    )
