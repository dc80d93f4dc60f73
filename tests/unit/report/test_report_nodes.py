"""Which machines a study had, what each did, and what each says."""

from pathlib import Path

import pytest

import dryfit.study.functions as api
from dryfit.documents.document import document_of
from dryfit.documents.plots import lanes
from dryfit.documents.summary import nodes_ever, nodes_view
from dryfit.ledger.events import AttemptEnded, AttemptPlaced, NodeJoined, NodeLost
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import Action, ConfigError, FailureKind
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import LOG_FILE
from golden import Golden
from ledgers import Script
from study_runs import run_here


def joined(script: Script, node: str, epoch: int = 1) -> None:
    facts = {"agent": f"agent-{node}", "host": f"box-{node}", "pid": 7, "cores": 8, "host_bytes": 2**34}
    card = DeviceSpec(name="NVIDIA H200", capacity_bytes=139 * 2**30, capability=(9, 0))
    specs = {"n1": (card, card), "n2": (card, None)}.get(node, ())  # n3: as an older version wrote it
    script.say(NodeJoined(node=node, epoch=epoch, devices=("0", "1"), specs=specs, **facts))


def two_sessions() -> Script:
    """Two nodes, one of which is lost with a trial; then another session with a third one, where a trial runs."""
    script = Script()
    script.begin()
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
    alone = Script()
    alone.begin()
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
