"""The live view, drawn from scripted events: the panel at several widths, and the lines off a terminal."""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dryfit.documents import live_progress
from dryfit.documents.live_progress import LiveDisplay, watch, watching
from dryfit.documents.live_study import LiveStudy, StudyFollower, StudyPanel, Vitals, read_vitals, remaining_text
from dryfit.ledger import events
from dryfit.ledger.events import SessionClosed
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.settings.choices import BuiltInTask, Direction
from dryfit.settings.errors import Action, DataError, FailureKind
from dryfit.settings.trial import Goal, MetricPoint, Outcome
from dryfit.settings.wire import Message, Note, Phase, Progress
from dryfit.study.functions import StudyRun, Turn
from dryfit.study.observers import Observer
from ledgers import Script

GOAL = Goal(name="loss", direction=Direction.MINIMIZE)
BEGAN_S = 1_000_000.0


class Happening:
    """A study that happens as written, at times as written."""

    def __init__(self, *observers: Observer, total: int = 6, parallel: int = 2, also: tuple[Goal, ...] = ()) -> None:
        self.state = StudyState()
        self.observers = list(observers)
        self.now_s = BEGAN_S
        self.looks: list[tuple[Path, int | None]] = []
        self.vitals = Vitals(rss_bytes=512 * 2**20, beat_age_s=0.34)
        self.live = LiveStudy(clock=lambda: self.now_s, vitals=self._look)
        self.observers.append(self.live)
        for observer in self.observers:
            observer.on_open(StudyLayout(Path("/study")))
        self.event(
            events.StudyCreated,
            id="x",
            name="toy",
            task=BuiltInTask.CRITERIA,
            metric="f1_macro",
            direction=Direction.MAXIMIZE,
            also=also,
            seed=0,
            space="{}",
        )
        self.event(events.SessionOpened, pid=1, host="h", version="0", total=total, parallel=parallel)

    def _look(self, folder: Path, pid: int | None, now_s: float) -> Vitals:
        assert now_s == self.now_s
        self.looks.append((folder, pid))
        return self.vitals

    def event(self, cls: Callable[..., events.Event], **fields: Any) -> None:
        event = cls(at=self.now_s, **fields)
        self.state.apply(event)
        for observer in self.observers:
            observer.on_event(event, self.state)

    def say(self, number: int, *messages: Message) -> None:
        for message in messages:
            for observer in self.observers:
                observer.on_message(number, message)

    def ask(self, number: int) -> None:
        self.event(
            events.TrialAsked,
            number=number,
            params={"optim.lr": 1e-3},
            internal={},
            distributions={},
            seed=1,
            fingerprint="f",
        )

    def place(self, number: int, attempt: int = 1, *, pid: int | None = None) -> None:
        self.event(events.AttemptPlaced, number=number, attempt=attempt)
        pid = 100 + number if pid is None else pid
        self.event(events.AttemptStarted, number=number, attempt=attempt, pid=pid, overhead_ms=1.0)
        self.say(number, Phase(name="train"))

    def progress(self, number: int, step: int, total: int = 100, **more: Any) -> None:
        self.say(number, Progress(step=step, total_steps=total, epoch=0.5, loss=0.4123, **more))

    def report(self, number: int, n: int, value: float, **metrics: float) -> None:
        point = MetricPoint(n=n, step=10 * n, epoch=float(n), value=value, metrics={"f1_macro": value, **metrics})
        self.event(events.ReportMade, number=number, attempt=1, point=point)

    def finish(self, number: int, outcome: Outcome, value: float | None, steps: int) -> None:
        self.event(events.AttemptEnded, number=number, attempt=len(self.state.trials[number].attempts))
        further = self.state.created.also if self.state.created is not None and value is not None else ()
        also = tuple(0.3 for _ in further)
        self.event(events.TrialFinished, number=number, outcome=outcome, value=value, also=also, steps=steps)

    def panel(self, width: int = 120, encoding: str = "utf-8") -> list[str]:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        out = Console(width=width, record=True, file=stream, force_terminal=True)
        out.print(StudyPanel(self.live.view()))
        return [line.rstrip() for line in out.export_text().splitlines()]


