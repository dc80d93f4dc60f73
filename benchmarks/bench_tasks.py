"""The tasks on a real data set, beside baselines on the same rows: a majority, and TF-IDF by scikit-learn.

    python benchmarks/bench_tasks.py baselines DATA [--train 1280] [--validation 400]
    python benchmarks/bench_tasks.py search DATA FOLDER [--task evidence] [--train 1280] [--validation 400] [--trials 4]
    python benchmarks/bench_tasks.py table DATA FOLDER [--train 1280] [--validation 400]
    python benchmarks/bench_tasks.py score DATA MODEL [--split test] [--rows 1000]

DATA holds train.jsonl, validation.jsonl and test.jsonl of the project's schema. ``search`` writes a study for each task
into FOLDER and tunes it; run again it goes on. ``table`` lets the best trial's weights predict test, and prints how
right they are beside the baselines; ``score`` does so with a folder of weights, and any split. The baselines read the
rows that the studies read; what they choose (a threshold) they choose on validation, as the studies do.

For classes: logistic regression on TF-IDF of words and word pairs of criterion and text. For spans: the sentence whose
TF-IDF vector is nearest to the criterion's, none where it is not near enough; and dryfit's own baseline, the likeliest
sentence by logistic regression. Beside the metrics of spans stands where they are lost: whether a row has a span at
all (``null_auc``: the area under the curve by the answer's score), and which (``span_f1``: of rows that have one, were
it always known that they do).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from class_baselines import Row, baseline_classes, f1_macro, read_rows
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

import dryfit
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.choices import Metric
from dryfit.tasks import rows as checked_rows
from dryfit.tasks.baselines import likeliest_sentences
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.spans import null_threshold, row_scores, span_metrics
from dryfit.tasks.windows import Ragged, word_spans

Spans = np.ndarray

_LARGE = 1e9  # no score is larger but infinity, of rows whose text has no word
SPLITS = ("train", "validation", "test")
TASKS = ("criteria", "evidence", "share", "joint")
METRICS = {"criteria": "f1_macro", "evidence": "span_balanced", "share": "combined", "joint": "combined"}
# A rate for an encoder of six layers with a head that is new; what is searched is what small data is most sensitive to.
STUDY = """[study]
name = "{task}"
task = "{task}"
metric = "{metric}"
trials = {trials}
seed = 1

[data]
train = "{data}/train.jsonl"
validation = "{data}/validation.jsonl"
test = "{data}/test.jsonl"
train_limit = {train}
validation_limit = {validation}

[train]
epochs = {epochs}
batch_size = 16
max_length = {length}
precision = "{precision}"

[optim]
lr = 2e-4
head_lr_factor = 5.0

[space]
"optim.lr" = {{low = 5e-5, high = 3e-4, log = true}}
"optim.head_lr_factor" = [1.0, 5.0, 20.0]

[search]
pruner = "median"
pruner_startup_trials = 1
startup_trials = 3
"""

# A third of the evidence of contracts is longer than the 64 tokens that an answer has by default. Six rows in ten have
# none: an epoch without most of those takes half the time, and the threshold is fitted afterwards.
SPAN = """
[span]
max_answer_len = 192
negatives = 1.0
"""


@dataclass(frozen=True)
class Rows:
    """The rows that the studies read."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]

    @classmethod
    def read(cls, folder: Path, train: int, validation: int) -> "Rows":
        """Read the splits; the first rows of two of them."""
        limits = (train, validation, None)
        return cls(*(read_rows(folder / f"{split}.jsonl", limit) for split, limit in zip(SPLITS, limits, strict=True)))


def classes(rows: Rows) -> dict[str, dict[str, float]]:
    """Macro F1 on test of each baseline."""
    said = baseline_classes(rows.train, [rows.test])
    return {name: {"f1_macro": f1_macro(rows.test, parts[0])} for name, parts in said.items()}


def sentences(text: str) -> list[tuple[int, int]]:
    """Characters of each sentence: up to a full stop, semicolon or line's end."""
    found = [match.span() for match in re.finditer(r"[^.;\n]+[.;]?", text) if match[0].strip()]
    return [(end - len(text[start:end].lstrip()), start + len(text[start:end].rstrip())) for start, end in found]


def spans(rows: Rows) -> dict[str, dict[str, float]]:
    """Metrics of spans on test of each baseline."""
    every = [text for row in rows.train for text in (row["criterion"], row["text"])]
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(every)

    def nearest(part: Sequence[Row]) -> tuple[np.ndarray, Spans]:
        scores, places = np.zeros(len(part)), np.zeros((len(part), 2), dtype=np.int64)
        for index, row in enumerate(part):
            cuts = sentences(row["text"])
            vectors = words.transform([row["text"][start:end] for start, end in cuts])
            near = (vectors @ words.transform([row["criterion"]]).T).toarray()
            scores[index], places[index] = near.max(), cuts[int(near.argmax())]
        return scores, places

    found = {"majority": scored(rows.test, np.zeros((len(rows.test), 2), dtype=np.int64))}
    for name, answer in (("TF-IDF, nearest", nearest), ("TF-IDF, likeliest", likeliest(rows))):
        (scores, places), (test_scores, test_places) = answer(rows.validation), answer(rows.test)
        least = -null_threshold(places, -scores, *truths(rows.validation), metric=Metric.SPAN_BALANCED)
        found[name] = scored(rows.test, spoken(test_places, test_scores >= least))
        found[name] |= parts(rows.test, test_scores, test_places)
    return found


