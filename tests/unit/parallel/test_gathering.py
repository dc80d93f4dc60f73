"""Whole state dicts back from the ranks, bit for bit."""

import copy
from collections.abc import Callable

import pytest
import torch

import shard_plans as made
from dryfit.core.errors import ShardError
from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.meta import materialise
from dryfit.parallel.ranks.apply import apply
from dryfit.parallel.ranks.collectives import AbsentRanks
from dryfit.parallel.ranks.gathering import gather_state
from dryfit.parallel.ranks.simulated import simulate

PLANS: dict[str, Callable[..., ShardPlan]] = {
    "bert": lambda module, degree: made.bert_plan(module, degree, vocabulary=True),
    "llama": lambda module, degree: made.llama_plan(module, degree, vocabulary=True),
    "gpt2": made.gpt2_plan,
}


@pytest.mark.parametrize("kind", PLANS)
def test_what_was_cut_comes_back_as_it_was(kind: str):
    module = made.on_meta(kind, tie_word_embeddings=True)
    materialise(module, missing="init")
    plan = PLANS[kind](module, 4)
    copies = [copy.deepcopy(module) for _ in range(4)]

    found = simulate(4, lambda ranks: gather_state(apply(copies[ranks.rank], plan, ranks), plan, ranks))

    expected = module.state_dict()
    for state in found:
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    pairs = [name for name in expected if expected[name].data_ptr() == expected[next(iter(expected))].data_ptr()]
    assert len({found[0][name].data_ptr() for name in pairs}) == 1


def test_a_rank_that_does_not_keep_it_helps_only():
    module = made.on_meta("bert")
    materialise(module, missing="init")
    plan = made.bert_plan(module, 2)
    copies = [copy.deepcopy(module) for _ in range(2)]

    found = simulate(
        2, lambda ranks: gather_state(apply(copies[ranks.rank], plan, ranks), plan, ranks, keep=ranks.rank == 1)
    )

    assert found[0] == {}
    assert list(found[1]) == list(module.state_dict())


def test_a_module_that_is_not_cut_is_refused():
    module = made.on_meta("bert")

    with pytest.raises(ShardError, match="the module is not cut as rank 0 of 2"):
        gather_state(module, made.bert_plan(module, 2), AbsentRanks(0, 2))
