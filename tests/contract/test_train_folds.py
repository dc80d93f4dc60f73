"""A trial of several folds is what as many plain trials are, whatever stops it on its way."""

import copy
import hashlib
import json
import math
import statistics
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import own_tasks
import spans
import tiny
import tiny_lms
import trials
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.plan_messages import StudyTokens
from dryfit.settings.tables import DataSettings
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.trial import MetricPoint, fold_spreads
from dryfit.settings.wire import Progress
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.own import make_task
from dryfit.tasks.prepare import Fold, checked_splits, fold_splits, study_folds
from dryfit.training import plan_job
from dryfit.training import trainer as steward
from dryfit.training.checkpoint import newest_good
from dryfit.training.model import build_model
from dryfit.training.run import fold_seed
from dryfit.training.trainer import Evaluated
from dryfit.training.trial_jobs import train

TABLES = {
    "train": {"evals_per_epoch": 2, "group_by_length": True},
    "regularization": {"dropout": 0.2, "attention_dropout": 0.1},
    "head": {"dropout": 0.3, "layers": 1},
}
FOLDS = 3
STEPS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def in_folds(folder: Path, model: Path, *, folds: int = FOLDS, groups: int = 30, **tables: Any) -> trials.Trial:
    """A trial of some forty rows and the rest of sixty; of thirty groups each fold has as many rows and ten steps."""
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for row in tiny.rows(60, groups=groups):
        rows[int(row["group"][1:]) < 20].append(row)
    data = {
        "train": str(tiny.write_jsonl(folder / "data" / "train.jsonl", rows[True])),
        "validation": str(tiny.write_jsonl(folder / "data" / "validation.jsonl", rows[False])),
        "folds": folds,
    }
    return trials.Trial(folder, encoder=model, data=data, **(TABLES | tables))


def plain_trials(folder: Path, trial: trials.Trial) -> list[trials.Trial]:
    """For each fold a plain trial on files that somebody wrote by hand, with the fold's own seed."""
    data = trial.data
    splits = checked_splits(make_task(trial.task, TaskContext(trial.settings, data)))
    sources = [Path(source) for source in (data.train, data.validation, data.file) if source is not None]
    lines = [json.loads(line) for source in sources for line in source.read_text("utf-8").splitlines()]
    by_id = {line["id"]: line for line in lines}
    found: list[trials.Trial] = []
    for fold in study_folds(data):
        place = folder / f"plain-{fold.number}"
        rows = fold_splits(splits, fold, data)
        written = {
            name: str(tiny.write_jsonl(place / f"{name}.jsonl", [by_id[row.id] for row in rows[name]])) for name in rows
        }
        one = copy.copy(trial)
        one.folder = place
        kept = data.model_dump(exclude={"file", "folds", "validation_fraction", "test_fraction", "split_seed"})
        one.data = DataSettings(**kept | written)
        one.seed = fold_seed(trial.seed, fold.number)
        found.append(one)
    return found


def same_as_plain(folder: Path, trial: trials.Trial) -> tuple[TrainResult, list[TrainResult], list[MetricPoint]]:
    """Run both, and hold one against the other."""
    result, channel = trial.run()
    plain = [one.run() for one in plain_trials(folder, trial)]
    results = [found for found, _ in plain]
    assert [fold.value for fold in result.folds] == [one.value for one in results]
    assert [fold.steps for fold in result.folds] == [one.steps for one in results]
    values = [one.value or 0.0 for one in results]
    assert result.value == sum(values) / len(values)
    assert result.steps == sum(one.steps for one in results)
    # Each validation is that of the plain trial, to the last bit.
    assert [point.metrics for point in channel.points] == [p.metrics for _, heard in plain for p in heard.points]
    best = [heard.points[one.best or 0] for one, heard in plain]
    assert [fold.best_step for fold in result.folds] == [point.step for point in best]
    assert not (trial.folder / "best").exists()
    return result, results, channel.points


