"""This machine as a node, and as the only one of a study: no socket and no thread lies between."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from dryfit.core.jobs.train import ResolveResult
from dryfit.core.sharding.device_groups import HERE, devices_of, visible_devices
from dryfit.core.wire import Started, Verdict
from dryfit.runtime.children.child_spec import ChildEvent, ChildMessage, ChildSpec
from dryfit.runtime.machine.gpus import GpuMonitor, GpuState
from dryfit.runtime.machine.host_memory import HostMemory, read_host_memory
from dryfit.runtime.machine.local_devices import local_facts
from dryfit.runtime.machine.node import Children, ComputeNode, NodeFacts


def _forget(_key: str, _device: str, _planned_bytes: int | None) -> None:
    """Do nothing."""


class LocalNode:
    """A :class:`~dryfit.runtime.machine.node.ComputeNode`, and the nodes of a study that has no other.

    Args:
        children: Starts and watches them.
        devices: Looks at GPUs.
        placed: Called with the key, the device and the planned bytes of a child before it starts, for each device.
        host: Looks at the host's memory, and at that of some processes.
        name: Its name in the study.
    """

    def __init__(
        self,
        children: Children,
        devices: GpuMonitor | None = None,
        *,
        placed: Callable[[str, str, int | None], None] = _forget,
        host: Callable[[Iterable[int]], HostMemory] = read_host_memory,
        name: str = HERE,
    ) -> None:
        self._children = children
        self._devices = devices or GpuMonitor()
        self._placed = placed
        self._host = host
        self._name = name
        self._facts: NodeFacts | None = None

    @property
    def name(self) -> str:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        return self._name

    @property
    def facts(self) -> NodeFacts:
        """What it has; where no child has told, the driver's own tool is asked for the devices."""
        if self._facts is None:
            self._facts = local_facts()
        return self._facts

    def learn(self, resolved: ResolveResult) -> None:
        """Take in what a child has found of this machine's devices."""
        self._facts = local_facts(resolved)
        self._devices.set_uuids({device.name: device.uuid for device in self._facts.devices if device.uuid})

    def start(self, spec: ChildSpec) -> None:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        visible = visible_devices(spec.place)
        for device in devices_of(visible) if visible is not None else ():
            self._placed(spec.key, device, spec.planned_bytes)
        self._children.start(spec)

    def answer(self, key: str, verdict: Verdict) -> None:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        self._children.answer(key, verdict)

    def ask_stop(self, key: str) -> None:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        self._children.ask_stop(key)

    def kill(self, key: str, why: str = "now") -> None:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        self._children.kill(key, why)

    def look(self, device: str) -> GpuState | None:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        return self._devices.look(device)

    def host_memory(self, pids: Iterable[int] = ()) -> HostMemory:
        """See :class:`~dryfit.runtime.machine.node.ComputeNode`."""
        return self._host(pids)

    def all(self) -> Mapping[str, ComputeNode]:
        """See :class:`~dryfit.runtime.machine.node.Nodes`."""
        return {self._name: self}

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """See :class:`~dryfit.runtime.machine.node.Nodes`."""
        events = self._children.wait(timeout_s)
        for event in events:
            if isinstance(event, ChildMessage) and isinstance(event.message, Started):
                self._devices.mark_own(event.message.pid)
        return events if self._name == HERE else [replace(event, node=self._name) for event in events]

    def take_going_on(self) -> Mapping[str, str]:
        """See :class:`~dryfit.runtime.machine.node.Nodes`; here no child outlives its control process."""
        return {}

    def wake(self) -> None:
        """See :class:`~dryfit.runtime.machine.node.Nodes`."""
        self._children.wake()
