"""Machines that a study's children run on: their interface, and this machine with its memory, cores and GPUs."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import psutil

from dryfit.processes.child_spec import ChildEvent, ChildMessage, ChildSpec
from dryfit.processes.gpus import GpuMonitor, GpuState
from dryfit.settings.devices import HERE, devices_of, parse_device, visible_devices
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.secrets import public_environment
from dryfit.settings.training_messages import ResolveResult
from dryfit.settings.wire import Started, Verdict

# The host's free memory, by its control group too, and the memory that our processes take of it.


_PROC = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60


def _values(names: dict[int, str], proc: Path, root: Path) -> Iterator[str]:
    """Yield the contents of our cgroup's files, the most specific first (a container may see only its root).

    Args:
        names: Name of the file by version of cgroups.
    """
    try:
        membership = proc.read_text()
    except OSError:
        return
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            files = [root / relative / names[2], root / names[2]]
        elif "memory" in controllers.split(","):
            files = [root / "memory" / relative / names[1], root / "memory" / names[1]]
        else:
            continue
        for file in files:
            with suppress(OSError):
                yield file.read_text()


def oom_kills(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Return the out-of-memory kills counted by our cgroup (version 2, else 1); None if they are not counted.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst
    (memory.oom_control); both have a line ``oom_kill N``.
    """
    for text in _values({2: "memory.events", 1: "memory.oom_control"}, proc, root):
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def memory_limit_bytes(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Return the lowest memory limit of our cgroup (version 2, else 1); None if there is none.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (memory.max) and cgroup-v1/memory.rst
    (memory.limit_in_bytes; "no limit" is a number above any machine's memory).
    """
    texts = [text.strip() for text in _values({2: "memory.max", 1: "memory.limit_in_bytes"}, proc, root)]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def rose(before: int | None, after: int | None) -> bool:
    """Whether a count rose; False if it is unknown."""
    return before is not None and after is not None and after > before


_KEPT_FREE = 0.1
"""Share of the host's memory that is kept free."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory at one moment.

    Attributes:
        total_bytes: All memory that this process may use.
        free_bytes: The part of it that is free.
        rss_bytes: Memory taken by processes of ours, by process id, each with its whole session (ranks, loader
            workers); pages shared by two sessions count in both.
    """

    total_bytes: int
    free_bytes: int
    rss_bytes: Mapping[int, int] = field(default_factory=dict[int, int])

    def available_bytes(self, expected: Mapping[int, int]) -> int:
        """Return the memory that further trials can be planned with.

        Args:
            expected: Planned memory by process id; the part not taken yet is reserved.
        """
        to_come = sum(max(0, size_bytes - self.rss_bytes.get(pid, 0)) for pid, size_bytes in expected.items())
        return max(0, self.free_bytes - int(_KEPT_FREE * self.total_bytes) - to_come)


def plannable_bytes(total_bytes: int) -> int:
    """Return the most that a trial may be planned with, on a host with so much memory, if no other runs."""
    return total_bytes - int(_KEPT_FREE * total_bytes)


def host_total_bytes() -> int:
    """Return the memory of this machine, or the limit of our cgroup where that is lower."""
    total_bytes = psutil.virtual_memory().total
    return min(total_bytes, memory_limit_bytes() or total_bytes)


def read_host_memory(pids: Iterable[int]) -> HostMemory:
    """Read the host's memory, and that of some children of ours; ended ones take nothing.

    A child leads a session, and the private memory of the session's other processes is counted as the child's.

    Under a memory limit of the cgroup, free memory is the limit less what this process and its descendants take.
    """
    rss_bytes: dict[int, int] = {}
    for pid in pids:
        with suppress(psutil.Error):
            rss_bytes[pid] = psutil.Process(pid).memory_info().rss
    for leader, members in _sessions(rss_bytes).items():
        rss_bytes[leader] += sum(map(_private_bytes, members))
    memory = psutil.virtual_memory()
    limit_bytes = memory_limit_bytes()
    if limit_bytes is None or limit_bytes >= memory.total:
        return HostMemory(memory.total, memory.available, rss_bytes)
    taken_bytes = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            taken_bytes += process.memory_info().rss
    return HostMemory(limit_bytes, max(0, min(memory.available, limit_bytes - taken_bytes)), rss_bytes)


def _sessions(leaders: Collection[int]) -> dict[int, list[int]]:
    """Return the processes of some sessions without their leaders."""
    members: dict[int, list[int]] = {}
    for pid in psutil.pids() if leaders else ():
        with suppress(ProcessLookupError, PermissionError):
            session = os.getsid(pid)
            if session in leaders and pid not in leaders:
                members.setdefault(session, []).append(pid)
    return members


def _private_bytes(pid: int) -> int:
    """Return the memory that would be free if a process ended: a fork shares most of its memory with its parent."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError):
        return 0


# Nodes: the machines that a study's children run on, as the control process sees them.


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
        """Kill a child with all it started; ``why`` is as in :attr:`dryfit.settings.errors.Evidence.killed_by_us`."""
        ...


class Children(ChildControl, Protocol):
    """The children of one machine, such as :class:`~dryfit.processes.supervisor.Supervisor` keeps them."""

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


# This machine's resources: the usable cores, and its GPUs by ``nvidia-smi``.


_SMI_TIMEOUT_S = 20.0
_SMI_END_S = 2.0

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of ``/proc/cpuinfo`` on x86 and ARM with which oneDNN multiplies in bf16."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_here() -> str | None:
    """Return which CUDA devices the user lets us use, as ``CUDA_VISIBLE_DEVICES``; None: all."""
    return os.environ.get(_VISIBLE)


def local_facts(resolved: ResolveResult | None = None) -> NodeFacts:
    """Return this machine's resources for children.

    Args:
        resolved: What a child has found of its devices. None: none has looked, and the driver's own tool is asked;
            so it is where the child was on a machine without a GPU, and trials run on others.
    """
    variable = visible_here()
    if resolved is None or (resolved.device is DeviceKind.CUDA and not resolved.device_count):
        devices = driver_devices(variable)
    elif resolved.device is DeviceKind.CUDA:
        names = device_names(resolved.device_count, variable)
        count = len(names)
        uuids = resolved.device_uuids if len(resolved.device_uuids) == count else ("",) * count
        specs = resolved.device_specs if len(resolved.device_specs) == count else (resolved.device_spec,) * count
        devices = tuple(DeviceFacts(*each) for each in zip(names, uuids, specs, strict=True))
    else:
        devices = ()
    model, bf16 = processor()
    name = f"{platform.node()}, {platform.machine()} {model}".rstrip()
    return NodeFacts(available_cores(), host_total_bytes(), devices, name, bf16)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, bool]:
    """Return the processor's name, and whether it has instructions for bf16; where it is not known "", False."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", False
    model, flags = (
        re.search(rf"^{key}[ \t]*:(.*)$", text, re.MULTILINE) for key in ("model name", "(?:flags|Features)")
    )
    has = set(flags.group(1).split()) if flags is not None else set[str]()
    return model.group(1).strip() if model is not None else "", bool(_BF16_FLAGS & has)


def available_cores(cgroup_cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the CPU cores this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cgroup_cpu_max.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def device_names(count: int, variable: str | None) -> tuple[str, ...]:
    """Return the names of the CUDA devices a trial may be given, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Args:
        count: Devices that are there.
        variable: The variable as the user has set it: its devices, and no others, may be used.
    """
    if variable:
        return tuple(name.strip() for name in variable.split(","))[:count]
    return tuple(str(index) for index in range(count))


def named_gpu(name: str, variable: str | None) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` for a process that is to see one device only.

    Args:
        name: ``cuda`` or ``cuda:N``.
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.

    Raises:
        ConfigError: It is no such name.
        MachineError: The variable lists fewer devices.
    """
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name.strip())
    if match is None:
        raise ConfigError("choosing a GPU", f"{name!r}", "cuda, cuda:0, cuda:1, ...")
    index = int(match[1] or 0)
    if variable is None:
        return str(index)
    listed = [part.strip() for part in variable.split(",") if part.strip()]
    if index >= len(listed):
        raise MachineError(
            f"looking for {name}",
            f"CUDA_VISIBLE_DEVICES is {variable!r}",
            f"cuda:0 to cuda:{len(listed) - 1}" if listed else "",
            "unset it, or name one of its devices",
        )
    return listed[index]


