"""Continue four prompts of 2,048 tokens with a Falcon 7B in bf16."""

import torch
from transformers import FalconConfig, FalconForCausalLM

torch.set_default_dtype(torch.bfloat16)
model = FalconForCausalLM(FalconConfig()).cuda().eval()
ids = torch.randint(12, 65000, (4, 2048), device="cuda")
model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=11, attention_mask=torch.ones_like(ids))
