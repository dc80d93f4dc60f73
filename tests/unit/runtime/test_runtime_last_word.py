"""What a child says last: the first error, whatever goes wrong while it is told."""

import json
import sys

import pytest

from dryfit.processes import child
from dryfit.processes.child import ChildStatus, describe_fault
from dryfit.processes.child_spec import ChildSpec, leave_secrets
from dryfit.processes.failures import classify
from dryfit.settings.errors import DataError, FailureKind
from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import FinalRequest
from dryfit.settings.wire import Note
from runtime_jobs import GENEROUS, Harness, request


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    isolation = Isolation.FORKSERVER if sys.platform == "linux" else Isolation.FRESH
    with Harness(tmp_path_factory.mktemp("harness"), isolation=isolation) as opened:
        yield opened


def test_an_exception_that_cannot_say_what_it_is_is_told_by_its_class(harness):
    harness.start("wordless", "wordless")
    event = harness.until_exit("wordless")
    assert event.evidence.exit_code == ChildStatus.FAULT
    assert event.evidence.fault is not None
    assert event.evidence.fault.type_names[0].endswith("WordlessError")
    assert event.evidence.fault.message == "(its message could not be made: RuntimeError)"
    assert classify(event.evidence, event.result).kind is FailureKind.USER_CODE


def test_a_message_that_is_no_text_crosses_all_the_same(harness):
    harness.start("no text", "no text")
    event = harness.until_exit("no text")
    assert classify(event.evidence, event.result).kind is FailureKind.DATA
    assert event.result is not None and event.result.error is not None
    assert event.result.error.doing == "reading posts-\\udcff.jsonl"


def test_an_error_while_cleaning_up_does_not_hide_the_first(harness):
    """Python chains them; both cross, and the first is told where the second began."""
    harness.start("clean-up", "clean-up")
    fault = harness.until_exit("clean-up").evidence.fault
    assert fault is not None
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
        monkeypatch.setattr(child.os, "environ", environment)
        leave_secrets(body, {**environment, "HF_TOKEN": "hf_planted"})
        kept = {"HOME": "/root"} | ({"HF_TOKEN": "hf_planted"} if source.startswith("hub:") else {})
        assert environment == kept
