"""Collectives that count the bytes which a rank sends."""

from dataclasses import dataclass, field

import torch

from dryfit.core.sharding.shard_summary import Sent
from dryfit.parallel.ranks.collectives import Ranks


@dataclass(slots=True)
class CountedRanks:
    """Passes calls on and counts the bytes that this rank sends, as ring algorithms do.

    An all-reduce over n ranks sends 2 (n - 1) / n of the tensor, an all-gather n - 1 times the rank's own.
    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Attributes:
        inner: Makes the calls.
        backward: Whether bytes count as sent in the backward pass from now on.
        sent: Bytes sent so far.
    """

    inner: Ranks
    backward: bool = False
    sent: Sent = field(default_factory=Sent)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.inner.rank

    @property
    def degree(self) -> int:
        """How many ranks there are."""
        return self.inner.degree

    @property
    def own_generator(self) -> bool:
        """Whether this rank has torch's random generators to itself."""
        return self.inner.own_generator

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """See :class:`dryfit.parallel.ranks.collectives.Ranks`."""
        self._count(-(-2 * (self.degree - 1) * tensor.nbytes // self.degree))
        return self.inner.all_reduce(tensor, what)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """See :class:`dryfit.parallel.ranks.collectives.Ranks`."""
        self._count((self.degree - 1) * tensor.nbytes)
        return self.inner.all_gather(tensor, what)

    def _count(self, size_bytes: int) -> None:
        self.sent += Sent(backward_bytes=size_bytes) if self.backward else Sent(forward_bytes=size_bytes)
