"""A rehearsal by an interpreter that was started from nothing, as the command line does it."""

from pathlib import Path
from typing import Any

import pytest

import dryfit
import warm
from dryfit.settings.rehearsal_messages import RehearsalAnswer
from rehearsed import PROGRAMS, rehearse
from rehearsed_memory import memory_of

pytestmark = pytest.mark.slow
OF_THE_PROCESS = {"rehearsal_s", "host_peak_bytes"}
"""What an answer says of its process, and not of the script.

In which order tensors are freed, addresses decide; a log has as many digits as its seconds.
"""


def facts_of(answer: RehearsalAnswer) -> dict[str, Any]:
    assert answer.memory is not None, (answer.end, answer.reasons, answer.traceback)
    places = [(point.step, point.phase, point.line) for point in answer.memory.timeline]
    facts = answer.model_dump(mode="json", exclude=OF_THE_PROCESS)
    del facts["memory"]["timeline"], facts["run"]["batches_per_s"]
    for one in facts["muted"]:
        del one["bytes"]
    return {**facts, "places": places}


def test_it_answers_as_one_that_was_forked_from_a_warm_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None
) -> None:
    monkeypatch.chdir(tmp_path)
    program, arguments = "glue_trainer.py", ("--output_dir", str(tmp_path / "out"), "--precision", "fp16")
    started = dryfit.rehearse(PROGRAMS / program, device="24GiB", arguments=list(arguments))
    monkeypatch.delenv(warm.COLD_VARIABLE)
    forked = rehearse(tmp_path, program, *arguments, device=started.device)
    assert facts_of(started) == facts_of(forked)
    assert [step.number for step in memory_of(forked).steps] == [1, 2, 3]
