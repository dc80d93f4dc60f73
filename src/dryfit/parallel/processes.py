"""The process group that trains one trial: fork its ranks, and report the failure of any of them.

Rank 0 is the child that the control process started, and the only one that reports to it. The others are its children
and of its session, so that ending rank 0 ends them all. They are forked before any thread or device context exists.
"""

import datetime
import gc
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast, final

import torch.distributed as dist

from dryfit.parallel.collectives import ProcessRanks
from dryfit.processes.channel import ChildChannel, Peers
from dryfit.processes.process import die_with_parent
from dryfit.settings.devices import devices_of
from dryfit.settings.errors import CommError
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.text import few

T = TypeVar("T")

_FOLDER: Final = "ranks"
_LONGEST_CALL: Final = datetime.timedelta(hours=24)
"""Limit of a collective; a hung rank is found sooner by the control process, which misses its heartbeat."""
_TO_END_S: Final = 10.0
_POLL_S: Final = 0.02
_LOST: Final = ("gloo/transport/", "NCCL error", "Connection closed by peer", "Connection reset by peer")
"""Texts in the errors of collectives when another rank has ended. Sources: gloo names the file that raised in every
message; torch torch/csrc/distributed/c10d/NCCLUtils.hpp; c10d's socket and libuv pass on the system's message."""


class ProcessGroup(Peers, Protocol):
    """The processes that train a trial, as one of them sees them."""

    def collect(self, value: T) -> list[T]:
        """Return every process's value, in the order of ranks; on each of them."""
        ...


@final
class SingleProcess:
    """One process trains the trial."""

    def __init__(self) -> None:
        self.rank: Final = 0
        self.size: Final = 1

    def share(self, value: T) -> T:
        """Return the value."""
        return value

    def collect(self, value: T) -> list[T]:
        """Return the value in a list."""
        return [value]


SINGLE_PROCESS: Final = SingleProcess()


@final
class RankGroup:
    """One of several processes of a torch.distributed group.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        tensors: This rank's end of the collectives on tensors.
    """

    def __init__(self, rank: int, size: int, folder: Path, device: DeviceKind) -> None:
        # All are on this machine: its host name need not resolve, nor a firewall let them through.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        backend = "cpu:gloo,cuda:nccl" if device is DeviceKind.CUDA else "gloo"
        store = (folder / "store").absolute().as_uri()
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=_LONGEST_CALL)
        self.rank: Final = rank
        self.size: Final = size
        self.tensors: Final = ProcessRanks()

    def share(self, value: T) -> T:
        """Return rank 0's value; it is pickled."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return cast("T", values[0])

    def collect(self, value: T) -> list[T]:
        """Return every rank's value; they are pickled."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ResultT = TypeVar("ResultT")


def run_in_process_group(plan: ExecutionPlan, channel: ChildChannel, job: Callable[[ProcessGroup], ResultT]) -> ResultT:
    """Run a job on the plan's number of processes, and return the result of this one, rank 0.

    Args:
        plan: How the trial is run.
        channel: To the control process; the other ranks send nothing there.
        job: Run by each process.

    Raises:
        CommError: A rank has ended without an error of its own, as when it is killed.
        Exception: The error that ended a rank, this one or another.
    """
    if plan.processes == 1:
        return job(SINGLE_PROCESS)
    folder = channel.folder / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # Free an earlier group now: collected after the fork, it would wait for threads that do not exist there.
    gc.collect()
    others = _Others(folder)
    try:
        for rank in range(1, plan.processes):
            others.start(rank, lambda rank=rank: _joined(rank, plan, folder, channel, job))
        result = _joined(0, plan, folder, channel, job)
        others.wait()
        return result
    except Exception as error:
        raise others.blamed(error) from error
    finally:
        others.end()
        channel.part()
        if dist.is_initialized():
            dist.destroy_process_group()


def _joined(
    rank: int, plan: ExecutionPlan, folder: Path, channel: ChildChannel, job: Callable[[ProcessGroup], ResultT]
) -> ResultT:
    _see_one_device(rank, os.environ)
    group = RankGroup(rank, plan.processes, folder, plan.device)
    channel.join(group)
    result = job(group)
    dist.barrier()  # no rank leaves while another still waits for it
    return result


def _see_one_device(rank: int, environment: dict[str, str] | os._Environ[str]) -> None:
    """Restrict this rank to its own device of those that the trial was given."""
    devices = devices_of(environment.get("CUDA_VISIBLE_DEVICES", ""))
    if len(devices) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = devices[rank]


@dataclass(slots=True)
class _Others:
    """The ranks that this process has forked.

    Attributes:
        folder: Where they leave their errors.
        running: Process ids, by rank.
        ended: Exit statuses of those that failed, by rank.
    """

    folder: Path
    running: dict[int, int] = field(default_factory=dict[int, int])
    ended: dict[int, int] = field(default_factory=dict[int, int])

    def start(self, rank: int, job: Callable[[], object]) -> None:
        """Fork a rank."""
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_rank(parent_pid, self._error_path(rank), job)
        self.running[rank] = pid

    def _error_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error"

    def _reap(self) -> None:
        for rank, pid in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.running[rank]
                if status:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)

    def wait(self) -> None:
        """Wait until all have ended, or the time limit is over.

        Raises:
            CommError: A rank failed after it had done its work.
        """
        deadline_s = time.monotonic() + _TO_END_S
        while self.running and time.monotonic() < deadline_s:
            self._reap()
            time.sleep(_POLL_S)
        if self.ended:
            raise self._lost("ending the trial")

    def blamed(self, error: Exception) -> Exception:
        """Return the error that ended the trial: this rank's own, unless it only says that another rank is gone."""
        if not _says_lost(error):
            return error
        deadline_s = time.monotonic() + _TO_END_S
        while self.running and not self.ended and time.monotonic() < deadline_s:
            self._reap()
            time.sleep(_POLL_S)
        for rank in sorted(self.ended):
            theirs = _read_error(self._error_path(rank))
            if theirs is not None and not _says_lost(theirs):
                theirs.add_note(f"it ended rank {rank} of the trial's processes")
                return theirs
        return self._lost("training a trial on several processes") if self.ended else error

    def _lost(self, doing: str) -> CommError:
        ends = [f"rank {rank} {_how(status)}" for rank, status in sorted(self.ended.items())]
        return CommError(doing, few(ends), allowed="all ranks until the end", hint="see log.txt of the attempt")

    def end(self) -> None:
        """Kill and reap the ranks that still run."""
        for pid in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.running.clear()


def _run_rank(parent_pid: int, error_path: Path, job: Callable[[], object]) -> NoReturn:
    """Run a rank's job in a freshly forked process, and end the process; an error is left in a file."""
    status = 1
    try:
        die_with_parent(parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 receives it, and shares the decision
        job()
        status = 0
    except BaseException as error:  # noqa: BLE001  # the outermost frame: rank 0 reads whatever it is
        sys.stderr.write("".join(traceback.format_exception(error)))
        with suppress(Exception):
            error_path.write_bytes(pickle.dumps(error))
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _read_error(path: Path) -> Exception | None:
    try:
        error = pickle.loads(path.read_bytes())  # noqa: S301  # our own process has written it
    except Exception:  # noqa: BLE001  # no file, half of it, or a class that cannot be unpickled
        return None
    return error if isinstance(error, Exception) else None


def _says_lost(error: BaseException) -> bool:
    """Return whether an exception only says that a collective failed."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)


def _how(status: int) -> str:
    """Return how a process has ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
