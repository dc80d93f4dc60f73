"""Child jobs IMPORT and OBJECTIVE: check that the user's own function can be called, and call it for a trial."""

import importlib
import os
import platform
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ObjectiveError
from dryfit.core.jobs.train import ImportRequest, ImportResult, ObjectiveRequest, TrainResult
from dryfit.core.user_code import demand_unchanged, source_file, source_hash
from dryfit.core.wire import Phase
from dryfit.jobs.own.objective_files import make_checkpoint_folder
from dryfit.jobs.own.objective_function import import_function
from dryfit.jobs.own.objective_trial import Trial
from dryfit.jobs.script.target import described

_BEAT_EVERY_S = 1.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NUMPY_SEEDS = 2**32


def check(body: ImportRequest, channel: ChildChannel) -> ImportResult:
    """Import a study's function without calling it; of a script, only read it.

    Raises:
        ObjectiveError: It cannot be imported, or not be called with a trial; there is no such script.
    """
    channel.send(Phase(name="load"))
    if body.table == "script":
        return described(body.objective.function, Path(body.objective.paths[0]))
    before = set(sys.modules)
    with beating(channel):
        for name in body.objective.preload:
            _import_preloaded(name, body.table)
        function = import_function(body.objective, body.table)
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        versions = {"python": platform.python_version(), **_versions(new | {"dryfit", *body.objective.preload})}
    file = source_file(function)
    return ImportResult(source_file=str(file or ""), source_hash=source_hash(file), versions=versions)


def run(body: ObjectiveRequest, channel: ChildChannel) -> TrainResult:
    """Call a study's function for one trial.

    Raises:
        ChangedError: Its file was edited.
        ObjectiveError: It cannot be imported, or did not return one number for each goal.
        CheckpointError: What is to go on from belongs to another trial.
        NonFiniteError: One of them is NaN or infinite.
    """
    use_threads(body.threads)
    channel.send(Phase(name="load"))
    with beating(channel):
        demand_unchanged(body.own_file, body.own_hash)
        function = import_function(body.objective)
        make_checkpoint_folder(body)
        trial = Trial(body, channel)
        seed_libraries(body.seed)
        channel.send(Phase(name="train"))
        returned = function(trial)
    return trial.result(returned)


def seed_libraries(seed: int) -> None:
    """Seed ``random``, and NumPy's and PyTorch's global generators where they are imported."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


@contextmanager
def beating(channel: ChildChannel) -> Iterator[None]:
    """Send a heartbeat every second: the process is watched, as only the user knows the pace of the function."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_EVERY_S):
            with suppress(OSError):
                channel.beat()

    thread = threading.Thread(target=beat, name="dryfit-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def use_threads(count: int) -> None:
    """Replace the limit of one thread that children start with, for libraries that are imported from here on."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(count)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def _import_preloaded(name: str, table: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ObjectiveError(f"importing {table}.preload {name!r}", str(error), "installed modules") from error


def _versions(modules: set[str]) -> dict[str, str]:
    """Return the versions of the packages that top-level modules belong to."""
    versions: dict[str, str] = {}
    owners = packages_distributions()
    for package in sorted({owner for name in modules for owner in owners.get(name.partition(".")[0], ())}):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
