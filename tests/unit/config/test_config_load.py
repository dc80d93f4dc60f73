import json
from pathlib import Path

import pytest

from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import Case
from dryfit.settings.study_file_reading import load_study_file

DATA = '[data]\ntrain = "train.jsonl"\nvalidation = "sub/validation.csv"\n'


def write(folder: Path, text: str, data: str = DATA) -> Path:
    path = folder / "study.toml"
    path.write_text(data + text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str, data: str = DATA) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_study_file(write(folder, text, data), overrides)
    return caught.value


def test_every_value_knows_its_origin(tmp_path):
    path = write(tmp_path, '[train]\n\nepochs = 3\n[space]\n"optim.lr" = [1e-4]\nhead.layers = [0, 1]\n')
    study = load_study_file(path, ["optim.name=sgd", "train.batch_size=8"])
    assert (study.config.train.epochs, study.config.train.batch_size, study.config.optim.name) == (3, 8, "sgd")
    expected = {
        "data.train": "study.toml:2",
        "train.epochs": "study.toml:6",
        "train.batch_size": "--set",
        "optim.name": "--set",
        "optim.beta2": "default",
        "space.optim.lr": "study.toml:8",
        "space.head.layers": "study.toml:9",
    }
    assert {key: study.origins[key] for key in expected} == expected
    assert study.folder == tmp_path
    assert load_study_file(tmp_path).config.train.epochs == 3


def test_paths_are_relative_to_where_they_were_written(tmp_path, monkeypatch):
    home, away = tmp_path / "home", tmp_path / "away"
    (home / "encoder").mkdir(parents=True)
    away.mkdir()
    monkeypatch.chdir(away)
    path = write(
        home,
        'test = "hub:some/rows:test"\n[model]\nname = "encoder"\n'
        '[space]\n"model.name" = ["encoder", "minilm", "org/name", "./other"]\n'
        '"train.batch_size" = [{choices = [8], when = {"model.name" = "encoder"}}]\n',
    )
    config = load_study_file(path, ["data.train=my rows.jsonl"]).config
    assert config.data.train == str(away / "my rows.jsonl")
    assert config.data.validation == str(home / "sub/validation.csv")
    assert config.data.test == "hub:some/rows:test"
    assert config.model.name == str(home / "encoder")
    folders = (str(home / "encoder"), "minilm", "org/name", str(home / "other"))
    assert config.space["model.name"] == (Case(choices=folders),)
    assert config.space["train.batch_size"][0].when == {"model.name": str(home / "encoder")}
    assert load_study_file(path, ["model.name=org/name"]).config.model.name == "org/name"


@pytest.mark.parametrize("key", ["space.optim.lr", 'space."optim.lr"', "space . optim.lr"])
def test_a_searched_key_can_be_set_quoted_or_bare(tmp_path, key):
    study = load_study_file(
        write(tmp_path, '[space]\n"optim.lr" = {low = 1e-5, high = 1e-3}\n'), [f"{key}=[1e-5, 1e-4]"]
    )
    assert study.config.space == {"optim.lr": (Case(choices=(1e-5, 1e-4)),)}
    assert study.origins["space.optim.lr"] == "--set"


def test_one_key_of_a_case_can_be_set(tmp_path):
    path = write(tmp_path, '[space]\n"optim.lr" = {low = 1e-5, high = 1e-3}\n')
    assert load_study_file(path, ["space.optim.lr.low=1e-4"]).config.space["optim.lr"][0].low == 1e-4


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("study.name=2024-01-01", "2024-01-01"),
        ('study.name="7"', "7"),
        ("study.name=a=b", None),
        ("study.name=x.y", "x.y"),
        ("study.name=1\nseed = 2", None),
    ],
)
def test_bare_words_are_text(tmp_path, override, value):
    path = write(tmp_path, "")
    if value is None:
        with pytest.raises(ConfigError, match="study.name"):
            load_study_file(path, [override])
    else:
        assert load_study_file(path, [override]).config.study.name == value


