"""The children of a machine where nothing happens; stand-ins say what does."""

from collections.abc import Sequence

from dryfit.processes.child_spec import ChildEvent, ChildSpec
from dryfit.settings.wire import Verdict


class QuietChildren:
    """Children that never start, say nothing and hear nothing (:class:`dryfit.processes.node.Children`)."""

    def start(self, spec: ChildSpec) -> None:
        """Start nothing."""

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """Nothing happened."""
        return []

    def answer(self, key: str, verdict: Verdict) -> None:
        """Nobody asked."""

    def ask_stop(self, key: str) -> None:
        """Nobody hears."""

    def kill(self, key: str, why: str = "now") -> None:
        """Nobody is there."""

    def wake(self) -> None:
        """Nobody waits."""
