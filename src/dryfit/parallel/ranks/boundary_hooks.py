"""Apply a plan's row to one module: hooks around its call, sizes that its code reads, its bias after the sum.

Where activations enter and leave a tensor-parallel region, collectives are differentiable. Source: M. Shoeybi et
al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, section 3; its f and
g are COPY and REDUCE. GATHER concatenates where REDUCE adds.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dryfit.core.errors import ShardError
from dryfit.core.sharding.shard_plan import Boundary, ModuleShard
from dryfit.parallel.ranks.collectives import Ranks
from dryfit.parallel.ranks.sharded_scores import ShardedScores
from dryfit.parallel.ranks.streams import RegionStream


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