@pytest.mark.slow
def test_its_value_is_the_mean_of_plain_trials_on_the_same_rows(tmp_path: Path, model: Path) -> None:
    trial = in_folds(tmp_path / "folds", model, groups=25)
    result, results, points = same_as_plain(tmp_path, trial)
    assert len({fold.steps for fold in result.folds}) > 1, "groups make folds of other sizes"
    assert len({fold.value for fold in result.folds}) == FOLDS
    assert fold_spreads(result.folds) == pytest.approx((statistics.stdev([one.value or 0.0 for one in results]),))
    assert (result.stopped_by, result.best) == (None, None)
    # Numbers and steps count over the whole trial; the last of each fold says what the trial has come to.
    assert [point.n for point in points] == list(range(4 * FOLDS))
    assert [point.fold for point in points] == [1] * 4 + [2] * 4 + [3] * 4
    assert [point.step for point in points] == sorted(point.step for point in points)
    values = [fold.value for fold in result.folds]
    assert [points[n].value for n in (3, 7, 11)] == [values[0], (values[0] + values[1]) / 2, result.value]
    assert points[5].value == (values[0] + points[5].metrics["loss"]) / 2


def of_task(name: str, folder: Path, model: Path) -> trials.Trial:
    """A trial of two folds of one of the tasks."""
    short = {"epochs": 1, "evals_per_epoch": 2, "max_length": 28}
    windows = {"doc_stride": 6, "negatives": 1.5}
    match name:
        case "several labels":
            data = tiny.multi_label_data(folder / "data")
            return trials.Trial(folder, encoder=model, data=data | {"folds": 2}, train=short)
        case "evidence":
            data, study = spans.evidence_data(folder / "data"), {"task": name, "metric": "token_f1"}
            return trials.Trial(folder, encoder=model, data=data | {"folds": 2}, study=study, train=short, span=windows)
        case "share" | "joint":
            data, study = spans.both_data(folder / "data"), {"task": name, "metric": "combined"}
            return trials.Trial(folder, encoder=model, data=data | {"folds": 2}, study=study, train=short, span=windows)
        case "causal-lm":
            data = tiny.data(folder / "data", train=24, validation=8)
            decoder = tiny_lms.causal_lm(folder / "qwen2", attention_dropout=0.1)
            lm = {"format": "both", "max_new_tokens": 3, "generate_rows": 2, "packing": True}
            return trials.Trial(
                folder,
                encoder=decoder,
                data=data | {"folds": 2},
                study={"task": name},
                train={"epochs": 1, "max_length": 160},
                lm=lm,
                lora={"r": 4},
            )
        case _:
            file = own_tasks.example_file(folder, "own_in_folds")
            trial = own_tasks.score_trial(folder, model, f"{file}:ScoreTask", train={"epochs": 1})
            trial.data = trial.data.model_copy(update={"folds": 2})
            return trial


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        "causal-lm",  # its training rows share sequences, and its validation rows do not
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("several labels", "evidence", "share", "joint", "a task of one's own")
        ),
    ],
)
def test_every_task_has_folds(tmp_path: Path, model: Path, name: str) -> None:
    (tmp_path / "folds").mkdir()
    same_as_plain(tmp_path, of_task(name, tmp_path / "folds", model))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path):
    result, channel = in_folds(tmp_path_factory.mktemp("whole"), model).run()
    assert result.steps == STEPS
    return result, channel.points


@pytest.mark.slow
def test_stopped_again_and_again(tmp_path: Path, model: Path, undisturbed) -> None:
    result, points = undisturbed
    trial = in_folds(tmp_path, model)
    reported: list[MetricPoint] = []
    for _ in range(STEPS):
        found, channel = trial.run(stop_at=4)
        reported += channel.points
        if found.stopped_by is None:
            break
        assert len(list((tmp_path / "checkpoints").iterdir())) <= 2
    assert (reported, found) == (points, result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "every_s", "from_step", "heard"),
    [
        (6, 1e9, 10, 4),  # within the second fold, with no checkpoint: it begins anew, and the first one is kept
        pytest.param(6, 1e-9, 15, 6, marks=pytest.mark.nightly),  # behind a checkpoint of its own
    ],
)
def test_killed_in_its_second_fold(
    tmp_path: Path, model: Path, undisturbed, n: int, every_s: float, from_step: int, heard: int
) -> None:
    result, points = undisturbed
    trial = in_folds(tmp_path, model)
    trials.killed(trial, lambda point: point.n == n, checkpoint_every_s=every_s)
    found = newest_good(trial.layout.files_of(1).checkpoints, trial.fingerprint)
    assert found is not None
    assert (found.step, found.fold_step, found.folds) == (from_step, from_step - 10, result.folds[:1])
    second, after = trial.run()
    assert after.points == points[heard:]
    assert second == result


