"""Fine-tune a pretrained causal language model with the HF Trainer and DeepSpeed. Run it with a launcher."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

stage = int(sys.argv[-1])
sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
AutoConfig.for_model("llama", vocab_size=512, num_hidden_layers=4, tie_word_embeddings=False, **sizes).save_pretrained(
    "model"
)
zero = {
    "stage": stage,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}
names = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
arguments = TrainingArguments(
    output_dir="out",
    bf16=True,
    per_device_train_batch_size=2,
    max_steps=6,
    save_steps=3,
    eval_strategy="steps",
    eval_steps=3,
    report_to="none",
    deepspeed={"bf16": {"enabled": "auto"}, "zero_optimization": zero, **dict.fromkeys(names, "auto")},
)
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
rows = [{"input_ids": list(range(64)), "labels": list(range(64))} for _ in range(64)]
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4]).train()
