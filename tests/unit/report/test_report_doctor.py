"""A diagnosis as lines that can be searched, and as JSON."""

import json

from dryfit.documents.document import json_text
from dryfit.documents.findings import finding_lines, verdict_document
from dryfit.study.machine_checks import Diagnosis, failed, passed, warned

GOOD, ODD, BAD = (
    passed("machine", "cores", "2"),
    warned("study", "mirror", "gone", "x"),
    failed("data", "rows", "a\n b", "c"),
)


def test_a_line_for_each_check_and_one_for_each_fix() -> None:
    assert list(finding_lines(GOOD)) == ["PASS  machine: cores: 2"]
    assert list(finding_lines(ODD)) == ["WARN  study: mirror: gone", "      fix: x"]
    assert list(finding_lines(BAD)) == ["FAIL  data: rows: a b", "      fix: c"]


def test_the_verdict_counts() -> None:
    assert str(verdict_document(Diagnosis((GOOD, ODD)))) == "ready: 1 passed, 1 to look at, 0 failed"
    assert str(verdict_document(Diagnosis((GOOD, ODD, BAD)))) == "not ready: 1 passed, 1 to look at, 1 failed"
    assert Diagnosis(()).healthy


def test_json_has_a_schema_and_everything() -> None:
    view = json.loads(json_text(Diagnosis((GOOD, BAD))))
    assert view["schema"] == 1
    assert view["healthy"] is False
    assert view["counts"] == {"pass": 1, "warn": 0, "fail": 1}
    assert view["checks"][1] == {"about": "data", "check": "rows", "status": "fail", "found": "a\n b", "fix": "c"}
