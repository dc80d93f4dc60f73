"""The mean of several models' classes: of probabilities, whatever the scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dryfit.core.errors import ConfigError
from dryfit.core.settings.tables import DataSettings, TrialSettings
from dryfit.tasks.averaging import averaging, mean_scores
from dryfit.tasks.base import TaskContext
from dryfit.tasks.classification import ClassAnswers, CriteriaTask
from dryfit.tasks.lm.causal_lm import CausalLmTask

DATA = DataSettings(train="train.jsonl", validation="validation.jsonl")


@given(seed=st.integers(0, 1000), models=st.integers(1, 5), classes=st.integers(2, 6), spread=st.floats(0.1, 30))
def test_it_is_the_mean_of_probabilities(seed: int, models: int, classes: int, spread: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = [torch.randn(7, classes, generator=rng, dtype=torch.float64) * spread for _ in range(models)]
    one_class = mean_scores(scores, multi_label=False)
    by_hand = sum(one.softmax(dim=-1) for one in scores) / models
    torch.testing.assert_close(one_class.softmax(dim=-1), by_hand, rtol=1e-12, atol=1e-14)
    several = mean_scores(scores, multi_label=True)
    each = sum(one.sigmoid() for one in scores) / models
    torch.testing.assert_close(several.sigmoid(), each, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("multi_label", [False, True])
def test_what_no_number_holds_is_still_averaged(multi_label: bool) -> None:
    """Probabilities of e-4000: their logs are numbers, and so metrics are."""
    sure, unsure = torch.tensor([[4000.0, -4000.0]]), torch.tensor([[0.0, 0.0]])
    mean = mean_scores([sure, unsure], multi_label=multi_label)
    assert mean.isfinite().all()
    found = mean.sigmoid() if multi_label else mean.softmax(dim=-1)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25]], dtype=torch.float64))
    both = mean_scores([sure, sure], multi_label=multi_label)
    labels = torch.tensor([[0, 1]], dtype=torch.uint8) if multi_label else torch.tensor([1])
    assert ClassAnswers(both, labels, multi_label).metrics({})["loss"] == pytest.approx(4000 if multi_label else 8000)


def test_a_mean_of_scores_would_be_another_one() -> None:
    """One model that is very sure does not decide alone."""
    scores = [torch.tensor([[30.0, 0.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 2.0]])]
    assert (sum(scores) / 3).argmax() == 0
    assert mean_scores(scores, multi_label=False).argmax() == 1


def test_a_task_without_a_mean_is_refused() -> None:
    def made(task: object) -> object:
        return averaging(task)  # type: ignore[arg-type]

    assert made(CriteriaTask(TaskContext(TrialSettings(), DATA)))
    with pytest.raises(ConfigError, match="CausalLmTask does not say what their mean is"):
        made(CausalLmTask(TaskContext(TrialSettings(), DATA)))
