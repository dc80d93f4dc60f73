"""The states of a study's sessions and of the machines that joined in them, as its ledger has them."""

from dataclasses import dataclass, field

from dryfit.store.events import NodeJoined, NodeLost, ParallelSet


@dataclass(slots=True)
class NodeState:
    """A machine of a study beside that of the control process.

    Attributes:
        joined: Its agent, and what it has.
        losses: How many times it was given up.
        lost: Why it was given up last; empty: it is there, as long as its session lasts.
    """

    joined: NodeJoined
    losses: int = 0
    lost: str = ""


@dataclass(slots=True)
class SessionState:
    """One session: the work of one control process on the study.

    Attributes:
        set_aside: Devices that are not used any more, each with the reason.
        nodes: The machines that have joined in it, by name.
        side_by_side: How many trials may run at the same time, as determined last; None: as asked for.
        side_by_side_reason: Why not more.
        superseded: Whether a later session was opened; if this one was not closed, it was killed.
    """

    opened_at_s: float
    last_at_s: float
    total: int
    parallel: int = 1
    host: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()
    closed: str | None = None
    set_aside: dict[str, str] = field(default_factory=dict[str, str])
    nodes: dict[str, NodeState] = field(default_factory=dict[str, NodeState])
    side_by_side: int | None = None
    side_by_side_reason: str = ""
    pid: int | None = None
    superseded: bool = False

    def take(self, event: NodeJoined | NodeLost | ParallelSet) -> None:
        """Take in what happened to the machines of the session, or to the number of trials side by side."""
        match event:
            case NodeJoined():
                before = self.nodes.get(event.node)
                self.nodes[event.node] = NodeState(event, before.losses if before is not None else 0)
            case NodeLost() if event.node in self.nodes:
                lost = self.nodes[event.node]
                lost.losses, lost.lost = lost.losses + 1, event.why
            case NodeLost():
                pass
            case ParallelSet():
                self.side_by_side, self.side_by_side_reason = event.parallel, event.reason

    @property
    def is_open(self) -> bool:
        """Whether its control process works on the study, as far as the ledger says."""
        return self.closed is None and not self.superseded
