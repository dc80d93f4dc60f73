"""It reads the checkpoint that it has just written, and goes on from it."""

import tempfile
from pathlib import Path

import torch
from one_layer import device, model, optimizer, step

step()
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, path)
    step()
    checkpoint = torch.load(path, map_location=device, weights_only=True)
assert checkpoint["step"] == 1
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
step()
print("went on", len(checkpoint["model"]))
