"""A program that uses every public name of dryfit with its type: pyright checks it against the installed wheel.

Run with a study's folder and a saved model, it reads both.
"""

import sys
from pathlib import Path
from typing import Any, assert_type

from torch import nn
from transformers import PreTrainedModel

import dryfit
from dryfit.parallel import parallelize


def objective(trial: dryfit.Trial) -> float:
    low = trial.params["x"]
    if not isinstance(low, float) or trial.report(low, step=trial.number):
        return 0.0
    assert_type(trial.checkpoint_dir, Path)
    return low + trial.seed


class Watch(dryfit.Observer):
    def on_event(self, event: dryfit.events.Event, state: dryfit.events.StudyState) -> None:
        if isinstance(event, dryfit.events.TrialFinished):
            assert_type(event.value, float | None)
            assert_type(state.best, dryfit.events.TrialState | None)


def prepare(folder: Path) -> list[str]:
    files = assert_type(dryfit.init(folder, preset="smoke", force=True), list[Path])
    own = assert_type(dryfit.init_rows(folder / "own", folder / "rows.csv", columns={"label": "answer"}), Path)
    rows = dryfit.import_rows("squad", folder / "squad.json", out=folder / "data")
    diagnosis = dryfit.doctor(folder / "study.toml", machine=False)
    names = [file.name for file in (*files, own)]
    return [*names, rows.model_dump_json(), *(found.found for found in diagnosis.findings)]


def search(folder: Path) -> dryfit.TuneResult:
    of_function = dryfit.tune(objective=objective, space={"x": {"low": 0.0, "high": 1.0}}, trials=2, folder=folder)
    assert_type(of_function, dryfit.TuneResult)
    several = assert_type(dryfit.tune_all([folder], trials=3, observers=[Watch()]), dryfit.TuneAllResult)
    if several.status != 0 or several.stopped is not None:
        assert_type(dryfit.stop(folder), int | None)
    return dryfit.resume(folder, trials=4)


def in_a_script(folder: Path) -> None:
    """What a training script calls, in a trial or by itself."""
    dryfit.report(0.5, step=1)
    if dryfit.current_trial() is not None:
        dryfit.checkpointed(1)


def plan(study_file: Path) -> tuple[bool, int]:
    answer = dryfit.plan(study_file, device="8GiB", overrides=["train.batch_size=4"])
    space = dryfit.plan_space(preset="smoke", device="rtx4090")
    measured = dryfit.calibrate("cuda:0", quick=True)
    assert_type(answer.reasons, tuple[str, ...])
    assert_type(space.fits, bool)
    return answer.verdict.fits and bool(measured.model_dump()), answer.shortfall_bytes


def rehearse(script: Path) -> int:
    answer = dryfit.rehearse(script, device="24GiB", steps=2)
    assert_type(answer.reasons, tuple[str, ...])
    with dryfit.virtual_gpu("rtx4090") as gpu:
        assert_type(gpu.peak_allocated_bytes, int)
    return answer.shortfall_bytes


def use(folder: Path, model: Path) -> int:
    trained = dryfit.train(folder, trial="best", out=model)
    assert_type(dryfit.train_top(folder, top=1, seeds=2).status == trained.status, bool)
    compared = dryfit.compare(folder, top=2, seeds=2).comparison
    assert compared is None or assert_type(compared.judgement, tuple[str, ...])
    assert_type(dryfit.check(model).healthy, bool)
    assert_type(dryfit.export(folder, "csv"), Path)
    assert_type(dryfit.export(model, "transformers", folder / "plain"), Path)
    assert_type(dryfit.write_report(folder), Path)
    predicted = dryfit.predict(model, folder / "data" / "test.jsonl", folder / "predictions.jsonl", batch=8)
    said = assert_type(dryfit.Predictor(model, device="cpu")(["a text", {"text": "another"}]), list[dict[str, Any]])
    assert dryfit.push(model, "me/model", dry_run=True).sizes
    return int(trained.status) + predicted.rows - predicted.bad + len(said)


def cut(model: Path) -> int:
    """Under torchrun."""
    part = assert_type(parallelize(model, 2), PreTrainedModel)
    return sum(one.numel() for one in part.parameters())


def tell(folder: Path) -> list[str]:
    script = assert_type(dryfit.init_script(folder / "script", "train.py", ["--lr", "1e-3"]), Path)
    archive = dryfit.bug_report(folder).file
    several = dryfit.status_all([folder])
    assert_type(dryfit.Study(folder).trial(0).model_dump(), dict[str, Any])
    return [
        str(script),
        archive,
        *(study.model_dump_json() for study in several.studies),
    ]


def read(folder: Path, model: Path) -> None:
    summary = dryfit.status(folder)
    best = summary.best
    assert best is not None
    assert_type(best.value, float)
    assert_type(summary.trials.complete, int)
    state = dryfit.open_study(folder)
    assert len(state.trials) == summary.trials.total
    loaded = assert_type(dryfit.load(model), nn.Module)
    version: str = dryfit.__version__
    print(f"dryfit {version}: trial {best.number}, {type(loaded).__name__}")
    try:
        dryfit.load(folder.absolute() / "no-such-model")
    except dryfit.LoadError as error:
        refusal: dryfit.DryfitError = error
        print(f"{refusal.code}: {refusal.doing}: {refusal.found}")


if __name__ == "__main__":
    read(Path(sys.argv[1]), Path(sys.argv[2]))
