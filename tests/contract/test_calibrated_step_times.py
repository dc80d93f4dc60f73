"""Step times of a card follow one measured step, through the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dryfit.documents.command_line import app
from dryfit.settings.errors import ConfigError

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
layer = torch.nn.Linear(8192, 8192, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
while True:
    layer(torch.ones(16384, 8192, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_measured_step_is_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("train.py").write_text(SCRIPT)

    def told(*words: str) -> dict:
        done = CliRunner().invoke(app, [words[0], "--json", "--quiet", *words[1:], "train.py"])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout)

    before = told("rehearse", "--device", "l40s")["step_time"]
    assert (before["level"], before["decides"]) == ("power-limited", "tensor")
    measured_s = 1.3 * before["estimate_s"]
    kept = told("calibrate", "--time", "--device", "L40S", "--measured", str(measured_s))
    assert kept["device"] == "l40s" and kept["quantity"] == "tensor" and kept["value"] < kept["before"] == 0.615
    assert kept["estimated_s"] == pytest.approx(before["estimate_s"])
    after = told("rehearse", "--device", "l40s")["step_time"]
    assert after["level"] == "calibrated" and after["estimate_s"] == pytest.approx(measured_s, rel=1e-3)
    assert after["high_s"] / after["low_s"] < before["high_s"] / before["low_s"]
    other = told("rehearse", "--device", "h200")["step_time"]
    assert other["level"] == "measured"


@pytest.mark.parametrize(
    "words",
    [
        ("--time",),
        ("--time", "--measured", "1", "--device", "24GiB", "train.py"),
        ("--time", "--measured", "soon", "--device", "l40s", "train.py"),
        ("--time", "--quick", "--measured", "1", "--device", "l40s", "train.py"),
        ("--measured", "1"),
        ("train.py",),
        ("--time", "train.py"),  # no GPU is here
    ],
)
def test_what_cannot_be_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("train.py").write_text("")
    assert isinstance(CliRunner().invoke(app, ["calibrate", *words]).exception, ConfigError)
