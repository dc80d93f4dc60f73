"""``dryfit doctor`` and ``tune --dry-run`` as a user meets them: findings, fixes, exit statuses, and no trace."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dryfit
import sick
from study_runs import DEADLINE_S, command, run, run_here, write_study

SICK: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "shard": (sick.shard_missing, "weights", "model-00002-of-00002.safetensors"),
    "padding": (sick.without_padding, "tokens", "the tokenizer has no padding token"),
    "embeddings": (sick.few_embeddings, "tokens", "token id"),
    "positions": (sick.few_positions, "tokens", "train.max_length is 48"),
    "nan": (sick.nan_weights, "step", "loss nan"),
}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a study but its token cache."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): path.read_bytes() for path in files if "cache" not in path.relative_to(folder).parts}


def checks_of(stdout: str) -> list[dict[str, Any]]:
    found = json.loads(stdout)
    assert found["schema"] == 1
    assert found["counts"] == {
        status: sum(one["status"] == status for one in found["checks"]) for status in ("pass", "warn", "fail")
    }
    assert found["healthy"] == (found["counts"]["fail"] == 0)
    assert all(one["fix"] for one in found["checks"] if one["status"] != "pass")
    return found["checks"]


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One study whose space names a good model and five bad ones; what the doctor says of it."""
    folder = tmp_path_factory.mktemp("ward")
    file = write_study(folder / "study")
    models = [str(make(folder / name)) for name, (make, _, _) in SICK.items()]
    models.append(str(folder / "study" / "model"))
    text = file.read_text(encoding="utf-8")
    text = text.replace("[space]\n", f'[space]\n"model.name" = {json.dumps(models)}\n')
    file.write_text(text, encoding="utf-8")
    before = contents(folder / "study")
    done = subprocess.run(
        command("doctor", file, "--json"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))},
    )
    assert done.returncode == 1, done.stderr
    assert contents(folder / "study") == before
    return folder, checks_of(done.stdout)


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_bad_model_is_told_with_its_fix(ward: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    folder, checks = ward
    _, check, said = SICK[name]
    failures = [one for one in checks if one["about"] == f"model {folder / name}" and one["status"] == "fail"]
    assert failures, checks
    assert any(one["check"].startswith(check) and said in one["found"] for one in failures), failures


@pytest.mark.slow
def test_bad_models_hide_no_good_one_and_no_machine(ward: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, checks = ward
    good = [one for one in checks if one["about"] == f"model {folder / 'study' / 'model'}"]
    assert {one["check"] for one in good} >= {"batches", "step", "time", "points"}
    assert {one["status"] for one in good} == {"pass"}
    (step,) = (one for one in good if one["check"] == "step")
    assert "22,658 of 22,658 parameters have finite gradients" in step["found"]
    machine = {one["check"]: one for one in checks if one["about"] == "machine"}
    assert set(machine) >= {"Python", "libraries", "cores", "memory", "fork server", "fresh interpreter", "GPU"}
    assert machine["fork server"]["status"] == machine["fresh interpreter"]["status"] == "pass"
    data = {one["check"]: one["found"] for one in checks if one["about"] == "data"}
    assert data["train"] == "64 rows; by label 0: 32, 1: 32"


def test_a_broken_study_file_is_a_finding_with_its_line(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    text = study.read_text(encoding="utf-8").replace("batch_size = 8", "batchsize = 8")
    study.write_text(text, encoding="utf-8")
    line = text.splitlines().index("batchsize = 8") + 1
    done = run_here("tune", study, "--dry-run")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"line {line}" in done.stdout
    assert "fix: " in done.stdout
    found = dryfit.doctor(study, machine=False)
    assert [str(finding.status) for finding in found.findings] == ["fail"]


def test_no_such_study_is_an_error(tmp_path: Path) -> None:
    for words in (("doctor", tmp_path / "nowhere.toml"), ("tune", tmp_path, "--dry-run")):
        done = run_here(*words)
        assert done.returncode == 2
        assert "dryfit init" in done.stderr


@pytest.mark.slow
def test_a_dry_run_names_the_bad_row_and_runs_no_trial(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    rows = tmp_path / "study/data/train.jsonl"
    lines = rows.read_text(encoding="utf-8").splitlines()
    rows.write_text("\n".join([*lines[:4], json.dumps(json.loads(lines[4]) | {"label": 7}), *lines[5:]]))
    before = contents(tmp_path / "study")
    done = run("tune", study, "--dry-run")
    assert done.returncode == 1, done.stderr
    (failure,) = (line for line in done.stdout.splitlines() if line.startswith("FAIL"))
    assert failure.startswith("FAIL  data: rows: ")
    assert "train.jsonl, line 5: label is 7" in failure
    assert "; allowed: an integer from 0 to 1 (data.num_labels = 2)" in done.stdout and "data.labels" in done.stdout
    assert "machine:" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ready: ")
    assert contents(tmp_path / "study") == before


@pytest.mark.slow
def test_a_process_that_died_has_left_its_log(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    words = ("--set", f"model.name={sick.aborting(tmp_path / 'aborting')}", "--set", "model.trust_remote_code=true")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    asked = command("doctor", study, "--json", *words)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    (death,) = (one for one in checks_of(done.stdout) if one["status"] == "fail")
    assert (death["about"], death["check"]) == (f"model {tmp_path / 'aborting'}", "rehearsal")
    assert "SIGABRT" in death["found"]
    log = Path(death["fix"].removeprefix("see "))
    assert "dryfit batch-check child" in log.read_text(encoding="utf-8")
