"""What a study's file, folder and record say before anything is run."""

import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instant
import ledgers
from dryfit.ledger.events import Resolved, SessionOpened, StudyCreated, TrialAsked, TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger, StudyLock
from dryfit.ledger.replay import StudyState
from dryfit.search.space import Space
from dryfit.settings.check_messages import (
    BatchCheckRequest,
    BatchCheckResult,
    BatchWalk,
    PointCheck,
    ProbeFailure,
    ProbeResult,
    StepCheck,
)
from dryfit.settings.errors import ChildError
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.tables import TrialSettings
from dryfit.settings.training_messages import ResolveResult, SplitFacts
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import ErrorParts
from dryfit.study.files import disk_need
from dryfit.study.machine_checks import Finding, FolderFacts, Status, failed
from dryfit.study.study_checks import (
    CheckScope,
    batch_checks,
    cache_finding,
    covering,
    data_changed,
    data_findings,
    device_findings,
    disk_finding,
    fold_findings,
    lock_finding,
    mirror_finding,
    model_findings,
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


# ---- What a study's children are asked, and what their answers mean


CARD = DeviceSpec(name="A card", capacity_bytes=24 << 30, capability=(7, 5))
STEP = StepCheck(parameters=100, trainable=80, rows=16, length=30, micro_batch=16, loss=0.7, largest_s=0.5, step_s=0.25)
NAN = float("nan")
ERROR = ErrorParts(code="LOAD", doing="reading m", found="shard 2 is missing", hint="get it again")


def requests(**tables: dict[str, Any]) -> dict[str, BatchCheckRequest]:
    config = instant.config(**({"execution": {}} | tables))
    space = Space.from_config(config)
    ground = CheckScope(config, space, "print", DeviceKind.CPU, None, 4, 1, Path("/cache"), Path("/scratch"))
    return batch_checks(ground, space_findings(config, space)[1])


def test_one_request_a_model_with_the_largest_batch_and_the_longest_input() -> None:
    space = {
        "model.name": ["a", "b"],
        "train.max_length": [{"choices": [64, 32], "when": {"model.name": "a"}}],
        "train.batch_size": {"low": 8, "high": 256, "log": True},
        "loss.name": ["cross_entropy", "focal"],
    }
    asked = requests(space=space, execution={"micro_batch": 16})
    assert set(asked) == {"a", "b"}
    assert asked["a"].lengths == (32, 64)
    assert asked["b"].lengths == (160,)
    trial = asked["a"].trial
    assert trial.config.settings.train.max_length == 64
    assert (trial.plan.effective_batch, trial.plan.micro_batch, trial.plan.accumulation) == (256, 16, 16)
    for name, request in asked.items():
        assert {point.settings.model.name for point in request.points} == {name}
        assert {point.settings.loss.name for point in request.points} == {"cross_entropy", "focal"}
        assert {point.data_fingerprint for point in request.points} == {"print"}
    assert [*requests()] == ["minilm"]
    assert requests()["minilm"].points == ()


@given(st.lists(st.dictionaries(st.sampled_from(["head.pooling", "loss.name", "optim.lr"]), st.sampled_from("abc"))))
def test_few_points_cover_every_value(drawn: list[dict[str, Any]]) -> None:
    points = tuple((params, TrialSettings()) for params in drawn)
    chosen = covering(points)

    def values(some: Any) -> set[tuple[str, str]]:
        return {pair for params, _ in some for pair in params.items() if pair[0] != "optim.lr"}

    assert values(chosen) == values(points)
    assert len(chosen) <= min(len(drawn), 6)
    assert all(one in points for one in chosen)


def judged(found: BatchCheckResult | ChildError) -> list[Finding]:
    (asked,) = requests().values()
    return list(model_findings("m", asked, found, 160))


def walked(*faults: str) -> tuple[BatchWalk, ...]:
    return (BatchWalk(max_length=64, split="train", rows=160, batches=10, longest=30, faults=faults),)


def told(findings: Iterable[Finding]) -> list[tuple[str, ...]]:
    return [(one.status, one.about, one.check, one.found, one.fix) for one in findings]


def test_a_good_model_passes_with_its_times(golden: Golden) -> None:
    found = judged(BatchCheckResult(walks=walked(), step=STEP))
    assert {one.status for one in found} == {Status.PASS}
    golden("doctor", told(found))  # 0.25 s for 16 rows, 160 rows, 2 epochs: 5 s


def step(**changes: Any) -> StepCheck:
    return STEP.model_copy(update=changes)


WRONG: dict[str, BatchCheckResult | ChildError] = {
    "batches": BatchCheckResult(walks=walked("ids of 30")),
    "step": BatchCheckResult(step=step(loss=NAN)),
    "step, a parameter": BatchCheckResult(step=step(not_finite=("w",))),
    "step, the head": BatchCheckResult(step=step(untouched=("head.0.w",))),
    "step, elsewhere": BatchCheckResult(step=step(untouched=("mask_emb",))),
    "memory": BatchCheckResult(step=step(micro_batch=4)),
    "weights": BatchCheckResult(failures=(ProbeFailure(stage="weights", error=ERROR),)),
    "point head.pooling=max": BatchCheckResult(points=(PointCheck(params={"head.pooling": "max"}, error=ERROR),)),
    "point loss.name=focal": BatchCheckResult(points=(PointCheck(params={"loss.name": "focal"}, step=step(loss=NAN)),)),
    "rehearsal": ChildError("rehearsing", "killed by SIGSEGV", hint="see /log.txt"),
}


def test_what_is_wrong_with_a_model(golden: Golden) -> None:
    found = [one for check, result in WRONG.items() for one in judged(result) if one.check == check.partition(",")[0]]
    assert len(found) == len(WRONG)
    golden("doctor", told(found))


def read(labels: tuple[str, ...], **splits: SplitFacts) -> ResolveResult:
    return ResolveResult(
        data_fingerprint="",
        splits=splits,
        revisions={},
        device=DeviceKind.CPU,
        device_count=0,
        versions={},
        labels=labels,
    )


def test_labels_are_counted_and_an_absent_one_is_said(golden: Golden) -> None:
    full, part = SplitFacts(rows=5, label_counts={0: 2, 1: 3}), SplitFacts(rows=2, label_counts={1: 2})
    some, none = (SplitFacts(rows=rows, label_counts={}, with_evidence=count) for rows, count in ((5, 3), (2, 0)))
    every = [data_findings(read(labels, train=full, validation=part), 2) for labels in ((), ("no", "yes"))]
    golden("doctor", *map(told, every), told(data_findings(read((), train=some, validation=none), 2)))


def test_what_is_remarked_of_the_rows_is_said() -> None:
    found = judged(BatchCheckResult(remarks=("train: 1 row fits nowhere",)))
    assert [(one.status, one.check, one.found) for one in found] == [(Status.WARN, "rows", "train: 1 row fits nowhere")]


DEVICES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("auto", "fp32", {}),
    ("auto", "fp16", {"devices": (CARD,)}),
    ("cuda", "fp32", {}),
    ("auto", "fp16", {}),
    *((device, "bf16", {"devices": (CARD,), "bf16": False}) for device in ("cpu", "auto")),
)


