"""Rows of the span tests: texts of every script, tokenizers of every kind."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.tasks.base import Batch
from dryfit.tasks.rows import UnlabelledRow
from dryfit.tasks.saved_models import load, read_model_input
from dryfit.tasks.spans import span_metrics
from dryfit.tasks.tokens import TokenSet
from dryfit.tasks.windows import Ragged, Windows, extras, word_spans
from dryfit.training.prediction import ModelPredictor
from trials import Trial

TOKENIZERS = ("bert", "roberta", "xlm-roberta", "deberta-v3", "xlnet", "modernbert")
"""WordPiece; byte-level BPE, with trimmed offsets or not; sentencepiece, the classification token first or last."""

_PIECES = (
    *(" ", "  ", "\n\t", "\u00a0", "\u3000", "\u2028", ".", "[SEP]", "<s>", "A", "b c", "sad"),
    *("\u0301", "e\u0301", "\u200b", "\u200d", "\ufe0f", "\u0e33", "\u0f71\u0f72", "\ufb01", "\u2460", "\u00ad"),
    *("😀", "👍🏽", "👩‍👩‍👧", "🇩🇪", "日本", "カ\u3099", "한국", "كيف", "Straße", "नमस्ते", "\x00", "\ufffd", "ǆ"),
)
texts = st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=4)), max_size=14).map("".join)
"""Texts of any script, with emoji, combining characters, runs of white space and characters that tokenizers drop."""


@dataclass(frozen=True)
class SpanRow:
    """A row without a label."""

    text: str
    criterion: str | None = "feel sad"


def drawn_windows(rows: int, *, seed: int, length: int = 24, golds: bool = False) -> tuple[torch.Tensor, Windows]:
    """Scores (W, L, 2) and windows of rows: one to four windows each, which overlap; some tokens are white space.

    With gold spans half of the rows have the characters of their last window's label, and words of five characters.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    rows_W: list[int] = []
    offsets: list[torch.Tensor] = []
    nulls: list[int] = []
    labels: list[tuple[int, int]] = []
    for row in range(rows):
        begins = 0
        for _ in range(draw(1, 5)):
            widths = torch.randint(0, 5, (length,), generator=rng)
            ends = begins + (widths + 1).cumsum(0)
            spans = torch.stack([ends - widths, ends], dim=1)
            spans[widths == 0] = 0
            cls_last = row % 3 == 0
            spans[: 0 if cls_last else draw(1, 4)] = 0
            spans[length - 1 - cls_last :] = 0
            begins = int(ends[length // 2])
            null = length - 1 if cls_last else 0
            (text,) = spans[:, 1].nonzero(as_tuple=True)
            first = draw(0, len(text))
            pair = (int(text[first]), int(text[draw(first, len(text))]))
            rows_W.append(row)
            nulls.append(null)
            offsets.append(spans)
            labels.append(pair if draw(0, 2) else (null, null))
    marked = words = Ragged.of([np.zeros((0, 2), dtype=np.int32)] * rows)
    if golds:
        last = {row: at for at, row in enumerate(rows_W)}
        chars = [
            [int(offsets[at][labels[at][0], 0]), int(offsets[at][labels[at][1], 1])] for _, at in sorted(last.items())
        ]
        found = [np.array([one] if one[1] else [], dtype=np.int32).reshape(-1, 2) for one in chars]
        marked = Ragged.of(found)
        each = np.stack([np.arange(0, 2000, 6), np.arange(5, 2005, 6)], axis=1).astype(np.int32)
        words = Ragged.of([each] * rows)
    tokens = TokenSet(
        torch.zeros(len(rows_W) * length, dtype=torch.int32),
        None,
        torch.arange(len(rows_W) + 1) * length,
        torch.tensor(labels),
        extra=extras(torch.cat(offsets).to(torch.int32), torch.tensor(nulls), marked, words),
        source_R=torch.tensor(rows_W),
    )
    return torch.randn(len(rows_W), length, 2, generator=rng) * 3, Windows(tokens)


def span_batch(windows: Windows) -> Batch:
    """What decoding and losses read of a batch of all windows, which are equally long."""
    text = (windows.offsets_T2[:, 1] > 0).reshape(len(windows), -1)
    return {"labels": windows.tokens.labels_R, "text_mask": text, "nulls": windows.nulls_W}


def evidence_data(folder: Path, *, train: int = 24, validation: int = 16, test: int = 0) -> dict[str, Any]:
    """Texts of several windows, half of them with evidence: the words of the criterion; no labels."""
    rng = random.Random(5)

    def drawn(count: int, start: int) -> list[dict[str, Any]]:
        found = []
        for number in range(start, start + count):
            said = tiny.CRITERIA[number % 2]
            words = [rng.choice(tiny.WORDS) for _ in range(rng.randrange(6, 60))]
            place = rng.randrange(len(words))
            has = rng.random() < 0.5
            words[place : place + 1] = said.split() if has else ["never"]
            begin = len(" ".join(words[:place])) + (place > 0)
            spans = [[begin, begin + len(said)]] if has else []
            row = {"id": f"e{number}", "criterion": said, "text": " ".join(words), "evidence": spans}
            found.append(row)
        return found

    found = {"test": str(tiny.write_jsonl(folder / "test.jsonl", drawn(test, 900)))} if test else {}
    return found | {
        "train": str(tiny.write_jsonl(folder / "train.jsonl", drawn(train, 0))),
        "validation": str(tiny.write_jsonl(folder / "validation.jsonl", drawn(validation, train))),
    }


def both_data(folder: Path, *, criterion_repeated: int = 1, **sizes: int) -> dict[str, Any]:
    """The rows of :func:`evidence_data`, each with a label: whether it has evidence; criteria said so often."""
    paths = evidence_data(folder, **sizes)
    for path in map(Path, paths.values()):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row |= {"label": int(bool(row["evidence"])), "criterion": " ".join([row["criterion"]] * criterion_repeated)}
        tiny.write_jsonl(path, rows)
    return paths


def assert_predicts_as_validated(trial: Trial) -> None:
    """What the folder of a trial's best weights says of the validation rows scores as it did in training."""
    folder = trial.folder / "best"
    source = FolderSource(str(folder))
    predictor = ModelPredictor(load(folder), load_tokenizer(source), read_model_input(folder), 4, source)
    path = Path(trial.data.validation or "")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    said: list[Any] = list(
        predictor.predict([UnlabelledRow(row["id"], row["text"], row["criterion"], "") for row in rows])
    )
    answers = np.array([one["span"] or (0, 0) for one in said], dtype=np.int64)
    golds = Ragged.of([np.array(row["evidence"], dtype=np.int32).reshape(-1, 2) for row in rows])
    found = span_metrics(answers, golds, Ragged.of([word_spans(row["text"]) for row in rows]))
    hits = [one["label"] == row["label"] for one, row in zip(said, rows, strict=True)]
    found["accuracy"] = sum(hits) / len(hits)
    logs = [math.log(one["probabilities"][row["label"]]) for one, row in zip(said, rows, strict=True)]
    validated = json.loads((folder / "dryfit.json").read_text(encoding="utf-8"))["metrics"]
    for name, value in found.items():
        assert math.isclose(validated[name], value, abs_tol=1e-9) or math.isnan(value), name
    assert -sum(logs) / len(logs) < 2 * validated["loss"]  # of which the class has one half
