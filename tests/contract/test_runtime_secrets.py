"""Children with secrets in their environment: none is in what they leave, whatever they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.processes.attempt import child_log_tail, read_messages, read_result
from dryfit.processes.child_spec import leave_secrets
from dryfit.processes.failures import classify
from dryfit.settings.check_messages import BatchCheckRequest, CheckRequest, ProbeRequest
from dryfit.settings.plan_messages import CalibrateRequest
from dryfit.settings.secrets import forget_secrets
from dryfit.settings.study_file import Isolation
from dryfit.settings.tables import DataSettings, JointSettings, ModelSettings, ObjectiveSettings
from dryfit.settings.training_messages import (
    ImportRequest,
    MergeRequest,
    ResolveRequest,
    RowsRequest,
    TinyLmRequest,
    TrainRequest,
)
from dryfit.settings.wire import Started
from runtime_jobs import Harness, request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

TOKEN, KEY, PASSWORD = "hf_planted-token-0001", "planted/key 0002", "planted-0003"


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
    assert result.fault.message == "401 Unauthorized: <HF_TOKEN>"
    said = f"{result}{read_messages(folder)}{child_log_tail(folder)}"
    assert TOKEN not in said and "see <HF_TOKEN>" in said and "{<HF_TOKEN>" in said


@pytest.mark.parametrize("isolation", [Isolation.FORKSERVER, Isolation.FRESH])
def test_no_process_is_started_with_a_secret(tmp_path, monkeypatch, isolation):
    """The kernel shows the environment that a process was started with, whatever it removed since."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("DRYFIT_COLD", "1")  # not forked from the process that has imported everything for the tests
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{PASSWORD}@db/x")
    with Harness(tmp_path, isolation=isolation) as harness:
        harness.start("run", "run")
        said = harness.until_said("run", "started").message
        assert isinstance(said, Started)
        pids = (said.pid, harness.supervisor.server_pid or said.pid)
        started = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
        inputs = {os.readlink(f"/proc/{pid}/fd/0") for pid in pids}
    assert all(b"PATH=" in environ for environ in started)
    assert not any(secret.encode() in environ for environ in started for secret in (TOKEN, PASSWORD))
    assert inputs == {os.devnull}  # what handed the secrets over is closed


HUB = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
TRAINING = request("noop")


def training(model: str = "minilm", rows: str = "/a.jsonl", criteria: str | None = None) -> TrainRequest:
    changed = {"model": ModelSettings(name=model), "joint": JointSettings(criteria_model=criteria)}
    settings = TRAINING.config.settings.model_copy(update=changed)
    data = DataSettings(train=rows, validation="/b.jsonl")
    return TRAINING.model_copy(
        update={"config": TRAINING.config.model_copy(update={"settings": settings, "data": data})},
    )


def resolve(*models: str, rows: str = "/a.jsonl") -> ResolveRequest:
    pairs = tuple((ModelSettings(name=model), 16) for model in models)
    config = training(rows=rows).config
    return ResolveRequest(
        task=config.task, data=config.data, settings=config.settings, pairs=pairs, cache_dir="c", device="cpu"
    )


OWN = ObjectiveSettings(function="mine:f", secrets=("MY_API_KEY",))


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (training(), set()),
        (training("/models/mine"), set()),
        (training("org/name"), HUB),
        (training(rows="hub:org/rows"), HUB),
        (training(criteria="org/name"), HUB),
        (BatchCheckRequest(trial=training("org/name"), lengths=(8,)), HUB),
        (BatchCheckRequest(trial=training(), lengths=(8,)), set()),
        (resolve("minilm", "/models/mine"), set()),
        (resolve("minilm", "org/name"), HUB),
        (resolve("minilm", rows="hub:org/rows"), HUB),
        (CheckRequest(folder="/models/mine", task=None, trust=False), set()),
        (ProbeRequest(), set()),
        (CalibrateRequest(case=None, folder="m"), set()),
        (RowsRequest(source="/a.jsonl", columns=("text",), out="o"), set()),
        (RowsRequest(source="hub:org/rows", columns=("text",), out="o"), HUB),
        (MergeRequest(model_dir="m", out="o", threads=1), HUB),
        (TinyLmRequest(folder="f", source="s", seed=0), set()),
        (ImportRequest(objective=OWN), {"MY_API_KEY"}),
        (ImportRequest(objective=ObjectiveSettings(function="mine:f")), set()),
    ],
)
def test_a_job_has_the_secrets_of_the_table_and_no_others(monkeypatch, body, kept):
    inherited = {"HOME": "/home/me", "PGPASSWORD": "inherited", "HTTPS_PROXY": "http://me:proxy-pass@host"}
    monkeypatch.setattr(os, "environ", dict(inherited))
    secrets = {name: f"value of {name}" for name in (*HUB, "MY_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY")}
    leave_secrets(body, secrets)
    assert set(os.environ) == {"HOME", "HTTPS_PROXY"} | kept
    assert all(os.environ[name] == secrets[name] for name in kept)


def test_forgotten_variables_are_gone_for_grandchildren_too(tmp_path, monkeypatch):
    """``os.environ`` writes through to what new processes inherit."""

    monkeypatch.setenv("SOME_API_KEY", KEY)
    forget_secrets(os.environ, keep=frozenset())
    done = subprocess.run(["env"], capture_output=True, text=True, check=True)
    assert KEY not in done.stdout
