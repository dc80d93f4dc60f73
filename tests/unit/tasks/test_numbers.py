"""Regression: its loss, its metrics and its baselines against torch, SciPy and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import mean_absolute_error, mean_squared_error

from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.tasks.answers import NumberAnswers, number_metrics
from dryfit.tasks.base import TaskContext
from dryfit.tasks.baselines import number_baselines
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.row_metrics import collapsed, row_metric
from dryfit.tasks.rows import Row
from dryfit.tasks.scored_rows import ScoredRow

pytestmark = pytest.mark.heavy

NAMES = ("mse", "mae", "pearson", "spearman", "loss")


def task() -> CriteriaTask:
    return CriteriaTask(TaskContext(TrialSettings(), DataSettings(num_labels=1)))


def row(number: int, text: str, label: float) -> Row:
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
        assert metric is not None
        assert metric.of(weights[None].astype(float))[0] == pytest.approx(value, rel=1e-9), name
        assert metric.value == pytest.approx(number_metrics(said, right)[name], rel=1e-9), name


def test_the_baselines() -> None:
    labels = [1.0, 2.0, 9.0, 2.0]
    train = tuple(row(at, f"{'good' if label > 5 else 'bad'} text {at}", label) for at, label in enumerate(labels * 5))
    validation = (row(90, "a good text", 9.0), row(91, "a bad text", 1.0), row(92, "bad text", 2.0))
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
