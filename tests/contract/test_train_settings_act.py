"""Every key that says what is learned changes what is learned, or is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny
import trials
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError, DryfitError, LoadError
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.task_facts import reads
from parts import need_package
from settings_act import (
    CLASS_HEAD,
    COMMON,
    DECIDES,
    ELSEWHERE,
    FOCAL,
    Case,
    Pairs,
    Tables,
    whole_training,
)

SEVERAL: Tables = {"data": {"multi_label": True}}
CASES: dict[str, Case] = {
    **COMMON,
    **CLASS_HEAD,
    "train.epochs": ({}, 3),
    "train.max_length": ({}, 12),
    "train.early_stopping": ({"optim": {"lr": 5e-3}, "train": {"epochs": 8}}, 1),
}
MORE = [
    *[("optim.name", {}, name) for name in ("adafactor", "lion", "radam", "nadam")],
    *[("optim.weight_decay", {"optim": {"name": name}}, 0.5) for name in ("lion", "adafactor", "radam", "nadam")],
    *[("optim.beta1", {"optim": {"name": name}}, 0.5) for name in ("radam", "nadam")],
    *[("optim.beta2", {"optim": {"name": name}}, 0.9) for name in ("radam", "nadam")],
    *[("optim.eps", {"optim": {"name": name}}, 1e-2) for name in ("radam", "nadam")],
    ("optim.beta1", {"optim": {"name": "sgd", "lr": 0.1}}, 0.5),
    ("optim.weight_decay", {"optim": {"name": "sgd", "lr": 0.1}}, 0.5),
    ("head.pooling", {}, "cls"),
    ("head.pooling", {}, "attention"),
    *[("head.activation", {"head": {"layers": 1}}, name) for name in ("relu", "silu")],
    ("loss.class_balance", {}, "effective"),
    ("loss.class_balance", FOCAL, "weighted"),
    ("loss.class_balance", {"loss": {"label_smoothing": 0.1}}, "weighted"),
    ("loss.name", SEVERAL, "focal"),
    ("loss.label_smoothing", SEVERAL, 0.2),
    ("loss.gamma", SEVERAL | FOCAL, 0.5),
    ("loss.alpha", SEVERAL | FOCAL, 0.25),
    ("loss.class_balance", SEVERAL, "weighted"),
    ("loss.class_balance", SEVERAL, "effective"),
    ("loss.effective_beta", SEVERAL | {"loss": {"class_balance": "effective"}}, 0.9),
    ("regularization.max_grad_norm", {}, 0.0),
    ("regularization.freeze_layers", {"regularization": {"freeze_layers": 1}}, 2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("models") / "first")


def trial_of(model: Path, folder: Path, tables: Tables) -> trials.Trial:
    tables = dict(tables)
    several = tables.pop("data", None) == SEVERAL["data"]
    data = (tiny.multi_label_data if several else tiny.data)(folder / "data")
    return trials.Trial(folder, encoder=model, data=data, **tables)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"), partial(trial_of, model))


def test_every_key_that_can_be_searched_has_a_case() -> None:
    keys = {key for key in SEARCHABLE if reads(BuiltInTask.CRITERIA, key)}
    assert keys == CASES.keys() | ELSEWHERE | DECIDES


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("key", "tables", "value"),
    [(key, *case) for key, case in CASES.items()] + [pytest.param(*case, marks=pytest.mark.nightly) for case in MORE],
    ids=[*CASES, *[f"{key}-{value}-{'-'.join(tables)}" for key, tables, value in MORE]],
)
def test_the_key_changes_training(pairs: Pairs, key: str, tables: Tables, value: Any) -> None:
    pairs.assert_acts(key, tables, value)


def test_the_same_settings_give_the_same_outcome(tmp_path: Path, model: Path) -> None:
    """What the test above would mistake for an effect."""
    train = whole_training
    assert train(trial_of(model, tmp_path / "a", {})) == train(trial_of(model, tmp_path / "b", {}))


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        ({"regularization": {"freeze_layers": 3}}, "the encoder has 2"),
        ({"loss": {"gamma": 1.0}}, "no effect with loss.name = 'cross_entropy'"),
        ({"loss": {"name": "focal", "label_smoothing": 0.1}}, "no effect with loss.name = 'focal'"),
        ({"loss": {"alpha": 0.5}}, "no effect with loss.name = 'cross_entropy'"),
        ({"loss": {"effective_beta": 0.9}}, "no effect with loss.class_balance = 'none'"),
        ({"sched": {"cycles": 3}}, "no effect with sched.name = 'linear'"),
        ({"sched": {"name": "cosine", "power": 3.0}}, "no effect with sched.name = 'cosine'"),
        ({"head": {"hidden": 7}}, "no effect with head.layers = 0"),
        ({"head": {"activation": "relu"}}, "no effect with head.layers = 0"),
        ({"optim": {"name": "sgd", "beta2": 0.9}}, "no effect with optim.name = 'sgd'"),
        ({"optim": {"name": "sgd", "eps": 1e-3}}, "no effect with optim.name = 'sgd'"),
        ({"optim": {"name": "adafactor", "beta1": 0.5}}, "no effect with optim.name = 'adafactor'"),
        ({"optim": {"name": "lion", "eps": 1e-3}}, "no effect with optim.name = 'lion'"),
        ({"optim": {"name": "radam"}, "execution": {"optimizer_impl": "fused"}}, "radam has no such implementation"),
        ({"optim": {"name": "lion"}, "execution": {"optimizer_impl": "fused"}}, "lion has no such implementation"),
        ({"execution": {"offload_optimizer": True}}, "it lies in host memory already"),
        ({"train": {"evals_per_epoch": 6}}, "an epoch has 5 steps"),
        ({"train": {"precision": "fp16"}}, "it needs a CUDA device"),
        ({"train": {"max_length": 73}}, "train.max_length is 73"),
        ({"model": {"revision": "main"}}, "model.revision is 'main'"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path: Path, model: Path, tables: Tables, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trials.small(tmp_path, encoder=model, **tables).run()
    assert found in caught.value.found


EIGHT_BITS = [
    ("optim.name", {}, "adamw8bit"),
    ("optim.beta1", {"optim": {"name": "adamw8bit"}}, 0.5),
    ("optim.beta2", {"optim": {"name": "adamw8bit"}}, 0.5),
    ("optim.eps", {"optim": {"name": "adamw8bit"}}, 1e-2),
    ("optim.weight_decay", {"optim": {"name": "adamw8bit"}}, 0.5),
]


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore")  # importing the library warns of what it does itself
@pytest.mark.parametrize(("key", "tables", "value"), EIGHT_BITS, ids=[key for key, _, _ in EIGHT_BITS])
def test_eight_bit_keys_change_training(tmp_path: Path, key: str, tables: Tables, value: Any) -> None:
    """On a wider model: tensors of less than 4096 elements keep their state in fp32."""
    need_package("bitsandbytes")
    wide = tiny.model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    Pairs(tmp_path / "pairs", partial(trial_of, wide)).assert_acts(key, tables, value)


def test_a_searched_switch_lets_an_idle_key_pass(tmp_path: Path, model: Path) -> None:
    trial = trials.small(tmp_path, encoder=model, loss={"gamma": 1.0})
    trial.params = {"loss.name": "cross_entropy"}
    assert trial.run()[0].stopped_by is None


@pytest.mark.parametrize("tables", [{"regularization": {"freeze_layers": 1}}, {"optim": {"layer_decay": 0.9}}])
def test_shared_layers_cannot_be_told_apart(tmp_path: Path, tables: Tables) -> None:
    albert = tiny.model(tmp_path / "albert", "albert")
    with pytest.raises(ConfigError, match="albert has no list of 2 layers"):
        trials.small(tmp_path, encoder=albert, **tables).run()


def test_f1_of_three_classes_is_refused(tmp_path: Path, model: Path) -> None:
    rows = tiny.rows(40)
    for index, row in enumerate(rows):
        row["label"] = index % 3
    path = tiny.write_jsonl(tmp_path / "all.jsonl", rows)
    data = {"file": str(path), "num_labels": 3}
    with pytest.raises(ConfigError, match="f1 with 3 classes"):
        trials.Trial(tmp_path / "a", encoder=model, data=data, study={"metric": "f1"}).run()
    result, channel = trials.Trial(tmp_path / "b", encoder=model, data=data, study={"metric": "f1_macro"}).run()
    assert result.value == max(point.value for point in channel.points)
    assert "f1" not in channel.points[0].metrics


def test_a_model_that_is_not_there(tmp_path: Path, model: Path) -> None:
    near = model.with_name("firts")
    with pytest.raises(LoadError, match="there is no such folder") as caught:
        trials.small(tmp_path, encoder=near).run()
    assert caught.value.hint == f"did you mean {model}?"
    assert isinstance(caught.value, DryfitError)
