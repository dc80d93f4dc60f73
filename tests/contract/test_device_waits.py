"""The host waits for its device once an optimizer step: counted in real trials on a virtual GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import device_waits


@pytest.mark.parametrize(
    ("tables", "encoders"),
    [
        ({"train": {"precision": "fp16"}, "execution": {"micro_batch": 3}}, 1),
        *[
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.nightly])
            for case in (
                ({"regularization": {"max_grad_norm": 0.0}, "loss": {"name": "focal", "class_balance": "weighted"}}, 1),
                (
                    {
                        "study": {"task": "joint"},
                        "span": {"doc_stride": 4},
                        "loss": {"class_balance": "weighted"},
                        "execution": {"micro_batch": 3},
                    },
                    2,
                ),
            )
        ],
    ],
    ids=str,
)
def test_a_step_reads_its_device_once(tmp_path: Path, tables: Any, encoders: int) -> None:
    command = [sys.executable, device_waits.__file__, str(tmp_path), json.dumps(tables)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])  # DeepSpeed may say before that it found no accelerator
    # transformers looks for padding in each micro-batch, to leave out a mask of none.
    places = [place for _, place in found["waits"]]
    masks = [place for place in places if place.startswith("masking_utils.py:")]
    assert [place for place in places if place not in masks] == ["step.py:numbers"]
    assert len(masks) == encoders * found["micro"]
    assert found["pinned"] == [True]
