"""What metrics are worth without a model: constants by hand, linear models where they must win."""

import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

import tiny
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.tables import DataSettings, TrialSettings
from dryfit.scoring.collapse import collapsed
from dryfit.scoring.row_metrics import row_metric
from dryfit.scoring.scored_row import ScoredRow
from dryfit.tasks.base import TaskContext
from dryfit.tasks.baselines.baseline import Baseline, HasBaselines, TimeIsUpError, at_most
from dryfit.tasks.baselines.classes import class_baselines
from dryfit.tasks.baselines.spans import sentences, span_baselines
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import Row

pytestmark = pytest.mark.heavy


def row(number: int, text: str, label: object = None, evidence: tuple[tuple[int, int], ...] = ()) -> Row:
    return Row(f"r{number}", text, "a criterion", label, f"g{number}", evidence, "rows.jsonl, line 1")  # pyright: ignore


def valued(baselines: list[Baseline], metric: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for one in baselines:
        found = row_metric(metric, one.rows())
        assert found is not None
        values[one.name] = found.value
    return values


def skewed(count: int, zeros: int) -> tuple[Row, ...]:
    return tuple(row(number, "some words", 0 if number < zeros else 1) for number in range(count))


def test_always_the_commonest_class_of_a_real_imbalance() -> None:
    rows = skewed(2058, 427)
    found = list(class_baselines({"train": rows, "validation": rows}, DataSettings()))
    constant = [one for one in found if not one.is_linear]
    assert [one.name for one in constant] == ["majority", "constant-0", "prior"]
    values = valued(constant, "f1_macro")
    assert values["majority"] == pytest.approx(1631 * 2 / (2 * 1631 + 427) / 2) == pytest.approx(0.4421, abs=1e-4)
    assert values["constant-0"] == pytest.approx(427 * 2 / (2 * 427 + 1631) / 2)
    assert values["prior"] == pytest.approx(0.5, abs=0.03)
    assert "79%" in constant[0].words
    share = 1631 / 2058
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert valued(constant[:1], "loss")["majority"] == pytest.approx(entropy, abs=1e-4)
    assert collapsed(constant[0].rows()) == "every row is answered with class 1"


def test_words_that_decide_are_found() -> None:
    rng = random.Random(0)
    rows = tuple(
        row(at, " ".join([*rng.choices(tiny.WORDS, k=6), "yes" if at % 3 == 0 else "no"]), int(at % 3 == 0))
        for at in range(300)
    )
    found = list(class_baselines({"train": rows[:200], "validation": rows[200:]}, DataSettings()))
    values = valued(found, "f1_macro")
    assert values["tfidf"] > 0.95 and values["tfidf-balanced"] > 0.95 > values["majority"]


def test_a_word_that_means_another_thing_with_each_criterion_is_found() -> None:
    rng, rows = random.Random(1), []
    for at in range(400):
        word = rng.choice(("sun", "rain"))
        one = row(at, " ".join([*rng.choices(tiny.WORDS, k=6), word]), int(word == ("sun", "rain")[at % 2]))
        rows.append(replace(one, criterion=("warm?", "wet?")[at % 2]))
    found = list(class_baselines({"train": tuple(rows[:300]), "validation": tuple(rows[300:])}, DataSettings()))
    assert valued(found, "accuracy")["tfidf"] > 0.95


def test_several_classes_to_a_row() -> None:
    rows = tuple(row(at, "some words", ((0,), (0, 1), ())[at % 3]) for at in range(60))
    found = list(class_baselines({"train": rows, "validation": rows}, DataSettings(multi_label=True, num_labels=3)))
    values = valued(found, "f1_macro")
    assert values["majority"] == pytest.approx((0.8 + 0 + 0) / 3)  # class 0 alone is there in most rows
    assert values["constant"] == pytest.approx((0.8 + 0.5 + 0) / 3)
    assert {type(one.answer["class"]) for one in found[0].rows()} == {list}


def test_a_class_that_no_row_has_and_a_lone_class() -> None:
    rows = tuple(row(at, "some words", 2) for at in range(10))
    other = tuple(row(at + 10, "some words", at % 3) for at in range(9))
    found = list(class_baselines({"train": rows, "validation": other}, DataSettings(num_labels=4)))
    assert all(math.isfinite(value) for value in valued(found, "loss").values())
    assert valued(found, "accuracy")["majority"] == pytest.approx(1 / 3)


def test_spans_by_hand() -> None:
    text = " First one.  The second has it! Third\n"
    assert [text[start:end] for start, end in sentences(text)] == ["First one.", "The second has it!", "Third"]
    assert sentences("   ") == [(0, 0)] and sentences("no end") == [(0, 6)]
    gold = (text.index("The"), text.index("!") + 1)
    rows = (row(0, text, evidence=(gold,)), row(1, text), row(2, " \n ", evidence=()))
    golds = {one.id: one.evidence for one in rows}
    found = {one.name: one for one in span_baselines({"train": rows, "validation": rows}, golds)}
    never, whole = found["never"].rows(), found["whole"].rows()
    assert [one.answer["span"] for one in never] == [None] * 3
    assert [one.values["exact_match"] for one in never] == [0, 1, 1]
    assert [one.answer["span"] for one in whole] == [[1, len(text) - 1], [1, len(text) - 1], None]
    words = 7
    assert whole[0].values["token_f1"] == pytest.approx(2 * 4 / (4 + words))
    assert [one.answer["span"] for one in found["first"].rows()] == [[1, 11], [1, 11], None]


def test_a_linear_model_finds_the_sentence() -> None:
    rng, rows = random.Random(2), []
    for at in range(240):
        said = [" ".join(rng.choices(tiny.WORDS, k=5)) + "." for _ in range(3)]
        where = rng.randrange(3)
        has = at % 2 == 0
        said[where] = ("I can not sleep " if has else "I went home ") + said[where]
        text, start = " ".join(said), len(" ".join([*said[:where], ""]))
        rows.append(row(at, text, evidence=((start, start + len(said[where])),) if has else ()))
    golds = {one.id: one.evidence for one in rows}
    splits = {"train": tuple(rows[:180]), "validation": tuple(rows[180:])}
    values = valued(list(span_baselines(splits, golds)), "token_f1")
    assert values["never"] == pytest.approx(0.5)
    assert values["tfidf-balanced"] > 0.9


@pytest.mark.parametrize("name", ["criteria", "evidence", "share", "joint"])
def test_every_task_of_rows_names_some(name: str) -> None:
    train, validation = (
        tuple(
            replace(row(at, one["text"], one["label"], tuple(map(tuple, one["evidence"]))), criterion=one["criterion"])
            for at, one in enumerate(tiny.rows(count, seed=count))
        )
        for count in (60, 31)
    )
    task = make_task(BuiltInTask(name), TaskContext(TrialSettings(), DataSettings()))
    assert isinstance(task, HasBaselines)

    def tokens() -> None:
        raise AssertionError("nothing here needs tokens")

    found = list(task.baselines({"train": train, "validation": validation}, tokens))
    assert sum(one.is_linear for one in found) == 2
    metric = task.metric_names()[0]
    for one in found:
        scored = one.rows()
        assert [each.id for each in scored] == [each.id for each in validation]
        assert all(isinstance(each, ScoredRow) for each in scored)
        value = row_metric(metric, scored)
        assert value is not None and np.isfinite(value.value), (one.name, metric)


def test_what_takes_too_long_is_interrupted() -> None:
    began = time.monotonic()
    with pytest.raises(TimeIsUpError), at_most(0.05):
        while True:
            sum(range(1000))
    assert time.monotonic() - began < 5
    with at_most(5):
        pass
