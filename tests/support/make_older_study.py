"""Make the study folders of this version of dryfit that every later version must go on with.

Run once for a state of the formats, on a Linux machine with two idle cores, and commit what it writes:

    PYTHONPATH=src:tests/support python tests/support/make_older_study.py tests/older_studies/NAME

Each study is stopped in the middle of a trial that has a checkpoint. A copy of it is then resumed by the same code, and
what it comes to, and what its models predict, is written into ``expected.json``. tests/older_studies/README.md says
what each study is for, and tests/contract/test_older_studies.py reads them.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import older_studies
import spans
import study_runs
import tiny
import tiny_lms
from dryfit.study import functions

HERE = older_studies.HERE
_TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}

STUDY = f"""
[study]
task = "{{task}}"
trials = {{trials}}
seed = 11
{{study}}

[data]
{{data}}

[model]
name = "{HERE}/model"

[train]
epochs = {{epochs}}
batch_size = 8
max_length = 48
evals_per_epoch = 2

{{tables}}

[space]
{{space}}

[search]
mirror = "none"
defaults_first = false
{{search}}

[execution]
threads = 1
device = "cpu"
{{execution}}

[runtime]
checkpoint_every_s = 0.001
keep = "best:2"
{{runtime}}
"""
SPLITS = f'train = "{HERE}/data/train.jsonl"\nvalidation = "{HERE}/data/validation.jsonl"\n'
RATES = '"optim.lr" = {low = 1e-5, high = 2e-2, log = true}\n'


def study_text(task: str, *, trials: int, data: str = SPLITS, epochs: int = 3, space: str = RATES, **more: str) -> str:
    """A study file; ``more`` is what stands in its other tables."""
    own = {"study": "", "tables": "", "search": "", "execution": "", "runtime": ""} | more
    return STUDY.format(task=task, trials=trials, data=data, epochs=epochs, space=space, **own)


@dataclass(frozen=True)
class Scenario:
    """A study, how it is interrupted, and what is made of it.

    Attributes:
        write: Writes the study's folder.
        stop_in: The trial that is interrupted, once it has a checkpoint of this step or a later one.
        stop_at: That step.
        disturb: What is done to the study while it runs, looked at again and again until it says that it is done.
        trained: Arguments of ``dryfit train``, a call each; what its models predict is recorded.
        in_place: Whether the same code can resume it only where it was made.
        changes: Overrides under which the study is run to its end before, each in a run of its own.
    """

    write: Callable[[Path], None]
    stop_in: int
    stop_at: int
    disturb: Callable[[Path], bool] = lambda _: True
    trained: tuple[tuple[str, ...], ...] = ()
    changes: tuple[tuple[str, ...], ...] = ()
    in_place: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _rows(folder: Path) -> None:
    asked = [{name: row[name] for name in ("id", "criterion", "text")} for row in tiny.rows(9, seed=5)]
    tiny.write_jsonl(folder / "rows.jsonl", asked)


def _criteria(folder: Path) -> None:
    """Trials 0 and 1 complete, 2 cannot be trained, 3 is pruned; the others are drawn by TPE."""
    tiny.model(folder / "model", **_TINY)
    broken = tiny.model(folder / "broken", **_TINY) / "model.safetensors"
    weights = load_file(broken)
    weights.pop("embeddings.LayerNorm.bias")
    save_file(weights, broken, {"format": "pt"})
    tiny.data(folder / "data", train=64, validation=32, seed=3)
    tiny.write_jsonl(folder / "data" / "test.jsonl", tiny.rows(16, start=700))
    points = (("model", 5e-3), ("model", 2e-3), ("broken", 2e-3), ("model", 2e-5))
    known = "\n".join(
        f'[[search.enqueue]]\n"optim.lr" = {rate}\n"model.name" = "{HERE}/{model}"' for model, rate in points
    )
    text = study_text(
        "criteria",
        trials=9,
        study='metric = "loss"',
        data=SPLITS + f'test = "{HERE}/data/test.jsonl"',
        space=f'{RATES}"model.name" = ["{HERE}/model", "{HERE}/broken"]\n'
        '"head.pooling" = ["cls", "mean", "max"]\n'
        '"train.batch_size" = [{choices = [4, 8], when = {"head.pooling" = "cls"}}, '
        '{choices = [8, 16], when = {"head.pooling" = ["mean", "max"]}}]',
        search='sampler = "tpe"\nstartup_trials = 2\npruner = "median"\npruner_startup_trials = 2\n'
        f"warmup_reports = 4\n{known}",
    )
    (folder / "study.toml").write_text(text, encoding="utf-8")


def _kill_one(folder: Path) -> bool:
    """End the first process of trial 1 without a word."""
    trials = study_runs.fold(folder).trials
    if len(trials) < 2 or not trials[1].attempts or trials[1].attempts[0].checkpoint_step is None:
        return False
    pid = trials[1].attempts[0].pid
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _evidence(folder: Path) -> None:
    tiny.model(folder / "model", **_TINY)
    spans.evidence_data(folder / "data", train=24, validation=16)
    text = study_text(
        "evidence",
        trials=3,
        epochs=8,
        study='metric = "loss"',
        tables='[span]\ndoc_stride = 6\ntopk = 3\nnull_policy = "calibrated"\n',
        search='sampler = "random"\npruner = "asha"',
    )
    (folder / "study.toml").write_text(text, encoding="utf-8")


def _share(folder: Path) -> None:
    tiny.model(folder / "model", **_TINY)
    spans.both_data(folder / "data", train=32, validation=16)
    text = study_text(
        "share",
        trials=3,
        epochs=6,
        study='metric = "loss"\nalso = ["token_f1"]',
        tables='[span]\ndoc_stride = 6\n[multitask]\nweighting = "uncertainty"\n',
        search='sampler = "nsga2"',
    )
    (folder / "study.toml").write_text(text, encoding="utf-8")


def _causal_lm(folder: Path) -> None:
    tiny_lms.causal_lm(folder / "model", sizes={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1})
    tiny.data(folder / "data", train=32, validation=8, seed=3)
    text = study_text(
        "causal-lm",
        trials=2,
        epochs=6,
        study='metric = "loss"',
        tables='[lora]\nr = 2\n[lm]\nformat = "criteria"\nmax_new_tokens = 3\ngenerate_rows = 2\n',
        search='sampler = "random"',
    ).replace("max_length = 48", "max_length = 160")
    (folder / "study.toml").write_text(text, encoding="utf-8")


def _planned(folder: Path) -> None:
    """Plans under a limit; then the space is widened, and then narrowed: a second generation."""
    tiny.model(folder / "model", **_TINY)
    tiny.data(folder / "data", train=48, validation=16, seed=3)
    text = study_text(
        "criteria",
        trials=2,
        study='metric = "loss"',
        search='sampler = "random"',
        execution='memory_limit = "4GiB"',
    )
    (folder / "study.toml").write_text(text, encoding="utf-8")


def _moved(folder: Path) -> None:
    """A study as users have them: what it names lies in its folder, and is named without it."""
    _planned(folder)
    text = (folder / "study.toml").read_text(encoding="utf-8").replace(f"{HERE}/", "")
    (folder / "study.toml").write_text(text.replace('memory_limit = "4GiB"\n', ""), encoding="utf-8")


def _ranks(folder: Path) -> None:
    tiny.model(folder / "model", **_TINY)
    tiny.data(folder / "data", train=64, validation=16, seed=3)
    text = study_text(
        "criteria",
        trials=1,
        epochs=4,
        study='metric = "loss"',
        search='sampler = "random"',
        execution='dp = 2\noptimizer_impl = "plain"',
    )
    (folder / "study.toml").write_text(text, encoding="utf-8")


def _folds(folder: Path) -> None:
    """A trial that is interrupted within its second fold."""
    tiny.model(folder / "model", **_TINY)
    tiny.data(folder / "data", train=48, validation=16, seed=3)
    text = study_text(
        "criteria",
        trials=2,
        data=f"{SPLITS}folds = 2",
        study='metric = "loss"\nalso = ["f1_macro"]',
        search='sampler = "random"',
    ).replace('keep = "best:2"\n', "")
    (folder / "study.toml").write_text(text, encoding="utf-8")


WALK = '''"""The function that this study optimises; it is part of the study, and imports nothing of dryfit."""

import json
import os
import random
import time


def walk(trial):
    """A walk of twelve steps with a checkpoint at each."""
    file = trial.checkpoint_dir / "state.json"
    state = json.loads(file.read_text()) if file.exists() else {"step": 0, "total": 0.0, "attempts": []}
    state["attempts"].append(trial.attempt)
    while state["step"] < 12:
        draw = random.Random(f"{trial.seed}-{state['step']}")
        state["total"] += trial.params["x"] ** 2 + draw.random()
        state["step"] += 1
        time.sleep(float(os.environ.get("STEP_PAUSE_S", "0")))
        stop = trial.report(state["total"], state["step"])
        temporary = trial.checkpoint_dir / "state.tmp"
        temporary.write_text(json.dumps(state))
        temporary.replace(file)
        trial.checkpointed(state["step"])
        if stop:
            return None
    if trial.params["kind"] == "bad":
        raise ValueError("a bad kind")
    return state["total"] + 100 * (len(state["attempts"]) - 1)
'''

OBJECTIVE = """
[study]
task = "objective"
trials = 6
seed = 5

