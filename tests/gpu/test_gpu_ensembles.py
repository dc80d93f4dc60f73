"""On a CUDA device: an ensemble is trained, evaluated and predicts there, one member at a time.

python -m pytest tests/gpu -m gpu
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from study_runs import run, write_study

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_an_ensemble_says_the_same_on_the_device_and_on_the_cpu(tmp_path: Path) -> None:
    study, both = tmp_path / "study", tmp_path / "both"
    write_study(study, trials=2, search='sampler = "random"')
    assert run("tune", study, "--set", "execution.device=cuda").returncode == 0
    done = run("train", study, "--trial", "top2", "--json", "-o", both)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["members"]) == 2
    assert "- device cuda" in (both / "README.md").read_text("utf-8")
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(40, start=900))
    found = []
    for device in ("cuda", "cpu"):
        out = tmp_path / f"{device}.jsonl"
        said = run("predict", both, rows, "-o", out, "--device", device)
        assert said.returncode == 0, said.stderr
        lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        found.append(np.array([line["probabilities"] for line in lines]))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-3)
