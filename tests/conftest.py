"""Settings of all tests."""

import gc
from collections.abc import Iterator

import optuna
import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong: no test may fail for the time it takes.
settings.register_profile("dryfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dryfit")


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that was imported: the Trainer asks for a full collection after each training.

    Going through the million objects of torch and its friends took nearly half of the time of a tiny trial.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def quiet_optuna() -> Iterator[None]:
    """Optuna says nothing of each trial that it is told of."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)
