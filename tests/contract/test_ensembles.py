"""Several models as one, from their trainings to a folder that predicts: beside the mean that is computed by hand."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss

import encoders
import spans
import tiny
import trials
from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.jobs.analysis import Analysis
from dryfit.core.jobs.ensemble import EnsembleMember, EnsembleRequest, EnsembleResult
from dryfit.core.jobs.train import FinalRequest, FinalResult
from dryfit.jobs import prediction as predicting
from dryfit.jobs.ensemble import ensemble
from dryfit.jobs.final import final
from dryfit.meta.files.source import FolderSource
from dryfit.meta.loading.configs import load_tokenizer
from dryfit.tasks.rows.characters import word_spans
from dryfit.tasks.saved.load_check import folder_health
from dryfit.tasks.saved.model_input import read_model_input
from dryfit.tasks.saved.saved_ensemble import Ensemble, read_ensemble
from dryfit.tasks.saved.saved_model import load
from dryfit.tasks.spans.span_metrics import span_metrics
from dryfit.tasks.tokens.windows import Ragged

Line = dict[str, Any]
read = trials.read_lines

SIZES = {"train": 24, "validation": 16, "test": 12}


@dataclass(frozen=True)
class Made:
    """An ensemble, and what it was made of."""

    result: EnsembleResult
    request: EnsembleRequest
    data: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.result.model_dir)

    @property
    def members(self) -> list[Path]:
        return [Path(member.model_dir) for member in self.request.members]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two encoders that have nothing in common, their tokenizers least of all."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny.model(folder / "words"), encoders.model(folder / "bytes", "roberta")]


def made(folder: Path, data: dict[str, Any], members: list[tuple[Path, dict[str, Any]]]) -> Made:
    """Train each, with settings of its own, as ``dryfit train`` does; then put them together."""
    done: list[EnsembleMember] = []
    for number, (encoder, tables) in enumerate(members):
        base = {"train": {"epochs": 1}, "optim": {"lr": 5e-3}}
        merged = {name: base.get(name, {}) | tables.get(name, {}) for name in base | tables}
        trial = trials.Trial(folder / str(number), encoder=encoder, data=data, **merged)
        trial.seed += number
        own = folder / f"final-{number}"
        training = trials.alone(trial.request(), own)
        model = str(own / "model")
        asked = FinalRequest(training=training, model_dir=model, attempt_model_dir=model, study="s")
        result = final(asked, trials.ScriptedChannel(own))
        assert isinstance(result, FinalResult)
        done.append(EnsembleMember(training=training, result=result, searched=0.5, model_dir=str(own / "model")))
    together = str(folder / "together")
    request = EnsembleRequest(
        members=tuple(done), model_dir=together, attempt_model_dir=together, study="s", with_validation=False
    )
    result = ensemble(request, trials.ScriptedChannel(folder / "channel"))
    return Made(result, request, data)


def predicted(folder: Path, source: Path | str, *, batch_rows: int = 4) -> list[Line]:
    """What ``dryfit predict`` says."""
    return trials.predicted(folder, source, folder.with_name(f"{folder.name}-said.jsonl"), batch_rows=batch_rows)[1]


def probabilities(lines: list[Line]) -> np.ndarray:
    return np.array([line["probabilities"] for line in lines], dtype=np.float64)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> Made:
    folder = tmp_path_factory.mktemp("classes")
    data = tiny.data(folder / "data", train=SIZES["train"], validation=SIZES["validation"])
    data["test"] = str(tiny.write_jsonl(folder / "data" / "test.jsonl", tiny.rows(SIZES["test"], start=700)))
    return made(
        folder,
        data,
        [
            (models[0], {"head": {"pooling": "mean"}}),
            (models[1], {"train": {"max_length": 24}, "head": {"layers": 1, "hidden": 8}}),
            (models[0], {"train": {"max_length": 20}}),
        ],
    )


def test_what_it_predicts_is_the_mean_of_what_its_members_predict(classes: Made) -> None:
    test = classes.data["test"]
    said = predicted(classes.folder, test)
    alone = [probabilities(predicted(folder, test)) for folder in classes.members]
    assert np.abs(alone[0] - alone[1]).max() > 0.01
    np.testing.assert_allclose(probabilities(said), sum(alone) / 3, rtol=0, atol=1e-12)
    assert [line["label"] for line in said] == (sum(alone) / 3).argmax(axis=1).tolist()
    assert [line["id"] for line in said] == [row["id"] for row in read(test)]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_its_scores_are_those_of_that_mean(classes: Made, split: str) -> None:
    rows = read(classes.data[split])
    mean = sum(probabilities(predicted(folder, classes.data[split])) for folder in classes.members) / 3
    truth = [row["label"] for row in rows]
    found = getattr(classes.result, split)
    assert found["loss"] == pytest.approx(log_loss(truth, mean), rel=1e-6)
    assert found["accuracy"] == accuracy_score(truth, mean.argmax(axis=1))
    assert found["f1_macro"] == pytest.approx(f1_score(truth, mean.argmax(axis=1), average="macro", zero_division=0))
    assert classes.result.rows[split] == len(rows)


def test_it_says_what_it_does_well_and_badly(classes: Made) -> None:
    analysis, test = classes.result.analysis, classes.result.test
    assert analysis is not None and analysis.classes is not None and test is not None
    assert (analysis.split, analysis.rows) == ("test", SIZES["test"])
    assert analysis.overall.scores == pytest.approx({name: test[name] for name in analysis.overall.scores}, rel=1e-5)
    wrong = round((1 - test["accuracy"]) * SIZES["test"])
    ids = {line["id"] for line in predicted(classes.folder, classes.data["test"])}
    assert {row.id for row in analysis.classes.worst} <= ids and len(analysis.classes.worst) == min(20, wrong)
    assert Analysis.model_validate_json((classes.folder / "analysis.json").read_bytes()) == analysis
    assert "## What it does well and badly" in (classes.folder / "README.md").read_text("utf-8")


def test_its_folder_is_all_that_is_needed(classes: Made, tmp_path: Path) -> None:
    """Elsewhere, without the models it was made of; each member is a model that can be used alone."""
    said = predicted(classes.folder, classes.data["test"])
    away = tmp_path / "away"
    shutil.copytree(classes.folder, away)
    hidden = [folder.rename(folder.with_name("hidden")) for folder in classes.members]
    try:
        assert predicted(away, classes.data["test"], batch_rows=16) == [
            {**line, "probabilities": pytest.approx(line["probabilities"], abs=1e-6)} for line in said
        ]
    finally:
        for folder, own in zip(hidden, classes.members, strict=True):
            folder.rename(own)
    for own, copied in zip(classes.members, read_ensemble(away).folders, strict=True):
        assert predicted(copied, classes.data["test"]) == predicted(own, classes.data["test"])
    card = (away / "README.md").read_text("utf-8")
    assert classes.result.test is not None
    assert "an ensemble of 3 models" in card
    numbers = [classes.result.test["loss"], *(one.test["loss"] for one in classes.result.members if one.test)]
    assert f"| loss | {' | '.join(f'{value:.6f}' for value in numbers)} |" in card
    facts = json.loads((away / "dryfit.json").read_text("utf-8"))
    assert facts["test_metrics"] == classes.result.test
    assert facts["ensemble"]["members"] == ["members/1", "members/2", "members/3"]


def test_load_gives_all_members_each_of_which_reads_tokens_of_its_own(classes: Made) -> None:
    model = load(classes.folder)
    assert isinstance(model, Ensemble)
    assert not model.training
    row = read(classes.data["test"])[0]
    inputs = []
    for folder in read_ensemble(classes.folder).folders:
        kept = {"truncation": "only_second", "max_length": read_model_input(folder).max_length}
        tokenizer = load_tokenizer(FolderSource(str(folder)))
        inputs.append(dict(tokenizer(row["criterion"], row["text"], return_tensors="pt", **kept)))
    with torch.inference_mode():
        said = torch.stack([one.double().softmax(dim=-1)[0] for one in model(inputs)])
    line = predicted(classes.folder, classes.data["test"])[0]
    assert said.mean(dim=0).tolist() == pytest.approx(line["probabilities"], abs=1e-6)
    with pytest.raises(ConfigError, match="2 inputs for 3 members"):
        model(inputs[:2])
    with pytest.raises(ConfigError, match="task is 'encoder'"):
        load(classes.folder, task="encoder")


def test_a_bad_row_of_one_member_is_a_bad_row(classes: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A criterion that leaves no room in the shorter members; the rows in chunks of two, in order."""
    rows = read(classes.data["test"])
    long = {**rows[0], "id": "long", "criterion": "feel " * 18 + "sad"}
    source = tiny.write_jsonl(tmp_path / "rows.jsonl", [rows[0], long, *rows[1:]])
    whole = predicted(classes.folder, classes.data["test"])
    monkeypatch.setattr(predicting, "CHUNK_ROWS", 6)
    said = predicted(classes.folder, source)
    bad = said.pop(1)
    assert (bad["id"], set(bad)) == ("long", {"row", "id", "error"})
    assert "has 19 tokens" in bad["error"]
    assert [line["id"] for line in said] == [line["id"] for line in whole]
    np.testing.assert_allclose(probabilities(said), probabilities(whole), rtol=0, atol=1e-6)


