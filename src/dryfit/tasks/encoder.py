"""What tasks with one encoder and a head on it have in common. A task of one's own begins here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.core.errors import DataError
from dryfit.core.settings.tables import ModelSettings
from dryfit.meta.construction.construction import build
from dryfit.meta.loading.pretrained import Kind
from dryfit.tasks.base import MODEL_INPUTS, Batch, MakeBase, Outputs, Task, TaskContext, TaskModel, pad_rows
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.rows.checked_rows import Readable, Row, Splits, UnlabelledRow
from dryfit.tasks.tokens.token_set import Tokens, TokenSet, crowded_criteria, token_set, tokenise

_NOTHING: Mapping[str, float] = MappingProxyType({})


class EncoderTask(Task):
    """Scores for each row, from one encoder's pooled token vectors.

    A subclass says at least: :attr:`num_outputs`, :meth:`labels`, the loss (:meth:`batch_weight`, :meth:`loss_sum`),
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
        """Labels are no classes."""
        return None

    @property
    def num_outputs(self) -> int:
        """Scores for each row."""
        raise NotImplementedError

    def labels(self, rows: Sequence[Row]) -> torch.Tensor:
        """What is to be learned of each row; the first dimension is the row."""
        raise NotImplementedError

    def check_rows(self, splits: Splits) -> None:
        """Any rows will do."""

    def token_key(self) -> str:
        """Nothing but rows, model and length decides the tokens."""
        return ""

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Tokenise (criterion, text), or text alone, cutting only the text."""
        labels = {name: self.labels(rows) for name, rows in splits.items()}
        return tokenise(splits, labels, tokenizer, self.context.settings.train.max_length)

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Tokenise rows without labels in the same way."""
        return token_set(rows, torch.full((len(rows),), -1), tokenizer, self.context.settings.train.max_length)

    def sources(self) -> Mapping[str, ModelSettings]:
        """One encoder."""
        return {"": self.context.settings.model}

    @property
    def shared_tokens(self) -> int | None:
        """A text is cut, not split into windows."""
        return 0

    def remarks(self, tokens: Tokens) -> tuple[str, ...]:
        """Nothing."""
        del tokens
        return ()

    def epoch_rows(self, tokens: TokenSet, *, seed: int, epoch: int) -> torch.Tensor | None:
        """Each epoch trains on all rows."""
        del tokens, seed, epoch
        return None

    def epoch_entries(self, tokens: TokenSet, *, seed: int, epoch: int) -> Batch:
        """The same batch of rows is the same in each epoch."""
        del tokens, seed, epoch
        return {}

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """The encoder with its head."""
        settings, facts = self.context.settings, self.context.facts
        encoder = make(settings.model, self.kind)
        spec = HeadSpec(
            settings.head, self.num_outputs, cls_last=facts.cls_last, multi_label=self.context.data.multi_label
        )
        return build(lambda: EncoderWithHead(encoder, spec, classes=self.classes), seed=seed)

    def check_model(self, model: TaskModel) -> None:
        """Any will do."""

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
        """Inputs of (rows, length), and a label for each row."""
        inputs = self.inputs if segments else tuple(name for name in self.inputs if name != "token_type_ids")
        return dict.fromkeys(inputs, (rows, length)) | {"labels": (rows,)}

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """The scores."""
        del batch
        assert isinstance(outputs, torch.Tensor)
        return outputs

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """Nothing is chosen."""
        del kept, tokens
        return _NOTHING

    def measure(
        self, model: TaskModel, tokens: TokenSet, *, batch_rows: int, beat: Callable[[], None]
    ) -> Mapping[str, float]:
        """One pass is enough."""
        del model, tokens, batch_rows, beat
        return _NOTHING

    def measured_rows(self, batch_rows: int) -> int:
        """None."""
        del batch_rows
        return 0

    def rehearse_measure(self, model: TaskModel, rows: int, length: int) -> None:
        """Nothing is done."""

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """The scores themselves."""
        del tokens, rows
        yield from ({"scores": scores} for scores in kept.double().tolist())

    def unfit(self, rows: Sequence[UnlabelledRow], tokenizer: PreTrainedTokenizerBase) -> Mapping[int, DataError]:
        """Rows whose criterion leaves no room for any text."""
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
        """Nothing is written."""
        del model, rows, tokenizer, batch_rows, beat
        return None
