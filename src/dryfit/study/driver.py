"""The one loop that acts: starts children, waits for their messages, and passes these to a decider."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.processes.node import Nodes
from dryfit.settings.devices import node_of
from dryfit.study.next_step import End
from dryfit.study.stops import StopRequests

C = TypeVar("C")


class Decider(Protocol[C]):
    """Work done by children: which start, and the reaction to their messages and ends."""

    @property
    def running(self) -> Mapping[str, C]:
        """What each running child works on, by the child's key."""
        ...

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        """Decide what comes next; what must be on record before it happens is written here.

        Returns:
            Children to start, which are in :attr:`running` already; where there are none, the question is asked again.
            Or the seconds to wait for news at most. None: the work is done.
        """
        ...

    def on_stop(self, why: End) -> None:
        """Heed the first request to stop."""
        ...

    def on_message(self, child: C, event: ChildMessage) -> None:
        """Take in a message of a running child."""
        ...

    def on_exit(self, child: C, event: ChildExited) -> None:
        """Take in the end of a child, and remove it from :attr:`running`."""
        ...


def drive(
    decider: Decider[C], nodes: Nodes, stops: StopRequests | None = None, going_on: Mapping[str, str] | None = None
) -> None:
    """Carry out a decider's decisions until its work is done.

    Requests to stop are looked for before each decision. One for an immediate end kills every running child.

    Args:
        decider: The work.
        nodes: Where the children run.
        stops: Requests to stop; None: there are none.
        going_on: The node of each child that runs already, by its key; None: none does.
    """
    stopping = killed = False
    node_by_key = dict(going_on or {})
    while True:
        if stops is not None:
            stops.look()
            if stops.why is not None and not stopping:
                stopping = True
                decider.on_stop(stops.why)
            if stops.at_once and not killed:
                killed = True
                for key in decider.running:
                    nodes.all()[node_by_key[key]].kill(key, "now")
        following = decider.next_starts()
        if following is None:
            return
        if isinstance(following, float | int):
            _hand_on(decider, nodes, node_by_key, following)
            continue
        for spec in following:
            node_by_key[spec.key] = node_of(spec.place)
            nodes.all()[node_by_key[spec.key]].start(spec)


def _hand_on(decider: Decider[C], nodes: Nodes, node_by_key: dict[str, str], timeout_s: float) -> None:
    """Hand on what is heard of children that run.

    Nothing else counts: an earlier event may have ended the interest in a child, or it is an attempt that was given
    up, or one that runs on another node by now. Such a child is killed where it is.
    """
    for event in nodes.wait(timeout_s):
        child = decider.running.get(event.key)
        if child is None or event.node != node_by_key[event.key]:
            if isinstance(event, ChildMessage):
                nodes.all()[event.node].kill(event.key)
            continue
        match event:
            case ChildMessage():
                decider.on_message(child, event)
            case ChildExited():
                del node_by_key[event.key]
                decider.on_exit(child, event)
