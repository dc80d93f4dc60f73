"""Enqueued points: checked against the space with file and line, and each tried once."""

from pathlib import Path

import pytest

from dryfit.search.space import enqueued_points, next_enqueued
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_reading import LoadedStudy, load_study_text
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.trial import TrialRecord
from dryfit.study.arguments import space_of

STUDY = """
[data]
train = "a.jsonl"
validation = "b.jsonl"

[space]
"optim.lr" = {low = 1e-6, high = 1.0, log = true}
"model.name" = ["small", "large", "huge"]
"train.batch_size" = [
    {choices = [8, 16], when = {"model.name" = "small"}},
    {choices = [2, 4], when = {"model.name" = "large"}},
]
"head.layers" = {low = 0, high = 4, step = 2}

[search]
sampler = "random"
"""


def loaded(text: str, *overrides: str) -> LoadedStudy:
    return load_study_text(STUDY + text, Path("/studies/study.toml"), overrides)


def test_the_defaults_come_first_and_the_enqueued_follow_in_order() -> None:
    study = loaded("[[search.enqueue]]\noptim.lr = 1\n[[search.enqueue]]\n'model.name' = 'huge'\nhead.layers = 2\n")
    space = space_of(study)
    enqueued = ({"optim.lr": 1.0}, {"model.name": "huge", "head.layers": 2})
    first, *rest = enqueued_points(space, study.config, 0)
    assert (first["optim.lr"], first["model.name"], tuple(rest)) == (5e-5, "minilm", enqueued)
    assert enqueued_points(space, study.config, 1) == enqueued
    again = load_study_text(dump_toml(study.config), Path("/studies/frozen.toml"))
    assert enqueued_points(space, again.config, 1) == enqueued
    no_defaults = loaded("[[search.enqueue]]\noptim.lr = 1\n", "search.defaults_first=false")
    assert enqueued_points(space, no_defaults.config, 0) == ({"optim.lr": 1.0},)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ('"optim.weight_decay" = 0.1', ["study.toml:18", "is not searched", "add optim.weight_decay to [space]"]),
        ('"optim.lrr" = 0.1', ["study.toml:18", "did you mean optim.lr?"]),
        ('"optim.lr" = 2.0', ["study.toml:18", "2.0 lies outside the space", "1e-06 to 1, log"]),
        ('optim.lr = "fast"', ["study.toml:18", '"fast" lies outside']),
        ("head.layers = 1", ["study.toml:18", "0 to 4, step 2"]),
        ("head.layers = true", ["true lies outside"]),
        ('model.name = "other"', ['"small", "large", "huge"']),
        ('"train.batch_size" = 8', ["study.toml:18", "do not meet its condition", 'model.name = "small" or']),
        ('model.name = "huge"\n"train.batch_size" = 8', ["study.toml:19", "do not meet its condition"]),
        ('model.name = "large"\n"train.batch_size" = 8', ["study.toml:19", '[2, 4] when model.name = "large"']),
        ('"optim.lr" = [1e-3]', ["line 18", "search.enqueue.optim.lr is [0.001]", "a number, text in quotes"]),
        ("# nothing", ["line 17", "is {}"]),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(point: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        space_of(loaded(f"[[search.enqueue]]\n{point}\n"))
    for word in words:
        assert word in str(caught.value)


def test_a_point_on_the_command_line_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="outside the space"):
        space_of(loaded("", 'search.enqueue=[{"optim.lr"=7.0}]'))
    study = loaded("", "search.enqueue=[{optim = {lr = 0.5}}]")
    assert enqueued_points(space_of(study), study.config, 1) == ({"optim.lr": 0.5},)


def test_a_folder_of_a_model_is_the_same_in_a_point_and_in_the_space(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    text = STUDY.replace('["small", "large", "huge"]', '["small", "large", "./encoder"]')
    study = load_study_text(text + "[[search.enqueue]]\nmodel.name = './encoder'\n", tmp_path / "study.toml")
    assert enqueued_points(space_of(study), study.config, 1) == ({"model.name": str(tmp_path / "encoder")},)


def test_each_point_is_taken_once_whatever_order_they_stand_in() -> None:
    one, two = {"optim.lr": 0.1}, {"optim.lr": 0.2}

    def past(*points: dict[str, float]) -> list[TrialRecord]:
        return [TrialRecord(number, {}, {}, enqueued=dict(point)) for number, point in enumerate(points)]

    assert next_enqueued([one, two], []) == one
    assert next_enqueued([one, two], past(one)) == two
    assert next_enqueued([one, two], past(two)) == one
    assert next_enqueued([one, two], past({}, one, {}, two)) == {}
    assert next_enqueued([one, one], past(one)) == one
    assert next_enqueued([one, one], past(one, one)) == {}
    assert next_enqueued([two], past(one)) == two
