"""``dryfit plan`` as a user meets it: what is printed and kept, exit statuses. The planner is a stand-in but once."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import plan_stand_in
import tiny
from dryfit.settings.jobs import JOBS
from dryfit.settings.wire import Job
from golden import Golden
from study_runs import command, run_here, write_study

Plan = Callable[..., subprocess.CompletedProcess[str]]
SUPPORT = Path(plan_stand_in.__file__).parent
START = (
    "from dryfit.settings.jobs import JOBS, Job\n"
    "JOBS[Job.PLAN] = JOBS[Job.PLAN]._replace(entry='plan_stand_in:plan')\n"
    "from dryfit.documents.command_line import main\n"
    "main()"
)
LARGE = ("--set", "model.name=bert-large-uncased", "--set", "train.batch_size=16", "--set", "train.max_length=512")
STAND_IN = JOBS[Job.PLAN]._replace(entry="plan_stand_in:plan")
KEYS = (
    "schema verdict peak_allocated_bytes peak_reserved_bytes min_cap_bytes overhead_bytes margin_bytes required_bytes "
    "capacity_bytes fragmented_bytes by_category by_phase peak_at worst_batch execution fallbacks eval_batches ladder "
    "shortfall_bytes reasons confidence torch planner_s"
).split()


def paths() -> str:
    """Where children find the stand-in."""
    return os.pathsep.join([str(SUPPORT), *(path for path in sys.path if path)])


def plan(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``dryfit plan`` with the stand-in, whose processes alone are others than this one."""
    known = {"PYTHONPATH": paths(), **environment}
    with patch.dict(os.environ, known), patch.dict(JOBS, {Job.PLAN: STAND_IN}):
        return run_here("plan", *words)


def plan_apart(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", START, "plan", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths()},
        check=False,
    )


def answer(*words: str | Path, status: int = 0, plan: Plan = plan) -> dict[str, Any]:
    """The one object that ``plan --json`` prints."""
    done = plan(*words, "--json")
    assert done.returncode == status, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOBS, Job.PLAN, STAND_IN)
    monkeypatch.setenv("PYTHONPATH", paths())


def test_one_object_without_a_study_file() -> None:
    found = answer(*LARGE, "--set", "train.precision=bf16", "--device", "24GiB", plan=plan_apart)
    assert set(KEYS) <= set(found)
    assert found["schema"] == 1
    assert found["verdict"] == "fits"
    assert found["capacity_bytes"] == 24 * 2**30
    assert found["execution"] == {
        "micro_batch": 16,
        "accumulation": 1,
        "eval_batch": None,
        "checkpointing": False,
        "chunked_loss": None,
        "offload_activations": False,
        "optimizer_impl": "auto",
        "offload_optimizer": False,
        "tp": None,
    }
    assert found["peak_at"]["module"] == "encoder.layer.23.attention"
    assert found["worst_batch"]["from_data"] is False


def test_what_is_asked_of_execution_is_kept() -> None:
    found = answer(*LARGE, "--set", "execution.micro_batch=4", "--set", "execution.checkpointing=true", "--device=8GiB")
    assert found["verdict"] == "fits"
    assert found["execution"]["micro_batch"] == 4
    assert found["execution"]["accumulation"] == 4
    assert found["execution"]["checkpointing"] is True
    free = answer(*LARGE, "--device", "8GiB")
    assert free["verdict"] == "fits_with"
    assert len(free["ladder"]) == 1
    assert len(answer(*LARGE, "--device", "8GiB", "--ladder")["ladder"]) == 5
    limited = answer(*LARGE, "--set", "execution.memory_limit=8GiB", "--device", "24GiB")
    assert limited["capacity_bytes"] == 8 * 2**30
    assert limited["execution"] == free["execution"]


