import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BertForPreTraining

import dryfit
import tasks
import tiny
from dryfit.meta.checkpoint_files import FolderSource, model_identity
from dryfit.meta.pretrained import Kind, empty_stack, load_pretrained
from dryfit.settings.check_messages import Health, Subject
from dryfit.settings.errors import ConfigError, LoadError, MachineError
from dryfit.settings.tables import HeadSettings, ModelSettings, RegularizationSettings
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.saved_models import folder_health, load, save_trained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model")


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_without_weights_or_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="no weights"):
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match="reading the config of"):
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)


def test_an_encoder_decoder_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(ConfigError, match="t5 is an encoder-decoder"):
        empty_stack(FolderSource(str(folder)), Kind.ENCODER, RegularizationSettings())


def test_minilm_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install 'dryfit\[demo\]'"):
        load_pretrained(ModelSettings(name="minilm"), Kind.ENCODER)


def test_identity_is_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = model_identity(FolderSource(str(folder)))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert model_identity(FolderSource(str(copy))) == first
    change_weights(copy, lambda weights: weights["encoder.layer.0.output.dense.bias"].add_(1e-3))
    assert model_identity(FolderSource(str(copy))) != first


def saved(folder: Path, tmp_path: Path) -> tuple[EncoderWithHead, Path]:
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    head = HeadSettings(layers=2, hidden=5, activation="tanh", pooling="max")
    model = EncoderWithHead(encoder, HeadSpec(head, num_outputs=3))
    facts = {"metric": "f1", "step": 7, "input": tasks.saved_input(head, 3)}
    save_trained(tmp_path / "best", model, tokenizer_folders={"": folder}, facts=facts)
    return model, tmp_path / "best"


