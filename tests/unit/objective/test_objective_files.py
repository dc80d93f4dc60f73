"""The folder of an attempt at a user's own function: a copy of what was left, whole or not there, and of this trial."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from dryfit.ledger.folder import TrialLayout
from dryfit.settings.errors import CheckpointError
from dryfit.settings.tables import ObjectiveSettings
from dryfit.settings.training_messages import ObjectiveRequest
from dryfit.training.objective import TRIAL_FILE, make_checkpoint_folder


def request(trial: TrialLayout, *, attempt: int = 2, fingerprint: str = "mine") -> ObjectiveRequest:
    return ObjectiveRequest(
        objective=ObjectiveSettings(function="m:f"),
        number=4,
        fingerprint=fingerprint,
        params={},
        seed=9,
        attempt=attempt,
        reported=(),
        checkpoint_step=None,
        checkpoint_dir=str(trial.files_of(attempt).checkpoints),
        kept_checkpoint_dir=str(trial.checkpoints),
        verdict_timeout_s=1.0,
        threads=1,
    )


@pytest.fixture
def trial(tmp_path: Path) -> TrialLayout:
    """A trial whose attempts have left something; in the shared folder of an earlier dryfit it had no name."""
    trial = TrialLayout(tmp_path)
    (trial.checkpoints / "deep" / "er").mkdir(parents=True)
    (trial.checkpoints / "state.json").write_text("{}", encoding="utf-8")
    (trial.checkpoints / "deep" / "er" / "weights").write_bytes(b"\0" * 5000)
    (trial.checkpoints / "newest").symlink_to("deep/er/weights")
    (trial.checkpoints / "gone").symlink_to("nowhere")
    os.utime(trial.checkpoints / "state.json", (1, 2))
    return trial


def test_an_attempt_begins_with_all_that_was_left(trial: TrialLayout) -> None:
    make_checkpoint_folder(request(trial))
    own = trial.files_of(2).checkpoints
    assert (own / "state.json").read_text(encoding="utf-8") == "{}" and (own / "state.json").stat().st_mtime == 2
    assert (own / "newest").readlink() == Path("deep/er/weights") and (own / "newest").read_bytes() == b"\0" * 5000
    assert (own / "gone").is_symlink()
    assert json.loads((own / TRIAL_FILE).read_text(encoding="utf-8")) == {"fingerprint": "mine", "trial": 4}
    assert [path.name for path in trial.attempt(2).iterdir()] == ["checkpoints"]
    (own / "state.json").write_text("changed", encoding="utf-8")
    assert (trial.checkpoints / "state.json").read_text(encoding="utf-8") == "{}", "nothing is shared"


def test_the_first_attempt_begins_with_an_empty_folder(tmp_path: Path) -> None:
    trial = TrialLayout(tmp_path)
    make_checkpoint_folder(request(trial, attempt=1))
    assert [path.name for path in trial.files_of(1).checkpoints.iterdir()] == [TRIAL_FILE]


def test_pipes_and_sockets_are_left_out(trial: TrialLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(trial.checkpoints / "pipe")
    monkeypatch.chdir(trial.checkpoints)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        make_checkpoint_folder(request(trial))
    names = {path.name for path in trial.files_of(2).checkpoints.iterdir()}
    assert names == {"state.json", "deep", "newest", "gone", TRIAL_FILE}


@pytest.mark.parametrize("place", ["kept", "own"])
@pytest.mark.parametrize(
    "said", ['{"fingerprint":"another"}', "[]", '{"fingerp', "[" * 100_000 + "]" * 100_000, " " * 100_000]
)
def test_another_trials_folder_is_refused_and_stays_as_it_is(trial: TrialLayout, place: str, said: str) -> None:
    folder = trial.checkpoints if place == "kept" else trial.files_of(2).checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRIAL_FILE).write_text(said, encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"\.dryfit-trial\.json in it is of a trial with fingerprint (another|that)"
    ):
        make_checkpoint_folder(request(trial))
    assert (folder / TRIAL_FILE).read_text(encoding="utf-8") == said
    assert (trial.checkpoints / "state.json").exists()
    assert trial.files_of(2).checkpoints.exists() == (place == "own")


@pytest.mark.parametrize("kind", ["FIFO", "folder", "endless device"])
def test_what_is_no_file_at_its_place_is_refused_and_not_waited_for(trial: TrialLayout, kind: str) -> None:
    said = trial.checkpoints / TRIAL_FILE
    make = {
        "FIFO": lambda: os.mkfifo(said),
        "folder": said.mkdir,
        "endless device": lambda: said.symlink_to("/dev/zero"),
    }
    make[kind]()
    with pytest.raises(CheckpointError, match="with fingerprint that cannot be read"):
        make_checkpoint_folder(request(trial))


def test_a_copy_that_a_full_disk_ended_leaves_nothing(trial: TrialLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(shutil, "copy2", full)
        make_checkpoint_folder(request(trial))
    assert caught.value.errno == errno.ENOSPC, "by which the failure is known"
    assert not list(trial.attempt(2).iterdir())
    make_checkpoint_folder(request(trial))
    assert (trial.files_of(2).checkpoints / "deep" / "er" / "weights").read_bytes() == b"\0" * 5000


def copied_until(body: ObjectiveRequest, files: int) -> int:
    """Copy in a process of its own that ends before its next file but so many; its exit status."""
    child = os.fork()
    if child == 0:
        left, copy = files, shutil.copy2

        def deadly(source: Path, target: Path) -> None:
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1
            copy(source, target)

        shutil.copy2 = deadly  # type: ignore[assignment]
        make_checkpoint_folder(body)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("files", "status", "there"), [(0, 9, False), (1, 9, False), (2, 0, True)])
def test_a_copy_that_was_killed_is_never_taken_for_a_whole_one(
    trial: TrialLayout, files: int, status: int, there: bool
) -> None:
    assert copied_until(request(trial), files) == status
    assert trial.files_of(2).checkpoints.exists() == there
    make_checkpoint_folder(request(trial, attempt=3))
    names = {path.name for path in trial.files_of(3).checkpoints.rglob("*")}
    assert names == {"state.json", "deep", "er", "weights", "newest", "gone", TRIAL_FILE}
