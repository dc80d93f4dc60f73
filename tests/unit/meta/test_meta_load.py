import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dryfit
import tasks
import tiny
from dryfit.meta.checkpoint_files import FolderSource, model_identity
from dryfit.meta.pretrained import Kind, empty_stack, load_pretrained
from dryfit.settings.errors import ConfigError, LoadError, MachineError
from dryfit.settings.tables import HeadSettings, ModelSettings, RegularizationSettings
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.saved_models import load, save_trained


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
