"""Write the table of docs/cards.md: what fine-tuning a model takes, and which way of it fits which card, as planned.

``python scripts/card_table.py`` plans every model of :data:`MODELS` in every way of :data:`WAYS` with ``dryfit plan``
and rewrites what stands between the markers. Nothing is measured. How long it takes is said on the page.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Final

from dryfit.settings.devices import parse_device

ROOT = Path(__file__).resolve().parents[1]
PAGE, COUNTS = ROOT / "docs" / "cards.md", ROOT / "docs" / "models-and-devices.md"
BEGIN, END = "<!-- table: written by scripts/card_table.py -->\n", "<!-- end of table -->\n"
GIB = 2**30

MODELS: Final[Sequence[str]] = (
    "google/gemma-3-1b-it",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B",
    "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B",
    "google/gemma-2-9b",
    "Qwen/Qwen3-14B",
    "google/gemma-2-27b",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen2.5-72B",
)
"""Names of the catalogue, smallest first."""

CARDS: Final = MappingProxyType({12: "rtx3060", 16: "rtx4080", 24: "rtx4090", 48: "a6000", 80: "a100-80"})
"""For each size in GiB a card that is sold with it: what counts is the memory that its driver leaves."""

_ALIKE: Final = (
    "study.task=causal-lm",
    "train.batch_size=1",
    "train.max_length=2048",
    "train.precision=bf16",
    "execution.micro_batch=1",
    "execution.eval_batch=1",
    "execution.checkpointing=true",
)
WAYS: Final = MappingProxyType(
    {
        "QLoRA": ("lora.r=16", "lora.base=nf4", "lora.double_quant=true"),
        "LoRA": ("lora.r=16", "lora.base=bf16"),
        "full": ("lora.r=0",),
    }
)
"""Ways of fine-tuning, the one that needs least first, and what they set besides :data:`_ALIKE`."""

_LEAST_BYTES: Final = MappingProxyType({"QLoRA": 0.5, "LoRA": 2, "full": 16})
"""What a parameter takes at least: four bits; bf16; weights, gradients and two moments in fp32."""

ANY_SIZE: Final = "1024GiB@8.6"
"""A plan says how large a device must be, whatever its size; on this one everything is planned as asked."""

Needed = Mapping[str, int]
"""Bytes that a device must have, by way; a way that was not planned is absent."""


def settings(model: str, way: str) -> tuple[str, ...]:
    """Return the ``key=value`` pairs of a plan."""
    return (f"model.name={model}", *_ALIKE, *WAYS[way])


def required_bytes(model: str, way: str) -> int:
    """Return how much memory a device must have, of which ``dryfit plan`` is asked.

    Raises:
        RuntimeError: There is no plan.
    """
    pairs = [part for pair in settings(model, way) for part in ("--set", pair)]
    program = Path(sys.executable).with_name("dryfit")
    done = subprocess.run(
        [program, "plan", *pairs, "--device", ANY_SIZE, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{model}, {way}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return json.loads(done.stdout)["required_bytes"]


def parameters_of(model: str) -> int:
    """Return how many parameters a model has, of which a table of the documents tells."""
    row = re.search(rf"^\| `{re.escape(model)}` \|.*\| ([\d,]+) \|", COUNTS.read_text("utf-8"), re.MULTILINE)
    assert row is not None
    return int(row[1].replace(",", ""))


def ways_of(model: str) -> list[str]:
    """Return the ways that are planned: those of which the weights alone do not already fill the largest card."""
    parameters = parameters_of(model)
    return [way for way in WAYS if parameters * _LEAST_BYTES[way] < usable_bytes(max(CARDS))]


def needed_of(model: str) -> Needed:
    """Plan a model in every way that could fit the largest card."""
    found: dict[str, int] = {}
    for way in ways_of(model):
        began = time.monotonic()
        found[way] = required_bytes(model, way)
        print(f"{model}, {way}: {found[way] / GIB:.1f} GiB, {time.monotonic() - began:.0f} s", flush=True)
    return found


def usable_bytes(size: int) -> int:
    """Return the memory of the card of a size."""
    return parse_device(CARDS[size]).capacity_bytes


def best(needed: Needed, size: int) -> str:
    """Return the way that needs most among those that fit a card; a dash where none does."""
    fitting = [way for way, bytes_ in needed.items() if bytes_ <= usable_bytes(size)]
    return fitting[-1] if fitting else "-"


def render(found: Mapping[str, Needed], *, when: date, took_s: float) -> str:
    """Return what stands between the markers."""
    used = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    minutes = f"{took_s / 60:.0f} minutes"
    lines = [
        f"**Planned, not measured**: {when}, {used}; {sum(map(len, found.values()))} plans, {minutes}.",
        "",
        "| model | " + " | ".join(f"{way}, GiB" for way in WAYS) + " | " + " | ".join(map(_heading, CARDS)) + " |",
        "|---|" + "--:|" * len(WAYS) + "---|" * len(CARDS),
    ]
    for model, needed in found.items():
        figures = [f"{needed[way] / GIB:.1f}" if way in needed else "" for way in WAYS]
        lines.append(f"| `{model}` | " + " | ".join([*figures, *(best(needed, size) for size in CARDS)]) + " |")
    return re.sub(r"  +", " ", "\n".join(lines)) + "\n"


def _heading(size: int) -> str:
    return f"{size} GiB (`{CARDS[size]}`: {usable_bytes(size) / GIB:.1f})"


def with_table(page: str, table: str) -> str:
    """Return the page with another table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table + END + after


def table_of(page: str) -> str:
    """Return what stands between the markers."""
    return page.partition(BEGIN)[2].partition(END)[0]


def rows_of(table: str) -> dict[str, Sequence[str]]:
    """Return the cells of each row by the model's name, headings left out."""
    cells = [
        [cell.strip() for cell in line.strip("| ").split(" |")] for line in table.splitlines() if line[:3] == "| `"
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


def main() -> None:
    """Plan everything, two models at a time, and write the page."""
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found: dict[str, Needed] = dict(zip(MODELS, pool.map(needed_of, MODELS), strict=True))
    table = render(found, when=date.today(), took_s=time.monotonic() - began)
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), table), "utf-8")


if __name__ == "__main__":
    main()
