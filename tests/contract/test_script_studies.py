"""Training scripts of the user's own, searched as they are in real processes: killed at every event, and wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dryfit
import hf_script
import trainers
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.state import TrialState
from dryfit.settings.errors import ConfigError, ExitStatus, ObjectiveError
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import LOG_FILE
from study_runs import fold, run_here

pytestmark = [pytest.mark.heavy]

HF = Path(hf_script.__file__)
EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = (
    "--per_device_train_batch_size 8 --num_train_epochs 2 --save_strategy steps --save_steps 2 --logging_steps 1 "
    "--report_to none --use_cpu --disable_tqdm True --dataloader_pin_memory False"
)
STEPS = "--eval_strategy steps --eval_steps 2"
GOAL = 'metric = "error"\ndirection = "minimize"\n'
SPACE = "rate = {low = 1e-3, high = 1e-2, log = true}\ndropout = [0.1, 0.3]\n"
HF_COMMAND = f"{HF} --learning_rate {{rate}} --dropout {{dropout}} {RUN}"


def study(
    folder: Path, command: str, space: str = SPACE, *, goal: str = "", script: str = "", search: str = ""
) -> Path:
    """Write a study file of a command."""
    file = folder / "own.toml"
    file.write_text(
        f'[study]\ntask = "script"\ntrials = 1\n{goal}\n[script]\ncommand = {json.dumps(command)}\n{script}\n'
        f'[space]\n{space}\n[search]\nsampler = "random"\nmirror = "none"\n{search}',
        encoding="utf-8",
    )
    return file


def tune(file: Path, *overrides: str, ends: ExitStatus = ExitStatus.DONE) -> list[TrialState]:
    """Search a study file, and return the trials."""
    limits = ["runtime.checkpoint_every_s=1000", "runtime.max_failed_in_a_row=100", "runtime.max_same_failure=100"]
    result = dryfit.tune(file, overrides=[*limits, *overrides])
    assert result.status is ends, result
    return fold(file.with_suffix("")).trials


def curve(trial: TrialState) -> list[tuple[int, float, dict[str, float]]]:
    return [(point.step, point.value, point.metrics) for point in trial.reports]


def story(file: Path, number: int = 0) -> str:
    return run_here("show", file.with_suffix(""), str(number)).stdout


# ---- a script of transformers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrialState:
    """A trial of the script that nobody has killed."""
    (trial,) = tune(study(tmp_path_factory.mktemp("undisturbed"), f"{HF_COMMAND} {STEPS}"))
    assert trial.outcome is Outcome.COMPLETE, trial
    return trial


def test_evaluations_of_its_trainer_are_reports(undisturbed: TrialState) -> None:
    assert [step for step, _, _ in curve(undisturbed)] == list(range(2, trainers.STEPS + 1, 2))
    assert undisturbed.value == min(value for _, value, _ in curve(undisturbed))
    assert {"eval_loss", "eval_accuracy"} == set(undisturbed.reports[0].metrics)


KILLS = [
    pytest.param([("step", 1)], marks=pytest.mark.nightly),
    pytest.param([("end", 12)], marks=pytest.mark.nightly),
    [("save", 8), ("half", 10), ("step", 11)],
    [("stop at step", 3), ("stop at evaluate", 6), ("stop at step", 7)],
]


@pytest.mark.slow
@pytest.mark.parametrize("at", KILLS, ids=lambda value: str(value).replace(" ", "-"))
def test_a_script_that_was_killed_has_the_values_of_one_that_was_not(
    at: list[tuple[str, int]], undisturbed: TrialState, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("KILL_AT", json.dumps({"at": at}))
    (trial,) = tune(study(tmp_path, f"{HF_COMMAND} {STEPS}"))
    assert len(trial.attempts) == 1 + len(at)
    assert (trial.outcome, trial.value) == (Outcome.COMPLETE, undisturbed.value)
    assert curve(trial) == curve(undisturbed)


@pytest.mark.slow
def test_an_evaluation_after_training_counts_where_training_had_none(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (whole,) = tune(study(tmp_path / "whole", f"{HF_COMMAND} --eval_strategy no"))
    (trial,) = tune(study(tmp_path, f"{HF_COMMAND} --eval_strategy no --way late"))
    assert len(trial.attempts) == 2  # killed after the evaluation
    assert trial.outcome is Outcome.COMPLETE, trial.reason
    assert (trial.value, curve(trial)) == (whole.value, curve(whole))
    assert [step for step, _, _ in curve(trial)] == [trainers.STEPS]


ENDS = {
    "twice": (Outcome.FAILED, "the script has trained one already, and trains the same Trainer again"),
    "two": (Outcome.FAILED, "the script has trained one already, and trains another one, a Trainer"),
    "exit": (Outcome.FAILED, "it ended by sys.exit with exit status 4"),
    "never": (Outcome.FAILED, "was trained and never evaluated"),
    "plain": (Outcome.COMPLETE, ""),
    "weights only": (Outcome.COMPLETE, ""),
    "no checkpoints": (Outcome.COMPLETE, ""),
    "endless": (Outcome.COMPLETE, ""),
    "own rate": (Outcome.COMPLETE, ""),
}


@pytest.mark.slow
def test_every_way_of_a_trainer_to_end_is_told(tmp_path: Path) -> None:
    command = f"{HF} --learning_rate {{rate}} --forgotten {{forgotten}} --way {{way}} {RUN} --max_steps 2 {{strategy}}"
    ways = [
        {"way": way, "rate": 2e-3, "forgotten": 0.1, "strategy": "" if way == "never" else "--eval_strategy=epoch"}
        for way in ENDS
    ]
    space = (
        f"way = {json.dumps(list(ENDS))}\nrate = [2e-3]\nforgotten = [0.1]\nstrategy = ['', '--eval_strategy=epoch']\n"
    )
    points = ", ".join(f"{{{', '.join(f'{key} = {json.dumps(value)}' for key, value in way.items())}}}" for way in ways)
    file = study(tmp_path, command, space, search=f"enqueue = [{points}]\n")
    trials = tune(file, f"study.trials={len(ways)}", "runtime.keep=all")
    for trial, (way, (outcome, said)) in zip(trials, ENDS.items(), strict=True):
        assert trial.outcome is outcome, (way, trial.reason)
        assert said in trial.reason, (way, trial.reason)
    assert "nothing in the script has read --forgotten: the search over it has no effect" in story(file, 4)
    assert "from trial.params" not in story(file, 4)
    assert "save_only_model=True: its checkpoints hold no optimizer state" in story(file, 5)
    assert "save_strategy='no': checkpoints are written at evaluations" in story(file, 6)
    said = "--learning_rate is 0.002, and learning_rate of the Trainer's arguments is 0.001"
    assert said in story(file, 8) and said not in story(file, 4)
    assert StudyLayout(file.with_suffix("")).trial(4).best.joinpath("model.safetensors").is_file()


# ---- any other script

PLAIN = """
import argparse, json, os, subprocess, sys, time
import dryfit

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--way", default="")
parser.add_argument("--output_dir")
arguments = parser.parse_args()
way = arguments.way
if way == "asks":
    input("which? ")
