"""A Trainer's checkpoint counts once it is marked, and as long as it has its files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dryfit.training.current_trial import MARK_FILE, Evaluation, mark_whole, newest_whole

SEEN = (Evaluation(step=10, epoch=0.5, metrics={"eval_loss": float("nan"), "eval_f1": 0.5}),)


def checkpoint(folder: Path, step: int, *, marked: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    (made / "deep").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"x" * 100)
    (made / "deep" / "part").write_bytes(b"y")
    if marked:
        mark_whole(made, step=step, done=step == 30, evaluations=SEEN)
    return made


def test_the_newest_whole_one_counts_and_the_others_go(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) is None
    (tmp_path / "runs").mkdir()
    for step, marked in ((9, True), (20, True), (100, False)):
        checkpoint(tmp_path, step, marked=marked)
    found = newest_whole(tmp_path)
    assert found is not None
    folder, mark = found
    assert (folder.name, mark.step, mark.done) == ("checkpoint-20", 20, False)
    assert str(mark.evaluations) == str(SEEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-9", "runs"]
    assert (tmp_path / "checkpoint-9").stat().st_mtime < folder.stat().st_mtime
    checkpoint(tmp_path, 30)
    assert newest_whole(tmp_path)[1].done  # type: ignore[index]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shorter": lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99),
    "missing": lambda folder: (folder / "deep" / "part").unlink(),
    "more": lambda folder: (folder / "optimizer.pt").write_bytes(b""),
    "torn mark": lambda folder: (folder / MARK_FILE).write_bytes(b'{"v": 1, "st'),
    "no mark": lambda folder: (folder / MARK_FILE).unlink(),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_bytes(b"")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_one_is_passed_over(what: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    DAMAGE[what](checkpoint(tmp_path, 20))
    found = newest_whole(tmp_path)
    assert found is not None and found[1].step == 10
