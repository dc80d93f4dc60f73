"""A causal transformer in a bare loop; with checkpointing, dropout, accumulation or compilation if asked."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--vocabulary", type=int, default=50304)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--manual-attention", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.up, self.down = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, args.heads, -1).permute(2, 0, 3, 1, 4)
        if args.manual_attention:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            y = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), args.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=args.dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(rows, length, width)), args.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), args.dropout, self.training)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if args.checkpointing else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


torch.manual_seed(0)
model = Gpt().cuda()
step_model = torch.compile(model) if args.compile else model
named = {"fused": True} if args.fused else {}
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-4, **named)
scaler = torch.amp.GradScaler(enabled=args.precision == "fp16")
autocast = torch.autocast(
    "cuda", torch.float16 if args.precision == "fp16" else torch.bfloat16, enabled=args.precision != "fp32"
)
for step in range(args.steps):
    for _ in range(args.accumulation):
        ids = torch.randint(args.vocabulary, (args.batch, args.length + 1)).pin_memory().cuda(non_blocking=True)
        with autocast:
            loss = step_model(ids[:, :-1], ids[:, 1:]) / args.accumulation
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
