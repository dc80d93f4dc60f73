"""One job whose answer is waited for: run in a child, repeated where the child died through no fault of the job."""

import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dryfit.config.schema import Isolation
from dryfit.core.errors import ChildError, PoisonedError
from dryfit.core.failure import PastFailure
from dryfit.core.jobs import Body, ChildResult
from dryfit.core.wire import LOG_FILE, Message
from dryfit.runtime.children.child_spec import ChildExited, ChildLimits, ChildMessage, ChildSpec, SupervisorSettings
from dryfit.runtime.children.supervisor import Supervisor
from dryfit.runtime.failures.classify import classify
from dryfit.runtime.failures.recovery import ANOTHER_ATTEMPT, decide_recovery

OnMessage = Callable[[Message], None]
"""Hears what a child says while it works."""

_RETRIES = 3
_POLL_S = 0.5
STANDALONE_LIMITS = ChildLimits(start_s=120.0, hang_s=600.0, total_s=None, stop_grace_s=1.0)
"""Limits of jobs that belong to no study."""


@dataclass(frozen=True, slots=True)
class ChildJob:
    """A job, and where and how to run it.

    Attributes:
        doing: What it does, for messages: ``checking data and machine``.
        body: The job.
        folder: Each try gets a folder of its own in here, numbered from what is there already.
        limits: How long a try may take.
    """

    doing: str
    body: Body
    folder: Path
    limits: ChildLimits


def never() -> bool:
    """Nobody asks to stop."""
    return False


@dataclass(frozen=True, slots=True)
class _Try:
    """One child that works on an job, and what became of those before it."""

    job: ChildJob
    number: int
    past: tuple[PastFailure, ...] = ()

    @classmethod
    def first(cls, job: ChildJob) -> "_Try":
        return cls(job, 1 + (len(list(job.folder.glob("*"))) if job.folder.exists() else 0))

    def spec(self) -> ChildSpec:
        """The child to start; its folder has a number that no earlier run used."""
        key = f"{self.job.folder.name}-{self.job.body.job}-{self.number}"
        return ChildSpec(key, self.job.folder / f"{self.number:04d}", self.job.body, self.job.limits)

    def judge(self, exited: ChildExited) -> "ChildResult | _Try":
        """The answer, or the next try.

        Raises:
            DryfitError: What the child raised.
            ChildError: It failed in another way, and trying again is of no use.
        """
        result = exited.result
        if result is not None and result.error is not None and result.error.code != PoisonedError.code:
            raise result.error.rebuilt()
        if result is not None and result.fault is None:
            return result
        failure = classify(exited.evidence, result, job=self.job.body.job)
        answer = decide_recovery(failure, self.past, retries=_RETRIES)
        if answer.action not in ANOTHER_ATTEMPT or len(self.past) >= _RETRIES:
            raise ChildError(
                self.job.doing,
                f"the process ended without an answer ({failure.kind}: {failure.sentence})",
                hint=f"see {self.spec().folder / LOG_FILE}",
            )
        return _Try(self.job, self.number + 1, (*self.past, PastFailure(failure.kind, reached_checkpoint=False)))


def run_job(job: ChildJob, supervisor: Supervisor, stop_asked: Callable[[], bool] = never) -> ChildResult | None:
    """Run a job to its answer.

    Args:
        job: The job.
        supervisor: Who runs it.
        stop_asked: Whether to give up; asked a few times a second.

    Returns:
        The child's answer; None where a stop was asked for meanwhile.

    Raises:
        DryfitError: What the child raised.
        ChildError: The child failed in another way, or died several times.
    """
    answer: ChildResult | _Try = _Try.first(job)
    while isinstance(answer, _Try):
        exited = _run(answer.spec(), supervisor, stop_asked)
        if exited is None:
            return None
        answer = answer.judge(exited)
    return answer


