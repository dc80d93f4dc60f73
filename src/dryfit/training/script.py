"""A training script as a trial: found, run unchanged, its results taken."""

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.training_arguments import ArgumentWatch
from dryfit.processes.channel import ChildChannel
from dryfit.processes.process import CopiesEndHere
from dryfit.settings.errors import DryfitError, ObjectiveError
from dryfit.settings.files import copy_folder, publishing, reading
from dryfit.settings.ladder import arguments_of
from dryfit.settings.rehearsal_messages import ArgumentValue
from dryfit.settings.text import brief, few
from dryfit.settings.training_messages import ObjectiveRequest, ScriptRequest, TrainResult
from dryfit.settings.user_code import FOLDER, CommandTemplate
from dryfit.settings.wire import Note, Phase, parse_json
from dryfit.training.current_trial import (
    TRIAL_VARIABLE,
    Evaluation,
    Goals,
    OwnLine,
    ScriptEnded,
    ScriptReports,
    Trial,
    begin,
    completed,
    newest_whole,
    numbers_of,
)
from dryfit.training.objective import called, limit_memory, run_script, seed_libraries
from dryfit.training.script_arguments import ArgumentReads

# Files that a script opens for writing outside of its trial's folder, where another trial would overwrite them.


_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CACHES: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
_SYSTEM: Final = ("/dev", "/proc", "/sys", "/run")
_MOST: Final = 20


@final
class OutsideWrites:
    """Notes what Python code of this process opens for writing; what libraries open in native code is not seen.

    Args:
        own: Folders that belong to the trial.
        work: The folder that the script is run in: what is written there counts wherever it lies.
    """

    def __init__(self, own: Sequence[Path], work: Path) -> None:
        caches = [os.environ[name] for name in _CACHES if name in os.environ]
        self._work = f"{os.path.realpath(work)}{os.sep}"
        self._own = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in own)
        others = (*caches, *_SYSTEM, tempfile.gettempdir(), str(Path.home() / ".cache"))
        self._allowed = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in others)
        self.paths: dict[str, None] = {}

    def install(self) -> None:
        """Watch from now on, until the process ends."""
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or len(self.paths) >= _MOST:
            return
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
        if not writes or not isinstance(path, str | bytes):
            return
        place = os.path.realpath(os.fsdecode(path))
        if place.startswith(self._own) or "__pycache__" in place:
            return
        if place.startswith(self._work) or not place.startswith(self._allowed):
            self.paths[place] = None


# A file of JSON lines that a script writes its results to: each line with the metric becomes a report.


_LOOK_EVERY_S: Final = 0.1
_END_SIGNAL: Final = signal.SIGUSR2


@final
class ResultsFile:
    """Reports what a script writes to its results file, and ends the script where it is told to stop.

    Args:
        path: The file; it need not be there yet.
        reports: Where reports go.
        goals: What the study optimises.
    """

    def __init__(self, path: Path, reports: ScriptReports, goals: Goals) -> None:
        self._path, self._reports, self._goals = path, reports, goals
        self._read_bytes = self._line = 0
        self._seen: dict[str, None] = {}
        self._error: DryfitError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dryfit-results", daemon=True)

    def start(self) -> None:
        """Follow the file from now on. Called by the main thread, before the script begins."""
        signal.signal(_END_SIGNAL, _end)
        self._thread.start()

    def finish(self) -> None:
        """Report what is left of the file, after the script has ended.

        Raises:
            ObjectiveError: A line is no JSON object, or has the metric and no step.
        """
        signal.signal(_END_SIGNAL, signal.SIG_IGN)  # first: the thread may be about to send it
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._reports.trial.stopped_by is None:
            self._report_new(whole=False)

    @property
    def seen(self) -> str:
        """The names of the numbers that its lines have, in words."""
        return few(self._seen) or "no numbers at all"

    def _follow(self) -> None:
        main = threading.main_thread().ident
        assert main is not None  # it runs
        while not self._over.wait(_LOOK_EVERY_S):
            try:
                stop = self._report_new(whole=True) or self._reports.trial.should_stop
            except ScriptEnded:
                stop = True
            except DryfitError as error:
                self._error, stop = error, True
            if stop:
                signal.pthread_kill(main, _END_SIGNAL)
                return

    def _report_new(self, *, whole: bool) -> bool:
        """Report the lines that are new; those that have no end yet are left unless the script has ended."""
        try:
            with reading(self._path, links=True) as file:
                if os.fstat(file.fileno()).st_size < self._read_bytes:
                    raise self._wrong("it has become shorter", "a file that only grows")
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return False
        for line in text.splitlines(keepends=True):
            if whole and not line.endswith(b"\n"):
                break
            self._read_bytes, self._line = self._read_bytes + len(line), self._line + 1
            if line.strip() and self._report(line):
                return True
        return False

    def _report(self, line: bytes) -> bool:
        try:
            found = parse_json(line.decode())
        except ValueError as error:
            raise self._wrong(f"line {self._line} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise self._wrong(f"line {self._line} is {brief(found, 60)}")
        numbers = numbers_of({name: value for name, value in found.items() if name != "step"})
        self._seen.update(dict.fromkeys(numbers))
        value, step = self._goals.first(numbers), found.get("step")
        if value is None:
            return False  # of training, perhaps
        if not isinstance(step, int):
            raise self._wrong(f"line {self._line} has {self._goals.names[0]} and no step")
        return self._reports.report(value, step, _others(numbers, self._goals.names[0]))

    def _wrong(self, found: str, allowed: str = "") -> ObjectiveError:
        example = f'lines such as {{"step": 100, "{self._goals.names[0]}": 0.5}}'
        return ObjectiveError(f"reading results from {self._path}", found, allowed or example)


def _others(numbers: Mapping[str, float], first: str) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if name != first}


