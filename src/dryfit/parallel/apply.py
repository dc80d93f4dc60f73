"""A whole module turned into one rank's shard: checked, sliced, connected by hooks."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dryfit.gpu.private_apis.torch_modules import MODULES, parameters_of
from dryfit.gpu.private_apis.torch_tensors import TENSORS, on_same_memory
from dryfit.gpu.slots import put_all
from dryfit.meta.keys import StoredSlice
from dryfit.parallel.collectives import Ranks, RegionStream, agree
from dryfit.parallel.vocabulary_loss import ShardedScores
from dryfit.settings.errors import ShardError
from dryfit.settings.private_names import require
from dryfit.settings.sharding import Boundary, ModuleShard, ParameterShard, ShardPlan
from dryfit.settings.text import few

# Check that a shard plan fits a module, by names and shapes, before anything changes.


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


# Apply a plan's row to one module: hooks around its call, sizes that its code reads, its bias after the sum.
#
# Where activations enter and leave a tensor-parallel region, collectives are differentiable. Source: M. Shoeybi et
# al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, section 3; its f
# and g are COPY and REDUCE. GATHER concatenates where REDUCE adds.


def cross(boundary: Boundary, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
    """Apply a boundary's collective to an activation.

    Args:
        boundary: Which collective.
        tensor: The activation.
        ranks: This rank's end of the collectives.
        where: Place for messages; the same on each rank.
    """
    match boundary:
        case Boundary.COPY:
            return _Copy.apply(tensor, ranks, where) if tensor.requires_grad else tensor
        case Boundary.REDUCE:
            return _Reduce.apply(tensor, ranks, where)
        case Boundary.GATHER:
            return _Gather.apply(tensor, ranks, where)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
        ctx.ranks, ctx.where = ranks, where
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.ranks.all_reduce(gradient, f"gradients of {ctx.where}"), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
        return ranks.all_reduce(tensor, where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
        ctx.ranks, ctx.size = ranks, tensor.shape[-1]
        return torch.cat(ranks.all_gather(tensor, where), -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.narrow(-1, ctx.ranks.rank * ctx.size, ctx.size).contiguous(), None, None


def connect_module(
    part: nn.Module,
    path: str,
    what: ModuleShard,
    ranks: Ranks,
    stream: RegionStream,
    scores: ShardedScores | None = None,
) -> None:
    """Apply a row of the plan to its module.

    Args:
        part: The module.
        path: Its path.
        what: The row.
        ranks: This rank's end of the collectives.
        stream: Random numbers of sharded regions.
        scores: For the module whose scores may stay sharded: says when they do.

    Raises:
        ShardError: The module has no input of a name in the row.
    """
    for name, number in what.attributes.items():
        setattr(part, name, number)
    hooks = _Hooks(path, what, ranks, stream, scores)
    if what.vocabulary:
        assert isinstance(part, nn.Embedding)
        table = _Rows(part.weight.shape[0] * ranks.rank, part.weight.shape[0], part.padding_idx)
        part.padding_idx = table.local_padding()
        part.register_forward_pre_hook(table.before, with_kwargs=True)
        part.register_forward_hook(table.after)
    if what.bias_after:
        part.__class__ = _WITHOUT_BIAS[type(part)]
    if what.inputs:
        hooks.find_inputs(part)
        part.register_forward_pre_hook(hooks.before, with_kwargs=True)
    if what.outputs:
        part.register_forward_hook(hooks.after)


class LinearWithoutBias(nn.Linear):
    """A Linear whose bias is added after the sum over the ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product with the weight."""
        return functional.linear(input, self.weight)


class Conv1DWithoutBias(Conv1D):
    """A transformers Conv1D whose bias is added after the sum over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the weight."""
        return x @ self.weight


_WITHOUT_BIAS: Mapping[type, type] = {nn.Linear: LinearWithoutBias, Conv1D: Conv1DWithoutBias}


@dataclass(slots=True)
class _Hooks:
    """The boundaries of one module."""

    path: str
    what: ModuleShard
    ranks: Ranks
    stream: RegionStream
    scores: ShardedScores | None = None
    inputs: list[tuple[int | None, str, Boundary]] = field(default_factory=list)

    def find_inputs(self, part: nn.Module) -> None:
        """Find position and name of each input in the row, which gives one of the two."""
        parameters = inspect.signature(part.forward).parameters
        plain = [
            name
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        kinds = {parameter.kind for parameter in parameters.values()}
        for given, boundary in self.what.inputs.items():
            if given.isdecimal() and int(given) < len(plain):
                self.inputs.append((int(given), plain[int(given)], boundary))
            elif given.isdecimal() and inspect.Parameter.VAR_POSITIONAL in kinds:
                self.inputs.append((int(given), "", boundary))
            elif given in plain:
                self.inputs.append((plain.index(given), given, boundary))
            elif given in parameters or (not given.isdecimal() and inspect.Parameter.VAR_KEYWORD in kinds):
                self.inputs.append((None, given, boundary))
            else:
                raise ShardError(
                    f"connecting {self.path}",
                    f"{given!r} is none of its inputs",
                    allowed=", ".join(plain),
                )

    def before(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook."""
        given = list(args)
        for position, name, boundary in self.inputs:
            if position is not None and position < len(given):
                given[position] = self._cross(boundary, given[position], f"input {name}", part.training)
            elif name in kwargs:
                kwargs = {**kwargs, name: self._cross(boundary, kwargs[name], f"input {name}", part.training)}
        return tuple(given), kwargs

    def after(self, part: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook."""
        for key, boundary in self.what.outputs.items():
            output = self._replaced(output, int(key), boundary, part)
        return output

    def _replaced(self, output: Any, position: int, boundary: Boundary, part: nn.Module) -> Any:
        if isinstance(output, torch.Tensor) and position == 0:
            return self._cross_out(boundary, output, position, part)
        if isinstance(output, tuple | list) and position < len(output):
            items = list(output)
            items[position] = self._cross_out(boundary, items[position], position, part)
            make: Callable[..., Any] = type(output)._make if hasattr(output, "_make") else type(output)  # pyright: ignore
            return make(items)
        if isinstance(output, Mapping) and position < len(output):  # a ModelOutput
            key = list(output)[position]
            output[key] = self._cross_out(boundary, output[key], position, part)  # pyright: ignore[reportIndexIssue]
            return output
        raise ShardError(
            f"running {self.path} on rank {self.ranks.rank}", f"it has no output {position}: {type(output).__name__}"
        )

    def _cross_out(self, boundary: Boundary, value: Any, position: int, part: nn.Module) -> Any:
        if boundary is Boundary.GATHER and self.scores is not None and self.scores.stay:
            self.stream.leave(value.device)
            return value
        value = self._cross(boundary, value, f"output {position}", part.training)
        # A bias is for the sum; added on each rank it would be there as often as there are ranks.
        return value + part.bias if self.what.bias_after else value

    def _cross(self, boundary: Boundary, value: Any, which: str, training: bool) -> Any:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ShardError(
                f"running {self.path} on rank {self.ranks.rank}",
                f"{which} is {kind}, the plan has {boundary} for it",
                allowed="a floating-point tensor",
            )
        crossed = cross(boundary, value, self.ranks, f"{self.path or 'the model'}, {which}")
        if boundary is not Boundary.COPY:
            self.stream.leave(value.device)
        elif training and self.ranks.own_generator:
            self.stream.enter(value.device)
        return crossed


@dataclass(slots=True)
class _Rows:
    """The rows of an embedding that a rank holds; ids of other rows give zeros, which the sum over the ranks fills."""

    begin: int
    count: int
    padding: int | None
    _elsewhere: torch.Tensor | None = None

    def local_padding(self) -> int | None:
        """Return the index of the padding row here, which never gets a gradient; None: another rank has it."""
        if self.padding is None or not 0 <= self.padding - self.begin < self.count:
            return None
        return self.padding - self.begin

    def before(self, _part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook."""
        ids = (args[0] if args else kwargs["input"]) - self.begin
        self._elsewhere = (ids < 0) | (ids >= self.count)
        return (ids.masked_fill(self._elsewhere, 0),), {}

    def after(self, _part: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Forward hook."""
        assert self._elsewhere is not None
        elsewhere, self._elsewhere = self._elsewhere, None
        return output.masked_fill(elsewhere.unsqueeze(-1), 0)


# Turn a whole module into one rank's tensor-parallel shard: slice its parameters, connect it to the other ranks.


ModuleT = TypeVar("ModuleT", bound=nn.Module)

SHARDED: Final = "_dryfit_cut"
"""Attribute of a sharded module: its rank and degree."""


def apply(module: ModuleT, plan: ShardPlan, ranks: Ranks) -> ModuleT:
    """Shard a module for one rank, in place, and connect it to the others.

    Works on modules with weights, and on meta. A trial's model is not sharded by this: its slices are read from the
    checkpoint (:mod:`dryfit.parallel.layout`), and :func:`connect` does the rest.

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
