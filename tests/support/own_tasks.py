"""Tasks of a user's own: the example of the documents, and classes with one thing wrong."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import tiny
from trials import Trial

EXAMPLE = Path(__file__).parents[2] / "examples" / "score.py"

_WRONG = """
import torch
from {module} import ScoreTask
from dryfit.tasks.encoder import EncoderTask


class Wide(ScoreTask):
    def keep(self, outputs, batch):
        return outputs.expand(-1, batch["input_ids"].shape[1])


class Flat(ScoreTask):
    def keep(self, outputs, batch):
        return outputs[:, 0]


class Sick(ScoreTask):
    def loss_sum(self, outputs, batch):
        return super().loss_sum(outputs, batch) * float("nan")


class Forgetful(ScoreTask):
    def metrics(self, kept, tokens, fitted):
        return {{"mse": 1.0}}


class Raising(ScoreTask):
    def __init__(self, context):
        raise RuntimeError("no licence")


class Careless(ScoreTask):
    def __init__(self, context):
        pass


class Half(EncoderTask):
    pass


class Bare:
    pass


class Listing(ScoreTask):
    knobs = {{"sizes": [1, 2]}}


function = print
"""


def example_file(folder: Path, name: str) -> Path:
    """A copy of the example, as a module that no other test imports."""
    return Path(shutil.copyfile(EXAMPLE, folder / f"{name}.py"))


def wrong_file(folder: Path, name: str) -> Path:
    """A module with classes that each have one thing wrong, beside a copy of the example that they build on."""
    example_file(folder, f"{name}_example")
    file = folder / f"{name}.py"
    file.write_text(_WRONG.format(module=f"{name}_example"), encoding="utf-8")
    return file


def score_rows(folder: Path, count: int = 60, *, seed: int = 0) -> Path:
    """Texts with the number of their good words."""
    draw = random.Random(seed)
    texts = [draw.choices(tiny.WORDS, k=draw.randint(4, 12)) for _ in range(count)]
    good = {"good", "happy", "very"}
    rows = [
        {"id": f"r{index}", "text": " ".join(words), "score": sum(word in good for word in words)}
        for index, words in enumerate(texts)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def score_trial(folder: Path, encoder: Path, task: str, **tables: dict[str, Any]) -> Trial:
    """A trial of a task that learns these numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"file": str(score_rows(folder)), "validation_fraction": 0.3, "test_fraction": 0.2}
    study = {"task": task, "metric": "mse", "direction": "minimize"}
    return Trial(folder, encoder=encoder, data=data, study=study, **tables)
