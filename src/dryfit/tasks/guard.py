"""Checks of tokens, batches and outputs on the host, before they can break a device.

A token id or label out of range ends a CUDA kernel with a device-side assert, which names neither the row nor the
problem. Here every tensor is checked while it is on the CPU, so that no check waits for a device. A whole split is
checked once, before the first step; each batch again, because a worker or the collation may damage it. Messages name
rows by their ids, never by their text. Labels as they stand in the user's files are checked in
:mod:`dryfit.tasks.rows`: here they are tensors, which a cache or a worker may have damaged since.

Dimension suffixes: ``T`` all tokens of a split one after another, ``R`` rows of a split, ``B`` rows of a batch, ``L``
tokens, ``N`` any.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from dryfit.meta.configs import most_tokens
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.text import few
from dryfit.tasks.base import Batch, Outputs, TaskModel
from dryfit.tasks.tokens import TokenSet

_VOCABULARY_HINT = "use the tokenizer that the model was trained with, or give the model an embedding for added tokens"
_MOST_NAMES = 64
_CACHE_HINT = "the rows were in order when the study began: remove its folder `cache` and resume it"
_BATCH_HINT = "the tokens it was made of are in order: set execution.loader_workers = 0, and report it if it comes back"

RowsOf: TypeAlias = Callable[[NDArray[np.bool_]], Sequence[int]]
"""Returns the rows of a split that bad values are in, given which values are bad."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the numbers that a model and its task accept; None: no limit.

    Attributes:
        tokens: Rows of the model's embedding.
        segments: Rows of its embedding of segments.
        length: Positions it has.
        labels: Classes; None where labels are not classes.
        entries: Exclusive upper limits of further entries of a batch.
    """

    tokens: int | None
    segments: int | None
    length: int | None
    labels: int | None
    entries: Mapping[str, int] = field(default_factory=dict[str, int])


def config_bounds(config: PreTrainedConfig) -> Bounds:
    """Return the limits that a model's config states; it states none of labels."""
    rows = getattr(config, "vocab_size", None)
    return Bounds(rows if isinstance(rows, int) else None, segments=None, length=most_tokens(config), labels=None)


def model_bounds(model: TaskModel) -> Bounds:
    """Return the limits of the tables that a model really has."""
    config = model.base().config
    embedding: Any = model.base().get_input_embeddings()
    return Bounds(
        tokens=len(embedding.weight),
        segments=getattr(config, "type_vocab_size", None) if model.takes_types else None,
        length=most_tokens(config),
        labels=model.classes,
        entries=model.limits,
    )


@dataclass(frozen=True, slots=True)
class _Checker:
    """Checks of one split or its batches, with what their messages need.

    Attributes:
        doing: What is being checked, for messages.
        tokens: The split, which knows the ids of its rows.
        bounds: Limits of the model.
        hint: What to do about damaged data.
    """

    doing: str
    tokens: TokenSet
    bounds: Bounds
    hint: str

    def refuse(self, what: str, rows: Sequence[int], allowed: str, hint: str = "") -> NoReturn:
        """Raise a data error about some rows of the split."""
        count = f"{len(rows)} row{'s' if len(rows) > 1 else ''}"
        raise DataError(self.doing, f"{what} in {count}: {few(self.tokens.names_of(rows))}", allowed, hint or self.hint)

    def check_range(
        self, what: str, values_N: NDArray[Any], limit: int | None, rows_of: RowsOf, why: str = "", hint: str = ""
    ) -> None:
        """Refuse values below 0, or not below a limit.

        Args:
            what: What they are, for the message.
            values_N: The values.
            limit: The limit; None: any.
            rows_of: Returns the rows of the split that bad values are in.
            why: What the limit comes from.
            hint: What to do about values above it, where that is no damage.

        Raises:
            DataError: There is such a value.
        """
        # In one pass: as unsigned numbers, negative ones are large.
        if limit is None or values_N.size == 0 or values_N.view(f"u{values_N.itemsize}").max() < limit:
            return
        bad_N = (values_N < 0) | (values_N >= limit)
        worst = int(values_N[bad_N].max())
        self.refuse(f"{what} {worst}", rows_of(bad_N), f"0 to {limit - 1}{why}", hint if worst >= limit else "")

    def check_inputs(self, ids_N: NDArray[Any], types_N: NDArray[Any] | None, rows_of: RowsOf) -> None:
        """Refuse token ids and segments without an embedding.

        Raises:
            DataError: There is one.
        """
        tokens, segments = self.bounds.tokens, self.bounds.segments
        # A tokenizer that was added to goes on where the embedding ends; in a batch such ids come from damage.
        hint = _VOCABULARY_HINT if self.hint != _BATCH_HINT else ""
        self.check_range("token id", ids_N, tokens, rows_of, f": the model's embedding has {tokens} rows", hint)
        if types_N is not None:
            why = f": the model has {segments} token types"
            self.check_range("segment", types_N, segments, rows_of, why, _VOCABULARY_HINT)

    def check_labels(self, labels_N: NDArray[Any], rows: Callable[[], Sequence[int]]) -> None:
        """Check the labels of some rows: one class, or for each class whether the row has it.

        Raises:
            DataError: A class does not exist, or the shape is wrong.
        """
        classes = self.bounds.labels
        if classes is None:
            return
        named = f" (data.num_labels = {classes})"
        if labels_N.ndim > 1 and labels_N.shape[1:] != (classes,):
            self.refuse(f"labels {labels_N.shape}", rows(), f"(rows, {classes}){named}")
        limit, why = (classes, named) if labels_N.ndim == 1 else (2, "")
        self.check_range("label", labels_N, limit, lambda bad_N: _named(rows(), bad_N), why)

    def check_places(self, places_RN: NDArray[Any], lengths_R: NDArray[Any], rows: Callable[[], Sequence[int]]) -> None:
        """Check labels that are positions of tokens.

        Args:
            places_RN: Positions in each row, (rows, any).
            lengths_R: Tokens of each row.
            rows: Rows of the split; called for a message only.

        Raises:
            DataError: A position is outside its row.
        """
        bad_RN = (places_RN < 0) | (places_RN >= lengths_R[:, None])
        if bad_RN.any():
            worst = places_RN[bad_RN].max()
            self.refuse(f"place {worst}", _named(rows(), bad_RN), "places of the row's own tokens")


