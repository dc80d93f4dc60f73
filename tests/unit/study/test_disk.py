"""The room a study takes: to the byte, and what would fit where it does not."""

from pathlib import Path

import pytest

from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import MachineError
from dryfit.study.files import DiskNeed, check_disk, disk_need, taken_bytes, what_fits

GIB = 2**30


@pytest.mark.parametrize(
    ("keep", "trials", "parallel", "optimizers", "expected_bytes"),
    [
        # a running trial: three files of weights, three checkpoints of weights and state
        ("none", 20, 1, ["adamw"], (3 + 3 * (1 + 2)) * GIB),
        ("best:3", 20, 1, ["adamw"], (3 + 3 + 3 * 3) * GIB),
        ("best:3", 2, 8, ["adamw"], (2 + 2 * (3 + 3 * 3)) * GIB),  # no more than the study's trials
        ("all", 20, 2, ["sgd"], (20 + 2 * (3 + 3 * 2)) * GIB),
        ("best:1", 20, 1, ["sgd", "adamw"], (1 + 3 + 3 * 3) * GIB),  # the optimizer with the most state decides
        ("best:1", 20, 1, ["not known"], (1 + 3 + 3 * 3) * GIB),
    ],
)
def test_the_need_is_the_sum_of_what_may_lie_there_at_once(
    keep: str, trials: int, parallel: int, optimizers: list[str], expected_bytes: int
) -> None:
    need = disk_need([GIB // 2, GIB], optimizers, keep=keep, trials=trials, parallel=parallel)
    assert need.total_bytes == expected_bytes


def test_exactly_enough_is_enough_and_a_byte_less_is_not(tmp_path: Path) -> None:
    need = disk_need([GIB], ["adamw"], keep="best:3", trials=20, parallel=2)
    check_disk(need, free_bytes=need.total_bytes, taken_bytes=0, place=tmp_path)
    check_disk(need, free_bytes=need.total_bytes - 5, taken_bytes=5, place=tmp_path)
    with pytest.raises(MachineError) as refused:
        check_disk(need, free_bytes=need.total_bytes - 1, taken_bytes=0, place=tmp_path)
    assert "27.0 GiB" in refused.value.found
    assert "3 kept x 1.0 GiB" in refused.value.found
    assert "--set runtime.keep=best:2" in refused.value.hint


def test_a_study_whose_models_are_not_known_needs_nothing(tmp_path: Path) -> None:
    check_disk(disk_need([], ["adamw"], keep="all", trials=9, parallel=9), free_bytes=0, taken_bytes=0, place=tmp_path)


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (24 + 2, "--set runtime.keep=best:2"),
        (24 + 1, "--set runtime.keep=best:1"),
        (24, "--set runtime.keep=none"),
        (23, "--set runtime.keep=none --set runtime.parallel=1"),
        (12, "--set runtime.keep=none --set runtime.parallel=1"),
        (11, ""),
    ],
)
def test_what_is_proposed_fits_and_takes_least_away(room: int, said: str) -> None:
    need = DiskNeed(weights_bytes=1, state_bytes=2, kept=3, running=2)
    assert need.running_bytes == 24
    assert what_fits(need, room) == said


def test_what_trials_have_already_is_counted(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    assert taken_bytes(layout) == 0
    files = {
        "0000/best/model.safetensors": 100,
        "0001/checkpoints/step-00000002/model": 11,
        "0001/attempt-2/best/model.safetensors": 1000,
        "0001/attempt-2/checkpoints/step-00000004/model": 10000,
    }
    for name, size_bytes in files.items():
        path = layout.trials / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size_bytes))
    assert taken_bytes(layout) == 11111


def test_with_folds_no_weights_stay() -> None:
    need = disk_need([GIB], ["adamw"], keep="best:3", trials=20, parallel=2)
    assert need.with_folds(1) == need
    folds = need.with_folds(5)
    assert (folds.kept_bytes, folds.running_bytes) == (0, 2 * 3 * 3 * GIB)
    assert what_fits(folds, 9 * GIB) == "--set runtime.parallel=1"
