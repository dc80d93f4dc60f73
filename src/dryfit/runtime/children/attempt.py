"""The state of one running child: its messages, its signs of life, its limits and the evidence of its end."""

from dataclasses import dataclass, field

from dryfit.core.failure import Evidence
from dryfit.core.jobs.child import ChildResult, training_of
from dryfit.core.text.tail import LineTail
from dryfit.core.wire import (
    BEAT_FILE,
    DISK_FULL_BEAT_NS,
    LOG_FILE,
    MESSAGES_FILE,
    Checkpointed,
    Message,
    Phase,
    Progress,
    Started,
)
from dryfit.runtime.children.child import ChildStatus
from dryfit.runtime.children.child_spec import ChildSpec
from dryfit.runtime.children.fresh import FreshChild
from dryfit.runtime.children.log_limit import LogLimit
from dryfit.runtime.children.result_reading import child_log_tail, new_messages
from dryfit.runtime.children.silence import SilenceLimits
from dryfit.runtime.machine.cgroup import oom_kills, rose


@dataclass(slots=True)
class Attempt:
    """One child, from its placement to its end. Times are those of the supervisor's own clock.

    Attributes:
        token: Name of this start for the fork server; each start has its own.
        begun_s: When it was asked for, and later when its process was made.
        asks: Number of fork servers that were asked for it.
        pid: None until its process exists.
        fresh: Its process, if it has an interpreter of its own.
        started_s: When its first line was seen.
        alive_s: Time of its last sign of life.
        killed_by_us: As in :class:`dryfit.core.failure.Evidence`.
        killed_s: When it was killed first.
        stacks: As in :class:`dryfit.core.failure.Evidence`.
        phase: What it does, by its last message on it.
        step: The optimizer step of its last message.
        peak_bytes: The most device memory that it has reported.
    """

    spec: ChildSpec
    token: str
    begun_s: float
    oom_kills_before: int | None = field(default_factory=oom_kills)
    asks: int = 0
    pid: int | None = None
    fresh: FreshChild | None = None
    started_s: float | None = None
    alive_s: float = 0.0
    stop_asked_s: float | None = None
    killed_by_us: str = ""
    killed_s: float | None = None
    stacks: str = ""
    phase: str = ""
    step: int = 0
    peak_bytes: int | None = None
    _silence: SilenceLimits = field(default_factory=SilenceLimits)
    _beat_ns: int = 0
    _tail: LineTail = field(init=False)
    _log: LogLimit = field(init=False)

    def __post_init__(self) -> None:
        self._tail = LineTail(self.spec.folder / MESSAGES_FILE)
        self._log = LogLimit(self.spec.folder / LOG_FILE)

    def look(self, now_s: float) -> list[Message]:
        """Read what is new in its folder; notice its first line and its heartbeat; keep its log in bounds."""
        self._log.trim()
        messages = new_messages(self._tail)
        try:
            beat_ns = (self.spec.folder / BEAT_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            beat_ns = 0
        # A change counts, not the age: the wall clock that stamps files may jump.
        if messages or beat_ns != self._beat_ns:
            if self.started_s is not None:
                self._silence.note(self.phase, now_s - self.alive_s)
            self._beat_ns = beat_ns
            self.alive_s = now_s
        for message in messages:
            self._note(message, now_s)
        return messages

    def _note(self, message: Message, now_s: float) -> None:
        """Keep what may explain its end."""
        match message:
            case Started():
                self.started_s = now_s if self.started_s is None else self.started_s
            case Phase(name=name, step=step):
                self.phase, self.step = name, step
            case Progress(step=step, device_bytes=device_bytes):
                self.step = step
                if device_bytes is not None:
                    self.peak_bytes = max(self.peak_bytes or 0, device_bytes)
            case Checkpointed(step=step):
                self.step = step
            case _:
                pass

    @property
    def hang_s(self) -> float:
        """The longest silence that is allowed now, in seconds."""
        limits = self.spec.limits
        return self._silence.limit_s(self.phase, limits.hang_s) if limits.hang_learned else limits.hang_s

    def overdue(self, now_s: float) -> str:
        """Return why it must be killed now, in the words of ``killed_by_us``; empty if it need not."""
        limits = self.spec.limits
        if self.killed_by_us:
            return ""
        if self.stop_asked_s is not None and now_s - self.stop_asked_s > limits.stop_grace_s:
            return "now"
        if self.started_s is None:
            return "start" if now_s - self.begun_s > limits.start_s else ""
        if now_s - self.alive_s > self.hang_s:
            return "hang"
        if limits.total_s is not None and now_s - self.started_s > limits.total_s:
            return "timeout"
        return ""

    def evidence(
        self, now_s: float, result: ChildResult | None, *, status: int | None, server_lost: bool, trouble: str = ""
    ) -> Evidence:
        """Collect the evidence of its end, once its log has its last size.

        Args:
            status: Exit status, or minus the signal that ended it; None: unknown.
            trouble: Why its process could not be made; added to the log's end.
        """
        self._log.settle()
        log = child_log_tail(self.spec.folder)
        trained = training_of(result)
        reported_bytes = (self.peak_bytes, trained.peak_reserved_bytes if trained is not None else None)
        return Evidence(
            exit_code=status if status is not None and status >= 0 else None,
            disk_full=status == ChildStatus.DISK_FULL and self._beat_ns == DISK_FULL_BEAT_NS,
            signal=-status if status is not None and status < 0 else None,
            fault=result.fault if result is not None else None,
            log_tail=f"{log}\n{trouble}" if trouble else log,
            started=self.started_s is not None,
            beat_age_s=now_s - self.alive_s if self.started_s is not None else 0.0,
            stop_asked=self.stop_asked_s is not None,
            killed_by_us=self.killed_by_us,
            server_lost=server_lost,
            oom_kills_rose=rose(self.oom_kills_before, oom_kills()),
            phase=self.phase,
            step=self.step,
            stacks=self.stacks,
            peak_bytes=max((size_bytes for size_bytes in reported_bytes if size_bytes is not None), default=None),
        )
