"""An image model of timm in a bare loop."""

import argparse

import timm
import torch
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet50")
parser.add_argument("--image", type=int, default=224)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--benchmark", action="store_true", help="let cuDNN time its algorithms")
parser.add_argument("--tf32", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
torch.backends.cudnn.benchmark = args.benchmark
if args.tf32:
    torch.set_float32_matmul_precision("high")
model = timm.create_model(args.model, pretrained=False, num_classes=1000).cuda()
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
autocast = torch.autocast(
    "cuda", torch.float16 if args.precision == "fp16" else torch.bfloat16, enabled=args.precision != "fp32"
)
model.train()
for step in range(args.steps):
    images = torch.rand(args.batch, 3, args.image, args.image).cuda()
    if args.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch,)).cuda()
    optimizer.zero_grad()
    with autocast:
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
