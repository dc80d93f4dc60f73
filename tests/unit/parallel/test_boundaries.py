"""What each boundary does to an activation and to its gradient, against what it stands for."""

import torch

from dryfit.parallel.apply import cross
from dryfit.parallel.collectives import SimulatedRanks, simulate
from dryfit.settings.sharding import Boundary

DEGREE = 4
VALUES = torch.randn(DEGREE, 3, 8, dtype=torch.float64)
GRADIENTS = torch.randn(DEGREE, 3, 8, dtype=torch.float64)


def passed(boundary: Boundary) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def work(ranks: SimulatedRanks) -> tuple[torch.Tensor, torch.Tensor]:
        x = VALUES[ranks.rank].clone().requires_grad_()
        out = cross(boundary, x, ranks, "x")
        repeats = [1, 1]
        if boundary is Boundary.GATHER:
            repeats[-1] = DEGREE
        weights = GRADIENTS[ranks.rank].repeat(*repeats)[: out.shape[0], : out.shape[1]]
        (out * weights).sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    return simulate(DEGREE, work)


def test_copy_adds_up_the_gradients():
    for rank, (out, gradient) in enumerate(passed(Boundary.COPY)):
        assert torch.equal(out, VALUES[rank])
        assert torch.allclose(gradient, GRADIENTS.sum(0), rtol=0, atol=1e-14)


def test_reduce_adds_up_the_activations():
    for rank, (out, gradient) in enumerate(passed(Boundary.REDUCE)):
        assert torch.allclose(out, VALUES.sum(0), rtol=0, atol=1e-14)
        assert torch.equal(gradient, GRADIENTS[rank])


def test_gather_puts_slices_together_and_gives_each_its_gradient():
    for rank, (out, gradient) in enumerate(passed(Boundary.GATHER)):
        assert torch.equal(out, torch.cat(list(VALUES), -1))
        assert torch.equal(gradient, GRADIENTS[rank])


def test_copy_of_what_gets_no_gradient_sends_nothing():
    given = VALUES[0]
    found = simulate(2, lambda ranks: cross(Boundary.COPY, given, ranks, "x"))
    assert all(one is given for one in found)
