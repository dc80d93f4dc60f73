"""A ledger whose lines are valid one by one and wrong together: an error that names the line, never a wrong state."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import LedgerError
from dryfit.settings.trial import Outcome
from dryfit.study.session import read_study
from study_runs import run_here

OLDER = Path(__file__).parents[2] / "older_studies" / "0.1.0"
Line = dict[str, Any]


def lines_of(name: str) -> list[Line]:
    return [json.loads(line) for line in (OLDER / name / "ledger.jsonl").read_text().splitlines()]


def numbered(lines: list[Line]) -> list[Line]:
    """The lines as a writer would number them: what is wrong is not their order."""
    return [{**line, "seq": index} for index, line in enumerate(lines)]


def doubled(lines: list[Line], at: int) -> list[Line]:
    return [*lines[: at + 1], lines[at], *lines[at + 1 :]]


def dropped(lines: list[Line], at: int) -> list[Line]:
    return lines[:at] + lines[at + 1 :]


def with_key(key: str, value: int) -> Callable[[list[Line], int], list[Line]]:
    def change(lines: list[Line], at: int) -> list[Line]:
        return [{**line, key: value} if index == at and key in line else line for index, line in enumerate(lines)]

    change.__name__ = f"{key} {value}"
    return change


CHANGES = [
    doubled,
    dropped,
    *(with_key(key, value) for key in ("number", "attempt", "n", "generation") for value in (-1, 0, 7, 10**12)),
]


def study(folder: Path, lines: list[Line]) -> StudyState:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in numbered(lines))
    (folder / "ledger.jsonl").write_text(text, encoding="utf-8")
    return read_study(StudyLayout(folder))


def mutants(lines: list[Line], change: Callable[[list[Line], int], list[Line]]) -> Iterator[tuple[int, list[Line]]]:
    for at in range(len(lines)):
        changed = change(lines, at)
        if changed != lines:
            yield at, changed


def sound(state: StudyState) -> None:
    """What is still read is a state that a study can have."""
    assert [trial.number for trial in state.trials] == list(range(len(state.trials)))
    assert sum(state.counts.values()) <= len(state.trials)
    for trial in state.trials:
        assert trial.outcome in (None, *Outcome)
        numbers = [point.n for point in trial.reports]
        assert numbers == sorted({*numbers}) and {*trial.verdicts} <= {*numbers}


@pytest.mark.parametrize(
    "name",
    [
        "criteria",
        "objective",
        *(
            pytest.param(path.name, marks=pytest.mark.slow)
            for path in sorted(OLDER.iterdir())
            if path.name not in ("criteria", "objective")
        ),
    ],
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_ledger_is_read_or_refused_with_its_line(
    name: str, change: Callable[[list[Line], int], list[Line]], tmp_path: Path
) -> None:
    lines = lines_of(name)
    study(tmp_path / "whole", lines)
    for at, changed in mutants(lines, change):
        try:
            state = study(tmp_path / "changed", changed)
        except LedgerError as error:
            unnamed = [] if "line" in error.doing or "there is none" in error.found else [str(error)]
        else:
            unnamed = []
            sound(state)
        assert not unnamed, at


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("study_created", doubled, "a second time"),
        ("trial_finished", doubled, "has finished before"),
        ("trial_finished", with_key("number", -1), "no trial -1"),
        ("attempt_placed", with_key("attempt", 7), "attempt 7 comes where 1 belongs"),
        ("attempt_ended", doubled, "has ended before"),
        ("report", doubled, "comes after report"),
        ("verdict", with_key("n", 10**12), "has no report"),
        ("trial_asked", dropped, "no trial 0 was asked for"),
        ("trial_asked", doubled, "belongs"),
    ],
)
def test_commands_name_the_line_and_change_nothing(
    kind: str, change: Callable[[list[Line], int], list[Line]], said: str, tmp_path: Path
) -> None:
    lines = lines_of("criteria")
    at = next(index for index, line in enumerate(lines) if line["type"] == kind)
    with pytest.raises(LedgerError, match=said):
        study(tmp_path, change(lines, at))
    before = (tmp_path / "ledger.jsonl").read_bytes()
    for command in (
        ("status", tmp_path),
        ("show", tmp_path, "0"),
        ("export", tmp_path, "--to", "csv", "--output", tmp_path / "out.csv"),
    ):
        done = run_here(*command)
        assert done.returncode == 2, (command, done.stderr)
        assert "[LEDGER]" in done.stderr and "line" in done.stderr
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert not (tmp_path / "out.csv").exists()
