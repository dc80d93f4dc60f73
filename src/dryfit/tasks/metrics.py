"""Metrics of classes and numbers over a split, most of them by scikit-learn and SciPy. docs/settings.md defines each.

Dimension suffixes: ``R`` rows of a split, ``C`` classes, ``N`` probabilities.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from numpy.typing import NDArray

from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import Metric
from dryfit.scoring.row_metrics import CALIBRATION_BINS
from dryfit.tasks.base import Task

Values = dict[Metric, Any]


def one_class_metrics(
    outputs_RC: torch.Tensor, labels_R: torch.Tensor, guess_R: torch.Tensor | None = None
) -> dict[str, float]:
    """Return the metrics where each row has one class.

    ``loss`` is the plain cross entropy whatever the training loss, so that trials can be compared by it. It does not
    depend on the guesses, nor do ``auroc`` and ``ece``.

    Args:
        outputs_RC: Scores before softmax, fp32, on the CPU.
        labels_R: The classes.
        guess_R: The classes that are guessed; None: the likeliest.
    """
    classes = outputs_RC.shape[1]
    likeliest_R = outputs_RC.argmax(dim=-1)
    truth_R, said_R = labels_R.numpy(), (likeliest_R if guess_R is None else guess_R).numpy()
    _, recall_C, f1_C, support_C = _counted(truth_R, said_R, classes)
    values: Values = {
        Metric.F1_MACRO: f1_C.mean(),
        Metric.ACCURACY: sklearn_metrics().accuracy_score(truth_R, said_R),
        Metric.BALANCED_ACCURACY: recall_C[support_C > 0].mean(),
        Metric.MCC: sklearn_metrics().matthews_corrcoef(truth_R, said_R),
        Metric.AUROC: math.nan,
        Metric.ECE: math.nan,
        Metric.LOSS: F.cross_entropy(outputs_RC, labels_R).item(),
    }
    if classes == 2:
        values[Metric.F1] = f1_C[1]
    if outputs_RC.isfinite().all():
        p_RC = outputs_RC.double().softmax(dim=-1)
        # Of two classes one says all: the other's ranking is the same, turned round.
        asked = range(1, 2) if classes == 2 else range(classes)
        values[Metric.AUROC] = _auroc(p_RC, F.one_hot(labels_R, classes), asked)
        values[Metric.ECE] = calibration_error(p_RC.amax(dim=-1).float().numpy(), truth_R == likeliest_R.numpy())
    return _plain(values)


def multi_label_metrics(
    outputs_RC: torch.Tensor, labels_RC: torch.Tensor, found_RC: torch.Tensor | None = None
) -> dict[str, float]:
    """Return the metrics where each class is decided for itself.

    Args:
        outputs_RC: Scores before the sigmoid, fp32, on the CPU.
        labels_RC: 1 where a row has a class, else 0.
        found_RC: Whether a class is found, bool; None: at a probability of one half.
    """
    classes = outputs_RC.shape[1]
    # One more class that nobody has: scikit-learn takes a single column for something else.
    truth_RC = np.pad(labels_RC.numpy(), ((0, 0), (0, 1)))
    found_RC = outputs_RC >= 0 if found_RC is None else found_RC
    guess_RC = np.pad(found_RC.numpy().astype(truth_RC.dtype), ((0, 0), (0, 1)))
    _, _, f1_C, _ = _counted(truth_RC, guess_RC, classes)
    values: Values = {
        Metric.F1_MACRO: f1_C.mean(),
        Metric.ACCURACY: sklearn_metrics().accuracy_score(truth_RC, guess_RC),
        Metric.AUROC: math.nan,
        Metric.ECE: math.nan,
        Metric.LOSS: F.binary_cross_entropy_with_logits(outputs_RC, labels_RC.to(outputs_RC)).item(),
    }
    if outputs_RC.isfinite().all():
        p_RC = outputs_RC.double().sigmoid()
        values[Metric.AUROC] = _auroc(p_RC, labels_RC, range(classes))
        values[Metric.ECE] = calibration_error(p_RC.flatten().numpy(), labels_RC.flatten().numpy())
    return _plain(values)


def number_metrics(outputs_R: torch.Tensor, labels_R: torch.Tensor) -> dict[str, float]:
    """Return the metrics of numbers; a correlation is NaN where one of the two sides has the same number in all rows.

    ``loss`` is the mean squared error, which is what training minimises.

    Args:
        outputs_R: The numbers that are said, on the CPU.
        labels_R: The right ones.
    """
    said_R, right_R = outputs_R.double().numpy(), labels_R.double().numpy()
    values: Values = dict.fromkeys((Metric.MSE, Metric.MAE, Metric.PEARSON, Metric.SPEARMAN), math.nan)
    if np.isfinite(said_R).all():
        values[Metric.MSE] = sklearn_metrics().mean_squared_error(right_R, said_R)
        values[Metric.MAE] = sklearn_metrics().mean_absolute_error(right_R, said_R)
        if np.ptp(said_R) > 0 and np.ptp(right_R) > 0:
            values[Metric.PEARSON], values[Metric.SPEARMAN] = _correlations(right_R, said_R)
    return _plain(values | {Metric.LOSS: values[Metric.MSE]})


def _correlations(one_R: NDArray[Any], other_R: NDArray[Any]) -> tuple[float, float]:
    """Return Pearson's correlation of numbers, and Spearman's: that of their ranks, of equal ones the mean rank."""
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)  # says that digits are lost, as they are
        by_value: Any = stats.pearsonr(one_R, other_R)
        by_rank: Any = stats.spearmanr(one_R, other_R)
    return float(by_value.statistic), float(by_rank.statistic)


def check_metrics(task: Task, asked: Iterable[str]) -> None:
    """Refuse metrics that a task does not have with these rows.

    Raises:
        ConfigError: The task lacks one of them.
    """
    known = task.metric_names()
    for metric in asked:
        if metric not in known:
            data = task.context.data
            words = f"with {data.num_labels} classes" + (", any number of them to a row" if data.multi_label else "")
            words = words if task.classes is not None else f"of {type(task).__name__}"
            raise ConfigError("checking study.metric", f"{metric} {words}", ", ".join(known), f"use {known[0]}")


def sklearn_metrics() -> Any:
    """Return scikit-learn's metrics, imported late: they take a second and 100 MB, which loading need not pay."""
    from sklearn import metrics

    return metrics