if way == "exit 0":
    sys.exit()
if way == "exit text":
    sys.exit("no data")
if way == "fails":
    raise ValueError("own mistake")
if way == "outside":
    open("shared.txt", "w").write("x")
if way == "processes":
    for new in (False, True):
        subprocess.Popen(["sleep", "600"], start_new_session=new)
if way == "forks":
    copies = [os.fork() for _ in range(2)]
    if copies[0] == 0:
        sys.exit(3)
    if copies[1] == 0:
        raise ValueError("a copy's own")
    assert [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in copies] == [3, 1]
if way == "elsewhere":
    subprocess.run([sys.executable, "-c", "import dryfit; dryfit.report(1.0, 1)"], check=True)
if way == "in a copy":
    if os.fork() == 0:
        dryfit.report(1.0, 1)
    os.wait()
    sys.exit()
if way == "backwards":
    dryfit.report(1.0, 5)
error = 8.0
for step in range(1, 5):
    error *= arguments.rate
    if way == "lines":
        with open(os.path.join(arguments.output_dir, "log.jsonl"), "a") as file:
            file.write(json.dumps({"step": step, "error": error, "loss": 2 * error}) + "\\n")
    elif dryfit.report(error, step, metrics={"loss": 2 * error}):
        break
left_open = open(os.path.join(arguments.output_dir, "model.json"), "w")
left_open.write(json.dumps({"rate": arguments.rate, "trial": dryfit.current_trial().number}))
"""

PLAIN_ENDS = {
    "": (Outcome.COMPLETE, ""),
    "asks": (Outcome.FAILED, "EOF when reading a line"),
    "exit 0": (Outcome.FAILED, "plain.py has ended, and reported nothing"),
    "exit text": (Outcome.FAILED, "it ended by sys.exit with the message no data"),
    "fails": (Outcome.FAILED, "own mistake"),
    "outside": (Outcome.COMPLETE, ""),
    "processes": (Outcome.COMPLETE, ""),
    "forks": (Outcome.COMPLETE, ""),
    "elsewhere": (Outcome.FAILED, "returned non-zero exit status 1"),
    "in a copy": (Outcome.FAILED, "plain.py has ended, and reported nothing"),
    "backwards": (Outcome.FAILED, "the report before was of step 5"),
}


def plain(folder: Path, ways: list[str], *, script: str = "", text: str = PLAIN) -> Path:
    """Write a plain script, and a study file of it."""
    (folder / "plain.py").write_text(text, encoding="utf-8")
    points = ", ".join(f"{{way = {json.dumps(way)}, rate = 0.5}}" for way in ways)
    return study(
        folder,
        "plain.py --rate {rate} --way={way} --output_dir ignored",
        f"rate = [0.5]\nway = {json.dumps(ways)}\n",
        goal=GOAL,
        script=script,
        search=f"enqueue = [{points}]\n",
    )


def _sleeping(folder: Path) -> list[int]:
    """Processes of a trial below a folder that sleep."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"sleep\x00600" in (entry / "cmdline").read_bytes() and (entry / "cwd").readlink() == folder:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_every_way_of_a_plain_script_to_end_is_told(tmp_path: Path) -> None:
    file = plain(tmp_path, list(PLAIN_ENDS))
    trials = tune(file, f"study.trials={len(PLAIN_ENDS)}")
    for trial, (way, (outcome, said)) in zip(trials, PLAIN_ENDS.items(), strict=True):
        assert trial.outcome is outcome, (way, trial.reason)
        assert said in trial.reason, (way, trial.reason)
    numbers = list(PLAIN_ENDS)
    assert curve(trials[0]) == [(n, 8 * 0.5**n, {"error": 8 * 0.5**n, "loss": 16 * 0.5**n}) for n in range(1, 5)]
    assert trials[0].value == 0.5
    assert "input() has no keyboard here" in story(file, numbers.index("asks"))
    assert 'raise ValueError("own mistake")' in story(file, numbers.index("fails"))
    assert f"outside of its folder: {tmp_path}/shared.txt" in story(file, numbers.index("outside"))
    assert not _sleeping(tmp_path)
    layout = StudyLayout(file.with_suffix(""))
    assert curve(trials[numbers.index("forks")]) == curve(trials[0])
    assert "ValueError: a copy's own" in (layout.trial(numbers.index("forks")).attempt(1) / LOG_FILE).read_text()
    for way in ("elsewhere", "in a copy"):
        said = (layout.trial(numbers.index(way)).attempt(1) / LOG_FILE).read_text()
        assert "is one that the trial's script has started" in said and not trials[numbers.index(way)].reports
    kept = StudyLayout(file.with_suffix("")).trial(0).best / "model.json"
    assert json.loads(kept.read_text()) == {"rate": 0.5, "trial": 0}


