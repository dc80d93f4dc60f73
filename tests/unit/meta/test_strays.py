"""Keys without a place: heads of other tasks are left out, what belongs inside the model is an error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining, LlamaConfig, LlamaForCausalLM

import dryfit
from dryfit.settings.errors import LoadError

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT as it was pretrained: pooler, masked language model and next-sentence head."""
    BertForPreTraining(BertConfig(**SMALL)).save_pretrained(tmp_path)
    return tmp_path


def add(folder: Path, key: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {key: torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("task", "missing", "left_out"),
    [
        (None, "error", {"bert.pooler", "cls.predictions", "cls.seq_relationship"}),
        ("masked-lm", "error", {"bert.pooler", "cls.seq_relationship"}),
        ("sequence-classification", ["classifier.*"], {"cls.predictions", "cls.seq_relationship"}),
        ("token-classification", ["classifier.*"], {"bert.pooler", "cls.predictions", "cls.seq_relationship"}),
    ],
)
def test_poolers_and_other_heads_are_left_out(folder: Path, task: str, missing: object, left_out: set[str]) -> None:
    report = dryfit.load(folder, task=task, missing=missing).load_report
    assert {".".join(key.split(".")[:2]) for key in report.unexpected} == left_out


@pytest.mark.parametrize("task", [None, "masked-lm"])
@pytest.mark.parametrize(
    "key",
    [
        "bert.embeddings.more.weight",
        "bert.encoder.layer.0.attention.self.query.lora_A.weight",
        "bert.encoder.layer.2.output.dense.weight",
        "bert.encoder.layer.0.more.weight",
        "encoder.layer.2.output.dense.weight",
        "bert.encoder.layer.0.output.dense.more",
    ],
)
def test_what_belongs_inside_the_encoder_is_an_error(folder: Path, task: str | None, key: str) -> None:
    add(folder, key)
    with pytest.raises(LoadError, match="without a place") as caught:
        dryfit.load(folder, task=task)
    assert key.removeprefix("bert.") in caught.value.found


@pytest.mark.parametrize("task", [None, "masked-lm"])
def test_a_config_with_fewer_layers_is_an_error(folder: Path, task: str | None) -> None:
    configure(folder, num_hidden_layers=1)
    with pytest.raises(LoadError, match="16 without a place"):
        dryfit.load(folder, task=task)


def test_biases_the_config_does_not_know_are_an_error(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)).save_pretrained(tmp_path)
    configure(tmp_path, attention_bias=False)
    with pytest.raises(LoadError, match="8 without a place"):
        dryfit.load(tmp_path, task="causal-lm")


def test_adapters_are_told_from_a_larger_model(folder: Path) -> None:
    add(folder, "bert.encoder.layer.0.attention.self.query.lora_A.weight")
    with pytest.raises(LoadError) as caught:
        dryfit.load(folder)
    assert "attach=FOLDER" in caught.value.hint


def test_a_caller_may_leave_out_what_has_no_place(folder: Path) -> None:
    add(folder, "bert.embeddings.more.weight")
    model = dryfit.meta.build(lambda: BertForPreTraining(BertConfig(**SMALL)))
    report = dryfit.meta.materialise(model, folder, unexpected=["bert.embeddings.more.*"])
    assert report.unexpected == ("bert.embeddings.more.weight",)
