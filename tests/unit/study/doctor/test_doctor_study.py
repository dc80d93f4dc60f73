"""What a study's file, folder and record say before anything is run."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import instant
import ledgers
from dryfit.ledger.events import Resolved, SessionOpened, StudyCreated, TrialAsked, TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger, StudyLock
from dryfit.ledger.replay import StudyState
from dryfit.search.space import Space
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.trial import Outcome
from dryfit.study.files import disk_need
from dryfit.study.machine_checks import Finding, FolderFacts, Status, failed
from dryfit.study.study_checks import (
    cache_finding,
    data_changed,
    disk_finding,
    lock_finding,
    mirror_finding,
    record_findings,
    space_findings,
)
from golden import Golden

SPACE = {"optim.lr": {"low": 1e-5, "high": 1e-3, "log": True}, "head.pooling": ["cls", "mean", "max"]}


def config(**tables: dict[str, Any]) -> StudyConfig:
    data = {"train": "/a.jsonl", "validation": "/b.jsonl"}
    return instant.config(**({"space": SPACE, "data": data} | tables))


def begun(folder: Path, asked: StudyConfig) -> StudyLayout:
    """A study of one trial, as an earlier run left it."""
    layout = StudyLayout(folder)
    space = Space.from_config(asked)
    study = asked.study
    ledger = Ledger(layout.ledger, apply=lambda event: None)
    ledger.append(
        StudyCreated(
            id="i",
            name=study.name,
            task=study.task,
            metric=study.metric,
            direction=study.resolved_direction,
            seed=study.seed,
            space=space.to_json(),
        )
    )
    ledger.append(SessionOpened(pid=1, host="h", version="0", total=4))
    ledger.append(TrialAsked(number=0, params={}, internal={}, distributions={}, seed=0, fingerprint="f"))
    ledger.append(TrialFinished(number=0, outcome=Outcome.COMPLETE, value=0.5))
    ledger.close()
    layout.frozen_file.write_text(dump_toml(asked), encoding="utf-8")
    return layout


def record(asked: StudyConfig, layout: StudyLayout) -> tuple[dict[str, Finding], StudyState]:
    findings, state = record_findings(asked, Space.from_config(asked), layout)
    return {finding.check: finding for finding in findings}, state


def test_a_space_is_drawn_from() -> None:
    found, drawn = space_findings(config(), Space.from_config(config()))
    assert found.status is Status.PASS and len(drawn) == 64
    assert {settings.head.pooling for _, settings in drawn} == {"cls", "mean", "max"}
    nothing, none = space_findings(config(space={}), Space.from_config(config(space={})))
    assert "nothing is searched" in nothing.found and none == ()


def test_a_running_study_s_lock_is_in_the_way(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    assert lock_finding(layout).status is Status.PASS
    with StudyLock(layout.lock):
        found = lock_finding(layout)
        assert found.status is Status.FAIL
        assert "is running it" in found.found and f"dryfit stop {tmp_path}" in found.fix
    assert lock_finding(layout).status is Status.PASS


def test_a_study_that_goes_on(tmp_path: Path) -> None:
    found, _ = record(config(), StudyLayout(tmp_path))
    assert "no trial yet" in found["ledger"].found
    layout = begun(tmp_path, config())
    before = layout.ledger.read_bytes()
    found, state = record(config(), layout)
    assert {finding.status for finding in found.values()} == {Status.PASS}
    assert found["ledger"].found == "4 events, 1 trials, 1 of them ended"
    assert len(state.trials) == 1
    assert layout.ledger.read_bytes() == before


def test_what_a_change_would_mean_is_said_beforehand(tmp_path: Path, golden: Golden) -> None:
    layout = begun(tmp_path, config())
    before = layout.ledger.read_bytes()
    found, _ = record(config(optim={"weight_decay": 0.5}), layout)
    narrower = config(space=SPACE | {"head.pooling": ["cls", "mean"]})
    wider = config(space=SPACE | {"head.pooling": ["cls", "mean", "max", "attention"]}, study={"seed": 8})
    every = [found["going on"], *(record(one, layout)[0]["going on"] for one in (narrower, wider))]
    assert [one.status for one in every] == [Status.WARN, Status.WARN, Status.PASS]
    golden("doctor", *([one.found, one.fix] for one in every))
    assert layout.ledger.read_bytes() == before


def test_other_rows_are_a_warning(tmp_path: Path) -> None:
    _, state = record(config(), begun(tmp_path, config()))
    state.apply(Resolved(result=ledgers.resolved()))
    assert data_changed(state, ledgers.resolved().data_fingerprint) is None
    found = data_changed(state, "others")
    assert found is not None and found.status is Status.WARN
    assert "fingerprint others, it was d0d0cafe" in found.found and "a new generation would begin" in found.found


def test_a_torn_ledger_and_a_lost_frozen_file(tmp_path: Path) -> None:
    layout = begun(tmp_path, config())
    layout.frozen_file.unlink()
    found, _ = record(config(), layout)
    assert found["going on"].status is Status.WARN
    assert "nobody wrote down what the trials so far were run with" in found["going on"].found
    layout.ledger.write_bytes(layout.ledger.read_bytes().replace(b'"v":1', b'"v":9'))
    found, state = record(config(), layout)
    assert found["ledger"].status is Status.FAIL and "a newer dryfit wrote it" in found["ledger"].found
    assert state.created is None


def test_mirrors(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    assert mirror_finding("none", layout, {}).found == "off"
    assert mirror_finding("journal", layout, {}).status is Status.PASS
    assert mirror_finding(f"sqlite:///{tmp_path}/x.db", layout, {}).status is Status.PASS
    assert list(tmp_path.iterdir()) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"postgresql+psycopg2://me:secret@127.0.0.1:{port}/db"
        found = mirror_finding(url, layout, {})
        assert found.status is Status.PASS, found
    for gone in (url, "nonsense", "postgresql://me:secret@127.0.0.1:x/db", "oracle://h/db"):
        found = mirror_finding(gone, layout, {})
        assert found.status is Status.WARN and found.fix
        assert "secret" not in found.found + found.fix


def test_a_mirror_named_by_a_variable(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://me:secret@127.0.0.1:{server.getsockname()[1]}/db"
        found = mirror_finding("env:STORAGE", layout, {"STORAGE": url})
        assert found.status is Status.PASS and "secret" not in found.found, found
    assert mirror_finding("env:STORAGE", layout, {"STORAGE": url}).status is Status.WARN
    missing = mirror_finding("env:STORAGE", layout, {})
    assert missing.status is Status.FAIL and "STORAGE is not set" in missing.found and "export STORAGE=" in missing.fix


def test_the_token_cache(tmp_path: Path) -> None:
    layout, folder = StudyLayout(tmp_path), FolderFacts(tmp_path, "ext4", 1)
    assert "none yet" in cache_finding(layout, folder).found
    (layout.cache / "abc").mkdir(parents=True)
    (layout.cache / "abc" / "train.safetensors").write_bytes(bytes(3 << 20))
    (layout.cache / "frozen").mkdir()
    (layout.cache / "frozen" / "abc.states").write_bytes(bytes(1 << 20))
    assert "1 of (data, model, length), 3 MiB" in cache_finding(layout, folder).found
    assert cache_finding(layout, replace(folder, not_writable="no")).status is Status.WARN


def test_disk_is_compared_with_what_is_free_and_what_is_its_own() -> None:
    need = disk_need([4_000_000], ["adamw"], keep="best:3", trials=10, parallel=2)
    folder = FolderFacts(Path("/x"), "ext4", 10 * need.total_bytes)
    assert disk_finding(need, folder, 0).status is Status.PASS
    assert disk_finding(need, replace(folder, free_bytes=round(1.5 * need.total_bytes)), 0).status is Status.WARN
    less = replace(folder, free_bytes=need.total_bytes - 1)
    short = disk_finding(need, less, 0)
    assert short.status is Status.FAIL and "--set runtime.keep=best:2" in short.fix
    assert disk_finding(need, less, 1).status is Status.WARN


def test_a_finding_to_act_on_says_how() -> None:
    with pytest.raises(ValueError, match="must say how"):
        failed("study", "disk", "full", "")
