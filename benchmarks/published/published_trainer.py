"""The Hugging Face Trainer with the settings of fms-acceleration's benchmarks, on packed rows of random tokens.

Their trainer is that of fms-hf-tuning with trl 0.11; this program makes the same calls in the same order: where the
model is loaded, quantised, prepared, and adapted. It runs with transformers 4.45 and 5.
"""

import argparse
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments


class Packed(Dataset):
    """Rows of one length."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        self.rows = torch.randint(0, vocabulary, (rows, length))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        row = self.rows[n]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def cast(model: torch.nn.Module) -> None:
    """What trl 0.11 does with an adapted 4-bit model under bf16 (``peft_module_casting_to_bf16``)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            module.to(torch.bfloat16)
        elif isinstance(module, torch.nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif name.rpartition(".")[2] in ("lm_head", "embed_tokens", "wte", "wpe"):
            module.to(torch.bfloat16)


def main() -> None:
    """Train as a row of the benchmark did: ``full``, ``lora``, ``bnb`` (trl prepares) or ``bnb-plain`` (the plugin)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("method", choices=("full", "lora", "bnb", "bnb-plain"))
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    more: dict[str, Any] = {}
    if given.method.startswith("bnb"):
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    more["dtype" if transformers.__version__ > "4.56" else "torch_dtype"] = torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation="flash_attention_2", **more)
    checkpointing = {"use_reentrant": True}
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=given.batch,
        gradient_checkpointing=given.method != "bnb",
        gradient_checkpointing_kwargs=checkpointing,
        bf16=given.bf16,
        optim="adamw_torch",
        adam_epsilon=1e-4,
        weight_decay=0.01,
        warmup_steps=10,
        lr_scheduler_type="linear",
        logging_steps=10,
        max_steps=100,
        save_strategy="no",
        report_to=[],
    )
    if given.method == "bnb":
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=checkpointing)
    elif given.method != "full":
        model.enable_input_require_grads()
    if given.method != "full":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", *(["c_attn"] if given.method == "bnb-plain" else [])]
        adapted = LoraConfig(
            r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets, bias="none", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapted)
    if given.method == "bnb":
        cast(model)
    rows = Packed(8 * given.batch, given.length, model.config.vocab_size)
    Trainer(model=model, args=arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main()
