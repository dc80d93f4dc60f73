"""Base class of the tasks ``share`` and ``joint``: a class and a span are learned from the same windows.

All windows of a row have its class. A row's class scores are the mean of its windows' scores: the softmax of a
mean of scores is the normalised geometric mean of the windows' probabilities, a logarithmic opinion pool with equal
weights (Genest and Zidek 1986, "Combining Probability Distributions: A Critique and an Annotated Bibliography"). A
confident window counts for more than an unsure one, and none decides alone, as it would with a maximum.

Dimension suffixes: ``B`` windows of a batch, ``W`` windows of a split, ``R`` rows, ``C`` classes, ``K`` numbers kept of
a window, ``2`` the two parts of the loss (class, span), each with a normaliser of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import ClassVar, Final, final

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.core.settings.choices import Metric, Weighting
from dryfit.core.settings.tables import LossSettings, MultitaskSettings
from dryfit.core.settings.task_facts import metrics_of_both
from dryfit.scoring.scored_row import LOSS_TERMS, ScoredRow
from dryfit.tasks.base import Batch, Outputs, TaskContext
from dryfit.tasks.baselines.baseline import Baseline
from dryfit.tasks.baselines.classes import class_baselines
from dryfit.tasks.classification import ClassAnswers, check_threshold, class_answers, class_loss, fits_threshold
from dryfit.tasks.heads import HeadSpec
from dryfit.tasks.losses import ScoreLoss
from dryfit.tasks.rows.checked_rows import Readable, Row, Splits, check_classes
from dryfit.tasks.spans.evidence import EvidenceTask
from dryfit.tasks.spans.span_losses import SpanLoss
from dryfit.tasks.tokens.sampling import epoch_roles
from dryfit.tasks.tokens.token_set import CLASSES, Tokens, TokenSet, class_labels
from dryfit.tasks.tokens.windows import Windows

TRAINS_CLASS: Final = "trains_class"
TRAINS_SPAN: Final = "trains_span"
"""Entries of a batch: 1 for windows that train this part, else 0. Without them every window trains both."""


@final
class TwoLosses:
    """Weighted sum of a class's and a span's mean loss over the windows that train each.

    ``fixed``: ``w * class + (1 - w) * span``. ``uncertainty``: ``exp(-s) * loss + s / 2`` for each of the two, with a
    learned log variance ``s`` of its own (Kendall et al. 2018, arXiv:1705.07115, equation 10: both losses are those of
    a softmax, so that neither has the factor one half of a regression).

    Args:
        settings: The ``[multitask]`` table.
        classes: The loss of classes.
        loss: The ``[loss]`` table; its ``alpha`` applies to classes only.
    """

    def __init__(self, settings: MultitaskSettings, classes: ScoreLoss, loss: LossSettings) -> None:
        self._settings = settings
        self._classes = classes
        self._spans = SpanLoss(loss.model_copy(update={"alpha": None}))

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the normalisers of both parts, (2,), fp64; 1 where no window of the batch trains a part."""
        weights_2 = self._weights(batch)
        return torch.where(weights_2 > 0, weights_2, 1)

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return both parts, summed over the windows that train each, (2,)."""
        assert isinstance(outputs, tuple)
        classes_BC, spans_BL2 = outputs[:2]
        rows_B = self._classes.row_losses(classes_BC, {"labels": batch[CLASSES]})
        windows_B = self._spans.row_losses(spans_BL2, batch)
        if TRAINS_CLASS in batch:
            rows_B, windows_B = rows_B * batch[TRAINS_CLASS], windows_B * batch[TRAINS_SPAN]
        if self._settings.weighting is Weighting.FIXED:
            weight = self._settings.criteria_weight
            return torch.stack([rows_B.sum() * weight, windows_B.sum() * (1 - weight)])
        parts_2 = torch.stack([rows_B.sum(), windows_B.sum()])
        logs_2 = outputs[2][0]
        # s / 2 counts once for a batch: its micro-batches share it by their weights.
        return parts_2 * torch.exp(-logs_2) + self._weights(batch).to(parts_2) * logs_2 / 2

    def _weights(self, batch: Batch) -> torch.Tensor:
        rows_B = self._classes.row_weights({"labels": batch[CLASSES]})
        windows_B = torch.ones_like(rows_B)
        if TRAINS_CLASS in batch:
            rows_B, windows_B = rows_B * batch[TRAINS_CLASS], windows_B * batch[TRAINS_SPAN]
        return torch.stack([rows_B.sum(), windows_B.sum()])


class ClassAndSpanTask(EvidenceTask):
    """A span for each row, as the task ``evidence`` finds it, and a class. A subclass defines the model and its input.

    Args:
        context: Settings, rows and tokens.

    Raises:
        ConfigError: ``loss.alpha`` or a fitted threshold is asked for and there are more than two classes, of which a
            row has one.
    """

    required: ClassVar[frozenset[str]] = frozenset({"label", "evidence"})

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._loss = TwoLosses(settings.multitask, class_loss(context), settings.loss)
        check_threshold(context)

    @property
    def num_outputs(self) -> int:
        """One score for each class; spans have a head of their own."""
        return self.context.data.num_labels

    @property
    def limits(self) -> Mapping[str, int]:
        """Limit of classes: their number, or 2 where each of several is there or not."""
        data = self.context.data
        return {CLASSES: 2 if data.multi_label else data.num_labels}

    @property
    def head(self) -> HeadSpec:
        """Shape of the head for classes."""
        data = self.context.data
        return HeadSpec(
            self.context.settings.head,
            self.num_outputs,
            cls_last=self.context.facts.cls_last,
            multi_label=data.multi_label,
        )

    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics of classes and of spans, and one that combines both."""
        return metrics_of_both(self.context.data)

    def check_rows(self, splits: Splits) -> None:
        """Refuse rows from which classes or spans cannot be learned."""
        check_classes(splits, self.context.data)
        super().check_rows(splits)

    def token_key(self) -> str:
        """Return what spans depend on, and the number of classes."""
        return f"{super().token_key()}-classes-{self.context.data.num_labels}"

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Cut all texts into windows, each with the class of its row."""
        tokens = super().tokenise(splits, tokenizer)
        sets = {name: self.with_classes(split, splits[name]) for name, split in tokens.splits.items()}
        return replace(tokens, splits=sets)

    def with_classes(self, split: TokenSet, rows: Sequence[Row]) -> TokenSet:
        """Return windows of some rows with the class of its row beside each."""
        labels = class_labels(rows, self.context.data.num_labels)[Windows(split).rows_W]
        return replace(split, extra={**split.extra, CLASSES: labels})

    def epoch_rows(self, tokens: TokenSet, *, seed: int, epoch: int) -> torch.Tensor | None:
        """Return all windows but those that would train neither head."""
        if self.context.settings.multitask.criteria_share is None:
            return None  # the class is trained by all
        classes_W, spans_W = self._roles(tokens, seed=seed, epoch=epoch)
        return (classes_W | spans_W).nonzero()[:, 0]

    def epoch_entries(self, tokens: TokenSet, *, seed: int, epoch: int) -> Batch:
        """Return which head each window trains, where not all train both."""
        if not self._has_roles:
            return {}
        classes_W, spans_W = self._roles(tokens, seed=seed, epoch=epoch)
        return {TRAINS_CLASS: classes_W.long(), TRAINS_SPAN: spans_W.long()}

    @property
    def _has_roles(self) -> bool:
        settings = self.context.settings
        return settings.multitask.criteria_share is not None or settings.span.negatives is not None

    def _roles(self, tokens: TokenSet, *, seed: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self.context.settings
        return epoch_roles(
            Windows(tokens).has_span_W,
            criteria_share=settings.multitask.criteria_share,
            negatives=settings.span.negatives,
            seed=seed,
            epoch=epoch,
        )

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some windows and add their labels and classes."""
        return super().collate(tokens, rows) | {CLASSES: tokens.extra[CLASSES][list(rows)].long()}

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return the sizes of spans, with classes, and where windows have roles the heads that each trains."""
        several = self.context.data.multi_label
        sizes = super().batch_sizes(rows, length, segments=segments)
        sizes[CLASSES] = (rows, self.num_outputs) if several else (rows,)
        return sizes | (dict.fromkeys((TRAINS_CLASS, TRAINS_SPAN), (rows,)) if self._has_roles else {})

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the normalisers of both parts of the loss, (2,)."""
        return self._loss.batch_weight(batch)

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return the loss of classes and that of spans, each weighted and summed over windows, (2,)."""
        return self._loss.loss_sum(outputs, batch)

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Keep the scores of classes, then what decoding needs of spans; fp32."""
        assert isinstance(outputs, tuple)
        return torch.cat([outputs[0].float(), super().keep(outputs[1], batch)], dim=1)

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """Return the thresholds of classes and that of null, as far as they are fitted."""
        spans = super().fit(kept[:, self.num_outputs :], tokens)
        return {**spans, **self._class_answers(self._scores(kept, tokens), tokens).fit()}

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of classes and of spans, by row; ``combined`` and ``loss`` are the mean of both.

        No weight of the settings enters: if it is searched, trials could not be compared by these.
        """
        classes = self._class_answers(self._scores(kept, tokens), tokens).metrics(fitted)
        spans = super().metrics(kept[:, self.num_outputs :], tokens, fitted)
        loss = (classes[Metric.LOSS] + spans[Metric.LOSS]) / 2
        return _together(classes, spans) | {str(Metric.LOSS): loss}

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """Yield each row's prediction of a class together with that of a span."""
        classes = self._class_answers(self._scores(kept.float(), tokens), tokens).predictions(rows, self.context.fitted)
        spans = super().predictions(kept[:, self.num_outputs :], tokens, rows)
        yield from ({**of_class, **of_span} for of_class, of_span in zip(classes, spans, strict=True))

    def baselines(self, splits: Splits, tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
        """Yield pairs of the baselines of both: each constant one with each, and the linear ones of a kind."""
        fits = fits_threshold(self.context)
        classes = class_baselines(splits, self.context.data, fits=fits, metric=self.context.metric)
        spans = tuple(super().baselines(splits, tokens))
        for of_class, of_span in product(classes, spans):
            if of_class.is_linear == of_span.is_linear and (not of_class.is_linear or of_class.name == of_span.name):
                yield Baseline(
                    f"{of_class.name}+{of_span.name}",
                    f"{of_class.words}; {of_span.words}",
                    partial(_both_answered, of_class, of_span),
                    is_linear=of_class.is_linear,
                )

    def scored_rows(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row with its class and its span beside the right ones."""
        classes = self._class_answers(self._scores(kept, tokens), tokens).scored_rows(tokens.source_names, fitted)
        spans = super().scored_rows(kept[:, self.num_outputs :], tokens, fitted)
        return both_parts(classes, spans)

    def _scores(self, kept: torch.Tensor, tokens: TokenSet) -> torch.Tensor:
        """Return the class scores of each row."""
        return row_means(kept[:, : self.num_outputs], Windows(tokens).rows_W, tokens.sources)

    def _class_answers(self, scores_RC: torch.Tensor, tokens: TokenSet) -> ClassAnswers:
        return class_answers(scores_RC, row_labels(tokens), self.context)


def both_parts(classes: Iterable[ScoredRow], spans: Iterable[ScoredRow]) -> Iterator[ScoredRow]:
    """Yield rows with the answers of both; their losses do not add up to that of the task, and are left out."""
    for of_class, of_span in zip(classes, spans, strict=True):
        yield ScoredRow(
            of_class.id,
            {**of_class.truth, **of_span.truth},
            {**of_class.answer, **of_span.answer},
            of_class.p,
            {name: value for name, value in of_span.values.items() if name not in (Metric.LOSS, LOSS_TERMS)},
        )


def _both_answered(classes: Baseline, spans: Baseline) -> list[ScoredRow]:
    return list(both_parts(classes.scored()[0], spans.scored()[0]))


def _together(classes: Mapping[str, float], spans: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of classes and of spans, and ``combined``, the mean of ``f1_macro`` and ``token_f1``."""
    return {**classes, **spans, str(Metric.COMBINED): (classes[Metric.F1_MACRO] + spans[Metric.TOKEN_F1]) / 2}


def row_labels(tokens: TokenSet) -> torch.Tensor:
    """Return the class or classes of each row; -1 for rows to predict."""
    classes_W = tokens.extra.get(CLASSES)
    if classes_W is None:
        return torch.full((tokens.sources,), -1)
    labels_R = classes_W.new_empty((tokens.sources, *classes_W.shape[1:]))
    labels_R[Windows(tokens).rows_W] = classes_W  # all windows of a row have the same
    return labels_R


def row_means(scores_WC: torch.Tensor, rows_W: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the mean scores of each row's windows, (R, C), added up in fp64."""
    sums_RC = torch.zeros((rows, scores_WC.shape[1]), dtype=torch.float64).index_add_(0, rows_W, scores_WC.double())
    return (sums_RC / torch.bincount(rows_W, minlength=rows).unsqueeze(1)).to(scores_WC.dtype)
