import errno
import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from dryfit.ledger.folder import TrialLayout
from dryfit.settings.errors import CheckpointError, CorruptCheckpointError
from dryfit.settings.trial import FoldScore, MetricPoint
from dryfit.settings.wire import Job
from dryfit.study.files import take_over
from dryfit.training.checkpoint import Reading, newest_good, save_checkpoint

POINTS = (
    MetricPoint(n=0, step=5, epoch=0.5, value=0.25, metrics={"f1": 0.25, "loss": 1 / 3}),
    MetricPoint(n=1, step=10, epoch=1.0, value=math.nan, metrics={"f1": math.nan}),
)


def write(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "optimizer.pt").write_bytes(b"moments")


def save(directory: Path, step: int) -> Path:
    return save_checkpoint(directory, step=step, fingerprint="abc", points=POINTS, write=write)


def test_newest_two_are_kept_and_the_newest_found(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    found = newest_good(tmp_path, "abc")
    assert found is not None
    assert (found.step, found.folder) == (30, tmp_path / "step-00000030")
    assert found.points[0] == POINTS[0]
    assert math.isnan(found.points[1].value)
    assert newest_good(tmp_path / "none", "abc") is None


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "optimizer.pt").write_bytes(b"damaged")
    save(tmp_path, 20)
    found = newest_good(tmp_path, "abc")
    assert found is not None
    assert found.step == 20


def test_another_trials_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="fingerprint abc"):
        newest_good(tmp_path, "other")
    with pytest.raises(CheckpointError, match="allowed: a checkpoint of the trial with fingerprint other"):
        newest_good(tmp_path, "other", computed="a third")


def test_a_checkpoint_of_what_is_computed_now_is_taken(tmp_path: Path) -> None:
    """dryfit 0.1.0 wrote the hash of its own time into checkpoints, not what the ledger had."""
    save(tmp_path, 10)
    found = newest_good(tmp_path, "other", computed="abc")
    assert found is not None and found.step == 10


_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


def killed_at(directory: Path, step: int, operation: int) -> bool:
    """Save in a process of its own that is killed before one of its operations on files; whether it was."""

    def count(*_: object) -> None:
        nonlocal operation
        operation -= 1
        if operation < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        # A tree is removed by names within open folders.
        path = arguments[0]
        if event in _OPERATIONS and (
            isinstance(path, int) or str(path).startswith(str(directory)) or "/" not in str(path)
        ):
            count()

    def torn(folder: Path) -> None:
        """As the state is written: a kill may leave half a file."""
        for path, content in ((folder / "model.safetensors", b"weights" * 1000), (folder / "optimizer.pt", b"moments")):
            with path.open("wb", buffering=0) as file:
                for half in (content[: len(content) // 2], content[len(content) // 2 :]):
                    file.write(half)
                    count()

    child = os.fork()
    if child == 0:
        fsync = os.fsync
        os.fsync = lambda file: (count(), fsync(file))[1]
        sys.addaudithook(heard)
        save_checkpoint(directory, step=step, fingerprint="abc", points=POINTS, write=torn)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_killed_at_any_operation_of_a_write_there_is_a_good_checkpoint(tmp_path: Path) -> None:
    reached: list[int] = []
    for operation in range(200):
        directory = tmp_path / str(operation)
        for step in (10, 20):
            save(directory, step)
        (directory / "step-00000020" / "optimizer.pt").write_bytes(b"damaged")
        killed = killed_at(directory, 30, operation)
        found = newest_good(directory, "abc")
        assert found is not None, operation
        assert found.step in (10, 30), operation
        reached.append(found.step)
        # The next attempt goes on from there, and leaves nothing of what was interrupted.
        save(directory, 40)
        after = newest_good(directory, "abc")
        assert after is not None and after.step == 40
        assert all(path.name.startswith("step-") for path in directory.iterdir())
        assert len(list(directory.iterdir())) <= 2
        if not killed:
            break
    assert not killed and len(reached) > 25, "each operation was met"
    assert reached == sorted(reached) and {10, 30} == set(reached), "one rename divides before from after"


def test_a_damaged_newest_one_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    for step in (10, 30):
        save(tmp_path, step)
    (tmp_path / "step-00000030" / "optimizer.pt").unlink()
    save(tmp_path, 20)  # by an attempt that went on from step 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.write_bytes(b"moment"), "optimizer.pt: 6 bytes, not 7"),
        (lambda path: path.write_bytes(b"Moments"), "optimizer.pt: its hash is another"),
        (lambda path: path.write_bytes(b"moments "), "optimizer.pt: 8 bytes, not 7"),
        (lambda path: path.unlink(), "optimizer.pt: No such file or directory"),
        (lambda path: path.with_name("manifest.json").write_bytes(b""), "manifest.json: its hash is another"),
    ],
)
def test_damage_is_told_with_what_is_done_without_it(tmp_path: Path, harm, told: str) -> None:
    save(tmp_path, 10)
    harm(save(tmp_path, 20) / "optimizer.pt")
    notes: list[str] = []
    found = newest_good(tmp_path, "abc", notes.append)
    assert found is not None and found.step == 10
    assert notes == [f"the checkpoint step-00000020 is damaged ({told}): going on from step 10, the one before"]
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    notes.clear()
    assert newest_good(tmp_path, "abc", notes.append) is None
    assert len(notes) == 2
    assert all(note.endswith("and there is no good one before: beginning anew") for note in notes)