[objective]
function = "walk.py:walk"

[space]
x = {low = -3.0, high = 3.0}
kind = ["good", "bad"]

[search]
sampler = "tpe"
startup_trials = 3
pruner = "median"
pruner_startup_trials = 1
warmup_reports = 6

[[search.enqueue]]
x = 1.0
kind = "good"

[[search.enqueue]]
x = 0.5
kind = "bad"
"""


def _objective(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "walk.py").write_text(WALK, encoding="utf-8")
    (folder / "study.toml").write_text(OBJECTIVE, encoding="utf-8")


SCENARIOS = {
    "criteria": Scenario(_criteria, 6, 6, _kill_one, (("--trial", "best"),)),
    "evidence": Scenario(_evidence, 2, 4, trained=((),)),
    "share": Scenario(_share, 2, 8, trained=((),)),
    "causal-lm": Scenario(_causal_lm, 1, 6, trained=((),)),
    "objective": Scenario(_objective, 4, 3, environment={"STEP_PAUSE_S": "0.1"}),
    "planned": Scenario(
        _planned,
        5,
        3,
        changes=(
            (),
            ("study.trials=4", "space.optim.lr.high=0.1"),
            ("study.trials=2", "space.optim.lr.high=0.001"),
        ),
    ),
    "moved": Scenario(_moved, 1, 6, in_place=True),
    "folds": Scenario(_folds, 1, 18),
    "ranks": Scenario(_ranks, 0, 8),
}


def _tune(folder: Path, scenario: Scenario, words: tuple[str, ...]) -> None:
    """Run the study until its trial is well under way, then stop it."""
    undisturbed = True
    process = study_runs.start("tune", folder, "--quiet", *words)

    def under_way() -> bool:
        nonlocal undisturbed
        if not (folder / "ledger.jsonl").exists():
            return False
        undisturbed = undisturbed and not scenario.disturb(folder)
        trials = study_runs.fold(folder).trials
        if len(trials) <= scenario.stop_in:
            return False
        steps = [attempt.checkpoint_step or 0 for attempt in trials[scenario.stop_in].attempts]
        return max(steps, default=0) >= scenario.stop_at

    assert study_runs.wait_for(under_way, process), process.communicate()
    assert functions.stop(folder, now=False) is not None
    _, errors = process.communicate()
    assert process.returncode == 3, errors
    assert not undisturbed, "the study was not disturbed as it should have been"


def _without_this_machine(folder: Path) -> None:
    """Take the paths of this machine's libraries and of this checkout out of logs and tracebacks."""
    places = {sys.prefix: "/venv", str(Path(__file__).resolve().parents[2]): "/dryfit"}
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".txt") and "checkpoints" not in path.parts:
            text = before = path.read_text(encoding="utf-8")
            for place, name in places.items():
                text = text.replace(place, name)
            if text != before:
                path.write_text(text, encoding="utf-8")


