"""A series of numbers drawn as a line of characters."""

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_NO_NUMBER = "?"


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """Draw the last values, scaled from the lowest to the highest; values that are not finite are question marks.

    Args:
        values: The values, in order.
        width: Maximum number of characters; earlier values are left out.
        plain: Whether to use ASCII only.
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