def edited(file: str, table: str, key: str, value: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        facts = json.loads((folder / file).read_text("utf-8"))
        (facts[table] if table else facts)[key] = value
        (folder / file).write_text(json.dumps(facts), encoding="utf-8")

    return edit


OWN, SECOND = "dryfit.json", "members/2/dryfit.json"
WEIGHTS = "members/3/model.safetensors"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "members/2"), "its member members/2 is not there"),
        (lambda folder: (folder / SECOND).unlink(), "members/2 has no dryfit.json"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no weights"), "model.safetensors"),
        (lambda folder: (folder / WEIGHTS).unlink(), "model.safetensors"),
        (edited(OWN, "ensemble", "members", ["members/1", "../x"]), "no folder within"),
        (edited(OWN, "ensemble", "members", ["members/1"]), "ensemble.members"),
        (edited(OWN, "ensemble", "members", ["members/1"] * 2), "named twice"),
        (edited(OWN, "", "ensemble", None), "reading the ensemble"),
        (edited(SECOND, "input", "num_labels", 3), "data.num_labels 3, and members/1 2"),
        (edited(SECOND, "input", "text", "post"), "text column 'post'"),
        (edited(SECOND, "input", "criterion", None), "criterion column None"),
        (edited(SECOND, "input", "task", "evidence"), "task 'evidence'"),
        (edited(SECOND, "", "format", 3), "it holds an ensemble"),
    ],
)
def test_a_damaged_folder_is_refused_with_words(
    classes: Made, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    """By whoever loads it, predicts with it, or only looks at it."""
    folder = tmp_path / "folder"
    shutil.copytree(classes.folder, folder)
    damage(folder)
    with pytest.raises(LoadError, match=said):
        load(folder)
    with pytest.raises(LoadError, match=said):
        predicted(folder, classes.data["test"])
    assert not folder_health(str(folder)).healthy


def test_a_folder_that_says_nothing_is_no_ensemble(classes: Made, tmp_path: Path) -> None:
    shutil.copytree(classes.folder, tmp_path / "folder")
    (tmp_path / "folder" / OWN).write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match="the folder is damaged"):
        load(tmp_path / "folder")


