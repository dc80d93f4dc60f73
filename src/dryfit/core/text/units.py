"""Parsing and formatting of amounts of memory."""

import re
from fractions import Fraction

from dryfit.core.errors import ConfigError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_AMOUNT = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([KMGT]i?B|B)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: ``14GiB``, ``512 MiB``, ``80GB``.

    Raises:
        ConfigError: It is not an amount above zero.
    """
    match = _AMOUNT.fullmatch(text.strip())
    size_bytes = int(Fraction(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size_bytes <= 0:
        raise ConfigError("reading an amount of memory", f"{text!r}", "a number with its unit: 24GiB, 512MiB, 80GB")
    return size_bytes


def gib(size_bytes: int) -> str:
    """Format an amount in GiB with one decimal, or in MiB below one GiB."""
    if abs(size_bytes) < 2**30:
        return f"{size_bytes / 2**20:.0f} MiB"
    return f"{size_bytes / 2**30:.1f} GiB"
