"""Collectives of a tensor-parallel model: of torch.distributed, counted, simulated by threads."""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import Sent

# The collectives of a tensor-parallel model: their interface, and torch.distributed's implementation.
#
# :mod:`dryfit.parallel.collectives` has another implementation, for ranks that are threads of one process.


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


# Collectives that count the bytes which a rank sends.


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
        """See :class:`dryfit.parallel.collectives.Ranks`."""
        self._count(-(-2 * (self.degree - 1) * tensor.nbytes // self.degree))
        return self.inner.all_reduce(tensor, what)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """See :class:`dryfit.parallel.collectives.Ranks`."""
        self._count((self.degree - 1) * tensor.nbytes)
        return self.inner.all_gather(tensor, what)

    def _count(self, size_bytes: int) -> None:
        self.sent += Sent(backward_bytes=size_bytes) if self.backward else Sent(forward_bytes=size_bytes)


# Simulate ranks by threads of one process, to run a tensor-parallel model without process groups or devices.
#
# On the CPU autograd's backward pass runs in the thread that called it, so collectives work inside it. torch's random
# generator is one for all threads: models run here with dropout off.


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
    """One thread's end; see :class:`dryfit.parallel.collectives.Ranks`."""

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
        """See :class:`dryfit.parallel.collectives.Ranks`; ranks are added in their order."""
        first, *rest = self._exchange("all_reduce", tensor, what)
        total = first.clone(memory_format=torch.contiguous_format)
        for other in rest:
            total += other
        return total

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """See :class:`dryfit.parallel.collectives.Ranks`."""
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


# Random numbers of ranks: alike where all hold the same activations, different where each rank holds a slice.
#
# All ranks start with the same generator state, so that dropout of shared activations drops the same elements
# everywhere. Inside a sharded region the same numbers would drop the same elements of each rank's heads. Megatron-LM
# keeps a second generator per rank for that (``megatron/core/tensor_parallel/random.py``) and a checkpoint function
# of its own, which saves both. Here the second stream is a function of the first: where a region begins, its seed is
# made of the generator's state and the rank, and the generator moves on by one number. So recomputing under torch's
# own checkpoint, which restores the generator, draws the same numbers again, and no other code is concerned.


@dataclass(slots=True)
class RegionStream:
    """Switches the generators between the shared stream and one rank's own, at the edges of sharded regions.

    Whether a region is open is read from the generator's seed: a checkpoint that stops recomputing within a region
    restores the generator, and with it closes the region.
    """

    rank: int
    _open: dict[torch.device, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def enter(self, device: torch.device) -> None:
        """Begin a region, unless it has begun."""
        generator = _generator(device)
        if self._is_open(device, generator):
            return
        state = generator.get_state()
        torch.rand((), device=device)  # the next region shall begin with another state; nothing waits for the device
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7, salt=self.rank.to_bytes(8, "little"))
        seed = int.from_bytes(digest.digest(), "little")
        self._open[device] = (seed, generator.get_state())
        generator.manual_seed(seed)

    def leave(self, device: torch.device) -> None:
        """End a region, if one has begun; later draws are as if it had not been there."""
        if device not in self._open:
            return
        generator = _generator(device)
        if self._is_open(device, generator):
            generator.set_state(self._open.pop(device)[1])

    def leave_all(self) -> None:
        """End every region, at the end of a pass, however it ended."""
        for device in list(self._open):
            self.leave(device)
        self._open.clear()

    def _is_open(self, device: torch.device, generator: torch.Generator) -> bool:
        return device in self._open and generator.initial_seed() == self._open[device][0]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