def _make(name: str, scenario: Scenario, out: Path, work: Path) -> None:
    folder = work / name / "study"
    scenario.write(folder)
    *before, last = [[word for one in change for word in ("--set", one)] for change in scenario.changes or ((),)]
    os.chdir(folder)
    os.environ.update({"STEP_PAUSE_S": "0"} | scenario.environment)
    for words in before:
        done = study_runs.run("tune", folder, "--quiet", *words)
        assert done.returncode == 0, done.stderr
    _tune(folder, scenario, tuple(last))
    os.environ["STEP_PAUSE_S"] = "0"
    for words in scenario.trained:
        done = study_runs.run("train", folder, "--quiet", *words)
        assert done.returncode == 0, done.stderr
    models = older_studies.models_in(folder) if scenario.trained else []
    if models:
        _rows(folder)
    _without_this_machine(folder)
    older_studies.pack(folder, out / name)
    expected: dict[str, Any] = {
        "interrupted": older_studies.interrupted(folder),
        "stopped": older_studies.trials_of(folder),
        "models": {model: older_studies.predictions(folder, model) for model in models},
    }
    if not scenario.in_place:
        folder = work / f"{name}-resumed" / "study"
        older_studies.unpack(out / name, folder)
        os.chdir(folder)
    done = study_runs.run("resume", folder, "--quiet")
    assert done.returncode == 0, done.stderr
    expected["resumed"] = older_studies.trials_of(folder)
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (out / name / "expected.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Make all studies, in a folder that is not there yet."""
    out = Path(sys.argv[1]).absolute()
    only = sys.argv[2:] or list(SCENARIOS)
    if any((out / name).exists() for name in only):
        sys.exit(f"{out} is there already: what an older dryfit wrote is never made anew; name another folder")
    with tempfile.TemporaryDirectory(prefix="dryfit-") as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        for name in only:
            print(name, flush=True)
            _make(name, SCENARIOS[name], out, Path(work))
        os.chdir("/")


if __name__ == "__main__":
    main()