def check_tokens(split: str, tokens: TokenSet, bounds: Bounds, *, hint: str = _CACHE_HINT) -> None:
    """Check a whole split.

    Args:
        split: Its name.
        tokens: The split.
        bounds: Limits of the model.
        hint: What to do about damaged data.

    Raises:
        DataError: A row is empty or too long, or has a token id, segment or label beyond the model's limits.
    """
    checker = _Checker(f"checking the tokens of the split {split}", tokens, bounds, hint)
    starts_R, lengths_R = tokens.starts_R.numpy(), tokens.lengths_R.numpy()
    sizes = [len(values) for values in (tokens.ids_T, tokens.types_T) if values is not None]
    if len(starts_R) != len(tokens) + 1 or starts_R[0] != 0 or any(size != starts_R[-1] for size in sizes):
        ends = f"{len(lengths_R)} rows that end at {starts_R[-1]}"
        problem = f"{len(tokens)} labels, {ends}, {' and '.join(map(str, sizes))} tokens"
        raise DataError(checker.doing, problem, "a label for each row, and rows that cover all tokens", hint)
    if (lengths_R < 1).any():
        checker.refuse("no token", _at(lengths_R < 1), "at least one token in each row")
    if bounds.length is not None and (lengths_R > bounds.length).any():
        allowed = f"at most {bounds.length}: the model has no more positions"
        checker.refuse(f"{lengths_R.max()} tokens", _at(lengths_R > bounds.length), allowed)

    def rows_of(bad_T: NDArray[np.bool_]) -> list[int]:
        return np.unique(np.searchsorted(starts_R, bad_T.nonzero()[0], side="right") - 1).tolist()

    types_T = tokens.types_T.numpy() if tokens.types_T is not None else None
    checker.check_inputs(tokens.ids_T.numpy(), types_T, rows_of)
    checker.check_labels(tokens.labels_R.numpy(), lambda: range(len(tokens)))
    if "nulls" in tokens.extra:
        places_RN = np.concatenate([tokens.labels_R.numpy(), tokens.extra["nulls"].numpy()[:, None]], axis=1)
        checker.check_places(places_RN, lengths_R, lambda: range(len(tokens)))


