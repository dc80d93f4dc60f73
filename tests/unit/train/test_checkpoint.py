import math
from pathlib import Path

import pytest

from dryfit.core.errors import CheckpointError
from dryfit.core.trial import MetricPoint
from dryfit.train.checkpoint import newest_good, save_checkpoint

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


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove", "grow"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20) / name
    content = path.read_bytes()
    match harm:
        case "cut":
            path.write_bytes(content[:-1])
        case "flip":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "grow":
            path.write_bytes(content + b" ")
        case "remove":
            path.unlink()
    found = newest_good(tmp_path, "abc")
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize("moment", ["while writing", "before renaming"])
def test_a_kill_while_writing_leaves_the_one_before(tmp_path: Path, moment: str, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    save(tmp_path, 10)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if moment == "before renaming":
            patch.setattr(Path, "rename", killed)
            save(tmp_path, 20)
        save_checkpoint(tmp_path, step=20, fingerprint="abc", points=(), write=killed)
    found = newest_good(tmp_path, "abc")
    assert found is not None
    assert found.step == 10
    save(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


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
