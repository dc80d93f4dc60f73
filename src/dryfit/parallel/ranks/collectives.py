"""The collectives of a tensor-parallel model: their interface, and torch.distributed's implementation.

:mod:`dryfit.parallel.ranks.simulated` has another implementation, for ranks that are threads of one process.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dryfit.core.errors import ShardError


@runtime_checkable
class Ranks(Protocol):
    """One rank's end of the collectives that a tensor-parallel model needs.

    Every rank makes the same calls in the same order. ``what`` names the tensor in messages; it is the same on all.
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
        """Whether this rank has torch's random generators to itself."""
        ...

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return the sum over the ranks, bit for bit the same on each; the argument stays as it is."""
        ...

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """Collectives of a rank without the others, for shapes and memory alone: values mean nothing.

    Attributes:
        rank: This rank's number.
        degree: How many there would be.
    """

    rank: int
    degree: int
    own_generator: bool = False

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return a tensor of the sum's shape."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return tensors of the others' shapes."""
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for _ in range(self.degree)]


class ProcessRanks:
    """Ranks that are the processes of torch.distributed (gloo, nccl)."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ShardError(
                "sharding a model over processes",
                "torch.distributed is not initialised",
                allowed="a process group with one process for each rank",
                hint="call torch.distributed.init_process_group first",
            )
        self.own_generator: Final = True
        self.rank: Final[int] = dist.get_rank()
        self.degree: Final[int] = dist.get_world_size()
        self._by_device = dist.get_backend() == dist.Backend.NCCL

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """See :class:`Ranks`."""
        # A copy: autograd may have kept the tensor for a gradient.
        summed = tensor.detach().to(self._carrier(tensor)).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed.to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """See :class:`Ranks`."""
        own = tensor.detach().to(self._carrier(tensor)).contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(gathered, own)
        return [one.to(tensor.device) for one in gathered]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessRanks":
        return self  # a module's copy is on the same ranks

    def _carrier(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor must lie on to be sent."""
        return torch.device("cuda", torch.cuda.current_device()) if self._by_device else tensor.device


def digest_of(content: bytes) -> torch.Tensor:
    """Return a SHA-256 digest as a tensor of 32 bytes."""
    return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)


def agree(ranks: Ranks, facts: dict[str, str]) -> None:
    """Compare facts with the other ranks', before anything runs that needs them alike.

    Args:
        ranks: This rank's end.
        facts: Texts by name ("the plan"); the same keys on each rank.

    Raises:
        ShardError: A fact differs; the first one is named, with the rank.
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
