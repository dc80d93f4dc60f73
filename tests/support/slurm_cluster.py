"""A Slurm of its own on this machine: munged, slurmctld and a slurmd for each node, all below one folder."""

import getpass
import os
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from parts import need

DEADLINE_S = 60.0

CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.txt
SlurmdLogFile={folder}/slurmd.%n.txt
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MinJobAge=10
KillWait=20
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 Gres=gpu:1\n"
GRES = "NodeName={name} Name=gpu File={file}\n"
PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 State=UP MaxTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP MaxTime=60
"""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class SlurmCluster:
    """Several nodes on one machine, each with one CPU, and with a GPU as far as Slurm looks: a file of a device.

    Args:
        folder: For everything it writes; as short as the path of a socket.
        nodes: How many.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ports, host = free_ports(nodes + 1), socket.gethostname().partition(".")[0]
        text = CONF.format(host=host, user=getpass.getuser(), folder=folder, ports=ports)
        text += "".join(
            NODE.format(name=name, host=host, port=port) for name, port in zip(self.names, ports[1:], strict=True)
        )
        self.conf = folder / "slurm.conf"
        self.conf.write_text(text + PARTITIONS, encoding="ascii")
        (folder / "state").mkdir(exist_ok=True)
        self._make_gpus()
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}

    def _make_gpus(self) -> None:
        """Make a file of a device for each node: a number of its own, and the same null device."""
        text = ""
        for number, name in enumerate(self.names):
            file = self.folder / f"nvidia{number}"
            os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            text += GRES.format(name=name, file=file)
        (self.folder / "gres.conf").write_text(text, encoding="ascii")

    def start(self) -> None:
        """Start everything, and wait until all nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = [f"--{name}={self.folder}/munge.{end}" for name, end in MUNGE_FILES.items()]
        self._run("munged", "--foreground", "--force", *munge)
        wait_until((self.folder / "munge.sock").exists, "munged has no socket")
        self._run("slurmctld", "-D", "-c")
        for name in self.names:
            self.start_node(name)
        wait_until(lambda: self.states() == ["idle"] * len(self.names), "nodes are not idle")

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._run("slurmd", "-D", "-c", "-N", name, key=name)

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node; what it has started goes on."""
        self._processes[name].kill()
        self._processes.pop(name).wait()

    def stop(self) -> None:
        """Cancel all jobs, and end everything."""
        self.cancel_all()
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until they have ended."""
        with suppress(subprocess.SubprocessError):
            self.command("scancel", "--user", getpass.getuser())
            wait_until(lambda: not self.jobs(), "jobs do not end")

    def begin_pending(self) -> None:
        """Let jobs that were put back into the queue begin soon, where Slurm lets them wait for two minutes.

        Not at once: within the second in which a job has ended, its node takes its new credential for the old one,
        which is revoked, and Slurm gives the job up ("Killing non-startable batch: Job credential revoked").
        """
        for job in [job for job, (state, _) in self.jobs().items() if state == "PENDING"]:
            self.command("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def command(self, *words: str) -> str:
        """Run one of Slurm's commands; what it prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def states(self) -> list[str]:
        """The states of the nodes."""
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """State and node of each job in the queue, by its number; those of an array as ``12_3``."""
        lines = self.command("squeue", "--noheader", "--array", "--format=%i %T %N").splitlines()
        words = [[*line.split(), ""] for line in lines]
        return {job: (state, node) for job, state, node, *_ in words}

    def said(self) -> str:
        """The end of what the servers wrote, for a failure."""
        files = sorted(self.folder.glob("*.txt"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def _run(self, program: str, *words: str, key: str = "") -> None:
        with (self.folder / f"{key or program}.out").open("ab") as out:
            self._processes[key or program] = subprocess.Popen(
                [need(program), *words], env=self.environment, stdout=out, stderr=out, start_new_session=True
            )


MUNGE_FILES = {"socket": "sock", "key-file": "key", "pid-file": "pid", "log-file": "txt", "seed-file": "seed"}


def wait_until(happened: Callable[[], object], otherwise: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until something has happened."""
    until_s = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < until_s, otherwise
        time.sleep(0.1)


def processes_with(word: str) -> dict[int, list[str]]:
    """The command lines of living processes that have a word, by process id."""
    found: dict[int, list[str]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # of which a zombie is one
            line = process.cmdline()
            if word in line:
                found[process.pid] = line
    return found
