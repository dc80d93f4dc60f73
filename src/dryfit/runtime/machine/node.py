"""Nodes: the machines that a study's children run on, as the control process sees them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.wire import Verdict
from dryfit.runtime.children.child_spec import ChildEvent, ChildSpec
from dryfit.runtime.machine.gpus import GpuState
from dryfit.runtime.machine.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A CUDA device of a node.

    Attributes:
        name: As ``CUDA_VISIBLE_DEVICES`` takes it on its node.
        uuid: Its UUID; empty: not known.
        spec: Its model, the memory that programs can take of it, and its compute capability; None: not known.
    """

    name: str
    uuid: str = ""
    spec: DeviceSpec | None = None

    @property
    def capacity_bytes(self) -> int | None:
        """Memory that programs can take of it; None: not known."""
        return self.spec.capacity_bytes if self.spec is not None else None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node has for children.

    Attributes:
        cores: CPU cores that they may use.
        host_bytes: Host memory that they may use, what others hold included.
        devices: Its CUDA devices.
        name: Its own name and its processor's, which tell it from other machines; empty: not known.
        bf16: Whether its processor multiplies in bf16 by instructions of its own.
    """

    cores: int
    host_bytes: int
    devices: tuple[DeviceFacts, ...] = ()
    name: str = ""
    bf16: bool = False


class ChildControl(Protocol):
    """Starts children and ends them; nothing but :meth:`start` does anything where the child is gone."""

    def start(self, spec: ChildSpec) -> None:
        """Start a child."""
        ...

    def answer(self, key: str, verdict: Verdict) -> None:
        """Answer a report of a child."""
        ...

    def ask_stop(self, key: str) -> None:
        """Ask a child to write a checkpoint and end."""
        ...

    def kill(self, key: str, why: str = "now") -> None:
        """Kill a child with all it started; ``why`` is as in :attr:`dryfit.core.failure.Evidence.killed_by_us`."""
        ...


class Children(ChildControl, Protocol):
    """The children of one machine, such as :class:`~dryfit.runtime.children.supervisor.Supervisor` keeps them."""

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """Return what is new, in order, as soon as there is something, or when the time is over."""
        ...

    def wake(self) -> None:
        """Make :meth:`wait` return; may be called from a signal handler."""
        ...


class ComputeNode(ChildControl, Protocol):
    """One machine. Devices have the names they have there: ``0``, not ``here/0``."""

    @property
    def name(self) -> str:
        """Its name in a study: ``here``."""
        ...

    @property
    def facts(self) -> NodeFacts:
        """What it has."""
        ...

    def look(self, device: str) -> GpuState | None:
        """Return the state of a device now; None: not known."""
        ...

    def host_memory(self, pids: Iterable[int] = ()) -> HostMemory:
        """Return the state of the host's memory now, and what some children and their processes take of it."""
        ...


class Nodes(Protocol):
    """The machines of a study. Each event names the node it is from."""

    def all(self) -> Mapping[str, ComputeNode]:
        """The nodes that there are, by name, the one for work that belongs to no trial first."""
        ...

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """Return what is new, in order for each node, as soon as there is something, or when the time is over."""
        ...

    def take_going_on(self) -> Mapping[str, str]:
        """Return the node of each child that an earlier session has left running, by its key.

        From this call on :meth:`wait` returns what they say, and in any case their ends. Until then they are let be.
        """
        ...

    def wake(self) -> None:
        """Make :meth:`wait` return; may be called from a signal handler."""
        ...


def first_node(nodes: Nodes) -> ComputeNode:
    """Return the node for children that belong to no trial."""
    return next(iter(nodes.all().values()))
