"""A trial that is trained to its end is complete in a study, whatever its pruner thinks of it."""

from pathlib import Path

import pytest

from dryfit.ledger.replay import StudyState
from dryfit.settings.trial import Outcome
from kill_points import REPORTS, study_session


def searched(patch: pytest.MonkeyPatch, folder: Path, warmup: int) -> StudyState:
    """A search whose only rung lies at the report behind the warm-up."""
    search = {"sampler": "random", "pruner": "asha", "warmup_reports": warmup, "reduction": 2, "mirror": "none"}
    space = {"train.batch_size": [8], "train.max_length": [32], "head.hidden": [128], "head.layers": [1]}
    return study_session(patch, folder, {"study": {"seed": 3, "trials": 8}, "search": search, "space": space}).state


def test_at_the_last_report_nothing_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = searched(monkeypatch, tmp_path / "before", warmup=REPORTS - 2)
    assert Outcome.PRUNED in {trial.outcome for trial in before.trials}
    state = searched(monkeypatch, tmp_path / "last", warmup=REPORTS - 1)
    told = [trial for trial in state.trials if trial.reports]
    assert len(told) >= 6
    assert {trial.outcome for trial in told if len(trial.reports) == REPORTS} == {Outcome.COMPLETE}
    verdicts = [trial.verdicts[REPORTS - 1] for trial in told if trial.outcome is Outcome.COMPLETE]
    spared = [verdict for verdict in verdicts if "but trained to its end" in verdict.reason]
    assert spared and all(verdict.proceed for verdict in verdicts)
    kept = [one for one in state.history() if one.outcome is Outcome.COMPLETE]
    assert all(one.system_attrs for one in kept)  # whoever comes later is compared with the rungs of all
