import pytest

from dryfit.settings.errors import DataError
from dryfit.settings.splits import SPLITS, SplitRule, split_groups

RULE = SplitRule(validation=0.2, test=0.1, seed=0)


def split(groups, rule=RULE):
    return split_groups(groups, rule, doing="splitting rows", hint="add rows")


def test_each_split_gets_its_share_whatever_the_order_of_the_groups():
    groups = [f"g{number}" for number in range(50)]
    found = split(groups)
    assert found == split(reversed(groups)) == split(groups * 2)
    assert [list(found.values()).count(name) for name in SPLITS] == [35, 10, 5]
    assert found != split(groups, SplitRule(0.2, 0.1, seed=1))


def test_few_groups_move_where_one_is_added():
    before = split([f"g{number}" for number in range(100)])
    after = split([f"g{number}" for number in range(101)])
    assert sum(after[group] != name for group, name in before.items()) <= 2


@pytest.mark.parametrize("rule", [SplitRule(0.0, 0.0, 0), SplitRule(0.5, 0.5, 0), SplitRule(0.9, 0.0, 0)])
def test_a_split_without_a_group_is_refused(rule):
    with pytest.raises(DataError, match="2 groups, of which validation takes") as caught:
        split(["a", "b"], rule)
    assert caught.value.doing == "splitting rows" and caught.value.hint == "add rows"
