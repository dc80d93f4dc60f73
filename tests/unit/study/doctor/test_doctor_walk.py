"""What a study's children are asked, and what their answers mean."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instant
from dryfit.core.errors import ChildError
from dryfit.core.jobs.diagnostics import (
    BatchCheckRequest,
    BatchCheckResult,
    BatchWalk,
    PointCheck,
    ProbeFailure,
    ProbeResult,
    StepCheck,
)
from dryfit.core.jobs.train import ResolveResult, SplitFacts
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.wire import ErrorParts
from dryfit.search.space.space import Space
from dryfit.study.doctor.finding import Finding, Status
from dryfit.study.doctor.study_checks import space_findings
from dryfit.study.doctor.study_walk import (
    CheckScope,
    batch_checks,
    covering,
    data_findings,
    device_findings,
    fold_findings,
    model_findings,
)

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


def test_a_good_model_passes_with_its_times() -> None:
    found = {one.check: one for one in judged(BatchCheckResult(walks=walked(), step=STEP))}
    assert {one.status for one in found.values()} == {Status.PASS}
    assert "80 of 100 parameters have finite gradients" in found["step"].found
    # 0.25 s for 16 rows, 160 rows, 2 epochs
    assert "about 5.0 s a trial (320 rows)" in found["time"].found


@pytest.mark.parametrize(
    ("result", "check", "status", "said"),
    [
        (BatchCheckResult(walks=walked("ids of 30")), "batches", Status.FAIL, "train at 64: ids of 30"),
        (BatchCheckResult(step=STEP.model_copy(update={"loss": NAN})), "step", Status.FAIL, "loss nan"),
        (BatchCheckResult(step=STEP.model_copy(update={"not_finite": ("w",)})), "step", Status.FAIL, "NaN: w"),
        (BatchCheckResult(step=STEP.model_copy(update={"untouched": ("head.0.w",)})), "step", Status.FAIL, "head.0.w"),
        (BatchCheckResult(step=STEP.model_copy(update={"untouched": ("mask_emb",)})), "step", Status.WARN, "mask_emb"),
        (BatchCheckResult(step=STEP.model_copy(update={"micro_batch": 4})), "memory", Status.WARN, "4 do"),
        (BatchCheckResult(failures=(ProbeFailure(stage="weights", error=ERROR),)), "weights", Status.FAIL, "shard 2"),
        (
            BatchCheckResult(points=(PointCheck(params={"head.pooling": "max"}, error=ERROR),)),
            "point head.pooling=max",
            Status.FAIL,
            "shard 2",
        ),
        (
            BatchCheckResult(
                points=(PointCheck(params={"loss.name": "focal"}, step=STEP.model_copy(update={"loss": NAN})),)
            ),
            "point loss.name=focal",
            Status.FAIL,
            "loss nan",
        ),
        (ChildError("rehearsing", "killed by SIGSEGV", hint="see /log.txt"), "rehearsal", Status.FAIL, "SIGSEGV"),
    ],
)
def test_what_is_wrong_with_a_model(
    result: BatchCheckResult | ChildError, check: str, status: Status, said: str
) -> None:
    found = next(one for one in judged(result) if one.check == check)
    assert (found.status, said in found.found) == (status, True), found
    assert found.about == "model m"


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


@pytest.mark.parametrize(("labels", "no", "yes"), [((), "0", "1"), (("no", "yes"), "no", "yes")])
def test_labels_are_counted_and_an_absent_one_is_said(labels: tuple[str, ...], no: str, yes: str) -> None:
    full, part = SplitFacts(rows=5, label_counts={0: 2, 1: 3}), SplitFacts(rows=2, label_counts={1: 2})
    found = list(data_findings(read(labels, train=full, validation=part), 2))
    assert [one.status for one in found] == [Status.PASS, Status.WARN]
    assert found[0].found == f"5 rows; by label {no}: 2, {yes}: 3"
    assert f"label {no}" in found[1].fix


def test_evidence_is_counted() -> None:
    some = SplitFacts(rows=5, label_counts={}, with_evidence=3)
    none = SplitFacts(rows=2, label_counts={}, with_evidence=0)
    found = list(data_findings(read((), train=some, validation=none), 2))
    assert [one.status for one in found] == [Status.PASS, Status.WARN]
    assert [one.found for one in found] == ["5 rows; 3 with evidence", "2 rows; 0 with evidence"]
    assert "add rows with evidence" in found[1].fix


def test_what_is_remarked_of_the_rows_is_said() -> None:
    found = judged(BatchCheckResult(remarks=("train: 1 row fits nowhere",)))
    assert [(one.status, one.check, one.found) for one in found] == [(Status.WARN, "rows", "train: 1 row fits nowhere")]


@pytest.mark.parametrize(
    ("device", "precision", "probe", "status", "said"),
    [
        ("auto", "fp32", {}, Status.PASS, "cpu, fp32"),
        ("auto", "fp16", {"devices": (CARD,)}, Status.PASS, "cuda, fp16"),
        ("cuda", "fp32", {}, Status.FAIL, "can use no CUDA device"),
        ("auto", "fp16", {}, Status.FAIL, "fp16 needs a CUDA device"),
        ("cpu", "bf16", {"devices": (CARD,), "bf16": False}, Status.PASS, "cpu, bf16"),
        ("auto", "bf16", {"devices": (CARD,), "bf16": False}, Status.FAIL, "A card has no bf16"),
    ],
)
def test_devices_and_number_formats(
    device: str, precision: str, probe: dict[str, Any], status: Status, said: str
) -> None:
    config = instant.config(execution={"device": device})
    answer = ProbeResult(torch="2.13", cuda_build=None, **probe)
    (found,) = device_findings(config, (precision,), answer)
    assert (found.status, said in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("device", "count", "status", "said"),
    [
        ("auto", 4, Status.PASS, "2 such trial(s) on 4 device(s)"),
        ("auto", 3, Status.WARN, "1 such trial(s) on 3 device(s) without sharing any; 1 device(s) stay idle"),
        ("auto", 1, Status.FAIL, "each of a trial's 2 processes a device of its own: there is 1 CUDA device(s)"),
        ("auto", 0, Status.PASS, "share the cores"),
        ("cpu", 1, Status.PASS, "share the cores"),
    ],
)
def test_processes_of_a_trial_need_a_device_each(device: str, count: int, status: Status, said: str) -> None:
    config = instant.config(execution={"device": device, "tp": 2})
    answer = ProbeResult(torch="2.13", cuda_build=None, devices=(CARD,) * count)
    first, found = device_findings(config, ("fp32",), answer)
    assert (first.check, first.status) == ("device", Status.PASS)
    assert (found.check, found.status, said in found.found) == ("processes", status, True), found


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        ({"train": {"evals_per_epoch": 11, "batch_size": 16}}, "evals_per_epoch = 11, and with train.batch_size = 16 "),
        (
            {"space": {"train.batch_size": [8, 64], "train.evals_per_epoch": [2, 20]}},
            "evals_per_epoch = 20, and with train.batch_size = 64 ",
        ),
    ],
)
def test_an_epoch_has_a_step_for_each_validation(tables: dict[str, dict[str, Any]], found: str) -> None:
    (asked,) = requests(**tables).values()
    findings = model_findings("m", asked, BatchCheckResult(walks=walked(), step=STEP), 160)
    (one,) = [one for one in findings if one.check == "validations"]
    assert one.status is Status.FAIL and found in one.found and "an epoch has 10 step(s)" in one.found
    assert one.fix.startswith("train.evals_per_epoch = 10")


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
