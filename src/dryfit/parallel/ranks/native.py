"""A plan in transformers' own words: module names with wildcards, and a style for each.

Source: ``transformers/distributed/tensor_parallel.py`` (5.23). What the styles do is a plan too, not always the same
one: each column-wise layer sums the gradients of its own input, where a plan may do so once for several. So what
transformers would run is given as a plan by :func:`as_run_natively`, for the prover.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from dryfit.core.sharding.shard_plan import Boundary, ModuleShard, ParameterShard, ShardPlan

_WHOLE: Final = "replicate"
_COLUMN: Final = frozenset({"colwise", "colwise_gather_output", "packed_colwise"})
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


def native_plan(plan: ShardPlan, shipped: Iterable[str] = ()) -> dict[str, str] | None:
    """Say a plan as ``DistributedConfig(tp_plan=...)`` takes it.

    Args:
        plan: The plan.
        shipped: Names of the plan that the model's class brings along (``model.tp_plan``): transformers merges the two,
            so what is whole in ours is said for those.

    Returns:
        Styles by name; None where transformers has none for what the plan does: transposed weights, three blocks in
        one, numbers that the code reads, tied weights that are cut, other shapes in one layer than in the next. Nor for
        sums of gradients of whole parameters: its hook sums what was accumulated before once more.
    """
    styles = _styles(plan)
    if styles is None:
        return None
    generic: dict[str, str] = {}
    for path, style in styles.items():
        name = _NUMBER.sub("*", path)
        if generic.setdefault(name, style) != style:
            return None
    needed = {name: style for name, style in generic.items() if style != _WHOLE}
    return needed | {name: _WHOLE for name in shipped if name not in needed}


def as_run_natively(plan: ShardPlan) -> ShardPlan | None:
    """What transformers does with :func:`native_plan`, as a plan; None where that is None."""
    styles = _styles(plan)
    if styles is None or native_plan(plan) is None:
        return None
    modules: dict[str, ModuleShard] = {}
    for path, style in styles.items():
        row = plan.modules.get(path, ModuleShard())
        if style in _COLUMN:
            modules[path] = row.model_copy(update={"inputs": {"input": Boundary.COPY}})
        elif style != _WHOLE:
            modules[path] = row
    return plan.model_copy(update={"modules": modules, "traffic": ()})


def _styles(plan: ShardPlan) -> dict[str, str] | None:
    """A style for each module with parameters; None where one has none."""
    owned: dict[str, dict[str, ParameterShard]] = {}
    for name, shard in plan.parameters.items():
        path, _, own = name.rpartition(".")
        owned.setdefault(path, {})[own] = shard
    styles: dict[str, str] = {}
    for path, parameters in owned.items():
        style = _style(parameters, plan.modules.get(path, ModuleShard()))
        if style is None:
            return None
        styles[path] = style
    around = [row for path, row in plan.modules.items() if path not in owned]
    only_copies = ModuleShard()
    plain = all(row.model_copy(update={"inputs": {}}) == only_copies and _copies(row) for row in around)
    return styles if plain else None


def _copies(row: ModuleShard) -> bool:
    return all(boundary is Boundary.COPY for boundary in row.inputs.values())


def _style(parameters: Mapping[str, ParameterShard], row: ModuleShard) -> str | None:
    cut = {name for name, shard in parameters.items() if shard.dim is not None}
    if row.attributes or row.dim != -1 or any(shard.sum_gradient for shard in parameters.values()):
        return None
    if not cut:
        return _WHOLE if not row.outputs and _copies(row) else None
    if not parameters.keys() <= {"weight", "bias"} or any(shard.tied_to for shard in parameters.values()):
        return None
    weight, bias = parameters["weight"], parameters.get("bias")
    if weight.dim == 0 and not row.vocabulary:
        return _column(weight, bias, row) if _copies(row) else None
    if len(weight.blocks) != 1 or (bias is not None and bias.dim is not None):
        return None
    if row.vocabulary:
        return "embedding_rowwise" if row.outputs == {"0": Boundary.REDUCE} else None
    if weight.dim != 1 or row.outputs != {"0": Boundary.REDUCE} or row.bias_after != (bias is not None):
        return None
    kinds = set(row.inputs.values())
    return "rowwise" if not kinds else "rowwise_split_input" if kinds == {Boundary.SPLIT} else None


def _column(weight: ParameterShard, bias: ParameterShard | None, row: ModuleShard) -> str | None:
    if bias is not None and (bias.dim != 0 or bias.blocks != weight.blocks):
        return None
    match len(weight.blocks), row.outputs:
        case 1, {"0": Boundary.GATHER}:
            return "colwise_gather_output"
        case 1, outputs if not outputs:
            return "colwise"
        case 2, outputs if not outputs and weight.blocks[0] == weight.blocks[1] and bias is None:
            return "packed_colwise"
        case _:
            return None
