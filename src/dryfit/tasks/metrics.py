"""Metrics of classes and numbers over a split. docs/settings.md defines each.

Dimension suffixes: ``R`` rows of a split, ``C`` classes.
"""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError
from dryfit.tasks.base import Task
from dryfit.tasks.row_metrics import class_metric, correlation


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
