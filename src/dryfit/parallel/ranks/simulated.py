"""Simulate ranks by threads of one process, to run a tensor-parallel model without process groups or devices.

On the CPU autograd's backward pass runs in the thread that called it, so collectives work inside it. torch's random
generator is one for all threads: models run here with dropout off.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from dryfit.core.errors import ShardError

T = TypeVar("T")

_THE_END: Final = "its end"


class _Abandoned(BaseException):
    """Ends a rank's thread when another rank has failed; no Exception, so that no handler of the model catches it."""


class _Rendezvous:
    """Exchanges calls and tensors between the ranks' threads."""

    def __init__(self, degree: int) -> None:
        self.degree: Final = degree
        self._barrier = threading.Barrier(degree)
        self._calls: list[str] = [""] * degree
        self._tensors: list[torch.Tensor | None] = [None] * degree

    def exchange(self, rank: int, call: str, tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
        self._calls[rank], self._tensors[rank] = call, tensor
        self._wait()
        calls, tensors = list(self._calls), list(self._tensors)
        self._wait()  # nobody writes the next call before all have read this one
        other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
        if other is not None:
            raise ShardError(
                f"running a model on {self.degree} ranks",
                f"ranks disagree: rank 0 is at {calls[0]}, rank {other} at {calls[other]}",
                allowed="the same calls in the same order on each rank",
                hint="ranks need the same model, plan, batch, settings and library versions",
            )
        return tensors

    def leave(self) -> None:
        """Wake all waiting ranks with an error."""
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise _Abandoned from None


@dataclass(frozen=True, slots=True)
class SimulatedRanks:
    """One thread's end; see :class:`dryfit.parallel.ranks.collectives.Ranks`."""

    rank: int
    rendezvous: _Rendezvous
    own_generator: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> "SimulatedRanks":
        return self

    @property
    def degree(self) -> int:
        """How many ranks there are."""
        return self.rendezvous.degree

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """See :class:`dryfit.parallel.ranks.collectives.Ranks`; ranks are added in their order."""
        first, *rest = self._exchange("all_reduce", tensor, what)
        total = first.clone(memory_format=torch.contiguous_format)
        for other in rest:
            total += other
        return total

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """See :class:`dryfit.parallel.ranks.collectives.Ranks`."""
        return [
            other.clone(memory_format=torch.contiguous_format) for other in self._exchange("all_gather", tensor, what)
        ]

    def _exchange(self, operation: str, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        # A copy: the owner may go on and change the tensor while others still read it.
        given = tensor.detach().clone()
        call = f"{operation} of {what}, {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        tensors = self.rendezvous.exchange(self.rank, call, given)
        return [tensor for tensor in tensors if tensor is not None]


def simulate(degree: int, run: Callable[[SimulatedRanks], T]) -> list[T]:
    """Run a function on each rank, in a thread each.

    Args:
        degree: How many ranks.
        run: Called with the rank's end of the collectives.

    Returns:
        The result of each rank.

    Raises:
        ShardError: Ranks called different collectives, or one ended while others waited.
        BaseException: What the function raised, of the first rank that did; a note names the rank.
    """
    rendezvous = _Rendezvous(degree)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            result = run(SimulatedRanks(rank, rendezvous))
            rendezvous.exchange(rank, _THE_END, None)
            results[rank] = result
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits for this one
            errors[rank] = error
            rendezvous.leave()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        rank = min(errors)
        # Ranks that disagree all raise the same error: no need to name one of them.
        if not isinstance(errors[rank], ShardError):
            errors[rank].add_note(f"on simulated rank {rank} of {degree}")
        raise errors[rank]
    return [results[rank] for rank in range(degree)]