def test_lines_of_a_results_file_are_reports(tmp_path: Path) -> None:
    file = plain(tmp_path, ["lines"], script='results = "log.jsonl"\n')
    (trial,) = tune(file)
    assert curve(trial) == [(n, 8 * 0.5**n, {"error": 8 * 0.5**n, "loss": 16 * 0.5**n}) for n in range(1, 5)]
    assert (trial.outcome, trial.value) == (Outcome.COMPLETE, 0.5)
    (tmp_path / "other").mkdir()
    file = plain(tmp_path / "other", ["lines"], script='results = "log.jsonl"\n')
    (trial,) = tune(file, "study.metric=f1", ends=ExitStatus.ANSWER_IS_NO)
    assert "log.jsonl in the trial's folder has no line with it; there are error, loss" in trial.reason
    bad = PLAIN.replace('file.write(json.dumps({"step": step, ', 'file.write(json.dumps({"epoch": step, ')
    (tmp_path / "bad").mkdir()
    file = plain(tmp_path / "bad", ["lines"], script='results = "log.jsonl"\n', text=bad)
    (trial,) = tune(file, ends=ExitStatus.ANSWER_IS_NO)
    assert "line 1 has error and no step" in trial.reason


SLOW = """
import json, os, sys, time
import dryfit

rate = float(sys.argv[1])
with open(os.path.join(sys.argv[2], "log.jsonl"), "a", buffering=1) as file:
    for step in range(1, 40):
        file.write(json.dumps({"step": step, "error": rate}) + "\\n")
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_poor_scripts_are_pruned_whether_they_look_or_not(tmp_path: Path) -> None:
    points = "enqueue = [{rate = 0.1}, {rate = 0.2}, {rate = 0.9}]\n"
    search = f'{points}pruner = "median"\npruner_startup_trials = 2\nwarmup_reports = 2\n'
    line = 'file.write(json.dumps({"step": step, "error": rate}) + "\\n")'
    ways = {
        "lines": (SLOW, 'results = "log.jsonl"\n'),
        "reports": (SLOW.replace(line, "dryfit.report(rate, step)"), ""),
    }
    for name, (text, script) in ways.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "plain.py").write_text(text, encoding="utf-8")
        space = "rate = {low = 0.0, high = 1.0}\n"
        file = study(tmp_path / name, "plain.py {rate} {folder}", space, goal=GOAL, script=script, search=search)
        trials = tune(file, "study.trials=3")
        assert [trial.outcome for trial in trials] == [Outcome.COMPLETE, Outcome.COMPLETE, Outcome.PRUNED], name
        assert len(trials[2].reports) < 30


RESUMING = """
import os, signal, sys
from pathlib import Path
import dryfit

