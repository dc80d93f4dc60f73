"""Make the study folders of this version of dryfit that every later version must go on with.

Run once for a state of the formats, on a Linux machine with two idle cores, and commit what it writes:

    PYTHONPATH=src:tests/support python tests/support/make_older_study.py tests/older_studies/NAME

Each study is stopped in the middle of a trial that has a checkpoint. A copy of it is then resumed by the same code, and
what it comes to, and what its models predict, is written into ``expected.json``. tests/older_studies/README.md says
what each study is for and where its inputs come from, and tests/contract/test_older_studies.py reads them.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import older_studies
import study_runs
from dryfit.study import functions

FIRST: Final = older_studies.KEPT / "0.1.0"
"""Whose study files, rows, models and functions every later folder begins with."""
INPUTS: Final = ("study.toml", "data", "model", "broken", "rows.jsonl", "walk.py")


@dataclass(frozen=True)
class Scenario:
    """A study, how it is interrupted, and what is made of it.

    Attributes:
        stop_in: The trial that is interrupted, once it has a checkpoint of this step or a later one.
        stop_at: That step.
        disturb: What is done to the study while it runs, looked at again and again until it says that it is done.
        trained: Arguments of ``dryfit train``, a call each; what its models predict is recorded.
        in_place: Whether the same code can resume it only where it was made.
        changes: Overrides under which the study is run to its end before, each in a run of its own.
    """

    stop_in: int
    stop_at: int
    disturb: Callable[[Path], bool] = lambda _: True
    trained: tuple[tuple[str, ...], ...] = ()
    changes: tuple[tuple[str, ...], ...] = ()
    in_place: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _kill_one(folder: Path) -> bool:
    """End the first process of trial 1 without a word."""
    trials = study_runs.fold(folder).trials
    if len(trials) < 2 or not trials[1].attempts or trials[1].attempts[0].checkpoint_step is None:
        return False
    pid = trials[1].attempts[0].pid
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


SCENARIOS = {
    "criteria": Scenario(6, 6, _kill_one, (("--trial", "best"),)),
    "evidence": Scenario(2, 4, trained=((),)),
    "share": Scenario(2, 8, trained=((),)),
    "causal-lm": Scenario(1, 6, trained=((),)),
    "objective": Scenario(4, 3, environment={"STEP_PAUSE_S": "0.1"}),
    "planned": Scenario(
        5,
        3,
        changes=(
            (),
            ("study.trials=4", "space.optim.lr.high=0.1"),
            ("study.trials=2", "space.optim.lr.high=0.001"),
        ),
    ),
    "moved": Scenario(1, 6, in_place=True),
    "folds": Scenario(1, 18),
    "ranks": Scenario(0, 8),
}


def _tune(folder: Path, scenario: Scenario, words: tuple[str, ...]) -> None:
    """Run the study until its trial is well under way, then stop it."""
    undisturbed = True
    process = study_runs.start("tune", folder, "--quiet", *words)

    def under_way() -> bool:
        nonlocal undisturbed
        if not (folder / "ledger.jsonl").exists():
            return False
        undisturbed = undisturbed and not scenario.disturb(folder)
        trials = study_runs.fold(folder).trials
        if len(trials) <= scenario.stop_in:
            return False
        steps = [attempt.checkpoint_step or 0 for attempt in trials[scenario.stop_in].attempts]
        return max(steps, default=0) >= scenario.stop_at

    assert study_runs.wait_for(under_way, process), process.communicate()
    assert functions.stop(folder, now=False) is not None
    _, errors = process.communicate()
    assert process.returncode == 3, errors
    assert not undisturbed, "the study was not disturbed as it should have been"


def _without_this_machine(folder: Path) -> None:
    """Take the paths of this machine's libraries and of this checkout out of logs and tracebacks."""
    places = {sys.prefix: "/venv", str(Path(__file__).resolve().parents[2]): "/dryfit"}
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".txt") and "checkpoints" not in path.parts:
            text = before = path.read_text(encoding="utf-8")
            for place, name in places.items():
                text = text.replace(place, name)
            if text != before:
                path.write_text(text, encoding="utf-8")


def _make(name: str, scenario: Scenario, out: Path, work: Path) -> None:
    folder = older_studies.unpack(FIRST / name, work / name / "study")
    for path in folder.iterdir():
        if path.name not in INPUTS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    *before, last = [[word for one in change for word in ("--set", one)] for change in scenario.changes or ((),)]
    os.chdir(folder)
    os.environ.update({"STEP_PAUSE_S": "0"} | scenario.environment)
    for words in before:
        done = study_runs.run("tune", folder, "--quiet", *words)
        assert done.returncode == 0, done.stderr
    _tune(folder, scenario, tuple(last))
    os.environ["STEP_PAUSE_S"] = "0"
    for words in scenario.trained:
        done = study_runs.run("train", folder, "--quiet", *words)
        assert done.returncode == 0, done.stderr
    models = older_studies.models_in(folder) if scenario.trained else []
    _without_this_machine(folder)
    older_studies.pack(folder, out / name)
    expected: dict[str, Any] = {
        "interrupted": older_studies.interrupted(folder),
        "stopped": older_studies.trials_of(folder),
        "models": {model: older_studies.predictions(folder, model) for model in models},
    }
    if not scenario.in_place:
        folder = work / f"{name}-resumed" / "study"
        older_studies.unpack(out / name, folder)
        os.chdir(folder)
    done = study_runs.run("resume", folder, "--quiet")
    assert done.returncode == 0, done.stderr
    expected["resumed"] = older_studies.trials_of(folder)
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (out / name / "expected.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Make all studies, in a folder that is not there yet."""
    out = Path(sys.argv[1]).absolute()
    only = sys.argv[2:] or list(SCENARIOS)
    if any((out / name).exists() for name in only):
        sys.exit(f"{out} is there already: what an older dryfit wrote is never made anew; name another folder")
    with tempfile.TemporaryDirectory(prefix="dryfit-") as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        for name in only:
            print(name, flush=True)
            _make(name, SCENARIOS[name], out, Path(work))
        os.chdir("/")


if __name__ == "__main__":
    main()
