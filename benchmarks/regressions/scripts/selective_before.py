"""Score 16 rows of 1,024 tokens over 32,768 words in fp32, as a reinforcement trainer does."""

import torch
from trl.trainer.utils import selective_log_softmax

logits = torch.randn(16, 1024, 32768, device="cuda")
ids = torch.randint(0, 32768, (16, 1024), device="cuda")
for _ in range(2):
    scores = selective_log_softmax(logits, ids)
