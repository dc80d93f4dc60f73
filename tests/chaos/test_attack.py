"""A short form of ``make attack``: attacks of every kind, from fixed seeds."""

from pathlib import Path

import pytest

from attack import Kind, Range, prepare
from attacker import ATTACKS, attack_once

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Range:
    return prepare(tmp_path_factory.mktemp("grounds"))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ATTACKS, ids=lambda kind: kind.__name__)
def test_a_random_attack_breaks_no_promise(kind: Kind, seed: int, grounds: Range, tmp_path: Path) -> None:
    report = attack_once(seed, grounds, tmp_path, [kind])
    assert report.commands
    assert not report.broken, report.name
