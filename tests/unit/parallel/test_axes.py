"""Axes of dimensions: made one, split, and read back as slices of a tensor."""

import pytest

from dryfit.parallel.axes import Axes, Obstacle, Reason
from dryfit.settings.errors import InternalError

WHY = Reason(Obstacle.OPERATOR, "they cross")


def sizes(axes: Axes, dim: tuple[int, ...]) -> list[int]:
    return [axes.size(axis) for axis in axes.axes_of(dim)]


def test_a_dimension_of_one_has_no_axis():
    assert Axes().new(1) == ()


def test_equal_dimensions_become_one():
    axes = Axes()
    one, other, third = axes.new(6), axes.new(6), axes.new(6)
    axes.unify(one, other, WHY)
    axes.unify(other, third, WHY)
    assert axes.axes_of(one) == axes.axes_of(other) == axes.axes_of(third)
    axes.replicate(third, WHY)
    assert axes.reasons(one[0]) == (WHY,)


def test_a_longer_axis_becomes_a_product_everywhere_it_is():
    axes = Axes()
    features, heads, width, twin = axes.new(32), axes.new(4), axes.new(8), axes.new(32)
    axes.unify(features, twin, WHY)
    axes.unify(features, (*heads, *width), WHY)
    assert sizes(axes, twin) == [4, 8]
    assert axes.axes_of(twin) == axes.axes_of((*heads, *width))
    assert axes.layout(twin, heads[0]) == (1, 8) and axes.layout(twin, width[0]) == (4, 1)
    assert not axes.reasons(heads[0])


def test_what_holds_of_an_axis_holds_of_its_parts():
    axes = Axes()
    table = axes.new(12, WHY)
    axes.unify(table, (*axes.new(3), *axes.new(4)), WHY)
    assert all(axes.reasons(axis) == (WHY,) for axis in axes.axes_of(table))


@pytest.mark.parametrize("one, other", [((2, 3), (3, 2)), ((4, 6), (6, 4)), ((6,), (4,))])
def test_axes_that_cross_are_held(one, other):
    axes = Axes()
    left = tuple(axis for size in one for axis in axes.new(size))
    right = tuple(axis for size in other for axis in axes.new(size))
    axes.unify(left, right, WHY)
    assert all(axes.reasons(axis) for axis in (*axes.axes_of(left), *axes.axes_of(right)))


def test_regrouping_splits_and_joins():
    axes = Axes()
    dims = [axes.new(3), axes.new(7), axes.new(32)]
    made = axes.regroup(dims, (3, 7, 4, 8))
    assert made is not None and [sizes(axes, dim) for dim in made] == [[3], [7], [4], [8]]
    joined = axes.regroup([made[0], made[2], made[1], made[3]], (12, 7, 8))
    assert joined is not None and sizes(axes, joined[0]) == [3, 4]
    assert axes.axes_of(dims[2]) == (*axes.axes_of(made[2]), *axes.axes_of(made[3]))


def test_a_shape_across_an_axis_is_no_regrouping():
    axes = Axes()
    assert axes.regroup([axes.new(4), axes.new(6)], (6, 4)) is None


def test_an_axis_is_split_by_what_divides_it_only():
    axes = Axes()
    with pytest.raises(InternalError, match="6 by 4"):
        axes.split(axes.new(6)[0], 4)
