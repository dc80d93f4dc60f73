"""The norm of all gradients, from slices."""

import copy

import pytest
import torch

import shard_plans as made
from dryfit.meta import materialise
from dryfit.parallel.apply import apply
from dryfit.parallel.collectives import SimulatedRanks, simulate
from dryfit.parallel.tensor_parallel import gradient_norm


@pytest.mark.parametrize("degree", [2, 4])
def test_the_norm_is_that_of_the_whole_model(degree: int):
    module = made.on_meta("llama", tie_word_embeddings=True)
    materialise(module, missing="init")
    module.double().eval()
    module.get_parameter("model.norm.weight").requires_grad_(False)
    plan = made.llama_plan(module, degree, vocabulary=True)
    copies = [copy.deepcopy(module) for _ in range(degree)]

    def work(ranks: SimulatedRanks) -> torch.Tensor:
        part = apply(copies[ranks.rank], plan, ranks)
        part(**made.batch()).logits.square().sum().backward()
        return gradient_norm(part, plan, ranks)

    found = simulate(degree, work)

    module(**made.batch()).logits.square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    expected = torch.nn.utils.get_total_norm(gradients)
    assert all(torch.equal(one, found[0]) for one in found)
    assert abs(float(found[0] / expected) - 1) < 1e-6  # norms of layers round to fp32
