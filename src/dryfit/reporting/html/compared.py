"""The section of a report page on the best trials over several seeds."""

from collections.abc import Sequence

from dryfit.reporting.comparing.comparison import Comparison
from dryfit.reporting.comparing.comparison_text import comparison_table
from dryfit.reporting.html.sections import Section

_AFTER = ("best", "baselines")


def with_comparison(sections: Sequence[Section], comparison: Comparison | None) -> tuple[Section, ...]:
    """Return the sections of a page with that of a comparison, after what the best trial is and is worth."""
    if comparison is None:
        return tuple(sections)
    at = sum(section.anchor in _AFTER for section in sections)
    own = Section(
        "compared",
        "Whether the best trials really differ",
        texts=comparison.judgement,
        tables=(("", comparison_table(comparison)),),
        notes=comparison.notes,
    )
    return (*sections[:at], own, *sections[at:])
