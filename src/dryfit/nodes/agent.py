"""The agent: runs the children that a study's control process requests, on its own machine; decides nothing.

Children run under a lease: it begins when the agent *sends* a beat, counts on this machine's own clock, and holds once
control has acknowledged that beat. Without another in time the agent ends its children, and comes back with a new
epoch; control gives them up only later than that.
"""

import select
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from dryfit.core.clock import since_boot_s
from dryfit.core.errors import ConfigError, DryfitError, MachineError
from dryfit.nodes.agent_children import AgentChildren
from dryfit.nodes.agent_link import AgentLink, Meeting
from dryfit.nodes.installation import installation, own_identity
from dryfit.nodes.messages import (
    AnswerChild,
    Beat,
    BeatHeard,
    Bye,
    FromControl,
    Hello,
    Identity,
    KillChild,
    Left,
    Refusal,
    StartChild,
    StopChild,
    Welcome,
)
from dryfit.nodes.outbox import Inbox
from dryfit.nodes.rendezvous import read_address, read_fingerprint, read_token, split_address
from dryfit.runtime.machine.local_devices import local_facts
from dryfit.runtime.machine.node import NodeFacts
from dryfit.store.layout import StudyLayout

_TURN_S = 0.25
_SAY_WAITING_S = 3.0
_LEAVE_S = 5.0
_BEATS_A_LEASE = 6
_BEAT_MOST_S = 1.0
_SILENT_MOST_S = 5.0


