"""Write a model's weights beside its stand-in config: a sparse file of zeros, named as transformers names them.

``python published_weights.py NAME`` in the row's own environment. transformers before 4.56 does not begin without it.
"""

import json
import struct
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

BYTES = 2


def main(name: str) -> None:
    """Write ``model.safetensors`` in bf16, unless it is there."""
    path = Path(cached_file(name, "config.json")).with_name("model.safetensors")
    if path.exists():
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    header, at, seen = {"__metadata__": {"format": "pt"}}, 0, set()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied: written once
            continue
        seen.add(id(tensor))
        size = BYTES * tensor.numel()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)


if __name__ == "__main__":
    main(sys.argv[1])
