"""``nvidia-smi`` of a virtual GPU: a program of its own, which imports nothing of dryfit.

``python nvidia_smi.py DEVICES [OPTION ...]``, where ``DEVICES`` is JSON: of each device its values by the field of
``--query-gpu``. Memory is in MiB, as it was when the script began.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

_UNITS: Final = {"memory": "MiB", "utilization": "%", "power": "W", "clocks": "MHz"}
"""Unit of a field's values, by the field's first word."""


def answer(devices: Sequence[Mapping[str, object]], options: Sequence[str]) -> str:
    """Return what ``nvidia-smi`` prints: a list, the fields of a query, or a table.

    Args:
        devices: Their fields.
        options: Of the command. Options that choose no device and no output are passed over.
    """
    named = dict(word.split("=", 1) for word in options if "=" in word)
    named |= {word: value for word, value in pairwise(options) if word in ("-i", "--id")}
    asked = named.get("-i") or named.get("--id")
    chosen = [device for device in devices if asked is None or str(device["index"]) in asked.split(",")]
    if "-L" in options or "--list-gpus" in options:
        return "".join(f"GPU {one['index']}: {one['name']} (UUID: {one['uuid']})\n" for one in chosen)
    if "--query-gpu" in named:
        form = named.get("--format", "csv").split(",")
        return _queried(chosen, named["--query-gpu"].split(","), "noheader" not in form, "nounits" not in form)
    if any(name.startswith("--query") for name in named):
        return ""  # no process, no retired page
    lines = [f"|{one['index']:>4}  {one['name']:<45}{_memory(one):>25} |" for one in chosen]
    edge = f"+{'-' * 77}+"
    return "\n".join([edge, f"| {'NVIDIA-SMI of a virtual GPU':<76}|", edge, *lines, edge, ""])


def _memory(device: Mapping[str, object]) -> str:
    return f"{device['memory.used']}MiB / {device['memory.total']}MiB"


def _queried(devices: Sequence[Mapping[str, object]], fields: Sequence[str], header: bool, units: bool) -> str:
    fields = [field.strip() for field in fields]
    unit_of = {field: _UNITS.get(field.partition(".")[0], "") for field in fields}
    rows = [[f"{field} [{unit}]" if unit and units else field for field, unit in unit_of.items()]] if header else []
    for device in devices:
        values = {field: device.get(field, "[N/A]") for field in fields}
        rows.append([f"{value} {unit_of[field]}".strip() if units else str(value) for field, value in values.items()])
    return "".join(f"{', '.join(row)}\n" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(answer(json.loads(sys.argv[1]), sys.argv[2:]))
