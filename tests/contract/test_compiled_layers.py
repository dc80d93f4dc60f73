"""Layers that torch compiles compute what plain ones do, dropout included, and without a compiler the trial goes on."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import tasks
import tiny
import tiny_lms
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind, load_pretrained
from dryfit.settings.tables import HeadSettings
from dryfit.settings.wire import Note
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.tokens import TokenSet
from dryfit.training.model import CompiledLayers, enable_checkpointing, layers_of
from dryfit.training.step import backward_batch
from parts import need

# Compiling warns of much, and takes a warning that is an error for a fault of its own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NOTE = "the layers are not compiled from here on"
TABLES = {"criteria": {}, "causal-lm": {"lm": {"format": "text"}, "lora": {"r": 4, "dropout": 0.1}}}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what was compiled: empty, so that it shows whether anything was."""
    need("g++")
    folder = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def gradients(folder: Path, *, compiled: bool) -> tuple[torch.Tensor, list[str]]:
    """Of three batches, each of another width, in fp64, with layers that are recomputed."""
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    torch.manual_seed(0)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(dropout=0.1), 3)).double().train()
    enable_checkpointing(encoder, reentrant=False)
    notes: list[str] = []
    layers = CompiledLayers(model, layers_of(model) if compiled else [], notes.append)
    task, found = tasks.criteria(num_labels=3, train_counts={0: 7, 1: 2, 2: 1}, pad_id=0), []
    for rows, width in ((11, 40), (8, 17), (5, 29)):
        torch.manual_seed(width)
        ids = torch.randint(5, 30, (rows * width,), dtype=torch.int32)
        tokens = TokenSet(ids, None, torch.arange(0, rows * width + 1, width), torch.randint(0, 3, (rows,)))
        batch = task.collate(tokens, range(rows))

        def step(batch: Any = batch) -> torch.Tensor:
            return backward_batch(
                model, batch, task, micro_batch=4, backward=lambda loss: loss.backward(), autocast=nullcontext
            )

        layers.gradients(step)
        found += [parameter.grad.flatten().clone() for parameter in parameters(model)]
        model.zero_grad()
    return torch.cat(found), notes


def parameters(model: nn.Module) -> Sequence[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.nightly
def test_gradients_are_those_of_plain_layers(tmp_path: Path, kept: Path) -> None:
    model = tiny.model(tmp_path / "m")
    plain, _ = gradients(model, compiled=False)
    compiled, notes = trials.apart(lambda: gradients(model, compiled=True))
    assert notes == []
    assert list(kept.rglob("*.so"))
    assert float((compiled - plain).norm() / plain.norm()) < 1e-12


@pytest.mark.parametrize("task", ["criteria", pytest.param("causal-lm", marks=pytest.mark.nightly)])
def test_a_trial_comes_to_what_a_plain_one_does(tmp_path: Path, kept: Path, task: str) -> None:
    model = tiny.model(tmp_path / "m") if task == "criteria" else tiny_lms.causal_lm(tmp_path / "m")
    plain = run(tmp_path / "plain", model, task, compiled=False)
    compiled = run(tmp_path / "compiled-trial", model, task, compiled=True)
    assert compiled["notes"] == [] and compiled["left"] == 0
    assert list(kept.rglob("*.so"))
    assert compiled["values"] == pytest.approx(plain["values"], rel=1e-4)
    assert compiled["weights"].keys() == plain["weights"].keys()
    for name, weights in plain["weights"].items():
        assert torch.allclose(compiled["weights"][name], weights, atol=1e-4), name


def test_without_a_compiler_a_trial_is_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model = tiny.model(tmp_path / "m")
    plain = run(tmp_path / "plain", model, "criteria", compiled=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled = run(tmp_path / "compiled-trial", model, "criteria", compiled=True)
    (note,) = compiled["notes"]
    assert note.startswith(NOTE) and "compiler" in note.lower()
    assert compiled["values"] == plain["values"]
    assert trials.same_weights(compiled["weights"], plain["weights"])


def run(folder: Path, model: Path, task: str, *, compiled: bool) -> dict[str, Any]:
    """What a trial of a process of its own came to."""
    folder.mkdir()
    execution = {"compiled": compiled, "checkpointing": task == "criteria"}
    trial = trials.small(folder, encoder=model, study={"task": task}, execution=execution, **TABLES[task])

    def attempt() -> tuple[dict[str, Any], list[Any]]:
        _, channel = trial.run()
        notes = [message.text for message in channel.messages() if isinstance(message, Note)]
        left = len(psutil.Process(os.getpid()).children())
        return {"notes": notes, "values": [point.value for point in channel.points], "left": left}, []

    found, _ = trials.apart(attempt)
    name = "adapter_model.safetensors" if task == "causal-lm" else "model.safetensors"
    return {**found, "weights": trial.best_weights(name)}
