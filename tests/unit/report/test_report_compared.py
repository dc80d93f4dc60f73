"""Trials compared over seeds: what is found of rows that were made up, what is said of it, and who reads it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dryfit.documents.comparison import (
    BestIs,
    Comparison,
    Contender,
    SeedOutcome,
    comparison_of,
    comparison_table,
    judgement,
    read_comparison,
)
from dryfit.documents.report import build_page
from dryfit.documents.worth import verdict_of
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.settings.choices import Direction
from dryfit.settings.errors import ConfigError
from dryfit.settings.trial import FoldScore
from dryfit.tasks.scored_rows import RowFacts, ScoredRow, write_rows
from golden import Golden
from ledgers import begun

ROWS = 240
FACTS = {str(row): RowFacts(f"g{row // 2}") for row in range(ROWS)}


def study(values: Sequence[float], metric: str = "accuracy") -> StudyState:
    script = begun(metric=metric)
    for number, value in enumerate(values):
        script.complete(number, {"optim.lr": 1e-4 * (number + 1)}, [value])
    return script.state()


def rows_of(right: np.ndarray) -> list[ScoredRow]:
    """Rows of two classes; where it is right, the loss is less."""
    return [
        ScoredRow(
            str(row),
            {"class": row % 2},
            {"class": row % 2 if ok else 1 - row % 2},
            (0.5, 0.5),
            {"loss": 0.2 if ok else 1.0},
        )
        for row, ok in enumerate(right)
    ]


def contenders(folder: Path, state: StudyState, shares: dict[int, float], *, seeds: int = 4) -> list[Contender]:
    """Runs of the trials named; a trial's share of rows is answered rightly, nearly the same rows with each seed."""
    hard = np.random.default_rng(0).permutation(ROWS) / ROWS
    found: list[Contender] = []
    for number, share in shares.items():
        outcomes: list[SeedOutcome] = []
        for seed in range(seeds):
            noise = np.random.default_rng((number, seed)).normal(0, 0.03, ROWS)
            right = hard + noise < share
            scored = folder / f"trial-{number:04d}-seed-{seed}" / "scored"
            write_rows(scored, "validation", rows_of(right), {})
            outcomes.append(SeedOutcome(seed, float(right.mean()), None, scored))
        found.append(Contender(state.trials[number], tuple(outcomes)))
    return found


def test_what_differs_is_told_from_what_does_not(tmp_path: Path, golden: Golden) -> None:
    state = study([0.80, 0.79, 0.78, 0.77])
    found = comparison_of(state, contenders(tmp_path, state, {0: 0.7, 1: 0.5, 2: 0.7, 3: 0.9}), FACTS)
    assert [(one.trial, one.best_is) for one in found.differences] == [
        (1, BestIs.BETTER),
        (2, BestIs.NOT_TOLD_APART),
        (3, BestIs.WORSE),
    ]
    better = found.differences[0]
    assert better.value is not None and better.low is not None and better.high is not None
    assert 0 < better.low < better.value < better.high < 0.4
    assert better.value == pytest.approx(0.2, abs=0.04)
    assert (better.seeds, better.groups, better.rows, found.grouped) == ((0, 1, 2, 3), ROWS // 2, ROWS, True)
    assert found.trials[1].validation is not None
    assert found.trials[0].validation is not None
    means = found.trials[0].validation.mean - found.trials[1].validation.mean
    assert better.value == pytest.approx(means)
    assert found.notes == ()
    golden("compare", found.judgement, comparison_table(found))


def test_less_loss_is_better(tmp_path: Path) -> None:
    script = begun(metric="loss")
    script.events[0] = script.events[0].model_copy(update={"direction": Direction.MINIMIZE})
    for number in range(2):
        script.complete(number, {"optim.lr": 1e-4 * (number + 1)}, [0.4 + number / 10])
    state = script.state()
    found = comparison_of(state, contenders(tmp_path, state, {0: 0.9, 1: 0.6}), FACTS)
    (one,) = found.differences
    assert one.best_is is BestIs.BETTER and one.value is not None and one.value < 0


def test_runs_that_collapsed_failed_or_lost_their_rows_are_said(tmp_path: Path, golden: Golden) -> None:
    state = study([0.8, 0.7, 0.6])
    every = contenders(tmp_path, state, {0: 0.7, 1: 0.5, 2: 0.5})
    always = [ScoredRow(str(row), {"class": row % 2}, {"class": 1}, (0.4, 0.6)) for row in range(ROWS)]
    write_rows(every[1].outcomes[2].scored, "validation", always, {})
    broken = SeedOutcome(3, None, "it ran out of memory", every[1].outcomes[3].scored)
    every[1] = Contender(every[1].trial, (*every[1].outcomes[:3], broken))
    for outcome in every[2].outcomes[1:]:
        (outcome.scored / "validation.jsonl.gz").write_bytes(b"damaged")
    found = comparison_of(state, every, None, ["said before"])
    assert found.differences[0].seeds == (0, 1, 2)
    assert [run.collapsed is not None for run in found.trials[1].runs] == [False, False, True, False]
    assert found.differences[1].best_is is BestIs.UNKNOWN and found.is_useful
    golden("compare", found.judgement, found.notes, comparison_table(found))


def test_a_metric_that_rows_do_not_give_is_not_compared_and_folds_are_explained(tmp_path: Path, golden: Golden) -> None:
    state = study([0.8, 0.7], metric="my_metric")
    state.trials[0].folds = (FoldScore(0.8, (), 1, 1, 1),)
    found = comparison_of(state, contenders(tmp_path, state, {0: 0.7, 1: 0.5}), FACTS)
    assert not found.is_useful
    golden("compare", found.judgement, found.notes)


def test_the_report_reads_it_while_the_best_trial_is_the_same(tmp_path: Path, golden: Golden) -> None:
    layout, state = StudyLayout(tmp_path), study([0.8, 0.7])
    assert read_comparison(layout, state) is None
    found = comparison_of(state, contenders(layout.finals, state, {0: 0.9, 1: 0.5}), FACTS)
    layout.comparison.write_text(found.model_dump_json(by_alias=True), encoding="utf-8")
    back = read_comparison(layout, state)
    assert back == found and back is not None
    assert read_comparison(layout, study([0.8, 0.7, 0.9])) is None
    assert read_comparison(layout, study([0.8, 0.7], metric="mcc")) is None
    said = verdict_of(state, defaults_first=True, comparison=back)
    golden("report", said.certainty)
    page = build_page(state, ConfigError("reading it", "none"), layout, running=False, now_s=0.0)
    assert [section.anchor for section in page.sections][:3] == ["best", "compared", "history"]
    layout.comparison.write_text("{}", encoding="utf-8")
    assert read_comparison(layout, state) is None


def test_what_many_comparisons_leave_is_said(tmp_path: Path, golden: Golden) -> None:
    state = study([0.8, 0.7])
    one = comparison_of(state, contenders(tmp_path, state, {0: 0.9, 1: 0.5}), FACTS)
    near = one.differences[0].model_copy(update={"best_is": BestIs.NOT_TOLD_APART})
    told = Comparison.model_validate(one.model_dump() | {"differences": [near, near.model_copy()]})
    golden("compare", judgement(told))
