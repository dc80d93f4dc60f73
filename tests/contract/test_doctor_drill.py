"""``dryfit doctor --drill`` in real processes: it kills its own study, and leaves nothing."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from study_runs import DEADLINE_S, command, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


def test_nothing_is_lost_and_nothing_is_left(tmp_path: Path) -> None:
    at = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command("doctor", "--drill", "--json"), capture_output=True, text=True, env=at, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["passed"] and answer["troubles"] == [] and answer["left"] == 0
    assert [kill["victim"] for kill in answer["kills"]].count("study's process") == 3
    assert [kill["victim"] for kill in answer["kills"]].count("trial's process") == 2
    assert [trial["same"] for trial in answer["trials"]] == [True] * 3
    assert all(trial["undisturbed"] == trial["disturbed"] for trial in answer["trials"])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_drill_leaves_nothing_either(tmp_path: Path) -> None:
    at = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command("doctor", "--drill"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=at)
    assert wait_for(lambda: list(tmp_path.glob("dryfit-drill-*/disturbed/ledger.jsonl")), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
