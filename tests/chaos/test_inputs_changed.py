"""Rows and models that are changed, removed or replaced while a study trains on them: no trial learns from others."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dryfit.core.settings.trial import Outcome
from study_runs import DEADLINE_S, ends, fold, start, tune_to_end, wait_for, write_study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    write_study(folder, trials=3)
    return tune_to_end(folder)


def changed_after_a_trial(undisturbed: Path, folder: Path, change: Callable[[Path], object]) -> str:
    """Run the study again, change something once a trial has ended; what is printed on stderr."""
    folder.mkdir()
    for name in ("model", "data"):
        shutil.copytree(undisturbed / name, folder / name)
    shutil.copy(undisturbed / "study.toml", folder / "study.toml")
    process = start("tune", folder, "--quiet")
    assert wait_for(lambda: (folder / "ledger.jsonl").exists() and fold(folder).counted >= 1, process)
    change(folder)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return errors


def fewer_rows(folder: Path) -> None:
    rows = (folder / "data/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "data/train.jsonl").write_text("".join(rows[:-5]), encoding="utf-8")


def a_fifo_for_rows(folder: Path) -> None:
    (folder / "data/train.jsonl").unlink()
    os.mkfifo(folder / "data/train.jsonl")


def no_cache(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


@pytest.mark.parametrize("change", [fewer_rows, a_fifo_for_rows, no_cache])
def test_a_study_goes_on_with_the_rows_that_it_began_with(
    change: Callable[[Path], None], undisturbed: Path, tmp_path: Path
) -> None:
    changed_after_a_trial(undisturbed, tmp_path / "study", change)
    assert ends(tmp_path / "study") == ends(undisturbed)


def other_rows_and_no_cache(folder: Path) -> None:
    fewer_rows(folder)
    no_cache(folder)


def other_weights(folder: Path) -> None:
    weights = folder / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    for at in range(len(data) // 2 // 4 * 4, len(data), 4):
        data[at + 2] ^= 0x3F
    weights.with_name("other").write_bytes(data)
    weights.with_name("other").replace(weights)


@pytest.mark.parametrize(
    ("change", "words"), [(other_rows_and_no_cache, "the rows have changed"), (other_weights, "its files have changed")]
)
def test_a_trial_that_would_learn_from_something_else_fails_and_says_so(
    change: Callable[[Path], None], words: str, undisturbed: Path, tmp_path: Path
) -> None:
    changed_after_a_trial(undisturbed, tmp_path / "study", change)
    first, *others = fold(tmp_path / "study").trials
    assert first.value == ends(undisturbed)[0].value
    assert [trial.outcome for trial in others] == [Outcome.FAILED] * 2
    for trial in others:
        failure = trial.attempts[-1].failure
        assert failure is not None and words in failure.sentence
