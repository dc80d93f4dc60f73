"""What a rehearsal with the smallest sizes makes of one that does not fit with the largest."""

from typing import Any, cast

import pytest

from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, ScriptEnd
from dryfit.study.rehearsals import with_bounds
from rehearsal_stand_in import GIB, answer_of

DEVICE = DeviceSpec(name="24GiB", capacity_bytes=24 * GIB)
LARGEST = answer_of(40 * GIB, DEVICE).model_copy(update={"sized_by_values": True})


def bounded(answer: RehearsalAnswer, smallest: RehearsalAnswer | None) -> RehearsalAnswer:
    class Prepared:
        def with_smallest_sizes(self, device: DeviceSpec) -> RehearsalAnswer:
            assert device is DEVICE and smallest is not None
            return smallest

    return with_bounds(answer, cast("Any", Prepared()))


@pytest.mark.parametrize(("activations", "verdict"), [(4 * GIB, VerdictKind.UNKNOWN), (30 * GIB, VerdictKind.REFUSED)])
def test_it_is_refused_only_where_the_smallest_do_not_fit(activations: int, verdict: VerdictKind) -> None:
    smallest = answer_of(activations, DEVICE)
    found = bounded(LARGEST, smallest)
    assert found.verdict is verdict and found.memory is not None and smallest.memory is not None
    assert found.memory.least_bytes == smallest.memory.required_bytes < found.memory.required_bytes
    compiled = smallest.memory.model_copy(update={"least_bytes": GIB})
    below = bounded(LARGEST, smallest.model_copy(update={"memory": compiled}))
    assert below.memory is not None and below.memory.least_bytes == GIB and below.verdict is VerdictKind.UNKNOWN


def test_where_the_smallest_cannot_be_rehearsed_nothing_is_refused() -> None:
    failed = answer_of(GIB, DEVICE).model_copy(update={"end": ScriptEnd.FAILED})
    found = bounded(LARGEST, failed)
    assert found.verdict is VerdictKind.UNKNOWN and found.fits is False and found.memory == LARGEST.memory


def test_what_fits_or_has_known_sizes_is_not_rehearsed_again() -> None:
    fits = answer_of(GIB, DEVICE).model_copy(update={"sized_by_values": True})
    known = answer_of(40 * GIB, DEVICE)
    assert bounded(fits, None) is fits and bounded(known, None) is known
