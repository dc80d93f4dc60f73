"""One Trainer has one peak, whoever asks: `dryfit plan`, `dryfit doctor`, a study's own planning, `dryfit rehearse`."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import dryfit
import plan_jobs
import tiny
from dryfit.ledger.folder import StudyLayout
from dryfit.plans.timeline import BLOCK_BYTES
from dryfit.search.space import apply_params
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.plan_messages import MemoryCase, PartPeak, PlanAnswer, PlanRequest, StudyTokens
from dryfit.settings.tables import TrialSettings
from dryfit.settings.wire import Job
from dryfit.study import doctor
from dryfit.study.child_jobs import run_alone
from dryfit.study.planning import plan_input
from dryfit.study.requests import plan_subject
from rehearsed import rehearse
from study_runs import fold

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

SUPPORT = Path(plan_jobs.__file__).parent
ROWS, TOKENS = 8, 48
STUDY = f"""
[study]
trials = 1
[data]
train = "data/train.jsonl"
validation = "data/validation.jsonl"
[model]
name = "model"
[train]
epochs = 1
batch_size = {ROWS}
max_length = {TOKENS}
precision = "bf16"
[space]
"optim.lr" = [0.001]
[search]
mirror = "none"
sampler = "random"
"""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has a GPU, by what everybody says of it; its trials are stand-ins."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("dryfit.processes.node.gpu_count", lambda _: 1)
    plan_jobs.use_stand_ins(monkeypatch, Job.PROBE, Job.TRAIN)


def of_doctor(file: Path, monkeypatch: pytest.MonkeyPatch) -> PlanAnswer:
    """The plan that the doctor makes of a study's own values."""
    answers: list[PlanAnswer] = []
    plan = doctor.plan_trial

    def listening(*args: Any, **options: Any) -> PlanAnswer:
        answers.append(plan(*args, **options))
        return answers[-1]

    monkeypatch.setattr(doctor, "plan_trial", listening)
    dryfit.doctor(file, machine=False)
    return answers[0]


def of_a_trial(file: Path) -> PlanAnswer:
    """The plan that a study makes of a trial: by the tokens that it has prepared."""
    asked = plan_input(file, device="1GiB", overrides=(), preset=None)
    resolved = fold(file.parent).resolved
    tokens = StudyTokens(
        data=asked.config.data,
        cache_dir=str(StudyLayout(file.parent).cache),
        data_fingerprint=resolved.data_fingerprint,
    )
    (trial,) = fold(file.parent).trials
    request = PlanRequest(
        subjects=(plan_subject(asked.config, apply_params(asked.config.trial_settings, trial.params)),),
        device=asked.device,
        execution=asked.config.execution,
        tokens=tokens,
        trace_dir=str(file.parent / "traces"),
    )
    (answer,) = run_alone("planning a trial", request).answers
    return answer


def of_rehearsal(folder: Path, tokens: int) -> int:
    """The peak of a script that makes the same steps."""
    tables = {
        "model": {"name": str(folder / "study" / "model")},
        "train": {"batch_size": ROWS, "max_length": tokens, "precision": "bf16"},
    }
    subject = PlanSubject(
        task=BuiltInTask.CRITERIA, settings=TrialSettings.model_validate_json(json.dumps(tables)), num_labels=3
    )
    choice = ExecutionChoice(micro_batch=ROWS, accumulation=1)
    case = folder / "case.json"
    made = MemoryCase(name="case", family="encoder", subject=subject, execution=choice)
    case.write_text(made.model_dump_json(), encoding="utf-8")
    written = folder / "kept" / "peaks.json"
    written.parent.mkdir()
    kept: dict[str, Any] = {"surroundings": {"NLTK_DATA": str(written.parent)}, "keep_caches": True}
    answer = rehearse(folder, str(SUPPORT / "observed_case.py"), case, written, steps=100, **kept)
    assert answer.memory is not None and not answer.traceback, answer.traceback
    peaks = TypeAdapter(list[PartPeak]).validate_json(written.read_bytes())
    assert answer.memory.peak_allocated_bytes == max(peak.allocated_bytes for peak in peaks)
    return answer.memory.peak_allocated_bytes


def test_the_peak_is_the_same_to_the_byte(tmp_path: Path, card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    tiny.model(folder / "model")
    tiny.data(folder / "data", train=64, validation=32, seed=3)
    file = folder / "study.toml"
    file.write_text(STUDY, encoding="utf-8")
    told = {"doctor": of_doctor(file, monkeypatch), "plan": dryfit.plan(file, device="1GiB")}
    dryfit.tune(file)
    told["tune"] = of_a_trial(file)
    memories = {name: answer.memory for name, answer in told.items()}
    peaks = {name: memory.peak_allocated_bytes for name, memory in memories.items() if memory is not None}
    assert peaks.keys() == told.keys(), told
    longest = {memory.worst_batch.length for memory in memories.values() if memory is not None}
    # Between two steps a process keeps one number more: the loss of the last.
    peaks["rehearse"] = of_rehearsal(tmp_path, *longest) - BLOCK_BYTES
    assert len(set(peaks.values())) == 1, peaks
