"""The study file of a user's own script: what it may hold, and what a mistake is told."""

from pathlib import Path

import pytest

from dryfit.settings.choices import Direction
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.study_file_text import dump_toml
from golden import Golden, refusal

HEAD = '[study]\ntask = "script"\n'
OWN = '[script]\ncommand = "train.py --rate {rate}"\n'
SPACE = "[space]\nrate = {low = 1e-4, high = 1, log = true}\n"


def load(text: str, use: Use = Use.TRAIN) -> StudyConfig:
    return load_study_text(text, Path("own.toml"), (), use).config


def test_mistakes_are_told(golden: Golden) -> None:
    cases = [
        HEAD + SPACE,
        HEAD + SPACE,
        '[study]\ntask = "trainer"\n' + SPACE + OWN,
        HEAD + OWN + SPACE + '[trainer]\nmake = "m:f"\n',
        HEAD + OWN,
        HEAD + OWN + "[space]\nrata = [1, 2]\n",
        HEAD + OWN + SPACE + "other = [1, 2]\n",
        HEAD + OWN + SPACE + "seed = [1, 2]\n",
        HEAD + '[script]\ncommand = "torchrun train.py {rate}"\n' + SPACE,
        HEAD + '[script]\ncommand = "train.py {rate}"\nresults = "/tmp/x"\n' + SPACE,
        HEAD + "metric = 'f1'\n" + OWN + SPACE + "[search]\npruner = 'hyperband'\n",
        HEAD + "metric = 'own_f1'\n" + OWN + SPACE,
        HEAD + OWN + SPACE + "[train]\nepochs = 3\n",
    ]
    golden("study", [refusal(load, case) for case in cases])


def test_its_memory_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="is script: what your own function takes of a device cannot be planned"):
        load(HEAD + OWN + SPACE, use=Use.PLAN)


def test_its_folder_is_that_of_the_study_file_unless_it_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(HEAD + "also = ['f1']\nalso_directions = ['maximize']\n" + OWN + SPACE, encoding="utf-8")
    config = load_study_file(file).config
    own = config.function
    assert own is not None and own.function == "train.py --rate {rate}" and own.paths == (str(tmp_path),)
    assert (own.goals, own.directions) == (("eval_loss", "f1"), (Direction.MINIMIZE, Direction.MAXIMIZE))
    frozen = dump_toml(config, tmp_path)
    assert 'folder = "./."' in frozen or 'folder = "."' in frozen
    (tmp_path / "again.toml").write_text(frozen, encoding="utf-8")
    assert load_study_file(tmp_path / "again.toml").config == config
    file.write_text(HEAD + OWN + 'folder = "work"\n' + SPACE, encoding="utf-8")
    script = load_study_file(file).config.script
    assert script is not None and script.folder == str(tmp_path / "work")