@dataclass(slots=True)
class Agent:
    """One agent, from its start to its end.

    Attributes:
        identity: Who it is.
        find: Returns where the control process is; None: nobody knows now.
        study: The study's id, where its folder is known; else empty.
        patience_s: How long it waits for a control process.
        note: Tells its user a sentence.
        clock: Seconds of a clock that is never set, and counts while the machine sleeps.
        stop_asked: Asked to have no more children and to end, by a signal handler.
        stop_now: The same, at once.
    """

    identity: Identity
    find: Callable[[], Meeting | None]
    study: Callable[[], str]
    patience_s: float
    note: Callable[[str], None]
    clock: Callable[[], float]
    stop_asked: bool = False
    stop_now: bool = False
    _epoch: int = 1
    _facts: NodeFacts = field(default_factory=local_facts)
    _link: AgentLink = field(init=False)
    _children: AgentChildren | None = None
    _welcome: Welcome | None = None
    _over: str = ""
    _said_hello: bool = False
    _noted: str = ""
    _said_waiting: bool = False
    _beats: dict[int, float] = field(default_factory=dict[int, float])
    _beat: int = 0
    _beat_s: float = 0.0
    _heard_s: float = 0.0
    _lease_from_s: float = 0.0
    _ending: bool = False
    _leaving_since_s: float | None = None

    def __post_init__(self) -> None:
        self._link = AgentLink(self.find, self._watch, self._forget, self.clock)

    def run(self) -> str:
        """Serve a study until its session is over, or this process is asked to end.

        Returns:
            Why it ended.

        Raises:
            DryfitError: It may not join, or this machine lacks what trials need.
        """
        self._heard_s = self.clock()
        try:
            while not self._over and not self.stop_now:
                self._turn()
            if self._children is not None:
                self._children.note(f"it ends: {self._over or 'asked to, at once'}")
            self._end_children()
            if not self._over:
                self._link.tell(Left(number=0, why="its agent was ended at once"))
        except DryfitError as error:
            if self._children is not None:
                self._children.note(f"it ends: {error}")
            self._end_children()
            self._link.tell(Left(number=0, why=str(error)))
            raise
        finally:
            self._end_children()
            self._link.hang_up("")
        return self._over or "ended at once"

    def _say(self, text: str) -> None:
        """Tell its user a sentence; once it has joined, the log of its node too."""
        (self._children.note if self._children is not None else self.note)(text)

    def _turn(self) -> None:
        if not self._ending:
            self._link.dial()
        if self._link.is_proved and not self._said_hello:
            self._say_hello()
        try:
            for message in self._link.hear():
                self._take(message)
        except ValueError as error:
            raise MachineError("serving a study", f"its control process speaks otherwise: {error}") from error
        if self._link.fileno() is None:
            self._said_hello = False
        if self._link.refused != self._noted:
            self._noted = self._link.refused
            self.note(f"no study is joined, another try follows: {self._noted}")
        self._keep_lease()
        self._leave_if_asked()
        self._send_beat()
        self._wait()

    def _say_hello(self) -> None:
        self._said_hello = True
        self._beats, self._beat = {0: self.clock()}, 0
        session = self._welcome.session if self._welcome is not None else ""
        running = self._children.running if self._children is not None else frozenset[str]()
        self._link.say(
            Hello(
                identity=self.identity,
                epoch=self._epoch,
                session=session,
                running=tuple(sorted(running | self._link.unheard())),
                acknowledged=self._link.outbox.acknowledged,
                heard=self._link.inbox.last,
                study=self.study(),
                code=installation(),
                facts=self._facts,
            )
        )

    def _take(self, message: FromControl) -> None:
        """Take in what control says.

        Raises:
            DryfitError: It may not join, or control asks for what no control of this study does.
        """
        self._heard_s = self.clock()
        match message:
            case Welcome():
                self._join(message)
            case Refusal(stale=True):
                self._say(f"the trials here are ended: {message.why}")
                self._begin_again()
            case Refusal():
                raise MachineError("joining a study", message.why, hint="look at what the study's own terminal says")
            case BeatHeard():
                self._lease_from_s = max(self._lease_from_s, self._beats.pop(message.beat, 0.0))
                self._link.outbox.acknowledge(message.heard)
            case Bye():
                self._over = message.why
            case StartChild() | AnswerChild() | StopChild() | KillChild():
                if self._link.inbox.is_new(message.number) and self._children is not None:
                    for news in self._children.do(message):
                        self._link.tell(news)

    def _join(self, welcome: Welcome) -> None:
        self._lease_from_s = self._beats[0]
        if self._children is not None and self._welcome is not None and welcome.session != self._welcome.session:
            going_on = self._children.serve(welcome)
            if going_on is None:
                self._say("the study's trials are run otherwise now: those here are ended")
                self._begin_again()
                return
            self._say(f"another control process of the study goes on with {len(self._children)} trial(s) here")
            self._welcome = welcome
            self._link.inbox = Inbox()
            for news in going_on:
                self._link.tell(news)
        if self._children is None:
            self._welcome = welcome
            self._children = AgentChildren(welcome, self.identity.agent, self.note)
            fd = self._link.fileno()
            if fd is not None:
                self._children.watch(fd)
            self._say(f"joined as {welcome.node}, process {self.identity.pid} on {self.identity.host}")
        self._link.go_on(welcome.heard)

    def _keep_lease(self) -> None:
        """End the children in time where control cannot have heard of them; give a dead connection up before that."""
        welcome, now_s = self._welcome, self.clock()
        if welcome is None:
            self._look_out(now_s - self._heard_s)
            return
        if self._ending:
            if not self._children:
                self._begin_again()
            return
        if self._said_hello and now_s - self._heard_s > min(_SILENT_MOST_S, welcome.lease_s / 2):
            self._heard_s = now_s
            self._link.hang_up("nothing is heard")
            self._said_hello = False
        if now_s - self._lease_from_s > welcome.lease_s:
            self._say(f"nothing was heard of the control process for {now_s - self._lease_from_s:.0f} s: trials end")
            self._ending = True
            self._link.hang_up("the lease is over")
            self._said_hello = False
            if self._children is not None:
                self._children.ask_all_to_stop()

    def _look_out(self, waited_s: float) -> None:
        """Say once that there is no control process yet, and end when there has been none for too long."""
        if waited_s > self.patience_s:
            why = f"no control process was found in {self.patience_s:.0f} s"
            raise MachineError("joining a study", why, hint=self._link.trouble)
        if waited_s > _SAY_WAITING_S and self._link.trouble and not self._said_waiting:
            self._said_waiting = True
            self.note(f"{self._link.trouble}; waiting for a study, {self.patience_s:.0f} s at most")

    def _begin_again(self) -> None:
        """End what is left of the children, and come back as if newly started."""
        self._end_children()
        self._link.forget_all()
        self._epoch += 1
        self._welcome, self._ending, self._said_hello, self._said_waiting = None, False, False, False
        self._heard_s = self.clock()

    def _leave_if_asked(self) -> None:
        if not self.stop_asked:
            return
        if self._leaving_since_s is None:
            self._say("asked to stop: trials here write a checkpoint and go on elsewhere")
            if self._children is not None:
                self._children.ask_all_to_stop()
            self._leaving_since_s = 0.0
            self._send_beat(at_once=True)
        if self._children:
            return
        if self._leaving_since_s == 0.0:
            self._leaving_since_s = self.clock()
            self._link.tell(Left(number=0, why="its agent was asked to stop"))
        if not len(self._link.outbox) or self._welcome is None or self.clock() - self._leaving_since_s > _LEAVE_S:
            self._over = "asked to stop"

    def _send_beat(self, *, at_once: bool = False) -> None:
        children, welcome, now_s = self._children, self._welcome, self.clock()
        if not self._said_hello or children is None or welcome is None:
            return
        every_s = min(_BEAT_MOST_S, welcome.lease_s / _BEATS_A_LEASE)
        if not at_once and self._beat and now_s - self._beat_s < every_s:
            return
        self._beat, self._beat_s = self._beat + 1, now_s
        self._beats[self._beat] = now_s
        leaving = "it was asked to stop" if self.stop_asked else children.trouble
        heard = self._link.inbox.last
        self._link.say(
            Beat(beat=self._beat, heard=heard, devices=children.devices(), memory=children.memory(), leaving=leaving)
        )

    def _wait(self) -> None:
        if self._children is not None:
            for news in self._children.wait(_TURN_S):
                self._link.tell(news)
            return
        fd = self._link.fileno()
        select.select([fd] if fd is not None else [], [], [], _TURN_S)

    def _end_children(self) -> None:
        if self._children is not None:
            fd = self._link.fileno()
            if fd is not None:
                self._children.forget(fd)
            children, self._children = self._children, None
            children.close()

    def _watch(self, fd: int) -> None:
        if self._children is not None:
            self._children.watch(fd)

    def _forget(self, fd: int) -> None:
        if self._children is not None:
            self._children.forget(fd)


