"""The analysis of a model's answers: as scikit-learn computes it, bounded, and without a word of any text."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from dryfit.settings.training_messages import Analysis, ClassAnalysis
from dryfit.tasks.analysis import analyse
from dryfit.tasks.scored_rows import RowFacts, ScoredRow, read_rows, write_rows

sk: Any = metrics
"""Its types say less than it takes."""


def class_rows(rng: np.random.Generator, rows: int, classes: int) -> list[ScoredRow]:
    scores = rng.normal(size=(rows, classes))
    p_RC = (np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)).round(3)  # some are equal
    labels = rng.integers(0, classes, rows)
    return [
        ScoredRow(
            f"r{at}",
            {"class": int(label)},
            {"class": int(p.argmax())},
            tuple(p.tolist()),
        )
        for at, (label, p) in enumerate(zip(labels, p_RC, strict=True))
    ]


def analysed(rows: Sequence[ScoredRow], facts: dict[str, RowFacts] | None = None, **others: Any) -> Analysis:
    found = analyse(rows, facts, split="test", metric="f1_macro", **others)
    assert found is not None and Analysis.model_validate_json(found.model_dump_json()) == found
    return found


def classes_of(analysis: Analysis) -> ClassAnalysis:
    assert analysis.classes is not None
    return analysis.classes


@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("seed", range(3))
def test_classes_are_scored_as_by_scikit_learn(classes: int, seed: int) -> None:
    rows = class_rows(np.random.default_rng(seed), 20 if seed == 2 else 300, classes)
    truth, said = [row.truth["class"] for row in rows], [row.answer["class"] for row in rows]
    found = classes_of(analysed(rows))
    labels = list(range(classes))
    assert [list(row) for row in found.confusion] == sk.confusion_matrix(truth, said, labels=labels).tolist()
    every = sk.precision_recall_fscore_support(truth, said, labels=labels, zero_division=np.nan)
    for score, precision, recall, f1, support in zip(found.scores, *every, strict=True):
        assert (score.support, score.answered) == (support, said.count(score.label))
        for mine, theirs in ((score.precision, precision), (score.recall, recall)):
            assert mine == (None if math.isnan(theirs) else pytest.approx(theirs, rel=1e-5))
        assert score.f1 == pytest.approx(0.0 if math.isnan(f1) else f1, rel=1e-5)
    bins = found.calibration
    assert sum(one.count for one in bins) == len(rows) and all(one.low <= one.p <= one.high + 1e-6 for one in bins)
    gaps = sum(one.count / len(rows) * abs(one.p - one.share) for one in bins)
    assert found.ece == pytest.approx(gaps, abs=1e-5)
    wrong = [row for row in rows if row.truth != row.answer]
    losses = sorted((-math.log(row.p[row.truth["class"]]) for row in wrong), reverse=True)
    assert [row.values["loss"] for row in found.worst] == pytest.approx(losses[:20], rel=1e-5)
    assert found.worst[0].values["p_right"] == min(row.p[row.truth["class"]] for row in wrong)


@pytest.mark.parametrize("rows", [15, 400])
def test_precision_over_recall_is_that_of_scikit_learn(rows: int) -> None:
    made = class_rows(np.random.default_rng(rows), rows, 2)
    truth, p = [row.truth["class"] for row in made], [row.p[1] for row in made]
    (curve,) = classes_of(analysed(made, thresholds=(0.3,))).curves
    assert (curve.label, curve.threshold) == (1, 0.3)
    assert curve.average_precision == pytest.approx(sk.average_precision_score(truth, p), rel=1e-5)
    precisions, recalls, thresholds = sk.precision_recall_curve(truth, p)
    theirs = {f"{t:.6g}": (a, b) for t, a, b in zip(thresholds, precisions, recalls, strict=False)}
    for threshold, *mine in zip(curve.thresholds, curve.precisions, curve.recalls, strict=True):
        assert mine == pytest.approx(theirs[f"{threshold:.6g}"], rel=1e-5)
    assert 1 < len(curve.thresholds) <= 100 and curve.recalls[-1] == 1.0
    assert curve.thresholds[0] > curve.thresholds[-1]


def test_of_several_classes_a_row_each_is_judged_for_itself() -> None:
    rng = np.random.default_rng(4)
    p_RC, has_RC = rng.random((200, 4)), rng.random((200, 4)) < 0.3
    rows = [
        ScoredRow(
            str(at),
            {"class": np.flatnonzero(has_RC[at]).tolist()},
            {"class": np.flatnonzero(p_RC[at] > 0.5).tolist()},
            tuple(p_RC[at].tolist()),
        )
        for at in range(200)
    ]
    found = classes_of(analysed(rows, thresholds=(0.1, 0.2, 0.3, 0.4)))
    assert found.several and not found.confusion
    every = sk.precision_recall_fscore_support(has_RC, p_RC > 0.5, zero_division=np.nan)
    assert [one.f1 for one in found.scores] == pytest.approx(every[2], rel=1e-5)
    assert [one.threshold for one in found.curves] == [0.1, 0.2, 0.3, 0.4]
    areas = [sk.average_precision_score(has_RC[:, at], p_RC[:, at]) for at in range(4)]
    assert [one.average_precision for one in found.curves] == pytest.approx(areas, rel=1e-5)
    assert sum(one.count for one in found.calibration) == 800
    wrong = [at for at, row in enumerate(rows) if row.truth != row.answer]
    losses = {str(at): sk.log_loss(has_RC[at], p_RC[at], labels=[0, 1]) for at in wrong}
    assert [row.id for row in found.worst] == sorted(losses, key=lambda name: -losses[name])[:20]
    assert found.worst[0].values["loss"] == pytest.approx(max(losses.values()), rel=1e-5)


def test_each_criterion_and_few_groups_have_scores_of_their_own() -> None:
    rows = class_rows(np.random.default_rng(1), 120, 2)
    facts = {row.id: RowFacts(f"g{at % 4}", ("one?", "two?", "two?")[at % 3]) for at, row in enumerate(rows)}
    found = analysed(rows, facts)
    assert [(one.name, one.rows) for one in found.criteria] == [("two?", 80), ("one?", 40)]
    assert [(one.name, one.rows) for one in found.groups] == [(f"g{at}", 30) for at in range(4)]
    mine = [row for at, row in enumerate(rows) if at % 3 == 0]
    expected = sk.f1_score([row.truth["class"] for row in mine], [row.answer["class"] for row in mine], average="macro")
    assert found.criteria[1].scores["f1_macro"] == pytest.approx(expected, rel=1e-5)
    assert list(found.overall.scores) == ["f1_macro", "f1", "accuracy"] and not found.notes
    alone = {row.id: RowFacts(row.id) for row in rows[:100]}
    lonely = analysed(rows, alone)
    assert not lonely.criteria and not lonely.groups
    assert lonely.notes == ("Criterion and group are known of 100 of 120 rows.",)
    assert "is not known" in analysed(rows).notes[0]


def test_of_spans_it_says_which_rows_have_none() -> None:
    def row(name: str, right: list[list[int]], said: list[int] | None, f1: float, loss: float) -> ScoredRow:
        return ScoredRow(name, {"span": right}, {"span": said}, values={"token_f1": f1, "loss": loss, "loss_terms": 2})

    rows = [
        row("found", [[1, 5]], [1, 5], 1.0, 0.2),
        row("half", [[1, 5], [7, 9]], [3, 9], 0.5, 1.0),
        row("missed", [[1, 5]], None, 0.0, 3.0),
        row("invented", [], [2, 4], 0.0, 5.0),
        row("left", [], None, 1.0, 9.0),
    ]
    found = analysed(rows, {one.id: RowFacts("g", one.id[0]) for one in rows})
    spans = found.spans
    assert spans is not None and found.classes is None and found.texts is None
    assert (spans.found, spans.missed, spans.invented, spans.left) == (2, 1, 1, 1)
    assert [one.id for one in spans.worst] == ["invented", "missed", "half"]
    assert [(one.right, one.answered) for one in spans.worst] == [("none", "2-4"), ("1-5", "none"), ("1-5, 7-9", "3-9")]
    assert spans.worst[0].values == {"token_f1": 0.0, "loss": 2.5}
    assert {one.name: one.scores["token_f1"] for one in found.criteria} == {"f": 1, "h": 0.5, "m": 0, "i": 0, "l": 1}
    assert found.criteria[0].scores["token_f1_has"] is not None
    assert next(one for one in found.criteria if one.name == "l").scores["token_f1_has"] is None


def test_of_generated_text_not_a_word_is_told() -> None:
    rows = [
        ScoredRow("a", {"text": "SECRET yes"}, {"text": "SECRET yes"}, values={"exact_match": 1.0, "loss": 1.0}),
        ScoredRow("b", {"text": "SECRET no"}, {"text": "SECRET"}, values={"exact_match": 0.0, "loss": 2.0}),
        ScoredRow("c", {}, {}, values={"loss": 3.0}),
    ]
    found = analysed(rows, {name: RowFacts(name, "Is it?") for name in "abc"})
    assert found.texts is not None and (found.texts.asked, found.texts.exact) == (2, 1)
    assert [one.id for one in found.texts.worst] == ["b"]
    assert found.criteria[0].scores == {"exact_match": 0.5, "loss": 2.0}
    assert "SECRET" not in found.model_dump_json()
    scored = analysed([ScoredRow(str(at), {}, {}, values={"loss": at, "loss_terms": 2}) for at in range(30)])
    assert scored.texts is not None and scored.texts.asked == 0
    assert [one.values["loss"] for one in scored.texts.worst] == [at / 2 for at in range(29, 9, -1)]


def test_it_is_bounded_whatever_the_rows_are() -> None:
    rng = np.random.default_rng(0)
    rows = class_rows(rng, 2_000, 300)
    facts = {row.id: RowFacts(row.id, f"{at % 90} " + "long " * 200) for at, row in enumerate(rows)}
    found = analysed(rows, facts, of=9_000)
    classes = classes_of(found)
    assert (classes.classes, len(classes.scores), len(classes.confusion)) == (300, 50, 50)
    fewest = min(one.support for one in classes.scores)
    listed = {one.label for one in classes.scores}
    assert all(
        sum(row.truth["class"] == label for row in rows) <= fewest for label in range(300) if label not in listed
    )
    assert len(found.criteria) == 50 and max(len(one.name) for one in found.criteria) <= 120
    assert found.notes == ("Of 90 criteria the 50 with the most rows are listed.",)
    assert len(classes.worst) == 20 and len(found.model_dump_json()) < 60_000


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (ScoredRow("x", {}, {"class": 1}, (0.5, 0.5)), "nothing that is right"),
        (ScoredRow("x", {"class": 1}, {"class": 1}, (0.2, 0.3, 0.5)), "different numbers of classes"),
        (ScoredRow("x", {"class": [1]}, {"class": [1]}, (0.5, 0.5)), "different numbers of classes"),
        (ScoredRow("x", {"class": 2}, {"class": 1}, (0.5, 0.5)), "a class is none of 0 to 1"),
        (ScoredRow("x", {"class": "no"}, {"class": 1}, (0.5, 0.5)), "a class is none of 0 to 1"),
    ],
)
def test_rows_of_a_task_of_ones_own_may_be_anything(broken: ScoredRow, why: str) -> None:
    found = analysed([*class_rows(np.random.default_rng(0), 9, 2), broken])
    assert (found.rows, found.of, found.classes) == (0, 10, None) and why in found.notes[0]


def test_rows_with_values_alone_have_their_means() -> None:
    found = analyse([ScoredRow("x", {}, {}, values={"mse": 4.0})], {}, split="test", metric="mse")
    assert found is not None and found.overall.scores == {"mse": 4.0} and found.texts is None


def test_what_is_no_number_breaks_nothing_and_files_say_the_same(tmp_path: Any) -> None:
    rows = class_rows(np.random.default_rng(3), 40, 2)
    broken = [
        ScoredRow("nan", {"class": 1}, {"class": 0}, (math.nan, math.nan)),
        ScoredRow("inf\udc80", {"class": 1}, {"class": 0}, (1.0, 0.0)),
    ]
    found = classes_of(analysed([*rows, *broken]))
    assert {row.id for row in found.worst[:2]} == {"nan", "inf\\udc80"}
    assert [row.values["loss"] for row in found.worst[:2]] == [None, None]
    assert sum(one.count for one in found.calibration) == 41 and found.ece is not None
    json.dumps(found.model_dump(), allow_nan=False)
    only = classes_of(analysed([broken[0]]))
    assert only.calibration == () and only.ece is None and only.curves[0].thresholds == ()
    assert analyse([], {}, split="test", metric="accuracy") is None
    write_rows(tmp_path, "test", rows, {})
    again = read_rows(tmp_path / "test.jsonl.gz")
    assert analysed(again.rows, of=again.of) == analysed(rows)
