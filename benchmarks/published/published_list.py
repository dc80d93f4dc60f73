"""The rows that are held against published measurements, and how each is run.

Pure: nothing is read, run or written here.
"""

import csv
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

MIB: Final = 2**20
START_BYTES: Final = 2 * MIB
"""What PEFT's scripts subtract: they reserve one segment before they begin."""

ANCHOR: Final = "mm lora r32"
"""The row on which the free parameters of MetaMathQA were fitted; allocated memory is told as a difference to it."""

LONGEST_TOKENS: Final = (727, 480, 400, 340)
"""Tokens of the longest batch and of the three after it. The first was fitted on :data:`ANCHOR`'s reserved memory."""

USUAL_STEPS: Final = slice(1, 20)
"""Steps of MetaMathQA whose end counts toward the mean: after the first, before the longest batch."""


@dataclass(frozen=True, slots=True)
class Family:
    """Rows of one public script.

    Attributes:
        title: Its name in tables.
        source: Key of the checkout: ``PEFT``, ``TIMM``; empty: the program is this repository's own.
        folder: Where it runs, within the checkout.
        command: ``{experiment}`` is the row's.
        options: Of ``dryfit rehearse``.
        makes: Inputs, made by ``published_inputs``.
        overlay: A file of settings that the script reads, with what is changed in it.
        path: Folders within the checkout that are on ``PYTHONPATH``.
        packages: Modules that must be importable.
        requires: What an environment of a row's own versions has besides these.
    """

    title: str
    source: str
    folder: str
    command: str
    options: str = ""
    makes: tuple[str, ...] = ()
    overlay: tuple[str, Mapping[str, Any]] | None = None
    path: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


SHORT_SCHEDULE: Final = {"max_steps": 4, "eval_steps": 2, "drift_image_prompts": ["a cat"], "sample_image_prompts": []}
"""Of 750 steps with an evaluation after each 100, four with two; pictures that come after the counters were read."""

_BESIDE: Final = frozenset({"seen", "origin", "stack", "weights", "trained", "weight_bits"})
"""What is told of a row, and does not decide how it runs."""

_NUMBERS: Final = ("weights", "trained", "weight_bits")

_LITGPT: Final = Family(
    "LitGPT",
    "LITGPT",
    "",
    "{experiment}",
    makes=("litgpt {experiment}",),
    packages=("jsonargparse", "lightning", "bitsandbytes"),
    requires=(
        "jsonargparse[signatures]==4.32.1",
        *("setuptools<80", "pillow", "huggingface_hub", "tokenizers", "datasets", "requests", "numpy", "tqdm"),
    ),
)

