"""Every job's function takes the request and returns the result that its row says; another result is refused."""

import importlib
import inspect
from typing import get_args

import pytest

import plan_jobs
from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import CheckRequest
from dryfit.settings.errors import InternalError
from dryfit.settings.jobs import JOBS
from dryfit.settings.wire import Job
from dryfit.study.child_jobs import run_alone


@pytest.mark.heavy
@pytest.mark.parametrize("job", Job)
def test_the_function_of_a_job_is_what_its_row_says(job: Job) -> None:
    row = JOBS[job]
    module, _, name = row.entry.partition(":")
    body, channel, returned = inspect.get_annotations(
        getattr(importlib.import_module(module), name), eval_str=True
    ).values()
    assert (body, channel) == (row.request, ChildChannel)
    assert set(get_args(returned) or (returned,)) == set(row.results.values())


def test_a_function_that_returns_the_result_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_jobs.use_stand_ins(monkeypatch)
    monkeypatch.setitem(JOBS, Job.CHECK, JOBS[Job.CHECK]._replace(entry="plan_jobs:resolve"))
    with pytest.raises(InternalError, match="(?s)doing the job check: its answer is ResolveResult.*CheckResult"):
        run_alone("looking", CheckRequest(folder="f", task=None, trust=False))
