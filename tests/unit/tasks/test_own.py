import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dryfit.settings.errors import ConfigError, LoadError
from dryfit.settings.tables import DataSettings, OwnSettings, TrialSettings
from dryfit.tasks.base import TaskContext
from dryfit.tasks.own import check_settings, made_with_own, own_class, own_source, saved_name
from own_tasks import example_file, wrong_file


def with_own(**knobs: object) -> TrialSettings:
    return TrialSettings(own=OwnSettings.model_validate(knobs))


def test_a_class_is_found_in_a_file_and_in_a_module_of_a_folder(tmp_path: Path) -> None:
    file = example_file(tmp_path, "own_found")
    by_file = own_class(f"{file}:ScoreTask")
    assert by_file is own_class(f"{tmp_path}/own_found:ScoreTask")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    example_file(tmp_path / "own_package", "inner")
    assert own_class(f"{tmp_path}/own_package.inner:ScoreTask").__module__ == "own_package.inner"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_at_all:X", "there is no module nowhere_at_all"),
        ("{folder}/absent.py:X", "there is no file {folder}/absent.py"),
        ("{folder}/own_wrong.py:Hallf", "own_wrong.py has no Hallf.*did you mean Half"),
        ("{folder}/own_wrong.py:function", "it is a builtin_function_or_method.*a class that is a Task"),
        ("{folder}/own_wrong.py:Half", "it lacks .*metric_names.*metrics.*num_outputs, labels"),
        ("{folder}/own_wrong.py:Half", "lacks batch_weight, loss_sum"),
        ("{folder}/own_wrong.py:Bare", "it lacks inputs, padded, .*kind, required"),
        ("{folder}/own_wrong.py:Listing", r"knobs has sizes = \[1, 2\].*bool, int, float, str"),
    ],
)
def test_what_is_no_task_is_refused_with_what_it_lacks(
    tmp_path_factory: pytest.TempPathFactory, name: str, message: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "wrong"
    folder.mkdir(exist_ok=True)
    if not (folder / "own_wrong.py").exists():
        wrong_file(folder, "own_wrong")
    with pytest.raises(ConfigError, match=f"(?s){message.format(folder=folder)}"):
        own_class(name.format(folder=folder))


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "path", list(sys.path)
    )  # a json.py stays on it, which processes of other tests would import
    file = example_file(tmp_path, "json")
    with pytest.raises(ConfigError, match="(?s)json is already the module in .*rename the file"):
        own_class(f"{file}:ScoreTask")


def test_what_a_module_raises_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "own_raising.py").write_text("import a_package_that_nobody_has\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        own_class(f"{tmp_path}/own_raising.py:X")


def test_its_own_keys_have_its_defaults_and_their_types(tmp_path: Path) -> None:
    made = own_class(f"{example_file(tmp_path, 'own_keys')}:ScoreTask")
    unset = made_with_own(made, TaskContext(TrialSettings(), DataSettings()))
    assert unset.context.own == {"delta": 1.0}
    whole = made_with_own(made, TaskContext(with_own(delta=2), DataSettings())).context.own["delta"]
    assert whole == 2.0 and isinstance(whole, float)
    for knobs, message in (
        ({"delta": "much"}, "own.delta is 'much'.*a number, as its default, 1.0"),
        ({"delta": True}, "own.delta is True"),
        ({"delt": 1.0}, "there is no key own.delt.*did you mean delta"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            made_with_own(made, TaskContext(with_own(**knobs), DataSettings()))


def test_a_class_that_keeps_nothing_of_what_it_is_given_is_refused(tmp_path: Path) -> None:
    made = own_class(f"{wrong_file(tmp_path, 'own_careless')}:Careless")
    with pytest.raises(ConfigError, match="(?s)no attribute context.*super"):
        made_with_own(made, TaskContext(TrialSettings(), DataSettings()))


def test_a_class_that_speaks_of_its_context_as_given_works_as_before(tmp_path: Path) -> None:
    class Whole:  # a task that writes every method itself, and so keeps what it gets under the former name
        knobs: ClassVar = {"delta": 1.0}

        def __init__(self, given: TaskContext) -> None:
            self.given = given

    file = example_file(tmp_path, "own_former")
    former = file.read_text("utf-8").replace("self.context", "self.given")
    init = "def __init__(self, given):\n        super().__init__(given)\n        self.delta = self.given.own['delta']\n"
    file.write_text(former.replace("num_outputs = 1\n", f"num_outputs = 1\n\n    {init}"), "utf-8")
    for made in (own_class(f"{file}:ScoreTask"), Whole):
        task: Any = made_with_own(made, TaskContext(with_own(delta=2), DataSettings()))
        assert task.given is task.context
        assert task.given.own["delta"] == 2.0
        assert getattr(task, "delta", 2.0) == 2.0


def test_settings_that_it_does_not_read_are_refused(tmp_path: Path) -> None:
    made = own_class(f"{example_file(tmp_path, 'own_reads')}:ScoreTask")
    head = TrialSettings.model_validate_json('{"head": {"layers": 2}, "own": {"delta": 3.0}}')
    check_settings(made, head, {"optim.lr": (0.1, 0.2), "own.delta": (0.1, 2), "head.pooling": ("cls",)})
    focal = TrialSettings.model_validate_json('{"loss": {"name": "focal"}}')
    with pytest.raises(ConfigError, match=r"(?s)\[loss\] is set, and ScoreTask does not read it.*ScoreTask.tables"):
        check_settings(made, focal, {})
    with pytest.raises(ConfigError, match="span.topk is searched, and ScoreTask does not read it"):
        check_settings(made, TrialSettings(), {"span.topk": (1, 20)})
    with pytest.raises(ConfigError, match="own.delta is 'low'"):
        check_settings(made, TrialSettings(), {"own.delta": (0.5, "low")})


def test_its_source_is_its_files(tmp_path: Path) -> None:
    file = example_file(tmp_path, "own_source_one")
    other = tmp_path / "own_source_two.py"
    other.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    one, two = (own_source(own_class(f"{path}:ScoreTask")) for path in (file, other))
    assert one and two and one != two


def test_a_saved_models_class_is_looked_for_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "study" / "final" / "model"
    model.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(LoadError, match="(?s)no code of dryfit's.*trust=True"):
        saved_name("own_saved.py:ScoreTask", model, trust=False)
    with pytest.raises(LoadError, match="(?s)neither in the current folder nor in one above the model's"):
        saved_name("own_saved.py:ScoreTask", model, trust=True)
    above = example_file(tmp_path / "study", "own_saved")
    assert saved_name("own_saved.py:ScoreTask", model, trust=True) == f"{above}:ScoreTask"
    here = example_file(elsewhere, "own_saved")
    assert saved_name("own_saved.py:ScoreTask", model, trust=True) == f"{here}:ScoreTask"
    assert saved_name("installed.package:ScoreTask", model, trust=True) == "installed.package:ScoreTask"