@pytest.mark.slow
def test_a_verdict_ends_it_in_its_fold(tmp_path: Path, model: Path, undisturbed) -> None:
    result, points = undisturbed
    found, channel = in_folds(tmp_path, model).run(verdict=lambda point: point.n < 5)
    assert (found.stopped_by, found.steps, found.value) == (StopReason.VERDICT, 15, None)
    assert found.folds == result.folds[:1]
    assert channel.points == points[:6]
    assert channel.lasts == []  # the last report of a fold is not the trial's: other folds are still to be paid for


@pytest.mark.slow
def test_each_fold_stops_early_by_itself(tmp_path: Path, model: Path) -> None:
    """As plain trials do; and its last report has the fold's last number, wherever it stopped."""
    tables = {"train": TABLES["train"] | {"epochs": 4, "early_stopping": 2}, "optim": {"lr": 5e-3}}
    trial = in_folds(tmp_path / "folds", model, **tables)
    result, results, points = same_as_plain(tmp_path, trial)
    assert result.stopped_by is StopReason.EARLY_STOPPING
    assert [fold.stopped_early for fold in result.folds] == [one.stopped_by is not None for one in results]
    assert any(fold.stopped_early for fold in result.folds)
    lasts = [max(point.n for point in points if point.fold == number) for number in (1, 2, 3)]
    assert lasts == [7, 15, 23]
    assert len({point.n for point in points}) == len(points)
    values = [fold.value for fold in result.folds]
    by_number = {point.n: point.value for point in points}
    assert [by_number[n] for n in lasts] == [sum(values[: k + 1]) / (k + 1) for k in range(3)]
    stopped = in_folds(tmp_path / "parts", model, **tables)
    step = result.folds[0].steps + 3
    _, before = stopped.run(stop_at=step)
    again, after = stopped.run()
    assert again == result and before.points + after.points == points
    assert before.lasts + after.lasts == [23]
    totals = [m.total_steps for m in before.messages() + after.messages() if isinstance(m, Progress)]
    assert totals[0] == 3 * result.folds[0].schedule_steps
    assert totals[-1] == result.steps + result.folds[2].schedule_steps - result.folds[2].steps


@pytest.mark.slow
def test_folds_are_numbered_as_the_study_asks(tmp_path: Path, model: Path) -> None:
    """Other trials of the study have more epochs: the same number is the same fold."""
    trial = in_folds(tmp_path, model, folds=2)
    channel = trials.ScriptedChannel(tmp_path / "attempt")
    train(trial.request().model_copy(update={"fold_reports": 10}), channel)
    assert [point.n for point in channel.points] == [0, 1, 2, 9, 10, 11, 12, 19]


