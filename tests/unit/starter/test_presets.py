"""Presets: each is a legal study file, and its space can be searched."""

from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest

from dryfit.search.samplers import suggest
from dryfit.search.space import Space, apply_params
from dryfit.settings.choices import PRESETS, BaseFormat, BuiltInTask, Direction
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import SamplerName, SearchSettings
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import LoadedStudy, load_study_file, load_study_text
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.tables import TRIAL_NEEDS, TrialSettings
from dryfit.settings.task_facts import facts_of, reads
from dryfit.study.template import TASKS, SplitSizes, init_folder, preset_tasks, preset_text

DATA = ("data.train=a.jsonl", "data.validation=b.jsonl")


def load(
    name: str, use: Use = Use.PLAN, overrides: tuple[str, ...] = (), task: BuiltInTask | None = None
) -> LoadedStudy:
    return load_study_text(preset_text(name, task), Path(f"preset {name}"), overrides, use)


OF_CRITERIA = ("max", "smoke", "standard", "supermax")
TRAINABLE = ("evidence", "joint", "share", *OF_CRITERIA)
EVERY_TASK = ("max", "supermax")
OF_EVERY_TASK = [(name, task) for name in EVERY_TASK for task in TASKS]
# Keys that no trial of supermax varies, each with its reason; of any task, and of one.
NOT_SEARCHED = {
    "model.revision": "which files a model is, is no matter of luck",
    "model.trust_remote_code": "so is whose code is run",
    "train.evals_per_epoch": "it decides what trials are compared at",
    "train.early_stopping": "it would cut trials short that the pruner is to judge",
    "train.early_stopping_min_delta": "nor does it act without early stopping",
    "regularization.frozen_dropout": "frozen layers are a part of what is learned by, as it is",
}
FITS_ROWS = "it must fit the words of the user's rows"
MEASURES = "it decides how much is measured, and nothing that is learned"
NOT_SEARCHED_OF: dict[BuiltInTask, dict[str, str]] = {
    BuiltInTask.JOINT: {"joint.criteria_model": "joint.share_ratio acts only where both encoders are one model"},
    BuiltInTask.CAUSAL_LM: {
        "lm.format": "losses of different formats do not compare",
        "lm.criteria_prompt": FITS_ROWS,
        "lm.evidence_prompt": FITS_ROWS,
        "lm.answers": FITS_ROWS,
        "lm.no_evidence": FITS_ROWS,
        "lm.mix": "it acts only where lm.format is both",
        "lm.generate_rows": MEASURES,
        "lm.max_new_tokens": MEASURES,
        "lm.num_beams": MEASURES,
        "lm.metric": "values of different metrics do not compare",
        "regularization.dropout": "these models have no hidden dropout",
    },
}


def test_every_preset_is_legal_for_all_it_is_for() -> None:
    assert set(PRESETS) == {*TRAINABLE, "lora-7b-24gb", "qlora-7b-12gb", "qlora-7b-24gb"}
    folder = files("dryfit.study") / "presets"
    names = {f"{name}.toml" for name in PRESETS} | {f"{name}.decoder.toml" for name in EVERY_TASK}
    assert {entry.name for entry in folder.iterdir()} == names
    for name in PRESETS:
        for task in preset_tasks(name):
            config = load(name, task=task).config
            assert (config.study.name, config.study.task) == (name, task)
            Space.from_config(config)
        assert preset_text(name) == preset_text(name, preset_tasks(name)[0])
    for name in TRAINABLE:
        config = load(name, Use.TRAIN, DATA).config
        assert Space.from_config(config).names


def test_what_the_presets_promise() -> None:
    configs = {name: load(name, Use.TRAIN, DATA).config for name in OF_CRITERIA}
    trials = {name: config.study.trials for name, config in configs.items()}
    assert trials == {"smoke": 2, "standard": 20, "max": 800, "supermax": 5000}
    assert {configs[name].model.name for name in ("smoke", "standard")} == {"minilm"}
    assert not any("model.name" in configs[name].space for name in ("smoke", "standard"))
    standard = configs["standard"]
    assert (standard.search.sampler, standard.search.pruner) == ("tpe", "median")
    # A user, and the benchmark, may take another sampler without taking anything out of the file.
    assert load("standard", Use.TRAIN, (*DATA, "search.sampler=random")).config.search.sampler == "random"
    spaces = {name: set(config.space) for name, config in configs.items()}
    assert spaces["standard"] - {"regularization.freeze_layers"} < spaces["max"] < spaces["supermax"]
    assert len(configs["max"].space["model.name"][0].choices or ()) == 3
    assert configs["supermax"].space["model.name"][0].choices == (
        "bert-base-uncased",
        "bert-large-uncased",
        "roberta-base",
        "roberta-large",
        "microsoft/deberta-v3-base",
        "microsoft/deberta-v3-large",
        "xlm-roberta-base",
    )


@pytest.mark.parametrize("task", TASKS)
def test_supermax_searches_every_key_of_a_task_but_a_few(task: BuiltInTask) -> None:
    config = load("supermax", Use.TRAIN, DATA, task).config
    read = {key for key in SEARCHABLE if reads(task, key)}
    assert set(config.space) < read
    assert read - set(config.space) == NOT_SEARCHED.keys() & read | NOT_SEARCHED_OF.get(task, {}).keys()
    assert facts_of(task).not_searched.keys() <= NOT_SEARCHED_OF.get(task, {}).keys()
    assert len(config.space["model.name"][0].choices or ()) == 7
    nearly = load("max", Use.TRAIN, DATA, task).config
    assert (config.study.trials, nearly.study.trials) == (5000, 800)
    assert set(nearly.space) < set(config.space)