def _end(_number: int, _frame: FrameType | None) -> None:
    raise ScriptEnded


# Child job SCRIPT: run a user's own training script for one trial, unchanged, and take what it tells.


_OUTPUT: Final = "output"
"""Folder of what the script writes: beside it, and not in it, are dryfit's own files, as some scripts want it empty."""

_TRAINER: Final = "transformers.trainer"
_HOOKS: Final = "dryfit.training.script_trainers"


def run(body: ScriptRequest, channel: ChildChannel) -> TrainResult:
    """Run a study's script for one trial.

    Raises:
        ChangedError: Its file was edited.
        ObjectiveError: It ended with another status than 0, told no value, or cannot be searched.
        CheckpointError: What is to go on from belongs to another trial.
        NonFiniteError: The loss became infinite or NaN, or every value is.
    """
    anew = body.calling.checkpoint_step is None
    with called(body.calling, channel, anew=anew):
        when_imported("torch", partial(limit_memory, body.memory_fraction))
        return _ScriptTrial(body, channel).run()


@final
class TrialScript:
    """The user's script with the values of a trial: it is rehearsed as it is run.

    Args:
        trial: The trial, in whose folder it writes.
        calling: The call of the script.
        changed: ``TrainingArguments`` that take the place of its own, by name.

    Attributes:
        work: The folder that it is run in.
        command: What is run.
        arguments: What its parser does with the values.
        planned: What becomes of the changes.
    """

    def __init__(self, trial: Trial, calling: ObjectiveRequest, changed: Mapping[str, ArgumentValue]) -> None:
        self._trial, self._calling, folder = trial, calling, str(trial.folder)
        self.work, self.command = Path(calling.objective.paths[0]), CommandTemplate.parse(calling.objective.function)
        values = {FOLDER: folder, "seed": calling.seed, "number": calling.number}
        values |= dict(trial.params.items())  # a command reads them all
        self._words = self.command.arguments(values)
        self.arguments = ArgumentReads(self.command.options(), values, None if self.command.names_output else folder)
        self.planned = ArgumentWatch(changed)

    def connect(self, on_trainer: Callable[[Any], None], *reports: ScriptReports) -> None:
        """Make this process ready for the script.

        Args:
            on_trainer: Called with the module of transformers' Trainer once the script imports it.
            reports: Take what the script reports; none: it is rehearsed.
        """
        calling = self._calling
        os.environ["DRYFIT_FOLDER"] = str(self._trial.folder)
        os.environ[TRIAL_VARIABLE] = str(calling.number)
        os.environ["DRYFIT_ATTEMPT"] = str(calling.attempt)
        os.environ["DRYFIT_SEED"] = str(calling.seed)
        begin(self._trial, *reports)
        self.arguments.install()
        self.planned.install()
        when_imported(_TRAINER, on_trainer)
        seed_libraries(calling.seed)

    def run(self) -> None:
        """Run the script."""
        run_script(self.command, self.work, self._words)


