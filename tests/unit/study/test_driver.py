"""The loop that acts: what counts of what is heard, and where a child is answered."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildLimits, ChildMessage, ChildSpec
from dryfit.processes.node import LocalNode
from dryfit.settings.check_messages import CheckRequest
from dryfit.settings.errors import Evidence
from dryfit.settings.wire import Note
from dryfit.study.driver import drive
from dryfit.study.next_step import End
from quiet_children import QuietChildren

LIMITS = ChildLimits(start_s=1, hang_s=1, total_s=None, stop_grace_s=1)


class Listed(QuietChildren):
    """Children that keep a list of what they were told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []

    def start(self, spec: ChildSpec) -> None:
        self.started.append(spec.key)

    def kill(self, key: str, why: str = "now") -> None:
        self.killed.append(key)


class Script:
    """Nodes that say what a test has written down, one event at a time."""

    def __init__(self, events: Sequence[ChildEvent]) -> None:
        self.children = {name: Listed() for name in ("n1", "n2")}
        self._events = deque(events)
        self._nodes = {name: LocalNode(children, name=name) for name, children in self.children.items()}

    def all(self) -> Mapping[str, LocalNode]:
        return self._nodes

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        return [self._events.popleft()]

    def take_going_on(self) -> Mapping[str, str]:
        return {}

    def wake(self) -> None: ...


@dataclass
class OneTrial:
    """A trial whose first attempt runs on a node, and, once that has ended, its second on another."""

    waiting: list[ChildSpec]
    running: dict[str, int] = field(default_factory=dict)
    heard: list[tuple[int, str]] = field(default_factory=list)

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        if self.running:
            return 0.0
        if not self.waiting:
            return None
        spec = self.waiting.pop(0)
        self.running[spec.key] = len(self.waiting)
        return [spec]

    def on_stop(self, why: End) -> None: ...

    def on_message(self, child: int, event: ChildMessage) -> None:
        assert isinstance(event.message, Note)
        self.heard.append((child, event.message.text))

    def on_exit(self, child: int, event: ChildExited) -> None:
        del self.running[event.key]


def spec(key: str, place: str, folder: Path) -> ChildSpec:
    return ChildSpec(key, folder / key, CheckRequest(folder="f", task=None, trust=False), LIMITS, place)


def said(key: str, text: str, node: str) -> ChildMessage:
    return ChildMessage(key, Note(text=text), node)


def test_only_the_open_attempt_is_heard_and_what_else_speaks_is_killed_where_it_is(tmp_path: Path) -> None:
    """An attempt that was given up, one of the next attempt's name on another node, and a child nobody knows."""
    gone = Evidence(exit_code=1)
    nodes = Script(
        [
            said("trial-0-1", "first", "n1"),
            said("trial-0-1", "an impostor", "n2"),
            ChildExited("trial-0-1", None, gone, "n2"),
            ChildExited("trial-0-1", None, gone, "n1"),
            said("trial-0-1", "late", "n1"),
            said("trial-0-2", "second", "n2"),
            said("trial-7-1", "who is this", "n2"),
            ChildExited("trial-0-1", None, gone, "n1"),
            ChildExited("trial-0-2", None, gone, "n2"),
        ]
    )
    work = OneTrial([spec("trial-0-1", "n1/0,n1/1", tmp_path), spec("trial-0-2", "n2/cpu", tmp_path)])
    drive(work, nodes)
    assert work.heard == [(1, "first"), (0, "second")]
    assert nodes.children["n1"].started == ["trial-0-1"] and nodes.children["n2"].started == ["trial-0-2"]
    assert nodes.children["n1"].killed == ["trial-0-1"]
    assert nodes.children["n2"].killed == ["trial-0-1", "trial-7-1"]
