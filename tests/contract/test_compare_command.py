"""``dryfit compare``: the best trials over seeds, by rows that runs keep; none is trained twice, test is not read."""

import json
import shutil
from pathlib import Path

import pytest

import tiny
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.attempt import read_result
from dryfit.settings.training_messages import FinalResult
from dryfit.study.functions import compare, train_top, tune
from dryfit.study.next_step import End
from dryfit.tasks.scored_rows import read_rows
from study_runs import fold, objective_study, run, run_here, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three trials; the data has a test split."""
    folder = tmp_path_factory.mktemp("studies") / "study"
    file = write_study(folder, trials=3)
    tiny.write_jsonl(folder / "data" / "test.jsonl", tiny.rows(24, seed=3, start=400))
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('validation.jsonl"\n', 'validation.jsonl"\ntest = "data/test.jsonl"\n'), "utf-8")
    assert tune(file).end is End.DONE
    return folder


@pytest.mark.slow
def test_the_best_trials_are_compared_and_the_report_says_how(study: Path) -> None:
    layout, state = StudyLayout(study), fold(study)
    best, second = (trial.number for trial in state.ranked[:2])
    ledger = layout.ledger.read_bytes()
    train_top(study, top=1, seeds=2)
    done = run("compare", study, "--top", "2", "--seeds", "2", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert layout.comparison.read_text(encoding="utf-8") == done.stdout
    assert (told["best"], [one["trial"] for one in told["trials"]]) == (best, [best, second])
    seed_runs = [seed_run for trial in told["trials"] for seed_run in trial["runs"]]
    folders = [seed_run["folder"] for seed_run in seed_runs]
    kinds = [(best, "scores"), (second, "scores-no-test")]  # those of train_top are not trained again
    assert folders == [f"trial-{number:04d}-seed-{seed}-{kind}" for number, kind in kinds for seed in (0, 1)]
    for seed_run in seed_runs:
        folder, paths = seed_run["folder"], layout.final(seed_run["folder"])
        ended = read_result(paths.attempt(1))
        assert ended is not None and isinstance(ended.answer, FinalResult)
        assert (ended.answer.test is None) == folder.endswith("no-test")
        rows = read_rows(paths.scored / "validation.jsonl.gz")
        assert rows.of == 32 and rows.metrics[told["metric"]] == pytest.approx(seed_run["value"])
    (one,) = told["differences"]
    means = [trial["validation"]["mean"] for trial in told["trials"]]
    assert one["value"] == pytest.approx(means[0] - means[1]) and one["low"] <= one["value"] <= one["high"]
    assert (one["seeds"], one["rows"], told["grouped"]) == ([0, 1], 32, True)
    assert layout.ledger.read_bytes() == ledger

    shutil.rmtree(layout.final(folders[3]).folder)  # as if it had been stopped before its last run
    again = compare(study, top=2, seeds=2)
    assert again.comparison is not None and again.status == 0
    assert again.comparison.model_dump(by_alias=True, mode="json") == told
    assert all(layout.final(folder).attempts == 1 for folder in folders)
    printed = run_here("compare", study, "--top", "2", "--seeds", "2")
    assert printed.returncode == 0 and printed.stdout.startswith(told["judgement"][0] + "\n")
    for command in ("status", "show"):
        assert told["judgement"][0] in run_here(command, study).stdout
    assert json.loads(run_here("status", study, "--json").stdout)["comparison"] == told
    assert run_here("report", study).returncode == 0
    page = layout.report.read_text(encoding="utf-8")
    assert "the best 2 were trained again with 2 seeds each" in page and "Whether the best trials really differ" in page


@pytest.mark.parametrize(
    ("top", "seeds", "said"),
    [("1", "2", "2 to 20 trials"), ("21", "2", "2 to 20 trials"), ("2", "1", "how much seeds differ")],
)
def test_what_compares_nothing_is_refused(study: Path, top: str, seeds: str, said: str) -> None:
    done = run_here("compare", study, "--top", top, "--seeds", seeds)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.slow
def test_fewer_trials_and_functions_of_the_users_own_are_refused(tmp_path: Path) -> None:
    one = write_study(tmp_path / "one", trials=1)
    assert tune(one).end is End.DONE
    done = run_here("compare", tmp_path / "one", "--top", "2", "--seeds", "2")
    assert done.returncode == 2 and "only one trial is complete" in done.stderr
    own = tmp_path / "own"
    own.mkdir()
    (own / "study.toml").write_text(objective_study("quadratic", study="trials = 1\nseed = 5"), encoding="utf-8")
    assert tune(own).end is End.DONE
    for words in (("compare", own, "--top", "2", "--seeds", "2"), ("train", own)):
        refused = run_here(*words)
        assert refused.returncode == 2 and "dryfit trains no model there" in refused.stderr
