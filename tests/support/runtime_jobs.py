"""Small jobs that children of the runtime tests do, and a harness that starts them. Needs no torch."""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dryfit.processes.channel import ChildChannel
from dryfit.processes.child_spec import (
    ChildEvent,
    ChildExited,
    ChildLimits,
    ChildMessage,
    ChildSpec,
    SupervisorSettings,
)
from dryfit.processes.process import die_with_parent
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import DataError
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.jobs import JOBS as ALL_JOBS
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.study_file import Isolation
from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.settings.training_messages import StopReason, TrainRequest, TrainResult
from dryfit.settings.trial import MetricPoint, Scalar, TrialConfig
from dryfit.settings.wire import Job, Note, Phase

PATIENCE_S = 120.0
GENEROUS = ChildLimits(start_s=60.0, hang_s=60.0, total_s=None, stop_grace_s=60.0)


def request(job: str, **params: Scalar) -> TrainRequest:
    """A training request whose searched values say what the test job does."""
    config = TrialConfig(
        number=0,
        task=BuiltInTask.CRITERIA,
        metric=Metric.F1,
        direction=Direction.MAXIMIZE,
        data=DataSettings(train="a.jsonl", validation="b.jsonl"),
        settings=TrialSettings(),
        params={"job": job, **params},
        seed=1,
    )
    return TrainRequest(
        config=config,
        fingerprint=config.fingerprint,
        plan=ExecutionPlan(device=DeviceKind.CPU, effective_batch=1, micro_batch=1, accumulation=1),
        attempt=1,
        cache_dir="cache",
        checkpoint_dir="attempt-1/checkpoints",
        kept_checkpoint_dir="checkpoints",
        best_dir="attempt-1/best",
        scored_dir="attempt-1/scored",
        kept_best_dir="best",
        load_report="load.json",
        checkpoint_every_s=1.0,
        verdict_timeout_s=PATIENCE_S,
    )


def done(value: float = 1.0, stopped_by: StopReason | None = None) -> TrainResult:
    return TrainResult(value=value, best=0, steps=1, stopped_by=stopped_by)


def _sleep_beating(channel: ChildChannel) -> TrainResult:
    while True:
        channel.beat()
        reason = channel.stop_requested()
        if reason is not None:
            return done(stopped_by=reason)
        time.sleep(0.02)


def _report(channel: ChildChannel) -> TrainResult:
    for n in range(3):
        point = MetricPoint(n=n, step=n, epoch=float(n), value=float(n), metrics={})
        if not channel.report(point, timeout_s=PATIENCE_S):
            return done(float(n), StopReason.VERDICT)
    return done(3.0)


def _cause_chain() -> None:
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        raise DataError("reading rows", "found 3", "2", "look") from error


def _descendants(channel: ChildChannel) -> TrainResult:
    """One descendant in our group, one that left it and chained the death signal instead."""
    plain = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        die_with_parent(me)
        time.sleep(600)
    channel.send(Note(text=f"{plain.pid} {pid}"))
    return _sleep_beating(channel)


def _facts(channel: ChildChannel) -> TrainResult:
    names: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists
            names += [os.readlink(f"/proc/self/fd/{fd}")] if int(fd) > 2 else []
    channel.send(Note(text="\n".join(names)))
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    facts = f"sid={os.getsid(0) == os.getpid()} visible={visible!r} gc={gc.isenabled()} ppid={os.getppid()}"
    channel.send(Note(text=facts))
    return done()


def _torch_threads() -> TrainResult:
    import torch  # the test preloads it; the other jobs must do without

    torch.set_num_threads(2)
    total = 0.0
    for _ in range(3):
        weights = torch.ones(600, 600, requires_grad=True)
        (weights @ weights).sum().backward()
        total += float(weights.grad.sum())  # type: ignore[union-attr]
    return done(total)


