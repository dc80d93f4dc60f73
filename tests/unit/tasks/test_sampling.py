import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dryfit.tasks.tokens import epoch_roles, epoch_windows

flags = st.lists(st.booleans(), min_size=1, max_size=60).map(torch.tensor)


@given(has=flags, negatives=st.floats(0, 20), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_all_with_a_span_and_so_many_others(has: torch.Tensor, negatives: float, seed: int, epoch: int) -> None:
    found = epoch_windows(has, negatives, seed=seed, epoch=epoch)
    assert torch.equal(found, epoch_windows(has, negatives, seed=seed, epoch=epoch))
    assert found.tolist() == sorted(set(found.tolist()))
    positives, others = int(has.sum()), int((~has).sum())
    assert int(has[found].sum()) == positives
    assert len(found) == positives + min(others, round(negatives * positives))


def test_each_epoch_draws_anew_and_in_time_all_are_drawn() -> None:
    has = torch.arange(100) < 20
    drawn = [frozenset(epoch_windows(has, 1.0, seed=3, epoch=epoch).tolist()) for epoch in range(40)]
    assert {len(one) for one in drawn} == {40}
    assert len(set(drawn)) == 40
    assert frozenset.union(*drawn) == set(range(100))
    assert drawn[0] != frozenset(epoch_windows(has, 1.0, seed=4, epoch=0).tolist())


@pytest.mark.parametrize("negatives", [None, 0.0, 1.5, 100.0])
@pytest.mark.parametrize("share", [None, 0.01, 0.3, 0.99])
def test_roles_are_as_many_in_every_epoch(share: float | None, negatives: float | None) -> None:
    has_span = torch.arange(200) % 5 == 0

    def drawn(epoch: int, seed: int = 1):
        return epoch_roles(has_span, criteria_share=share, negatives=negatives, seed=seed, epoch=epoch)

    counts = set()
    for epoch in range(4):
        classes, spans = drawn(epoch)
        counts.add((int(classes.sum()), int((spans & has_span).sum()), int(spans.sum())))
        again = drawn(epoch)
        assert torch.equal(classes, again[0])
        assert torch.equal(spans, again[1])
        assert classes.all() if share is None else not (classes & spans).any()
    assert len(counts) == 1
    ((classes, with_span, spans),) = counts
    if share is not None:
        assert classes == sum(min(max(round(share * n), 1), n - 1) for n in (40, 160))
    of_spans = 40 if share is None else 40 - min(max(round(share * 40), 1), 39)
    assert with_span == of_spans > 0
    rest = 160 if share is None else 160 - min(max(round(share * 160), 1), 159)
    assert spans - with_span == (rest if negatives is None else min(rest, round(negatives * of_spans)))
    if share is not None:
        assert not torch.equal(drawn(0)[0], drawn(1)[0])
        assert not torch.equal(drawn(0)[0], drawn(0, seed=2)[0])
