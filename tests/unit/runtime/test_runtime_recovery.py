"""What past failures ask of the next attempt, and how that is told."""

import pytest

from dryfit.processes.failures import attempt_terms, terms_text
from dryfit.settings.errors import Action, AttemptTerms, FailureKind, PastFailure

KIND = FailureKind.DEVICE_LOST


def past(*actions: Action, device: str | None = None) -> tuple[PastFailure, ...]:
    return tuple(PastFailure(KIND, False, action, device) for action in actions)


@pytest.mark.parametrize(
    ("failures", "terms"),
    [
        ((), AttemptTerms()),
        (past(Action.RETRY, Action.FALLBACK, device="0"), AttemptTerms()),
        (past(Action.EXCLUSIVE, Action.RETRY), AttemptTerms(exclusive=True)),
        (past(Action.DIAGNOSE, Action.RETRY), AttemptTerms(diagnostic=True)),
        (past(Action.LIGHTER, Action.RETRY, Action.LIGHTER), AttemptTerms(lighter=2)),
        (
            (*past(Action.ELSEWHERE, device="1"), *past(Action.ELSEWHERE, device="0")),
            AttemptTerms(avoid=frozenset({"0", "1"})),
        ),
        (past(Action.ELSEWHERE, device="2,0"), AttemptTerms(avoid=frozenset({"0", "2"}))),
        (past(Action.ELSEWHERE), AttemptTerms()),
    ],
)
def test_terms_are_what_past_failures_asked_for(failures, terms):
    assert attempt_terms(failures) == terms


def test_terms_are_told_in_words():
    assert terms_text(AttemptTerms()) == ()
    every = AttemptTerms(exclusive=True, diagnostic=True, lighter=2, avoid=frozenset({"1", "0"}))
    assert terms_text(every) == (
        "alone on its device",
        "slowly, to learn where it fails: blocking launches, device assertions",
        "with fewer loader workers (step 2), tensors shared through files",
        "rather not on device 0, 1",
    )
