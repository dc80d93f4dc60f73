"""Scripts of the user's own on a made-up GPU: planned by rehearsal, run with what the plan changes, refused."""

import json
from pathlib import Path

import pytest

import dryfit
import hf_script
import plan_jobs
import trainers
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.plan_messages import NO_TORCH, PlanAnswer, RehearsedPlanRequest
from dryfit.settings.rehearsal_messages import FAILED_BY_ITSELF
from dryfit.settings.tables import CalledCode
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import Job
from dryfit.study.requests import calling_request
from dryfit.training.rehearsed_plan import plan
from study_runs import fold, run_here

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

HF = Path(hf_script.__file__)
COMMAND = (
    f"{HF} --learning_rate 1e-3 --dropout {{dropout}} --per_device_train_batch_size {{batch}} --num_train_epochs 2 "
    "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2 --way 'runs out' "
    "--report_to none --use_cpu --disable_tqdm True --dataloader_pin_memory False"
)


def test_a_trial_is_run_with_its_plan_and_goes_on_with_the_next_fallback_after_it_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("dryfit.processes.node.gpu_count", lambda _: 1)
    plan_jobs.use_stand_ins(monkeypatch, Job.PROBE, Job.REHEARSE)
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
    assert fitting.outcome is Outcome.COMPLETE, fitting.reason
    first, second = fitting.attempts
    assert first.failure is not None and second.failure is None
    assert (first.failure.kind, first.failure.action) == (FailureKind.OOM_DEVICE, Action.FALLBACK)
    assert first.needs_bytes == plan_jobs.needs(1, 512)
    assert [point.step for point in fitting.reports][-1] == trainers.STEPS
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
