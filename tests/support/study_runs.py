"""Running whole studies as a user does, in real processes, and killing them."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

import tiny
from dryfit.documents.command_line import main
from dryfit.ledger.events import Event
from dryfit.ledger.ledger import each_event, read_ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.helpers import marker_of
from dryfit.settings.wire import MARKER_VARIABLE

DEADLINE_S = 600
"""When a command counts as hung: a machine that others use makes everything many times slower."""
_POLL_S = 0.02

STUDY = """
[study]
trials = {trials}
seed = 11
{study}

[data]
train = "data/train.jsonl"
validation = "data/validation.jsonl"

[model]
name = "model"

[train]
epochs = 3
batch_size = 8
max_length = 48
evals_per_epoch = 2

[space]
"optim.lr" = {{low = 1e-4, high = 1e-2, log = true}}
"head.pooling" = ["cls", "mean", "max"]
"train.batch_size" = [
    {{choices = [4, 8], when = {{"head.pooling" = "cls"}}}},
    {{choices = [8, 16], when = {{"head.pooling" = ["mean", "max"]}}}},
]

[search]
mirror = "none"
{search}

[execution]
threads = 1
{execution}

[runtime]
checkpoint_every_s = 0.001
{runtime}
"""


def write_study(
    folder: Path,
    *,
    trials: int = 4,
    rows: int = 64,
    study: str = "",
    search: str = "",
    runtime: str = "",
    execution: str = "",
) -> Path:
    """A study on a tiny random BERT and a small synthetic data set; checkpoints at every validation."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.model(folder / "model")
    tiny.data(folder / "data", train=rows, validation=32, seed=3)
    file = folder / "study.toml"
    file.write_text(
        STUDY.format(trials=trials, study=study, search=search, runtime=runtime, execution=execution), encoding="utf-8"
    )
    return file


OBJECTIVE = f"""
[study]
task = "objective"
{{study}}

[objective]
function = "objectives:{{function}}"
paths = ["{Path(__file__).parent}"]

[space]
x = {{{{low = -3.0, high = 3.0}}}}
{{space}}

[search]
{{search}}

[runtime]
{{runtime}}
"""
RANDOM = 'sampler = "random"\nmirror = "none"'


def objective_study(
    function: str, *, study: str = "trials = 3\nseed = 5", space: str = "", search: str = RANDOM, runtime: str = ""
) -> str:
    """The text of a study of one of :mod:`objectives`."""
    return OBJECTIVE.format(function=function, study=study, space=space, search=search, runtime=runtime)


def write_stepwise(folder: Path, *, runtime: str = "") -> Path:
    """A study of a function whose every step takes ``STEP_PAUSE_S``; each step has a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(objective_study("stepwise", runtime=runtime), encoding="utf-8")
    return folder


def command(*words: str | Path) -> list[str]:
    """A dryfit command line."""
    return [sys.executable, "-m", "dryfit.documents.command_line", *map(str, words)]


_PREPARED = """\
import os, resource, signal, sys
{}
os.execv(sys.executable, [sys.executable, "-m", "dryfit.documents.command_line", *sys.argv[1:]])
"""


def command_after(setup: str, *words: str | Path) -> list[str]:
    """A dryfit command line, in a process that the Python statements ``setup`` have prepared."""
    return [sys.executable, "-c", _PREPARED.format(setup), *map(str, words)]


def start(*words: str | Path) -> subprocess.Popen[str]:
    """Start a command in a session of its own, as a terminal would: Ctrl-C reaches it."""
    return subprocess.Popen(
        command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@contextlib.contextmanager
def _signals_kept() -> Generator[None, None, None]:
    """A command sets what its process does on signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_here(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: those that look, write a file or refuse.

    An interpreter of its own takes a second for its imports alone.
    """
    output, errors, status = io.StringIO(), io.StringIO(), 0
    argv = ["dryfit", *map(str, words)]
    with (
        patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        _signals_kept(),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(argv, status, output.getvalue(), errors.getvalue())


def summary_of(folder: Path) -> dict[str, Any]:
    """What ``status --json`` prints."""
    done = run_here("status", folder, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Ended:
    """A trial's end and everything that must not depend on kills."""

    params: dict[str, Any]
    outcome: str
    value: float | None
    reports: tuple[tuple[int, int, float], ...]


def fold(folder: Path) -> StudyState:
    """The study's ledger, folded."""
    state = StudyState()
    for event in each_event(folder / "ledger.jsonl"):
        state.apply(event)
    return state


def ends(folder: Path) -> list[Ended]:
    """Every trial of a finished study."""
    return [
        Ended(
            params=trial.params,
            outcome=str(trial.outcome),
            value=trial.value,
            reports=tuple((point.n, point.step, point.value) for point in trial.reports),
        )
        for trial in fold(folder).trials
    ]


def events_of(folder: Path) -> list[Event]:
    """The ledger so far."""
    return read_ledger(folder / "ledger.jsonl")


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str] | None = None) -> bool:
    """Wait until something has happened; False where the process ended before it did."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if happened():
            return True
        if process is not None and process.poll() is not None:
            return bool(happened())
        time.sleep(_POLL_S)
    raise AssertionError("it never happened")


def wait_for_events(folder: Path, count: int, process: subprocess.Popen[str]) -> bool:
    """Wait until the ledger has so many events."""
    ledger = folder / "ledger.jsonl"
    return wait_for(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") >= count, process)


def kill_now(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def child_running(module: str, of: int) -> psutil.Process | None:
    """The child, or child's child, of a process that runs a module as its program; others may end meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # of which a zombie is one
                if module in child.cmdline():
                    return child
    return None


def marked_processes(folder: Path) -> list[int]:
    """Every living process that carries the study's marker."""
    created = fold(folder).created
    marker = marker_of(created.id, folder) if created else "none"
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER_VARIABLE) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [pid for pid in found if pid != os.getpid()]


def tune_to_end(folder: Path) -> Path:
    """Run a study that nobody disturbs; its folder."""
    done = run("tune", folder, "--quiet")
    assert done.returncode == 0, done.stderr
    return folder


def resume_to_end(folder: Path, words: Sequence[str] = ()) -> None:
    """Resume until the study says it is done."""
    done = run("resume", folder, "--quiet", *words)
    assert done.returncode == 0, done.stderr
