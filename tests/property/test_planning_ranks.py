"""Over how many ranks a model is sharded: the fewest that fit, and never more than there are."""

from hypothesis import given
from hypothesis import strategies as st

from dryfit.parallel.device_counts import fits_on, until_fits
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import TraceError
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.sharding import DEGREES, degrees_within
from plan_jobs import MIB, memory

CARD = parse_device("24GiB")
TRUTHS = st.fixed_dictionaries(dict.fromkeys(DEGREES, st.none() | st.sampled_from(VerdictKind)))


@given(TRUTHS, st.integers(0, 20), st.none() | st.integers(0, 10))
def test_the_fewest_ranks_that_fit_are_taken_and_never_more_than_there_are(
    truth: dict[int, VerdictKind | None], most: int, host: int | None
) -> None:
    asked: list[int] = []
    host_bytes = None if host is None else host * MIB

    def on_ranks(ranks: int) -> PlanAnswer:
        asked.append(ranks)
        verdict = truth[ranks]
        if verdict is None:
            raise TraceError("sharding a model", "it branches on data", "a model that can be traced")
        needs = None if verdict is VerdictKind.UNKNOWN else memory(1, 1)
        return PlanAnswer(verdict=verdict, device=CARD, memory=needs, torch="2.13.0", planner_s=0.0)

    degrees = degrees_within(most)
    assert all(degree <= most for degree in degrees)
    answers, reasons = until_fits(reversed(degrees), on_ranks, lambda ranks, one: fits_on(one, ranks, host_bytes))
    fitting = [ranks for ranks in degrees if truth[ranks] in (VerdictKind.FITS, VerdictKind.FITS_WITH)]
    fitting = [ranks for ranks in fitting if host is None or ranks <= host]
    assert asked == [ranks for ranks in degrees if not fitting or ranks <= fitting[0]], "nothing is asked in vain"
    assert [ranks for ranks, answer in answers.items() if fits_on(answer, ranks, host_bytes)] == fitting[:1]
    assert list(answers) == [ranks for ranks in asked if truth[ranks] is not None]
    assert len(reasons) == len(asked) - len(answers)
    assert all("it branches on data" in reason for reason in reasons)
