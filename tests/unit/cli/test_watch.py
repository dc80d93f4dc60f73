"""``status --watch``: what is drawn on a terminal, what is printed elsewhere, and when it ends."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from dryfit.documents.live_progress import watch
from dryfit.documents.live_study import StudyFollower
from dryfit.ledger.events import SessionClosed
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.trial import Outcome
from ledgers import Script


class Watching:
    """A study that goes on, second by second, while it is watched."""

    def __init__(self, folder: Path) -> None:
        self.script = Script()
        self.script.begin()
        self.folder = folder
        self.now_s = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.script.write(folder)
        self.follower = StudyFollower(StudyLayout(folder), clock=lambda: self.script.now_s, host="elsewhere")

    def at(self, second: float, happens: Callable[[], None]) -> None:
        self.due.append((second, happens))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for one in [one for one in self.due if one[0] <= self.now_s]:
            self.due.remove(one)
            one[1]()
        self.script.write(self.folder)

    def watch(self, out: Console | None = None) -> None:
        watch(self.follower, out=out, sleep=self.sleep, clock=lambda: self.now_s)


@pytest.fixture
def study(tmp_path: Path) -> Watching:
    watching = Watching(tmp_path)
    script = watching.script

    def fails() -> None:
        script.ask(0, {})
        script.place(0)
        script.fail(0, 1, FailureKind.KILLED, "killed from outside (SIGKILL), nobody knows why", Action.RETRY)

    def completes() -> None:
        script.place(0, 2)
        script.finish(0, Outcome.COMPLETE, 0.75)

    watching.at(2, fails)
    watching.at(40, completes)
    watching.at(42, lambda: script.say(SessionClosed(reason="done")))
    return watching


def test_off_a_terminal_there_are_lines_now_and_then_and_at_the_end(
    study: Watching, capsys: pytest.CaptureFixture[str]
) -> None:
    study.watch()
    printed = capsys.readouterr().out.splitlines()
    heads = [line for line in printed if line.startswith("study: ")]
    assert len(heads) == 3  # at once, after half a minute, and at the end
    assert heads[0].startswith("study: 0/40 trials") and "1/40 trials (1 complete), best f1_macro 0.7500" in heads[2]
    assert "side by side: 1 (as asked for)" in printed
    assert any(line.startswith("trial 0: waiting") for line in printed)
    assert any(line.startswith("1 x killed in trial(s) 0: 1 retry; ") for line in printed)
    assert printed[-1] == "nobody runs this study now"
    assert study.now_s == 42


def test_a_terminal_is_drawn_anew_every_second(study: Watching) -> None:
    stream = io.StringIO()
    study.watch(Console(file=stream, force_terminal=True, width=60, height=20, color_system=None))
    text = stream.getvalue()
    assert text.count("side by side: 1") > 40
    assert "waiting" in text and "1/40 trials (1 complete)" in text
    assert "nobody runs this study now" in text
    assert "\x1b[?25h" in text  # the cursor is there again
    assert not [line for line in text.splitlines() if "SIGKILL" in line]  # cut to the width


def test_ctrl_c_leaves_the_terminal_as_it_was(study: Watching) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    study.at(5, press)
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        study.watch(Console(file=stream, force_terminal=True, width=60, color_system=None))
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_study_that_nobody_runs_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watching = Watching(tmp_path)
    watching.script.say(SessionClosed(reason="done"))
    watching.script.write(tmp_path)
    watching.watch()
    assert capsys.readouterr().out.splitlines()[-1] == "nobody runs this study now"
    assert watching.now_s == 0
