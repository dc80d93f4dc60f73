"""Functions of the user's own, searched in real processes: every way to end, and all a study file can do."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import dryfit
import objectives
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.settings.errors import ExitStatus, FailureKind
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import LOG_FILE
from dryfit.study.next_step import End
from study_runs import DEADLINE_S, fold, marked_processes, run, run_here, start, wait_for

RANDOM = {"sampler": "random", "mirror": "none"}
SUPPORT = str(Path(objectives.__file__).parent)


def expected(params) -> float:
    shift = 1.0 if params["kind"] == "shifted" else 0.0
    return (params["x"] - shift) ** 2 / params["n"]


# ---- a study that everything about a finished one is read from


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "study"
    result = dryfit.tune(objective=objectives.quadratic, space=objectives.SPACE, trials=12, folder=folder)
    assert (result.end, result.status) == (End.DONE, ExitStatus.DONE)
    return folder


def test_values_are_those_of_the_function(finished: Path) -> None:
    state = fold(finished)
    assert len(state.trials) == 12
    assert {trial.outcome for trial in state.trials} == {Outcome.COMPLETE}
    for trial in state.trials:
        assert trial.value == expected(trial.params)
        assert isinstance(trial.params["n"], int) and 1 <= trial.params["n"] <= 3
        assert isinstance(trial.params["x"], float) and -4 <= trial.params["x"] <= 4
    assert state.best is not None
    assert state.best.value == min(trial.value for trial in state.trials if trial.value is not None)
    assert len({trial.fingerprint for trial in state.trials}) == 12


def test_the_frozen_study_goes_on_from_anywhere(finished: Path, tmp_path: Path) -> None:
    text = (finished / "frozen.toml").read_text(encoding="utf-8")
    assert 'function = "objectives:quadratic"' in text
    assert "f1_macro" not in text and "[train]" not in text
    command = [
        sys.executable,
        "-m",
        "dryfit.documents.command_line",
        "resume",
        str(finished),
        "--trials",
        "14",
        "--json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trials"]["complete"] == 14
    assert fold(finished).trials[13].value == expected(fold(finished).trials[13].params)


# ---- every way to end


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TrialState, StudyLayout]]:
    """One trial of each way to end."""
    folder = tmp_path_factory.mktemp("ways") / "study"
    dryfit.tune(
        objective=objectives.every_way,
        space={"way": list(objectives.WAYS)},
        trials=len(objectives.WAYS),
        folder=folder,
        search={**RANDOM, "enqueue": [{"way": way} for way in objectives.WAYS]},
        runtime={"max_failed_in_a_row": 100, "max_same_failure": 100, "parallel": 2},
    )
    state = fold(folder)
    assert marked_processes(folder) == []
    found = {str(trial.params["way"]): (trial, StudyLayout(folder)) for trial in state.trials}
    assert set(found) == set(objectives.WAYS)
    return found


ENDS = {
    "none": (Outcome.FAILED, None, FailureKind.USER_CODE, "None (does every path of the function return a value?)"),
    "nan": (Outcome.PRUNED, None, FailureKind.NONFINITE, "value is nan"),
    "exception": (Outcome.FAILED, None, FailureKind.USER_CODE, "an exception ended it: ValueError: no such luck"),
    "exit": (Outcome.FAILED, None, FailureKind.USER_CODE, "SystemExit: 0"),
    "leave": (Outcome.FAILED, None, FailureKind.USER_CODE, "it ended its own process (exit status 0)"),
    "crash": (Outcome.FAILED, None, FailureKind.NATIVE_CRASH, "native code crashed (SIGSEGV)"),
    "killed once": (Outcome.COMPLETE, 1.0, FailureKind.KILLED, ""),
    "device assert": (Outcome.FAILED, None, FailureKind.DEVICE_ASSERT, "(blocking launches: 1)"),
    "report nan": (Outcome.COMPLETE, 3.0, None, ""),
    "many reports": (Outcome.COMPLETE, 59.0, None, ""),
}


@pytest.mark.parametrize("way", objectives.WAYS)
def test_every_way_to_end_has_an_outcome(ways: dict[str, tuple[TrialState, StudyLayout]], way: str) -> None:
    trial, layout = ways[way]
    outcome, value, kind, said = ENDS[way]
    assert (trial.outcome, trial.value) == (outcome, value), trial.reason
    assert said in trial.reason
    failure = trial.attempts[0].failure
    assert (failure.kind if failure is not None else None) == kind
    assert len(trial.attempts) == (2 if way in ("killed once", "crash", "device assert") else 1)
    assert not list(layout.trial(trial.number).folder.glob("**/checkpoints"))


def test_the_log_has_the_traceback(ways: dict[str, tuple[TrialState, StudyLayout]]) -> None:
    trial, layout = ways["exception"]
    log = (layout.trial(trial.number).attempt(1) / LOG_FILE).read_text(encoding="utf-8")
    assert "Traceback" in log and "ValueError: no such luck" in log and "objectives.py" in log
    story = run_here("show", layout.folder, str(trial.number)).stdout
    assert "ValueError: no such luck" in story


def test_a_second_attempt_has_the_checkpoints_and_the_reports_of_the_first(
    ways: dict[str, tuple[TrialState, StudyLayout]],
) -> None:
    trial, _ = ways["killed once"]
    assert [(point.n, point.step, point.value) for point in trial.reports] == [(0, 1, 5.0), (1, 2, 6.0)]
    assert trial.attempts[0].checkpoint_step == 1
    assert [(point.n, point.step) for point in ways["many reports"][0].reports] == [(n, n + 1) for n in range(59)]


# ---- what a process is like


def test_a_trials_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None) -> None:
    monkeypatch.setenv("FACTS_FILE", str(tmp_path / "facts.json"))
    folder = tmp_path / "study"
    servers: list[int] = []

    class Watch:
        def on_open(self, layout) -> None:
            pass

        def on_event(self, event, state: StudyState) -> None:
            for pid in marked_processes(folder):
                with suppress(psutil.NoSuchProcess):  # it has ended between the two looks
                    process = psutil.Process(pid)
                    if "dryfit.processes.fork_server" in process.cmdline():
                        servers.append(process.memory_info().rss)

        def on_message(self, number, message) -> None:
            pass

        def on_note(self, text: str) -> None:
            pass

    dryfit.tune(
        objective=objectives.facts,
        space={"a.b": [3], "C": ["x"]},
        trials=1,
        folder=folder,
        search=RANDOM,
        execution={"threads": 2, "device": "cpu"},
        study={"seed": 8},
        observers=[Watch()],
    )
    facts = json.loads((tmp_path / "facts.json").read_text())
    trial = fold(folder).trials[0]
    assert facts["params"] == {"a.b": 3, "C": "x"} == trial.params
    assert (facts["torch"], facts["numpy"], facts["visible"], facts["threads"]) == (False, False, "", "2")
    assert (facts["seed"], facts["number"], facts["attempt"]) == (trial.seed, 0, 1)
    assert servers and max(servers) < 120 << 20, "a fork server with torch takes three times as much"


def test_global_generators_are_seeded_per_trial(tmp_path: Path) -> None:
    values = []
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        folder = tmp_path / name
        dryfit.tune(
            objective=objectives.seeded, space={"x": [1]}, trials=2, folder=folder, search=RANDOM, study={"seed": seed}
        )
        values.append([trial.value for trial in fold(folder).trials])
    assert values[0] == values[1] != values[2]
    assert values[0][0] != values[0][1]


def test_a_request_to_stop_reaches_the_function_and_the_trial_goes_on(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "study", study_file(tmp_path, 'function = "objectives:waits"\n', trials=1)).folder
    assert fold(folder).trials[0].outcome is None
    assert run_here("resume", folder, "--quiet").returncode == 0
    trial = fold(folder).trials[0]
    assert (trial.outcome, trial.value, len(trial.attempts)) == (Outcome.COMPLETE, 2.0, 2)


def interrupted(folder: Path, file: Path) -> StudyLayout:
    """A study whose only trial was stopped in its first attempt, which left a file."""
    process = start("tune", file, "--quiet", "--dir", folder)
    assert wait_for(lambda: (folder / "trials/0000/attempt-1/checkpoints/attempt-1").exists(), process)
    assert run_here("stop", folder).returncode == 0
    process.communicate()
    assert process.returncode == ExitStatus.STOPPED
    return StudyLayout(folder)


def test_a_trial_goes_on_from_the_folder_that_its_attempts_once_shared(tmp_path: Path) -> None:
    """As dryfit left it before attempts had folders of their own, without a word on whose it is."""
    layout = interrupted(tmp_path / "study", study_file(tmp_path, 'function = "objectives:waits"\n', trials=1))
    kept = layout.trial(0).checkpoints
    (kept / ".dryfit-trial.json").unlink()
    assert [path.name for path in kept.iterdir()] == ["attempt-1"]
    assert run_here("resume", layout.folder, "--quiet").returncode == 0
    assert fold(layout.folder).trials[0].value == 2.0


def test_the_folder_of_another_studys_trial_is_not_taken_over(tmp_path: Path) -> None:
    """The ledger was deleted, to begin anew, but not what its trials had left."""
    file = study_file(tmp_path, 'function = "objectives:waits"\n', trials=1)
    layout = interrupted(tmp_path / "study", file)
    layout.ledger.unlink()
    words = ("tune", file, "--quiet", "--dir", layout.folder, "--set", "study.seed=77")
    done = run_here(*words)
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert (
        f"its ledger is older than its folder: it does not know all attempts in {layout.trial(0).folder}" in done.stderr
    )
    shutil.rmtree(layout.trial(0).attempt(1))
    assert run(*words).returncode != 0
    trial = fold(layout.folder).trials[0]
    assert trial.outcome is Outcome.FAILED and len(trial.attempts) == 1
    assert ".dryfit-trial.json in it is of a trial with fingerprint" in trial.reason
    assert "remove the folder" in run_here("show", layout.folder, "0").stdout


# ---- study files and scripts


def study_file(folder: Path, objective: str, *, trials: int = 3, space: str = "x = [1, 2, 3]") -> Path:
    file = folder / "own.toml"
    file.write_text(
        f'[study]\ntask = "objective"\ntrials = {trials}\n\n[objective]\n{objective}paths = [".", "{SUPPORT}"]\n\n'
        f'[space]\n{space}\n\n[search]\nsampler = "random"\nmirror = "none"\n',
        encoding="utf-8",
    )
    return file


def test_a_study_file_with_a_function_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(trial):\n    return trial.params['deep.rate'] * 10\n")
    file = study_file(tmp_path, 'function = "mine.py:f"\n', space='"deep.rate" = {low = 1, high = 4}')
    done = run_here("tune", file, "--quiet", "--json", "--set", "space.deep.rate.high=2")
    assert done.returncode == 0, done.stderr
    trials = fold(tmp_path / "own").trials
    assert all(trial.value == trial.params["deep.rate"] * 10 <= 20 for trial in trials)
    assert run_here("resume", tmp_path / "own", "--quiet", "--trials", "4").returncode == 0
    (tmp_path / "mine.py").write_text("def f(trial):\n    return -1.0\n")
    done = run_here("resume", tmp_path / "own", "--trials", "5")
    assert "mine.py:f has changed since the trials so far" in done.stderr
    assert fold(tmp_path / "own").trials[4].value == -1.0


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ('function = "nowhere:f"\n', "there is no module nowhere"),
        ('function = "objectives:nothing"\n', "has no nothing"),
        ('function = "objectives:quadratic"\npreload = ["no_such_library"]\n', "objective.preload 'no_such_library'"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_the_first_trial(tmp_path: Path, objective: str, said: str) -> None:
    done = run_here("tune", study_file(tmp_path, objective), "--quiet")
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert said in done.stderr and "[OBJECTIVE]" in done.stderr
    assert fold(tmp_path / "own").trials == []


@pytest.mark.slow
def test_a_dry_run_imports_the_function_and_calls_it_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(trial):\n    raise SystemExit('called')\n")
    found = dryfit.doctor(study_file(tmp_path, 'function = "mine.py:f"\n'), machine=False)
    assert found.healthy, found
    assert [one.found for one in found.findings if one.check == "function"] == ["mine.py:f can be imported"]
    found = dryfit.doctor(study_file(tmp_path, 'function = "mine.py:g"\n'), machine=False)
    assert ["has no g" in one.found for one in found.findings if one.check == "function"] == [True]
    assert not found.healthy


def test_preloaded_modules_are_there_before_the_fork(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys\nseen = 'colorsys' in sys.modules\ndef f(trial):\n    return float(seen)\n"
    )
    file = study_file(tmp_path, 'function = "mine.py:f"\npreload = ["colorsys"]\n', trials=1)
    assert run_here("tune", file, "--quiet").returncode == 0
    assert fold(tmp_path / "own").trials[0].value == 1.0


SCRIPT = """
import multiprocessing
import dryfit

