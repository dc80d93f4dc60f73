"""A plain loop: a transformer encoder, autocast in fp16 and a gradient scaler."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=100)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--rows", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        layer = nn.TransformerEncoderLayer(args.width, args.heads, 4 * args.width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, args.layers)
        self.head = nn.Linear(args.width, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(dim=1))


tokens = torch.randint(args.vocabulary, (args.rows, args.length))
labels = tokens[:, 0] % 2
loader = DataLoader(TensorDataset(tokens, labels), batch_size=args.batch, shuffle=True, pin_memory=device == "cuda")

model = Classifier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
loss_fn = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    total, right = 0.0, 0
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"):
            logits = model(x)
            loss = loss_fn(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
        right += (logits.argmax(dim=-1) == y).sum().item()
    print(f"epoch {epoch}: loss {total / len(loader):.3f}, accuracy {right / args.rows:.3f}")
if device == "cuda":
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
