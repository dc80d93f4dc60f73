"""Jobs run in children: their answers are waited for, and repeated where a child died through no fault of its job."""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Generic, overload

from dryfit.processes.child_spec import ChildExited, ChildLimits, ChildMessage, ChildSpec, SupervisorSettings
from dryfit.processes.failures import ANOTHER_ATTEMPT, classify, decide_recovery
from dryfit.processes.node import LocalNode, Nodes, first_node
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.devices import cpu_of
from dryfit.settings.errors import ChildError, PastFailure, PoisonedError
from dryfit.settings.installed import how_to_install
from dryfit.settings.jobs import answer_to
from dryfit.settings.study_file import Isolation
from dryfit.settings.wire import LOG_FILE, JobRequest, Message, R
from dryfit.study.driver import StopRequests, drive
from dryfit.study.next_step import End

STANDALONE_LIMITS = ChildLimits(start_s=120.0, hang_s=600.0, total_s=None, stop_grace_s=1.0)
"""Limits of jobs that belong to no study."""

OnMessage = Callable[[Message], None]
"""Called with each message of a child."""

_RETRIES = 3
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ChildJob(Generic[R]):
    """A job, with its folder and its limits.

    Attributes:
        doing: What it does, for error messages: ``checking data and machine``.
        body: The job.
        folder: Each try gets the next numbered folder in here.
        limits: How long a try may take.
    """

    doing: str
    body: JobRequest[R]
    folder: Path
    limits: ChildLimits


@dataclass(frozen=True, slots=True)
class _Try(Generic[R]):
    """One child that works on a job.

    Attributes:
        index: The job's place among those that run together.
        number: The number of the try's folder.
        past: How the tries before it failed.
    """

    job: ChildJob[R]
    index: int
    number: int
    past: tuple[PastFailure, ...] = ()

    @property
    def folder(self) -> Path:
        """The try's folder."""
        return self.job.folder / f"{self.number:04d}"

    def spec(self, place: str) -> ChildSpec:
        """Return the child to start."""
        key = f"{self.job.folder.name}-{self.job.body.job}-{self.number}"
        return ChildSpec(key, self.folder, self.job.body, self.job.limits, place)

    def judge(self, exited: ChildExited) -> "R | ChildError | _Try[R]":
        """Return the answer, the next try, or the error where another try would be of no use.

        Raises:
            DryfitError: The child raised it.
            InternalError: Its answer is of another job.
        """
        result = exited.result
        if result is not None and result.error is not None and result.error.code != PoisonedError.code:
            error = result.error.rebuilt()
            if isinstance(error, ChildError):
                return error
            raise error
        if result is not None and result.fault is None:
            return answer_to(self.job.body, result.answer)
        failure = classify(exited.evidence, result, job=self.job.body.job)
        answer = decide_recovery(failure, self.past, retries=_RETRIES)
        if answer.action not in ANOTHER_ATTEMPT or len(self.past) >= _RETRIES:
            return ChildError(
                self.job.doing,
                f"the process ended without an answer ({failure.kind}: {failure.sentence})",
                hint=how_to_install(failure.sentence) or f"see {self.folder / LOG_FILE}",
            )
        past = (*self.past, PastFailure(failure.kind, reached_checkpoint=False))
        return replace(self, number=self.number + 1, past=past)


def _first_try(index: int, job: ChildJob[R]) -> _Try[R]:
    """Return the first try of a job; its number is one that no earlier run used."""
    return _Try(job, index, 1 + (len(list(job.folder.glob("*"))) if job.folder.exists() else 0))


@dataclass(slots=True)
class _JobQueue(Generic[R]):
    """Jobs that wait for a child, have one, or have their answer; a :class:`~dryfit.study.messages.Decider`."""

    nodes: Nodes
    waiting: deque[_Try[R]]
    most: int = 1
    on_done: Callable[[int], None] = lambda _: None
    say: OnMessage = lambda _: None
    answers: dict[int, R | ChildError] = field(default_factory=dict[int, Any])
    running: dict[str, _Try[R]] = field(default_factory=dict[str, Any])

    def next_starts(self) -> list[ChildSpec] | float | None:
        if not self.waiting and not self.running:
            return None
        starts: list[ChildSpec] = []
        while self.waiting and len(self.running) < self.most:
            attempt = self.waiting.popleft()
            starts.append(attempt.spec(cpu_of(first_node(self.nodes).name)))
            self.running[starts[-1].key] = attempt
        return starts or _POLL_S

    def on_stop(self, why: End) -> None:
        for key in self.running:
            first_node(self.nodes).kill(key, "now")
        self.running.clear()
        self.waiting.clear()

    def on_message(self, child: _Try[R], event: ChildMessage) -> None:
        self.say(event.message)

    def on_exit(self, child: _Try[R], event: ChildExited) -> None:
        del self.running[event.key]
        answer = child.judge(event)
        if isinstance(answer, _Try):
            self.waiting.appendleft(answer)
        else:
            self.answers[child.index] = answer
            self.on_done(child.index)


