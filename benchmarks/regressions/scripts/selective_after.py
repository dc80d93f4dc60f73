"""Score 16 rows of 1,024 tokens over 32,768 words in fp32, as a reinforcement trainer does."""

import torch

logits = torch.randn(16, 1024, 32768, device="cuda")
ids = torch.randint(0, 32768, (16, 1024), device="cuda")
for _ in range(2):
    scores = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