@pytest.mark.parametrize("override", ["lr=3", "optim.lr", "=3", "", "optim.lr.x=1", 'optim."lr=3', "optim..lr=3"])
def test_an_override_that_is_none_is_refused(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        load_study_file(write(tmp_path, "[optim]\nlr = 1e-4\n"), [override])
    assert caught.value.found


@pytest.mark.parametrize(
    ("text", "line", "found", "allowed", "hint"),
    [
        (
            "[train]\nbatch_sise = 8\n",
            5,
            "train.batch_sise is no key of [train]",
            "batch_size",
            "did you mean batch_size?",
        ),
        ("[optm]\nlr = 1\n", 4, "optm is no table", "optim", "did you mean optim?"),
        ("[train]\nlr = 1\n", 5, "train.lr is no key of [train]", "epochs", "did you mean optim.lr?"),
        ("[train]\nepochs = 0\n", 5, "train.epochs is 0", "an integer from 1 to 1000", ""),
        ("[optim]\nlr = 0\n", 5, "optim.lr is 0", "a number above 0, at most 10", ""),
        ("[optim]\nlr = nan\n", 5, "optim.lr is NaN", "a number above 0, at most 10", ""),
        ('[optim]\nlr = "1e-4"\n', 5, 'optim.lr is "1e-4"', "a number above 0, at most 10", "without quotes: 1e-4"),
        ("[study]\nname = 7\n", 5, "study.name is 7", "text", 'write it in quotes: "7"'),
        ("[train]\nepochs = 2.0\n", 5, "train.epochs is 2.0", "an integer from 1 to 1000", ""),
        ('[train]\nprecision = "bf61"\n', 5, 'train.precision is "bf61"', "fp32, fp16, bf16", "did you mean bf16?"),
        ("train = 3\n", 4, "", "", ""),
        ("[runtime]\nparallel = true\n", 5, "runtime.parallel is true", "an integer from 1 to 256", ""),
        ("[train]\nepochs = 2024-01-01\n", 5, "train.epochs is the date or time 2024-01-01", "numbers", "quotes"),
        ('[space]\n"optim.lrr" = [1]\n', 5, "space.optim.lrr names no key", "[optim]", "did you mean optim.lr?"),
        ("[space]\noptm.lr = [1]\n", 5, "space.optm.lr names no key", "[optim]", "did you mean optim.lr?"),
        ("[space]\nstudy.seed = [1]\n", 5, "space.study.seed names no key", "[optim]", ""),
        ("[space]\noptim.lr = {low = 1, hihg = 2}\n", 5, "space.optim.lr.hihg is no key of a case", "high", "high?"),
        ("[space]\noptim.lr = {low = 2, high = 1}\n", 5, "space.optim.lr low 2 is above high 1", "", ""),
        ("[space]\noptim.lr = 3\n", 5, "space.optim.lr is 3", "a list of choices", ""),
        ("[space]\noptim.lr = []\n", 5, "space.optim.lr", "a list", ""),
        (
            '[space]\noptim.lr = [\n  {choices = [1], when = {"head.layers" = 1}},\n  {low = "a", high = 2},\n]\n',
            7,
            'space.optim.lr.low is "a"',
            "a number",
            "",
        ),
    ],
)
def test_a_refusal_has_file_line_value_range_and_nearest_key(tmp_path, text, line, found, allowed, hint):
    error = refusal(tmp_path, text)
    assert error.doing == f"reading {tmp_path / 'study.toml'}, line {line}"
    assert found in error.found
    assert allowed in error.allowed
    assert hint in error.hint
    assert not any(word in str(error).lower() for word in ("pydantic", "http", "input should", "value error"))


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path):
    error = refusal(tmp_path, "[train]\nepochs = 0\nbach_size = 1\n[optim]\nlr = -1\n", "head.layers=99")
    lines = [line.strip() for line in error.found.splitlines()]
    assert lines[0] == "4 problems"
    starts = ["--set: head.layers is 99", "line 5: train.epochs is 0", "line 6: train.bach_size is", "line 7"]
    starts[3] = "line 8: optim.lr is -1"
    assert [line for line in lines[1:] if line.startswith(("line", "--set"))] == [
        starts[0],
        starts[1],
        "line 6: train.bach_size is no key of [train]",
        starts[3],
    ]


