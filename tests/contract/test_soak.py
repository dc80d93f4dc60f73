"""The soak as a check: what it calls growth, its table, and a short one through the whole system."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import soak  # noqa: E402
from soak import BOUNDS, Sample  # noqa: E402

FLAT = Sample(
    trials=0,
    seconds=0.0,
    control_mib=80.0,
    control_fds=20,
    control_threads=2,
    server_mib=40.0,
    server_fds=6,
    server_threads=1,
    mirror_mib=90.0,
    mirror_fds=4,
    mirror_threads=1,
    processes=4,
    zombies=0,
    logs_mib=0.0,
    entries=12,
)


def samples(column: str = "", per_1000: float = 0.0, trials: int = 5000) -> list[Sample]:
    """Looks that differ by chance; one column grows besides."""
    draw = random.Random(1)
    found = []
    for count in range(0, trials + 1, 50):
        looked = replace(FLAT, trials=count, control_mib=80 + draw.uniform(-1, 1), processes=draw.choice([3, 4, 5, 6]))
        if column:
            looked = replace(looked, **{column: getattr(looked, column) + per_1000 * count / 1000})
        found.append(looked)
    return found


def growing(looks: list[Sample]) -> set[str]:
    return {column for column, _, _, keeps in soak.verdicts(looks) if not keeps}


def test_what_differs_by_chance_is_flat() -> None:
    assert growing(samples()) == set()
    late = [replace(look, control_mib=look.control_mib + min(look.trials, 500) / 5) for look in samples()]
    assert growing(late) == set()  # what grows before all is settled does not count


@pytest.mark.parametrize("column", BOUNDS)
def test_growth_beyond_its_bound_is_found_in_each_column(column: str) -> None:
    bound = BOUNDS[column]
    assert growing(samples(column, 2 * bound.per_1000 + bound.slack)) == {column}
    assert growing(samples(column, bound.per_1000 / 2)) == set()
    looks = samples(column, 1.0)
    whole = looks[-1].trials / 1000
    before = soak.growth(samples(), column)
    assert soak.growth(looks, column) == pytest.approx(before + whole)


def test_a_descriptor_for_each_trial_is_found_in_a_short_soak_too() -> None:
    assert growing(samples("control_fds", 1000.0, trials=700)) == {"control_fds"}
    with pytest.raises(SystemExit, match="too few"):
        soak.verdicts(samples(trials=550))


def test_the_table_is_read_again_but_for_a_torn_row(tmp_path: Path) -> None:
    file = tmp_path / "samples.csv"
    assert soak.read_samples(file) == []
    looks = samples(trials=300)
    for look in looks:
        soak.write_sample(file, replace(look, control_mib=80.125))
    assert soak.read_samples(file) == [replace(look, control_mib=80.125) for look in looks]
    with file.open("a") as rows:
        rows.write("350,1.0,80.")
    assert len(soak.read_samples(file)) == len(looks)
