"""A study is seen as done from its files alone, and only where another run would find nothing to do."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ledgers
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import LedgerError
from dryfit.settings.files import write_text_atomic
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.trial import Outcome
from dryfit.study.next_step import End
from dryfit.study.session import finished

TEXT = '[study]\ntrials = 1\n[data]\ntrain = "t.jsonl"\nvalidation = "v.jsonl"\n[space]\n"optim.lr" = [1e-4]\n'


def config_of(folder: Path, *overrides: str) -> StudyConfig:
    return load_study_file(folder / "study.toml", overrides).config


def write(folder: Path, *, end: str | None = "done", overrides: tuple[str, ...] = ()) -> StudyLayout:
    """A study whose one trial is complete; its last session began after its rows were written."""
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(TEXT, encoding="utf-8")
    for name in ("t.jsonl", "v.jsonl"):
        (folder / name).write_text("{}\n")
    script = ledgers.Script(now_s=time.time() + 0.1)
    script.begin()
    script.ask(0, {"optim.lr": 1e-4})
    script.place(0)
    script.finish(0, Outcome.COMPLETE, 0.5)
    if end is not None:
        script.close(end)
    script.write(folder)
    layout = StudyLayout(folder)
    write_text_atomic(layout.frozen_file, dump_toml(config_of(folder, *overrides), folder))
    layout.logs.mkdir()
    layout.mirror_status.write_text(f'{{"offset": {layout.ledger.stat().st_size}}}')
    return layout


@pytest.mark.parametrize("end", ["done", "no_improvement"])
def test_a_study_that_is_done(tmp_path: Path, end: str) -> None:
    layout = write(tmp_path / "study", end=end)
    before = layout.ledger.read_bytes()
    found = finished(config_of(layout.folder), layout)
    assert (found.end, found.layout, found.state.counts[Outcome.COMPLETE]) == (End(end), layout, 1)
    assert layout.ledger.read_bytes() == before
    assert sorted(path.name for path in layout.folder.iterdir()) == [
        "frozen.toml", "ledger.jsonl", "logs", "study.toml", "t.jsonl", "v.jsonl"
    ]  # fmt: skip


@pytest.mark.parametrize("end", [None, "of_a_later_dryfit", *(str(end) for end in End if not end.is_final)])
def test_a_session_that_came_to_another_end_or_none(tmp_path: Path, end: str | None) -> None:
    layout = write(tmp_path / "study", end=end)
    assert finished(config_of(layout.folder), layout) is None


@pytest.mark.parametrize("left", ["nothing", "bytes", "a folder"])
def test_a_frozen_configuration_that_cannot_be_read(tmp_path: Path, left: str) -> None:
    layout = write(tmp_path / "study")
    layout.frozen_file.unlink()
    if left == "bytes":
        layout.frozen_file.write_bytes(b"\xff\xfe")
    elif left == "a folder":
        layout.frozen_file.mkdir()
    assert finished(config_of(layout.folder), layout) is None


@pytest.mark.parametrize("override", ["study.trials=2", "optim.weight_decay=0.5", "runtime.parallel=3"])
def test_any_other_setting(tmp_path: Path, override: str) -> None:
    layout = write(tmp_path / "study")
    assert finished(config_of(layout.folder, override), layout) is None


def _append(file: Path) -> None:
    with file.open("a") as rows:
        rows.write("{}\n")


def _replace_by_an_older_one(file: Path) -> None:
    other = file.with_name("other")
    other.write_text('{"x": 1}\n')
    os.utime(other, (1_000_000, 1_000_000))
    other.replace(file)


def _make_it_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("change", [_append, _replace_by_an_older_one, Path.unlink, _make_it_a_folder])
@pytest.mark.parametrize("name", ["t.jsonl", "v.jsonl"])
def test_rows_that_were_touched(tmp_path: Path, change: Callable[[Path], None], name: str) -> None:
    layout = write(tmp_path / "study")
    config = config_of(layout.folder)
    time.sleep(max(0.0, ledgers_began_s(layout) - time.time()) + 0.02)  # files say when they change, to some ms
    change(layout.folder / name)
    assert finished(config, layout) is None


def ledgers_began_s(layout: StudyLayout) -> float:
    found = finished(config_of(layout.folder), layout)
    return found.state.sessions[-1].opened_at_s


def test_rows_on_the_hub_may_have_changed(tmp_path: Path) -> None:
    overrides = ("data.train=hub:someone/rows:train",)
    layout = write(tmp_path / "study", overrides=overrides)
    assert finished(config_of(layout.folder, *overrides), layout) is None


def test_a_mirror_that_is_behind_or_silent(tmp_path: Path) -> None:
    layout = write(tmp_path / "study")
    layout.mirror_status.write_text('{"offset": 17}')
    assert finished(config_of(layout.folder), layout) is None
    shutil.rmtree(layout.logs)
    assert finished(config_of(layout.folder), layout) is None
    none = ("search.mirror=none",)
    without = write(tmp_path / "none", overrides=none)
    shutil.rmtree(without.logs)
    assert finished(config_of(without.folder, *none), without) is not None


def test_a_folder_without_a_ledger_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    layout = write(tmp_path / "study")
    config = config_of(layout.folder)
    layout.ledger.write_text("no JSON\n")
    with pytest.raises(LedgerError, match="line 1"):
        finished(config, layout)
    layout.ledger.unlink()
    layout.ledger.mkdir()
    assert finished(config, layout) is None
    layout.ledger.rmdir()
    assert finished(config, layout) is None
    assert finished(config, StudyLayout(tmp_path / "nowhere")) is None
