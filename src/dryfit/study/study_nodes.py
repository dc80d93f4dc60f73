"""The machines of a session: this one, and where the study file has ``[nodes]`` those that agents join with."""

import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dryfit.ledger.events import Event
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.processes.child_spec import SupervisorSettings
from dryfit.processes.node import LocalNode, NodeFacts, Nodes
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.wire import since_boot_s
from dryfit.study.context import job_of_trials

if TYPE_CHECKING:
    from dryfit.processes.joined_nodes import JoinedNodes


_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class StudyNodes:
    """The machines of a session.

    Attributes:
        local: This machine.
        nodes: All of them.
        joining: What each has that trials may run on, by name, which changes as agents come and go; None: none do.
    """

    local: LocalNode
    nodes: Nodes
    joining: Mapping[str, NodeFacts] | None = None

    def facts(self) -> Mapping[str, NodeFacts]:
        """Return what each machine has that trials may run on, by name."""
        return self.joining if self.joining is not None else {name: one.facts for name, one in self.nodes.all().items()}

    def has_one(self, is_stopping: Callable[[], bool]) -> bool:
        """Wait until there is a machine for trials; False: a stop was asked for meanwhile."""
        while not self.facts():
            if is_stopping():
                return False
            self.nodes.wait(_WAIT_S)
        return True


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """What a session knows that agents may join.

    Attributes:
        config: The study.
        layout: Where it lies.
        state: What is known of it.
        settings: How children are made here, and on other machines.
        write: Appends an event to the ledger.
        note: Tells the user a sentence.
    """

    config: StudyConfig
    layout: StudyLayout
    state: StudyState
    settings: SupervisorSettings
    write: Callable[[Event], None]
    note: Callable[[str], None]


@contextmanager
def study_nodes(session: JoinTerms, supervisor: Supervisor, local: LocalNode) -> Generator[StudyNodes, None, None]:
    """Open the machines of a session; agents are told when it is over.

    Args:
        session: What is known of the session.
        supervisor: Keeps the children of this machine, and waits for agents too.
        local: This machine.
    """
    config, layout, settings, created = session.config, session.layout, session.settings, session.state.created
    wish = config.nodes
    if wish is None or created is None:
        yield StudyNodes(local, local)
        return
    from dryfit.processes.agent_link import listening, publish, token_of
    from dryfit.processes.connection import control_context
    from dryfit.processes.joined_nodes import JoinedNodes, Listener, Terms, left_running
    from dryfit.processes.launch import launched, listen_host
    from dryfit.processes.node_messages import Welcome

    token = token_of(layout)
    tls, fingerprint = control_context(layout) if wish.tls else (None, "")
    listener = Listener(listening(listen_host(wish), wish.port), token, since_boot_s, tls)
    name = uuid.uuid4().hex
    welcome = Welcome(
        node="",
        session=name,
        heard=0,
        lease_s=wish.lease_s,
        marker=settings.marker,
        folder=str(layout.folder),
        needs=_needs(config),
        isolation=settings.isolation,
        preload=settings.preload,
        jobs=(job_of_trials(config),),
    )
    names = {node.joined.agent: known for earlier in session.state.sessions for known, node in earlier.nodes.items()}
    left = left_running(session.state, layout)
    terms = Terms(welcome, created.id, config.runtime.stop_grace_s, wish.local, names, left)
    joined = JoinedNodes(
        local,
        listener,
        terms,
        session.write,
        session.note,
        since_boot_s,
        heard=lambda node: _mark(layout.node_heard(node)),
    )
    supervisor.watch(listener.fileno())
    try:
        with launched(wish, layout, session.note), _heard(joined, layout):
            address = publish(layout, listener.address, created.id, welcome.session, fingerprint)
            session.note(f"listening for nodes on {address.host}, port {address.port}: dryfit agent {layout.folder}")
            if fingerprint:
                session.note(f"they speak TLS; elsewhere an agent needs --fingerprint {fingerprint}")
            yield StudyNodes(local, joined, joined.placeable)
    finally:
        supervisor.forget(listener.fileno())
        listener.close()


@contextmanager
def _heard(joined: "JoinedNodes", layout: StudyLayout) -> Generator[None, None, None]:
    """Tell all agents at the end of this block that the session is over; later ones find no address."""
    try:
        yield
    finally:
        layout.node_address.unlink(missing_ok=True)
        joined.close("the session of the study is over")


def _mark(file: Path) -> None:
    """Give a file the time of now, for whoever looks; a folder that cannot be written to now is told of elsewhere."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def _needs(config: StudyConfig) -> tuple[str, ...]:
    """Return the files and folders that trials read, as far as the study file names them."""
    data, own = config.data, config.function
    named = [data.train, data.validation, data.test, data.file, config.model.name, config.joint.criteria_model]
    paths = [*named, *(own.paths if own is not None else ())]
    return tuple(dict.fromkeys(path for path in paths if path and Path(path).is_absolute() and Path(path).exists()))