def test_the_cells_of_supermax() -> None:
    space = Space.from_config(load("supermax", Use.TRAIN, DATA).config)
    names = ("model.name", "train.max_length", "train.batch_size")
    points = space.combinations(names, 1000)
    assert points is not None and len(points) == 7 * 4 * 4
    assert {point["train.batch_size"] for point in points} == {8, 16, 32, 64}
    assert {point["train.max_length"] for point in points} == {128, 256, 384, 512}


CHOICES = ["head.pooling", "head.activation", "loss.name", "loss.class_balance", "sched.name"]
OF_SPANS = ["span.reranker", "span.null_policy", "multitask.weighting", "joint.fusion"]


@pytest.mark.parametrize("key", [*CHOICES, *OF_SPANS])
def test_supermax_searches_every_value_there_is(key: str) -> None:
    table, _, name = key.partition(".")
    of: Any = TrialSettings.model_fields[table].annotation
    kind = of.model_fields[name].annotation
    there_are = get_args(kind) or tuple(kind)  # a Literal, or an enum
    space = load("supermax", task=BuiltInTask.JOINT).config.space
    choices = [choice for case in space[key] for choice in case.choices or ()]
    assert set(choices) == set(there_are)


@pytest.mark.parametrize(
    ("name", "count", "task"),
    [
        *((name, 100, task) for name, task in OF_EVERY_TASK),
        ("supermax", 300, None),
        *((name, 60, None) for name in ("standard", "evidence", "share", "joint")),
        ("smoke", 10, None),
    ],
)
def test_random_points_are_valid_trials(name: str, count: int, task: BuiltInTask | None) -> None:
    config = load(name, Use.TRAIN, DATA, task).config
    space, base = Space.from_config(config), config.trial_settings
    search = SearchSettings(sampler=SamplerName.RANDOM)
    drawn: set[str] = set()
    for number in range(count):
        point = suggest(
            space, (), search=search, directions=(Direction.MAXIMIZE,), points=(), seed=5, number=number
        ).params
        found = apply_params(base, point)
        assert {key: getattr(getattr(found, key.split(".")[0]), key.split(".")[1]) for key in point} == point
        for needs in TRIAL_NEEDS:  # nothing is drawn that nothing reads
            table, _, field = needs.switch.partition(".")
            assert needs.key not in point or getattr(getattr(found, table), field) in needs.values, needs.key
        drawn |= set(point)
    assert drawn == set(config.space)


def test_a_preset_becomes_a_study_with_data(tmp_path: Path) -> None:
    pairs = [(name, None) for name in PRESETS] + OF_EVERY_TASK
    for name, task in pairs:
        folder = tmp_path / (task or "any") / f"my {name}"
        written = init_folder(folder, preset=name, task=task, sizes=SplitSizes(20, 8, 8))
        assert [path.name for path in written] == ["study.toml", "train.jsonl", "validation.jsonl", "test.jsonl"]
        mine, preset = load_study_file(folder).config, load(name, task=task).config
        assert mine.study.name == f"my-{name}"
        assert mine.data.train == str(folder / "data/train.jsonl")
        assert mine.data.test == str(folder / "data/test.jsonl")
        own = {"study", "data"}
        assert mine.model_dump(exclude=own) == preset.model_dump(exclude=own)
        assert mine.study == preset.study.model_copy(update={"name": f"my-{name}"})
        assert mine.data.train_limit == preset.data.train_limit
        text = (folder / "study.toml").read_text("utf-8")
        assert all(
            line in text for line in preset_text(name, task).splitlines() if line.startswith("#") or " = {" in line
        )


def test_init_refuses_presets_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean standard"):
        init_folder(tmp_path / "a", preset="standart")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in EVERY_TASK])
def test_init_refuses_a_preset_of_another_task(name: str, tmp_path: Path) -> None:
    for task in TASKS:
        if task in preset_tasks(name):
            continue
        with pytest.raises(ConfigError, match=f"{name} of the task {task}: {name} is for ") as refused:
            init_folder(tmp_path / "a", preset=name, task=task)
        known = refused.value.allowed.split(", ")
        assert set(EVERY_TASK) <= set(known) and name not in known
    assert not (tmp_path / "a").exists()


def test_the_seven_billion_preset() -> None:
    config = load("lora-7b-24gb", Use.TRAIN, DATA).config
    assert config.study.task is BuiltInTask.CAUSAL_LM
    assert (config.study.trials, config.study.metric) == (1, "loss")
    assert (config.lora.r, config.lora.alpha, config.lora.base) == (128, 256.0, BaseFormat.FP16)
    assert (config.train.batch_size, config.train.max_length, config.execution.micro_batch) == (16, 512, 1)
    assert config.execution.checkpointing is True
    with pytest.raises(ConfigError, match="gradients would pass through fp16 without a scale"):
        load("lora-7b-24gb", Use.TRAIN, (*DATA, "train.precision=fp32"))


@pytest.mark.parametrize(("name", "rows", "length"), [("qlora-7b-12gb", 1, 2048), ("qlora-7b-24gb", 4, 4096)])
def test_the_presets_in_four_bits(name: str, rows: int, length: int) -> None:
    config = load(name, Use.TRAIN, DATA).config
    assert (config.study.task, config.model.name) == (BuiltInTask.CAUSAL_LM, "Qwen/Qwen2.5-7B")
    assert (config.lora.r, config.lora.base, config.lora.double_quant) == (64, BaseFormat.NF4, True)
    assert (config.train.batch_size, config.train.max_length, config.train.precision) == (16, length, "bf16")
    assert (config.execution.micro_batch, config.execution.checkpointing) == (rows, True)


def test_an_unknown_preset_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean lora-7b-24gb") as caught:
        preset_text("lora-7b-24g")
    assert "supermax" in caught.value.allowed
