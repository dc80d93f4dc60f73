"""The processes that train one trial together: forked from the trial's own, and heard through it alone.

Rank 0 is the child that the control process started; the others are its children and of its session, so that whoever
ends the one ends them all. They are forked before anything has begun a thread or touched a device.
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

from dryfit.core.channel import ChildChannel, Peers
from dryfit.core.errors import CommError
from dryfit.core.process import die_with_parent
from dryfit.core.settings.execution import DeviceKind, ExecutionPlan
from dryfit.core.sharding.device_groups import devices_of
from dryfit.core.text.words import few
from dryfit.parallel.ranks.collectives import ProcessRanks

T = TypeVar("T")

_FOLDER: Final = "ranks"
_LONGEST_CALL: Final = datetime.timedelta(hours=24)
"""Of a collective: a rank that hangs is found by the control process, which hears no heartbeat then."""
_TO_END_S: Final = 10.0
_POLL_S: Final = 0.02
_LOST: Final = ("gloo/transport/", "NCCL error", "Connection closed by peer", "Connection reset by peer")
"""What messages of collectives hold where another rank has ended. Sources: gloo names the file that raised in its every
message; torch torch/csrc/distributed/c10d/NCCLUtils.hpp; c10d's own socket, and libuv, what the system said."""


class ProcessGroup(Peers, Protocol):
    """The processes that train a trial, as one of them sees them."""

    def collect(self, value: T) -> list[T]:
        """What each of them has, in the order of their ranks; on each of them."""
        ...


@final
class SingleProcess:
    """One process trains the trial."""

    def __init__(self) -> None:
        self.rank: Final = 0
        self.size: Final = 1

    def share(self, value: T) -> T:
        """The value."""
        return value

    def collect(self, value: T) -> list[T]:
        """The value alone."""
        return [value]


SINGLE_PROCESS: Final = SingleProcess()


@final
class RankGroup:
    """One of several processes of a torch.distributed group.

    Attributes:
        rank: Its number.
        size: How many there are.
        tensors: Its end of the collectives on tensors.
    """

    def __init__(self, rank: int, size: int, folder: Path, device: DeviceKind) -> None:
        # All are on this machine: its own name need not resolve, nor a firewall let them through.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        backend = "cpu:gloo,cuda:nccl" if device is DeviceKind.CUDA else "gloo"
        store = (folder / "store").absolute().as_uri()
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=_LONGEST_CALL)
        self.rank: Final = rank
        self.size: Final = size
        self.tensors: Final = ProcessRanks()

    def share(self, value: T) -> T:
        """Rank 0's value, pickled."""
        said: list[Any] = [value]
        dist.broadcast_object_list(said, src=0)
        return cast("T", said[0])

    def collect(self, value: T) -> list[T]:
        """Every rank's value, pickled."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


ResultT = TypeVar("ResultT")


def run_in_process_group(plan: ExecutionPlan, channel: ChildChannel, job: Callable[[ProcessGroup], ResultT]) -> ResultT:
    """Do a job on as many processes as its plan says; this one is rank 0, and its result is the job's.

    Args:
        plan: How the trial is run.
        channel: To the control process; the other ranks say nothing there.
        job: What each of them does.

    Raises:
        CommError: A rank has ended without a word.
        Exception: What ended a rank, this one or another.
    """
    if plan.processes == 1:
        return job(SINGLE_PROCESS)
    folder = channel.folder / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # What an earlier group left is to be gone: collected after the fork, it would wait there for threads left behind.
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
    dist.barrier()  # nobody leaves while another still waits for it
    return result


def _see_one_device(rank: int, environment: dict[str, str] | os._Environ[str]) -> None:
    """Of the devices that the trial was given, this rank has the one in its place."""
    devices = devices_of(environment.get("CUDA_VISIBLE_DEVICES", ""))
    if len(devices) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = devices[rank]


@dataclass(slots=True)
class _Others:
    """The ranks that this process has started.

    Attributes:
        folder: Where they leave what ended them.
        running: Process ids, by rank.
        ended: How each has ended that did not end well, by rank.
    """

    folder: Path
    running: dict[int, int] = field(default_factory=dict[int, int])
    ended: dict[int, int] = field(default_factory=dict[int, int])

    def start(self, rank: int, job: Callable[[], object]) -> None:
        """Fork a rank."""
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_a_rank(parent_pid, self._said(rank), job)
        self.running[rank] = pid

    def _said(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error"

    def _look(self) -> None:
        for rank, pid in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.running[rank]
                if status:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)

    def wait(self) -> None:
        """Wait until all have ended, or for as long as they may take.

        Raises:
            CommError: One did not end well, although it had done its work.
        """
        deadline_s = time.monotonic() + _TO_END_S
        while self.running and time.monotonic() < deadline_s:
            self._look()
            time.sleep(_POLL_S)
        if self.ended:
            raise self._lost("ending the trial")

    def blamed(self, error: Exception) -> Exception:
        """What ended the trial: this rank's own exception, unless it only says that another one has gone."""
        if not _says_lost(error):
            return error
        deadline_s = time.monotonic() + _TO_END_S
        while self.running and not self.ended and time.monotonic() < deadline_s:
            self._look()
            time.sleep(_POLL_S)
        for rank in sorted(self.ended):
            theirs = _read_error(self._said(rank))
            if theirs is not None and not _says_lost(theirs):
                theirs.add_note(f"it ended rank {rank} of the trial's processes")
                return theirs
        return self._lost("training a trial on several processes") if self.ended else error

    def _lost(self, doing: str) -> CommError:
        ends = [f"rank {rank} {_how(status)}" for rank, status in sorted(self.ended.items())]
        return CommError(doing, few(ends), allowed="all ranks until the end", hint="see child.log of the attempt")

    def end(self) -> None:
        """Kill and reap those that are left."""
        for pid in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.running.clear()


def _be_a_rank(parent_pid: int, said: Path, job: Callable[[], object]) -> NoReturn:
    """Do a rank's part in a process that was just forked, and end it; what ended it early is left in a file."""
    status = 1
    try:
        die_with_parent(parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 hears it, and tells
        job()
        status = 0
    except BaseException as error:  # noqa: BLE001  # the outermost frame: rank 0 hears of whatever it is
        sys.stderr.write("".join(traceback.format_exception(error)))
        with suppress(Exception):
            said.write_bytes(pickle.dumps(error))
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _read_error(path: Path) -> Exception | None:
    try:
        found = pickle.loads(path.read_bytes())  # noqa: S301  # our own process has written it
    except Exception:  # noqa: BLE001  # nothing, half of it, or a class that cannot be made again
        return None
    return found if isinstance(found, Exception) else None


def _says_lost(error: BaseException) -> bool:
    """Whether an exception says no more than that a collective failed."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)


def _how(status: int) -> str:
    """How a process has ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
