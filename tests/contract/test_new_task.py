"""A further built-in task is a name, a row and a class: every command works with it, and nothing else is edited."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import study_runs
import tiny

SRC = Path(__file__).resolve().parents[2] / "src"

CLASS = '''"""The task ``length``: how many letters a text has, by mean squared error."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from dryfit.tasks.base import Batch
from dryfit.tasks.encoder import EncoderTask
from dryfit.tasks.rows import Readable, Row
from dryfit.tasks.tokens import TokenSet


class LengthTask(EncoderTask):
    required = frozenset()
    num_outputs = 1

    def labels(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.tensor([len(row.text) / 100 for row in rows])

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(float(len(batch["labels"])))

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return ((outputs[:, 0] - batch["labels"]) ** 2).sum()

    def metric_names(self) -> tuple[str, ...]:
        return ("loss",)

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        return {"loss": float(((kept[:, 0] - tokens.labels_R) ** 2).mean())}

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        for length in kept[:, 0].tolist():
            yield {"length": 100 * length}
'''
ROW = """    BuiltInTask.LENGTH: TaskFacts(
        implementation="dryfit.tasks.length:LengthTask",
        tables=frozenset({"head"}),
        unread=frozenset({"data.label", "data.num_labels", "data.multi_label"}),
        metrics=lambda _: (Metric.LOSS,),
        pipeline="length-measuring",
        starter={"study.trials": 1, "train.epochs": 1},
        starter_space={"optim.lr": "{low = 1e-4, high = 1e-3, log = true}"},
    ),
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the task ``length``."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(SRC / "dryfit", source / "dryfit")
    for name, before, more in (
        ("choices.py", '    OBJECTIVE = "objective"\n', '    LENGTH = "length"\n'),
        ("task_facts.py", "    BuiltInTask.OBJECTIVE: TaskFacts(\n", ROW),
    ):
        path = source / "dryfit" / "settings" / name
        text = path.read_text("utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, more + before), encoding="utf-8")
    (source / "dryfit" / "tasks" / "length.py").write_text(CLASS, encoding="utf-8")
    return source


@pytest.mark.slow
@pytest.mark.nightly
def test_a_name_a_row_and_a_class_are_a_task(source: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"

    def run(*words: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *filter(None, sys.path)])}
        done = subprocess.run(
            study_runs.command(*words), env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        return done

    run("init", study, "--task", "length")
    text = (study / "study.toml").read_text("utf-8")
    assert 'task = "length"' in text and 'metric = "loss"' in text
    assert "num_labels" not in text and "[loss]" not in text and "[model] to [regularization]" in text
    small = (f"model.name={tiny.model(tmp_path / 'model')}", "data.train_limit=32", "train.max_length=48")
    options = [word for override in small for word in ("--set", override)]

    wrong = run("tune", study, *options, "--set", "study.metric=mcc", "--set", "loss.gamma=1", status=2)
    assert "study.metric is mcc, and study.task is length" in wrong.stderr
    assert "loss.gamma is not read by study.task = length" in wrong.stderr

    run("tune", study, *options)
    assert not {"[loss]", "[lora]", "[span]"} & set((study / "frozen.toml").read_text("utf-8").splitlines())

    run("train", study, "--trial", "best", "--out", tmp_path / "trained")
    card = (tmp_path / "trained" / "README.md").read_text("utf-8")
    assert "pipeline_tag: length-measuring" in card and "loss" in card

    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(5))
    run("predict", tmp_path / "trained", rows, "--out", tmp_path / "predicted.jsonl")
    said = [json.loads(line) for line in (tmp_path / "predicted.jsonl").read_text("utf-8").splitlines()]
    assert len(said) == 5 and all(isinstance(one["length"], float) for one in said)
