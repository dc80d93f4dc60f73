"""Turn a whole module into one rank's tensor-parallel shard: slice its parameters, connect it to the other ranks."""

from collections.abc import Mapping
from typing import Final, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dryfit.core.errors import ShardError
from dryfit.core.private_names import require
from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.core.text.words import few
from dryfit.meta.construction.walk import put_all
from dryfit.meta.files.stored_slices import StoredSlice
from dryfit.meta.private_apis.torch_modules import MODULES, parameters_of
from dryfit.meta.private_apis.torch_tensors import TENSORS, on_same_memory
from dryfit.parallel.ranks.boundary_hooks import connect_module
from dryfit.parallel.ranks.check import check_plan, shards_of
from dryfit.parallel.ranks.collectives import Ranks, agree
from dryfit.parallel.ranks.sharded_scores import ShardedScores
from dryfit.parallel.ranks.streams import RegionStream

ModuleT = TypeVar("ModuleT", bound=nn.Module)

SHARDED: Final = "_dryfit_cut"
"""Attribute of a sharded module: its rank and degree."""


def apply(module: ModuleT, plan: ShardPlan, ranks: Ranks) -> ModuleT:
    """Shard a module for one rank, in place, and connect it to the others.

    Works on modules with weights, and on meta. A trial's model is not sharded by this: its slices are read from the
    checkpoint (:mod:`dryfit.parallel.layout.model_slices`), and :func:`connect` does the rest.

    Args:
        module: The whole module; the same on each rank.
        plan: How it is sharded.
        ranks: This rank's end of the collectives.

    Returns:
        The module.

    Raises:
        ShardError: The plan is not this module's, or the module is sharded already.
    """
    check_plan(module, plan)
    if ranks.degree != plan.degree:
        raise ShardError(
            f"sharding a {type(module).__name__} over {ranks.degree} ranks",
            f"the plan is for {plan.degree}",
            allowed="as many ranks as the plan has",
        )
    shard(module, plan, ranks.rank)
    return connect(module, plan, ranks)


def shard(module: nn.Module, plan: ShardPlan, rank: int) -> None:
    """Replace parameters by a rank's slices, in memory of their own; ties and flags stay.

    Raises:
        ShardError: The module is sharded already.
    """
    require("sharding a model over ranks", MODULES, TENSORS)
    if SHARDED in vars(module):
        raise ShardError("sharding a model over ranks", "it is sharded already", allowed="a whole model")
    made = slices_of(module, plan, rank)
    put_all(module, lambda slot: made.get(id(slot.tensor)))
    mark_sharded(module, rank, plan.degree)


def mark_sharded(module: nn.Module, rank: int, degree: int) -> None:
    """Note on a module that it holds a rank's slices."""
    vars(module)[SHARDED] = (rank, degree)


def slices_of(module: nn.Module, plan: ShardPlan, rank: int) -> dict[int, nn.Parameter]:
    """Return a rank's slice of each sharded parameter, by the id of the whole one."""
    shards = shards_of(module, plan)
    return {
        id(whole): _slice_of(whole, shards[name], rank, plan.degree)
        for name, whole in module.named_parameters()
        if shards[name].dim is not None
    }


def slice_on_rank(shard: ParameterShard, rank: int, degree: int) -> StoredSlice | None:
    """Return the slice of a parameter that a rank holds; None: all of it."""
    return None if shard.dim is None else StoredSlice(shard.dim, tuple(shard.slices(rank, degree)))


def slices_on_rank(module: nn.Module, plan: ShardPlan, rank: int) -> dict[str, StoredSlice]:
    """Return the part that a rank holds of each sharded parameter, by every name of the parameter."""
    parts = {name: slice_on_rank(shard, rank, plan.degree) for name, shard in shards_of(module, plan).items()}
    return {name: part for name, part in parts.items() if part is not None}


def slice_tensor(tensor: torch.Tensor, shard: ParameterShard, rank: int, degree: int) -> torch.Tensor:
    """Return a rank's slice of a tensor; the tensor itself where it is not sharded."""
    part = slice_on_rank(shard, rank, degree)
    return tensor if part is None else part.of(tensor)