@overload
def run_job(job: ChildJob[R], nodes: Nodes) -> R: ...


@overload
def run_job(job: ChildJob[R], nodes: Nodes, stops: StopRequests) -> R | None: ...


def run_job(job: ChildJob[R], nodes: Nodes, stops: StopRequests | None = None) -> R | None:
    """Run a job to its answer.

    Args:
        job: The job.
        nodes: The first of them runs its child.
        stops: Requests to stop; None: there are none.

    Returns:
        The child's answer; None where a stop was asked for.

    Raises:
        DryfitError: The child raised it.
        ChildError: The child failed in another way, or died several times.
    """
    queue = _JobQueue(nodes, deque([_first_try(0, job)]))
    drive(queue, nodes, stops)
    answer = queue.answers.get(0)
    if isinstance(answer, ChildError):
        raise answer
    return answer


def run_side_by_side(
    jobs: Sequence[ChildJob[R]],
    nodes: Nodes,
    *,
    most: int,
    on_done: Callable[[int], None],
    on_message: OnMessage = lambda _: None,
    stops: StopRequests | None = None,
) -> list[R | ChildError]:
    """Run several jobs, each in a folder of its own name.

    Args:
        jobs: The jobs.
        nodes: The first of them runs their children.
        most: How many run at once.
        on_done: Called with the index of a job that has its answer.
        on_message: Called with each message of a child.
        stops: As for :func:`run_job`.

    Returns:
        The answer of each; an error where its child died, which does not end the others. Where a stop was asked for,
        only those that were there by then.

    Raises:
        DryfitError: A child raised it.
    """
    queue = _JobQueue(nodes, deque(map(_first_try, count(), jobs)), most, on_done, on_message)
    drive(queue, nodes, stops)
    return [queue.answers[index] for index in sorted(queue.answers)]


def run_alone(doing: str, body: JobRequest[R], on_message: OnMessage = lambda _: None) -> R:
    """Run a job that belongs to no study, in a fresh interpreter and a temporary folder.

    The folder stays if the child left no answer: its log is in there.

    Args:
        doing: As in :class:`ChildJob`.
        body: The job; its paths must be absolute.
        on_message: As in :func:`run_side_by_side`.

    Raises:
        DryfitError: What the child raised.
        ChildError: The child failed in another way, or died several times.
    """
    (answer,) = run_all_alone(doing, (body,), on_message=on_message)
    if isinstance(answer, ChildError):
        raise answer
    return answer


def run_all_alone(
    doing: str,
    bodies: Sequence[JobRequest[R]],
    *,
    most: int = 1,
    preload: tuple[str, ...] = (),
    on_done: Callable[[int], None] = lambda _: None,
    on_message: OnMessage = lambda _: None,
) -> list[R | ChildError]:
    """Run jobs as :func:`run_alone` does, several at once.

    Args:
        doing: As in :class:`ChildJob`.
        bodies: The jobs; their paths must be absolute.
        most: As in :func:`run_side_by_side`.
        preload: Modules that a fork server imports once for all jobs; none: each gets a fresh interpreter.
        on_done: As in :func:`run_side_by_side`.
        on_message: As in :func:`run_side_by_side`.

    Raises:
        DryfitError: What a child raised.
    """
    folder = Path(tempfile.mkdtemp(prefix="dryfit-"))
    isolation = Isolation.AUTO if preload else Isolation.FRESH
    settings = SupervisorSettings.of_no_study(folder, isolation, preload)
    jobs = [ChildJob(doing, body, folder / f"job-{index}", STANDALONE_LIMITS) for index, body in enumerate(bodies)]
    keep = False
    try:
        with Supervisor(settings) as supervisor:
            answers = run_side_by_side(jobs, LocalNode(supervisor), most=most, on_done=on_done, on_message=on_message)
        keep = any(isinstance(answer, ChildError) for answer in answers)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return answers
