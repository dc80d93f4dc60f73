"""What a task is to the rest: its rows as tokens, its model, a loss that is a sum, metrics and predictions.

The loop, the planner and the commands know nothing else of a task. :class:`~dryfit.tasks.encoder.EncoderTask` has all
of it for one encoder with a head; a task of that kind says little more than what its labels, loss and metrics are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Final, Protocol, Self, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dryfit.core.errors import DataError
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.tables import DataSettings, Knob, ModelSettings, TrialSettings
from dryfit.core.settings.task_facts import MetricName
from dryfit.meta.files.source import FolderSource
from dryfit.meta.loading.pretrained import Kind
from dryfit.tasks.rows.checked_rows import Readable, Splits, UnlabelledRow
from dryfit.tasks.tokens.token_set import NOT_TOKENISED, TokenFacts, Tokens, TokenSet

Batch = dict[str, torch.Tensor]
"""Tensors by name; the first dimension of each is the row."""

Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""What a model gives: one tensor, or several; the first dimension of each is the row."""

DTYPES: Final = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""Torch's own name of each number format."""

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""What an encoder is called with, as far as it takes it; padded along the second dimension."""


class Loss(Protocol):
    """What is minimised. It must be a sum over rows, so that a batch can be cut into micro-batches.

    A loss of several parts, each with a normaliser of its own, gives both as vectors: what is minimised is the sum of
    the quotients.
    """

    inputs: ClassVar[tuple[str, ...]]
    """Entries of a batch that the model is called with, where they are there."""
    padded: ClassVar[tuple[str, ...]]
    """Entries that are padded along the second dimension, and can be cut to the longest row by ``attention_mask``."""

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """What the loss sum of this batch is divided by, above 0; 0-dimensional, or one for each part."""
        ...

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """The batch's loss, summed over its rows; 0-dimensional, or one for each part."""
        ...


