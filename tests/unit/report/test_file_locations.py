"""The files of a study that are named beside its tables."""

import json
from pathlib import Path

import pytest

from dryfit.documents.report_tables import file_locations
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState


@pytest.mark.parametrize(("journal", "named"), [("/somewhere/optuna.journal", True), ("", False)])
def test_a_journal_is_named_where_the_mirror_writes_one(journal: str, named: bool, tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    layout.mirror_status.parent.mkdir()
    layout.mirror_status.write_text(json.dumps({"offset": 7, "journal": journal}))
    found = dict(file_locations(StudyState(), layout))
    assert found.get("Optuna journal") == (Path(journal) if named else None)
    assert "ledger" in found
