"""A configuration trained once more: the trial itself where rows and seed are its own, whatever interrupts it."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.choices import Metric
from dryfit.settings.errors import DataError
from dryfit.settings.training_messages import Analysis, FinalRequest, FinalResult, TrainResult
from dryfit.tasks.analysis import analyse
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.saved_models import load
from dryfit.tasks.scored_rows import RowFacts, read_rows, write_facts
from dryfit.training import trial_jobs as final_module
from dryfit.training.batches import read_tokens, trial_task
from dryfit.training.model import trial_parts
from dryfit.training.run import FixedLength
from dryfit.training.trainer import run_training
from dryfit.training.trial_jobs import final, train


def with_test_rows(folder: Path, *, alone: bool = False) -> dict[str, str]:
    data = tiny.data(folder / "data")
    data["test"] = str(tiny.write_jsonl(folder / "data" / "test.jsonl", tiny.rows(30, start=500)))
    for path in data.values() if alone else ():
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        tiny.write_jsonl(Path(path), [{key: row[key] for key in ("id", "text", "label")} for row in rows])
    return data


class Again:
    """A trial that has run, and runs of its configuration beside it."""

    def __init__(self, folder: Path, *, architecture: str = "bert", alone: bool = False, **tables: Any) -> None:
        encoder = tiny.model(folder / "model", architecture)
        self.trial = trials.Trial(folder, encoder=encoder, data=with_test_rows(folder, alone=alone), **tables)
        self.folder = folder

    def request(self, name: str, *, last_step: int | None = None, checkpoint_every_s: float = 1e9) -> FinalRequest:
        own = self.folder / name
        training = trials.alone(self.trial.request(checkpoint_every_s=checkpoint_every_s), own)
        training = training.model_copy(update={"load_report": str(self.folder / f"{name}-load.json")})
        model = str(own / "model")
        return FinalRequest(training=training, last_step=last_step, model_dir=model, attempt_model_dir=model, study="s")

    def run(self, name: str, *, last_step: int | None = None, stop_at: int | None = None) -> FinalResult | TrainResult:
        request = self.request(name, last_step=last_step, checkpoint_every_s=1e-9)
        return final(request, trials.ScriptedChannel(self.folder / name, stop_at=stop_at))


def scores(result: FinalResult | TrainResult) -> FinalResult:
    assert isinstance(result, FinalResult)
    training = result.training.model_copy(update={"peak_rss_bytes": None})
    return result.model_copy(update={"training": training, "model_dir": None})


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Again:
    return Again(tmp_path_factory.mktemp("again"))


def test_the_same_seed_and_rows_are_the_trial_itself_bit_for_bit(again: Again) -> None:
    before, channel = again.trial.run()
    once_more = again.run("plain")
    assert isinstance(once_more, FinalResult)
    assert once_more.training.value == before.value
    assert once_more.validation == channel.points[before.best or 0].metrics
    stored = load_file(again.folder / "plain" / "model" / "model.safetensors")
    assert stored.keys() == again.trial.best_weights().keys()
    assert all(torch.equal(stored[name], value) for name, value in again.trial.best_weights().items())
    assert once_more.rows == {"train": 40, "validation": 20, "test": 30, "trained": 40}


def test_train_and_validation_together_end_with_the_step_that_was_asked_for(again: Again) -> None:
    done = again.run("both", last_step=4)
    assert isinstance(done, FinalResult)
    assert (done.step, done.training.steps) == (4, 4)
    assert (done.validation, done.training.value) == (None, None)
    assert done.rows["trained"] == 60
    assert done.test is not None


@pytest.mark.slow
def test_a_fixed_length_keeps_the_schedule_and_the_batches(tmp_path: Path) -> None:
    """On the same rows, all steps of a fixed length are all steps of the trial."""
    again = Again(tmp_path, sched={"name": "cosine", "warmup_ratio": 0.3})

    def weights(length: FixedLength | None) -> dict[str, torch.Tensor]:
        body, channel = again.request("x").training, trials.ScriptedChannel(tmp_path / "channel")
        tokens = read_tokens(body, trial_task(body.config), only=(TRAIN, VALIDATION))
        parts = trial_parts(body, channel, tokens, length=length)
        assert run_training(parts, None).step == (10 if length is None else length.last_step)
        return parts.model.state_dict()

    plain, fixed, short = weights(None), weights(FixedLength(10, 10)), weights(FixedLength(10, 9))
    assert all(torch.equal(plain[name], fixed[name]) for name in plain)
    assert not all(torch.equal(plain[name], short[name]) for name in plain)


def test_a_search_never_reads_test(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    body = again.request("y").training
    read: list[tuple[str, ...]] = []
    monkeypatch.setattr("dryfit.training.trial_jobs.read_tokens", lambda *_, only, fold: read.append(only) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(body, trials.ScriptedChannel(again.folder / "channel"))
    assert read == [("train", "validation")]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("architecture", "head", "alone"),
    [
        ("bert", {"pooling": "mean"}, False),
        ("roberta", {"pooling": "max", "layers": 2, "hidden": 16, "activation": "tanh"}, True),
        ("distilbert", {"pooling": "cls", "layers": 1, "hidden": 24, "activation": "relu"}, False),
        ("xlnet", {"pooling": "cls", "layers": 1, "hidden": 16}, False),
        ("bert", {"pooling": "attention", "layers": 1, "hidden": 16, "activation": "silu"}, True),
    ],
)
def test_plain_python_opens_the_folder_as_its_readme_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    head: dict[str, Any],
    alone: bool,
) -> None:
    again = Again(tmp_path, architecture=architecture, alone=alone, head=head, train={"epochs": 1})
    again.run("final")
    folder = tmp_path / "final" / "model"
    assert (folder / "example.py").read_text(encoding="utf-8") in (folder / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(folder)
    capsys.readouterr()
    runpy.run_path("example.py")
    printed = json.loads(capsys.readouterr().out)
    texts = ("A text.",) if alone else ("a criterion", "A text.")
    tokens = load_tokenizer(FolderSource(str(folder)))(*texts, return_tensors="pt")
    with torch.inference_mode():
        expected = load(folder)(**tokens).softmax(dim=-1)
    torch.testing.assert_close(torch.tensor(printed), expected, rtol=0, atol=1e-6)


def test_the_card_says_what_a_stranger_needs(again: Again) -> None:
    again.run("card")
    text = (again.folder / "card" / "model" / "README.md").read_text(encoding="utf-8")
    request = again.request("z")
    for said in (
        f"fingerprint `{request.training.config.data_fingerprint}`",
        "seed 3",
        '[optim]\nname = "adamw"\nlr = 0.002',
        "| accuracy |",
        "Test was read once",
        f"torch {torch.__version__.split('+')[0]}",
    ):
        assert said in text, said
    assert str(again.folder) not in text  # paths are nobody's business


def test_the_test_split_is_looked_at_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(tmp_path)
    read_tokens = final_module.read_tokens

    def damaged(*args: Any, **kwargs: Any) -> Any:
        tokens = read_tokens(*args, **kwargs)
        tokens.splits["test"].ids_T[0] = 10_000
        return tokens

    monkeypatch.setattr(final_module, "read_tokens", damaged)
    monkeypatch.setattr(final_module, "run_training", lambda *_: pytest.fail("trained before it was looked at"))
    with pytest.raises(DataError, match="token id 10000 in 1 row: ") as caught:
        again.run("split")
    assert caught.value.doing == "checking the tokens of the split test"


def test_what_the_model_does_well_and_badly_stands_in_its_folder(again: Again) -> None:
    request = again.request("analysed")
    facts = {row["id"]: RowFacts(row["group"], row["criterion"]) for row in tiny.rows(30, start=500)}
    write_facts(again.folder / "facts.gz", facts)
    request = request.model_copy(update={"facts_file": str(again.folder / "facts.gz")})
    done = final(request, trials.ScriptedChannel(again.folder / "analysed"))
    assert isinstance(done, FinalResult) and done.analysis is not None and done.test is not None
    analysis = done.analysis
    assert (analysis.split, analysis.rows, analysis.notes) == ("test", 30, ())
    assert analysis.overall.scores[Metric.F1_MACRO] == pytest.approx(done.test[Metric.F1_MACRO], rel=1e-5)
    assert {one.name for one in analysis.criteria} == set(tiny.CRITERIA)
    file = read_rows(Path(request.training.scored_dir) / "test.jsonl.gz")
    assert file.metrics == pytest.approx(done.test) and len(file.rows) == 30
    assert analyse(file.rows, facts, split="test", metric=request.training.config.metric) == analysis
    folder = again.folder / "analysed" / "model"
    assert Analysis.model_validate_json((folder / "analysis.json").read_bytes()) == analysis
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "## What it does well and badly\n\nOn the 30 rows of test." in card
    assert "| class | precision | recall | F1 | rows |\n|---|--:|--:|--:|--:|\n| 0 |" in card
    assert analysis.classes is not None and f"| {analysis.classes.worst[0].id} | " in card


def test_without_test_rows_validation_is_analysed_and_where_it_was_trained_on_nothing_is(tmp_path: Path) -> None:
    again = Again(tmp_path, train={"epochs": 1})
    again.trial.data = again.trial.data.model_copy(update={"test": None})
    done = again.run("plain")
    assert isinstance(done, FinalResult) and done.test is None and done.validation is not None
    assert done.analysis is not None and (done.analysis.split, done.analysis.rows) == ("validation", 20)
    assert done.analysis.overall.scores["accuracy"] == pytest.approx(done.validation["accuracy"], rel=1e-5)
    assert "no such file" in done.analysis.notes[0]
    both = again.run("both", last_step=2)
    assert isinstance(both, FinalResult) and both.analysis is None
    assert not (tmp_path / "both" / "model" / "analysis.json").exists()
