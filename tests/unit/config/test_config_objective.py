"""The study file of a user's own function: what it may hold, and what a mistake is told."""

from pathlib import Path

import pytest

from dryfit.search.space import Space
from dryfit.settings.choices import FUNCTION_TASK
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.study_file_text import TABLES, dump_toml
from dryfit.settings.task_facts import reads
from golden import Golden, refusal

HEAD = '[study]\ntask = "objective"\n'
OWN = '[objective]\nfunction = "package.module:f"\n'
SPACE = "[space]\nrate = {low = 1e-4, high = 1, log = true}\nlayers = {low = 1, high = 4}\n"


def load(text: str, *overrides: str, use: Use = Use.TRAIN) -> StudyConfig:
    return load_study_text(text, Path("own.toml"), overrides, use).config


def test_names_and_numbers_of_a_free_space() -> None:
    text = HEAD + OWN + SPACE + '"opt/β1"= [1]\n'
    with pytest.raises(ConfigError, match="is no name of a parameter"):
        Space.from_config(load(text))
    config = load(HEAD + OWN + SPACE + 'deep.rate = [0.1, 1]\nkind = ["a", 2, true]\n', "space.width=[8,16]")
    space = Space.from_config(config)
    assert space.names == ("rate", "layers", "deep.rate", "kind", "width")
    kinds = {name: type(space.cases(name)[0].distribution).__name__ for name in space.names}
    assert kinds["rate"] == "FloatDistribution"
    assert kinds["layers"] == "IntDistribution"
    assert kinds["kind"] == "CategoricalDistribution"


@pytest.mark.parametrize("name", ["lr#0", "lr~2", "1st", "a b", "a=b", "", "x" * 101])
def test_names_that_collide_with_our_own_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a parameter"):
        Space.from_config(load(HEAD + OWN + f'[space]\n"{name}" = [1, 2]\n'))


def test_conditions_and_cases_work_with_free_names() -> None:
    one, other = '{low = 1, high = 3, when = {kind = "a"}}', '{low = 0.5, high = 1, when = {kind = "b"}}'
    cases = f'[space]\nkind = ["a", "b"]\nsize = [{one}, {other}]\n'
    space = Space.from_config(load(HEAD + OWN + cases))
    assert [type(param.distribution).__name__ for param in space.cases("size")] == [
        "IntDistribution",
        "FloatDistribution",
    ]
    with pytest.raises(ConfigError, match="which is not searched"):
        Space.from_config(load(HEAD + OWN + '[space]\nsize = {low = 1, high = 2, when = {kind = "a"}}\n'))


def test_mistakes_are_told(golden: Golden) -> None:
    cases = [
        HEAD + SPACE,
        HEAD + OWN,
        HEAD + "[objective]\n" + SPACE,
        HEAD + '[objective]\nfunction = "module"\n' + SPACE,
        HEAD + OWN + 'goals = ["a", "a"]\n' + SPACE,
        HEAD + OWN + "goals = []\n" + SPACE,
        HEAD + OWN + 'directions = ["minimize", "maximize"]\n' + SPACE,
        HEAD + OWN + 'directions = ["up"]\n' + SPACE,
        HEAD + OWN + 'goals = ["a", "b"]\n' + SPACE + '[search]\npruner = "median"\n',
        HEAD + OWN + SPACE + '[search]\npruner = "hyperband"\n',
        HEAD + 'metric = "mcc"\n' + OWN + SPACE,
        HEAD + 'direction = "maximize"\n' + OWN + SPACE,
        HEAD + OWN + SPACE + "[train]\nepochs = 3\n",
        HEAD + OWN + SPACE + '[data]\nfile = "a.jsonl"\n',
        HEAD + OWN + SPACE + "[data]\nfolds = 3\n",
        HEAD + OWN + SPACE + "[lora]\nr = 4\n",
        HEAD + OWN + SPACE + "[runtime]\ncheckpoint_every_s = 5\n",
        HEAD + OWN + SPACE + '[execution]\nmemory_limit = "2GiB"\n',
        HEAD + OWN + SPACE + "[execution]\ntp = 2\n",
        HEAD + OWN + SPACE + "[execution]\ndp = 2\n",
        HEAD + OWN + SPACE + "[search]\nreduction = 4\n",
        '[data]\nfile = "a.jsonl"\n' + OWN,
    ]
    golden("study", [refusal(load, case) for case in cases])


def test_every_key_is_read_or_refused() -> None:
    """A value that differs from the default of an unread key is an error, whichever key it is."""
    keys = [f"{table}.{key}" for table, names in TABLES.items() for key in names]
    read = {key for key in keys if reads(FUNCTION_TASK, key)}
    assert {"study.trials", "objective.paths", "search.sampler", "runtime.parallel", "execution.threads"} <= read
    assert not any(key.startswith(("model.", "data.", "train.", "optim.", "sched.", "head.", "loss.")) for key in read)


def test_its_memory_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="cannot be planned"):
        load(HEAD + OWN + SPACE, use=Use.PLAN)


def test_paths_start_at_the_file_and_where_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = tmp_path / "own.toml"
    file.write_text(HEAD + OWN + SPACE)
    own = load_study_file(file).config.objective
    assert own is not None and own.paths == (str(tmp_path), str(tmp_path / "elsewhere"))
    file.write_text(HEAD + OWN + 'paths = ["src"]\n' + SPACE)
    own = load_study_file(file).config.objective
    assert own is not None and own.paths == (str(tmp_path / "src"),)


def test_a_frozen_study_can_be_moved_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(HEAD + OWN + 'paths = [".", "src", "/opt/code"]\n' + SPACE + "deep.rate = [1]\n")
    config = load_study_file(tmp_path / "own.toml").config
    text = dump_toml(config, tmp_path)
    assert str(tmp_path) not in text
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "frozen.toml").write_text(text)
    again = load_study_file(moved / "frozen.toml").config
    assert again.objective is not None
    assert again.objective.paths == (str(moved), str(moved / "src"), "/opt/code")
    assert again.model_copy(update={"objective": config.objective}) == config
