"""Study folders, checkpoints and saved models that earlier versions of dryfit wrote: read, gone on with, and used.

tests/older_studies/README.md says what is kept there. Nothing in it is ever made anew.
"""

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import dryfit
import older_studies
import trials
from dryfit.ledger import events
from dryfit.processes.node import available_cores
from dryfit.settings.errors import LoadError
from dryfit.settings.trial import Outcome
from dryfit.tasks.saved_models import folder_health
from study_runs import events_of, run_here, summary_of

KEPT = older_studies.KEPT
STUDIES = sorted(file.parent for file in KEPT.glob("*/*/expected.json"))
VALUE_TOLERANCE = 1e-3
"""Of losses after some fifty steps: processors add in other orders."""
SHARE_TOLERANCE = 0.13
"""Of shares of the few validation rows, which a little rounding changes by a row: the further goals."""
PREDICTION_TOLERANCE = 1e-4

RESUMED_BY_PROOF = ("evidence", "share", "folds", "ranks")
"""Studies whose going on has much in common with that of another; each takes some seconds of imports."""

KINDS = {one.model_fields["type"].default for one in get_args(get_args(events.Event)[0])}
# Kinds of events that no kept study has, each with the reason.
NOT_KEPT = {
    "parallel_set": "what the machine, not the study file, allows side by side: how often it is said is chance",
    "baselines": "they are computed again where a ledger lacks them, as those of earlier versions do",
    "device_set_aside": "a device that is set aside is one of a GPU machine",
    "node_joined": "a study that listens for agents has them: tests/chaos/test_nodes.py",
    "node_lost": "the same",
}

on_linux = pytest.mark.skipif(
    not Path(older_studies.HERE).exists(), reason=f"their study files name their folder by {older_studies.HERE}"
)


@dataclass(frozen=True)
class Kept:
    """A study as it was left, in a folder of its own, and what the code that wrote it made of it."""

    source: Path
    folder: Path
    expected: dict[str, Any]


def name_of(source: Path) -> str:
    return f"{source.parent.name}/{source.name}"


def unpacked(source: Path, folder: Path) -> Kept:
    expected = json.loads((source / "expected.json").read_text(encoding="utf-8"))
    return Kept(source, older_studies.unpack(source, folder / "study"), expected)


