"""The interface of a task: how rows become tokens, the model, a loss that is a sum, metrics and predictions.

The training loop, the planner and the commands use nothing else of a task. :class:`~dryfit.tasks.encoder.EncoderTask`
implements it for one encoder with a head; a task of that kind adds its labels, its loss and its metrics.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind
from dryfit.settings.errors import DataError
from dryfit.settings.execution import WeightFormat
from dryfit.settings.tables import DataSettings, Knob, ModelSettings, TrialSettings
from dryfit.settings.task_facts import MetricName
from dryfit.tasks.rows import Readable, Splits, UnlabelledRow
from dryfit.tasks.scored_rows import ScoredRow
from dryfit.tasks.tokens import NOT_TOKENISED, TokenFacts, Tokens, TokenSet

Batch = dict[str, torch.Tensor]
"""Tensors by name; the first dimension of each is the row."""

Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""A model's outputs: one tensor, or several; the first dimension of each is the row."""

"""Torch's dtype of each number format."""

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Arguments of an encoder, as far as it takes them; padded along the second dimension."""


class Loss(Protocol):
    """A loss that is a sum over rows, so that a batch can be split into micro-batches.

    A loss of several parts, each with a normaliser of its own, returns vectors: the sum of the quotients is minimised.
    """

    inputs: ClassVar[tuple[str, ...]]
    """Entries of a batch that are passed to the model, where the batch has them."""
    padded: ClassVar[tuple[str, ...]]
    """Entries padded along the second dimension; micro-batches are cut to their longest row by ``attention_mask``."""

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the normaliser of a batch, above 0: 0-dimensional, or one number for each part."""
        ...

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return the loss summed over the rows: 0-dimensional, or one number for each part."""
        ...


class MakeBase(Protocol):
    """Makes a pretrained model: with its weights for training, without them for planning and loading."""

    def __call__(
        self, source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        """Make the model.

        Args:
            source: Its name and revision.
            kind: Its head, as the library of pretrained models calls it.
            part: Subfolder of a saved model that holds this one's config; empty: the folder itself.
            frozen: Format of its weights where they are frozen; None: they are trained, in fp32.
        """
        ...


class TaskModel(nn.Module):
    """The model that a task trains: pretrained parts with a head on them."""

    encoder_paths: ClassVar[tuple[str, ...]] = ()
    """Submodules that are pretrained encoders. All else is the head."""
    drawn: ClassVar[tuple[str, ...]] = ("head.*",)
    """Patterns of weights that no file has: they are drawn at random before training."""
    classes: int | None = None
    """Number of classes; None: labels are not classes."""
    limits: Mapping[str, int] = MappingProxyType({})
    """Exclusive upper limits of further entries of a batch, beside ids, segments and labels; the lower one is 0."""
    takes_types: bool = False
    """Whether the model reads token types (segments)."""
    still: tuple[str, ...] = ()
    """Submodules that stay in eval mode while the rest trains: frozen ones without dropout."""

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, or out of it; :attr:`still` modules stay in eval mode."""
        super().train(mode)
        for path in self.still:
            self.get_submodule(path).eval()
        return self

    def base(self) -> PreTrainedModel:
        """Return the pretrained model that reads ``input_ids``."""
        raise NotImplementedError

    def pretrained(self) -> Mapping[str, PreTrainedModel]:
        """Return the pretrained models by the subfolder of a saved model that holds each one's config."""
        return {"": self.base()}

    def adapted(self) -> nn.Module | None:
        """Return PEFT's model where only adapters are trained and saved; None: the whole model is."""
        return None


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a task is made from: the settings of a trial, and facts of its data.

    Attributes:
        settings: The trial's settings.
        data: The ``[data]`` table.
        facts: Facts of the tokens; defaults before there are any.
        metric: The study's metric, by which :meth:`Task.fit` chooses; None: the task's usual one.
        fitted: Result of :meth:`Task.fit`.
        saved: Folder of the saved model that is used; None: the model is still to be trained.
    """

    settings: TrialSettings
    data: DataSettings
    facts: TokenFacts = NOT_TOKENISED
    metric: MetricName | None = None
    fitted: Mapping[str, float] = field(default_factory=dict[str, float])
    saved: FolderSource | None = None

    @property
    def own(self) -> Mapping[str, Knob]:
        """Return the values of ``[own]``: the keys that a task of the user's own declares in ``knobs``."""
        return self.settings.own.knobs

    def with_facts(self, facts: TokenFacts) -> Self:
        """Return a copy with facts of the tokens."""
        return replace(self, facts=facts)


