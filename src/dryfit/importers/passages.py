"""Divide a long text into passages, so that each span lies in one passage."""

from collections.abc import Sequence

from dryfit.importers.items import Span, trimmed


def passages_of(text: str, spans: Sequence[Span], enough_chars: int) -> list[Span]:
    """Return the passages of a text, in order, without the white space at their ends.

    A passage ends before the first span at which it has enough characters, unless an earlier span reaches into that
    span. Text between two spans belongs to the passage before. So each span lies in one passage, and only white space
    in none; a passage is as long as its spans need it to be, and the last one may be short.

    Args:
        text: The text.
        spans: Spans such as sentences, in any order.
        enough_chars: The length from which a passage ends with the next span.
    """
    cuts = [0]
    reach = 0
    for start, end in sorted(spans):
        if start >= reach and start - cuts[-1] >= enough_chars:
            cuts.append(start)
        reach = max(reach, end)
    passages = [trimmed(text, (start, end)) for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [passage for passage in passages if passage is not None]
