"""Try whether a decoder keeps examples apart that share a sequence, as packing asks."""

import inspect
from typing import Final

import torch

from dryfit.core.errors import ConfigError
from dryfit.tasks.base import TaskModel

_SAME: Final = 1e-6
"""Share of the largest score that masked tokens may change: only rounding, since their weights are zero."""

_CLOSE: Final = 2e-2
"""Share of the largest score that other shapes may change by rounding in half precision."""


def check_packing(model: TaskModel) -> None:
    """Refuse packing for a decoder in which one example would change another's scores.

    The decoder is tried: a second example is scored behind two different first ones, and alone. The test holds for any
    weights, and whatever the cause.

    Raises:
        ConfigError: The second example's scores are not its own.
    """
    doing, allowed = "checking lm.packing = true", "lm.packing = false for this model"
    config = model.base().config
    name = config.model_type
    if "position_ids" not in inspect.signature(model.base().forward).parameters:
        raise ConfigError(doing, f"{name} takes no positions", allowed)
    device = next(model.parameters()).device
    ids_BL = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 8, 9, 10]], device=device) % config.vocab_size
    positions_BL = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device).expand(2, -1)
    mask_BL = torch.ones_like(ids_BL)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        packed_BLV = model(ids_BL, mask_BL, positions_BL)[:, 3:].float()
        alone_LV = model(ids_BL[:1, 3:], mask_BL[:1, 3:])[0].float()
    model.train(was_training)
    size = float(alone_LV.abs().max())
    seen = float((packed_BLV[0] - packed_BLV[1]).abs().max())
    moved = float((packed_BLV[0] - alone_LV).abs().max())
    if not (seen <= _SAME * size and moved <= _CLOSE * size):
        problem = f"examples in one sequence see each other in {name}: scores change by {max(seen, moved):.2g}"
        raise ConfigError(doing, f"{problem} of {size:.2g}", allowed)
