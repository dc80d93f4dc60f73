"""Mapped weights are used only while their files are what they were."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dryfit
import tiny
from dryfit.settings.errors import LoadError

INPUTS = {"input_ids": torch.tensor([[2, 7, 9, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model")


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


def test_a_file_that_was_cut_short_does_not_kill_the_process(folder: Path) -> None:
    mapped = dryfit.load(folder, mapped=True)
    os.truncate(folder / "model.safetensors", 200)
    with pytest.raises(LoadError, match="its size changed"):
        mapped(**INPUTS)


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
