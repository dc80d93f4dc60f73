"""Scripts that will not end, or end more than once: an answer comes, in time, and it is the script's."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dryfit.settings.errors import ExitStatus
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, ScriptEnd
from rehearsed import rehearse

pytestmark = pytest.mark.slow

LOOP = """
import os, signal, sys, time
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def step():
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


"""
WAIT = "while True:\n    try:\n        time.sleep(1000)  # here\n    except BaseException:\n        print('no')\n"


def ran(folder: Path, code: str, timeout_s: float = 600) -> RehearsalAnswer:
    script = folder / "script.py"
    script.write_text(LOOP + code, encoding="utf-8")
    return rehearse(folder, str(script), timeout_s=timeout_s)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))", id="blocks signals"),
        pytest.param("signal.alarm(0)", id="takes back alarms"),
        pytest.param("time.sleep = lambda _: 1", id="replaces sleep", marks=pytest.mark.nightly),
    ],
)
def test_without_a_step_it_is_ended_in_time_and_says_where_it_was(tmp_path: Path, first: str) -> None:
    answer = ran(tmp_path, f"{first}\n{WAIT}", timeout_s=4)
    assert answer.end is ScriptEnd.NO_STEP and answer.ran and not answer.went_through
    assert answer.reasons == ("no optimizer took a step within 4 s",)
    assert f"{tmp_path}/script.py" in answer.traceback
    assert "dryfit/gpu" not in answer.traceback


def test_one_that_catches_its_end_is_ended_all_the_same(tmp_path: Path) -> None:
    answer = ran(tmp_path, "while True:\n    try:\n        step()\n    except:\n        pass\n")
    assert (answer.end, answer.verdict) == (ScriptEnd.STOPPED, VerdictKind.FITS), answer.traceback
    assert answer.memory is not None and [step.number for step in answer.memory.steps] == [1, 2, 3]


@pytest.mark.parametrize(("steps", "verdict"), [(1, VerdictKind.UNKNOWN), (3, VerdictKind.FITS)])
def test_one_that_waits_after_its_steps_is_ended_with_what_was_seen(
    tmp_path: Path, steps: int, verdict: VerdictKind
) -> None:
    answer = ran(tmp_path, f"for _ in range({steps}):\n    step()\n{WAIT}", timeout_s=15)
    assert (answer.end, answer.verdict) == (ScriptEnd.STOPPED, verdict), answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) == steps
    assert any(f"ended after 30 s, with {steps} of 3 steps" in text for text in (*answer.notes, *answer.reasons))


@pytest.mark.parametrize("ends", ["raise ValueError", "pass\nelse:\n    os.waitpid(child, 0)\n    step()"])
def test_a_process_that_it_forks_ends_as_ever(tmp_path: Path, ends: str) -> None:
    code = f"child = os.fork()\nif child == 0:\n    {ends}\n"
    after = "os.waitpid(child, 0)\nstep()\n" if "else" not in ends else ""
    answer = ran(tmp_path, code + after)
    assert (answer.end, answer.verdict) == (ScriptEnd.FINISHED, VerdictKind.FITS), answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) == 1


KERNELS = {
    "sparse": """
torch.eye(8).to_sparse_csr().cuda()  # here
""",
    "registered": """
