"""Trainers of the user's own on a made-up GPU: planned by rehearsal, run with fallbacks, refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dryfit
import hf_script
import plan_jobs
import trainers
from dryfit.documents.story import story_lines, trial_story
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.state import TrialState
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import Action, ConfigError, FailureKind, ObjectiveError
from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.ladder import arguments_of
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.plan_messages import NO_TORCH, PlanAnswer, RehearsedPlanRequest
from dryfit.settings.rehearsal_messages import FAILED_BY_ITSELF
from dryfit.settings.tables import CalledCode, ObjectiveSettings
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import Job
from dryfit.study.machine_checks import Status
from dryfit.study.requests import calling_request
from dryfit.training.current_trial import Trial
from dryfit.training.own_trainer import make_trainer
from dryfit.training.rehearsed_plan import plan
from study_runs import events_of, fold, run_here

pytestmark = [pytest.mark.heavy]

SUPPORT = str(Path(trainers.__file__).parent)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a GPU, by what everybody says of it; what is trained stays on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("dryfit.processes.node.gpu_count", lambda _: 1)
    plan_jobs.use_stand_ins(monkeypatch, Job.PROBE, Job.REHEARSE)


def tune(folder: Path, make: Any, dropout: list[float]) -> list[TrialState]:
    result = dryfit.tune(
        trainer=make,
        folder=folder,
        trials=1,
        space={"rate": [0.001], "dropout": dropout},
        metric="eval_loss",
        search={"sampler": "random", "mirror": "none", "enqueue": [{"rate": 0.001, "dropout": dropout[0]}]},
        runtime={"max_refused_in_a_row": 1},
    )
    assert result is not None
    return fold(folder).trials


def story(folder: Path, number: int = 0) -> str:
    return "\n".join(story_lines(trial_story(fold(folder), number, events_of(folder), StudyLayout(folder))))


def assert_went_on(trial: TrialState) -> None:
    """It ran out of memory as planned, and was done with the next fallback."""
    assert trial.outcome is Outcome.COMPLETE, trial
    first, second = trial.attempts
    assert first.failure is not None and second.failure is None
    assert (first.failure.kind, first.failure.action) == (FailureKind.OOM_DEVICE, Action.FALLBACK)
    assert first.needs_bytes == plan_jobs.needs(1, 512)
    assert [point.step for point in trial.reports][-1] == trainers.STEPS


@pytest.mark.slow
def test_a_trial_is_run_with_its_plan_and_goes_on_with_the_next_fallback_after_it_ran_out(
    tmp_path: Path, card: None
) -> None:
    (trial,) = tune(tmp_path / "study", trainers.runs_out, [0.1])
    assert_went_on(trial)
    told = story(tmp_path / "study")
    assert "plan: fits_with, needs 512 MiB of 1.0 GiB" in told
    assert "run with micro-batch 2 x 4, checkpointing, the 1. fallback of its plan" in told


def request(name: str, capacity_bytes: int, **params: Any) -> RehearsedPlanRequest:
    own = ObjectiveSettings(function=f"trainers:{name}", paths=(SUPPORT,))
    given = {"rate": 0.001, "dropout": 0.1, **params}
    device = plan_jobs.CARD.model_copy(update={"capacity_bytes": capacity_bytes})
    return RehearsedPlanRequest(
        calling=calling_request(own, params=given, seed=1), device=device, calibration_dir="nowhere"
    )


@pytest.mark.slow
def test_a_real_rehearsal_plans_a_trial_and_leaves_no_file(tmp_path: Path) -> None:
    """With room for all, and then with a little less than that: the rehearsal itself touches no folder."""
    channel = ChildChannel(tmp_path, wakeup_fifo=None, placed_at_s=0.0)
    before = {path.name for path in tmp_path.iterdir()}
    (answer,) = plan(request("on_gpu", 2**34), channel).answers
    assert answer.verdict is VerdictKind.FITS, answer.reasons
    assert answer.execution == ExecutionChoice(micro_batch=trainers.BATCH, accumulation=1)
    assert answer.memory is not None
    assert answer.memory.worst_batch.rows == trainers.BATCH
    (tight,) = plan(request("on_gpu", answer.memory.required_bytes - 2**23), channel).answers
    assert tight.verdict is VerdictKind.FITS_WITH, tight.reasons
    assert tight.execution is not None and tight.memory is not None
    assert tight.execution.micro_batch * tight.execution.accumulation == trainers.BATCH
    assert tight.memory.required_bytes < answer.memory.required_bytes
    after = {path.name for path in tmp_path.iterdir()} - {"messages.jsonl"}
    assert after <= before


@pytest.mark.slow
def test_why_a_trial_cannot_be_rehearsed_is_said(tmp_path: Path) -> None:
    channel = ChildChannel(tmp_path, wakeup_fifo=None, placed_at_s=0.0)
    (answer,) = plan(request("without_evaluation", 2**34), channel).answers
    assert (answer.verdict, answer.memory) == (VerdictKind.UNKNOWN, None)
    assert "it never evaluates: eval_strategy is 'no'" in "; ".join(answer.reasons)


@pytest.mark.slow
def test_the_doctor_rehearses_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"""
[study]
task = "trainer"
metric = "eval_loss"
[trainer]
make = "trainers:make"
paths = [{SUPPORT!r}]
[space]
rate = [0.001]
dropout = [0.3]
"""
    plan_jobs.use_stand_ins(monkeypatch, Job.REHEARSE)
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    for dropout, status, said in (
        ("0.3", Status.WARN, "rate = 0.001, dropout = 0.3: needs 2.0 GiB"),
        ("0.1", Status.PASS, "rate = 0.001, dropout = 0.1: it needs 512 MiB of a GPU with micro-batch 4 x 2"),
    ):
        found = dryfit.doctor(tmp_path / "study.toml", overrides=(f"space.dropout=[{dropout}]",), machine=False)
        (finding,) = [one for one in found.findings if one.check == "training"]
        assert (finding.status, said in finding.found) == (status, True), finding


@pytest.mark.slow
def test_the_doctor_tells_the_hours_of_a_study_on_a_card_and_their_cost(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        f"""
[study]
task = "trainer"
metric = "eval_loss"
trials = 10000
[trainer]
make = "trainers:on_gpu"
paths = [{SUPPORT!r}]
[space]
rate = [0.001]
dropout = [0.1]
""",
        encoding="utf-8",
    )
    found = dryfit.doctor(file, machine=False, device="rtx4090", price="2USD")
    (finding,) = [one for one in found.findings if one.check == "training"]
    said = re.search(r"10000 trials one after the other (\S+) to (\S+) min .*, (\S+) to (\S+) USD$", finding.found)
    assert finding.status is Status.PASS and said is not None, finding
    low, high, least, most = map(float, said.groups())
    assert 0 < low < high and (least, most) == pytest.approx((2 * low / 60, 2 * high / 60), rel=0.06)
    for wrong in ({"device": "rtx40900"}, {"device": "cpu"}, {"price": "cheap"}):
        with pytest.raises(ConfigError):
            dryfit.doctor(file, machine=False, **wrong)


def made(name: str, folder: Path, choice: ExecutionChoice | None = None, **params: Any) -> tuple[Any, list[str]]:
    calling = request(name, 1, **params).calling.model_copy(update={"checkpoint_dir": str(folder)})
    channel = ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0)
    return make_trainer(calling, Trial(calling, channel), arguments_of(choice))


HALF = ExecutionChoice(micro_batch=4, accumulation=2, checkpointing=True, eval_batch=1)


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial changes its process for good; this one lives on."""
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "__post_init__", TrainingArguments.__post_init__)


