"""The results of ``dryfit train``: models, ensembles, and the best configurations over several seeds."""

import math
import statistics
from collections.abc import Sequence

from dryfit.core.jobs.analysis import Analysis
from dryfit.core.settings.trial import Scalar
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.terminal.tables import Table, measured_text, number_text, params_text


class FinalScores(Answer):
    """The scores of configurations that were trained once more.

    Attributes:
        value: The study's metric on validation now; None if validation was trained on.
        validation: Metrics on validation.
        test: Metrics on test; None if the data has no such split.
        rows: Number of rows of each split, and of those trained on as ``trained``; empty of the user's own code.
        analysis: What the model does well and badly on test, or on validation where there are no test rows.
        judgement: Whether it beats the strongest baseline of the study, in sentences; empty where none is known.
    """

    study: str
    metric: str
    with_validation: bool
    value: float | None
    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    analysis: Analysis | None = None
    judgement: tuple[str, ...] = ()


class TrainedModel(FinalScores):
    """A trial's configuration, trained once more.

    Attributes:
        searched: The trial's value in the search; None if it has none.
        step: The optimizer step of the weights.
        steps: Optimizer steps done.
        folder: The saved model, or what the user's own code has left; None if only its scores were asked for, or it has
            left nothing.
    """

    trial: int
    seed: int
    searched: float | None
    step: int
    steps: int
    folder: str | None


class EnsembleMemberScores(View):
    """One model of an ensemble with scores of its own; fields as in :class:`TrainedModel`."""

    trial: int
    seed: int
    params: dict[str, Scalar]
    searched: float | None
    step: int
    validation: dict[str, float] | None
    test: dict[str, float] | None
    folder: str


class TrainedEnsemble(FinalScores):
    """Several configurations, trained once more and averaged.

    Attributes:
        members: Its models, the best of the search first.
        folder: The saved ensemble.
    """

    members: tuple[EnsembleMemberScores, ...]
    folder: str


class SeedSpread(View):
    """Statistics over seeds; ``std`` is the sample standard deviation (n - 1), None for a single value."""

    count: int
    mean: float
    std: float | None
    min: float
    max: float


class SeedRun(View):
    """A configuration's values with one seed, or why there are none."""

    seed: int
    validation: float | None = None
    test: float | None = None
    error: str | None = None


class TopConfiguration(View):
    """One of the best configurations of the search, and its values with several seeds."""

    rank: int
    trial: int
    params: dict[str, Scalar]
    searched: float
    validation: SeedSpread | None
    test: SeedSpread | None
    runs: tuple[SeedRun, ...]


class TopTable(Answer):
    """The best configurations of a study, each trained with several seeds; the best of the search first."""

    study: str
    metric: str
    seeds: tuple[int, ...]
    complete: bool
    configurations: tuple[TopConfiguration, ...]


def spread(values: Sequence[float | None]) -> SeedSpread | None:
    """Return the statistics of the finite values; None if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return SeedSpread(
        count=len(finite),
        mean=statistics.fmean(finite),
        std=statistics.stdev(finite) if len(finite) > 1 else None,
        min=min(finite),
        max=max(finite),
    )


def trained_lines(model: TrainedModel) -> list[str]:
    """Return a few lines on a trained model."""
    how = "train and validation together, for as long as the trial took to its best validation"
    if not model.with_validation:
        how = f"the weights of step {model.step} of {model.steps}, the best validation"
    if "trained" in model.rows:
        how = f"{how} ({model.rows['trained']} rows trained on)"
    else:  # by the user's own code, which may leave something else than its best weights
        how = f"the best value at step {model.step} of {model.steps}"
    lines = [f"trial {model.trial}, seed {model.seed}: {how}"]
    if model.searched is not None:
        lines.append(f"  {model.metric} on validation in the search: {number_text(model.searched)}")
    return [*lines, f"  model: {model.folder}"] if model.folder is not None else lines


def scores_table(model: TrainedModel) -> Table:
    """Return one row for each metric: its values on validation and test."""
    validation, test = model.validation or {}, model.test or {}
    rows = [(name, number_text(validation.get(name)), number_text(test.get(name))) for name in {**validation, **test}]
    return Table(("metric", "validation", "test"), tuple(sorted(rows)))


def ensemble_lines(model: TrainedEnsemble) -> list[str]:
    """Return a few lines on an ensemble."""
    trials = ", ".join(str(member.trial) for member in model.members)
    on = ", each trained on train and validation together" if model.with_validation else ""
    return [f"the mean of {len(model.members)} models, of the trials {trials}{on}", f"  model: {model.folder}"]


def ensemble_table(model: TrainedEnsemble) -> Table:
    """Return one row for each metric and split: the values of the ensemble and of its members."""
    heads = ("metric", "split", "ensemble", *(f"trial {member.trial}" for member in model.members))
    rows: list[tuple[str, ...]] = []
    splits = {
        "validation": [scored.validation or {} for scored in (model, *model.members)],
        "test": [scored.test or {} for scored in (model, *model.members)],
    }
    for split, columns in splits.items():
        names = sorted({name for metrics in columns for name in metrics})
        rows += [(name, split, *(number_text(metrics.get(name)) for metrics in columns)) for name in names]
    return Table(heads, tuple(rows))


def top_table(table: TopTable) -> Table:
    """Return one row for each configuration."""
    heads = ("rank", "trial", "search", "seeds", "validation", "min", "max", "test", "min", "max", "parameters")
    rows = [
        (
            str(row.rank),
            str(row.trial),
            number_text(row.searched),
            f"{sum(run.validation is not None for run in row.runs)}/{len(table.seeds)}",
            *_spread_cells(row.validation),
            *_spread_cells(row.test),
            params_text(row.params),
        )
        for row in table.configurations
    ]
    return Table(heads, tuple(rows))


def _spread_cells(spread: SeedSpread | None) -> tuple[str, str, str]:
    if spread is None:
        return "-", "-", "-"
    return measured_text(spread.mean, spread.std), number_text(spread.min), number_text(spread.max)
