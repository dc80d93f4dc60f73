"""LoRA adapters of PEFT in a loop without any trainer; the adapters are saved and merged at the end."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocabulary", type=int, default=100)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=2 * args.width,
)
model = LlamaForCausalLM(config).to(device)
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
model.train()
for step in range(args.steps):
    tokens = torch.randint(args.vocabulary, (args.batch, args.length), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.3f}")
model.save_pretrained(args.output_dir)
merged = model.merge_and_unload()
print(type(merged).__name__)
