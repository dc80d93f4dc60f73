"""``dryfit bug-report``: what it tells, of whatever is left of a study; and that no planted secret or text is in it."""

import json
import os
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dryfit.study.functions  # noqa: F401  # the module `doctor` there has the name of its function
from dryfit.settings.errors import ExitStatus
from dryfit.settings.secrets import shareable
from dryfit.study.diagnosis import MOST_EVENTS, MOST_LOG_BYTES, MOST_LOGS
from dryfit.study.machine_checks import Finding, passed
from study_runs import run_here

TEXT = "I feel so empty since my sister Annabelle left"
"""A row's text, as it may come into any message."""
PLANTED = {
    "hub": "hf_QkQkQkQkQkQkQkQkQkQk",
    "variable": "purple-Monkey-dishwasher",
    "oddly named": "k3y0fSomeServiceThatNobodyKnows42",
    "of a URL": "sw0rdfish",
    "assigned": "tr0ub4dor",
    "bearer": "abc123.def456/ghi+789==",
    "forge": "ghp_0123456789abcdefghij",
    "cloud": "AKIAIOSFODNN7EXAMPLE",
    "signed": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "text": "Annabelle",
    "label": "melancholic",
    "prompt": "Does she suffer",
    "row": "empty since my sister",
    "linked": "behind the link",
    "client": "acme-hospital",
    "patient": "patient-jones",
    "own": "said by print",
    "key": "-----BEGIN RSA PRIVATE KEY-----",
}

STUDY = f"""
[study]
name = "posts"
task = "criteria"
[data]
train = "https://me:{PLANTED["of a URL"]}@host.example/{PLANTED["client"]}/train.jsonl"
validation = "/data/{PLANTED["client"]}/{PLANTED["patient"]}.jsonl"
labels = ["{PLANTED["label"]}", "other"]
[model]
name = "org/encoder-{PLANTED["hub"]}"
[lm]
criteria_prompt = "{PLANTED["prompt"]}? {{text}}"
[extra]
api_key = "{PLANTED["assigned"]}"
"{TEXT}" = 1
"""

LOG = f"""
Traceback (most recent call last):
  File "/home/jones/{PLANTED["client"]}/model.py", line 7, in forward
    raise ValueError("{TEXT}")
  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl
ValueError: could not convert string to float: '{TEXT}'
TypeError: this can't be a row: '{TEXT}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB
{PLANTED["own"]}: {TEXT}
PGPASS token={PLANTED["assigned"]} Authorization: Bearer {PLANTED["bearer"]}
CUDA error while logged in with {PLANTED["hub"]} and {PLANTED["forge"]} {PLANTED["cloud"]} {PLANTED["signed"]}
RuntimeError: fetching https://me:{PLANTED["of a URL"]}@host.example failed, password={PLANTED["assigned"]}
OSError: {PLANTED["variable"]} and {PLANTED["oddly named"]} were in the environment
{PLANTED["key"]}
"""


