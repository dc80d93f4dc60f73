"""The task ``criteria``: classify (criterion, text), or text alone, into one class or any number of them; or a number.

Dimension suffixes: ``B`` rows of a batch, ``R`` rows of a split, ``C`` classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.settings.choices import Metric
from dryfit.settings.task_facts import MetricName, metrics_of_classes
from dryfit.tasks.answers import (
    NumberAnswers,
    check_two,
    decided,
    fit_thresholds,
    multi_label_metrics,
    one_class_metrics,
    scale_remark,
)
from dryfit.tasks.base import Batch, Outputs, TaskContext
from dryfit.tasks.baselines import Baseline, class_baselines, number_baselines
from dryfit.tasks.encoder import EncoderTask
from dryfit.tasks.losses import ScoreLoss, SquaredLoss, make_loss
from dryfit.tasks.rows import Readable, Row, Splits, check_classes, check_numbers
from dryfit.tasks.scored_rows import CLASS, ScoredRow
from dryfit.tasks.tokens import Tokens, TokenSet, class_labels


@final
class CriteriaTask(EncoderTask):
    """Classification by cross entropy or focal loss; with ``data.num_labels = 1`` regression by squared error.

    Args:
        context: Settings, rows and tokens.

    Raises:
        ConfigError: ``loss.alpha`` or a fitted threshold is asked for and there are more than two classes, of which a
            row has one.
    """

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self._loss = class_loss(context)
        check_threshold(context)

    @property
    def num_outputs(self) -> int:
        """One score for each class; of a regression the number itself."""
        return self.context.data.num_labels

    @property
    def classes(self) -> int | None:
        """Number of classes of the data; None where labels are numbers."""
        return None if self.context.data.is_regression else self.context.data.num_labels

    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics that such labels have."""
        return metrics_of_classes(self.context.data)

    def check_rows(self, splits: Splits) -> None:
        """Refuse training rows that lack a class, or from which one cannot be learned; or all of the same number."""
        if self.context.data.is_regression:
            check_numbers(splits)
        else:
            check_classes(splits, self.context.data)

    def labels(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return each row's class, or for each class whether the row has it; its number, fp64."""
        if self.context.data.is_regression:
            return torch.tensor([row.label for row in rows], dtype=torch.float64)
        return class_labels(rows, self.context.data.num_labels)

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return the sizes for any encoder; with ``multi_label`` there is a label for each class."""
        sizes = super().batch_sizes(rows, length, segments=segments)
        return sizes | {"labels": (rows, self.num_outputs)} if self.context.data.multi_label else sizes

    def remarks(self, tokens: Tokens) -> tuple[str, ...]:
        """Return a remark on numbers far from what a fresh head says."""
        return scale_remark(tokens) if self.context.data.is_regression else ()

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the normaliser of a batch."""
        return self._loss.batch_weight(batch)

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return the weighted loss of all rows."""
        assert isinstance(outputs, torch.Tensor)
        return self._loss.loss_sum(outputs, batch)

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """Return the thresholds that are best by the study's metric, with ``head.threshold = "calibrated"``."""
        return self._answers(kept, tokens).fit()

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return every metric that such labels have."""
        return self._answers(kept, tokens).metrics(fitted)

    def baselines(self, splits: Splits, tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
        """Yield what the metrics are worth without a model."""
        del tokens
        if self.context.data.is_regression:
            return number_baselines(splits)
        return class_baselines(splits, self.context.data, fits=fits_threshold(self.context), metric=self.context.metric)

    def scored_rows(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row with its answer beside the right one."""
        return self._answers(kept, tokens).scored_rows(tokens.source_names, fitted)

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """Yield each row's class, or with ``multi_label`` its classes, and every class's probability; or its number."""
        return self._answers(kept, tokens).predictions(rows, self.context.fitted)

    def _answers(self, scores_RC: torch.Tensor, tokens: TokenSet) -> "ClassAnswers | NumberAnswers":
        if self.context.data.is_regression:
            return NumberAnswers(scores_RC[:, 0], tokens.labels_R)
        return class_answers(scores_RC, tokens.labels_R, self.context)


@final
@dataclass(frozen=True, slots=True)
class ClassAnswers:
    """Class scores of rows.

    Attributes:
        scores_RC: Scores before softmax or sigmoid, on the CPU.
        labels: Classes, (R,), or (R, C) with ``multi_label``: 1 where a row has a class.
        multi_label: Each class is decided for itself.
        calibrated: By fitted thresholds; otherwise the likeliest class, or those of at least one half.
        metric: The study's metric, by which thresholds are fitted; None: by ``f1_macro``.
        names: Of the classes; empty: they are numbers.
    """

    scores_RC: torch.Tensor
    labels: torch.Tensor
    multi_label: bool
    calibrated: bool = False
    metric: MetricName | None = None
    names: tuple[str, ...] = ()

    def fit(self) -> Mapping[str, float]:
        """Return the best thresholds; nothing where none are asked for."""
        if not self.calibrated:
            return {}
        return fit_thresholds(self.scores_RC, self.labels, self.metric, multi_label=self.multi_label)

    def decided(self, fitted: Mapping[str, float]) -> torch.Tensor:
        """Return each row's class, (R,), int64; with ``multi_label`` whether it has each class, (R, C), bool."""
        return decided(self.scores_RC, fitted, multi_label=self.multi_label, calibrated=self.calibrated)

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return every metric that such classes have."""
        measure = multi_label_metrics if self.multi_label else one_class_metrics
        return measure(self.scores_RC, self.labels, self.decided(fitted))

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield the class, or with ``multi_label`` the classes, by name if they have one; probabilities in fp64."""
        del rows
        scores_RC = self.scores_RC.double()
        p_RC = scores_RC.sigmoid() if self.multi_label else scores_RC.softmax(dim=-1)
        for p_C, said in zip(p_RC.tolist(), self.decided(fitted).tolist(), strict=True):
            has = [index for index, found in enumerate(said) if found] if self.multi_label else said
            if self.names:
                named = [self.names[index] for index in has] if self.multi_label else self.names[said]
                yield {"label": named, "probabilities": dict(zip(self.names, p_C, strict=True))}
            else:
                yield {"label": has, "probabilities": p_C}

    def scored_rows(self, ids: Sequence[str], fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row's class, or classes, with their probabilities and the plain cross entropy."""
        scores_RC, said = self.scores_RC.double(), self.decided(fitted)
        if self.multi_label:
            p_RC, said = scores_RC.sigmoid(), [row.nonzero()[:, 0].tolist() for row in said]
            truth = [row.nonzero()[:, 0].tolist() for row in self.labels]
            loss_R = F.binary_cross_entropy_with_logits(scores_RC, self.labels.to(scores_RC), reduction="none").mean(1)
        else:
            p_RC, said, truth = scores_RC.softmax(dim=-1), said.tolist(), self.labels.tolist()
            loss_R = F.cross_entropy(scores_RC, self.labels, reduction="none")
        for name, right, answer, p_C, loss in zip(ids, truth, said, p_RC.tolist(), loss_R.tolist(), strict=True):
            yield ScoredRow(name, {CLASS: right}, {CLASS: answer}, tuple(p_C), {Metric.LOSS: loss})


def class_answers(scores_RC: torch.Tensor, labels: torch.Tensor, context: TaskContext) -> ClassAnswers:
    """Return the classes of rows, decided as the settings ask.

    Args:
        scores_RC: Scores before softmax or sigmoid, on the CPU.
        labels: As of :class:`ClassAnswers`.
        context: The settings.
    """
    return ClassAnswers(
        scores_RC,
        labels,
        multi_label=context.data.multi_label,
        calibrated=fits_threshold(context),
        metric=context.metric,
        names=context.data.labels,
    )


def fits_threshold(context: TaskContext) -> bool:
    """Whether thresholds of classes are fitted on validation."""
    return context.settings.head.threshold == "calibrated"


def check_threshold(context: TaskContext) -> None:
    """Refuse a fitted threshold where a row has one of more than two classes.

    Raises:
        ConfigError: It has.
    """
    if fits_threshold(context):
        check_two(context.data.num_labels, multi_label=context.data.multi_label)


def class_loss(context: TaskContext) -> ScoreLoss:
    """Return the loss of scores that the settings ask for.

    Raises:
        ConfigError: ``loss.alpha`` is set and there are more than two classes, of which a row has one.
    """
    data, facts = context.data, context.facts
    if data.is_regression:
        return SquaredLoss()
    return make_loss(
        context.settings.loss,
        num_labels=data.num_labels,
        # Before the rows are known, as in planning, any counts will do in which every class has a row.
        train_counts=facts.label_counts or dict.fromkeys(range(data.num_labels), 1),
        train_rows=facts.train_rows or data.num_labels + 1,
        multi_label=data.multi_label,
    )
