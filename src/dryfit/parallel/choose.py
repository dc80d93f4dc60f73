"""Which axes to cut: those that save most memory for what they send.

An axis is worth the bytes of the parameters it cuts, with their gradients and an optimizer's two moments, that a rank
need not hold, less the bytes that a step sends because of it. Axes that meet in one tensor cannot both be cut: the
better one is. Layers are cut in any case, that being what was asked for; the table of a vocabulary, whose sums and
scores are long, only where it pays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final

from dryfit.core.errors import ConfigError
from dryfit.parallel.axes import Hold
from dryfit.parallel.graph import LEAVE, Graph, Leaf, Ref
from dryfit.parallel.regions import CannotCut, Regions, find_regions
from dryfit.parallel.rules.base import Meeting
from dryfit.parallel.solve import Solved, solve

KEPT_PER_PARAMETER: Final = 4
"""A parameter, its gradient and the two moments of Adam, all of one size."""

LEAST_SHARE: Final = 0.01
"""A table of a vocabulary that is less of the model than this is not worth two collectives in a step."""

TOKENS: Final = 4096
"""Tokens of a step, where nobody says how many there are."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is cut.

    Attributes:
        solved: The graph with its axes.
        cut: The axes that are.
        regions: What follows from that.
        whole: Why others are not, by parameter.
    """

    solved: Solved
    cut: frozenset[int]
    regions: Regions
    whole: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Candidate:
    axis: int
    size: int
    leaves: tuple[Leaf, ...]
    gain_bytes: float
    vocabulary: bool


def choose(graph: Graph, degree: int, tokens: int = TOKENS, refused: Mapping[str, str] | None = None) -> Chosen:
    """Choose what is cut over some ranks.

    Args:
        graph: A forward pass.
        degree: Number of ranks.
        tokens: Of a step, for what it sends.
        refused: Parameters that must stay whole, with the reason.

    Raises:
        ConfigError: What is worth cutting cannot be cut by this degree, or nothing can be cut.
    """
    solved = solve(graph)
    if heads := _heads(solved):
        solved = solve(graph, heads)
    whole: dict[str, str] = {}
    found = _candidates(solved, degree, tokens, refused or {}, whole)
    cut, regions = _settle(solved, found, whole)
    whole = {name: why for name, why in whole.items() if solved.cut_of(Ref(name), cut) is None}
    sizes = {axis: solved.axes.size(axis) for axis in cut}
    if not cut:
        raise ConfigError(
            f"cutting a model over {degree} ranks",
            "nothing of it can be cut: " + "; ".join(f"{name}: {why}" for name, why in list(whole.items())[:3]),
            "layers whose features or heads are independent of each other",
            "train it without execution.tp",
        )
    wrong = {axis: size for axis, size in sizes.items() if size % degree}
    if wrong:
        raise _indivisible(solved, wrong, sizes, degree)
    return Chosen(solved, cut, regions, whole)


def _heads(solved: Solved) -> list[str]:
    """Marks behind linear layers whose features are whole only because the model returns them, or a loss needs them."""
    made: list[str] = []
    makers = {node.name: node for node in solved.graph.nodes}
    for node in solved.graph.nodes:
        maker = makers.get(node.ref("x").name) if node.op == LEAVE else None
        if maker is None or maker.op != "linear" or maker.module != node.module:
            continue
        axes = solved.axes.axes_of(solved.dims[maker.ref("weight")][0])
        holds = {reason.hold for axis in axes for reason in solved.axes.reasons(axis)}
        if holds and holds <= {Hold.OUTPUT, Hold.LOSS}:
            made.append(node.name)
    return made


def _candidates(
    solved: Solved, degree: int, tokens: int, refused: Mapping[str, str], whole: dict[str, str]
) -> list[_Candidate]:
    """The axes that might be cut, the best first; of the others' parameters, why not."""
    tables = {
        axis
        for met in solved.sums.values()
        for one in met
        if one.meeting is Meeting.LOOKUP
        for axis in solved.axes.axes_of(one.dim)
    }
    scores: dict[int, Ref] = {
        axis: Ref(node.name)
        for node in solved.graph.nodes
        if node.name in solved.opened
        for axis in solved.axes_of(node.ref("x"))[-1]
    }
    twice = _twice(solved)
    total = sum(leaf.value.size_bytes for leaf in solved.graph.parameters()) * KEPT_PER_PARAMETER
    found: list[_Candidate] = []
    for axis, leaves in _axes_of_parameters(solved).items():
        reason = next(iter(solved.axes.reasons(axis)), None)
        text = reason.text if reason else "one tensor has the same axis twice" if axis in twice else ""
        text = text or next((refused[leaf.name] for leaf in leaves if leaf.name in refused), "")
        if text:
            for leaf in leaves:
                whole.setdefault(leaf.name, text)
            continue
        saved = sum(leaf.value.size_bytes for leaf in leaves) * KEPT_PER_PARAMETER * (degree - 1) / degree
        sent = _sent_bytes(solved, axis, scores) * tokens * 2 * (degree - 1) / degree
        vocabulary = axis in tables or axis in scores
        if vocabulary and (saved <= sent or saved < LEAST_SHARE * total):
            for leaf in leaves:
                whole[leaf.name] = "cutting its rows would send more than it saves"
            continue
        if vocabulary and solved.axes.size(axis) % degree:
            for leaf in leaves:
                whole[leaf.name] = f"{degree} ranks do not divide its {solved.axes.size(axis)} rows"
            continue
        found.append(_Candidate(axis, solved.axes.size(axis), leaves, saved - sent, vocabulary))
    return sorted(found, key=lambda candidate: -candidate.gain_bytes)


