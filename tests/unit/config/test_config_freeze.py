import shutil

import pytest

from dryfit.config.freeze import changed_keys, check_resumable, dump_toml, may_change
from dryfit.config.load import load_study_file
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import StudyMismatchError

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
