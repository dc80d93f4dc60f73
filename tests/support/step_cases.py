"""Small models' training steps that two routes measure: configurations by a text, and the plan of each."""

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig

from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.execution import ExecutionChoice, MemoryPlan, PlanSubject
from dryfit.settings.memory_terms import Allocator, OptimizerImpl
from dryfit.settings.plan_messages import MemoryCase
from dryfit.settings.tables import LoraSettings, TrialSettings
from rehearsed import device

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
PLANNED = """
import sys
from pathlib import Path
import torch
from dryfit.settings.plan_messages import MemoryCase
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.training.calibrate import planned
from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import device_constants
from dryfit.plans.estimate import Device
torch.set_num_threads(1)
case = MemoryCase.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
spec = DeviceSpec.model_validate_json(sys.argv[2])
settings = AllocatorSettings.of(case.allocator)
plan, _ = planned(case, Device(spec, device_constants(spec, torch.__version__), settings, torch.__version__))
Path(sys.argv[3]).write_text(plan.model_dump_json(), encoding="utf-8")
"""


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


def planned(folder: Path, case: Path) -> MemoryPlan:
    """The plan of a case, made in a process of its own."""
    spec = device().model_dump_json()
    script = folder / "planned.py"
    script.write_text(PLANNED, encoding="utf-8")
    command = [sys.executable, str(script), str(case), spec, str(folder / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return MemoryPlan.model_validate_json((folder / "plan.json").read_text(encoding="utf-8"))
