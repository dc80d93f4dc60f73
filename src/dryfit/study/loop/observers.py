"""Who may watch a study. Observers are told, never asked: nothing they do changes what the study does."""

from typing import Protocol

from dryfit.core.wire import Message
from dryfit.store.events import Event
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState


class Observer(Protocol):
    """Something that watches a running study."""

    def on_open(self, layout: StudyLayout) -> None:
        """The study in this folder is about to be worked on; its events follow."""
        ...

    def on_event(self, event: Event, state: StudyState) -> None:
        """An event was written to the ledger; ``state`` already includes it."""
        ...

    def on_message(self, number: int, message: Message) -> None:
        """The child of trial ``number`` said something that is not kept in the ledger (progress, a phase)."""
        ...

    def on_note(self, text: str) -> None:
        """The control process says in a sentence what it is doing."""
        ...
