"""The machines of a study, as its ledger has them: what they have, what runs there, how often they were lost."""

from collections import Counter

from dryfit.core.sharding.device_groups import node_of
from dryfit.core.text.units import gib
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.terminal.tables import Table
from dryfit.store.replay import StudyState


class NodeView(View):
    """One machine with an agent.

    Attributes:
        trials: The trials that run there.
        attempts: How many attempts at trials ran there in this session so far.
        losses: How many times it was given up.
        lost: Why it is not there any more; empty: it is.
    """

    node: str
    host: str
    pid: int
    cores: int
    host_bytes: int
    devices: tuple[str, ...]
    epoch: int
    trials: tuple[int, ...]
    attempts: int
    losses: int
    lost: str


class NodesView(Answer):
    """The machines that joined in the last session; whether it is still going on, as far as the ledger says."""

    running: bool
    nodes: tuple[NodeView, ...]


def nodes_view(state: StudyState) -> NodesView:
    """Return the machines of a study, apart from that of its control process."""
    if not state.sessions:
        return NodesView(running=False, nodes=())
    session = state.sessions[-1]
    attempts = [one for trial in state.trials for one in trial.attempts if one.session is session]
    counts = Counter(node_of(one.place) for one in attempts)
    views = [
        NodeView.of(
            node.joined,
            node=name,
            trials=tuple(one.trial for one in attempts if node_of(one.place) == name and not one.ended),
            attempts=counts[name],
            losses=node.losses,
            lost=node.lost or ("" if session.is_open else "the session is over"),
        )
        for name, node in session.nodes.items()
    ]
    return NodesView(running=session.is_open, nodes=tuple(views))


def nodes_table(view: NodesView) -> Table:
    """Return the machines as a table."""
    heading = ("node", "host", "cores", "memory", "devices", "trials now", "attempts", "losses", "state")
    rows = [
        (
            node.node,
            node.host,
            str(node.cores),
            gib(node.host_bytes),
            ",".join(node.devices) or "none",
            " ".join(map(str, node.trials)) or "none",
            str(node.attempts),
            str(node.losses),
            node.lost or "joined",
        )
        for node in view.nodes
    ]
    return Table(heading, tuple(rows))
