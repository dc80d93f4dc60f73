"""Ranks as threads: what they compute together, and how they end when one of them does not go on."""

import threading

import pytest
import torch

from dryfit.parallel.collectives import SimulatedRanks, simulate
from dryfit.settings.errors import ShardError


def test_a_sum_is_the_same_on_each_rank_bit_for_bit():
    given = torch.randn(4, 5, 3)  # fp32: another order of adding would show

    sums = simulate(4, lambda ranks: ranks.all_reduce(given[ranks.rank], "x"))

    assert torch.equal(sums[0], ((given[0] + given[1]) + given[2]) + given[3])
    assert all(torch.equal(one, sums[0]) for one in sums)


def test_what_was_given_stays_and_may_be_changed_at_once():
    given = torch.randn(3, 6, dtype=torch.float64)
    kept = given.clone()

    def work(ranks: SimulatedRanks) -> list[torch.Tensor]:
        own = given[ranks.rank].clone()
        found = []
        for _ in range(50):
            found = ranks.all_gather(own, "x")
            own.zero_()  # while the others may still be reading
            own.copy_(kept[ranks.rank])
        return found

    for found in simulate(3, work):
        assert torch.equal(torch.stack(found), kept)


def test_collectives_meet_inside_a_backward_pass():
    weights = torch.randn(2, 4, dtype=torch.float64)

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ranks):
            ctx.ranks = ranks
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.ranks.all_reduce(gradient, "gradient"), None

    def work(ranks: SimulatedRanks) -> torch.Tensor:
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        (Sum.apply(x, ranks) * weights[ranks.rank]).sum().backward()
        assert x.grad is not None
        return x.grad

    assert all(torch.equal(found, weights[0] + weights[1]) for found in simulate(2, work))


def test_an_error_of_one_rank_ends_all_and_names_it():
    before = threading.active_count()

    def work(ranks: SimulatedRanks) -> None:
        for step in range(3):
            if (ranks.rank, step) == (2, 1):
                raise KeyError("lost")
            ranks.all_reduce(torch.ones(1), f"step {step}")

    with pytest.raises(KeyError, match="lost") as caught:
        simulate(4, work)

    assert caught.value.__notes__ == ["on simulated rank 2 of 4"]
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda ranks: ranks.all_gather(torch.ones(2), "a"), "all_gather of a, float32[2]"),
        (lambda ranks: ranks.all_reduce(torch.ones(2), "b"), "all_reduce of b, float32[2]"),
        (lambda ranks: ranks.all_reduce(torch.ones(3), "a"), "all_reduce of a, float32[3]"),
        (lambda ranks: ranks.all_reduce(torch.ones(2).double(), "a"), "all_reduce of a, float64[2]"),
        (lambda ranks: None, "its end"),
    ],
    ids=["operation", "place", "shape", "dtype", "end"],
)
def test_ranks_that_do_different_things_are_both_named(other, named: str):
    def work(ranks: SimulatedRanks) -> None:
        if ranks.rank == 1:
            other(ranks)
        else:
            ranks.all_reduce(torch.ones(2), "a")

    with pytest.raises(ShardError, match="ranks disagree") as caught:
        simulate(3, work)

    assert "rank 0 is at all_reduce of a, float32[2]" in caught.value.found
    assert f"rank 1 at {named}" in caught.value.found
