"""Load Qwen3 0.6B without naming a type, and score a sentence."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
Path("qwen3").mkdir()
Path("qwen3/config.json").write_text(json.dumps(config))
model = AutoModelForCausalLM.from_pretrained("qwen3").cuda()
with torch.no_grad():
    model(input_ids=torch.randint(0, 151936, (1, 16), device="cuda"))
