"""The task ``evidence``: find the span of a text that shows a criterion, or none (extractive question answering).

Dimension suffixes: ``W`` windows of a split, ``R`` rows, ``K`` numbers kept of a window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.meta.construction import build
from dryfit.settings.choices import Metric
from dryfit.settings.errors import DataError
from dryfit.settings.task_facts import metrics_of_spans
from dryfit.tasks.base import MODEL_INPUTS, Batch, MakeBase, Outputs, TaskContext, TaskModel, pad_rows, padded
from dryfit.tasks.baselines import Baseline, span_baselines
from dryfit.tasks.encoder import EncoderTask
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.rows import TRAIN, Readable, Row, Splits
from dryfit.tasks.scored_rows import LOSS_TERMS, ScoredRow
from dryfit.tasks.spans import SpanAnswers, SpanLoss, decode, pack, window_losses
from dryfit.tasks.tokens import Tokens, TokenSet, check_room, epoch_windows, tokens_of
from dryfit.tasks.windows import Cut, Spans, Windows, cut_into_windows

_BLANK = "blank"
"""Entry of ``TokenSet.extra``: the number of spans of white space alone in each row of the data."""


class EvidenceTask(EncoderTask):
    """Start and end scores of each token of each window, decoded to one span of the row, or none.

    Args:
        context: Settings, rows and tokens.
    """

    required: ClassVar[frozenset[str]] = frozenset({"evidence"})
    padded: ClassVar[tuple[str, ...]] = (*MODEL_INPUTS, "text_mask")

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self._span = context.settings.span
        self._loss = SpanLoss(context.settings.loss)

    @property
    def num_outputs(self) -> int:
        """A start and an end score for each token."""
        return 2

    @property
    def shared_tokens(self) -> int | None:
        """Tokens of the text that two neighbouring windows share."""
        return self._span.doc_stride

    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics of spans, and the plain cross entropy of windows."""
        return metrics_of_spans(self.context.data)

    def check_rows(self, splits: Splits) -> None:
        """Refuse rows from which no span can be learned.

        Raises:
            DataError: No training row has a span with text in it.
        """
        if not any(spans_with_text(row) for row in splits[TRAIN]):
            raise DataError(
                "preparing the split train",
                f"none of its {len(splits[TRAIN])} rows has any evidence",
                allowed="some rows with a span in data.evidence",
            )

    def token_key(self) -> str:
        """Return what decides windows beside rows, model and length."""
        return f"windows-1-{self._span.doc_stride}"  # another number if they are ever made otherwise

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Cut all texts into windows."""
        check_room((row for rows in splits.values() for row in rows), tokenizer, self._cut.max_length)
        sets = {name: self._windows_of(rows, tokenizer) for name, rows in splits.items()}
        return tokens_of(sets, tokenizer, pairs=splits[TRAIN][0].criterion is not None)

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Cut texts into windows without gold spans."""
        return cut_into_windows(rows, [()] * len(rows), tokenizer, self._cut).tokens

    def remarks(self, tokens: Tokens) -> tuple[str, ...]:
        """Return remarks on rows whose evidence is in no window, or longer than any answer."""
        return tuple(text for name, split in tokens.splits.items() for text in span_remarks(name, split, self.context))

    def epoch_rows(self, tokens: TokenSet, *, seed: int, epoch: int) -> torch.Tensor | None:
        """Return all windows with a span, and as many others as ``span.negatives`` asks for."""
        if self._span.negatives is None:
            return None
        return epoch_windows(Windows(tokens).has_span_W, self._span.negatives, seed=seed, epoch=epoch)

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return the encoder with a head on each token."""
        settings = self.context.settings
        encoder = make(settings.model, self.kind)
        spec = HeadSpec(settings.head, self.num_outputs, cls_last=self.context.facts.cls_last, per_token=True)
        return build(lambda: EncoderWithHead(encoder, spec), seed=seed)

    def collate_unlabelled(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some windows; without gold spans their labels are their null positions."""
        return collate_windows(tokens, rows, pad_id=self.context.facts.pad_id)

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return sizes (rows, length) for inputs and the text's mask; two labels and a null position a window."""
        sizes = super().batch_sizes(rows, length, segments=segments)
        return sizes | {"text_mask": (rows, length), "nulls": (rows,), "labels": (rows, 2)}

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of windows."""
        return self._loss.batch_weight(batch)

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return the mean of the start's and the end's loss, summed over windows."""
        assert isinstance(outputs, torch.Tensor)
        return self._loss.loss_sum(outputs, batch)

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Keep the best candidates of each window, and the scores of no span."""
        assert isinstance(outputs, torch.Tensor)
        return pack(outputs, batch, self._span)

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """Return the null threshold that is best by the study's metric, with ``null_policy = "calibrated"``."""
        if self._span.null_policy != "calibrated":
            return super().fit(kept, tokens)  # without decoding
        return self._answers(kept, tokens).fit()

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a split's answers, and the plain cross entropy of its windows."""
        loss = float(window_losses(kept).double().mean())
        return self._answers(kept, tokens).metrics(fitted) | {str(Metric.LOSS): loss}

    def baselines(self, splits: Splits, tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
        """Yield what the metrics are worth without a model."""
        del tokens
        golds = {row.id: spans_with_text(row) for rows in splits.values() for row in rows}
        fits = self._span.null_policy == "calibrated"
        return span_baselines(splits, golds, fits=fits, metric=self.context.metric)

    def scored_rows(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row with its span, or none, beside the right ones, and the loss of its windows."""
        windows = Windows(tokens)
        terms_R = torch.bincount(windows.rows_W, minlength=tokens.sources)
        losses_R = torch.zeros(tokens.sources, dtype=torch.float64)
        losses_R.index_add_(0, windows.rows_W, window_losses(kept).double())
        rows = self._answers(kept, tokens).scored_rows(tokens.source_names, fitted)
        for row, loss, terms in zip(rows, losses_R.tolist(), terms_R.tolist(), strict=True):
            yield replace(row, values={**row.values, Metric.LOSS: loss, LOSS_TERMS: terms})

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """Yield the span with its text and score, or none, with null's score and all candidates."""
        return self._answers(kept, tokens).predictions(rows, self.context.fitted)

    def _answers(self, kept: torch.Tensor, tokens: TokenSet) -> SpanAnswers:
        windows = Windows(tokens)
        return SpanAnswers(decode(kept, windows, self._span), windows, self._span, self.context.metric)

    @property
    def _cut(self) -> Cut:
        return Cut(self.context.settings.train.max_length, self._span.doc_stride)

    def _windows_of(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        golds = [spans_with_text(row) for row in rows]
        blank_R = torch.tensor([len(row.evidence) - len(spans) for row, spans in zip(rows, golds, strict=True)])
        tokens = cut_into_windows(rows, golds, tokenizer, self._cut).tokens
        assert tokens.source_R is not None
        row_ids = tuple(rows[row].id for row in tokens.source_R.tolist())
        return replace(tokens, row_ids=row_ids, extra={**tokens.extra, _BLANK: blank_R})


def spans_with_text(row: Row) -> Spans:
    """Return a row's gold spans without those of white space alone, which cutting a text into passages leaves."""
    return tuple((start, end) for start, end in row.evidence if row.text[start:end].strip())


def span_remarks(split: str, tokens: TokenSet, context: TaskContext) -> Iterator[str]:
    """Yield remarks on gold spans of a split that cannot be learned, or cannot be answered.

    Args:
        split: Its name.
        tokens: Its windows.
        context: The settings that they were cut by.
    """
    windows, span = Windows(tokens), context.settings.span
    unfit, has = int(windows.unfit_R.sum()), int((windows.golds.counts_R > 0).sum())
    length, model = context.settings.train.max_length, context.settings.model.name
    blank = int(tokens.extra[_BLANK].count_nonzero()) if _BLANK in tokens.extra else 0
    if blank:
        yield f"{split}: {blank} rows have spans of white space alone, which are read as none"
    if unfit:
        yield (
            f"{split}: of {has} rows with evidence {unfit} have none that lies wholly in a window of {length} tokens "
            f"of {model}: they are learned as rows without"
        )
    long_W = tokens.labels_R[:, 1] - tokens.labels_R[:, 0] >= span.max_answer_len
    long = len(windows.rows_W[long_W].unique())
    if long:
        yield (
            f"{split}: of {has} rows with evidence {long} have a span of more than span.max_answer_len = "
            f"{span.max_answer_len} tokens of {model}, which is never answered"
        )


def collate_windows(tokens: TokenSet, rows: Sequence[int], *, pad_id: int) -> Batch:
    """Return the batch of some windows: inputs, the text's mask, null positions and labels."""
    windows, batch = Windows(tokens), pad_rows(tokens, rows, pad_id=pad_id)
    text_mask = padded(windows.offsets_T2[:, 1], tokens, rows) > 0
    picked = list(rows)
    return batch | {"text_mask": text_mask.long(), "nulls": windows.nulls_W[picked], "labels": tokens.labels_R[picked]}
