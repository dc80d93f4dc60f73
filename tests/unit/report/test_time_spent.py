"""Every second of every slot is counted once, and for what it was."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dryfit.documents.pages import Section
from dryfit.documents.time_spent import WORK, Spent, TimeSpent, spent_table, time_spent, with_time
from dryfit.ledger.events import AttemptEnded, ParallelSet
from dryfit.ledger.state import AttemptState
from dryfit.processes.attempt import read_phases
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import MESSAGES_FILE, Phase, Progress
from ledgers import Script, begun


def phases(*told: tuple[str, int, float]) -> list[Phase]:
    """Each by name, step and seconds after placement."""
    return [Phase.model_validate({"name": name, "step": step, "after_ms": 1000 * s}) for name, step, s in told]


def one_trial(script: Script, number: int = 0) -> None:
    """12 ms to its first line, 0.7 s to its first step, two reports, 12.8 s in all."""
    script.complete(number, {"optim.lr": 1e-4}, [0.5, 0.6])


TOLD = phases(
    ("load", 0, 0.012),
    ("train", 0, 0.6),
    ("evaluate", 20, 5.6),
    ("save", 20, 6.1),
    ("train", 20, 6.2),
    ("evaluate", 40, 11.2),
    ("save", 40, 11.6),
    ("train", 40, 11.7),
)


def told_to(attempt: AttemptState) -> Sequence[Phase]:
    return TOLD


def test_a_trials_phases_and_all_around_them_add_up_to_the_session() -> None:
    script = begun()
    one_trial(script)
    script.close()
    state = script.state()
    (attempt,) = state.attempts
    life_s = attempt.end_s - attempt.placed_at_s
    spent = time_spent(state, told_to)
    assert spent.total_s == pytest.approx(state.wall_s)
    assert spent.seconds[Spent.PREPARING] == pytest.approx(attempt.placed_at_s - state.sessions[0].opened_at_s)
    assert spent.seconds[Spent.STARTING] == pytest.approx(0.012)
    assert spent.seconds[Spent.LOADING] == pytest.approx(0.588)
    assert spent.seconds[Spent.TRAINING] == pytest.approx(5.0 + 5.0)
    assert spent.seconds[Spent.VALIDATING] == pytest.approx(0.5 + 0.4)
    assert spent.seconds[Spent.SAVING] == pytest.approx(0.1 + 0.1)
    assert spent.seconds[Spent.ENDING] == pytest.approx(life_s - 11.7)
    assert spent.seconds[Spent.IDLE] == pytest.approx(state.sessions[0].last_at_s - attempt.end_s)
    assert spent.beside_work == pytest.approx(1 - 10.9 / state.wall_s)
    assert [row[0] for row in spent_table(spent).rows][:2] == ["training", "validating"]


def test_a_slot_without_a_trial_is_idle() -> None:
    script = begun()
    script.say(ParallelSet(parallel=2, reason="two cores"))
    one_trial(script)
    one_trial(script, 1)
    script.close()
    state = script.state()
    spent = time_spent(state, told_to)
    assert spent.total_s == pytest.approx(2 * state.wall_s)
    assert spent.seconds[Spent.TRAINING] == pytest.approx(20.0)
    busy = [each.end_s - each.placed_at_s for each in state.attempts]
    before = state.attempts[0].placed_at_s - state.sessions[0].opened_at_s
    assert spent.seconds[Spent.IDLE] == pytest.approx(2 * (state.wall_s - before) - sum(busy))


def test_what_told_no_phases_is_not_told_apart() -> None:
    """Trials of an earlier version, and of a user's own code."""
    script = begun()
    one_trial(script)
    for told in ([], [Phase(name="load"), Phase(name="train")]):
        spent = time_spent(script.state(), lambda _, told=told: told)
        life_s = script.state().attempts[0].time_s
        assert spent.seconds[Spent.WORKING] == pytest.approx(life_s - 0.7)
        assert spent.seconds[Spent.LOADING] == pytest.approx(0.688)
        assert spent.share(*WORK) == pytest.approx((life_s - 0.7) / spent.total_s)


def test_an_attempt_that_fails_between_two_steps_ends_in_training() -> None:
    script = begun()
    script.ask(0, {"optim.lr": 1e-4})
    script.place(0)
    script.fail(0, 1, FailureKind.OOM_HOST, "killed", Action.RETRY)
    script.place(0, attempt=2)
    script.report(0, 0, 0.5, attempt=2)
    script.say(AttemptEnded(number=0, attempt=2))
    script.finish(0, Outcome.COMPLETE, 0.5, best=0, steps=20)
    state = script.state()
    spent = time_spent(state, lambda one: phases(("load", 0, 0.012), ("train", 0, 0.7)))
    lives = [each.end_s - each.placed_at_s for each in state.attempts]
    assert spent.seconds[Spent.TRAINING] == pytest.approx(sum(lives) - 1.4)
    assert spent.seconds[Spent.ENDING] == 0
    assert spent.total_s == pytest.approx(state.wall_s)


def test_a_study_without_trials_and_a_page_without_a_timeline() -> None:
    script = begun()
    spent = time_spent(script.state(), told_to)
    assert spent.seconds[Spent.PREPARING] == pytest.approx(script.state().wall_s)
    line = Section("timeline", "Timeline", texts=("One bar.",))
    assert with_time(line, TimeSpent(dict.fromkeys(Spent, 0.0))) == line
    added = with_time(line, spent)
    assert len(added.charts) == 1 and added.tables[0][0] == "Where the time went"
    assert "100.0% of it is neither training nor validating" in added.texts[1]


def test_a_child_says_when_each_phase_began(tmp_path: Path) -> None:
    channel = ChildChannel(tmp_path, wakeup_fifo=None, placed_at_s=0.0)
    channel.send(Phase(name="load"))
    channel.send(Progress(step=1, total_steps=2, epoch=0.5))
    channel.send(Phase(name="train", step=3))
    with (tmp_path / MESSAGES_FILE).open("ab") as file:
        file.write(b'{"type":"phase","na')  # as a full disk leaves it
    first, second = read_phases(tmp_path)
    assert (first.name, second.name, second.step) == ("load", "train", 3)
    assert first.after_ms is not None and second.after_ms is not None and 0 < first.after_ms <= second.after_ms
    assert read_phases(tmp_path / "nowhere") == []