def first_gpu(variable: str | None) -> DeviceSpec | None:
    """Return the GPU that a trial would see first; None if there is none, or no driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    first = device_names(1, variable)[0]
    if variable is not None and not variable.strip():
        return None
    return next((spec for _, _, spec in _driver_lines("-i", first)), None)


def driver_devices(variable: str | None) -> tuple[DeviceFacts, ...]:
    """Return the GPUs that trials may use, as the driver's own tool knows them; none without a driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set. A MIG instance that it names is not described.
    """
    if variable is not None and not variable.strip():
        return ()
    known = {known: (uuid, spec) for index, uuid, spec in _driver_lines() for known in (index, uuid)}
    count = len(known) // 2 or gpu_count(variable)  # an older tool does not know all that was asked
    return tuple(DeviceFacts(name, *known.get(name, ("", None))) for name in device_names(count, variable))


def gpu_count(variable: str | None) -> int:
    """Return how many GPUs trials may use, as the driver's own tool counts them; 0 without a driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    if variable is not None and not variable.strip():
        return 0
    count = sum(line.strip().isdigit() for line in _query_driver("index").splitlines())
    return len(device_names(count, variable))


def _driver_lines(*options: str) -> Iterator[tuple[str, str, DeviceSpec | None]]:
    """Yield index, UUID and what is known of each GPU, as the driver's own tool says it.

    It is there wherever a driver is, and needs neither torch nor a CUDA context. It counts what the driver keeps for
    itself, which no program can have.
    """
    for line in _query_driver("index,uuid,name,memory.total,memory.reserved,compute_cap", *options).splitlines():
        index, *rest = (part.strip() for part in line.split(","))
        if not index.isdigit():
            continue
        try:
            uuid, name, total_mib, reserved_mib, capability = rest
            major, minor = map(int, capability.split("."))
            capacity_bytes = (int(total_mib) - int(reserved_mib)) * 2**20
            yield index, uuid, DeviceSpec(name=name, capacity_bytes=capacity_bytes, capability=(major, minor))
        except ValueError:  # a driver that does not know one of these, or "[N/A]"
            yield index, rest[0] if rest else "", None