@pytest.fixture(scope="module", params=STUDIES, ids=name_of)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Read by many tests, changed by none."""
    return unpacked(request.param, tmp_path_factory.mktemp("kept"))


def assert_alike(have: Any, want: Any, *, tolerance: float, at: str = "") -> None:
    """The same JSON, but that numbers with a fraction may differ by a little."""
    if isinstance(want, dict):
        assert isinstance(have, dict) and have.keys() == want.keys(), at
        for name, value in want.items():
            assert_alike(have[name], value, tolerance=tolerance, at=f"{at}.{name}")
    elif isinstance(want, list):
        assert isinstance(have, list) and len(have) == len(want), at
        for index, value in enumerate(want):
            assert_alike(have[index], value, tolerance=tolerance, at=f"{at}[{index}]")
    elif isinstance(want, float):
        assert math.isclose(have, want, rel_tol=tolerance, abs_tol=tolerance), f"{at}: {have}, not {want}"
    else:
        assert have == want, f"{at}: {have}, not {want}"


def test_every_kind_of_event_is_in_one_of_them() -> None:
    ledgers = [source / "ledger.jsonl" for source in STUDIES]
    there = {json.loads(line)["type"] for file in ledgers for line in file.read_text(encoding="utf-8").splitlines()}
    assert KINDS - there == set(NOT_KEPT)


def test_it_is_read_as_it_was(kept: Kept) -> None:
    assert older_studies.trials_of(kept.folder) == kept.expected["stopped"]
    assert older_studies.interrupted(kept.folder) == kept.expected["interrupted"]


def _earlier_trials(folder: Path) -> int:
    """How many trials are of generations before the last one."""
    read = events_of(folder)
    began = max((one.seq for one in read if isinstance(one, events.GenerationBegan)), default=0)
    return len([one for one in read if isinstance(one, events.TrialAsked) and one.seq < began])


def test_every_command_that_looks_at_it_says_what_it_holds(kept: Kept, tmp_path: Path) -> None:
    outcomes = [trial["outcome"] for trial in kept.expected["stopped"][_earlier_trials(kept.folder) :]]
    counts = summary_of(kept.folder)["trials"]
    for outcome in (Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED):
        assert counts[outcome] == outcomes.count(outcome)
    shown = run_here("show", kept.folder)
    assert shown.returncode == 0, shown.stderr
    for number, trial in enumerate(kept.expected["stopped"]):
        story = run_here("show", kept.folder, str(number), "--json")
        assert story.returncode == 0, story.stderr
        said = json.loads(story.stdout)
        assert said["outcome"] == trial["outcome"] and len(said["attempts"]) == trial["attempts"]
    page, table, storage = tmp_path / "page.html", tmp_path / "trials.csv", tmp_path / "optuna.journal"
    for words in (
        ("report", "-o", page),
        ("export", "--to", "csv", "-o", table),
        ("export", "--to", "optuna", "-o", storage),
    ):
        done = run_here(words[0], kept.folder, *words[1:])
        assert done.returncode == 0, done.stderr
    assert len(table.read_text(encoding="utf-8").splitlines()) == 1 + len(kept.expected["stopped"])
    assert page.stat().st_size and storage.stat().st_size


def resumed(kept: Kept) -> None:
    """Go on with a study to its end, and compare what came of it with what the code that wrote it came to."""
    before = (kept.folder / "ledger.jsonl").read_bytes()
    with contextlib.chdir(kept.folder):
        done = run_here("resume", kept.folder, "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (kept.folder / "ledger.jsonl").read_bytes().startswith(before)
    have, want = older_studies.trials_of(kept.folder), kept.expected["resumed"]
    further = [[trial["values"][1:] for trial in several] for several in (have, want)]
    have, want = ([trial | {"values": trial["values"][:1]} for trial in several] for several in (have, want))
    assert_alike(have, want, tolerance=VALUE_TOLERANCE)
    assert_alike(*further, tolerance=SHARE_TOLERANCE)
    # The trial went on from its checkpoint: no validation before it was made again.
    number, step = kept.expected["interrupted"].values()
    later = events_of(kept.folder)[before.count(b"\n") :]
    reports = [one.point.step for one in later if isinstance(one, events.ReportMade) and one.number == number]
    assert reports and min(reports) > step
    # Another folder, or a key that came later, is written down; it changes nothing.
    assert not [one for one in later if isinstance(one, events.GenerationBegan)]
    revised = [one for one in later if isinstance(one, events.StudyRevised)]
    assert all(one.compatibility is events.Compatibility.SAME and not one.reasons for one in revised)


@on_linux
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(one, id=name_of(one), marks=[pytest.mark.slow] if one.name in RESUMED_BY_PROOF else [])
        for one in STUDIES
        if one.name != "moved"
    ],
)
def test_it_goes_on_from_its_checkpoint_and_ends_as_it_did(source: Path, tmp_path: Path) -> None:
    if source.name == "ranks" and available_cores() < 2:
        pytest.skip("each rank needs a core of its own")
    resumed(unpacked(source, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("source", [one for one in STUDIES if one.name == "moved"], ids=name_of)
def test_a_study_that_was_moved_goes_on_from_its_checkpoint(source: Path, tmp_path: Path) -> None:
    resumed(unpacked(source, tmp_path))


# PEFT itself asks transformers for a property under its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_its_models_load_and_predict_as_they_did(kept: Kept, tmp_path: Path) -> None:
    for model, wanted in kept.expected["models"].items():
        folder = kept.folder / model
        if (folder / "members").is_dir():
            continue  # several models, see below
        assert not dryfit.load(folder).training
        assert folder_health(folder).healthy
        said = trials.predicted(folder, kept.folder / "rows.jsonl", tmp_path / "said.jsonl")[1]
        assert_alike(said, wanted, tolerance=PREDICTION_TOLERANCE, at=model)


ENSEMBLES = [
    (source, model)
    for source in STUDIES
    for model in json.loads((source / "expected.json").read_text(encoding="utf-8"))["models"]
    if model.startswith("final/top")
]


@pytest.mark.parametrize(("source", "model"), ENSEMBLES)
def test_several_models_that_were_averaged_are_read_one_by_one(source: Path, model: str, tmp_path: Path) -> None:
    """The study is read and reported as ever; of its averaged models each still predicts, and the whole says so."""
    kept = unpacked(source, tmp_path)
    assert dryfit.status(kept.folder)
    assert dryfit.write_report(kept.folder).is_file()
    assert folder_health(kept.folder / model).healthy
    for use in (dryfit.load, dryfit.Predictor):
        with pytest.raises(LoadError, match="several models") as caught:
            use(kept.folder / model)
        assert "members/1" in caught.value.hint
    rows = trials.read_lines(kept.folder / "rows.jsonl")
    members = sorted((kept.folder / model / "members").iterdir())
    said = [dryfit.Predictor(member, device="cpu")(rows) for member in members]
    mean_RC = np.mean([[line["probabilities"] for line in lines] for lines in said], axis=0)
    wanted = [line["probabilities"] for line in kept.expected["models"][model]]
    assert mean_RC.tolist() == pytest.approx(np.array(wanted), abs=PREDICTION_TOLERANCE)


def test_there_are_models_and_an_ensemble() -> None:
    assert {one.name for one in STUDIES} >= {"criteria", "evidence", "share", "causal-lm", "moved"}
    assert ENSEMBLES
