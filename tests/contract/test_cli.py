"""The command line as a user meets it: exit statuses, what is printed where, errors that say what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.settings.errors import MachineError
from dryfit.settings.version import refuse_unsupported_platform
from study_runs import run, run_here, write_study


def test_help_names_every_command_and_nothing_that_does_not_work_yet() -> None:
    done = run("--help")
    assert done.returncode == 0
    named = [line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines() if line.strip()]
    assert named == [
        "init",
        "import",
        "doctor",
        "bug-report",
        "rehearse",
        "check",
        "plan",
        "calibrate",
        "tune",
        "resume",
        "status",
        "show",
        "agent",
        "nodes",
        "report",
        "export",
        "stop",
        "train",
        "compare",
        "predict",
        "load",
        "push",
        "schema",
    ]
    for name in named:
        assert run_here(name, "--help").returncode == 0


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dryfit.documents.command_line import app\n"
        "heavy = {'torch', 'transformers', 'optuna', 'numpy', 'rich.live', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "words", [["nonsense"], ["tune"], ["tune", "--trials", "0", "x"], ["init", "--task", "x", "y"]]
)
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    done = run_here(*words)
    assert done.returncode == 2
    assert done.stderr


def test_init_writes_a_study_once(tmp_path: Path) -> None:
    done = run_here("init", tmp_path / "new", "--task", "criteria")
    assert done.returncode == 0
    written = [Path(line) for line in done.stdout.splitlines()]
    assert {path.name for path in written} == {"study.toml", "train.jsonl", "validation.jsonl", "test.jsonl"}
    assert all(path.stat().st_size > 0 for path in written)
    again = run_here("init", tmp_path / "new")
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert run_here("init", tmp_path / "new", "--force").returncode == 0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lrr=1", "did you mean lr?"),
        ("train.epochs=0", "an integer from 1"),
        ("space.optm.lr=[1e-3]", "did you mean optim.lr?"),
        ("space.execution.micro_batch=[1, 2]", "no key that can be searched"),
        ("space.optim.lr={low = 1e-5, high = 99}", "at most 10"),
    ],
)
def test_bad_settings_end_with_2_and_start_nothing(tmp_path: Path, override: str, said: str) -> None:
    study = write_study(tmp_path / "study")
    done = run_here("tune", study, "--set", override)
    assert done.returncode == 2
    assert said in done.stderr
    assert "--set" in done.stderr
    assert "[CONFIG]" in done.stderr
    assert not (tmp_path / "study" / "ledger.jsonl").exists()


def test_an_unknown_key_is_named_with_its_line(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    text = study.read_text(encoding="utf-8").replace("batch_size = 8", "batchsize = 8")
    study.write_text(text, encoding="utf-8")
    line = text.splitlines().index("batchsize = 8") + 1
    done = run("tune", study)
    assert done.returncode == 2
    assert f"line {line}" in done.stderr
    assert "batch_size" in done.stderr


@pytest.mark.slow
def test_bad_data_ends_with_2_before_any_trial(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    rows = tmp_path / "study/data/train.jsonl"
    lines = rows.read_text(encoding="utf-8").splitlines()
    broken = json.loads(lines[4]) | {"label": 7}
    rows.write_text("\n".join([*lines[:4], json.dumps(broken), *lines[5:]]), encoding="utf-8")
    done = run("tune", study)
    assert done.returncode == 2
    assert "[DATA]" in done.stderr
    assert "train.jsonl" in done.stderr
    assert "5" in done.stderr
    assert "7" in done.stderr
    assert not (tmp_path / "study/trials").exists()
    rows.write_text("\n".join(lines), encoding="utf-8")
    assert run("tune", study, "--trials", "1", "--quiet").returncode == 0


_LONG, _TIMES = "9" * 5000, 100_000


def test_a_folder_without_a_study_is_said_to_be_one(tmp_path: Path) -> None:
    for words in (
        ["status", tmp_path],
        ["show", tmp_path],
        ["resume", tmp_path],
        ["stop", tmp_path],
        ["tune", tmp_path],
    ):
        done = run_here(*words)
        assert done.returncode == 2, words
        assert "dryfit" in done.stderr or "ledger" in done.stderr


def test_the_schema_is_json_and_knows_the_tables() -> None:
    schema = json.loads(run_here("schema").stdout)
    assert {"study", "data", "model", "train", "optim", "space", "search", "runtime"} <= set(schema["properties"])


def test_windows_is_refused_with_a_sentence() -> None:
    with pytest.raises(MachineError, match="WSL"):
        refuse_unsupported_platform("win32")
    refuse_unsupported_platform("linux")
    refuse_unsupported_platform("darwin")
