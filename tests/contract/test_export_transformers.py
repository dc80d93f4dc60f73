"""``dryfit export MODEL --to transformers``: plain transformers gives the same fp64 scores, or it is said why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import dryfit
import encoders
import spans
import study_runs
import tiny
import tiny_lms
import trials
from dryfit.settings.errors import ConfigError, LedgerError, LoadError
from dryfit.settings.training_messages import ExportRequest, ExportResult
from dryfit.settings.wire import Note
from dryfit.training.export import export

# PEFT itself asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WITHIN = 1e-10

HEADS: dict[str, dict[str, Any]] = {
    "bert": {"pooling": "cls", "layers": 1, "activation": "tanh"},
    "albert": {"pooling": "cls", "layers": 1, "activation": "tanh"},
    "roberta": {"pooling": "cls", "layers": 1, "activation": "tanh"},
    "xlm-roberta": {"pooling": "cls", "layers": 1, "activation": "tanh"},
    "electra": {"pooling": "cls", "layers": 1, "activation": "gelu"},
    "distilbert": {"pooling": "cls", "layers": 1, "activation": "relu"},
    "deberta-v2": {"pooling": "cls", "layers": 1, "activation": "silu"},
}
"""The head of ours that each architecture's own is; DeBERTa's config says which activation."""


def encoder_of(folder: Path, architecture: str) -> Path:
    return tiny.model(folder) if architecture == "bert" else encoders.model(folder, architecture)


def width_of(encoder: Path) -> int:
    return AutoModel.from_pretrained(encoder).config.hidden_size


def trained(folder: Path, architecture: str, **tables: Any) -> Path:
    """A trial's best weights, of the head that the architecture has unless another is said."""
    encoder = encoder_of(folder / "encoder", architecture)
    head = {**HEADS[architecture], "hidden": width_of(encoder)}
    settings = trials.merged({"train": {"epochs": 1}, "head": head}, tables)
    if not settings["head"]["layers"]:
        settings["head"] = {key: value for key, value in settings["head"].items() if key in ("pooling", "layers")}
    trials.small(folder, encoder=encoder, **settings).run()
    return folder / "best"


def exported(model: Path, out: Path, *, encoder_alone: bool = False) -> tuple[ExportResult, list[str]]:
    channel = trials.ScriptedChannel(out.with_name(f"{out.name}-channel"))
    body = ExportRequest(model_dir=str(model), out=str(out), encoder_alone=encoder_alone, threads=1)
    result = export(body, channel)
    return result, [message.text for message in channel.messages() if isinstance(message, Note)]


def tokens(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens of rows of several lengths, padded with the tokenizer's own."""
    config = AutoModel.from_pretrained(folder).config
    generator = torch.Generator().manual_seed(seed)
    pad = config.pad_token_id or 0
    ids = torch.randint(0, config.vocab_size, (4, 14), generator=generator)
    ids[ids == pad] = (pad + 1) % config.vocab_size
    mask = torch.ones_like(ids)
    for row, length in enumerate((14, 9, 3, 12)):
        ids[row, length:], mask[row, length:] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def in_fp64(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return model.double().eval()(**batch)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HEADS)
def test_plain_transformers_gives_the_same_scores(architecture: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "trial", architecture)
    result, _ = exported(model, tmp_path / "plain")
    assert result.loaded_by == "AutoModelForSequenceClassification"
    ours = dryfit.load(model)
    plain, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(told.values())  # nothing is missing, nothing left over
    for seed in range(3):
        batch = tokens(tmp_path / "trial" / "encoder", seed)
        want = in_fp64(ours, batch)
        have = in_fp64(plain, batch).logits
        assert (have - want).abs().max() <= WITHIN * want.abs().max()
        assert want.std(dim=0).min() > 1e-6  # rows differ, so that equal scores say something


@pytest.mark.slow
def test_the_folder_has_the_tokenizer_and_the_classes(tmp_path: Path) -> None:
    data = tiny.data(tmp_path / "data")
    for path in (Path(data["train"]), Path(data["validation"])):
        rows = [{**row, "label": ("no", "yes")[row["label"]]} for row in trials.read_lines(path)]
        tiny.write_jsonl(path, rows)
    encoder = tiny.model(tmp_path / "encoder")
    head = {**HEADS["bert"], "hidden": width_of(encoder)}
    named = {**data, "labels": ("no", "yes")}
    trials.Trial(tmp_path / "trial", encoder=encoder, data=named, train={"epochs": 1}, head=head).run()
    model = tmp_path / "trial" / "best"
    exported(model, tmp_path / "plain")
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert plain.config.id2label == {0: "no", 1: "yes"} and plain.config.label2id == {"no": 0, "yes": 1}
    assert plain.config.problem_type == "single_label_classification"
    row = tiny.rows(1)[0]
    read = {"truncation": "only_second", "max_length": 32, "return_tensors": "pt"}
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "plain")
    with torch.no_grad():
        scores = plain(**tokenizer(row["criterion"], row["text"], **read)).logits
    said = dryfit.Predictor(model, device="cpu")([row])[0]
    assert list(said["probabilities"].values()) == pytest.approx(scores.softmax(dim=-1)[0].tolist(), abs=1e-6)
    readme = (tmp_path / "plain" / "README.md").read_text(encoding="utf-8")
    assert "only_second" in readme and "max_length=32" in readme and "AutoModelForSequenceClassification" in readme


