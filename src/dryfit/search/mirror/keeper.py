"""Runs the mirror beside a study that is worked on."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dryfit.core.cleanup import closing
from dryfit.core.wire import Message
from dryfit.search.mirror.handle import JOURNAL_PREFIX, MirrorProcess
from dryfit.store.events import Event
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState

_FLUSH_S = 10.0


@dataclass(frozen=True, slots=True)
class MirrorKeeper:
    """Starts the mirror again if it has died, whenever the ledger has grown.

    It is called by the study's own thread, as the mirror's death is tied to it; it neither raises nor waits.
    """

    mirror: MirrorProcess

    def on_open(self, layout: StudyLayout) -> None:
        """The mirror knows where the ledger is."""

    def on_event(self, event: Event, state: StudyState) -> None:
        """Start the mirror again where it died."""
        self.mirror.keep_alive()

    def on_message(self, number: int, message: Message) -> None:
        """Nothing to mirror."""

    def on_note(self, text: str) -> None:
        """Nothing to mirror."""


@contextmanager
def mirrored(target: str, layout: StudyLayout, study: str) -> Generator[list[MirrorKeeper], None, None]:
    """Run the Optuna mirror beside the study; it cannot delay or fail a trial.

    Args:
        target: ``search.mirror``.
        layout: The study's folder.
        study: The study's name in the storage.

    Yields:
        The observer that starts it again if it died; none without a mirror.
    """
    if target == "none":
        yield []
        return
    mirror = MirrorProcess(
        layout.ledger,
        storage=f"{JOURNAL_PREFIX}{layout.journal}" if target == "journal" else target,
        study=study,
        status=layout.mirror_status,
        log=layout.logs / "mirror.txt",
    )
    mirror.start()
    with ExitStack() as stack:
        stack.push(closing(mirror.stop))
        yield [MirrorKeeper(mirror)]
        mirror.flush(_FLUSH_S)
