import math

from hypothesis import given
from hypothesis import strategies as st

from dryfit.documents.live_study import sparkline


def test_the_lowest_and_the_highest_value_have_the_ends_of_the_scale():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 10) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 1, 3], 10) == "█▁█"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 3, plain=True) == "_=#"
    assert sparkline([2, 2], 10) == "▅▅"
    assert sparkline([], 10) == "" and sparkline([1.0], 0) == ""


def test_what_is_no_number_is_said():
    assert sparkline([math.nan, 1, 2, math.inf], 10) == "?▁█?"
    assert sparkline([math.nan], 10) == "?"


@given(values=st.lists(st.floats()), width=st.integers(0, 20))
def test_any_values_fit_the_width(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)
    assert sparkline(values, width, plain=True).isascii()
