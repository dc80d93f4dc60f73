"""Every sampler says how it is told of refusals, and is told so."""

import json
from dataclasses import replace

import pytest

from dryfit.search.samplers import SEES_REFUSALS, Suggestion, suggest
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SamplerName, SearchSettings, StudyConfig
from dryfit.settings.trial import Outcome, TrialRecord

CONFIG = StudyConfig.model_validate_json(json.dumps({"space": {"train.batch_size": {"low": 1, "high": 512}}}))
SPACE = Space.from_config(CONFIG)


def next_point(history: list[TrialRecord], sampler: SamplerName) -> Suggestion:
    search = SearchSettings(sampler=sampler, startup_trials=2 if sampler is SamplerName.TPE else 10)
    return suggest(
        SPACE,
        history,
        search=search,
        directions=(Direction.MAXIMIZE,),
        points=(),
        seed=1,
        number=len(history),
    )


def history(outcome: Outcome) -> list[TrialRecord]:
    """Small batches complete, large ones end so."""
    space = next_point([], SamplerName.RANDOM)
    (name,) = space.internal
    sizes = range(10, 500, 10)
    return [
        TrialRecord(
            number,
            {name: size},
            space.distributions,
            Outcome.COMPLETE if size < 100 else outcome,
            0.5 if size < 100 else None,
        )
        for number, size in enumerate(sizes)
    ]


def test_every_sampler_has_a_policy() -> None:
    assert set(SEES_REFUSALS) == set(SamplerName) and not SEES_REFUSALS[SamplerName.RANDOM]


def test_tpe_turns_away_from_what_was_refused() -> None:
    refused = next_point(history(Outcome.REFUSED), SamplerName.TPE)
    assert refused == next_point(history(Outcome.PRUNED), SamplerName.TPE)
    size = refused.params["train.batch_size"]
    assert isinstance(size, int) and size < 150


def test_tpe_ranks_what_does_not_fit_by_how_much_it_lacks() -> None:
    """Where nearly nothing has fitted yet, it looks where least was lacking."""
    known = history(Outcome.REFUSED)
    left = [replace(one, excess=one.number - 9.0 if one.outcome is Outcome.REFUSED else None) for one in known[8:]]
    right = [replace(one, excess=50.0 - one.number if one.outcome is Outcome.REFUSED else None) for one in known[8:]]
    sizes = [int(next_point(numbered(each), SamplerName.TPE).params["train.batch_size"]) for each in (left, right)]
    assert sizes[0] < 150 and sizes[1] > 300


def numbered(records: list[TrialRecord]) -> list[TrialRecord]:
    refused_first = sorted(records, key=lambda one: one.outcome is Outcome.COMPLETE)
    return [replace(one, number=number) for number, one in enumerate(refused_first[:-1])]


def test_the_table_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEES_REFUSALS, SamplerName.TPE, False)  # type: ignore[arg-type]
    told = next_point(history(Outcome.REFUSED), SamplerName.TPE)
    assert told == next_point(history(Outcome.CANCELLED), SamplerName.TPE)
