"""A vision transformer of timm, with exponential averages of its weights."""

import argparse

import timm.optim
import torch
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--image", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--rows", type=int, default=8)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = timm.create_model(args.model, pretrained=False, num_classes=10, img_size=args.image).to(device)
averaged = ModelEmaV3(model, decay=0.99)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
images = torch.rand(args.rows, 3, args.image, args.image)
loader = DataLoader(TensorDataset(images, torch.arange(args.rows) % 10), batch_size=args.batch, shuffle=True)

model.train()
for step, (x, y) in enumerate(loader):
    x, y = x.to(device), y.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update(model, step=step)
    print(f"step {step}: loss {loss.item():.3f}")
