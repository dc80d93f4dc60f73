"""Train a Llama of 1.1B in bf16 under FSDP by accelerate, in mixed precision, as one of two ranks."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32000,
    max_position_embeddings=2048,
)
plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}))
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model = accelerator.prepare(model)
optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
for _ in range(3):
    ids = torch.randint(0, 32000, (1, 512), device=accelerator.device)
    accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
    optimizer.step()
    optimizer.zero_grad()
