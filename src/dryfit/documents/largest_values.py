"""The largest value of an argument with which a command fits, as lines and a table, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict

from dryfit.documents.document import Block, Document, Line
from dryfit.settings.largest_value import LargestValue, TriedValue, ValueEnd
from dryfit.settings.text import Table, gib


def largest_values_json(values: Sequence[LargestValue]) -> dict[str, object]:
    """Return what ``rehearse --largest --json`` prints."""
    devices = [{**asdict(one), "is_known": one.is_known} for one in values]
    return {"schema": 1, "name": values[0].name, "devices": devices}


def largest_values_document(values: Sequence[LargestValue]) -> Document:
    """Return a line for each device, and what was rehearsed."""
    blocks: list[Block] = [Line(_headline(one), "green" if one.is_known else "yellow") for one in values]
    rows = tuple((one.device.name, *_cells(tried)) for one in values for tried in one.tried)
    return Document((*blocks, "", Table(("device", values[0].name, "verdict", "required"), rows)))


def _cells(tried: TriedValue) -> tuple[str, str, str]:
    needed = "unknown" if tried.required_bytes is None else gib(tried.required_bytes)
    return str(tried.value), tried.end, needed


def _headline(one: LargestValue) -> str:
    unit = "" if not one.bytes_per_unit else f"; each more takes {one.bytes_per_unit / 2**20:,.1f} MiB"
    following, device = one.following, f"{one.device.name} ({gib(one.device.capacity_bytes)})"
    if one.largest is None:
        why = f": {following.reason}" if following is not None and following.reason else ""
        return f"no {one.name} is known to fit {device}: {following.value if following else 1} does not{why}{unit}"
    text = f"the largest {one.name} that fits {device} is {one.largest.value}"
    if following is None:
        return f"no {one.name} is too large for {device}: from {one.largest.value} on memory grows no more"
    if following.end is ValueEnd.UNKNOWN:
        known = f"the largest {one.name} known to fit {device} is {one.largest.value}"
        return f"{known}; with {following.value} that is unknown: {following.reason}{unit}"
    return f"{text}; {following.value} does not{unit}"
