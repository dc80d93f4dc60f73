"""Which examples share a sequence."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dryfit.core.errors import InternalError
from dryfit.tasks.packs import epoch_packs, pack_lengths

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=120)


@given(lengths=LENGTHS, capacity=st.integers(50, 90))
def test_every_example_is_in_one_sequence_that_has_room(lengths: list[int], capacity: int) -> None:
    packs = pack_lengths(lengths, capacity)
    assert Counter(length for pack in packs for length in pack) == Counter(lengths)
    assert all(0 < sum(pack) <= capacity for pack in packs)
    # No two sequences would fit into one: what best fit promises of any order.
    sums = sorted(map(sum, packs))
    assert len(sums) < 2 or sums[0] + sums[1] > capacity
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // capacity) + 1 or max(lengths) > capacity / 3


@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_an_epoch_is_a_function_of_its_arguments_and_as_long_as_the_next(lengths: list[int], seed: int) -> None:
    tensor = torch.tensor(lengths)
    first, again, next_one = (epoch_packs(tensor, 60, seed=seed, epoch=epoch) for epoch in (0, 0, 1))
    assert first == again
    assert sorted(example for pack in first for example in pack) == list(range(len(lengths)))
    assert sorted(example for pack in next_one for example in pack) == list(range(len(lengths)))
    sizes = [sorted(int(tensor[pack].sum()) for pack in packs) for packs in (first, next_one)]
    assert sizes[0] == sizes[1]


def test_epochs_and_seeds_mix_examples_anew() -> None:
    lengths = torch.randint(5, 30, (200,), generator=torch.Generator().manual_seed(1))
    packs = [epoch_packs(lengths, 64, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    together = [{frozenset(pack) for pack in one} for one in packs]
    assert len(together[0] & together[1]) < 5
    assert len(together[0] & together[2]) < 5


def test_an_example_that_is_too_long_is_our_mistake() -> None:
    with pytest.raises(InternalError):
        pack_lengths([5, 70], 60)
