"""The tables of the page of models and devices, rendered from the catalogue and the table of devices.

Run this file to write the page anew: ``PYTHONPATH=src:tests/support python tests/support/names_page.py``.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from transformers import AutoModel, PreTrainedModel

from dryfit.meta import build
from dryfit.meta.configs import catalogue_config, catalogue_entries
from dryfit.meta.pretrained import Kind, make_model, stored_kind
from dryfit.settings.devices import device_names, parse_device

PAGE = Path(__file__).parents[2] / "docs" / "models-and-devices.md"
_HEADS = {Kind.CAUSAL_LM: "decoder with its head", Kind.SEQ2SEQ_LM: "encoder-decoder with its head"}


def whole_model(name: str) -> tuple[str, PreTrainedModel]:
    """A model of the catalogue on meta, with the pooler or head that belongs to it, and in words what that is."""
    config = catalogue_config(name)
    kind = stored_kind(config)
    if kind in _HEADS:
        return _HEADS[kind], build(partial(make_model, config, kind))
    words = "encoder-decoder" if config.is_encoder_decoder else "encoder"
    return words, build(partial(AutoModel.from_config, config))


def render(page: str, models: Mapping[str, tuple[str, int]]) -> str:
    """Return the page with its two tables written anew; the prose around them is its own.

    Args:
        page: What it was.
        models: For each name of the catalogue, what was built and how many parameters it has.
    """
    lines = ["| model | also called | parameters | counted |", "|---|---|---:|---|"]
    for name, (words, parameters) in models.items():
        also = ", ".join(f"`{alias}`" for alias in catalogue_entries()[name]["aliases"])
        lines.append(f"| `{name}` | {also} | {parameters:,} | {words} |".replace("|  |", "| |"))
    devices = ["| device | bytes | GiB | compute capability |", "|---|---:|---:|---:|"]
    for name in device_names():
        device = parse_device(name)
        size = f"{device.capacity_bytes:,} | {device.capacity_bytes / 2**30:.2f}"
        devices.append(f"| `{name}` | {size} | {device.capability[0]}.{device.capability[1]} |")
    for table in (lines, devices):
        page = re.sub(re.escape(table[0]) + r"\n(\|.*\n)+", lambda _, table=table: "\n".join(table) + "\n", page)
    return page


if __name__ == "__main__":
    built = {name: whole_model(name) for name in catalogue_entries()}
    page = PAGE.read_text("utf-8")
    PAGE.write_text(
        render(page, {name: (words, model.num_parameters()) for name, (words, model) in built.items()}), "utf-8"
    )