mine = torch.library.Library("mine", "DEF")
mine.define("thrice(Tensor x) -> Tensor")
mine.impl("thrice", lambda x: x * 3, "CUDA")
torch.ops.mine.thrice(torch.ones(3, device="cuda"))  # here
""",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_without_a_stand_in_is_named_with_its_line(tmp_path: Path, kernel: str) -> None:
    answer = ran(tmp_path, f"step()\n{KERNELS[kernel]}\nstep()\n")
    assert (answer.end, answer.verdict) == (ScriptEnd.STOPPED, VerdictKind.UNKNOWN), answer.traceback
    assert "has no stand-in" in answer.reasons[0]
    assert answer.unknown[-1].code.endswith("# here")
    assert answer.ran and answer.memory is not None


CUSTOM = """
@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice(torch.ones(3, device="cuda"))
"""


def test_a_custom_operator_in_python_runs_as_its_own_code(tmp_path: Path) -> None:
    answer = ran(tmp_path, f"step()\n{CUSTOM}\nstep()\n")
    assert (answer.end, answer.verdict) == (ScriptEnd.FINISHED, VerdictKind.FITS), answer.traceback
    assert not answer.unknown


def test_one_that_asks_whether_a_kernel_is_there_goes_on_without_it(tmp_path: Path) -> None:
    code = f"try:\n    exec({KERNELS['registered']!r})\nexcept RuntimeError:\n    step()\n"
    answer = ran(tmp_path, code)
    assert (answer.end, answer.verdict) == (ScriptEnd.FINISHED, VerdictKind.FITS), answer.traceback
    assert answer.unknown


ENDS = {"fails": "raise RuntimeError('mine')", "exits": "sys.exit(3)", "is interrupted": "raise KeyboardInterrupt"}


@pytest.mark.each_value
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_seen_of_one_that_fails_is_told(tmp_path: Path, ends: str, steps: int) -> None:
    code = f"for _ in range({steps}):\n    step()\nheld = torch.empty(2**28, device='cuda')  # here\n{ENDS[ends]}\n"
    answer = ran(tmp_path, code)
    assert (answer.end, answer.verdict) == (ScriptEnd.FAILED, VerdictKind.UNKNOWN)
    assert answer.ran and not answer.fits and answer.memory is not None
    assert len(answer.memory.steps) == steps
    assert answer.memory.peak_allocated_bytes > 2**30 and answer.memory.peak_code.endswith("# here")


def test_one_that_fails_before_it_takes_memory_has_nothing_to_tell(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError")
    answer = rehearse(tmp_path, str(tmp_path / "script.py"))
    assert answer.end is ScriptEnd.FAILED and not answer.ran


def test_one_that_changes_its_parameters_by_hand_has_trained(tmp_path: Path) -> None:
    code = "with torch.enable_grad():\n    model(torch.randn(4, 64, device='cuda')).sum().backward()\n"
    answer = ran(tmp_path, f"{code}with torch.no_grad():\n    model.weight.sub_(model.weight.grad)\n")
    assert (answer.end, answer.verdict, answer.fits) == (ScriptEnd.FINISHED, VerdictKind.FITS, True)


def interrupted_in(folder: Path, devices: str, steps: int) -> Any:
    """Return what ``rehearse --json`` prints of a script that waits after so many steps, when Ctrl-C comes there."""
    (folder / "script.py").write_text(f"{LOOP}for _ in range({steps}):\n    step()\nprint('ready')\n{WAIT}")
    module = "dryfit.documents.command_line"
    command = [sys.executable, "-m", module, "rehearse", "--device", devices, "--json", "script.py"]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        assert any("ready" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == ExitStatus.INTERRUPTED
    return json.loads(said)


@pytest.mark.parametrize(
    ("steps", "end"), [pytest.param(0, ScriptEnd.NO_STEP, marks=pytest.mark.nightly), (2, ScriptEnd.STOPPED)]
)
def test_ctrl_c_at_the_terminal_tells_what_was_seen(tmp_path: Path, steps: int, end: ScriptEnd) -> None:
    answer = interrupted_in(tmp_path, "16GiB", steps)
    assert (answer["ended"], answer["fits"], answer["at_least"]) == (end, None, True)
    assert answer["peak_allocated_bytes"] >= 64 * 64 * 4 and len(answer["steps"]) == steps


def test_a_broken_package_that_the_script_does_not_import_is_no_matter(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "transformers"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken here')")
    (tmp_path / "script.py").write_text("")
    answer = rehearse(tmp_path, str(tmp_path / "script.py"), surroundings={"PYTHONPATH": str(broken.parent)})
    assert (answer.end, answer.traceback) == (ScriptEnd.NO_STEP, "")


def test_ctrl_c_among_several_devices_tells_what_was_seen_of_them(tmp_path: Path) -> None:
    answers = interrupted_in(tmp_path, "rtx4090,l4,v100-32", 2)["devices"]
    told = {one["device"]["name"]: (one["fits"], one["at_least"]) for one in answers}
    assert told == {"rtx4090": (None, True), "l4": (None, True)}