def test_devices_and_number_formats_and_a_device_for_each_process(golden: Golden) -> None:
    def found(execution: dict[str, Any], precision: str, probe: dict[str, Any]) -> list[tuple[str, ...]]:
        answer = ProbeResult(torch="2.13", cuda_build=None, **probe)
        return told(device_findings(instant.config(execution=execution), (precision,), answer))

    for_one = [one for device, *rest in DEVICES for one in found({"device": device}, *rest)]
    counts = [("auto", 4), ("auto", 3), ("auto", 1), ("auto", 0), ("cpu", 1)]
    for_two = [found({"device": device, "tp": 2}, "fp32", {"devices": (CARD,) * count}) for device, count in counts]
    golden("doctor", for_one, *for_two)


EPOCHS: tuple[dict[str, dict[str, Any]], ...] = (
    {"train": {"evals_per_epoch": 11, "batch_size": 16}},
    {"space": {"train.batch_size": [8, 64], "train.evals_per_epoch": [2, 20]}},
)


def test_an_epoch_has_a_step_for_each_validation(golden: Golden) -> None:
    asked = [request for tables in EPOCHS for request in requests(**tables).values()]
    every = [model_findings("m", one, BatchCheckResult(walks=walked(), step=STEP), 160) for one in asked]
    golden("doctor", told(one for findings in every for one in findings if one.check == "validations"))


def test_as_many_validations_as_steps_pass() -> None:
    (asked,) = requests(train={"evals_per_epoch": 10}).values()
    findings = model_findings("m", asked, BatchCheckResult(walks=walked(), step=STEP), 160)
    assert {one.status for one in findings} == {Status.PASS}


def test_folds_are_counted() -> None:
    (found,) = fold_findings((11, 9, 10))
    assert (found.status, found.check, found.found) == (Status.PASS, "folds", "3, of 9 to 11 of 30 rows")
    assert list(fold_findings(())) == []


def test_the_time_of_a_trial_is_that_of_all_its_folds() -> None:
    (asked,) = requests(data={"folds": 5}).values()
    held = BatchWalk(max_length=64, split="validation", rows=40, batches=10, longest=30, faults=())
    answer = BatchCheckResult(walks=(*walked(), held), step=STEP)
    (time,) = [one for one in model_findings("m", asked, answer, 160) if one.check == "time"]
    # 0.25 s for 16 rows, four of five parts of 200 rows five times, 2 epochs
    assert "about 25 s a trial (1600 rows)" in time.found