def test_the_arguments_of_a_plan_reach_the_trainer(tmp_path: Path, as_it_was: None) -> None:
    trainer, notes = made("make", tmp_path, HALF)
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert args.per_device_eval_batch_size == 1
    assert args.gradient_checkpointing and not notes


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("set afterwards", "its Trainer has per_device_train_batch_size = 8"),
        ("drop last", "dataloader_drop_last=True leaves out other rows"),
        ("batch norm", "its model has batch normalization"),
        ("fsdp", "fsdp is set, and a trial is one process on one device"),
    ],
)
def test_what_would_learn_something_else_is_refused(way: str, said: str, tmp_path: Path, as_it_was: None) -> None:
    with pytest.raises(ObjectiveError, match=said):
        made("changed_by", tmp_path, None if way == "fsdp" else HALF, way=way)


def test_nothing_is_pushed_and_no_batch_is_looked_for(tmp_path: Path, as_it_was: None) -> None:
    trainer, notes = made("changed_by", tmp_path, way="pushes")
    assert not trainer.args.push_to_hub and not trainer.args.auto_find_batch_size
    assert [note.split("=")[0] for note in notes] == ["auto_find_batch_size", "push_to_hub"]


# ---- Scripts of the user's own on a made-up GPU: planned by rehearsal, run with what the plan changes, refused


