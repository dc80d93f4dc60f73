"""One job whose answer is waited for: run in a child, repeated where the child died through no fault of the job."""

import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dryfit.config.schema import Isolation
from dryfit.core.errors import ChildError, DryfitError, error_from_parts
from dryfit.core.failure import Action, PastFailure
from dryfit.core.wire import LOG_FILE, Body, ChildResult
from dryfit.runtime.faults import classify
from dryfit.runtime.recovery import decide
from dryfit.runtime.spec import ChildExited, ChildLimits, ChildSpec, SupervisorSettings
from dryfit.runtime.supervisor import Supervisor

_RETRIES = 3
_POLL_S = 0.5
_PATIENT = ChildLimits(start_s=120.0, hang_s=600.0, total_s=None, stop_grace_s=1.0)


@dataclass(frozen=True, slots=True)
class Errand:
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


def run_errand(errand: Errand, supervisor: Supervisor, stop_asked: Callable[[], bool] = never) -> ChildResult | None:
    """Run a job to its answer.

    Args:
        errand: The job.
        supervisor: Who runs it.
        stop_asked: Whether to give up; asked a few times a second.

    Returns:
        The child's answer; None where a stop was asked for meanwhile.

    Raises:
        DryfitError: What the child raised.
        ChildError: The child failed in another way, or died several times.
    """
    earlier = len(list(errand.folder.glob("*"))) if errand.folder.exists() else 0
    past: tuple[PastFailure, ...] = ()
    while True:
        number = earlier + 1 + len(past)
        folder = errand.folder / f"{number:04d}"
        spec = ChildSpec(key=f"{errand.body.job}-{number}", folder=folder, body=errand.body, limits=errand.limits)
        exited = _run(spec, supervisor, stop_asked)
        if exited is None:
            return None
        result = exited.result
        if result is not None and result.error is not None:
            error = result.error
            raise error_from_parts(error.code, error.doing, error.found, error.allowed, error.hint)
        if result is not None and result.fault is None:
            return result
        failure = classify(exited.evidence, result)
        answer = decide(failure, past, retries=_RETRIES)
        if answer.action is not Action.RETRY or len(past) >= _RETRIES:
            raise ChildError(
                errand.doing,
                f"the process ended without an answer ({failure.kind}: {failure.sentence})",
                hint=f"see {folder / LOG_FILE}",
            )
        past = (*past, PastFailure(failure.kind, reached_checkpoint=False))


def run_alone(doing: str, body: Body) -> ChildResult:
    """Run a job that belongs to no study, in a fresh interpreter and a temporary folder.

    The folder stays where the child left no answer: its log is in there.

    Args:
        doing: As in :class:`Errand`.
        body: The job; its paths must be absolute.

    Raises:
        DryfitError: What the child raised.
        ChildError: The child failed in another way, or died several times.
    """
    folder = Path(tempfile.mkdtemp(prefix="dryfit-"))
    settings = SupervisorSettings(
        marker=uuid.uuid4().hex,
        doorbell=folder / "doorbell",
        isolation=Isolation.FRESH,
        server_log=folder / "forkserver.txt",
    )
    keep = False
    try:
        with Supervisor(settings) as supervisor:
            result = run_errand(Errand(doing, body, folder / "tries", _PATIENT), supervisor)
    except DryfitError as error:
        keep = isinstance(error, ChildError)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    assert result is not None  # nobody could ask to stop
    return result


def _run(spec: ChildSpec, supervisor: Supervisor, stop_asked: Callable[[], bool]) -> ChildExited | None:
    supervisor.start(spec)
    while True:
        if stop_asked():
            supervisor.kill(spec.key, "now")
            return None
        for event in supervisor.wait(_POLL_S):
            if isinstance(event, ChildExited) and event.key == spec.key:
                return event
