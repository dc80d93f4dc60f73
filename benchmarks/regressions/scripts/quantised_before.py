"""Load Mistral 7B v0.3 in 4 bits for LoRA."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MistralConfig

config = MistralConfig(vocab_size=32768, num_key_value_heads=8, max_position_embeddings=32768, sliding_window=None)
config.architectures = ["MistralForCausalLM"]
config.save_pretrained("mistral")
quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
model = AutoModelForCausalLM.from_pretrained(
    "mistral", quantization_config=quantised, device_map={"": 0}, dtype=torch.float16
)
