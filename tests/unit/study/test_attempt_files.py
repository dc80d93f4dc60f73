"""What an ended attempt left becomes the trial's own: whatever else there is, and wherever a kill comes in between."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dryfit.ledger.folder import FinalLayout, TrialLayout
from dryfit.settings.wire import Job
from dryfit.study.files import discard, drop_superseded, take_over


def make(folder: Path, steps: str, text: str) -> None:
    """Checkpoints, each with a file that says which attempt wrote it."""
    for step in steps.split():
        path = folder / f"step-{int(step):08d}"
        path.mkdir(parents=True)
        (path / "model").write_text(text, encoding="utf-8")


def save_best(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "dryfit.json").write_text(text, encoding="utf-8")


def steps(folder: Path) -> dict[int, str]:
    """The step of each checkpoint, and which attempt wrote it."""
    return {int(path.name[5:]): (path / "model").read_text(encoding="utf-8") for path in folder.glob("step-*")}


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, and what is in it."""
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    ("kept", "own", "left"),
    [
        ("", "", {}),
        ("10 20", "", {10: "1", 20: "1"}),
        ("", "30", {30: "2"}),
        ("10 20", "30", {20: "1", 30: "2"}),
        ("10 20", "30 40", {30: "2", 40: "2"}),
        ("10 20", "15", {10: "1", 15: "2"}),  # that of step 20 was damaged: it took no place of a good one
        ("10 20", "20", {10: "1", 20: "2"}),
        ("10 20", "5", {5: "2"}),  # none could be read: it began anew
        ("", "10 20 30", {20: "2", 30: "2"}),  # killed while it removed the first
    ],
)
def test_two_checkpoints_stay_that_the_next_attempt_can_go_on_from(
    tmp_path: Path, kept: str, own: str, left: dict[int, str]
) -> None:
    trial = TrialLayout(tmp_path)
    make(trial.checkpoints, kept, "1")
    trial.files_of(2).folder.mkdir()
    make(trial.files_of(2).checkpoints, own, "2")
    take_over(trial, 2, Job.TRAIN)
    assert steps(trial.checkpoints) == left
    assert not trial.files_of(2).checkpoints.exists()
    take_over(trial, 2, Job.TRAIN)
    assert steps(trial.checkpoints) == left


@pytest.mark.parametrize(
    ("kept", "own", "left"), [("10 20", "", [10, 20]), ("10 20", "30", [20]), ("10 20", "30 40", []), ("", "30", [])]
)
def test_while_an_attempt_runs_a_trial_has_no_more_than_two_and_its_next(
    tmp_path: Path, kept: str, own: str, left: list[int]
) -> None:
    trial = TrialLayout(tmp_path)
    make(trial.checkpoints, kept, "1")
    make(trial.files_of(2).checkpoints, own, "2")
    drop_superseded(trial, 2)
    assert sorted(steps(trial.checkpoints)) == left
    assert sorted(steps(trial.files_of(2).checkpoints)) == [int(step) for step in own.split()]


def test_one_that_could_not_be_read_is_kept_under_another_name(tmp_path: Path) -> None:
    trial = TrialLayout(tmp_path)
    make(trial.checkpoints, "10 20", "1")
    (trial.files_of(2).checkpoints / "unreadable-step-00000020").mkdir(parents=True)
    take_over(trial, 2, Job.TRAIN)
    assert sorted(path.name for path in trial.checkpoints.iterdir()) == ["step-00000010", "unreadable-step-00000020"]


def test_the_best_weights_are_those_of_the_newest_attempt_that_has_some(tmp_path: Path) -> None:
    trial = TrialLayout(tmp_path)
    save_best(trial.files_of(1).best, "of 1")
    (trial.files_of(1).best / ".model.safetensors.77.tmp").write_text("half", encoding="utf-8")
    take_over(trial, 1, Job.TRAIN)
    trial.files_of(2).folder.mkdir()
    take_over(trial, 2, Job.TRAIN)  # it has found no better ones
    assert tree(tmp_path) == {"best/dryfit.json": "of 1"}
    save_best(trial.files_of(3).best, "of 3")
    save_best(trial.files_of(3).folder / ".best.78.tmp", "half")
    take_over(trial, 3, Job.TRAIN)
    assert tree(tmp_path) == {"best/dryfit.json": "of 3"}


