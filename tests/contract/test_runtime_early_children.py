"""Children that the fork server makes between two imports: those whose job is there, and they wait for no import."""

import sys
from pathlib import Path

import pytest

from dryfit.processes.child_spec import PRELOAD, SERVE, ChildMessage
from dryfit.settings.study_file import Isolation
from dryfit.settings.wire import Started
from runtime_jobs import Harness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")

SLOW = """
import time
from pathlib import Path
from runtime_jobs import run_job

Path({folder!r}, "begun" if {waits_for!r} == "go" else "early").touch()
while not Path({folder!r}, {waits_for!r}).exists():
    time.sleep(0.01)
"""


def harness(folder: Path, entry: str) -> Harness:
    """A server that imports a module before it looks for requests, and one after, that take until a file is there."""
    for name, waits_for in (("early_import", "asked"), ("slow_import", "go")):
        text = SLOW.format(folder=str(folder), waits_for=waits_for)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    sys.path.append(str(folder))  # where the harness finds what it gives on
    preload = ("runtime_jobs", "early_import", SERVE, "slow_import")
    return Harness(folder, isolation=Isolation.FORKSERVER, preload=preload, entry=entry)


def test_a_child_is_made_and_its_end_heard_before_all_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with harness(tmp_path, "runtime_jobs:run_job") as early:
        early.start("first", "noop")
        (tmp_path / "asked").touch()  # it looks once: by then the request is there
        event = early.until_exit("first")
        assert event.result is not None and event.result.fault is None, event.evidence.log_tail
        assert not (tmp_path / "go").exists()
        early.start("second", "noop")
        early.events += early.supervisor.wait(0.3)
        assert "started" not in early.said("second"), "it is made once everything is imported, in one go"
        (tmp_path / "go").touch()
        assert early.until_exit("second").result is not None


def test_a_child_waits_for_the_module_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would import it for itself, and all that this rests on."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with harness(tmp_path, "slow_import:run_job") as early:
        early.start("first", "noop")
        (tmp_path / "asked").touch()
        while not (tmp_path / "begun").exists():
            early.events += early.supervisor.wait(0.05)
        early.events += early.supervisor.wait(0.3)
        assert not [one for one in early.events if isinstance(one, ChildMessage) and isinstance(one.message, Started)]
        (tmp_path / "go").touch()
        assert early.until_exit("first").result is not None


def test_what_prepares_a_study_is_imported_first() -> None:
    first, then = (place for place, name in enumerate(PRELOAD) if name == SERVE)
    assert PRELOAD.index("dryfit.training.resolve") < first < PRELOAD.index("dryfit.tasks.baselines") < then
    assert PRELOAD.index("dryfit.training.trial_jobs") > then  # a trial has everything with it
