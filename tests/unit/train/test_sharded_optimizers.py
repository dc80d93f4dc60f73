"""What is said of trials that are sharded over processes, whose steps nobody traces."""

import math
from pathlib import Path

import pytest
from torch import nn

from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.tables import OptimSettings
from dryfit.settings.text import gib
from dryfit.training.optimizer import OptimizerPlan, make_optimizer, moments_of
from dryfit.training.step_tracer import step_parts
from rank_plans import config, planned, subject


@pytest.mark.parametrize("name", ["adamw", "radam", "nadam", "sgd"])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_moments_are_those_that_the_optimizer_keeps(name: str, beta1: float) -> None:
    optim = OptimSettings.model_validate({"name": name, "beta1": beta1})
    layer = nn.Linear(3, 5, bias=False)
    optimizer = make_optimizer(layer, optim, OptimizerPlan())
    layer.weight.grad = layer.weight.detach().clone()
    optimizer.step()
    state = [one for one in optimizer.state[layer.weight].values() if one is not None and one.shape == (5, 3)]
    assert moments_of(optim) == len(state)


def test_a_sharded_plan_says_what_each_process_holds(tmp_path: Path) -> None:
    what = subject(config(tmp_path / "model", hidden_size=256, vocab_size=8191))
    rows = [
        (one.shape[0], math.prod(one.shape[1:]) * one.itemsize)
        for one in step_parts(what, checkpointing=False, reentrant=False).model.parameters()
    ]
    for size in (2, 3):
        answer = planned(what, tmp_path / "cache", dp=size)
        part_bytes = sum(-(-count // size) * row_bytes for count, row_bytes in rows)
        assert answer.verdict is VerdictKind.UNKNOWN
        assert f"each of {size} processes holds {gib(4 * part_bytes)} between two steps" in answer.reasons[-1]
        assert f"weights {gib(part_bytes)}, gradients {gib(part_bytes)}, " in answer.reasons[-1]
