"""Agents as jobs of a real Slurm on this machine: whatever becomes of them, a study has the values it has alone."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from dryfit.ledger.events import AttemptPlaced, NodeJoined
from dryfit.settings.errors import ExitStatus
from launched_studies import LaunchedStudy
from slurm_cluster import SlurmCluster, processes_with, wait_until
from study_runs import command, events_of, fold, objective_study, run

pytestmark = pytest.mark.nodes
NODES = 3


@pytest.fixture(scope="module")
def slurm() -> Generator[SlurmCluster, None, None]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a socket's path is short
        cluster = SlurmCluster(Path(folder), NODES)
        try:
            cluster.start()
            os.environ["SLURM_CONF"] = str(cluster.conf)
            yield cluster
        except AssertionError:
            print(cluster.said())
            raise
        finally:
            os.environ.pop("SLURM_CONF", None)
            cluster.stop()


@pytest.fixture(autouse=True)
def no_jobs_are_left(slurm: SlurmCluster) -> Generator[None, None, None]:
    yield
    try:
        wait_until(lambda: not slurm.jobs(), "jobs are left")
    finally:
        slurm.cancel_all()


def running(slurm: SlurmCluster) -> list[str]:
    return sorted(job for job, (state, _) in slurm.jobs().items() if state == "RUNNING")


def test_more_agents_than_there_is_room_for(slurm: SlurmCluster, study: LaunchedStudy, alone: Path) -> None:
    """Of five, three begin at once; the others are cancelled when the study is over."""
    study.tune("slurm:5")
    study.wait_for_joins(NODES)
    assert len(running(slurm)) == NODES and len(slurm.jobs()) == 5
    study.ends_as(alone)
    used = {event.node for event in events_of(study.folder) if isinstance(event, AttemptPlaced)}
    assert len(used) > 1 and "here" not in used
    assert not (study.folder / "nodes" / "slurm.json").exists()


def test_a_warning_that_the_time_is_over_drains_an_agent_which_comes_back(
    slurm: SlurmCluster, study: LaunchedStudy, alone: Path
) -> None:
    study.tune("slurm:3")
    study.wait_for_joins(NODES)
    job = running(slurm)[0]
    slurm.command("scancel", "--full", "--signal=USR2", job)  # to the script and to the agent, which is told twice
    study.wait_for_losses(1)
    assert study.losses() == ["its agent was asked to stop"]
    wait_until(lambda: slurm.jobs()[job][0] == "PENDING", "the agent's job is not in the queue again")
    slurm.begin_pending()
    study.wait_for_joins(NODES + 1)
    study.ends_as(alone)
    attempts = [attempt for trial in fold(study.folder).trials for attempt in trial.attempts]
    assert {one.failure.kind.value for one in attempts if one.failure is not None} <= {"preempted", "lost"}


def test_a_job_of_higher_priority_takes_a_node(slurm: SlurmCluster, study: LaunchedStudy, alone: Path) -> None:
    study.tune("slurm:3")
    study.wait_for_joins(NODES)
    urgent = slurm.command("sbatch", "--parsable", "--partition=high", "--output=/dev/null", "--wrap=sleep 2").strip()
    study.wait_for_losses(1)
    wait_until(lambda: urgent not in slurm.jobs(), "the urgent job does not run")
    slurm.begin_pending()
    study.wait_for_joins(NODES + 1)
    study.ends_as(alone)
    assert set(study.losses()) == {"its agent was asked to stop"}


def test_a_slurmd_and_an_agent_are_killed(slurm: SlurmCluster, study: LaunchedStudy, alone: Path) -> None:
    """What the slurmd has started goes on, and is heard; what the agent had begins again elsewhere."""
    study.tune("slurm:3")
    study.wait_for_joins(NODES)
    slurm.kill_node(slurm.names[0])
    try:
        agents = [pid for pid, line in processes_with(str(study.folder)).items() if "agent" in line]
        nodes = {psutil.Process(pid).environ()["SLURMD_NODENAME"]: pid for pid in agents}
        assert set(nodes) == set(slurm.names)
        os.kill(nodes[slurm.names[1]], signal.SIGKILL)
        study.wait_for_losses(1)
        assert study.losses() == ["its agent was ended"]
        study.ends_as(alone)
    finally:  # a job on a node that does not answer stays until its slurmd is back
        slurm.start_node(slurm.names[0])
        wait_until(lambda: slurm.states() == ["idle"] * NODES, "a node does not come back")


def test_control_is_a_job_too_is_killed_and_finds_its_agents_again(
    slurm: SlurmCluster, study: LaunchedStudy, alone: Path
) -> None:
    script = f"#!/bin/bash\nexec {' '.join(command(*study.words('slurm:2')))}\n"
    first = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null"], input=script, capture_output=True, text=True, check=True
    ).stdout.strip()
    study.wait_for_trials(1)
    (control,) = [pid for pid, line in processes_with(str(study.folder)).items() if "tune" in line]
    os.kill(control, signal.SIGKILL)  # `scancel` would ask it to stop first, and it would cancel its agents
    wait_until(lambda: first not in slurm.jobs(), "control goes on")
    agents = running(slurm)
    assert len(agents) == 2
    study.resume()
    study.wait_for_trials(study.finished() + 1)
    assert running(slurm) == agents, "its agents are the same"
    study.ends_as(alone)


SMI = """\
#!/bin/sh
case "$SLURMD_NODENAME" in n1) model="NVIDIA Small, 24564, 446, 8.9" ;; *) model="NVIDIA Large, 81559, 408, 9.0" ;; esac
echo "0, GPU-a, $model"
echo "1, GPU-b, $model"
"""


def test_trials_get_the_gpus_that_slurm_gives_its_jobs(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver stands in: two GPUs a node, of another model on one; a job is given one GPU, and so are its trials."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "study"
    folder.mkdir()
    text = objective_study("on_device", study="trials = 12\nseed = 5", runtime="parallel = 3")
    nodes = (
        '[execution]\ndevice = "cuda"\n[nodes]\nlocal = false\nslots = 1\nhost = "127.0.0.1"\nsbatch = "--gres=gpu:1"\n'
    )
    (folder / "study.toml").write_text(f"{text}\n{nodes}", encoding="utf-8")
    done = run("tune", folder, "--nodes", "slurm:3")
    assert done.returncode == ExitStatus.DONE, done.stderr
    joined = {event.node: event for event in events_of(folder) if isinstance(event, NodeJoined)}
    assert {event.devices for event in joined.values()} == {("0",)}, "a job may use the GPU that it was given, not both"
    models = sorted(spec.name for event in joined.values() for spec in event.specs if spec is not None)
    assert models == ["NVIDIA Large", "NVIDIA Large", "NVIDIA Small"]
    for trial in fold(folder).trials:
        node, _, device = trial.attempts[-1].place.partition("/")
        assert node in joined and trial.value == float(device), "a trial sees the GPU that it was placed on"
    assert len({trial.attempts[-1].place for trial in fold(folder).trials}) > 1


def test_what_slurm_refuses_is_said_and_nothing_is_left(study: LaunchedStudy) -> None:
    done = run(*study.words("slurm:2"), "--sbatch", "--partition=none")
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert "invalid partition specified: none" in done.stderr
    assert not (study.folder / "nodes" / "slurm.json").exists()
