"""A function of the user's own as a trial: imported, called, given its parameters and files."""

import importlib
import importlib.util
import inspect
import os
import platform
import random
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import CheckpointError, FileError, ObjectiveError
from dryfit.settings.files import copy_folder, publishing, read_bounded
from dryfit.settings.tables import CalledCode
from dryfit.settings.training_messages import ImportRequest, ImportResult, ObjectiveRequest, TrainResult
from dryfit.settings.user_code import (
    CommandTemplate,
    FunctionName,
    Search,
    demand_unchanged,
    script_file,
    script_imports,
    source_file,
    source_hash,
)
from dryfit.settings.wire import Phase, canonical_json, parse_json
from dryfit.training.current_trial import Trial

# The script of a command: found, described without running it, and run as Python itself would.


_OURS = ("dryfit", "torch", "transformers")
_TORCH = re.compile(r"torch\b")


def described(command: str, folder: Path) -> ImportResult:
    """Return the file of a script, with its hash and the versions of what it imports; nothing of it is run.

    Raises:
        ObjectiveError: It is not there, or Python cannot read it.
    """
    file = script_file(command, folder)
    if file is not None:
        _compiled(file, folder)
    elif not folder.is_dir():
        raise ObjectiveError(f"looking for the script of {command!r}", f"there is no folder {folder}", "a folder")
    modules = {*script_imports(command, folder), *_OURS}
    return _import_result(file, modules)


def may_use_torch(command: str, folder: Path) -> bool:
    """Whether a script may train with PyTorch, by what its own file imports: torch, a package that can need it, or
    modules of the user's own, of which nothing is known. Of a module that is run nothing is known either.
    """
    if script_file(command, folder) is None:
        return True
    owners = packages_distributions()
    for name in script_imports(command, folder) - sys.stdlib_module_names - {"dryfit"}:
        packages = owners.get(name, ())
        if not packages or any(_TORCH.match(need) for one in packages for need in (one, *(requires(one) or ()))):
            return True
    return False


def _compiled(file: Path, folder: Path) -> CodeType:
    doing = f"looking at the script {file}"
    try:
        return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ObjectiveError(
            doing, "there is no such file", f"a Python script, by its path from {folder}", "see script.folder"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise ObjectiveError(doing, f"Python cannot read it: {error}", "a Python script") from error


def run_script(command: CommandTemplate, folder: Path, words: Sequence[str]) -> None:
    """Run a script in this process, in its folder, with ``sys.argv`` and ``sys.path`` as Python sets them.

    What it leaves in its namespace is let go of, so that files which it has not closed are written.
    """
    os.chdir(folder)
    sys.argv = [command.target, *words]
    if command.is_module:
        sys.path.insert(0, str(folder))
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    script = folder / command.target
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


# An attempt's own copy of what the attempts before it left for a user's function to go on from.


TRIAL_FILE = ".dryfit-trial.json"
"""In a folder of checkpoints: the trial that it belongs to."""

_MOST_BYTES = 1 << 16


def make_checkpoint_folder(body: ObjectiveRequest, *, anew: bool = False) -> None:
    """Make the folder in which an attempt keeps what it needs to go on, with all that those before it left.

    It is a copy: what an earlier attempt's process may still write cannot reach it. It gets its name by one rename,
    complete and on disk.

    Args:
        body: The call of the user's code.
        anew: It begins empty, as nothing of what is left there is known to be whole.

    Raises:
        CheckpointError: What is there belongs to another trial.
        OSError: It cannot be written; what was written of it is removed.
    """
    own, kept = Path(body.checkpoint_dir), Path(body.kept_checkpoint_dir)
    for folder in (own, kept):
        _refuse_other_trial(folder, body.fingerprint)
    if own.is_dir():
        return
    with publishing(own) as temporary:
        if kept.is_dir() and not anew:
            copy_folder(kept, temporary)
        text = canonical_json({"fingerprint": body.fingerprint, "trial": body.number})
        (temporary / TRIAL_FILE).write_text(text, encoding="utf-8")


def _refuse_other_trial(folder: Path, fingerprint: str) -> None:
    """Refuse a folder of another trial; one of an earlier dryfit says nothing of its trial.

    Raises:
        CheckpointError: It belongs to another trial.
    """
    try:
        found = parse_json(read_bounded(folder / TRIAL_FILE, _MOST_BYTES).decode())["fingerprint"]
    except FileNotFoundError:
        return
    except (FileError, ValueError, LookupError, TypeError):
        found = "that cannot be read"
    if found != fingerprint:
        raise CheckpointError(
            f"going on from {folder}",
            f"{TRIAL_FILE} in it is of a trial with fingerprint {found}",
            allowed=f"a folder of the trial with fingerprint {fingerprint}",
            hint="remove the folder, or search in another study folder",
        )


# Import a study's function by its name, in a process that did not define it.


_SCRIPT_MODULE = "__mp_main__"
"""What multiprocessing calls a script that is imported by its children: whoever knows that name need not know us."""


_WANTED: Final = {
    "objective": ("a function that takes a trial and returns a number", "def objective(trial): ..."),
    "trainer": ("a function that takes a trial and returns a Trainer", "def make_trainer(trial): ..."),
}
"""By the table of a study file: what the function there is, and an example."""


def import_function(objective: CalledCode, table: str = "objective") -> Callable[[object], object]:
    """Import the function of a study; a script is run without its ``if __name__ == "__main__"`` block.

    Args:
        objective: The function.
        table: The table of the study file that names it.

    Raises:
        ObjectiveError: There is no such module, file or name, or it cannot be called with a trial alone.
    """
    name = FunctionName.parse(objective.function)
    doing = f"importing {name}"
    search = Search(doing, ObjectiveError, objective.paths, f"add its folder to {table}.paths")
    search.add_paths()
    module = _run_script(name.place, search) if name.in_script else search.module(name.place)
    function = search.named(module, name.place, name.qualname)
    check_callable(function, doing, table)
    return function  # pyright: ignore[reportReturnType]  # check_callable has looked


def check_callable(function: object, doing: str, table: str = "objective") -> None:
    """Refuse what cannot be called with a trial and nothing else.

    Raises:
        ObjectiveError: Says what it is instead.
    """
    wanted, example = _WANTED[table]
    if not callable(function) or isinstance(function, type):
        kind = f"it is a {type(function).__name__}" if not isinstance(function, type) else "it is a class"
        raise ObjectiveError(doing, kind, wanted)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in that does not tell
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ObjectiveError(
            doing,
            f"it takes {signature}: {error}",
            "a function of one argument, the trial",
            example,
        ) from error


def _run_script(place: str, search: Search) -> ModuleType:
    for folder in search.paths:
        file = Path(folder) / place
        if file.is_file():
            break
    else:
        raise ObjectiveError(
            f"looking for {place}",
            "there is no such file",
            f"a file in {search.listed}",
            search.hint,
        )
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, file)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # as of any script: multiprocessing then hands on the file, not a name nobody can import
    # Under both names: what the function pickles for processes of its own says __main__.
    sys.modules[_SCRIPT_MODULE] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


