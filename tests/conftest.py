"""Settings of all tests."""

import gc
import signal
from collections.abc import Iterator
from typing import Final

import optuna
import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong: no test may fail for the time it takes.
settings.register_profile("dryfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dryfit")


_SIGNALS: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
}
"""As a shell starts a command; whatever started the tests may ignore some, as ``nohup`` does."""


_FIRST: Final = (
    "test_docs_studies.py",
    "test_readme_tour.py",
    "test_shard_architectures.py",
    "test_narrow.py",
    "test_train_divided.py",
    "test_train_cut.py",
)
"""The long files: begun before the others, so that no process is left with one of them when the others are done."""


gc.disable()  # until all is imported: to look for garbage among modules takes as long as to import them


def pytest_configure() -> None:
    """Set the signals' handlers for fixtures that outlive a test too."""
    for number, handler in _SIGNALS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Leave no test the handlers of the one before: a command run in this process installs its own for good."""
    yield
    pytest_configure()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; all else stays in its order."""
    items.sort(key=lambda item: _FIRST.index(item.path.name) if item.path.name in _FIRST else len(_FIRST))


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that was imported: the Trainer asks for a full collection after each training.

    Going through the million objects of torch and its friends took nearly half of the time of a tiny trial.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def quiet_optuna() -> Iterator[None]:
    """Optuna says nothing of each trial that it is told of."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)
