"""The longest silence that is no hang: learned from a process's own signs of life, phase by phase."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.attempt import FACTOR, LEAST_GAPS, LEAST_S, Attempt, SilenceLimits, silence_limit_s
from dryfit.processes.child_spec import ChildLimits, ChildSpec
from dryfit.settings.errors import FailureKind, PastFailure
from dryfit.settings.study_file import RuntimeSettings
from dryfit.settings.wire import Phase, Progress, Started
from dryfit.study.requests import training_limits
from runtime_jobs import request

seconds = st.floats(0.0, 1e5)


@given(most_s=st.floats(0.1, 1e5), longest_s=seconds, gaps=st.integers(0, 1000))
def test_it_is_never_longer_than_what_was_set_and_never_shorter_than_what_was_seen(most_s, longest_s, gaps):
    limit_s = silence_limit_s(most_s, longest_s, gaps)
    assert limit_s <= most_s
    assert limit_s >= min(most_s, LEAST_S)
    assert limit_s >= min(most_s, longest_s)


@given(st.lists(st.tuples(st.sampled_from(["load", "train", "evaluate", "save"]), seconds)))
def test_what_one_phase_shows_says_nothing_of_another(gaps):
    patience = SilenceLimits()
    for phase, gap_s in gaps:
        patience.note(phase, gap_s)
    for phase in ("load", "train", "evaluate", "save"):
        own = [gap_s for name, gap_s in gaps if name == phase]
        assert patience.limit_s(phase, 600.0) == silence_limit_s(600.0, max(own, default=0.0), len(own))


@pytest.mark.parametrize(
    ("longest_s", "gaps", "limit_s"),
    [
        (0.5, LEAST_GAPS - 1, 600.0),
        (0.5, LEAST_GAPS, LEAST_S),
        (10.0, LEAST_GAPS, FACTOR * 10.0),
        (100.0, LEAST_GAPS, 600.0),
    ],
)
def test_the_formula(longest_s, gaps, limit_s):
    assert silence_limit_s(600.0, longest_s, gaps) == limit_s


class Child:
    """An attempt on a clock of the test's, whose child says what it is told to."""

    def __init__(self, folder, *, learned=True):
        limits = ChildLimits(start_s=60.0, hang_s=600.0, total_s=None, stop_grace_s=60.0, hang_learned=learned)
        self.attempt = Attempt(ChildSpec("a", folder, request("noop"), limits), token="0", begun_s=0.0)
        self.folder = folder
        self.now_s = 0.0
        self.say(Started(pid=1, overhead_ms=1.0))

    def say(self, message):
        with (self.folder / "messages.jsonl").open("a") as file:
            file.write(message.model_dump_json() + "\n")
        self.attempt.look(self.now_s)

    def beat(self, after_s):
        self.now_s += after_s
        os.utime(self.folder / "beat", ns=(int(self.now_s * 1e9), int(self.now_s * 1e9)))
        self.attempt.look(self.now_s)

    def overdue_after(self, silence_s):
        return self.attempt.overdue(self.now_s + silence_s)


@pytest.fixture
def child(tmp_path):
    (tmp_path / "beat").touch()
    return Child(tmp_path)


def test_a_slow_first_step_has_all_the_time_there_is(child):
    child.say(Phase(name="train"))
    assert child.overdue_after(599.0) == ""
    child.beat(590.0)  # the first step compiles
    for _ in range(LEAST_GAPS):
        child.beat(1.0)
    assert child.overdue_after(599.0) == "", "what took so long once may do so again"


def test_steps_of_a_second_make_two_minutes_of_silence_a_hang(child):
    child.say(Phase(name="load"))
    child.beat(300.0)
    child.say(Phase(name="train"))
    for _ in range(LEAST_GAPS + 1):
        child.beat(1.0)
    assert [child.overdue_after(silence_s) for silence_s in (LEAST_S, LEAST_S + 0.1)] == ["", "hang"]
    child.say(Phase(name="save", step=11))
    assert child.overdue_after(599.0) == "", "writing has its own pace"
    child.say(Phase(name="train", step=11))
    assert child.overdue_after(LEAST_S + 0.1) == "hang"


def test_the_evidence_says_what_it_did_last(child):
    child.say(Phase(name="train", step=3))
    child.say(Progress(step=7, total_steps=10, epoch=0.5))
    evidence = child.attempt.evidence(child.now_s, None, status=None, server_lost=False)
    assert (evidence.phase, evidence.step) == ("train", 7)


def test_where_nothing_is_to_be_learned_only_the_setting_counts(tmp_path):
    (tmp_path / "beat").touch()
    child = Child(tmp_path, learned=False)
    for _ in range(LEAST_GAPS + 1):
        child.beat(1.0)
    assert [child.overdue_after(silence_s) for silence_s in (600.0, 600.1)] == ["", "hang"]


def test_a_trial_that_was_taken_to_hang_gets_all_the_time_from_then_on():
    runtime = RuntimeSettings()
    hung = PastFailure(FailureKind.HANG, reached_checkpoint=True)
    other = PastFailure(FailureKind.KILLED, reached_checkpoint=False)
    assert training_limits(runtime).hang_learned
    assert training_limits(runtime, (other,)).hang_learned
    assert not training_limits(runtime, (hung, other)).hang_learned
