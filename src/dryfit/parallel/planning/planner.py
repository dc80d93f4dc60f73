"""Plan how a module is sharded over ranks, without a process group or a device."""

import re

from torch import nn

from dryfit.core.errors import ConfigError, TraceError
from dryfit.core.sharding.shard_plan import Boundary, ModuleShard, ParameterShard, ShardPlan
from dryfit.parallel.planning.choose import TOKENS, ShardedAxes, choose
from dryfit.parallel.planning.rank_shapes import Attributes, ShapeMismatch, check_size, read_numbers, shape_mismatches
from dryfit.parallel.trace.capture import OTHER, SMALL, Inputs, capture
from dryfit.parallel.trace.graph import Leaf, Ref
from dryfit.parallel.trace.repeats import for_all_layers, shortened


def plan_shards(
    module: nn.Module,
    degree: int,
    *,
    inputs: Inputs | None = None,
    tokens: int = TOKENS,
    loss_over_ranks: bool = False,
) -> ShardPlan:
    """Plan how a model is sharded over ranks.

    Args:
        module: A model, which may be on the meta device; it is not changed.
        degree: Number of ranks.
        inputs: Returns its keyword arguments, given rows and length; None: tokens and a mask.
        tokens: Tokens of a step, for weighing bytes sent against bytes saved.
        loss_over_ranks: Whether the loss is a cross entropy over the last dimension of the model's output and can be
            computed from a rank's part of it: vocabulary scores then stay sharded.

    Raises:
        ConfigError: Nothing can be sharded, or the degree does not divide it.
        TraceError: The model's code cannot be traced.
    """
    if degree < 2:
        raise ConfigError("planning how a model is sharded", f"{degree} ranks", "2 or more", "leave execution.tp away")
    with shortened(module) as stands_for:
        try:
            plan = _planned(module, degree, inputs, tokens, loss_over_ranks)
        except TraceError:
            if not stands_for:
                raise
            plan = None
    if plan is None:  # its code needs all of its layers
        return _planned(module, degree, inputs, tokens, loss_over_ranks)
    return for_all_layers(plan, module, stands_for)


def _planned(module: nn.Module, degree: int, inputs: Inputs | None, tokens: int, loss_over_ranks: bool) -> ShardPlan:
    graph = capture(module, inputs, SMALL)
    other = capture(module, inputs, OTHER)
    check_size(graph, other, module)
    refused: dict[str, str] = {}
    while True:
        chosen = choose(graph, degree, tokens, refused, loss_over_ranks=loss_over_ranks)
        wrong: list[ShapeMismatch] = []
        tried: list[Attributes] = []
        for computed in (False, True):
            attributes = read_numbers(chosen, other, degree, computed=computed)
            if attributes in tried:
                continue
            tried.append(attributes)
            plan = assemble(chosen, degree, attributes)
            mismatches = shape_mismatches(module, inputs, chosen, other, plan)
            if not mismatches:
                return plan
            wrong = wrong or mismatches
        refused |= _kept_whole(chosen, wrong)


def _kept_whole(chosen: ShardedAxes, wrong: list[ShapeMismatch]) -> dict[str, str]:
    """Return the parameters that stay whole because of shape_mismatches, in all layers alike, with the reason."""
    kept: dict[str, str] = {}
    for mismatch in wrong:
        patterns = {
            re.sub(r"\d+", "*", leaf.name)
            for leaf in chosen.traced.graph.parameters()
            if chosen.traced.sharded_axis(Ref(leaf.name), mismatch.axes) is not None
        }
        for leaf in chosen.traced.graph.parameters():
            if re.sub(r"\d+", "*", leaf.name) in patterns:
                kept[leaf.name] = mismatch.text
    return kept


def assemble(chosen: ShardedAxes, degree: int, attributes: Attributes) -> ShardPlan:
    """Return the plan for the chosen axes."""
    parameters: dict[str, ParameterShard] = {}
    for leaf in chosen.traced.graph.parameters():
        parameters[leaf.name] = _parameter(chosen, leaf)
        for name in leaf.names[1:]:
            parameters[name] = parameters[leaf.name].model_copy(update={"tied_to": leaf.name})
    return ShardPlan(
        degree=degree,
        parameters=parameters,
        modules=_modules(chosen, attributes),
        whole=dict(chosen.whole),
        scores=chosen.scores,
    )


def _parameter(chosen: ShardedAxes, leaf: Leaf) -> ParameterShard:
    traced, ref = chosen.traced, Ref(leaf.name)
    axis = traced.sharded_axis(ref, chosen.axes)
    if axis is None:
        return ParameterShard(shape=leaf.value.shape, sum_gradient=leaf.name in chosen.regions.summed)
    dim = traced.places(ref, axis)[0]
    outer, inner = traced.axes.layout(traced.dims[ref][dim], axis)
    block = leaf.value.shape[dim] // outer
    return ParameterShard(shape=leaf.value.shape, dim=dim, blocks=(block,) * outer, unit=inner)


def _modules(chosen: ShardedAxes, attributes: Attributes) -> dict[str, ModuleShard]:
    regions = chosen.regions
    inputs: dict[str, dict[str, Boundary]] = {}
    outputs: dict[str, dict[str, Boundary]] = {}
    for module, name in regions.copies:
        inputs.setdefault(module, {})[name] = Boundary.COPY
    for module, name in regions.reduces:
        outputs.setdefault(module, {})[name] = Boundary.REDUCE
    for module, name in regions.gathers:
        outputs.setdefault(module, {})[name] = Boundary.GATHER
    paths = sorted({*inputs, *outputs, *attributes, *regions.lookups, *regions.biases}, key=_in_order)
    return {
        path: ModuleShard(
            inputs=inputs.get(path, {}),
            outputs=outputs.get(path, {}),
            attributes=attributes.get(path, {}),
            vocabulary=path in regions.lookups,
            bias_after=path in regions.biases,
        )
        for path in paths
    }


def _in_order(path: str) -> list[tuple[int, str]]:
    """Return a sort key that orders layers by number."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