def test_broken_toml_has_a_line(tmp_path):
    error = refusal(tmp_path, "[train\nepochs = 2\n")
    assert error.doing.endswith("study.toml, line 4")
    assert "not TOML" in error.found
    assert refusal(tmp_path, '[train]\nx = """').doing.endswith("line 5")


def test_a_missing_or_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_study_file(tmp_path / "nowhere.toml")
    (tmp_path / "study.toml").write_bytes(b"x = '\xff'")
    with pytest.raises(ConfigError, match="byte 5 is not UTF-8"):
        load_study_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "data", "key"),
    [
        ("", "", "data has no train and no validation"),
        ("", '[data]\ntrain = "a.csv"\n', "data has no validation"),
        ("", '[data]\nfile = "a.csv"\ntrain = "b.csv"\n', "data.train stands beside data.file"),
        ("", '[data]\nfile = "a.csv"\nvalidation_fraction = 0.6\ntest_fraction = 0.4\n', "add up to 1"),
        ("", '[data]\nfile = "a.csv"\nvalidation_fraction = 0\n', "data.validation_fraction is 0"),
        ("split_seed = 4\n", DATA, "data.split_seed is read only with data.file"),
        ("folds = 3\nvalidation_fraction = 0.1\n", DATA, "data.validation_fraction is read only with data.file"),
        ("folds = 3\n[runtime]\nkeep = 'all'\n", DATA, 'runtime.keep is "all", but data.folds = 3 does not read it'),
        ("folds = 0\n", DATA, "data.folds is 0"),
        ("folds = 21\n", DATA, "data.folds is 21"),
        ('num_labels = 3\n[study]\nmetric = "f1"\n', DATA, "study.metric is f1"),
        ('[train]\nprecision = "fp16"\n[execution]\ndevice = "cpu"\n', DATA, "train.precision is fp16"),
        ("[loss]\ngamma = 1.0\n", DATA, "loss.gamma is 1.0, but loss.name = cross_entropy does not read it"),
        ("[head]\nhidden = 64\n", DATA, "head.hidden is 64, but head.layers = 0 does not read it"),
        ('num_labels = 3\n[study]\nalso = ["f1"]\n', DATA, "study.also is f1"),
        ('[execution]\ntp = "auto"\ndp = 2\n', DATA, 'tp is "auto" and dp is over 1'),
        ("[execution]\ntp = 2\ndp = 2\n", DATA, "tp and dp are both over 1"),
        ('[execution]\ntp = "some"\n', DATA, 'execution.tp is "some"'),
        ("[execution]\ntp = 0\n", DATA, "execution.tp is 0"),
        ("[search]\nreduction = 4\n", DATA, "search.reduction is 4"),
        ("[search]\nqmc_sequence = 'halton'\n", DATA, "search.qmc_sequence is"),
        ("[search]\npopulation_size = 4\n", DATA, "search.population_size is 4"),
        ("[search]\npruner = 'median'\nmin_delta = 0.1\n", DATA, "search.min_delta is 0.1"),
        ("[search]\npruner = 'asha'\npatience_reports = 3\n", DATA, "search.patience_reports is 3"),
        ("[search]\npruner = 'asha'\npatient_of = 'asha'\n", DATA, "search.patient_of is"),
        ("[search]\npruner = 'patient'\nreduction = 4\n", DATA, "search.patient_of = median does not read it"),
        ("[search]\npruner = 'asha'\npruner_startup_trials = 2\n", DATA, "search.pruner = asha does not read it"),
        ("[search]\npruner = 'median'\npercentile = 10.0\n", DATA, "search.pruner = median does not read it"),
        ("[train]\nearly_stopping_min_delta = 0.1\n", DATA, "but train.early_stopping = 0 does not read it"),
        (
            "[search]\npruner = 'patient'\npatient_of = 'asha'\npruner_startup_trials = 2\n",
            DATA,
            "search.patient_of = asha does not read it",
        ),
        ('[study]\nalso = ["loss", "mcc", "loss"]\n', DATA, "study.also repeats loss"),
        ('[study]\nalso = ["f1_macro"]\n', DATA, "study.also repeats f1_macro"),
        ('[study]\nalso_directions = ["minimize"]\n', DATA, "1 direction(s) for 0 metric(s)"),
        ('[study]\nalso = ["loss", "mcc"]\nalso_directions = ["minimize"]\n', DATA, "1 direction(s) for 2 metric(s)"),
        ('[study]\nalso = ["loss"]\n[search]\npruner = "asha"\n', DATA, "search.pruner is asha, but with study.also"),
        ('num_labels = 1\n[study]\ntask = "joint"\n', DATA, "data.num_labels is 1, and data.multi_label is false"),
        ('multi_label = true\n[study]\nmetric = "mcc"\n', DATA, "study.metric is mcc, and data.multi_label is true"),
        ('multi_label = true\n[study]\nalso = ["f1"]\n', DATA, "study.also is f1, and data.multi_label is true"),
        ('num_labels = 3\n[loss]\nname = "focal"\nalpha = 0.3\n', DATA, "loss.alpha weighs class 1 against class 0"),
        (
            'num_labels = 3\n[head]\nthreshold = "calibrated"\n',
            DATA,
            "head.threshold is calibrated, which decides between",
        ),
        (
            'num_labels = 3\n[space]\n"head.threshold" = ["fixed", "calibrated"]\n',
            DATA,
            "head.threshold is calibrated, which decides between two classes, and data.num_labels is 3",
        ),
        ("[loss]\nalpha = 0.3\n", DATA, "loss.alpha is 0.3, but loss.name = cross_entropy does not read it"),
        ("[loss]\neffective_beta = 0.9\n", DATA, "but loss.class_balance = none does not read it"),
        ("[sched]\ncycles = 3\n", DATA, "sched.cycles is 3, but sched.name = linear does not read it"),
        ('[optim]\nname = "sgd"\n[space]\n"optim.eps" = [1e-6]\n', DATA, "is searched, but optim.name = sgd does not"),
        ('[space]\n"head.hidden" = [64]\n', DATA, "is searched, but head.layers = 0 does not read it"),
    ],
)
def test_keys_that_do_not_go_together(tmp_path, text, data, key):
    assert key in refusal(tmp_path, text, data=data).found


