"""Runs trackers beside a study that is worked on; they cannot delay or fail a trial."""

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dryfit.config.trackers import Tracker, tracker_of
from dryfit.core.cleanup import closing
from dryfit.core.wire import Message
from dryfit.search.mirror.follower import FollowerProcess, followed_bytes
from dryfit.search.trackers.targets import tracker_environment
from dryfit.store.events import Event
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState

_DRAIN_S = 60.0
"""At most, for all trackers together, when a session ends; one that cannot be written gets one more try."""


@dataclass(frozen=True, slots=True)
class TrackerKeeper:
    """Starts trackers again that have died, whenever the ledger has grown.

    It is called by the study's own thread, as their death is tied to it; it neither raises nor waits.
    """

    trackers: tuple[FollowerProcess, ...]

    def on_open(self, layout: StudyLayout) -> None:
        """The trackers know where the ledger is."""

    def on_event(self, event: Event, state: StudyState) -> None:
        """Start those again that died."""
        for tracker in self.trackers:
            tracker.keep_alive()

    def on_message(self, number: int, message: Message) -> None:
        """Nothing to track: the ledger has all that is shown."""

    def on_note(self, text: str) -> None:
        """Nothing to track."""


def tracker_process(tracker: Tracker, layout: StudyLayout) -> FollowerProcess:
    """Return the process of one tracker; it is not started."""
    files = layout.tracker(tracker.slug)
    return FollowerProcess(
        layout.ledger,
        module="dryfit.search.trackers.tracker",
        arguments=["--position", str(files.position)],
        target=tracker.entry,
        environment=lambda: tracker_environment(tracker, os.environ),
        status=files.status,
        log=files.log,
    )


def left_bytes(tracker: Tracker, layout: StudyLayout) -> int:
    """Return how many bytes of the ledger a tracker lacks for certain."""
    return max(0, layout.ledger.stat().st_size - max(0, followed_bytes(layout.tracker(tracker.slug).position)))


@contextmanager
def tracked(
    entries: Sequence[str], layout: StudyLayout, note: Callable[[str], None]
) -> Generator[list[TrackerKeeper], None, None]:
    """Run the trackers of ``study.track``; at the end they get some time for what is left.

    Args:
        entries: ``study.track``.
        layout: The study's folder.
        note: Is told in a sentence what a tracker lacks at the end.

    Yields:
        The observer that starts them again where they died; none without an entry.
    """
    trackers = tuple(tracker_of(entry) for entry in entries)
    for former in set(layout.tracker_statuses) - {layout.tracker(tracker.slug).status for tracker in trackers}:
        former.unlink(missing_ok=True)
    processes = tuple(tracker_process(tracker, layout) for tracker in trackers)
    if not processes:
        yield []
        return
    layout.trackers.mkdir(exist_ok=True)
    with ExitStack() as stack:
        for process in processes:
            process.start()
            stack.push(closing(process.stop))
        yield [TrackerKeeper(processes)]
        _drain(processes)
    for tracker in trackers:
        left = left_bytes(tracker, layout)
        if left:
            lacks = f"{tracker.entry} lacks the last {left} bytes of the ledger"
            note(f"{lacks}: `dryfit resume {layout.folder}` goes on with them")


def _drain(processes: Sequence[FollowerProcess]) -> None:
    deadline_s = time.monotonic() + _DRAIN_S

    def left_s() -> float:
        return max(0.0, deadline_s - time.monotonic())

    for process in processes:
        process.flush(left_s())
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.stop(left_s())
