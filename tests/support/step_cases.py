"""Small models' training steps that two routes measure: configurations by a text."""

import json
from pathlib import Path

from transformers import AutoConfig

from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.memory_terms import Allocator, OptimizerImpl
from dryfit.settings.plan_messages import MemoryCase
from dryfit.settings.tables import LoraSettings, TrialSettings

ENCODER = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 160,
    "vocab_size": 8000,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
DECODER = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 8000,
    "pad_token_id": 0,
}
CASES = {
    "bert fp32 fused": "bert fp32 adamw:fused",
    "bert fp32 foreach": "bert fp32 adamw:foreach",
    "bert bf16 foreach": "bert bf16 adamw:foreach",
    "bert fp16 fused": "bert fp16 adamw:fused",
    "bert bf16 checkpointing": "bert bf16 adamw:fused ckpt",
    "bert bf16 reentrant": "bert bf16 adamw:fused ckpt-reentrant",
    "bert bf16 accumulation": "bert bf16 adamw:fused micro",
    "bert bf16 adafactor": "bert bf16 adafactor",
    "bert bf16 in 8 bits": "bert bf16 adamw8bit",
    "modernbert bf16": "modernbert bf16 adamw:fused",
    "qwen2 bf16": "qwen2 bf16 adamw:fused",
    "qwen2 bf16 adapters": "qwen2 bf16 adamw:fused lora",
    "qwen2 fp16 adapters checkpointing": "qwen2 fp16 adamw:foreach lora ckpt",
    "llama fp32 checkpointing": "llama fp32 adamw:fused ckpt",
}


def case_of(folder: Path, text: str) -> MemoryCase:
    """A configuration of a small model: architecture, precision, optimizer, flags."""
    architecture, precision, optimizer, *flags = text.split()
    name, _, impl = optimizer.partition(":")
    is_decoder = architecture in ("qwen2", "llama")
    AutoConfig.for_model(architecture, **(DECODER if is_decoder else ENCODER)).save_pretrained(folder)
    rows = 8
    tables = {
        "model": {"name": str(folder)},
        "train": {"batch_size": rows, "max_length": 128, "precision": precision},
        "optim": {"name": name},
    }
    subject = PlanSubject(
        task=BuiltInTask.CAUSAL_LM if is_decoder else BuiltInTask.CRITERIA,
        settings=TrialSettings.model_validate_json(json.dumps(tables)),
        lora=LoraSettings(r=16, alpha=32.0, base=BaseFormat(precision)) if "lora" in flags else None,
    )
    micro = 2 if "micro" in flags else rows
    execution = ExecutionChoice(
        micro_batch=micro,
        accumulation=rows // micro,
        checkpointing=any(flag.startswith("ckpt") for flag in flags),
        optimizer_impl=OptimizerImpl(impl or "auto"),
    )
    return MemoryCase(
        name="case",
        family=architecture,
        subject=subject,
        execution=execution,
        reentrant="ckpt-reentrant" in flags,
        allocator=Allocator.NATIVE,
    )