def calibration_error(p_N: NDArray[Any], true_N: NDArray[Any]) -> float:
    """Return the expected calibration error: the mean over bins of |share that is true - mean probability|.

    Bins are [k/15, (k+1)/15); a probability of exactly 1 has one of its own. Each counts by the probabilities in it
    (Naeini et al. 2015, AAAI 29(1); Guo et al. 2017, arXiv:1706.04599, equation 3).

    Args:
        p_N: Probabilities, from 0 to 1.
        true_N: 1 where what was given that probability is true, else 0.
    """
    bins_N = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1), p_N, side="right")
    return float(np.abs(np.bincount(bins_N, weights=true_N - p_N.astype(np.float64))).sum() / len(p_N))


def _counted(truth: np.ndarray, guess: np.ndarray, classes: int) -> Any:
    """Return precision, recall, F1 and support of each class, in one call: input checks cost more than sums."""
    nothing = 0  # the score where a class has no row; the default is a warning
    count = sklearn_metrics().precision_recall_fscore_support
    return count(truth, guess, labels=np.arange(classes), average=None, zero_division=nothing)


def _auroc(p_RC: torch.Tensor, truth_RC: torch.Tensor, classes: range) -> float:
    """Return the mean AUROC of the classes that some rows have and some do not; NaN where there is none."""
    rows = len(truth_RC)
    defined = [label for label in classes if 0 < int(truth_RC[:, label].sum()) < rows]
    if not defined:
        return math.nan
    truth, p = truth_RC.numpy(), p_RC.numpy()
    rank = sklearn_metrics().roc_auc_score
    return float(np.mean([rank(truth[:, label], p[:, label]) for label in defined]))


def _plain(values: Values) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
