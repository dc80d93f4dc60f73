"""The page of models and devices, rendered from the catalogue and the table of devices.

Run this file to write the page anew: ``PYTHONPATH=src:tests/support python tests/support/names_page.py``.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from transformers import AutoModel, PreTrainedModel

from dryfit.core.settings.known_devices import device_names, parse_device
from dryfit.meta import build
from dryfit.meta.loading.catalogue import catalogue_config, catalogue_entries
from dryfit.meta.loading.pretrained import Kind, make_model, stored_kind

PAGE = Path(__file__).parents[2] / "docs" / "models-and-devices.md"
_HEADS = {Kind.CAUSAL_LM: "decoder with its head", Kind.SEQ2SEQ_LM: "encoder-decoder with its head"}

_INTRODUCTION = """\
# Models and devices that can be planned for

Planning needs neither weights nor a GPU: a model's config and the size of a device are enough.

## What names a model

The first of these that has a config is taken.

1. `minilm`, the encoder of the extra `demo`.
2. A folder with a `config.json`; nothing else need be in it.
3. A hub id whose `config.json` is in the local cache.
4. A name of the table below: dryfit comes with these configs. They are asked for no revision: where one is named, the
   cache or the hub must have it.
5. A hub id, fetched from the hub, unless `HF_HUB_OFFLINE` is set.

Training takes no config from the table: it needs weights, and reads the config that lies beside them.

The config is the published one. Parameters are counted on the model built from it, tied weights once: of encoders with
their pooler and without a head, of others as the last column says. A test compares them with the published numbers.

"""

_DEVICES = """\

## What names a device

A name of the table below, in any spelling (`RTX 4090`, `NVIDIA A100-SXM4-80GB`); an amount of usable memory (`24GiB`),
with a CUDA compute capability if it matters (`24GiB@8.9`; otherwise 8.0 is taken); or an amount of host memory
(`cpu:16GiB`). Amounts from 64MiB to 1024TiB are taken. `a100` and `v100` were made with two memories, so the size must
be named, and `rtx6000` is `quadro-rtx6000` or `rtx6000ada`; `h100` is `h100-80`; `gh200` is the one with 96 GB.

Bytes are what PyTorch calls `total_memory`: what the driver leaves to programs. They are gathered from the "total
capacity" in out-of-memory errors of public reports from Linux machines, the lowest of the common ones, and are exact to
two decimals of a GiB. Drivers differ by up to 0.2 GiB; `nvidia-smi` shows 0.3 to 1.1 GiB more than is usable.

"""


def whole_model(name: str) -> tuple[str, PreTrainedModel]:
    """A model of the catalogue on meta, with the pooler or head that belongs to it, and in words what that is."""
    config = catalogue_config(name)
    assert config is not None
    kind = stored_kind(config)
    if kind in _HEADS:
        return _HEADS[kind], build(partial(make_model, config, kind))
    words = "encoder-decoder" if config.is_encoder_decoder else "encoder"
    return words, build(partial(AutoModel.from_config, config))


def render(models: Mapping[str, tuple[str, int]]) -> str:
    """The whole page.

    Args:
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
    return _INTRODUCTION + "\n".join(lines) + "\n" + _DEVICES + "\n".join(devices) + "\n"


if __name__ == "__main__":
    built = {name: whole_model(name) for name in catalogue_entries()}
    PAGE.write_text(render({name: (words, model.num_parameters()) for name, (words, model) in built.items()}), "utf-8")
