"""A plain training loop of a small transformer on random tokens, for ``gpu-memory.toml`` beside it.

python examples/gpu_memory/train.py --batch-size 16
dryfit check --file examples/gpu_memory/gpu-memory.toml
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--epochs", type=int, default=1)
arguments = parser.parse_args()
TOKENS, CLASSES = 8_000, 10


class Classifier(nn.Module):
    """Embeddings, layers of self-attention, and a class for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, arguments.width)
        layer = nn.TransformerEncoderLayer(arguments.width, arguments.width // 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)
        self.head = nn.Linear(arguments.width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the classes: rows x classes."""
        return self.head(self.layers(self.embed(tokens)).mean(dim=1))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens = torch.randint(TOKENS, (256, arguments.length))
loader = DataLoader(TensorDataset(tokens, tokens[:, 0] % CLASSES), arguments.batch_size, shuffle=True)
model = Classifier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(arguments.epochs):
    for rows, labels in loader:
        loss = cross_entropy(model(rows.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