@pytest.mark.slow
def test_a_fold_without_a_number_is_the_end(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean can be none any more."""
    real, calls = steward.evaluate, []

    def broken(*args: Any, **kwargs: Any) -> Evaluated:
        calls.append(None)
        found = real(*args, **kwargs)
        return found if len(calls) <= 4 else Evaluated({**found.metrics, "loss": float("nan")}, found.fitted)

    monkeypatch.setattr(steward, "evaluate", broken)
    result, channel = in_folds(tmp_path, model).run()
    assert (result.value, result.stopped_by, result.steps, len(result.folds)) == (None, None, 20, 1)
    assert len(channel.points) == 8
    assert all(math.isnan(point.value) for point in channel.points[4:])


def test_too_few_groups_are_refused_before_any_trial(tmp_path: Path, model: Path) -> None:
    rows = tiny.rows(12, groups=3)
    data = {
        "train": str(tiny.write_jsonl(tmp_path / "train.jsonl", [row for row in rows if row["group"] != "g2"])),
        "validation": str(tiny.write_jsonl(tmp_path / "val.jsonl", [row for row in rows if row["group"] == "g2"])),
        "folds": 4,
    }
    with pytest.raises(ConfigError) as caught:
        trials.Trial(tmp_path, encoder=model, data=data).resolve()
    assert caught.value.doing == "dividing 12 rows of train and validation into folds by group"
    assert caught.value.found == "3 groups for data.folds = 4"
    assert caught.value.allowed == "at most 3 folds"
    assert "data.folds" in caught.value.hint


def test_a_fold_that_cannot_be_learned_is_named(tmp_path: Path, model: Path) -> None:
    """Only one group has class 1: without it nobody learns that class."""
    rows = [row | {"label": int(row["group"] == "g0")} for row in tiny.rows(20, groups=5)]
    data = {
        "train": str(tiny.write_jsonl(tmp_path / "train.jsonl", [row for row in rows if row["group"] != "g4"])),
        "validation": str(tiny.write_jsonl(tmp_path / "val.jsonl", [row for row in rows if row["group"] == "g4"])),
    }
    trials.Trial(tmp_path, encoder=model, data=data).resolve()
    with pytest.raises(DataError, match=r"fold \d of 5: preparing the split train: no row has label 1") as caught:
        trials.Trial(tmp_path, encoder=model, data=data | {"folds": 5}).resolve()
    assert "data.folds" in caught.value.hint


def test_a_key_that_is_not_set_changes_no_fingerprint(tmp_path: Path, model: Path) -> None:
    """Checkpoints of before are gone on from; with folds they are another trial's."""
    config = trials.small(tmp_path, encoder=model).request().config
    newer = {"lora": {"double_quant", "compute"}, "train": {"early_stopping_min_delta"}}
    later = {"data": {"folds", "labels"}, "settings": newer}
    text = config.model_dump_json(exclude={"number": True, "params": True, **later})
    assert config.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:16]
    in_two = config.model_copy(update={"data": config.data.model_copy(update={"folds": 2})})
    assert in_two.fingerprint != config.fingerprint


def test_nothing_of_a_fold_is_left_when_the_next_begins(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is that of one model, though the Trainer and its callbacks refer to each other."""
    made: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    def building(*args: Any) -> Any:
        alive.append(sum(one() is not None for one in made))
        built = build_model(*args)
        made.append(weakref.ref(built))
        return built

    monkeypatch.setattr("dryfit.training.model.build_model", building)
    in_folds(tmp_path, model, folds=2).run()
    assert alive == [0, 0]


@pytest.mark.parametrize(
    ("of_folds", "expected"),
    [
        ([(4, 5, 9), (4, 5, 9)], [4, 5, 9]),  # each row has its tokens, whatever it stands beside
        ([(7, 9), (4, 14)], [4, 7, 9, 14]),  # rows share sequences, other ones in each fold
    ],
)
def test_memory_is_planned_for_the_sequences_of_every_fold(
    monkeypatch: pytest.MonkeyPatch, of_folds: list[tuple[int, ...]], expected: list[int]
) -> None:
    def prepared(task: Any, *, fold: Fold | None, **_: Any) -> Any:
        lengths = torch.tensor((4, 5, 9) if fold is None else of_folds[fold.number - 1])
        return SimpleNamespace(
            splits={
                "train": SimpleNamespace(lengths_R=lengths[:1]),
                "validation": SimpleNamespace(lengths_R=lengths[1:]),
            }
        )

    monkeypatch.setattr(plan_job, "prepared_tokens", prepared)
    for folds, wanted in ((2, expected), (1, [4, 5, 9])):
        tokens = StudyTokens(data=DataSettings(folds=folds), cache_dir="", data_fingerprint="")
        assert sorted(plan_job.row_lengths(tokens, cast(Task, None))) == wanted
