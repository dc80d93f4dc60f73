"""The answer of ``dryfit compare``: the best trials over several seeds, each beside the best; and its file."""

from enum import StrEnum

from pydantic import Field, ValidationError

from dryfit.core.regular_files import contents
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Scalar
from dryfit.reporting.data.final_results import SeedSpread
from dryfit.reporting.data.json_view import Answer, View
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState


class BestIs(StrEnum):
    """How the best trial stands to another one."""

    BETTER = "better"
    WORSE = "worse"
    NOT_TOLD_APART = "not_told_apart"
    UNKNOWN = "unknown"


class ComparedRun(View):
    """A configuration trained with one seed."""

    seed: int
    value: float | None = Field(
        description="the study's metric on validation; null: the run failed, or it is no number"
    )
    collapsed: str | None = Field(description="in words how it gave all rows the same answer; null: it did not")
    error: str | None = Field(description="why there is no value")
    folder: str = Field(description="its folder under final/")


class ComparedTrial(View):
    """One of the best configurations of the search, trained with several seeds."""

    rank: int
    trial: int
    params: dict[str, Scalar]
    searched: float = Field(description="its value in the search")
    collapsed: bool = Field(description="whether it had collapsed in the search")
    validation: SeedSpread | None = Field(description="over the seeds; null: no run has a value")
    runs: tuple[ComparedRun, ...]


class TrialDifference(View):
    """The best trial of the search beside another one, on the same rows with the same seeds."""

    trial: int = Field(description="the other one")
    best_is: BestIs = Field(description="better and worse: also after Holm's correction for all comparisons")
    value: float | None = Field(description="metric of the best trial minus that of the other, mean over the seeds")
    low: float | None = Field(
        description="lower end of its 95 % interval, of this comparison alone; null: too few groups"
    )
    high: float | None = Field(description="upper end")
    seeds: tuple[int, ...] = Field(description="those with which both have rows")
    groups: int = Field(description="groups of rows that were drawn from; without known groups, rows")
    rows: int = Field(description="rows that both have")
    why: str | None = Field(description="why the two cannot be compared")

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval of this comparison alone is of one sign."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Comparison(Answer):
    """The best trials of a study over several seeds; the best of the search first."""

    study: str
    metric: str
    direction: Direction
    generation: int = Field(description="of the study")
    best: int = Field(description="the best trial of the search, which the others are compared with")
    seeds: tuple[int, ...]
    grouped: bool = Field(description="whether the groups of rows are known; else each row counts as one")
    trials: tuple[ComparedTrial, ...]
    differences: tuple[TrialDifference, ...]
    judgement: tuple[str, ...] = Field(default=(), description="what this means, in sentences")
    notes: tuple[str, ...] = Field(description="what limits it")

    @property
    def is_useful(self) -> bool:
        """Whether any two trials could be compared."""
        return any(one.best_is is not BestIs.UNKNOWN for one in self.differences)


def read_comparison(layout: StudyLayout, state: StudyState) -> Comparison | None:
    """Return the comparison that was made last; None without one, or where another trial was the best then."""
    data = contents(layout.comparison)
    if data is None or not state.ranked:
        return None
    try:
        found = Comparison.model_validate_json(data)
    except ValidationError:
        return None  # of another version: it can be made again
    now = (state.goals[0].name, len(state.generations), state.ranked[0].number)
    return found if (found.metric, found.generation, found.best) == now else None
