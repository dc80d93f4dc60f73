"""An attack on a copy of a study, and the promises that every command is held to; :mod:`attacker` makes them."""

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from study_runs import Ended, command_after, ends, fold, write_stepwise

LIMIT_S = 120
"""When a command counts as hung; on a busy machine one takes ten times as long as it should."""
SECRET = "s3cret-\"quoted\\and-back'slashed"
STATUSES = (0, 1, 2, 3, 130)
_BOUNDED = "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))"
"""What reads without end must not take the machine."""
READERS = (
    ("status",),
    ("status", "--json"),
    ("show",),
    ("show", "0"),
    ("show", "0", "--json"),
    ("report",),
    ("export", "--to", "csv"),
    ("stop",),
)
_OLDER = re.compile(r"its ledger is older than its folder: (.*)")


@dataclass
class Report:
    """What an attack has shown."""

    name: str
    broken: list[str] = field(default_factory=list[str])
    commands: int = 0


@dataclass
class Range:
    """The studies that are attacked: a finished and an interrupted one, and how an undisturbed one ends."""

    finished: Path
    interrupted: Path
    expected: list[Ended]


def environment() -> dict[str, str]:
    """The environment of every command: with a secret, without what our tests set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DRYFIT_", "PYTEST_"))}
    return {**kept, "HF_TOKEN": SECRET, "PGPASSWORD": SECRET, "STEP_PAUSE_S": "0"}


def prepare(folder: Path) -> Range:
    """Make the studies, with real commands."""
    finished = write_stepwise(folder / "finished")
    subprocess.run(argv("tune", finished, "--quiet"), env=environment(), check=True, capture_output=True)
    interrupted = write_stepwise(folder / "interrupted")
    process = subprocess.Popen(argv("tune", interrupted, "--quiet"), env={**environment(), "STEP_PAUSE_S": "0.1"})
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        if (interrupted / "ledger.jsonl").exists():
            state = fold(interrupted)
            if state.counted and any(one.attempts and one.attempts[-1].checkpoint_step for one in state.open_trials):
                break
        time.sleep(0.02)
    process.kill()
    process.wait()
    return Range(finished, interrupted, ends(finished))


def argv(*words: str | Path, setup: str = "") -> list[str]:
    """A command line, in a process that ``setup`` has prepared."""
    return command_after(f"{_BOUNDED}; {setup}", *words)


@dataclass
class Attack:
    """One attack on a copy of a study.

    Attributes:
        draw: Decides everything.
        study: The copy.
        grounds: The studies that copies are taken of.
        report: What it has shown.
        printed: What the last command has printed.
    """

    draw: random.Random
    study: Path
    grounds: Range
    report: Report
    printed: str = ""

    def run(self, *words: str, setup: str = "", cwd: Path | None = None) -> int:
        """Run a command on the study, and hold it to the promises that every command gives."""
        command, *options = words
        line = argv(command, self.study, *options, setup=setup)
        self.report.commands += 1
        try:
            done = subprocess.run(
                line,
                env=environment(),
                cwd=cwd,
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            self.broken(f"{' '.join(words)}: hangs")
            return -1
        self.holds(" ".join(words), done.returncode, done.stdout + done.stderr)
        return done.returncode

    def holds(self, what: str, status: int, printed: bytes) -> None:
        """Hold a command that has ended to the promises that every command gives."""
        self.printed = printed.decode(errors="replace")
        if status not in STATUSES:
            self.broken(f"{what}: exit status {status}: {self.printed[-600:]}")
        elif "Traceback (most recent call last)" in self.printed:
            self.broken(f"{what}: a traceback: {self.printed[-600:]}")
        if SECRET in self.printed:
            self.broken(f"{what}: prints a secret")

    def broken(self, what: str) -> None:
        """Note a promise that was not kept."""
        self.report.broken.append(what)

    def reads(self, most: int = 3, setup: str = "") -> None:
        """Run some commands that only look."""
        for words in self.draw.sample(READERS, self.draw.randint(1, most)):
            self.run(*words, setup=setup)

    def goes_on(self) -> None:
        """Resume; it must end as an undisturbed study does, to the last report.

        Where a study went on from a changed ledger, the one that is put back is older than the folder, and refused:
        what it does not know is moved away then, as the message says.
        """
        status = self.run("resume", "--quiet")
        while status == 2 and (names := _OLDER.search(self.printed)) is not None:
            for name in re.findall(r"\S*/trials/[0-9]+", names[1]):
                shutil.rmtree(name)
            status = self.run("resume", "--quiet")
        if status != 0:
            self.broken(f"put back, it does not go on: exit status {status}: {self.printed[-600:]}")
        elif ends(self.study) != self.grounds.expected:
            self.broken("its values are others than those of an undisturbed study")

    def paths(self) -> list[Path]:
        """Everything in the study's folder, and what could be."""
        made = [path for path in self.study.rglob("*") if not path.is_symlink()]
        names = ("stop", "lock", "doorbell", "cache", "logs", "report", "final", "frozen.toml", "optuna.journal")
        return sorted({*made, *(self.study / name for name in names)})


Kind = Callable[[Attack], str]
