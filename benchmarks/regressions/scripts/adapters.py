"""Train LoRA adapters of rank 64 on a Llama of 1.1B in bf16."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32000,
    max_position_embeddings=2048,
)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
adapters = LoraConfig(r=64, target_modules=names, task_type="CAUSAL_LM")
model = get_peft_model(model, adapters).cuda()
trained = [one for one in model.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
for _ in range(3):
    ids = torch.randint(0, 32000, (1, 1024), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
