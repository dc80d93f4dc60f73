"""The agent: runs a study's children on its own machine, as the control process asks."""

import select
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.agent_link import (
    AgentLink,
    Meeting,
    installation,
    own_identity,
    read_address,
    read_fingerprint,
    read_token,
    split_address,
)
from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec, SupervisorSettings
from dryfit.processes.connection import Inbox
from dryfit.processes.evidence import EvidenceCollector
from dryfit.processes.failures import classify
from dryfit.processes.gpus import GpuState, NvmlLink
from dryfit.processes.node import HostMemory, LocalNode, NodeFacts, local_facts
from dryfit.processes.node_messages import (
    AnswerChild,
    Beat,
    BeatHeard,
    Bye,
    Command,
    Ended,
    FromControl,
    Hello,
    Identity,
    KillChild,
    Left,
    News,
    Refusal,
    Said,
    StartChild,
    StopChild,
    Welcome,
)
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.errors import ConfigError, DryfitError, Evidence, FailureKind, MachineError
from dryfit.settings.files import appending, closing
from dryfit.settings.wire import Started, since_boot_s

# The children of an agent, under the supervisor and with the devices of its machine, for one study.


_LITTLE_BYTES = 128 << 20
"""Free bytes below which the disk of the study's folder counts as full: then no node is to blame."""