def test_a_refusal_has_numbers_and_says_what_would_fit(golden: Golden) -> None:
    words = (*LARGE, "--set", "execution.micro_batch=16", "--device", "3GiB")
    found = answer(*words, status=1)
    assert found["verdict"] == "refused"
    assert found["execution"] is None
    assert found["shortfall_bytes"] == found["required_bytes"] - found["capacity_bytes"] > 0
    done = plan(*words, NO_COLOR="1")
    assert done.returncode == 1
    golden("plan", done.stdout.rpartition("uncalibrated")[0], done.stderr)


def test_tables_are_plain_where_nobody_looks(golden: Golden) -> None:
    done = plan(*LARGE, "--device", "8GiB")
    assert done.returncode == 0, done.stderr
    golden("plan", done.stdout.rpartition("uncalibrated")[0], done.stderr)
    assert not plan(*LARGE, "--device", "8GiB", "--quiet").stderr


def test_a_planner_that_dies_leaves_the_memory_unknown() -> None:
    found = answer("--set", "model.name=crash", "--device", "24GiB", status=1)
    assert found["verdict"] == "unknown"
    assert found["required_bytes"] is None
    assert any("log.txt" in reason for reason in found["reasons"])
    assert found["torch"]


def test_bad_input_ends_with_2(golden: Golden) -> None:
    cases = [
        ["--set", "train.batch_size=0", "--device", "24GiB"],
        ["--set", "train.batch_size=4", "--set", "execution.micro_batch=8", "--device", "24GiB"],
        ["--set", "execution.memory_limit=0GiB", "--device", "24GiB"],
        ["--device", "0GiB"],
        ["--device", "rtx409"],
        ["--set", "model.name=bert-bse-uncased", "--device", "24GiB"],
        ["--preset", "supermx", "--device", "24GiB"],
        ["nowhere.toml", "--preset", "supermax", "--device", "24GiB"],
        ["--preset", "smoke", "--task", "joint", "--device", "24GiB"],
        ["--task", "joint", "--device", "24GiB"],
        ["nowhere.toml", "--device", "24GiB"],
        ["--preset", "supermax", "--ladder", "--device", "24GiB"],
        ["--set", "lora.r=8", "--device", "24GiB"],
        ["--set", "study.task=causal-lm", "--set", "head.layers=1", "--device", "24GiB"],
    ]
    every = [plan(*case) for case in cases]
    assert [(done.returncode, done.stdout) for done in every] == [(2, "")] * len(cases)
    golden("plan", [done.stderr for done in every])


def test_the_machines_gpu_is_taken_where_none_is_named(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in *"-i 1") echo "1, GPU-x, NVIDIA X, 24564, 500, 8.9";; *) exit 6;; esac\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = plan("--json", PATH=path, CUDA_VISIBLE_DEVICES="1,0")
    assert done.returncode == 0, done.stderr
    device = json.loads(done.stdout)["device"]
    assert (device["name"], device["capacity_bytes"], device["capability"]) == ("NVIDIA X", 24064 * 2**20, [8, 9])
    for visible in ("", "7"):
        none = plan("--json", PATH=path, CUDA_VISIBLE_DEVICES=visible)
        assert none.returncode == 2
        assert "a100-80" in none.stderr


