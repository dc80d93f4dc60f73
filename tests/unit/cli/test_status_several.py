"""``dryfit status A B``: a row for each study, one object with ``--json``; the nearest name of a mistyped command."""

import json
import re
from pathlib import Path

import pytest

import dryfit
import ledgers
from dryfit.settings.errors import ExitStatus
from study_runs import run_here


def test_each_study_has_a_row(tmp_path: Path) -> None:
    first, second = ledgers.done(tmp_path / "first", 0.5, 0.75), ledgers.done(tmp_path / "second", 0.25)
    done = run_here("status", first, second)
    assert (done.returncode, done.stderr) == (0, "")
    heads, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    told = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [(one["study"], one["complete"], one["of"], one["now"]) for one in told] == [
        ("first", "2", "40", "not running"),
        ("second", "1", "40", "not running"),
    ]
    assert "0.75" in told[0]["best"] and "0.25" in told[1]["best"]
    assert [one["folder"] for one in told] == [str(first), str(second)]


def test_json_has_the_summary_of_each_in_the_order_given(tmp_path: Path) -> None:
    folders = [ledgers.done(tmp_path / name, 0.5) for name in ("b", "a")]
    answer = json.loads(run_here("status", *folders, "--json").stdout)
    assert (answer["schema"], answer["status"]) == (1, 0)
    for folder, one in zip(folders, answer["studies"], strict=True):
        assert (one["folder"], one["owner"], one["error"]) == (str(folder), None, None)
        assert one["summary"] == json.loads(dryfit.status(folder).model_dump_json(by_alias=True))
    # One study is answered as ever.
    assert json.loads(run_here("status", folders[0], "--json").stdout)["study"] == "b"


def test_a_study_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    good, broken = ledgers.done(tmp_path / "good", 0.5), ledgers.done(tmp_path / "broken", 0.5)
    ledger = broken / "ledger.jsonl"
    ledger.write_text("no JSON\n" + ledger.read_text("utf-8"), encoding="utf-8")
    done = run_here("status", broken, good, tmp_path / "nowhere")
    assert done.returncode == ExitStatus.CANNOT_RUN
    rows = [line.split("\t") for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["-", "good", "-"]
    assert "line 1" in done.stderr and "no ledger.jsonl" in done.stderr and "Traceback" not in done.stderr
    answer = json.loads(run_here("status", broken, good, "--json").stdout)
    assert [one["summary"] is None for one in answer["studies"]] == [True, False]
    assert answer["status"] == 2 and "[LEDGER]" in answer["studies"][0]["error"]


def test_several_are_not_watched(tmp_path: Path) -> None:
    done = run_here("status", tmp_path, tmp_path, "--watch")
    assert done.returncode == ExitStatus.CANNOT_RUN and "--watch with one study" in done.stderr


@pytest.mark.parametrize(("typed", "nearest"), [("statu", "status"), ("dctor", "doctor"), ("expotr", "export")])
def test_a_mistyped_command_is_answered_with_the_nearest(typed: str, nearest: str) -> None:
    done = run_here(typed)
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert re.search(f"Did you mean '?{nearest}", done.stderr), done.stderr


def test_a_mistyped_option_is_answered_with_the_nearest() -> None:
    done = run_here("tune", "--dry-rn", "study.toml")
    assert done.returncode == ExitStatus.CANNOT_RUN and "--dry-run" in done.stderr
