"""Settings of all tests."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import optuna
import pytest
from hypothesis import HealthCheck, settings

import durations
import reach
import thinning
import warm
from golden import Golden

# A loaded machine is slow, not wrong: no test may fail for the time it takes.
settings.register_profile(
    "dryfit", max_examples=thinning.examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dryfit")


_SIGNALS: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
}
"""As a shell starts a command; whatever started the tests may ignore some, as ``nohup`` does."""


os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make` does: forks would wait for torch's threads for ever
gc.disable()  # until all is imported: to look for garbage among modules takes as long as to import them


def _set_signals() -> None:
    for number, handler in _SIGNALS.items():
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Set the signals' handlers for fixtures that outlive a test too, and how processes and modules are found."""
    _set_signals()
    if config.getoption("--light"):
        reach.refuse_heavy_imports()
    else:
        warm.install()


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Leave no test the handlers of the one before: a command run in this process installs its own for good."""
    yield
    _set_signals()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make check` and `make proof` ask for their files, and somebody rewrite golden texts."""
    parser.addoption("--light", action="store_true", help="only files that import no heavy library; such imports fail")
    parser.addoption("--long", action="store_true", help="only files that name the mark of long tests")
    parser.addoption("--rewrite-golden", action="store_true", help="write the texts of tests/golden anew: without -n")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files that need heavy libraries, or have no long test, without importing them."""
    if config.getoption("--long") and collection_path.name.startswith("test_"):
        return True if "mark.slow" not in collection_path.read_text(encoding="utf-8") else None
    if not config.getoption("--light") or collection_path == reach.TESTS:
        return None
    code = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    return True if code.suffix == ".py" and code.is_file() and not reach.reach(code).light else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark what `make nightly` alone runs, let ``-m`` choose, and put the files that take longest first."""
    thinning.leave_to_nightly(items)
    yield
    if file := os.environ.get(durations.DONE_VARIABLE):
        config.hook.pytest_deselected(items=durations.take_done(items, Path(file).read_text("utf-8").splitlines()))
    items.sort(key=durations.longest_first(items))


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that was imported: the Trainer asks for a full collection after each training.

    Going through the million objects of torch and its friends took nearly half of the time of a tiny trial.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write down what each test takes, where a file is named for that: see :mod:`durations`."""
    file = os.environ.get(durations.VARIABLE)
    before = durations.Moment.now()
    result = yield
    if file:
        durations.note(Path(file), item, before, durations.Moment.now())
    return result


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare what is rendered with the section of this test in the golden text of a command."""
    return Golden(request.node.nodeid.removeprefix("tests/"), request.config.getoption("--rewrite-golden"))


@pytest.fixture
def quiet_optuna() -> Iterator[None]:
    """Optuna says nothing of each trial that it is told of."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every process of this test from nothing: what it imports, or how much memory it has, is what is tested."""
    monkeypatch.setenv(warm.COLD_VARIABLE, "1")
