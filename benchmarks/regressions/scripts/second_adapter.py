"""Give a Mistral 7B in bf16 two adapters: one trains the output layer, the other the embeddings."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import MistralConfig, MistralForCausalLM

config = MistralConfig(vocab_size=32768, num_key_value_heads=8, max_position_embeddings=32768, sliding_window=None)
torch.set_default_dtype(torch.bfloat16)
model = MistralForCausalLM(config).cuda()
torch.set_default_dtype(torch.float32)
model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
model.add_adapter("other", LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"]))
