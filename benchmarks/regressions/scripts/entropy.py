"""Take the entropy of each token of four rows of 4,096 tokens over 151,936 words in fp32, as trainers log it."""

import torch
from trl.trainer.utils import entropy_from_logits

logits = torch.randn(4, 4096, 151936, device="cuda")
entropies = entropy_from_logits(logits)
