"""Over how many ranks a model is sharded: the fewest that fit, never more than there are, and one where one will do."""

from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.sharding import DEGREES, RankOutcome, degrees_within, next_ranks, ranks_taken

TRUTHS = st.fixed_dictionaries(dict.fromkeys((1, *DEGREES), st.sampled_from(RankOutcome)))


def looked_at(
    truth: dict[int, RankOutcome], degrees: tuple[int, ...], known: dict[int, RankOutcome]
) -> dict[int, RankOutcome]:
    """All that is looked at, in order, by one who knows something already."""
    found = dict(known)
    while (ranks := next_ranks(found, degrees)) is not None:
        assert ranks not in found
        found[ranks] = truth[ranks]
    return found


@given(TRUTHS, st.integers(0, 20))
def test_the_fewest_ranks_that_fit_are_taken_and_never_more_than_there_are(
    truth: dict[int, RankOutcome], most: int
) -> None:
    degrees = degrees_within(most)
    assert all(degree <= most for degree in degrees)
    found = looked_at(truth, degrees, {})
    taken = ranks_taken(found)
    assert set(found) <= {1, *degrees}
    if truth[1] is not RankOutcome.TOO_LARGE:
        assert set(found) == {1} and taken == (1 if truth[1] is RankOutcome.FITS else None)
        return
    fitting = [ranks for ranks in degrees if truth[ranks] is RankOutcome.FITS]
    assert taken == (min(fitting) if fitting else None)
    assert all(ranks <= (taken or max(most, 1)) for ranks in found), "nothing is looked at in vain"


@given(TRUTHS, st.integers(0, 20), st.data())
def test_who_goes_on_after_a_restart_takes_the_same(
    truth: dict[int, RankOutcome], most: int, data: st.DataObject
) -> None:
    whole = looked_at(truth, degrees_within(most), {})
    kept = data.draw(st.integers(0, len(whole)))
    known = dict(list(whole.items())[:kept])
    assert looked_at(truth, degrees_within(most), known) == whole
    assert ranks_taken(whole) == ranks_taken(dict(reversed(whole.items())))