class Task(Loss, Protocol):
    """One kind of learning, made from the settings of one trial."""

    kind: ClassVar[Kind]
    """Head of the pretrained model."""
    required: ClassVar[frozenset[str]]
    """Columns that rows must have beside the text: ``label``, ``evidence``, ``criterion``."""
    further: ClassVar[tuple[str, ...]]
    """Further columns that rows must have, by the user's own names; each row keeps them in ``extra``."""
    tables: ClassVar[frozenset[str]] = frozenset()
    """Tables that a task of the user's own reads beside those of the training loop. Another one is refused where it is
    set or searched. ``settings/task_facts.py`` has those of dryfit's tasks."""
    knobs: ClassVar[Mapping[str, Knob]] = MappingProxyType({})
    """Keys of ``[own]`` with their defaults."""
    context: TaskContext

    @property
    def classes(self) -> int | None:
        """Number of classes; None: labels are not classes."""
        ...

    def __init__(self, context: TaskContext) -> None: ...

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of all metrics of :meth:`metrics` and :meth:`measure`."""
        ...

    def check_rows(self, splits: Splits) -> None:
        """Refuse rows from which the task cannot be learned.

        Raises:
            DataError: The message names a row, or the split.
        """
        ...

    def token_key(self) -> str:
        """Return a text that names every setting, beside model and length, on which tokens depend; may be empty."""
        ...

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Tokenise all rows, with labels.

        Raises:
            DataError: A row does not fit into the length.
            ConfigError: The tokenizer is of the wrong kind.
        """
        ...

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Tokenise rows to predict."""
        ...

    @property
    def shared_tokens(self) -> int | None:
        """Tokens of the text that two windows share: a row must have room for one more of them beside its criterion.

        None: the criterion is read apart from the text.
        """
        ...

    def sources(self) -> Mapping[str, ModelSettings]:
        """Return the pretrained models to start from, by the folders of :meth:`TaskModel.pretrained`."""
        ...

    def remarks(self, tokens: Tokens) -> tuple[str, ...]:
        """Return notes on the data for the user that do not stop training; may be empty."""
        ...

    def epoch_rows(self, tokens: TokenSet, *, seed: int, epoch: int) -> torch.Tensor | None:
        """Return the rows of the training split for an epoch (from 0), as many in each; None: all rows.

        A pure function, so that a resumed trial goes on with the same rows.
        """
        ...

    def epoch_entries(self, tokens: TokenSet, *, seed: int, epoch: int) -> Batch:
        """Return further entries of an epoch's batches (from 0), beside those of :meth:`collate`, for all rows.

        A pure function, as :meth:`epoch_rows`. Usually empty.
        """
        ...

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return the model; what is not pretrained is on the meta device, and drawn by the seed when materialised."""
        ...

    def check_model(self, model: TaskModel) -> None:
        """Refuse a loaded model that cannot be trained with these settings.

        Raises:
            ConfigError: The model cannot.
        """
        ...

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Return the batch of some rows, with labels."""
        ...

    def collate_unlabelled(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Return the batch of some rows to predict."""
        ...

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return the size of each entry of a batch, all int64, for planning.

        Args:
            rows: Rows of the batch.
            length: Tokens of each.
            segments: Whether the model reads token types.
        """
        ...

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return what metrics and predictions need of a batch's outputs: (rows, K), with one K for all batches."""
        ...

    def fit(self, kept: torch.Tensor, tokens: TokenSet) -> Mapping[str, float]:
        """Choose numbers (a threshold) by the outputs of the validation split; may be empty."""
        ...

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a whole split; ``kept`` is (rows, K), in row order, in fp32 on the CPU."""
        ...

    def measure(
        self, model: TaskModel, tokens: TokenSet, *, batch_rows: int, beat: Callable[[], None]
    ) -> "Mapping[str, float] | Measured":
        """Return metrics that need more than one pass over the rows (generation); may be empty.

        Args:
            model: In eval mode, on its device.
            tokens: A split.
            batch_rows: Rows of a validation batch; at most :meth:`measured_rows` of it are used at once.
            beat: Called once a batch, as a sign of life.
        """
        ...

    def measured_rows(self, batch_rows: int) -> int:
        """Return how many rows :meth:`measure` works on at once, given those of a validation batch; 0: none."""
        ...

    def rehearse_measure(self, model: TaskModel, rows: int, length: int) -> None:
        """Run the part of :meth:`measure` that takes most memory, on tensors without values, for planning."""
        ...

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        """Yield the prediction of each row, in order, as JSON takes it."""
        ...

    def unfit(self, rows: Sequence[UnlabelledRow], tokenizer: PreTrainedTokenizerBase) -> Mapping[int, DataError]:
        """Return the error of each row to predict that the model cannot read, by the row's index."""
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
        """Generate the predictions of rows; None: :meth:`predictions` makes them, after one pass over the rows.

        Args:
            model: In eval mode, on its device.
            rows: None of them in :meth:`unfit`.
            tokenizer: The model's.
            batch_rows: Rows at once.
            beat: Called once a batch, as a sign of life.
        """
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Metrics that needed more than one pass over the rows, with their inputs.

    Attributes:
        metrics: By name.
        rows: The rows that were looked at, by their index in the split.
    """

    metrics: Mapping[str, float]
    rows: Mapping[int, ScoredRow] = field(default_factory=dict[int, ScoredRow])


@runtime_checkable
class TellsRows(Protocol):
    """A task that returns, for each row, its answer and the correct one."""

    def scored_rows(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> Iterable[ScoredRow]:
        """Yield each row of a labelled split, in order; arguments as of :meth:`Task.metrics`."""
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
