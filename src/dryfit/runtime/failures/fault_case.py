"""The conditions that rows of the failure table are made of."""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dryfit.core.failure import ChildFault, Evidence
from dryfit.core.jobs.child import ChildResult, training_of
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.train import StopReason
from dryfit.core.sharding.device_groups import devices_of, visible_devices
from dryfit.core.wire import VALIDATING
from dryfit.runtime.children.child import ChildStatus
from dryfit.runtime.failures import fault_texts as texts
from dryfit.runtime.failures.device_memory import held_by_neighbours, known_device_memory
from dryfit.runtime.failures.fault_texts import FATAL_XIDS

CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})
"""Signals of a crash in native code."""

_LITTLE_BYTES = 128 << 20
"""Free bytes below which shared memory or a disk counts as full: containers have 64 MiB by default."""

_RESUMING = ("in _load_from_checkpoint", "in _load_optimizer_and_scheduler", "in _load_rng_state")
"""The Trainer's functions that read a checkpoint, as in a traceback."""

UNREADABLE_TYPES = (
    "_pickle.UnpicklingError",
    "pickle.UnpicklingError",
    "safetensors_rust.SafetensorError",
    "json.decoder.JSONDecodeError",
    "zipfile.BadZipFile",
    "builtins.EOFError",
    "builtins.OSError[EIO]",
)
"""Exceptions of reading a torn or damaged file."""


@dataclass(frozen=True, slots=True)
class FaultCase:
    """The end of an attempt. ``fault`` is that of the evidence, or else that of the result."""

    evidence: Evidence
    result: ChildResult | None
    fault: ChildFault | None
    job: Job = Job.TRAIN

    @property
    def stopped_by(self) -> StopReason | None:
        """Why training stopped early; None unless a training result says so."""
        trained = training_of(self.result)
        return trained.stopped_by if trained is not None else None

    @property
    def log(self) -> str:
        """The end of the log of a child that crashed in native code without a result; empty for any other child.

        Other logs are not used: what a child printed need not be why it ended.
        """
        evidence = self.evidence
        broke = evidence.signal in CRASH_SIGNALS or evidence.exit_code == ChildStatus.NO_LAST_WORD
        explained = bool(evidence.killed_by_us) or evidence.server_lost or self.fault is not None
        return evidence.log_tail if broke and not explained and self.job not in _PLANNERS else ""


_PLANNERS = (Job.PLAN, Job.REHEARSE)

Test = Callable[[FaultCase], bool]


def code(*codes: str) -> Test:
    """The child raised an error of dryfit with one of these codes."""
    return lambda case: case.fault is not None and case.fault.code in codes


def raised(*names: str) -> Test:
    """An exception of its chain is of one of these classes or a subclass."""
    return lambda case: case.fault is not None and not set(names).isdisjoint(case.fault.type_names)


def _searched(case: FaultCase) -> tuple[str, ...]:
    return (case.fault.message, case.fault.traceback) if case.fault is not None else (case.log,)


def said(*wanted: str) -> Test:
    """One of these texts is in its exception, or in its log if it left none; the last resort."""
    return lambda case: any(text in searched for searched in _searched(case) for text in wanted)


def by_signal(numbers: Iterable[int]) -> Test:
    """One of these signals ended the child."""
    wanted = frozenset(numbers)
    return lambda case: case.evidence.signal in wanted


def killed(why: str) -> Test:
    """We killed the child for this reason."""
    return lambda case: case.evidence.killed_by_us == why


def any_of(*tests: Test) -> Test:
    """At least one of the tests holds."""
    return lambda case: any(test(case) for test in tests)


def all_of(*tests: Test) -> Test:
    """All tests hold."""
    return lambda case: all(test(case) for test in tests)


def stop_asked(case: FaultCase) -> bool:
    """We had asked the child to stop."""
    return case.evidence.stop_asked


def oom_rose(case: FaultCase) -> bool:
    """The kernel killed processes for lack of memory meanwhile."""
    return case.evidence.oom_kills_rose


def has_result(case: FaultCase) -> bool:
    """The child left a result."""
    return case.result is not None and case.result.answer is not None


def has_fault(case: FaultCase) -> bool:
    """The child left an exception."""
    return case.fault is not None


def plans(case: FaultCase) -> bool:
    """The child planned a trial's memory."""
    return case.job in _PLANNERS


def calls_own_function(case: FaultCase) -> bool:
    """The child called a function of the user."""
    return case.job in (Job.OBJECTIVE, Job.TRAINER, Job.SCRIPT)


def validates(case: FaultCase) -> bool:
    """The child scored rows of a study when it ended, so many at once as its plan says."""
    return case.evidence.phase == VALIDATING and case.job is not Job.PREDICT


def left_by_itself(case: FaultCase) -> bool:
    """The child exited with a status that is not ours: its own code did that, and would do so again."""
    evidence = case.evidence
    ours = evidence.disk_full or evidence.exit_code == ChildStatus.NO_LAST_WORD
    return evidence.started and evidence.exit_code is not None and not ours


def has_device(case: FaultCase) -> bool:
    """The child was given a device."""
    return case.evidence.device is not None


def fatal_xids(case: FaultCase) -> list[int]:
    """Return the driver's errors after which a device is not trusted."""
    return [xid for xid in case.evidence.xids if xid in FATAL_XIDS]


def lost_devices(evidence: Evidence, place: str) -> tuple[str, ...]:
    """Return the devices of a place that failed when a child lost its device; all, if it is unknown which."""
    fatal = {device for xid, device in zip(evidence.xids, evidence.xid_devices, strict=False) if xid in FATAL_XIDS}
    devices = devices_of(place)
    return tuple(device for device in devices if visible_devices(device) in fatal) or devices


def lost_its_device(case: FaultCase) -> bool:
    """The driver reported a fatal error while the child ran, and no stop of ours explains its end."""
    ours = case.evidence.killed_by_us in ("now", "start") or case.evidence.server_lost
    return bool(fatal_xids(case)) and not ours


def in_shared_memory(case: FaultCase) -> bool:
    """A write to shared memory failed, or shared memory is full, while the disk has space."""
    shm, disk = case.evidence.shm_free_bytes, case.evidence.disk_free_bytes
    if disk is not None and disk < _LITTLE_BYTES:
        return False
    message = case.fault.message if case.fault is not None else case.log
    named = any(place in message for place in texts.SHARED_MEMORY_PLACES)
    return named or (disk is not None and shm is not None and shm < _LITTLE_BYTES)


def shm_low(case: FaultCase) -> bool:
    """Shared memory is nearly full."""
    shm = case.evidence.shm_free_bytes
    return shm is not None and shm < _LITTLE_BYTES


def resumed(case: FaultCase) -> bool:
    """The child was reading a checkpoint."""
    return case.fault is not None and any(place in case.fault.traceback for place in _RESUMING)


def neighbours(case: FaultCase) -> bool:
    """Other programs held the device memory that the child needed."""
    return held_by_neighbours(known_device_memory(case.evidence, case.fault))
