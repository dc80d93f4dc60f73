"""A study whose file changes between sessions goes on, always: what it makes of each change, and that nothing is lost.

Whole sessions on a real ledger and a real mirror, with children that answer at once.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState as Optunas

import dryfit
from changing import SAMPLERS, AtOnce, Killed, Watch, config, mirrored, own_function, run, space_of
from dryfit.documents.report_tables import csv_text, trials_table
from dryfit.documents.summary import began_text, generation_text, generations_table, summarise
from dryfit.documents.worth import verdict_of
from dryfit.ledger.events import Compatibility, Event, GenerationBegan, StudyRevised
from dryfit.ledger.ledger import Ledger, read_ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.child_spec import ChildSpec
from dryfit.search import samplers as suggesting
from dryfit.search.space import Space
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.trial import Outcome, TrialRecord

SAME, EXTENDS, FORKS = Compatibility
TRIALS, MORE = 8, 5
OWN = {"x": {"low": 0.0, "high": 1.0}, "n": {"low": 1, "high": 4}, "kind": ["a", "b"]}


@pytest.fixture(
    scope="module", params=["tpe", *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS if name != "tpe")]
)
def sampler(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def before(sampler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of models that is done."""
    folder = tmp_path_factory.mktemp(sampler) / "study"
    state = run(folder, config(sampler, TRIALS))
    assert state.counts[Outcome.COMPLETE] == TRIALS
    return folder


