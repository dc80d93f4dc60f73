"""On two CUDA devices: trials whose model is sharded over them, in bf16 and fp32, against trials on one.

python -m pytest tests/gpu -m gpu
"""

from pathlib import Path

import pytest
import torch

from dryfit.ledger.events import AttemptEnded
from dryfit.settings.errors import FailureKind
from study_runs import ends, events_of, marked_processes, run, write_study

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

QUIET = "\n[regularization]\ndropout = 0.0\nattention_dropout = 0.0\n[head]\ndropout = 0.0\n"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_devices_learn_what_one_does(tmp_path: Path, precision: str) -> None:
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        file = write_study(folder, trials=2, execution=f'device = "cuda"\ntp = {ranks}')
        text = file.read_text(encoding="utf-8").replace("[train]", f'[train]\nprecision = "{precision}"')
        file.write_text(text + QUIET, encoding="utf-8")
        done = run("tune", folder)
        assert done.returncode == 0, done.stderr
        failures = [one.failure for one in events_of(folder) if isinstance(one, AttemptEnded) and one.failure]
        assert not [failure for failure in failures if failure.kind is FailureKind.COMM]
        assert not marked_processes(folder)
        found.append(ends(folder))
    for one, two in zip(*found, strict=True):
        assert (one.params, one.outcome) == (two.params, two.outcome)
        if one.value is not None:
            assert two.value == pytest.approx(one.value, abs=0.05)
