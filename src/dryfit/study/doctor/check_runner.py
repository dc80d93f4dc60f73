"""A supervisor for the doctor's children that has proved that it can start them."""

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dryfit.config.schema import Isolation
from dryfit.core.jobs.diagnostics import ProbeResult
from dryfit.runtime.children.child_spec import SupervisorSettings
from dryfit.runtime.children.supervisor import Supervisor
from dryfit.runtime.machine.local_node import LocalNode
from dryfit.study.doctor.machine_facts import RoundTrip, fork_round_trip, forks_here, fresh_round_trip


@dataclass(frozen=True, slots=True)
class CheckRunner:
    """Runs the doctor's children, outside the study's folder.

    Attributes:
        node: This machine, which runs them.
        folder: Their folder.
        trips: The trial starts.
    """

    node: LocalNode
    folder: Path
    trips: tuple[RoundTrip, ...]

    @property
    def probe(self) -> ProbeResult | None:
        """What torch can use, as the first child reported."""
        return next((trip.probe for trip in self.trips if trip.probe is not None), None)


@contextmanager
def open_check_runner(folder: Path, isolation: Isolation, *, fresh: bool) -> Generator[CheckRunner, None, None]:
    """Test how children can start, and yield a runner that starts them so.

    Args:
        folder: The children's folder.
        isolation: As in ``runtime.isolation``.
        fresh: Whether a fresh interpreter is tried as well if forks work.
    """
    trips: tuple[RoundTrip, ...] = ()
    if forks_here() and isolation is not Isolation.FRESH:
        with Supervisor(_settings(folder, Isolation.FORKSERVER)) as supervisor:
            node = LocalNode(supervisor)
            forked = fork_round_trip(node, folder)
            if not forked.trouble:
                yield CheckRunner(node, folder, (forked, fresh_round_trip()) if fresh else (forked,))
                return
        trips = (forked,)
    with Supervisor(_settings(folder, Isolation.FRESH)) as supervisor:
        yield CheckRunner(LocalNode(supervisor), folder, (*trips, fresh_round_trip()))


def _settings(folder: Path, isolation: Isolation) -> SupervisorSettings:
    return SupervisorSettings(
        marker=uuid.uuid4().hex,
        wakeup_fifo=folder / f"doorbell-{isolation}",
        isolation=isolation,
        server_log=folder / "forkserver.txt",
    )
