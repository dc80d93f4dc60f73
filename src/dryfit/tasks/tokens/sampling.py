"""Sampling of windows for an epoch, and of the heads that each window trains.

Dimension suffix: ``W`` windows.
"""

import torch

from dryfit.core.seeds import derive_seed


def epoch_windows(has_span_W: torch.Tensor, negatives: float, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the windows of one epoch, ascending: all with a span, and others drawn anew for each epoch.

    A pure function, so that a resumed trial continues with the same windows; every epoch has as many.

    Args:
        has_span_W: Which windows have a gold span.
        negatives: Windows without a span for each with one, as far as there are enough.
        seed: Seed of the trial's batch order.
        epoch: From 0.
    """
    with_span, without = has_span_W.nonzero()[:, 0], (~has_span_W).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(derive_seed(seed, "negatives", epoch))
    drawn = torch.randperm(len(without), generator=generator)[: round(negatives * len(with_span))]
    return torch.cat([with_span, without[drawn]]).sort().values


def epoch_roles(
    has_span_W: torch.Tensor, *, criteria_share: float | None, negatives: float | None, seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw which heads each window trains, anew for each epoch.

    Windows with a gold span and those without are divided separately. Of two or more windows of a kind, each head gets
    some. A pure function, so that a resumed trial continues with the same; every epoch has as many of each.

    Args:
        has_span_W: Which windows have a gold span.
        criteria_share: Share of the windows that train the class; the others train the span. None: all train both.
        negatives: Windows without a span that train the span, for each with one that does, as far as there are enough;
            None: all.
        seed: Seed of the trial's batch order.
        epoch: From 0.

    Returns:
        Which windows train the class, and which the span; both, or none, are possible.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "roles", epoch))
    classes_W, spans_W = torch.zeros_like(has_span_W), torch.zeros_like(has_span_W)
    of_spans: list[torch.Tensor] = []
    for group in (has_span_W.nonzero()[:, 0], (~has_span_W).nonzero()[:, 0]):
        drawn = group[torch.randperm(len(group), generator=generator)]
        cut = 0 if criteria_share is None else _cut(len(group), criteria_share)
        classes_W[drawn if criteria_share is None else drawn[:cut]] = True
        of_spans.append(drawn[cut:])
    with_span, without = of_spans
    kept = without if negatives is None else without[: round(negatives * len(with_span))]
    spans_W[torch.cat([with_span, kept])] = True
    return classes_W, spans_W


def _cut(count: int, share: float) -> int:
    """Return that share of a count; of two or more neither none nor all."""
    return min(max(round(share * count), 1), count - 1) if count > 1 else round(share * count)
