"""What the tests of all engines need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launched_studies import LaunchedStudy, alone_study


@pytest.fixture(scope="session")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that holds a study; engines must know of it when they start, whose environment agents have."""
    with pytest.MonkeyPatch.context() as patch:
        file = tmp_path_factory.mktemp("hold") / "hold"
        patch.setenv("HELD_BY", str(file))
        patch.setenv("STEP_PAUSE_S", "0.2")
        yield file


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study without agents, at its end."""
    return alone_study(tmp_path_factory.mktemp("alone") / "study")


@pytest.fixture
def study(tmp_path: Path, hold: Path, alone: Path) -> Iterator[LaunchedStudy]:
    """A study that was not begun."""
    assert alone.exists()  # which is not held
    study = LaunchedStudy(tmp_path, hold)
    yield study
    study.close()