def test_a_look_at_it_finds_its_members_healthy(classes: Made) -> None:
    found = folder_health(str(classes.folder))
    assert found.healthy
    assert [one.subject for one in found.members] == ["trained"] * 3


@pytest.mark.slow
def test_several_labels_are_averaged_each_for_itself(tmp_path: Path, models: list[Path]) -> None:
    data = tiny.multi_label_data(tmp_path / "data", train=24, validation=12)
    both = made(tmp_path, data, [(models[0], {}), (models[1], {"train": {"max_length": 24}})])
    assert both.result.test is None
    assert both.result.validation is not None
    alone = [probabilities(predicted(folder, data["validation"])) for folder in both.members]
    said = predicted(both.folder, data["validation"])
    mean = (alone[0] + alone[1]) / 2
    np.testing.assert_allclose(probabilities(said), mean, rtol=0, atol=1e-12)
    truth = np.array([[int(label in row["label"]) for label in range(3)] for row in read(data["validation"])])
    assert both.result.validation["accuracy"] == accuracy_score(truth, mean > 0.5)
    assert [line["label"] for line in said] == [np.flatnonzero(row >= 0.5).tolist() for row in mean]


SPANS = {"doc_stride": 6, "topk": 5}


@pytest.fixture(
    scope="module",
    params=["evidence", *(pytest.param(task, marks=pytest.mark.slow) for task in ("share", "joint"))],
)
def found_spans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    metric = "token_f1" if request.param == "evidence" else "combined"
    study = {"task": request.param, "metric": metric}
    data = (spans.evidence_data if request.param == "evidence" else spans.both_data)(folder / "data", **SIZES)
    first = {"study": study, "train": {"max_length": 28}, "span": SPANS}
    second = {"study": study, "train": {"max_length": 40}, "span": SPANS | {"reranker": "product", "topk": 3}}
    if request.param == "joint":
        second["joint"] = {"criteria_model": str(models[0]), "criterion_length": 12}
    return made(folder, data, [(models[0], first), (models[1], second)])


