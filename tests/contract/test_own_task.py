"""A task of the user's own is trained, resumed, saved and used as dryfit's are; what is wrong with it is said."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from dryfit.settings.errors import ConfigError, LoadError, NonFiniteError
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_key import memory_key
from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanRequest
from dryfit.settings.tables import TrialSettings
from dryfit.settings.training_messages import FinalRequest, FinalResult, PredictRequest, ResolveRequest, StopReason
from dryfit.tasks.saved_models import load
from dryfit.training.plan_job import plan
from dryfit.training.prediction import predict
from dryfit.training.resolve import resolve
from dryfit.training.trial_jobs import final
from own_tasks import EXAMPLE, example_file, score_trial, wrong_file
from trials import ScriptedChannel


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("encoder"))


def task_in(folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"{example_file(folder, name)}:ScoreTask"


def test_it_learns_and_goes_on_bit_for_bit(tmp_path: Path, encoder: Path) -> None:
    task = task_in(tmp_path, "contract_learns")
    whole = score_trial(tmp_path / "whole", encoder, task, train={"epochs": 4})
    result, channel = whole.run()
    values = [point.value for point in channel.points]
    assert values[-1] < values[0] and set(channel.points[0].metrics) == {"spearman", "mse"}
    cut = score_trial(tmp_path / "cut", encoder, task, train={"epochs": 4})
    assert cut.run(stop_at=6)[0].stopped_by is StopReason.REQUEST
    again, _ = cut.run()
    assert again == result
    ours, theirs = cut.best_weights(), whole.best_weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_its_own_key_changes_what_is_learned(tmp_path: Path, encoder: Path) -> None:
    task = task_in(tmp_path, "contract_key")
    values = [
        score_trial(tmp_path / str(delta), encoder, task, own={"delta": delta}).run()[0].value for delta in (0.01, 1.0)
    ]
    assert values[0] != values[1]


def test_a_saved_model_says_its_class_and_is_used_where_that_is_found(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = score_trial(tmp_path, encoder, task_in(tmp_path, "contract_saved"), own={"delta": 0.5})
    model = str(tmp_path / "model")
    body = FinalRequest(training=trial.request(), model_dir=model, attempt_model_dir=model, study="scores")
    done = final(body, ScriptedChannel(tmp_path / "final"))
    assert isinstance(done, FinalResult) and done.test is not None and set(done.test) == {"spearman", "mse"}
    said = json.loads((tmp_path / "model" / "dryfit.json").read_text(encoding="utf-8"))
    assert said["task"] == said["input"]["task"] == "contract_saved.py:ScoreTask"
    assert said["input"]["settings"]["own"] == {"delta": 0.5} and str(tmp_path) not in json.dumps(said)
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "contract_saved.py:ScoreTask" in card and "text-classification" not in card and str(tmp_path) not in card

    monkeypatch.chdir(tmp_path.parent)  # the file lies above the model's folder
    with pytest.raises(LoadError, match="trust=True"):
        load(tmp_path / "model")
    model = load(tmp_path / "model", trust=True)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())

    asked = PredictRequest(
        model_dir=str(tmp_path / "model"),
        source=str(tmp_path / "rows.jsonl"),
        out=str(tmp_path / "out.jsonl"),
        temporary=str(tmp_path / "out.tmp"),
        batch_rows=8,
        device="cpu",
        threads=1,
    )
    with pytest.raises(LoadError, match="trust=True"):
        predict(asked, ScriptedChannel(tmp_path / "untrusted"))
    predict(asked.model_copy(update={"trust": True}), ScriptedChannel(tmp_path / "predict"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [f"r{index}" for index in range(60)]
    assert all(isinstance(line["score"], float) for line in lines)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Wide", ConfigError, r"Wide.keep gave \(.*as before"),
        ("Flat", ConfigError, r"Flat.keep gave \(.*one K for all batches"),
        ("Forgetful", ConfigError, "Forgetful.metrics gave mse, and not spearman.*metric_names says: spearman, mse"),
        ("Sick", NonFiniteError, "loss nan, gradient norm nan"),
        ("Raising", RuntimeError, "no licence"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(
    tmp_path: Path, encoder: Path, name: str, error: type[Exception], message: str
) -> None:
    file = wrong_file(tmp_path, f"contract_wrong_{name.lower()}")
    trial = score_trial(tmp_path / "trial", encoder, f"{file}:{name}", execution={"micro_batch": 1})
    trial.metric = "spearman"
    with pytest.raises(error, match=f"(?s){message}"):
        trial.run()


def test_before_any_trial_the_class_is_asked_for_the_metric_and_for_what_it_reads(
    tmp_path: Path, encoder: Path
) -> None:
    trial = score_trial(tmp_path, encoder, task_in(tmp_path, "contract_asked"))

    def asked(**changes: Any) -> ResolveRequest:
        tables = {"model": {"name": str(encoder)}, **changes.pop("tables", {})}
        settings = TrialSettings.model_validate_json(json.dumps(tables))
        body = {"task": trial.task, "data": trial.data, "settings": settings, "pairs": (), "device": "cpu"}
        return ResolveRequest(**body, cache_dir=str(tmp_path / "cache"), **changes)

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            resolve(asked(**changes), ScriptedChannel(tmp_path / "resolve"))

    refused("accuracy of ScoreTask.*spearman, mse", metrics=("accuracy",))
    refused("loss.* does not read it", searched={"loss.name": ("focal",)})
    refused("there is no key own.delt", tables={"own": {"delt": 1.0}})
    found = resolve(asked(metrics=("mse",)), ScriptedChannel(tmp_path / "resolve"))
    assert set(found.revisions) == {"contract_asked.py:ScoreTask"}


def test_its_memory_is_planned_and_another_source_is_another_plan(tmp_path: Path, encoder: Path) -> None:
    settings = TrialSettings.model_validate_json(
        json.dumps({"model": {"name": str(encoder)}, "train": {"max_length": 32}})
    )
    subject = PlanSubject(task=task_in(tmp_path, "contract_planned"), settings=settings)
    body = PlanRequest(
        subjects=(subject,),
        device=DeviceSpec(name="invented", capacity_bytes=8 * 2**30),
        execution=ExecutionSettings(),
        trace_dir=str(tmp_path / "traces"),
    )
    result = plan(body, ScriptedChannel(tmp_path / "plan"))
    assert result.answers[0].verdict is VerdictKind.FITS, result
    sources = {memory_key(subject.model_copy(update={"source": source})) for source in ("one", "two")}
    assert len(sources) == 2


def test_tokens_are_made_anew_for_another_source(tmp_path: Path, encoder: Path) -> None:
    trial = score_trial(tmp_path, encoder, task_in(tmp_path, "contract_tokens_one"))
    trial.resolve()
    other = tmp_path / "contract_tokens_two.py"
    other.write_text(EXAMPLE.read_text(encoding="utf-8").replace("float(row", "2 * float(row"), encoding="utf-8")
    trial.task = f"{other}:ScoreTask"
    trial.resolve()
    assert len(list((tmp_path / "cache").glob("*/tokens.json"))) == 2


def test_the_documents_show_the_example_as_it_is() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "own-task.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"<!-- file: score.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert body == EXAMPLE.read_text(encoding="utf-8")
    assert len(body.splitlines()) <= 60
