"""How trials failed in a session since the last one that ended well: what the breaker of a study looks at."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from dryfit.core.failure import PERMITTED, FailureKind
from dryfit.store.events import FailureFacts

Fingerprint: TypeAlias = tuple[FailureKind, str, str]
"""Kind, class of the exception, and where it came from: two trials with one fingerprint failed in the same way."""

_SAID_BY_US = frozenset({FailureKind.CONFIG, FailureKind.DATA})
"""Kinds whose messages are ours: one place in our code finds many things wrong, so what it found is looked at too."""


def fingerprint(facts: FailureFacts) -> Fingerprint:
    """What makes a failure the same as another one."""
    place = facts.place or facts.sentence
    if facts.kind in _SAID_BY_US:
        place = f"{place}: {facts.error.partition(chr(10))[0]}"
    return facts.kind, facts.error_type, place


@dataclass(slots=True)
class FailureTally:
    """Failed trials since the last complete or pruned one. Those killed by nobody knows whom are left out.

    Attributes:
        in_a_row: How many there are.
        alike: How many of them failed in each way.
    """

    in_a_row: int = 0
    alike: Counter[Fingerprint] = field(default_factory=Counter[Fingerprint])

    def failed(self, facts: FailureFacts | None) -> None:
        """Take in a failed trial.

        Args:
            facts: Its last attempt's failure; None where it had none.
        """
        if facts is None:
            self.in_a_row += 1
        elif PERMITTED[facts.kind].trips:
            self.in_a_row += 1
            self.alike[fingerprint(facts)] += 1
