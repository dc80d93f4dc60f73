"""What a training needs with given parameters: as rehearsed, kept, and asked again where anything has changed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dryfit
from dryfit.settings.errors import ConfigError, ObjectiveError
from dryfit.study import estimates

pytestmark = pytest.mark.heavy

EXAMPLES = Path(__file__).parents[2] / "examples" / "estimates"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "code"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "train.py").write_bytes((EXAMPLES / "train.py").read_bytes())
    return place


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    run, seen = estimates.run_prepared, []

    def counted(prepared):
        seen.append(prepared)
        return run(prepared)

    monkeypatch.setattr(estimates, "run_prepared", counted)
    return seen


def train(width: int, rows: int) -> None:
    spec = importlib.util.spec_from_file_location("trained", EXAMPLES / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.train(width, rows)


def test_it_is_what_a_rehearsal_says_and_is_kept(folder, rehearsals):
    params = {"width": 1000, "rows": 64}
    rehearsed = dryfit.rehearse("train.py", device="rtx4090", arguments=["--width", "1000", "--rows", "64"])
    told = dryfit.estimate("train.py", params, device="rtx4090")
    assert told.fits and told.memory == rehearsed.memory and len(rehearsals) == 1
    again = dryfit.estimate("train.py", params, device="rtx4090")
    assert again == told and len(rehearsals) == 1
    assert dryfit.fits("train.py --width {width} --rows {rows}", params, device="rtx4090")
    assert len(rehearsals) == 1  # the same command
    assert not dryfit.fits("train.py", {**params, "width": 3_000_000}, device="2GiB")
    assert len(rehearsals) == 2
    (folder / "train.py").write_text((folder / "train.py").read_text().replace("range(3)", "range(4)"))
    assert dryfit.fits("train.py", params, device="rtx4090") and len(rehearsals) == 3
    kept = next((folder.parent / "cache" / "dryfit" / "estimates").iterdir())
    kept.write_text("{")
    for name in ("width", "rows"):  # a damaged file is asked for anew, whichever it is
        assert dryfit.estimate("train.py", params, device="rtx4090").memory is not None, name


def test_a_function_gets_the_parameters_by_name(folder, rehearsals):
    told = dryfit.estimate(train, {"width": 1000, "rows": 64}, device="rtx4090")
    other = dryfit.estimate(train, {"width": 2000, "rows": 64}, device="rtx4090")
    assert told.memory is not None and other.memory is not None, told.traceback
    assert other.memory.by_category["weights"] == pytest.approx(2 * told.memory.by_category["weights"], rel=0.01)
    assert dryfit.estimate(train, {"width": 2000, "rows": 64}, device="rtx4090") == other and len(rehearsals) == 2


def test_what_failed_is_not_kept(folder, rehearsals):
    for _ in range(2):
        assert not dryfit.fits("train.py", {"rows": 64}, device="rtx4090")  # --width is missing
    assert len(rehearsals) == 2


@pytest.mark.parametrize(
    ("target", "params", "words"),
    [
        (
            "train.py",
            {"a": 1, "b": True, "c": False, "d": None, "e": "x y"},
            ["train.py", "--a", "1", "--b", "--e", "x y"],
        ),
        ("train.py --lr {lr}", {"lr": 0.1, "rows": 2}, ["train.py", "--lr", "0.1", "--rows", "2"]),
        ("-m train model.size={size}", {"size": 4}, ["-m", "train", "model.size=4"]),
        (Path("my train.py"), {}, ["my train.py"]),
    ],
)
def test_parameters_become_arguments(target, params, words):
    assert estimates._words(target, params) == words


@pytest.mark.parametrize("name", ["", "--rows", "a b", "{a}", "a=b"])
def test_a_name_that_no_argument_has_is_refused(name):
    with pytest.raises(ConfigError, match="a parameter"):
        dryfit.estimate("train.py", {name: 1}, device="rtx4090")


def test_what_cannot_be_estimated_is_refused(folder):
    with pytest.raises(ConfigError, match="there is no file"):
        dryfit.estimate("nowhere.py", device="rtx4090")
    with pytest.raises(ConfigError, match="no parameter for {rows}"):
        dryfit.estimate("train.py --width {width} --rows {rows}", {"width": 3}, device="rtx4090")
    with pytest.raises(ConfigError, match="No closing quotation"):
        dryfit.estimate("train.py --name 'a", device="rtx4090")
    with pytest.raises(ConfigError, match="no device"):
        dryfit.estimate("train.py", device="rtx9999")
    with pytest.raises(ConfigError, match="python"):
        dryfit.estimate(train, device="rtx4090", python=sys.executable)
    with pytest.raises(ObjectiveError):
        dryfit.estimate(lambda: None, device="rtx4090")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "package", "said"),
    [
        ("optuna_search", "optuna", "GiB"),
        pytest.param("ray_search", "ray", "trained 100000 0.042 of a GPU", marks=pytest.mark.nightly),
        ("lightning_batch_size", "lightning", "batch size 32768"),
    ],
)
def test_the_examples_work_with_the_real_libraries(example, package, said, tmp_path):
    pytest.importorskip(package)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(EXAMPLES / f"{example}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    if example == "optuna_search":
        rows = [line.split() for line in done.stdout.splitlines() if line.endswith("GiB")]
        assert len(rows) == 4 and {"COMPLETE", "PRUNED"} == {row[0] for row in rows}
        assert all((float(row[2]) > 0) == (row[0] == "PRUNED") for row in rows)
