"""What a sampler may read to draw the parameters of one trial, and which trials it sees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from dryfit.config.schema import SamplerName, SearchSettings
from dryfit.core.seeds import derive_seed
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Scalar
from dryfit.search.sampling.gp_handle import GpQuestion, ask_once
from dryfit.search.space.params import Distribution
from dryfit.search.space.space import Space
from dryfit.store.history import History

FreeParams: TypeAlias = Mapping[str, Distribution]
"""The parameters of one group that have more than one value, by internal name."""

Draw: TypeAlias = Callable[[FreeParams], Mapping[str, Scalar]]
"""Draws a group of parameters."""


SEES_REFUSALS: Final[Mapping[SamplerName, bool]] = {
    SamplerName.TPE: True,
    SamplerName.RANDOM: False,
    SamplerName.QMC: False,
    SamplerName.NSGA2: False,
    SamplerName.GP: True,
    SamplerName.CMAES: False,
}
"""Whether a sampler sees refused trials, as infeasible ones, which rank below every trial that ran.

TPE and the Gaussian process then turn away from what does not fit; if they were failed or hidden it would be proposed
again and again. The others read no history, or only complete trials, and asking them again is cheap."""


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The input of a sampler that draws the parameters of one trial.

    Attributes:
        space: What may be drawn.
        history: The trials so far.
        search: The sampler's settings.
        directions: Whether each goal is maximised or minimised.
        seed: The study's seed.
        number: The number of the next trial.
        ask_gp: Asks the process of Gaussian processes; None where it gives no answer.
    """

    space: Space
    history: History
    search: SearchSettings
    directions: tuple[Direction, ...]
    seed: int
    number: int
    ask_gp: Callable[[GpQuestion], Mapping[str, Scalar] | None] = ask_once

    @property
    def trial_seed(self) -> int:
        """The seed of this trial's draws."""
        return derive_seed(self.seed, "suggest", self.number)

    @property
    def sees_refusals(self) -> bool:
        """Whether the sampler sees refused trials."""
        return SEES_REFUSALS[self.search.sampler]

    def unconditional(self) -> dict[str, Distribution]:
        """Return the parameters that every trial has and that have more than one value, by internal name."""
        every = (param for param in self.space.params if not param.when and not param.distribution.single())
        return {param.internal: param.distribution for param in every}
