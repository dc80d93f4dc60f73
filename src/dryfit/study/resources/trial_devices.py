"""Which devices and cores of the nodes trials may use, and how many trials that makes side by side."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import MachineError
from dryfit.core.jobs.job import Job
from dryfit.core.settings.execution import DeviceKind, ExecutionSettings
from dryfit.core.sharding.device_groups import check_enough, cpu_of, most_on_a_node, overlap, place_on, places_of
from dryfit.core.sharding.rank_search import AUTO, degrees_within
from dryfit.runtime.machine.node import DeviceFacts, NodeFacts

_MOST_PARALLEL = 256

CPU_THREADS = 4
"""Cores of a trial on the CPU where ``execution.threads`` is unset and ``runtime.parallel`` is "auto"."""

CUDA_THREADS = 2
"""The same for a trial on a GPU: one core to launch kernels, one for everything else."""


def device_places(nodes: Mapping[str, NodeFacts]) -> dict[str, DeviceFacts]:
    """Return every CUDA device of some nodes by its place, those of a node together."""
    return {place_on(name, device.name): device for name, node in nodes.items() for device in node.devices}


def choose_place(
    device: DeviceKind, nodes: Mapping[str, NodeFacts], in_use: Sequence[str] = (), *, processes: int
) -> str:
    """Return the place with the fewest running trials, where nothing is known of memory; the first of equals.

    Args:
        device: Where trials run.
        nodes: The machines that they may use, by name.
        in_use: The places of the running trials.
        processes: Processes of each trial; on CUDA devices every one gets a device of its own.

    Raises:
        MachineError: There are fewer devices than a trial has processes, or none.
    """
    if device is DeviceKind.CUDA:
        devices = tuple(device_places(nodes))
        check_enough(most_on_a_node(devices), processes)
        places = places_of(devices, processes)
    else:
        places = [cpu_of(name) for name in nodes]
    if not places:
        raise MachineError(
            "looking for a GPU on this machine",
            "there is none, and the study's trials were trained on those of other machines",
            "a machine with one",
            "run the command there, in the study's folder",
        )
    return min(places, key=lambda place: sum(overlap(other, place) for other in in_use))


def devices_without_torch(wish: str, count: int) -> tuple[DeviceKind, int]:
    """Return where trials that call the user's own function run, and on how many devices.

    Args:
        wish: ``auto``, ``cpu`` or ``cuda``.
        count: GPUs that are there.

    Raises:
        MachineError: CUDA is asked for and not there.
    """
    if wish == "cuda" and not count:
        raise MachineError(
            'looking for execution.device = "cuda"',
            "nvidia-smi finds no GPU",
            hint='set execution.device = "auto" to run without one',
        )
    return (DeviceKind.CPU, 1) if wish == "cpu" or not count else (DeviceKind.CUDA, count)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many trials may run side by side as far as cores go, and why."""

    most: int
    reason: str


def parallelism(config: StudyConfig, device: DeviceKind, nodes: Collection[NodeFacts]) -> Parallelism:
    """How many trials may run side by side; memory may allow fewer.

    Args:
        config: The study.
        device: Where its trials run.
        nodes: The machines that they may use.
    """
    wish, execution = config.runtime.parallel, config.execution
    if wish != AUTO:
        return Parallelism(wish, f"runtime.parallel is {wish}")
    together, cores = execution.processes, sum(node.cores for node in nodes)
    most = sum(min(_most_on(config, device, node), _slots(config)) for node in nodes)
    each = _cores_each(execution, device, max((node.cores for node in nodes), default=1))
    whose = "each trial" if together == 1 else f"each of a trial's {together} processes"
    return Parallelism(max(1, min(most, _MOST_PARALLEL)), f"{cores} core(s), {each} for {whose}")


def _cores_each(execution: ExecutionSettings, device: DeviceKind, cores: int) -> int:
    """Return the cores of a node that each process of a trial is counted with."""
    usual = CPU_THREADS if device is DeviceKind.CPU else CUDA_THREADS
    return (execution.threads or min(cores, usual)) + execution.loader_workers


def _most_on(config: StudyConfig, device: DeviceKind, node: NodeFacts) -> int:
    together = config.execution.processes
    on_devices = 1 if device is DeviceKind.CPU else len(node.devices) // together
    return max(1, on_devices, node.cores // (_cores_each(config.execution, device, node.cores) * together))


def most_on_node(config: StudyConfig, device: DeviceKind, nodes: Mapping[str, NodeFacts], name: str) -> int:
    """Return how many trials may run side by side on one node: its share of a fixed number, or what it has cores for.

    Args:
        config: The study.
        device: Where its trials run.
        nodes: The machines that they may use, by name.
        name: The one that is asked about.
    """
    wish = config.runtime.parallel
    most = _most_on(config, device, nodes[name]) if wish == AUTO else math.ceil(wish / len(nodes))
    return min(most, _slots(config))


def _slots(config: StudyConfig) -> int:
    """Return the most trials on one node that the study file allows."""
    return _MOST_PARALLEL if config.nodes is None or config.nodes.slots == AUTO else config.nodes.slots


def degrees_at_hand(config: StudyConfig, device: DeviceKind, nodes: Mapping[str, NodeFacts]) -> tuple[int, ...]:
    """Return the numbers of ranks that the planner may shard a trial's model over if ``execution.tp`` is "auto".

    There are no more than GPUs of a node. On the CPU each rank of every trial that may run needs cores of its own.

    Args:
        config: The study.
        device: Where its trials run.
        nodes: The machines that they may use, by name.
    """
    execution = config.execution
    if execution.tp != AUTO:
        return ()
    if device is DeviceKind.CUDA:
        return degrees_within(max((len(node.devices) for node in nodes.values()), default=1))
    each = (execution.threads or 1) + execution.loader_workers
    most = {name: most_on_node(config, device, nodes, name) for name in nodes}
    return degrees_within(max(node.cores // (each * most[name]) for name, node in nodes.items()))


def job_of_trials(config: StudyConfig) -> Job:
    """Return the job of a trial's process."""
    if config.script is not None:
        return Job.SCRIPT
    if config.trainer is not None:
        return Job.TRAINER
    return Job.TRAIN if config.objective is None else Job.OBJECTIVE
