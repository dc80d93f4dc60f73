"""What needs no model, on the rows of a benchmark: the majority, and a linear model of words (scikit-learn's)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline

Row = dict[str, Any]


def read_rows(path: str | Path, limit: int | None = None) -> list[Row]:
    """The rows of a file, or its first ones."""
    return [json.loads(text) for text in Path(path).read_text(encoding="utf-8").splitlines()[:limit]]


def labels(rows: Sequence[Row]) -> np.ndarray:
    """The label of each row."""
    return np.array([row["label"] for row in rows])


def baseline_classes(train: Sequence[Row], asked: Sequence[Sequence[Row]]) -> dict[str, list[np.ndarray]]:
    """The classes that each baseline, fitted on ``train``, gives the rows of each part of ``asked``."""

    def texts(rows: Sequence[Row]) -> list[str]:
        return [f"{row['criterion']} {row['text']}" for row in rows]

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    models = {
        "majority": DummyClassifier(),
        "TF-IDF": make_pipeline(words, LogisticRegression(C=10, max_iter=2000)),
    }
    found: dict[str, list[np.ndarray]] = {}
    for name, model in models.items():
        model.fit(texts(train), labels(train))
        found[name] = [model.predict(texts(rows)) for rows in asked]
    return found


def f1_macro(rows: Sequence[Row], classes: np.ndarray) -> float:
    """Macro F1 of classes of the rows."""
    return float(f1_score(labels(rows), classes, average="macro"))
