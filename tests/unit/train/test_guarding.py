"""Guards in a trial: what damages its cache, its batches or its model ends it with rows named and no text."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tasks
import tiny
import trials
from dryfit.processes.child import describe_fault
from dryfit.processes.failures import classify
from dryfit.settings.errors import ConfigError, DataError, Evidence, FailureKind, NonFiniteError
from dryfit.settings.jobs import ChildResult
from dryfit.tasks.base import Batch
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.heads import EncoderWithHead
from dryfit.tasks.tokens import TokenSet
from dryfit.training.run import ALONE
from dryfit.training.step import loss_origin
from dryfit.training.trainer import TrialTrainer

Damage = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("guarding"))


def words_of(trial: trials.Trial) -> set[str]:
    """Words of the rows' texts that no message uses by chance."""
    files = [Path(str(name)) for name in (trial.data.train, trial.data.validation)]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["text"] for row in rows} | {" ".join(row["text"].split()[:2]) for row in rows}


def fault_of(trial: trials.Trial, error: Exception, kind: FailureKind) -> str:
    """All that crosses to the control process, once it is seen to be of that kind and to hold no text."""
    fault = describe_fault(error)
    failure = classify(Evidence(exit_code=1), ChildResult(fault=fault))
    assert failure.kind is kind
    said = "\n".join((fault.message, fault.traceback, failure.sentence))
    assert not [word for word in words_of(trial) if word in said]
    return failure.sentence


def damage_cache(trial: trials.Trial, split: str, name: str, at: int, value: int) -> None:
    (file,) = (trial.folder / "cache").glob(f"*/{split}.safetensors")
    tensors = load_file(file)
    tensors[name][at] = value
    save_file(tensors, file)


