import shutil

import pytest

from dryfit.config.freeze import changed_keys, check_resumable, dump_toml, may_change
from dryfit.config.load import load_study_file
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError, StudyMismatchError

TEXT = '[data]\ntrain = "train.jsonl"\nvalidation = "validation.jsonl"\n[space]\n"optim.lr" = [1e-4, 1e-5]\n'


def load(folder, *overrides):
    (folder / "study.toml").write_text(TEXT, encoding="utf-8")
    return load_study_file(folder, overrides).config


def test_what_may_change_may_change(tmp_path):
    old = load(tmp_path)
    new = load(
        tmp_path,
        "study.trials=99",
        "study.patience=3",
        "runtime.parallel=2",
        "search.sampler=random",
        "space.optim.lr=[1e-3]",
        "space.head.layers=[0,1]",
        "execution.threads=1",
    )
    changed = {
        "study.trials", "study.patience", "runtime.parallel", "search.sampler", "space.optim.lr", "space.head.layers",
        "execution.threads",
    }  # fmt: skip
    assert set(changed_keys(old, new)) == changed
    assert all(may_change(key) for key in changed)
    check_resumable(old, new)


@pytest.mark.parametrize(
    ("override", "was", "now", "back"),
    [
        ("optim.lr=0.001", "optim.lr was 5e-05", "is now 0.001", "--set optim.lr=5e-05"),
        ("study.metric=accuracy", 'study.metric was "f1_macro"', 'is now "accuracy"', "--set study.metric=f1_macro"),
        ("study.seed=4", "study.seed was 0", "is now 4", "--set study.seed=0"),
        ("study.direction=minimize", "study.direction was unset", "minimize", "remove study.direction"),
        ('study.also=["loss"]', "study.also was []", 'is now ["loss"]', "--set study.also=[]"),
        ("data.train=/x.csv", "data.train was", '"/x.csv"', "--set data.train="),
    ],
)
def test_what_changes_the_results_is_refused(tmp_path, override, was, now, back):
    with pytest.raises(StudyMismatchError) as caught:
        check_resumable(load(tmp_path), load(tmp_path, override, "study.trials=3"))
    assert was in caught.value.found
    assert now in caught.value.found
    assert "study.trials" not in caught.value.found
    assert "new folder" in caught.value.hint
    assert back in caught.value.hint


def test_a_number_is_not_its_float_nor_a_truth_value():
    one = StudyConfig.model_validate_json('{"space": {"head.layers": [1]}}')
    for other in ("1.0", "true"):
        assert changed_keys(one, StudyConfig.model_validate_json(f'{{"space": {{"head.layers": [{other}]}}}}'))


def test_a_frozen_study_can_be_moved(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "encoder").mkdir(parents=True)
    config = load(here, f"model.name={here / 'encoder'}")
    (here / "frozen.toml").write_text(dump_toml(config, here), encoding="utf-8")
    assert load_study_file(here / "frozen.toml").config == config
    shutil.move(here, there)
    moved = load_study_file(there / "frozen.toml").config
    assert moved.model.name == str(there / "encoder")
    check_resumable(moved, load(there, f"model.name={there / 'encoder'}"))


def test_a_study_frozen_with_an_older_spelling_goes_on_and_a_study_file_is_told_the_new_one(tmp_path):
    new = load(tmp_path, "runtime.keep=best:7")
    frozen = tmp_path / "frozen.toml"
    frozen.write_text(dump_toml(new, tmp_path).replace('keep = "best:7"', "keep_best = 7"), encoding="utf-8")
    assert "keep_best = 7" in frozen.read_text(encoding="utf-8")
    check_resumable(load_study_file(frozen).config, new)
    assert load_study_file(frozen).config.runtime.keep == "best:7"
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "runtime.keep_best=7")
    assert (refused.value.found, refused.value.allowed) == (
        "runtime.keep_best is no key of [runtime] any more",
        "best:K, all or none",
    )
    assert 'keep = "best:3"' in refused.value.hint


@pytest.mark.parametrize("wrong", ["best:0", "best:", "3", "some", "best:1000000"])
def test_keep_is_best_of_a_number_all_or_none(tmp_path, wrong):
    with pytest.raises(ConfigError, match="runtime.keep is"):
        load(tmp_path, f"runtime.keep={wrong}")