def two_running(**settings: Any) -> Happening:
    """One trial complete after 20 s; one halfway with validations, one just placed."""
    script = Happening(**settings)
    for number in range(3):
        script.ask(number)
    script.place(0)
    script.progress(0, 1)
    script.now_s += 20
    script.report(0, 0, 0.71, loss=0.6)
    script.progress(0, 100)
    script.finish(0, Outcome.COMPLETE, 0.71, 100)
    script.place(1)
    script.progress(1, 2)
    script.now_s += 10
    for n, value in enumerate((0.55, 0.6, 0.8, 0.8123)):
        script.report(1, n, value, loss=0.5 - 0.1 * n)
    script.progress(1, 52)
    script.place(2)
    return script


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_row_for_each_trial_and_a_line_for_the_study_and_narrow_ones_leave_out_the_least(golden):
    script = two_running()
    # 3 trials without a process, 20 s each; 9.6 s and 20 s for those that run; two places: 45 s.
    golden("tune", *(script.panel(width) for width in (120, 80, 60, 40)), script.panel(80, encoding="ascii"))
    assert "\n".join(script.panel(80, encoding="ascii")).isascii()
    assert script.looks[-2:] == [
        (Path("/study/trials/0001/attempt-1"), 101),
        (Path("/study/trials/0002/attempt-1"), 102),
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width):
    script = two_running(also=(GOAL,))
    script.live.on_note("stopping (stopped): 2 running trial(s) write a checkpoint before " + "everything ends " * 9)
    for number in range(3, 20):
        script.ask(number)
    lines = script.panel(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "52/100" in text and "0.8123" in text and "and 7 more trials" in text and "1/6 trials" in text


def test_several_goals_have_a_column_each(golden):
    golden("tune", two_running(also=(GOAL,)).panel(120))


def test_the_phases_of_planning():
    script = Happening()
    script.ask(0)
    assert cells(script.panel()[1]) == ["0", "waiting"]
    script.say(0, Phase(name="load"))
    assert cells(script.panel()[1]) == ["0", "planning"]
    assert not script.looks  # there is no attempt whose folder could be looked at
    script.event(events.AttemptPlaced, number=0, attempt=1)
    assert cells(script.panel()[1])[:2] == ["0", "starting"]
    script.say(0, Phase(name="load"))
    assert cells(script.panel()[1])[:2] == ["0", "load"]
    assert "left" not in script.panel()[-1]  # nothing is known of what a trial takes


def test_a_resumed_trial_is_judged_by_the_steps_of_its_new_process():
    script = Happening(total=1)
    script.ask(0)
    script.place(0)
    script.report(0, 0, 0.5)
    script.progress(0, 80)
    failure = events.FailureFacts(kind=FailureKind.KILLED, sentence="killed", action=Action.RETRY)
    script.event(events.AttemptEnded, number=0, attempt=1, failure=failure)
    assert cells(script.panel()[1])[:3] == ["0", "waiting", "80/100"]
    script.now_s += 1000
    script.place(0, attempt=2, pid=7)
    script.progress(0, 81)
    assert "left" not in script.panel()[0]
    script.now_s += 20
    script.progress(0, 91)
    row = cells(script.panel()[1])
    assert row[2] == "91/100" and row[-1] == "18 s"  # 2 s a step, not the 11 s since the first attempt began
    assert "▅" in row  # the validation of the first attempt is part of the curve
    assert script.looks[-1] == (Path("/study/trials/0000/attempt-2"), 7)


def test_early_ends_shorten_the_studys_estimate_but_not_the_trials():
    def left(steps: int) -> tuple[str, str]:
        script = Happening(total=2)
        script.ask(0)
        script.place(0)
        script.progress(0, 1)
        script.now_s += 20
        script.finish(0, Outcome.PRUNED, 0.4, steps)
        script.ask(1)
        script.place(1)
        script.progress(1, 0)
        script.now_s += 10
        script.progress(1, 10)
        lines = script.panel()
        return cells(lines[1])[-1], lines[-1].rpartition("about ")[2]

    assert left(100) == ("2 min", "2 min left")
    assert left(20) == ("2 min", "10 s left")


def test_memory_of_the_device_is_shown_where_it_is_known():
    script = two_running()
    script.progress(2, 3, device_bytes=3 * 2**30)
    assert "3.0 GiB" in script.panel()[2]


def test_a_study_that_is_done_has_nothing_left():
    script = Happening(total=1)
    script.ask(0)
    script.place(0)
    script.now_s += 5
    script.finish(0, Outcome.FAILED, None, 0)
    assert script.panel() == ["1/1 trials (1 failed)  |  5.0 s  |  about 0 s left"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min"), (3599, "1 h 00 min"), (9000, "2 h 30 min")]
)
def test_remaining_times(seconds, text):
    assert remaining_text(seconds) == text


# ---- off a terminal


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_one_line_an_event_and_progress_now_and_then(capsys, golden):
    clock = Clock()
    script = two_running()
    script.observers = [LiveDisplay(clock=clock, study=script.live)]
    for _ in range(100):
        clock.now_s += 1.0
        script.progress(1, 60)
    script.say(1, Note(text="a note"))
    script.now_s += 60
    clock.now_s += 60
    script.finish(1, Outcome.COMPLETE, 0.8123, 100)
    golden("tune", capsys.readouterr().err)


def test_a_line_on_a_trial_comes_once_a_minute(capsys, golden):
    clock = Clock()
    script = Happening()
    script.observers = [LiveDisplay(clock=clock, study=script.live)]
    script.ask(0)
    script.place(0)
    script.progress(0, 1)
    for second in range(150):
        clock.now_s += 1.0
        script.now_s += 1.0
        script.progress(0, 1 + second // 3)
    golden("tune", capsys.readouterr().err)


def test_of_several_studies_the_lines_say_which(capsys, golden):
    clock = Clock()
    lines = LiveDisplay(clock=clock)
    for number in (1, 2):
        turn = Turn(number, 3, f"toy-{number}", Path("/study"))
        lines.on_turn(turn)
        script = Happening(lines)
        script.ask(0)
        script.place(0)
        clock.now_s += 60
        script.finish(0, Outcome.COMPLETE, 0.5, 100)
        lines.on_end(StudyRun(turn, error=DataError("reading rows", "there are none", "some")))
    golden("tune", [line for line in capsys.readouterr().err.splitlines() if "1/6" not in line])


def test_of_several_studies_the_panel_shows_which_and_forgets_the_one_before():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    panel = LiveDisplay(Console(width=100, record=True, file=stream, force_terminal=True))

    def drawn() -> list[str]:
        out = Console(width=100, record=True, file=stream, force_terminal=True)
        out.print(panel.render())
        return [line.rstrip() for line in out.export_text().splitlines()]

    panel.on_turn(Turn(1, 2, "first", Path("/first")))
    script = Happening(panel)
    script.ask(0)
    script.place(0)
    panel.on_note("checking")
    assert len(drawn()) == 4 and drawn()[2].startswith("study 1 of 2: first  |  0/6 trials  |  ")
    panel.on_turn(Turn(2, 2, "second", Path("/second")))
    assert drawn() == ["study 2 of 2: second"]
    Happening(panel, total=9)
    assert len(drawn()) == 1 and drawn()[0].startswith("study 2 of 2: second  |  0/9 trials  |  ")


def test_terms_devices_and_parallelism_are_lines(capsys, golden):
    script = Happening()
    script.observers = [LiveDisplay(clock=Clock(), study=script.live)]
    script.event(events.ParallelSet, parallel=3, reason="a fourth trial does not fit")
    script.event(events.DeviceSetAside, device="1", reason="2.0 GiB are not given back")
    script.ask(0)
    script.place(0)
    failure = events.FailureFacts(kind=FailureKind.OOM_NEIGHBOUR, sentence="others held it", action=Action.EXCLUSIVE)
    script.event(events.AttemptEnded, number=0, attempt=1, failure=failure)
    script.event(events.AttemptPlaced, number=0, attempt=2, terms=("alone on its device",))
    golden("tune", capsys.readouterr().err)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def draws_panel(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **environment: str) -> bool:
    for name in ("CI", "NO_COLOR", "TERM", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", stream)
    with watching(quiet=False) as observer:
        return observer._live is not None


def test_what_watches_depends_on_where_stderr_goes(monkeypatch):
    assert draws_panel(monkeypatch, Terminal())
    assert not draws_panel(monkeypatch, Terminal(), CI="true")
    assert not draws_panel(monkeypatch, Terminal(), TERM="dumb")
    assert not draws_panel(monkeypatch, io.StringIO())
    with watching(quiet=True) as observer:
        assert observer is None


def shown_by_panel(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    stream = Terminal()
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    with watching(quiet=False) as observer:
        assert observer is not None and observer._live is not None
        script = Happening(observer)
        script.ask(0)
        script.place(0)
        script.progress(0, 5)
        observer._live.refresh()
    return stream.getvalue()


def test_the_panel_moves_and_colours_obey_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    colours = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    with_colours = shown_by_panel(monkeypatch)
    assert "5/100" in with_colours and "trial 0: new" in with_colours and colours.search(with_colours)
    without = shown_by_panel(monkeypatch, NO_COLOR="1")
    assert "5/100" in without and not colours.search(without)


def test_vitals_of_a_real_process_and_of_none(tmp_path):

    (tmp_path / "beat").touch()
    os.utime(tmp_path / "beat", (500.0, 500.0))
    found = read_vitals(tmp_path, os.getpid(), 502.5)
    assert found.beat_age_s == 2.5 and found.rss_bytes is not None and found.rss_bytes > 10 * 2**20
    assert read_vitals(tmp_path / "gone", 2**22 + 1, 0.0) == Vitals()
    assert read_vitals(tmp_path / "gone", None, 0.0) == Vitals()
    assert live_progress._PROGRESS_EVERY_S == 60.0


# ---- ``status --watch``: what is drawn on a terminal, what is printed elsewhere, and when it ends


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
def watched(tmp_path: Path) -> Watching:
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
    watched: Watching, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.watch()
    printed = capsys.readouterr().out.splitlines()
    heads = [line for line in printed if line.startswith("study: ")]
    assert len(heads) == 3  # at once, after half a minute, and at the end
    assert heads[0].startswith("study: 0/40 trials") and "1/40 trials (1 complete), best f1_macro 0.7500" in heads[2]
    assert "side by side: 1 (as asked for)" in printed
    assert any(line.startswith("trial 0: waiting") for line in printed)
    assert any(line.startswith("1 x killed in trial(s) 0: 1 retry; ") for line in printed)
    assert printed[-1] == "nobody runs this study now"
    assert watched.now_s == 42


def test_a_terminal_is_drawn_anew_every_second(watched: Watching) -> None:
    stream = io.StringIO()
    watched.watch(Console(file=stream, force_terminal=True, width=60, height=20, color_system=None))
    text = stream.getvalue()
    assert text.count("side by side: 1") > 40
    assert "waiting" in text and "1/40 trials (1 complete)" in text
    assert "nobody runs this study now" in text
    assert "\x1b[?25h" in text  # the cursor is there again
    assert not [line for line in text.splitlines() if "SIGKILL" in line]  # cut to the width


def test_ctrl_c_leaves_the_terminal_as_it_was(watched: Watching) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    watched.at(5, press)
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        watched.watch(Console(file=stream, force_terminal=True, width=60, color_system=None))
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_study_that_nobody_runs_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watching = Watching(tmp_path)
    watching.script.say(SessionClosed(reason="done"))
    watching.script.write(tmp_path)
    watching.watch()
    assert capsys.readouterr().out.splitlines()[-1] == "nobody runs this study now"
    assert watching.now_s == 0
