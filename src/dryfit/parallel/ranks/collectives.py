"""How ranks talk: what a cut model asks of them, and torch.distributed's answer.

:mod:`dryfit.parallel.ranks.simulated` has another, for ranks that are threads of one process.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dryfit.core.errors import ShardError


@runtime_checkable
class Ranks(Protocol):
    """One rank's end of the collectives that a cut model needs.

    Every rank makes the same calls in the same order. ``what`` says what for, in messages; it is the same on all.
    """

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    @property
    def degree(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def own_generator(self) -> bool:
        """Whether torch's generators of random numbers are this rank's alone."""
        ...

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over the ranks, bit for bit the same on each; the tensor given stays as it is."""
        ...

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """A rank without the others: what its module takes and which shapes it makes, without a group; values mean nothing.

    Attributes:
        rank: This rank's number.
        degree: How many there would be.
    """

    rank: int
    degree: int
    own_generator: bool = False

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """A tensor like the sum."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Tensors like the others'."""
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for _ in range(self.degree)]


class ProcessRanks:
    """Ranks that are processes of a torch.distributed group (gloo, nccl).

    Args:
        group: The group; None: all processes.
        checked: Whether each call is compared with what the other ranks call, before it is made. It costs a message
            more; ranks that call different things would otherwise wait for ever, or add up what does not belong
            together. May be set at any time, on all ranks at the same call.
    """

    def __init__(self, group: Any = None, *, checked: bool = False) -> None:
        if not dist.is_initialized():
            raise ShardError(
                "cutting a model over processes",
                "torch.distributed is not initialised",
                allowed="a process group with one process for each rank",
                hint="call torch.distributed.init_process_group first",
            )
        self._group = group
        self.checked = checked
        self.own_generator: Final = True
        self.rank: Final[int] = dist.get_rank(group)
        self.degree: Final[int] = dist.get_world_size(group)
        self._by_device = dist.get_backend(group) == dist.Backend.NCCL

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """See :class:`Ranks`."""
        self._compare("all_reduce", tensor, what)
        # A copy: whoever made the tensor may have kept it for its own gradient.
        summed = tensor.detach().to(self._carrier(tensor)).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self._group)
        return summed.to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """See :class:`Ranks`."""
        self._compare("all_gather", tensor, what)
        own = tensor.detach().to(self._carrier(tensor)).contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(gathered, own, group=self._group)
        return [one.to(tensor.device) for one in gathered]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessRanks":
        return self  # a module's copy is on the same ranks

    def _carrier(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor must lie to be sent."""
        return torch.device("cuda", torch.cuda.current_device()) if self._by_device else tensor.device

    def _compare(self, operation: str, tensor: torch.Tensor, what: str) -> None:
        if not self.checked:
            return
        call = described(operation, tensor, what)
        digest = digest_of(call.encode())
        digest = digest.to(self._carrier(digest))
        others = [torch.empty_like(digest) for _ in range(self.degree)]
        dist.all_gather(others, digest, group=self._group)
        if any(not torch.equal(digest, other) for other in others):
            calls: list[Any] = [None] * self.degree
            dist.all_gather_object(calls, call, group=self._group)
            raise disagreement(calls)


def described(operation: str, tensor: torch.Tensor, what: str) -> str:
    """A call of a collective, for comparing and for messages."""
    return f"{operation} of {what}, {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def disagreement(calls: list[str]) -> ShardError:
    """The error for ranks that do not do the same; names the first two that differ."""
    other = next(rank for rank, call in enumerate(calls) if call != calls[0])
    return ShardError(
        f"running a model on {len(calls)} ranks",
        f"ranks disagree: rank 0 is at {calls[0]}, rank {other} at {calls[other]}",
        allowed="the same calls in the same order on each rank",
        hint="ranks need the same model, plan, batch, settings and library versions",
    )


def digest_of(content: bytes) -> torch.Tensor:
    """A digest as numbers, 32 bytes."""
    return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)


def agree(ranks: Ranks, facts: dict[str, str]) -> None:
    """Compare facts with the other ranks', before anything is run that needs them alike.

    Args:
        ranks: This rank's end.
        facts: Texts by what they are ("the plan"); the same keys on each rank.

    Raises:
        ShardError: They differ; names the first fact that does, and the ranks.
    """
    for name, fact in facts.items():
        digests = ranks.all_gather(digest_of(fact.encode()), name)
        different = [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
        if different:
            raise ShardError(
                f"comparing {name} on {ranks.degree} ranks",
                f"ranks disagree: {name} of rank {different[0]} is not that of rank 0",
                allowed="the same on each rank",
                hint="start all ranks from the same study, folder and library versions",
            )
