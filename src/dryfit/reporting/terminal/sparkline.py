"""A row of numbers as a curve of characters."""

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_NO_NUMBER = "?"


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """The last values as a curve, lowest to highest; what is not finite is a question mark.

    Args:
        values: In order.
        width: Most characters; more values than that are cut at the front.
        plain: Use ASCII alone.
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    levels = _ASCII if plain else _BLOCKS
    if not finite:
        return _NO_NUMBER * len(shown)
    low, high = min(finite), max(finite)
    return "".join(_level(value, low, high, levels) if math.isfinite(value) else _NO_NUMBER for value in shown)


def _level(value: float, low: float, high: float, levels: str) -> str:
    if high == low:
        return levels[len(levels) // 2]
    # Halved first: the difference of two large numbers may be infinite.
    part = (value / 2 - low / 2) / (high / 2 - low / 2)
    return levels[min(len(levels) - 1, int(part * len(levels)))]
