"""Train a Mamba-2 of transformers: with mamba-ssm its layers keep what the fused function keeps."""

import sys

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

ROWS, TOKENS, HIDDEN, HEADS, WIDTH, STATES = 4, 512, 256, 8, 64, 64
INNER = HEADS * WIDTH
config = Mamba2Config(
    hidden_size=HIDDEN, num_heads=HEADS, head_dim=WIDTH, state_size=STATES, n_groups=1, num_hidden_layers=2,
    vocab_size=1000, chunk_size=128,
)  # fmt: skip
model = Mamba2ForCausalLM(config).to("cuda", torch.bfloat16).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
kept = []
model.backbone.layers[1].mixer.register_forward_pre_hook(lambda *_: kept.append(-torch.cuda.memory_allocated()))
model.backbone.layers[1].mixer.register_forward_hook(lambda *_: kept.append(torch.cuda.memory_allocated()))
for _ in range(3):
    ids = torch.randint(0, 1000, (ROWS, TOKENS), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

projected = 2 * INNER + 2 * STATES + HEADS
values = 2 * (projected + INNER + HIDDEN) + 4  # of a token: input, output before its norm, output, the norm's number
decay = 2 * 512  # A in fp32, and its negative
is_fused = sum(kept[-2:]) == ROWS * TOKENS * values + decay
if is_fused is not (sys.argv[1] == "fused"):
    raise SystemExit(f"kept {kept}, not {ROWS * TOKENS * values + decay}")
