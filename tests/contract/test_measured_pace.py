"""``runtime.parallel`` and ``train.precision`` "auto" of a study that trains: measured once, kept, and said."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dryfit.ledger.events import GenerationBegan
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.node import available_cores
from dryfit.settings.choices import Precision
from dryfit.settings.jobs import JOBS
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import Job
from dryfit.study import pace
from dryfit.study.pace import (
    MeasuredWay,
    Way,
    _Kept,  # pyright: ignore[reportPrivateUsage]
    divisions,
    recorded_precision,
)
from study_runs import events_of, fold, run_here, write_study

AUTO = ("--set", "runtime.parallel=auto", "--set", "train.precision=auto")
MEASURED = "measured on this machine"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRYFIT_CACHE", str(folder))
    return folder / "pace"


def study_of(folder: Path) -> Path:
    file = write_study(folder, trials=2)
    text = file.read_text(encoding="utf-8").replace("threads = 1\n", "")
    file.write_text(text, encoding="utf-8")
    return file


def kept(cache: Path) -> dict[Way, float]:
    (file,) = cache.iterdir()
    read = _Kept.model_validate_json(file.read_bytes())
    return {one.way: one.step_s for one in read.measured}


def precisions(folder: Path) -> list[str]:
    """The number formats of all attempts, as their processes were told."""
    requests = sorted(folder.glob("trials/*/attempt-*/request.json"))
    return [json.loads(one.read_bytes())["body"]["config"]["settings"]["train"]["precision"] for one in requests]


def test_a_study_measures_once_and_keeps_its_format(tmp_path: Path, cache: Path) -> None:
    file = study_of(tmp_path / "study")
    done = run_here("tune", file, *AUTO)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(MEASURED) == 1
    found, state = kept(cache), fold(file.parent)
    cores = available_cores()
    assert {(way.threads, way.side_by_side) for way in found if way.precision is Precision.FP32} >= {(cores, 1)}
    decided = recorded_precision(state)
    assert decided in (Precision.FP32, Precision.BF16)
    (began,) = (one for one in events_of(file.parent) if isinstance(one, GenerationBegan))
    assert (began.comparability.own or {})["train.precision"] == decided
    assert precisions(file.parent) == [decided] * 2
    frozen = StudyLayout(file.parent).frozen_file.read_text(encoding="utf-8")
    assert f'precision = "{decided}"' in frozen and 'parallel = "auto"' in frozen and "threads" not in frozen
    # The study is done: nothing is started for another run of it, nor for its file beside others.
    assert run_here("tune", file, *AUTO, "--json").returncode == 0

    # Whatever would be measured now, what trials have been run with stays.
    other = Precision.FP32 if decided is Precision.BF16 else Precision.BF16
    (kept_file,) = cache.iterdir()
    ways = [MeasuredWay(way=way, step_s=0.001 if way.precision is other else 9.0) for way in found]
    kept_file.write_text(_Kept(measured=tuple(ways)).model_dump_json(), encoding="utf-8")
    again = run_here("resume", file.parent, "--trials", "3", *AUTO)
    assert again.returncode == 0, again.stderr
    assert precisions(file.parent) == [decided] * 3
    assert fold(file.parent).generation.number == 1 and recorded_precision(fold(file.parent)) is decided


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = study_of(tmp_path / "study")
    assert run_here("tune", file, *AUTO, "--trials", "1").returncode == 0
    cores = available_cores()
    ways = [
        MeasuredWay(way=Way(threads=threads, side_by_side=together, precision=Precision.FP32), step_s=9.0**together)
        for threads, together in divisions(cores, 0, 2)
    ]
    in_bf16 = Way(threads=cores, side_by_side=1, precision=Precision.BF16)
    (kept_file,) = cache.iterdir()
    known = _Kept(measured=(*ways, MeasuredWay(way=in_bf16, step_s=0.5)))
    kept_file.write_text(known.model_dump_json(), encoding="utf-8")
    monkeypatch.setattr(pace, "_measure", _must_not)
    monkeypatch.setattr(pace, "has_bf16", lambda *_, **__: True)
    for left in ("ledger.jsonl", "frozen.toml"):
        (file.parent / left).unlink()
    shutil.rmtree(file.parent / "trials")
    done = run_here("tune", file, *AUTO)
    assert done.returncode == 0, done.stderr
    assert f"1 trial(s) at once, {cores} thread(s) each, bf16" in done.stderr
    assert precisions(file.parent) == ["bf16"] * 2


def _must_not(*_: object) -> None:
    raise AssertionError("it was measured again")


def test_where_nothing_can_be_measured_the_study_goes_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(JOBS, Job.PACE, JOBS[Job.PACE]._replace(entry="pace_dies:dies"))
    file = study_of(tmp_path / "study")
    done = run_here("tune", file, *AUTO)
    assert done.returncode == 0, done.stderr
    assert "how trials run fastest could not be measured" in done.stderr
    assert fold(file.parent).counts[Outcome.COMPLETE] == 2
    assert precisions(file.parent) == ["fp32"] * 2
    assert not cache.exists()


def test_numbers_in_the_file_measure_nothing(tmp_path: Path, cache: Path) -> None:
    file = study_of(tmp_path / "study")
    done = run_here("tune", file, "--trials", "1")
    assert done.returncode == 0, done.stderr
    assert MEASURED not in done.stderr and not cache.exists()
    # A study that was begun with a format keeps it under "auto".
    again = run_here("tune", file, *AUTO)
    assert again.returncode == 0, again.stderr
    assert precisions(file.parent) == ["fp32"] * 2 and fold(file.parent).generation.number == 1


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        (["train.precision=auto", 'space.train.precision=["bf16","fp32"]'], "is auto and searched"),
        (['space.train.precision=["auto","fp32"]'], "is auto and searched"),
        (["train.precision=auto", "study.task=causal-lm", "study.metric=loss"], "steps of a language model"),
        (["lora.compute=auto", "study.task=causal-lm", "study.metric=loss"], "lora.compute"),
    ],
)
def test_where_auto_is_refused(sets: Sequence[str], found: str, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('[data]\ntrain = "a.jsonl"\nvalidation = "b.jsonl"\n', encoding="utf-8")
    done = run_here("tune", file, *(word for one in sets for word in ("--set", one)))
    assert done.returncode == 2
    assert found in done.stderr