def space_study(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "study.toml"
    file.write_text(
        '[space]\n"model.name" = ["bert-base-uncased", "bert-large-uncased"]\n"train.max_length" = [128, 512]\n'
        '"train.batch_size" = [8, 16]\n"optim.lr" = {low = 1e-5, high = 1e-4}\n',
        encoding="utf-8",
    )
    return file


@pytest.mark.slow
def test_a_space_is_a_table(tmp_path: Path, golden: Golden) -> None:
    study = space_study(tmp_path)
    done = plan(study, "--device", "5GiB")
    assert done.returncode == 0, done.stderr
    golden("plan", done.stdout.rpartition(", ")[0], sorted(done.stderr.splitlines()))
    found = answer(study, "--device", "5GiB")
    assert len(found["cells"]) == 16
    assert found["varied"] == ["model.name", "train.max_length", "train.batch_size"]
    assert found["cells"][0]["plan"]["verdict"] == "fits"
    assert {cell["checkpointing"] for cell in found["cells"]} == {False, True}


@pytest.mark.slow
def test_a_space_of_which_nothing_fits_ends_with_1_and_a_crash_spoils_one_model(tmp_path: Path) -> None:
    study = space_study(tmp_path)
    words = ("--set", 'space.model.name=["bert-base-uncased", "crash"]', "--set", "space.train.max_length=[512]")
    done = plan(study, *words, "--set", "execution.micro_batch=8", "--device", "2GiB")
    assert done.returncode == 1, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[1] == ["bert-base-uncased", "512", "needs 4.5 GiB", "needs 4.5 GiB"]
    assert rows[2] == ["crash", "512", "unknown", "unknown"]
    assert any(row[0].startswith("unknown: the process ended") for row in rows)


@pytest.mark.slow
def test_lengths_of_the_data_are_used_where_it_can_be_resolved(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    found = answer(study, "--device", "24GiB")
    assert {cell["plan"]["worst_batch"]["from_data"] for cell in found["cells"]} == {True}
    assert (tmp_path / "study/cache").is_dir()
    assert not (tmp_path / "study/ledger.jsonl").exists()
    hub = answer(study, "--set", "model.name=bert-base-uncased", "--device", "24GiB")
    assert {cell["plan"]["worst_batch"]["from_data"] for cell in hub["cells"]} == {False}
    (tmp_path / "study/data/train.jsonl").write_text("{}\n", encoding="utf-8")
    broken = plan(study, "--device", "24GiB")
    assert broken.returncode == 2
    assert "[DATA]" in broken.stderr


@pytest.mark.slow
def test_hours_of_trainings_follow_epochs_and_rows(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")

    def hours(*words: str) -> list[float | None]:
        done = run_here("plan", study, "--json", "--quiet", *words)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["cost"] is None) == (found["hours"] is None)
        return [each and each["estimate"] for each in (cell["plan"]["hours"] for cell in found["cells"])]

    two = hours("--device", "rtx4090", "--price", "2USD", "--set", "train.epochs=2")
    six = hours("--device", "rtx4090", "--price", "2USD", "--set", "train.epochs=6")
    assert two and all(one is not None and other == pytest.approx(3 * one) for one, other in zip(two, six, strict=True))
    assert set(hours("--device", "24GiB")) == {None}  # no card: no rates


@pytest.mark.slow
def test_the_planner_itself_answers_for_a_folder_that_holds_just_a_config(tmp_path: Path) -> None:
    tiny.model(tmp_path / "whole")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "whole/config.json").read_bytes())
    words = ("plan", "--set", f"model.name={folder}", "--set", "train.max_length=64", "--device", "24GiB", "--json")
    environment = {**os.environ, "DRYFIT_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def ask(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*words, *more), capture_output=True, text=True, env=environment, check=False)

    done = ask("--set", "execution.micro_batch=4")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "fits"
    assert (found["execution"]["micro_batch"], found["execution"]["accumulation"]) == (4, 4)
    assert found["required_bytes"] == found["min_cap_bytes"] + found["overhead_bytes"] + found["margin_bytes"]
    assert found["peak_allocated_bytes"] == sum(found["by_category"].values()) == max(found["by_phase"].values())
    assert list((tmp_path / "cache/traces").iterdir())
    # Nothing fits beside a CUDA context: every change is priced, those of the experiment on the smallest plan found.
    refused = ask("--device", "512MiB")
    assert refused.returncode == 1, refused.stderr
    ladder = json.loads(refused.stdout)["ladder"]
    assert {fallback["effect"] for fallback in ladder} == {"exact", "numerics", "semantics"}
    assert "8-bit optimizer state" in {fallback["change"] for fallback in ladder}
    assert not any(fallback["fits"] for fallback in ladder)
    long = ask("--set", "train.max_length=512")
    assert long.returncode == 2
    assert "no more positions" in long.stderr
    misspelt = ask("--set", "model.name=bert-large-uncasd")
    assert misspelt.returncode == 2
    assert "bert-large-uncased" in misspelt.stderr