def test_a_final_trainings_model_comes_to_its_place(tmp_path: Path) -> None:
    paths = FinalLayout(tmp_path)
    save_best(paths.model, "of a result that is gone")
    save_best(paths.files_of(2).model, "of 2")
    take_over(paths, 2, Job.FINAL)
    assert tree(tmp_path) == {"model/dryfit.json": "of 2"}


def test_what_a_function_keeps_is_moved_as_a_whole(tmp_path: Path) -> None:
    """Whatever its own files are called."""
    trial = TrialLayout(tmp_path)
    make(trial.checkpoints, "1 2", "1")
    make(trial.files_of(2).checkpoints, "2 3 4", "2")
    take_over(trial, 2, Job.OBJECTIVE)
    assert steps(trial.checkpoints) == {2: "2", 3: "2", 4: "2"}
    trial.files_of(3).folder.mkdir(exist_ok=True)
    take_over(trial, 3, Job.OBJECTIVE)  # it was killed before it had a folder
    assert steps(trial.checkpoints) == {2: "2", 3: "2", 4: "2"}


def left_behind(folder: Path) -> TrialLayout:
    """A trial as its first attempt left it, and as the second did, which ended while it wrote."""
    trial = TrialLayout(folder)
    make(trial.checkpoints, "10 20", "1")
    save_best(trial.best, "of 1")
    make(trial.files_of(2).checkpoints, "30", "2")
    make(trial.files_of(2).checkpoints / ".step-00000040.5.tmp", "0", "half")
    save_best(trial.files_of(2).best, "of 2")
    return trial


_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")


def killed_before(operation: int, trial: TrialLayout, job: Job) -> bool:
    """Take over in a process of its own that is killed before one of its operations on files; whether it was."""
    child = os.fork()
    if child == 0:
        left = operation

        def heard(event: str, _arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in _OPERATIONS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(heard)
        take_over(trial, 2, job)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("job", [Job.TRAIN, Job.OBJECTIVE, Job.TRAINER])
def test_killed_at_any_operation_it_is_done_the_next_time(tmp_path: Path, job: Job) -> None:
    """Between the two, every reader finds a whole folder of weights, or none."""
    whole = left_behind(tmp_path / "whole")
    take_over(whole, 2, job)
    want = tree(whole.folder)
    own = job is Job.TRAIN
    assert steps(whole.checkpoints) == ({20: "1", 30: "2"} if own else {30: "2"})
    seen: set[str | None] = set()
    for operation in range(200):
        trial = left_behind(tmp_path / str(operation))
        killed = killed_before(operation, trial, job)
        best = trial.best / "dryfit.json"
        seen.add(best.read_text(encoding="utf-8") if trial.best.exists() else None)
        take_over(trial, 2, job)
        assert tree(trial.folder) == want, operation
        shutil.rmtree(trial.folder)
        if not killed:
            break
    assert not killed and operation > 10, "each operation was met"
    assert seen == ({"of 1"} if job is Job.OBJECTIVE else {"of 1", None, "of 2"})


def test_what_comes_later_is_nobodys(tmp_path: Path) -> None:
    """A process that goes on after its attempt has ended begins anew in an empty folder; in the end that goes too."""
    trial = TrialLayout(tmp_path)
    make(trial.files_of(1).checkpoints, "10", "1")
    save_best(trial.files_of(1).best, "of 1")
    take_over(trial, 1, Job.TRAIN)
    before = tree(tmp_path)
    make(trial.files_of(1).checkpoints, "20", "late")
    save_best(trial.files_of(1).best, "late")
    trial.files_of(2).folder.mkdir()
    take_over(trial, 2, Job.TRAIN)
    discard(trial.files_of(1))
    assert tree(tmp_path) == before