def likeliest(rows: Rows) -> Callable[[Sequence[Row]], tuple[np.ndarray, Spans]]:
    """Return dryfit's own baseline, trained on the training rows: scores and places of other rows."""
    train = tuple(map(checked, rows.train))

    def answer(part: Sequence[Row]) -> tuple[np.ndarray, Spans]:
        others = tuple(map(checked, part))
        golds = {row.id: row.evidence for row in (*train, *others)}
        found = likeliest_sentences({TRAIN: train, VALIDATION: others}, golds, balanced=False)
        return -found.differences_R, found.spans_R2

    return answer


def checked(row: Row) -> checked_rows.Row:
    """Return a row as dryfit reads it, without spans of white space."""
    spans = tuple((start, end) for start, end in row["evidence"] if row["text"][start:end].strip())
    return checked_rows.Row(row["id"], row["text"], row["criterion"], row["label"], row["group"], spans, "")


def parts(rows: Sequence[Row], scores: np.ndarray, places: Spans) -> dict[str, float]:
    """Return how well answers tell whether rows have a span, and which it is where they have one.

    Args:
        rows: The rows.
        scores: The higher, the likelier a row has a span.
        places: The best span of each row.
    """
    golds, words = truths(rows)
    has = golds.counts_R.numpy() > 0
    return {
        "null_auc": float(roc_auc_score(has, np.maximum(scores, -_LARGE))),
        "span_f1": float(row_scores(places, golds, words).f1_R[has].mean()),
    }


def truths(rows: Sequence[Row]) -> tuple[Ragged, Ragged]:
    """Return the right spans, and the words, of rows."""
    golds = Ragged.of([np.array(row["evidence"], dtype=np.int32).reshape(-1, 2) for row in rows])
    return golds, Ragged.of([word_spans(row["text"]) for row in rows])


def spoken(places: Spans, said: np.ndarray) -> Spans:
    """The places that are said, and (0, 0) for none."""
    return np.where(said[:, None], places, 0)


def scored(rows: Sequence[Row], places: Spans) -> dict[str, float]:
    """Metrics of a place for each row."""
    return span_metrics(places, *truths(rows))


def search(options: argparse.Namespace) -> None:
    """Tune each task's study."""
    for task in [options.task] if options.task else TASKS:
        folder = options.folder / task
        folder.mkdir(parents=True, exist_ok=True)
        study = folder / "study.toml"
        if not study.exists():
            filled = STUDY.format(
                task=task,
                metric=METRICS[task],
                trials=options.trials,
                data=options.data.resolve(),
                train=options.train,
                validation=options.validation,
                epochs=options.epochs,
                length=options.length,
                precision=options.precision,
            )
            study.write_text(filled + ("" if task == "criteria" else SPAN), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "dryfit.documents.command_line", "tune", str(study)], check=True)


def table(options: argparse.Namespace) -> None:
    """Print the winners beside the baselines."""
    rows = Rows.read(options.data, options.train, options.validation)
    print(
        f"{len(rows.train)} training rows, {len(rows.validation)} validation rows, {len(rows.test)} test rows; on test:"
    )
    found: dict[str, Callable[[Rows], dict[str, dict[str, float]]]] = {"classes": classes, "spans": spans}
    for kind, baseline in found.items():
        for name, metrics in baseline(rows).items():
            print(line(f"{kind}: {name}", metrics))
    if options.action == "baselines":
        return
    for task in TASKS:
        if (options.folder / task / "ledger.jsonl").exists():
            best = dryfit.status(options.folder / task).best
            assert best is not None  # a trial of it is complete
            weights = StudyLayout(options.folder / task).trial(best.number).best
            print(line(f"{task}: searched", predicted(weights, rows.test)))


def score(options: argparse.Namespace) -> None:
    """Print the metrics of a folder of weights."""
    rows = read_rows(options.data / f"{options.split}.jsonl", options.rows)
    print(line(f"{options.split}, {len(rows)} rows", predicted(options.folder, rows)))


def predicted(weights: Path, rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of what a folder of weights says of rows."""
    with tempfile.TemporaryDirectory() as temporary:
        asked, out = Path(temporary) / "rows.jsonl", Path(temporary) / "said.jsonl"
        asked.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        dryfit.predict(weights, asked, out)
        said = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    found: dict[str, float] = {}
    if "label" in said[0]:
        found["f1_macro"] = f1_macro(rows, np.array([row["label"] for row in said]))
    if "span" in said[0]:
        found |= scored(rows, np.array([row["span"] or (0, 0) for row in said]))
        scores = [-np.inf if row["score"] is None else row["score"] - row["null_score"] for row in said]
        places = [row["candidates"][0]["span"] if row["candidates"] else (0, 0) for row in said]
        found |= parts(rows, np.array(scores), np.array(places))
    return found


def line(name: str, metrics: dict[str, float]) -> str:
    """One row of the table."""
    shown = (
        *("f1_macro", "span_balanced", "token_f1", "token_f1_has", "exact_match"),
        *("null_precision", "null_recall", "null_auc", "span_f1"),
    )
    return f"{name:30s} " + "  ".join(f"{key} {metrics[key]:.3f}" for key in shown if key in metrics)


def main() -> None:
    """Do what is asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("baselines", "search", "table", "score"))
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--train", type=int, default=1280)
    parser.add_argument("--validation", type=int, default=400)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--rows", type=int, help="so many rows of the split; unset: all")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--precision", default="fp32", help="bf16 is faster where the CPU has instructions for it")
    options = parser.parse_args()
    if options.action != "baselines" and options.folder is None:
        parser.error("FOLDER is needed")
    {"search": search, "score": score}.get(options.action, table)(options)


if __name__ == "__main__":
    main()
