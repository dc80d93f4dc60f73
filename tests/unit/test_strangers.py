"""The list of strangers' scripts, what counts as an answer, and the table: without running any."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "strangers"
sys.path.insert(0, str(FOLDER))

from strangers_list import PARTS, Kind, Row, counts, differing, estimate, kind_of, reason, rows_of  # noqa: E402
from strangers_page import BEGIN, END, render, with_table  # noqa: E402

LIST = tomllib.loads((FOLDER / "rows.toml").read_text("utf-8"))
ROWS = rows_of(LIST)
MAKERS = set(re.findall(r"^    def (\w+)", (FOLDER / "stranger_inputs.py").read_text("utf-8"), re.MULTILINE))
HUB = (FOLDER / "stranger_hub.py").read_text("utf-8")
HAND = {"n": "10 + 2*3", "weights": "4*n", "gradients": "4*n", "optimizer": "2*weights", "activation": "2**20"}
LARGE = {"weights": "100*2**20", "gradients": "0", "optimizer": "0", "activation": "1"}
GOOD = {
    "fits": True,
    "peak_allocated_bytes": 3 * 2**29,
    "peak_line": "/x/W/checkouts/repo/train.py:7",
    "steps": [{"number": 1}],
    "required_bytes": 2**31,
    "capacity_bytes": 2**34,
    "shortfall_bytes": 0,
    "at_least": False,
    "by_category": {"weights": 2**20, "optimizer": 2**21},
    "torch": "2.13.0",
}


def record(**answer):
    return {"row": "a", "when": "2026-01-02T03:04:05", "dryfit": "abc", "seconds": 12.3, "answer": GOOD | answer}


def row(name="a", by_hand=HAND, **more):
    return Row(
        name=name, repository="me/repo", commit="c" * 40, command="train.py", device="16GiB", **more, by_hand=by_hand
    )


def test_the_list_has_its_rows_and_each_is_well_formed():
    assert len(ROWS) >= 90
    for one in ROWS:
        assert re.fullmatch(r"[a-z0-9_]+", one.name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.repository) and re.fullmatch(r"[0-9a-f]{40}", one.commit)
        assert one.command and one.device
        sizes = estimate(one.by_hand)
        assert set(sizes) == set(PARTS) and sizes["weights"] > 0 and sizes["activation"] > 0
        for spec in one.makes:
            maker, *words = spec.split()
            assert maker in MAKERS, one.name
            assert maker not in ("model", "data") or f'"{words[0]}"' in HUB, one.name


def test_a_row_that_is_not_well_formed_is_told_by_its_name():
    entry = {"name": "a", "repository": "me/repo", "command": "train.py", "device": "16GiB", "by_hand": HAND}
    commits = {"me/repo": "c" * 40}
    assert rows_of({"commits": commits, "row": [entry]})[0].checkout == "repo"
    for wrong in (
        {"repository": "you/repo"},
        {"size": 3},
        {"by_hand": HAND | {"weights": "4*m"}},
        {"by_hand": HAND | {"weights": "open('x')"}},
        {"by_hand": {"weights": "1"}},
        {"apart": {"gradients": "freed"}},
        {"command": "'never closed"},
    ):
        with pytest.raises(ValueError, match="a: "):
            rows_of({"commits": commits, "row": [entry | wrong]})
    with pytest.raises(ValueError, match="same name: a"):
        rows_of({"commits": commits, "row": [entry, entry]})


def test_an_estimate_is_arithmetic_of_what_stands_before():
    assert estimate(HAND) == {"weights": 64, "gradients": 64, "optimizer": 128, "activation": 2**20}


def test_what_decides_how_a_row_runs_changes_its_key_and_an_estimate_does_not():
    other = Row(**{name: getattr(row(), name) for name in ("name", "repository", "commit", "command", "device")})
    assert row().key == other.key != row(options="--ranks 2").key
    assert row().words("/w") == ["train.py"]


def test_an_answer_has_a_verdict_a_peak_with_its_line_and_a_step():
    assert kind_of(record()) is Kind.FITS
    assert kind_of(record(fits=False)) is Kind.DOES_NOT_FIT
    for lacking in ({"peak_line": ""}, {"peak_allocated_bytes": None}, {"steps": []}, {"fits": None}):
        assert kind_of(record(**lacking)) is Kind.NO_ANSWER
    assert kind_of(record(fits=None, at_least=True, least_bytes=2**31)) is Kind.NO_ANSWER
    assert kind_of(record(fits=None, least_bytes=int(2**31 * 0.95))) is Kind.BETWEEN
    assert kind_of(record(fits=None, least_bytes=2**30)) is Kind.NO_ANSWER
    assert kind_of(None) is Kind.NOT_RUN
    assert kind_of({"not_run": "no checkout"}) is Kind.NOT_RUN
    assert kind_of({"seconds": 210, "ended": "killed"}) is Kind.NO_ANSWER


def test_a_row_is_too_slow_by_its_cpu_seconds_and_not_by_the_clock():
    slow, loaded = record() | {"cpu_seconds": 180.5}, record() | {"cpu_seconds": 170.4, "seconds": 400}
    assert (kind_of(slow), kind_of(loaded)) == (Kind.NO_ANSWER, Kind.FITS)
    assert reason(slow) == "too slow: over 180 CPU seconds"
    assert "| 170 (400) |" in render([row()], {"a": loaded}, working="/x/W")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CPU seconds are read from /proc")
def test_cpu_seconds_are_those_of_all_that_a_command_started_orphans_too():
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}], start_new_session=True)"
    counts = (
        "import subprocess, sys, time; from strangers_cpu import Spent; spent = Spent(); "
        f"subprocess.run([sys.executable, '-c', {starts!r}], check=True)\n"
        "until = time.monotonic() + 60\n"
        "while spent.seconds() < 0.5 and time.monotonic() < until: time.sleep(0.05)\n"
        "print(0.5 <= spent.seconds() < 5, Spent().seconds() < 5)"
    )
    done = subprocess.run([sys.executable, "-c", counts], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize(
    ("mib", "share", "quantised"), [(98.1, None, False), (97, -0.03, False), (103, 0.03, False), (96, None, True)]
)
def test_what_is_counted_otherwise_than_by_hand_is_marked(mib, share, quantised):
    found = record(by_category={"weights": (mib - 1) * 2**20, "adapters": 2**20, "optimizer": 1000})
    one = row(by_hand=LARGE, quantised=quantised, apart={"weights": "half of them are shared"})
    expected = {} if share is None else {"weights": pytest.approx(share)}
    assert differing(one, found) == expected
    table = render([one], {"a": found}, working="/x/W")
    said = "Counted otherwise than by hand: `a` (weights: half of them are shared)."
    assert (said in table) is (f"**weights {share or 0:+.0%}**" in table) is bool(expected)
    assert "no reason is known" in render([row(by_hand=LARGE)], {"a": record()}, working="/x/W")


def test_the_reason_of_a_row_without_an_answer_is_one_line():
    text = 'Traceback:\n  File "x", line 1\nValueError: of | the\nscript'
    failed = record(fits=None, reasons=["the script failed by itself"], traceback=text)
    assert reason(failed) == r"the script failed by itself: ValueError: of \| the"
    assert reason({"status": 2, "stderr": "a\nlast words\n"}) == "last words"
    assert reason({"status": 2, "ended": "killed after 210 s", "stderr": "x"}) == "killed after 210 s"


def test_the_table_has_every_row_and_counts_on_top():
    by_hand = {"weights": "2**20", "gradients": "0", "optimizer": "2**21", "activation": "2**20"}
    rows = [row("a", by_hand), row("b", by_hand), row("c", by_hand, folder="sub"), row("d", by_hand)]
    found = {
        "a": record(),
        "b": record(fits=False, shortfall_bytes=2**33, at_least=True),
        "c": {"row": "c", "not_run": "no package x"},
        "d": record(fits=None, reasons=["unknown"], steps=[]),
    }
    table = render(rows, found, working="/x/W")
    assert table.startswith(
        "**4 rows; 3 were run: 2 answered (67 %) (1 fits, 1 does not fit), 1 not; 1 not run.** "
        "Run 2026-01-02 by dryfit abc (3 rows), torch 2.13.0."
    )
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    hand, rest = "1.0 / 0.0 / 2.0", "1.0 / 0.0 / 2.0 | 1.0 |"
    line = "1.50 | `repo/train.py:7` | (12)"
    assert lines[0] == f"| `a` | me/repo | 16GiB | fits | 2.00 | {line} | {hand} | {rest}"
    assert lines[1] == f"| `b` | me/repo | 16GiB | does not fit | at least 24.00 | {line} | {hand} | {rest}"
    assert lines[2] == f"| `c` | me/repo, `sub` | 16GiB | not run | | | no package x | | {hand} | | 1.0 |"
    assert lines[3] == f"| `d` | me/repo | 16GiB | no answer | | | unknown | (12) | {hand} | | 1.0 |"
    assert counts([Kind.NOT_RUN]) == "1 rows; 0 were run: 0 answered, 0 not; 1 not run"


def test_the_page_holds_a_table_of_the_list():
    page = (ROOT / "docs" / "strangers.md").read_text("utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert with_table(page, table) == page
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == [one.name for one in ROWS]
