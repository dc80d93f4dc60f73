"""A deep perceptron whose memory is that of its optimizer, with each optimizer's default settings."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--layers", type=int, default=40)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--clip", action="store_true")
parser.add_argument("--average", action="store_true", help="keep an exponential average of the weights")
parser.add_argument("--bf16", action="store_true", help="weights in bf16")
args = parser.parse_args()

torch.manual_seed(0)
dtype = torch.bfloat16 if args.bf16 else torch.float32
bias = args.optimizer != "Muon"  # which takes matrices alone
layers = [part for _ in range(args.layers) for part in (nn.Linear(args.width, args.width, bias=bias), nn.Tanh())]
model = nn.Sequential(*layers).to("cuda", dtype)
optimizer = getattr(torch.optim, args.optimizer)(model.parameters())
averaged = None
if args.average:
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=True
    )
for _ in range(args.steps):
    inputs = torch.randn(args.batch, args.width, device="cuda", dtype=dtype)

    def closure(inputs=inputs):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    if args.optimizer == "LBFGS":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    if averaged is not None:
        averaged.update_parameters(model)
