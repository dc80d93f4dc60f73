"""A kill -9 while several studies run in a row: the same command goes on, and touches nothing that was done."""

from pathlib import Path

import pytest

from study_runs import ends, fold, kill_now, marked_processes, objective_study, run, start, wait_for


@pytest.mark.slow
def test_a_kill_in_the_second_of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{name}.toml" for name in "abc"]
    for file in files:
        file.write_text(objective_study("stepwise", study="trials = 2\nseed = 5"), encoding="utf-8")
    first, second, third = (file.with_suffix("") for file in files)
    assert run("tune", files[0], "--quiet").returncode == 0
    done = (first / "ledger.jsonl").read_bytes()
    monkeypatch.setenv("STEP_PAUSE_S", "0.15")
    process = start("tune", *files, "--quiet")

    def half_way() -> bool:
        state = fold(second) if (second / "ledger.jsonl").exists() else None
        trials = state.open_trials if state is not None else []
        return any(trial.attempts and trial.attempts[-1].checkpoint_step is not None for trial in trials)

    assert wait_for(half_way, process)
    kill_now(process)
    assert not third.exists()
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    again = run("tune", *files, "--quiet")
    assert again.returncode == 0, again.stderr
    assert (first / "ledger.jsonl").read_bytes() == done
    assert ends(first) == ends(second) == ends(third)
    assert [len(fold(folder).sessions) for folder in (first, second, third)] == [1, 2, 1]
    assert all(marked_processes(folder) == [] for folder in (first, second, third))
