"""It calls an operator of its own, as torchvision's ``nms``, that keeps as many rows as their values say."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.library.custom_op("program::keep", mutates_args=())
def keep(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Positions of the scores above a threshold."""
    return (scores > threshold).nonzero().squeeze(1)


@keep.register_fake
def _(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    return scores.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)


model = nn.Linear(16, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    scores = model(torch.randn(1000, 16, device=device)).squeeze(1)
    kept = scores[keep(scores.detach(), 0.0)]
    print(kept.shape)
    kept.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
