"""Two machines of a study in one process: a real supervisor of children for each, and both heard together."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from dryfit.processes.child_spec import ChildEvent, SupervisorSettings
from dryfit.processes.node import LocalNode
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.training_messages import ResolveResult
from dryfit.study import session

NAMES = "n1", "n2"
_POLL_S = 0.02


class TwoNodes:
    """The nodes ``n1`` and ``n2``, each with a fork server of its own (:class:`dryfit.processes.node.Nodes`).

    Args:
        settings: How one process runs its children.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, LocalNode] = {}
        self._stack = ExitStack()
        self._woken = False

    def __enter__(self) -> Self:
        for name in NAMES:
            own = replace(
                self._settings,
                marker=f"{self._settings.marker}-{name}",
                wakeup_fifo=Path(f"{self._settings.wakeup_fifo}-{name}"),
                server_log=self._settings.server_log.with_name(f"forkserver-{name}.txt"),
            )
            self._nodes[name] = LocalNode(self._stack.enter_context(Supervisor(own)), name=name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def learn(self, resolved: ResolveResult) -> None:
        """Both have what a child has found on the first."""
        for node in self._nodes.values():
            node.learn(resolved)

    def all(self) -> dict[str, LocalNode]:
        """Both."""
        return self._nodes

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """What is new on either."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            events = [event for node in self._nodes.values() for event in node.wait(_POLL_S)]
            if events or self._woken or time.monotonic() >= deadline_s:
                self._woken = False
                return events

    def take_going_on(self) -> dict[str, str]:
        """None: they end with the session."""
        return {}

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._woken = True


def use_two_nodes(patch: pytest.MonkeyPatch, make: Callable[[SupervisorSettings], TwoNodes] = TwoNodes) -> None:
    """Let sessions run on two nodes."""

    def both(nodes: TwoNodes, *_monitor: Any, **_looks: Any) -> TwoNodes:
        return nodes

    patch.setattr(session, "Supervisor", make)
    patch.setattr(session, "LocalNode", both)
