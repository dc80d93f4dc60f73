"""What a classifier does well and badly: classes, confusion, calibration, precision over recall, the worst rows.

Dimension suffixes: ``R`` rows, ``C`` classes, ``N`` probabilities of a row that are judged, ``U`` thresholds.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from dryfit.core.jobs.analysis import CalibrationBin, ClassAnalysis, ClassScore, PrecisionRecall, WorstRow
from dryfit.core.settings.choices import Metric
from dryfit.core.text.words import sendable
from dryfit.scoring.row_metrics import CALIBRATION_BINS, Floats, both_parts, judged, one_hot, row_metric
from dryfit.scoring.scored_row import CLASS, ScoredRow

MOST_CLASSES: Final = 50
MOST_CURVES: Final = 10
MOST_POINTS: Final = 100
MOST_WORST: Final = 20
HALF: Final = 0.5
_MOST_ID: Final = 200


def analysed_classes(
    rows: Sequence[ScoredRow], thresholds: Sequence[float], names: Sequence[str] = ()
) -> ClassAnalysis:
    """Return the analysis of rows that are answered with classes.

    Args:
        rows: One at least; each with the probabilities of as many classes.
        thresholds: Of class 1 of two, or with several classes a row of each class; where there is none, one half.
        names: Of the classes; where these are not as many, they have none.
    """
    several, classes = isinstance(rows[0].truth[CLASS], list), len(rows[0].p)
    names = tuple(names) if len(names) == classes else ()
    # As many digits as files of scored rows keep, so that these give the same.
    p_RC = np.array([[float(f"{p:.9g}") for p in row.p] for row in rows])
    has_RC, said_RC = (one_hot([part[CLASS] for part in parts], classes) for parts in both_parts(rows))
    support_C = has_RC.sum(axis=0)
    by_support = np.argsort(-support_C, kind="stable")
    shown = np.sort(by_support[:MOST_CLASSES])
    scores = [_class_score(int(label), has_RC[:, label], said_RC[:, label]) for label in shown]
    counts = np.rint(has_RC.T @ said_RC).astype(int)[np.ix_(shown, shown)].tolist()
    finite_R = np.array([all(map(math.isfinite, row.p)) for row in rows])
    curved = [1] if classes == 2 and not several else np.sort(by_support[:MOST_CURVES]).tolist() if several else []
    asked = {score.label: score for score in scores}
    return ClassAnalysis(
        classes=classes,
        several=several,
        scores=tuple(scores),
        confusion=() if several else tuple(map(tuple, counts)),
        ece=_ece([row for row, finite in zip(rows, finite_R, strict=True) if finite]),
        calibration=tuple(_calibration(p_RC[finite_R], has_RC[finite_R], several=several)),
        curves=tuple(
            _curve(asked[label], _threshold(thresholds, at), p_RC[finite_R, label], has_RC[finite_R, label])
            for at, label in ((label if several else 0, label) for label in curved)
        ),
        worst=_worst(rows, _cross_entropies(p_RC, has_RC, several=several), names),
        names=names,
    )


def number(value: float) -> float | None:
    """Return a number with six digits; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def row_name(row: ScoredRow) -> str:
    """Return a row's id, cut where it is long."""
    return sendable(row.id)[:_MOST_ID]


def _class_score(label: int, has_R: Floats, said_R: Floats) -> ClassScore:
    has, said, both = (int(np.rint(one)) for one in (has_R.sum(), said_R.sum(), has_R @ said_R))
    return ClassScore(
        label=label,
        support=has,
        answered=said,
        right=both,
        precision=number(both / said) if said else None,
        recall=number(both / has) if has else None,
        f1=float(f"{2 * both / (has + said):.6g}") if both else 0.0,
    )


def _ece(rows: Sequence[ScoredRow]) -> float | None:
    metric = row_metric(Metric.ECE, rows)
    return number(metric.value) if metric is not None else None