def test_a_full_disk_gets_its_room_back_and_keeps_what_was_good(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 10)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, step=20, fingerprint="abc", points=(), write=full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_clean_up_that_fails_does_not_hide_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("shutil.os.rmdir", refused)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, step=20, fingerprint="abc", points=(), write=full)


@pytest.mark.parametrize("error", [RuntimeError("PytorchStreamReader failed"), KeyError("state"), EOFError()])
def test_one_that_cannot_be_read_is_set_aside_so_that_the_next_attempt_does_without(tmp_path: Path, error) -> None:
    trial = TrialLayout(tmp_path)
    for step in (10, 20):
        save(trial.checkpoints, step)
    newest, own = trial.checkpoints / "step-00000020", trial.files_of(2).checkpoints
    with pytest.raises(CorruptCheckpointError, match="step-00000020: it cannot be read") as caught:
        with Reading(newest, own):
            raise error
    assert caught.value.__cause__ is error
    assert newest.is_dir(), "it is not this attempt's own"
    take_over(trial, 2, Job.TRAIN)
    found = newest_good(trial.checkpoints, "abc")
    assert found is not None and found.step == 10


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), OSError(errno.EIO, "")])
def test_what_is_not_the_files_fault_sets_nothing_aside(tmp_path: Path, error: Exception) -> None:
    newest = save(tmp_path, 20)
    with pytest.raises(type(error)), Reading(newest, tmp_path / "own"):
        raise error
    with pytest.raises(type(error)), Reading(None, tmp_path / "own"):
        raise error
    assert newest.is_dir() and not (tmp_path / "own").exists()


def test_folds_that_are_done_are_kept_and_older_checkpoints_have_none(tmp_path: Path) -> None:
    folds = (FoldScore(0.25, (0.5,), 10, 12, 20), FoldScore(0.75, (1 / 3,), 3, 8, 20))
    between = save_checkpoint(tmp_path, step=20, fingerprint="abc", points=(), write=lambda _: None, folds=folds)
    found = newest_good(tmp_path, "abc")
    assert found is not None
    assert (found.folder, found.folds, found.points, found.fold_step) == (between, folds, (), 0)
    save_checkpoint(tmp_path, step=25, fingerprint="abc", points=POINTS, write=write, folds=folds)
    found = newest_good(tmp_path, "abc")
    assert found is not None and (found.step, found.fold_step, found.folds) == (25, 5, folds)
    # As it was written before there were folds.
    (tmp_path / "older").mkdir()
    folder = save(tmp_path / "older", 10)
    _, _, text = (folder / "manifest.json").read_bytes().partition(b"\n")
    manifest = json.loads(text)
    del manifest["folds"]
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
    found = newest_good(tmp_path / "older", "abc")
    assert found is not None and (found.folds, found.fold_step) == ((), 10)
