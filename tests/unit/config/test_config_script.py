"""The study file of a user's own script: what it may hold, and what a mistake is told."""

from pathlib import Path

import pytest

from dryfit.config.checks import Use
from dryfit.config.freeze import dump_toml
from dryfit.config.load import load_study_file, load_study_text
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import Direction

HEAD = '[study]\ntask = "script"\n'
OWN = '[script]\ncommand = "train.py --rate {rate}"\n'
SPACE = "[space]\nrate = {low = 1e-4, high = 1, log = true}\n"


def load(text: str, use: Use = Use.TRAIN) -> StudyConfig:
    return load_study_text(text, Path("own.toml"), (), use).config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + SPACE, "there is no [script]"),
        (HEAD + SPACE, 'command = "train.py --learning_rate {lr}"'),
        ('[study]\ntask = "trainer"\n' + SPACE + OWN, "script is read only with study.task = script"),
        (HEAD + OWN + SPACE + '[trainer]\nmake = "m:f"\n', "trainer is read only with study.task = trainer"),
        (HEAD + OWN, "has {rate}, and [space] has no rate"),
        (HEAD + OWN + "[space]\nrata = [1, 2]\n", "did you mean {rata}?"),
        (HEAD + OWN + SPACE + "other = [1, 2]\n", "script.command has no {other}: the script would never get it"),
        (HEAD + OWN + SPACE + "seed = [1, 2]\n", "commands have a meaning of their own for"),
        (HEAD + '[script]\ncommand = "torchrun train.py {rate}"\n' + SPACE, "starts processes of its own"),
        (HEAD + '[script]\ncommand = "train.py {rate}"\nresults = "/tmp/x"\n' + SPACE, "script.results"),
        (
            HEAD + "metric = 'f1'\n" + OWN + SPACE + "[search]\npruner = 'hyperband'\n",
            "of your own function nobody does",
        ),
        (HEAD + "metric = 'own_f1'\n" + OWN + SPACE, "nobody else knows what is better"),
        (HEAD + OWN + SPACE + "[train]\nepochs = 3\n", "train.epochs is not read by study.task = script"),
    ],
)
def test_mistakes_are_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert said in str(caught.value)


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
