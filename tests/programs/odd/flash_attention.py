"""Its model asks for flash attention by name, of which this machine may have no package."""

import argparse

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--attention", default="flash_attention_2")
args = parser.parse_args()

config = Qwen2Config(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    attn_implementation=args.attention,
)
model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 100, (4, 256), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
