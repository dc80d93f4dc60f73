"""What a study file must hold depends on what it is read for."""

from pathlib import Path

import pytest

from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.tables import DataSettings
from dryfit.settings.task_facts import default_metric, facts_of
from golden import Golden, refusal

DATA = '[data]\ntrain = "a.jsonl"\nvalidation = "b.jsonl"\n'
PLANNED = [
    ('[study]\ntask = "causal-lm"\nmetric = "f1_macro"\n', "study.metric is f1_macro, and study.task is causal-lm"),
    ("", "has no train"),
]
NEVER = [
    ("[lora]\nr = 8\n", "not read by study.task = criteria"),
    ('[study]\ntask = "causal-lm"\n[head]\nlayers = 1\n', "not read by study.task = causal-lm"),
    ('[study]\ntask = "causal-lm"\n[space]\n"loss.gamma" = [1.0, 2.0]\n', "not read by study.task = causal-lm"),
    ('[execution]\nmemory_limit = "0GiB"\n', "execution.memory_limit is '0GiB'"),
    ("[data]\nsplit_seed = 3\n", "only with data.file"),
]


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("criteria", "maximize f1_macro"),
        ("evidence", "maximize span_balanced"),
        ("share", "maximize combined"),
        ("joint", "maximize combined"),
        ("causal-lm", "minimize loss"),
    ],
)
def test_a_study_without_a_metric_has_its_tasks_first(task: str, metric: str) -> None:
    goals = load_study_text(f'[study]\ntask = "{task}"\n{DATA}', Path("x.toml")).config.goals
    assert [f"{goal.direction} {goal.name}" for goal in goals] == [metric]
    assert default_metric(BuiltInTask(task)) == facts_of(BuiltInTask(task)).metrics(DataSettings())[0]


REGRESSION = DATA + "num_labels = 1\n"


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("", "minimize mse"),
        ('[study]\nname = "mine"\n', "minimize mse"),
        ('[study]\nmetric = "spearman"\n', "maximize spearman"),
        ('[study]\nmetric = "mae"\n', "minimize mae"),
    ],
)
def test_one_number_to_a_row_is_a_regression(text: str, goal: str) -> None:
    goals = load_study_text(text + REGRESSION, Path("x.toml")).config.goals
    assert [f"{goal.direction} {goal.name}" for goal in goals] == [goal]


def test_what_a_regression_has_not(golden: Golden) -> None:
    cases = [
        '[study]\nmetric = "f1_macro"\n',
        '[study]\ntask = "share"\nmetric = "combined"\n',
        '[study]\ntask = "evidence"\n',
        '[loss]\nname = "focal"\n',
        '[space]\n"loss.class_balance" = ["none", "weighted"]\n',
        '[head]\nthreshold = "calibrated"\n',
        '[space]\n"head.threshold" = ["fixed", "calibrated"]\n',
    ]
    golden("study", [refusal(load_study_text, case + REGRESSION, Path("x.toml")) for case in cases])


def test_a_regression_has_no_names_of_classes() -> None:
    with pytest.raises(ConfigError, match=r"data\.labels has one name, 'a'"):
        load_study_text(DATA + 'labels = ["a"]\n', Path("x.toml"))


def test_of_code_of_the_users_own_the_default_is_what_it_was() -> None:
    assert default_metric("mine:Task") == default_metric(BuiltInTask.OBJECTIVE) == "f1_macro"


@pytest.mark.parametrize(("text", "said"), PLANNED)
def test_what_can_only_be_planned(text: str, said: str) -> None:
    data = DATA if "task" in text else ""
    assert load_study_text(text, Path("x.toml"), (), Use.PLAN).config
    with pytest.raises(ConfigError, match=said):
        load_study_text(text + data, Path("x.toml"))


@pytest.mark.parametrize(("text", "said"), NEVER)
@pytest.mark.parametrize("use", Use)
def test_what_is_wrong_for_both(text: str, said: str, use: Use) -> None:
    data = "" if "[data]" in text else DATA
    with pytest.raises(ConfigError) as caught:
        load_study_text(text + data, Path("x.toml"), (), use)
    assert said in str(caught.value)


def test_adapters_are_planned_with_their_task() -> None:
    text = '[study]\ntask = "causal-lm"\n[lora]\nr = 8\n'
    config = load_study_text(text, Path("x.toml"), ("lora.alpha=16",), Use.PLAN).config
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (8, 16.0)


def test_a_micro_batch_above_the_batch_cannot_be_planned() -> None:
    sizes = ("train.batch_size=4", "execution.micro_batch=8")
    with pytest.raises(ConfigError, match="from 1 to 4"):
        load_study_text("", Path("x.toml"), sizes, Use.PLAN)
    searched = (*sizes, "space.train.batch_size=[4, 8]")
    assert load_study_text("", Path("x.toml"), searched, Use.PLAN).config.execution.micro_batch == 8
    assert load_study_text(DATA, Path("x.toml"), sizes).config.execution.micro_batch == 8


def test_paths_start_where_the_text_would_lie(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "study.toml").write_text('[model]\nname = "model"\n', encoding="utf-8")
    assert load_study_file(tmp_path, (), Use.PLAN).config.model.name == str(tmp_path / "model")