def power_limit_watts() -> int | None:
    """Return the power limit of the GPU that a trial would see first; None where the driver does not say."""
    first = device_names(1, visible_here())[0]
    try:
        return round(float(_query_driver("power.limit", "-i", first).split("\n")[0]))
    except ValueError:
        return None


def _query_driver(query: str, *options: str) -> str:
    """Return the output of the driver's own tool; empty if there is none, it fails, or the driver hangs.

    A process stuck in a driver outlives its kill, and ``subprocess.run`` would wait for its end: this does not.
    """
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *options]
    try:
        environment = public_environment(os.environ)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, errors="replace"
        )
    except OSError:
        return ""
    try:
        said, _ = process.communicate(timeout=_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_SMI_END_S)
        return ""
    return said if process.returncode == 0 else ""


# This machine as a node, and as the only one of a study: no socket and no thread lies between.


def _forget(_key: str, _device: str, _planned_bytes: int | None) -> None:
    """Do nothing."""


class LocalNode:
    """A :class:`~dryfit.processes.node.ComputeNode`, and the nodes of a study that has no other.

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
        """See :class:`~dryfit.processes.node.ComputeNode`."""
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
        """See :class:`~dryfit.processes.node.ComputeNode`."""
        visible = visible_devices(spec.place)
        for device in devices_of(visible) if visible is not None else ():
            self._placed(spec.key, device, spec.planned_bytes)
        self._children.start(spec)

    def answer(self, key: str, verdict: Verdict) -> None:
        """See :class:`~dryfit.processes.node.ComputeNode`."""
        self._children.answer(key, verdict)

    def ask_stop(self, key: str) -> None:
        """See :class:`~dryfit.processes.node.ComputeNode`."""
        self._children.ask_stop(key)

    def kill(self, key: str, why: str = "now") -> None:
        """See :class:`~dryfit.processes.node.ComputeNode`."""
        self._children.kill(key, why)

    def look(self, device: str) -> GpuState | None:
        """See :class:`~dryfit.processes.node.ComputeNode`."""
        return self._devices.look(device)

    def host_memory(self, pids: Iterable[int] = ()) -> HostMemory:
        """See :class:`~dryfit.processes.node.ComputeNode`."""
        return self._host(pids)

    def all(self) -> Mapping[str, ComputeNode]:
        """See :class:`~dryfit.processes.node.Nodes`."""
        return {self._name: self}

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """See :class:`~dryfit.processes.node.Nodes`."""
        events = self._children.wait(timeout_s)
        for event in events:
            if isinstance(event, ChildMessage) and isinstance(event.message, Started):
                self._devices.mark_own(event.message.pid)
        return events if self._name == HERE else [replace(event, node=self._name) for event in events]

    def take_going_on(self) -> Mapping[str, str]:
        """See :class:`~dryfit.processes.node.Nodes`; here no child outlives its control process."""
        return {}

    def wake(self) -> None:
        """See :class:`~dryfit.processes.node.Nodes`."""
        self._children.wake()


def device_of(text: str | None) -> DeviceSpec:
    """Return a device by its name; None: this machine's first GPU.

    Raises:
        ConfigError: It has no such name, or there is no GPU and none was named.
    """
    found = parse_device(text) if text is not None else first_gpu(visible_here())
    if found is None:
        raise ConfigError(
            "looking for a device to plan for",
            "this machine has no GPU that can be seen",
            "a device by its name or its amount of memory: rtx4090, a100-80, h200, 24GiB",
            "type a card after --device: `--device rtx4090`",
        )
    return found
