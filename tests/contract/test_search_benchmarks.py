# pyright: reportMissingImports=false
"""The benchmarks of whole searches: what they run, that they go on, and what their tables say."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tiny

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_alternatives  # noqa: E402
import bench_pruners  # noqa: E402
import plain_optuna  # noqa: E402
from alternatives_table import Result, table  # noqa: E402
from bench_alternatives import Work  # noqa: E402
from bench_quality import CASES  # noqa: E402
from bench_side_by_side import Way, search  # noqa: E402
from plain_trials import Search  # noqa: E402

from dryfit.config.schema import PrunerName, SearchSettings  # noqa: E402
from dryfit.core.settings.trial import MetricPoint  # noqa: E402
from study_runs import DEADLINE_S  # noqa: E402

WORK = Work(6, 320, 240, "minilm", "train.jsonl", "validation.jsonl", "test.jsonl")


def result(arm: str, seed: int = 1, *, wall_s: float = 100, rss: float = 1000, **changes: Any) -> Result:
    seen = changes.pop("validations", [(10.0, 0.5), (wall_s - 1, 0.6)])
    return Result(arm, seed, asdict(WORK), 0.0, wall_s, 2 * wall_s, rss, rss / 2, 0, seen)


def test_a_score_never_reached_is_a_miss_and_no_fast_search() -> None:
    said = table([result("a"), result("c", wall_s=20, validations=[(5.0, 0.59)])])
    assert "1 of 1 missed" in said and "over (a)'s: inf; at most 0.5: missed" in said


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def run(arm: str, seed: int, folder: Path) -> Result:
        assert folder.is_dir() and not list(folder.iterdir())
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append((arm, seed))
        return result(arm, seed)

    with pytest.raises(KeyboardInterrupt):
        bench_alternatives.run_all(tmp_path, "ac", 3, WORK, run)
    assert ran == [("a", 1), ("c", 1), ("c", 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.json", "c-1.json", "c-2.json"]
    ran = []
    found = bench_alternatives.run_all(tmp_path, "ac", 2, WORK, run)
    assert ran == [("a", 2)] and found[0] == result("a", 1) and len(found) == 4
    with pytest.raises(SystemExit, match="of other work"):
        bench_alternatives.run_all(tmp_path, "ac", 2, Work(**asdict(WORK) | {"rows": 800}), run)


def test_the_loop_around_optuna_trains_what_the_starter_file_says(tmp_path: Path) -> None:
    tiny.model(tmp_path / "model", max_position_embeddings=128)
    files = tiny.data(tmp_path)
    text = bench_alternatives.starter_text(tmp_path / "starter")
    work = Work(2, 32, 16, str(tmp_path / "model"), files["train"], files["validation"], "")
    asked = bench_alternatives.search_of(text, work, 3, tmp_path)
    (tmp_path / "search.json").write_text(json.dumps(asked), encoding="utf-8")
    made = Search.read(str(tmp_path / "search.json"))
    assert (made.epochs, made.max_length, made.reports, made.seed) == (2, 96, 4, 3)
    study = plain_optuna.search_all(made)
    assert [set(trial.params) for trial in study.trials] == 2 * [set(bench_alternatives.SHARED_KEYS)]
    lines = (tmp_path / "validations.jsonl").read_text(encoding="utf-8").splitlines()
    seen = [json.loads(line) for line in lines]
    assert [one["trial"] for one in seen] == [0, 0, 0, 0, 1, 1, 1, 1]  # too few trials for the pruner
    assert study.best_value == max(one["value"] for one in seen)
    assert all(one["at_s"] <= other["at_s"] for one, other in itertools.pairwise(seen))


@pytest.mark.nightly
def test_whole_searches_are_measured_and_kept(tmp_path: Path) -> None:
    tiny.model(tmp_path / "model", max_position_embeddings=128)
    script = ROOT / "benchmarks" / "bench_alternatives.py"
    words = ["--arms", "a,d", "--trials", "2", "--rows", "64", "--validation-rows", "32", "--contracts", ""]
    command = [sys.executable, str(script), *words, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = {arm: Result.read(tmp_path / "out" / f"{arm}-1.json") for arm in "ad"}
    for one in found.values():
        assert len(one.validations) == 8 and all(0 < at_s < one.wall_s for at_s, _ in one.validations)
        assert 0 < one.peak_pss_mib <= one.peak_rss_mib and one.cpu_s > 1 and not one.killed
    assert "(d) the same" in done.stdout


_BURNS = "import time; began = time.process_time()\nwhile time.process_time() < began + 0.5: pass"
_LEAVES = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {_BURNS!r}])"


def test_processes_left_behind_are_waited_for_and_counted(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from process_tree import run_tree
cost = run_tree([sys.executable, "-S", "-c", {_LEAVES!r}], Path({str(tmp_path / "log")!r}), os.environ, 0.05)
assert cost.cpu_s >= 0.5 and not cost.killed and cost.peak_rss_mib >= cost.peak_pss_mib > 0, cost
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


def curve(*values: float) -> tuple[MetricPoint, ...]:
    return tuple(MetricPoint(n, n + 1, (n + 1) / 2, value, {}) for n, value in enumerate(values))


GOOD, BAD = curve(0.5, 0.6, 0.7, 0.8), curve(0.5, 0.4, 0.4, 0.4)
NONE = SearchSettings(pruner=PrunerName.NONE)
MEDIAN = SearchSettings(pruner=PrunerName.MEDIAN, pruner_startup_trials=2)


LEFT = {1: 0.8 - 0.5, 2: math.inf, 5: math.inf}
"""What is missing when half is trained: the good trial is the last of three; side by side none is complete by then."""


@pytest.mark.parametrize("beside", LEFT)
def test_without_a_pruner_nothing_is_saved(beside: int) -> None:
    found = bench_pruners.replay([GOOD, BAD, BAD], [2, 1, 0], NONE, beside)
    assert found == bench_pruners.Replayed(saved=0.0, kept_best=True, loss=0.0, loss_at_half=LEFT[beside], pruned=0)


def test_a_pruned_trial_takes_no_further_epoch() -> None:
    curves = [GOOD, GOOD, BAD, BAD]
    found = bench_pruners.replay(curves, [0, 1, 2, 3], MEDIAN, beside=1)
    assert found == bench_pruners.Replayed(saved=2 * 2 / 16, kept_best=True, loss=0.0, loss_at_half=0.0, pruned=2)
    late = bench_pruners.replay(curves, [2, 3, 0, 1], MEDIAN, beside=1)
    assert late.pruned == 0 and late.kept_best
    beside = bench_pruners.replay(curves, [0, 1, 2, 3], MEDIAN, beside=4)
    assert beside.saved < found.saved  # who runs beside the first ones has none to be compared with


def test_a_trial_that_is_trained_to_its_end_is_not_pruned() -> None:
    fallen = curve(*(point.value for point in GOOD[:-1]), 0.0)
    asha = SearchSettings(pruner=PrunerName.ASHA, warmup_reports=len(GOOD) - 1)
    found = bench_pruners.replay([GOOD, GOOD, fallen], [0, 1, 2], asha, beside=1)
    assert found.pruned == 0 and found.saved == 0


def test_what_a_pruner_loses_is_told() -> None:
    late = curve(0.1, 0.1, 0.1, 0.9)
    found = bench_pruners.replay([GOOD, GOOD, late], [0, 1, 2], MEDIAN, beside=1)
    assert not found.kept_best and found.loss == pytest.approx(0.1)


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "curves.csv"
    file.write_text("trial,report,step,epoch,value,params\n4,0,3,0.5,0.25,a=1\n4,1,6,1,0.5,a=1\n7,0,3,0.5,0.75,a=2\n")
    first, second = bench_pruners.read_curves(file)
    assert [(one.n, one.step, one.epoch, one.value) for one in first] == [(0, 3, 0.5, 0.25), (1, 6, 1.0, 0.5)]
    assert bench_pruners.score(second) == 0.75


def test_one_at_a_time_is_side_by_side_of_one() -> None:
    case = CASES["Branin"]
    alone = search(case, Way.ALONE, 5, trials=14, beside=8)
    assert search(case, Way.BESIDE, 5, trials=14, beside=1) == alone
    beside, blind = (search(case, way, 5, trials=30, beside=8) for way in (Way.BESIDE, Way.BLIND))
    assert len(set(beside)) == len(set(blind)) == 30
    assert beside != blind  # what runs is seen by one of them
