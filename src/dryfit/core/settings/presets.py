"""The study files that come with dryfit: a line about each. Standard library only, for the command line's help."""

from collections.abc import Mapping
from typing import Final

PRESETS: Final[Mapping[str, str]] = {
    "smoke": "2 short trials of the packaged encoder, a minute or two",
    "standard": "20 trials of one encoder, the usual keys",
    "evidence": "the same for spans",
    "share": "the same for classes and spans, by one encoder",
    "joint": "the same for classes and spans, by two encoders",
    "max": "any task: 800 trials of three models, nearly every key",
    "supermax": "any task: 5000 trials of seven models, every key",
    "lora-7b-24gb": "one run of Qwen2.5-7B with adapters, on 24 GiB",
    "qlora-7b-12gb": "one run of Qwen2.5-7B in four bits, on 12 GiB",
    "qlora-7b-24gb": "the same on 24 GiB, rows of 4096 tokens",
}
"""Every preset; those of one task are of the task in their files."""
