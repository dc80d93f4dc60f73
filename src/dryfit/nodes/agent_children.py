"""The children of an agent, under the supervisor and with the devices of its machine, for one study."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dryfit.core.cleanup import closing
from dryfit.core.clock import since_boot_s
from dryfit.core.errors import MachineError
from dryfit.core.failure import Evidence, FailureKind
from dryfit.core.regular_files import appending
from dryfit.core.wire import Started
from dryfit.nodes.messages import AnswerChild, Command, Ended, KillChild, News, Said, StartChild, StopChild, Welcome
from dryfit.nodes.rendezvous import read_address
from dryfit.runtime.children.child_spec import ChildExited, ChildMessage, ChildSpec, SupervisorSettings
from dryfit.runtime.children.supervisor import Supervisor
from dryfit.runtime.failures.classify import classify
from dryfit.runtime.failures.evidence import EvidenceCollector
from dryfit.runtime.machine.gpus import GpuState
from dryfit.runtime.machine.host_memory import HostMemory
from dryfit.runtime.machine.local_node import LocalNode
from dryfit.runtime.machine.nvml_link import NvmlLink
from dryfit.store.layout import StudyLayout

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
