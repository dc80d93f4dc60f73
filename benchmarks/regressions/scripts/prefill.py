"""Continue a prompt of 8,192 tokens with Llama 3.1 8B in bf16."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_theta=500000.0,
)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config).cuda().eval()
ids = torch.randint(0, 128000, (1, 8192), device="cuda")
model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
