"""What a task is to the loop: batches, a loss that is a sum, and metrics."""

from collections.abc import Sequence
from typing import Protocol

import torch

from dryfit.tasks.tokens import TokenSet

Batch = dict[str, torch.Tensor]
"""Tensors by name; the first dimension of each is the row."""

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Entries of a batch the model is called with; padded along the second dimension."""


class Loss(Protocol):
    """What is minimised. It must be a sum over rows, so that a batch can be cut into micro-batches."""

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """What the loss sum of this batch is divided by: its normaliser, 0-dimensional."""
        ...

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The batch's loss, summed over its rows, 0-dimensional."""
        ...


class Task(Loss, Protocol):
    """One kind of learning."""

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Make the batch of some rows."""
        ...

    def metrics(self, outputs: torch.Tensor, tokens: TokenSet) -> dict[str, float]:
        """Every metric of a whole split; ``outputs`` in row order, in fp32 on the CPU."""
        ...


def pad_rows(tokens: TokenSet, rows: Sequence[int], *, pad_id: int) -> Batch:
    """Token ids, mask and segments of some rows, padded on the right to the longest of them."""
    starts = tokens.starts_R
    spans = [(int(starts[row]), int(starts[row + 1])) for row in rows]
    width = max(end - start for start, end in spans)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    types = torch.zeros_like(mask) if tokens.types_T is not None else None
    for index, (start, end) in enumerate(spans):
        ids[index, : end - start] = tokens.ids_T[start:end]
        mask[index, : end - start] = 1
        if types is not None and tokens.types_T is not None:
            types[index, : end - start] = tokens.types_T[start:end]
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch if types is None else batch | {"token_type_ids": types}
