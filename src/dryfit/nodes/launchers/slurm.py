"""Agents as an array of Slurm jobs: its script, and the commands that submit, look at and cancel it.

Slurm owns the processes, and starts them again after a preemption or a node's death (``--requeue``). Of what it says
about them nothing is believed but that an array has left the queue: one that it calls pending may still run somewhere.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dryfit.core.errors import FileError, MachineError
from dryfit.core.regular_files import read_bounded
from dryfit.core.wire import Wire, write_model
from dryfit.store.layout import StudyLayout

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
    agent = shlex.join([sys.executable, "-P", "-m", "dryfit.cli.app", "agent", str(layout.folder)])
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
