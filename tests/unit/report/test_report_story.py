"""A trial's story: in order, with what its processes noted, and with where to read on."""

import json
from pathlib import Path

import pytest

import dryfit.study.functions as api
from dryfit.documents.document import document_of
from dryfit.documents.plots import lanes
from dryfit.documents.story import FOLLOWED, MomentKind, TrialStory, story_lines, trial_story
from dryfit.documents.summary import nodes_ever, nodes_view
from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    FailureFacts,
    NodeJoined,
    NodeLost,
    ReportMade,
    TrialAsked,
)
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import Action, ConfigError, FailureKind
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.trial import FoldScore, MetricPoint, Outcome
from dryfit.settings.wire import (
    LOG_FILE,
    MESSAGES_FILE,
    STACKS_FILE,
    Checkpointed,
    FirstStep,
    Message,
    Note,
    Phase,
    Report,
    Started,
)
from golden import Golden
from ledgers import Script, begun, eventful
from study_runs import run_here

LAYOUT = StudyLayout(Path("/study"))
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 23.64 GiB"


def told(script: Script, number: int = 0, layout: StudyLayout = LAYOUT) -> TrialStory:
    return trial_story(script.state(), number, script.events, layout)


def texts(story: TrialStory) -> list[str]:
    return [one.text for one in story.moments]


def tried_twice() -> Script:
    """A trial that runs out of memory after a checkpoint, and completes with the next fallback."""
    script = begun()
    params = {"train.batch_size": 32, "train.max_length": 64}
    script.ask(0, params)
    script.plan(0, params)
    script.say(AttemptPlaced(number=0, attempt=1, device="1", needs_bytes=3 * 2**29))
    script.say(AttemptStarted(number=0, attempt=1, pid=77, overhead_ms=12.4))
    script.report(0, 0, 0.6)
    facts = FailureFacts(
        kind=FailureKind.OOM_DEVICE,
        sentence="the device's memory did not suffice",
        action=Action.FALLBACK,
        error_type="torch.OutOfMemoryError",
        error=OOM,
        detail="in train/step.py, line 40\nstep 21, rows a7, b9",
    )
    script.say(AttemptEnded(number=0, attempt=1, failure=facts), 2.5)
    script.say(AttemptPlaced(number=0, attempt=2, device="1", terms=("with the next fallback of its plan",)))
    script.say(AttemptStarted(number=0, attempt=2, pid=78, overhead_ms=11.0))
    script.report(0, 1, 0.7, attempt=2)
    script.say(AttemptEnded(number=0, attempt=2), 1)
    script.finish(0, Outcome.COMPLETE, 0.7, best=1, steps=40)
    return script


def test_a_story_is_told_in_order(golden: Golden) -> None:
    story = told(tried_twice())
    times = [one.at for one in story.moments if one.at is not None]
    assert times == sorted(times)
    golden("show", [one.what for one in story.moments], story_lines(story))


def test_every_action_has_words() -> None:
    assert set(FOLLOWED) == set(Action)


def test_an_error_that_the_sentence_has_told_is_not_told_twice() -> None:
    script = begun()
    script.ask(0, {})
    script.place(0)
    facts = FailureFacts(
        kind=FailureKind.USER_CODE,
        sentence="an exception ended it: ValueError: no such luck",
        action=Action.GIVE_UP,
        error_type="builtins.ValueError",
        error="no such luck",
    )
    script.say(AttemptEnded(number=0, attempt=1, failure=facts), 1)
    (failure,) = (one for one in told(script).moments if one.what is MomentKind.FAILURE)
    assert not any("no such luck" in one for one in failure.details)


def test_a_trial_that_nobody_has_looked_at_since_its_run_was_killed() -> None:
    script = eventful()
    story = told(script, len(script.state().trials) - 1)
    script.ask(story.number + 1, {})  # the last that was heard of that run
    assert (story.outcome, story.attempts[0].ended, story.lost_s) == (None, False, 0.0)
    script.now_s += 3600
    script.open()
    later = told(script, story.number)
    assert later.lost_s > 0 and later.time_s < 60
    assert later.moments[-1].what is MomentKind.SESSION


