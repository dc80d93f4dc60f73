import json
import os
from pathlib import Path

import pytest

from dryfit.documents.summary import summarise
from dryfit.ledger.events import Compatibility, StudyCreated
from dryfit.ledger.replay import StudyState
from dryfit.search.changes import comparability_key, compare
from dryfit.search.space import Space
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_reading import LoadedStudy, load_study_text
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.trial import TrialConfig
from dryfit.study.requests import resolve_request

DATA = '[data]\nfile = "rows.jsonl"\n'
STUDY = '[study]\ntask = "{task}"\nmetric = "{metric}"\n{more}\n' + DATA


def loaded(folder: Path, task: str, *, metric: str = "mse", more: str = 'direction = "minimize"') -> LoadedStudy:
    return load_study_text(STUDY.format(task=task, metric=metric, more=more), folder / "study.toml")


def test_a_file_and_a_module_beside_the_study_file_are_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "alone.py").touch()
    for written, found in (
        ("absent.py:X", f"{tmp_path}/absent.py:X"),
        ("alone.py:X.Y", f"{tmp_path}/alone.py:X.Y"),
        ("alone:X", f"{tmp_path}/alone:X"),
        ("package.inner:X", f"{tmp_path}/package.inner:X"),
        ("./package.inner:X", f"{tmp_path}/package.inner:X"),
        ("installed.inner:X", "installed.inner:X"),
        ("/elsewhere/a.py:X", "/elsewhere/a.py:X"),
    ):
        assert loaded(tmp_path, written).config.study.task == found


def test_a_file_in_the_current_folder_is_found_from_a_study_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    assert loaded(tmp_path, "mine:X").config.study.task == f"{tmp_path}/here/mine:X"


def test_a_frozen_study_moves_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.py").touch()
    config = loaded(tmp_path / "old", "mine.py:X", more='direction = "minimize"\n[own]\ndelta = 0.5').config
    text = dump_toml(config, tmp_path / "old")
    assert str(tmp_path) not in text
    assert load_study_text(text, tmp_path / "old" / "frozen.toml").config == config
    os.rename(tmp_path / "old", tmp_path / "new")
    moved = load_study_text(text, tmp_path / "new" / "frozen.toml").config
    assert moved.study.task == f"{tmp_path}/new/mine.py:X" and moved.own.knobs == {"delta": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            STUDY.format(task="a.py:X", metric="brier", more=""),
            "study.direction is unset, and brier is a metric of a.py:X",
        ),
        (
            STUDY.format(task="a.py:X", metric="mse", more='direction = "minimize"\nalso = ["rank"]'),
            "also_directions is unset, and rank of study.also has no direction",
        ),
        (STUDY.format(task="a.py:", metric="f1", more=""), "study.task is .*causal-lm.*package.module:Class"),
        (STUDY.format(task="criteria", metric="mse", more=""), "study.metric is mse.*f1_macro"),
        (STUDY.format(task="criteria", metric="f1_makro", more=""), "did you mean f1_macro"),
        (STUDY.format(task="criteria", metric="f1", more="task_version = 2"), "only with a task of your own"),
        (STUDY.format(task="criteria", metric="f1", more="") + "[own]\na = 1\n", "own.a is read only with a task of"),
        (
            STUDY.format(task="criteria", metric="f1", more="") + '[space]\n"own.a" = [1, 2]\n',
            "own.a is read only with a task of your own",
        ),
        (STUDY.format(task="a.py:X", metric="f1", more="") + "[own]\na = [1]\n", "own.a is .1.*a number, text in"),
        (STUDY.format(task="a.py:X", metric="f1", more="") + "[own]\nBig = 1\n", "'Big' is no name of a key"),
        (
            STUDY.format(task="a.py:X", metric="f1", more="") + '[space]\n"own.Big" = [1, 2]\n',
            "own.Big names no key that can be searched",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_imported(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_study_text(text, tmp_path / "study.toml")


def test_a_metric_of_dryfits_has_its_direction(tmp_path: Path) -> None:
    config = loaded(tmp_path, "a.py:X", metric="loss", more="").config
    assert config.study.resolved_direction is Direction.MINIMIZE and config.study.metric is Metric.LOSS


def test_its_keys_are_searched_as_they_are_written(tmp_path: Path) -> None:
    text = (
        STUDY.format(task="a.py:X", metric="loss", more="")
        + '[own]\nkind = "a"\n[space]\n"own.size" = {low = 1, high = 4}\n'
        + '"own.rate" = {low = 0.5, high = 2, log = true, when = {"own.kind" = "b"}}\n"own.kind" = ["a", "b"]\n'
    )
    config = load_study_text(text, tmp_path / "study.toml").config
    space = Space.from_config(config)
    request = resolve_request(config, space, pairs=(), cache_dir=tmp_path, device="cpu")
    assert request.searched == {"own.size": (1, 4), "own.rate": (0.5, 2.0), "own.kind": ("a", "b")}
    assert all(type(value) is int for value in request.searched["own.size"])
    assert request.settings.own.knobs == {"kind": "a"} and request.metrics == (Metric.LOSS,)


def config_of(task: str, **more: object) -> StudyConfig:
    study = {"task": task, "metric": "mse", "direction": "minimize", **more}
    return StudyConfig.model_validate_json(json.dumps({"study": study, "own": {"delta": 1.0}}))


def test_another_version_forks_and_another_folder_does_not() -> None:
    old = comparability_key(config_of("/old/a.py:X"), Space(()), data="rows", folder=Path("/old"))
    moved = comparability_key(config_of("/new/a.py:X"), Space(()), data="rows", folder=Path("/new"))
    assert compare(old, moved).verdict is Compatibility.SAME
    version = compare(
        old, comparability_key(config_of("/old/a.py:X", task_version=2), Space(()), data="rows", folder=Path("/old"))
    )
    assert not version.comparable and version.reasons == ("the task was a.py:X, version 1, is now a.py:X, version 2",)
    other = compare(old, comparability_key(config_of("/old/b.py:X"), Space(()), data="rows", folder=Path("/old")))
    assert not other.comparable and other.verdict is Compatibility.FORKS


def test_the_task_goes_through_the_ledger_and_a_trials_request() -> None:
    basis = comparability_key(config_of("/old/a.py:X"), Space(()), data="", folder=Path("/old"))
    created = StudyCreated(
        id="0", name="s", task=basis.task, metric="mse", direction=Direction.MINIMIZE, seed=0, space=basis.space
    )
    state = StudyState()
    state.apply(StudyCreated.model_validate_json(created.model_dump_json()))
    assert state.created is not None and state.created.task == "/old/a.py:X"
    assert summarise(state).task == "a.py:X"
    trial = {"number": 0, "metric": "mse", "direction": "minimize", "data": {}, "settings": {}, "params": {}, "seed": 0}
    for task, wanted in (("/old/a.py:X", "/old/a.py:X"), ("criteria", BuiltInTask.CRITERIA)):
        config = TrialConfig.model_validate_json(json.dumps({**trial, "task": task}))
        assert config.task == wanted and isinstance(config.task, BuiltInTask) == isinstance(wanted, BuiltInTask)
        assert TrialConfig.model_validate_json(config.model_dump_json()) == config
