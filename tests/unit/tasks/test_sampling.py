import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dryfit.tasks.sampling import epoch_windows

flags = st.lists(st.booleans(), min_size=1, max_size=60).map(torch.tensor)


@given(has=flags, negatives=st.none() | st.floats(0, 20), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_all_with_a_span_and_so_many_others(has: torch.Tensor, negatives: float | None, seed: int, epoch: int) -> None:
    found = epoch_windows(has, negatives, seed=seed, epoch=epoch)
    assert torch.equal(found, epoch_windows(has, negatives, seed=seed, epoch=epoch))
    assert found.tolist() == sorted(set(found.tolist()))
    positives, others = int(has.sum()), int((~has).sum())
    assert int(has[found].sum()) == positives
    want = others if negatives is None else min(others, round(negatives * positives))
    assert len(found) == positives + want


def test_each_epoch_draws_anew_and_in_time_all_are_drawn() -> None:
    has = torch.arange(100) < 20
    drawn = [frozenset(epoch_windows(has, 1.0, seed=3, epoch=epoch).tolist()) for epoch in range(40)]
    assert {len(one) for one in drawn} == {40}
    assert len(set(drawn)) == 40
    assert frozenset.union(*drawn) == set(range(100))
    assert drawn[0] != frozenset(epoch_windows(has, 1.0, seed=4, epoch=0).tolist())


@pytest.mark.parametrize("negatives", [None, 1000.0])
def test_all_are_all(negatives: float | None) -> None:
    has = torch.arange(10) < 3
    assert epoch_windows(has, negatives, seed=0, epoch=7).tolist() == list(range(10))
