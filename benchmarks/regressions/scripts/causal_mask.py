"""Train a Llama of DeepSeek-Coder 1.3B's shape in bf16 on rows of 1,024 tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=32256,
    max_position_embeddings=16384,
    rope_theta=100000,
)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config).cuda()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model.train()
for _ in range(3):
    ids = torch.randint(0, 32256, (1, 1024), device="cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
