"""Check that a shard plan fits a module, by names and shapes, before anything changes."""

from torch import nn
from transformers.pytorch_utils import Conv1D

from dryfit.core.errors import ShardError
from dryfit.core.sharding.shard_plan import Boundary, ModuleShard, ParameterShard, ShardPlan
from dryfit.core.text.words import few


def check_plan(module: nn.Module, plan: ShardPlan) -> None:
    """Compare a plan with the whole module it is for.

    Raises:
        ShardError: Parameters or modules are missing or too many, shapes differ, tied parameters are sharded
            differently, or a module cannot do what its row says. Every problem is named.
    """
    wrong = [*_parameters(module, plan), *_modules(module, plan), *_scores(module, plan)]
    if wrong:
        raise ShardError(
            f"sharding a {type(module).__name__} over {plan.degree} ranks",
            few(wrong),
            allowed="a plan made for this module",
            hint="plan it again; plans belong to one config and one version of the model's code",
        )


def shards_of(module: nn.Module, plan: ShardPlan) -> dict[str, ParameterShard]:
    """Return a plan's rows by every name of each parameter; a plan may name a tied one by any of them."""
    every = dict(module.named_parameters(remove_duplicate=False))
    by_id = {id(every[name]): shard for name, shard in plan.parameters.items() if name in every}
    return {name: by_id[id(parameter)] for name, parameter in every.items() if id(parameter) in by_id}


def _parameters(module: nn.Module, plan: ShardPlan) -> list[str]:
    wrong: list[str] = []
    every = dict(module.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    wrong += [f"{name} is no parameter of it" for name in plan.parameters if name not in every]
    names_of: dict[int, list[str]] = {}
    for name, parameter in every.items():
        if name in plan.parameters:
            names_of.setdefault(id(parameter), []).append(name)
    wrong += [f"{name} has no row" for key, name in first.items() if key not in names_of]
    for names in names_of.values():
        one = plan.parameters[names[0]]
        if tuple(every[names[0]].shape) != one.shape:
            wrong.append(f"{names[0]} is {list(every[names[0]].shape)}, its row says {list(one.shape)}")
        if one.dim is not None and one.sum_gradient:
            wrong.append(f"{names[0]} is sharded: its gradients are slices, and not to be summed")
        others = [name for name in names if _way(plan.parameters[name]) != _way(one)]
        wrong += [f"{name} is tied to {names[0]} and sharded differently" for name in others]
    return wrong


def _way(shard: ParameterShard) -> tuple[object, ...]:
    return shard.shape, shard.dim, shard.blocks, shard.sum_gradient


def _modules(module: nn.Module, plan: ShardPlan) -> list[str]:
    parts = dict(module.named_modules(remove_duplicate=False))
    shards = shards_of(module, plan)
    wrong: list[str] = []
    for path, what in plan.modules.items():
        if path not in parts:
            wrong.append(f"{path} is no module of it")
            continue
        dot = f"{path}." if path else ""
        own = (shards.get(f"{dot}weight"), shards.get(f"{dot}bias"))
        wrong += [f"{path}: {found}" for found in _module(parts[path], what, *own)]
    return wrong


def _scores(module: nn.Module, plan: ShardPlan) -> list[str]:
    if plan.scores is None:
        return []
    if plan.modules.get(plan.scores, ModuleShard()).outputs != {"0": Boundary.GATHER}:
        return [f"{plan.scores} has scores that stay sharded, and does not put them together elsewhere"]
    row = shards_of(module, plan).get(f"{plan.scores}.weight")
    if row is None or row.dim is None or len(row.blocks) != 1:
        return [f"{plan.scores} has scores that stay sharded, and no weight that is sharded by them, in one block"]
    return []


def _module(
    part: nn.Module, what: ModuleShard, weight: ParameterShard | None, bias: ParameterShard | None
) -> list[str]:
    numbers = {name: getattr(part, name, None) for name in what.attributes}
    wrong = [f"it has no number called {name}" for name, found in numbers.items() if not isinstance(found, int)]
    if what.vocabulary:
        if not isinstance(part, nn.Embedding):
            wrong.append(f"a {type(part).__name__} has no vocabulary")
        elif part.max_norm is not None or part.scale_grad_by_freq or part.sparse:
            wrong.append("max_norm, scale_grad_by_freq and sparse need the whole table on each rank")
        elif weight is None or weight.dim != 0 or len(weight.blocks) != 1:
            wrong.append("its table is not sharded by rows, in one block")
    if what.bias_after:
        if type(part) not in (nn.Linear, Conv1D):
            wrong.append(f"a {type(part).__name__} cannot leave its bias for later; a Linear or Conv1D can")
        elif bias is None or bias.dim is not None:
            wrong.append("a bias that is added after the sum must be there, whole")
        if what.outputs != {"0": Boundary.REDUCE}:
            wrong.append("a bias after the sum needs its output summed")
    return wrong
