"""What is known of a study: its devices and cores, and the configuration of each trial."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.node import DeviceFacts, NodeFacts
from dryfit.search.pruning import most_reports
from dryfit.search.space import Space, apply_params, enumerated, setting
from dryfit.settings.devices import check_enough, cpu_of, most_on_a_node, overlap, place_on, places_of
from dryfit.settings.errors import MachineError
from dryfit.settings.execution import ExecutionSettings
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.sharding import AUTO, degrees_within
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.tables import TrialSettings
from dryfit.settings.training_messages import ResolveResult
from dryfit.settings.trial import Scalar, TrialConfig
from dryfit.settings.wire import Job, digest

# Which devices and cores of the nodes trials may use, and how many trials that makes side by side.


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


# What is known of a study: by the process that runs it, and by one that only reads it.


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyStudy:
    """A study, its data resolved, and the nodes that its trials may use, by name."""

    config: StudyConfig
    layout: StudyLayout
    state: StudyState
    resolved: ResolveResult
    nodes: Mapping[str, NodeFacts]

    @property
    def parallelism(self) -> Parallelism:
        """How many trials may run side by side, as far as cores go."""
        return parallelism(self.config, self.resolved.device, self.nodes.values())

    def most_on(self, node: str) -> int:
        """How many of them may run on one node."""
        return most_on_node(self.config, self.resolved.device, self.nodes, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyContext(AnyStudy):
    """The study that a session runs; only ``state`` changes meanwhile, with each event of the ledger."""

    space: Space
    ledger: Ledger

    @property
    def trial_job(self) -> Job:
        """The job of a trial's process."""
        return job_of_trials(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot(AnyStudy):
    """A study as its folder has it now, whether it runs or not."""


# The configuration of a trial: the study file's values, with those that were drawn for it.


_FEW_VALUES = 100


def trial_settings(study: AnyStudy, params: Mapping[str, Scalar], own: Mapping[str, Scalar]) -> TrialSettings:
    """Return the tables of a trial: the study file's, with the drawn values in them.

    Args:
        study: The study of the trial.
        params: The values that were drawn for it.
        own: The study file's values at that time. A key that is searched only since then keeps its value of then.
    """
    kept = {name: own[name] for name in study.config.space if name in own}
    return apply_params(study.config.trial_settings, {**kept, **params})


def trial_config(study: AnyStudy, number: int, params: Mapping[str, Scalar], seed: int) -> TrialConfig:
    """Return everything that decides what trial ``number`` learns; the trial need not exist yet."""
    trials = study.state.trials
    own = trials[number].own if number < len(trials) else dict[str, Scalar]()
    settings, data = trial_settings(study, params, own), study.resolved.data_fingerprint
    return config_of(study.config, settings, params, number=number, seed=seed, data_fingerprint=data)


def config_of(
    config: StudyConfig,
    settings: TrialSettings,
    params: Mapping[str, Scalar],
    *,
    data_fingerprint: str,
    number: int = 0,
    seed: int | None = None,
) -> TrialConfig:
    """Return everything that decides what a trial learns.

    Args:
        config: The study's.
        settings: The trial's tables.
        params: The drawn values, which are in them.
        data_fingerprint: Of the rows.
        number: The trial's.
        seed: None: the study's, for a trial that is none of it.
    """
    return TrialConfig(
        number=number,
        task=config.study.task,
        metric=config.study.metric,
        direction=config.study.resolved_direction,
        also=config.study.also,
        data=config.data,
        settings=settings,
        params=dict(params),
        seed=config.study.seed if seed is None else seed,
        data_fingerprint=data_fingerprint,
    )


def trial_fingerprint(study: StudyContext, number: int, params: Mapping[str, Scalar], seed: int) -> str:
    """Return a hash of all that changes a trial's result; the user's own function counts by its name and version."""
    own = study.config.function
    if own is None:
        return trial_config(study, number, params, seed).fingerprint
    decides = {"function": own.function, "version": own.version, "params": dict(params), "seed": seed}
    return digest(decides)


def fold_reports(study: StudyContext) -> int:
    """Return how many report numbers each fold of a trial has.

    It is the same for all trials, so that reports of one number compare: they follow as many validations of one fold.
    """
    return most_reports(study.space, study.config.trial_settings) if study.config.data.folds > 1 else 1


def possible_values(config: StudyConfig, space: Space, key: str) -> tuple[str, ...]:
    """Return every word that a key of few values may have in a trial: those in the space, else the file's own.

    A value that the device or the disk does not allow can so be refused before the first trial.
    """
    choices = [enumerated(param.distribution, limit=_FEW_VALUES) for param in space.cases(key)]
    searched = {str(value) for values in choices for value in values or ()}
    return tuple(sorted(searched)) or (str(setting(config.trial_settings, key)),)
