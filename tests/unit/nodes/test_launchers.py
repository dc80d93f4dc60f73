"""What is submitted to have agents started, and what of `[nodes]` is refused."""

import socket
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.launch import (
    Ray,
    Slurm,
    launch_text,
    launched,
    launcher_of,
    listen_host,
    script,
    slurm_environment,
    submission,
)
from dryfit.settings.errors import MachineError
from dryfit.settings.study_file import NodesSettings
from study_runs import objective_study, run_here

FAKE = """\
#!/bin/sh
echo "$(basename $0) $*" >> {calls}
case $(basename $0) in
    sbatch) cat > {submitted}; echo "41;cluster" ;;
    squeue) cat {queue} ;;
esac
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Slurm's commands; what `squeue` prints is this file's text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    files = {name: tmp_path / name for name in ("calls", "submitted", "queue")}
    files["queue"].touch()
    for command in ("sbatch", "squeue", "scancel"):
        program = folder / command
        program.write_text(FAKE.format(**files), encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return files["queue"]


@pytest.fixture
def layout(tmp_path: Path) -> StudyLayout:
    """A study's folder whose name a shell, and Slurm, would read otherwise."""
    layout = StudyLayout(tmp_path / "it's 100 %A")
    layout.nodes.mkdir(parents=True)
    return layout


def calls(queue: Path) -> list[str]:
    file = queue.with_name("calls")
    return [line.partition(" ")[0] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    "table",
    [
        {"launch": "slurm"},
        {"launch": "slurm:0"},
        {"launch": "slurm:8 --gres=gpu:1"},
        {"launch": "ray://10.0.0.5:10001"},
        {"launch": "ray:ray://10.0.0.5:10001"},
        {"launch": "k8s"},
        {"sbatch": "--time=1"},
        {"launch": "ray", "sbatch": "--time=1"},
        {"launch": "slurm:1", "sbatch": "--array=0-9"},
        {"launch": "slurm:1", "sbatch": "-a 0-9"},
        {"launch": "slurm:1", "sbatch": "-a0-9"},
        {"launch": "slurm:1", "sbatch": "--wrap 'rm -r /'"},
        {"launch": "slurm:1", "sbatch": "--comment='open"},
        {"host": ""},
    ],
)
def test_tables_that_are_refused(table: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        NodesSettings.model_validate(table)


def test_the_script_is_one_that_a_shell_reads_as_it_was_meant(layout: StudyLayout) -> None:
    text = script(layout, 8)
    assert "#SBATCH --array=0-7\n" in text and "--signal=B:USR2@120" in text and "--requeue" in text
    said = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    words = submission(layout, ("--gres=gpu:1",))
    assert f"--output={layout.folder.parent}/it's 100 %%A/nodes/slurm-%A_%a.txt" in words
    assert words[-1] == "--gres=gpu:1"


def test_the_environment_of_a_job_is_not_that_of_the_jobs_it_submits() -> None:
    given = {
        "SLURM_JOB_ID": "1",
        "SLURM_MEM_PER_NODE": "5",
        "SLURM_CONF": "/x",
        "SBATCH_ACCOUNT": "lab",
        "PATH": "/bin",
    }
    assert slurm_environment(given) == {"SLURM_CONF": "/x", "SBATCH_ACCOUNT": "lab", "PATH": "/bin"}


def test_an_array_that_is_in_the_queue_is_gone_on_with(queue: Path, layout: StudyLayout) -> None:
    assert Slurm(layout, 2, ()).start() == "submitted 2 agent(s) to Slurm as job 41"
    assert queue.with_name("submitted").read_text() == script(layout, 2)
    queue.write_text("41_0 RUNNING\n")
    assert "job 41 of an earlier session" in Slurm(layout, 2, ()).start()
    assert Slurm(layout, 2, ()).trouble() == ""
    assert calls(queue) == ["sbatch", "squeue", "squeue"]
    Slurm(layout, 3, ()).start()  # as many as that array is not of
    assert calls(queue)[3:] == ["squeue", "scancel", "sbatch"]
    queue.write_text("")
    assert "job 41 has left the queue" in Slurm(layout, 3, ()).trouble()


def test_what_has_not_begun_is_cancelled_at_the_end(queue: Path, layout: StudyLayout) -> None:
    notes: list[str] = []
    with pytest.raises(RuntimeError), launched(NodesSettings(launch="slurm:2"), layout, notes.append):
        raise RuntimeError
    assert notes == ["submitted 2 agent(s) to Slurm as job 41"]
    assert calls(queue) == ["sbatch", "scancel", "squeue"]
    assert "scancel --state=PENDING 41" in queue.with_name("calls").read_text()
    assert not (layout.nodes / "slurm.json").exists()


def test_where_nothing_is_launched_it_listens_on_loopback_unless_told(layout: StudyLayout) -> None:
    assert listen_host(NodesSettings()) == "127.0.0.1"
    assert listen_host(NodesSettings(launch="slurm:1", host="10.1.1.1")) == "10.1.1.1"
    assert listen_host(NodesSettings(launch="ray")) not in ("", "0.0.0.0")
    assert launcher_of(NodesSettings(), layout) is None
    assert "ray_agents" in launch_text(NodesSettings(launch="ray:head:6379"), layout)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{free}", "[::1]:{free}", "127.0.0.1:99999", "a host:6379", "x" * 300 + ":1"]
)
def test_an_address_where_nothing_listens_starts_no_process(address: str, layout: StudyLayout) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    launcher = launcher_of(NodesSettings(launch="ray"), layout)
    assert isinstance(launcher, Ray)
    launcher.address = address.format(free=free)
    with pytest.raises(MachineError):
        launcher.start()
    assert not launcher.waits() and not (layout.nodes / "ray.txt").exists()


def test_a_dry_run_prints_what_would_be_submitted(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(objective_study("stepwise"), encoding="utf-8")
    words = ("tune", tmp_path, "--nodes", "slurm:4", "--sbatch", "--comment='a b'", "--dry-run")
    done = run_here(*words)
    assert done.returncode == 0, done.stderr
    assert "'--comment=a b' << 'END'\n#!/bin/bash\n" in done.stdout and "--array=0-3" in done.stdout
    assert run_here(*words, "--json").stdout.startswith("{")
    assert not (tmp_path / "ledger.jsonl").exists()
