"""Answers of classes and numbers: from scores to decisions, at thresholds fitted on validation rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from numpy.typing import NDArray

from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.splits import TRAIN
from dryfit.settings.task_facts import MetricName
from dryfit.tasks.base import Task
from dryfit.tasks.row_metrics import ClassCounts, class_metric, correlation
from dryfit.tasks.rows import Readable
from dryfit.tasks.scored_rows import NUMBER, ScoredRow
from dryfit.tasks.tokens import Tokens, TokenSet

# Metrics of classes and numbers over a split. docs/settings.md defines each.
#
# Dimension suffixes: ``R`` rows of a split, ``C`` classes.


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
    said_R = outputs_RC.argmax(dim=-1) if guess_R is None else guess_R
    has_RC, said_RC = (F.one_hot(classes_R, outputs_RC.shape[1]) for classes_R in (labels_R, said_R))
    loss = F.cross_entropy(outputs_RC, labels_R).item()
    return _class_metrics(has_RC, said_RC, outputs_RC, loss, several=False)


def multi_label_metrics(
    outputs_RC: torch.Tensor, labels_RC: torch.Tensor, found_RC: torch.Tensor | None = None
) -> dict[str, float]:
    """Return the metrics where each class is decided for itself.

    Args:
        outputs_RC: Scores before the sigmoid, fp32, on the CPU.
        labels_RC: 1 where a row has a class, else 0.
        found_RC: Whether a class is found, bool; None: at a probability of one half.
    """
    said_RC = outputs_RC >= 0 if found_RC is None else found_RC
    loss = F.binary_cross_entropy_with_logits(outputs_RC, labels_RC.to(outputs_RC)).item()
    return _class_metrics(labels_RC, said_RC, outputs_RC, loss, several=True)


def _class_metrics(
    has_RC: torch.Tensor, said_RC: torch.Tensor, outputs_RC: torch.Tensor, loss: float, *, several: bool
) -> dict[str, float]:
    outputs_RC = outputs_RC.double() if outputs_RC.isfinite().all() else torch.full_like(outputs_RC, torch.nan)
    p_RC = outputs_RC.sigmoid() if several else outputs_RC.softmax(dim=-1)
    has, said, p = (of_RC.double().numpy() for of_RC in (has_RC, said_RC, p_RC))
    found = {str(name): class_metric(name, has, said, p, several=several) for name in Metric}
    return {**{name: metric.value for name, metric in found.items() if metric is not None}, str(Metric.LOSS): loss}


def number_metrics(outputs_R: torch.Tensor, labels_R: torch.Tensor) -> dict[str, float]:
    """Return the metrics of numbers; a correlation is NaN where one of the two sides has the same number in all rows.

    ``loss`` is the mean squared error, which is what training minimises.

    Args:
        outputs_R: The numbers that are said, on the CPU.
        labels_R: The right ones.
    """
    said_R, right_R = outputs_R.double().numpy(), labels_R.double().numpy()
    off_R = said_R - right_R if np.isfinite(said_R).all() else np.full(len(said_R), np.nan)
    errors = {Metric.MSE: float((off_R**2).mean()), Metric.MAE: float(np.abs(off_R).mean())}
    alike = {name: correlation(name, right_R, said_R).value for name in (Metric.PEARSON, Metric.SPEARMAN)}
    return {str(name): value for name, value in {**errors, **alike, Metric.LOSS: errors[Metric.MSE]}.items()}


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


# From class scores to decisions: at one half, or at thresholds that are fitted on the validation rows.
#
# A threshold is of a probability: of class 1 where a row has one of two classes, else of each class.
#
# Dimension suffixes: ``R`` rows, ``C`` classes, ``K`` probabilities that are decided by (1 of two classes, else C),
# ``N`` possible thresholds.


CLASS_THRESHOLD: Final = "class_threshold"
"""Name of the fitted threshold of class 1; with ``multi_label`` each class has one, ``class_threshold_0`` ..."""

HALF: Final = 0.5

_ROUNDING: Final = 1e-5
"""Log-odds that differ by less than this share of their usual size may be equal but for rounding."""

_ALONE: Final = 1.0
"""How far beyond the outermost log-odds a threshold lies where no two of them differ."""

_DIGITS: Final = 12
"""Of values that are compared: equal fractions computed in different ways are equal then."""

Floats: TypeAlias = NDArray[np.float64]


def check_two(num_labels: int, *, multi_label: bool) -> None:
    """Refuse fitted thresholds where a row has one of more than two classes.

    Raises:
        ConfigError: It has.
    """
    if num_labels != 2 and not multi_label:
        raise ConfigError(
            'checking head.threshold = "calibrated"',
            f"data.num_labels is {num_labels}: one threshold does not choose among more than two classes",
            allowed="two classes, or data.multi_label = true",
            hint='use head.threshold = "fixed": the likeliest class',
        )


def log_odds(scores_RC: torch.Tensor, *, multi_label: bool) -> torch.Tensor:
    """Return what is decided by as log-odds, (R, K), fp64: of class 1 of two, else of each class."""
    scores_RC = scores_RC.double()
    return scores_RC if multi_label else scores_RC[:, 1:] - scores_RC[:, :1]


def decided(
    scores_RC: torch.Tensor, fitted: Mapping[str, float], *, multi_label: bool, calibrated: bool
) -> torch.Tensor:
    """Return each row's class, (R,), int64; with ``multi_label`` whether it has each class, (R, C), bool.

    Args:
        scores_RC: Scores before softmax or sigmoid.
        fitted: Result of :func:`fit_thresholds`; one half where it has none.
        multi_label: Each class is decided for itself.
        calibrated: By the fitted thresholds; otherwise the likeliest class, or every class of at least one half.
    """
    if not calibrated:
        return scores_RC >= 0 if multi_label else scores_RC.argmax(dim=-1)
    p_RK = log_odds(scores_RC, multi_label=multi_label).sigmoid()
    names = threshold_names(p_RK.shape[1], multi_label=multi_label)
    found_RK = p_RK > torch.tensor([fitted.get(name, HALF) for name in names], dtype=torch.float64)
    return found_RK if multi_label else found_RK[:, 0].long()


def threshold_names(count: int, *, multi_label: bool) -> Sequence[str]:
    """Return the names of the thresholds among fitted numbers."""
    return [f"{CLASS_THRESHOLD}_{label}" for label in range(count)] if multi_label else [CLASS_THRESHOLD]


def fit_thresholds(
    scores_RC: torch.Tensor, labels: torch.Tensor, metric: MetricName | None, *, multi_label: bool
) -> Mapping[str, float]:
    """Return the thresholds that are best on these rows.

    Of two classes: by the metric, where it depends on the decision (``f1_macro``, ``f1``, ``accuracy``,
    ``balanced_accuracy``, ``mcc``), else by ``f1_macro``. With ``multi_label`` each class's is the best by its own F1,
    whatever the metric: together they are the best by ``f1_macro``, its mean over the classes.

    Args:
        scores_RC: Scores before softmax or sigmoid, on the CPU.
        labels: (R,), or with ``multi_label`` (R, C): 1 where a row has a class.
        metric: The study's.
        multi_label: Each class is decided for itself.
    """
    odds_RK = log_odds(scores_RC, multi_label=multi_label).numpy()
    has_RK = (labels if multi_label else labels[:, None]).numpy() == 1
    names = threshold_names(odds_RK.shape[1], multi_label=multi_label)
    by = Metric.F1 if multi_label else metric
    return {name: fit_threshold(odds_RK[:, k], has_RK[:, k], by) for k, name in enumerate(names)}


def fit_threshold(odds_R: Floats, has_R: NDArray[np.bool_], metric: MetricName | None) -> float:
    """Return the probability above which to find a class, the best by a metric.

    Every threshold that decides differently is tried: those in the middle (of log-odds) between two rows, one below
    all rows, one above all, and one half. Rows that only rounding may separate are not separated, so that rounding
    changes no decision on these rows. Of equally good thresholds the nearest to one half is taken, then the smaller.

    Args:
        odds_R: Log-odds of the class.
        has_R: Whether a row has it.
        metric: As of :func:`fit_thresholds`.

    Returns:
        The threshold; one half where a number is not finite.
    """
    if len(odds_R) == 0 or not np.isfinite(odds_R).all():
        return HALF
    order = np.argsort(odds_R, kind="stable")
    sorted_R, rows = odds_R[order], len(odds_R)
    gaps = np.diff(sorted_R)
    near = _ROUNDING * float(np.median(np.abs(sorted_R)))
    (apart,) = (gaps > near).nonzero()
    beyond = float(np.median(gaps[apart])) / 2 if len(apart) else _ALONE
    cuts_N = np.concatenate([[sorted_R[0] - beyond], sorted_R[apart] + gaps[apart] / 2, [sorted_R[-1] + beyond]])
    below_N = np.concatenate([[0], apart + 1, [rows]])
    p_N, p_R = _probability(cuts_N), _probability(sorted_R)
    p_N[0], p_N[-1] = min(p_N[0], np.nextafter(p_R[0], -1)), max(p_N[-1], p_R[-1])
    if np.abs(sorted_R).min() > near:  # no row is at one half
        half = np.searchsorted(sorted_R, 0.0)
        cuts_N, p_N, below_N = np.append(cuts_N, 0.0), np.append(p_N, HALF), np.append(below_N, half)
    # Probabilities next to 0 or 1 may be equal numbers though their log-odds differ.
    before_N, after_N = np.append(-np.inf, p_R)[below_N], np.append(p_R, np.inf)[below_N]
    separates_N = (before_N <= p_N) & (p_N < after_N)
    cuts_N, p_N, below_N = cuts_N[separates_N], p_N[separates_N], below_N[separates_N]
    had_N = np.append(0, has_R[order].cumsum())[below_N]
    said_N2 = np.stack([below_N, rows - below_N], axis=1).astype(np.float64)
    both_N2 = np.stack([below_N - had_N, has_R.sum() - had_N], axis=1).astype(np.float64)
    has_N2 = np.broadcast_to([rows - has_R.sum(), has_R.sum()], both_N2.shape).astype(np.float64)
    values_N = _values(metric, ClassCounts(has_N2, said_N2, both_N2)).round(_DIGITS)
    best_N = values_N == values_N.max()
    return min(zip(cuts_N[best_N].tolist(), p_N[best_N].tolist(), strict=True), key=lambda one: (abs(one[0]), one[0]))[
        1
    ]


def _probability(odds: Floats) -> Floats:
    return torch.from_numpy(np.ascontiguousarray(odds)).sigmoid().numpy()  # as decisions are made


def _values(metric: MetricName | None, counts: ClassCounts) -> Floats:
    """Return the metric of each way of deciding between a class and its absence."""
    match metric:
        case Metric.F1:
            return counts.f1[:, 1]
        case Metric.ACCURACY:
            return counts.both.sum(axis=1) / counts.has.sum(axis=1)
        case Metric.BALANCED_ACCURACY:
            return counts.balanced_accuracy
        case Metric.MCC:
            return counts.matthews
        case _:
            return counts.f1.mean(axis=1)


# Answers of a regression: one number to a row.
#
# Dimension suffix: ``R`` rows of a split.


_FAR: Final = 10.0
"""A mean or standard deviation of labels from which on they are called far from 0."""


@final
@dataclass(frozen=True, slots=True)
class NumberAnswers:
    """Numbers of rows.

    Attributes:
        said_R: On the CPU.
        labels_R: The right ones.
    """

    said_R: torch.Tensor
    labels_R: torch.Tensor

    def fit(self) -> Mapping[str, float]:
        """Choose nothing."""
        return {}

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return every metric of numbers."""
        del fitted
        return number_metrics(self.said_R, self.labels_R)

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield the number of each row."""
        del rows, fitted
        yield from ({"value": said} for said in self.said_R.tolist())

    def scored_rows(self, ids: Sequence[str], fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row's number beside the right one, with its errors."""
        del fitted
        for name, right, said in zip(ids, self.labels_R.tolist(), self.said_R.double().tolist(), strict=True):
            yield scored_number(name, right, said)


def scored_number(name: str, right: float, said: float) -> ScoredRow:
    """Return a row with a number beside the right one, and its errors."""
    squared, absolute = (said - right) ** 2, abs(said - right)
    values: dict[str, float] = {Metric.MSE: squared, Metric.MAE: absolute, Metric.LOSS: squared}
    return ScoredRow(name, {NUMBER: right}, {NUMBER: said}, values=values)


def scale_remark(tokens: Tokens) -> tuple[str, ...]:
    """Return a remark on training labels far from 0, where a fresh head's numbers lie; nothing where they are near."""
    split: TokenSet | None = tokens.splits.get(TRAIN)
    if split is None or len(split) < 2:
        return ()
    mean, spread = split.labels_R.mean().item(), split.labels_R.std().item()
    if abs(mean) <= _FAR and spread <= _FAR:
        return ()
    found = f"labels have the mean {mean:.4g} and the standard deviation {spread:.4g}"
    return (f"{found}: training begins near 0 and takes small steps; mean 0 and deviation 1 are learned soonest",)