def _axes_of_parameters(solved: Solved) -> dict[int, tuple[Leaf, ...]]:
    found: dict[int, dict[str, Leaf]] = {}
    for leaf in solved.graph.parameters():
        for axes in solved.axes_of(Ref(leaf.name)):
            for axis in axes:
                found.setdefault(axis, {})[leaf.name] = leaf
    return {axis: tuple(leaves.values()) for axis, leaves in found.items()}


def _twice(solved: Solved) -> set[int]:
    """Axes that are in one tensor twice, as the two sides of a square matrix between residual streams."""
    found: set[int] = set()
    for ref in solved.dims:
        axes = [axis for dim in solved.axes_of(ref) for axis in dim]
        if len(set(axes)) < len(axes):
            found.update(axis for axis in axes if axes.count(axis) > 1)
    return found


def _sent_bytes(solved: Solved, axis: int, scores: Mapping[int, Ref]) -> float:
    """Bytes of a token that are added up or put together because an axis is cut."""
    made = [
        solved.values[Ref(one.node)]
        for met in solved.sums.values()
        for one in met
        if axis in solved.axes.axes_of(one.dim)
    ]
    made += [solved.values[scores[axis]]] if axis in scores else []
    return sum(value.size_bytes for value in made) / solved.graph.tokens


def _settle(solved: Solved, found: list[_Candidate], whole: dict[str, str]) -> tuple[frozenset[int], Regions]:
    """Take the best candidates that can be cut together."""
    rivals = _rivals(solved, {candidate.axis for candidate in found})
    left = list(found)
    while True:
        taken: set[int] = set()
        for candidate in left:
            if not rivals.get(candidate.axis, set()) & taken:
                taken.add(candidate.axis)
        cut = frozenset(taken)
        try:
            return cut, find_regions(solved, cut)
        except CannotCut as no:
            for candidate in left:
                if text := no.why.get(candidate.axis):
                    whole.update({leaf.name: text for leaf in candidate.leaves})
            left = [candidate for candidate in left if candidate.axis not in no.why]


def _rivals(solved: Solved, candidates: set[int]) -> dict[int, set[int]]:
    """Candidates that meet in one tensor, which can be cut only once."""
    found: dict[int, set[int]] = {}
    for ref in solved.dims:
        here = {axis for dim in solved.axes_of(ref) for axis in dim} & candidates
        if len(here) > 1:
            for axis in here:
                found.setdefault(axis, set()).update(here - {axis})
    return found


def _indivisible(solved: Solved, wrong: Mapping[int, int], sizes: Mapping[int, int], degree: int) -> ConfigError:
    axis, size = next(iter(wrong.items()))
    names = [leaf.name for leaf in _axes_of_parameters(solved)[axis]]
    common = gcd(*sizes.values())
    allowed = [number for number in range(2, common + 1) if common % number == 0]
    return ConfigError(
        f"cutting a model over {degree} ranks",
        f"{degree} does not divide the {size} heads or features that {names[0]} and {len(names) - 1} other parameters have in common",
        f"execution.tp of {', '.join(map(str, allowed))}" if allowed else "no degree: what could be cut has no divisor in common",
        "of heads that share keys and values, the number of keys' heads counts",
    )