def event(seq: int, kind: object, **fields: object) -> str:
    return json.dumps({"v": 1, "seq": seq, "at": 1.0 * seq, "type": kind, **fields}) + "\n"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose every file has something that nobody else may see; no check is run."""
    folder = tmp_path / "home" / "posts"
    attempt = folder / "trials" / "0000" / "attempt-1"
    attempt.mkdir(parents=True)
    (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    failure = {"kind": "user_code", "sentence": f"an exception ended it: ValueError: '{TEXT}'", "action": "give_up"}
    failure |= {"error_type": "ValueError", "error": f"ValueError: {TEXT!r}", "detail": LOG}
    lines = [
        event(0, "study_created", id="0123456789abcdef", name="posts", host=PLANTED["client"]),
        event(1, "resolved", result={"splits": {"train": {"rows": 2, "label_counts": {PLANTED["label"]: 2}}}}),
        event(2, "trial_asked", number=0, params={"optim.lr": 0.5, "head.pooling": "cls", "x": TEXT}),
        event(3, "attempt_ended", number=0, attempt=1, failure=failure),
    ]
    (folder / "ledger.jsonl").write_text("".join(lines), encoding="utf-8")
    (attempt / "log.txt").write_text(LOG, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_PASSWORD", PLANTED["variable"])
    monkeypatch.setenv("SERVICE", PLANTED["oddly named"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(sys.modules["dryfit.study.diagnosis"], "examine", checks)
    return folder


def checks(*_: object, **__: object) -> Iterator[Finding]:
    yield passed("machine", "disk", f"{Path.home()}/posts on a disk, {PLANTED['hub']}, '{TEXT}'")


def unpacked(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name).decode("utf-8") for name in opened.namelist()}


def reported(folder: Path, out: Path) -> dict[str, str]:
    done = run_here("bug-report", folder, "--out", out, "--quiet")
    assert done.returncode == 0, done.stderr
    parts = unpacked(out)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()[1:-1]} == parts.keys() - {"README.txt"}
    assert done.stdout.splitlines()[-1] == str(out)
    return parts


def test_no_planted_secret_and_no_text_is_anywhere_in_the_archive(study: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "log.txt").write_text(f"ValueError: {PLANTED['linked']}\n", encoding="utf-8")
    (study / "logs").symlink_to(outside)
    (study / "trials" / "0001").symlink_to(outside)
    (study / "trials" / "0000" / "attempt-1" / "stacks.txt").symlink_to(outside / "log.txt")
    (study / "trials" / "0000" / "attempt-1" / f"{PLANTED['patient']}.txt").write_text("ValueError: x\n")
    os.mkfifo(study / "trials" / "0000" / "fifo.txt")
    parts = reported(study, tmp_path / "bug.zip")
    everything = "\n".join([*parts, *parts.values()])
    assert {name: value for name, value in PLANTED.items() if value in everything} == {}
    assert str(tmp_path) not in everything and "jones" not in everything
    # What it takes to find a bug is there.
    assert parts["versions.txt"].startswith("dryfit ")
    assert json.loads(parts["environment.json"])["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert json.loads(parts["doctor.json"])[-1]["found"].startswith("<study> on a disk, <token>")
    settings = json.loads(parts["study.json"])
    assert settings["study"] == {"name": "<5 characters>", "task": "criteria"}
    events = [json.loads(line) for line in parts["events.jsonl"].splitlines()]
    assert [one["type"] for one in events] == ["study_created", "resolved", "trial_asked", "attempt_ended"]
    assert events[2]["params"] == {"optim.lr": 0.5, "head.pooling": "cls", "x": f"<{len(TEXT)} characters>"}
    assert (events[3]["failure"]["kind"], events[3]["failure"]["error_type"]) == ("user_code", "ValueError")
    log = parts["study/trials/0000/attempt-1/log.txt"]
    assert 'File ".../model.py", line 7, in forward' in log
    assert 'File "site-packages/torch/nn/modules/module.py", line 1751' in log
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB" in log
    assert sum(name.startswith("study/") for name in parts) == 1


def test_messages_of_a_users_own_code_are_left_out(study: Path, tmp_path: Path) -> None:
    own = '[study]\ntask = "objective"\n[objective]\nfunction = "mine:f"\n[space]\nx = [1]\n'
    (study / "study.toml").write_text(own, encoding="utf-8")
    said = f"mine.Odd: it was {TEXT}\nMineError: it was {TEXT}\nValueError: it was {TEXT}\n"
    (study / "trials" / "0000" / "attempt-1" / "log.txt").write_text(said, encoding="utf-8")
    failure = {"kind": "user_code", "sentence": f"it ended: Odd: it was {TEXT}", "error": f"Odd: it was {TEXT}"}
    (study / "ledger.jsonl").write_text(event(0, "attempt_ended", failure=failure), encoding="utf-8")
    parts = reported(study, tmp_path / "bug.zip")
    assert "Annabelle" not in "".join(parts.values())
    assert "ValueError: <" in parts["study/trials/0000/attempt-1/log.txt"]


def test_a_broken_study_still_gives_one(study: Path, tmp_path: Path) -> None:
    (study / "study.toml").write_bytes(b"[study\n\xff" + TEXT.encode())
    with (study / "ledger.jsonl").open("ab") as ledger:
        ledger.write(event(4, TEXT).encode() + event(5, PLANTED["hub"]).encode() + event(6, {TEXT: TEXT}).encode())
        ledger.write(TEXT.encode() + b"\n" + b"[" * 100_000 + b"\n\x00\xff\n" + event(9, "x").encode() + b'{"torn')
    parts = reported(study, tmp_path / "bug.zip")
    assert "Annabelle" not in "".join(parts.values()) and PLANTED["hub"] not in "".join(parts.values())
    assert "cannot_be_told" in json.loads(parts["study.json"])
    told = json.loads(parts["ledger.json"])
    assert len(told["unreadable_lines_counted_back_from_the_last"]) == 4 and not told["last_line_is_whole"]
    assert told["events_by_type"]["x"] == 1
    assert '"unreadable_bytes"' in parts["events.jsonl"]
    (study / "ledger.jsonl").unlink()
    os.mkfifo(study / "ledger.jsonl")
    (study / "study.toml").unlink()
    (study / "study.toml").symlink_to(tmp_path / "nowhere")
    parts = reported(study, tmp_path / "second.zip")
    assert "FIFO" in parts["ledger.json"] and "FIFO" in parts["events.jsonl"]


def test_what_cannot_be_examined_is_said(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Iterator[Finding]:
        yield passed("machine", "first", "fine")
        raise PermissionError(13, "Permission denied", "/tmp")

    monkeypatch.setattr(sys.modules["dryfit.study.diagnosis"], "examine", broken)
    parts = reported(study, tmp_path / "bug.zip")
    found = json.loads(parts["doctor.json"])
    assert (found[-1]["status"], found[-1]["check"]) == ("fail", "checks") and "Permission denied" in found[-1]["found"]


def test_it_is_bounded(study: Path, tmp_path: Path) -> None:
    (study / "ledger.jsonl").write_text("".join(event(n, "checkpoint", step=n) for n in range(1000)))
    for number in range(40):
        attempt = study / "trials" / f"{number:04d}" / "attempt-1"
        attempt.mkdir(parents=True, exist_ok=True)
        with (attempt / "log.txt").open("w") as log:  # the tail begins in the middle of a secret
            log.write("ValueError: " + PLANTED["hub"] * 20_000 + "\n" + "KeyError: 5\n" * 2000)
    parts = reported(study, tmp_path / "bug.zip")
    lines = parts["events.jsonl"].splitlines()
    assert len(lines) == MOST_EVENTS and json.loads(lines[-1])["step"] == 999
    logs = [text for name, text in parts.items() if name.startswith("study/")]
    assert len(logs) == MOST_LOGS
    assert all(len(text) <= 3 * MOST_LOG_BYTES and "QkQk" not in text and "KeyError: <" in text for text in logs)
    assert (tmp_path / "bug.zip").stat().st_size < 1 << 20


def test_what_is_there_is_not_replaced(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "bug.zip"
    out.write_text("mine")
    done = run_here("bug-report", study, "--out", out)
    assert done.returncode == ExitStatus.CANNOT_RUN and out.read_text() == "mine"
    assert run_here("bug-report", tmp_path / "nowhere").returncode == ExitStatus.CANNOT_RUN
    assert run_here("bug-report", study, "--out", tmp_path / "no" / "x.zip").returncode == ExitStatus.CANNOT_RUN


def test_without_a_study_it_is_of_the_machine(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = json.loads(run_here("bug-report", "--json", "-q").stdout)
    parts = unpacked(Path(answer["file"]))
    assert [part["name"] for part in answer["parts"]] == ["versions.txt", "environment.json", "doctor.json"]
    assert all(part["bytes"] == len(parts[part["name"]].encode()) for part in answer["parts"])
    assert stat.S_ISREG(Path(answer["file"]).lstat().st_mode) and Path(answer["file"]).parent == tmp_path


def test_a_quotation_that_was_cut_off_is_left_out() -> None:
    share = shareable({}, Path("/home/jane"), "box")
    assert share.log(f"TypeError: this can't be: '{TEXT}") == f"TypeError: this can't be: <{len(TEXT) + 1} characters>"
    assert share.log("ValueError: it isn't 5") == "ValueError: it isn't 5"