def given_to(folder: Path, row: Line, task: str) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Of each window of a row: characters of its tokens, probabilities as starts and ends, and the null position."""
    model, read_as, tokenizer = load(folder), read_model_input(folder), load_tokenizer(FolderSource(str(folder)))
    alone = task == "joint"
    texts = (row["text"],) if alone else (row["criterion"], row["text"])
    cut = {"max_length": read_as.max_length, "stride": SPANS["doc_stride"], "return_overflowing_tokens": True}
    wanted = {"return_offsets_mapping": True, "truncation": True if alone else "only_second"}
    windows: Any = tokenizer(*texts, **cut, **wanted)
    criterion: dict[str, torch.Tensor] = {}
    if alone:
        other = load_tokenizer(FolderSource(f"{folder}/criteria"))
        ids = other(row["criterion"], truncation=True, max_length=read_as.settings.joint.criterion_length)["input_ids"]
        criterion = {"criterion_ids": torch.tensor([ids]), "criterion_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    found = []
    for place in range(len(windows["input_ids"])):
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = {name: torch.tensor([windows[name][place]]) for name in names if name in windows}
        with torch.inference_mode():
            said = model(**inputs, **criterion)
        scores = (said[1] if isinstance(said, tuple) else said)[0].double()
        of_text = zip(windows.sequence_ids(place), windows["offset_mapping"][place], strict=True)
        own = [part == len(texts) - 1 and bool(row["text"][slice(*chars)].strip()) for part, chars in of_text]
        may = torch.tensor([True, *own[1:]])
        offsets = np.array(windows["offset_mapping"][place]) * np.array(own)[:, None]
        found.append((offsets, scores.masked_fill(~may[:, None], -math.inf).softmax(dim=0).numpy(), 0))
    return found


def spaces_trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    inner = text[start:end].strip()
    begin = text.index(inner, start) if inner else start
    return begin, begin + len(inner)


def probability(windows: list[tuple[np.ndarray, np.ndarray, int]], text: str, span: list[int]) -> float:
    """Of a span of characters, in the best window: of the fewest tokens that cover it the first and the last."""
    best = 0.0
    for offsets, shares, _ in windows:
        chars = [spaces_trimmed(text, *pair) for pair in offsets.tolist()]
        runs = [
            (chars[last][1] - chars[first][0], first - last, first, last)
            for first in range(len(chars))
            for last in range(first, len(chars))
            if chars[first][0] < chars[first][1] and chars[last][0] < chars[last][1]
            if chars[first][0] <= span[0] and chars[last][1] >= span[1]
        ]
        if runs:
            _, _, first, last = min(runs)
            best = max(best, float(shares[first, 0] * shares[last, 1]))
    return best


def test_spans_have_the_mean_of_the_members_probabilities(found_spans: Made) -> None:
    """By dryfit.load and the tokenizers alone, for two members that agree on characters only."""
    task = str(found_spans.request.members[0].training.config.task)
    rows = read(found_spans.data["test"])
    lines = predicted(found_spans.folder, found_spans.data["test"])
    fitted = read_ensemble(found_spans.folder).fitted["null_threshold"]
    for row, line in zip(rows[:6], lines[:6], strict=True):
        windows = [given_to(folder, row, task) for folder in found_spans.members]
        for candidate in line["candidates"]:
            mean = sum(probability(one, row["text"], candidate["span"]) for one in windows) / 2
            assert candidate["score"] == pytest.approx(math.log(mean), abs=1e-4)
        nulls = [min(float(shares[null].prod()) for _, shares, null in one) for one in windows]
        assert line["null_score"] == pytest.approx(math.log(sum(nulls) / 2), abs=1e-4)
        without = line["null_score"] - line["score"] > fitted
        assert line["span"] == (None if without else line["candidates"][0]["span"])
        assert line["text"] == (None if without else row["text"][slice(*line["span"])])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_spans_score_as_what_is_predicted(found_spans: Made, split: str) -> None:
    rows = read(found_spans.data[split])
    lines = predicted(found_spans.folder, found_spans.data[split])
    answers = np.array([line["span"] or (0, 0) for line in lines], dtype=np.int64)
    golds = Ragged.of([np.array(row["evidence"], dtype=np.int32).reshape(-1, 2) for row in rows])
    wanted = span_metrics(answers, golds, Ragged.of([word_spans(row["text"]) for row in rows]))
    found = getattr(found_spans.result, split)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-9, nan_ok=True), name
    assert "loss" not in found
    if "probabilities" in lines[0]:
        alone = [probabilities(predicted(folder, found_spans.data[split])) for folder in found_spans.members]
        np.testing.assert_allclose(probabilities(lines), (alone[0] + alone[1]) / 2, rtol=0, atol=1e-6)
        truth = [row["label"] for row in rows]
        guess = probabilities(lines).argmax(axis=1)
        assert found["accuracy"] == accuracy_score(truth, guess)
        f1 = f1_score(truth, guess, average="macro", zero_division=0)
        assert found["combined"] == pytest.approx((f1 + wanted["token_f1"]) / 2)
