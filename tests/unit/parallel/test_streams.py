"""Random numbers in regions: each rank's own there, alike outside, and the same again when recomputed."""

import torch

from dryfit.parallel.collectives import RegionStream

CPU = torch.device("cpu")


def drawn(rank: int) -> tuple[list[float], list[float]]:
    """What a pass draws outside of its two regions, and inside."""
    torch.manual_seed(3)
    stream = RegionStream(rank)
    outside, inside = [torch.rand(()).item()], []
    for _ in range(2):
        stream.enter(CPU)
        stream.enter(CPU)  # as queries, keys and values each do
        inside += torch.rand(3).tolist()
        stream.leave(CPU)
    outside.append(torch.rand(()).item())
    return outside, inside


def test_ranks_draw_alike_outside_of_regions_and_differently_inside():
    (outside_0, inside_0), (outside_1, inside_1) = drawn(0), drawn(1)

    assert outside_0 == outside_1
    assert not set(inside_0) & set(inside_1)
    assert len(set(inside_0)) == 6  # the second region does not repeat the first


def test_the_same_again_when_a_checkpoint_restores_the_generator_even_after_stopping_inside():
    stream = RegionStream(1)
    torch.manual_seed(3)
    state = torch.get_rng_state()

    found = []
    for _ in range(3):
        torch.set_rng_state(state)  # whether or not the last pass left its region
        stream.enter(CPU)
        found.append(torch.rand(3).tolist())

    assert found[0] == found[1] == found[2]


def test_leaving_without_a_region_changes_nothing():
    stream = RegionStream(0)
    torch.manual_seed(5)
    state = torch.get_rng_state()

    stream.leave(CPU)
    stream.leave_all()

    assert torch.equal(torch.get_rng_state(), state)


def test_the_end_of_a_pass_ends_its_regions():
    torch.manual_seed(5)
    torch.rand(())
    expected = torch.rand(())
    torch.manual_seed(5)
    stream = RegionStream(0)

    stream.enter(CPU)  # moves the generator on by one number
    torch.rand(7)
    stream.leave_all()

    assert torch.rand(()) == expected
