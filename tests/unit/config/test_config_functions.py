"""The study file of a user's own function, Trainer or script: what it may hold, and what a mistake is told."""

from pathlib import Path

import pytest

from dryfit.search.space import Space
from dryfit.settings.choices import FUNCTION_TASK, TRAINER_TASK, BuiltInTask, Direction
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.study_file_text import TABLES, dump_toml
from dryfit.settings.tables import DataSettings
from dryfit.settings.task_facts import default_metric, facts_of, reads
from golden import Golden, refusal

HEAD = '[study]\ntask = "objective"\n'
OWN = '[objective]\nfunction = "package.module:f"\n'
TRAINER = '[study]\ntask = "trainer"\n'
MAKE = '[trainer]\nmake = "package.module:f"\n'
SCRIPT = '[study]\ntask = "script"\n'
COMMAND = '[script]\ncommand = "train.py --rate {rate}"\n'
RATE = "[space]\nrate = {low = 1e-4, high = 1, log = true}\n"
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


@pytest.mark.parametrize("text", [HEAD + OWN + SPACE, TRAINER + MAKE + RATE, SCRIPT + COMMAND + RATE])
def test_its_memory_cannot_be_planned(text: str) -> None:
    with pytest.raises(ConfigError, match="what your own function takes of a device cannot be planned"):
        load(text, use=Use.PLAN)


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
    assert again.objective.paths == (str(moved), str(moved / "src"), "/opt/code")
    assert again.model_copy(update={"objective": config.objective}) == config


def test_mistakes_of_a_trainer_are_told(golden: Golden) -> None:
    cases = [
        TRAINER + RATE,
        TRAINER + RATE + '[objective]\nfunction = "m:f"\n',
        '[study]\ntask = "objective"\n' + RATE + MAKE,
        TRAINER + MAKE + RATE + '[objective]\nfunction = "m:f"\n',
        TRAINER + MAKE,
        TRAINER + "metric = 'eval_f1'\n" + MAKE + RATE,
        TRAINER + "also = ['eval_f1']\n" + MAKE + RATE,
        TRAINER + "also = ['eval_loss']\nalso_directions = ['maximize']\n" + MAKE + RATE,
        TRAINER + MAKE + RATE + '[search]\npruner = "hyperband"\n',
        TRAINER + MAKE + RATE + "[train]\nepochs = 3\n",
        TRAINER + MAKE + RATE + '[execution]\nmemory_limit = "2GiB"\n',
        '[data]\nfile = "a.jsonl"\n' + MAKE,
        TRAINER + MAKE + 'goals = ["a"]\n' + RATE,
    ]
    golden("study", [refusal(load, case) for case in cases])


def test_every_key_of_a_trainer_is_read_or_refused() -> None:
    read = {key for table, names in TABLES.items() for name in names if reads(TRAINER_TASK, key := f"{table}.{name}")}
    assert {"execution.allow", "execution.unknown", "runtime.max_refused_in_a_row"} <= read
    assert {"study.metric", "study.also", "trainer.make", "runtime.keep", "runtime.checkpoint_every_s"} <= read
    assert not any(key.startswith(("model.", "data.", "train.", "optim.", "objective.")) for key in read)


def test_goals_are_metrics_of_a_trainers_evaluations(tmp_path: Path) -> None:
    also = 'also = ["eval_f1"]\nalso_directions = ["maximize"]\n'
    file = tmp_path / "own.toml"
    file.write_text(TRAINER + also + MAKE + 'version = 3\nsecrets = ["HF_TOKEN"]\npreload = ["json"]\n' + RATE)
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


def test_mistakes_of_a_script_are_told(golden: Golden) -> None:
    cases = [
        SCRIPT + RATE,
        SCRIPT + RATE,
        '[study]\ntask = "trainer"\n' + RATE + COMMAND,
        SCRIPT + COMMAND + RATE + '[trainer]\nmake = "m:f"\n',
        SCRIPT + COMMAND,
        SCRIPT + COMMAND + "[space]\nrata = [1, 2]\n",
        SCRIPT + COMMAND + RATE + "other = [1, 2]\n",
        SCRIPT + COMMAND + RATE + "seed = [1, 2]\n",
        SCRIPT + '[script]\ncommand = "torchrun train.py {rate}"\n' + RATE,
        SCRIPT + '[script]\ncommand = "train.py {rate}"\nresults = "/tmp/x"\n' + RATE,
        SCRIPT + "metric = 'f1'\n" + COMMAND + RATE + "[search]\npruner = 'hyperband'\n",
        SCRIPT + "metric = 'own_f1'\n" + COMMAND + RATE,
        SCRIPT + COMMAND + RATE + "[train]\nepochs = 3\n",
    ]
    golden("study", [refusal(load, case) for case in cases])


def test_a_scripts_folder_is_that_of_the_study_file_unless_it_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(SCRIPT + "also = ['f1']\nalso_directions = ['maximize']\n" + COMMAND + RATE, encoding="utf-8")
    config = load_study_file(file).config
    own = config.function
    assert own is not None and own.function == "train.py --rate {rate}" and own.paths == (str(tmp_path),)
    assert (own.goals, own.directions) == (("eval_loss", "f1"), (Direction.MINIMIZE, Direction.MAXIMIZE))
    frozen = dump_toml(config, tmp_path)
    assert 'folder = "./."' in frozen or 'folder = "."' in frozen
    (tmp_path / "again.toml").write_text(frozen, encoding="utf-8")
    assert load_study_file(tmp_path / "again.toml").config == config
    file.write_text(SCRIPT + COMMAND + 'folder = "work"\n' + RATE, encoding="utf-8")
    script = load_study_file(file).config.script
    assert script is not None and script.folder == str(tmp_path / "work")


# ---- What a study file must hold depends on what it is read for


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
