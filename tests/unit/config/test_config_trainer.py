"""The study file of a user's own Trainer: what it may hold, and what a mistake is told."""

from pathlib import Path

import pytest

from dryfit.config.checks import Use
from dryfit.config.freeze import dump_toml
from dryfit.config.load import load_study_file, load_study_text
from dryfit.config.schema import StudyConfig
from dryfit.config.schema_json import TABLES
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import TRAINER_TASK
from dryfit.core.settings.task_facts import reads

HEAD = '[study]\ntask = "trainer"\n'
OWN = '[trainer]\nmake = "package.module:f"\n'
SPACE = "[space]\nrate = {low = 1e-4, high = 1, log = true}\n"


def load(text: str, *overrides: str, use: Use = Use.TRAIN) -> StudyConfig:
    return load_study_text(text, Path("own.toml"), overrides, use).config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + SPACE, "there is no [trainer]"),
        (HEAD + SPACE + '[objective]\nfunction = "m:f"\n', "objective is read only with study.task = objective"),
        ('[study]\ntask = "objective"\n' + SPACE + OWN, "trainer is read only with study.task = trainer"),
        (HEAD + OWN + SPACE + '[objective]\nfunction = "m:f"\n', "objective is read only with study.task = objective"),
        (HEAD + OWN, "space is empty"),
        (HEAD + "metric = 'eval_f1'\n" + OWN + SPACE, "nobody else knows what is better"),
        (HEAD + "also = ['eval_f1']\n" + OWN + SPACE, "study.also_directions is unset"),
        (HEAD + "also = ['eval_loss']\nalso_directions = ['maximize']\n" + OWN + SPACE, "study.also repeats a metric"),
        (HEAD + OWN + SPACE + '[search]\npruner = "hyperband"\n', "of your own function nobody does"),
        (HEAD + OWN + SPACE + "[train]\nepochs = 3\n", "train.epochs is not read by study.task = trainer"),
        (HEAD + OWN + SPACE + '[execution]\nmemory_limit = "2GiB"\n', "execution.memory_limit is not read"),
        ('[data]\nfile = "a.jsonl"\n' + OWN, "trainer is read only with study.task = trainer"),
        (HEAD + OWN + 'goals = ["a"]\n' + SPACE, "trainer.goals"),
    ],
)
def test_mistakes_are_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert said in str(caught.value)


def test_every_key_is_read_or_refused() -> None:
    read = {key for table, names in TABLES.items() for name in names if reads(TRAINER_TASK, key := f"{table}.{name}")}
    assert {"execution.allow", "execution.unknown", "runtime.max_refused_in_a_row"} <= read
    assert {"study.metric", "study.also", "trainer.make", "runtime.keep", "runtime.checkpoint_every_s"} <= read
    assert not any(key.startswith(("model.", "data.", "train.", "optim.", "objective.")) for key in read)


def test_its_memory_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="is trainer: what your own function takes of a device cannot be planned"):
        load(HEAD + OWN + SPACE, use=Use.PLAN)


def test_goals_are_metrics_of_its_evaluations(tmp_path: Path) -> None:
    also = 'also = ["eval_f1"]\nalso_directions = ["maximize"]\n'
    file = tmp_path / "own.toml"
    file.write_text(HEAD + also + OWN + 'version = 3\nsecrets = ["HF_TOKEN"]\npreload = ["json"]\n' + SPACE)
    config = load_study_file(file).config
    own = config.function
    assert own is not None and config.function_table == "trainer"
    assert (own.goals, own.directions) == (("eval_loss", "eval_f1"), ("minimize", "maximize"))
    assert (own.function, own.version, own.secrets, own.preload) == ("package.module:f", 3, ("HF_TOKEN",), ("json",))
    assert own.paths == (str(tmp_path), str(Path.cwd()))
    text = dump_toml(config, tmp_path)
    assert "[objective]" not in text and "[train]" not in text and str(tmp_path) not in text
    (tmp_path / "again.toml").write_text(text)
    assert load_study_file(tmp_path / "again.toml").config == config
