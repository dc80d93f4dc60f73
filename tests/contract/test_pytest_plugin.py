"""The pytest plugin in a project of its own: marked tests run on a virtual GPU, with fixtures, and in two workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.heavy]
PROJECT = """
import pytest, torch
from torch import nn

@pytest.fixture(params=[2048])
def model(request):
    return nn.Sequential(*(nn.Linear(request.param, request.param) for _ in range(8))).cuda()

@pytest.mark.gpu_memory("2 GiB", device="rtx4090")
def test_trains(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(64, 2048, device="cuda")).sum().backward()
        optimizer.step()

@pytest.mark.gpu_memory("1 GiB", device="rtx4090")
def test_needs_more(model):
    held = torch.zeros(2**29, device="cuda")
    with torch.no_grad():
        model(torch.randn(64, 2048, device="cuda"))

@pytest.mark.gpu_memory("4 GiB")
def test_fails(model):
    assert len(model) == 7, "seven layers"

class TestInAClass:
    @pytest.mark.xfail
    @pytest.mark.gpu_memory("1 GiB")
    def test_has_no_room(self):
        torch.zeros(2**30, device="cuda")

@pytest.mark.gpu_memory("4 GiB")
def test_skips():
    pytest.skip("for a reason")

@pytest.mark.skipif(True, reason="outside")
@pytest.mark.gpu_memory("4 GiB")
def test_is_not_even_begun():
    raise AssertionError

@pytest.mark.gpu_memory("4 GiB", device="rtx4o90")
def test_has_no_such_device():
    pass

def test_asks_by_itself(rehearsal, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch; torch.zeros(2**28, device='cuda')")
    answer = rehearsal(["" + str(script)], device="24GiB")
    assert answer.memory.peak_allocated_bytes == 2**30
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "dryfit.pytest_plugin", "-p", "no:cacheprovider", "-rA", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_each_test_ends_as_it_must(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(PROJECT, encoding="utf-8")
    done = run(tmp_path, "-n", "2")
    ends = {
        name: end for end, name in re.findall(r"^(PASSED|FAILED|XFAIL|ERROR) test_own\.py::(\S+)", done.stdout, re.M)
    }
    assert ends == {
        "test_trains[2048]": "PASSED",
        "test_needs_more[2048]": "FAILED",
        "test_fails[2048]": "FAILED",
        "TestInAClass::test_has_no_room": "XFAIL",
        "test_has_no_such_device": "FAILED",
        "test_asks_by_itself": "PASSED",
    }, done.stdout
    assert "for a reason" in done.stdout and "outside" in done.stdout and "2 skipped" in done.stdout
    line = PROJECT[: PROJECT.index("held =")].count("\n") + 1
    assert re.search(rf"^2.0 GiB .* test_own.py:{line} +held = torch.zeros", done.stdout, re.M), done.stdout
    assert "AssertionError: seven layers" in done.stdout and "did you mean rtx4090" in done.stdout


def test_wrong_arguments_of_the_marker_end_the_run(tmp_path: Path) -> None:
    text = 'import pytest\n@pytest.mark.gpu_memory(gpu="x")\ndef test_a(): pass\n'
    (tmp_path / "test_own.py").write_text(text, encoding="utf-8")
    done = run(tmp_path)
    assert done.returncode == 4 and "gpu_memory(budget" in done.stderr + done.stdout