def run_side_by_side(
    jobs: Sequence[ChildJob],
    supervisor: Supervisor,
    *,
    most: int,
    told: Callable[[int], None],
    heard: OnMessage = lambda _: None,
) -> list[ChildResult | ChildError]:
    """Run several jobs, each in a folder of its own name.

    Args:
        jobs: The jobs.
        supervisor: Who runs them.
        most: How many at once.
        told: Called with the number of a job that has its answer.
        heard: Called with what a child says meanwhile.

    Returns:
        The answer of each; an error where its child died, which does not end the others.

    Raises:
        DryfitError: What a child raised.
    """
    waiting = deque((index, _Try.first(job)) for index, job in enumerate(jobs))
    running: dict[str, tuple[int, _Try]] = {}
    answers: dict[int, ChildResult | ChildError] = {}
    while waiting or running:
        while waiting and len(running) < most:
            index, attempt = waiting.popleft()
            running[attempt.spec().key] = (index, attempt)
            supervisor.start(attempt.spec())
        for event in supervisor.wait(_POLL_S):
            if isinstance(event, ChildMessage):
                heard(event.message)
            if not isinstance(event, ChildExited) or event.key not in running:
                continue
            index, attempt = running.pop(event.key)
            answer = _answer(attempt, event)
            if isinstance(answer, _Try):
                waiting.appendleft((index, answer))
            else:
                answers[index] = answer
                told(index)
    return [answers[index] for index in range(len(jobs))]


def _answer(attempt: _Try, exited: ChildExited) -> ChildResult | ChildError | _Try:
    try:
        return attempt.judge(exited)
    except ChildError as error:
        return error


def run_alone(doing: str, body: Body, heard: OnMessage = lambda _: None) -> ChildResult:
    """Run a job that belongs to no study, in a fresh interpreter and a temporary folder.

    The folder stays where the child left no answer: its log is in there.

    Args:
        doing: As in :class:`ChildJob`.
        body: The job; its paths must be absolute.
        heard: As in :func:`run_side_by_side`.

    Raises:
        DryfitError: What the child raised.
        ChildError: The child failed in another way, or died several times.
    """
    (answer,) = run_all_alone(doing, (body,), heard=heard)
    if isinstance(answer, ChildError):
        raise answer
    return answer


def run_all_alone(
    doing: str,
    bodies: Sequence[Body],
    *,
    most: int = 1,
    preload: tuple[str, ...] = (),
    told: Callable[[int], None] = lambda _: None,
    heard: OnMessage = lambda _: None,
) -> list[ChildResult | ChildError]:
    """Run jobs as :func:`run_alone` does, several at once.

    Args:
        doing: As in :class:`ChildJob`.
        bodies: The jobs; their paths must be absolute.
        most: As in :func:`run_side_by_side`.
        preload: Modules that a fork server imports once for all jobs; none: each gets a fresh interpreter.
        told: As in :func:`run_side_by_side`.
        heard: As in :func:`run_side_by_side`.

    Raises:
        DryfitError: What a child raised.
    """
    folder = Path(tempfile.mkdtemp(prefix="dryfit-"))
    settings = SupervisorSettings(
        marker=uuid.uuid4().hex,
        wakeup_fifo=folder / "doorbell",
        isolation=Isolation.AUTO if preload else Isolation.FRESH,
        server_log=folder / "forkserver.txt",
        preload=preload,
    )
    jobs = [ChildJob(doing, body, folder / f"job-{index}", STANDALONE_LIMITS) for index, body in enumerate(bodies)]
    keep = False
    try:
        with Supervisor(settings) as supervisor:
            answers = run_side_by_side(jobs, supervisor, most=most, told=told, heard=heard)
        keep = any(isinstance(answer, ChildError) for answer in answers)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return answers


def _run(spec: ChildSpec, supervisor: Supervisor, stop_asked: Callable[[], bool]) -> ChildExited | None:
    supervisor.start(spec)
    while True:
        if stop_asked():
            supervisor.kill(spec.key, "now")
            return None
        for event in supervisor.wait(_POLL_S):
            if isinstance(event, ChildExited) and event.key == spec.key:
                return event
