"""The recorder of rehearsals over real CPU tensors, beside torch's profiler: one step, two counts of its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recorded_on_cpu import CASES

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[1] / "support" / "recorded_on_cpu.py"


def counted_bytes(what: str, case: str) -> int:
    """The most that a step takes, counted in a fresh process: the recorder's hooks on modules stay."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, case],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


@pytest.mark.every(6)
@pytest.mark.parametrize("case", CASES)
def test_the_recorder_counts_what_the_profiler_counts(case: str) -> None:
    recorded, profiled = counted_bytes("recorder", case), counted_bytes("profiler", case)
    assert profiled > 20_000_000
    # The rest is scratch memory of kernels, and the random state that checkpointing puts aside.
    assert abs(recorded / profiled - 1) <= 0.001, (recorded, profiled)
