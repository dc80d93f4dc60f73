import shutil

import pytest

from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.study_file_text import dump_toml

TEXT = '[data]\ntrain = "train.jsonl"\nvalidation = "validation.jsonl"\n[space]\n"optim.lr" = [1e-4, 1e-5]\n'


def load(folder, *overrides):
    (folder / "study.toml").write_text(TEXT, encoding="utf-8")
    return load_study_file(folder, overrides).config


def test_a_frozen_study_can_be_moved(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "encoder").mkdir(parents=True)
    config = load(here, f"model.name={here / 'encoder'}")
    (here / "frozen.toml").write_text(dump_toml(config, here), encoding="utf-8")
    assert load_study_file(here / "frozen.toml").config == config
    shutil.move(here, there)
    moved = load_study_file(there / "frozen.toml").config
    assert moved.model.name == str(there / "encoder")
    assert moved == load(there, f"model.name={there / 'encoder'}")


def test_a_study_frozen_with_an_older_spelling_goes_on_and_a_study_file_is_told_the_new_one(tmp_path):
    new = load(tmp_path, "runtime.keep=best:7")
    frozen = tmp_path / "frozen.toml"
    frozen.write_text(dump_toml(new, tmp_path).replace('keep = "best:7"', "keep_best = 7"), encoding="utf-8")
    assert "keep_best = 7" in frozen.read_text(encoding="utf-8")
    assert load_study_file(frozen).config == new
    assert load_study_file(frozen).config.runtime.keep == "best:7"
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "runtime.keep_best=7")
    assert (refused.value.found, refused.value.allowed) == (
        "runtime.keep_best is no key of [runtime] any more",
        "best:K, all or none",
    )
    assert 'keep = "best:3"' in refused.value.hint
    text = dump_toml(new, tmp_path)
    frozen.write_text(text.replace("[execution]", '[execution]\nfrozen_cache = "4GiB"'), encoding="utf-8")
    assert "frozen_cache" in frozen.read_text(encoding="utf-8")
    assert load_study_file(frozen).config == new
    with pytest.raises(ConfigError, match="frozen_cache is no key of"):
        load(tmp_path, "execution.frozen_cache=1GiB")


def test_listeners_are_found_beside_the_study_file_and_move_with_it(tmp_path, monkeypatch):
    here, there, current = (tmp_path / name for name in ("here", "there", "current"))
    here.mkdir(), current.mkdir()
    (here / "beside.py").touch()
    (current / "around.py").touch()
    monkeypatch.chdir(current)
    names = ["beside:make", "beside.py:Made", "around:make", "installed.module:make", "/opt/far.py:make"]
    (here / "study.toml").write_text(f"[study]\nlisteners = {names}\n{TEXT}", encoding="utf-8")
    config = load_study_file(here).config
    others = (f"{current}/around:make", "installed.module:make", "/opt/far.py:make")
    assert config.study.listeners == (f"{here}/beside:make", f"{here}/beside.py:Made", *others)
    (here / "frozen.toml").write_text(dump_toml(config, here), encoding="utf-8")
    assert load_study_file(here / "frozen.toml").config == config
    shutil.move(here, there)
    monkeypatch.chdir(tmp_path)
    moved = load_study_file(there / "frozen.toml").config
    assert moved.study.listeners == (f"{there}/beside:make", f"{there}/beside.py:Made", *others)
    with pytest.raises(ConfigError, match="study.listeners is"):
        load(tmp_path, 'study.listeners=["nameless"]')


@pytest.mark.parametrize("wrong", ["best:0", "best:", "3", "some", "best:1000000"])
def test_keep_is_best_of_a_number_all_or_none(tmp_path, wrong):
    with pytest.raises(ConfigError, match="runtime.keep is"):
        load(tmp_path, f"runtime.keep={wrong}")