def test_the_json_has_a_schema_and_all_of_it(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    stacks = layout.trial(0).attempt(1) / STACKS_FILE
    stacks.parent.mkdir(parents=True)
    stacks.write_text("Thread 0x1\n")
    (layout.trial(0).attempt(2)).mkdir()
    (layout.trial(0).attempt(2) / STACKS_FILE).touch()
    document = json.loads(told(tried_twice(), layout=layout).model_dump_json())
    assert (document["schema"], document["study"], document["number"]) == (1, "made-up", 0)
    first, second = document["attempts"]
    assert first["failure"]["kind"] == "oom_device" and first["failure"]["error"] == OOM
    assert (first["stacks"], second["stacks"]) == (str(stacks), None)
    assert (first["lost_s"], second["failure"]) == (2.5, None)
    assert document["values"] == {"f1_macro": 0.7}
    assert document["plan"]["verdict"] == "fits_with"
    assert [one["what"] for one in document["moments"]][-1] == "finished"


def write_messages(folder: Path, *messages: Message) -> None:
    folder.mkdir(parents=True)
    (folder / MESSAGES_FILE).write_text("".join(f"{message.model_dump_json()}\n" for message in messages))


def test_notes_of_processes_stand_where_they_were_made(tmp_path: Path, golden: Golden) -> None:
    layout = StudyLayout(tmp_path)
    point = MetricPoint(n=0, step=20, epoch=1.0, value=0.6, metrics={})
    write_messages(
        layout.trial(0).attempt(1),
        Note(text="before its first line"),
        Started(pid=77, overhead_ms=12.4),
        Phase(name="load"),
        Note(text="loading"),
        FirstStep(after_ms=1.0),
        Note(text="after a step that the ledger does not know"),
        Report(point=point),
        Checkpointed(step=20),
        Note(text="after the checkpoint"),
    )
    write_messages(layout.trial(0).attempt(2), Note(text="alone"))
    golden("show", [(one.what, one.text) for one in told(tried_twice(), layout=layout).moments])


def test_many_notes_are_cut_and_counted(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    write_messages(layout.trial(0).attempt(2), *(Note(text=f"note {number}") for number in range(60)))
    found = [one.text for one in told(tried_twice(), layout=layout).moments if one.what is MomentKind.NOTE]
    assert len(found) == 51 and found[-1].startswith("10 ")


def test_a_session_that_began_while_the_trial_was_open_is_part_of_it() -> None:
    script = eventful()
    lost = next(trial.number for trial in script.state().trials if len(trial.attempts) == 2 and trial.number == 13)
    kinds = [one.what for one in told(script, lost).moments]
    assert kinds.index(MomentKind.SESSION) < kinds.index(MomentKind.FAILURE)
    assert MomentKind.SESSION not in [one.what for one in told(script, 0).moments]


def test_folds_are_told(golden: Golden) -> None:
    script = begun()
    script.ask(0, {})
    script.place(0)
    point = MetricPoint(n=5, step=35, epoch=1.5, value=0.75, metrics={"f1_macro": 0.7}, fold=2)
    script.say(ReportMade(number=0, attempt=1, point=point))
    script.say(AttemptEnded(number=0, attempt=1))
    folds = (FoldScore(0.8, (), 10, 20, 20), FoldScore(0.7, (), 20, 20, 20))
    script.finish(0, Outcome.COMPLETE, 0.75, folds=folds, steps=40)
    story = told(script)
    assert (story.best, story.folds) == (None, folds)
    assert story.spreads == {"f1_macro": pytest.approx(0.005**0.5)}
    golden("show", story_lines(story))


def test_a_trial_that_another_sampler_drew_says_why() -> None:
    script = begun()
    script.ask(0, {"train.batch_size": 32})
    asked = script.events[-1]
    assert isinstance(asked, TrialAsked)
    script.events[-1] = asked.model_copy(update={"fallback": "gp took longer than 30 s"})
    assert texts(told(script))[0].endswith("gp took longer than 30 s")


# ---- which machines a study had, what each did, and what each says


def joined(script: Script, node: str, epoch: int = 1) -> None:
    facts = {"agent": f"agent-{node}", "host": f"box-{node}", "pid": 7, "cores": 8, "host_bytes": 2**34}
    card = DeviceSpec(name="NVIDIA H200", capacity_bytes=139 * 2**30, capability=(9, 0))
    specs = {"n1": (card, card), "n2": (card, None)}.get(node, ())  # n3: as an older version wrote it
    script.say(NodeJoined(node=node, epoch=epoch, devices=("0", "1"), specs=specs, **facts))


def two_sessions() -> Script:
    """Two nodes, one of which is lost with a trial; then another session with a third one, where a trial runs."""
    script = begun()
    joined(script, "n1")
    joined(script, "n2")
    for number, node in enumerate(("n1", "n2")):
        script.ask(number, {})
        script.say(AttemptPlaced(number=number, attempt=1, node=node))
    script.say(AttemptEnded(number=0, attempt=1), 10)
    script.finish(0, Outcome.COMPLETE, 0.5)
    script.say(NodeLost(node="n2", epoch=1, why="its agent was ended", trials=1))
    script.fail(1, 1, FailureKind.LOST, "its node was lost", Action.RETRY)
    joined(script, "n2", epoch=2)
    script.close("stopped")
    script.open()
    joined(script, "n1")
    joined(script, "n3")
    script.say(AttemptPlaced(number=1, attempt=2, node="n3"))
    return script


def test_the_report_has_every_machine_that_ever_joined_and_the_list_those_of_the_last_session(golden: Golden) -> None:
    state = two_sessions().state()
    ((_, table),) = nodes_ever(state)
    view = nodes_view(state)
    assert view.running and [(one.node, one.attempts) for one in view.nodes] == [("n1", 0), ("n3", 1)]
    assert [row for _, row in lanes(state.attempts)] == ["the CPU of n1", "the CPU of n2", "the CPU of n3"]
    heard = nodes_view(state, {"n1": 2.4, "n2": 9.0}.get)
    assert [(one.node, one.heard_s) for one in heard.nodes] == [("n1", 2.4), ("n3", None)]
    golden("nodes", table, *(document_of(one).blocks[0] for one in (view, heard)))
    alone = begun()
    assert nodes_ever(alone.state()) == ()


def test_the_page_lists_the_machines(tmp_path: Path) -> None:
    page = api.write_report(two_sessions().write(tmp_path)).read_text(encoding="utf-8")
    assert "Machines that joined" in page and "box-n2" in page and "the CPU of n3" in page


def test_what_a_machine_says_now_is_its_agents_log_and_its_trials(tmp_path: Path) -> None:
    layout = StudyLayout(two_sessions().write(tmp_path))
    for file, text in (
        (layout.node_log("n3"), "joined as n3\n"),
        (layout.trial(1).attempt(1) / LOG_FILE, "of the lost attempt\n"),
        (layout.trial(1).attempt(2) / LOG_FILE, "x" * 100_000 + "\nloss 0.25\n"),
        (layout.trial(0).attempt(1) / LOG_FILE, "of another node\n"),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    logs = {one.name: one.text for one in api.node_logs(tmp_path, "n3").logs}
    assert list(logs) == ["agent", "fork server", "trial 1"]
    assert logs["agent"] == "joined as n3\n" and logs["fork server"] == ""
    assert logs["trial 1"].endswith("x\nloss 0.25\n") and len(logs["trial 1"]) < 10_000
    said = run_here("nodes", tmp_path, "--logs", "n3")
    assert said.returncode == 0 and "joined as n3\n\n== fork server" in said.stdout and "(nothing)" in said.stdout
    assert '"node":"n3"' in run_here("nodes", tmp_path, "--logs", "n3", "--json").stdout.replace(" ", "")
    with pytest.raises(ConfigError, match="n1, n3"):
        api.node_logs(tmp_path, "n2")
