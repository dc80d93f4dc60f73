"""A study on machines with different GPUs, whose own machine has none: real processes, drivers and trials stand in."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

import plan_jobs
from agents import end
from dryfit.ledger.events import AttemptPlaced, NodeJoined
from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import ExitStatus
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.trial import Outcome
from study_runs import DEADLINE_S, events_of, fold, wait_for

pytestmark = pytest.mark.slow

GPUS = {
    "small": ("NVIDIA Small", 1024, "8.6"),
    "large": ("NVIDIA Large", 8192, "9.0"),
}
PROGRAM = Path(__file__).parent.parent / "support" / "stand_in_command.py"


def start(*words: str | Path, gpu: str | None, tmp_path: Path) -> subprocess.Popen[str]:
    """Start a command on a machine with one GPU, or none, as its driver's tool says."""
    tools = tmp_path / f"driver-{gpu}"
    tools.mkdir(exist_ok=True)
    tool = tools / "nvidia-smi"
    if gpu is None:
        tool.write_text("#!/bin/sh\nexit 9\n")
    else:
        name, size_mib, capability = GPUS[gpu]
        tool.write_text(f"#!/bin/sh\necho '0, GPU-{gpu}, {name}, {size_mib}, 0, {capability}'\n")
    tool.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, words)],
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[ExitStack, None, None]:
    """What is ended with the test."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan_jobs.use_stand_ins(monkeypatch)
    with ExitStack() as stack:
        yield stack


def write(folder: Path, **tables: dict[str, str | int]) -> Path:
    known: dict[str, dict[str, str | int]] = {
        "study": {"trials": 8, "seed": 1, "baselines_s": 0},
        "execution": {"device": '"cuda"'},
        "nodes": {"local": "false", "lease_s": 3},
        "runtime": {"isolation": '"fresh"', "parallel": 2, "stop_grace_s": 2},
        "train": {"max_length": 64, "precision": '"fp32"'},
        "space": {'"train.batch_size"': "[8, 16, 32, 64]"},
    }
    return plan_jobs.write_study(folder, **{name: keys | tables.get(name, {}) for name, keys in known.items()})


def kinds_of(folder: Path) -> tuple[StudyState, dict[str, str]]:
    """The study, and the name of the GPU of each node."""
    joined = [event for event in events_of(folder) if isinstance(event, NodeJoined)]
    return fold(folder), {event.node: event.specs[0].name for event in joined if event.specs and event.specs[0]}


def test_trials_run_on_the_gpus_of_others_each_by_the_plan_for_the_one_it_gets(
    machines: ExitStack, tmp_path: Path
) -> None:
    """512 MiB to 4 GiB: the small one takes 1 GiB, so larger batches run there with checkpointing, or in parts."""
    folder = write(tmp_path / "study")
    control = start("tune", folder, gpu=None, tmp_path=tmp_path)
    machines.callback(end, control)
    for gpu in GPUS:
        machines.callback(end, start("agent", folder, "--wait", "60", gpu=gpu, tmp_path=tmp_path))
    _, said = control.communicate(timeout=DEADLINE_S)
    assert control.returncode == ExitStatus.DONE, said
    state, gpus = kinds_of(folder)
    assert sorted(gpus.values()) == ["NVIDIA Large", "NVIDIA Small"]
    assert [trial.outcome for trial in state.trials] == [Outcome.COMPLETE] * 8
    for trial in state.trials:
        place, plan = trial.attempts[-1].place, trial.plan
        assert plan is not None and plan.answer.verdict.fits
        assert plan.answer.device.name == gpus[place.partition("/")[0]]
    placed = [event for event in events_of(folder) if isinstance(event, AttemptPlaced)]
    assert {event.device for event in placed} <= {f"{node}/0" for node in gpus} and len(placed) == 8


def test_a_trial_that_fits_the_large_one_alone_waits_for_another_of_its_kind(
    machines: ExitStack, tmp_path: Path
) -> None:
    """Its machine is killed while it runs, and the small one, which is free, does not take it."""
    one_row = {"train": {"max_length": 4096}, "space": {'"train.batch_size"': "[1]"}, "study": {"trials": 1}}
    folder = write(tmp_path / "study", **one_row)  # 2 GiB with checkpointing
    os.environ["PLAN_JOBS_PAUSE_S"] = "3"
    machines.callback(os.environ.pop, "PLAN_JOBS_PAUSE_S")
    control = start("tune", folder, gpu=None, tmp_path=tmp_path)
    large = start("agent", folder, "--wait", "60", gpu="large", tmp_path=tmp_path)
    for process in (control, large):
        machines.callback(end, process)

    def placed() -> list[AttemptPlaced]:
        return [event for event in events_of(folder) if isinstance(event, AttemptPlaced)]

    def joined() -> int:
        ledger = (folder / "ledger.jsonl").exists()
        return sum(isinstance(event, NodeJoined) for event in events_of(folder)) if ledger else 0

    wait_for(joined, control)  # with the small one alone the study would end: nothing fits
    machines.callback(end, start("agent", folder, "--wait", "60", gpu="small", tmp_path=tmp_path))
    wait_for(lambda: joined() == 2 and bool(placed()), control)
    end(large)
    machines.callback(end, start("agent", folder, "--wait", "60", gpu="large", tmp_path=tmp_path))
    _, said = control.communicate(timeout=DEADLINE_S)
    assert control.returncode == ExitStatus.DONE, said
    state, gpus = kinds_of(folder)
    (trial,) = state.trials
    assert trial.outcome is Outcome.COMPLETE and len(trial.attempts) == 2
    assert {gpus[event.node] for event in placed()} == {"NVIDIA Large"}
    verdicts = {plan.answer.device.name: plan.answer.verdict for plan in trial.plans.values()}
    assert verdicts.pop("NVIDIA Small", VerdictKind.REFUSED) is VerdictKind.REFUSED  # planned if it joined in time
    assert verdicts == {"NVIDIA Large": VerdictKind.FITS}