def test_a_model_that_an_earlier_version_saved_is_the_same(folder: Path, tmp_path: Path) -> None:
    model, best = saved(folder, tmp_path)
    spec = model.spec
    old = {"format": 1, "head": spec.settings.model_dump(mode="json"), "num_outputs": 3, "cls_last": True}
    (best / "dryfit.json").write_text(json.dumps(old), encoding="utf-8")
    found = load(best)
    assert isinstance(found, EncoderWithHead)
    assert found.spec == replace(spec, cls_last=True)
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_saved_model_comes_back_whole(folder: Path, tmp_path: Path) -> None:
    model, best = saved(folder, tmp_path)
    found = load(best)
    assert isinstance(found, EncoderWithHead)
    assert found.spec == model.spec
    assert found.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())
    assert load(best, dtype=torch.float64).head[-1].weight.dtype is torch.float64
    assert json.loads((best / "dryfit.json").read_text())["step"] == 7


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are told by their inodes: a name may have belonged to another before."""
    heard: list[int | str] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        heard.append(os.fstat(descriptor).st_ino)

    def named(real: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def name(path: Path, target: Path) -> Path:
            heard.append(str(target))
            return real(path, target)

        return name

    monkeypatch.setattr(os, "fsync", synced)
    for way in ("rename", "replace"):
        monkeypatch.setattr(Path, way, named(getattr(Path, way)))
    model, best = saved(folder, tmp_path)
    at = heard.index(str(best))
    assert {path.stat().st_ino for path in (best, *best.rglob("*"))} <= set(heard[:at])
    assert best.parent.stat().st_ino in heard[at:]
    heard.clear()
    save_trained(
        best, model, tokenizer_folders={"": folder}, facts={"input": tasks.saved_input(model.spec.settings, 3)}
    )
    weights, facts = best / "model.safetensors", best / "dryfit.json"
    expected = [weights.stat().st_ino, str(weights), facts.stat().st_ino, str(facts), best.stat().st_ino]
    assert heard == expected


def test_saving_again_replaces_weights_and_facts_only(folder: Path, tmp_path: Path) -> None:
    model, best = saved(folder, tmp_path)
    with torch.no_grad():
        model.head[-1].bias.add_(1)
    save_trained(
        best, model, tokenizer_folders={"": folder}, facts=json.loads((best / "dryfit.json").read_text()) | {"step": 9}
    )
    assert torch.equal(load(best).head[-1].bias, model.head[-1].bias)
    assert json.loads((best / "dryfit.json").read_text())["step"] == 9
    assert sorted(path.name for path in best.iterdir()) == [
        "config.json",
        "dryfit.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_anything_else_gives_the_encoder(folder: Path) -> None:
    model = load(folder)
    assert type(model).__name__ == "BertModel"
    assert not model.training


# ---- mapped weights are used only while their files are what they were

INPUTS = {"input_ids": torch.tensor([[2, 7, 9, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}


def overwrite(path: Path, value: float) -> None:
    """Put other weights into the same file, as `cp` does."""
    other = {name: torch.full_like(tensor, value) for name, tensor in load_file(path).items()}
    save_file(other, path.with_suffix(".new"), metadata={"format": "pt"})
    with path.open("r+b") as file:
        file.write(path.with_suffix(".new").read_bytes())
    stamp = path.stat()
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))  # a clock of coarse ticks


def test_a_file_that_was_overwritten_is_noticed_before_the_weights_are_used(folder: Path) -> None:
    private, mapped = dryfit.load(folder), dryfit.load(folder, mapped=True)
    want = private(**INPUTS)[0]
    overwrite(folder / "model.safetensors", 0.5)
    with pytest.raises(LoadError, match="the file changed since its header was read"):
        mapped(**INPUTS)
    with pytest.raises(LoadError, match="the file changed since its header was read"):
        mapped.encoder.layer[0].attention.self.query(torch.ones(1, 32))
    assert torch.equal(private(**INPUTS)[0], want)


def test_weights_moved_into_memory_of_their_own_no_longer_depend_on_the_file(folder: Path) -> None:
    mapped = dryfit.load(folder, mapped=True)
    dryfit.meta.move(mapped, "cpu", torch.float64)
    want = mapped(**INPUTS)[0]
    os.truncate(folder / "model.safetensors", 200)  # would end the process, were a page of it still in use
    assert torch.equal(mapped(**INPUTS)[0], want)


def test_filling_again_ends_the_watch(folder: Path) -> None:
    mapped = dryfit.load(folder, mapped=True)
    dryfit.meta.materialise(mapped, folder, missing=["pooler.*"])
    want = mapped(**INPUTS)[0]
    assert torch.equal(want, dryfit.load(folder)(**INPUTS)[0])
    os.truncate(folder / "model.safetensors", 200)
    assert torch.equal(mapped(**INPUTS)[0], want)


# ---- A look at a checkpoint says what loading it would say, and reads nothing but headers


Weights = dict[str, torch.Tensor]


def change(file: Path, how: Callable[[Weights], Any]) -> None:
    weights = load_file(file)
    how(weights)
    save_file(weights, file, metadata={"format": "pt"})


def look(folder: Path, task: str | None = None, *, trust: bool = False) -> Health:
    """A look; it must survive its way through a file."""
    found = folder_health(str(folder), task, trust=trust)
    assert Health.model_validate_json(found.model_dump_json()) == found
    assert Health.model_validate_json(found.model_dump_json(by_alias=True)) == found
    return found


def agrees_with_loading(folder: Path, found: Health) -> bool:
    """Whether loading comes to the same verdict, and names what the look names."""
    try:
        load(folder, task=found.task or None)
    except LoadError as error:
        named = all(names[0] in str(error) for _, names in found.faults())
        return not found.healthy and named
    return found.healthy


def llama(folder: Path, **overrides: Any) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("llama", vocab_size=64, num_key_value_heads=2, **sizes, tie_word_embeddings=True)
    shards = overrides.pop("max_shard_size", "1GB")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shards)
    return folder


def test_a_healthy_encoder(folder: Path) -> None:
    found = look(folder)
    assert found.healthy and not found.faults() and not found.errors
    assert (found.subject, found.task, found.why) == (Subject.MODEL, "encoder", "config.json names BertModel")
    weights = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in weights.values())
    assert found.stored is not None and found.model is not None
    assert (found.stored.format, found.stored.tensors) == ("safetensors", len(weights))
    assert (found.stored.total_bytes, found.stored.bytes_by_dtype) == (total, {"float32": total})
    (file,) = found.stored.files
    assert (file.name, file.size_bytes) == ("model.safetensors", (folder / "model.safetensors").stat().st_size)
    model = load(folder)
    assert found.model.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.model.filled == found.model.places == len(list(model.parameters()))
    assert found.unexpected == ("pooler.dense.bias", "pooler.dense.weight")
    assert agrees_with_loading(folder, found)


def test_the_task_is_the_one_the_config_names(tmp_path: Path) -> None:
    found = look(llama(tmp_path / "llama", max_shard_size="30KB"))
    assert found.task == "causal-lm"
    assert found.why == "config.json names LlamaForCausalLM"
    assert found.healthy and found.model is not None and found.stored is not None
    assert found.model.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert len(found.stored.files) > 2
    assert sum(file.tensors for file in found.stored.files) == found.stored.tensors
    encoder = look(tmp_path / "llama", "encoder")
    assert (encoder.why, encoder.healthy) == ("as asked", True)
    assert encoder.model is not None and dict(encoder.model.renamed) == {"model.": 20}
    config = json.loads((tmp_path / "llama/config.json").read_text())
    (tmp_path / "llama/config.json").write_text(json.dumps(config | {"architectures": None}))
    nothing = look(tmp_path / "llama")
    assert (nothing.task, nothing.healthy) == ("encoder", True)
    assert "names no architecture, which is of no task" in nothing.why


def test_a_class_of_no_task_is_looked_at_as_the_bare_encoder(folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    BertForPreTraining(config).save_pretrained(tmp_path / "both")
    found = look(tmp_path / "both")
    assert (found.task, found.healthy) == ("encoder", True)
    assert "BertForPreTraining, which is of no task" in found.why
    assert "cls.seq_relationship.weight" in found.unexpected


@pytest.mark.parametrize("harm", ["missing", "shape", "stray", "kind", "layers"])
def test_what_is_wrong_is_named(folder: Path, harm: str) -> None:
    name = "encoder.layer.1.output.dense.weight"
    file = folder / "model.safetensors"
    match harm:
        case "missing":
            change(file, lambda weights: weights.pop(name))
            want = [("missing", (name,))]
        case "shape":
            change(file, lambda weights: weights.update({name: torch.zeros(7)}))
            want = [("of another shape", (f"{name}: [7] in the file, not [32, 64]",))]
        case "stray":
            change(file, lambda weights: weights.update({"encoder.layer.2.output.dense.bias": torch.zeros(1)}))
            want = [("without a place", ("encoder.layer.2.output.dense.bias",))]
        case "kind":
            change(file, lambda weights: weights.update({name: torch.zeros(32, 64, dtype=torch.int8)}))
            want = [("of another kind of number", (f"{name}: torch.int8 in the file, not torch.float32",))]
        case _:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
            want = None
    found = look(folder)
    assert not found.healthy
    if want is not None:
        assert list(found.faults()) == want
    else:
        assert len(found.missing) == 16
        assert all(name.startswith("encoder.layer.2.") for name in found.missing)
    assert agrees_with_loading(folder, found)


def test_what_headers_cannot_tell_is_said(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    copied = {"lm_head.weight": torch.zeros(64, 32)}
    change(folder / "model.safetensors", lambda weights: weights.update(copied))
    found = look(folder)
    assert found.healthy
    assert any("must be equal, which is not looked at" in note and "lm_head.weight" in note for note in found.notes)
    with pytest.raises(LoadError, match="differ in the file"):
        load(folder, task="causal-lm")


def test_a_new_head_is_missing(folder: Path) -> None:
    found = look(folder, "sequence-classification")
    assert not found.healthy
    assert found.missing == ("classifier.weight", "classifier.bias")
    assert found.why == "as asked"


def lose_from_shard(folder: Path) -> str:
    shard = folder / "model-00002-of-00004.safetensors"
    key = next(iter(load_file(shard)))
    change(shard, lambda weights: weights.pop(key))
    return key


def cut_shard(folder: Path) -> str:
    shard = folder / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    return shard.name


def stale_single(folder: Path) -> str:
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    return "both model.safetensors and model.safetensors.index.json"


def lost_shard(folder: Path) -> str:
    (folder / "model-00001-of-00004.safetensors").unlink()
    return "1 of 4 shards are missing"


@pytest.mark.parametrize("harm", [lose_from_shard, cut_shard, stale_single, lost_shard])
def test_files_that_cannot_be_opened_are_a_finding(tmp_path: Path, harm: Callable[[Path], str]) -> None:
    folder = llama(tmp_path / "llama", max_shard_size="30KB")
    named = harm(folder)
    found = look(folder)
    assert not found.healthy and found.stored is None
    (error,) = found.errors
    assert named in error and "[LOAD]" in error
    assert found.model is not None and found.model.architecture == "LlamaForCausalLM"
    assert found.model.filled == 0 and not found.faults()


def test_a_config_that_cannot_be_read_is_a_finding(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    found = look(folder)
    assert not found.healthy and found.model is None
    assert found.stored is not None and found.stored.tensors == 39
    assert "reading the config of" in found.errors[0]


def test_a_config_of_wrong_values_is_a_finding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    found = look(folder)
    assert "hidden_size is 'many'" in found.errors[0] and "an integer from 1 to" in found.errors[0]


def test_pickles_are_looked_at_too_and_unused_files_noted(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    assert look(folder).notes == ("not used: pytorch_model.bin",)
    (folder / "model.safetensors").unlink()
    found = look(folder)
    assert found.healthy and found.stored is not None
    assert (found.stored.format, found.stored.tensors) == ("pickle", 39)


def written(folder: Path, tmp_path: Path) -> Path:
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    head = HeadSettings(layers=2, hidden=5)
    model = EncoderWithHead(encoder, HeadSpec(head, num_outputs=3))
    save_trained(tmp_path / "best", model, tokenizer_folders={"": folder}, facts={"input": tasks.saved_input(head, 3)})
    return tmp_path / "best"


def test_the_folder_of_a_trial(folder: Path, tmp_path: Path) -> None:
    best = written(folder, tmp_path)
    found = look(best)
    assert (found.subject, found.task, found.healthy) == (Subject.TRAINED, "", True)
    assert found.model is not None and found.model.architecture == "EncoderWithHead"
    assert found.model.filled == found.model.places
    assert found.folder == str(best)
    change(best / "model.safetensors", lambda weights: weights.update({"more": torch.zeros(1)}))
    found = look(best)
    assert found.strays == ("more",)
    assert agrees_with_loading(best, found)
    (best / "dryfit.json").write_text("{}")
    found = look(best)
    assert found.subject is Subject.TRAINED
    assert "format None" in found.errors[0]


def lora(folder: Path, *, layers: int = 2, **config: Any) -> Path:
    folder.mkdir()
    weights = {}
    for layer in range(layers):
        stem = f"base_model.model.encoder.layer.{layer}.attention.self.query"
        weights[f"{stem}.lora_A.weight"] = torch.zeros(4, 32)
        weights[f"{stem}.lora_B.weight"] = torch.zeros(32, 4)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "some/base", "target_modules": ["query"]}
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    return folder


def test_an_adapter(tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter")
    found = look(folder)
    assert found.healthy and found.subject is Subject.ADAPTER and found.model is None
    assert (found.adapter.kind, found.adapter.base, found.adapter.layers, found.adapter.rank) == (
        "LORA",
        "some/base",
        2,
        4,
    )
    with pytest.raises(ConfigError, match="the task 'encoder' was asked for"):
        look(folder, "encoder")


def test_pairs_of_an_adapter(tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    stem = "base_model.model.encoder.layer.1.attention.self.query"
    change(file, lambda weights: weights.pop(f"{stem}.lora_B.weight"))
    assert look(folder).missing == (f"{stem}.lora_B.weight",)
    change(file, lambda weights: weights.update({f"{stem}.lora_B.weight": torch.zeros(32, 3)}))
    found = look(folder)
    assert not found.healthy and not found.missing
    assert found.shapes == (f"{stem}: lora_A is of rank 4, lora_B is of rank 3; adapter_config.json says 4",)
    change(file, lambda weights: weights.update({f"{stem}.lora_A.weight": torch.zeros(3, 32)}))
    assert len(look(folder).shapes) == 1
    about = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(about | {"rank_pattern": {"layer.1": 3}}))
    assert look(folder).healthy
    (folder / "adapter_config.json").write_text(json.dumps(about | {"rank_pattern": {"x": 3}, "use_dora": True}))
    assert look(folder).missing == tuple(
        f"base_model.model.encoder.layer.{layer}.attention.self.query.lora_magnitude_vector" for layer in range(2)
    )
    (folder / "adapter_config.json").write_text("[]")
    assert "it holds no JSON object" in look(folder).errors[0]
    file.unlink()
    assert len(look(folder).errors) == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's business
def test_peft_s_own_files_are_healthy(folder: Path, tmp_path: Path) -> None:
    for name, extra in (
        ("plain", {}),
        ("dora", {"use_dora": True}),
        ("embedding", {"target_modules": ["query", "word_embeddings"]}),
    ):
        config = peft.LoraConfig(**{"r": 4, "target_modules": ["query", "value"]} | extra)
        adapted = peft.get_peft_model(load(folder), config)
        adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
        found = look(tmp_path / name)
        assert found.healthy, (name, found)
        assert found.adapter.layers == (3 if name == "embedding" else 4)


def test_what_cannot_be_looked_at(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no such folder"):
        look(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="nothing is downloaded"):
        folder_health("some-model")
    with pytest.raises(ConfigError, match="there is no task 'spelling'"):
        look(folder, "spelling")
    with pytest.raises(ConfigError, match="seq2seq|Seq2Seq"):
        look(folder, "seq2seq-lm")


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_no_weight_is_read_and_no_memory_taken(folder: Path, tmp_path: Path) -> None:
    big = tiny.model(tmp_path / "big", vocab_size=320_000)
    size = (big / "model.safetensors").stat().st_size
    assert size > 40e6
    look(folder)  # imports and caches
    read, resident = read_bytes(), resident_bytes()
    found = look(big)
    assert found.healthy and found.stored is not None and found.stored.total_bytes > 40e6
    assert read_bytes() - read < 2e6
    assert resident_bytes() - resident < 8e6  # a file that is mapped and looked at counts here
