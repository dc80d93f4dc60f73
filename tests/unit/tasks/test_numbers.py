"""What metrics are worth without a model: constants by hand, linear models where they must win."""

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score, mean_absolute_error, mean_squared_error

import tiny
import tiny_lms
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.choices import BuiltInTask, Metric
from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.tasks.answers import NumberAnswers, number_metrics
from dryfit.tasks.base import TaskContext
from dryfit.tasks.baselines import (
    Baseline,
    HasBaselines,
    TimeIsUpError,
    at_most,
    class_baselines,
    likeliest_sentences,
    number_baselines,
    sentences,
    span_baselines,
)
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.own import make_task
from dryfit.tasks.row_metrics import collapsed, row_metric
from dryfit.tasks.rows import Row, Splits
from dryfit.tasks.scored_rows import ScoredRow

pytestmark = pytest.mark.heavy


def row(number: int, text: str, label: object = None, evidence: tuple[tuple[int, int], ...] = ()) -> Row:
    return Row(f"r{number}", text, "a criterion", label, f"g{number}", evidence, "rows.jsonl, line 1")  # pyright: ignore


def valued(baselines: list[Baseline], metric: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for one in baselines:
        found = row_metric(metric, one.scored()[0])
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
    assert collapsed(constant[0].scored()[0]) == "every row is answered with class 1"


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
    assert {type(one.answer["class"]) for one in found[0].scored()[0]} == {list}


def by_threshold(found: list[Baseline], label: int, several: bool) -> float:
    """The best F1 of a class, or of two classes the best mean, of any threshold of the plain linear model."""
    rows = next(one for one in found if one.name == "tfidf").scored()[0]
    p_R = np.array([one.p[label] for one in rows])
    truths = [one.truth["class"] for one in rows]
    has_R = np.array([label in one if isinstance(one, list) else one == label for one in truths])
    said = [p_R > cut for cut in (-1.0, *p_R, 0.5)]
    return max(f1_score(has_R, one, average="binary" if several else "macro", zero_division=0.0) for one in said)


def test_thresholds_of_words_are_fitted_where_those_of_trials_are() -> None:
    rng = random.Random(2)
    texts = [" ".join(rng.choices(tiny.WORDS, k=6)) for _ in range(200)]  # of which nothing can be learned
    one = tuple(row(at, text, int(rng.random() < 0.2)) for at, text in enumerate(texts))
    splits = {"train": one[:160], "validation": one[160:]}
    plain = list(class_baselines(splits, DataSettings()))
    fitted = valued(list(class_baselines(splits, DataSettings(), fits=True, metric=Metric.F1_MACRO)), "f1_macro")
    assert fitted["tfidf"] == pytest.approx(by_threshold(plain, 1, several=False))
    assert fitted["tfidf"] > valued(plain, "f1_macro")["tfidf"]
    assert {**valued(plain, "f1_macro"), "tfidf": 0, "tfidf-balanced": 0} == {**fitted, "tfidf": 0, "tfidf-balanced": 0}


def test_with_several_classes_a_row_each_has_a_fitted_threshold() -> None:
    rng = random.Random(3)
    rows = tuple(
        row(at, " ".join(rng.choices(tiny.WORDS, k=6)), tuple(one for one in range(3) if rng.random() < 0.3))
        for at in range(200)
    )
    splits, data = {"train": rows[:160], "validation": rows[160:]}, DataSettings(multi_label=True, num_labels=3)
    plain = list(class_baselines(splits, data))
    fitted = list(class_baselines(splits, data, fits=True))
    best = np.mean([by_threshold(plain, label, several=True) for label in range(3)])
    assert valued(fitted, "f1_macro")["tfidf"] == pytest.approx(best)
    assert valued(plain, "f1_macro")["tfidf"] < best


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
    never, whole = found["never"].scored()[0], found["whole"].scored()[0]
    assert [one.answer["span"] for one in never] == [None] * 3
    assert [one.values["exact_match"] for one in never] == [0, 1, 1]
    assert [one.answer["span"] for one in whole] == [[1, len(text) - 1], [1, len(text) - 1], None]
    words = 7
    assert whole[0].values["token_f1"] == pytest.approx(2 * 4 / (4 + words))
    assert [one.answer["span"] for one in found["first"].scored()[0]] == [[1, 11], [1, 11], None]


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


def half_told(count: int) -> dict[str, tuple[Row, ...]]:
    """Rows of eight sentences; of those with "can sleep" in one, half have it as evidence: no sentence is likely."""
    rng, rows = random.Random(4), []
    for at in range(count):
        said = [" ".join(rng.choices(tiny.WORDS, k=4)) + "." for _ in range(8)]
        if at % 4 < 2:
            said[at % 8] = f"I can sleep {said[at % 8]}"
        text, start = " ".join(said), len(" ".join([*said[: at % 8], ""]))
        rows.append(row(at, text, evidence=((start, start + len(said[at % 8])),) if at % 4 == 0 else ()))
    return {"train": tuple(rows[: count // 2]), "validation": tuple(rows[count // 2 :])}


@pytest.mark.parametrize("metric", ["span_balanced", "token_f1", "loss", None])
def test_a_linear_models_threshold_of_none_is_fitted_as_a_trained_ones(metric: Metric | None) -> None:
    splits = half_told(240)
    golds = {one.id: one.evidence for rows in splits.values() for one in rows}
    shown = metric or "token_f1" if metric != "loss" else "token_f1"
    fixed = valued(list(span_baselines(splits, golds)), shown)
    fitted = valued(list(span_baselines(splits, golds, fits=True, metric=metric)), shown)
    assert fitted["tfidf"] >= max(fixed["tfidf"], fitted["never"])
    assert fitted["never"] == fixed["never"]
    if metric == "span_balanced":
        assert fitted["tfidf"] > fixed["tfidf"] + 0.05
    best = likeliest_sentences(splits, golds, balanced=False)
    (at_half,) = (one.rows() for one in span_baselines(splits, golds) if one.name == "tfidf")
    assert [one.answer["span"] is None for one in at_half] == (best.differences_R > 0).tolist()


def test_the_task_says_whether_thresholds_are_fitted() -> None:
    splits, values = half_told(160), {}
    for policy in ("calibrated", "threshold"):
        settings = TrialSettings.model_validate({"span": {"null_policy": policy}})
        task = make_task(BuiltInTask.EVIDENCE, TaskContext(settings, DataSettings(), metric=Metric.SPAN_BALANCED))
        assert isinstance(task, HasBaselines)
        values[policy] = valued(list(task.baselines(splits, lambda: None)), "span_balanced")  # pyright: ignore
    assert values["calibrated"]["tfidf"] > values["threshold"]["tfidf"] + 0.05


def test_linear_spans_of_rows_that_say_nothing() -> None:
    """White space has no sentence; where no training sentence is right, none is likelier than another."""
    rows = (row(0, "One. Two."), row(1, " \n "), row(2, "Three. Four.", evidence=((0, 6),)))
    golds = {one.id: one.evidence for one in rows}
    splits = {"train": rows[:2], "validation": rows}
    best = likeliest_sentences(splits, golds, balanced=False)
    assert best.spans_R2.tolist() == [[0, 4], [0, 0], [0, 6]]
    assert best.differences_R.tolist() == [0.5, math.inf, 0.5]
    for fits in (False, True):
        found = span_baselines(splits, golds, fits=fits, metric=Metric.SPAN_BALANCED)
        (one,) = (one.rows() for one in found if one.name == "tfidf")
        assert one[1].answer["span"] is None and len(one) == 3


def tiny_rows(count: int) -> tuple[Row, ...]:
    return tuple(
        replace(row(at, one["text"], one["label"], tuple(map(tuple, one["evidence"]))), criterion=one["criterion"])
        for at, one in enumerate(tiny.rows(count, seed=count))
    )


@pytest.mark.parametrize("name", ["criteria", "evidence", "share", "joint"])
def test_every_task_of_rows_names_some(name: str) -> None:
    train, validation = tiny_rows(60), tiny_rows(31)
    task = make_task(BuiltInTask(name), TaskContext(TrialSettings(), DataSettings()))
    assert isinstance(task, HasBaselines)

    def tokens() -> None:
        raise AssertionError("nothing here needs tokens")

    found = list(task.baselines({"train": train, "validation": validation}, tokens))
    assert sum(one.is_linear for one in found) == 2
    metric = task.metric_names()[0]
    for one in found:
        scored = one.scored()[0]
        assert [each.id for each in scored] == [each.id for each in validation]
        assert all(isinstance(each, ScoredRow) for each in scored)
        value = row_metric(metric, scored)
        assert value is not None and np.isfinite(value.value), (one.name, metric)


def test_quotations_and_classes_that_nobody_generated(tmp_path: Path) -> None:
    train, validation = tiny_rows(60), tiny_rows(31)
    splits: Splits = {"train": train, "validation": validation}
    settings = TrialSettings.model_validate(
        {
            "model": {"name": str(tiny_lms.causal_lm(tmp_path / "lm"))},
            "train": {"max_length": 200},
            "lm": {"format": "both", "answers": "never, always walk", "generate_rows": 40, "packing": True},
        }
    )
    task = make_task(BuiltInTask.CAUSAL_LM, TaskContext(settings, DataSettings()))
    assert isinstance(task, HasBaselines)
    tokens = task.tokenise(splits, load_tokenizer(settings.model))
    found = {one.name: one for one in task.baselines(splits, lambda: tokens)}
    assert list(found) == ["unigram", "commonest", "none", "whole", "first", "tfidf", "tfidf-balanced"]
    measured = {name: one.scored()[0] for name, one in found.items() if name != "unigram"}
    by_id = {one.id: one for one in validation}
    asked = [one.id for one in measured["none"]]
    assert len(asked) == 40 and all([one.id for one in rows] == asked for rows in measured.values())
    quoted = [one for one in asked if one.endswith("(evidence)")]
    without = [by_id[one.removesuffix(" (evidence)")] for one in quoted]
    right = row_metric("token_f1", measured["none"])
    assert right is not None and right.value == pytest.approx(sum(not one.evidence for one in without) / len(without))
    whole = {one.id: one for one in measured["whole"]}
    text_of = whole[next(one for one in quoted if by_id[one.removesuffix(" (evidence)")].evidence)]
    gold, text = text_of.truth["text"].split(), text_of.answer["text"].split()
    assert text_of.values["token_f1"] == pytest.approx(2 * len(gold) / (len(gold) + len(text)))
    said = {one.answer["text"] for one in measured["commonest"]}
    zeros = sum(one.label == 0 for one in train)
    assert said == {"never" if zeros > len(train) / 2 else "always walk", "none"}
    exact = row_metric("exact_match", measured["tfidf-balanced"])
    assert exact is not None and 0 <= exact.value <= 1


def test_what_takes_too_long_is_interrupted() -> None:
    with pytest.raises(TimeIsUpError), at_most(0.05):
        while True:
            sum(range(1000))
    with at_most(60):
        pass


# ---- Regression: its loss, its metrics and its baselines against torch, SciPy and scikit-learn


NAMES = ("mse", "mae", "pearson", "spearman", "loss")


def task() -> CriteriaTask:
    return CriteriaTask(TaskContext(TrialSettings(), DataSettings(num_labels=1)))


def numbered(number: int, text: str, label: float) -> Row:
    return Row(f"r{number}", text, None, label, f"g{number}", (), "rows.jsonl, line 1")


def drawn(count: int, *, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    right = torch.randn(count, generator=generator, dtype=torch.float64)
    said = right + torch.randn(count, generator=generator, dtype=torch.float64)
    return (said.round(), right.round()) if ties else (said, right)


def scored(said: torch.Tensor, right: torch.Tensor) -> list[ScoredRow]:
    return list(NumberAnswers(said, right).scored_rows([str(at) for at in range(len(said))], {}))


def test_what_the_task_is() -> None:
    found = task()
    assert (found.num_outputs, found.classes, found.metric_names()) == (1, None, NAMES)
    assert found.batch_sizes(4, 9, segments=False)["labels"] == (4,)


def test_the_loss_is_torchs_and_parts_of_a_batch_add_up() -> None:
    said, right = drawn(12)
    outputs = said[:, None].clone().requires_grad_()
    batch = {"labels": right}
    mean = task().loss_sum(outputs, batch) / task().batch_weight(batch)
    want = torch.nn.MSELoss()(outputs[:, 0], right)
    assert torch.equal(mean, want)
    assert torch.allclose(*(torch.autograd.grad(one, outputs)[0] for one in (mean, want)))
    parts = [task().loss_sum(outputs[part], {"labels": right[part]}) for part in (slice(5), slice(5, 12))]
    assert torch.allclose(sum(parts) / 12, want)


@pytest.mark.parametrize("ties", [False, True])
def test_metrics_are_those_of_the_libraries(ties: bool) -> None:
    said, right = drawn(70, ties=ties)
    found = number_metrics(said, right)
    assert tuple(found) == NAMES
    assert found["mse"] == found["loss"] == pytest.approx(mean_squared_error(right, said), rel=1e-12)
    assert found["mae"] == pytest.approx(mean_absolute_error(right, said), rel=1e-12)
    assert found["pearson"] == pytest.approx(stats.pearsonr(right, said).statistic, rel=1e-12)
    assert found["spearman"] == pytest.approx(stats.spearmanr(right, said).statistic, rel=1e-12)


def test_what_cannot_be_said() -> None:
    said, right = drawn(9)
    for one, other in ((torch.full_like(said, 2.0), right), (said, torch.full_like(right, 2.0)), (said[:1], right[:1])):
        found = number_metrics(one, other)
        assert math.isnan(found["pearson"]) and math.isnan(found["spearman"]) and found["mse"] >= 0
    said[3] = math.inf
    assert all(math.isnan(value) for value in number_metrics(said, right).values())
    for name in ("pearson", "spearman"):
        metric = row_metric(name, scored(said, right))
        assert metric is not None and math.isnan(metric.value)


@pytest.mark.parametrize("ties", [False, True])
def test_metrics_of_weighted_rows_are_those_of_repeated_rows(ties: bool) -> None:
    said, right = drawn(40, ties=ties)
    weights = np.random.default_rng(4).integers(0, 4, 40)
    again = np.repeat(np.arange(40), weights)
    want = number_metrics(said[again], right[again])
    for name, value in want.items():
        metric = row_metric(name, scored(said, right))
        assert metric.of(weights[None].astype(float))[0] == pytest.approx(value, rel=1e-9), name
        assert metric.value == pytest.approx(number_metrics(said, right)[name], rel=1e-9), name


def test_the_baselines() -> None:
    labels = [1.0, 2.0, 9.0, 2.0]
    train = tuple(
        numbered(at, f"{'good' if label > 5 else 'bad'} text {at}", label) for at, label in enumerate(labels * 5)
    )
    validation = (numbered(90, "a good text", 9.0), numbered(91, "a bad text", 1.0), numbered(92, "bad text", 2.0))
    found = {one.name: one for one in number_baselines({"train": train, "validation": validation})}
    assert [name for name, one in found.items() if one.is_linear] == ["tfidf"]
    assert found["mean"].words == "always 3.5, the mean of the training rows"
    assert found["median"].words == "always 2, the median of the training rows"
    said = {name: [one.answer["number"] for one in found[name].rows()] for name in found}
    assert said["mean"] == [3.5] * 3 and said["median"] == [2.0] * 3
    assert said["tfidf"][0] > 6 > 3 > max(said["tfidf"][1:])
    metric = row_metric("mae", found["mean"].rows())
    assert metric is not None and metric.value == pytest.approx((5.5 + 2.5 + 1.5) / 3)


def test_a_constant_answer_has_collapsed() -> None:
    right = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert (
        collapsed(scored(torch.tensor([2.5, 2.501, 2.499, 2.5]), right)) == "every row is answered with 2.5, or nearly"
    )
    assert not collapsed(scored(torch.tensor([2.4, 2.5, 2.5, 2.6]), right))
    assert not collapsed(scored(torch.full((4,), 2.0), torch.full((4,), 2.0)))
    assert not collapsed(scored(torch.tensor([2.0]), right[:1]))
    assert not collapsed(scored(torch.tensor([math.nan, 1.0, 1.0, 1.0]), right))
