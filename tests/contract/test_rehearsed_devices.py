"""One rehearsal for several devices says of each, to the byte, what a rehearsal for this device alone says."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from dryfit.documents.rehearsals import rehearsal_json
from dryfit.settings.device_answers import DeviceAnswer, DeviceAnswers
from dryfit.settings.devices import parse_devices
from dryfit.settings.rehearsal_messages import RehearsalAnswer, ScriptEnd
from dryfit.study.largest import largest_value
from dryfit.study.rehearsals import RehearsalOptions, read_command, rehearse_command, rehearse_devices
from rehearsed import PROGRAMS

pytestmark = pytest.mark.slow

NOT_COMPARED = ("planner_s", "host_peak_bytes", "timeline")  # frees come in the garbage collector's order
ASKS = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
rows = {rows}
for _ in range(4):
    model(torch.randn(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CASES: dict[str, tuple[list[str], str, int]] = {
    "fits, short of its margin, out of memory": (
        ["plain_loop.py", "--width", "512", "--layers", "8", "--batch", "64"],
        "rtx4090,1300MiB@8.9,1240MiB@8.9,1100MiB@8.9,24GiB@8.0",
        3,
    ),
    "all are too small": (
        ["plain_loop.py", "--width", "512", "--layers", "8", "--batch", "64"],
        "1100MiB,1080MiB,1GiB",
        2,
    ),
    "a script that catches the error": (["halves_batch.py", "--batch", "65536"], "8GiB,640MiB,600MiB", 3),
}


def alone(words: list[str], one: DeviceAnswer) -> RehearsalAnswer:
    return rehearse_command(read_command(words), RehearsalOptions(device=one.device.name))


def view(answer: RehearsalAnswer) -> dict[str, Any]:
    answer = answer.model_copy(update={"run": answer.run and answer.run.model_copy(update={"batches_per_s": None})})
    made = cast("dict[str, Any]", rehearsal_json(answer, with_timeline=True))
    return json.loads(json.dumps({key: value for key, value in made.items() if key not in NOT_COMPARED}, default=str))


def together(words: list[str], devices: str) -> DeviceAnswers:
    seen = rehearse_devices(read_command(words), RehearsalOptions(), parse_devices([devices]))
    assert [one.device.name for one in seen.answers] == devices.split(",")
    return seen


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly) if case == "all are too small" else case for case in CASES]
)
def test_each_device_has_the_answer_of_a_rehearsal_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (program, *arguments), devices, rehearsals = CASES[case]
    words = [str(PROGRAMS / program), *arguments]
    seen = together(words, devices)
    assert seen.rehearsals == rehearsals
    assert any(not one.fits or one.answer.out_of_memory for one in seen.answers)
    for one in seen.answers:
        assert view(one.answer) == view(alone(words, one)), one.device.name
    if case == "a script that catches the error":
        small = seen.answers[1].answer
        assert small.out_of_memory[0].caught and small.end is not ScriptEnd.OUT_OF_MEMORY


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ("int(torch.cuda.get_device_properties(0).total_memory // 2**22)", "its memory"),
        ("torch.cuda.mem_get_info()[1] // 2**22", "its free memory"),
        ("64 * len(torch.cuda.get_device_name())", "its name"),
    ],
)
def test_a_script_that_asks_for_the_device_is_rehearsed_on_each(tmp_path: Path, rows: str, what: str) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS.format(rows=rows))
    seen = together([str(script)], "rtx4090,l4")
    assert [one.recorded_on for one in seen.answers] == ["rtx4090", "l4"]
    assert seen.answers[1].apart == f"the script asks for {what} at {script}:5"
    assert view(seen.answers[1].answer) == view(alone([str(script)], seen.answers[1]))
    assert len({one.left_over_bytes for one in seen.answers}) == 2


def test_what_all_devices_of_an_architecture_answer_alike_needs_no_other_rehearsal(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        ASKS.format(rows="64 * torch.cuda.get_device_capability()[0] + torch.cuda.memory_allocated() % 7")
    )
    seen = together([str(script)], "rtx4090,l4,rtx4070")
    assert seen.rehearsals == 1 and {one.recorded_on for one in seen.answers} == {"rtx4090"}


def test_a_script_that_cannot_run_is_not_tried_for_each_device(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise KeyError('here')\n")
    seen = together([str(script)], "rtx4090,l4,rtx4070")
    assert (seen.rehearsals, seen.ran, seen.fits) == (1, False, False)


ROWS = """
import sys
import torch
rows = dict(word.split("=") for word in sys.argv[1:])["data.rows"]
if int(rows) > 4:
    raise ValueError("no so many rows")
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    model(torch.randn(int(rows) * 2048, 4096, device="cuda")).relu().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_largest_value_is_what_a_scan_finds(tmp_path: Path) -> None:
    script = tmp_path / "rows.py"
    script.write_text(ROWS)
    devices = parse_devices(["1300MiB,1350MiB,24GiB"])
    seen = largest_value([str(script), "data.rows=2"], "data.rows", RehearsalOptions(), devices)
    commands = [read_command([str(script), f"data.rows={number}"]) for number in range(1, 6)]
    scan = [rehearse_devices(command, RehearsalOptions(), devices) for command in commands]
    for at, one in enumerate(seen):
        fits = [n for n, answers in enumerate(scan, 1) if answers.answers[at].fits]
        assert one.largest is not None and fits == list(range(1, one.largest.value + 1))
        assert one.following is not None and one.following.value == one.largest.value + 1
    assert [one.is_known for one in seen] == [True, True, False]
    assert seen[2].following is not None and "no so many rows" in seen[2].following.reason
