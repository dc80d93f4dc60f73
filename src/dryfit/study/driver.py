"""The one loop that acts: starts children, passes their messages to a decider, and heeds requests to stop."""

import faulthandler
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self, TypeVar

from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.processes.node import Nodes
from dryfit.processes.process import end_of_command
from dryfit.settings.devices import node_of
from dryfit.settings.files import appending, contents, first_error_wins
from dryfit.study.next_step import End

# Requests to stop, by signal or by ``dryfit stop``, and the dump of the control process's stacks on SIGUSR1.


GRACEFUL = "graceful"
NOW = "now"
_REQUEST_BYTES = 1 << 10

_REASONS = {
    signal.SIGINT: End.INTERRUPTED,
    signal.SIGTERM: End.STOPPED,
    signal.SIGHUP: End.STOPPED,
    signal.SIGUSR2: End.STOPPED,
}
"""SIGUSR2 is the warning that a batch system sends some time before it takes the machine away."""


class StopSignals:
    """Context that turns stop signals into stop requests for the running study.

    It may span several studies that run one after another: a signal between two of them is not lost, and a Ctrl-C
    after it ends the process. Handlers are only installed in the main thread, because Python allows it nowhere
    else. SIGHUP stays ignored where it is: that is how ``nohup`` works. After a stop, a command ignores what repeats
    itself while it ends.
    """

    def __init__(self) -> None:
        self._old: dict[signal.Signals, object] = {}
        self.listener: Callable[[signal.Signals], None] | None = None
        self.why: End | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
                if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_wins(error):
            for number, handler in self._old.items():
                over = self.why is not None and handler is end_of_command
                restored = signal.SIG_IGN if over else handler
                signal.signal(number, restored)  # pyright: ignore[reportArgumentType]  # what signal() itself returned
            self._old.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # At once: handlers of signals that come faster than they are handled run within each other.
        if self.why is not None and number != signal.SIGINT:
            return
        received, first = signal.Signals(number), self.why is None
        self.why = self.why or _REASONS[received]
        if self.listener is not None:
            self.listener(received)
        elif received is signal.SIGINT and not first:
            raise KeyboardInterrupt  # no study runs that could end at once: a person must not have to wait


class StopRequests:
    """Collects requests to stop while it is entered; the driver looks at them between any two steps.

    The first request means: checkpoint and stop. A SIGINT after it, as of a person who presses Ctrl-C once more, or
    ``dryfit stop --now``, means: now. Other signals may come as often as they like: the terminal and the shell send a
    SIGHUP each, ``timeout`` sends SIGTERM to the process and to its group, a batch system warns before it ends a job.

    Args:
        request_file: The file that ``dryfit stop`` writes.
        wake: Wakes the driver; called from signal handlers.
        signals: Handlers that are installed already; None: own ones are, while it is entered.
        check: Called at each look; raises where the study cannot go on at all.
    """

    def __init__(
        self,
        request_file: Path,
        wake: Callable[[], None],
        signals: StopSignals | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = request_file
        self._wake = wake
        self._signals = signals or StopSignals()
        self._own = ExitStack()
        self._own_signals = signals is None
        self._check = check
        self.why: End | None = None
        self.at_once = False

    def __enter__(self) -> Self:
        self._file.unlink(missing_ok=True)
        self._signals.listener = self._on_signal
        self.why = self.why or self._signals.why
        if self._own_signals:
            self._own.enter_context(self._signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_wins(error):
            self._own.close()
            self._signals.listener = None
            self._file.unlink(missing_ok=True)

    def look(self) -> None:
        """Read a request that was made through the file; before it, make sure that the study can go on."""
        self._check()
        data = contents(self._file, _REQUEST_BYTES)
        if data is not None:
            self.why = self.why or End.STOPPED
            self.at_once = self.at_once or data.strip() == NOW.encode()

    def asked(self) -> bool:
        """Look, and return whether a stop was asked for."""
        self.look()
        return self.why is not None

    def _on_signal(self, received: signal.Signals) -> None:
        if self.why is not None and received is signal.SIGINT:
            self.at_once = True
        self.why = self.why or _REASONS[received]
        self._wake()


@contextmanager
def stacks_on_request(file: Path) -> Generator[None, None, None]:
    """Let SIGUSR1 append the stacks of all threads to a file, and do nothing else, within this block.

    An embedding program that handles the signal itself keeps it.
    """
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    with appending(file) as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


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
