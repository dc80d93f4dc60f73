"""What each sampler is told of trials that were refused because they do not fit."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from dryfit.config.schema import SamplerName


class RefusalTold(StrEnum):
    """How a refused trial enters a sampler's history."""

    AS_PRUNED = "as_pruned"
    """As pruned without a report: below every trial that ran. TPE then turns away from what does not fit; told as
    failed, or not at all, it would propose it again and again."""
    NOT_TOLD = "not_told"
    """Left out: the sampler reads no history, or only complete trials. Asking again is cheap."""


REFUSALS: Final[Mapping[SamplerName, RefusalTold]] = {
    SamplerName.TPE: RefusalTold.AS_PRUNED,
    SamplerName.RANDOM: RefusalTold.NOT_TOLD,
}
"""Every sampler has its row."""
