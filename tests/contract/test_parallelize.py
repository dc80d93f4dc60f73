"""``dryfit.parallel.parallelize``: a model over real ranks is the whole model, and what cannot be is said on each."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rank_groups
from dryfit.parallel import narrow, parallelize
from dryfit.parallel import torchrun as module
from dryfit.parallel.apply import shards_of, slice_tensor
from dryfit.parallel.collectives import ProcessRanks
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import proof_bytes
from dryfit.settings.errors import ConfigError, DryfitError, ShardError
from dryfit.settings.sharding import ShardPlan
from rank_groups import ERROR, Facts

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def whole_model(**sizes: Any) -> Any:
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SIZES, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch() -> dict[str, Any]:
    ids = torch.randint(5, 64, (3, 11), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


@cache
def the_plan(degree: int) -> ShardPlan:
    """How the model is sharded; called before the ranks are forked, none of them has to find out."""
    return plan_shards(whole_model(), degree)


def off_by(made: Any, whole: Any, ranks: ProcessRanks) -> Facts:
    """What outputs and gradients of a rank's part are off by, in fp64, and what share it holds."""
    shards = shards_of(whole, the_plan(ranks.degree))
    found, expected = (model(**batch()).logits for model in (made, whole))
    for scores in (found, expected):
        (scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)).sum().backward()
    gradients = {name: one.grad for name, one in whole.named_parameters()}
    largest = max(float(one.abs().max()) for one in gradients.values())
    worst = 0.0
    for name, one in made.named_parameters():
        own = slice_tensor(gradients[name], shards[name], ranks.rank, ranks.degree)
        worst = max(worst, float((one.grad - own).abs().max()) / largest)
    held = sum(one.numel() for one in made.parameters()) / sum(one.numel() for one in whole.parameters())
    return {"outputs": float((found - expected).detach().abs().max()), "gradients": worst, "held": held}


def from_folder(folder: Path, ranks: ProcessRanks) -> Facts:
    made = parallelize(folder, ranks.degree, dtype=torch.float64)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return {**off_by(made, whole, ranks), "training": made.training}


def from_weights(ranks: ProcessRanks) -> Facts:
    torch.manual_seed(ranks.rank)
    made = parallelize(whole_model().double().train(), ranks.degree)
    return {**off_by(made, whole_model().double(), ranks), "training": made.training}


def refused(call: Callable[[], object], kind: type[DryfitError], _: ProcessRanks) -> Facts:
    try:
        call()
    except kind as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def with_failing_proof(ranks: ProcessRanks) -> Facts:
    def fails(*_: object) -> None:
        raise ShardError("proving a plan", f"the outputs are off on rank {ranks.rank}")

    module._prove = fails  # pyright: ignore[reportAttributeAccessIssue]
    return refused(lambda: parallelize(whole_model(), 2), ShardError, ranks)


def test_it_is_the_whole_model_and_what_cannot_be_is_said_on_each_rank(tmp_path: Path) -> None:
    whole_model().save_pretrained(tmp_path / "model")
    the_plan(2)
    three = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    found = rank_groups.run(
        2,
        tmp_path / "ranks",
        {
            "folder": partial(from_folder, tmp_path / "model"),
            "weights": from_weights,
            "degree": partial(refused, lambda: parallelize(tmp_path / "model", 3), ShardError),
            "heads": partial(refused, lambda: parallelize(whole_model(**three), 2), ConfigError),
            "empty": partial(refused, lambda: parallelize(whole_model().to("meta"), 2), ShardError),
            "proof": with_failing_proof,
        },
    )
    for name, ranks in found.items():
        assert all(ERROR not in one for one in ranks), (name, ranks)
    for name, training in (("folder", False), ("weights", True)):
        for rank in found[name]:
            assert max(rank["outputs"], rank["gradients"]) < 1e-10, (name, rank)
            assert rank["held"] < 0.75 and rank["training"] == training
    for name, said in (
        ("degree", "2 processes, and a degree of 3"),
        ("heads", "2 does not divide 3"),
        ("empty", "it has no weights"),
        ("proof", "the outputs are off on rank 0"),
    ):
        assert all(said in rank["said"] for rank in found[name]), (name, found[name])


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ShardError, match="torchrun --nproc-per-node 4 script.py"):
        parallelize("nowhere", 4)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardError, match="2 processes, and a degree of 4"):  # before it waits for anybody
        parallelize("nowhere", 4)


@pytest.mark.slow
def test_a_model_too_wide_for_a_proof_is_proved_on_a_narrower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whole_model(vocab_size=2048).to("meta")

    def wide(model: torch.nn.Module, plan: ShardPlan) -> int:
        return 1 << 50 if model is whole else proof_bytes(model, plan)

    monkeypatch.setattr(narrow, "proof_bytes", wide)
    proof = module._prove(whole, plan_shards(whole, 2))
    assert proof.narrowed["vocab_size"] == (2048, 512)
    assert max(proof.output_error, proof.gradient_error) < 1e-10


@pytest.mark.nightly
@pytest.mark.slow
def test_the_example_trains_the_same_under_torchrun(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert all(float(line.rpartition(" ")[2]) < 1e-10 for line in steps)
    held = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert held == [f"rank {rank} holds 69,952 of 106,816 numbers" for rank in range(2)]