class MakeBase(Protocol):
    """Makes a pretrained model: with its weights, or for planning and for loading without."""

    def __call__(
        self, source: ModelSettings, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        """Make one.

        Args:
            source: Which model.
            kind: What stands on it.
            part: Folder within a saved model's own that keeps this one's config; empty: the folder itself.
            dtype: Of its weights where they are not trained; None: fp32.
        """
        ...


class TaskModel(nn.Module):
    """What a task trains: pretrained parts, and a head on them."""

    encoder_paths: ClassVar[tuple[str, ...]] = ()
    """Submodules that are pretrained encoders. What lies outside is the head, where there is any."""
    drawn: ClassVar[tuple[str, ...]] = ("head.*",)
    """Patterns of what no file has: it is drawn at random before training."""
    classes: int | None = None
    """Classes that a row's label is one of, or has any number of; None: labels are something else."""
    limits: Mapping[str, int] = MappingProxyType({})
    """Entries of a batch, beside ids, segments and labels, whose numbers are from 0 to below a limit."""
    takes_types: bool = False
    """Whether the segment of each token is read."""

    def base(self) -> PreTrainedModel:
        """The pretrained model that reads ``input_ids``."""
        raise NotImplementedError

    def pretrained(self) -> Mapping[str, PreTrainedModel]:
        """Its pretrained models, by the folder that keeps each one's config within the saved model's own (``""``)."""
        return {"": self.base()}

    def adapted(self) -> nn.Module | None:
        """PEFT's model, where adapters alone are trained, and saved; None: all of this is."""
        return None


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a task is made from.

    Attributes:
        settings: What is learned, and how.
        data: What the rows are like.
        facts: What is known of their tokens; nothing before they were made.
        metric: The study's, by which :meth:`Task.fit` chooses; None: whatever the task takes for usual.
        fitted: What :meth:`Task.fit` has chosen.
        saved: The folder of the saved model that is used; None: it is still to be trained.
    """

    settings: TrialSettings
    data: DataSettings
    facts: TokenFacts = NOT_TOKENISED
    metric: MetricName | None = None
    fitted: Mapping[str, float] = field(default_factory=dict[str, float])
    saved: FolderSource | None = None

    @property
    def own(self) -> Mapping[str, Knob]:
        """The keys that a task of the user's own declares in ``knobs``: as the study file or the search has them."""
        return self.settings.own.knobs

    def knowing(self, facts: TokenFacts) -> Self:
        """The same, with its rows tokenised."""
        return replace(self, facts=facts)


class Task(Loss, Protocol):
    """One kind of learning, made from the settings of one trial."""

    kind: ClassVar[Kind]
    """What stands on its pretrained model."""
    required: ClassVar[frozenset[str]]
    """Columns that its rows must have beside the text: ``label``, ``evidence``, ``criterion``."""
    further: ClassVar[tuple[str, ...]]
    """Columns of the user's own that its rows must have; each row keeps them in ``extra``."""
    tables: ClassVar[frozenset[str]] = frozenset()
    """Tables of a trial's settings that it reads, beside those that the training loop does. Asked of own tasks alone:
    another table is refused where it is set or searched. ``core/tasks.py`` has those of dryfit's tasks."""
    knobs: ClassVar[Mapping[str, Knob]] = MappingProxyType({})
    """Keys of ``[own]`` with their defaults, for a task of the user's own."""
    context: TaskContext

    @property
    def classes(self) -> int | None:
        """Classes that a row's label is one of, or has any number of; None: labels are something else."""
        ...

    def __init__(self, context: TaskContext) -> None: ...

    def metric_names(self) -> tuple[str, ...]:
        """Every metric that :meth:`metrics` gives."""
        ...

    def check_rows(self, splits: Splits) -> None:
        """Refuse rows from which this cannot be learned.

        Raises:
            DataError: The message names a row, or the split.
        """
        ...

    def token_key(self) -> str:
        """What decides the tokens beside rows, model and length, in one word; empty: nothing."""
        ...

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Make all rows tokens with labels.

        Raises:
            DataError: A row has no room.
            ConfigError: The tokenizer cannot.
        """
        ...

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Make rows to predict tokens; their labels are not looked at."""
        ...

    @property
    def shared_tokens(self) -> int | None:
        """Tokens that a row must have room for beside its criterion, and one more: those that two windows share.

        None: a criterion takes no room of its text.
        """
        ...

    def sources(self) -> Mapping[str, ModelSettings]:
        """Which pretrained models it builds on, by the folders of :meth:`TaskModel.pretrained`."""
        ...

    def remarks(self, tokens: Tokens) -> tuple[str, ...]:
        """What whoever made the data should know of its tokens, though training goes on; may be empty."""
        ...

    def epoch_rows(self, tokens: TokenSet, *, seed: int, epoch: int) -> torch.Tensor | None:
        """Rows of the training split that an epoch (from 0) trains on, as many in each; None: all of them.

        A pure function, so that a resumed trial goes on with the same rows.
        """
        ...

    def epoch_entries(self, tokens: TokenSet, *, seed: int, epoch: int) -> Batch:
        """Entries that batches of an epoch (from 0) have beside those of :meth:`collate`; for all rows of the split.

        A pure function, as :meth:`epoch_rows`. Usually there are none.
        """
        ...

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """The model; what is not pretrained is on the meta device, and drawn by the seed when it is materialised."""
        ...

    def check_model(self, model: TaskModel) -> None:
        """Refuse a model that has its weights and cannot do what is asked.

        Raises:
            ConfigError: It cannot.
        """
        ...

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Make the batch of some rows, labels included."""
        ...

    def collate_unlabelled(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Make the batch of some rows to predict."""
        ...

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """The size of each entry of a batch of so many rows of so many tokens; all are int64. For planning.

        Args:
            segments: Whether the model reads the segment of each token.
        """
        ...

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """What metrics and predictions need of a batch's outputs: (rows, K), of one width K for all batches."""
        ...

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """What is chosen by the outputs of the validation split (a threshold), never by another's; may be empty."""
        ...

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        """Every metric of a whole split; ``kept`` is (rows, K), in row order, in fp32 on the CPU."""
        ...

    def measure(
        self, model: TaskModel, tokens: TokenSet, *, batch_rows: int, beat: Callable[[], None]
    ) -> Mapping[str, float]:
        """Metrics that need more of the model than one pass over the rows; may be empty.

        Args:
            model: In eval mode, on its device.
            tokens: A split.
            batch_rows: Rows of a validation batch; never more at once than :meth:`measured_rows` of it.
            beat: Called once a batch.
        """
        ...

    def measured_rows(self, batch_rows: int) -> int:
        """Rows that :meth:`measure` works on at once, where a validation batch has so many; 0: it does nothing."""
        ...

    def rehearse_measure(self, model: TaskModel, rows: int, length: int) -> None:
        """What of :meth:`measure` takes most memory, on tensors without values, for so many rows of so many tokens."""
        ...

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """What is said of each row, in order, as JSON takes it."""
        ...

    def unfit(self, rows: Sequence[UnlabelledRow], tokenizer: PreTrainedTokenizerBase) -> Mapping[int, DataError]:
        """Rows to predict that the model cannot read, by their index, each with what is wrong."""
        ...

    def generate(
        self,
        model: TaskModel,
        rows: Sequence[Readable],
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_rows: int,
        beat: Callable[[], None],
    ) -> Iterator[dict[str, object]] | None:
        """What a model that writes says of each row; None: :meth:`predictions` says it, after one pass over them.

        Args:
            model: In eval mode, on its device.
            rows: Of which none is unfit.
            tokenizer: Its tokenizer.
            batch_rows: Rows at once.
            beat: Called once a batch.
        """
        ...


def pad_rows(tokens: TokenSet, rows: Sequence[int], *, pad_id: int) -> Batch:
    """Return token ids, mask and segments of some rows, padded on the right to the longest of them."""
    ids_BL = padded(tokens.ids_T, tokens, rows, fill=pad_id).long()
    picked = torch.tensor(rows)
    lengths_B = tokens.starts_R[picked + 1] - tokens.starts_R[picked]
    mask_BL = torch.arange(ids_BL.shape[1]) < lengths_B[:, None]
    batch = {"input_ids": ids_BL, "attention_mask": mask_BL.long()}
    return batch if tokens.types_T is None else batch | {"token_type_ids": padded(tokens.types_T, tokens, rows).long()}


def padded(values_T: torch.Tensor, tokens: TokenSet, rows: Sequence[int], *, fill: int = 0) -> torch.Tensor:
    """Return one number for each token of some rows, (rows, longest), in the dtype of the numbers.

    Args:
        values_T: A number for each token of the split.
        tokens: The split.
        rows: Which rows of it.
        fill: What stands behind the end of a shorter row.
    """
    starts = tokens.starts_R
    values = [values_T[int(starts[row]) : int(starts[row + 1])] for row in rows]
    return pad_sequence(values, batch_first=True, padding_value=fill)