FAMILIES: Final = {
    "image-gen": Family(
        "PEFT image-gen",
        "PEFT",
        "method_comparison/image-gen",
        "run.py -v experiments/{experiment}",
        "--steps 5",
        (
            "model black-forest-labs/FLUX.2-klein-base-4B",
            "model facebook/dinov2-base",
            "data peft-internal-testing/cat-image-dataset 20",
        ),
        ("experiments/{experiment}/training_params.json", SHORT_SCHEDULE),
        ("src",),
        ("diffusers", "torchvision"),
        ("torchvision", "pillow", "accelerate", "numpy", "tqdm"),
    ),
    "metamath": Family(
        "PEFT MetaMathQA",
        "PEFT",
        "method_comparison/MetaMathQA",
        "run.py -v experiments/{experiment}",
        "--steps 24",
        ("model meta-llama/Llama-3.2-3B", "metamath " + ",".join(map(str, LONGEST_TOKENS))),
        path=("src",),
        requires=("accelerate", "numpy", "tqdm", "psutil", "pillow"),
    ),
    "fms": Family(
        "HF Trainer (fms)",
        "",
        "",
        "{here}/published_trainer.py {experiment}",
        "--with flash_attn",
        ("model {model}", "weights {model}"),
        requires=("bitsandbytes==0.49.2", "numpy", "pillow", "datasets"),
    ),
    "nanochat": Family(
        "nanochat",
        "NANOCHAT",
        "",
        "{experiment}",
        makes=("nanochat",),
        packages=("rustbpe", "tiktoken", "pyarrow", "wandb"),
        requires=(
            "rustbpe",
            "tiktoken",
            "pyarrow",
            "wandb",
            "numpy",
            "psutil",
            "tokenizers",
            "requests",
            "regex",
            "datasets",
            "pillow",
        ),
    ),
    "modded-nanogpt": Family(
        "modded-nanogpt",
        "MODDED_NANOGPT",
        "",
        "torchrun --standalone --nproc_per_node=8 {experiment}.py",
        makes=("modded_nanogpt {experiment}",),
    ),
    "nanovlm": Family(
        "nanoVLM",
        "NANOVLM",
        "",
        "measure_vram.py --batch_sizes {experiment}",
        makes=("nanovlm",),
        packages=("torchvision",),
        requires=("torchvision", "pillow", "datasets==4.2.0", "numpy", "tqdm", "requests"),
    ),
    "litgpt": _LITGPT,
    "litgpt 4-bit": replace(_LITGPT, title="LitGPT in 4 bits"),
    "litgpt x4": replace(_LITGPT, title="LitGPT on four devices"),
    "timm": Family(
        "timm benchmark.py",
        "TIMM",
        "",
        "benchmark.py --bench train --amp -b 512 --results-file out.csv {experiment}",
        packages=("torchvision",),
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One published run, without what was measured.

    Attributes:
        family: Key of :data:`FAMILIES`.
        experiment: What its command is given.
        commit: Of the script's repository.
        origin: File, or file and line, of the measurement in the repository that publishes it.
        stack: Versions that ran there: ``torch 2.13.0 transformers 5.13.1``.
        seen: Whether its measured value was known to whoever worked on dryfit before it was predicted.
        weights: Weights of the model with its adapters; 0: not counted here.
        trained: Those that are trained.
        weight_bits: Of each weight that is not trained.
    """

    name: str
    family: str
    experiment: str
    commit: str
    origin: str
    device: str
    stack: str
    seen: bool
    weights: int = 0
    trained: int = 0
    weight_bits: int = 16

    @property
    def key(self) -> str:
        """What changes with whatever decides how the row runs."""
        words = {name: value for name, value in asdict(self).items() if name not in _BESIDE}
        family = {name: value for name, value in asdict(FAMILIES[self.family]).items() if name != "requires"}
        return hashlib.sha256(json.dumps([words, family], sort_keys=True).encode()).hexdigest()[:12]

    @property
    def pins(self) -> dict[str, str]:
        """The versions that ran there, by package."""
        words = self.stack.split()
        return dict(zip(words[::2], words[1::2], strict=True))

    def filled(self, text: str, here: str = "") -> str:
        """Return a text of the family with what is the row's put in."""
        model = shlex.split(self.experiment)[0] if self.experiment else ""
        return text.replace("{experiment}", self.experiment).replace("{model}", model).replace("{here}", here)


def rows_of(text: str) -> tuple[Row, ...]:
    """Return the rows of a table with a header.

    Raises:
        ValueError: A row is not well-formed, with its name and why.
    """
    rows: list[Row] = []
    for entry in csv.DictReader(text.splitlines()):
        name = entry.get("name") or "a row without a name"
        if entry.get("family") not in FAMILIES:
            raise ValueError(f"{name}: family {entry.get('family')!r}; there are {', '.join(FAMILIES)}")
        if entry.get("seen") not in ("yes", "no"):
            raise ValueError(f"{name}: seen is yes or no, not {entry.get('seen')!r}")
        try:
            numbers = {field: int(entry[field]) for field in _NUMBERS if entry.get(field)}
            words = {field: value for field, value in entry.items() if field not in _NUMBERS}
            rows.append(Row(**{**words, "seen": entry["seen"] == "yes", **numbers}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"rows of the same name: {', '.join(twice)}")
    return tuple(rows)


def counters(family: str, answer: Mapping[str, Any], log: str) -> dict[str, int]:
    """Return what is compared of a rehearsal: bytes of each counter, or the batch that ran.

    Empty where the rehearsal did not come so far.
    """
    match family:
        case "image-gen":
            means = re.findall(r'"mem allocated": "(\d+)"', log)
            most = re.findall(r"accelerator memory max: (\d+)MB", log)
            if not means or not most or int(most[-1]) == 0:
                return {}
            return {"allocated": int(means[0]), "reserved": int(most[-1]) * MIB}
        case "metamath":
            ends = [step["end_bytes"] for step in answer.get("steps") or []]
            usual = ends[USUAL_STEPS]
            if len(ends) < USUAL_STEPS.stop + len(LONGEST_TOKENS):
                return {}
            mean = round(sum(usual) / len(usual))
            return {"allocated": mean - START_BYTES, "reserved": answer["peak_reserved_bytes"] - START_BYTES}
        case "litgpt" | "litgpt 4-bit" | "litgpt x4":
            if answer.get("verdict") == "refused":
                return {"fits": 0}
            if answer.get("verdict") != "fits" or len(answer.get("steps") or []) < 2:
                return {}
            return {"allocated": answer["peak_allocated_bytes"], "fits": 1}
        case "nanovlm":
            *_, last = re.findall(r"^Batch Size \d+: (.*)", log, re.MULTILINE) or [""]
            if last.startswith("OOM"):
                return {"fits": 0}
            of = re.fullmatch(r"([\d.]+) MB", last)
            return {"allocated": round(float(of[1]) * MIB), "fits": 1} if of else {}
        case "modded-nanogpt":
            if len(answer.get("steps") or []) < 2:
                return {}
            return {"allocated": answer["peak_allocated_bytes"], "reserved": answer["peak_reserved_bytes"]}
        case "fms" | "nanochat":
            return {"allocated": answer["peak_allocated_bytes"]} if len(answer.get("steps") or []) > 1 else {}
        case _:
            batches = re.findall(r"Reducing batch size to (\d+)", log)
            return {"batch": int(batches[-1]) if batches else 512} if answer.get("steps") else {}