@pytest.mark.parametrize("split, row", [("train", "r3"), ("validation", "r43")])
@pytest.mark.parametrize("name, value, found", [("labels", 2, "label 2"), ("ids", 5_000, "token id 5000")])
def test_a_damaged_cache_ends_the_trial_before_its_first_step(
    tmp_path: Path, encoder: Path, split: str, row: str, name: str, value: int, found: str
) -> None:
    trial = trials.small(tmp_path, encoder=encoder)
    request = trial.request()
    (file,) = (trial.folder / "cache").glob(f"*/{split}.safetensors")
    damage_cache(trial, split, name, 3 if name == "labels" else int(load_file(file)["starts"][3]), value)
    channel = trials.ScriptedChannel(tmp_path / "attempt")
    with pytest.raises(DataError, match=f"{found} in 1 row: {row}") as caught:
        trials.train(request, channel)
    assert f"{found} in 1 row: {row}" in fault_of(trial, caught.value, FailureKind.DATA)
    assert not channel.points


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused_before_any_trial(tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "model")
    tokenizer = tiny.tokenizer(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    trial = trials.small(tmp_path, encoder=folder)
    rows = tiny.rows(40)
    rows[7]["text"] += " zebra"
    tiny.write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    with pytest.raises(DataError, match=r"token id \d+ in 1 row: r7") as caught:
        trial.resolve()
    assert "the model's embedding has" in caught.value.allowed and "added tokens" in caught.value.hint
    fault_of(trial, caught.value, FailureKind.DATA)


def spoil_collation(monkeypatch: pytest.MonkeyPatch, rows_seen: list[list[int]], count: int, at: int) -> None:
    """From the first batch of ``count`` rows on, row ``at`` of each batch gets a label that there is not."""
    collate = CriteriaTask.collate

    def spoiled(self: CriteriaTask, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        batch = collate(self, tokens, rows)
        if len(rows) == count:
            rows_seen.append(list(rows))
            if len(rows_seen) > 3:
                batch["labels"][at] = 9
        return batch

    monkeypatch.setattr(CriteriaTask, "collate", spoiled)


@pytest.mark.parametrize("count, split, first, begun", [(8, "train", 0, 7), (20, "validation", 40, 3)])
def test_a_damaged_batch_is_told_with_its_row(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, count: int, split: str, first: int, begun: int
) -> None:
    trial = trials.small(tmp_path, encoder=encoder, execution={"micro_batch": 5}, train={"epochs": 4})
    rows_seen: list[list[int]] = []
    trial.run(stop_at=begun)
    spoil_collation(monkeypatch, rows_seen, count, 6)
    with pytest.raises(DataError, match="label 9 in 1 row: ") as caught:
        trial.run()
    assert caught.value.doing == f"checking a batch of the split {split}"
    # The training loader fetches ahead: the first spoiled batch is the fourth, whatever was fetched since.
    assert caught.value.found.endswith(f": r{first + rows_seen[3][6]}")
    fault_of(trial, caught.value, FailureKind.DATA)


@pytest.mark.parametrize("in_training, split", [(True, "train"), (False, "validation")])
def test_a_model_with_other_outputs_than_scores(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, in_training: bool, split: str
) -> None:
    forward = EncoderWithHead.forward

    def sequence_first(self: EncoderWithHead, **inputs: torch.Tensor) -> torch.Tensor:
        scores = forward(self, **inputs)
        one_more = torch.cat([scores, scores[:1]])
        return one_more if self.training is in_training else scores

    monkeypatch.setattr(EncoderWithHead, "forward", sequence_first)
    trial = trials.small(tmp_path, encoder=encoder, execution={"micro_batch": 3})
    with pytest.raises(ConfigError, match=r"the model gives \(\d+, 2\) torch.float32 for (3|12|8) rows: r") as caught:
        trial.run()
    assert caught.value.doing == f"checking a batch of the split {split}"
    fault_of(trial, caught.value, FailureKind.CONFIG)


# ---- Where a loss or a gradient stopped being a number: the micro-batch and the module, the parameter and its rate


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("nonfinite"))


class Spoiled(torch.autograd.Function):
    """The same values; a gradient that is none."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * math.nan


def ended(trial: trials.Trial) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        trial.run()
    fault = describe_fault(caught.value)
    assert classify(Evidence(exit_code=1), ChildResult(fault=fault)).kind is FailureKind.NONFINITE
    assert "at optimizer step" in fault.context and "batch of the split train" in fault.context
    return caught.value


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_gradient_that_is_no_number_is_told_with_its_parameter_and_rate(
    tmp_path: Path, healthy: Path, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    """From the second layer's output back: its own last tensor is the nearest to the loss, the head is unharmed."""
    forward, steps = EncoderWithHead.forward, [0]

    def spoiled(self: EncoderWithHead, *args: Any, **inputs: Any) -> torch.Tensor:
        layer = self.encoder.encoder.layer[1].output
        if self.training:
            steps[0] += 1
        handle = layer.register_forward_hook(lambda _m, _i, out: Spoiled.apply(out) if steps[0] == 3 else out)
        try:
            return forward(self, *args, **inputs)
        finally:
            handle.remove()

    monkeypatch.setattr(EncoderWithHead, "forward", spoiled)
    optim = {"lr": 1e-3, "head_lr_factor": 5.0}
    trial = trials.small(tmp_path, encoder=healthy, optim=optim, regularization={"max_grad_norm": clip})
    error = ended(trial)
    assert error.doing == "training step 3 of 10"
    assert "gradient norm nan, learning rate" in error.found
    assert "encoder.encoder.layer.1.output.LayerNorm.bias the nearest to the loss" in error.found
    assert "pooler" not in error.found and "head" not in error.found
    rate = float(error.found.partition("learning rate ")[2].split(";")[0])
    assert rate < 5e-3, "the head's rate is five times the encoder's"


def test_a_loss_that_is_no_number_is_told_with_its_module_and_micro_batch(
    tmp_path: Path, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.small(tmp_path, encoder=healthy, execution={"micro_batch": 3})
    step = TrialTrainer.training_step

    def overflow(self: TrialTrainer, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        if self.state.global_step == 3:
            with torch.no_grad():  # finite, and too large for what follows
                model.encoder.encoder.layer[0].intermediate.dense.weight.fill_(3e38)
        return step(self, model, inputs, *more)

    monkeypatch.setattr(TrialTrainer, "training_step", overflow)
    error = ended(trial)
    assert error.doing == "training step 4 of 10"
    assert error.found.startswith("loss nan, ")
    assert (
        "the output of encoder.encoder.layer.0.intermediate.dense is not finite, first in micro-batch 1" in error.found
    )


def test_weights_that_are_no_numbers_are_named_and_a_sound_model_names_nothing() -> None:
    class Scores(nn.Embedding):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)

    model, task = Scores(4, 2), tasks.criteria()
    batch = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "attention_mask": torch.ones(1, 1)}
    assert loss_origin(model, batch, task, 1) == ""
    assert loss_origin(model, batch | {"input_ids": batch["input_ids"] + 9}, task, 1) == "", (
        "a pass that fails names nothing"
    )
    with torch.no_grad():
        model.weight[1, 1] = math.inf
    assert loss_origin(model, batch, task, 1) == "the weights weight are not finite themselves"
    assert model.training


def trainer(model: nn.Module, scale: float | None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
    return SimpleNamespace(
        accelerator=SimpleNamespace(scaler=scaler),
        optimizer=optimizer,
        state=SimpleNamespace(global_step=6, max_steps=9),
        args=SimpleNamespace(device="cpu"),
        _batch={},
        _parts=SimpleNamespace(position=ALONE),
    )


def test_a_step_that_the_loss_scaler_skips_is_no_fault() -> None:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    TrialTrainer._refuse_non_finite(trainer(model, 65536.0), model, math.inf, 0.7)
    TrialTrainer._refuse_non_finite(trainer(model, 1.0), model, math.nan, 0.7)
    assert model.weight.grad is not None
    model.weight.grad.fill_(math.inf)
    with pytest.raises(NonFiniteError) as caught:
        TrialTrainer._refuse_non_finite(trainer(model, 0.5), model, math.inf, 0.7)
    assert caught.value.doing == "training step 7 of 9"
    assert caught.value.found == (
        "loss 0.7, gradient norm inf, learning rate 0.5, loss scale 0.5; "
        "of 2 tensors 1 have such a gradient, weight the nearest to the loss"
    )
