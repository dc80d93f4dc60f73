"""A model that is placed automatically: what does not fit on the device would be left in the memory of the host."""

import argparse

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--device_map", default="auto")
parser.add_argument("--quantised", action="store_true")
args = parser.parse_args()

how = BitsAndBytesConfig(load_in_4bit=True) if args.quantised else None
model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.float32, device_map=args.device_map, quantization_config=how
)
for parameter in model.parameters():
    parameter.requires_grad = parameter.is_floating_point() and parameter.dim() == 1
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])
for _ in range(3):
    ids = torch.ones(1, 8, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