class AgentChildren:
    """Children that the control process asks for. Close it to end them.

    Args:
        welcome: What control has said of the study.
        agent: The agent's name, which its processes carry as a part of their marker.
        note: Tells the user of this machine a sentence.

    Raises:
        MachineError: This machine lacks what trials need.
    """

    def __init__(self, welcome: Welcome, agent: str, note: Callable[[str], None]) -> None:
        _demand(welcome)
        self._welcome = welcome
        self._trials = StudyLayout(Path(welcome.folder)).trials
        self._running: dict[str, Started | None] = {}
        self.trouble = ""
        self._handing_over = False
        self._tell, self._since_s = note, since_boot_s()
        try:
            self._open(welcome, agent)
        except OSError as error:
            allowed = "room and permission to write there, and in the folder for temporary files"
            raise MachineError(f"joining as {welcome.node}", str(error), allowed) from error
        self.watch, self.forget, self.wake = self._supervisor.watch, self._supervisor.forget, self._supervisor.wake

    def _open(self, welcome: Welcome, agent: str) -> None:
        layout = StudyLayout(Path(welcome.folder))
        marker = f"{welcome.marker}-{agent}"
        with ExitStack() as stack:
            # On a disk of this machine: other machines may not share a FIFO over the study's folder.
            own = Path(stack.enter_context(TemporaryDirectory(prefix="dryfit-agent-")))
            self._log = layout.node_log(welcome.node)
            self._log.parent.mkdir(exist_ok=True)
            devices = NvmlLink(marker, self._log.with_name("nvml.txt"), self.note)
            stack.push(closing(devices.close))
            around = EvidenceCollector(devices, layout.folder)
            settings = SupervisorSettings(
                marker=marker,
                wakeup_fifo=own / "doorbell",
                isolation=welcome.isolation,
                server_log=layout.node_server_log(welcome.node),
                preload=welcome.preload,
                probe=around.probe,
            )
            self._supervisor = stack.enter_context(Supervisor(settings))
            self._node = LocalNode(self._supervisor, devices, placed=around.placed)
            self._closing = stack.pop_all()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def running(self) -> frozenset[str]:
        """The keys of the children that run."""
        return frozenset(self._running)

    def serve(self, welcome: Welcome) -> Iterator[News] | None:
        """Go on for another session of the study; None: its children are to be made otherwise than these were.

        Args:
            welcome: What the new control process says of the study.

        Returns:
            What it is to be told of the children that run.
        """
        own = {"session", "heard", "lease_s"}
        if welcome.model_dump(exclude=own) != self._welcome.model_dump(exclude=own):
            return None
        self._welcome = welcome
        return (Said(number=0, key=key, message=said) for key, said in self._running.items() if said is not None)

    def note(self, text: str) -> None:
        """Tell the user of this machine a sentence, and whoever reads the log in the study's folder."""
        self._tell(text)
        with suppress(OSError), appending(self._log) as log:  # a full disk shows elsewhere
            log.write(f"{since_boot_s() - self._since_s:.1f} s after it joined: {text}\n".encode())

    def do(self, command: Command) -> Iterator[News]:
        """Do what control asks, and yield what it is to be told.

        Raises:
            MachineError: Control asks for what it has not said that it would.
        """
        match command:
            case StartChild():
                yield from self._start(command)
            case AnswerChild():
                with self._noting_trouble():
                    self._node.answer(command.key, command.verdict)
            case StopChild():
                with self._noting_trouble():
                    self._node.ask_stop(command.key)
            case KillChild():
                self._node.kill(command.key, command.why)

    def wait(self, timeout_s: float) -> Iterator[News]:
        """Wait for news of children, and yield it."""
        for event in self._node.wait(timeout_s):
            match event:
                case ChildMessage():
                    if isinstance(event.message, Started):
                        self._running[event.key] = event.message
                    yield Said(number=0, key=event.key, message=event.message)
                case ChildExited():
                    self._running.pop(event.key, None)
                    yield self._ended(event)

    def ask_all_to_stop(self) -> None:
        """Ask every child to write a checkpoint and end; each is killed when its grace is over."""
        self._handing_over = True
        for key in self._running:
            with self._noting_trouble():
                self._node.ask_stop(key)

    def devices(self) -> dict[str, GpuState]:
        """Return the state of each device that is known."""
        looks = {device.name: self._node.look(device.name) for device in self._node.facts.devices}
        return {name: look for name, look in looks.items() if look is not None}

    def memory(self) -> HostMemory:
        """Return the state of the host's memory, and what each child takes of it."""
        return self._node.host_memory([said.pid for said in self._running.values() if said is not None])

    def close(self) -> None:
        """Kill every child, and end all that was made for them."""
        self._closing.close()

    def _ended(self, event: ChildExited) -> Ended:
        """Return what control is told; of a child that a full disk of this machine has ended, that it was lost."""
        why = self._disk_full(event)
        if why:
            self.trouble = f"a disk of its own is full: {why}"
            evidence = Evidence(server_lost=True, log_tail=why)
            return Ended(number=0, key=event.key, result=None, evidence=evidence, handed_over=True)
        result = event.result.to_json() if event.result is not None else None
        over = self._handing_over
        return Ended(number=0, key=event.key, result=result, evidence=event.evidence, handed_over=over)

    def _disk_full(self, event: ChildExited) -> str:
        """Return the failure of a child that lacked room on a disk, where the study's own has some; else empty.

        A quota is the user's, and no other machine has more of it.
        """
        result, evidence = event.result, event.evidence
        fault = evidence.fault or (result.fault if result is not None else None)
        if (result is not None and fault is None) or (fault is not None and "EDQUOT" in " ".join(fault.type_names)):
            return ""
        failure = classify(evidence, result, job=self._welcome.jobs[0])
        shared = evidence.disk_free_bytes is None or evidence.disk_free_bytes < _LITTLE_BYTES
        return failure.sentence if failure.kind is FailureKind.DISK_FULL and not shared else ""

    @contextmanager
    def _noting_trouble(self) -> Generator[None, None, None]:
        """Take a file that cannot be written for a trouble of this machine, not of the trial, which goes on."""
        try:
            yield
        except OSError as error:
            self.trouble = f"it cannot write to the study's folder: {error}"

    def _start(self, start: StartChild) -> Iterator[News]:
        folder = Path(start.folder)
        inside = folder.is_relative_to(self._trials) and ".." not in folder.parts
        if start.body.job not in self._welcome.jobs or not inside or start.key in self._running:
            raise MachineError(f"starting {start.key}", f"a job {start.body.job} in {folder}", "one of this study")
        spec = ChildSpec(start.key, folder, start.body, start.limits, start.place, start.planned_bytes)
        try:
            self._node.start(spec)
        except OSError as error:  # a full disk, a folder that is not there: of this machine, not of the trial
            self.trouble = f"it cannot start trials: {error}"
            evidence = Evidence(started=False, server_lost=True, log_tail=str(error))
            yield Ended(number=0, key=start.key, result=None, evidence=evidence)
        else:
            self._running[start.key] = None


def _demand(welcome: Welcome) -> None:
    """Check that this machine has what trials need.

    Raises:
        MachineError: It does not.
    """
    layout = StudyLayout(Path(welcome.folder))
    address = read_address(layout)
    if address is None or address.session != welcome.session:
        raise MachineError(
            f"joining as {welcome.node}",
            f"{layout.folder} is not the study's folder here",
            "a folder that all nodes share, at the same path",
        )
    missing = [path for path in welcome.needs if not Path(path).exists()]
    if missing:
        raise MachineError(
            f"joining as {welcome.node}",
            f"not there on this machine: {', '.join(missing)}",
            "every file that trials read, at the same path as for the control process",
        )


# The agent: runs the children that a study's control process requests, on its own machine; decides nothing.
#
# Children run under a lease: it begins when the agent *sends* a beat, counts on this machine's own clock, and holds
# once control has acknowledged that beat. Without another in time the agent ends its children, and comes back with a
# new epoch; control gives them up only later than that.


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
    """Run trials of a study on this machine; see :func:`dryfit.study.functions.agent`."""
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
