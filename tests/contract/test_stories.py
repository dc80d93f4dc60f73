"""The stories of docs/stories.md, each in a tiny size; a change that costs memory in CI: test_github_action.py."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dryfit.ledger.events import SessionOpened
from dryfit.ledger.folder import StudyLayout
from study_runs import events_of, fold
from tiny import model

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = "--hidden 112 --heads 7 --layers 2 --words 1000 --tokens 32 --rank {} --per_device_train_batch_size 4"


def rehearsed(*words: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "dryfit.documents.command_line", "rehearse", "-q", "--json", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_adapters_and_recomputed_layers_make_a_language_model_fit() -> None:
    script = ("--device", "24GiB", EXAMPLES / "fit_7b.py")
    whole = rehearsed(*script, *TINY.format(0).split())
    less = rehearsed(*script, *TINY.format(2).split(), "--gradient_checkpointing", "True")
    assert whole["fits"] and less["fits"], (whole["traceback"], less["traceback"])
    assert less["by_category"]["optimizer"] < whole["by_category"]["optimizer"] / 5
    assert less["by_category"]["activations"] < whole["by_category"]["activations"]


@pytest.mark.slow
def test_a_trainer_is_searched_through_kills(tmp_path: Path) -> None:
    folder = tmp_path / "overnight"
    of_the_trainer = "--num_train_epochs 2 --rows 16 --report_to none --use_cpu"
    of_the_story = f"--folder {folder} --trials 2 --kills 1 --model_name_or_path {model(tmp_path / 'bert')}"
    command = [sys.executable, EXAMPLES / "overnight.py", *of_the_story.split(), *of_the_trainer.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "kill 1: " in done.stdout, done.stdout + done.stderr
    sessions = [one for one in events_of(folder) if isinstance(one, SessionOpened)]
    assert len(sessions) == 2 and "2 trials in " in done.stdout
    text = (folder / "study.toml").read_text(encoding="utf-8")
    assert "learning_rate = {low = 5e-06, high = 0.0005, log = true}  # float, default 5e-05" in text
    assert "classifier_dropout = {low = 0.0, high = 0.5}" in text
    assert "# adam_beta2 = {low = 0.95, high = 0.999}" in text and "seed" not in text
    trials = fold(folder).trials
    assert len(trials) == 2 and not (tmp_path / "trainer_output").exists()
    for number, trial in enumerate(trials):
        assert trial.value == min(point.value for point in trial.reports)
        assert (StudyLayout(folder).trial(number).best / "model.safetensors").is_file()


def test_eight_ranks_are_planned_on_one_machine() -> None:
    small = "--width 64 --layers 2 --heads 2 --words 1024 --tokens 32".split()
    parameters = 2 * 64 * 1024 + 2 * (12 * 64**2 + 3 * 64)
    told = rehearsed("--device", "24GiB", "torchrun", "--nproc-per-node", "8", EXAMPLES / "eight_ranks.py", *small)
    assert told["fits"] and told["ranks"] == 8, told["traceback"]
    assert told["by_category"]["weights"] == pytest.approx(4 * parameters / 8, rel=0.1)
    assert set(told["sent_bytes"]) == {"all_gather", "reduce_scatter"}


def test_cards_are_compared_by_hours_and_cost() -> None:
    prices = EXAMPLES / "prices.toml"
    small = "--batch-size 2 --length 16 --width 64 --layers 1".split()
    priced = ("--prices", prices, "--train-steps", "20000", EXAMPLES / "gpu_memory" / "train.py")
    told = rehearsed("--device", "rtx4090,l40s", *priced, *small)
    per_hour = dict(re.findall(r"\[(\S+)\]\nper_hour = ([\d.]+)", prices.read_text("utf-8")))
    for one in told["devices"]:
        run, name = one["run"], one["device"]["name"]
        assert run["cost"]["estimate"] == pytest.approx(run["hours"]["estimate"] * float(per_hour[name]))
