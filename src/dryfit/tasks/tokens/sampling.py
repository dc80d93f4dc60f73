"""Which windows an epoch trains on, and which of a model's two heads each of them trains.

Dimension suffix: ``W`` windows.
"""

from dataclasses import dataclass

import torch

from dryfit.core.seeds import derive_seed


def epoch_windows(has_span_W: torch.Tensor, negatives: float, *, seed: int, epoch: int) -> torch.Tensor:
    """Windows of one epoch, ascending: all with a span, and some of the others, drawn anew for each epoch.

    A pure function, so that a resumed trial goes on with the same windows; every epoch has as many.

    Args:
        has_span_W: Which windows have a gold span.
        negatives: Windows without one for each with one, as far as there are so many.
        seed: Seed of the trial's batch order.
        epoch: From 0.
    """
    with_span, without = has_span_W.nonzero()[:, 0], (~has_span_W).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(derive_seed(seed, "negatives", epoch))
    drawn = torch.randperm(len(without), generator=generator)[: round(negatives * len(with_span))]
    return torch.cat([with_span, without[drawn]]).sort().values


@dataclass(frozen=True, slots=True)
class Roles:
    """What each window trains in an epoch: the head of classes, that of spans, both, or none.

    Attributes:
        classes_W: Which windows train the class.
        spans_W: Which train the span.
    """

    classes_W: torch.Tensor
    spans_W: torch.Tensor


def epoch_roles(
    has_span_W: torch.Tensor, *, criteria_share: float | None, negatives: float | None, seed: int, epoch: int
) -> Roles:
    """Draw what each window trains, anew for each epoch.

    Windows with a gold span and those without are divided alike. Where there are two or more of a kind, each head gets
    some. A pure function, so that a resumed trial goes on with the same; every epoch has as many of each.

    Args:
        has_span_W: Which windows have a gold span.
        criteria_share: Share of the windows that train the class; the others train the span. None: all train both.
        negatives: Windows without a span that train the span for each with one that does, as far as there are so many;
            None: all.
        seed: Seed of the trial's batch order.
        epoch: From 0.
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
    return Roles(classes_W, spans_W)


def _cut(count: int, share: float) -> int:
    """That share of so many, but neither none nor all of them where there are two or more."""
    return min(max(round(share * count), 1), count - 1) if count > 1 else round(share * count)
