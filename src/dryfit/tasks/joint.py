"""The tasks ``share`` and ``joint``: a class and a span learned at once."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import ClassVar, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dryfit.meta.checkpoint_files import model_identity
from dryfit.meta.configs import check_positions, load_tokenizer
from dryfit.meta.construction import build
from dryfit.meta.pretrained import pretrained_config
from dryfit.settings.choices import Fusion, Metric, Weighting
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import JointSettings, LossSettings, ModelSettings, MultitaskSettings, TrialSettings
from dryfit.settings.task_facts import metrics_of_both
from dryfit.tasks.base import MODEL_INPUTS, Batch, MakeBase, Outputs, TaskContext, TaskModel
from dryfit.tasks.baselines import Baseline, class_baselines
from dryfit.tasks.classification import ClassAnswers, check_threshold, class_answers, class_loss, fits_threshold
from dryfit.tasks.evidence import EvidenceTask
from dryfit.tasks.heads import (
    EncoderModel,
    HeadSpec,
    dtype_of,
    encode,
    encoder_parts,
    make_head,
    mean_of_tokens,
    pooled,
    unneeded_outputs,
    width_of,
    without_autocast,
)
from dryfit.tasks.losses import ScoreLoss
from dryfit.tasks.rows import Readable, Row, Splits, UnlabelledRow, check_classes
from dryfit.tasks.scored_rows import LOSS_TERMS, ScoredRow
from dryfit.tasks.spans import SpanLoss
from dryfit.tasks.tokens import CLASSES, Tokens, TokenSet, class_labels, epoch_roles
from dryfit.tasks.windows import Windows

# Two heads on the same token vectors: one for the row's class, one for the start and end of its evidence.
#
# Dimension suffixes: ``B`` windows, ``L`` tokens, ``D`` width of token vectors, ``C`` classes, ``2`` two parts.


@final
class TwoHeads(nn.Module):
    """A head for classes and a head for spans; with uncertainty weighting also the variances that weight their losses.

    Args:
        width: Of the token vectors.
        spec: The shape of the head for classes; the one for spans has the same hidden layers.
        weighting: How the two losses are weighted.
    """

    def __init__(self, width: int, spec: HeadSpec, weighting: Weighting) -> None:
        super().__init__()
        self.spec = spec
        self.classes = make_head(width, spec)
        self.spans = make_head(width, replace(spec, num_outputs=2, per_token=True))
        # Log variances: any number is legal, and at 0 both losses count as they are.
        self.log_variances = nn.Parameter(torch.zeros(2)) if weighting is Weighting.UNCERTAINTY else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return dtype_of(self.spans)

    def forward(self, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Score windows.

        Args:
            hidden_BLD: Their token vectors, in the head's dtype.
            mask_BL: 1 for tokens, 0 for padding.

        Returns:
            Scores of classes (B, C), scores of each token as a start and as an end (B, L, 2), and where they are
            learned the log variances, the same for each window (B, 2).
        """
        classes_BC = self.classes(pooled(hidden_BLD, mask_BL, self.spec))
        outputs = (classes_BC, self.spans(hidden_BLD))
        if self.log_variances is None:
            return outputs
        return (*outputs, self.log_variances.expand(len(mask_BL), 2))


@final
class SharedEncoder(EncoderModel):
    """One encoder with two heads, which run in fp32 whatever the encoder's precision.

    Args:
        encoder: The encoder.
        spec: The shape of the head for classes.
        weighting: How the losses of the two heads are weighted.
        limits: As in :class:`~dryfit.tasks.base.TaskModel`.
    """

    def __init__(
        self, encoder: PreTrainedModel, spec: HeadSpec, weighting: Weighting, limits: Mapping[str, int]
    ) -> None:
        super().__init__(encoder)
        self.limits = limits
        self.head = TwoHeads(width_of(encoder), spec, weighting)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Score windows; see :meth:`TwoHeads.forward`.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            token_type_ids: (B, L); left out for encoders without segments.
        """
        hidden_BLD = self.token_vectors(input_ids, attention_mask, token_type_ids)
        with without_autocast(hidden_BLD.device):
            return self.head(hidden_BLD.to(self.head.dtype), attention_mask)


# Two encoders: the criterion's vectors are fused into the token vectors of the text, and two heads score them.
#
# Dimension suffixes: ``B`` windows, ``L`` tokens of a window, ``K`` tokens of a criterion, ``D`` width of token
# vectors of the text, ``C`` classes.


CRITERION_IDS: Final = "criterion_ids"
CRITERION_MASK: Final = "criterion_mask"
CRITERIA_PART: Final = "criteria"
"""Subfolder of a saved model with the files of the criterion's encoder."""


