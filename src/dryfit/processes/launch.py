"""Launchers of a session's agents, by ``nodes.launch``: by hand, Slurm, or Ray."""

import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pydantic import ValidationError

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.helpers import python_command
from dryfit.settings.errors import FileError, MachineError
from dryfit.settings.files import appending, read_bounded, write_model
from dryfit.settings.study_file import NodesSettings
from dryfit.settings.wire import Wire

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=dryfit
#SBATCH --array=0-{last}
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --open-mode=append
{agent} &
agent=$!
asked=0
trap 'asked=1; kill -USR2 $agent' USR2  # the time is nearly over: trials go on elsewhere
trap : TERM                             # Slurm tells the agent, too; as long as this waits, it may end well
while kill -0 $agent 2> /dev/null; do wait $agent; done
wait $agent; status=$?
if [ $asked = 1 ] && [ -e {address} ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $status
"""
_COMMAND_S = 60.0
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_MOST_BYTES = 1 << 16


class SlurmArray(Wire):
    """An array that was submitted, as ``nodes/slurm.json`` keeps it.

    Attributes:
        job: Slurm's number of it.
        agents: How many agents it is of.
        options: The further options of ``sbatch`` that it was submitted with.
    """

    job: int
    agents: int
    options: tuple[str, ...]


def script(layout: StudyLayout, agents: int) -> str:
    """Return the script of an array of agents."""
    agent = shlex.join([sys.executable, "-P", "-m", "dryfit.documents.command_line", "agent", str(layout.folder)])
    return _SCRIPT.format(last=agents - 1, agent=agent, address=shlex.quote(str(layout.node_address)))


def submission(layout: StudyLayout, options: Sequence[str]) -> list[str]:
    """Return the command that submits a script from its stdin."""
    nodes = str(layout.nodes).replace("%", "%%")  # which begins a pattern in names of output
    return ["sbatch", "--parsable", f"--chdir={layout.folder}", f"--output={nodes}/slurm-%A_%a.txt", *options]


@dataclass(frozen=True, slots=True)
class Slurm:
    """The array of one study.

    Attributes:
        layout: The study's folder.
        agents: How many agents are wanted.
        options: Further options of ``sbatch``.
    """

    layout: StudyLayout
    agents: int
    options: tuple[str, ...]

    def text(self) -> str:
        """Return the command that submits the array, with its script."""
        command = shlex.join(submission(self.layout, self.options))
        return f"{command} << 'END'\n{script(self.layout, self.agents)}END"

    def start(self) -> str:
        """Submit the array, unless one like it is in the queue since an earlier session; return that in words.

        Raises:
            MachineError: Slurm refuses, or is not there.
        """
        earlier = self._kept()
        if earlier is not None and self._in_queue(earlier.job):
            if (earlier.agents, earlier.options) == (self.agents, self.options):
                return f"Slurm job {earlier.job} of an earlier session still has its agents"
            _slurm("scancel", str(earlier.job))
        answer = _slurm(*submission(self.layout, self.options), said=script(self.layout, self.agents))
        job = answer.strip().partition(";")[0]
        if not job.isdigit():
            raise MachineError("submitting agents to Slurm", f"sbatch says {answer.strip()!r}", "the number of a job")
        array = SlurmArray(job=int(job), agents=self.agents, options=self.options)
        write_model(self._file, array, durable=False)
        return f"submitted {self.agents} agent(s) to Slurm as job {job}"

    def trouble(self) -> str:
        """Return why no agents are to be expected any more; empty where some are."""
        array = self._kept()
        if array is None or self._in_queue(array.job):
            return ""
        return f"Slurm job {array.job} has left the queue; what its agents said: {self.layout.nodes}/slurm-*.txt"

    def waits(self) -> bool:
        """Whether any of the array still has to start or to end."""
        array = self._kept()
        return array is not None and self._in_queue(array.job)

    def cancel(self, *, pending: bool) -> None:
        """Cancel the array: what has not begun, or all of it.

        Raises:
            MachineError: Slurm does not answer.
        """
        array = self._kept()
        if array is not None:
            _slurm("scancel", *(["--state=PENDING"] if pending else []), str(array.job))

    def forget(self) -> None:
        """Keep nothing of the array: it is cancelled."""
        self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self.layout.nodes / "slurm.json"

    def _kept(self) -> SlurmArray | None:
        try:
            return SlurmArray.model_validate_json(read_bounded(self._file, _MOST_BYTES))
        except (OSError, FileError, ValidationError):
            return None

    def _in_queue(self, job: int) -> bool:
        """Whether some of a job is in the queue; a job that Slurm has forgotten is not, of another error it may be.

        Raises:
            MachineError: Slurm does not answer.
        """
        try:
            return bool(_slurm("squeue", "--noheader", "--jobs", str(job)).strip())
        except MachineError as error:
            if "Invalid job id" in str(error):
                return False
            raise


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit in: of a job that submits, its own shape is none of the agents' (sbatch(1))."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in _KEPT}


def _slurm(command: str, *words: str, said: str = "") -> str:
    """Run a command of Slurm; return what it prints.

    Raises:
        MachineError: It is not there, fails, or does not answer.
    """
    doing = f"running {command}"
    path = shutil.which(command)
    if path is None:
        raise MachineError(doing, "it is not installed here", "a machine from which jobs of Slurm can be submitted")
    try:
        done = subprocess.run(
            [path, *words],
            input=said.encode(),
            capture_output=True,
            timeout=_COMMAND_S,
            check=False,
            env=slurm_environment(os.environ),
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise MachineError(doing, str(error), "a Slurm that answers") from error
    if done.returncode != 0:
        why = done.stderr.decode(errors="replace").strip()
        raise MachineError(doing, why or f"exit status {done.returncode}")
    return done.stdout.decode(errors="replace")


_MODULE = "dryfit.processes.ray_agents"
_CONNECT_S = 60.0
_MOST_SAID = 2000


@dataclass(slots=True)
class Ray:
    """An agent on each node of one cluster, which is there already: none is started.

    Attributes:
        layout: The study's folder.
        address: ``HOST:PORT`` of the cluster; ``auto``: as Ray finds it, by ``RAY_ADDRESS`` or on this machine.
    """

    layout: StudyLayout
    address: str
    _process: subprocess.Popen[bytes] | None = field(default=None)

    def text(self) -> str:
        """Return the command that starts the agents."""
        return shlex.join(self._command("$$")).replace("'$$'", "$$")

    def start(self) -> str:
        """Connect to the cluster; agents follow. Call from the main thread: the process ends with it.

        Raises:
            MachineError: There is no such cluster, or no Ray.
        """
        self._reach()
        with appending(self._log) as log:
            process = subprocess.Popen(
                self._command(str(os.getpid())), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        self._process = process
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _CONNECT_S)
        said = process.stdout.readline().decode(errors="replace").strip() if readable else ""
        if not said.startswith("connected"):
            self.cancel(pending=False)
            raise _no_cluster(self._last_words() or f"no answer in {_CONNECT_S:.0f} s")
        return said

    def trouble(self) -> str:
        """Return why no agents are to be expected any more; empty where some are."""
        if self._process is None or self._process.poll() is None:
            return ""
        return f"the process that starts agents with Ray has ended: {self._last_words() or self._log}"

    def waits(self) -> bool:
        """Whether it still ends agents."""
        return self._process is not None and self._process.poll() is None

    def cancel(self, *, pending: bool) -> None:
        """Ask it to end, which ends its agents; or kill it, and Ray ends them."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate() if pending else self._process.kill()
            if not pending:
                self._process.wait()

    def forget(self) -> None:
        """Nothing is kept of it."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def _reach(self) -> None:
        """Ask whether anything listens at the address: Ray itself tries for a minute.

        Raises:
            MachineError: Nothing does.
        """
        host, _, port = self.address.rpartition(":")
        if host and port.isdigit():
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            except (OSError, OverflowError, UnicodeError) as error:
                raise _no_cluster(f"no cluster is found at {shlex.quote(self.address)}: {error}") from error

    @property
    def _log(self) -> Path:
        return self.layout.nodes / "ray.txt"

    def _command(self, parent: str) -> list[str]:
        return python_command(_MODULE, str(self.layout.folder), self.address, parent)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace")[-_MOST_SAID:].strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""


def _no_cluster(why: str) -> MachineError:
    return MachineError("starting agents with Ray", why, "a cluster of Ray that this machine belongs to")


_LOOK_EVERY_S = 30.0
_END_S = 5.0
_POLL_S = 0.2
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737): a UDP socket connected to it sends nothing, and knows its own address."""


Launcher: TypeAlias = Slurm | Ray
"""Starts agents, and ends launched processes that have not joined."""


def launcher_of(wish: NodesSettings, layout: StudyLayout) -> Launcher | None:
    """Return the launcher of a study's agents; None: they are started by hand."""
    kind, _, rest = wish.launch.partition(":")
    match kind:
        case "slurm":
            return Slurm(layout, int(rest), wish.sbatch_options)
        case "ray":
            return Ray(layout, rest or "auto")
        case _:
            return None


def launch_text(wish: NodesSettings, layout: StudyLayout) -> str:
    """Return the command that starts a study's agents, as typed in a shell; empty without one."""
    launcher = launcher_of(wish, layout)
    return launcher.text() if launcher is not None else ""


def listen_host(wish: NodesSettings) -> str:
    """Return the address to listen on: that of the study file, or where others start the agents one they can reach."""
    if wish.host is not None:
        return wish.host
    return _LOOPBACK if wish.launch == "listen" else _own_address()


def _own_address() -> str:
    """Return this machine's address for others: what its name stands for, or else that of its way out."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = _LOOPBACK
    if not named.startswith("127."):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        try:
            way_out.connect(_ELSEWHERE)
            return way_out.getsockname()[0]
        except OSError:  # no network: agents can only be on this machine
            return _LOOPBACK


@contextmanager
def launched(wish: NodesSettings, layout: StudyLayout, note: Callable[[str], None]) -> Generator[None, None, None]:
    """Have agents started, within this block; at its end those that have not begun are cancelled, the others end.

    Args:
        wish: The table ``[nodes]``.
        layout: The study's folder, where the address lies already.
        note: Tells the user a sentence; from a thread too.

    Raises:
        DryfitError: They cannot be started.
    """
    launcher = launcher_of(wish, layout)
    if launcher is None:
        yield
        return
    note(launcher.start())
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(launcher, over, note), name="launched agents", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        try:
            _end(launcher)
        except MachineError as error:
            note(f"agents that wait to be started could not be cancelled: {error}")


def _watch(launcher: Launcher, over: threading.Event, note: Callable[[str], None]) -> None:
    """Say once when no agents are to be expected any more: the study would wait for them."""
    told = ""
    while not told and not over.wait(_LOOK_EVERY_S):
        try:
            told = launcher.trouble()
        except MachineError:  # it may answer the next time
            continue
        if told and not over.is_set():
            note(told)


def _end(launcher: Launcher) -> None:
    """Cancel what has not begun; the others have been told that the session is over, and end by themselves."""
    launcher.cancel(pending=True)
    until_s = time.monotonic() + _END_S
    while launcher.waits():
        if time.monotonic() > until_s:
            launcher.cancel(pending=False)
            break
        time.sleep(_POLL_S)
    launcher.forget()