def _crash(_channel: ChildChannel) -> TrainResult:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def _deadlock() -> TrainResult:
    """A lock that nobody gives back."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    raise AssertionError("unreachable")


def _worker_waits() -> None:
    time.sleep(600)


def _worker(channel: ChildChannel) -> TrainResult:
    """Wait for a forked worker that does nothing."""
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(me)
        _worker_waits()
    channel.send(Note(text=str(pid)))
    os.waitpid(pid, 0)
    return done()


def _slow(channel: ChildChannel) -> TrainResult:
    """A first step that takes long, then many quick ones."""
    channel.send(Phase(name="train"))
    time.sleep(1.5)
    for _ in range(20):
        channel.beat()
        time.sleep(0.01)
    return done()


def _variables(channel: ChildChannel) -> TrainResult:
    """Tell its environment."""
    channel.send(Note(text=json.dumps(dict(os.environ))))
    return done()


def _broken_words() -> None:
    class WordlessError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    raise WordlessError


def _no_text() -> None:
    name = os.fsdecode(b"posts-\xff.jsonl")  # a file's name may have bytes in it that no text has
    raise DataError(f"reading {name}", "found 3")


def _clean_up_fails() -> None:
    try:
        raise KeyError("the first error")
    finally:
        raise OSError("the clean-up's own")  # so it happens


def _spill(channel: ChildChannel) -> TrainResult:
    """Tell all it knows: its environment, and a secret from a file."""
    channel.send(Note(text=str(dict(os.environ))))
    print(dict(os.environ), flush=True)
    raise RuntimeError(f"401 Unauthorized: {Path(os.environ['SPILL_FROM']).read_text()}")


def _print_much(_channel: ChildChannel) -> TrainResult:
    for _ in range(200_000):
        print("x" * 100)
    print("the last line")
    os._exit(5)


JOBS: Mapping[str, Callable[[ChildChannel], TrainResult]] = {
    "noop": lambda _channel: done(),
    "run": _sleep_beating,
    "report": _report,
    "descendants": _descendants,
    "facts": _facts,
    "crash": _crash,
    "print": _print_much,
    "spill": _spill,
    "deadlock": lambda _channel: _deadlock(),
    "worker": lambda channel: _worker(channel),
    "stopped": lambda _channel: os.kill(os.getpid(), signal.SIGSTOP) or done(),
    "slow": lambda channel: _slow(channel),
    "variables": lambda channel: _variables(channel),
    "wordless": lambda _channel: _broken_words() or done(),
    "no text": lambda _channel: _no_text() or done(),
    "clean-up": lambda _channel: _clean_up_fails() or done(),
    "hang": lambda _channel: time.sleep(600) or done(),
    "exit": lambda _channel: os._exit(0) or done(),
    "fault": lambda _channel: _cause_chain() or done(),
    "sigterm": lambda channel: os.kill(os.getpid(), signal.SIGTERM) or _sleep_beating(channel),
    "torch": lambda _channel: _torch_threads(),
}


def run_job(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Entry point of the test children."""
    return JOBS[str(body.config.params["job"])](channel)


@dataclass
class Harness:
    """A supervisor for a test, and what its children said."""

    folder: Path
    isolation: Isolation = Isolation.AUTO
    preload: tuple[str, ...] = ("runtime_jobs",)
    entry: str = "runtime_jobs:run_job"
    limits: ChildLimits = GENEROUS
    events: list[ChildEvent] = field(default_factory=list)
    more_environment: dict[str, str] = field(default_factory=dict)
    _looked_at: int = field(default=0, init=False)

    def __enter__(self) -> "Harness":
        self.marker = f"test-{self.folder}"
        paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
        settings = SupervisorSettings(
            marker=self.marker,
            wakeup_fifo=self.folder / "doorbell",
            isolation=self.isolation,
            server_log=self.folder / "server.log",
            preload=self.preload,
            environment={"PYTHONPATH": os.pathsep.join(paths), **self.more_environment},
            jobs={Job.TRAIN: ALL_JOBS[Job.TRAIN]._replace(entry=self.entry)},
        )
        self.supervisor = Supervisor(settings)
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()

    def start(self, key: str, job: str, limits: ChildLimits | None = None) -> Path:
        folder = self.folder / key
        self.supervisor.start(ChildSpec(key, folder, request(job), limits or self.limits))
        return folder

    def until(self, arrived: Callable[[ChildEvent], bool]) -> ChildEvent:
        """Wait for an event after the last one that was waited for; all are kept in ``events``."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            while self._looked_at < len(self.events):
                event = self.events[self._looked_at]
                self._looked_at += 1
                if arrived(event):
                    return event
            if time.monotonic() >= deadline_s:
                break
            self.events += self.supervisor.wait(1.0)
        raise AssertionError(f"no such event; so far: {self.events}")

    def until_said(self, key: str, kind: str) -> ChildMessage:
        event = self.until(lambda e: isinstance(e, ChildMessage) and e.key == key and e.message.type == kind)
        assert isinstance(event, ChildMessage)
        return event

    def until_exit(self, key: str) -> ChildExited:
        event = self.until(lambda e: isinstance(e, ChildExited) and e.key == key)
        assert isinstance(event, ChildExited)
        return event

    def said(self, key: str) -> list[str]:
        return [e.message.type for e in self.events if isinstance(e, ChildMessage) and e.key == key]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_dead(*pids: int) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False