@final
class CriterionFusion(nn.Module):
    """Fuses a criterion into each token vector of a text.

    ``add``, ``concat`` and ``gate`` take the mean of the criterion's token vectors, projected to the text's width where
    it differs: ``h + c``, ``W [h; c] + b``, and ``g * h + (1 - g) * c`` with ``g = sigmoid(W [h; c] + b)`` for each
    dimension (the gate of Arevalo et al. 2017, arXiv:1702.01992, equation 4). With ``attention`` each token of the text
    attends to the criterion's tokens, and the result is added to it (Vaswani et al. 2017, arXiv:1706.03762, section
    3.2.3; as many heads as the text's encoder has, if its width can be divided by them).

    Args:
        kind: Which fusion.
        text: The text's encoder.
        criteria: The criterion's encoder.
        dropout: Of attention probabilities.
    """

    def __init__(self, kind: Fusion, text: PreTrainedModel, criteria: PreTrainedModel, *, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        width, criteria_width = width_of(text), width_of(criteria)
        if kind is Fusion.ATTENTION:
            heads = math.gcd(width, text.config.num_attention_heads)
            self.attention = nn.MultiheadAttention(
                width, heads, dropout=dropout, kdim=criteria_width, vdim=criteria_width, batch_first=True
            )
            return
        self.project = nn.Identity() if width == criteria_width else nn.Linear(criteria_width, width)
        if kind is not Fusion.ADD:
            self.mix = nn.Linear(2 * width, width)

    def forward(
        self, hidden_BLD: torch.Tensor, criterion_BKD: torch.Tensor, criterion_mask_BK: torch.Tensor
    ) -> torch.Tensor:
        """Return the fused token vectors, (B, L, D).

        Args:
            hidden_BLD: Token vectors of the text.
            criterion_BKD: Token vectors of the criterion, of its encoder's width.
            criterion_mask_BK: 1 for tokens, 0 for padding.
        """
        if self.kind is Fusion.ATTENTION:
            padding_BK = criterion_mask_BK == 0
            attended_BLD, _ = self.attention(
                hidden_BLD, criterion_BKD, criterion_BKD, key_padding_mask=padding_BK, need_weights=False
            )
            return hidden_BLD + attended_BLD
        mean_BD = self.project(mean_of_tokens(criterion_BKD, criterion_mask_BK))
        mean_BLD = mean_BD.unsqueeze(1).expand_as(hidden_BLD)
        if self.kind is Fusion.ADD:
            return hidden_BLD + mean_BLD
        mixed_BLD = self.mix(torch.cat([hidden_BLD, mean_BLD], dim=-1))
        if self.kind is Fusion.CONCAT:
            return mixed_BLD
        gate_BLD = mixed_BLD.sigmoid()
        return gate_BLD * hidden_BLD + (1 - gate_BLD) * mean_BLD


@final
class TwoEncoders(EncoderModel):
    """An encoder of texts and one of criteria, fused, with two heads; all but the encoders runs in fp32.

    Args:
        encoder: Of texts.
        encoder_of_criteria: Of criteria; its first layers may be those of the other.
        joint: The ``[joint]`` table.
        spec: The shape of the head for classes.
        weighting: How the losses of the two heads are weighted.
        limits: As in :class:`~dryfit.tasks.base.TaskModel`.

    Raises:
        ConfigError: Layers are to be shared, and the encoders are of different models, or have no list of layers.
    """

    encoder_paths = ("encoder", "encoder_of_criteria")
    drawn = ("head.*", "fusion.*")

    def __init__(
        self,
        encoder: PreTrainedModel,
        encoder_of_criteria: PreTrainedModel,
        joint: JointSettings,
        spec: HeadSpec,
        weighting: Weighting,
        limits: Mapping[str, int],
    ) -> None:
        share_layers(encoder, encoder_of_criteria, joint)
        super().__init__(encoder)
        self.encoder_of_criteria = encoder_of_criteria
        self.fusion = CriterionFusion(joint.fusion, encoder, encoder_of_criteria, dropout=spec.settings.dropout)
        self.head = TwoHeads(width_of(encoder), spec, weighting)
        embedding = encoder_of_criteria.get_input_embeddings()
        assert isinstance(embedding.weight, torch.Tensor)
        self.limits = {**limits, CRITERION_IDS: len(embedding.weight)}
        self._unneeded_of_criteria = unneeded_outputs(encoder_of_criteria)

    def pretrained(self) -> Mapping[str, PreTrainedModel]:
        """Return both encoders."""
        return {"": self.encoder, CRITERIA_PART: self.encoder_of_criteria}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        criterion_ids: torch.Tensor,
        criterion_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Score windows; see :meth:`~dryfit.tasks.joint.TwoHeads.forward`.

        Args:
            input_ids: Of the text, (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            criterion_ids: Of the criterion, (B, K).
            criterion_mask: (B, K), as the other.
            token_type_ids: Of the text, (B, L); left out for encoders without segments.
        """
        hidden_BLD = self.token_vectors(input_ids, attention_mask, token_type_ids)
        criterion = {"input_ids": criterion_ids, "attention_mask": criterion_mask}
        criterion_BKD = encode(self.encoder_of_criteria, {**criterion, **self._unneeded_of_criteria})
        with without_autocast(hidden_BLD.device):
            dtype = self.head.dtype
            fused_BLD = self.fusion(hidden_BLD.to(dtype), criterion_BKD.to(dtype), criterion_mask)
            return self.head(fused_BLD, attention_mask)


def share_layers(first: PreTrainedModel, second: PreTrainedModel, joint: JointSettings) -> None:
    """Share the embeddings and first layers of one encoder with another: the same parameters, not copies.

    Args:
        first: Stays as it is.
        second: An encoder of the same model; changed in place.
        joint: Its ``share_ratio`` of the layers, rounded, is shared; at 0 not even the embeddings are.

    Raises:
        ConfigError: The encoders are of different models, or have no list of layers.
    """
    if joint.share_ratio == 0:
        return
    doing = f"sharing layers between two encoders (joint.share_ratio = {joint.share_ratio:g})"
    if joint.criteria_model is not None:
        raise ConfigError(
            doing,
            f"the criterion's encoder is {joint.criteria_model}",
            allowed="joint.criteria_model unset: both encoders are then of one model",
            hint="leave out joint.criteria_model, or joint.share_ratio",
        )
    try:
        parts = encoder_parts(first)
    except ConfigError as error:
        raise ConfigError(doing, error.found, allowed="joint.share_ratio = 0 for this model") from error
    count = round(joint.share_ratio * parts.depth)
    for name, parameter in list(first.named_parameters()):
        if parts.depth_of[name] <= count:
            owner, _, key = name.rpartition(".")
            second.get_submodule(owner).register_parameter(key, parameter)


# Base class of the tasks ``share`` and ``joint``: a class and a span are learned from the same windows.
#
# All windows of a row have its class. A row's class scores are the mean of its windows' scores: the softmax of a mean
# of scores is the normalised geometric mean of the windows' probabilities, a logarithmic opinion pool with equal
# weights (Genest and Zidek 1986, "Combining Probability Distributions: A Critique and an Annotated Bibliography"). A
# confident window counts for more than an unsure one, and none decides alone, as it would with a maximum.
#
# Dimension suffixes: ``B`` windows of a batch, ``W`` windows of a split, ``R`` rows, ``C`` classes, ``K`` numbers
# kept of a window, ``2`` the two parts of the loss (class, span), each with a normaliser of its own.


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


# The task ``joint``: a class and a span, from one encoder that reads the criterion and one that reads the text.
#
# Windows hold the text alone. The criterion comes in by the fusion, so that no window is shorter for a long
# criterion.
#
# Dimension suffixes: ``B`` windows of a batch, ``R`` rows, ``K`` tokens of a criterion.


_LENGTHS: Final = "criterion_lengths"


@final
class JointTask(ClassAndSpanTask):
    """A class and a span of each row, from two encoders."""

    required: ClassVar[frozenset[str]] = frozenset({"label", "evidence", "criterion"})
    inputs: ClassVar[tuple[str, ...]] = (*MODEL_INPUTS, CRITERION_IDS, CRITERION_MASK)

    @property
    def shared_tokens(self) -> None:
        """None: criteria are in no window."""
        return None

    def sources(self) -> Mapping[str, ModelSettings]:
        """Return the model that reads texts and the one that reads criteria."""
        settings = self.context.settings
        return {"": settings.model, CRITERIA_PART: criteria_source(settings)}

    def token_key(self) -> str:
        """Return what windows, classes and the criterion's own tokens depend on."""
        settings = self.context.settings
        criteria = f"{model_identity(criteria_source(settings))}-{settings.joint.criterion_length}"
        return f"{super().token_key()}-alone-{criteria}"

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Cut all texts into windows, with the tokens of each row's criterion beside them.

        Raises:
            ConfigError: The criterion's model has too few positions, or its tokenizer has no padding token.
        """
        self._check_length()
        criteria = self._criteria_tokenizer()
        alone = {name: tuple(replace(row, criterion=None) for row in rows) for name, rows in splits.items()}
        tokens = super().tokenise(alone, tokenizer)
        sets = {name: self._with_criteria(split, splits[name], criteria) for name, split in tokens.splits.items()}
        return replace(tokens, splits=sets, pairs=True)

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Cut texts into windows, with the tokens of each row's criterion beside them."""
        alone = [UnlabelledRow(id=None, text=row.text, criterion=None, place="") for row in rows]
        split = super().tokenise_unlabelled(alone, tokenizer)
        return self._with_criteria(split, rows, self._criteria_tokenizer())

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return both encoders with their fusion and two heads."""
        settings = self.context.settings
        encoder = make(settings.model, self.kind)
        criteria = make(criteria_source(settings), self.kind, part=CRITERIA_PART)
        weighting = settings.multitask.weighting
        return build(
            lambda: TwoEncoders(encoder, criteria, settings.joint, self.head, weighting, self.limits), seed=seed
        )

    def collate_unlabelled(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some windows and the criteria of their rows."""
        sources_B = Windows(tokens).rows_W[list(rows)]
        lengths_B = tokens.extra[_LENGTHS][sources_B]
        places_K = torch.arange(int(lengths_B.max()))
        return super().collate_unlabelled(tokens, rows) | {
            CRITERION_IDS: tokens.extra[CRITERION_IDS][sources_B, : len(places_K)].long(),
            CRITERION_MASK: (places_K < lengths_B[:, None]).long(),
        }

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return the sizes for one encoder, with criteria of the greatest length."""
        criterion = dict.fromkeys((CRITERION_IDS, CRITERION_MASK), (rows, self.context.settings.joint.criterion_length))
        return super().batch_sizes(rows, length, segments=segments) | criterion

    def _criteria_tokenizer(self) -> PreTrainedTokenizerBase:
        saved = self.context.saved
        if saved is None:
            return load_tokenizer(criteria_source(self.context.settings))
        return load_tokenizer(replace(saved, name=f"{saved.name}/{CRITERIA_PART}"))

    def _with_criteria(
        self, split: TokenSet, rows: Sequence[Row | Readable], tokenizer: PreTrainedTokenizerBase
    ) -> TokenSet:
        """Add the tokens of each row's criterion to its windows: padded ids (R, K), and their number (R,)."""
        pad_id, length = tokenizer.pad_token_id, self.context.settings.joint.criterion_length
        if not isinstance(pad_id, int):
            raise ConfigError(
                "tokenising the criteria",
                "the tokenizer has no padding token",
                allowed="an encoder's tokenizer for joint.criteria_model",
            )
        texts = [row.criterion or "" for row in rows]
        distinct = list(dict.fromkeys(texts))
        encoded = tokenizer(distinct, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
        table = torch.full((len(distinct), length), pad_id, dtype=torch.int32)
        for index, ids in enumerate(encoded):
            table[index, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        numbers = {text: index for index, text in enumerate(distinct)}
        picked_R = torch.tensor([numbers[text] for text in texts])
        lengths_R = torch.tensor([len(ids) for ids in encoded])[picked_R]
        return replace(split, extra={**split.extra, CRITERION_IDS: table[picked_R], _LENGTHS: lengths_R})

    def _check_length(self) -> None:
        source, length = criteria_source(self.context.settings), self.context.settings.joint.criterion_length
        config, doing = pretrained_config(source, self.kind), f"preparing the model {source.name}"
        check_positions(config, "joint.criterion_length", length, doing)


def criteria_source(settings: TrialSettings) -> ModelSettings:
    """Return the model that reads criteria; ``model.revision`` is of the one that reads texts."""
    name = settings.joint.criteria_model
    if name is None:
        return settings.model
    return ModelSettings(name=name, trust_remote_code=settings.model.trust_remote_code)


# The task ``share``: a class and a span by two heads on one encoder of (criterion, text), or text alone.


@final
class ShareTask(ClassAndSpanTask):
    """A class and a span of each row, from windows that one encoder reads."""

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return the encoder with its two heads."""
        settings = self.context.settings
        encoder = make(settings.model, self.kind)
        weighting = settings.multitask.weighting
        return build(lambda: SharedEncoder(encoder, self.head, weighting, self.limits), seed=seed)
