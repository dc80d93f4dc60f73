"""A trial of the soak: milliseconds of work, and now and then a way to end that leaves something behind."""

import os
import signal
import subprocess
import sys

import dryfit

SPACE = {
    "x": {"low": -4.0, "high": 4.0},
    "y": {"low": -4.0, "high": 4.0},
    "rate": {"low": 1e-5, "high": 1e-1, "log": True},
    "n": {"low": 1, "high": 8},
    "kind": ["plain", "shifted", "scaled"],
    "shift": {"low": 0.0, "high": 2.0, "when": {"kind": "shifted"}},
    "scale": {"low": 0.5, "high": 2.0, "when": {"kind": "scaled"}},
}
REPORTS = 3
KILLED_EVERY, RAISES_EVERY, LEAVES_EVERY = 50, 90, 40


def tiny(trial: dryfit.Trial) -> float | None:
    """A bowl. Some trials die once, some raise, some leave a process of their own behind."""
    params = trial.params
    if trial.number % RAISES_EVERY == 11:
        raise ValueError(f"no such luck: {params}")
    value = (params["x"] - params.get("shift", 0.0)) ** 2 + params.get("scale", 1.0) * params["y"] ** 2
    if trial.number % LEAVES_EVERY == 3:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for step in range(1, REPORTS + 1):
        if trial.report(value + 1 / step, step):
            return None
        (trial.checkpoint_dir / "step").write_text(str(step))
        trial.checkpointed(step)
        if step == 1 and trial.attempt == 1 and trial.number % KILLED_EVERY == 7:
            os.kill(os.getpid(), signal.SIGKILL)
    return value