def square(x):
    return x * x

def objective(trial: dryfit.Trial) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # pickles square by the name of this script
        return float(pool.map(square, [trial.params["x"]])[0])

{guard}
print(dryfit.tune(objective=objective, space={{"x": [3]}}, trials=1, folder="here").summary.best.value)
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "search.py").write_text(text)
    command = [sys.executable, "search.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=DEADLINE_S)


@pytest.mark.slow
def test_a_script_searches_a_function_of_its_own(tmp_path: Path) -> None:
    guarded = SCRIPT.format(guard='if __name__ == "__main__":').replace("\nprint", "\n    print")
    done = run_script(tmp_path, guarded)
    assert (done.returncode, done.stdout) == (0, "9.0\n"), done.stderr
    assert run("resume", tmp_path / "here", "--quiet", "--trials", "2").returncode == 0
    assert [trial.value for trial in fold(tmp_path / "here").trials] == [9.0, 9.0]


def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT.format(guard=""))
    assert done.returncode != 0
    assert 'write `if __name__ == "__main__":` above the call of dryfit.tune' in done.stderr


def test_a_module_that_is_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    text = "import dryfit\ndef f(trial):\n    return trial.params['x']\nif __name__ == '__main__':\n"
    text += "    dryfit.tune(objective=f, space={'x': [1.5]}, trials=1, folder='here')\n"
    (tmp_path / "package" / "search.py").write_text(text)
    subprocess.run([sys.executable, "-m", "package.search"], cwd=tmp_path, check=True)
    assert fold(tmp_path / "here").trials[0].value == 1.5
    assert 'function = "package.search:f"' in (tmp_path / "here/frozen.toml").read_text()


def test_what_runs_no_function_of_ones_own(tmp_path: Path) -> None:
    file = study_file(tmp_path, 'function = "objectives:quadratic"\n')
    planned = run_here("plan", file, "--device", "24GiB")
    assert planned.returncode == ExitStatus.CANNOT_RUN
    assert "cannot be planned" in planned.stderr
    begun = run_here("init", tmp_path / "new", "--task", "objective")
    assert begun.returncode == ExitStatus.CANNOT_RUN
    assert "dryfit.tune(objective=..., space=...)" in begun.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "examples" / "objective.py").read_text(encoding="utf-8")
    assert "trials=20" in text
    for trials in (2, 3):
        done = run_script(tmp_path, text.replace("trials=20", f"trials={trials}"))
        assert done.returncode == 0, done.stderr
        assert fold(tmp_path / "noisy_moons-study").counted == trials
    best = fold(tmp_path / "noisy_moons-study").best
    assert best is not None and best.value is not None and 0 < best.value < 0.69