HF = Path(hf_script.__file__)
COMMAND = (
    f"{HF} --learning_rate 1e-3 --dropout {{dropout}} --per_device_train_batch_size {{batch}} --num_train_epochs 2 "
    "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2 --way 'runs out' "
    "--report_to none --use_cpu --disable_tqdm True --dataloader_pin_memory False"
)


@pytest.mark.slow
def test_a_script_is_run_with_its_plan_and_goes_on_with_the_next_fallback(tmp_path: Path, card: None) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        f'[study]\ntask = "script"\ntrials = 2\n[script]\ncommand = {json.dumps(COMMAND)}\n'
        "[space]\ndropout = [0.1, 0.3]\nbatch = [8]\n"
        '[search]\nsampler = "random"\nmirror = "none"\n'
        "enqueue = [{dropout = 0.1, batch = 8}, {dropout = 0.3, batch = 8}]\n",
        encoding="utf-8",
    )
    dryfit.tune(file, overrides=["runtime.max_refused_in_a_row=1"])
    fitting, refused = fold(file.with_suffix("")).trials
    assert_went_on(fitting)
    told = run_here("show", file.with_suffix(""), "0").stdout
    assert "run with micro-batch 2 x 4, checkpointing, the 1. fallback of its plan" in told
    assert "has not reached it" not in told  # the batch was changed by the plan
    assert (refused.outcome, refused.attempts) == (Outcome.REFUSED, [])
    assert "needs 2.0 GiB, a card has 1.0 GiB" in (refused.reason or "")


SCRIPTS = {
    "plain.py": "import json, dryfit\ndryfit.report(1.0, 1)\n",
    "fails.py": "import helpers\nraise KeyError('own mistake')\n",
    "helpers.py": "",
    "loop.py": (
        "import os, sys, torch, dryfit\n"
        "assert os.environ['DRYFIT_FOLDER'] == sys.argv[1] == str(dryfit.current_trial().folder)\n"
        "model = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for step in range(10):\n"
        "    model(torch.rand(8, 1024).cuda()).sum().backward()\n"
        "    optimizer.step()\n"
        "    dryfit.report(1.0, step)\n"
        "    dryfit.checkpointed(step)\n"
    ),
}


def planned(folder: Path, command: str, capacity_bytes: int = 2**34) -> PlanAnswer:
    own = CalledCode(function=command, goals=("value",), directions=(), paths=(str(folder),))
    body = RehearsedPlanRequest(
        calling=calling_request(own, params={}, seed=1),
        is_script=True,
        device=plan_jobs.CARD.model_copy(update={"capacity_bytes": capacity_bytes}),
        calibration_dir="nowhere",
    )
    (answer,) = plan(body, ChildChannel(folder / "job", wakeup_fifo=None, placed_at_s=0.0)).answers
    return answer


@pytest.mark.slow
def test_a_loop_of_torch_is_planned_as_it_is_and_other_scripts_say_why_not(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    fits = planned(tmp_path, "loop.py {folder}")
    assert (fits.verdict, fits.fallbacks) == (VerdictKind.FITS, ()), fits.reasons
    assert fits.memory is not None and fits.execution is not None
    weights = 4 * (1024 * 1024 + 1024)
    assert 4 * weights <= fits.memory.peak_allocated_bytes  # with gradients and two moments
    assert planned(tmp_path, "plain.py").reasons == (NO_TORCH,)
    failed = planned(tmp_path, "fails.py").reasons
    assert failed[0] == FAILED_BY_ITSELF and "own mistake" in failed[1]
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {*SCRIPTS, "job"}