def told_to_samplers(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The trials that each suggestion was told of."""
    told: list[set[int]] = []
    make_draw = suggesting.make_draw

    def listening(asked: Any) -> Any:
        records: list[TrialRecord] = [record for record in asked.history if record.outcome is not None]
        told.append({record.number for record in records if asked.space.read(record.params, record.own)})
        return make_draw(asked)

    monkeypatch.setattr(suggesting, "make_draw", listening)
    return told


def check_new_trials(state: StudyState, study: StudyConfig, first: int) -> None:
    """New trials lie in the new space, whichever way they were drawn."""
    space = Space.from_config(study)
    assert len(state.trials) > first
    for trial in state.trials[first:]:
        for name in space.names:
            case = space.active(name, trial.params)
            assert (case is None) == (name not in trial.params)
            assert case is None or case.contains(trial.params[name])
        assert set(trial.params) <= set(space.names)


NARROW = {"low": 1e-4, "high": 1e-3, "log": True}
CHANGES: dict[str, tuple[Compatibility, dict[str, Any], bool]] = {
    # what it makes of it, the change, whether values still compare
    "nine models to seven": (FORKS, {"space": space_of(7)}, True),
    "other batches": (FORKS, {"space": space_of(9, train__batch_size=[8, 32, 64])}, True),
    "a wider range": (EXTENDS, {"space": space_of(9, optim__lr={"low": 1e-6, "high": 1e-1, "log": True})}, True),
    "a narrower range": (FORKS, {"space": space_of(9, optim__lr=NARROW)}, True),
    "no logarithm": (SAME, {"space": space_of(9, optim__lr={"low": 1e-5, "high": 1e-2})}, True),
    "a case lost": (
        FORKS,
        {"space": space_of(9, train__batch_size={"choices": [8, 16], "when": {"model.name": ["m0", "m1"]}})},
        True,
    ),
    "a key more": (EXTENDS, {"space": space_of(9, optim__weight_decay=[0.0, 0.01])}, True),
    "a key less": (FORKS, {"space": space_of(9, head__dropout=None), "head": {"dropout": 0.1}}, True),
    "more epochs": (FORKS, {"train": {"epochs": 5}}, True),
    "another seed": (SAME, {"study": {"seed": 77}}, True),
    "another pruner": (SAME, {"search": {"pruner": "median"}}, True),
    "the other direction": (FORKS, {"study": {"direction": "minimize"}}, False),
    "another metric": (FORKS, {"study": {"metric": "accuracy"}}, False),
    "one more goal": (FORKS, {"study": {"also": ["loss"]}}, False),
    "other rows": (FORKS, {}, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_goes_on(
    before: Path, sampler: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, change, compares = CHANGES[name]
    folder = tmp_path / "study"
    shutil.copytree(before, folder)
    done = (folder / "ledger.jsonl").read_bytes()
    told = told_to_samplers(monkeypatch)
    forks, watch = verdict is FORKS, Watch()
    after = config(sampler, MORE if forks else TRIALS + MORE, **change)
    state = run(folder, after, data="others" if name == "other rows" else "rows", watch=watch)

    assert (folder / "ledger.jsonl").read_bytes().startswith(done), "nothing is ever taken back"
    assert len(state.generations) == (2 if forks else 1)
    assert state.counts[Outcome.COMPLETE] == (MORE if forks else TRIALS + MORE)
    check_new_trials(state, after, TRIALS)
    events = [event for event in watch.events if isinstance(event, GenerationBegan | StudyRevised)]
    assert len(events) == (0 if name == "another pruner" or name == "another seed" else 1)
    if events and name != "no logarithm":
        assert events[0].reasons
    usable = {trial.number for trial in state.trials[:TRIALS]} if not forks else set(state.generation.reused)
    assert all(one & set(range(TRIALS)) == usable for one in told)
    if not compares:
        assert not usable
    # both Optuna studies can be loaded, each with its own choices under plain names
    old = mirrored(folder, "toy")
    assert len(old.trials) == (TRIALS if forks else TRIALS + MORE)
    assert {trial.state for trial in old.trials} == {Optunas.COMPLETE}
    assert not any("~" in key for trial in old.trials[:TRIALS] for key in trial.params)
    if forks:
        new = mirrored(folder, "toy-g2")
        assert [trial.user_attrs["trial"] for trial in new.trials] == list(range(TRIALS, TRIALS + MORE))
        assert not any("~" in key for trial in new.trials for key in trial.params)
        assert new.user_attrs["generation"] == 2 and new.user_attrs["reasons"] == list(state.generation.reasons)
        assert new.user_attrs["told"] == list(state.generation.reused)
        assert [one.name for one in new.directions] == [one.name for one in state.directions]
    # once more: nothing has changed since
    again = run(folder, after.model_copy(), data="others" if name == "other rows" else "rows")
    assert len(again.generations) == len(state.generations) and len(again.trials) == len(state.trials)


def test_what_is_said(tmp_path: Path) -> None:
    run(tmp_path, config("random", TRIALS))
    watch = Watch()
    state = run(tmp_path, config("random", 3, space=space_of(6)), watch=watch)
    fitting = [n for n in range(TRIALS) if state.trials[n].params["model.name"] not in ("m6", "m7", "m8")]
    assert list(state.generation.reused) == fitting
    assert 0 < len(fitting) < TRIALS
    began = next(event for event in watch.events if isinstance(event, GenerationBegan))
    said = began_text(began, state)
    assert said is not None
    assert f"generation 2 begins (forks): 8 trials of generation 1 kept, {len(fitting)} of them used" in said
    assert 'model.name: ["m0"' in said
    summary = summarise(state)
    assert (summary.trials.complete, summary.trials.total, summary.trials.running) == (3, 3, 0)
    assert summary.best is not None and summary.best.number >= TRIALS
    view = summary.generation
    assert (view.number, view.mirror, view.earlier, view.used) == (2, "toy-g2", TRIALS, len(fitting))
    text = generation_text(view)
    assert text.startswith("generation 2 (since 20") and text.endswith(f"kept, {len(fitting)} of them used")
    table = trials_table(state)
    assert [row[2] for row in table.rows] == ["1"] * TRIALS + ["2"] * 3
    assert [row[0] for row in generations_table(state).rows] == ["2", "1"]
    assert [trial.number for trial in state.present] == [8, 9, 10]
    assert len(csv_text(state).splitlines()) == 1 + TRIALS + 3
    assert "trial 0" not in verdict_of(state, defaults_first=True).result


def test_values_of_other_goals_stand_under_their_own_names(tmp_path: Path) -> None:
    run(tmp_path, config("random", 2))
    state = run(tmp_path, config("random", 2, study={"metric": "accuracy", "also": ["loss"]}))
    heads, rows = trials_table(state).heads, trials_table(state).rows
    assert heads[2:5] == ("generation", "accuracy", "loss")
    assert rows[0][3].startswith("f1_macro 0.") and rows[0][4] == "-"
    assert rows[2][3].startswith("0.") and rows[2][4] == "0.5000"
    assert all(len(row) == len(heads) for row in rows)
    assert mirrored(tmp_path, "toy-g2").directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    assert mirrored(tmp_path, "toy").directions == [StudyDirection.MAXIMIZE]
    exported = JournalStorage(JournalFileBackend(str(dryfit.export(tmp_path, "optuna", tmp_path / "all.journal"))))
    assert optuna.get_all_study_names(exported) == ["toy", "toy-g2"]
    assert "Generations of the study" in dryfit.write_report(tmp_path).read_text(encoding="utf-8")


def test_the_best_points_are_tried_again_where_values_do_not_compare(tmp_path: Path) -> None:
    first = run(tmp_path, config("random", TRIALS, search={"defaults_first": False}))
    best = sorted(first.trials, key=lambda trial: -(trial.value or 0))
    second = run(tmp_path, config("random", 5, search={"defaults_first": False}), data="others")
    assert second.generation.reused == ()
    assert [trial.params for trial in second.present[:3]] == [trial.params for trial in best[:3]]
    assert not any(trial.enqueued for trial in second.present[3:])
    # more epochs: the values do not compare, the points still are points
    third = run(tmp_path, config("random", 4, search={"defaults_first": False}, train={"epochs": 7}), data="others")
    best = sorted(second.present, key=lambda trial: (-(trial.value or 0), trial.number))
    assert [trial.params for trial in third.present[:3]] == [trial.params for trial in best[:3]]
    # what was best is worst now
    study = {"direction": "minimize"}
    last = run(
        tmp_path, config("random", 2, study=study, search={"defaults_first": False}, train={"epochs": 7}), data="others"
    )
    assert last.generation.points == () and len(last.generations) == 4


def test_going_back_brings_the_old_trials_back(tmp_path: Path) -> None:
    run(tmp_path, config("tpe", TRIALS))
    run(tmp_path, config("tpe", 3), data="others")
    state = run(tmp_path, config("tpe", 3))
    assert [generation.number for generation in state.generations] == [1, 2, 3]
    assert state.generation.reused == tuple(range(TRIALS))
    assert [len(state.in_generation(number)) for number in (1, 2, 3)] == [TRIALS, 3, 3]
    wide = run(tmp_path, config("tpe", 6, space=space_of(9, optim__lr={"low": 1e-6, "high": 1.0, "log": True})))
    assert len(wide.generations) == 3 and wide.generation.reused == tuple(range(TRIALS))
    back = run(tmp_path, config("tpe", 3))
    inside = {trial.number for trial in wide.present if 1e-5 <= float(trial.params["optim.lr"] or 0) <= 1e-2}  # type: ignore[arg-type]
    assert set(back.generation.reused) == {*range(TRIALS), *inside}


def test_a_key_more_gives_earlier_trials_the_value_they_had(tmp_path: Path) -> None:
    run(tmp_path, config("tpe", TRIALS, optim={"weight_decay": 0.01}))
    wider = config("tpe", TRIALS + 2, space=space_of(9, optim__weight_decay=[0.0, 0.01]), optim={"weight_decay": 0.0})
    state = run(tmp_path, wider)
    space = Space.from_config(wider)
    told = [space.read(record.params, record.own) for record in state.history()]
    assert [point["optim.weight_decay"] for point in told[:TRIALS]] == [0.01] * TRIALS


# ---- a function of the user's own


@pytest.mark.parametrize(
    ("change", "verdict", "told"),
    [
        ({"space": OWN | {"n": {"low": 1.0, "high": 4.0}}}, FORKS, TRIALS),
        ({"space": OWN | {"kind": ["a", "b", "c"]}}, EXTENDS, 0),
        ({"space": OWN | {"y": [1, 2]}}, FORKS, 0),
        ({"space": {"x": OWN["x"]}}, FORKS, 0),
        ({"objective": {"version": 2}}, FORKS, 0),
        ({"objective": {"function": "mine:g"}}, FORKS, 0),
        ({"objective": {"goals": ["loss"]}}, FORKS, 0),
        ({"objective": {"goals": ["value", "size"]}}, FORKS, 0),
        ({"objective": {"directions": ["maximize"]}}, FORKS, 0),
        ({"objective": {"preload": ["math"]}}, SAME, 0),
    ],
)
def test_a_function_of_ones_own(tmp_path: Path, change: dict[str, Any], verdict: Compatibility, told: int) -> None:
    run(tmp_path, own_function(OWN, TRIALS))
    after = own_function(**({"space": OWN, "trials": TRIALS + 4} | change))
    state = run(tmp_path, after)
    assert len(state.generations) == (2 if verdict is FORKS else 1)
    check_new_trials(state, after, TRIALS)
    assert len(state.generation.reused) == told
    assert state.counts[Outcome.COMPLETE] == TRIALS + 4
    if "n" in after.space and isinstance(after.space["n"][0].low, float):
        assert all(isinstance(trial.params["n"], float) for trial in state.present)
    mirrored(tmp_path, "toy-g2" if verdict is FORKS else "toy")


def test_another_task_is_another_generation(tmp_path: Path) -> None:
    run(tmp_path, config("tpe", 3))
    state = run(tmp_path, own_function(OWN, 3), data="")
    assert state.created is not None and state.created.task == "objective"
    assert (len(state.generations), state.generation.reused, state.generation.points) == (2, (), ())
    assert {tuple(trial.params) for trial in state.present} == {("x", "n", "kind")}


def test_a_changed_source_is_said_and_changes_nothing_else(tmp_path: Path) -> None:
    run(tmp_path, own_function(OWN, 2), revisions={"mine:f": "1"})
    watch = Watch()
    state = run(tmp_path, own_function(OWN, 3), revisions={"mine:f": "2"}, watch=watch)
    assert len(state.generations) == 1
    assert any(
        "mine:f has changed since the trials so far" in note and "objective.version" in note for note in watch.notes
    )


# ---- before the first trial, and trials that have not ended


def stop_before(kind: str) -> Callable[[Ledger, Event], None]:
    def kill(ledger: Ledger, event: Event) -> None:
        if event.type == kind:
            raise Killed

    return kill


def test_before_the_first_trial_everything_may_change_and_nothing_is_deleted(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, config("tpe", 3), kill=stop_before("trial_asked"))
    begun = (tmp_path / "ledger.jsonl").read_bytes()
    assert begun
    changed = config("tpe", 3, space=space_of(4, train__batch_size=[8]), study={"metric": "loss"})
    state = run(tmp_path, changed, data="others")
    assert (tmp_path / "ledger.jsonl").read_bytes().startswith(begun)
    assert len(state.generations) == 1 and state.direction == "minimize" and len(state.trials) == 3
    assert [one.name for one in mirrored(tmp_path, "toy").directions] == ["MINIMIZE"]


def test_a_generation_without_a_trial_may_change_again(tmp_path: Path) -> None:
    run(tmp_path, config("tpe", 3))
    with pytest.raises(Killed):
        run(tmp_path, config("tpe", 3), data="others", kill=stop_before("trial_asked"))
    state = run(tmp_path, config("tpe", 3))
    assert (len(state.generations), state.generation.name) == (2, "toy-g2")
    assert state.generation.reasons == ("what had changed was changed back",)
    assert state.generation.reused == (0, 1, 2)
    assert len(mirrored(tmp_path, "toy-g2").trials) == 3


@pytest.mark.parametrize("left", ["nothing", "a result"])
def test_a_trial_that_had_not_ended(tmp_path: Path, left: str) -> None:
    with pytest.raises(Killed):
        run(tmp_path, config("tpe", 3), kill=stop_before("attempt_ended"))
    result = tmp_path / "trials/0000/attempt-1/result.json"
    value = json.loads(result.read_text())["train"]["value"]
    if left == "nothing":
        result.unlink()
    state = run(tmp_path, config("tpe", 2, space=space_of(7)))
    first = state.trials[0]
    assert first.outcome is (Outcome.COMPLETE if left == "a result" else Outcome.CANCELLED)
    assert first.value == (value if left == "a result" else None)
    if left == "nothing":
        assert first.reason == "generation 2 of the study began before it ended"
    assert state.counts[Outcome.COMPLETE] == 2 and state.counts[Outcome.CANCELLED] == 0
    states = {"nothing": Optunas.FAIL, "a result": Optunas.COMPLETE}
    assert mirrored(tmp_path, "toy").trials[0].state is states[left]
    assert len(mirrored(tmp_path, "toy-g2").trials) == 2


def test_a_trial_that_had_not_ended_goes_on_where_the_study_was_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, config("tpe", 3, optim={"weight_decay": 0.01}), kill=stop_before("attempt_ended"))
    (tmp_path / "trials/0000/attempt-1/result.json").unlink()
    wider = config("tpe", 3, space=space_of(9, optim__weight_decay=[0.0, 0.01]), optim={"weight_decay": 0.0})
    asked: list[float] = []
    start = AtOnce.start

    def listening(self: AtOnce, spec: ChildSpec) -> None:
        assert isinstance(spec.body, TrainRequest)
        asked.append(spec.body.config.settings.optim.weight_decay)
        start(self, spec)

    monkeypatch.setattr(AtOnce, "start", listening)
    state = run(tmp_path, wider)
    assert len(state.generations) == 1 and state.counts[Outcome.COMPLETE] == 3
    assert asked[0] == 0.01, "it was asked for with the file's old value"
    assert "optim.weight_decay" not in state.trials[0].params


# ---- killed around the event


def ends(state: StudyState) -> list[tuple[Any, ...]]:
    return [
        (trial.number, trial.generation, trial.params, trial.enqueued, trial.outcome, trial.value)
        for trial in state.trials
    ]


def remove_later_attempts(folder: Path, lines: list[bytes]) -> None:
    """Remove the files of attempts that no event has: an attempt's folder is made after its event was written."""
    events = [json.loads(line) for line in lines]
    known = {(event["number"], event["attempt"]) for event in events if event["type"] == "attempt_placed"}
    for attempt in folder.glob("trials/*/attempt-*"):
        if (int(attempt.parent.name), int(attempt.name.removeprefix("attempt-"))) not in known:
            shutil.rmtree(attempt)


@pytest.mark.parametrize(
    "name",
    ["other rows", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nine models to seven", "a key more"))],
)
def test_a_kill_before_midway_or_after_any_event_changes_nothing(tmp_path: Path, name: str) -> None:
    verdict, change, _ = CHANGES[name]
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    run(begun, config("tpe", 5))
    shutil.copytree(begun, whole)
    data = "others" if name == "other rows" else "rows"
    after = config("tpe", 3 if verdict is FORKS else 7, **change)
    expected = ends(run(whole, after, data=data))
    lines = (whole / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    first = len((begun / "ledger.jsonl").read_bytes().splitlines())
    for kept in range(first, len(lines)):
        for torn in (b"", lines[kept][: len(lines[kept]) // 2]):
            folder = tmp_path / f"cut-{kept}-{len(torn)}"
            shutil.copytree(whole, folder)  # the newest frozen.toml there can be, and the files of trials ...
            (folder / "ledger.jsonl").write_bytes(b"".join(lines[:kept]) + torn)
            remove_later_attempts(folder, lines[:kept])
            state = run(folder, after, data=data)
            assert ends(state) == expected, (kept, torn)
            kinds = [event.type for event in read_ledger(folder / "ledger.jsonl")]
            assert kinds.count("generation_began") + kinds.count("study_revised") == 1
            shutil.rmtree(folder)


def test_an_older_ledger_is_read_with_the_file_beside_it(tmp_path: Path) -> None:
    """An older dryfit wrote no values of the file's own: they stand in frozen.toml, which each session replaces."""
    run(tmp_path, config("tpe", 4))
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    created = json.loads(lines[0])
    for key in ("own", "function", "folder"):
        del created[key]
    ledger.write_text(json.dumps(created) + "\n" + "".join(lines[1:]))
    (tmp_path / "frozen.toml").unlink()
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(ledger, copy)
    unknown = run(copy, config("tpe", 2))
    assert len(unknown.generations) == 2 and "nobody wrote down" in unknown.generation.reasons[0]
