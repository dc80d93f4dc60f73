"""The machines of a study from its ledger: hardware, running trials, number of losses."""

from collections import Counter
from collections.abc import Callable, Sequence

from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.sharding.device_groups import node_of
from dryfit.core.text.table import Table
from dryfit.core.text.units import gib
from dryfit.reporting.document import Answer, Document, View, document_of, duration_text
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptEnd, SessionState


class NodeView(View):
    """One machine with an agent.

    Attributes:
        specs: What each of its devices is; None: not known.
        trials: The trials that run there.
        attempts: How many attempts at trials ran there so far.
        time_s: How long they took, together.
        losses: How many times it was given up.
        lost: Why it is not there any more; empty: it is.
        heard_s: How long ago it was heard last, in seconds; None: it is not there any more, or nobody has looked.
    """

    node: str
    host: str
    pid: int
    cores: int
    host_bytes: int
    devices: tuple[str, ...]
    specs: tuple[DeviceSpec | None, ...] = ()
    epoch: int
    trials: tuple[int, ...]
    attempts: int
    time_s: float
    losses: int
    lost: str
    heard_s: float | None = None


class NodesView(Answer):
    """The machines that joined in the last session; whether it is still going on, as far as the ledger says."""

    running: bool
    nodes: tuple[NodeView, ...]


class LogEnd(View):
    """The end of one log."""

    name: str
    file: str
    text: str


class NodeLogs(Answer):
    """Log ends of a machine: its agent, its fork server, and the trials that run there."""

    node: str
    logs: tuple[LogEnd, ...]


def nodes_view(state: StudyState, heard_s: Callable[[str], float | None] = lambda _node: None) -> NodesView:
    """Return the machines of a study's last session, apart from that of its control process.

    Args:
        state: The study.
        heard_s: Says how long ago a node was heard last, in seconds, by its name; None where that is not known.
    """
    sessions = state.sessions[-1:]
    views = (
        one if one.lost else one.model_copy(update={"heard_s": heard_s(one.node)}) for one in _views(state, sessions)
    )
    return NodesView(running=any(one.is_open for one in sessions), nodes=tuple(views))


def nodes_ever(state: StudyState) -> tuple[tuple[str, Table], ...]:
    """Return the table of all machines that ever joined, with its heading; nothing where none did."""
    nodes = _views(state, state.sessions)
    return (("Machines that joined", _table(nodes)),) if nodes else ()


@document_of.register
def _(logs: NodeLogs) -> Document:
    """Return the ends of a machine's logs, one below the other."""
    parts = (("", f"== {log.name}: {log.file}", log.text.rstrip() or "(nothing)") for log in logs.logs)
    return Document(tuple(line for part in parts for text in part for line in text.split("\n"))[1:])


@document_of.register
def _(view: NodesView) -> Document:
    return Document((_table(view.nodes) if view.nodes else "no other machine has joined in its last session",))


def _views(state: StudyState, sessions: Sequence[SessionState]) -> tuple[NodeView, ...]:
    """Return the machines of some sessions, each as it was last, with all that it did in them."""
    counted = {id(session) for session in sessions}
    attempts = [one for trial in state.trials for one in trial.attempts if id(one.session) in counted]
    last = {name: (session, node) for session in sessions for name, node in session.nodes.items()}
    views: list[NodeView] = []
    for name, (session, node) in last.items():
        own = [one for one in attempts if node_of(one.place) == name]
        views.append(
            NodeView.of(
                node.joined,
                node=name,
                trials=tuple(one.trial for one in own if one.end is AttemptEnd.RUNNING),
                attempts=len(own),
                time_s=round(sum(one.time_s for one in own), 3),
                losses=sum(one.nodes[name].losses for one in sessions if name in one.nodes),
                lost=node.lost or ("" if session.is_open else "the session is over"),
            )
        )
    return tuple(views)


def nodes_table(view: NodesView) -> Table:
    """Return the machines as a table."""
    return _table(view.nodes)


def _table(nodes: Sequence[NodeView]) -> Table:
    heading = ("node", "host", "cores", "memory", "devices", "trials now", "attempts", "time", "losses", "state")
    rows = [
        (
            node.node,
            node.host,
            str(node.cores),
            gib(node.host_bytes),
            _devices_text(node),
            " ".join(map(str, node.trials)) or "none",
            str(node.attempts),
            duration_text(node.time_s),
            str(node.losses),
            node.lost or ("joined" if node.heard_s is None else f"joined, heard {node.heard_s:.0f} s ago"),
        )
        for node in nodes
    ]
    return Table(heading, tuple(rows))


def _devices_text(node: NodeView) -> str:
    """Return a machine's devices by name, and what they are: ``0,1: 2 x NVIDIA H200, 139.7 GiB``."""
    counts = Counter(f"{spec.name}, {gib(spec.capacity_bytes)}" for spec in node.specs if spec is not None)
    kinds = "; ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in counts.items())
    return ": ".join(part for part in (",".join(node.devices), kinds) if part) or "none"
