"""The table of jobs, and the files of a child: every name in them is that of a job's row."""

import json

import pytest
from pydantic import ValidationError

import runtime_jobs
from dryfit.settings.check_messages import BatchCheckRequest, ProbeRequest
from dryfit.settings.errors import ChildFault
from dryfit.settings.jobs import JOBS, ChildRequest, ChildResult, training_of
from dryfit.settings.plan_messages import CalibrateRequest
from dryfit.settings.tables import ObjectiveSettings
from dryfit.settings.training_messages import (
    ExportRequest,
    FinalRequest,
    FinalResult,
    ImportRequest,
    ImportResult,
    MergeRequest,
    RowsRequest,
    StopReason,
    TrainResult,
)
from dryfit.settings.wire import ErrorParts, Job, ProcessNeeds, Wire

NAMES = (
    "resolve baselines train check plan calibrate probe pace batch_check imported script_arguments final "
    "predict merge exported tiny_lm rows fault error"
).split()
TRAINED = TrainResult(value=0.5, also=(0.25,), best=None, steps=7, stopped_by=StopReason.SIGTERM, peak_rss_bytes=5)
IN_FILE = {
    "v": 1,
    "value": 0.5,
    "also": [0.25],
    "best": None,
    "steps": 7,
    "folds": [],
    "stopped_by": "sigterm",
    "peak_allocated_bytes": None,
    "peak_reserved_bytes": None,
    "peak_rss_bytes": 5,
}


def in_file(**parts: object) -> str:
    """A ``result.json`` as it has always been written: one key for each type of answer, null for all but one."""
    return json.dumps({"v": 1} | dict.fromkeys(NAMES) | parts)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (in_file(train=IN_FILE), ChildResult(TRAINED)),
        (
            in_file(imported={"v": 1, "source_file": "", "source_hash": "ab", "versions": {"python": "3.11"}}),
            ChildResult(ImportResult(source_hash="ab", versions={"python": "3.11"})),
        ),
        (
            in_file(
                final={
                    "v": 1,
                    "training": IN_FILE,
                    "step": 3,
                    "validation": None,
                    "test": {"loss": float("inf")},
                    "rows": {"train": 2},
                    "model_dir": "m",
                    "analysis": None,
                }
            ),
            ChildResult(
                FinalResult(
                    training=TRAINED,
                    step=3,
                    validation=None,
                    test={"loss": float("inf")},
                    rows={"train": 2},
                    model_dir="m",
                )
            ),
        ),
        (
            in_file(
                fault={"type_names": ["a.B"], "code": "DATA", "message": "m", "traceback": "", "context": ""},
                error={"v": 1, "code": "DATA", "doing": "d", "found": "f", "allowed": "", "hint": ""},
            ),
            ChildResult(fault=ChildFault(("a.B",), "DATA", "m"), error=ErrorParts(code="DATA", doing="d", found="f")),
        ),
    ],
)
def test_a_result_is_written_and_read_as_in_older_versions(text: str, result: ChildResult) -> None:
    assert ChildResult.from_json(text.encode()) == result
    assert json.loads(result.to_json()) == json.loads(text)


@pytest.mark.parametrize("text", ['{"v": 2}', in_file(newer={}), in_file(train={"v": 1}), "", "[]"])
def test_what_this_version_does_not_understand_is_no_result(text: str) -> None:
    with pytest.raises(ValidationError):
        ChildResult.from_json(text.encode())


def test_only_training_says_how_training_ended() -> None:
    assert training_of(ChildResult(TRAINED)) == TRAINED
    assert training_of(None) is training_of(ChildResult()) is None
    assert training_of(ChildResult(ImportResult(source_hash="", versions={}))) is None


def test_every_job_has_its_row_and_a_name_in_files_has_one_type() -> None:
    assert set(JOBS) == set(Job)
    types: dict[str, set[type[Wire]]] = {}
    for job, row in JOBS.items():
        assert row.request.model_fields["job"].default is job
        for name, result in row.results.items():
            types.setdefault(name, set()).add(result)
    assert sorted(types) == sorted(NAMES[:-2])
    assert all(len(some) == 1 for some in types.values())


def test_a_request_is_read_back_as_that_of_its_job() -> None:
    for body in (
        MergeRequest(model_dir="m", out="o", threads=2),
        ExportRequest(model_dir="m", out="o", threads=2),
        RowsRequest(source="hub:x", columns=("a", "b"), out="o"),
    ):
        request = ChildRequest(placed_at_s=1.0, wakeup_fifo=None, body=body)
        text = request.model_dump_json()
        assert json.loads(text)["body"] == json.loads(body.model_dump_json())
        assert ChildRequest.model_validate_json(text) == request
    with pytest.raises(ValidationError, match="no-such-job"):
        ChildRequest.model_validate_json(text.replace('"rows"', '"no-such-job"'))


def test_what_jobs_need_of_their_process() -> None:
    training = runtime_jobs.request("noop").model_copy(update={"visible_device": "GPU-a", "diagnostic": True})
    own = ProcessNeeds(hides_devices=True, visible_device="GPU-a", diagnostic=True)
    final = FinalRequest(training=training, model_dir=None, attempt_model_dir="a", study="s")
    objective = ObjectiveSettings(function="m:f")
    assert training.process_needs() == final.process_needs() == own
    assert BatchCheckRequest(trial=training, lengths=(8,)).process_needs() == ProcessNeeds(
        hides_devices=True, visible_device="GPU-a"
    )
    assert CalibrateRequest(case=None, folder="f").process_needs() == ProcessNeeds(hides_devices=True)
    assert ImportRequest(objective=objective).process_needs() == ProcessNeeds(hides_devices=True, of_the_user=True)
    assert ProbeRequest().process_needs() == ProcessNeeds(), "it looks at every device"