@pytest.mark.slow
def test_several_classes_of_a_row_are_said_in_the_config(tmp_path: Path) -> None:
    encoder = tiny.model(tmp_path / "encoder")
    head = {**HEADS["bert"], "hidden": width_of(encoder)}
    data = tiny.multi_label_data(tmp_path / "data")
    trials.Trial(tmp_path / "trial", encoder=encoder, data=data, train={"epochs": 1}, head=head).run()
    exported(tmp_path / "trial" / "best", tmp_path / "plain")
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert plain.config.problem_type == "multi_label_classification"
    assert plain.config.num_labels == 3


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra", "distilbert", "deberta-v2"])
def test_spans_are_those_of_question_answering(architecture: str, tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path / "encoder", architecture)
    data = spans.evidence_data(tmp_path / "data", train=24, validation=8)
    tables: dict[str, Any] = {"train": {"epochs": 1, "max_length": 28}, "span": {"doc_stride": 6}}
    study = {"task": "evidence", "metric": "token_f1"}
    trials.Trial(tmp_path / "trial", encoder=encoder, data=data, study=study, **tables).run()
    result, notes = exported(tmp_path / "trial" / "best", tmp_path / "plain")
    assert result.loaded_by == "AutoModelForQuestionAnswering"
    assert any("fitted on validation" in note for note in notes)  # the threshold of null is dryfit's own
    plain, told = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(told.values())
    batch = tokens(encoder)
    want, have = in_fp64(dryfit.load(tmp_path / "trial" / "best"), batch), in_fp64(plain, batch)
    for place, scores in enumerate((have.start_logits, have.end_logits)):
        assert (scores - want[..., place]).abs().max() <= WITHIN * want.abs().max()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mean pooling": ("bert", {"head": {"pooling": "mean"}}, "pooling = mean"),
    "max pooling": ("roberta", {"head": {"pooling": "max"}}, "pooling = max"),
    "attention": ("bert", {"head": {"pooling": "attention"}}, "pooling = attention"),
    "no layer": ("bert", {"head": {"layers": 0}}, "layers = 0"),
    "two layers": ("bert", {"head": {"layers": 2}}, "layers = 2"),
    "another width": ("bert", {"head": {"hidden": 7}}, "hidden = 7"),
    "another activation": ("bert", {"head": {"activation": "gelu"}}, "activation = gelu"),
    "an activation that is nearly the same": ("electra", {"head": {"activation": "silu"}}, "activation = silu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_the_architecture_has_not_is_refused_with_one_that_it_has(name: str, tmp_path: Path) -> None:
    architecture, tables, words = REFUSED[name]
    model = trained(tmp_path / "trial", architecture, **tables)
    with pytest.raises(ConfigError) as caught:
        exported(model, tmp_path / "plain")
    assert words in caught.value.found
    own = HEADS[architecture]
    assert f"pooling = cls, layers = 1, hidden = {width_of(tmp_path / 'trial' / 'encoder')}" in caught.value.allowed
    assert f"activation = {own['activation']}" in caught.value.allowed
    assert "transformers-encoder" in caught.value.hint
    assert not (tmp_path / "plain").exists()


@pytest.mark.slow
def test_a_norm_in_the_own_head_is_named(tmp_path: Path) -> None:
    encoder = encoders.model(tmp_path / "trial" / "encoder", "modernbert")
    trials.small(tmp_path / "trial", encoder=encoder, train={"epochs": 1}).run()
    with pytest.raises(ConfigError, match=r"also has .*norm") as caught:
        exported(tmp_path / "trial" / "best", tmp_path / "plain")
    assert "nothing that [head] can say" in caught.value.allowed


@pytest.mark.slow
@pytest.mark.parametrize("task", ["share", "joint"])
def test_two_heads_are_refused_and_their_encoders_are_not(task: str, tmp_path: Path) -> None:
    data = spans.both_data(tmp_path / "data", train=24, validation=8)
    tables: dict[str, Any] = {"train": {"epochs": 1, "max_length": 28}, "span": {"doc_stride": 6}}
    encoder = tiny.model(tmp_path / "encoder")
    study = {"task": task, "metric": "combined"}
    trials.Trial(tmp_path / "trial", encoder=encoder, data=data, study=study, **tables).run()
    model = tmp_path / "trial" / "best"
    with pytest.raises(ConfigError, match="no class of transformers has together") as caught:
        exported(model, tmp_path / "plain")
    assert "transformers-encoder" in caught.value.hint
    exported(model, tmp_path / "plain", encoder_alone=True)
    loaded: Any = dryfit.load(model)
    for part, ours in loaded.pretrained().items():
        batch = tokens(tmp_path / "plain" / part)
        plain = AutoModel.from_pretrained(tmp_path / "plain" / part)
        want, have = in_fp64(ours, batch)[0], in_fp64(plain, batch)[0]
        assert (have - want).abs().max() <= WITHIN * want.abs().max()
        assert AutoTokenizer.from_pretrained(tmp_path / "plain" / part).vocab_size > 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_language_model_is_whole_with_its_adapters_merged(rank: int, tmp_path: Path) -> None:
    base = tiny_lms.causal_lm(tmp_path / "qwen2")
    tables: dict[str, Any] = {
        "train": {"epochs": 1, "max_length": 160, "batch_size": 8},
        "lm": {"format": "both", "max_new_tokens": 3, "generate_rows": 4, "answers": "never, always walk"},
        "lora": {"r": rank},
        "optim": {"lr": 2e-2},
    }
    data = tiny.data(tmp_path / "data", train=16, validation=8)
    trials.Trial(tmp_path / "trial", encoder=base, data=data, study={"task": "causal-lm"}, **tables).run()
    model = tmp_path / "trial" / "best"
    result, _ = exported(model, tmp_path / "plain")
    assert result.loaded_by == "AutoModelForCausalLM"
    ids = torch.randint(2, 300, (2, 20), generator=torch.Generator().manual_seed(4))
    loaded: Any = dryfit.load(model)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    want = in_fp64(loaded.decoder, {"input_ids": ids}).logits
    have = in_fp64(plain, {"input_ids": ids}).logits
    within = 1e-5 if rank else WITHIN  # merged and saved in fp32
    assert (have - want).abs().max() <= within * want.abs().max()
    untrained = in_fp64(AutoModelForCausalLM.from_pretrained(base), {"input_ids": ids}).logits
    assert (untrained - want).abs().max() > 1e-2
    assert not (tmp_path / "plain" / "adapter_config.json").exists()
    with pytest.raises(ConfigError, match="it is a decoder"):
        exported(model, tmp_path / "other", encoder_alone=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model") / "trial", "bert")


@pytest.mark.slow
def test_the_command_makes_the_folder_once(model: Path, tmp_path: Path) -> None:
    done = study_runs.run("export", model, "--to", "transformers", "-o", tmp_path / "plain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "plain")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    again = study_runs.run("export", model, "--to", "transformers", "-o", tmp_path / "plain")
    assert again.returncode == 2
    assert "exists" in again.stderr


@pytest.mark.slow
def test_without_a_name_it_lies_beside_a_model_that_no_study_owns(model: Path) -> None:
    assert dryfit.export(model, "transformers-encoder") == model.with_name("best-encoder")
    AutoModel.from_pretrained(model.with_name("best-encoder"))


def test_a_models_folder_and_a_studys_are_told_apart(tmp_path: Path) -> None:
    saved, study = tmp_path / "model", tmp_path / "study"
    inside = study / "trials" / "0001" / "best"
    for folder in (saved, inside):
        folder.mkdir(parents=True)
        (folder / "dryfit.json").touch()
    (study / "ledger.jsonl").touch()
    with pytest.raises(LoadError, match="it is a study's folder") as caught:
        dryfit.export(study, "transformers")
    assert str(inside) in caught.value.hint
    with pytest.raises(ConfigError, match="it is a model's folder") as other:
        dryfit.export(saved, "csv")
    assert "transformers" in other.value.allowed
    with pytest.raises(ConfigError, match=r"lies in the study .*\n.*-o FOLDER"):
        dryfit.export(inside, "transformers")
    with pytest.raises(LoadError, match="no such folder"):
        dryfit.export(tmp_path / "nowhere", "transformers")
    with pytest.raises(LedgerError):
        dryfit.export(tmp_path / "nowhere", "csv")
    with pytest.raises(ConfigError, match="trust is given"):
        dryfit.export(study, "csv", trust=True)
    with pytest.raises(ConfigError, match="the format 'onnx' is unknown"):
        dryfit.export(saved, "onnx")
