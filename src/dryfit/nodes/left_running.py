"""Trials that a killed control process has left on nodes, whose agents hold out for the lease. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from dryfit.core.sharding.device_groups import node_of
from dryfit.nodes.messages import Identity
from dryfit.nodes.remote_node import RemoteNode
from dryfit.runtime.machine.node import DeviceFacts, NodeFacts
from dryfit.store.events import NodeJoined
from dryfit.store.layout import StudyLayout, attempt_key
from dryfit.store.replay import StudyState
from dryfit.store.session_state import NodeState, SessionState


@dataclass(frozen=True, slots=True)
class LeftRunning:
    """What was left on one node.

    Attributes:
        joined: The node, as it has joined last.
        children: The folder of each process, by its key.
    """

    joined: NodeJoined
    children: dict[str, Path] = field(default_factory=dict[str, Path])


def left_running(state: StudyState, layout: StudyLayout) -> Mapping[str, LeftRunning]:
    """Return what may still run on nodes, by the node's name: every attempt that no session has ended.

    A session that left in order has told its agents to end what they ran, so only those count that were killed since
    the last that did. Where no agent comes back with an attempt, it is lost.

    Args:
        state: The study, its present session included.
        layout: Where it lies.
    """
    killed = list(takewhile(lambda session: session.closed is None, reversed(state.sessions[:-1])))
    left: dict[str, LeftRunning] = {}
    for trial in state.open_trials:
        last = trial.attempts[-1] if trial.attempts else None
        if last is None or last.ended or not any(last.session is session for session in killed):
            continue
        node = _newest(killed, node_of(last.place))
        if node is not None and not node.lost:
            found = left.setdefault(node.joined.node, LeftRunning(node.joined))
            folder = layout.trial(trial.number).attempt(last.number)
            found.children[attempt_key(trial.number, last.number)] = folder
    return left


def awaited_node(left: LeftRunning, verdict_timeout_s: float) -> RemoteNode:
    """Return a node that is silent, and that its agent may come back with."""
    joined = left.joined
    identity = Identity(agent=joined.agent, host=joined.host, boot=joined.boot, pid=joined.pid, started=joined.started)
    specs = dict(zip(joined.devices, joined.specs, strict=False))  # older versions wrote none
    devices = tuple(DeviceFacts(name, spec=specs.get(name)) for name in joined.devices)
    facts = NodeFacts(cores=joined.cores, host_bytes=joined.host_bytes, devices=devices)
    node = RemoteNode(joined.node, identity, joined.epoch, facts, verdict_timeout_s, heard_s=0.0)
    node.children, node.awaited = dict(left.children), True
    return node


def _newest(sessions: list[SessionState], name: str) -> NodeState | None:
    """Return a node as it was in the newest session that it joined; None where it joined none, as this machine."""
    return next((session.nodes[name] for session in sessions if name in session.nodes), None)
