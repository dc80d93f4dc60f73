"""Gaussian processes and CMA-ES in real studies: the same after a kill; a process that dies changes one trial."""

from functools import partial
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

import dryfit
import objectives
from dryfit.search import samplers
from dryfit.search.samplers import GpProcess, GpQuestion, GpTrial, ask_once
from dryfit.search.space import to_text
from dryfit.settings.choices import Direction
from dryfit.settings.errors import MachineError
from dryfit.settings.study_file import SamplerName
from dryfit.study import loop
from study_runs import fold, kill_now, run, start, wait_for_events

SUPPORT = str(Path(objectives.__file__).parent)
TRIALS = 6


def question(number: int) -> GpQuestion:
    space = {"x": to_text(FloatDistribution(0.0, 1.0)), "kind": to_text(CategoricalDistribution(["a", "b"]))}
    trials = [
        GpTrial(params={"x": n / 8, "kind": "ab"[n % 2]}, values=(-((n / 8 - 0.4) ** 2),), excess=n / 8 - 0.6)
        for n in range(number)
    ]
    running = GpTrial(params={"x": 0.45, "kind": "a"})
    return GpQuestion(space=space, directions=(Direction.MAXIMIZE,), trials=(*trials, running), seed=number)


@pytest.mark.slow
def test_an_answer_depends_on_its_question_alone() -> None:
    with GpProcess() as process:
        once = [process.ask(question(number)) for number in (4, 7)]
        again = [process.ask(question(number)) for number in (7, 4)]
        assert process.take_trouble() == ""
    assert once == again[::-1] and once[0] != once[1]
    assert ask_once(question(7)) == once[1]
    assert once[1] is not None and once[1]["x"] < 0.6  # type: ignore[operator]


def study(folder: Path, sampler: str, function: str = "quadratic") -> Path:
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(
        f'[study]\ntask = "objective"\ntrials = {TRIALS}\n[objective]\nfunction = "objectives:{function}"\n'
        f'paths = ["{SUPPORT}"]\n[space]\nx = {{low = -4.0, high = 4.0}}\nn = {{low = 1, high = 3}}\n'
        f'kind = ["plain", "shifted"]\n[search]\nsampler = "{sampler}"\nmirror = "none"\nstartup_trials = 2\n'
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["cmaes"])
def test_a_study_that_is_killed_is_the_undisturbed_one(tmp_path: Path, sampler: str) -> None:
    whole, killed = (study(tmp_path / name, sampler) for name in ("whole", "killed"))
    assert run("tune", whole).returncode == 0
    process = start("tune", killed)
    assert wait_for_events(killed, 26, process)
    kill_now(process)
    assert run("tune", killed).returncode == 0
    want, have = (fold(folder).trials for folder in (whole, killed))
    assert len(want) == TRIALS
    assert [trial.params for trial in have] == [trial.params for trial in want]
    notes = fold(whole).sessions[0].opened.notes
    assert ("cmaes leaves to tpe: kind (conditional, or a choice)" in notes) == (sampler == "cmaes")


def test_a_process_that_cannot_work_leaves_the_trial_to_tpe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GpProcess", partial(GpProcess, ("false",)))
    found = {}
    for sampler in ("gp", "tpe"):
        search = {"sampler": sampler, "startup_trials": 2, "mirror": "none"}
        folder = tmp_path / sampler
        dryfit.tune(objective=objectives.quadratic, space=objectives.SPACE, trials=4, folder=folder, search=search)
        found[sampler] = [trial.params for trial in fold(folder).trials]
    assert found["gp"] == found["tpe"]
    text = (tmp_path / "gp" / "ledger.jsonl").read_text()
    assert text.count("the Gaussian process gave no suggestion (") == 2


def test_without_its_package_cmaes_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="cmaes is not installed") as caught:
        samplers.demand_package(SamplerName.CMAES)
    assert caught.value.hint == "pip install 'dryfit[cmaes]'"