def _slice_of(old: nn.Parameter, shard: ParameterShard, rank: int, degree: int) -> nn.Parameter:
    with torch.no_grad():
        local = slice_tensor(old.detach(), shard, rank, degree)
    # As old.__class__ would: parameters may be of a subclass, and carry attributes (_is_hf_initialized).
    new = on_same_memory(type(old), local, old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    return new


def connect(module: ModuleT, plan: ShardPlan, ranks: Ranks, scores: ShardedScores | None = None) -> ModuleT:
    """Make a module that holds a rank's slices compute with the others: boundaries, attributes, sums of gradients.

    Called when the weights are there and it is known which of them are trained, and before an optimizer is made: sums
    of gradients hang on the parameters themselves.

    Args:
        module: Holds this rank's slices.
        plan: How it is sharded.
        ranks: This rank's end of the collectives.
        scores: Says when the scores that the plan names stay sharded; None: never.

    Raises:
        ShardError: The module does not hold this rank's slices, or cannot do what a row of the plan asks.
    """
    require("connecting the ranks of a model", MODULES, TENSORS)
    if vars(module).get(SHARDED) != (ranks.rank, plan.degree) or ranks.degree != plan.degree:
        held = vars(module).get(SHARDED)
        state = f"sharded as rank {held[0]} of {held[1]}" if held else "not sharded"
        raise ShardError(
            f"connecting rank {ranks.rank} of {ranks.degree}",
            f"the module is {state}, the plan is for {plan.degree} ranks",
            allowed="a module with this rank's slices, and as many ranks as the plan has",
        )
    shards = shards_of(module, plan)
    _check_shapes(module, shards, plan.degree)
    stream = RegionStream(ranks.rank)
    parts = dict(module.named_modules(remove_duplicate=False))
    for path, what in plan.modules.items():
        connect_module(parts[path], path, what, ranks, stream, scores if path == plan.scores else None)
    for part in module.modules():
        _set_sizes(part)
    for name, parameter in module.named_parameters():
        if shards[name].sum_gradient:
            _sum_gradient(parameter, name, ranks)
    module.register_forward_hook(lambda *_: stream.leave_all(), always_call=True)
    return module


def _check_shapes(module: nn.Module, shards: Mapping[str, ParameterShard], degree: int) -> None:
    wrong = [
        f"{name} is {list(parameter.shape)}, a slice is {list(shards[name].local_shape(degree))}"
        for name, parameter in module.named_parameters()
        if tuple(parameter.shape) != shards[name].local_shape(degree)
    ]
    if wrong:
        raise ShardError("connecting the ranks of a model", few(wrong), allowed="the slices that the plan says")


def _set_sizes(part: nn.Module) -> None:
    """Set a layer's size attributes to those of its slice; some layers compute with them."""
    weight = parameters_of(part).get("weight")
    if weight is None or weight.ndim != 2:
        return
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = weight.shape
    elif isinstance(part, nn.Embedding):
        part.num_embeddings, part.embedding_dim = weight.shape
    elif isinstance(part, Conv1D):  # its weight is transposed
        part.nx, part.nf = weight.shape


def _sum_gradient(parameter: nn.Parameter, name: str, ranks: Ranks) -> None:
    """Sum each new gradient of a parameter over the ranks; accumulated ones must not be summed again."""
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: ranks.all_reduce(gradient, f"gradients of {name}"))


def check_ranks(module: nn.Module, plan: ShardPlan, ranks: Ranks) -> None:
    """Compare with the other ranks, before training starts, everything that must be alike on all.

    Raises:
        ShardError: Plans, parameters, modes or generators' states differ; the first one is named.
    """
    parameters = [
        f"{name} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        for name, parameter in module.named_parameters()
    ]
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    facts = {
        "the plan": plan.model_dump_json(),
        "the parameters": "\n".join(parameters),
        "the mode (train or eval)": str([part.training for part in module.modules()]),
        "the random generator's state": str([state.tolist() for state in states]),
        "torch's version": torch.__version__,
    }
    agree(ranks, facts)
