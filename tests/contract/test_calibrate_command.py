"""``dryfit calibrate``: without a GPU it says so; the way from measurements to a kept calibration, with a stand-in."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import calibrate_stand_in
import tiny
from dryfit.documents.document import json_text
from dryfit.documents.plans import calibration_lines, calibration_table
from dryfit.gpu.constants import device_constants, read_calibrations
from dryfit.processes.node import named_gpu
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ChildError, ConfigError, MachineError
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.jobs import JOBS
from dryfit.settings.memory_terms import Confidence
from dryfit.settings.plan_messages import CalibrateRequest, MemoryCase
from dryfit.settings.tables import TrialSettings
from dryfit.settings.wire import Job
from dryfit.study import planning as calibrating
from dryfit.study.child_jobs import run_alone
from dryfit.study.planning import measure_and_compare
from study_runs import run_here

SUPPORT = Path(calibrate_stand_in.__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRYFIT_CACHE", str(tmp_path / "cache"))
    done = run_here("calibrate", "--quick")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "finds no CUDA device    [MACHINE]" in done.stderr
    assert "next: plans need no calibration" in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["cpu", "cuda:", "cuda:x", "0"])
def test_only_cuda_devices_have_names_here(name: str) -> None:
    with pytest.raises(ConfigError, match="cuda:0"):
        named_gpu(name, None)


def test_a_device_is_one_of_those_this_process_may_use() -> None:
    assert [named_gpu("cuda", None), named_gpu("cuda:2", None)] == ["0", "2"]
    assert named_gpu("cuda:1", "5, GPU-ab") == "GPU-ab"
    for variable in ("5", ""):
        with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES"):
            named_gpu("cuda:1", variable)


def case(folder: Path, name: str) -> MemoryCase:
    tables = {"model": {"name": str(tiny.model(folder, "bert"))}, "train": {"batch_size": 4, "max_length": 24}}
    subject = PlanSubject(task=BuiltInTask.CRITERIA, settings=TrialSettings.model_validate_json(json.dumps(tables)))
    return MemoryCase(
        name=name, family="encoder", subject=subject, execution=ExecutionChoice(micro_batch=4, accumulation=1)
    )


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOBS, Job.CALIBRATE, JOBS[Job.CALIBRATE]._replace(entry="calibrate_stand_in:calibrate"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *(path for path in sys.path if path)]))
    found = (case(tmp_path / "model", "tiny"),)
    monkeypatch.setattr(calibrating, "calibration_cases", lambda folder, quick: found)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_device_that_does_as_planned_has_no_error(tmp_path: Path) -> None:
    notes: list[str] = []
    result = measure_and_compare("0", tmp_path / "kept", notes.append)
    (one,) = result.comparisons
    assert (one.allocated_error, one.reserved_error) == (0, 0)
    (kept,) = read_calibrations(tmp_path / "kept")
    assert kept == result.calibration
    known = device_constants(calibrate_stand_in.DEVICE, torch.__version__, (kept,))
    assert known.confidence is Confidence.CALIBRATED
    assert known.overhead_bytes == calibrate_stand_in.CONTEXT_BYTES
    assert notes == ["measuring tiny", "planning the same 1 cases without the device"]
    assert calibration_table(result.comparisons).rows[0][3::3] == ("+0.00%", "+0.00%")
    assert "Stand-In 4000" in calibration_lines(result)[0]
    said = json.loads(json_text(result))
    assert (said["schema"], said["calibration"]["runs"]) == (1, 1)


def test_a_case_that_cannot_be_run_is_told_and_no_comparison_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(doing: str, body: CalibrateRequest) -> None:
        raise ChildError(doing, "out of memory")

    monkeypatch.setattr(calibrating, "run_alone", dies)
    notes: list[str] = []
    with pytest.raises(ChildError, match="out of memory"):
        measure_and_compare("0", tmp_path / "kept", notes.append, quick=True)
    assert sum("out of memory" in note for note in notes) == 3
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_nothing_measured_is_nothing_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was measured"):
        run_alone("comparing", CalibrateRequest(case=None, folder=str(tmp_path), calibration_dir=str(tmp_path)))
