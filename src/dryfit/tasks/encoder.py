"""Base class of tasks with one encoder and a head on it; a task of the user's own begins here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.meta.construction import build
from dryfit.meta.pretrained import Kind
from dryfit.settings.errors import DataError
from dryfit.settings.tables import ModelSettings
from dryfit.tasks.base import MODEL_INPUTS, Batch, MakeBase, Outputs, Task, TaskContext, TaskModel, pad_rows
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.rows import Readable, Row, Splits, UnlabelledRow
from dryfit.tasks.tokens import Tokens, TokenSet, crowded_criteria, token_set, tokenise

_NOTHING: Mapping[str, float] = MappingProxyType({})


class EncoderTask(Task):
    """Scores of each row, from one encoder's pooled token vectors.

    A subclass defines at least :attr:`num_outputs`, :meth:`labels`, the loss (:meth:`batch_weight`, :meth:`loss_sum`),
    :meth:`metric_names` and :meth:`metrics`, and :meth:`predictions`.

    Args:
        context: Settings, rows and tokens.
    """

    kind: ClassVar[Kind] = Kind.ENCODER
    required: ClassVar[frozenset[str]] = frozenset({"label"})
    further: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[frozenset[str]] = frozenset({"head"})
    inputs: ClassVar[tuple[str, ...]] = MODEL_INPUTS
    padded: ClassVar[tuple[str, ...]] = MODEL_INPUTS

    def __init__(self, context: TaskContext) -> None:
        self.context = context

    @property
    def given(self) -> TaskContext:
        """The context, by its former name, for tasks of the user's own that were written with it."""
        return self.context

    @property
    def classes(self) -> int | None:
        """None: labels are not classes."""
        return None

    @property
    def num_outputs(self) -> int:
        """Number of scores of each row."""
        raise NotImplementedError

    def labels(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the labels of rows; the first dimension is the row."""
        raise NotImplementedError

    def check_rows(self, splits: Splits) -> None:
        """Accept any rows."""

    def token_key(self) -> str:
        """Return nothing: tokens depend on rows, model and length alone."""
        return ""

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Tokenise (criterion, text), or text alone, cutting only the text."""
        labels = {name: self.labels(rows) for name, rows in splits.items()}
        return tokenise(splits, labels, tokenizer, self.context.settings.train.max_length)

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Tokenise rows without labels in the same way."""
        return token_set(rows, torch.full((len(rows),), -1), tokenizer, self.context.settings.train.max_length)

    def sources(self) -> Mapping[str, ModelSettings]:
        """Return the one encoder."""
        return {"": self.context.settings.model}

    @property
    def shared_tokens(self) -> int | None:
        """0: a text is truncated, not split into windows."""
        return 0

    def remarks(self, tokens: Tokens) -> tuple[str, ...]:
        """Return no remarks."""
        del tokens
        return ()

    def epoch_rows(self, tokens: TokenSet, *, seed: int, epoch: int) -> torch.Tensor | None:
        """Return None: each epoch trains on all rows."""
        del tokens, seed, epoch
        return None

    def epoch_entries(self, tokens: TokenSet, *, seed: int, epoch: int) -> Batch:
        """Return nothing: a batch of the same rows is the same in each epoch."""
        del tokens, seed, epoch
        return {}

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return the encoder with its head."""
        settings, facts = self.context.settings, self.context.facts
        encoder = make(settings.model, self.kind)
        spec = HeadSpec(
            settings.head, self.num_outputs, cls_last=facts.cls_last, multi_label=self.context.data.multi_label
        )
        return build(lambda: EncoderWithHead(encoder, spec, classes=self.classes), seed=seed)

    def check_model(self, model: TaskModel) -> None:
        """Accept any model."""

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some rows and add their labels."""
        labels = tokens.labels_R[list(rows)]
        return self.collate_unlabelled(tokens, rows) | {
            "labels": labels if labels.is_floating_point() else labels.long()
        }

    def collate_unlabelled(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some rows."""
        return pad_rows(tokens, rows, pad_id=self.context.facts.pad_id)

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return sizes (rows, length) for inputs, and one label for each row."""
        inputs = self.inputs if segments else tuple(name for name in self.inputs if name != "token_type_ids")
        return dict.fromkeys(inputs, (rows, length)) | {"labels": (rows,)}

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Keep the scores."""
        del batch
        assert isinstance(outputs, torch.Tensor)
        return outputs

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """Choose nothing."""
        del kept, tokens
        return _NOTHING

    def measure(
        self, model: TaskModel, tokens: TokenSet, *, batch_rows: int, beat: Callable[[], None]
    ) -> Mapping[str, float]:
        """Return no further metrics: one pass is enough."""
        del model, tokens, batch_rows, beat
        return _NOTHING

    def measured_rows(self, batch_rows: int) -> int:
        """Return 0: nothing is measured beyond one pass."""
        del batch_rows
        return 0

    def rehearse_measure(self, model: TaskModel, rows: int, length: int) -> None:
        """Do nothing."""

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """Yield the scores themselves."""
        del tokens, rows
        yield from ({"scores": scores} for scores in kept.double().tolist())

    def unfit(self, rows: Sequence[UnlabelledRow], tokenizer: PreTrainedTokenizerBase) -> Mapping[int, DataError]:
        """Return an error for each row whose criterion leaves no room for any text."""
        if self.shared_tokens is None:
            return {}
        crowded = crowded_criteria(rows, tokenizer, self.context.settings.train.max_length, shared=self.shared_tokens)
        return {
            index: DataError(f"tokenising {row.place}", crowded[row.criterion].found, crowded[row.criterion].allowed)
            for index, row in enumerate(rows)
            if row.criterion is not None and row.criterion in crowded
        }

    def generate(
        self,
        model: TaskModel,
        rows: Sequence[Readable],
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_rows: int,
        beat: Callable[[], None],
    ) -> Iterator[dict[str, object]] | None:
        """Return None: nothing is generated."""
        del model, rows, tokenizer, batch_rows, beat
        return None
