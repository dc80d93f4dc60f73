"""Children with secrets in their environment: none is in what they leave, whatever they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.config.schema import Isolation
from dryfit.core.settings.tables import DataSettings, ModelSettings
from dryfit.core.text.secrets import forget_secrets
from dryfit.runtime.children import child
from dryfit.runtime.children.result_reading import child_log_tail, read_messages, read_result
from dryfit.runtime.failures.classify import classify
from runtime_jobs import Harness, request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

TOKEN, KEY = "hf_planted-token-0001", "planted/key 0002"


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("isolation", [Isolation.FORKSERVER, Isolation.FRESH])
def test_a_child_that_tells_all_it_knows(tmp_path, monkeypatch, isolation):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("SOME_API_KEY", KEY)
    (tmp_path / "elsewhere").write_text(TOKEN)
    (tmp_path / "harness").mkdir()
    spill_from = {"SPILL_FROM": str(tmp_path / "elsewhere")}
    with Harness(tmp_path / "harness", isolation=isolation, more_environment=spill_from) as harness:
        folder = harness.start("spill", "spill")
        ended = harness.until_exit("spill")
    assert classify(ended.evidence, ended.result).sentence.endswith("RuntimeError: 401 Unauthorized: <HF_TOKEN>")
    assert b"SPILL_FROM" in (folder / "log.txt").read_bytes()  # it printed its environment, which had no secrets
    assert b"<HF_TOKEN>" in (folder / "log.txt").read_bytes()  # the traceback
    assert b"<HF_TOKEN>" in (folder / "result.json").read_bytes()
    for secret in (TOKEN, KEY):
        assert secret.encode() not in everything(tmp_path / "harness")


def test_what_a_child_could_not_know_to_be_secret_is_taken_out_by_its_reader(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").write_text(TOKEN)
    (tmp_path / "harness").mkdir()
    with Harness(tmp_path / "harness", more_environment={"SPILL_FROM": str(tmp_path / "elsewhere")}) as harness:
        folder = harness.start("spill", "spill")
        harness.until_exit("spill")
    assert TOKEN.encode() in (folder / "result.json").read_bytes()
    messages = (folder / "messages.jsonl").read_text()
    (folder / "messages.jsonl").write_text(messages + f'{{"v":1,"type":"note","text":"see {TOKEN}"}}\n{{{TOKEN}\n')
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = read_result(folder)
    assert result is not None and result.fault is not None
    assert result.fault.message == "401 Unauthorized: <HF_TOKEN>"
    said = f"{result}{read_messages(folder)}{child_log_tail(folder)}"
    assert TOKEN not in said and "see <HF_TOKEN>" in said and "{<HF_TOKEN>" in said


@pytest.mark.parametrize(
    ("model", "rows", "kept"),
    [
        ("minilm", "a.jsonl", set()),
        ("/models/mine", "a.jsonl", set()),
        ("org/name", "a.jsonl", {"HF_TOKEN"}),
        ("minilm", "hub:org/rows", {"HF_TOKEN"}),
    ],
)
def test_a_trial_keeps_the_hubs_token_only_where_it_may_need_it(monkeypatch, model, rows, kept):
    monkeypatch.setattr(os, "environ", {"HF_TOKEN": TOKEN, "SOME_API_KEY": KEY, "HOME": "/home/me"})
    body = request("noop")
    settings = body.config.settings.model_copy(update={"model": ModelSettings(name=model)})
    data = DataSettings(train=rows, validation="b.jsonl")
    config = body.config.model_copy(update={"settings": settings, "data": data})
    child._forget_secrets(body.model_copy(update={"config": config}))
    assert set(os.environ) == {"HOME"} | kept


def test_forgotten_variables_are_gone_for_grandchildren_too(tmp_path, monkeypatch):
    """``os.environ`` writes through to what new processes inherit."""

    monkeypatch.setenv("SOME_API_KEY", KEY)
    forget_secrets(os.environ, keep=frozenset())
    done = subprocess.run(["env"], capture_output=True, text=True, check=True)
    assert KEY not in done.stdout