@final
class BatchGuard:
    """Checks the batches of one split, and the model's outputs for them.

    Args:
        split: Its name.
        tokens: The split, which has passed :func:`check_tokens`.
        bounds: Limits of the model.
    """

    def __init__(self, split: str, tokens: TokenSet, bounds: Bounds) -> None:
        self._checker = _Checker(f"checking a batch of the split {split}", tokens, bounds, _BATCH_HINT)
        self._split = split
        self._seen: tuple[Batch, Callable[[], Sequence[int]]] | None = None

    def check_batch(self, batch: Batch, rows: Callable[[], Sequence[int]]) -> None:
        """Check a batch that is still on the host.

        Args:
            batch: Of rows with labels.
            rows: Rows of the split in the batch, in order; called for a message only.

        Raises:
            DataError: A shape is wrong, a row is empty, or a value is beyond the model's limits.
        """
        self._seen = (batch, rows)
        checker, bounds = self._checker, self._checker.bounds
        arrays = {name: values.numpy() for name, values in batch.items()}
        ids_BL, mask_BL, labels_N = arrays["input_ids"], arrays["attention_mask"], arrays["labels"]
        types_BL = arrays.get("token_type_ids", mask_BL)
        if not (mask_BL.shape == ids_BL.shape == types_BL.shape and labels_N.shape[:1] == ids_BL.shape[:1]):
            shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in batch.items())
            checker.refuse(shapes, rows(), "(rows, tokens) for all inputs, as many labels")
        if bounds.length is not None and ids_BL.shape[1] > bounds.length:
            allowed = f"at most {bounds.length}: the model has no more positions"
            checker.refuse(f"{ids_BL.shape[1]} positions", rows(), allowed)

        def rows_of(bad_N: NDArray[np.bool_]) -> list[int]:
            return _named(rows(), bad_N)

        checker.check_inputs(ids_BL, arrays.get("token_type_ids"), rows_of)
        checker.check_labels(labels_N, rows)
        for name, limit in bounds.entries.items():
            if name in arrays:
                checker.check_range(name, arrays[name], limit, rows_of)
        if "nulls" in arrays:
            places_BN = np.concatenate([labels_N, arrays["nulls"][:, None]], axis=1)
            checker.check_places(places_BN, mask_BL.sum(axis=1), rows)
        checker.check_range("attention mask", mask_BL, 2, rows_of, ": 1 for tokens, 0 for padding")
        # Rows are padded on the right, so that the first token tells for nearly all of them.
        if not mask_BL[:, 0].all() and not mask_BL.any(axis=1).all():
            empty = [row for row, mask_L in zip(rows(), mask_BL, strict=False) if not mask_L.any()]
            checker.refuse("an attention mask without a token", empty, "a token in each row")

    def forget(self) -> None:
        """Drop the batch checked last: it has been trained on."""
        self._seen = None

    def describe(self, rows_within: slice = slice(None)) -> str:
        """Return a description of the batch at hand for error messages; empty where there is none.

        Args:
            rows_within: Which rows of it.
        """
        if self._seen is None:
            return ""
        batch, rows = self._seen
        part = {name: values[rows_within] for name, values in batch.items()}
        names = self._checker.tokens.names_of(list(rows())[rows_within])
        lengths_B = part["attention_mask"].sum(dim=1)
        classes = (
            f"labels {_range(part['labels'])} of {self._checker.bounds.labels} classes, "
            if self._checker.bounds.labels
            else ""
        )
        return (
            f"batch of the split {self._split}: {len(names)} row(s): {few(names, most=_MOST_NAMES)}\n"
            f"{classes}token ids {_range(part['input_ids'])} of {self._checker.bounds.tokens} in the embedding, "
            f"{_range(lengths_B)} tokens in a row"
        )

    def check_outputs(self, outputs: Outputs, batch_rows: int, rows: Callable[[], Sequence[int]]) -> None:
        """Check the shape and dtype of a model's outputs, which the host knows without waiting.

        Args:
            outputs: Outputs on any device.
            batch_rows: Rows of the batch.
            rows: These rows; called for a message only.

        Raises:
            ConfigError: Outputs are not one score for each row and class.
        """
        classes = self._checker.bounds.labels
        tensors = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        wanted = f"({batch_rows}, ...)" if classes is None else f"({batch_rows}, {classes})"
        if all(one.is_floating_point() and one.shape[:1] == (batch_rows,) for one in tensors) and (
            classes is None or [tuple(one.shape) for one in tensors] == [(batch_rows, classes)]
        ):
            return
        names = few(self._checker.tokens.names_of(rows()))
        shapes = " and ".join(f"{tuple(one.shape)} {one.dtype}" for one in tensors)
        raise ConfigError(
            self._checker.doing,
            f"the model gives {shapes} for {batch_rows} rows: {names}",
            allowed=f"{wanted} of a floating-point dtype: a score for each row" + (" and class" if classes else ""),
            hint="use another model: this one does not keep to (rows, tokens, width)",
        )


def _range(values_N: torch.Tensor) -> str:
    return f"{int(values_N.min())} to {int(values_N.max())}" if values_N.numel() else "none"


def _at(bad_R: NDArray[np.bool_]) -> list[int]:
    return bad_R.nonzero()[0].tolist()


def _named(rows: Sequence[int], bad_N: NDArray[Any]) -> list[int]:
    """Return the rows with any bad value; the first dimension is the row."""
    return [row for row, bad in zip(rows, bad_N, strict=False) if bad.any()]