def test_each_goal_has_its_own_direction_unless_one_is_given(tmp_path):
    text = '[study]\nalso = ["loss", "mcc"]\n'
    assert [goal.direction for goal in load_study_file(write(tmp_path, text)).config.study.further_goals] == [
        "minimize",
        "maximize",
    ]
    asked = text + 'also_directions = ["maximize", "minimize"]\n'
    goals = load_study_file(write(tmp_path, asked)).config.study.further_goals
    assert [(goal.name, goal.direction) for goal in goals] == [("loss", "maximize"), ("mcc", "minimize")]


def test_what_a_patient_pruner_asks_may_be_set(tmp_path):
    for numbers in (
        "pruner_startup_trials = 2",
        "patient_of = 'asha'\nreduction = 4",
        "patient_of = 'hyperband'\nreduction = 4",
        "patient_of = 'percentile'\npercentile = 10.0\npruner_startup_trials = 2",
    ):
        text = f"[search]\npruner = 'patient'\npatience_reports = 2\nmin_delta = 0.1\n{numbers}\n"
        assert load_study_file(write(tmp_path, text)).config.search.patience_reports == 2


def test_a_setting_is_read_where_its_owner_is_searched(tmp_path):
    path = write(tmp_path, '[loss]\ngamma = 1.0\n[space]\n"loss.name" = ["cross_entropy", "focal"]\n')
    assert load_study_file(path).config.loss.gamma == 1.0


