"""Functions that studies of the tests optimise, each in processes of their own. Imports no torch."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import dryfit

SPACE = {"x": {"low": -4.0, "high": 4.0}, "n": {"low": 1, "high": 3}, "kind": ["plain", "shifted"]}
STEPS = 6


def quadratic(trial: dryfit.Trial) -> float:
    """A value that depends on nothing but the parameters."""
    shift = 1.0 if trial.params["kind"] == "shifted" else 0.0
    return (trial.params["x"] - shift) ** 2 / trial.params["n"]


def stepwise(trial: dryfit.Trial) -> float | None:
    """A walk with checkpoints: its end is the same however often it is killed, if only the checkpoints are used."""
    file = trial.checkpoint_dir / "state.json"
    state: dict[str, Any] = {"step": 0, "total": 0.0, "pids": []}
    if file.exists():
        state = json.loads(file.read_text())
    state["pids"].append(os.getpid())
    while state["step"] < STEPS:
        draw = random.Random(f"{trial.seed}-{state['step']}")
        state["total"] += trial.params["x"] ** 2 + draw.random()
        state["step"] += 1
        time.sleep(float(os.environ.get("STEP_PAUSE_S", "0")))
        stop = trial.report(state["total"], state["step"])
        temporary = trial.checkpoint_dir / "state.tmp"
        temporary.write_text(json.dumps(state))
        temporary.replace(file)
        trial.checkpointed(state["step"])
        if stop:
            return None
    return state["total"]


def held(trial: dryfit.Trial) -> float | None:
    """As ``stepwise``; but while there is a file ``HELD_BY``, the last of 20 trials does not end."""
    while trial.number == 19 and Path(os.environ.get("HELD_BY", "/")).is_file():
        time.sleep(0.1)
    return stepwise(trial)


def on_device(trial: dryfit.Trial) -> float:
    """The number of the GPU that the trial sees, once others had the time to begin on theirs."""
    time.sleep(0.5)
    return float(os.environ["CUDA_VISIBLE_DEVICES"])


def walk(trial: dryfit.Trial) -> float | None:
    """A way of one step, or, every second trial, of forty, which takes longer than children live in a storm.

    It keeps a checkpoint at every step, and reports every tenth.
    """
    file = trial.checkpoint_dir / "state.json"
    state: dict[str, Any] = {"step": 0, "total": 0.0}
    if file.exists():
        state = json.loads(file.read_text())
    pause_s, steps = float(os.environ.get("STEP_PAUSE_S", "0")), 40 if trial.number % 2 else 1
    while state["step"] < steps:
        draw = random.Random(f"{trial.seed}-{state['step']}")
        state["total"] += float(trial.params["x"]) ** 2 + draw.random()
        state["step"] += 1
        time.sleep(pause_s)
        if state["step"] % 10 == 0 and trial.report(state["total"], state["step"]):
            return None
        temporary = trial.checkpoint_dir / "state.tmp"
        temporary.write_text(json.dumps(state))
        temporary.replace(file)
        trial.checkpointed(state["step"])
    return state["total"]


def seeded(trial: dryfit.Trial) -> float:
    """What the global generator gives first."""
    return random.random()


def facts(trial: dryfit.Trial) -> float:
    """Writes down what its process is like."""
    found = {
        "torch": "torch" in sys.modules,
        "numpy": "numpy" in sys.modules,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "threads": os.environ["OMP_NUM_THREADS"],
        "params": dict(trial.params),
        "seed": trial.seed,
        "number": trial.number,
        "attempt": trial.attempt,
        "main": sys.modules["__main__"].__name__,
    }
    Path(os.environ["FACTS_FILE"]).write_text(json.dumps(found))
    return 0.0


def _once_killed(trial: dryfit.Trial) -> float:
    """Ends its own process without a word in the first attempt."""
    if trial.attempt == 1:
        trial.report(5.0, 1)
        (trial.checkpoint_dir / "left").write_text("by attempt 1")
        trial.checkpointed(1)
        os.kill(os.getpid(), signal.SIGKILL)
    trial.report(7.0, 1)  # said before: the ledger keeps what was said then
    trial.report(6.0, 2)
    return 1.0 if (trial.checkpoint_dir / "left").read_text() == "by attempt 1" else 2.0


def _fail(_trial: dryfit.Trial) -> float:
    raise ValueError("no such luck")


def _report_nan(trial: dryfit.Trial) -> float:
    trial.report(float("nan"), 1)
    return 3.0


def _assert_on_device(_: dryfit.Trial) -> float:
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    raise RuntimeError(f"CUDA error: device-side assert triggered (blocking launches: {blocking})")


WAYS = {
    "none": lambda _: None,
    "nan": lambda _: float("nan"),
    "exception": _fail,
    "exit": lambda _: sys.exit(0),
    "leave": lambda _: os._exit(0),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "killed once": _once_killed,
    "device assert": _assert_on_device,
    "report nan": _report_nan,
    "many reports": lambda trial: float(sum(not trial.report(step, step) for step in range(1, 60))),
}


def every_way(trial: dryfit.Trial) -> Any:
    """Ends as its parameter says."""
    return WAYS[trial.params["way"]](trial)


def waits(trial: dryfit.Trial) -> float:
    """Runs until it is asked to stop; a second attempt ends at once."""
    (trial.checkpoint_dir / f"attempt-{trial.attempt}").touch()
    trial.checkpointed(trial.attempt)
    while trial.attempt == 1:
        if trial.should_stop:
            return 99.0
        time.sleep(0.01)
    return float(len(list(trial.checkpoint_dir.glob("attempt-*"))))


def needs_two(trial: dryfit.Trial, other: object) -> float:
    """Cannot be called with a trial alone."""
    return 0.0


class Holder:
    """Has functions of several kinds."""

    @staticmethod
    def static(trial: dryfit.Trial) -> float:
        """Importable by its dotted name."""
        return trial.params["x"]

    def bound(self, trial: dryfit.Trial) -> float:
        """Needs an object."""
        return 0.0


def make_closure():
    """A function that no other process can import."""

    def inside(trial: dryfit.Trial) -> float:
        return 0.0

    return inside


a_lambda = lambda trial: 0.0  # noqa: E731
renamed = quadratic


def quadratic_again(trial: dryfit.Trial) -> float:
    """Shadowed below."""
    return 0.0


shadowed = quadratic_again
quadratic_again = quadratic  # type: ignore[assignment]


def stubborn(trial: dryfit.Trial) -> float | None:
    """A walk that keeps its file open, and makes its folder again where that is gone; then its value is the best."""
    folder, gone = trial.checkpoint_dir, False
    with (folder / "steps.txt").open("a+") as file:
        file.seek(0)
        for step in range(len(file.read().split()) + 1, STEPS + 1):
            stop = trial.report(float(step), step)
            gone = gone or not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "newest").write_text(f"{step}, attempt {trial.attempt}")
            print(step, file=file, flush=True)
            trial.checkpointed(step)
            if stop:
                return None
        file.seek(0)
        said = [int(word) for word in file.read().split()]
    return -1000.0 if gone else trial.params["x"] ** 2 + sum(said)
