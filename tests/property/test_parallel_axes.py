"""Moving a rank's slice about gives the slice of what moving the whole gives, at every axis that was found."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dryfit.parallel.axes import Axes, Dim
from thinning import examples

FACTORS = st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=5)


def rank_slice(tensor: torch.Tensor, dims: list[Dim], axes: Axes, axis: int, rank: int) -> torch.Tensor:
    """What a rank has of a tensor that is sharded, element by element, at an axis."""
    at = next(place for place, dim in enumerate(dims) if axis in axes.axes_of(dim))
    outer, inner = axes.layout(dims[at], axis)
    size = axes.size(axis)
    index = torch.arange(tensor.shape[at]).view(outer, size, inner)[:, rank * size // 2 : (rank + 1) * size // 2]
    return tensor.index_select(at, index.reshape(-1))


def grouped(data: st.DataObject, factors: list[int]) -> list[int]:
    """A shape with the same elements, made of neighbours among the factors."""
    shape = [1]
    for factor in factors:
        if data.draw(st.booleans()):
            shape.append(factor)
        else:
            shape[-1] *= factor
    return shape


def replayed(tensor: torch.Tensor, moves: list[tuple[list[int] | None, list[Dim]]], axes: Axes, sharded: int | None):
    """The moves once more: an order of dimensions, or a shape whose sizes are a rank's where an axis is sharded."""
    for order, dims in moves:
        if order is not None:
            tensor = tensor.permute(order)
        else:
            sizes = [[axes.size(one) // (2 if one == sharded else 1) for one in axes.axes_of(dim)] for dim in dims]
            tensor = tensor.reshape([prod(each) for each in sizes])
    return tensor


@settings(max_examples=examples(100), deadline=None)
@given(FACTORS, st.data())
def test_slices_move_as_the_whole_does(factors, data):
    axes = Axes()
    first: list[Dim] = [axes.new(size) for size in grouped(data, factors)]
    moves: list[tuple[list[int] | None, list[Dim]]] = []
    dims = first
    for _ in range(3):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(len(dims))))
            dims = [dims[at] for at in order]
            moves.append((list(order), dims))
        else:
            flat = [axes.size(axis) for dim in dims for axis in axes.axes_of(dim)]
            made = axes.regroup(dims, tuple(grouped(data, flat)))
            assert made is not None
            dims = made
            moves.append((None, dims))
    shape = [axes.length(dim) for dim in first]
    whole = torch.arange(prod(shape)).view(shape)
    after = replayed(whole, moves, axes, None)
    for axis in {axis for dim in first for axis in axes.axes_of(dim) if axes.size(axis) % 2 == 0}:
        for rank in range(2):
            moved = replayed(rank_slice(whole, first, axes, axis, rank), moves, axes, axis)
            assert torch.equal(moved, rank_slice(after, dims, axes, axis, rank))
