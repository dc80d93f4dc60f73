"""Conditions on the evidence of a failure, and how the rows of the failure table combine them."""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dryfit.core.failure import ChildFault, Evidence
from dryfit.core.jobs import ChildResult, Job, StopReason
from dryfit.core.sharding.device_groups import devices_of
from dryfit.runtime.children.child import ChildStatus
from dryfit.runtime.failures import fault_texts as texts
from dryfit.runtime.failures.device_memory import held_by_neighbours, known_device_memory
from dryfit.runtime.failures.fault_texts import FATAL_XIDS, Text

CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})
"""What ends a process whose native code broke."""

_LITTLE_BYTES = 128 << 20
"""Room below which shared memory, or a disk, is called full: containers have 64 MiB unless told otherwise."""

_RESUMING = ("in _load_from_checkpoint", "in _load_optimizer_and_scheduler", "in _load_rng_state")
"""Functions of the Trainer that read a checkpoint, as a traceback names them."""

UNREADABLE_TYPES = (
    "_pickle.UnpicklingError",
    "pickle.UnpicklingError",
    "safetensors_rust.SafetensorError",
    "json.decoder.JSONDecodeError",
    "zipfile.BadZipFile",
    "builtins.EOFError",
    "builtins.OSError[EIO]",
)
"""What reading a torn or damaged file ends with."""


@dataclass(frozen=True, slots=True)
class FaultCase:
    """What a row looks at. ``fault`` is the evidence's, or the result's where that has none."""

    evidence: Evidence
    result: ChildResult | None
    fault: ChildFault | None
    job: Job = Job.TRAIN

    @property
    def stopped_by(self) -> StopReason | None:
        """Why training ended early, if a training result says so."""
        return self.result.train.stopped_by if self.result is not None and self.result.train is not None else None

    @property
    def log(self) -> str:
        """The end of the log of a child that native code ended before its last word; empty for any other.

        Nobody else's log is asked: what it printed need not be what it died of.
        """
        evidence = self.evidence
        broke = evidence.signal in CRASH_SIGNALS or evidence.exit_code == ChildStatus.NO_LAST_WORD
        explained = bool(evidence.killed_by_us) or evidence.server_lost or self.fault is not None
        return evidence.log_tail if broke and not explained and self.job is not Job.PLAN else ""


Test = Callable[[FaultCase], bool]


def code(*codes: str) -> Test:
    """It raised an error of ours with one of these codes."""
    return lambda case: case.fault is not None and case.fault.code in codes


def raised(*names: str) -> Test:
    """An exception of the chain is one of these, or of a subclass."""
    return lambda case: case.fault is not None and not set(names).isdisjoint(case.fault.type_names)


def _spoken(case: FaultCase) -> tuple[str, ...]:
    return (case.fault.message, case.fault.traceback) if case.fault is not None else (case.log,)


def said(*wanted: Text) -> Test:
    """The last resort: libraries that say it only in words, in an exception or, where none was left, in the log."""
    return lambda case: any(one.text in said for said in _spoken(case) for one in wanted)


def by_signal(numbers: Iterable[int]) -> Test:
    """One of these signals ended it."""
    wanted = frozenset(numbers)
    return lambda case: case.evidence.signal in wanted


def killed(why: str) -> Test:
    """We killed it for this reason."""
    return lambda case: case.evidence.killed_by_us == why


def any_of(*tests: Test) -> Test:
    """One of them holds."""
    return lambda case: any(test(case) for test in tests)


def all_of(*tests: Test) -> Test:
    """All of them hold."""
    return lambda case: all(test(case) for test in tests)


def stop_asked(case: FaultCase) -> bool:
    """We had asked it to stop."""
    return case.evidence.stop_asked


def oom_rose(case: FaultCase) -> bool:
    """The kernel killed for want of memory meanwhile."""
    return case.evidence.oom_kills_rose


def has_result(case: FaultCase) -> bool:
    """It left a result."""
    result = case.result
    if result is None:
        return False
    return any(one is not None for one in (result.train, result.resolve, result.plan, result.imported))


def has_fault(case: FaultCase) -> bool:
    """It left an exception."""
    return case.fault is not None


def plans(case: FaultCase) -> bool:
    """It was to plan a trial's memory."""
    return case.job is Job.PLAN


def calls_own_function(case: FaultCase) -> bool:
    """It called a function of the user's own."""
    return case.job is Job.OBJECTIVE


def left_by_itself(case: FaultCase) -> bool:
    """It ended with a status that is not ours: its own code did that, and would do it again."""
    ours = (ChildStatus.DISK_FULL, ChildStatus.NO_LAST_WORD)
    return case.evidence.started and case.evidence.exit_code is not None and case.evidence.exit_code not in ours


def has_device(case: FaultCase) -> bool:
    """It was given a device."""
    return case.evidence.device is not None


def fatal_xids(case: FaultCase) -> list[int]:
    """What the driver reported that no device is trusted after."""
    return [xid for xid in case.evidence.xids if xid in FATAL_XIDS]


def lost_devices(evidence: Evidence, place: str) -> tuple[str, ...]:
    """Which devices of a place are not to be trusted after a child lost its device: all, where nobody says which."""
    fatal = {device for xid, device in zip(evidence.xids, evidence.xid_devices, strict=False) if xid in FATAL_XIDS}
    devices = devices_of(place)
    return tuple(device for device in devices if device in fatal) or devices


def lost_its_device(case: FaultCase) -> bool:
    """The driver gave the device up while the child ran; no stop of ours explains the end."""
    ours = case.evidence.killed_by_us in ("now", "start") or case.evidence.server_lost
    return bool(fatal_xids(case)) and not ours


def in_shared_memory(case: FaultCase) -> bool:
    """What could not be written lies in shared memory, or that is full, while the disk has room."""
    shm, disk = case.evidence.shm_free_bytes, case.evidence.disk_free_bytes
    if disk is not None and disk < _LITTLE_BYTES:
        return False
    message = case.fault.message if case.fault is not None else case.log
    named = any(place in message for place in texts.SHARED_MEMORY_PLACES)
    return named or (disk is not None and shm is not None and shm < _LITTLE_BYTES)


def shm_low(case: FaultCase) -> bool:
    """There is little room in shared memory."""
    shm = case.evidence.shm_free_bytes
    return shm is not None and shm < _LITTLE_BYTES


def resumed(case: FaultCase) -> bool:
    """It was reading a checkpoint."""
    return case.fault is not None and any(place in case.fault.traceback for place in _RESUMING)


def neighbours(case: FaultCase) -> bool:
    """Others held the device's memory that it needed."""
    return held_by_neighbours(known_device_memory(case.evidence, case.fault))