def _calibration(p_RC: Floats, has_RC: Floats, *, several: bool) -> list[CalibrationBin]:
    """Return the bins that have a probability; the probability 1 is in one of its own, as in the metric."""
    found = judged(p_RC, has_RC, several=several)
    bins: list[CalibrationBin] = []
    for at in np.unique(found.bins_RN).tolist():
        inside_RN = found.bins_RN == at
        low, high = ((at - 1) / CALIBRATION_BINS, min(at / CALIBRATION_BINS, 1.0))
        p, share = float(found.p_RN[inside_RN].mean()), float(found.true_RN[inside_RN].mean())
        count = int(inside_RN.sum())
        bins.append(
            CalibrationBin(
                low=round(low, 6), high=round(high, 6), count=count, p=number(p) or 0.0, share=number(share) or 0.0
            )
        )
    return bins


def _threshold(thresholds: Sequence[float], at: int) -> float:
    return thresholds[at] if at < len(thresholds) else HALF


def _curve(score: ClassScore, threshold: float, p_R: Floats, has_R: Floats) -> PrecisionRecall:
    """Return precision and recall where a threshold falls, with the average precision of scikit-learn's user guide."""
    order = np.argsort(-p_R, kind="stable")
    p_R, has_R = p_R[order], has_R[order]
    # The last row of each probability: rows of one probability are answered alike.
    ends_U = np.flatnonzero(np.diff(p_R, append=-math.inf))
    right_U = np.cumsum(has_R)[ends_U]
    precision_U = right_U / (ends_U + 1)
    known = has_R.sum() > 0
    recall_U = right_U / has_R.sum() if known else np.zeros_like(right_U)
    kept = np.unique(np.linspace(0, len(ends_U) - 1, min(MOST_POINTS, len(ends_U))).round().astype(int))
    return PrecisionRecall(
        label=score.label,
        threshold=threshold,
        precision=score.precision,
        recall=score.recall,
        average_precision=number(float(np.diff(recall_U, prepend=0.0) @ precision_U)) if known else None,
        thresholds=_numbers(p_R[ends_U][kept]) if known else (),
        precisions=_numbers(precision_U[kept]) if known else (),
        recalls=_numbers(recall_U[kept]) if known else (),
    )


def _numbers(values: Floats) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def _cross_entropies(p_RC: Floats, has_RC: Floats, *, several: bool) -> list[float]:
    """Return each row's loss by its probabilities alone, with several classes the mean over them; infinite where none.

    Rows of tasks that learn spans too do not say what their classes lost.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if several:
            loss_R = -np.log(np.where(has_RC > 0, p_RC, 1 - p_RC)).mean(axis=1)
        else:
            loss_R = -np.log((p_RC * has_RC).sum(axis=1))
    return np.nan_to_num(loss_R, nan=math.inf, posinf=math.inf).tolist()


def _worst(rows: Sequence[ScoredRow], losses: Sequence[float], names: Sequence[str]) -> tuple[WorstRow, ...]:
    both = zip(rows, losses, strict=True)
    wrong = [(-loss, row.id, row) for row, loss in both if row.truth[CLASS] != row.answer[CLASS]]
    wrong.sort(key=lambda one: one[:2])
    return tuple(
        WorstRow(
            id=row_name(row),
            right=_classes(row.truth[CLASS], names),
            answered=_classes(row.answer[CLASS], names),
            values={**_probabilities(row), str(Metric.LOSS): number(-negative)},
        )
        for negative, _, row in wrong[:MOST_WORST]
    )


def _probabilities(row: ScoredRow) -> dict[str, float | None]:
    right, answer = row.truth[CLASS], row.answer[CLASS]
    return {} if isinstance(right, list) else {"p": number(row.p[answer]), "p_right": number(row.p[right])}


def _classes(part: Any, names: Sequence[str]) -> str:
    """Return a class, or several, as text."""
    if not isinstance(part, list):
        return names[int(part)] if names else str(part)
    labels = cast("list[int]", part)[:MOST_WORST]
    shown = ", ".join(names[one] if names else str(one) for one in labels)
    return "none" if not labels else shown if len(part) <= MOST_WORST else f"{shown} ..."
