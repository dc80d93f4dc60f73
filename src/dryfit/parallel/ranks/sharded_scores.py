"""Vocabulary scores that stay sharded: find where a model allows it, and switch it on during its calls.

A head that is sharded by words gives each rank the scores of some words, and its plan gathers them. A loss that is
computed over the ranks (:mod:`dryfit.parallel.ranks.vocabulary_loss`) does not need the gathered scores.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

from torch import nn

from dryfit.parallel.planning.solve import Solved
from dryfit.parallel.trace.graph import MARKS, Node, Ref

_ARITHMETIC: Final = frozenset({"add", "sub", "mul", "div", "neg", "tanh", "clamp", "clamp_min", "clamp_max"})
_COPIES: Final = frozenset({"alias", "clone", "contiguous", "to", "_to_copy"})
_ON_EACH: Final = _ARITHMETIC | _COPIES
"""Operators on each score by itself, as in scaling and soft caps."""


def score_mark(solved: Solved) -> str | None:
    """Return the mark at which the scores are gathered that are all that the model returns; None if there is none.

    Only marks and operators on each score may stand between the mark and the output, and nothing else may use what is
    between them.
    """
    graph = solved.graph
    nodes = {node.name: node for node in graph.nodes}
    if len(graph.outputs) != 1:
        return None
    seen: dict[Ref, None] = {}
    ends: set[str] = set()
    left = [graph.outputs[0]]
    while left:
        ref = left.pop()
        node = nodes.get(ref.name)
        if node is None or solved.values[ref].shape != solved.values[graph.outputs[0]].shape:
            return None
        seen[ref] = None
        if node.name in solved.opened:
            ends.add(node.name)
        elif _on_each(node):
            left.extend(given for given in node.refs() if given not in seen)
        else:
            return None
    within = {ref.name for ref in seen}
    outside = any(
        ref in seen for node in graph.nodes if node.name not in within and any(node.outputs) for ref in node.refs()
    )
    return ends.pop() if len(ends) == 1 and not outside else None


def _on_each(node: Node) -> bool:
    return (node.op in MARKS or node.op in _ON_EACH) and any(True for _ in node.refs())


@dataclass(slots=True)
class ShardedScores:
    """Switch for the scores of a plan that may stay sharded.

    Attributes:
        stay: Whether they stay sharded; else they are gathered.
    """

    stay: bool = False

    @classmethod
    def in_calls_of(cls, module: nn.Module) -> Self:
        """Return a switch that is on during calls of the module, and off when a part is called, as in generation."""
        made = cls()

        def begin(*_: Any) -> None:
            made.stay = True

        def end(*_: Any) -> None:
            made.stay = False

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        return made
