"""The distinct rows that a trial reads, by their content, and batches of them.

Dimension suffixes: ``T`` all tokens of a split one after another, ``B`` rows, ``L`` tokens.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
import xxhash
from torch.nn.utils.rnn import pad_sequence

from dryfit.tasks.base import Batch
from dryfit.tasks.tokens.token_set import TokenSet

Row: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Tokens of a row, int32, and their types, uint8, where the encoder reads any."""


def row_digest(ids_L: torch.Tensor, types_L: torch.Tensor | None) -> bytes:
    """Return what identifies a row's content: 16 bytes.

    Args:
        ids_L: Its tokens, int32, without padding, contiguous, on the CPU.
        types_L: Its token types, uint8; None where the encoder reads none.
    """
    digest = xxhash.xxh3_128(ids_L.numpy().data)
    if types_L is not None:
        digest.update(types_L.numpy().data)
    return digest.digest()


def distinct_rows(splits: Sequence[TokenSet], *, types: bool) -> dict[bytes, Row]:
    """Return the distinct rows of some splits by their digests, the shortest first, however they are split.

    Args:
        splits: The rows.
        types: Whether the encoder reads token types.
    """
    found: dict[bytes, Row] = {}
    for split in splits:
        types_T = split.types_T if types else None
        for first, last in pairwise(split.starts_R.tolist()):
            row = split.ids_T[first:last], None if types_T is None else types_T[first:last]
            found.setdefault(row_digest(*row), row)
    return dict(sorted(found.items(), key=lambda item: (len(item[1][0]), item[0])))


def padded_batch(rows: Sequence[Row]) -> Batch:
    """Return model inputs of some rows, padded on the right."""
    ids_BL = pad_sequence([ids_L for ids_L, _ in rows], batch_first=True).long()
    lengths_B = torch.tensor([len(ids_L) for ids_L, _ in rows])
    mask_BL = (torch.arange(ids_BL.shape[1]) < lengths_B[:, None]).long()
    types = [types_L for _, types_L in rows if types_L is not None]
    batch = {"input_ids": ids_BL, "attention_mask": mask_BL}
    return batch | {"token_type_ids": pad_sequence(types, batch_first=True).long()} if types else batch
