"""The study file of a user's own Trainer: what it may hold, and what a mistake is told."""

from pathlib import Path

import pytest

from dryfit.settings.choices import TRAINER_TASK
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.study_file_text import TABLES, dump_toml
from dryfit.settings.task_facts import reads
from golden import Golden, refusal

HEAD = '[study]\ntask = "trainer"\n'
OWN = '[trainer]\nmake = "package.module:f"\n'
SPACE = "[space]\nrate = {low = 1e-4, high = 1, log = true}\n"


def load(text: str, *overrides: str, use: Use = Use.TRAIN) -> StudyConfig:
    return load_study_text(text, Path("own.toml"), overrides, use).config


def test_mistakes_are_told(golden: Golden) -> None:
    cases = [
        HEAD + SPACE,
        HEAD + SPACE + '[objective]\nfunction = "m:f"\n',
        '[study]\ntask = "objective"\n' + SPACE + OWN,
        HEAD + OWN + SPACE + '[objective]\nfunction = "m:f"\n',
        HEAD + OWN,
        HEAD + "metric = 'eval_f1'\n" + OWN + SPACE,
        HEAD + "also = ['eval_f1']\n" + OWN + SPACE,
        HEAD + "also = ['eval_loss']\nalso_directions = ['maximize']\n" + OWN + SPACE,
        HEAD + OWN + SPACE + '[search]\npruner = "hyperband"\n',
        HEAD + OWN + SPACE + "[train]\nepochs = 3\n",
        HEAD + OWN + SPACE + '[execution]\nmemory_limit = "2GiB"\n',
        '[data]\nfile = "a.jsonl"\n' + OWN,
        HEAD + OWN + 'goals = ["a"]\n' + SPACE,
    ]
    golden("study", [refusal(load, case) for case in cases])


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
