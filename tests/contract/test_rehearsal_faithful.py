"""Two routes to one step's memory: a program that runs it on a virtual GPU, and the plan of it."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from dryfit.settings.plan_messages import PartPeak
from rehearsed import rehearse
from step_cases import CASES, case_of, planned

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[1] / "support"


@pytest.mark.every(3)
@pytest.mark.parametrize("name", list(CASES)[1::2])
def test_a_program_and_a_plan_of_one_step_agree(tmp_path: Path, name: str) -> None:
    """Of the cases between them a real Trainer is held against the plan each day: test_trainer_against_plan.py."""
    case = tmp_path / "case.json"
    case.write_text(case_of(tmp_path / "model", CASES[name]).model_dump_json(), encoding="utf-8")
    plan = planned(tmp_path, case)
    written = tmp_path / "kept" / "peaks.json"
    written.parent.mkdir()
    kept = {
        "surroundings": {"NLTK_DATA": str(written.parent)},
        "keep_caches": True,
    }  # a script writes nothing elsewhere
    answer = rehearse(tmp_path, str(HERE / "observed_case.py"), case, written, steps=100, **kept)
    assert not answer.traceback, answer.traceback
    peaks = TypeAdapter(list[PartPeak]).validate_json(written.read_bytes())
    allocated = max(peak.allocated_bytes for peak in peaks)
    reserved = max(peak.reserved_bytes for peak in peaks)
    assert answer.memory is not None and answer.memory.peak_allocated_bytes == allocated
    assert abs(allocated / plan.peak_allocated_bytes - 1) <= 0.001, (allocated, plan.peak_allocated_bytes)
    difference = abs(reserved - plan.peak_reserved_bytes)  # in segments of 2 MiB or more
    assert difference <= max(0.001 * reserved, 2 << 20), (reserved, plan.peak_reserved_bytes)
