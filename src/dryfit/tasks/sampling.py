"""Which windows an epoch trains on, where there are too many without a span.

Dimension suffix: ``W`` windows.
"""

import torch

from dryfit.core.seeds import derive_seed


def epoch_windows(has_span_W: torch.Tensor, negatives: float | None, *, seed: int, epoch: int) -> torch.Tensor:
    """Windows of one epoch, ascending: all with a span, and some of the others, drawn anew for each epoch.

    A pure function, so that a resumed trial goes on with the same windows; every epoch has as many.

    Args:
        has_span_W: Which windows have a gold span.
        negatives: Windows without one for each with one, as far as there are so many; None: all.
        seed: Seed of the trial's batch order.
        epoch: From 0.
    """
    if negatives is None:
        return torch.arange(len(has_span_W))
    with_span, without = has_span_W.nonzero()[:, 0], (~has_span_W).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(derive_seed(seed, "negatives", epoch))
    drawn = torch.randperm(len(without), generator=generator)[: round(negatives * len(with_span))]
    return torch.cat([with_span, without[drawn]]).sort().values