# Child jobs IMPORT and OBJECTIVE: check that the user's own function can be called, and call it for a trial.


_BEAT_EVERY_S = 1.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NUMPY_SEEDS = 2**32


def check(body: ImportRequest, channel: ChildChannel) -> ImportResult:
    """Import a study's function without calling it; of a script, only read it.

    Raises:
        ObjectiveError: It cannot be imported, or not be called with a trial; there is no such script.
    """
    if body.table == "script":
        return described(body.objective.function, Path(body.objective.paths[0]))
    before = set(sys.modules)
    with beating(channel):
        for name in body.objective.preload:
            _import_preloaded(name, body.table)
        function = import_function(body.objective, body.table)
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        return _import_result(source_file(function), new | {"dryfit", *body.objective.preload})


def run(body: ObjectiveRequest, channel: ChildChannel) -> TrainResult:
    """Call a study's function for one trial.

    Raises:
        ChangedError: Its file was edited.
        ObjectiveError: It cannot be imported, or did not return one number for each goal.
        CheckpointError: What is to go on from belongs to another trial.
        NonFiniteError: One of them is NaN or infinite.
    """
    with called(body, channel):
        function = import_function(body.objective)
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


@contextmanager
def called(body: ObjectiveRequest, channel: ChildChannel, *, anew: bool = False) -> Iterator[None]:
    """Make this process ready to run a user's own code for one trial, and send heartbeats while that runs.

    Args:
        body: The call of the code.
        channel: How it reports.
        anew: As in :func:`make_checkpoint_folder`.

    Raises:
        ChangedError: The code's file was edited.
        CheckpointError: What is to go on from belongs to another trial.
    """
    _use_threads(body.threads)
    with beating(channel):
        demand_unchanged(body.own_file, body.own_hash)
        make_checkpoint_folder(body, anew=anew)
        yield


def limit_memory(fraction: float | None, torch: Any) -> None:
    """Let PyTorch's allocator take no more than a share of its device; None: all."""
    if fraction is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)


def _use_threads(count: int) -> None:
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


def _import_result(file: Path | None, modules: Iterable[str]) -> ImportResult:
    """Return which file was imported, and the versions of Python and of the packages that modules belong to."""
    versions, owners = {"python": platform.python_version()}, packages_distributions()
    for package in sorted({owner for name in modules for owner in owners.get(name.partition(".")[0], ())}):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return ImportResult(source_file=str(file or ""), source_hash=source_hash(file), versions=versions)