def serve(
    layout: StudyLayout | None,
    join: str | None,
    token_file: Path | None,
    wait_s: float,
    on_note: Callable[[str], None],
    fingerprint: str | None = None,
) -> str:
    """Run trials of a study on this machine; see :func:`dryfit.api.agent`."""
    by_address = join is not None and token_file is not None
    if (layout is None) is not by_address or (join is None) is not (token_file is None):
        raise ConfigError("starting an agent", "not one of both", "the study's folder, or --join with --token-file")
    if join is None and fingerprint is not None:
        raise ConfigError("starting an agent", "--fingerprint without --join", "neither: the study's folder has both")
    if join is not None and token_file is not None:
        pinned = read_fingerprint(fingerprint) if fingerprint is not None else ""
        there = Meeting(*split_address(join), read_token(token_file), pinned)
        find, study = (lambda: there), str
    else:
        assert layout is not None
        folder = layout

        def find() -> Meeting | None:
            address = read_address(folder)
            if address is None:
                return None
            return Meeting(address.host, address.port, read_token(folder.node_token), address.fingerprint)

        def study() -> str:
            address = read_address(folder)
            return address.study if address is not None else ""

    made = Agent(own_identity(), find, study, wait_s, on_note, since_boot_s)
    with _stopped_by_signals(made):
        return made.run()


@contextmanager
def _stopped_by_signals(made: Agent) -> Generator[None, None, None]:
    """Let signals ask an agent to end, and the second of them at once, within this block."""

    def stop(number: int, _frame: FrameType | None) -> None:
        # SIGUSR2 may come twice for one warning, from Slurm and from the script of its job: it never means "at once".
        made.stop_now = made.stop_now or (made.stop_asked and number != signal.SIGUSR2)
        made.stop_asked = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
