"""On a CUDA device: a trial of several folds takes no more of it than one that trains once.

python -m pytest tests/gpu -m gpu
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny

# In a process of its own each: a peak is that of the whole process.
SCRIPT = """
import json, sys
from pathlib import Path
import tiny, trials
from dryfit.settings.memory_terms import DeviceKind

folder, model, folds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
trial = trials.Trial(folder, encoder=model, data=tiny.data(folder / "data") | {"folds": folds})
trial.plan = trial.plan.model_copy(update={"device": DeviceKind.CUDA})
result, _ = trial.run()
print(json.dumps({"folds": [fold.value for fold in result.folds], "value": result.value,
                  "allocated": result.peak_allocated_bytes, "reserved": result.peak_reserved_bytes}))
"""
SUPPORT = Path(__file__).parents[1] / "support"


def run(folder: Path, model: Path, folds: int) -> dict:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", SCRIPT, str(folder / str(folds)), str(model), str(folds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_of_a_fold_is_left_when_the_next_begins(tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    once, thrice = (run(tmp_path, model, folds) for folds in (1, 3))
    assert thrice["value"] == sum(thrice["folds"]) / 3
    # Weights, gradients and two moments of some 19 million parameters: 300 MB, which would be there twice.
    assert once["allocated"] > 200e6
    assert thrice["allocated"] < 1.1 * once["allocated"]
    assert thrice["reserved"] < 1.2 * once["reserved"]
