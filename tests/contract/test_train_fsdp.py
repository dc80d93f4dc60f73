"""A trial sharded over processes by FSDP2 is the trial that one process trains, whatever ends one of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import dryfit
import fsdp_sides
import tiny
import trials
from dryfit.parallel.fsdp import held_bytes
from dryfit.settings.errors import ConfigError, NonFiniteError
from dryfit.settings.training_messages import StopReason
from dryfit.training import trainer as loop
from together import (
    NOISY,
    OF_EACH_KIND,
    QUIET,
    SGD,
    assert_close,
    criteria,
    each_once,
    ends_with,
    of_decoder,
    on_rank_1,
    weights,
)
from trials import Trial, Undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TWO = {"dp": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


MAKERS: dict[str, Callable[..., Trial]] = OF_EACH_KIND | {
    "tied embeddings": of_decoder("llama", 0),
    "words, adapters": of_decoder("qwen2", 4, vocab_size=4608),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], Undisturbed]:
    return each_once(MAKERS, tmp_path_factory.mktemp("alone"), model)


@pytest.mark.parametrize(
    ("task", "execution"),
    [
        ("criteria", {**TWO, "micro_batch": 3}),
        ("joint, layers shared", TWO),
        ("adapters", TWO),
        pytest.param("tied embeddings", TWO, marks=pytest.mark.slow),
        pytest.param("evidence", {"dp": 3}, marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("share", TWO, marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("joint", TWO, marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("criteria", {"dp": 3, "micro_batch": 1}, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_outputs_gradients_and_steps_are_the_whole_models(
    tmp_path: Path, model: Path, task: str, execution: dict[str, Any]
) -> None:
    trial = MAKERS[task](tmp_path / "trial", model, execution=execution)
    for off in fsdp_sides.on_ranks(trial, fsdp_sides.differences):
        assert off["outputs"] < 1e-10
        assert off["loss"] < 1e-10
        assert off["gradients"] < 1e-8
        assert off["norm"] < 1e-10
        assert off["weights"] < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(("task", "size"), [("adapters", 2), ("criteria", 3)])
def test_a_process_holds_what_is_planned(tmp_path: Path, model: Path, task: str, size: int) -> None:
    trial = MAKERS[task](tmp_path / "trial", model, execution={"dp": size})
    found = fsdp_sides.on_ranks(trial, fsdp_sides.held, steps=1)
    for rank, (held, sizes) in enumerate(found):
        assert held == held_bytes(sizes, rank=rank, processes=size, moments=2)
    held, sizes = found[0]
    assert 2 * 8 * sum(math.prod(one.shape) for one in sizes if one.requires_grad) > held.state_bytes > 0
    assert held.weights_bytes < 0.6 * 8 * sum(math.prod(one.shape) for one in sizes)


TRIALS = {
    "criteria": ("criteria", {}, {}),
    "adapters": ("adapters", {}, {}),
    "micro-batches": ("criteria", {"micro_batch": 3}, {}),
    "evidence": ("evidence", {}, {}),
    "joint, layers shared": ("joint, layers shared", {}, {}),
    "checkpointing": ("criteria", {"checkpointing": True}, {}),
    "reentrant": ("adapters", {"checkpointing": True, "reentrant": True}, {}),
    "packing": ("adapters", {}, {"lm": {"packing": True}}),
    "frozen": ("criteria", {}, {"regularization": {"freeze_layers": 1}}),
    "a batch smaller than the processes": ("criteria", {"dp": 3}, {"train": {"batch_size": 2, "epochs": 1}}),
}
QUICK = ("criteria",)
NIGHTLY = ("packing", "adapters", "micro-batches", "evidence", "joint, layers shared", "reentrant", "frozen")
AT_NIGHT = {name: [pytest.mark.nightly] for name in NIGHTLY}


@pytest.mark.parametrize(
    "name",
    [one if one in QUICK else pytest.param(one, marks=[pytest.mark.slow, *AT_NIGHT.get(one, ())]) for one in TRIALS],
)
def test_several_processes_learn_what_one_does(tmp_path: Path, model: Path, name: str) -> None:
    task, execution, tables = TRIALS[name]
    many = {**TWO, **execution}
    found = [
        MAKERS[task](tmp_path / str(how["dp"]), model, **trials.merged(SGD, tables), execution=how)
        for how in ({**many, "dp": 1}, many)
    ]
    (result, channel), (other, heard) = found[0].run(), found[1].run()
    assert other.steps == result.steps and len(heard.points) == len(channel.points) > 0
    for mine, theirs in zip(heard.points, channel.points, strict=True):
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-6, abs=1e-6)
    assert_close(weights(found[1]), weights(found[0]))
    assert_close(*(dryfit.load(trial.folder / "best").state_dict() for trial in found))


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", [name for name in tiny.ARCHITECTURES if name != "bert"])
def test_every_architecture_is_sharded(tmp_path: Path, architecture: str) -> None:
    encoder = tiny.model(tmp_path / "encoder", architecture)
    dropout = {"dropout": 0.0} if architecture == "xlnet" else QUIET["regularization"]
    trial = trials.small(
        tmp_path / "trial", encoder=encoder, head={"dropout": 0.0}, regularization=dropout, execution=TWO
    )
    for off in fsdp_sides.on_ranks(trial, fsdp_sides.differences, steps=1):
        assert off["outputs"] < 1e-10 and off["gradients"] < 1e-8 and off["weights"] < 1e-8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Undisturbed:
    return trials.undisturbed(trials.small(tmp_path_factory.mktemp("whole"), encoder=model, **NOISY, execution=TWO))


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(9, marks=pytest.mark.nightly)])
def test_it_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, step: int
) -> None:
    trials.assert_goes_on(trials.small(tmp_path, encoder=model, **NOISY, execution=TWO), undisturbed, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "before", "after"),
    [
        ("criteria", {"tp": 2}, {"dp": 2}),
        *(
            pytest.param(*moved, marks=pytest.mark.nightly)
            for moved in (
                ("criteria", {"dp": 2}, {"tp": 2}),
                ("criteria", {"tp": 1}, {"tp": 2}),
                ("criteria", {"tp": 2}, {"tp": 1}),
                ("words, adapters", {"tp": 1}, {"tp": 2}),
                ("words, adapters", {"tp": 2}, {"tp": 1}),
                ("criteria", {"dp": 1}, {"dp": 2}),
                ("criteria", {"dp": 2}, {"dp": 3}),
                ("adapters", {"dp": 2}, {"dp": 1}),
                ("adapters", {"dp": 1}, {"dp": 2}),
            )
        ),
    ],
)
def test_others_go_on_from_its_checkpoint(
    tmp_path: Path,
    model: Path,
    alone: Callable[[str], Undisturbed],
    task: str,
    before: dict[str, int],
    after: dict[str, int],
) -> None:
    whole = alone(task).trial
    trial = MAKERS[task](tmp_path / "other", model, **SGD)
    trial.plan = trial.plan.model_copy(update=before)
    assert trial.run(stop_at=2)[0].stopped_by is StopReason.REQUEST
    (checkpoint,) = (trial.folder / "checkpoints").iterdir()
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert not any(isinstance(one["momentum_buffer"], DTensor) for one in moments.values())
    shapes = sorted(tuple(one["momentum_buffer"].shape) for one in moments.values())
    assert shapes == sorted(tuple(one.shape) for one in weights_of_trained(whole))
    trial.plan = trial.plan.model_copy(update={"dp": 1, "tp": 1, **after})
    assert trial.run()[0].stopped_by is None
    assert_close(weights(trial), weights(whole))


def weights_of_trained(trial: Trial) -> list[torch.Tensor]:
    return [one for name, one in weights(trial).items() if "position_ids" not in name]


@pytest.mark.slow
def test_a_gradient_that_is_no_number_is_named_wherever_it_lies(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(module: Any) -> None:
        name = "encoder.encoder.layer.1.output.dense.weight"
        gradient = dict(module.named_parameters())[name].grad
        assert isinstance(gradient, DTensor)
        gradient.to_local().fill_(math.nan)

    on_rank_1(monkeypatch, 2, spoil)
    error = ends_with(criteria(tmp_path, model, execution=TWO))
    assert isinstance(error, NonFiniteError) and error.doing == "training step 2 of 10"
    assert "1 have such a gradient, encoder.encoder.layer.1.output.dense.weight" in str(error)


@pytest.mark.slow
def test_what_ends_a_process_is_told_with_its_own_rows(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = criteria(tmp_path, model, execution={**TWO, "micro_batch": 3})
    original = loop.BatchGuard.check_outputs

    def fail(self: Any, outputs: Any, count: int, rows: Callable[[], Any]) -> None:
        original(self, outputs, count, rows)
        if dist.get_rank() == 1 and count == 1:
            raise torch.OutOfMemoryError(f"rows {list(rows())}")

    monkeypatch.setattr(loop.BatchGuard, "check_outputs", fail)
    error = ends_with(trial)
    assert isinstance(error, torch.OutOfMemoryError)
    told = "\n".join(error.__notes__)
    (row,) = str(error).removeprefix("rows [").removesuffix("]").split(", ")
    assert f"batch of the split train: 1 row(s): r{row}" in told  # the last of its share of four
    assert "micro-batch 2 of 2" in told and "rank 1" in told


def test_processes_drop_different_elements_of_their_rows(tmp_path: Path, model: Path) -> None:
    trial = criteria(tmp_path, model, execution=TWO)

    def draws(sides: fsdp_sides.Sides) -> tuple[list[float], list[float]]:
        torch.manual_seed(3)
        with sides.layout.drawing(torch.device("cpu")):
            own = torch.rand(4).tolist()
        return own, torch.rand(4).tolist()

    (own, common), (others, theirs) = fsdp_sides.on_ranks(trial, draws, steps=1)
    assert not set(own) & set(others)
    assert common == theirs


@pytest.mark.every(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [
        {"name": name, "impl": impl}
        for name, impls in (
            ("adamw", ("fused", "foreach", "plain")),
            ("sgd", ("foreach", "plain")),
            ("lion", ("foreach", "plain")),
            ("radam", ("foreach", "plain")),
            ("nadam", ("foreach", "plain")),
        )
        for impl in impls
    ],
    ids=lambda one: f"{one['name']}-{one['impl']}",
)
def test_every_optimizer_that_is_allowed_steps_as_on_the_whole(
    tmp_path: Path, model: Path, optim: dict[str, str]
) -> None:
    execution = {**TWO, "optimizer_impl": optim["impl"]}
    trial = criteria(tmp_path / "trial", model, execution=execution, optim={"name": optim["name"], "lr": 1e-3})
    for off in fsdp_sides.on_ranks(trial, fsdp_sides.differences):
        # Lion takes a gradient's sign, and has no other answer to one of 1e-18 than to one of 1.
        assert off["weights"] < (1e-8 if optim["name"] != "lion" else 1e-2) and off["gradients"] < 1e-2


@pytest.mark.parametrize(
    ("execution", "optim", "said"),
    [
        *((several, {"name": "adafactor"}, "adafactor computes with whole parameters") for several in (TWO, {"tp": 2})),
        *(({**several, "offload_optimizer": True}, {}, "offload_optimizer") for several in (TWO, {"tp": 2})),
        ({**TWO, "optimizer_impl": "fused"}, {"name": "sgd"}, "no such implementation for sharded"),
        ({"tp": 3}, {}, "3"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_trained(
    tmp_path: Path, model: Path, execution: dict[str, Any], optim: dict[str, str], said: str
) -> None:
    error = ends_with(criteria(tmp_path, model, optim=optim, execution=execution))
    assert isinstance(error, ConfigError) and said in str(error)


@pytest.mark.slow
@pytest.mark.nightly
def test_bf16_differs_by_its_rounding(tmp_path: Path, model: Path) -> None:
    tables = {"train": {"precision": "bf16"}, **SGD}
    found = [criteria(tmp_path / str(dp), model, **tables, execution={"dp": dp}) for dp in (1, 2)]
    values = [trial.run()[0].value for trial in found]
    assert values[1] == pytest.approx(values[0], rel=1e-2)
