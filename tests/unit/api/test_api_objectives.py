"""Which functions another process can import, and the study that a function stands for."""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

import dryfit
import objectives
from dryfit.settings.choices import Direction
from dryfit.settings.errors import ConfigError, DryfitError, ObjectiveError
from dryfit.settings.wire import MARKER_VARIABLE
from dryfit.study.own_functions import caller_paths, function_name, objective_study, trainer_study
from golden import refusal

SUPPORT = str(Path(objectives.__file__).parent)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (objectives.a_lambda, "it is a lambda"),
        (objectives.make_closure(), "defined inside a function"),
        (objectives.Holder().bound, "a bound method"),
        (functools.partial(objectives.quadratic), "a partial"),
        (objectives.Holder, "a type"),
        ("objectives:quadratic", "a str"),
        (objectives.shadowed, "something else than the function that was given"),
    ],
)
def test_what_no_other_process_can_import_is_refused(function, said):
    with pytest.raises(ObjectiveError) as caught:
        function_name(function)
    assert said in str(caught.value)
    assert "allowed: a function defined at the top of a module" in str(caught.value)


def test_what_is_defined_in_a_notebook_is_refused(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    function = eval("lambda trial: 0.0", main.__dict__)  # noqa: S307  # as a cell of a notebook defines it
    function.__qualname__ = "cell"
    monkeypatch.setattr(main, "cell", function, raising=False)
    with pytest.raises(ObjectiveError, match="notebook"):
        function_name(function)
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    with pytest.raises(ObjectiveError, match="notebook"):
        function_name(function)


def test_names_of_functions():
    assert str(function_name(objectives.quadratic)[0]) == "objectives:quadratic"
    assert str(function_name(objectives.renamed)[0]) == "objectives:quadratic"
    assert str(function_name(objectives.Holder.static)[0]) == "objectives:Holder.static"


def test_folders_that_a_new_process_would_not_know():
    paths = caller_paths()
    assert SUPPORT in paths
    assert not [path for path in paths if "site-packages" in path or path.endswith("lib-dynload")]


def study(space, **given):
    arguments = {"direction": None, "folder": None, "overrides": ()} | given
    tables = arguments.pop("tables", {})
    return objective_study(objectives.quadratic, {**tables, "space": space}, **arguments)


def test_the_study_of_a_function(tmp_path):
    space = {
        "x": {"low": np.float64(0.5), "high": 2},
        "n": range(1, 4),
        "k": {"low": np.int64(1), "high": 8, "log": True},
    }
    loaded, layout = study(
        space,
        folder=tmp_path / "here",
        overrides=("study.trials=7", "runtime.parallel=2"),
        tables={"study": {"seed": 5}, "search": {"sampler": "random"}},
        direction={"error": "minimize", "speed": Direction.MAXIMIZE},
    )
    config = loaded.config
    assert layout.folder == tmp_path / "here"
    assert (config.study.name, config.study.trials, config.study.seed) == ("quadratic", 7, 5)
    assert (config.search.sampler, config.runtime.parallel) == ("random", 2)
    assert [(goal.name, goal.direction) for goal in config.goals] == [("error", "minimize"), ("speed", "maximize")]
    assert config.objective.function == "objectives:quadratic"
    assert SUPPORT in config.objective.paths
    assert config.space["n"][0].choices == (1, 2, 3)
    assert study({"x": [1, 2]})[1].folder == Path.cwd() / "quadratic-study"


def test_the_study_of_a_trainer(tmp_path):
    given = {"metric": None, "direction": None, "folder": tmp_path / "here", "overrides": ("study.trials=7",)}
    config = trainer_study(objectives.quadratic, {"space": {"x": [1]}}, **given)[0].config
    assert config.trainer is not None and config.function is not None and config.objective is None
    assert (config.trainer.make, config.study.task, config.study.trials) == ("objectives:quadratic", "trainer", 7)
    assert (config.function.function, config.function.goals) == ("objectives:quadratic", ("eval_loss",))
    assert [(goal.name, goal.direction) for goal in config.goals] == [("eval_loss", "minimize")]
    given |= {"metric": "eval_f1"}
    with pytest.raises(ConfigError, match="nobody else knows what is better"):
        trainer_study(objectives.quadratic, {"space": {"x": [1]}}, **given)
    given |= {"direction": {"eval_f1": "maximize"}}
    with pytest.raises(ConfigError, match='"minimize" or "maximize"'):
        trainer_study(objectives.quadratic, {"space": {"x": [1]}}, **given)


@pytest.mark.parametrize(
    ("space", "given", "said"),
    [
        ({}, {}, "space is empty"),
        ({"x": {"low": 1, "high": object()}}, {}, "space.x.high has <object"),
        ({"x": {"low": 2, "high": 1}}, {}, "low 2 is above high 1"),
        ({"x": [1]}, {"direction": "upwards"}, "objective.directions is"),
        ({"x": [1]}, {"direction": {}}, "objective.goals"),
        ({"x": [1]}, {"tables": {"serach": {}}}, "serach is no table"),
        ({"x": [1]}, {"tables": {"study": 3}}, "study is 3"),
        ({"x": [1]}, {"tables": {"train": {"epochs": 3}}}, "train.epochs is not read by study.task = objective"),
        ({"x": [1]}, {"overrides": ("study.metric=mcc",)}, "study.metric is not read"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(space, given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        study(space, **given)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_file_or_a_function(golden):
    cases = [
        {},
        {"space": {"x": [1]}},
        {"study_file": "study.toml", "direction": "maximize"},
        {"study_file": "study.toml", "search": {"sampler": "random"}},
        {"study_file": "study.toml", "objective": objectives.quadratic},
        {"trainer": objectives.quadratic, "objective": objectives.quadratic},
        {"objective": objectives.quadratic, "space": {"x": [1]}, "metric": "eval_loss"},
    ]
    golden("study", [refusal(dryfit.tune, **case) for case in cases])


def test_a_trial_cannot_start_the_study_it_belongs_to(monkeypatch):
    monkeypatch.setenv(MARKER_VARIABLE, "an id")
    with pytest.raises(DryfitError, match='if __name__ == "__main__"'):
        dryfit.tune(objective=objectives.quadratic, space={"x": [1]})