class _ScriptTrial:
    """One attempt."""

    def __init__(self, body: ScriptRequest, channel: ChildChannel) -> None:
        calling = body.calling
        kept = Path(calling.checkpoint_dir)
        output = kept / _OUTPUT
        output.mkdir(exist_ok=True)
        newest_whole(output)  # removes checkpoints that a kill has left torn: scripts look for the last by themselves
        self.body, self.channel = body, channel
        self.trial = Trial(calling.model_copy(update={"checkpoint_dir": str(output)}), channel)
        self.goals = Goals.of(calling.objective)
        self.reports = ScriptReports(self.trial, self.goals, kept)
        self.script = TrialScript(self.trial, calling, arguments_of(body.choice))
        own = (kept, channel.folder, *((Path(body.best_dir),) if body.best_dir else ()))
        self.outside = OutsideWrites(own, self.script.work)
        results = output / body.results if body.results is not None else None
        self.results = ResultsFile(results, self.reports, self.goals) if results is not None else None
        self.trainers: Any = None
        """Of a script that has imported transformers' Trainer; its module is imported then."""

    def run(self) -> TrainResult:
        """Run the script, and return what became of it."""
        self._connect()
        try:
            with self._ends(), OwnLine(str(self.script.work / self.script.command.target)), CopiesEndHere():
                self.script.run()
            self._wait_for_threads()
        finally:
            self._finish_results()
            self._tell()
        return self._result()

    def _connect(self) -> None:
        if self.results is not None:
            self.results.start()
        self.script.connect(self._hook, self.reports)
        self.channel.send(Phase(name="train"))
        self.outside.install()

    def _hook(self, _module: object) -> None:
        self.trainers = importlib.import_module(_HOOKS).ScriptTrainers(
            self.trial, self.channel, self.body, self.reports, self.script.arguments, self.script.planned
        )
        self.trainers.install()

    @contextmanager
    def _ends(self) -> Generator[None, None, None]:
        """Turn the ends that a script may choose into ours."""
        doing = f"running {self.script.command.target}"
        try:
            yield
        except ScriptEnded:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                status = f"exit status {error.code}" if isinstance(error.code, int) else f"the message {error.code}"
                raise ObjectiveError(doing, f"it ended by sys.exit with {status}", "an end without a fault") from error
        except EOFError as error:
            error.add_note("nobody answers the questions of a trial: input() has no keyboard here")
            raise

    def _wait_for_threads(self) -> None:
        """Wait for what the script has left running, as Python does at its end, and close files that it left open."""
        for thread in threading.enumerate():
            if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
                thread.join()
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    def _finish_results(self) -> None:
        if self.results is not None:
            with suppress(ScriptEnded):
                self.results.finish()

    def _tell(self) -> None:
        """Say what the script does that a search does not expect of it."""
        notes = self.script.arguments.notes()
        if self.outside.paths:
            notes.append(
                f"the script writes outside of its folder: {few(self.outside.paths, 3)}; trials that write to one "
                "place overwrite each other: write below {folder}, which DRYFIT_FOLDER names too"
            )
        for note in notes:
            self.channel.send(Note(text=note))

    def _result(self) -> TrainResult:
        callback = self.trainers.callback if self.trainers is not None else None
        evaluations: list[Evaluation] = self.reports.evaluations
        trained, steps, cut_short = callback is not None, 0, self.trial.stopped_by is not None
        if callback is not None:
            evaluations, steps, cut_short = callback.evaluations, callback.steps, callback.cut_short
        steps = max([steps, *(each.step for each in evaluations)])
        if cut_short:
            return TrainResult(value=None, best=None, steps=steps, stopped_by=self.trial.stopped_by)
        if not evaluations:
            raise self._never_reported(trained)
        if not self.goals.are_known(evaluations):
            self.goals.demand(evaluations[-1])
        result = completed(self.goals.values(evaluations), self.goals.names, steps)
        if not trained and self.body.best_dir is not None:
            _keep(self.trial.folder, Path(self.body.best_dir))
        return result

    def _never_reported(self, trained: bool) -> ObjectiveError:
        name = self.goals.names[0]
        doing = f"looking for the metric {name}"
        if trained:
            return ObjectiveError(
                doing,
                "the script's Trainer was trained and never evaluated",
                "at least one evaluation",
                "add --eval_strategy epoch to the command, or call trainer.evaluate() after trainer.train()",
            )
        if self.results is not None:
            found = f"{self.body.results} in the trial's folder has no line with it; there are {self.results.seen}"
            return ObjectiveError(doing, found, f'lines such as {{"step": 100, "{name}": 0.5}}')
        return ObjectiveError(
            doing,
            f"{self.script.command.target} has ended, and reported nothing",
            "at least one report",
            f"train a transformers.Trainer, call dryfit.report({name}, step=...), or name the file of JSON lines that "
            "it writes in script.results",
        )


def _keep(folder: Path, best_dir: Path) -> None:
    """Keep what a script without a Trainer has written; without a copy of its bytes where the file system can."""
    if not any(folder.iterdir()):
        return
    with publishing(best_dir) as temporary:
        copy_folder(folder, temporary, _link)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
