"""Folds: whole groups, every row held out once, the same whatever the order of the rows."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.errors import ConfigError
from dryfit.settings.splits import fold_groups
from dryfit.settings.tables import DataSettings
from dryfit.tasks.prepare import fold_splits, study_folds
from dryfit.tasks.rows import TEST, TRAIN, VALIDATION, Row

NAMES = st.text(min_size=1, max_size=6)
FOLDS = st.integers(2, 20)


def rows(groups: Sequence[str], first: int = 0) -> tuple[Row, ...]:
    return tuple(
        Row(id=f"r{first + index}", text="x", criterion=None, label=0, group=group, evidence=(), place="")
        for index, group in enumerate(groups)
    )


@given(
    names=st.lists(NAMES, min_size=20, max_size=60, unique=True),
    folds=FOLDS,
    seed=st.integers(0, 5),
    draw=st.randoms(use_true_random=False),
)
def test_folds_divide_the_groups_of_train_and_validation(names: list[str], folds: int, seed: int, draw) -> None:
    data = DataSettings(folds=folds, split_seed=seed)
    of_rows = [draw.choice(names) for _ in range(100)] + names
    draw.shuffle(of_rows)
    cut = draw.randrange(1, len(of_rows))
    every = rows(of_rows)
    splits = {TRAIN: every[:cut], VALIDATION: every[cut:], TEST: rows(["held out"], first=10_000)}
    held: list[str] = []
    group_counts: list[int] = []
    of_group: dict[str, int] = {}
    for fold in study_folds(data):
        found = fold_splits(splits, fold, data)
        assert set(found) == {TRAIN, VALIDATION}
        assert found[TRAIN] and found[VALIDATION]
        # Every row once, in the order of the sources; no group on both sides.
        assert sorted(found[TRAIN] + found[VALIDATION], key=lambda row: int(row.id[1:])) == list(every)
        assert [int(row.id[1:]) for row in found[TRAIN]] == sorted(int(row.id[1:]) for row in found[TRAIN])
        groups = {row.group for row in found[VALIDATION]}
        assert groups.isdisjoint(row.group for row in found[TRAIN])
        held += [row.id for row in found[VALIDATION]]
        group_counts.append(len(groups))
        of_group |= dict.fromkeys(groups, fold.number)
    assert sorted(held) == sorted(row.id for row in every)
    assert max(group_counts) - min(group_counts) <= 1
    # Another order of the rows, and another cut between the two sources: the same folds.
    again = list(every)
    draw.shuffle(again)
    other = {TRAIN: tuple(again[:1]), VALIDATION: tuple(again[1:])}
    for fold in study_folds(data):
        assert {row.group for row in fold_splits(other, fold, data)[VALIDATION]} == {
            group for group, number in of_group.items() if number == fold.number
        }


@given(names=st.lists(NAMES, min_size=20, max_size=80, unique=True), folds=FOLDS, more=NAMES)
def test_a_further_group_moves_few_others(names: list[str], folds: int, more: str) -> None:
    def divided(groups: list[str]) -> dict[str, int]:
        return fold_groups(groups, folds, seed=0, doing="", hint="")

    before, after = divided(names), divided([*names, more])
    moved = [name for name in names if before[name] != after[name]]
    assert len(moved) <= folds - 1
    assert all(abs(before[name] - after[name]) == 1 for name in moved)


@given(names=st.lists(NAMES, max_size=19, unique=True))
def test_fewer_groups_than_folds_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        fold_groups(names * 2, len(names) + 1, seed=0, doing="dividing", hint="fewer")
    assert caught.value.found == f"{len(names)} groups for data.folds = {len(names) + 1}"
    allowed = f"at most {len(names)} folds" if len(names) > 1 else "at least two groups"
    assert (caught.value.allowed, caught.value.hint) == (allowed, "fewer")


def test_another_seed_gives_other_folds_and_one_fold_is_none() -> None:
    names = [f"g{number}" for number in range(40)]
    first, second = (fold_groups(names, 4, seed=seed, doing="", hint="") for seed in (0, 1))
    assert first != second
    assert study_folds(DataSettings()) == ()
