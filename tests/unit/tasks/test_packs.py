"""Which examples share a sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.errors import InternalError
from dryfit.tasks.tokens import pack

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=120)


@given(lengths=LENGTHS, capacity=st.integers(50, 90), seed=st.integers(0, 9))
def test_every_example_is_in_one_sequence_that_has_room(lengths: list[int], capacity: int, seed: int) -> None:
    packs = pack(lengths, capacity, seed=seed)
    assert sorted(example for one in packs for example in one) == list(range(len(lengths)))
    sums = sorted(sum(lengths[example] for example in one) for one in packs)
    assert 0 < sums[0] and sums[-1] <= capacity
    # No two sequences would fit into one: what best fit promises of any order.
    assert len(sums) < 2 or sums[0] + sums[1] > capacity
    assert packs == pack(lengths, capacity, seed=seed)


def test_best_fit_finds_what_first_fit_in_order_does_not() -> None:
    assert sorted(map(len, pack([5, 5, 7, 3, 6, 4], 10, seed=1))) == [2, 2, 2]


def test_seeds_mix_examples_anew() -> None:
    lengths = torch.randint(5, 30, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    first, other = ({frozenset(one) for one in pack(lengths, 64, seed=seed)} for seed in (1, 2))
    assert len(first) == len(other)
    assert len(first & other) < 5


def test_an_example_that_is_too_long_is_our_mistake() -> None:
    with pytest.raises(InternalError):
        pack([5, 70], 60, seed=1)