def test_alpha_is_read_where_each_class_is_decided_for_itself(tmp_path):
    path = write(tmp_path, '[loss]\nname = "focal"\nalpha = 0.3\n', data=DATA + "num_labels = 9\nmulti_label = true\n")
    assert load_study_file(path).config.loss.alpha == 0.3


def test_calibration_error_and_loss_are_minimised(tmp_path):
    for metric, direction in {"ece": "minimize", "loss": "minimize", "auroc": "maximize"}.items():
        path = write(tmp_path, f'[study]\nmetric = "{metric}"\n')
        assert load_study_file(path).config.study.resolved_direction == direction


def test_values_keep_their_types(tmp_path):
    path = write(tmp_path, '[space]\n"optim.weight_decay" = [0, 0.0, 0.1]\n"head.layers" = {low = 0, high = 2}\n')
    space = load_study_file(path).config.space
    assert json.dumps(space["optim.weight_decay"][0].choices) == "[0, 0.0, 0.1]"
    assert isinstance(space["head.layers"][0].low, int)


OWN = '[study]\ntask = "objective"\n[objective]\nfunction = "fit.py:f"\n'


@pytest.mark.parametrize("url", ["postgresql://me:pass-word@db/x", "mysql://db/x?user=me&password=pass-word"])
@pytest.mark.parametrize("study", ["", OWN, '[study]\ntask = "evidence"\n'])
def test_a_password_in_the_mirrors_url_is_refused_and_not_repeated(tmp_path, study, url):
    for error in (
        refusal(tmp_path, f'{study}[search]\nmirror = "{url}"\n'),
        refusal(tmp_path, study, f"search.mirror={url}"),
    ):
        assert "search.mirror" in str(error) and "is a URL with a password in it" in error.found
        assert "env:NAME" in str(error) and 'mirror = "env:DRYFIT_STORAGE"' in str(error)
        assert "pass-word" not in str(error)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ('[data]\ntrain = "https://me:pass-word@host/rows.jsonl"\n', "data.train"),
        ('[data]\nfile = "https://host/rows.jsonl?access_token=pass-word"\n', "data.file"),
        ('[model]\nname = "https://host/model?sig=1&key=pass-word"\n', "model.name"),
        ('[space]\n"model.name" = ["minilm", "https://me:pass-word@host/model"]\n', "space.model.name"),
        (OWN + '[space]\nwhere = ["s3://me:pass-word@host/a", "b"]\n', "space.where"),
        (OWN + '[space]\nwhere = ["a", "b"]\n[search]\nenqueue = [{where = "s3://me:pass-word@host/a"}]\n', "enqueue"),
    ],
)
def test_a_password_in_any_other_url_is_refused_too(tmp_path, written, key):
    error = refusal(tmp_path, written, data="" if "[data]" in written else DATA)
    assert key in str(error) and "is a URL with a password in it" in error.found
    assert "pass-word" not in str(error)


def test_a_frozen_file_of_an_earlier_version_keeps_its_password_and_takes_no_new_one(tmp_path):
    frozen = write(tmp_path, OWN + '[space]\nx = [1, 2]\n[search]\nmirror = "mysql://me:pass-word@db/x"\n', "")
    frozen = frozen.rename(tmp_path / "frozen.toml")
    assert load_study_file(frozen).config.search.mirror == "mysql://me:pass-word@db/x"
    with pytest.raises(ConfigError, match="is a URL with a password in it"):
        load_study_file(frozen, ["search.mirror=mysql://me:other@db/x"])


def test_the_mirrors_url_may_be_in_the_environment(tmp_path):
    config = load_study_file(write(tmp_path, '[search]\nmirror = "env:MY_STORAGE"\n')).config
    assert config.search.mirror == "env:MY_STORAGE"
    for wrong in ("env:", "env:MY STORAGE", "env:1X"):
        assert "env:NAME" in str(refusal(tmp_path, f'[search]\nmirror = "{wrong}"\n'))