saved = Path(os.environ["DRYFIT_FOLDER"], "state.txt")
fresh = not any(saved.parent.iterdir())
step = int(saved.read_text()) if saved.exists() else 0
with open(sys.argv[2], "a") as file:
    file.write(f"{os.environ['DRYFIT_ATTEMPT']} {step} {fresh}\\n")
while step < 6:
    step += 1
    dryfit.report(9.0 - float(sys.argv[1]) * step if step < 4 else 20.0, step)
    saved.write_text(str(step))
    if len(sys.argv) > 3:
        dryfit.checkpointed(step)
    if step == 4 and os.environ["DRYFIT_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [True, False])
def test_a_killed_script_begins_anew_unless_it_says_that_it_can_go_on(resumes: bool, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(RESUMING, encoding="utf-8")
    log = tmp_path / "log.txt"
    command = f"plain.py {{rate}} {log} {'resumes' if resumes else ''}"
    file = study(tmp_path, command, "rate = [1.0]\n", goal=GOAL)
    (trial,) = tune(file)
    assert log.read_text().splitlines() == ["1 0 True", "2 4 False" if resumes else "2 0 True"]
    assert (trial.outcome, trial.value) == (Outcome.COMPLETE, 6.0)  # of the third report, which the first attempt made
    assert [step for step, _, _ in curve(trial)] == [1, 2, 3, 4, 5, 6]


def test_another_command_begins_a_generation(tmp_path: Path) -> None:
    file = plain(tmp_path, [""])
    tune(file)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("--output_dir ignored", "--output_dir other"), encoding="utf-8")
    tune(file)
    state = fold(file.with_suffix(""))
    assert [trial.generation for trial in state.trials] == [1, 2]
    assert state.generation.reasons[0].startswith("the script was plain.py --rate {rate}")


def test_a_script_that_is_not_there_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    file = plain(tmp_path, [""])
    (tmp_path / "plain.py").unlink()
    with pytest.raises(ObjectiveError, match="there is no such file"):
        tune(file)
    done = run_here("doctor", file)
    assert done.returncode != 0 and "there is no such file" in done.stdout + done.stderr
    (tmp_path / "plain.py").write_text("if True\n", encoding="utf-8")
    with pytest.raises(ObjectiveError, match="Python cannot read it: expected ':'"):
        tune(file)


def test_what_a_parser_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN, encoding="utf-8")
    file = study(tmp_path, "plain.py --rata {rate}", "rate = [1.0]\n")
    (trial,) = tune(file, ends=ExitStatus.ANSWER_IS_NO)
    assert "parsing the script's command: unrecognized arguments: --rata 1.0" in trial.reason


