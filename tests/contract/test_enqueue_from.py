"""A study that begins with the best trials of another one goes on without it, after any kill."""

import shutil
from pathlib import Path

import objectives
from study_runs import fold, kill_now, run, run_here, start, wait_for_events

SUPPORT = str(Path(objectives.__file__).parent)
TOTAL = 6


def study(folder: Path, space: str, search: str, trials: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(
        f'[study]\ntask = "objective"\ntrials = {trials}\n[objective]\nfunction = "objectives:quadratic"\n'
        f'paths = ["{SUPPORT}"]\n[space]\n{space}\n[search]\nmirror = "none"\nstartup_trials = 2\n{search}\n'
    )
    return folder


X = "x = {low = -4.0, high = 4.0}"
KIND = 'kind = ["plain", "shifted"]'


def test_points_are_the_study_s_own_from_its_first_event_on(tmp_path: Path) -> None:
    before = study(tmp_path / "before", f"{X}\nn = {{low = 1, high = 3}}\n{KIND}", "", trials=5)
    assert run_here("tune", before).returncode == 0
    best = [trial.params for trial in fold(before).ranked[:2]]
    search = 'enqueue_from = "../before:top2"'
    narrower = f"{X}\nn = [1, 2, 3]\n{KIND}\nmore = [1, 2]"
    folders = [study(tmp_path / name, narrower, search, TOTAL) for name in ("whole", "killed", "late")]
    whole, killed, late = folders
    done = run_here("tune", whole)
    assert "trying 2 point(s) first" in done.stderr and "more of its trials" in done.stderr
    process = start("tune", killed)
    assert wait_for_events(killed, 6, process)
    kill_now(process)
    shutil.rmtree(before)
    assert run("tune", killed).returncode == 0
    assert run("resume", killed, "--trials", str(TOTAL + 1)).returncode == 0
    assert run_here("tune", whole, "--trials", str(TOTAL + 1)).returncode == 0
    want, have = (fold(folder).trials for folder in (whole, killed))
    assert [trial.params for trial in have] == [trial.params for trial in want]
    assert [{name: trial.params[name] for name in best[0]} for trial in want[:2]] == best
    assert [len(trial.enqueued) for trial in want] == [3, 3, *[0] * (TOTAL - 1)]
    refused = run_here("tune", late)
    assert refused.returncode == 2 and "there is none" in refused.stderr
