"""What training a study's configurations once more came to: the answers of ``dryfit train``."""

import math
import statistics
from collections.abc import Sequence

from dryfit.core.settings.trial import Scalar
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.terminal.tables import Table, number_text, params_text


class TrainedModel(Answer):
    """One configuration, trained once more.

    Attributes:
        searched: The trial's value in the search; None where it has none.
        value: The study's metric on validation now; None where validation was trained on.
        step: Optimizer steps behind the weights.
        steps: Optimizer steps done.
        validation: Metrics on validation.
        test: Metrics on test; None where the data has no such split.
        rows: Rows of each split, and of what was trained on as ``trained``.
        folder: The saved model; None where its scores alone were wanted.
    """

    study: str
    metric: str
    trial: int
    seed: int
    with_validation: bool
    searched: float | None
    value: float | None
    step: int
    steps: int
    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    folder: str | None


class EnsembleMemberScores(View):
    """One model of an ensemble, and what it is worth by itself; fields as in :class:`TrainedModel`."""

    trial: int
    seed: int
    params: dict[str, Scalar]
    searched: float | None
    step: int
    validation: dict[str, float] | None
    test: dict[str, float] | None
    folder: str


class TrainedEnsemble(Answer):
    """Several configurations, trained once more and averaged; fields as in :class:`TrainedModel`.

    Attributes:
        members: The best of the search first.
    """

    study: str
    metric: str
    with_validation: bool
    value: float | None
    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    members: tuple[EnsembleMemberScores, ...]
    folder: str


class SeedSpread(View):
    """Values of some seeds; ``std`` is that of a sample (n - 1), None for a single value."""

    count: int
    mean: float
    std: float | None
    min: float
    max: float


class SeedRun(View):
    """One seed of a configuration: its values, or why there are none."""

    seed: int
    validation: float | None = None
    test: float | None = None
    error: str | None = None


class TopConfiguration(View):
    """A configuration among the best of the search, and what it is worth with other seeds."""

    rank: int
    trial: int
    params: dict[str, Scalar]
    searched: float
    validation: SeedSpread | None
    test: SeedSpread | None
    runs: tuple[SeedRun, ...]


class TopTable(Answer):
    """The best configurations of a study, each run with several seeds; in the order of the search."""

    study: str
    metric: str
    seeds: tuple[int, ...]
    complete: bool
    configurations: tuple[TopConfiguration, ...]


def spread(values: Sequence[float | None]) -> SeedSpread | None:
    """Mean, spread and range of the values that are there and numbers; None without any."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    return SeedSpread(
        count=len(found),
        mean=statistics.fmean(found),
        std=statistics.stdev(found) if len(found) > 1 else None,
        min=min(found),
        max=max(found),
    )


def trained_lines(model: TrainedModel) -> list[str]:
    """A trained model in a few lines."""
    weights = f"the weights of step {model.step} of {model.steps}"
    how = "train and validation together, for as long as the trial took to its best validation"
    if not model.with_validation:
        how = f"{weights}, the best validation"
    lines = [f"trial {model.trial}, seed {model.seed}: {how} ({model.rows['trained']} rows trained on)"]
    if model.searched is not None:
        lines.append(f"  {model.metric} on validation in the search: {number_text(model.searched)}")
    return [*lines, f"  model: {model.folder}"] if model.folder is not None else lines


def scores_table(model: TrainedModel) -> Table:
    """Every metric on validation and on test."""
    validation, test = model.validation or {}, model.test or {}
    rows = [(name, number_text(validation.get(name)), number_text(test.get(name))) for name in {**validation, **test}]
    return Table(("metric", "validation", "test"), tuple(sorted(rows)))


def ensemble_lines(model: TrainedEnsemble) -> list[str]:
    """An ensemble in a few lines."""
    trials = ", ".join(str(member.trial) for member in model.members)
    on = ", each trained on train and validation together" if model.with_validation else ""
    return [f"the mean of {len(model.members)} models, of the trials {trials}{on}", f"  model: {model.folder}"]


def ensemble_table(model: TrainedEnsemble) -> Table:
    """Every metric of the ensemble on each split, beside those of its members."""
    heads = ("metric", "split", "ensemble", *(f"trial {member.trial}" for member in model.members))
    rows: list[tuple[str, ...]] = []
    splits = {
        "validation": [one.validation for one in (model, *model.members)],
        "test": [one.test for one in (model, *model.members)],
    }
    for split, found in splits.items():
        names = sorted({name for metrics in found for name in metrics or {}})
        rows += [(name, split, *(number_text((metrics or {}).get(name)) for metrics in found)) for name in names]
    return Table(heads, tuple(rows))


def top_table(table: TopTable) -> Table:
    """One row a configuration."""
    heads = ("rank", "trial", "search", "seeds", "validation", "min", "max", "test", "min", "max", "parameters")
    return Table(
        heads,
        tuple(
            (
                str(one.rank),
                str(one.trial),
                number_text(one.searched),
                f"{sum(run.validation is not None for run in one.runs)}/{len(table.seeds)}",
                *_spread_cells(one.validation),
                *_spread_cells(one.test),
                params_text(one.params),
            )
            for one in table.configurations
        ),
    )


def _spread_cells(found: SeedSpread | None) -> tuple[str, str, str]:
    if found is None:
        return "-", "-", "-"
    mean = number_text(found.mean) + (f" ± {found.std:.4f}" if found.std is not None else "")
    return mean, number_text(found.min), number_text(found.max)
