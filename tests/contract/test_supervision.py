"""The recipes of docs/supervision.md, run as they stand there."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dryfit.settings.errors import ExitStatus
from dryfit.settings.study_file import RuntimeSettings
from parts import need
from study_runs import DEADLINE_S

PAGE = Path(__file__).parents[2] / "docs" / "supervision.md"
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)
SPARE_S = 30


def recipe(name: str) -> str:
    (body,) = (found["body"] for found in FILE.finditer(PAGE.read_text(encoding="utf-8")) if found["name"] == name)
    return body


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH, with a ``scontrol`` that writes down what it is asked."""
    stub(tmp_path / "scontrol", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return tmp_path


def stub(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def submitted(place: Path) -> subprocess.Popen[str]:
    """The batch script, run by bash as slurmd would; what is in it is running once this returns."""
    (place / "study.sbatch").write_text(recipe("study.sbatch"))
    environment = {**os.environ, "STUDY": "study.toml"}
    process = subprocess.Popen(["bash", "study.sbatch"], cwd=place, env=environment, text=True)
    until(lambda: (place / "runs").exists())
    return process


def until(happened) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def asked(place: Path) -> str:
    file = place / "asked"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4])
def test_slurm_passes_its_warning_on_and_requeues_what_is_resumable(place: Path, status: int) -> None:
    """The stand-in takes a moment to stop, as a checkpoint does; SIGTERM follows the warning."""
    stub(
        place / "dryfit",
        f"trap '' TERM; trap 'echo warned >> warnings; sleep 0.3; exit {status}' USR2\n"
        'echo "$@" > arguments; touch runs; while :; do sleep 0.02; done',
    )
    process = submitted(place)
    process.send_signal(signal.SIGUSR2)
    until(lambda: (place / "warnings").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == status
    assert (place / "arguments").read_text().split() == ["tune", "study.toml", "--quiet"]
    assert asked(place) == ("requeue 4711\n" if status == 3 else "")


def test_slurm_leaves_a_study_that_ends_by_itself(place: Path) -> None:
    stub(place / "dryfit", "touch runs; exit 0")
    assert submitted(place).wait(DEADLINE_S) == 0
    assert asked(place) == ""


def test_slurms_warning_leaves_time_for_a_checkpoint() -> None:
    warning = re.search(r"--signal=B:USR2@(\d+)", recipe("study.sbatch"))
    assert int(warning[1]) >= RuntimeSettings().stop_grace_s + SPARE_S
    assert "#SBATCH --requeue" in recipe("study.sbatch")


@pytest.mark.parametrize(
    ("statuses", "end"), [([0], 0), ([3, 137, 139, 0], 0), ([3, 1], 1), ([2], 2), ([4], 4), ([143, 130], 130)]
)
def test_the_loop_goes_on_while_that_is_of_use(place: Path, statuses: list[int], end: int) -> None:
    (place / "left").write_text("".join(f"{status}\n" for status in statuses))
    stub(place / "dryfit", "status=$(head -n 1 left); sed -i 1d left; exit $status")
    (place / "loop.sh").write_text(recipe("until-done.sh"))
    environment = {**os.environ, "PAUSE_S": "0"}
    done = subprocess.run(["sh", "loop.sh", "study.toml"], cwd=place, env=environment, timeout=DEADLINE_S, check=False)
    assert done.returncode == end
    assert (place / "left").read_text() == ""


def keys(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)


def test_the_unit_starts_again_what_is_resumable_and_nothing_else() -> None:
    found = keys(recipe("dryfit-study.service"))
    final = {str(int(status)) for status in ExitStatus} - {"0", "3"}
    assert set(found["RestartPreventExitStatus"].split()) == final
    assert found["RestartForceExitStatus"] == found["SuccessExitStatus"] == str(int(ExitStatus.STOPPED))
    assert int(found["TimeoutStopSec"]) >= RuntimeSettings().stop_grace_s + SPARE_S
    assert (found["Restart"], found["KillMode"], found["OOMPolicy"]) == ("on-failure", "mixed", "continue")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = recipe("dryfit-study.service").replace("/srv/venv/bin/dryfit", sys.executable)
    file = tmp_path / "dryfit-study.service"
    file.write_text(unit.replace("/srv/studies", str(tmp_path)))
    done = subprocess.run(
        [need("systemd-analyze"), "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if file.name in line]
    assert (done.returncode, complaints) == (0, []), done.stderr
    file.write_text(unit.replace("KillMode=mixed", "KillMode=gently"))
    done = subprocess.run(
        [need("systemd-analyze"), "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert "kill mode" in done.stderr  # it would have told


def test_kubernetes_ends_the_job_where_trying_again_changes_nothing() -> None:
    job = yaml.safe_load(recipe("study-job.yaml"))["spec"]
    evicted, final = job["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert final["action"] == "FailJob"
    assert set(final["onExitCodes"]["values"]) == {
        ExitStatus.ANSWER_IS_NO,
        ExitStatus.CANNOT_RUN,
        ExitStatus.BUG,
    }
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert pod["terminationGracePeriodSeconds"] >= RuntimeSettings().stop_grace_s + SPARE_S
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
