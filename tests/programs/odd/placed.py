"""A model that is placed automatically: what does not fit on the device would be left in the memory of the host."""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?")
parser.add_argument("--device_map", default="auto")
parser.add_argument("--quantised", action="store_true")
args = parser.parse_args()

if args.model is None:
    args.model = tempfile.mkdtemp(dir=".")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=100, **size)).save_pretrained(args.model)
how = BitsAndBytesConfig(load_in_4bit=True) if args.quantised else None
model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.float32, device_map=args.device_map, quantization_config=how
)
for parameter in model.parameters():
    parameter.requires_grad = parameter.is_floating_point() and parameter.dim() == 1
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])
for _ in range(3):
    ids = torch.ones(1, 8, dtype=torch.long, device=model.device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
