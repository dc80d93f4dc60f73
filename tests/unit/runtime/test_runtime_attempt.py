"""Limits of one child on the supervisor's own clock, and what the control plane imports."""

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes import child as child_process
from dryfit.processes.attempt import FACTOR, LEAST_GAPS, LEAST_S, Attempt, SilenceLimits, silence_limit_s
from dryfit.processes.child import ChildStatus, describe_fault
from dryfit.processes.child_spec import ChildLimits, ChildSpec, leave_secrets
from dryfit.processes.failures import classify
from dryfit.settings.errors import DataError, FailureKind, PastFailure
from dryfit.settings.study_file import Isolation, RuntimeSettings
from dryfit.settings.training_messages import FinalRequest
from dryfit.settings.wire import Note, Phase, Progress, Started
from dryfit.study.requests import training_limits
from runtime_jobs import GENEROUS, Harness, request


@pytest.fixture
def attempt(tmp_path):
    limits = ChildLimits(start_s=10.0, hang_s=20.0, total_s=100.0, stop_grace_s=5.0)
    return Attempt(ChildSpec("a", tmp_path, request("noop"), limits), token="0", begun_s=0.0)


def say_started(attempt):
    line = Started(pid=1, overhead_ms=1.0).model_dump_json()
    (attempt.spec.folder / "messages.jsonl").write_text(f"{line}\n")


def test_without_a_first_line_only_the_start_limit_holds(attempt):
    assert [attempt.overdue(now_s) for now_s in (10.0, 10.1)] == ["", "start"]


def test_silence_is_counted_from_the_last_change_whatever_the_wall_clock_says(attempt):
    beat = attempt.spec.folder / "beat"
    beat.touch()
    say_started(attempt)
    assert len(attempt.look(1.0)) == 1 and attempt.look(1.0) == []
    assert attempt.overdue(21.0) == "" and attempt.overdue(21.1) == "hang"
    for wall_clock_ns in (1, 2**62):  # a jump far back, then far forward
        os.utime(beat, ns=(wall_clock_ns, wall_clock_ns))
        attempt.look(21.0)
        assert attempt.overdue(41.0) == ""
    attempt.look(41.0)
    assert attempt.overdue(41.1) == "hang"


def test_the_total_counts_from_the_first_line(attempt):
    say_started(attempt)
    attempt.look(8.0)
    attempt.alive_s = 108.0
    assert [attempt.overdue(now_s) for now_s in (108.0, 108.1)] == ["", "timeout"]


def test_the_grace_counts_from_the_request_and_one_kill_is_enough(attempt):
    attempt.stop_asked_s = 2.0
    assert [attempt.overdue(now_s) for now_s in (7.0, 7.1)] == ["", "now"]
    attempt.killed_by_us = "now"
    assert attempt.overdue(1000.0) == ""


# ---- The longest silence that is no hang: learned from a process's own signs of life, phase by phase


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


# ---- What a child says last: the first error, whatever goes wrong while it is told


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    isolation = Isolation.FORKSERVER if sys.platform == "linux" else Isolation.FRESH
    with Harness(tmp_path_factory.mktemp("harness"), isolation=isolation) as opened:
        yield opened


def test_an_exception_that_cannot_say_what_it_is_is_told_by_its_class(harness):
    harness.start("wordless", "wordless")
    event = harness.until_exit("wordless")
    assert event.evidence.exit_code == ChildStatus.FAULT
    assert event.evidence.fault.type_names[0].endswith("WordlessError")
    assert event.evidence.fault.message == "(its message could not be made: RuntimeError)"
    assert classify(event.evidence, event.result).kind is FailureKind.USER_CODE


def test_a_message_that_is_no_text_crosses_all_the_same(harness):
    harness.start("no text", "no text")
    event = harness.until_exit("no text")
    assert classify(event.evidence, event.result).kind is FailureKind.DATA
    assert event.result.error.doing == "reading posts-\\udcff.jsonl"


def test_an_error_while_cleaning_up_does_not_hide_the_first(harness):
    """Python chains them; both cross, and the first is told where the second began."""
    harness.start("clean-up", "clean-up")
    fault = harness.until_exit("clean-up").evidence.fault
    assert {"builtins.OSError", "builtins.KeyError"} <= set(fault.type_names)
    assert fault.traceback.index("the first error") < fault.traceback.index("the clean-up's own")


def test_notes_of_the_whole_chain_are_the_context_each_once():
    inner, outer = KeyError("inner"), DataError("doing", "found")
    inner.add_note("at step 3")
    outer.add_note("at step 3")
    outer.add_note("rows r1, r2")
    outer.__cause__ = inner
    assert describe_fault(outer).context == "at step 3\nrows r1, r2"
    assert describe_fault(ValueError()).context == ""


@pytest.mark.parametrize("diagnostic", [False, True])
def test_a_diagnostic_attempt_waits_for_every_kernel_and_no_other_does(harness, diagnostic):
    body = request("variables").model_copy(update={"diagnostic": diagnostic})
    key = f"diagnostic-{diagnostic}"
    harness.supervisor.start(ChildSpec(key, harness.folder / key, body, GENEROUS))
    harness.until_exit(key)
    (note,) = [e.message for e in harness.events if e.key == key and isinstance(getattr(e, "message", None), Note)]
    variables = json.loads(note.text)
    assert (variables.get("CUDA_LAUNCH_BLOCKING") == "1") is diagnostic
    assert (variables.get("PYTORCH_USE_CUDA_DSA") == "1") is diagnostic


@pytest.mark.parametrize("source", ["/data/posts.jsonl", "hub:owner/name"])
def test_a_final_training_keeps_no_secret_that_its_trial_would_not(monkeypatch, source):
    trial = request("noop")
    data = trial.config.data.model_copy(update={"test": source})
    settings = trial.config.settings
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"name": "minilm"})})
    training = trial.model_copy(update={"config": trial.config.model_copy(update={"data": data, "settings": settings})})
    for body in (training, FinalRequest(training=training, model_dir=None, attempt_model_dir="model", study="s")):
        environment = {"HF_TOKEN": "hf_planted", "WANDB_API_KEY": "planted", "HOME": "/root"}
        monkeypatch.setattr(child_process.os, "environ", environment)
        leave_secrets(body, {**environment, "HF_TOKEN": "hf_planted"})
        kept = {"HOME": "/root"} | ({"HF_TOKEN": "hf_planted"} if source.startswith("hub:") else {})
        assert environment == kept
