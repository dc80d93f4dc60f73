"""Decoders with quantised bases, ours and as transformers loads them."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dryfit.meta.filling import materialise
from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import DTYPES, Kind, empty_stack, fill_frozen
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.choices import BaseFormat, Precision
from dryfit.settings.execution import WeightFormat
from dryfit.settings.tables import (
    DataSettings,
    LoraSettings,
    ModelSettings,
    RegularizationSettings,
    TrainSettings,
    TrialSettings,
)
from dryfit.tasks.base import TaskContext
from dryfit.tasks.causal_lm import CausalLm, CausalLmTask
from dryfit.tasks.tokens import TokenFacts

NF4 = WeightFormat(BaseFormat.NF4, 4, Precision.FP32, quantised=True)
NF4_TWICE = WeightFormat(BaseFormat.NF4, 4, Precision.BF16, quantised=True, double_quant=True)
NF4_HALF = WeightFormat(BaseFormat.NF4, 4, Precision.FP16, quantised=True, double_quant=True)
INT8 = WeightFormat(BaseFormat.INT8, 8, Precision.BF16, quantised=True)
INT8_HALF = WeightFormat(BaseFormat.INT8, 8, Precision.FP16, quantised=True)
FORMATS = {"nf4": NF4, "nf4 twice": NF4_TWICE, "nf4 half": NF4_HALF, "int8": INT8, "int8 half": INT8_HALF}


def loaded(
    folder: Path, lora: LoraSettings, *, seed: int = 1, precision: Precision = Precision.BF16
) -> tuple[CausalLmTask, CausalLm, LoadReport]:
    """Load a trial's model with adapters."""
    settings = TrialSettings(model=ModelSettings(name=str(folder)), train=TrainSettings(precision=precision), lora=lora)
    task = CausalLmTask(TaskContext(settings, DataSettings(), TokenFacts(pad_id=1)))

    def make(source: Any, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None) -> Any:
        model = empty_stack(source, kind, RegularizationSettings(), frozen)
        fill_frozen(model, source, kind, frozen, LoadOptions(torch.device("cpu")))
        return model

    model = task.model(make, seed=seed)
    return task, model, materialise(model, missing=model.drawn)


def config_of(base: WeightFormat) -> BitsAndBytesConfig:
    """A format as transformers is told of it."""
    if base.name is BaseFormat.INT8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=base.double_quant,
        bnb_4bit_compute_dtype=DTYPES[base.compute],
    )


def by_transformers(folder: Path, base: WeightFormat) -> Any:
    """The base as transformers loads it, which quantises by itself."""
    stored = "quantization_config" in json.loads((folder / "config.json").read_text("utf-8"))
    how = {"quantization_config": config_of(base)} if base.quantised and not stored else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[base.compute], device_map="cpu", **how).eval()
    for part in model.modules():  # else a forward pass in eval mode stores weights in another order on some CPUs
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    return model


def batch(*, rows: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    """A batch whose every token is learned."""
    ids = torch.randint(2, 300, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
