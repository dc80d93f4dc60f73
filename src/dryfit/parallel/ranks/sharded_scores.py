"""Scores of a vocabulary that stay on their ranks: where a model allows it, and when it is done.

A head whose words are cut gives each rank the scores of a part of them, and its plan puts them together. A loss that
is computed over the ranks (:mod:`dryfit.parallel.ranks.vocabulary_loss`) does not need that.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

from torch import nn

from dryfit.parallel.planning.solve import Solved
from dryfit.parallel.trace.graph import MARKS, Node, Ref

_CAPS: Final = frozenset({"add", "sub", "mul", "div", "neg", "tanh", "clamp", "clamp_min", "clamp_max"})
_COPIES: Final = frozenset({"alias", "clone", "contiguous", "to", "_to_copy"})
_ON_EACH: Final = _CAPS | _COPIES
"""Operators that do the same with each score by itself, as scaling and soft caps do."""


def score_mark(solved: Solved) -> str | None:
    """The mark at which scores are put together that the model then returns, and nothing else.

    Nothing but marks and operators on each score may stand between, and nobody else may use what is there.
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
    """Whether scores stay on their ranks where a plan allows it; else they are put together.

    Attributes:
        stay: They do, from now on.
    """

    stay: bool = False

    @classmethod
    def in_calls_of(cls, module: nn.Module) -> Self:
        """They stay in calls of a module itself, and not where somebody calls a part of it, as generation does."""
        made = cls()

        def begin(*_: Any) -> None:
            made.stay = True

        def end(*_: Any) -> None:
            made.stay = False

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        return made