def test_a_script_can_be_run_without_dryfit(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import dryfit\nprint(dryfit.report(1.0, 1), dryfit.checkpointed(1), dryfit.current_trial())\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "False None None\n"


# ---- init


def _init(folder: Path, script: Path, *words: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "dryfit.documents.command_line", "init", "own", "--script", script, "--", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "dryfit doctor own/study.toml" in done.stderr
    return folder / "own" / "study.toml"


@pytest.mark.slow
def test_the_example_of_a_loop_is_begun_by_init_and_searched(tmp_path: Path) -> None:
    file = _init(tmp_path, EXAMPLES / "train_loop.py", "--epochs", "2", "--hidden=8")
    text = file.read_text(encoding="utf-8")
    assert "--epochs 2 --hidden=8 --lr {lr}" in text and 'folder = ".."' in text
    assert "lr = {low = 0.0003, high = 0.03, log = true}  # float, default 0.003" in text
    assert '# activation = ["relu", "gelu"]  # --activation {activation}: choice, default relu' in text
    assert not (tmp_path / "out").exists(), "init has trained"
    assert run_here("doctor", file).returncode == 0
    result = dryfit.tune(file, trials=2)
    assert result.status is ExitStatus.DONE
    trials = fold(file.parent).trials
    assert [[point.step for point in trial.reports] for trial in trials] == [[1, 2], [1, 2]]
    assert [trial.attempts[0].checkpoint_step for trial in trials] == [2, 2]
    assert {"value", "accuracy"} == set(trials[0].reports[0].metrics)
    best = result.summary.best
    left = StudyLayout(file.parent).trial(best.number).best
    assert (left / "state.pt").is_file()
    done = run_here("train", file.parent, "-o", tmp_path / "model", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)
    assert model["trial"] == best.number and model["value"] == model["searched"] == best.value
    assert model["steps"] == 2 and (tmp_path / "model" / "state.pt").is_file()
    done = run_here("train", file.parent, "--in-process")
    assert done.returncode != 0 and f"what trial {best.number} has left is in {left}" in done.stderr
    assert "train_loop.py --epochs 2 --hidden=8 --lr 0.0" in done.stderr
    for words in (("report", "-o", tmp_path / "page.html"), ("export", "--to", "csv")):
        assert run_here(words[0], file.parent, *words[1:]).returncode == 0


def test_the_arguments_are_those_of_the_parser_with_help(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import argparse\nfirst = argparse.ArgumentParser(add_help=False)\nfirst.add_argument('--config')\n"
        "rest = first.parse_known_args()[1]\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float, default=0.1)\nparser.parse_args(rest)\nraise AssertionError\n",
        encoding="utf-8",
    )
    file = dryfit.init_script(tmp_path / "own", str(tmp_path / "two.py"), ["--config", "x", "--lr=0.2"])
    text = file.read_text(encoding="utf-8")
    assert "--config x --lr={lr}" in text and "lr = {low = 0.02, high = 2.0, log = true}" in text


def test_what_init_refuses(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("print('trained')\n", encoding="utf-8")
    (tmp_path / "strict.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float, required=True)\n"
        "parser.parse_args()\nraise AssertionError('it went on')\n",
        encoding="utf-8",
    )
    for script, words, said in (
        ("none.py", (), "there is no such file"),
        ("silent.py", (), "it has run to its end and asked no argparse"),
        ("strict.py", (), "the following arguments are required: --lr"),
        ("strict.py", ("--lr", "x"), "argument --lr: invalid float value: 'x'"),
        ("notes.txt", (), "it is no Python script"),
    ):
        with pytest.raises((ObjectiveError, ConfigError)) as caught:
            dryfit.init_script(tmp_path / "own", str(tmp_path / script), words)
        assert said in str(caught.value)
    assert not (tmp_path / "own").exists()
    file = dryfit.init_script(tmp_path / "own", str(tmp_path / "strict.py"), ["--lr", "0.1"])
    with pytest.raises(ConfigError, match="exists"):
        dryfit.init_script(tmp_path / "own", str(tmp_path / "strict.py"), ["--lr", "0.1"])
    assert "lr = {low = 0.01, high = 1.0, log = true}" in file.read_text(encoding="utf-8")
