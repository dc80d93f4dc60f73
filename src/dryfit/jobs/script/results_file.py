"""A file of JSON lines that a script writes its results to: each line with the metric becomes a report."""

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Final, final

from dryfit.core.errors import DryfitError, ObjectiveError
from dryfit.core.regular_files import reading
from dryfit.core.text.json_text import parse_json
from dryfit.core.text.words import brief, few
from dryfit.jobs.own.trainer_goals import Goals, numbers_of
from dryfit.jobs.script.current import ScriptEnded, ScriptReports

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
