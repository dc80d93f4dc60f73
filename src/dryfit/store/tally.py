"""Counts of failed trials since the last one that ended well; by these a study stops itself."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from dryfit.core.failure import PERMITTED, FailureKind
from dryfit.store.events import FailureFacts

Fingerprint: TypeAlias = tuple[FailureKind, str, str]
"""Kind, exception class and origin of a failure: trials with one fingerprint failed in the same way."""

_OWN_MESSAGES = frozenset({FailureKind.CONFIG, FailureKind.DATA})
"""Kinds whose errors dryfit raises: one place in the code raises different ones, so the message counts too."""


def fingerprint(facts: FailureFacts) -> Fingerprint:
    """Return what two equal failures have in common."""
    place = facts.place or facts.sentence
    if facts.kind in _OWN_MESSAGES:
        place = f"{place}: {facts.error.partition(chr(10))[0]}"
    return facts.kind, facts.error_type, place


@dataclass(slots=True)
class FailureTally:
    """Failed trials since the last complete or pruned one; those killed from outside are left out.

    Attributes:
        in_a_row: Their number.
        alike: Their number by fingerprint.
    """

    in_a_row: int = 0
    alike: Counter[Fingerprint] = field(default_factory=Counter[Fingerprint])

    def failed(self, facts: FailureFacts | None) -> None:
        """Count a failed trial.

        Args:
            facts: The failure of its last attempt; None if it had none.
        """
        if facts is None:
            self.in_a_row += 1
        elif PERMITTED[facts.kind].trips:
            self.in_a_row += 1
            self.alike[fingerprint(facts)] += 1
