"""A late training step on real CPU tensors: ``python recorded_on_cpu.py recorder|profiler CASE``.

Prints the most bytes that the step takes beside what lives before it: as the recorder of rehearsals counts them, or as
torch's profiler does. The two in turn: below a dispatch mode autograd works in place less often.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.optimization import Adafactor

from profiled import peak_bytes, profiled_peak_bytes

ROWS, LENGTH = 8, 128
SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}
CASES = {
    "bert": "bert adamw",
    "bert bf16 fused": "bert adamw-fused bf16",
    "bert checkpointing": "bert adamw checkpointing",
    "modernbert": "modernbert adamw-fused bf16",
    "deberta": "deberta-v2 adamw",
    "qwen2 adapters": "qwen2 adamw adapters",
    "qwen2 adapters checkpointing": "qwen2 adamw adapters checkpointing",
    "qwen2 accumulation": "qwen2 adamw twice",
    "gpt2 adafactor": "gpt2 adafactor",
    "encoder": "plain sgd",
    "convolutions": "convolutions adamw",
}


class Scored(nn.Module):
    """A module of torch alone, with a loss, called as those of transformers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, labels: torch.Tensor, **given: torch.Tensor) -> Any:
        """Return the loss of one input."""
        (values,) = given.values()
        scores = self.body(values).flatten(1).mean(1, keepdim=True)
        return [nn.functional.binary_cross_entropy_with_logits(scores, labels[:, None].float())]


def model_and_batch(name: str, words: list[str]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model, and a batch for it."""
    labels = torch.arange(ROWS) % 2
    if name == "plain":
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        return Scored(nn.TransformerEncoder(layer, 3)), {"values": torch.randn(ROWS, LENGTH, 256), "labels": labels}
    if name == "convolutions":
        blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
        body = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 31 * 31, 64))
        return Scored(body), {"values": torch.randn(ROWS, 3, 64, 64), "labels": labels}
    is_decoder = name in ("qwen2", "gpt2")
    own = {"num_key_value_heads": 2} if name == "qwen2" else {}
    config = AutoConfig.for_model(name, vocab_size=2000, pad_token_id=0, **SIZES, **own)
    model = (AutoModelForCausalLM if is_decoder else AutoModelForSequenceClassification).from_config(config)
    if "adapters" in words:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    if "checkpointing" in words:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    ids = torch.randint(5, 2000, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    mask[1:, -5:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.clone() if is_decoder else labels}


def step_of(case: str) -> Callable[[], None]:
    """Return a step of a case, two of which were taken."""
    name, optim, *words = CASES[case].split()
    torch.manual_seed(0)
    model, batch = model_and_batch(name, words)
    model.train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(trained, foreach=True),
        "adamw-fused": lambda: torch.optim.AdamW(trained, fused=True),
        "adafactor": lambda: Adafactor(trained),
        "sgd": lambda: torch.optim.SGD(trained, 0.1, momentum=0.9),
    }[optim]()
    parts = 2 if "twice" in words else 1

    def step() -> None:
        for part in range(parts):
            rows = {key: value.tensor_split(parts)[part] for key, value in batch.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in words):
                loss = model(**rows)[0]
            loss.backward()
            del loss
        clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


def recorded_peak_bytes(work: Callable[[], None]) -> int:
    """The most that work takes, by the recorder of rehearsals."""
    from dryfit.gpu.allocator_settings import AllocatorSettings
    from dryfit.gpu.script_recorder import LiveAllocations, Places, ScriptRecorder

    run = LiveAllocations(AllocatorSettings, None, 0)
    recorder = ScriptRecorder(run, Places(), "cpu")
    recorder.follow()
    gc.collect()
    gc.disable()
    with recorder:
        work()
    return peak_bytes(run.deltas)


if __name__ == "__main__":
    what, case = sys.argv[1:]
    torch.set_num_threads(1)
    measure = {"recorder": recorded_peak_bytes, "profiler": profiled_peak_bytes}[what]
    print(measure(step_of(case)))
