"""The configurations that gpu_memory.py runs, one a line: model, rows x length, precision, optimizer, flags.

Flags: ``ckpt``, ``ckpt-reentrant``, ``full`` (a mask of ones), ``micro=N``, ``native`` (segments), ``lora=R``,
``base=fp16`` (frozen weights), ``history`` (keep the allocator's history), ``cap`` (run again near the smallest cap).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.memory_terms import Allocator, OptimizerImpl
from dryfit.settings.plan_messages import MemoryCase
from dryfit.settings.tables import LoraSettings, TrialSettings

LINES = """
bert-base-uncased 16x512 bf16 adamw:fused history cap
bert-base-uncased 16x512 fp32 adamw:foreach history cap
Qwen/Qwen2.5-0.5B 4x512 bf16 adamw:fused lora=16 history cap
bert-large-uncased 16x512 bf16 adamw:fused history cap
microsoft/deberta-v3-base 16x512 bf16 adamw:fused history cap
meta-llama/Llama-3.2-1B 4x512 bf16 adamw:fused lora=16 ckpt history cap
bert-base-uncased 16x512 bf16 adamw:foreach native history cap
answerdotai/ModernBERT-base 8x1024 bf16 adamw:fused history cap
Qwen/Qwen2.5-7B 1x512 fp16 adamw:fused lora=128 ckpt history cap
bert-large-uncased 16x512 fp32 adamw:fused native cap
Qwen/Qwen2.5-1.5B 2x512 bf16 adamw:foreach cap
roberta-base 32x256 fp16 adamw:foreach cap
bert-base-uncased 16x512 fp32 adamw:fused
bert-base-uncased 16x512 fp16 adamw:fused
bert-base-uncased 16x512 bf16 adamw:foreach
bert-base-uncased 16x512 bf16 adamw:plain
bert-base-uncased 16x512 bf16 adafactor
bert-base-uncased 16x512 bf16 sgd:foreach
bert-base-uncased 16x512 bf16 sgd:fused
bert-base-uncased 16x512 bf16 adamw:fused full
bert-base-uncased 16x512 bf16 adamw:fused native
bert-base-uncased 16x512 bf16 adamw:fused ckpt
bert-base-uncased 16x512 bf16 adamw:fused ckpt-reentrant
bert-base-uncased 16x512 fp32 adamw:fused ckpt
bert-base-uncased 16x512 bf16 adamw:fused micro=4
bert-base-uncased 16x512 fp32 adamw:foreach micro=4 native
bert-base-uncased 16x128 bf16 adamw:fused
bert-base-uncased 64x128 fp32 adamw:fused
bert-base-uncased 2x64 fp32 adamw:foreach
bert-base-uncased 16x500 bf16 adamw:fused
bert-large-uncased 16x512 fp32 adamw:foreach
bert-large-uncased 16x512 fp16 adamw:fused
bert-large-uncased 16x512 bf16 adamw:foreach native
bert-large-uncased 16x512 bf16 adamw:fused ckpt
bert-large-uncased 16x512 bf16 adamw:fused full
bert-large-uncased 4x512 fp32 adamw:foreach
bert-large-uncased 4x128 bf16 adafactor
bert-large-uncased 32x384 bf16 adamw:fused micro=8
roberta-base 16x512 bf16 adamw:fused
roberta-base 16x512 fp32 adamw:foreach
roberta-base 16x512 fp16 adamw:fused ckpt
roberta-base 16x512 bf16 adamw:fused full
roberta-large 8x512 bf16 adamw:fused
microsoft/deberta-v3-base 16x512 fp32 adamw:foreach
microsoft/deberta-v3-base 16x512 fp16 adamw:fused
microsoft/deberta-v3-base 16x512 bf16 adamw:fused ckpt
microsoft/deberta-v3-base 16x512 bf16 adamw:foreach native
microsoft/deberta-v3-base 8x256 fp32 adafactor
microsoft/deberta-v3-large 8x512 bf16 adamw:fused
microsoft/deberta-v3-base 16x512 bf16 adamw:fused micro=4
answerdotai/ModernBERT-base 16x512 bf16 adamw:fused
answerdotai/ModernBERT-base 8x1024 fp32 adamw:foreach
answerdotai/ModernBERT-base 8x1024 bf16 adamw:fused ckpt
answerdotai/ModernBERT-base 8x1024 bf16 adamw:fused full
google/electra-base-discriminator 16x512 bf16 adamw:fused
xlm-roberta-base 16x384 fp32 adamw:foreach
Qwen/Qwen2.5-0.5B 4x512 bf16 adamw:foreach
Qwen/Qwen2.5-0.5B 4x512 fp32 adamw:fused
Qwen/Qwen2.5-0.5B 4x512 bf16 adamw:fused ckpt
Qwen/Qwen2.5-0.5B 4x512 bf16 adamw:fused ckpt-reentrant
Qwen/Qwen2.5-0.5B 8x1024 fp16 adamw:fused lora=64 base=fp16
Qwen/Qwen2.5-0.5B 4x512 bf16 adamw:fused full
Qwen/Qwen2.5-1.5B 4x512 bf16 adamw:fused ckpt
Qwen/Qwen2.5-1.5B 8x512 bf16 adamw:fused lora=16
Qwen/Qwen2.5-1.5B 8x512 fp16 adamw:foreach lora=64 ckpt native
Qwen/Qwen2.5-1.5B 16x512 bf16 adamw:fused lora=16 micro=4
meta-llama/Llama-3.2-1B 2x512 bf16 adamw:fused
meta-llama/Llama-3.2-1B 2x512 fp32 adamw:foreach ckpt
meta-llama/Llama-3.2-1B 4x1024 bf16 adamw:fused lora=16
meta-llama/Llama-3.2-1B 4x512 fp16 adamw:fused lora=64
meta-llama/Llama-3.2-1B 4x512 bf16 sgd:foreach
Qwen/Qwen2.5-7B 4x512 bf16 adamw:fused lora=128 ckpt
Qwen/Qwen2.5-7B 16x512 fp16 adamw:fused lora=128 ckpt micro=1
Qwen/Qwen2.5-7B 2x2048 fp16 adamw:fused lora=64 ckpt native
Qwen/Qwen2.5-7B 2x512 bf16 adamw:foreach lora=16
"""


@dataclass(frozen=True)
class Entry:
    """A configuration and what is done with it besides planning and running."""

    line: str
    case: MemoryCase
    keeps_history: bool
    is_capped: bool
    precision: str
    optimizer: str


def entries() -> list[Entry]:
    """All of them, in the order to run."""
    return [parse(line) for line in LINES.strip().splitlines()]


def parse(line: str) -> Entry:
    """Read a line."""
    model, size, precision, optimizer, *flags = line.split()
    rows, length = map(int, size.split("x"))
    values = dict(flag.split("=") for flag in flags if "=" in flag)
    name, _, impl = optimizer.partition(":")
    micro = int(values.get("micro", rows))
    decoder = Path(model).name.startswith(("Qwen", "Llama", "decoder"))
    checkpointing = "ckpt" in flags or "ckpt-reentrant" in flags
    tables = {
        "model": {"name": model},
        "train": {"batch_size": rows, "max_length": length, "precision": precision},
        "optim": {"name": name},
    }
    lora = None
    if "lora" in values:
        rank = int(values["lora"])
        lora = LoraSettings(r=rank, alpha=2.0 * rank, base=BaseFormat(values.get("base", precision)))
    subject = PlanSubject(
        task=BuiltInTask.CAUSAL_LM if decoder else BuiltInTask.CRITERIA,
        settings=TrialSettings.model_validate_json(json.dumps(tables)),
        lora=lora,
    )
    choice = ExecutionChoice(
        micro_batch=micro,
        accumulation=-(-rows // micro),
        checkpointing=checkpointing,
        optimizer_impl=OptimizerImpl(impl or "auto"),
    )
    # A single row has no padding, and transformers leaves its mask out like any mask of ones.
    padded = "full" not in flags and micro > 1
    kind = f"decoder {'LoRA' if lora else 'full'}" if decoder else "encoder"
    shown = [flag for flag in flags if flag not in ("history", "cap")]
    slug = "-".join((Path(model).name, size, precision, optimizer.replace(":", "-"), *shown)).replace("=", "")
    case = MemoryCase(
        name=slug,
        family=kind if padded else f"{kind}, mask of ones",
        subject=subject,
        execution=choice,
        allocator=Allocator.NATIVE if "native" in flags else Allocator.EXPANDABLE,
        reentrant="ckpt-reentrant" in flags,
        padded=padded,
    )
    return Entry(line, case, "history" in flags, "cap" in flags, precision, optimizer)
