"""What each of several processes holds: as torch cuts it, nothing lost, nothing twice."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dryfit.parallel.fsdp import HeldBytes, held_bytes, share_of


@given(size=st.integers(1, 40), processes=st.integers(1, 9))
def test_shares_are_torchs_chunks(size: int, processes: int) -> None:
    chunks = torch.arange(size).chunk(processes)
    for rank in range(processes):
        begin, end = share_of(size, rank, processes)
        assert list(range(begin, end)) == (chunks[rank].tolist() if rank < len(chunks) else [])


def test_weights_and_gradients_are_padded_and_state_is_not() -> None:
    frozen = torch.empty(4, dtype=torch.bfloat16, device="meta")
    sizes = [nn.Parameter(torch.empty(5, 4, device="meta")), nn.Parameter(frozen, requires_grad=False)]
    assert held_bytes(sizes, rank=0, processes=2, moments=2) == HeldBytes(3 * 16 + 2 * 2, 3 * 16, 2 * 3 * 16)
    assert held_bytes(sizes, rank=1, processes=2, moments=2) == HeldBytes(3 * 16 + 2 * 2, 3 * 16, 2 * 2 * 16)
    assert held_bytes(sizes, rank=0, processes=1, moments=1) == HeldBytes(88, 80, 80)
